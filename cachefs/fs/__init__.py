"""The filesystem without FUSE: names, inodes, attributes, listings, handles. Everything here is tested without a mount.

The origin's listings are mirrored in LMDB, one row a name, in the origin's order (`tree`, written by `pages`). Known names
are used for a TTL (`freshness`). Unknown names are looked up with as few requests as possible: a page of a listing has a
thousand names (`listing`), and a single name is asked for directly where a listing would be long (`lookup`).

Invariants: a listing that did not reach its end never looks complete. A failure is never taken for an absence. Two versions
of an object are never read through one handle, nor through two handles of one inode. Everything runs in one trio thread,
except transactions, which run in worker threads.
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
