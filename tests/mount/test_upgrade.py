"""A daemon meets what another version has left in its cache directory, and takes nothing for what it is not; and what
programs see while one takes the place of another."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, alive, eventually, mounts_at
from tests.mount.test_passthrough import becomes_passthrough
from tests.mount.written import stored

pytestmark = ONE_BACKEND

MIB = 1 << 20


def everything(place: Path) -> dict[str, str]:
    """Relative path → digest, of all that lies there but for the log and locks."""
    return {
        str(path.relative_to(place)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in place.rglob("*")
        if path.is_file() and path.suffix not in (".pid", ".log")
    }


def mark(mount: Mount, name: str, version: str) -> str:
    """Mark a database as one of another version, which was closed. Returns the mark that it had."""
    found = list(mount.cache.glob(f"{name}/version"))
    assert len(found) == 1, list(mount.cache.iterdir())
    before = found[0].read_text()
    found[0].write_text(version if "\n" in version else f"{version}\nclosed 0\n")
    return before


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "versions"),
    [("index", ("blocks-1-1048576", "blocks-99-1048576")), ("names", ("names 1", "names 99"))],
)
def test_a_cache_of_another_format_is_dropped_with_a_line(
    mounted: Mounted, bucket: Bucket, name: str, versions: tuple[str, str]
) -> None:
    data = bucket.put("d/file", 2 * MIB)
    mount = mounted(bucket, ram="0")
    mount.allowed += ["dropping the database", "the cache starts empty"]
    assert (mount.path / "d/file").read_bytes() == data
    for number, version in enumerate(versions, 1):
        mount.stop()
        mark(mount, name, version)
        mount.start()
        with mount.counting() as counted:
            assert (mount.path / "d/file").read_bytes() == data
        assert (counted.get("origin_bytes", 0) > 0) is (name == "index")
        lines = [line for line in mount.log().splitlines() if "dropping the database" in line]
        assert len(lines) == number and f"its format is {version}" in lines[-1]
        mount.stop()
        mount.start()  # and it is of ours now
        assert mount.log().count("dropping the database") == number


@pytest.mark.parametrize("version", ["journal-99", "journal-0"])
def test_uploads_that_another_version_has_noted_are_not_touched(
    mounted: Mounted, bucket: Bucket, version: str
) -> None:
    bucket.put("old", MIB)
    mount = mounted(
        bucket, read_only=False, writeback=True, upload_delay="1h", ram="0", flush_deadline="1s", start=False
    ).start()
    mount.allowed += ["not at the origin", "of an earlier mount"]
    (mount.path / "old").read_bytes()
    (mount.path / "written").write_bytes(b"precious")
    mount.kill()
    journal = mark(mount, "journal", version)
    index = mark(mount, "index", "blocks-99-1048576")  # as a later version would have it
    before = everything(mount.cache)
    done = mount.try_start()
    lines = [line for line in done.stderr.splitlines() if "took away a dead mount" not in line]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert (
        f"in the format {version!r}" in lines[0] and "start the version of cachefs that wrote it" in lines[0]
    )
    assert everything(mount.cache) == before
    mark(mount, "journal", journal)
    mark(mount, "index", index)
    mount.start()
    assert (mount.path / "written").read_bytes() == b"precious"
    assert mount.cli("flush", mount.path).returncode == 0
    assert stored(bucket, "written") == b"precious"
    assert len(mounts_at(mount.path)) == 1


@pytest.mark.long
@pytest.mark.backends("native")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "stopped"])
def test_what_programs_see_of_a_restart(mounted: Mounted, bucket: Bucket, how: signal.Signals) -> None:
    """What the kernel reads by itself goes on; all else that is open is dead, and who opens again reads on."""
    passthrough, other = bucket.put("whole", 2 * MIB), bucket.put("other", 9 * MIB)
    mount = mounted(bucket, ram="0")
    mount.allowed.append("took away a dead mount")
    (mount.path / "whole").read_bytes()
    becomes_passthrough(mount, mount.path / "whole")
    with ExitStack() as stack:
        opened = {name: stack.enter_context((mount.path / name).open("rb", 0)) for name in ("whole", "other")}
        mapping = stack.enter_context(mmap.mmap(opened["whole"].fileno(), 0, prot=mmap.PROT_READ))
        folder = os.open(mount.path, os.O_RDONLY)
        stack.callback(os.close, folder)
        os.pread(opened["other"].fileno(), 10, 0)

        def held() -> None:
            assert os.pread(opened["whole"].fileno(), 2 * MIB, 0) == passthrough and mapping[:] == passthrough
            for ask in (lambda: os.pread(opened["other"].fileno(), 10, 8 * MIB), lambda: os.listdir(folder)):
                with pytest.raises(OSError) as caught:
                    ask()
                assert caught.value.errno == errno.ENOTCONN

        os.kill(mount.pid, how)
        eventually(lambda: not alive(mount.pid), "the daemon has ended", 20)
        mount.killed = how == signal.SIGKILL
        held()
        if how == signal.SIGKILL:  # the dead mount stays, so that nobody takes what is below it for the data
            with pytest.raises(OSError) as caught:
                (mount.path / "whole").open("rb")
            assert caught.value.errno == errno.ENOTCONN
        else:
            assert os.listdir(mount.path) == []
        mount.start()
        held()
        with mount.counting() as counted:
            assert (mount.path / "whole").read_bytes() == passthrough
        if how == signal.SIGTERM:  # a kill may cost what the index was not told yet
            assert "origin_bytes" not in counted
        assert (mount.path / "other").read_bytes() == other
