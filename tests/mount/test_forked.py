"""Commands that are forked are as those that are run."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.mount import forked
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import COMMAND, mounts_at, plain_environment

pytestmark = [ONE_BACKEND, pytest.mark.skipif(forked.EXEC, reason="here nothing is forked")]


@pytest.mark.parametrize(
    "words", [["version"], ["status", "nowhere"], ["mount", "--print-config", "s3://b", "."]]
)
def test_it_says_and_returns_the_same(tmp_path: Path, words: list[str]) -> None:
    env = {**plain_environment(), "CACHEFS_CACHE_SIZE": "7G", "CACHEFS_CACHE_DIR": str(tmp_path / "cache")}
    command = [*COMMAND, *words]
    mine = forked.run(command, 60, env=env, cwd=tmp_path, text=True)
    theirs = subprocess.run(command, capture_output=True, env=env, cwd=tmp_path, text=True, timeout=60)
    assert (mine.returncode, mine.stdout, mine.stderr) == (theirs.returncode, theirs.stdout, theirs.stderr)


def test_a_daemon_has_its_own_command_line_session_and_descriptors(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", b"1")
    mount = mounted(bucket)
    process = Path(f"/proc/{mount.pid}")
    words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert words[1:6] == [b"-P", b"-m", b"cachefs", b"mount", b"-f"] and words[-1] == os.fsencode(mount.path)
    assert os.getsid(mount.pid) == mount.pid
    links = {int(fd.name): os.readlink(fd) for fd in (process / "fd").iterdir()}
    assert links[0] == "/dev/null" and links[1] == links[2] == str(mount.log_file)


def test_one_that_is_killed_is_told_of(mounted: Mounted, bucket: Bucket) -> None:
    mount = mounted(bucket, start=False)
    with mount.in_foreground() as process:
        assert mounts_at(mount.path) and process.poll() is None
        mount.kill()
        assert process.wait(30) == -9
