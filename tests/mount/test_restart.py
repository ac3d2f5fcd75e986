"""A daemon that is killed and started again (`--restart`): programs wait, and read the right bytes."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import cachefs
from bench.lab.client import LabStore
from cachefs.base.linux import boot_id
from cachefs.base.logs import MAX_FILE_BYTES
from cachefs.config.config import LOG_NAME
from cachefs.daemon.background import held_by_holder
from cachefs.fuse import holder
from cachefs.fuse.handover import FORMAT
from tests.conftest import LEVEL
from tests.mount import restarting
from tests.mount.conftest import Bucket, Mounted, why_no_native_backend
from tests.mount.mounts import (
    COMMAND,
    Completed,
    Mount,
    alive,
    eventually,
    mounts_at,
    processes_with,
    run,
    state_of,
    succeed,
)
from tests.mount.written import stored

pytestmark = [
    pytest.mark.root,
    pytest.mark.backends("native"),
    pytest.mark.skipif(bool(why_no_native_backend()), reason="needs passthrough"),
]

KIB, MIB = 1 << 10, 1 << 20

SHORT = LEVEL == "short"
KILLS, WRITERS_DEATHS, UPGRADES = (2, 3, 2) if SHORT else (4, 5, 3)


def held_mount(mounted: Mounted, source: Bucket, **options: Any) -> Mount:
    mount = mounted(source, restart=True, **options)
    mount.allowed += ["the daemon has died", "was left by process"]
    return mount


def held(mount: Mount) -> dict[str, Any]:
    found: dict[str, Any] = mount.ask("status")["holder"]
    return found


def opened(pid: int) -> list[str]:
    """What the descriptors of a process lead to. It may close one while this looks."""
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.append(os.readlink(path))
    return found


def kill(mount: Mount) -> None:
    """Kill the daemon, and wait until the next one answers."""
    before = held(mount)["restarts"]
    mount.killed = True
    os.kill(mount.pid, signal.SIGKILL)
    restarting.next_daemon(mount, before, 30.0)


@pytest.mark.long
def test_the_next_daemons_write_the_same_log(mounted: Mounted, bucket: Bucket) -> None:
    """Also after it was rotated: by another daemon than the one that stood by, whose descriptor leads to the old file."""
    mount = held_mount(mounted, bucket, log_file=None)
    mount.allowed.append("logging at info")
    mount.log_file = mount.cache / LOG_NAME
    kill(mount)
    status = mount.ask("status")
    assert status["log_file"] == str(mount.log_file)
    eventually(
        lambda: mount.cli("logs", mount.path).stdout.count("mounted ") == 2, "both daemons say so in one log"
    )
    assert os.readlink(f"/proc/{status['pid']}/cwd") == "/", "it keeps no directory busy"
    standby = _next_one(mount)
    eventually(
        lambda: opened(standby).count(str(mount.log_file)) == 3,
        "it has opened the log, beside stdout and stderr",
    )
    os.truncate(mount.log_file, MAX_FILE_BYTES)
    mount.cli("log-level", "info", mount.path)
    eventually(lambda: mount.log_file.stat().st_size < MAX_FILE_BYTES, "the log is rotated")
    kill(mount)
    assert "the daemon has died" in mount.log()
    eventually(lambda: "mounted " in mount.log(), "the next daemon says so, too")
    mount.log_file.with_name(f"{LOG_NAME}.1").unlink()  # its zeros


@pytest.mark.long
def test_a_job_of_the_daemon_before_is_not_taken_for_one_of_the_next(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    """The command that follows it fails, and says so."""
    bucket.put("large", MIB)
    bucket.put("small", 10)
    mount = held_mount(mounted, bucket, prefetch="off")
    lab.fault("hang", key="large")
    with subprocess.Popen(
        [*COMMAND, "pin", mount.path / "large"], env=mount.env, stderr=subprocess.PIPE, text=True
    ) as pinning:
        eventually(lambda: [job for job in mount.ask("status")["jobs"] if job["files"]], "the job fetches")
        os.kill(pinning.pid, signal.SIGSTOP)
        kill(mount)
        assert mount.cli("evict", mount.path / "small").returncode == 0
        os.kill(pinning.pid, signal.SIGCONT)
        _, said = pinning.communicate(timeout=30)
    assert pinning.returncode == 1 and "run the command again" in said, (pinning.returncode, said)


def test_a_recording_goes_to_the_client_that_began_it(
    mounted: Mounted, bucket: Bucket, tmp_path: Path
) -> None:
    """Not to one that began one with the daemon before."""
    bucket.put("file", 10)
    mount = held_mount(mounted, bucket)
    written = tmp_path / "written"
    with subprocess.Popen(
        [*COMMAND, "record", "-o", written, mount.path], env=mount.env, stderr=subprocess.PIPE, text=True
    ) as recording:
        eventually(written.exists, "the recording has begun")
        os.kill(recording.pid, signal.SIGSTOP)
        kill(mount)
        number = mount.ask("record_start")
        os.kill(recording.pid, signal.SIGCONT)
        _, said = recording.communicate(timeout=30)
        assert (recording.returncode, said.strip()) == (1, "cachefs: recording 1 has ended")
        (mount.path / "file").read_bytes()
        assert len(mount.ask("record_drain", recording=number)["lines"]) == 1 and not written.read_text()


class Readers:
    """Threads that repeat something until told to stop, and note what went wrong."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.rounds: dict[str, int] = {}
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def add(self, work: Callable[[], bool]) -> None:
        name = work.__name__
        self.rounds[name] = 0

        def repeat() -> None:
            while not self._stop.is_set():
                try:
                    if not work():
                        self.wrong.append(f"{name}: wrong bytes")
                except Exception as exc:
                    self.wrong.append(f"{name}: {exc!r}")
                self.rounds[name] += 1

        self._threads.append(threading.Thread(target=repeat, daemon=True))

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(30)
        assert not any(thread.is_alive() for thread in self._threads), "a reader hangs"


def test_no_reader_notices_that_the_daemon_was_killed(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    """Every way of reading at once, over several kills; every byte is compared."""
    passed = bucket.put("passed", 3 * MIB + 5)
    mapped = bucket.put("mapped", 2 * MIB)
    through = bucket.put("through", 40 * MIB)  # larger than its tiers: never in passthrough
    names = {f"d/{number:04}" for number in range(1500)}
    for name in names:
        bucket.put(name, name.encode())
    mount = held_mount(mounted, bucket, ram="16M", cache_size="16M", keep_free="16M")
    mount.allowed.append("fails its checksum")  # the index does not know of the last second's evictions
    assert (mount.path / "passed").read_bytes() == passed
    eventually(lambda: _opened_in_passthrough(mount, "passed"), "passthrough")

    whole = os.open(mount.path / "passed", os.O_RDONLY)
    slow = os.open(mount.path / "through", os.O_RDONLY)
    with (mount.path / "mapped").open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    at = [0]

    def passthrough() -> bool:
        return os.pread(whole, MIB, 777) == passed[777 : 777 + MIB]

    def read() -> bool:
        at[0] = (at[0] + 3 * MIB + 12345) % len(through)
        os.posix_fadvise(slow, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(slow, 200_000, at[0]) == through[at[0] : at[0] + 200_000]

    def page_faults() -> bool:
        pages.madvise(mmap.MADV_DONTNEED)
        return pages[:] == mapped

    def open_and_close() -> bool:
        return (mount.path / "d/0007").read_bytes() == b"d/0007" and (
            mount.path / "passed"
        ).stat().st_size > 0

    def stat() -> bool:
        return os.stat(mount.path / "through").st_size == len(through) and os.fstat(slow).st_ino > 0

    def list_directory() -> bool:
        found = []
        with os.scandir(mount.path / "d") as entries:
            for number, entry in enumerate(entries):
                found.append(f"d/{entry.name}")
                if number % 100 == 0:
                    time.sleep(0.02)
        return sorted(found) == sorted(names)

    readers = Readers()
    for work in (passthrough, read, page_faults, open_and_close, stat, list_directory):
        readers.add(work)
    with readers.running():
        for _ in range(KILLS):
            time.sleep(0.7)
            kill(mount)
        time.sleep(0.5)
    assert not readers.wrong, readers.wrong[:5]
    assert all(readers.rounds.values()), readers.rounds
    # An inode that is open in passthrough is opened again with the file that the kernel has.
    assert (mount.path / "passed").read_bytes() == passed
    os.close(whole)
    os.close(slow)
    pages.close()
    eventually(lambda: mount.ask("status")["open_files"] == 0, "no handle is left open")
    status = held(mount)
    assert status["restarts"] == KILLS
    assert 0 < status["longest_pause_s"] < 20


@pytest.mark.long
def test_names_that_were_read_may_be_removed_before_the_next_daemon_is_asked(
    mounted: Mounted, bucket: Bucket
) -> None:
    """As `rm -r` does it: it removes what it has read, and reads on."""
    names = [f"{number:04}" for number in range(1500)]  # more than a buffer of the C library holds
    for name in names:
        bucket.put(f"d/{name}", b"1")
    mount = held_mount(mounted, bucket, read_only=None)
    found = []
    with os.scandir(mount.path / "d") as entries:
        for entry in entries:
            found.append(entry.name)
            os.unlink(entry.path)
            if len(found) == 500:
                kill(mount)
    assert found == names
    assert os.listdir(mount.path / "d") == []


def _opened_in_passthrough(mount: Mount, name: str) -> bool:
    before = mount.metrics()["passthrough_opens"]
    (mount.path / name).read_bytes()
    return mount.metrics()["passthrough_opens"] > before


@pytest.mark.long
def test_a_read_that_waits_for_the_origin_is_answered_by_the_next_daemon(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    data = bucket.put("cold", 2 * MIB)
    mount = held_mount(mounted, bucket)
    os.stat(mount.path / "cold")
    lab.shape(latency_ms=1000)
    reader = subprocess.Popen(["cat", mount.path / "cold"], stdout=subprocess.PIPE)
    eventually(lambda: mount.metrics()["fuse_read"], "the read")
    kill(mount)
    said, _ = reader.communicate(timeout=30)
    assert reader.returncode == 0
    assert said == data


def test_the_first_open_after_a_restart_drops_pages_of_an_older_version(
    mounted: Mounted, bucket: Bucket
) -> None:
    """Nothing in the daemon's memory says any more which pages of the kernel are out of date."""
    bucket.put("file", 300_000)
    mount = held_mount(mounted, bucket, metadata_ttl="1h")
    old = (mount.path / "file").read_bytes()
    with (mount.path / "file").open("rb") as held_open:
        new = bucket.put("file", 300_000, version=2)
        kill(mount)
        mount.refresh(mount.path / "file")
        assert (mount.path / "file").read_bytes() == new
        os.posix_fadvise(held_open.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert held_open.read() == old  # this handle reads its own version, which is cached
    assert (mount.path / "file").read_bytes() == new


def test_a_handle_whose_version_is_gone_fails_alone(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("lost", 3 * MIB)
    other = bucket.put("other", 100_000)
    mount = held_mount(mounted, bucket, ram=0, cache_size=0)
    with (mount.path / "lost").open("rb") as lost, (mount.path / "other").open("rb") as kept:
        lost.read(10)
        bucket.put("lost", 3 * MIB, version=2)
        kill(mount)
        with pytest.raises(OSError, match="Stale"):
            os.pread(lost.fileno(), 1000, 2 * MIB)
        assert kept.read() == other
    mount.allowed += ["replaced or removed", "no tier at all"]


@pytest.mark.long
def test_everything_ends_with_the_mount(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket, start=False)
    ends: dict[str, Callable[[int], object]] = {
        "cachefs umount": lambda _: mount.stop(),
        "umount": lambda _: run(["umount", mount.path]),
        "SIGTERM to the holder": lambda pid: os.kill(pid, signal.SIGTERM),
        "SIGTERM to the daemon": lambda _: os.kill(mount.pid, signal.SIGTERM),
    }
    for number, (name, end) in enumerate(ends.items()):
        for killed in (number % 2 == 1,) if SHORT else (False, True):
            mount.start()
            assert (mount.path / "file").read_bytes() == b"1"
            if killed:
                kill(mount)
            pid = held(mount)["pid"]
            end(pid)
            eventually(lambda pid=pid: not alive(pid) and not alive(mount.pid), name)  # type: ignore[misc]
            assert not mounts_at(mount.path), name
            assert not processes_with(str(mount.cache)), name


def test_a_holder_without_its_daemon_unmounts_when_it_is_told_to_stop(
    mounted: Mounted, bucket: Bucket
) -> None:
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket)
    pid = held(mount)["pid"]
    os.kill(mount.pid, signal.SIGKILL)
    mount.killed = True
    os.kill(pid, signal.SIGTERM)
    eventually(lambda: not alive(pid), "the holder has ended")
    assert not mounts_at(mount.path)
    assert not processes_with(str(mount.cache))


@pytest.mark.long
def test_a_daemon_that_stands_by_ends_with_its_holder(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket)
    pid = held(mount)["pid"]
    others = {pid, mount.pid}
    eventually(lambda: set(processes_with(str(mount.cache))) > others, "the next daemon")
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: set(processes_with(str(mount.cache))) == {mount.pid}, "only the daemon is left")
    assert (mount.path / "file").read_bytes() == b"1"
    assert held(mount)["pid"] == 0


@pytest.mark.long
def test_the_next_daemon_has_the_connection_once(mounted: Mounted, bucket: Bucket) -> None:
    """A copy that it does not know of would keep the connection."""
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket)
    for number in range(2 if SHORT else 3):
        assert opened(mount.pid).count("/dev/fuse") == 1, number
        kill(mount)


def test_sighup_reaches_the_daemon(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket)
    os.kill(held(mount)["pid"], signal.SIGHUP)
    eventually(lambda: "SIGHUP: changed nothing" in mount.log(), "the answer")
    kill(mount)
    assert (mount.path / "file").read_bytes() == b"1"


def test_in_the_foreground_the_holder_has_the_process_id_of_the_command(
    mounted: Mounted, bucket: Bucket
) -> None:
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, start=False)
    with mount.in_foreground() as process:
        eventually(lambda: _answers(mount), "the daemon")
        assert held(mount)["pid"] == process.pid
        mount.pids.append(mount.ask("status")["pid"])
        kill(mount)
        assert (mount.path / "file").read_bytes() == data
        process.terminate()
        _, complaint = process.communicate(timeout=30)
        assert process.returncode == 0, complaint
    assert not mounts_at(mount.path)


def _answers(mount: Mount) -> bool:
    try:
        return bool(mount.ask("status"))
    except Exception:
        return False


def test_a_crash_loop_ends_with_a_dead_mount(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", MIB)
    mount = held_mount(mounted, bucket)
    pid = held(mount)["pid"]
    until = time.monotonic() + 80
    while alive(pid) and time.monotonic() < until:
        for found in processes_with(str(mount.cache)):
            if found != pid:
                os.kill(found, signal.SIGKILL)
        time.sleep(0.05)
    mount.killed = True
    mount.allowed += ["took away a dead mount"]
    assert not alive(pid)
    assert (
        f"the daemon has died {holder.CRASH_LOOP} times in a row, each time within 10 s of its start"
        in mount.log()
    )
    assert mounts_at(mount.path)
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.listdir(mount.path)


def test_status_and_metrics_show_restarts_and_the_holder_is_small(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket)
    assert held(mount)["restarts"] == 0
    kill(mount)
    said = mount.cli("status", mount.path).stdout
    assert "1 restart" in said, said
    assert json.loads(mount.cli("status", "--json", mount.path).stdout)["holder"]["restarts"] == 1
    said = Path(f"/proc/{held(mount)['pid']}/status").read_text()
    (resident,) = (int(line.split()[1]) for line in said.splitlines() if line.startswith("VmRSS"))
    assert resident < 10 * KIB, said  # in KiB; with the interpreter's pages, which it shares with the daemon


def test_a_plain_mount_outlives_its_daemon(mounted: Mounted, bucket: Bucket) -> None:
    """Without any option. A command that comes while there is no daemon waits for the next one."""
    bucket.put("file", b"1")
    mount = mounted(bucket, start=False)
    del mount.env["CACHEFS_RESTART"]
    mount.allowed += ["the daemon has died", "was left by process"]
    mount.start()
    assert held(mount)["restarts"] == 0
    mount.killed = True
    os.kill(mount.pid, signal.SIGKILL)
    eventually(lambda: not alive(mount.pid), "the daemon has ended")
    status = mount.status()
    assert status["holder"]["restarts"] == 1
    mount.pids.append(status["pid"])
    assert (mount.path / "file").read_bytes() == b"1"


def test_a_plain_mount_that_ends_with_its_daemon_says_so_in_its_log_alone(
    mounted: Mounted, bucket: Bucket
) -> None:
    mount = mounted(bucket, start=False, fuse="pyfuse3")
    del mount.env["CACHEFS_RESTART"]
    mount.start()
    status = mount.ask("status")
    assert status["holder"] is None
    assert not [line for line in status["warnings"] if "restart" in line]
    assert "the mount ends with its daemon: the FUSE backend is pyfuse3" in mount.log()
    assert len(processes_with(str(mount.cache))) == 1, "a holder that holds nothing"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fuse": "pyfuse3"}, "the FUSE backend is pyfuse3"),
        ({"zero_open": True, "consistency": "immutable"}, "with --zero-open"),
    ],
)
def test_where_it_cannot_restart_the_mount_says_why_and_dies_as_before(
    mounted: Mounted, bucket: Bucket, options: dict[str, Any], why: str
) -> None:
    bucket.put("file", b"1")
    mount = mounted(bucket, restart=True, **options)
    mount.allowed.append("--restart has no effect")
    assert any(f"--restart has no effect: {why}" in line for line in mount.ask("status")["warnings"])
    mount.kill()
    with pytest.raises(OSError, match=r"not connected|connection abort"):
        os.listdir(mount.path)
    eventually(lambda: not processes_with(str(mount.cache)), "the holder has ended")


def test_what_the_daemon_says_at_start_reaches_the_caller(mounted: Mounted, bucket: Bucket) -> None:
    mount = mounted("s3://no-such-bucket-anywhere", start=False, restart=True)
    mount.allowed.append("no such bucket")
    done = mount.try_start()
    assert done.returncode == 1
    assert "no-such-bucket" in done.stderr
    assert not processes_with(str(mount.cache))


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_a_failure_in_the_daemon_is_a_death_like_any_other(
    mounted: Mounted, bucket: Bucket, killed: bool
) -> None:
    """Also of a daemon that has taken the mount over."""
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, start=False)
    fails = mount.place / "sitecustomize.py"
    fails.write_text(FAILING)
    mount.env["PYTHONPATH"] = str(mount.place)
    command = [sys.executable, "-m", "cachefs", *mount.arguments(foreground=True)]
    wrapped = held_by_holder(command, "/")
    process = subprocess.Popen(wrapped, env=mount.env, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _answers(mount), "the daemon")
        mount.pids += [process.pid, mount.ask("status")["pid"]]
        if killed:
            kill(mount)
        with (mount.path / "file").open("rb") as file:
            assert file.read(10) == data[:10]
            os.kill(mount.pid, signal.SIGUSR1)
            eventually(lambda: not alive(mount.pid), "the failure")
            file.seek(0)
            assert file.read() == data
        mount.allowed += ["a bug", "a failure ends this daemon", "Traceback", "Group", "Error", r"\|"]
        eventually(lambda: _answers(mount), "the next daemon")
        mount.pids.append(mount.ask("status")["pid"])
        assert held(mount)["restarts"] == 1 + killed
        mount.stop()
        assert process.wait(20) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


FAILING = """
import signal

def install():
    import trio
    from cachefs.daemon import daemon
    main = daemon.Daemon._ready

    async def ready(self):
        await main(self)
        with trio.open_signal_receiver(signal.SIGUSR1) as signals:
            async for _ in signals:
                raise RuntimeError("a bug in one of the daemon's own services")

    daemon.Daemon._ready = ready

import sys
if "mount" in sys.argv or "-m" in sys.orig_argv:
    install()
"""
"""The daemon, in which SIGUSR1 ends a service of its own with an exception."""


def test_the_watchdog_of_a_service_manager_hears_of_the_daemon(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket, start=False)
    with (
        tempfile.TemporaryDirectory(prefix="cf-") as place,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
    ):
        listener.bind(f"{place}/notify")
        listener.settimeout(30)
        command = [sys.executable, "-m", "cachefs", *mount.arguments(foreground=True)]
        env = {**mount.env, "NOTIFY_SOCKET": f"{place}/notify", "WATCHDOG_USEC": "1000000"}
        process = subprocess.Popen(
            ["sh", "-c", 'WATCHDOG_PID=$$ exec "$@"', "sh", *command], env=env, stderr=subprocess.DEVNULL
        )
        try:
            for killed in (False, True):
                while listener.recv(4096) != b"WATCHDOG=1":
                    pass
                mount.pids += [process.pid, mount.ask("status")["pid"]]
                if not killed:
                    kill(mount)
            process.terminate()
            assert process.wait(30) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


# -- upgrades ----------------------------------------------------------------------------------------


def upgraded(mount: Mount) -> Completed:
    before = mount.pid
    done = mount.cli("upgrade", mount.path)
    mount.pids.append(mount.ask("status")["pid"])
    assert mount.pid != before or done.returncode
    return done


def test_no_reader_notices_an_upgrade_and_what_is_in_memory_stays(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    passed, cached = bucket.put("passed", 3 * MIB + 5), bucket.put("cached", 2 * MIB)
    names = {f"d/{number:04}" for number in range(700)}
    for name in names:
        bucket.put(name, name.encode())
    mount = held_mount(mounted, bucket, cache_size=0)  # all is in memory
    for name, data in (("passed", passed), ("cached", cached)):
        assert (mount.path / name).read_bytes() == data
    eventually(lambda: _opened_in_passthrough(mount, "passed"), "passthrough")
    mount.settled()
    asked = lab.counters()["requests"].get("get", 0)
    whole = os.open(mount.path / "passed", os.O_RDONLY)
    slow = os.open(mount.path / "cached", os.O_RDONLY)

    def passthrough() -> bool:
        return os.pread(whole, MIB, 777) == passed[777 : 777 + MIB]

    def read() -> bool:
        os.posix_fadvise(slow, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(slow, 200_000, 300_000) == cached[300_000:500_000]

    def open_and_close() -> bool:
        return (mount.path / "cached").read_bytes() == cached

    def list_directory() -> bool:
        return {f"d/{name}" for name in os.listdir(mount.path / "d")} == names

    readers = Readers()
    for work in (passthrough, read, open_and_close, list_directory):
        readers.add(work)
    with readers.running():
        for number in range(1, UPGRADES + 1):
            time.sleep(0.3)
            done = upgraded(mount)
            assert done.returncode == 0, done.stderr
            assert "version 0.1.0 → 0.1.0, programs waited for" in done.stderr + done.stdout
            assert (held(mount)["restarts"], held(mount)["handed_over"]) == (number, number)
    assert not readers.wrong, readers.wrong[:5]
    assert all(readers.rounds.values()), readers.rounds
    os.close(whole)
    os.close(slow)
    assert lab.counters()["requests"].get("get", 0) == asked, "nothing is fetched again"
    assert f"{UPGRADES} restarts ({UPGRADES} by upgrade" in mount.cli("status", mount.path).stdout
    assert "was left by process" not in mount.log(), "the databases were closed"


@pytest.mark.long
def test_an_upgrade_runs_what_is_installed_now_or_changes_nothing(mounted: Mounted, bucket: Bucket) -> None:
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, start=False)
    installed = mount.place / "installed"
    shutil.copytree(Path(cachefs.__file__).parent, installed / "cachefs")
    # A cached module of the same length and second would be taken for the changed one.
    mount.env |= {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}

    def change(module: str, old: str, new: str) -> None:
        path = installed / "cachefs" / module
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    command = [sys.executable, "-m", "cachefs", *mount.arguments(foreground=True)]
    process = subprocess.Popen(command, env=mount.env, cwd="/", stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: _answers(mount), "the daemon")
        mount.pids += [process.pid, mount.ask("status")["pid"]]
        with (mount.path / "file").open("rb") as file:
            assert file.read(10) == data[:10]
            change("__init__.py", "0.1.0", "0.1.1")
            done = upgraded(mount)
            assert "version 0.1.0 → 0.1.1" in done.stderr + done.stdout
            change("fuse/handover.py", f"FORMAT = {FORMAT}", f"FORMAT = {FORMAT + 1}")
            change("__init__.py", "0.1.1", "0.2.0")
            done = upgraded(mount)
            assert (
                done.returncode == 1 and "version 0.2.0 cannot go on with this mount's state" in done.stderr
            )
            change("daemon/daemon.py", "from __future__", "from __past__")
            done = upgraded(mount)
            assert done.returncode == 1 and "what is installed now does not start" in done.stderr
            assert mount.ask("status")["version"] == "0.1.1"
            assert file.read() == data[10:]
        mount.allowed += ["cannot go on with a mount of state"]
        mount.stop()
        process.communicate(timeout=20)
        assert process.returncode == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _next_one(mount: Mount, *others: int) -> int:
    """The daemon that stands by, which is none of `others`."""
    found: set[int] = set()

    def there() -> bool:
        nonlocal found
        found = set(processes_with(str(mount.cache))) - {mount.pid, held(mount)["pid"], *others}
        return len(found) == 1

    eventually(there, "the daemon that stands by", 60)
    return found.pop()


@pytest.mark.long
@pytest.mark.parametrize("first", ["the daemon", "the next one"])
def test_two_kills_at_once(mounted: Mounted, bucket: Bucket, first: str) -> None:
    """Of the daemon and the one that stands by: it dies before the other one does, or while it takes over."""
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, read_only=None)
    with open(mount.path / "file", "rb", 0) as reader, open(mount.path / "new", "w+b", 0) as writer:
        assert reader.read(1000) == data[:1000]
        writer.write(b"before ")
        pids = [mount.pid, _next_one(mount)]
        mount.killed = True
        for pid in pids if first == "the daemon" else reversed(pids):
            os.kill(pid, signal.SIGKILL)
        writer.write(b"after")
        os.posix_fadvise(reader.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(reader.fileno(), MIB, 0) == data
        assert os.pread(writer.fileno(), 100, 0) == b"before after"
    mount.pids.append(mount.ask("status")["pid"])
    assert mount.pid not in pids and 1 <= held(mount)["restarts"] <= 2
    assert (mount.path / "new").read_bytes() == b"before after" == stored(bucket, "new")


@pytest.mark.long
def test_an_upgrade_that_meets_a_kill_goes_on_or_says_why_not(mounted: Mounted, bucket: Bucket) -> None:
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, read_only=None)
    before = _next_one(mount)
    with open(mount.path / "file", "rb", 0) as reader, open(mount.path / "new", "w+b", 0) as writer:
        writer.write(b"before ")
        command = [sys.executable, "-m", "cachefs", "upgrade", mount.path]
        with subprocess.Popen(command, env=mount.env, stderr=subprocess.PIPE, text=True) as upgrade:
            daemon = mount.pid
            eventually(lambda: not alive(before), "another one is loaded")
            mount.killed = True
            os.kill(daemon, signal.SIGKILL)
            writer.write(b"after")
            assert reader.read(MIB) == data
            _, said = upgrade.communicate(timeout=60)
        assert upgrade.returncode in (0, 1) and len(said.splitlines()) == 1, said
        assert os.pread(writer.fileno(), 100, 0) == b"before after"
    mount.pids.append(mount.ask("status")["pid"])
    assert mount.pid != daemon and held(mount)["restarts"] == 1
    assert stored(bucket, "new") == b"before after"
    assert upgraded(mount).returncode == 0


def test_a_mount_that_ends_with_its_daemon_is_not_upgraded(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", b"1")
    mount = mounted(bucket)
    done = mount.cli("upgrade", mount.path)
    assert done.returncode == 1 and "it was made with --no-restart" in done.stderr
    assert (mount.path / "file").read_bytes() == b"1"


# -- mounts that are written -------------------------------------------------------------------------


@pytest.mark.parametrize("writeback", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_file_that_is_being_written_goes_on(mounted: Mounted, bucket: Bucket, writeback: bool) -> None:
    """What was written is there, and what is written later is added; of files of every size, also in memory."""
    bucket.put("old", MIB)
    mount = held_mount(mounted, bucket, read_only=None, writeback=writeback)
    mount.allowed += ["not at the origin"]
    sizes = {"small": 100, "end": 300 * KIB, "large": 40 * MIB}
    data = {name: os.urandom(size) for name, size in sizes.items()}
    fds = {name: os.open(mount.path / name, os.O_RDWR | os.O_CREAT) for name in sizes}
    for name, fd in fds.items():
        half = sizes[name] // 2
        for at in range(0, half, 50_000):
            os.write(fd, data[name][at : min(at + 50_000, half)])
    old = os.open(mount.path / "old", os.O_RDWR)
    unchanged = os.open(mount.path / "old", os.O_RDWR | os.O_APPEND)
    os.ftruncate(old, 1000)
    kill(mount)
    for name, fd in fds.items():
        half = sizes[name] // 2
        assert os.fstat(fd).st_size == half
        assert os.pread(fd, half, 0) == data[name][:half]
        for at in range(half, sizes[name], 50_000):
            os.write(fd, data[name][at : at + 50_000])
    os.write(unchanged, b"end")
    kill(mount)
    for fd in (*fds.values(), old, unchanged):
        os.fsync(fd)
        os.close(fd)
    for name in sizes:
        assert (mount.path / name).read_bytes() == data[name]
    assert mount.cli("flush", mount.path).returncode == 0
    for name in sizes:
        assert stored(bucket, name) == data[name]
    assert stored(bucket, "old")[1000:] == b"end"
    assert "is lost" not in mount.log()


def upgrade(mount: Mount) -> None:
    done = upgraded(mount)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("end", "writeback"),
    [
        (kill, False),
        pytest.param(upgrade, True, marks=pytest.mark.long),
        pytest.param(kill, True, marks=pytest.mark.long),
        pytest.param(upgrade, False, marks=pytest.mark.long),
    ],
)
def test_no_writer_notices(
    mounted: Mounted, bucket: Bucket, writeback: bool, end: Callable[[Mount], object]
) -> None:
    """Every way of writing at once; changes of names are made once, also where the daemon died between the change and its
    answer; readers go on beside them."""
    cached = bucket.put("cached", 3 * MIB)
    mount = held_mount(mounted, bucket, read_only=None, writeback=writeback)
    mount.allowed.append("not at the origin")
    assert (mount.path / "cached").read_bytes() == cached
    kept = os.open(mount.path / "cached", os.O_RDONLY)
    saved: dict[str, bytes] = {}
    numbers = iter(range(1 << 30))
    logged = bytearray()
    journal = os.open(mount.path / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    table = os.open(mount.path / "table", os.O_RDWR | os.O_CREAT)
    pages = bytearray(64 * 4096)
    os.write(table, pages)

    def read() -> bool:
        os.posix_fadvise(kept, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(kept, MIB, MIB) == cached[MIB : 2 * MIB]

    def save() -> bool:
        """A temporary file, renamed once it is whole."""
        number = next(numbers)
        name, data = f"{number:05}.bin", b"%05d" % number * 20_000
        with open(mount.path / f"{name}.tmp", "wb", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
        os.rename(mount.path / f"{name}.tmp", mount.path / name)
        saved[name] = data
        return (mount.path / name).read_bytes() == data

    def replace() -> bool:
        """The same name again and again."""
        data = b"%09d" % next(numbers) * 1000
        (mount.path / "new").write_bytes(data)
        os.rename(mount.path / "new", mount.path / "latest")
        return (mount.path / "latest").read_bytes() == data

    def append() -> bool:
        line = b"%09d\n" % len(logged)
        logged.extend(line)
        return os.write(journal, line) == len(line) and os.fstat(journal).st_size == len(logged)

    def patch() -> bool:
        """Pages anywhere in a file; sometimes the file is cut, and grows again."""
        number = next(numbers)
        at = number * 7919 % 64 * 4096
        page = b"%08d" % number * 512
        pages[at : at + 4096] = page
        os.pwrite(table, page, at)
        if number % 50 == 0:
            os.ftruncate(table, 33 * 4096)
            os.ftruncate(table, 64 * 4096)
            pages[33 * 4096 :] = bytes(31 * 4096)
        return os.pread(table, len(pages), 0) == pages

    def change_names() -> bool:
        directory = mount.path / "made"
        os.mkdir(directory)
        os.rename(directory, mount.path / "moved")
        os.mknod(mount.path / "moved" / "empty", 0o644)
        os.unlink(mount.path / "moved" / "empty")
        os.rmdir(mount.path / "moved")
        return not directory.exists()

    users = Readers()
    for work in (read, save, replace, append, patch, change_names):
        users.add(work)
    with users.running():
        for _ in range(WRITERS_DEATHS):
            time.sleep(0.6)
            end(mount)
        time.sleep(0.3)
    assert not users.wrong, users.wrong[:5]
    assert all(users.rounds.values()), users.rounds
    for fd in (kept, journal, table):
        os.close(fd)
    assert mount.cli("flush", mount.path).returncode == 0
    expected = {**saved, "journal": bytes(logged), "table": bytes(pages)}
    for name, data in expected.items():
        assert (mount.path / name).read_bytes() == data, name
        assert stored(bucket, name) == data, name
    assert set(os.listdir(mount.path)) - {"latest"} == {"cached", *expected}
    assert held(mount)["restarts"] == WRITERS_DEATHS


@pytest.mark.parametrize(
    "call", ["close", *(pytest.param(call, marks=pytest.mark.long) for call in ("fsync", "truncate"))]
)
def test_a_call_that_waits_for_the_upload_is_answered_by_the_next_daemon(
    mounted: Mounted, bucket: Bucket, lab: LabStore, call: str
) -> None:
    data = os.urandom(3 * MIB)
    bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, read_only=None)
    calls = {
        "close": lambda fd: os.close(fd),
        "fsync": lambda fd: os.fsync(fd),
        "truncate": lambda _: os.truncate(mount.path / "file", len(data)),
    }
    wrong: list[BaseException] = []
    fd = os.open(mount.path / "file", os.O_RDWR | os.O_TRUNC)
    os.write(fd, data + b"x" * (call == "truncate"))
    if call == "truncate":
        os.close(fd)

    def work() -> None:
        try:
            calls[call](fd)
        except BaseException as exc:
            wrong.append(exc)

    rule = lab.fault("hang", kind="put", key="file")
    waiting = threading.Thread(target=work, daemon=True)
    waiting.start()
    eventually(lambda: lab.faults_fired().get(rule), "it is on its way")
    kill(mount)
    assert waiting.is_alive()
    lab.clear_faults()
    waiting.join(60)
    assert not waiting.is_alive() and not wrong
    if call == "fsync":
        os.close(fd)
    assert (mount.path / "file").read_bytes() == data
    assert mount.cli("flush", mount.path).returncode == 0
    assert stored(bucket, "file") == data


@pytest.mark.long
@pytest.mark.parametrize("writeback", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_file_that_has_lost_its_name_goes_on(mounted: Mounted, bucket: Bucket, writeback: bool) -> None:
    mount = held_mount(mounted, bucket, read_only=None, writeback=writeback)
    small, large = (os.open(mount.path / name, os.O_RDWR | os.O_CREAT) for name in ("small", "large"))
    data = {small: b"1" * 100, large: os.urandom(MIB)}
    for fd, content in data.items():
        os.write(fd, content)
    replaced = os.open(mount.path / "replaced", os.O_RDWR | os.O_CREAT)
    os.write(replaced, b"before")
    for name in ("small", "large"):
        os.unlink(mount.path / name)
    (mount.path / "new").write_bytes(b"after")
    os.rename(mount.path / "new", mount.path / "replaced")
    for _ in range(2):
        kill(mount)
        for fd, content in data.items():
            assert os.pread(fd, 2 * MIB, 0) == content
            assert os.fstat(fd).st_nlink == 0
            os.write(fd, b"more")
            data[fd] += b"more"
        assert os.pread(replaced, 100, 0) == b"before"
        assert (mount.path / "replaced").read_bytes() == b"after"
    for fd in (*data, replaced):
        os.close(fd)
    assert mount.cli("flush", mount.path).returncode == 0
    assert os.listdir(mount.path) == ["replaced"]
    assert stored(bucket, "replaced") == b"after"
    staging = Path(mount.ask("status")["state_dir"]) / "staging"
    eventually(lambda: not list(staging.iterdir()), "no staging file is left")


@pytest.mark.long
@pytest.mark.parametrize("ends", [kill, lambda mount: upgraded(mount)], ids=["kill", "upgrade"])
def test_an_unchanged_file_that_was_renamed_or_removed_goes_on(
    mounted: Mounted, bucket: Bucket, ends: Callable[[Mount], object]
) -> None:
    """It is read in passthrough, or open for writing."""
    data = {name: bucket.put(name, 100_000) for name in ("moved", "d/moved", "read", "written")}
    mount = held_mount(mounted, bucket, read_only=None, ram=0)
    for name, content in data.items():
        assert (mount.path / name).read_bytes() == content
    eventually(
        lambda: all(_opened_in_passthrough(mount, name) for name in data if name != "written"), "passthrough"
    )
    flags = {"written": os.O_RDWR}
    fds = {name: os.open(mount.path / name, flags.get(name, os.O_RDONLY)) for name in data}
    os.rename(mount.path / "moved", mount.path / "new")
    os.rename(mount.path / "d", mount.path / "e")
    for name in ("read", "written"):
        os.unlink(mount.path / name)
    ends(mount)
    for name, fd in fds.items():
        status = os.fstat(fd)
        assert (status.st_size, status.st_nlink) == (100_000, int("moved" in name)), name
        assert os.pread(fd, 200_000, 0) == data[name], name
    assert (mount.path / "new").read_bytes() == data["moved"]
    assert (mount.path / "e/moved").read_bytes() == data["d/moved"]
    assert os.pwrite(fds["written"], b"more", 5) == 4
    assert os.pread(fds["written"], 12, 0) == data["written"][:5] + b"more" + data["written"][9:12]
    for fd in fds.values():
        os.close(fd)
    assert sorted(os.listdir(mount.path)) == ["e", "new"]


@pytest.mark.parametrize("change", [os.unlink, lambda path: os.rename(path.with_name("other"), path)])
def test_a_file_that_was_just_written_and_loses_its_name_goes_on(
    mounted: Mounted, bucket: Bucket, change: Callable[[Path], object]
) -> None:
    """Whether the cache is adopting it, has adopted it, or has written that to its index."""
    mount = held_mount(mounted, bucket, read_only=None)
    for pause_s in (0.0, 0.01, 0.3):
        path, content = mount.path / "file", os.urandom(2 * MIB)
        (mount.path / "other").write_bytes(b"other")
        path.write_bytes(content)
        time.sleep(pause_s)
        with path.open("r+b", buffering=0) as file:
            change(path)
            kill(mount)
            assert os.pwrite(file.fileno(), b"more", 0) == 4
            assert os.pread(file.fileno(), 3 * MIB, 0) == b"more" + content[4:]


@pytest.mark.long
@pytest.mark.parametrize("writeback", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_mapping_that_is_written_goes_on(mounted: Mounted, bucket: Bucket, writeback: bool) -> None:
    """Of a file that its readers have in passthrough, too."""
    data = bytearray(bucket.put("file", 2 * MIB))
    mount = held_mount(mounted, bucket, read_only=None, writeback=writeback, ram=0)
    assert (mount.path / "file").read_bytes() == data
    eventually(lambda: _opened_in_passthrough(mount, "file"), "passthrough")
    with open(mount.path / "file", "rb") as reader, open(mount.path / "file", "r+b", buffering=0) as writer:
        with mmap.mmap(writer.fileno(), 0) as pages:
            for number in range(3):
                at = number * 300_000
                pages[at : at + 5] = data[at : at + 5] = b"page%d" % number
                os.pwrite(writer.fileno(), b"write", at + 100_000)
                data[at + 100_000 : at + 100_005] = b"write"
                kill(mount)
                assert pages[:] == data
            pages.flush()
        assert reader.read() == data
    assert mount.cli("flush", mount.path).returncode == 0
    assert (mount.path / "file").read_bytes() == data == stored(bucket, "file")


def test_what_set_times_and_modes_of_a_file_that_is_being_written_stays(
    mounted: Mounted, bucket: Bucket
) -> None:
    mount = held_mount(mounted, bucket, read_only=None)
    fds = [os.open(mount.path / name, os.O_RDWR | os.O_CREAT) for name in ("old", "new")]
    for fd in fds:
        os.write(fd, b"1")
        os.utime(fd, ns=(10**9, 10**9))
        os.fchmod(fd, 0o640)
    os.write(fds[1], b"2")  # its time is that of this
    written_ns = os.fstat(fds[1]).st_mtime_ns
    kill(mount)
    assert [os.fstat(fd).st_mtime_ns for fd in fds] == [10**9, written_ns]
    assert [os.fstat(fd).st_mode & 0o777 for fd in fds] == [0o640] * 2
    for fd in fds:
        os.close(fd)


def test_the_times_of_directories_stay(mounted: Mounted, bucket: Bucket) -> None:
    """`tar` says that a directory changed as it read it, and fails, if the time is another one."""
    mount = held_mount(mounted, bucket, read_only=None)
    for name in ("d", "d/e"):
        (mount.path / name).mkdir()
    (mount.path / "d/f").write_bytes(b"1")
    before = [os.stat(mount.path / name).st_mtime_ns for name in (".", "d", "d/e")]
    assert all(before)
    os.utime(mount.path / "d", ns=(5, 7))
    before[1] = 7
    kill(mount)
    assert [os.stat(mount.path / name).st_mtime_ns for name in (".", "d", "d/e")] == before


@pytest.mark.long
@pytest.mark.parametrize("mode", ["writeback", "durable"])
def test_programs_of_all_kinds_go_on(tmp_path: Path, mode: str) -> None:
    """`scripts/restarts` does it for longer, with more of them."""
    programs = ("loader, spawned", "mapping", "untar", "find", "checkpoint", "log", "table")
    rounds, pauses, wrong = restarting.series(mode, 2, 1, 1, tmp_path / "series", programs)
    assert wrong == []
    assert len(pauses) == 3 and set(rounds) == set(programs)


@pytest.mark.long
def test_what_the_next_daemon_would_not_find_is_not_handed_over(mounted: Mounted, bucket: Bucket) -> None:
    """Without a cache directory, staging files lie in one that ends with the daemon."""
    mount = held_mount(mounted, bucket, read_only=None, start=False, cache_dir="/proc/cachefs")
    mount.allowed += ["cannot", "/proc/cachefs", "no ssd tier", "keeping", "do not tell who writes"]
    mount.start()
    with open(mount.path / "new", "wb", buffering=0) as file:
        file.write(b"1")
        done = upgraded(mount)
        assert done.returncode == 1 and "open for writing" in done.stderr
        file.write(b"2")
    assert upgraded(mount).returncode == 0
    assert (mount.path / "new").read_bytes() == b"12" == stored(bucket, "new")


def test_who_reads_what_waits_for_its_upload_goes_on(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("other", b"1")
    mount = held_mount(mounted, bucket, read_only=None, writeback=True, upload_delay="1h")
    data = os.urandom(MIB)
    (mount.path / "file").write_bytes(data)
    with open(mount.path / "file", "rb", buffering=0) as reader:
        assert reader.read(10) == data[:10]
        # Of a file that is not written: returns when all names are on the disk.
        os.chmod(mount.path / "other", 0o640)
        kill(mount)
        assert reader.read() == data[10:]
        assert (mount.path / "file").read_bytes() == data
    assert mount.cli("flush", mount.path).returncode == 0
    assert stored(bucket, "file") == data


@pytest.fixture
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 MiB, of the kind that the test names: tmpfs or ext4."""
    place, image = tmp_path / "disk", tmp_path / "image"
    place.mkdir()
    if request.param == "tmpfs":
        succeed(["mount", "-t", "tmpfs", "-o", "size=64M", "small-disk", place])
    else:
        image.touch()
        os.truncate(image, 64 * MIB)
        succeed(["mkfs.ext4", "-q", "-m", "0", image])
        succeed(["mount", "-o", "loop", image, place])
    yield place
    succeed(["umount", "-l", place])


def fill_up(disk: Path) -> Path:
    """Another program's file takes all the space."""
    other = disk / "other"
    with open(other, "ab", buffering=0) as file:
        for size in (MIB, 4 * KIB, 1):
            with pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(size))
                    os.fsync(file.fileno())
    return other


@pytest.mark.long
@pytest.mark.parametrize("small_disk", ["tmpfs", "ext4"], indirect=True)
def test_small_files_that_the_journal_alone_has_go_on_while_the_disk_is_full(
    small_disk: Path, mounted: Mounted, bucket: Bucket
) -> None:
    """Each next daemon shows all that was acknowledged, and uploads it. Nothing comes back once there is space."""
    cache = small_disk / "cache"
    options = {"read_only": None, "cache_dir": cache, "cache_size": "16M", "keep_free": "1M"}
    mount = held_mount(mounted, bucket, writeback=True, upload_delay="1h", **options)
    mount.allowed += ["full|No space|ENOSPC|no room|do not tell who writes|trying again|databases"]
    data = {f"f{number}": os.urandom(100_000 if number else 0) for number in range(40)}
    for name, content in data.items():
        (mount.path / name).write_bytes(content)
    assert os.listdir(cache / "staging") == []
    other = fill_up(small_disk)
    for _ in range(2):
        kill(mount)
        assert {name: (mount.path / name).read_bytes() for name in data} == data
    assert os.listdir(cache / "staging") == [] and mount.status()["uploads"]["pending"] == len(data)
    assert mount.cli("flush", mount.path).returncode == 0
    assert {name: stored(bucket, name) for name in data} == data
    kill(mount)
    assert {name: (mount.path / name).read_bytes() for name in data} == data
    other.unlink()
    (mount.path / "f1").write_bytes(b"again")
    assert mount.cli("flush", mount.path).returncode == 0
    assert stored(bucket, "f1") == b"again"
    kill(mount)
    assert mount.status()["uploads"]["pending"] == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("small_disk", "end"),
    [("tmpfs", "killed"), ("ext4", "stopped"), ("ext4", "rebooted")],
    indirect=["small_disk"],
)
def test_a_new_mount_begins_on_a_full_disk(
    small_disk: Path, mounted: Mounted, bucket: Bucket, end: str
) -> None:
    """Also with small files that the journal alone has."""
    cache = small_disk / "cache"
    options = {"read_only": None, "cache_dir": cache, "cache_size": "16M", "keep_free": "1M"}
    options |= {"writeback": True, "upload_delay": "1h", "flush_deadline": "0s", "no_restart": True}
    mount = mounted(bucket, **options)
    mount.allowed += [
        "full|No space|no room|do not tell who writes|trying again|not at the origin|dropping the"
        # LMDB says EIO in place of ENOSPC if the disk took a part of a write.
        "|cannot write the cache index|cache index can be written"
    ]
    data = {f"f{number}": os.urandom(100_000 if number else 0) for number in range(40)}
    for name, content in data.items():
        (mount.path / name).write_bytes(content)
    fill_up(small_disk)
    if end == "stopped":
        os.kill(mount.pid, signal.SIGTERM)
        eventually(lambda: not alive(mount.pid), "it has stopped")
    else:
        mount.kill()
    if end == "rebooted":
        for mark in cache.glob("*/version"):
            with mark.open("r+") as file:
                text = file.read().replace(boot_id(), str(uuid.uuid4()))
                file.seek(0)
                file.write(text)
    mount.start()
    assert {name: (mount.path / name).read_bytes() for name in data} == data
    assert mount.cli("flush", mount.path).returncode == 0
    assert {name: stored(bucket, name) for name in data} == data


def test_an_upgrade_does_not_change_what_is_mounted(mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
    """Open files are known by their place in the list of sources."""
    bucket.put("file", b"1")
    config = tmp_path / "sources.toml"
    one = f'[[source]]\nname = "one"\nurl = "{bucket.url}"\n'
    config.write_text(one)
    mount = mounted(None, restart=True, config=config)
    mount.allowed.append("the configuration has other sources")  # the next daemon may read it just then
    config.write_text(one + f'[[source]]\nname = "two"\nurl = "{bucket.url}/p"\n')
    done = upgraded(mount)
    assert done.returncode == 1 and "has other sources than this mount" in done.stderr
    config.write_text("nonsense")
    done = upgraded(mount)
    assert done.returncode == 1 and "sources.toml" in done.stderr
    config.write_text(one)
    assert upgraded(mount).returncode == 0
    assert (mount.path / "one" / "file").read_bytes() == b"1"


# -- under a service manager -------------------------------------------------------------------------


LISTENS = """
import os, sys
os.environ["LISTEN_PID"] = str(os.getpid())
for number in range(int(sys.argv[1])):
    os.dup2(100 + number, 3 + number)
    os.close(100 + number)
os.execv(sys.executable, [sys.executable, "-m", "cachefs", *sys.argv[2:]])
"""
"""Descriptors from 100 on become those from 3 on, as sd_listen_fds(3) has them."""


class Manager:
    """What a service manager does for a unit: it hears what the processes say, keeps descriptors for them, and gives these
    to the next main process."""

    def __init__(self, mount: Mount, place: str) -> None:
        self._mount, self._path = mount, f"{place}/notify"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._listener.bind(self._path)
        self._listener.settimeout(0.1)
        self._process: subprocess.Popen[bytes] | None = None
        self.heard: list[str] = []
        self.stored: dict[str, int] = {}

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *words: str) -> None:
        """Start the main process, with what is stored; it is ready afterwards."""
        mount, kept = self._mount, list(self.stored.items())
        fds = [os.dup2(fd, 100 + index) for index, (_, fd) in enumerate(kept)]
        listen = {"LISTEN_FDS": str(len(kept)), "LISTEN_FDNAMES": ":".join(name for name, _ in kept)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", LISTENS, str(len(kept)), *mount.arguments(foreground=True), *words],
            env={**mount.env, "NOTIFY_SOCKET": self._path, **listen},
            stderr=subprocess.DEVNULL,
            pass_fds=fds,
        )
        for fd in fds:
            os.close(fd)
        self.heard.clear()
        mount.pids.append(self.pid)
        self.hear("READY=1")
        mount.pids.append(mount.ask("status")["pid"])

    def hear(self, wanted: str) -> None:
        """Until one has said `wanted`."""
        self._until(lambda: any(wanted in said for said in self.heard), wanted)

    def keeps_nothing(self) -> None:
        """Until all that was kept has been removed."""
        self._until(lambda: not self.stored, "what is kept")

    def _until(self, heard: Callable[[], bool], wanted: str) -> None:
        until = time.monotonic() + 30
        while not heard():
            try:
                data, fds, _, _ = socket.recv_fds(self._listener, 4096, 4)
            except TimeoutError:
                assert self._process is None or self._process.poll() is None, "it has ended"
                assert time.monotonic() < until, f"nothing was said of {wanted}"
                continue
            said = data.decode()
            name = said.rpartition("FDNAME=")[2]
            if "FDSTORE=1" in said:
                assert "FDPOLL=0" in said, "polling wakes the service manager for each request"
                self.stored[name] = fds[0]
            if "FDSTOREREMOVE=1" in said:
                self._remove(name)
            self.heard.append(said)

    def _remove(self, name: str) -> None:
        if name in self.stored:
            os.close(self.stored.pop(name))

    def kill(self) -> None:
        """All processes, as a control group is killed."""
        for pid in (self.pid, *processes_with(str(self._mount.cache))):
            os.kill(pid, signal.SIGKILL)
        self._mount.killed = True
        self.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(30)

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for name in list(self.stored):
            self._remove(name)
        self._listener.close()


@contextmanager
def managed(mount: Mount) -> Iterator[Manager]:
    with tempfile.TemporaryDirectory(prefix="cf-") as place:
        manager = Manager(mount, place)
        try:
            yield manager
        finally:
            manager.close()


@pytest.mark.long
def test_a_service_manager_keeps_the_connection_of_a_holder_that_is_killed(
    mounted: Mounted, bucket: Bucket
) -> None:
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, start=False)
    with managed(mount) as manager:
        manager.start()
        manager.hear("FDSTORE=1\nFDPOLL=0\nFDNAME=cachefs-fuse")
        assert list(manager.stored) == ["cachefs-memory", "cachefs-fuse"]
        with (mount.path / "file").open("rb") as file:
            assert file.read(10) == data[:10]
            for number in (1, 2):
                pause = held(mount)["longest_pause_s"]
                readers = Readers()

                def names() -> bool:
                    return os.listdir(mount.path) == ["file"]

                readers.add(names)
                with readers.running():
                    manager.kill()
                    # Where the configuration has no restart any more, it is gone on with all the same.
                    manager.start(*(["--no-restart"] if number == 2 else []))
                assert not readers.wrong and readers.rounds["names"]
                file.seek(0)
                assert file.read() == data
                found = held(mount)
                assert (found["pid"], found["restarts"]) == (manager.pid, number)
                assert found["longest_pause_s"] >= max(pause, found["pause_s"]) > 0
            kill(mount)
            assert held(mount)["restarts"] == 3
        os.kill(manager.pid, signal.SIGTERM)
        assert manager.wait() == 0
        manager.keeps_nothing()
        assert not mounts_at(mount.path)


@pytest.mark.long
@pytest.mark.parametrize("gone", ["the mount", "the connection"])
def test_what_a_service_manager_keeps_of_a_mount_that_has_gone_is_not_gone_on_with(
    mounted: Mounted, bucket: Bucket, gone: str
) -> None:
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, start=False)
    mount.allowed.append("took away a dead mount")
    with managed(mount) as manager:
        manager.start()
        manager.hear("FDSTORE=1\nFDPOLL=0\nFDNAME=cachefs-fuse")
        manager.kill()
        if gone == "the mount":
            run(["umount", "-l", mount.path])
        else:
            os.close(manager.stored.pop("cachefs-fuse"))
        manager.start()
        manager.hear("FDSTORE=1\nFDPOLL=0\nFDNAME=cachefs-fuse")
        assert held(mount)["restarts"] == 0 and len(manager.stored) == 2
        assert (mount.path / "file").read_bytes() == data
        mount.stop()
        assert manager.wait() == 0
        manager.keeps_nothing()


@pytest.mark.long
def test_a_crash_loop_of_holders_ends_and_nothing_is_kept(mounted: Mounted, bucket: Bucket) -> None:
    """As where a control group is killed as a whole, again and again."""
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket, start=False)
    with managed(mount) as manager:
        for short in (0, holder.CRASH_LOOP - 1):
            manager.start()
            if not short:
                manager.hear("FDSTORE=1\nFDPOLL=0\nFDNAME=cachefs-fuse")
            memory = manager.stored["cachefs-memory"]
            found, _ = holder.LIVES.unpack(os.pread(memory, holder.LIVES.size, holder.LIVES_AT))
            assert found == bool(short)
            os.pwrite(memory, holder.LIVES.pack(short, time.monotonic() + 60), holder.LIVES_AT)
            manager.kill()
        with pytest.raises(AssertionError, match="it has ended"):
            manager.start()
        assert manager.wait() == 1
        manager.keeps_nothing()
        with pytest.raises(OSError, match=r"not connected|connection abort"):
            os.listdir(mount.path)


@pytest.mark.long
def test_a_version_that_cannot_go_on_with_what_is_kept_gives_it_up(mounted: Mounted, bucket: Bucket) -> None:
    """It was installed before the holder died. The service manager then has it mount again."""
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, start=False)
    mount.allowed += ["this version cannot go on", "took away a dead mount"]
    with managed(mount) as manager:
        manager.start()
        manager.hear("FDSTORE=1\nFDPOLL=0\nFDNAME=cachefs-fuse")
        memory = manager.stored["cachefs-memory"]
        os.pwrite(memory, b"\x63\0\0\0", 24)  # the format of what a daemon leaves
        two_more = holder.LIVES.pack(holder.CRASH_LOOP - 2, time.monotonic() + 60)  # the kill is one of them
        os.pwrite(memory, two_more, holder.LIVES_AT)
        manager.kill()
        with pytest.raises(AssertionError, match="it has ended"):
            manager.start()
        assert manager.wait() == 1
        manager.keeps_nothing()
        assert "cannot go on with a mount of state 99" in mount.log()
        manager.start()
        assert (mount.path / "file").read_bytes() == data
        mount.stop()
        assert manager.wait() == 0


@pytest.mark.long
def test_a_service_manager_hears_of_a_stop_only_when_the_mount_ends(mounted: Mounted, bucket: Bucket) -> None:
    """Else it ends the unit some time after an upgrade."""
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket, start=False)
    with managed(mount) as manager:
        manager.start()
        assert upgraded(mount).returncode == 0
        manager.hear("READY=1")
        manager.heard.clear()
        assert upgraded(mount).returncode == 0
        manager.hear("READY=1")
        assert not any("STOPPING=1" in said for said in manager.heard), manager.heard
        os.kill(manager.pid, signal.SIGTERM)
        manager.hear("STOPPING=1")
        assert manager.wait() == 0


@pytest.mark.long
def test_what_hangs_is_ended_by_the_service_manager_and_gone_on_with(
    mounted: Mounted, bucket: Bucket
) -> None:
    """A process that is stopped does not even end by SIGABRT, which a watchdog sends to the main process."""
    data = bucket.put("file", MIB)
    mount = held_mount(mounted, bucket, start=False)
    with managed(mount) as manager:
        manager.start()
        manager.hear("FDSTORE=1\nFDPOLL=0\nFDNAME=cachefs-fuse")
        with (mount.path / "file").open("rb") as file:
            assert file.read(10) == data[:10]
            os.kill(mount.pid, signal.SIGSTOP)
            eventually(lambda: state_of(mount.pid) == "T", "it is stopped")
            os.kill(manager.pid, signal.SIGABRT)
            mount.killed = True
            assert manager.wait() > 128
            manager.start()
            assert held(mount)["restarts"] == 1
            file.seek(0)
            assert file.read() == data
        mount.stop()
        assert manager.wait() == 0


@pytest.mark.long
def test_under_a_service_manager_no_daemon_outlives_its_holder(mounted: Mounted, bucket: Bucket) -> None:
    """Else it would serve the same connection as the next one."""
    bucket.put("file", b"1")
    mount = held_mount(mounted, bucket, start=False)
    with managed(mount) as manager:
        manager.start()
        manager.hear("FDSTORE=1\nFDPOLL=0\nFDNAME=cachefs-fuse")
        os.kill(manager.pid, signal.SIGKILL)
        mount.killed = True
        eventually(lambda: not processes_with(str(mount.cache)), "the daemon has ended")
        manager.wait()
        manager.start()
        assert held(mount)["restarts"] == 1
        mount.stop()
        assert manager.wait() == 0
