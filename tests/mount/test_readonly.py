"""Nothing can be written, and what the attributes say."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import BACKEND_CONTRACT, Bucket, Mounted
from tests.mount.mounts import Mount, run, succeed

pytestmark = BACKEND_CONTRACT


@pytest.fixture(scope="module")
def shared(module_mounted: Mounted, module_bucket: Bucket) -> Iterator[Mount]:
    for key in ("file", "other", "d/file"):
        module_bucket.put(key, 5000)
    mount = module_mounted(module_bucket, uid=1234, gid=2345, file_mode="640", dir_mode="750")
    yield mount


def _open(flags: int, name: str = "file") -> Callable[[Path], object]:
    return lambda place: os.open(place / name, flags)


WRITES: dict[str, Callable[[Path], object]] = {
    "open O_WRONLY": _open(os.O_WRONLY),
    "open O_RDWR": _open(os.O_RDWR),
    "open O_TRUNC": _open(os.O_WRONLY | os.O_TRUNC),
    "open O_APPEND": _open(os.O_WRONLY | os.O_APPEND),
    "open O_CREAT of a new name": _open(os.O_WRONLY | os.O_CREAT, "new"),
    "open O_CREAT of a new name, to read": _open(os.O_RDONLY | os.O_CREAT, "new"),
    "open O_CREAT|O_EXCL of a new name": _open(os.O_WRONLY | os.O_CREAT | os.O_EXCL, "new"),
    "open O_TMPFILE": lambda place: os.open(place / "d", os.O_TMPFILE | os.O_RDWR),
    "mkdir": lambda place: os.mkdir(place / "new"),
    "rmdir": lambda place: os.rmdir(place / "d"),
    "unlink": lambda place: os.unlink(place / "file"),
    "rename": lambda place: os.rename(place / "file", place / "new"),
    "rename over": lambda place: os.rename(place / "file", place / "other"),
    "truncate": lambda place: os.truncate(place / "file", 0),
    "chmod": lambda place: os.chmod(place / "file", 0o600),
    "chown": lambda place: os.chown(place / "file", 1, 1),
    "utime": lambda place: os.utime(place / "file", (1, 1)),
    "touch": lambda place: os.utime(place / "file"),
    "symlink": lambda place: os.symlink("file", place / "new"),
    "link": lambda place: os.link(place / "file", place / "new"),
    "mknod": lambda place: os.mknod(place / "new", stat.S_IFREG | 0o644),
    "mkfifo": lambda place: os.mkfifo(place / "new"),
    "setxattr": lambda place: os.setxattr(place / "file", "user.mine", b"x"),
    "setxattr of ours": lambda place: os.setxattr(place / "file", "user.cachefs.etag", b"x"),
    "removexattr": lambda place: os.removexattr(place / "file", "user.cachefs.etag"),
}


class TestWriting:
    @pytest.mark.root
    @pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
    def test_every_write_is_refused_as_read_only(
        self, shared: Mount, write: Callable[[Path], object]
    ) -> None:
        with pytest.raises(OSError) as caught:
            write(shared.path)
        allowed = {errno.EROFS}
        if write is WRITES["open O_TMPFILE"]:
            allowed.add(errno.EOPNOTSUPP)
        assert caught.value.errno in allowed, caught.value

    def test_nothing_is_changed_by_trying(self, shared: Mount, module_bucket: Bucket) -> None:
        for command in (
            "touch new",
            "rm -f file",
            "echo x > file",
            "mkdir -p d/new",
            "mv d e",
            "cp file new",
        ):
            assert run(["sh", "-c", command], cwd=shared.path).returncode != 0
        found = succeed(["find", ".", "-type", "f"], cwd=shared.path).split()
        assert sorted(found) == ["./d/file", "./file", "./other"]
        assert (shared.path / "file").read_bytes() == module_bucket.objects["file"]

    def test_a_read_only_descriptor_cannot_be_written(self, shared: Mount) -> None:
        with open(shared.path / "file", "rb") as file:
            with pytest.raises(OSError):
                os.write(file.fileno(), b"x")
            with pytest.raises(OSError):
                os.ftruncate(file.fileno(), 0)
            os.fsync(file.fileno())

    def test_creating_what_exists_says_so(self, shared: Mount) -> None:
        with pytest.raises(OSError) as caught:
            os.mkdir(shared.path / "d")
        assert caught.value.errno in (errno.EEXIST, errno.EROFS)
        with pytest.raises(FileExistsError):
            os.open(shared.path / "file", os.O_CREAT | os.O_EXCL | os.O_WRONLY)


class TestAttributes:
    def test_owner_and_modes_are_as_asked(self, shared: Mount) -> None:
        shown = os.stat(shared.path / "file")
        assert (shown.st_uid, shown.st_gid, stat.S_IMODE(shown.st_mode)) == (1234, 2345, 0o640)
        shown = os.stat(shared.path / "d")
        assert (shown.st_uid, shown.st_gid, stat.S_IMODE(shown.st_mode)) == (1234, 2345, 0o750)
        shown = os.stat(shared.path)
        assert (shown.st_uid, shown.st_gid, stat.S_IMODE(shown.st_mode)) == (1234, 2345, 0o750)

    def test_times_are_those_of_the_object(self, shared: Mount) -> None:
        shown = os.stat(shared.path / "file")
        assert abs(shown.st_mtime - time.time()) < 600
        assert shown.st_size == 5000
        assert shown.st_blocks == 10

    @pytest.mark.root
    def test_access_follows_the_modes(self, shared: Mount) -> None:
        assert os.access(shared.path / "file", os.R_OK)
        assert not os.access(shared.path / "file", os.X_OK)
        assert os.access(shared.path / "d", os.R_OK | os.X_OK)

    def test_an_ls_has_nothing_to_complain_about(self, shared: Mount) -> None:
        done = run(["ls", "-laR", shared.path])
        assert (done.returncode, done.stderr) == (0, "")

    def test_unknown_attributes_are_absent_and_not_missing_files(self, shared: Mount) -> None:
        for path in (shared.path, shared.path / "d", shared.path / "file"):
            for name in ("user.nothing", "user.cachefs.nothing", "security.selinux", "security.capability"):
                with pytest.raises(OSError) as caught:
                    os.getxattr(path, name)
                assert caught.value.errno in (errno.ENODATA, errno.EOPNOTSUPP), (path, name)

    def test_cached_says_how_much_is_here(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("file", 70_000)
        mount = mounted(bucket)
        path = mount.path / "file"
        assert os.getxattr(path, "user.cachefs.cached") == b"0"
        path.read_bytes()
        assert os.getxattr(path, "user.cachefs.cached") == b"70000"

    def test_attributes_name_the_object(self, shared: Mount, module_bucket: Bucket) -> None:
        path = shared.path / "d/file"
        for name in ("user.cachefs.etag", "user.cachefs.cached", "user.cachefs.key"):
            os.getxattr(path, name)
        assert os.getxattr(path, "user.cachefs.key").endswith(b"/d/file")
        assert module_bucket.name.encode() in os.getxattr(path, "user.cachefs.key")
        assert os.getxattr(path, "user.cachefs.etag").startswith(b'"')

    def test_attributes_of_a_directory_can_be_read(self, shared: Mount) -> None:
        for path in (shared.path, shared.path / "d"):
            for name in ("user.cachefs.hidden", "user.cachefs.listed", "user.cachefs.key"):
                os.getxattr(path, name)

    def test_getfattr_shows_them(self, shared: Mount) -> None:
        said = succeed(["getfattr", "-n", "user.cachefs.etag", shared.path / "file"])
        assert "user.cachefs.etag" in said

    def test_they_are_not_listed(self, shared: Mount, tmp_path: Path) -> None:
        """Who copies a file with all its attributes would leave them on the copy for ever."""
        for path in (shared.path, shared.path / "d", shared.path / "file"):
            assert os.listxattr(path) == []
        succeed(["cp", "-a", shared.path / "file", tmp_path / "copy"])
        assert os.listxattr(tmp_path / "copy") == []

    def test_a_readlink_is_refused_as_on_any_file(self, shared: Mount) -> None:
        with pytest.raises(OSError) as caught:
            os.readlink(shared.path / "file")
        assert caught.value.errno == errno.EINVAL
