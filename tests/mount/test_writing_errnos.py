"""What is refused, with which errno, through the real kernel on both backends; in the manner of pjdfstest.

And a disk that fills up: its writer is told, and nobody else notices.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.lab.dataset import content
from tests.mount.conftest import BACKEND_CONTRACT, BOTH_BACKENDS, Bucket, Mounted
from tests.mount.mounts import Mount, eventually, succeed
from tests.mount.written import keys, stored

pytestmark = BACKEND_CONTRACT

MIB = 1 << 20
NOREPLACE, EXCHANGE = 1, 2
KEEP_SIZE, PUNCH_HOLE = 1, 2
GETFLAGS = 0x80086601  # FS_IOC_GETFLAGS, as lsattr asks
AT_FDCWD = -100
LONGEST = "x" * 255

libc = ctypes.CDLL(None, use_errno=True)


def renameat2(old: Path, new: Path, flags: int) -> None:
    if libc.renameat2(AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags):
        raise OSError(ctypes.get_errno(), "renameat2")


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    if libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(length)):
        raise OSError(ctypes.get_errno(), "fallocate")


def opened(path: Path, flags: int, call: Callable[[int], Any] = lambda fd: None) -> None:
    fd = os.open(path, flags, 0o644)
    try:
        call(fd)
    finally:
        os.close(fd)


def bound(path: Path) -> None:
    """A socket of this name; by a short path, as long ones are refused for themselves."""
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{here}/{path.name}")
    finally:
        os.close(here)


CREATE = os.O_WRONLY | os.O_CREAT
REFUSED: list[tuple[str, int, Callable[[Path], Any]]] = [
    # There are: f (a file), d (a directory with d/g in it), e (an empty directory).
    ("create over a directory", errno.EISDIR, lambda p: opened(p / "d", CREATE)),
    ("create exclusively over a file", errno.EEXIST, lambda p: opened(p / "f", CREATE | os.O_EXCL)),
    ("create exclusively over a directory", errno.EEXIST, lambda p: opened(p / "d", CREATE | os.O_EXCL)),
    ("create below nothing", errno.ENOENT, lambda p: opened(p / "no/f", CREATE)),
    ("create below a file", errno.ENOTDIR, lambda p: opened(p / "f/f", CREATE)),
    ("create with a long name", errno.ENAMETOOLONG, lambda p: opened(p / (LONGEST + "x"), CREATE)),
    ("create with a long path", errno.ENAMETOOLONG, lambda p: opened(p / ("d/" * 2100 + "f"), CREATE)),
    ("create with a name that is not UTF-8", errno.EINVAL, lambda p: opened(p / "\udcff", CREATE)),
    ("open what there is not", errno.ENOENT, lambda p: opened(p / "no", os.O_WRONLY)),
    ("open a directory to write", errno.EISDIR, lambda p: opened(p / "d", os.O_RDWR)),
    ("open a file as a directory", errno.ENOTDIR, lambda p: opened(p / "f", os.O_RDONLY | os.O_DIRECTORY)),
    ("open a file without a name", errno.EOPNOTSUPP, lambda p: opened(p, os.O_RDWR | os.O_TMPFILE)),
    (
        "write what is open to read",
        errno.EBADF,
        lambda p: opened(p / "f", os.O_RDONLY, lambda f: os.write(f, b"x")),
    ),
    (
        "read what is open to write",
        errno.EBADF,
        lambda p: opened(p / "f", os.O_WRONLY, lambda f: os.read(f, 1)),
    ),
    (
        "write too far",
        errno.EFBIG,
        lambda p: opened(p / "f", os.O_RDWR, lambda f: os.pwrite(f, b"x", 6 << 40)),
    ),
    ("truncate what there is not", errno.ENOENT, lambda p: os.truncate(p / "no", 0)),
    ("truncate a directory", errno.EISDIR, lambda p: os.truncate(p / "d", 0)),
    ("truncate to less than nothing", errno.EINVAL, lambda p: os.truncate(p / "f", -1)),
    ("truncate to too much", errno.EFBIG, lambda p: os.truncate(p / "f", 6 << 40)),
    (
        "truncate what is open to read",
        errno.EINVAL,
        lambda p: opened(p / "f", os.O_RDONLY, lambda f: os.ftruncate(f, 0)),
    ),
    ("allocate nothing", errno.EINVAL, lambda p: opened(p / "f", os.O_RDWR, lambda f: fallocate(f, 0, 0, 0))),
    (
        "punch a hole",
        errno.EOPNOTSUPP,
        lambda p: opened(p / "f", os.O_RDWR, lambda f: fallocate(f, KEEP_SIZE | PUNCH_HOLE, 0, 1)),
    ),
    ("mkdir over a file", errno.EEXIST, lambda p: os.mkdir(p / "f")),
    ("mkdir over a directory", errno.EEXIST, lambda p: os.mkdir(p / "d")),
    ("mkdir below nothing", errno.ENOENT, lambda p: os.mkdir(p / "no/d")),
    ("mkdir below a file", errno.ENOTDIR, lambda p: os.mkdir(p / "f/d")),
    ("mkdir with a long name", errno.ENAMETOOLONG, lambda p: os.mkdir(p / (LONGEST + "x"))),
    ("rmdir of a file", errno.ENOTDIR, lambda p: os.rmdir(p / "f")),
    ("rmdir of nothing", errno.ENOENT, lambda p: os.rmdir(p / "no")),
    ("rmdir of what has something in it", errno.ENOTEMPTY, lambda p: os.rmdir(p / "d")),
    ("rmdir of .", errno.EINVAL, lambda p: os.rmdir(f"{p}/e/.")),
    ("rmdir of ..", errno.ENOTEMPTY, lambda p: os.rmdir(f"{p}/e/..")),
    ("unlink of a directory", errno.EISDIR, lambda p: os.unlink(p / "d")),
    ("unlink of nothing", errno.ENOENT, lambda p: os.unlink(p / "no")),
    ("unlink of a file with a slash", errno.ENOTDIR, lambda p: os.unlink(f"{p}/f/")),
    ("rename of nothing", errno.ENOENT, lambda p: os.rename(p / "no", p / "x")),
    ("rename below nothing", errno.ENOENT, lambda p: os.rename(p / "f", p / "no/x")),
    ("rename below a file", errno.ENOTDIR, lambda p: os.rename(p / "d", p / "f/x")),
    ("rename of a directory over a file", errno.ENOTDIR, lambda p: os.rename(p / "d", p / "f")),
    ("rename of a file over a directory", errno.EISDIR, lambda p: os.rename(p / "f", p / "e")),
    ("rename over what has something in it", errno.ENOTEMPTY, lambda p: os.rename(p / "e", p / "d")),
    ("rename into oneself", errno.EINVAL, lambda p: os.rename(p / "d", p / "d/x")),
    ("rename into one's child", errno.EINVAL, lambda p: os.rename(p / "d", p / "d/k/x")),
    ("rename over one's parent", errno.ENOTEMPTY, lambda p: os.rename(p / "d/k", p / "d")),
    ("rename to a long name", errno.ENAMETOOLONG, lambda p: os.rename(p / "f", p / (LONGEST + "x"))),
    ("rename to what is not UTF-8", errno.EINVAL, lambda p: os.rename(p / "f", p / "\udcff")),
    ("rename of .", errno.EBUSY, lambda p: os.rename(f"{p}/d/.", p / "x")),
    ("rename that may not replace", errno.EEXIST, lambda p: renameat2(p / "f", p / "d/g", NOREPLACE)),
    ("exchange of two names", errno.EINVAL, lambda p: renameat2(p / "f", p / "d/g", EXCHANGE)),
    (
        "read without waiting",
        errno.EOPNOTSUPP,
        lambda p: opened(p / "f", os.O_RDONLY, lambda f: os.preadv(f, [bytearray(1)], 0, os.RWF_NOWAIT)),
    ),
    (
        "flags of a file",
        errno.ENOTTY,
        lambda p: opened(p / "f", os.O_RDONLY, lambda f: fcntl.ioctl(f, GETFLAGS, bytes(8))),
    ),
    ("symlink", errno.EPERM, lambda p: os.symlink("f", p / "x")),
    ("link", errno.EPERM, lambda p: os.link(p / "f", p / "x")),
    ("mkfifo", errno.EPERM, lambda p: os.mkfifo(p / "x")),
    ("a socket", errno.EPERM, lambda p: bound(p / "x")),
    ("setxattr", errno.EOPNOTSUPP, lambda p: os.setxattr(p / "f", "user.x", b"x")),
    ("removexattr", errno.EOPNOTSUPP, lambda p: os.removexattr(p / "f", "user.x")),
    ("chmod of nothing", errno.ENOENT, lambda p: os.chmod(p / "no", 0o600)),
    ("utime of nothing", errno.ENOENT, lambda p: os.utime(p / "no")),
]


def made(root: Path) -> Path:
    (root / "d/k").mkdir(parents=True)
    (root / "e").mkdir()
    (root / "f").write_bytes(b"file")
    (root / "d/g").write_bytes(b"another")
    return root


def tree(root: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


@pytest.fixture(scope="module")
def place(module_mounted: Mounted, module_bucket: Bucket, backend: str) -> Iterator[Path]:
    yield made(module_mounted(module_bucket, read_only=False).path / backend)


@pytest.mark.parametrize(
    ("number", "call"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused(place: Path, number: int, call: Callable[[Path], Any]) -> None:
    before = tree(place)
    with pytest.raises(OSError) as failure:
        call(place)
    assert errno.errorcode[failure.value.errno] == errno.errorcode[number]  # type: ignore[index]
    assert tree(place) == before, "what is refused changes nothing"


def test_what_is_not_refused(place: Path) -> None:
    names = [LONGEST, "ü" * 127, "a\nb", "-", "~", "..."]
    for name in names:
        (place / name).write_bytes(b"x")
        os.rename(place / name, place / "y")
        (place / "y").unlink()
    os.rename(place / "f", place / "f")
    os.rename(place / "e", place / "d/e")
    (place / "e").mkdir()
    os.rename(place / "d/e", place / "e")  # over an empty one
    assert (place / "f").read_bytes() == b"file"
    assert sorted(os.listdir(place)) == ["d", "e", "f"]


def test_a_directory_with_a_key_that_HTTP_cannot_name_stays(mounted: Mounted, bucket: Bucket) -> None:
    """The other hidden keys go with their directory."""
    for key in ("d/f", "d/./x", "e/f", "e//x"):
        bucket.put(key, 10)
    place = mounted(bucket, read_only=False).path
    with pytest.raises(OSError) as failure:
        (place / "d").rename(place / "new")
    assert failure.value.errno == errno.EOPNOTSUPP
    (place / "e").rename(place / "moved")
    assert sorted(os.listdir(place)) == ["d", "moved"]
    assert sorted(keys(bucket)) == ["d/./x", "d/f", "moved//x", "moved/f"]


READ_ONLY: list[Callable[[Path], Any]] = [
    lambda p: opened(p / "new", CREATE),
    lambda p: opened(p / "f", os.O_WRONLY),
    lambda p: opened(p / "f", os.O_RDWR | os.O_TRUNC),
    lambda p: os.truncate(p / "f", 0),
    lambda p: os.mkdir(p / "new"),
    lambda p: os.rmdir(p / "d"),
    lambda p: os.unlink(p / "f"),
    lambda p: os.rename(p / "f", p / "new"),
    lambda p: os.chmod(p / "f", 0o600),
    lambda p: os.utime(p / "f"),
    lambda p: os.symlink("f", p / "new"),
    lambda p: os.link(p / "f", p / "new"),
    lambda p: os.mknod(p / "new"),
    lambda p: os.setxattr(p / "f", "user.x", b"x"),
]


def test_read_only(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("f", b"x")
    bucket.put("d/g", b"x")
    mount = mounted(bucket)
    before = bucket.store.counters()["requests"]
    for number, call in enumerate(READ_ONLY):
        with pytest.raises(OSError) as failure:
            call(mount.path)
        assert failure.value.errno == errno.EROFS, f"call {number}: {failure.value}"
    after = bucket.store.counters()["requests"]
    assert not {"put", "delete", "copy", "create_upload"} & (after.keys() - before.keys())


def test_between_two_stores(mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
    other = type(bucket)(bucket.store)
    config = tmp_path / "stores.toml"
    config.write_text(
        "".join(f'[[source]]\nname = "{n}"\nurl = "{b.url}"\n' for n, b in (("one", bucket), ("two", other)))
    )
    mount = mounted(None, read_only=False, config=config)
    (mount.path / "one/f").write_bytes(b"x")
    for call, number in (
        (lambda: os.rename(mount.path / "one/f", mount.path / "two/f"), errno.EXDEV),
        (lambda: (mount.path / "three").mkdir(), errno.EPERM),
        (lambda: (mount.path / "f").touch(), errno.EPERM),
        (lambda: os.rename(mount.path / "one", mount.path / "three"), errno.EPERM),
        (lambda: os.rmdir(mount.path / "two"), errno.EPERM),
    ):
        with pytest.raises(OSError) as failure:
            call()
        assert failure.value.errno == number
    succeed(["mv", mount.path / "one/f", mount.path / "two/f"])
    assert keys(bucket) == []
    assert stored(other, "f") == b"x"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 48 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    succeed(["mount", "-t", "tmpfs", "-o", "size=48M", "small-disk", place])
    yield place
    succeed(["umount", "-l", place])


@BOTH_BACKENDS
@pytest.mark.root
class TestFullDisk:
    FULL = "has no room for what is written|is full"

    def small(self, mounted: Mounted, bucket: Bucket, disk: Path, **options: Any) -> Mount:
        options = {"read_only": False, "keep_free": "8M", "cache_size": "32M", "timeout": 30, **options}
        mount = mounted(bucket, cache_dir=disk / "cache", **options)
        mount.allowed += [self.FULL, "do not tell who writes them"]  # the disk is a tmpfs
        return mount

    def test_its_writer_is_told_and_nobody_else(self, disk: Path, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("before", content("before", 3 * MIB))
        mount = self.small(mounted, bucket, disk)
        small = (mount.path / "beside").open("wb", buffering=0)
        small.write(b"one")
        with pytest.raises(OSError) as failure, (mount.path / "large").open("wb", buffering=0) as large:
            for _ in range(60):
                large.write(bytes(MIB))
        assert failure.value.errno == errno.ENOSPC
        small.write(b", two")
        small.close()
        assert stored(bucket, "beside") == b"one, two"
        assert (mount.path / "before").read_bytes() == content("before", 3 * MIB)
        (mount.path / "large").unlink()
        assert sorted(keys(bucket)) == ["before", "beside"]
        for number in range(4):  # there is room again, and the cache gives way
            (mount.path / f"{number}").write_bytes(content(f"{number}", 20 * MIB))
            assert stored(bucket, f"{number}") == content(f"{number}", 20 * MIB)

    def test_what_waits_for_its_upload_makes_room_as_it_goes(
        self, disk: Path, mounted: Mounted, bucket: Bucket
    ) -> None:
        mount = self.small(mounted, bucket, disk, writeback=True, upload_delay="1h")
        for number in range(8):
            (mount.path / f"{number}").write_bytes(content(f"{number}", 12 * MIB))
        assert mount.cli("flush", mount.path).returncode == 0
        for number in range(8):
            assert stored(bucket, f"{number}") == content(f"{number}", 12 * MIB)

    def test_where_nothing_can_be_uploaded(self, disk: Path, mounted: Mounted, bucket: Bucket) -> None:
        """What was acknowledged stays, and is there when the store comes back."""
        mount = self.small(mounted, bucket, disk, writeback=True, upload_delay="10ms")
        mount.allowed.append("denied|AccessDenied|not at the origin")
        bucket.store.fault("403", kind="*put*")
        bucket.store.fault("403", kind="*upload*")
        written = []
        with pytest.raises(OSError) as failure:
            for number in range(10):
                try:
                    (mount.path / f"{number}").write_bytes(content(f"{number}", 9 * MIB))
                except PermissionError:
                    pass  # of an upload that failed; the bytes are kept
                written.append(number)
                eventually(lambda: not mount.status()["uploads"]["uploading"], "it was refused")
        assert failure.value.errno == errno.ENOSPC
        assert written
        bucket.store.clear_faults()
        eventually(lambda: mount.cli("flush", mount.path).returncode == 0, "all of it is uploaded", 30)
        for number in written:
            assert stored(bucket, f"{number}") == content(f"{number}", 9 * MIB)

    def test_a_mapping_has_no_room_either(self, disk: Path, mounted: Mounted, bucket: Bucket) -> None:
        mount = self.small(mounted, bucket, disk)
        code = (
            "import mmap, os, sys\n"
            "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
            "os.ftruncate(fd, 60 << 20)\n"
            "with mmap.mmap(fd, 0) as mapped:\n"
            "    for at in range(0, 60 << 20, 4096): mapped[at] = 1\n"
            "    mapped.flush()\n"
        )
        done = subprocess.run([sys.executable, "-c", code, mount.path / "f"], timeout=60, capture_output=True)
        assert b"No space left on device" in done.stderr, "not all of it can have been written"
        (mount.path / "g").write_bytes(b"goes on")
        assert stored(bucket, "g") == b"goes on"
