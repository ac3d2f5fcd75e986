"""A mount that outlives its daemon, as a unit of a machine with its own systemd: what dies, and what programs notice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.lab.client import LabStore
from cachefs.fuse import holder
from tests.mount.mounts import eventually
from tests.operations.debian import Machine, Rootfs
from tests.operations.jobs import fill, no_job_notices
from tests.operations.test_systemd import machine_files

pytestmark = pytest.mark.operations

UNIT = "cachefs@mnt-held.service"
PATH = "/mnt/held"
MEMORY = Path("/sys/fs/cgroup/memory")
BACK_S = 60.0
"""For the next daemon, on a machine that does other things. Guessed."""


@pytest.fixture(scope="module")
def store(lab: LabStore) -> LabStore:
    return fill(lab)


@pytest.fixture(scope="module")
def booted(rootfs: Rootfs, store: LabStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    files = machine_files(store)
    config = files["/etc/cachefs/mnt-data.toml"]
    config = config.replace("mnt-data", "mnt-held").replace("s3://data", "s3://held")
    files["/etc/cachefs/mnt-held.toml"] = config.replace("restart = false", "")
    files["/etc/cachefs/mnt-held.env"] = files["/etc/cachefs/mnt-data.env"]
    files["/etc/tmpfiles.d/held.conf"] = f"d {PATH}\n"
    files["/opt/worker.py"] = (Path(__file__).parent / "worker.py").read_text()
    with Machine(rootfs, tmp_path_factory.mktemp("machine"), files) as machine:
        yield machine


@pytest.fixture
def machine(booted: Machine) -> Machine:
    """With the unit running, and just started: a life is as long as the test."""
    booted.run("systemctl", "reset-failed", UNIT)
    booted.succeed("systemctl", "restart", UNIT, timeout=180)
    return booted


def status(machine: Machine) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(machine.succeed("cachefs", "status", "--json", PATH))
    return found


def main_pid(machine: Machine) -> int:
    return int(machine.show(UNIT, "MainPID"))


def systemd_restarts(machine: Machine) -> int:
    return int(machine.show(UNIT, "NRestarts"))


def stored(machine: Machine) -> int:
    return int(machine.show(UNIT, "NFileDescriptorStore"))


def send(machine: Machine, number: str, pid: int) -> None:
    machine.succeed("sh", "-c", f"kill -{number} {pid}")


def next_daemon(machine: Machine, restarts: int) -> dict[str, Any]:
    """Its status, once it answers and the unit is active."""
    found: list[dict[str, Any]] = []

    def back() -> bool:
        done = machine.run("cachefs", "status", "--json", PATH)
        if done.returncode == 0:
            found.append(json.loads(done.stdout))
        active = machine.show(UNIT, "ActiveState") == "active"
        return bool(active and found and found[-1]["holder"]["restarts"] >= restarts)

    eventually(back, f"daemon {restarts}", BACK_S)
    assert found[-1]["holder"]["restarts"] == restarts
    return found[-1]


def working(machine: Machine) -> AbstractContextManager[None]:
    """A job, in which no call fails."""
    return no_job_notices(machine.popen("python3", "/opt/worker.py", PATH))


class TestDying:
    def test_a_daemon(self, machine: Machine) -> None:
        main, before = main_pid(machine), systemd_restarts(machine)
        with working(machine):
            for number in (1, 2, 3):
                send(machine, "KILL", status(machine)["pid"])
                next_daemon(machine, number)
        assert (main_pid(machine), systemd_restarts(machine)) == (main, before)
        assert machine.show(UNIT, "ActiveState") == "active"
        assert machine.layers(PATH) == 1

    @pytest.mark.parametrize("whom", ["main", "all"])
    def test_the_holder(self, machine: Machine, whom: str) -> None:
        """`all`: as a control group is killed as a whole."""
        main, before = main_pid(machine), systemd_restarts(machine)
        eventually(lambda: stored(machine) == 2, "what is stored")
        with working(machine):
            for number in (1, 2):
                machine.succeed("systemctl", "kill", f"--kill-whom={whom}", "--signal=KILL", UNIT)
                eventually(lambda wanted=before + number: systemd_restarts(machine) == wanted, "a restart")  # type: ignore[misc]
                found = next_daemon(machine, number)["holder"]
                assert found["pid"] == main_pid(machine) != main
                assert found["longest_pause_s"] >= found["pause_s"] > 0
            send(machine, "KILL", status(machine)["pid"])
            next_daemon(machine, 3)
        assert stored(machine) == 2
        assert machine.layers(PATH) == 1

    @pytest.mark.skipif(not MEMORY.is_dir(), reason="no control groups of version 1 for memory")
    def test_a_daemon_that_has_no_memory_left(self, machine: Machine) -> None:
        """A control group outside of the machine, whose own are read-only: the kernel kills what is in it."""
        main = main_pid(machine)
        with working(machine), memory_limit(4 << 20, machine, status(machine)["pid"]) as kills:
            machine.run("sh", "-c", f"cat {PATH}/file-* >/dev/null")
            eventually(lambda: kills() == 1, "the kernel has killed it", BACK_S)
            next_daemon(machine, 1)
        assert main_pid(machine) == main

    def test_what_hangs(self, machine: Machine) -> None:
        machine.write(f"/run/systemd/system/{UNIT}.d/soon.conf", "[Service]\nWatchdogSec=3\n")
        machine.succeed("systemctl", "daemon-reload")
        machine.succeed("systemctl", "restart", UNIT, timeout=180)
        before = systemd_restarts(machine)
        eventually(lambda: stored(machine) == 2, "what is stored")
        with working(machine):
            send(machine, "STOP", status(machine)["pid"])
            eventually(lambda: systemd_restarts(machine) == before + 1, "the watchdog bit", BACK_S)
            machine.succeed("rm", f"/run/systemd/system/{UNIT}.d/soon.conf")
            machine.succeed("systemctl", "daemon-reload")
            next_daemon(machine, 1)
        assert machine.layers(PATH) == 1

    def test_a_crash_loop(self, machine: Machine) -> None:
        """The holder gives up: programs get an errno, and the unit mounts again."""
        before = systemd_restarts(machine)
        for number in range(holder.CRASH_LOOP):
            done = machine.run("cachefs", "status", "--json", PATH)
            send(machine, "KILL", json.loads(done.stdout)["pid"])
            if number < holder.CRASH_LOOP - 1:
                next_daemon(machine, number + 1)
        eventually(lambda: systemd_restarts(machine) == before + 1, "the holder has given up", BACK_S)
        assert next_daemon(machine, 0)["holder"]["restarts"] == 0
        assert f"the daemon has died {holder.CRASH_LOOP} times" in machine.journal(UNIT)
        assert machine.layers(PATH) == 1
        eventually(lambda: stored(machine) == 2, "what is stored of the new mount")

    def test_what_cannot_start_again_is_a_dead_mount_and_no_program_hangs(self, machine: Machine) -> None:
        """systemd keeps nothing of a unit that has failed for good."""
        eventually(lambda: stored(machine) == 2, "what is stored")
        config = machine.succeed("cat", "/etc/cachefs/mnt-held.toml")
        machine.write("/etc/cachefs/mnt-held.toml", f'{config}\ncache_sise = "1G"\n')
        try:
            machine.succeed("systemctl", "kill", "--kill-whom=all", "--signal=KILL", UNIT)
            eventually(lambda: machine.show(UNIT, "ActiveState") == "failed", "it is not tried again", BACK_S)
            eventually(lambda: stored(machine) == 0, "nothing is kept")
            done = machine.run("ls", PATH)
            assert "not connected" in done.stderr or "connection abort" in done.stderr
        finally:
            machine.write("/etc/cachefs/mnt-held.toml", config)


@contextmanager
def memory_limit(size: int, machine: Machine, pid: int) -> Iterator[Any]:
    """The process `pid` of the machine may take `size` bytes more. Yields how many the kernel has killed for it."""
    host = next(
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and f"\t{pid}\n" in nspid(path) and machine.has(int(path.name))
    )
    place = MEMORY / f"cachefs-test-{os.getpid()}"
    place.mkdir()
    try:
        (place / "memory.limit_in_bytes").write_text(str(size))
        (place / "cgroup.procs").write_text(str(host))
        yield lambda: int((place / "memory.oom_control").read_text().split()[-1])
    finally:
        eventually(lambda: not (place / "cgroup.procs").read_text(), "it is empty")
        place.rmdir()


def nspid(path: Path) -> str:
    try:
        lines = (path / "status").read_text().splitlines(keepends=True)
    except OSError:
        return ""
    return next((line for line in lines if line.startswith("NSpid:")), "")


class TestOnPurpose:
    def test_an_upgrade(self, machine: Machine) -> None:
        main, before = main_pid(machine), systemd_restarts(machine)
        with working(machine):
            for number in (1, 2):
                machine.succeed("cachefs", "upgrade", PATH)
                assert next_daemon(machine, number)["holder"]["handed_over"] == number
        assert (main_pid(machine), systemd_restarts(machine)) == (main, before)
        assert machine.show(UNIT, "SubState") == "running"  # and not stopping

    @pytest.mark.parametrize("verb", ["reload", "reload-or-restart"])
    def test_a_reload(self, machine: Machine, verb: str) -> None:
        """Reads the configuration again; no other daemon begins."""
        pid = status(machine)["pid"]
        with working(machine):
            machine.succeed("systemctl", verb, UNIT)
            eventually(lambda: "SIGHUP: changed nothing" in machine.journal(UNIT), "the answer")
        assert status(machine)["pid"] == pid

    def test_a_stop_leaves_nothing(self, machine: Machine) -> None:
        eventually(lambda: stored(machine) == 2, "what is stored")
        machine.succeed("systemctl", "stop", UNIT)
        assert machine.show(UNIT, "Result") == "success"
        assert machine.layers(PATH) == 0
        assert stored(machine) == 0
        assert PATH not in machine.succeed("sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '").replace(
            "sh -c cat", ""
        )

    def test_a_stop_in_use_and_without_a_daemon_leaves_nothing(self, machine: Machine) -> None:
        eventually(lambda: stored(machine) == 2, "what is stored")
        machine.succeed(
            "systemd-run", "--quiet", "--unit=user", "sh", "-c", f"exec 3<{PATH}/file-1; exec sleep 600"
        )
        machine.succeed("systemctl", "stop", UNIT)
        assert (machine.layers(PATH), stored(machine)) == (0, 0)
        machine.succeed("systemctl", "stop", "user")

    def test_a_manual_restart_ends_what_is_open(self, machine: Machine) -> None:
        before = status(machine)["pid"]
        machine.succeed("systemctl", "restart", UNIT, timeout=180)
        found = status(machine)
        assert found["pid"] != before and found["holder"]["restarts"] == 0
        assert machine.layers(PATH) == 1
        eventually(lambda: stored(machine) == 2, "what is stored of the new mount")

    def test_the_service_manager_is_not_woken_by_requests(self, machine: Machine) -> None:
        eventually(lambda: stored(machine) == 2, "what is stored")
        before = machine.wakeups()
        machine.succeed("python3", "-c", f"import os\nfor _ in range(2000): os.statvfs('{PATH}')")
        assert machine.wakeups() - before < 500
