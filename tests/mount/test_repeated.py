"""A call whose request is not answered when the daemon dies, by the real kernel: no errno reaches the caller, and the result
is as on a local disk.

Each call is made three times: the daemon dies while its request waits to be read, when it has read it, and when it has
carried it out and is about to answer. Only the scripted kernel (tests/fuse/test_repeated.py) shows ACCESS, READLINK,
READDIR, FORGET, BATCH_FORGET, INTERRUPT, DESTROY, and opcodes without a handler: this kernel does not send them here, or not
when it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cachefs.fuse.protocol import Op
from tests.fuse.deaths import CARRIED_OUT, READ, Daemons
from tests.mount.conftest import why_no_native_backend
from tests.mount.mounts import eventually, mounts_at, run

pytestmark = [
    pytest.mark.root,
    pytest.mark.backends("native"),
    pytest.mark.skipif(bool(why_no_native_backend()), reason="needs passthrough"),
]

WAITING = 0
MOMENTS = {"waiting": WAITING, "read": READ, "carried out": CARRIED_OUT}

CALLER = """
import ctypes, errno, json, os, stat, sys
libc = ctypes.CDLL(None, use_errno=True)
def at(name):
    return os.path.join(os.getcwd(), name)
def write(name, data=b"content", flags=os.O_TRUNC):
    fd = os.open(name, os.O_RDWR | os.O_CREAT | flags)
    os.write(fd, data)
    return fd
def save(name, data=b"content"):
    os.close(write(name, data))
def read(name):
    with open(name, "rb") as file:
        return file.read()
def rename_new(old, new):
    if libc.renameat2(-100, os.fsencode(at(old)), -100, os.fsencode(at(new)), 1):
        raise OSError(ctypes.get_errno(), "renameat2")
def errno_of(call, *arguments):
    try:
        call(*arguments)
    except OSError as exc:
        return exc.errno
names = globals()
for line in sys.stdin:
    code = json.loads(line)
    try:
        exec(code, names)
        said = ""
    except BaseException as exc:
        said = f"{code}: {exc!r}"
    print(json.dumps(said), flush=True)
"""
"""A program that makes the calls it is told, with an errno or an assertion that failed as its answer."""


class Call(NamedTuple):
    """`op` is the request that is not answered. `before` prepares `call`, `after` looks at what it did."""

    op: Op
    before: str
    call: str
    after: str


CALLS = {
    "open": Call(
        Op.OPEN,
        "save('f')",
        "fd = os.open('f', os.O_RDONLY)",
        "assert os.read(fd, 9) == b'content'; os.close(fd)",
    ),
    "open to write": Call(
        Op.OPEN,
        "save('f')",
        "fd = os.open('f', os.O_RDWR | os.O_APPEND)",
        "os.write(fd, b'more'); os.close(fd); assert read('f') == b'contentmore'",
    ),
    "open to empty": Call(
        Op.OPEN,
        "save('f')",
        "fd = os.open('f', os.O_WRONLY | os.O_TRUNC)",
        "os.write(fd, b'new'); os.close(fd); assert read('f') == b'new'",
    ),
    "read": Call(
        Op.READ,
        "save('f', b'1' * 100_000); fd = os.open('f', os.O_RDWR)",
        "data = os.pread(fd, 50_000, 70_000)",
        "assert data == b'1' * 30_000; os.close(fd)",
    ),
    "isatty": Call(
        Op.IOCTL,
        "save('f'); fd = os.open('f', os.O_RDONLY)",
        "found = os.isatty(fd)",
        "assert not found; os.close(fd)",
    ),
    "opendir": Call(Op.OPENDIR, "save('f')", "names_there = os.listdir()", "assert names_there == ['f']"),
    "readdir": Call(
        Op.READDIRPLUS,
        "[save(f'f{number}') for number in range(9)]",
        "names_there = os.listdir()",
        "assert sorted(names_there) == [f'f{number}' for number in range(9)]",
    ),
    "closedir": Call(
        Op.RELEASEDIR,
        "save('f')",
        "names_there = os.listdir()",
        "assert os.listdir() == names_there == ['f']",
    ),
    "lookup": Call(
        Op.LOOKUP,
        "",
        "found = os.stat(stored)",
        "assert found.st_size == 10 and read(stored) == b'0123456789'",
    ),
    "lookup of no name": Call(Op.LOOKUP, "", "found = os.path.exists('none')", "assert not found"),
    "fstat": Call(
        Op.GETATTR, "fd = write('f')", "found = os.fstat(fd)", "assert found.st_size == 7; os.close(fd)"
    ),
    "statvfs": Call(Op.STATFS, "", "found = os.statvfs('.')", "assert found.f_bsize == 4096"),
    "getxattr": Call(
        Op.GETXATTR,
        "save('f')",
        "found = os.getxattr('f', 'user.cachefs.key')",
        "assert found.endswith(b'/f')",
    ),
    "listxattr": Call(Op.LISTXATTR, "save('f')", "found = os.listxattr('f')", "assert found == []"),
    "setxattr": Call(
        Op.SETXATTR,
        "save('f')",
        "os.setxattr('f', 'user.cachefs.key', b'x')",
        "assert read('f') == b'content'",
    ),
    "removexattr": Call(
        Op.REMOVEXATTR, "save('f')", "os.removexattr('f', 'user.cachefs.key')", "assert os.listdir() == ['f']"
    ),
    "create": Call(
        Op.CREATE,
        "",
        "fd = os.open('f', os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)",
        "assert os.fstat(fd).st_mode == stat.S_IFREG | 0o640 and os.fstat(fd).st_size == 0\n"
        "os.write(fd, b'content'); os.close(fd); assert read('f') == b'content' and os.listdir() == ['f']",
    ),
    "mknod": Call(
        Op.MKNOD,
        "",
        "os.mknod('f', 0o640)",
        "assert os.stat('f').st_mode == stat.S_IFREG | 0o640 and read('f') == b''",
    ),
    "write": Call(
        Op.WRITE,
        "fd = write('f')",
        "count = os.write(fd, b'more')",
        "assert count == 4 and os.pread(fd, 99, 0) == b'contentmore'; os.close(fd); assert read('f') == b'contentmore'",
    ),
    "append a large piece": Call(
        Op.WRITE,
        "fd = write('f', flags=os.O_APPEND)",
        "count = os.write(fd, b'2' * 300_000)",
        "assert count == 300_000; os.close(fd); assert read('f') == b'content' + b'2' * 300_000",
    ),
    "fallocate": Call(
        Op.FALLOCATE,
        "fd = write('f')",
        "os.posix_fallocate(fd, 0, 100)",
        "os.close(fd); assert len(read('f')) == 100",
    ),
    "fsync": Call(
        Op.FSYNC, "fd = write('f')", "os.fsync(fd)", "os.close(fd); assert read('f') == b'content'"
    ),
    "fsync of a directory": Call(
        Op.FSYNCDIR, "fd = os.open('.', os.O_RDONLY)", "os.fsync(fd)", "os.close(fd)"
    ),
    "close": Call(Op.FLUSH, "fd = write('f')", "os.close(fd)", "assert read('f') == b'content'"),
    "last close": Call(Op.RELEASE, "fd = write('f')", "os.close(fd)", "assert read('f') == b'content'"),
    "rename": Call(
        Op.RENAME,
        "save('f')",
        "os.rename('f', 'g')",
        "assert read('g') == b'content' and os.listdir() == ['g']",
    ),
    "rename over a file": Call(
        Op.RENAME,
        "save('g', b'before'); save('f')",
        "os.rename('f', 'g')",
        "assert read('g') == b'content' and os.listdir() == ['g']",
    ),
    "rename of a directory": Call(
        Op.RENAME,
        "os.mkdir('d'); save('d/f')",
        "os.rename('d', 'e')",
        "assert read('e/f') == b'content' and os.listdir() == ['e']",
    ),
    "rename to a new name": Call(
        Op.RENAME2,
        "save('f')",
        "rename_new('f', 'g')",
        "assert read('g') == b'content' and os.listdir() == ['g']",
    ),
    "unlink": Call(Op.UNLINK, "save('f')", "os.unlink('f')", "assert os.listdir() == []"),
    "unlink of what is written": Call(
        Op.UNLINK,
        "fd = write('f')",
        "os.unlink('f')",
        "os.write(fd, b'more'); assert os.pread(fd, 99, 0) == b'contentmore' and os.fstat(fd).st_nlink == 0\n"
        "os.close(fd); assert os.listdir() == []",
    ),
    "mkdir": Call(Op.MKDIR, "", "os.mkdir('d')", "assert os.listdir() == ['d'] and os.listdir('d') == []"),
    "rmdir": Call(Op.RMDIR, "os.mkdir('d')", "os.rmdir('d')", "assert os.listdir() == []"),
    "chmod": Call(
        Op.SETATTR, "save('f')", "os.chmod('f', 0o600)", "assert os.stat('f').st_mode == stat.S_IFREG | 0o600"
    ),
    "chown": Call(
        Op.SETATTR,
        "save('f')",
        "os.chown('f', 7, 8)",
        "assert os.stat('f').st_uid == 7 and os.stat('f').st_gid == 8",
    ),
    "truncate": Call(Op.SETATTR, "save('f')", "os.truncate('f', 3)", "assert read('f') == b'con'"),
    "ftruncate": Call(
        Op.SETATTR,
        "fd = write('f')",
        "os.ftruncate(fd, 3)",
        "assert os.pread(fd, 9, 0) == b'con'; os.close(fd); assert read('f') == b'con'",
    ),
    "utimens": Call(
        Op.SETATTR, "save('f')", "os.utime('f', ns=(5, 7))", "assert os.stat('f').st_mtime_ns == 7"
    ),
    "symlink": Call(Op.SYMLINK, "", "found = errno_of(os.symlink, 'f', 'g')", "assert found == errno.EPERM"),
    "link": Call(Op.LINK, "save('f')", "found = errno_of(os.link, 'f', 'g')", "assert found == errno.EPERM"),
}

QUICK = {"open", "readdir", "write", "rename", "close"}
"""Calls that are made at each moment in every run. The other calls are made there only at the moment when they have been
carried out, because the repeated request then meets its own effect; `scripts/test --all` makes all calls at each moment."""


class World:
    def __init__(self, place: Path, **options: Any) -> None:
        self.daemons = Daemons(place, **options)
        self.path = place / "mnt"
        self._program: Any = None

    def start(self) -> None:
        self.daemons.start()
        eventually(lambda: mounts_at(self.path), "the mount")
        (mount,) = mounts_at(self.path)
        self._waiting = Path(f"/sys/fs/fuse/connections/{mount.device.partition(':')[2]}/waiting")
        self._program = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CALLER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        if self._program is not None:
            self._program.kill()
        self.daemons.close()  # the connection ends with its last descriptor
        if mounts_at(self.path):
            run(["umount", "-l", self.path])
        if self._program is not None:
            self._program.communicate()

    def tell(self, code: str) -> None:
        self._program.stdin.write(json.dumps(code) + "\n")
        self._program.stdin.flush()

    def said(self) -> None:
        assert json.loads(self._program.stdout.readline()) == ""

    def done(self, code: str) -> None:
        self.tell(code)
        self.said()

    def across_a_death(self, moment: int, op: int, code: str) -> None:
        """The call of the program, whose daemon dies at that moment."""
        daemons = self.daemons
        if moment != WAITING:
            daemons.arm(op, moment)
            self.tell(code)
            daemons.next_daemon()
        else:
            eventually(lambda: self._waiting.read_text() == "0\n", "nothing waits")
            os.kill(daemons.pid, signal.SIGSTOP)
            self.tell(code)
            eventually(lambda: self._waiting.read_text() != "0\n", "its request waits")
            daemons.kill()
        self.said()


@pytest.fixture
def make_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(World(tmp_path, **options))
        made[-1].start()
        return made[-1]

    yield make
    for world in made:
        world.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    found = World(tmp_path_factory.mktemp("repeated"))
    for name in CALLS:
        for moment in MOMENTS:
            (found.daemons.origin / f"stored {name} {moment}").write_bytes(b"0123456789")
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        pytest.param(moment, name, marks=[] if moment == "carried out" or name in QUICK else pytest.mark.long)
        for name in CALLS
        for moment in MOMENTS
    ],
)
def test_no_program_notices(world: World, name: str, moment: str) -> None:
    op, before, call, after = CALLS[name]
    place = f"{name} {moment}"
    root = str(world.path)
    world.done(
        f"os.chdir({root!r}); os.mkdir({place!r}); os.chdir({place!r}); stored = '../stored {place}'; {before}"
    )
    world.across_a_death(MOMENTS[moment], op, call)
    world.done(after)
    eventually(lambda: not world.daemons.handles(), "no handle is left")


IN_USE = """
def made(number):
    return bytes([number]) * 300_000 + b"end in memory"
reader, passed = (os.open(name, os.O_RDONLY) for name in ("stored a", "stored b"))
assert os.read(reader, 5) == b"01234"
written, log, table = (write(name, made(number)) for number, name in enumerate(("written", "log", "table")))
os.fsync(table)
os.pwrite(table, b"more", 100)
gone = write("gone", made(7))
os.unlink("gone")
small = write("small", b"small")
old = os.open("stored c", os.O_RDWR)
os.mkdir("d")
for number in range(40):
    save(f"d/{number:02}", b"")
stream = os.scandir("d")
listed = [next(stream).name for _ in range(3)]
save("renamed")
os.rename("renamed", "new")
os.chmod("new", 0o600)
"""

STILL_IN_USE = """
assert count == 4
assert os.pread(written, 1_000_000, 0) == made(0) + b"more"
assert os.read(reader, 99) == b"56789" and os.pread(passed, 99, 0) == b"0123456789"
os.lseek(log, 0, os.SEEK_END); os.write(log, b"line")
assert os.pread(log, 1_000_000, 0) == made(1) + b"line"
expected = made(2); assert os.pread(table, 1_000_000, 0) == expected[:100] + b"more" + expected[104:]
assert os.pread(gone, 1_000_000, 0) == made(7) and os.fstat(gone).st_nlink == 0
assert os.pread(small, 99, 0) == b"small"
os.pwrite(old, b"X", 0)
assert sorted(listed + [entry.name for entry in stream]) == [f"{number:02}" for number in range(40)]
assert read("new") == b"content" and os.stat("new").st_mode == stat.S_IFREG | 0o600
for fd in (written, log, table, gone, small, old, reader, passed):
    os.close(fd)
assert sorted(os.listdir()) == ["d", "log", "new", "small", "stored a", "stored b", "stored c", "table", "written"]
"""


@pytest.mark.long
@pytest.mark.parametrize("writeback", [False, pytest.param(True, marks=pytest.mark.long)])
def test_killed_at_each_step_of_taking_over(make_world: Callable[..., World], writeback: bool) -> None:
    """One daemon after the other dies while it takes over, each one step later; also between the notices that have the
    kernel forget names and repeat requests. A call that was not answered waits for the first that does not."""
    world = make_world(**({"writeback": True, "upload_delay": "1h"} if writeback else {}))
    daemons = world.daemons
    for name in "abc":
        (daemons.origin / f"stored {name}").write_bytes(b"0123456789")
    world.done(f"os.chdir({str(world.path)!r})\n{IN_USE}")
    daemons.arm(Op.FSYNC, READ)
    world.tell("os.lseek(written, 0, os.SEEK_END); count = os.write(written, b'more'); os.fsync(written)")
    assert daemons.die_while_taking_over() > 30
    world.said()
    world.done(STILL_IN_USE)
    eventually(lambda: not daemons.handles(), "no handle is left")
    if not writeback:
        expected = {
            "written": bytes(300_000) + b"end in memorymore",
            "small": b"small",
            "stored c": b"X123456789",
        }
        for name, data in expected.items():
            eventually(lambda name=name, data=data: (daemons.origin / name).read_bytes() == data, name)  # type: ignore[misc]
