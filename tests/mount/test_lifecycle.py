"""Coming and going: every way to start and to end, and what is left afterwards (nothing)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.lab.client import LabStore
from bench.mutation.running import fork
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import (
    COMMAND,
    Mount,
    alive,
    eventually,
    mounts_at,
    run,
    state_of,
    succeed,
)

MIB = 1 << 20
READER = """
import os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
print("open", flush=True)
try:
    while os.read(file, 1 << 20):
        pass
    print("end")
except OSError as exc:
    print(exc.errno)
"""


SIGNALLED = """
import os, signal, sys
from cachefs.cli.main import main
from cachefs.daemon import cachedir

cachedir.open_names = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
sys.argv[0] = "cachefs"
sys.exit(main())
"""
"""The daemon, which gets SIGTERM when it has opened its cache."""


def reader_of(path: Path) -> subprocess.Popen[str]:
    """A process that reads a file to its end and says which errno it met."""
    process = subprocess.Popen([sys.executable, "-c", READER, path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


@ONE_BACKEND
class TestStarting:
    def test_mount_returns_when_the_mount_answers(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("d/file", 1000)
        mount = mounted(bucket, start=False)
        done = mount.try_start()
        assert (mount.path / "d/file").read_bytes() == data
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert mount.status()["mountpoint"] == str(mount.path)

    @pytest.mark.parametrize("name", ["with space", "ünïcode 数,b=c", "tab\t'\"\\"])
    def test_a_mountpoint_may_have_any_name(self, mounted: Mounted, bucket: Bucket, name: str) -> None:
        data = bucket.put("file", 1000)
        mount = mounted(bucket, start=False)
        mount.path = mount.place / name
        mount.path.mkdir()
        mount.start()
        assert (mount.path / "file").read_bytes() == data
        assert mount.status()["mountpoint"] == str(mount.path)
        mount.stop()

    def test_a_relative_path_through_a_link_is_resolved(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 1000)
        mount = mounted(bucket, start=False)
        (mount.place / "link").symlink_to(mount.path)
        words = [word if word != str(mount.path) else "link/" for word in mount.arguments()]
        done = run([*COMMAND, *words], env=mount.env, cwd=mount.place)
        assert done.returncode == 0, done.stderr
        mount.pids.append(mount.ask("status")["pid"])
        assert (mount.path / "file").read_bytes() == data
        done = run([*COMMAND, "umount", "link"], env=mount.env, cwd=mount.place)
        assert done.returncode == 0, done.stderr

    def test_foreground_logs_to_stderr_and_ends_with_its_mount(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        data = bucket.put("file", 1000)
        mount = mounted(bucket, start=False)
        with mount.in_foreground() as process:
            eventually(lambda: (mount.path / "file").exists(), "the file")
            assert (mount.path / "file").read_bytes() == data
            mount.stop()
            out, err = process.communicate(timeout=20)
        assert process.returncode == 0
        assert out == ""
        assert "mounted s3://" in err and "Traceback" not in err

    def test_a_daemon_keeps_no_directory_and_no_terminal_of_its_parent(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        mount = mounted(bucket)
        process = Path(f"/proc/{mount.pid}")
        assert os.readlink(process / "cwd") == "/"
        assert os.getsid(mount.pid) != os.getsid(0)
        assert os.readlink(process / "fd/0") == "/dev/null"

    def test_the_same_source_mounted_twice_with_a_cache_each(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 1000)
        for mount in (mounted(bucket), mounted(bucket)):
            assert (mount.path / "file").read_bytes() == data

    def test_a_prefix_is_the_root(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("a/b/file", 1000)
        bucket.put("a/bc", 10)
        for url in (f"{bucket.url}/a/b", f"{bucket.url}/a/b/"):
            mount = mounted(url)
            assert os.listdir(mount.path) == ["file"]
            assert (mount.path / "file").read_bytes() == data

    def test_a_local_directory_is_a_source(self, mounted: Mounted, tmp_path: Path) -> None:
        (tmp_path / "tree/d").mkdir(parents=True)
        (tmp_path / "tree/d/file").write_bytes(b"local")
        mount = mounted(f"file://{tmp_path}/tree")
        assert (mount.path / "d/file").read_bytes() == b"local"

    def test_several_sources_are_one_namespace(
        self, mounted: Mounted, lab: LabStore, bucket: Bucket, tmp_path: Path
    ) -> None:
        other = Bucket(lab)
        data = {"one/d/file": bucket.put("d/file", 1000), "two/d/file": other.put("p/d/file", 2000)}
        other.put("p/d/unread", 10)
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree/file").write_bytes(b"local")
        data["three/file"] = b"local"
        config = tmp_path / "stores.toml"
        config.write_text(
            f"""
cache_size = "100M"

[[source]]
name = "one"
url = "{bucket.url}"
endpoint_url = "{lab.endpoint}"

[[source]]
name = "two"
url = "{other.url}/p"

[[source]]
name = "three"
url = "file://{tmp_path}/tree"
"""
        )
        mount = mounted(None, config=config, cache_size=None)
        assert sorted(os.listdir(mount.path)) == ["one", "three", "two"]
        for path, expected in data.items():
            assert (mount.path / path).read_bytes() == expected
        assert not (mount.path / "four").exists()
        assert len({os.stat(mount.path / name).st_ino for name in ("one", "two", "three")}) == 3
        assert [source["name"] for source in mount.status()["sources"]] == ["one", "two", "three"]
        # One store that fails leaves the others at work.
        lab.fault("403", key="p/*", kind="*")
        mount.allowed.append("(lookup|open|read|getattr|readdir|opendir):")
        with pytest.raises(PermissionError):
            (mount.path / "two/d/unread").read_bytes()
        (mount.path / "one/d/file").read_bytes()
        assert os.listdir(mount.path / "three") == ["file"]


def _cachefs_umount(mount: Mount) -> None:
    mount.stop()
    assert not alive(mount.pid), "the command returned before the daemon had ended"


def _umount(mount: Mount) -> None:
    succeed(["umount", mount.path])


def _fusermount(mount: Mount) -> None:
    succeed(["fusermount3", "-u", mount.path])


def _signal(number: int) -> Any:
    def send(mount: Mount) -> None:
        os.kill(mount.pid, number)

    return send


class TestEnding:
    WAYS = pytest.mark.parametrize(
        "end",
        [_cachefs_umount, _umount, _fusermount, _signal(15), _signal(2)],
        ids=["cachefs umount", "umount", "fusermount3 -u", "SIGTERM", "SIGINT"],
    )

    @WAYS
    def test_every_way_is_clean_and_keeps_the_cache(self, mounted: Mounted, bucket: Bucket, end: Any) -> None:
        data = bucket.put("file", 3 * MIB)
        mount = mounted(bucket)
        assert (mount.path / "file").read_bytes() == data
        end(mount)
        eventually(lambda: not alive(mount.pid), "the daemon has ended")
        assert not mounts_at(mount.path)
        assert os.listdir(mount.path) == []
        mount.start()
        with mount.counting() as grown:
            assert (mount.path / "file").read_bytes() == data
        assert "origin_get" not in grown
        assert mount.metrics()["checksum_failures"] == 0

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_signals_end_a_foreground_mount(self, mounted: Mounted, bucket: Bucket, number: int) -> None:
        mount = mounted(bucket, start=False)
        with mount.in_foreground() as process:
            eventually(lambda: mount.path.is_mount(), "the mount")
            time.sleep(0.2)
            process.send_signal(number)
            _, err = process.communicate(timeout=20)
        assert process.returncode in (0, 130)
        assert "Traceback" not in err
        assert not mounts_at(mount.path)

    def test_a_signal_during_the_start_leaves_no_memory_in_use(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        mount = mounted(bucket, start=False)
        done = run([sys.executable, "-c", SIGNALLED, *mount.arguments(foreground=True)], env=mount.env)
        assert done.returncode == 128 + signal.SIGTERM
        assert "RAM tier" in mount.log() and not mount.memory.is_mount()

    @pytest.mark.parametrize(
        "command", [["umount", "-l"], ["fusermount3", "-uz"], [*COMMAND, "umount", "-l"]]
    )
    def test_lazily_with_an_open_file_the_file_can_be_read_to_its_end(
        self, mounted: Mounted, bucket: Bucket, command: list[str]
    ) -> None:
        data = bucket.put("file", 6 * MIB)
        mount = mounted(bucket, max_readahead="1M")
        with open(mount.path / "file", "rb") as file:
            got = file.read(1000)
            succeed([*command, mount.path])
            assert not mounts_at(mount.path)
            assert got + file.read() == data
            assert alive(mount.pid)
        eventually(lambda: not alive(mount.pid), "the daemon has ended with its last user")

    def test_a_busy_mount_stays_and_its_users_are_named(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("d/file", 1000)
        mount = mounted(bucket)
        holder = subprocess.Popen(["sleep", "60"], cwd=mount.path / "d")
        try:
            done = mount.umount()
            assert done.returncode == 1
            assert done.stderr.count("\n") == 1
            assert f"sleep (pid {holder.pid})" in done.stderr
            assert "--lazy" in done.stderr
            assert (mount.path / "d/file").read_bytes() == data
        finally:
            holder.kill()
            holder.wait()

    def test_umount_of_what_is_no_mount_is_refused(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "absent", Path("/proc")):
            done = run([*COMMAND, "umount", path])
            assert done.returncode == 1
            assert done.stderr.count("\n") == 1


@ONE_BACKEND
class TestMemoryAfterwards:
    """A mount that has ended cleanly holds no memory: nobody would know whom to ask for it."""

    def test_nothing_stays_in_shared_memory(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("file", MIB)
        mount = mounted(bucket)
        (mount.path / "file").read_bytes()
        assert mount.memory.exists()
        mount.stop()
        assert not mount.memory.exists()

    @pytest.mark.parametrize("size", ["0", "2M"])
    def test_no_block_stays_that_the_ssd_cannot_take(
        self, mounted: Mounted, bucket: Bucket, size: str
    ) -> None:
        for number in range(8):
            bucket.put(f"file-{number}", 2 * MIB)
        mount = mounted(bucket, cache_size=size)
        for key in bucket.objects:
            (mount.path / key).read_bytes()
        mount.stop()
        assert not [file for file in mount.memory.rglob("*") if file.is_file() and file.name != "tag"]


class TestDying:
    def test_a_start_over_a_dead_mount_cleans_it(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 1000)
        mount = mounted(bucket)
        for _ in range(2):
            mount.kill()
            with pytest.raises(OSError) as caught:
                os.listdir(mount.path)
            assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
            done = mount.try_start()
            assert done.returncode == 0, done.stderr
            assert "took away a dead mount" in done.stderr
            assert len(mounts_at(mount.path)) == 1
            assert (mount.path / "file").read_bytes() == data

    def test_a_dead_mount_is_explained_and_can_be_taken_away(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket)
        mount.kill()
        done = mount.cli("status", mount.path)
        assert done.returncode == 1
        assert "has died" in done.stderr and done.stderr.count("\n") == 1
        done = mount.umount()
        assert done.returncode == 0, done.stderr
        assert not mounts_at(mount.path)
        assert os.listdir(mount.path) == []

    def test_a_dead_mount_with_an_open_file_is_taken_away_too(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 6 * MIB)
        mount = mounted(bucket, max_readahead="1M")
        descriptor = os.open(mount.path / "file", os.O_RDONLY)
        try:
            os.read(descriptor, 1000)
            mount.kill()
            with pytest.raises(OSError) as caught:
                os.pread(descriptor, 1000, 5 * MIB)
            assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
            mount.start()
            assert (mount.path / "file").read_bytes() == data
            assert len(mounts_at(mount.path)) == 1
        finally:
            with contextlib.suppress(OSError):  # the daemon that could be told has gone
                os.close(descriptor)

    @pytest.mark.parametrize(
        "number",
        [
            signal.SIGKILL,
            signal.SIGTERM,
        ],
        ids=["killed", "stopped"],
    )
    def test_readers_that_wait_get_an_errno(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore, number: int
    ) -> None:
        bucket.put("file", 8 * MIB)
        mount = mounted(bucket, timeout=60)
        lab.fault("hang-body", key="file", after=MIB)
        readers = [reader_of(mount.path / "file") for _ in range(3)]
        try:
            time.sleep(0.5)
            assert all(reader.poll() is None for reader in readers)
            mount.killed = number == signal.SIGKILL
            os.kill(mount.pid, number)
            said = [reader.communicate(timeout=5)[0].strip() for reader in readers]
            expected = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO, errno.EINTR, errno.ENODEV}
            assert {int(text) for text in said} <= expected
            eventually(lambda: not alive(mount.pid), "the daemon has ended")
            assert all(state_of(reader.pid) != "D" for reader in readers)
        finally:
            lab.clear_faults()
            for reader in readers:
                reader.communicate(timeout=20)
            eventually(lambda: not alive(mount.pid), "the daemon has ended")

    def test_a_waiting_reader_can_be_killed(self, mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
        bucket.put("file", 8 * MIB)
        mount = mounted(bucket, timeout=60)
        lab.fault("hang-body", key="file", after=MIB)
        reader = reader_of(mount.path / "file")
        time.sleep(0.3)
        reader.kill()
        assert reader.wait(timeout=5) == -signal.SIGKILL
        lab.clear_faults()
        assert (mount.path / "file").read_bytes() == bucket.objects["file"]

    @pytest.mark.long
    @ONE_BACKEND
    def test_a_daemon_that_hangs_is_told_apart(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket)
        os.kill(mount.pid, signal.SIGSTOP)
        try:
            words = [["status", mount.path], ["status", "--json"], ["umount", mount.path], mount.arguments()]
            with ThreadPoolExecutor(4) as together:
                asked = together.map(lambda one: mount.cli(*one, timeout=25), words)
                status, everything, taken, again = asked
            for done in (status, taken, again):
                assert done.returncode == 1
                assert done.stderr.count("\n") == 1, done.stderr
            assert "not answer" in status.stderr
            assert "--lazy" in taken.stderr
            assert "--lazy" in again.stderr
            assert everything.returncode == 0
            done = mount.umount("--lazy")
            assert done.returncode == 0, done.stderr
            assert not mounts_at(mount.path)
        finally:
            os.kill(mount.pid, signal.SIGCONT)
        eventually(lambda: not alive(mount.pid), "the daemon has ended")

    @ONE_BACKEND
    def test_the_answer_to_a_second_daemon_is_one_line(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 1000)
        first = mounted(bucket)
        second = mounted(bucket, start=False, cache_dir=first.cache)
        began = time.monotonic()
        done = second.try_start()
        assert time.monotonic() - began < 10
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert str(first.cache) in done.stderr
        assert not mounts_at(second.path)
        assert (first.path / "file").read_bytes() == data
        second.allowed.append(r"in use|another")

    @ONE_BACKEND
    def test_a_second_mount_at_the_same_place_is_refused(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket)
        done = run([*COMMAND, *mount.arguments(cache_dir=mount.place / "other")], env=mount.env)
        assert done.returncode == 1
        assert "already shows" in done.stderr and done.stderr.count("\n") == 1
        assert len(mounts_at(mount.path)) == 1
        os.listdir(mount.path)

    def test_ending_while_the_cache_is_being_filled_is_quick(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        bucket.put("file", 40 * MIB)
        mount = mounted(bucket)
        lab.shape(bandwidth=5 * MIB)
        reader = reader_of(mount.path / "file")
        time.sleep(0.5)
        began = time.monotonic()
        os.kill(mount.pid, signal.SIGTERM)
        eventually(lambda: not alive(mount.pid), "the daemon has ended", 8)
        assert time.monotonic() - began < 8
        assert reader.communicate(timeout=10)[0].strip() != "end"
        lab.shape(bandwidth=0)


@ONE_BACKEND
class TestStatus:
    def test_json_has_what_is_promised(self, mounted: Mounted, bucket: Bucket) -> None:
        bucket.put("file", 1000)
        mount = mounted(bucket)
        (mount.path / "file").read_bytes()
        status = mount.status()
        for name, kind in {
            "version": str,
            "pid": int,
            "started": float,
            "mountpoint": str,
            "sources": list,
            "fuse": str,
            "tiers": list,
            "metrics": dict,
            "tuning": list,
            "warnings": list,
            "memory_bytes": int,
        }.items():
            assert isinstance(status[name], kind), name
        assert status["pid"] == mount.pid
        assert status["warnings"] == []
        for tier in status["tiers"]:
            assert set(tier) >= {"name", "path", "used_bytes", "cap_bytes", "blocks", "state"}
        assert [tier["cap_bytes"] for tier in status["tiers"]] == [64 * MIB, 1024 * MIB]
        assert all(isinstance(value, int) for value in status["metrics"].values())
        listed = json.loads(mount.cli("status", "--json").stdout)
        assert str(mount.path) in [one["mountpoint"] for one in listed]

    def test_text_is_for_people(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket)
        done = mount.cli("status", mount.path)
        assert done.returncode == 0
        assert str(mount.path) in done.stdout and bucket.url in done.stdout
        assert "\x1b" not in done.stdout

    def test_a_path_below_the_mount_or_elsewhere(self, mounted: Mounted, tmp_path: Path) -> None:
        done = run([*COMMAND, "status", tmp_path])
        assert done.returncode == 1
        assert "not a cachefs mount" in done.stderr and done.stderr.count("\n") == 1

    @pytest.mark.root
    def test_without_any_daemon(self) -> None:
        words = " ".join(COMMAND)
        # Dead mounts of other tests would be listed.
        alone = "umount --all --lazy --types fuse.cachefs; mount -t tmpfs none /run"
        script = f"{alone}; {words} status; {words} status --json"
        done = run(["unshare", "-m", "--propagation", "private", "sh", "-ec", script])
        assert (done.returncode, done.stdout, done.stderr) == (0, "no cachefs mounts\n[]\n", "")

    def test_after_a_kill_a_mount_is_listed_with_a_warning_alone(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        mount = mounted(bucket)
        mount.kill()
        listed = json.loads(mount.cli("status", "--json").stdout)
        warning = f"its daemon has died: cachefs umount {mount.path}, then mount it again"
        assert {"mountpoint": str(mount.path), "warnings": [warning]} in listed


@ONE_BACKEND
class TestWarmAfterRestart:
    def test_a_clean_restart_asks_for_no_byte_again(self, mounted: Mounted, bucket: Bucket) -> None:
        for number in range(20):
            bucket.put(f"d/{number}", 100_000 + number)
        bucket.put("big", 20 * MIB + 5)
        mount = mounted(bucket)
        for key, data in bucket.objects.items():
            assert (mount.path / key).read_bytes() == data
        mount.stop()
        bucket.store.reset()
        mount.start()
        for key, data in bucket.objects.items():
            assert (mount.path / key).read_bytes() == data
        assert bucket.gets() == 0
        assert mount.metrics()["checksum_failures"] == 0

    def test_the_cache_is_found_at_another_mountpoint(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 3 * MIB)
        first = mounted(bucket)
        first.path.joinpath("file").read_bytes()
        first.stop()
        second = mounted(bucket, cache_dir=first.cache)
        with second.counting() as grown:
            assert (second.path / "file").read_bytes() == data
        assert "origin_get" not in grown

    def test_a_changed_object_is_not_served_from_the_old_cache(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        bucket.put("file", 3 * MIB)
        mount = mounted(bucket, metadata_ttl=1)
        (mount.path / "file").read_bytes()
        mount.stop()
        data = bucket.put("file", 3 * MIB, version=2)
        time.sleep(1.1)
        mount.start()
        assert (mount.path / "file").read_bytes() == data

    def test_a_cache_that_is_removed_is_filled_anew(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 3 * MIB)
        mount = mounted(bucket)
        (mount.path / "file").read_bytes()
        mount.stop()
        shutil.rmtree(mount.cache)
        mount.start()
        assert (mount.path / "file").read_bytes() == data


@ONE_BACKEND
@pytest.mark.root
def test_a_run_of_mutants_keeps_no_mount_alive(mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
    """Its process has a mount namespace of its own: what it holds there does not end when it is unmounted here."""
    mount = mounted(bucket)

    def holds() -> int:
        return int(str(mount.path) in Path("/proc/self/mountinfo").read_text())

    _, status = os.waitpid(fork(Path.cwd(), tmp_path / "log", holds, fresh=False), 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert os.path.ismount(mount.path)
