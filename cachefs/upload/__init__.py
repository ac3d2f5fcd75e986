"""Uploads: what is written here, on its way to the origin.

Idea: the new content of a file is a *dirty file*, one staging file beside the cache. It becomes an object whole or not at
all: in one request when it is small, in parts that are sent while it is written when it is large. What was acknowledged has
a row in the journal, and comes back after a crash.

Invariants: a staging file is removed only when the origin has its content (or it was removed); what is being made an object
does not change meanwhile; a failed upload is told to every caller that commits, and tried again.
"""

from cachefs.upload.dirty_file import DirtyFile
from cachefs.upload.journal import StoredFile, refuse_foreign
from cachefs.upload.uploads import Uploads

__all__ = ["DirtyFile", "StoredFile", "Uploads", "refuse_foreign"]
