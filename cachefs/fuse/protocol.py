"""The FUSE wire protocol as tables, and the packing of the filesystem's answers.

Source: include/uapi/linux/fuse.h, protocol 7.31 to 7.45. Integers are in the machine's byte order. A request is an
`IN_HEADER` and its arguments, a reply an `OUT_HEADER` and its body; a reply of fixed length has one structure for both.
"""

from __future__ import annotations

import stat
from enum import IntEnum, IntFlag
from struct import Struct

from cachefs.fs import Attributes, Entry

MAJOR, MINOR = 7, 45
"""The protocol version of this module. A kernel with an older one is answered in that version, down to `OLDEST`."""

OLDEST = 31
"""Oldest supported minor version: Linux 5.4, since when all structures below have had their present length."""

IN_HEADER = Struct("=IIQQIIIHH")  # len, opcode, unique, nodeid, uid, gid, pid, extensions, padding
IN_HEADER_USED = Struct("=IIQQIII4x")  # without extensions and padding
OUT_HEADER = Struct("=IiQ")  # len, -errno, unique


class Op(IntEnum):
    LOOKUP = 1
    FORGET = 2  # no reply
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36  # no reply
    DESTROY = 38
    IOCTL = 39
    BATCH_FORGET = 42  # no reply
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    COPY_FILE_RANGE = 47
    TMPFILE = 51


class Init(IntFlag):
    """Capabilities. The upper half is sent in a separate word (`flags2`), announced by INIT_EXT."""

    ASYNC_READ = 1 << 0
    ATOMIC_O_TRUNC = 1 << 3
    BIG_WRITES = 1 << 5
    DO_READDIRPLUS = 1 << 13
    READDIRPLUS_AUTO = 1 << 14
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    MAX_PAGES = 1 << 22
    HANDLE_KILLPRIV_V2 = 1 << 28
    INIT_EXT = 1 << 30
    PASSTHROUGH = 1 << 37
    HAS_RESEND = 1 << 39


class Setattr(IntFlag):
    """The fields of a SETATTR that are to be set."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    KILL_SUIDGID = 1 << 11


OPEN_KILL_SUIDGID = 1 << 0
"""A bit of `open_flags` of an open or a create: clear set-uid and set-gid bits."""

WRITE_KILL_SUIDGID = 1 << 2
"""A bit of `write_flags`: clear set-uid and set-gid bits."""


class OpenFlags(IntEnum):
    """How the kernel is to treat a handle."""

    DIRECT_IO = 1 << 0
    KEEP_CACHE = 1 << 1
    CACHE_DIR = 1 << 3
    NOFLUSH = 1 << 5
    PASSTHROUGH = 1 << 7


# -- arguments of requests -------------------------------------------------------------------------

INIT_IN = Struct("=IIII")  # major, minor, max_readahead, flags
INIT_IN_FLAGS2 = Struct("=I")  # behind INIT_IN, with INIT_EXT
OPEN_IN = Struct("=II")  # flags, open_flags
READ_IN = Struct("=QQIIQII")  # fh, offset, size, read_flags, lock_owner, flags, padding
RELEASE_IN = Struct("=QIIQ")  # fh, flags, release_flags, lock_owner
RELEASE_IN_USED = Struct("=Q16x")  # fh alone
GETXATTR_IN = Struct("=II")  # size, padding; then the name
SETXATTR_IN = Struct("=II")  # size, flags; then the name and the value
INTERRUPT_IN = Struct("=Q")  # unique of the request whose calling process has a signal
CREATE_IN = Struct("=IIII")  # flags, mode (the umask is taken off), umask, open_flags; then the name
MKNOD_IN = Struct("=IIII")  # mode, rdev, umask, padding; then the name
MKDIR_IN = Struct("=II")  # mode, umask; then the name
RENAME_IN = Struct("=Q")  # the new directory; then the old and the new name
RENAME2_IN = Struct("=QII")  # the new directory, flags, padding; then the old and the new name
WRITE_IN = Struct("=QQIIQII")  # fh, offset, size, write_flags, lock_owner, flags, padding; then the bytes
FLUSH_IN = Struct("=QIIQ")  # fh, unused, padding, lock_owner
FSYNC_IN = Struct("=QII")  # fh, fsync_flags, padding
FALLOCATE_IN = Struct("=QQQII")  # fh, offset, length, mode, padding
SETATTR_IN = Struct("=IIQQQQQQIIIIIIII")
"""valid, padding, fh, size, lock_owner, atime, mtime, ctime, their nanoseconds, mode, unused, uid, gid, unused"""

# -- bodies of replies -----------------------------------------------------------------------------

INIT_OUT = Struct("=IIIIHHIIHHIIH22x")
"""major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
map_alignment, flags2, max_stack_depth, request_timeout"""

ATTR = "QQQQQQIIIIIIIIII"
"""ino, size, blocks, atime, mtime, ctime, their nanoseconds, mode, nlink, uid, gid, rdev, blksize, flags"""

ENTRY = "QQQQII" + ATTR
"""nodeid, generation, entry_valid, attr_valid, their nanoseconds, attributes"""

ENTRY_REPLY = Struct("=IiQ" + ENTRY)
ATTR_REPLY = Struct("=IiQ" + "QII" + ATTR)  # attr_valid, its nanoseconds, padding
OPEN_REPLY = Struct("=IiQ" + "QIi")  # fh, open_flags, backing_id
CREATE_REPLY = Struct("=IiQ" + ENTRY + "QIi")  # the entry, and how it is opened
WRITE_REPLY = Struct("=IiQ" + "II")  # size, padding
XATTR_SIZE_REPLY = Struct("=IiQ" + "II")  # size, padding
STATFS_REPLY = Struct("=IiQ" + "QQQQQIIII24x")
"""blocks, bfree, bavail, files, ffree, bsize, namelen, frsize, padding"""

DIRENT = Struct("=QQII")  # ino, offset, length of the name, type; then the name, padded to 8 bytes
DIRENTPLUS = Struct("=" + ENTRY + "QQII")

# -- notifications, sent without a request (OUT_HEADER with unique 0 and the code as its error) -----

NOTIFY_INVAL_INODE, NOTIFY_INVAL_ENTRY = 2, 3

NOTIFY_RESEND, NOTIFY_INC_EPOCH = 7, 8
"""RESEND: send all unanswered requests again (Linux 6.9), with `RESENT` set in `unique`. INC_EPOCH: look up each name again
(6.16)."""

RESENT = 1 << 63

INVAL_INODE = Struct("=qqq")  # ino, offset, length (0: all)
INVAL_ENTRY = Struct("=QII")  # parent, length of the name, flags; then the name with its NUL

# -- ioctls on /dev/fuse ---------------------------------------------------------------------------

BACKING_OPEN = 0x4010E501  # _IOW(229, 1, struct fuse_backing_map)
BACKING_CLOSE = 0x4004E502  # _IOW(229, 2, uint32)
BACKING_MAP = Struct("=iIQ")  # fd, flags, padding

# -- packing and unpacking -------------------------------------------------------------------------

NO_ATTRIBUTES = (0,) * 16
_U64 = (1 << 64) - 1  # times before 1970 are negative


class Malformed(ValueError):
    """A request that no kernel sends."""


def attr(attributes: Attributes) -> tuple[int, ...]:
    """The fields of `ATTR`."""
    mtime_ns, size, mode = attributes.mtime_ns, attributes.size, attributes.mode
    seconds, nanoseconds = divmod(mtime_ns, 1_000_000_000)
    seconds &= _U64
    atime, atime_ns, ctime, ctime_ns = seconds, nanoseconds, seconds, nanoseconds
    if attributes.atime_ns != mtime_ns or attributes.ctime_ns != mtime_ns:  # most files have one time
        atime, atime_ns = divmod(attributes.atime_ns, 1_000_000_000)
        ctime, ctime_ns = divmod(attributes.ctime_ns, 1_000_000_000)
    block_size = 1 << 20 if stat.S_ISREG(mode) else 4096
    return (
        attributes.ino,
        size,
        -(-size // 512),
        atime & _U64,
        seconds,
        ctime & _U64,
        atime_ns,
        nanoseconds,
        ctime_ns,
        mode,
        attributes.nlink,
        attributes.uid,
        attributes.gid,
        0,
        block_size,
        0,
    )


def duration(seconds: float) -> tuple[int, int]:
    """Whole seconds, and the nanoseconds beyond them."""
    return divmod(int(seconds * 1e9), 10**9)


def entry(attributes: Attributes, ttl: float, least: float = 0.0) -> tuple[int, ...]:
    """The fields of `ENTRY`. The kernel may keep the name for `ttl` seconds, and the attributes for `ttl` or `least`
    seconds, whichever is longer."""
    seconds, nanoseconds = name_seconds, name_nanoseconds = divmod(int(ttl * 1e9), 10**9)
    if ttl < least:
        seconds, nanoseconds = duration(least)
    return (attributes.ino, 0, name_seconds, seconds, name_nanoseconds, nanoseconds, *attr(attributes))


def dirent(shown: Entry) -> bytes:
    attributes, name = shown.attributes, shown.name
    head = DIRENT.pack(attributes.ino, shown.next_offset, len(name), attributes.mode >> 12)
    return head + name.ljust(-(-len(name) // 8) * 8, b"\0")


def direntplus(shown: Entry) -> bytes:
    # The fields of `entry` and `attr` in one step, because a listing packs millions of entries.
    attributes, name = shown.attributes, shown.name
    ino, size, mode = attributes.ino, attributes.size, attributes.mode
    ttl, ttl_ns = divmod(int(shown.ttl * 1e9), 1_000_000_000)
    mtime, mtime_ns = divmod(attributes.mtime_ns, 1_000_000_000)
    mtime &= _U64
    atime, atime_ns, ctime, ctime_ns = mtime, mtime_ns, mtime, mtime_ns
    if attributes.atime_ns != attributes.mtime_ns or attributes.ctime_ns != attributes.mtime_ns:
        atime, atime_ns = divmod(attributes.atime_ns, 1_000_000_000)
        ctime, ctime_ns = divmod(attributes.ctime_ns, 1_000_000_000)
    length = len(name)
    head = DIRENTPLUS.pack(
        ino,
        0,
        ttl,
        ttl,
        ttl_ns,
        ttl_ns,
        ino,
        size,
        -(-size // 512),
        atime & _U64,
        mtime,
        ctime & _U64,
        atime_ns,
        mtime_ns,
        ctime_ns,
        mode,
        attributes.nlink,
        attributes.uid,
        attributes.gid,
        0,
        1 << 20 if stat.S_ISREG(mode) else 4096,
        0,
        ino,
        shown.next_offset,
        length,
        mode >> 12,
    )
    return head + name + bytes(-length & 7)


def signed(number: int) -> int:
    """The signed value of an unsigned 64-bit number."""
    return number - (1 << 64) if number >> 63 else number


def name_of(body: memoryview) -> bytes:
    """The name at the end of a request's arguments. Raises `Malformed`."""
    name, nul, _ = bytes(body).partition(b"\0")
    if not nul or not name:
        raise Malformed("a name without an end")
    return name


def names_of(body: memoryview) -> tuple[bytes, bytes]:
    """(old name, new name) of a rename. Raises `Malformed`."""
    old, _, rest = bytes(body).partition(b"\0")
    new, nul, _ = rest.partition(b"\0")
    if not old or not new or not nul:
        raise Malformed("a rename without two names")
    return old, new
