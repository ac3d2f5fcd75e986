"""A descriptor is of the file that was opened, as on a local disk: what is shown of it and its bytes stay when its name is
removed, goes to another file, or is shown again. On both backends, both kinds of origin and both ways to write."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LEVEL
from tests.mount.conftest import BOTH_BACKENDS, Bucket, Mounted
from tests.mount.mounts import Mount, eventually, in_python
from tests.mount.racing import MODES
from tests.mount.replacing import replace

sources = [pytest.param("file", marks=pytest.mark.long), "s3"]
pytestmark = [BOTH_BACKENDS, pytest.mark.parametrize("source", sources)]

both_modes = pytest.mark.parametrize("mode", MODES)

MIB = 1 << 20


@pytest.fixture
def writable(mounted: Mounted, bucket: Bucket, tmp_path: Path, source: str) -> Callable[..., Mount]:
    """A mount of an empty origin of the kind `source`."""

    def make(mode: str = "durable", **options: Any) -> Mount:
        (tmp_path / "data").mkdir()
        url = bucket.url if source == "s3" else f"file://{tmp_path}/data"
        return mounted(url, read_only=False, **MODES[mode], **options)

    return make


@pytest.fixture
def change(bucket: Bucket, tmp_path: Path, source: str) -> Callable[[str, bytes | None], None]:
    """What another client does at the origin: an object with other bytes, or none."""

    def do(key: str, data: bytes | None) -> None:
        place = tmp_path / "data" / key
        if source == "s3" and data is not None:
            bucket.put(key, data)
        elif source == "s3":
            bucket.store.delete(bucket.name, key)
        elif data is not None:
            place.with_name("beside").write_bytes(data)
            place.with_name("beside").rename(place)
        else:
            place.unlink()

    return do


def shown(found: os.stat_result) -> tuple[float, ...]:
    return found.st_ino, found.st_mode, found.st_size, found.st_mtime_ns, found.st_uid, found.st_gid


def unlinked(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    path.with_name("new").write_bytes(b"another")
    path.with_name("new").rename(path)


def made_anew(path: Path) -> None:
    path.unlink()
    path.write_bytes(b"another")


@both_modes
@pytest.mark.parametrize("how", [unlinked, replaced, made_anew])
@pytest.mark.parametrize("size", [100, 5 * MIB])
def test_after_a_change_of_its_name_here(
    writable: Callable[..., Mount], mode: str, how: Callable[[Path], None], size: int
) -> None:
    mount = writable(mode)
    path, data = mount.path / "f", os.urandom(size)
    path.write_bytes(data)
    path.chmod(0o640)
    if mode == "writeback":
        assert mount.cli("flush", mount.path).returncode == 0
    assert path.read_bytes() == data
    fd = os.open(path, os.O_RDONLY)
    try:
        before = os.fstat(fd)
        assert before.st_nlink == 1 and before.st_mode & 0o777 == 0o640
        how(path)
        for _ in range(2):
            after = os.fstat(fd)
            assert shown(after) == shown(before) and after.st_nlink == 0
            assert os.pread(fd, size + 1, 0) == data
            with mmap.mmap(fd, size, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == data
            assert in_python("import sys; print(len(sys.stdin.buffer.read()))", stdin=fd) == f"{size}\n"
            os.lseek(fd, 0, os.SEEK_SET)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(fd, size + 1, 0) == data
        os.fchmod(fd, 0o600)
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        assert os.pread(again, size + 1, 0) == data
        os.close(again)
        if how is unlinked:
            assert not path.exists()
        else:
            assert path.stat().st_ino != after.st_ino and path.stat().st_mode & 0o777 != 0o600
            assert path.read_bytes() == b"another"
    finally:
        os.close(fd)


@pytest.mark.parametrize("what", ["replaced", "removed"])
def test_after_a_change_at_the_origin_that_is_noticed(
    writable: Callable[..., Mount], change: Callable[[str, bytes | None], None], what: str
) -> None:
    mount = writable(metadata_ttl=0.2, negative_ttl=0.2)
    path, data, new = mount.path / "f", os.urandom(3 * MIB), os.urandom(MIB)
    change("f", data)
    fd = os.open(path, os.O_RDONLY)
    try:
        before = os.fstat(fd)
        assert os.pread(fd, 4 * MIB, 0) == data
        change("f", new if what == "replaced" else None)
        if what == "replaced":
            eventually(lambda: path.stat().st_size == len(new), "the new version is shown")
            assert path.read_bytes() == new
        else:
            eventually(lambda: not path.exists(), "the name is gone")
        for _ in range(2):
            assert shown(os.fstat(fd)) == shown(before)
            assert os.pread(fd, 4 * MIB, 0) == data
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def test_bytes_that_the_origin_has_no_more_are_missing_and_nothing_else(
    writable: Callable[..., Mount], change: Callable[[str, bytes | None], None]
) -> None:
    mount = writable(metadata_ttl=0.2, negative_ttl=0.2, max_readahead="1M")
    mount.allowed.append("was replaced")
    path, data = mount.path / "f", os.urandom(24 * MIB)
    change("f", data)
    fd = os.open(path, os.O_RDONLY)
    try:
        before = os.fstat(fd)
        assert os.pread(fd, 4096, 0) == data[:4096]
        change("f", b"another")
        for _ in range(2):
            with pytest.raises(OSError) as caught:
                os.pread(fd, 4096, 20 * MIB)
            assert caught.value.errno == errno.ESTALE
            assert shown(os.fstat(fd)) == shown(before)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(fd, 4096, 0) == data[:4096]
        assert path.read_bytes() == b"another"
    finally:
        os.close(fd)


@pytest.mark.parametrize("mode", [pytest.param("durable", marks=pytest.mark.long), "writeback"])
def test_a_file_that_is_replaced_again_and_again(writable: Callable[..., Mount], mode: str) -> None:
    seen = replace(writable(mode, ram="16M").path / "f", 3 if LEVEL == "short" else 6)
    assert set(seen) == {"replace ok", "read ok"}, seen
    assert min(seen.values()) > 5, seen


@both_modes
def test_a_working_directory_in_a_directory_that_is_renamed(
    writable: Callable[..., Mount], mode: str
) -> None:
    """A program of its own, because the working directory is the process's."""
    mount = writable(mode)
    (mount.path / "d/e").mkdir(parents=True)
    (mount.path / "d/e/f").write_bytes(b"here")
    code = """
import os, sys
root = sys.argv[1]
os.chdir(root + "/d/e")
fd, reader = os.open(".", os.O_RDONLY), os.open("f", os.O_RDONLY)
number = os.fstat(fd).st_ino
assert os.listdir(fd) == ["f"]
at = "d"
for to in "moved", "again", "d":
    os.rename(f"{root}/{at}", f"{root}/{to}")
    at = to
    open(f"new-{to}", "w").write(to)
    os.mkdir(f"made-{to}")
    open(f"made-{to}/in", "w").write(to)
    os.rename("f", "g")
    os.rename("g", "f")
    expected = sorted(os.listdir(f"{root}/{to}/e"))
    assert {"f", f"new-{to}", f"made-{to}"} <= set(expected), expected
    assert sorted(os.listdir(".")) == expected == sorted(os.listdir(fd))
    assert os.stat(".").st_ino == os.fstat(fd).st_ino == os.stat(f"{root}/{to}/e").st_ino == number
    assert os.stat(f"new-{to}").st_size == len(to) and os.stat("f", dir_fd=fd).st_size == 4
    assert open(f"{root}/{to}/e/made-{to}/in").read() == to
    assert os.pread(reader, 10, 0) == b"here" and os.fstat(reader).st_size == 4
    assert os.getcwd() == f"{root}/{to}/e"
os.chdir(root)
fd = os.open("d/e/made-d", os.O_RDONLY)
os.unlink("d/e/made-d/in")
os.rmdir("d/e/made-d")
assert os.listdir(fd) == [] and os.fstat(fd).st_nlink == 0
"""
    in_python(code, mount.path)
    if mode == "writeback":
        assert mount.cli("flush", mount.path).returncode == 0


@both_modes
def test_a_working_directory_that_is_removed_and_made_again(
    writable: Callable[..., Mount], tmp_path: Path, mode: str
) -> None:
    """As on a local disk: the old one is empty and takes nothing, the new one is another."""
    code = """
import errno, os, sys
root = sys.argv[1]

def tried(what):
    try:
        return what()
    except OSError as exc:
        return errno.errorcode[exc.errno]

def seen():
    here = os.stat(".")
    yield here.st_nlink, here.st_ino == number, os.listdir(".")
    yield tried(lambda: os.chmod(".", 0o700))
    yield tried(lambda: os.stat("x"))
    yield tried(lambda: os.close(os.open("x", os.O_CREAT | os.O_WRONLY)))
    yield tried(lambda: os.mkdir("y"))
    yield tried(lambda: os.listdir(root + "/d"))

os.mkdir(root + "/d")
os.chdir(root + "/d")
number = os.stat(".").st_ino
open("f", "w").close()
os.unlink("f")
os.rmdir(root + "/d")
print(*seen())
os.mkdir(root + "/d")
print(*seen())
open(root + "/d/new", "w").close()
print(*seen())
os.unlink(root + "/d/new")
os.rmdir(root + "/d")
print(*seen())
os.mkdir(root + "/d")
os.chdir(root + "/d")
number = os.stat(".").st_ino
os.mkdir(root + "/e")
open(root + "/e/old", "w").close()
os.rename(root + "/e", root + "/d")
print(*seen())
"""
    (local := tmp_path / "local").mkdir()
    expected = in_python(code, local)
    assert "(0, True, [])" in expected and "['new']" in expected and "['old']" in expected
    assert in_python(code, writable(mode).path) == expected


@both_modes
def test_what_is_read_in_a_directory_that_is_renamed_to_and_fro(
    writable: Callable[..., Mount], mode: str
) -> None:
    """The kernel keeps pages of what was read there before."""
    root = writable(mode).path
    (root / "d").mkdir()
    (root / "d").rename(root / "e")
    (root / "e" / "f").write_bytes(b"first")
    assert (root / "e" / "f").read_bytes() == b"first"
    (root / "e").rename(root / "d")
    (root / "d" / "f").unlink()
    (root / "d" / "f").write_bytes(b"other")
    (root / "d").rename(root / "e")
    assert (root / "e" / "f").read_bytes() == b"other"
