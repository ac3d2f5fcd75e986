"""What a local disk does, as a program: `python local_disk.py DIRECTORY` prints what each operation gives there.

The same program runs on a local disk and on a mount (`test_attributes.py`). Values are plain: results, errnos' names, and
comparisons of times, never the times themselves.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import fcntl
import json
import mmap
import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRANGER = 1000
GROUP = 2000
SECOND = 10**9
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def of(operation: Callable[[], Any]) -> Any:
    """Its result, or the name of its errno."""
    try:
        return operation()
    except OSError as exc:
        return errno.errorcode[exc.errno or 0]


def checked(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), "")


def as_stranger(operation: Callable[[], Any]) -> Any:
    """What another user gets."""
    into, out = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            os.umask(0)
            os.write(out, json.dumps(of(operation)).encode())
        finally:
            os._exit(0)
    os.close(out)
    with open(into, "rb") as file:
        said = file.read()
    os.waitpid(pid, 0)
    return json.loads(said)


def mode(path: Path) -> str:
    return oct(stat.S_IMODE(path.stat().st_mode))


def made(path: Path, bits: int = 0o644, data: bytes = b"x" * 100) -> Path:
    path.write_bytes(data)
    path.chmod(bits)
    return path


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def largest_file(root: Path) -> Any:
    path, far = made(root / "f"), 1 << 62
    fd = os.open(path, os.O_RDWR)
    found = [of(lambda: os.ftruncate(fd, far)), of(lambda: os.pwrite(fd, b"x", far))]
    found += [of(lambda: os.truncate(path, far)), os.fstat(fd).st_size]
    of(lambda: os.close(fd))
    path.unlink()
    return found


def long_names(root: Path) -> Any:
    long = root / ("x" * 256)
    return [
        of(operation)
        for operation in (
            long.touch,
            long.mkdir,
            long.stat,
            long.unlink,
            lambda: made(root / "f").rename(long),
            (root / ("x" * 255)).touch,
        )
    ]


def set_ids_and_a_new_owner(root: Path) -> Any:
    path, found = root / "f", []
    for bits in (0o6755, 0o2644, 0o4644):
        os.chown(made(path, bits), STRANGER, GROUP)
        found.append(mode(path))
    (root / "d").mkdir()
    (root / "d").chmod(0o6755)
    os.chown(root / "d", STRANGER, GROUP)
    return [*found, mode(root / "d")]


def set_ids_and_a_write(root: Path) -> Any:
    path, found = root / "f", []

    def write() -> None:
        with path.open("r+b") as file:
            file.write(b"y")

    def cut() -> None:
        with path.open("r+b") as file:
            os.ftruncate(file.fileno(), 5)

    changes = (write, cut, lambda: os.truncate(path, 3), lambda: path.open("wb").close())
    for bits in (0o6777, 0o4777, 0o2777):
        for change in (*changes, lambda: path.open("r+b").close()):
            made(path, bits)
            as_stranger(change)
            found.append(mode(path))
        made(path, bits)
        write()  # root may keep them
        found.append(mode(path))
    return found


def set_gid_directories(root: Path) -> Any:
    above = root / "d"
    above.mkdir()
    os.chown(above, 0, GROUP)
    above.chmod(0o2777)
    (above / "f").touch()
    (above / "n").mkdir()
    (above / "n" / "m").mkdir()
    os.mknod(above / "k", 0o644 | stat.S_IFREG)
    as_stranger(lambda: (above / "s").touch())
    as_stranger(lambda: (above / "t").mkdir())
    as_stranger(lambda: os.close(os.open(above / "u", os.O_CREAT | os.O_WRONLY, 0o2775)))
    made(root / "r").rename(above / "r")  # keeps its own
    shown = {name: (above / name).stat() for name in ("f", "n", "n/m", "k", "s", "t", "u", "r")}
    return {name: (oct(s.st_mode), s.st_uid, s.st_gid) for name, s in shown.items()}


def times_that_are_set(root: Path) -> Any:
    path, found = made(root / "f"), []

    def look(where: Path | int) -> None:
        status = os.stat(where)
        found.append((status.st_atime_ns // SECOND, status.st_mtime_ns // SECOND))

    os.utime(path, (1, 2))
    look(path)
    os.utime(path, (-5, -7))
    look(path)
    os.utime(path, (3, 2))
    append(path)
    found.append(path.stat().st_atime_ns)
    os.utime(path, (3, 4))
    moved = path.rename(root / "g")
    look(moved)
    with moved.open("r+b") as file:
        os.utime(file.fileno(), (5, 6))
        look(file.fileno())
    look(moved)
    (root / "d").mkdir()
    os.utime(root / "d", (7, 8))
    look(root / "d")
    moved.rename(root / "d" / "f")
    (root / "d").rename(root / "e")
    look(root / "e" / "f")
    return found


def changes_move_ctime(root: Path) -> Any:
    """[whether ctime moved, whether mtime did]"""
    path, other, found = made(root / "f"), root / "g", []

    def by(change: Callable[[], Any], look: Callable[[], os.stat_result] = path.stat) -> None:
        before = look()
        time.sleep(0.02)
        change()
        after = look() if path.exists() or look != path.stat else other.stat()
        found.append((after.st_ctime_ns > before.st_ctime_ns, after.st_mtime_ns > before.st_mtime_ns))

    by(lambda: path.chmod(0o600))
    by(lambda: os.chown(path, 1, 1))
    by(lambda: os.utime(path, (1, 2)))
    by(lambda: path.rename(other))
    other.rename(path)
    by(lambda: append(path))
    by(lambda: os.truncate(path, 2))
    by(lambda: path.open("r+b").close())
    by(path.read_bytes)
    by(lambda: path.open("wb").close())
    with path.open("r+b", buffering=0) as file:
        look = lambda: os.fstat(file.fileno())  # noqa: E731
        by(lambda: os.fchmod(file.fileno(), 0o640), look)
        by(lambda: file.write(b"x"), look)
        by(path.unlink, look)
        found.append(look().st_nlink)
    directory = root / "d"
    directory.mkdir()
    by(lambda: directory.chmod(0o700), directory.stat)
    by((directory / "f").touch, directory.stat)
    by((directory / "f").unlink, directory.stat)
    return found


def what_is_kept(root: Path) -> Any:
    path, found = made(root / "f", 0o640), []

    def look(where: Path) -> None:
        status = where.stat()
        found.append((oct(status.st_mode), status.st_uid, status.st_gid))

    os.chown(path, 5, 6)
    (root / "d" / "in").mkdir(parents=True)
    (root / "d" / "in").chmod(0o710)
    path = path.rename(root / "d" / "in" / "f")
    look(path)
    (root / "d").rename(root / "e")
    path = root / "e" / "in" / "f"
    time.sleep(0.1)
    look(path)
    with path.open("wb") as file:  # not by what the kernel still has of its attributes
        file.write(b"again")
    look(path)
    os.truncate(path, 1)
    look(path)
    look(path.parent)
    return found


def a_mode_that_is_set_beside_a_writer(root: Path) -> Any:
    lost = 0
    for number in range(20):
        path = root / f"f{number}"
        fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
        pid = os.fork()
        if not pid:
            path.write_bytes(b"z" * 1000)
            os._exit(0)
        path.chmod(0o751)
        os.write(fd, b"abc")
        os.close(fd)
        os.waitpid(pid, 0)
        lost += mode(path) != "0o751"
    time.sleep(0.3)
    return [lost, sum(mode(root / f"f{number}") != "0o751" for number in range(20))]


def a_directory_that_is_removed(root: Path) -> Any:
    (root / "d").mkdir()
    (root / "d").chmod(0o711)
    fd = os.open(root / "d", os.O_RDONLY)
    (root / "d").rmdir()
    status = os.fstat(fd)
    found = [status.st_nlink, oct(status.st_mode), os.listdir(fd), of(lambda: os.mkdir("x", dir_fd=fd))]
    os.close(fd)
    return found


def kinds_of_files(root: Path) -> Any:
    path = made(root / "f")
    return {
        "symbolic link": of(lambda: (root / "s").symlink_to("f")),
        "hard link": of(lambda: os.link(path, root / "h")),
        "pipe": of(lambda: os.mkfifo(root / "p")),
        "device": of(lambda: os.mknod(root / "c", stat.S_IFCHR | 0o600, os.makedev(1, 3))),
        "socket": of(lambda: os.mknod(root / "k", stat.S_IFSOCK | 0o600)),
        "file without a name": of(lambda: os.close(os.open(root, os.O_TMPFILE | os.O_RDWR))),
        "name that is not UTF-8": of(lambda: os.close(os.open(bytes(root) + b"/\xff", os.O_CREAT))),
    }


def extended_attributes(root: Path) -> Any:
    path, found = made(root / "f"), {}
    for name in ("user.a", "trusted.a", "security.a"):
        found[name] = [
            of(lambda name=name: os.setxattr(path, name, b"1")),
            of(lambda name=name: len(os.getxattr(path, name))),
            of(lambda name=name: os.removexattr(path, name)),
        ]
    return found


def fallocate(root: Path) -> Any:
    with made(root / "f").open("r+b") as file:

        def allocate(bits: int) -> Any:
            return of(lambda: checked(libc.fallocate(file.fileno(), bits, 0, 4096)))

        modes = {"0": 0, "keep size": 1, "punch": 3, "collapse": 8, "zero": 16, "insert": 32}
        return {name: allocate(bits) for name, bits in modes.items()}


def renameat2(root: Path) -> Any:
    one, two = made(root / "f"), made(root / "g")

    def rename(flags: int) -> Any:
        return of(lambda: checked(libc.renameat2(-100, bytes(one), -100, bytes(two), flags)))

    return {"noreplace": rename(1), "exchange": rename(2), "whiteout": rename(4), "unknown": rename(64)}


def what_is_refused(root: Path) -> Any:
    path, full = made(root / "f"), root / "d"
    (full / "in").mkdir(parents=True)
    (root / "e").mkdir()
    operations: list[Callable[[], Any]] = [
        lambda: os.mkdir(path),
        lambda: os.rmdir(path),
        lambda: os.rmdir(full),
        lambda: os.unlink(full),
        lambda: os.rename(full, full / "in" / "x"),
        lambda: os.rename(full, path),
        lambda: os.rename(path, full),
        lambda: os.rename(root / "e", full),
        lambda: os.rename(root / "nothing", root / "x"),
        lambda: os.truncate(full, 0),
        lambda: os.truncate(path, -1),
        lambda: os.open(full, os.O_WRONLY),
        lambda: os.open(path, os.O_CREAT | os.O_EXCL),
        lambda: os.open(path, os.O_DIRECTORY),
        lambda: os.stat(path / "x"),
        lambda: os.open(path / "x", os.O_CREAT),
        lambda: os.stat(f"{path}/"),
        lambda: os.chmod(root / "nothing", 0o600),
        lambda: os.rmdir(f"{full}/."),
    ]
    return [of(operation) for operation in operations]


def opened(path: Path, flags: int, bits: int = 0o644) -> Any:
    """The flags that F_GETFL shows, or the errno."""

    def one() -> int:
        fd = os.open(path, flags, bits)
        shown = fcntl.fcntl(fd, fcntl.F_GETFL)
        os.close(fd)
        return shown

    return of(one)


def open_flags(root: Path) -> Any:
    path, new = made(root / "f"), root / "new"
    (root / "d").mkdir()
    write, create = os.O_WRONLY, os.O_CREAT | os.O_RDWR
    found = {
        "path": opened(path, os.O_PATH),
        "nofollow": opened(path, os.O_NOFOLLOW),
        "noatime": opened(path, os.O_NOATIME),
        "nonblock": opened(path, os.O_NONBLOCK),
        "sync": opened(path, write | os.O_SYNC),
        "dsync": opened(path, write | os.O_DSYNC),
        "append": opened(path, write | os.O_APPEND),
        "excl without creat": opened(path, os.O_EXCL),
        "creat of a directory": opened(root / "d", os.O_CREAT),
        "creat and directory": opened(root / "none", os.O_CREAT | os.O_DIRECTORY),
        "creat behind a slash": of(lambda: os.open(f"{root}/none/", os.O_CREAT)),
        "trunc of a directory": opened(root / "d", os.O_TRUNC),
        "creat below nothing": opened(root / "none" / "f", os.O_CREAT),
        "exclusive": [opened(new, create | os.O_EXCL, 0o600), opened(new, create | os.O_EXCL), mode(new)],
        "creat without rights": [opened(root / "no", create, 0o000), mode(root / "no")],
    }
    fd = os.open(path, os.O_RDONLY | os.O_TRUNC)
    found["trunc, for reading"] = os.fstat(fd).st_size
    found["wrong way"] = [of(lambda: os.write(fd, b"x")), of(lambda: os.ftruncate(fd, 1))]
    os.close(fd)
    fd = os.open(path, os.O_WRONLY)
    found["write only"] = [of(lambda: os.read(fd, 1)), of(lambda: os.ftruncate(fd, -1))]
    os.close(fd)
    return found


def in_processes(count: int, work: Callable[[int], Any]) -> None:
    pids = []
    for number in range(count):
        pid = os.fork()
        if not pid:
            status = 1
            try:
                work(number)
                status = 0
            finally:
                os._exit(status)
        pids.append(pid)
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0


def appends_by_several_processes(root: Path) -> Any:
    """Each by a descriptor of its own, and by one that they share: nothing is lost or torn."""
    own, shared = root / "own", root / "shared"
    fd = os.open(shared, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def work(number: int) -> None:
        mine = os.open(own, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        for _ in range(50):
            os.write(mine, b"%d\n" % number * 10)
            os.write(fd, b"%d\n" % number * 10)
        os.close(mine)

    in_processes(4, work)
    os.close(fd)
    return [sorted(collections.Counter(path.read_bytes().split()).values()) for path in (own, shared)]


def one_of_several_creates(root: Path) -> Any:
    """O_EXCL, mkdir and RENAME_NOREPLACE: one process of four succeeds."""

    def wins(number: int) -> None:
        place = root / f"mine{number}"
        place.touch()
        for turn in range(10):
            created = of(lambda t=turn: os.close(os.open(root / f"f{t}", os.O_CREAT | os.O_EXCL)))
            directory = of(lambda t=turn: os.mkdir(root / f"d{t}"))
            renamed = of(
                lambda t=turn: checked(libc.renameat2(-100, bytes(place), -100, bytes(root / f"r{t}"), 1))
            )
            place.touch()
            said = (f"create {created}", f"mkdir {directory}", f"rename {renamed}")
            with open(root / "log", "a") as log:
                log.write("".join(f"{turn} {line}\n" for line in said))

    in_processes(4, wins)
    return sorted(collections.Counter((root / "log").read_text().splitlines()).items())


def renames_over_another(root: Path) -> Any:
    one, two = made(root / "a", 0o600, b"one"), made(root / "b", 0o640, b"two")
    number, fd = one.stat().st_ino, os.open(two, os.O_RDWR)
    os.rename(one, two)
    os.write(fd, b"lost")
    status = os.fstat(fd)
    found: list[Any] = [
        two.read_bytes().decode(),
        mode(two),
        two.stat().st_ino == number,
        two.stat().st_nlink,
    ]
    found += [status.st_nlink, status.st_size, os.pread(fd, 10, 0).decode(), os.listdir(root)]
    os.close(fd)
    os.rename(two, two)
    for name in ("d", "e", "full/in"):
        (root / name).mkdir(parents=True)
    number = (root / "d").stat().st_ino
    os.rename(root / "d", root / "e")
    found += [(root / "e").stat().st_ino == number, sorted(os.listdir(root))]
    found += [
        of(lambda: os.rename(root / "e", root / "full")),
        of(lambda: os.rename(root / "full" / "in", root / "e")),
    ]
    found += [of(lambda: os.rename(root / "full", root / "e" / "x")), sorted(os.listdir(root / "e"))]
    found += [of(lambda: os.rename(root / "e", f"{root}/g/")), of(lambda: os.rename(two, f"{root}/h/"))]
    return found


def holes_and_copies(root: Path) -> Any:
    path, other = made(root / "f", data=b"a" * 8192), made(root / "g", data=b"")
    with path.open("r+b") as file, other.open("r+b") as sink:
        fd, out = file.fileno(), sink.fileno()
        os.ftruncate(fd, 1 << 20)
        os.pwrite(fd, b"end", (1 << 20) - 3)
        ends = [os.lseek(fd, 0, os.SEEK_DATA), os.lseek(fd, (1 << 20) - 1, os.SEEK_HOLE)]
        ends += [
            of(lambda: os.lseek(fd, 1 << 21, os.SEEK_DATA)),
            of(lambda: os.lseek(fd, 1 << 21, os.SEEK_HOLE)),
        ]
        done = [os.copy_file_range(fd, out, 10, 0, 5), os.copy_file_range(fd, fd, 10, 0, 100)]
        done += [of(lambda: os.copy_file_range(fd, fd, 10, 0, 5)), os.sendfile(out, fd, 0, 3)]
        os.lseek(out, 0, os.SEEK_SET)
        done += [os.writev(out, [b"ab", b"cd"]), os.preadv(out, [bytearray(2), bytearray(9)], 0)]
        return [
            ends,
            done,
            os.pread(out, 100, 0).decode(),
            os.pread(fd, 4, 8190).decode(),
            os.fstat(fd).st_size,
        ]


def locks_over_fork(root: Path) -> Any:
    """An flock belongs to the descriptor, a lock of fcntl to the process; closing any descriptor gives the latter up."""
    path, found = made(root / "f"), []

    def elsewhere(lock: Callable[[Any, int], Any]) -> Any:
        into, out = os.pipe()

        def work(number: int) -> None:
            with path.open("r+b") as file:
                os.write(out, json.dumps(of(lambda: lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB))).encode())

        in_processes(1, work)
        os.close(out)
        with open(into, "rb") as said:
            return json.loads(said.read())

    first = path.open("r+b")
    fcntl.flock(first, fcntl.LOCK_EX)
    in_processes(1, lambda number: first.close())
    found += [elsewhere(fcntl.flock)]
    in_processes(1, lambda number: fcntl.flock(first, fcntl.LOCK_UN))
    found += [elsewhere(fcntl.flock)]
    fcntl.lockf(first, fcntl.LOCK_EX)
    found += [elsewhere(fcntl.lockf)]
    path.open().close()
    found += [elsewhere(fcntl.lockf)]
    first.close()
    return found


def shared_mappings(root: Path) -> Any:
    """What one process writes through a mapping, another one reads, through a mapping and by read."""
    path = made(root / "f", data=bytes(8192))
    with path.open("r+b") as file:
        here = mmap.mmap(file.fileno(), 8192)

        def work(number: int) -> None:
            with path.open("r+b") as theirs, mmap.mmap(theirs.fileno(), 8192) as there:
                there[4096:4100] = b"them"
                there.flush()

        in_processes(1, work)
        here[:4] = b"here"
        found = [
            here[4096:4100].decode(),
            path.read_bytes()[:4].decode(),
            os.pread(file.fileno(), 4, 4096).decode(),
        ]
        os.pwrite(file.fileno(), b"pwrite", 100)
        found += [here[100:106].decode()]
        here.flush()
        here.close()
    with path.open("rb") as file:
        found += [of(lambda: mmap.mmap(file.fileno(), 10, mmap.MAP_SHARED, mmap.PROT_WRITE).close())]
        with mmap.mmap(file.fileno(), 8192, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as own:
            own[:4] = b"mine"
    return [*found, path.read_bytes()[:4].decode(), path.stat().st_size]


NOW, OMIT = (1 << 30) - 1, (1 << 30) - 2


def times_by_utimensat(root: Path) -> Any:
    path = made(root / "f", 0o666)

    def set_times(*times: tuple[int, int]) -> Any:
        two = (ctypes.c_long * 4)(*times[0], *times[1])
        return of(lambda: checked(libc.utimensat(-100, bytes(path), two, 0)))

    found = [set_times((10, 5), (20, 7)), path.stat().st_atime_ns, path.stat().st_mtime_ns]
    found += [set_times((0, OMIT), (30, 9)), path.stat().st_atime_ns, path.stat().st_mtime_ns]
    found += [set_times((0, OMIT), (0, OMIT)), path.stat().st_mtime_ns]
    found += [set_times((0, 10**9), (0, 0)), path.stat().st_mtime_ns]
    found += [
        set_times((0, OMIT), (0, NOW)),
        abs(path.stat().st_mtime - time.time()) < 60,
        path.stat().st_atime_ns,
    ]
    found += [
        as_stranger(lambda: set_times((0, NOW), (0, NOW))),
        as_stranger(lambda: set_times((1, 1), (2, 2))),
    ]
    found += [set_times((-5, 1), (-5, 1)), path.stat().st_mtime_ns]
    return found


def access_and_sticky_bits(root: Path) -> Any:
    path, private = made(root / "f", 0o640), root / "p"
    private.mkdir(0o700)
    made(private / "in", 0o666)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    theirs = made(root / "sticky" / "theirs", 0o666)
    modes = (os.F_OK, os.R_OK, os.W_OK, os.X_OK)
    found: list[Any] = [[os.access(path, way) for way in modes]]
    found += [as_stranger(lambda: [os.access(path, way) for way in modes])]
    found += [as_stranger(lambda: os.stat(private / "in").st_size), as_stranger(lambda: os.listdir(private))]
    found += [
        as_stranger(lambda: os.close(os.open(path, os.O_RDONLY))),
        as_stranger(lambda: os.chmod(path, 0o777)),
    ]
    found += [
        as_stranger(lambda: os.unlink(theirs)),
        as_stranger(lambda: os.rename(theirs, root / "sticky" / "x")),
    ]
    found += [
        as_stranger(lambda: os.close(os.open(root / "sticky" / "own", os.O_CREAT | os.O_WRONLY, 0o600)))
    ]
    found += [
        as_stranger(lambda: os.unlink(root / "sticky" / "own")),
        as_stranger(lambda: os.truncate(path, 0)),
    ]
    found += [
        as_stranger(lambda: os.chown(theirs, STRANGER, -1)),
        as_stranger(lambda: os.mkdir(private / "x")),
    ]
    return [*found, mode(root / "sticky")]


def other_calls_on_descriptors(root: Path) -> Any:
    path = made(root / "f")
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    with path.open("r+b") as file:
        fd = file.fileno()
        duplicate = os.dup(fd)
        os.lseek(fd, 7, os.SEEK_SET)
        found = [os.lseek(duplicate, 0, os.SEEK_CUR), of(lambda: os.lseek(fd, -1, os.SEEK_SET))]
        os.close(duplicate)
        found += [
            of(lambda: os.fsync(directory)),
            of(lambda: os.fdatasync(fd)),
            of(lambda: os.read(directory, 1)),
        ]
        found += [of(lambda: checked(libc.syncfs(fd))), of(lambda: os.posix_fadvise(fd, 0, 0, 3))]
        found += [of(lambda: checked(libc.sync_file_range(fd, ctypes.c_long(0), ctypes.c_long(0), 7)))]
        found += [of(lambda: os.ftruncate(directory, 0)), of(lambda: os.fchmod(directory, 0o755))]
        found += [of(lambda: fcntl.ioctl(fd, 0x5401, bytes(64))), of(lambda: os.posix_fallocate(fd, 0, 0))]
        found += [
            of(lambda: os.pread(fd, 1, 1 << 40)),
            of(lambda: os.pwrite(fd, b"", 1 << 40)),
            path.stat().st_size,
        ]
    os.close(directory)
    return [value.decode() if isinstance(value, bytes) else value for value in found]


ROWS: dict[str, Callable[[Path], Any]] = {
    row.__name__: row
    for row in (
        largest_file,
        long_names,
        set_ids_and_a_new_owner,
        set_ids_and_a_write,
        set_gid_directories,
        times_that_are_set,
        changes_move_ctime,
        what_is_kept,
        a_mode_that_is_set_beside_a_writer,
        a_directory_that_is_removed,
        kinds_of_files,
        extended_attributes,
        fallocate,
        renameat2,
        what_is_refused,
        open_flags,
        appends_by_several_processes,
        one_of_several_creates,
        renames_over_another,
        holes_and_copies,
        locks_over_fork,
        shared_mappings,
        times_by_utimensat,
        access_and_sticky_bits,
        other_calls_on_descriptors,
    )
}


def main(root: Path) -> None:
    os.umask(0o022)
    for name, row in ROWS.items():
        (root / name).mkdir()
        (root / name).chmod(0o777)
        os.chdir(root / name)  # another user may not come here by its path
        print(json.dumps([name, row(Path())]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
