"""A daemon that a failure ends leaves a dead mount, and no directory that takes what others write."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest

from cachefs.base.client import control_path
from tests.mount.conftest import BOTH_BACKENDS, ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import COMMAND, Mount, eventually, mounts_at, run

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


def is_dead(mount: Mount) -> bool:
    """Whether one dead mount is there, and takes no file."""
    with pytest.raises(OSError) as caught:
        (mount.path / "lost").write_bytes(b"3")
    return caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED) and len(mounts_at(mount.path)) == 1


@ONE_BACKEND
@pytest.mark.parametrize(
    "how",
    [
        "directory",
        *(pytest.param(how, marks=pytest.mark.long) for how in ("origin", "bucket", "port")),
        "cache",
        "socket",
    ],
)
@pytest.mark.parametrize("foreground", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_start_that_is_refused_leaves_the_dead_mount(
    mounted: Mounted, bucket: Bucket, how: str, foreground: bool
) -> None:
    """A bare directory in its place would take what programs write. With `socket` the new mount is there already."""
    data = bucket.put("file", 1000)
    other = mounted(bucket)
    mount = mounted(bucket)
    mount.kill()
    mount.allowed.append(".")
    with ExitStack() as stack:
        taken = stack.enter_context(socket.socket())
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # nothing listens there, and nothing else can
        if how == "socket":
            control_path(mount.path).unlink()
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(control_path(mount.path)))
            listener.listen()
        options: dict[str, Any] = {
            "directory": {"cache_dir": mount.path / "cache"},
            "origin": {"endpoint_url": f"http://127.0.0.1:{port}"},
            "bucket": {},
            "cache": {"cache_dir": other.cache},
            "port": {"metrics": f"127.0.0.1:{port}"},
            "socket": {},
        }[how]
        words = mount.arguments(**options, foreground=foreground)
        if how == "bucket":
            words[-2] = "s3://no-such-bucket"
        before = mounts_at(mount.path)
        done = run([*COMMAND, *words], env=mount.env)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert is_dead(mount)
        assert how == "socket" or mounts_at(mount.path) == before
    mount.start()
    assert (mount.path / "file").read_bytes() == data and len(mounts_at(mount.path)) == 1
    mount.stop()
    assert os.listdir(mount.path) == []


@ONE_BACKEND
def test_what_a_dead_mount_covered_is_covered_again(mounted: Mounted, bucket: Bucket) -> None:
    """Refusing it would uncover it."""
    bucket.put("file", 10)
    mount = mounted(bucket, start=False)
    (mount.path / "mine").write_text("mine")
    mount.start(nonempty=True)
    mount.kill()
    mount.start()
    assert os.listdir(mount.path) == ["file"]
    mount.stop()
    assert (mount.path / "mine").read_text() == "mine"
