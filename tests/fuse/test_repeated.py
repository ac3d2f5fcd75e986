"""An unanswered request of every opcode at the moment of a daemon's death, by a scripted kernel.

Each request is made twice: a daemon dies when it has read it, and another one when it has carried it out and not answered.
The next daemon gets it again with bit 63 of `unique` set. Its reply has to be the one that the program should have had the
first time, and afterwards names, bytes and handles are as after one request. `tests/mount/test_repeated.py` has those of
these deaths that can be had with the real kernel."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from cachefs.fs.xattrs import KEY
from cachefs.fuse import protocol
from cachefs.fuse.protocol import Op, Setattr
from cachefs.origin.local import HIDDEN as TEMPORARY
from tests.fuse.deaths import DEATHS, Deaths, handlers
from tests.fuse.kernel import ROOT, Reply, opened, read_in, release_in
from tests.fuse.test_writing import create_in, flush_in, open_in, setattr_in, write_in
from tests.mount.mounts import eventually

pytestmark = pytest.mark.threads

LARGE = os.urandom(3 * 64 << 10)
"""More than lies in the request's buffer (`COPIED`) and less than a file in memory may have."""

EXCHANGE, NOREPLACE = 2, 1
COPY_FILE_RANGE, LSEEK, POLL, GETLK, SETLK = 47, 46, 40, 31, 32
"""Opcodes without a handler: the kernel does these by itself once it was told so."""

_ENTRY = struct.Struct("=" + protocol.ENTRY)
_ATTR = struct.Struct("=" + protocol.ATTR)


class Shown(NamedTuple):
    """Attributes in a reply."""

    ino: int
    size: int
    mtime: tuple[int, int]
    mode: int
    nlink: int
    owner: tuple[int, int]


def untimed(shown: Shown) -> Shown:
    """With --writeback an upload may end between two replies, and then the file has the origin's time."""
    return shown._replace(mtime=(0, 0))


def attributes(body: bytes) -> Shown:
    ino, size, _, _, mtime, _, _, mtime_ns, _, mode, nlink, uid, gid, *_ = _ATTR.unpack(body)
    return Shown(ino, size, (mtime, mtime_ns), mode, nlink, (uid, gid))


def entry_of(reply: Reply) -> Shown:
    assert not reply.error, reply
    return attributes(reply.body[40 : _ENTRY.size])


def attr_of(reply: Reply) -> Shown:
    assert not reply.error, reply
    return attributes(reply.body[16:])


class World:
    """What the cases use. Each has a directory of its own."""

    def __init__(self, deaths: Deaths) -> None:
        self.deaths = deaths
        self.ask = deaths.ask

    def begin(self, name: str) -> None:
        self.name = name
        self.dir = self.mkdir(ROOT, name)
        self.open: dict[int, int] = {}  # handle → inode

    # -- what programs do --------------------------------------------------------------------------

    def done(self, op: int, ino: int, body: bytes = b"") -> Reply:
        reply = self.ask(op, ino, body)
        assert not reply.error, (Op(op), os.strerror(reply.error))
        return reply

    def mkdir(self, parent: int, name: str) -> int:
        return entry_of(self.done(Op.MKDIR, parent, mkdir_in(name))).ino

    def lookup(self, name: str) -> Shown | None:
        reply = self.ask(Op.LOOKUP, self.dir, name.encode() + b"\0")
        if reply.error == errno.ENOENT or not (reply.error or int.from_bytes(reply.body[:8], "little")):
            return None
        return entry_of(reply)

    def create(self, name: str, data: bytes = b"") -> tuple[int, int]:
        """(inode, handle) of a file that is being written."""
        return self.created(self.done(Op.CREATE, self.dir, create_in(name.encode(), os.O_RDWR)), data)

    def created(self, reply: Reply, data: bytes = b"") -> tuple[int, int]:
        ino, fh = entry_of(reply).ino, handle_of(reply)
        self.open[fh] = ino
        if data:
            self.done(Op.WRITE, ino, write_in(fh, 0, data))
        return ino, fh

    def close(self, fh: int) -> None:
        ino = self.open.pop(fh)
        self.done(Op.FLUSH, ino, flush_in(fh))
        self.done(Op.RELEASE, ino, release_in(fh))

    def save(self, name: str, data: bytes = b"content") -> int:
        ino, fh = self.create(name, data)
        self.close(fh)
        return ino

    def open_file(self, ino: int, flags: int = os.O_RDONLY) -> int:
        fh = opened(self.done(Op.OPEN, ino, open_in(flags)))[0]
        self.open[fh] = ino
        return fh

    def read(self, fh: int, size: int = 1 << 20) -> bytes:
        return self.done(Op.READ, self.open[fh], read_in(fh, 0, size)).body

    def content(self, name: str) -> bytes | None:
        found = self.lookup(name)
        if found is None:
            return None
        fh = self.open_file(found.ino)
        data = self.read(fh)
        self.open.pop(fh)
        self.done(Op.RELEASE, found.ino, release_in(fh))
        assert found.size == len(data)
        return data

    def listed(self, ino: int = 0) -> set[str]:
        ino = ino or self.dir
        dh = opened(self.done(Op.OPENDIR, ino, open_in(0)))[0]
        names = names_in(self.done(Op.READDIR, ino, read_in(dh, 0, 1 << 16)).body)
        self.done(Op.RELEASEDIR, ino, release_in(dh))
        return names

    # -- what there is afterwards --------------------------------------------------------------------

    def tree(self) -> dict[str, bytes | None]:
        """Names and their bytes (None: a directory), as the mount shows them."""
        return {
            name: None if is_dir(self.lookup(name)) else self.content(name) for name in sorted(self.listed())
        }

    def stored(self) -> dict[str, bytes | None]:
        """The same at the origin. A kill may leave a file that was about to get its name."""
        place = self.deaths.origin / self.name
        paths = [path for path in sorted(place.iterdir()) if not path.name.startswith(TEMPORARY)]
        return {path.name: None if path.is_dir() else path.read_bytes() for path in paths}

    def end(self) -> None:
        """What is open is closed; no record of a handle is left, and the origin has what the mount shows."""
        assert self.deaths.handles() == self.open.keys(), "handles of the kernel, and those with a record"
        for fh in list(self.open):
            self.close(fh)
        eventually(lambda: self.stored() == self.tree(), f"the origin has what is shown: {self.name}")
        assert not self.deaths.handles()


def is_dir(shown: Shown | None) -> bool:
    assert shown is not None
    return stat.S_ISDIR(shown.mode)


def mkdir_in(name: str, mode: int = 0o755) -> bytes:
    return protocol.MKDIR_IN.pack(mode, 0o22) + name.encode() + b"\0"


def mknod_in(name: str) -> bytes:
    return protocol.MKNOD_IN.pack(stat.S_IFREG | 0o640, 0, 0o22, 0) + name.encode() + b"\0"


def rename_in(to: int, old: str, new: str, flags: int | None = None) -> bytes:
    head = protocol.RENAME_IN.pack(to) if flags is None else protocol.RENAME2_IN.pack(to, flags, 0)
    return head + old.encode() + b"\0" + new.encode() + b"\0"


def handle_of(reply: Reply) -> int:
    return int(protocol.CREATE_REPLY.unpack(bytes(16) + reply.body)[-3])


def names_in(body: bytes, head: struct.Struct = protocol.DIRENT) -> set[str]:
    names, at = set(), 0
    while at < len(body):
        *_, length, _ = head.unpack_from(body, at)
        at += head.size
        names.add(body[at : at + length].decode())
        at += -(-length // 8) * 8
    return names - {".", ".."}


def told(op: int, reply: Reply) -> object:
    """What a reply tells the program: an errno, attributes, or bytes. Handles, counts of names, and how long an answer holds
    may differ."""
    if reply.error or op in (Op.OPEN, Op.OPENDIR, Op.STATFS, Op.READDIRPLUS):
        return reply.error
    if op in (Op.LOOKUP, Op.MKNOD, Op.MKDIR, Op.CREATE):
        return reply.body[:8] and attributes(reply.body[40 : _ENTRY.size])
    if op in (Op.GETATTR, Op.SETATTR):
        return attr_of(reply)
    return reply.body


# -- cases -------------------------------------------------------------------------------------------

Asked = tuple[int, bytes]
"""The inode and the arguments of the request that is not answered."""

Case = Generator[Asked, Reply, None]
"""Prepares, yields the request, is sent the reply that the program gets, and looks at what there is."""

CASES: dict[str, tuple[int, Callable[[World], Case]]] = {}


def case(op: int) -> Callable[[Callable[[World], Case]], Callable[[World], Case]]:
    def note(function: Callable[[World], Case]) -> Callable[[World], Case]:
        assert function.__name__ not in CASES
        CASES[function.__name__] = op, function
        return function

    return note


def refused(op: int, name: str, body: Callable[[World], bytes], number: int) -> None:
    """A request that is answered with an errno, whether it comes once or twice."""

    def ask(w: World) -> Case:
        ino = w.save("file")
        reply = yield (w.dir if op in (Op.SYMLINK, Op.LINK) else ino), body(w)
        assert reply.error == number
        assert w.tree() == {"file": b"content"}

    ask.__name__ = name
    case(op)(ask)


@case(Op.LOOKUP)
def lookup(w: World) -> Case:
    ino = w.save("file")
    shown = entry_of((yield w.dir, b"file\0"))
    assert (shown.ino, shown.size) == (ino, 7)


@case(Op.LOOKUP)
def lookup_of_no_name(w: World) -> Case:
    reply = yield w.dir, b"none\0"
    assert reply.error == errno.ENOENT or not int.from_bytes(reply.body[:8], "little")


@case(Op.GETATTR)
def getattr_of_what_is_written(w: World) -> Case:
    ino, _ = w.create("file", b"content")
    shown = attr_of((yield ino, bytes(16)))
    assert (shown.ino, shown.size, shown.nlink) == (ino, 7, 1)


@case(Op.STATFS)
def statfs(w: World) -> Case:
    assert not (yield ROOT, b"").error


@case(Op.ACCESS)
def access(w: World) -> Case:
    assert not (yield w.save("file"), bytes(8)).error


@case(Op.OPEN)
def open_to_read(w: World) -> Case:
    ino = w.save("file")
    fh, *_ = opened((yield ino, open_in(os.O_RDONLY)))
    w.open[fh] = ino
    assert w.read(fh) == b"content"


@case(Op.OPEN)
def open_to_write(w: World) -> Case:
    ino = w.save("file")
    fh, *_ = opened((yield ino, open_in(os.O_RDWR)))
    w.open[fh] = ino
    w.done(Op.WRITE, ino, write_in(fh, 7, b"more"))
    w.close(fh)
    assert w.content("file") == b"contentmore"


@case(Op.OPEN)
def open_to_empty(w: World) -> Case:
    ino = w.save("file")
    fh, *_ = opened((yield ino, open_in(os.O_WRONLY | os.O_TRUNC)))
    w.open[fh] = ino
    assert w.content("file") == b""
    w.done(Op.WRITE, ino, write_in(fh, 0, b"new"))
    w.close(fh)
    assert w.content("file") == b"new"


@case(Op.READ)
def read_what_is_stored(w: World) -> Case:
    fh = w.open_file(w.save("file", LARGE))
    reply = yield w.open[fh], read_in(fh, 1000, 100_000)
    assert not reply.error and reply.body == LARGE[1000:101_000]


@case(Op.READ)
def read_what_is_written(w: World) -> Case:
    ino, fh = w.create("file", LARGE)
    reply = yield ino, read_in(fh, 1000, 100_000)
    assert not reply.error and reply.body == LARGE[1000:101_000]


@case(Op.RELEASE)
def release_by_a_reader(w: World) -> Case:
    fh = w.open_file(w.save("file"))
    assert not (yield w.open.pop(fh), release_in(fh)).error


@case(Op.RELEASE)
def release_by_a_writer(w: World) -> Case:
    ino, fh = w.create("file", b"content")
    w.done(Op.FLUSH, ino, flush_in(fh))
    del w.open[fh]
    assert not (yield ino, release_in(fh)).error
    assert w.content("file") == b"content"


@case(Op.RELEASE)
def release_behind_a_change(w: World) -> Case:
    """As of a mapping that is written behind its close."""
    ino, fh = w.create("file", b"content")
    w.done(Op.FLUSH, ino, flush_in(fh))
    w.done(Op.WRITE, ino, write_in(fh, 7, b"more"))
    del w.open[fh]
    assert not (yield ino, release_in(fh)).error
    assert w.content("file") == b"contentmore"


@case(Op.RELEASE)
def release_of_what_was_removed(w: World) -> Case:
    ino, fh = w.create("file", LARGE)
    w.done(Op.UNLINK, w.dir, b"file\0")
    del w.open[fh]
    assert not (yield ino, release_in(fh)).error
    assert w.tree() == {}


@case(Op.FLUSH)
def flush(w: World) -> Case:
    ino, fh = w.create("file", b"content")
    assert not (yield ino, flush_in(fh)).error
    w.done(Op.RELEASE, w.open.pop(fh), release_in(fh))
    assert w.content("file") == b"content"


@case(Op.FSYNC)
def fsync(w: World) -> Case:
    ino, fh = w.create("file", b"content")
    assert not (yield ino, protocol.FSYNC_IN.pack(fh, 0, 0)).error
    assert w.content("file") == b"content"


@case(Op.FSYNCDIR)
def fsyncdir(w: World) -> Case:
    assert not (yield w.dir, protocol.FSYNC_IN.pack(1, 0, 0)).error


@case(Op.OPENDIR)
def opendir(w: World) -> Case:
    w.save("file")
    dh, *_ = opened((yield w.dir, open_in(0)))
    assert names_in(w.done(Op.READDIR, w.dir, read_in(dh, 0, 1 << 16)).body) == {"file"}
    w.done(Op.RELEASEDIR, w.dir, release_in(dh))


def _reads_a_directory(op: int, head: struct.Struct, name: str) -> None:
    def ask(w: World) -> Case:
        for number in range(5):
            w.done(Op.MKNOD, w.dir, mknod_in(f"file{number}"))
        dh = opened(w.done(Op.OPENDIR, w.dir, open_in(0)))[0]
        first = w.done(op, w.dir, read_in(dh, 0, 2 * (head.size + 8))).body
        *_, at, _, _ = head.unpack_from(first, head.size + 8)
        assert names_in(first, head) == {"file0", "file1"}
        reply = yield w.dir, read_in(dh, at, 1 << 16)
        assert not reply.error and names_in(reply.body, head) == {"file2", "file3", "file4"}
        assert not w.ask(Op.RELEASEDIR, w.dir, release_in(dh)).error

    ask.__name__ = name
    case(op)(ask)


_reads_a_directory(Op.READDIR, protocol.DIRENT, "readdir")
_reads_a_directory(Op.READDIRPLUS, protocol.DIRENTPLUS, "readdirplus")


@case(Op.RELEASEDIR)
def releasedir(w: World) -> Case:
    dh = opened(w.done(Op.OPENDIR, w.dir, open_in(0)))[0]
    assert not (yield w.dir, release_in(dh)).error


@case(Op.GETXATTR)
def getxattr(w: World) -> Case:
    reply = yield w.save("file"), protocol.GETXATTR_IN.pack(1000, 0) + KEY + b"\0"
    assert not reply.error and reply.body.endswith(f"{w.name}/file".encode())


@case(Op.LISTXATTR)
def listxattr(w: World) -> Case:
    reply = yield w.save("file"), protocol.GETXATTR_IN.pack(1000, 0)
    assert not reply.error and reply.body == b""


@case(Op.SETXATTR)
def setxattr(w: World) -> Case:
    reply = yield w.save("file"), protocol.SETXATTR_IN.pack(1, 0) + KEY + b"\0x"
    assert not reply.error


@case(Op.REMOVEXATTR)
def removexattr(w: World) -> Case:
    assert not (yield w.save("file"), KEY + b"\0").error


@case(Op.DESTROY)
def destroy(w: World) -> Case:
    assert not (yield ROOT, b"").error


@case(Op.CREATE)
def create(w: World) -> Case:
    reply = yield w.dir, create_in(b"file", os.O_WRONLY | os.O_CREAT, 0o100640)
    shown = entry_of(reply)
    assert (shown.mode, shown.size, shown.nlink, shown.owner) == (0o100640, 0, 1, (0, 0))
    ino, fh = w.created(reply, b"content")
    assert attr_of(w.done(Op.GETATTR, ino, bytes(16)))[:2] == (ino, 7)
    w.close(fh)
    assert w.tree() == {"file": b"content"}


@case(Op.CREATE)
def create_exclusively(w: World) -> Case:
    _, fh = w.created((yield w.dir, create_in(b"file", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_TRUNC)))
    w.close(fh)
    assert w.tree() == {"file": b""}


@case(Op.MKNOD)
def mknod(w: World) -> Case:
    shown = entry_of((yield w.dir, mknod_in("file")))
    assert (shown.mode, shown.size, shown.owner) == (0o100640, 0, (0, 0))
    # Its time becomes that of its upload, which may end meanwhile with --writeback (docs/reference/differences.md).
    assert w.lookup("file")._replace(mtime=shown.mtime) == shown and w.tree() == {"file": b""}


@case(Op.MKDIR)
def mkdir(w: World) -> Case:
    shown = entry_of((yield w.dir, mkdir_in("d")))
    assert (shown.mode, shown.owner) == (0o40755, (0, 0))
    assert w.lookup("d") == shown and w.tree() == {"d": None}


@case(Op.MKDIR)
def mkdir_for_oneself(w: World) -> Case:
    shown = entry_of((yield w.dir, mkdir_in("d", 0o700)))
    assert (shown.mode, shown.owner) == (0o40700, (0, 0))
    assert w.lookup("d") == shown


@case(Op.UNLINK)
def unlink(w: World) -> Case:
    w.save("file")
    assert not (yield w.dir, b"file\0").error
    assert w.lookup("file") is None and w.tree() == {}
    assert w.ask(Op.UNLINK, w.dir, b"file\0").error == errno.ENOENT


@case(Op.UNLINK)
def unlink_what_is_written(w: World) -> Case:
    ino, fh = w.create("file", LARGE)
    assert not (yield w.dir, b"file\0").error
    assert w.tree() == {} and w.read(fh) == LARGE
    assert attr_of(w.done(Op.GETATTR, ino, bytes(16))).nlink == 0
    w.done(Op.WRITE, ino, write_in(fh, 0, b"more"))
    w.close(fh)
    assert w.tree() == {}


@case(Op.UNLINK)
def unlink_what_is_read(w: World) -> Case:
    fh = w.open_file(w.save("file", LARGE))
    assert w.read(fh) == LARGE
    assert not (yield w.dir, b"file\0").error
    assert w.tree() == {} and w.read(fh) == LARGE


@case(Op.UNLINK)
def unlink_beside_another(w: World) -> Case:
    w.save("other")
    w.save("file")
    assert not (yield w.dir, b"file\0").error
    assert w.tree() == {"other": b"content"}


@case(Op.RMDIR)
def rmdir(w: World) -> Case:
    w.mkdir(w.dir, "d")
    assert not (yield w.dir, b"d\0").error
    assert w.tree() == {}
    assert w.ask(Op.RMDIR, w.dir, b"d\0").error == errno.ENOENT


@case(Op.RMDIR)
def rmdir_of_what_is_not_empty(w: World) -> Case:
    inside = w.mkdir(w.dir, "d")
    w.mkdir(inside, "e")
    assert (yield w.dir, b"d\0").error == errno.ENOTEMPTY
    assert w.tree() == {"d": None} and w.listed(inside) == {"e"}
    w.done(Op.RMDIR, inside, b"e\0")
    w.done(Op.RMDIR, w.dir, b"d\0")


@case(Op.RENAME)
def rename(w: World) -> Case:
    ino = w.save("old")
    assert not (yield w.dir, rename_in(w.dir, "old", "new")).error
    assert w.tree() == {"new": b"content"}
    found = w.lookup("new")
    assert found is not None and found.ino == ino
    assert w.ask(Op.RENAME, w.dir, rename_in(w.dir, "old", "new")).error == errno.ENOENT


@case(Op.RENAME)
def rename_over_a_file(w: World) -> Case:
    w.save("new", b"before")
    w.save("old")
    assert not (yield w.dir, rename_in(w.dir, "old", "new")).error
    assert w.tree() == {"new": b"content"}


@case(Op.RENAME)
def rename_what_is_written_over_what_is_read(w: World) -> Case:
    reader = w.open_file(w.save("new", LARGE))
    assert w.read(reader) == LARGE
    ino, fh = w.create("old", b"content")
    assert not (yield w.dir, rename_in(w.dir, "old", "new")).error
    assert w.tree() == {"new": b"content"} and w.read(reader) == LARGE
    w.done(Op.WRITE, ino, write_in(fh, 7, b"more"))
    w.close(fh)
    assert w.tree() == {"new": b"contentmore"}


@case(Op.RENAME)
def rename_what_is_open_and_stored(w: World) -> Case:
    """A log that is rotated: its writer goes on."""
    ino, fh = w.create("old", b"content")
    w.done(Op.FSYNC, ino, protocol.FSYNC_IN.pack(fh, 0, 0))
    assert not (yield w.dir, rename_in(w.dir, "old", "new")).error
    assert w.tree() == {"new": b"content"}
    w.done(Op.WRITE, ino, write_in(fh, 7, b"more"))
    w.close(fh)
    assert w.tree() == {"new": b"contentmore"}


@case(Op.RENAME)
def rename_what_is_written_again(w: World) -> Case:
    ino = w.save("old", b"content")
    fh = w.open_file(ino, os.O_RDWR)
    w.done(Op.WRITE, ino, write_in(fh, 7, b"more"))
    assert not (yield w.dir, rename_in(w.dir, "old", "new")).error
    assert w.tree() == {"new": b"contentmore"}
    w.done(Op.WRITE, ino, write_in(fh, 11, b"still"))
    w.close(fh)
    assert w.tree() == {"new": b"contentmorestill"}


@case(Op.RENAME)
def rename_what_is_written_over_what_is_written(w: World) -> Case:
    target, other = w.create("new", b"before")
    ino, fh = w.create("old", b"content")
    assert not (yield w.dir, rename_in(w.dir, "old", "new")).error
    assert w.tree() == {"new": b"content"} and w.read(other) == b"before"
    w.done(Op.WRITE, target, write_in(other, 6, b"lost"))
    w.close(other)
    w.done(Op.WRITE, ino, write_in(fh, 7, b"more"))
    w.close(fh)
    assert w.tree() == {"new": b"contentmore"}


@case(Op.RENAME)
def rename_a_directory(w: World) -> Case:
    old = w.mkdir(w.dir, "old")
    w.mkdir(old, "inside")
    assert not (yield w.dir, rename_in(w.dir, "old", "new")).error
    assert w.tree() == {"new": None} and w.listed(old) == {"inside"}
    w.done(Op.RMDIR, old, b"inside\0")
    w.done(Op.RMDIR, w.dir, b"new\0")


@case(Op.RENAME2)
def rename_and_replace_nothing(w: World) -> Case:
    w.save("old")
    assert not (yield w.dir, rename_in(w.dir, "old", "new", NOREPLACE)).error
    assert w.tree() == {"new": b"content"}


@case(Op.RENAME2)
def rename_what_is_open_and_replace_nothing(w: World) -> Case:
    ino, fh = w.create("old", b"content")
    w.done(Op.FSYNC, ino, protocol.FSYNC_IN.pack(fh, 0, 0))
    assert not (yield w.dir, rename_in(w.dir, "old", "new", NOREPLACE)).error
    w.done(Op.WRITE, ino, write_in(fh, 7, b"more"))
    w.close(fh)
    assert w.tree() == {"new": b"contentmore"}


@case(Op.RENAME2)
def rename_what_is_there_and_replace_nothing(w: World) -> Case:
    w.save("new", b"before")
    w.save("old")
    assert (yield w.dir, rename_in(w.dir, "old", "new", NOREPLACE)).error == errno.EEXIST
    assert w.tree() == {"new": b"before", "old": b"content"}


@case(Op.RENAME2)
def rename_both_ways(w: World) -> Case:
    w.save("new", b"before")
    w.save("old")
    assert (yield w.dir, rename_in(w.dir, "old", "new", EXCHANGE)).error == errno.EINVAL
    assert w.tree() == {"new": b"before", "old": b"content"}


@case(Op.SETATTR)
def chmod(w: World) -> Case:
    ino = w.save("file")
    reply = yield ino, setattr_in(Setattr.MODE, mode=0o100600)
    assert attr_of(reply).mode == 0o100600 and untimed(w.lookup("file")) == untimed(attr_of(reply))


@case(Op.SETATTR)
def chown_of_what_is_written(w: World) -> Case:
    ino, _ = w.create("file", b"content")
    reply = yield ino, setattr_in(Setattr.UID | Setattr.GID, uid=7, gid=8)
    assert attr_of(reply).owner == (7, 8) and untimed(w.lookup("file")) == untimed(attr_of(reply))


@case(Op.SETATTR)
def utimens(w: World) -> Case:
    ino = w.save("file")
    times = {"atime": 5, "atimensec": 6, "mtime": 7, "mtimensec": 8}
    reply = yield ino, setattr_in(Setattr.ATIME | Setattr.MTIME, **times)
    assert attr_of(reply).mtime == (7, 8) and w.lookup("file") == attr_of(reply)


@case(Op.SETATTR)
def truncate(w: World) -> Case:
    ino = w.save("file")
    reply = yield ino, setattr_in(Setattr.SIZE, size=3)
    assert attr_of(reply).size == 3 and w.content("file") == b"con"


@case(Op.SETATTR)
def truncate_what_is_written(w: World) -> Case:
    ino, fh = w.create("file", LARGE)
    reply = yield ino, setattr_in(Setattr.SIZE | Setattr.FH, size=100_000, fh=fh)
    assert attr_of(reply).size == 100_000 and w.content("file") == LARGE[:100_000]
    w.done(Op.SETATTR, ino, setattr_in(Setattr.SIZE | Setattr.FH, size=100_010, fh=fh))
    assert w.read(fh) == LARGE[:100_000] + bytes(10)


@case(Op.WRITE)
def write(w: World) -> Case:
    ino, fh = w.create("file", b"content")
    reply = yield ino, write_in(fh, 7, b"more")
    assert not reply.error and reply.body[:4] == b"\4\0\0\0"
    assert w.read(fh) == b"contentmore"


@case(Op.WRITE)
def write_a_large_piece(w: World) -> Case:
    ino, fh = w.create("file", b"content")
    reply = yield ino, write_in(fh, 100_000, LARGE)
    assert not reply.error and int.from_bytes(reply.body[:4], "little") == len(LARGE)
    assert w.read(fh) == b"content".ljust(100_000, b"\0") + LARGE


@case(Op.WRITE)
def write_to_what_was_stored(w: World) -> Case:
    fh = w.open_file(w.save("file", LARGE), os.O_RDWR)
    reply = yield w.open[fh], write_in(fh, 5, b"more")
    assert not reply.error and w.read(fh) == LARGE[:5] + b"more" + LARGE[9:]


@case(Op.FALLOCATE)
def fallocate(w: World) -> Case:
    ino, fh = w.create("file", b"content")
    assert not (yield ino, protocol.FALLOCATE_IN.pack(fh, 0, 100, 0, 0)).error
    assert w.read(fh) == b"content".ljust(100, b"\0")


refused(Op.READLINK, "readlink", lambda w: b"", errno.EINVAL)
refused(Op.SYMLINK, "symlink", lambda w: b"new\0file\0", errno.EPERM)
refused(Op.LINK, "link", lambda w: struct.pack("=Q", ROOT) + b"new\0", errno.EPERM)
refused(Op.IOCTL, "ioctl", lambda w: bytes(32), errno.ENOTTY)
refused(COPY_FILE_RANGE, "copy_file_range", lambda w: bytes(56), errno.ENOSYS)
refused(LSEEK, "lseek", lambda w: bytes(24), errno.ENOSYS)
refused(POLL, "poll", lambda w: bytes(24), errno.ENOSYS)
refused(GETLK, "getlk", lambda w: bytes(48), errno.ENOSYS)
refused(SETLK, "setlk", lambda w: bytes(48), errno.ENOSYS)

TOLD = {
    Op.FORGET: struct.pack("=Q", 1),
    Op.BATCH_FORGET: struct.pack("=II", 0, 0),
    Op.INTERRUPT: protocol.INTERRUPT_IN.pack(1 << 20),
}
"""Requests without a reply, and their arguments. The kernel does not repeat them."""


UNSTEADY = ("truncate", "truncate_what_is_written", "mkdir", "mkdir_for_oneself")
"""Cases whose time the program may be told otherwise than the first time: a file is cut again, and what changed a directory
last is known to the daemon alone that made the change (docs/explanation/semantics.md)."""


# -- tests -------------------------------------------------------------------------------------------


MOMENTS = [pytest.param(name, marks=[] if name == "carried out" else pytest.mark.long) for name in DEATHS]
"""A request that was carried out meets its own effect when it is repeated. The other moment is left to
`scripts/test --all`."""


@contextmanager
def worlds(place: Path, *, writeback: bool) -> Iterator[World]:
    """A new mount."""
    deaths = Deaths(place, **{"writeback": True, "upload_delay": "50ms"} if writeback else {})
    try:
        yield World(deaths)
    finally:
        deaths.close()


@pytest.fixture(scope="module", params=["durable", pytest.param("writeback", marks=pytest.mark.long)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with worlds(tmp_path_factory.mktemp("deaths"), writeback=request.param == "writeback") as world:
        yield world


def test_each_handler_has_a_case() -> None:
    assert {op for op, _ in CASES.values()} | TOLD.keys() >= handlers()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_request_that_was_not_answered_is_answered_by_the_next_daemon(
    world: World, name: str, moment: str
) -> None:
    op, function = CASES[name]
    world.begin(f"{name}-{moment.replace(' ', '-')}")
    running = function(world)
    ino, body = next(running)
    lost, reply = world.deaths.ask_across_a_death(DEATHS[moment], op, ino, body)
    if lost is not None:
        first, second = told(op, lost), told(op, reply)
        if name in UNSTEADY:
            first, second = (shown._replace(mtime=(0, 0)) for shown in (first, second))  # type: ignore[attr-defined]
        assert first == second
    with pytest.raises(StopIteration):
        running.send(reply)
    world.end()


QUICK = {"mkdir_for_oneself", "rename_what_is_open_and_stored", "rename_and_replace_nothing"}
"""The cases that are not left to `scripts/test --all`."""

AT_ANY_STEP = [
    pytest.param(name, writeback, marks=[] if name in QUICK and not writeback else pytest.mark.long)
    for name in CASES
    for writeback in (False, True)
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "writeback"), AT_ANY_STEP)
def test_a_daemon_may_die_at_any_step_of_a_request(tmp_path: Path, name: str, writeback: bool) -> None:
    op, function = CASES[name]
    with worlds(tmp_path, writeback=writeback) as world:
        for step in itertools.count(1):
            world.begin(f"{name}-{step}")
            running = function(world)
            ino, body = next(running)
            died, reply = world.deaths.ask_dying_at(step, op, ino, body)
            try:
                with pytest.raises(StopIteration):
                    running.send(reply)
                world.end()
            except AssertionError as exc:
                exc.add_note(f"the daemon died {died}, step {step}")
                raise
            if not died:
                break


@pytest.mark.parametrize("op", TOLD, ids=lambda op: op.name.lower())
@pytest.mark.parametrize("moment", DEATHS)
def test_a_request_without_a_reply_leaves_all_as_it_is(world: World, op: Op, moment: str) -> None:
    world.begin(f"{op.name}-{moment.replace(' ', '-')}")
    ino, fh = world.create("file", b"content")
    world.deaths.tell_across_a_death(DEATHS[moment], op, ino, TOLD[op])
    assert world.read(fh) == b"content"
    world.done(Op.WRITE, ino, write_in(fh, 7, b"more"))
    world.close(fh)
    assert world.tree() == {"file": b"contentmore"}
    world.end()
