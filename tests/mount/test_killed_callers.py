"""A process that is killed takes its request back, also when the daemon is just about to read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mount.conftest import BOTH_BACKENDS, Bucket, Mounted

pytestmark = BOTH_BACKENDS

READS_TOO_EARLY = """
import os
import trio

wait = trio.lowlevel.wait_readable
early = False

async def wait_readable(fd):
    global early
    if os.readlink(f"/proc/self/fd/{fd}") == "/dev/fuse":
        early = not early and os.path.exists(os.environ["TEST_TOO_EARLY"])
        if early:
            return
    await wait(fd)

trio.lowlevel.wait_readable = wait_readable
"""


@pytest.mark.long
def test_the_daemon_goes_on_when_there_is_nothing_to_read(
    mounted: Mounted, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the daemon waited for is gone when it reads: every other read of /dev/fuse comes before a request."""
    early = tmp_path / "early"
    (tmp_path / "sitecustomize.py").write_text(READS_TOO_EARLY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TEST_TOO_EARLY", str(early))
    bucket.put("f", 10)
    mount = mounted(bucket)
    early.touch()
    for number in range(4):
        assert not (mount.path / f"no{number}").exists()  # every other one is the last for a while
        assert mount.cli("status", mount.path, timeout=20).returncode == 0
    early.unlink()
