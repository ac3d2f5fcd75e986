"""What a local disk does, as a program: `python local_disk.py DIRECTORY` prints what each operation gives there.

The same program runs on a local disk and on a mount (`test_attributes.py`). Values are plain: results, errnos' names, and
comparisons of times, never the times themselves.
"""

from __future__ import annotations

import ctypes
import errno
import json
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
    with path.open("r+b") as file:
        fd = file.fileno()
        found = [of(lambda: os.ftruncate(fd, far)), of(lambda: os.pwrite(fd, b"x", far))]
        return [*found, of(lambda: os.truncate(path, far)), os.fstat(fd).st_size]


def long_names(root: Path) -> Any:
    long = root / ("x" * 256)
    return [
        of(operation)
        for operation in (
            *(long.touch, long.mkdir, long.stat, long.unlink),
            *(lambda: made(root / "f").rename(long), (root / ("x" * 255)).touch),
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


ROWS: dict[str, Callable[[Path], Any]] = {
    row.__name__: row
    for row in (
        *(largest_file, long_names, set_ids_and_a_new_owner, set_ids_and_a_write, set_gid_directories),
        *(times_that_are_set, changes_move_ctime, what_is_kept, a_mode_that_is_set_beside_a_writer),
        *(a_directory_that_is_removed, kinds_of_files, extended_attributes, fallocate, renameat2),
        what_is_refused,
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
