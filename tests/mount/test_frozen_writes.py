"""The cache's disk is frozen while processes write, of every kind: those wait for it, and nobody else does. What was
acknowledged is there afterwards, also when the daemon was killed meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bench.lab.client import LabStore
from tests.mount import forked
from tests.mount.conftest import BOTH_BACKENDS, Bucket, Mounted
from tests.mount.frozen import Disk
from tests.mount.mounts import Mount, alive, eventually, mounts_at
from tests.mount.written import keys, stored

pytestmark = [pytest.mark.root, BOTH_BACKENDS]

KIB, MIB = 1 << 10, 1 << 20

BOUND_S = 6.0
"""What a process that has nothing to do with the frozen disk may wait."""

FROZEN_S = 8.0
"""Longer than it takes until the disk is known to hang."""

CHANGES = {
    "create": "os.close(os.open('new/empty', os.O_CREAT | os.O_WRONLY, 0o644))",
    "create, mode": "os.close(os.open('new/script', os.O_CREAT | os.O_WRONLY, 0o755))",
    "save small": "open('new/small', 'wb').write(b's' * 4096)",
    "save medium": "open('new/medium', 'wb').write(b'm' * 100_000)",
    "save large": "open('new/large', 'wb').write(b'l' * 3_000_000)",
    "overwrite": "open('overwritten', 'wb').write(b'o' * 100_000)",
    "append": "open('appended', 'ab').write(b'a' * 100_000)",
    "fsync": "f = open('new/synced', 'wb'); f.write(b'f' * 100_000); f.flush(); os.fsync(f.fileno()); f.close()",
    "truncate": "os.truncate('cut', 1000)",
    "rename": "os.rename('renamed', 'new/renamed')",
    "rename, written here": "os.rename('own', 'new/own')",
    "replace": "os.rename('winner', 'loser')",
    "unlink": "os.unlink('gone')",
    "unlink, written here": "os.unlink('own, too')",
    "chmod": "os.chmod('mode', 0o700)",
    "utime": "os.utime('time', (10, 10))",
    "mkdir": "os.mkdir('made', 0o755)",
    "rename, directory": "os.rename('old', 'moved')",
}
"""What each writer does in the mount's root while the disk is frozen."""

GIVES_UP = {"chmod", "utime", "unlink, written here", "rename, written here", "rename, directory"}
"""These may end with EIO: others wait for the directory that they change, or the name."""

HOLD = "f.write(b'b' * 300_000); f.flush(); print('open', flush=True); sys.stdin.read()"
OPEN = {
    "close": f"f = open('open', 'wb'); {HOLD}; f.close()",
    "close, removed": f"f = open('open, gone', 'wb'); {HOLD.replace('print', 'os.unlink(f.name); print')}; f.close()",
    "write, close": f"f = open('open, too', 'wb'); {HOLD}; f.write(b'c' * 300_000); f.close()",
}
"""What is open when the disk freezes, and is written and closed then."""

THERE = [
    "overwritten",
    "appended",
    "cut",
    "renamed",
    "winner",
    "loser",
    "gone",
    "mode",
    "time",
    "old/a",
    "old/b",
]

LOOK = """
import os, sys, time
longest, what = 0.0, ""
for name in sys.argv[2:]:
    for call in (os.stat, os.statvfs, os.path.exists, lambda path: open(path, 'rb').read()):
        began = time.monotonic()
        call(os.path.join(sys.argv[1], name))
        if time.monotonic() - began > longest:
            longest, what = time.monotonic() - began, name
began = time.monotonic()
assert len(os.listdir(sys.argv[1])) >= 10
print(max(longest, time.monotonic() - began), what)
"""


def start(mounted: Mounted, bucket: Bucket, disk: Disk, **options: Any) -> Mount:
    for name in THERE:
        bucket.put(name, 5000)
    bucket.put("new/there", 10)
    for number in range(60):
        bucket.put(f"others/{number:02d}", 20_000)
    mount = mounted(
        bucket,
        **{"cache_dir": disk.path / "cache", "log_file": disk.path / "log", "cache_size": "128M"},
        **{"read_only": False, "timeout": 60, "flush_deadline": 5, **options},
    )
    (mount.path / "own").write_bytes(b"w" * 200_000)
    (mount.path / "own, too").write_bytes(b"w" * 200_000)
    (mount.path / "others/00").read_bytes()
    for name in THERE:
        (mount.path / name).stat()
    return mount


@contextmanager
def writers(mount: Mount, changes: dict[str, str]) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """A process for each change; they are ended, which the disk must allow."""
    code = "import os, sys; os.chdir(sys.argv[1]); "
    running = {
        name: forked.Popen(
            [sys.executable, "-c", code + change, str(mount.path)],
            **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE),
            text=True,
        )
        for name, change in changes.items()
    }
    try:
        yield running
    finally:
        for process in running.values():
            if process.poll() is None:
                process.kill()
            process.wait(timeout=30)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def ended(process: subprocess.Popen[str]) -> str:
    """What it has said."""
    process.wait(60)
    assert process.stderr is not None
    return process.stderr.read()


def look(mount: Mount, disk: Disk, seconds: float) -> None:
    """Others read, list and stat for so long, each within the bound."""
    until, numbers, worst = time.monotonic() + seconds, iter(range(1, 60)), (0.0, "")
    while time.monotonic() < until:
        names = [f"others/{next(numbers, 0):02d}", "others/00", "new/there"]
        process = forked.Popen(
            [sys.executable, "-c", LOOK, str(mount.path), *names], stdout=subprocess.PIPE, text=True
        )
        try:
            printed, _ = process.communicate(timeout=BOUND_S + 10)
        except subprocess.TimeoutExpired:
            disk.thaw()  # it cannot be killed before
            process.kill()
            process.communicate(timeout=30)
            raise AssertionError("others wait for the frozen disk") from None
        assert process.returncode == 0
        worst = max(worst, (float(printed.split()[0]), printed.split()[1:]))
    assert worst[0] <= BOUND_S, worst


MODES = [{}, {"writeback": True, "upload_delay": "10ms"}]


@pytest.mark.long
@pytest.mark.parametrize(
    "options", [pytest.param(MODES[0], marks=pytest.mark.long), MODES[1]], ids=["durable", "writeback"]
)
def test_only_who_needs_the_disk_waits_for_it(
    disk: Disk, mounted: Mounted, bucket: Bucket, lab: LabStore, options: dict[str, Any]
) -> None:
    mount = start(mounted, bucket, disk, **options)
    mount.allowed += ["is down", "answers again", "trying again"]
    with writers(mount, OPEN) as before:
        for process in before.values():
            assert process.stdout is not None and process.stdout.readline() == "open\n"
        try:
            disk.freeze()
            with writers(mount, CHANGES) as running:
                for process in before.values():
                    assert process.stdin is not None
                    process.stdin.close()
                look(mount, disk, FROZEN_S)
                pause = mount.ask("status")["loop_pause_s"]["run"]
                disk.thaw()
                failed = set()
                for name, process in {**running, **before}.items():
                    said = ended(process)
                    if process.returncode:
                        assert "[Errno 5]" in said and name in GIVES_UP, f"{name}: {said}"
                        failed.add(name)
        finally:
            disk.thaw()
    assert pause < 3, f"the loop stood still for {pause:.1f} s"
    assert mount.cli("flush", mount.path).returncode == 0
    root = mount.path
    moved = "old" if "rename, directory" in failed else "moved"
    wanted = {
        "new/empty": b"",
        "new/script": b"",
        "new/small": b"s" * 4096,
        "new/medium": b"m" * 100_000,
        "new/large": b"l" * 3_000_000,
        "new/synced": b"f" * 100_000,
        "own" if "rename, written here" in failed else "new/own": b"w" * 200_000,
        "new/renamed": bucket.objects["renamed"],
        "overwritten": b"o" * 100_000,
        "appended": bucket.objects["appended"] + b"a" * 100_000,
        "cut": bucket.objects["cut"][:1000],
        "loser": bucket.objects["winner"],
        f"{moved}/a": bucket.objects["old/a"],
        f"{moved}/b": bucket.objects["old/b"],
        "open": b"b" * 300_000,
        "open, too": b"b" * 300_000 + b"c" * 300_000,
    }
    for name, data in wanted.items():
        assert (root / name).read_bytes() == data, name
        assert stored(bucket, name) == data, name
    went = {"renamed", "own", "own, too", "winner", "gone", "old", "open, gone"} - set(wanted) - {moved}
    for name in went:
        assert not (root / name).exists(), name
    # What was given up happens all the same, once the disk answers.
    assert (root / "mode").stat().st_mode & 0o777 == 0o700
    assert (root / "new/script").stat().st_mode & 0o777 == 0o755
    assert (root / "time").stat().st_mtime == 10
    assert (root / "made").is_dir()
    eventually(lambda: all(t["state"] == "normal" for t in mount.ask("status")["tiers"]), "it answers", 60)


@pytest.mark.long
@pytest.mark.parametrize("options", MODES, ids=["durable", "writeback"])
def test_a_kill_while_the_disk_is_frozen_loses_nothing_acknowledged(
    disk: Disk, mounted: Mounted, bucket: Bucket, lab: LabStore, options: dict[str, Any]
) -> None:
    mount = start(mounted, bucket, disk, **options)
    mount.allowed += ["is down", "answers again", "trying again", "was not closed", "took away"]
    (mount.path / "before").write_bytes(b"p" * 100_000)
    (mount.path / "mode").chmod(0o711)
    try:
        disk.freeze()
        with writers(mount, CHANGES) as running:
            look(mount, disk, 2)
            acknowledged = {name for name, process in running.items() if process.poll() == 0}
            mount.killed = True
            mount.allowed.append("took away a dead mount")
            os.kill(mount.pid, signal.SIGKILL)
            time.sleep(0.5)
            disk.thaw()
            eventually(lambda: not alive(mount.pid), "the killed daemon is gone", 60)
    finally:
        disk.thaw()
    lab.clear_faults()
    mount.start()
    root = mount.path
    assert (root / "before").read_bytes() == b"p" * 100_000
    assert (root / "mode").stat().st_mode & 0o777 in (0o711, 0o700)
    if "save small" in acknowledged:
        assert (root / "new/small").read_bytes() == b"s" * 4096
    if "save medium" in acknowledged:
        assert (root / "new/medium").read_bytes() == b"m" * 100_000
    if "fsync" in acknowledged:
        assert (root / "new/synced").read_bytes() == b"f" * 100_000
    if "rename, written here" in acknowledged:
        assert (root / "new/own").read_bytes() == b"w" * 200_000 and not (root / "own").exists()
    if "unlink" in acknowledged:
        assert not (root / "gone").exists()
    if "chmod" in acknowledged:
        assert (root / "mode").stat().st_mode & 0o777 == 0o700
    assert mount.cli("flush", mount.path).returncode == 0
    assert stored(bucket, "before") == b"p" * 100_000


@pytest.mark.long
def test_a_stop_does_not_wait_for_what_is_written(disk: Disk, mounted: Mounted, bucket: Bucket) -> None:
    mount = start(mounted, bucket, disk, writeback=True)
    try:
        disk.freeze()
        with writers(mount, CHANGES):
            time.sleep(1)
            os.kill(mount.pid, signal.SIGTERM)
            began = time.monotonic()
            eventually(lambda: not mounts_at(mount.path), "the mount is gone", 60)
            assert time.monotonic() - began < 45
            disk.thaw()
    finally:
        disk.thaw()
    mount.killed = True
    mount.allowed += ["stopped without closing cleanly"]
    eventually(lambda: not alive(mount.pid), "the daemon ends once its disk answers", 60)


@pytest.mark.long
def test_what_was_acknowledged_is_read_and_sent_from_a_disk_that_takes_no_writes(
    disk: Disk, mounted: Mounted, bucket: Bucket
) -> None:
    mount = mounted(
        bucket,
        **{"cache_dir": disk.path / "cache", "read_only": False, "cache_size": "64M"},
        **{"writeback": True, "upload_delay": "2s"},
    )
    mount.allowed += ["Read-only file system", "cache tier"]
    data = {f"file{number}": bytes([number + 65]) * 200_000 for number in range(4)}
    for name, content in data.items():
        (mount.path / name).write_bytes(content)
    disk.fail()
    with pytest.raises(OSError, match="Input/output"):
        (mount.path / "later").write_bytes(b"x" * 200_000)
    for name, content in data.items():
        assert (mount.path / name).read_bytes() == content
    eventually(lambda: set(data) <= set(keys(bucket)), "all are at the origin", 30)
    assert {name: stored(bucket, name) for name in data} == data
