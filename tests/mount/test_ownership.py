"""Who can read what a mount keeps, and what of it another user may ask for."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, in_python
from tests.mount.test_refusals import refused

DATABASES = {"index", "names", "journal"}
"""What LMDB makes in there is held by the tests of the database."""


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def open_to_others(directory: Path) -> list[str]:
    found = []
    for place, folders, files in os.walk(directory):
        for path in (Path(place), *(Path(place, name) for name in files)):
            inside = set(path.relative_to(directory).parts) & DATABASES
            if not inside and path.lstat().st_mode & 0o077 and not stat.S_ISLNK(path.lstat().st_mode):
                found.append(f"{path.lstat().st_mode:o} {path}")
        folders.sort()
    return found


@ONE_BACKEND
def test_all_that_is_kept_is_for_its_owner(mounted: Mounted, bucket: Bucket, no_umask: None) -> None:
    """Whatever the umask, and whatever existed."""
    data = bucket.put("d/file", 3 << 20)
    mount = mounted(
        bucket, start=False, read_only=False, writeback=True, upload_delay="1h", log_file=None, ram="0"
    )
    mount.log_file = mount.cache / "cachefs.log"
    for name in ("objects", "staging", "plans"):
        (mount.cache / name).mkdir(mode=0o755, parents=True)
    for name in ("cachefs.log", "held", "node"):
        (mount.cache / name).touch(0o644)
    mount.start()
    assert (mount.path / "d/file").read_bytes() == data
    (mount.path / "new").write_bytes(bytes(1 << 20))
    assert any((mount.cache / "staging").iterdir())
    assert open_to_others(mount.cache) == []
    assert mount.cli("flush", mount.path).returncode == 0
    mount.stop()
    assert open_to_others(mount.cache) == []
    assert (mount.cache / "held").stat().st_size and mount.log_file.stat().st_size


@ONE_BACKEND
@pytest.mark.root
def test_the_cache_of_another_user_is_refused(mounted: Mounted, bucket: Bucket) -> None:
    mount = mounted(bucket, start=False, log_file=None)
    mount.cache.mkdir()
    victim = mount.place / "victim"
    for name in ("cachefs.log", "held", "tag"):
        (mount.cache / name).symlink_to(victim)
    os.chown(mount.cache, 65534, 65534)
    assert "belongs to user nobody" in refused(mount)
    assert "belongs to user nobody" in refused(mount, words=mount.arguments(foreground=True))
    assert not victim.exists()


@ONE_BACKEND
@pytest.mark.root
def test_what_another_user_left_in_the_cache_is_refused(mounted: Mounted, bucket: Bucket) -> None:
    """It was there before the directory was closed to others."""
    data = bucket.put("file", 10)
    mount = mounted(bucket, start=False, log_file=None)
    victim = mount.place / "victim"
    mount.cache.mkdir(0o700)
    for name in ("cachefs.log", "objects"):
        (mount.cache / name).symlink_to(victim)
        os.lchown(mount.cache / name, 65534, 65534)
        line = f"{mount.cache / name} belongs to user nobody, and this is user root: chown or remove it"
        assert line in refused(mount)
        assert line in refused(mount, words=mount.arguments(foreground=True))
        assert not victim.exists()
        (mount.cache / name).unlink()
    mount.start()
    assert (mount.path / "file").read_bytes() == data


@pytest.mark.root
def test_other_users_cannot_make_it_list_again(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("d/file", 10)
    mount = mounted(bucket, allow_other=True)
    for above in mount.path.parents:
        if above.stat().st_uid == os.getuid() and Path(tempfile.gettempdir()) in above.parents:
            above.chmod(0o755)
    os.listdir(mount.path / "d")
    bucket.store.reset()
    attempt = (
        "import os, sys; os.setgid(65534); os.setuid(65534)\n"
        "assert os.listdir(sys.argv[1]) == ['file']\n"
        "for name in (sys.argv[1], sys.argv[1] + '/file'):\n"
        "    try: os.getxattr(name, 'user.cachefs.refresh'); print(0)\n"
        "    except OSError as exc: print(exc.errno)\n"
    )
    assert in_python(attempt, mount.path / "d").split() == [str(errno.EPERM)] * 2
    assert os.listdir(mount.path / "d") == ["file"] and bucket.store.requests() == []
    assert os.getxattr(mount.path / "d", "user.cachefs.refresh") == b"looking again"


@ONE_BACKEND
def test_names_reach_no_terminal_through_the_log(mounted: Mounted, bucket: Bucket) -> None:
    """And a read that fails as often as a user likes is logged once."""
    mount: Mount = mounted(bucket, timeout=2)
    name = "evil\x1b[31m"
    bucket.put(name, 10)
    mount.allowed.append("evil")
    bucket.store.fault("403", kind="get")
    for _ in range(5):
        with pytest.raises(OSError):
            (mount.path / name).read_bytes()
    lines = [line for line in mount.log().splitlines() if "evil" in line]
    assert len(lines) == 1 and "\x1b" not in mount.log() and r"evil\x1b[31m" in lines[0]
