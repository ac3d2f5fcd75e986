"""The filesystem without FUSE: names, inodes, attributes, listings, handles. Everything here is tested without a mount.

Idea: the origin's listings are mirrored in LMDB (`tree`, written by `pages`), row by row in the origin's own order; what is
known is used for a time (`freshness`); what is not known is found out with as few requests as possible: a page of a
listing primes a thousand names (`listing`), a single name is asked for directly where a listing would be long (`lookup`).

Invariants: a listing that did not reach its end never looks complete; a failure is never taken for an absence; two
versions of an object are never read through one handle, nor through two that are both alive. All of it runs in one trio
thread; only transactions run in workers.
"""

from cachefs.fs.attributes import Attributes, Entry, Options, Space, Ttls
from cachefs.fs.files import EVERY_FILE, LARGE, Former, OpenHook
from cachefs.fs.filesystem import FileSystem
from cachefs.fs.reader import Backing, Reader
from cachefs.fs.tree import FORMAT, TABLES, Volume
from cachefs.fs.tree_queries import Sibling
from cachefs.fs.xattrs import NoAttribute

__all__ = [
    "EVERY_FILE",
    "FORMAT",
    "LARGE",
    "TABLES",
    "Attributes",
    "Backing",
    "Entry",
    "FileSystem",
    "Former",
    "NoAttribute",
    "OpenHook",
    "Options",
    "Reader",
    "Sibling",
    "Space",
    "Ttls",
    "Volume",
]
