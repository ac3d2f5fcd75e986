"""The origin: an object store seen from trio.

Idea: a *client* (obstore, fsspec) is a blocking, thread-safe object that makes one attempt per call and knows
one vendor; `Origin` wraps it with everything that is the same for all of them: worker threads, the
concurrency limiter, retries with jitter, resuming a broken body where it stopped, deadlines, the download
limit, and counting. The rooms above only ever see `Origin`.

Writing (`Origin.put`, `begin_upload`, `copy`, `delete`) is whole or not at all: a key shows the old version until the new
one is complete.

Invariants: a read is conditional on the etag, so bytes of two versions never mix; every call ends within its
deadline; foreign exceptions do not leave this room.
"""

from cachefs.origin.gate import Turn
from cachefs.origin.origin import Origin
from cachefs.origin.protocol import Client, ListPage, ObjectInfo, Sink
from cachefs.origin.registry import open_origin
from cachefs.origin.uploads import Upload
from cachefs.origin.writing import FileRange, InMemory, Limits, Part, Pending, Source

__all__ = [
    "Client",
    "FileRange",
    "InMemory",
    "Limits",
    "ListPage",
    "ObjectInfo",
    "Origin",
    "Part",
    "Pending",
    "Sink",
    "Source",
    "Turn",
    "Upload",
    "open_origin",
]
