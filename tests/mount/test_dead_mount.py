"""A daemon that a failure ends leaves a dead mount, and no directory that takes what others write."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from tests.mount.conftest import BOTH_BACKENDS, Bucket, Mounted
from tests.mount.mounts import eventually, mounts_at

FAILING = """
import sys
from cachefs.cli.main import main
from cachefs.daemon import daemon

async def fail(self, signals, stop):
    async for number in signals:
        raise RuntimeError("a bug in one of the daemon's own services")

daemon.Daemon._stop_on_signal = fail
sys.argv[0] = "cachefs"
sys.exit(main())
"""
"""The daemon, in which the first signal ends a service of its own with an exception."""


@BOTH_BACKENDS
def test_a_daemon_that_a_failure_ends_leaves_no_bare_directory(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("before", b"1" * 1000)
    mount = mounted(bucket, start=False, read_only=None)
    process = subprocess.Popen(
        [sys.executable, "-c", FAILING, *mount.arguments(foreground=True)],
        env=mount.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        eventually(lambda: "mounted" in mount.log() or process.poll() is not None, "the mount")
        mount.pids.append(process.pid)
        (mount.path / "written").write_bytes(b"2" * 1000)
        process.send_signal(signal.SIGHUP)
        said, _ = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    mount.killed = True
    mount.allowed += [
        "a bug in one of",
        "a failure ends this daemon",
        "Traceback",
        "Group",
        "took away a dead",
    ]
    assert process.returncode == 1, said
    assert len(mounts_at(mount.path)) == 1 and "a failure ends this daemon" in mount.log()
    for work in (
        lambda: os.listdir(mount.path),
        lambda: (mount.path / "before").read_bytes(),
        lambda: (mount.path / "lost").write_bytes(b"3"),
        lambda: os.mkdir(mount.path / "directory"),
    ):
        with pytest.raises(OSError) as caught:
            work()
        assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    mount.start()
    names = sorted(path.name for path in mount.path.iterdir())
    assert names == ["before", "written"]
    assert (mount.path / "written").read_bytes() == b"2" * 1000
    mount.stop()
    assert not mounts_at(mount.path) and os.listdir(mount.path) == []
