"""The unit, the mount helper and fstab, on machines with a systemd of their own. The unit's mount ends with its daemon here;
`test_systemd_restart.py` has the other one."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from tests.mount.mounts import eventually
from tests.operations.debian import Machine, Rootfs
from tests.operations.jobs import BIG, DIGESTS, FILES, OUTAGE_S, begin, end, fill

pytestmark = pytest.mark.operations

UNIT = "cachefs@mnt-data.service"
DATA = "/mnt/data"
OTHER = "cachefs@mnt-other.service"


@pytest.fixture(scope="module")
def store(lab: LabStore) -> LabStore:
    return fill(lab)


def machine_files(store: LabStore) -> dict[str, str]:
    config = f"""
        source = "s3://data"
        endpoint_url = "{store.endpoint}"
        cache_dir = "/var/cache/cachefs/mnt-data"
        cache_size = "512M"
        ram = "64M"
        keep_free = "16M"
        timeout = "5s"
        allow_other = true
        restart = false
    """
    credentials = "".join(f"{name}={value}\n" for name, value in store.env.items())
    options = f"_netdev,nofail,ro,allow-other,cache_size=64M,keep-free=16M,ram=0,endpoint_url={store.endpoint},x-our.own"
    return {
        "/etc/cachefs/mnt-data.toml": config,
        "/etc/cachefs/mnt-data.env": credentials,
        "/etc/cachefs/mnt-other.toml": config.replace("mnt-data", "mnt-other"),
        "/etc/cachefs/mnt-other.env": credentials,
        # Where fstab's mounts take theirs from, as root's own.
        "/root/.aws/credentials": "[default]\naws_access_key_id = {AWS_ACCESS_KEY_ID}\n"
        "aws_secret_access_key = {AWS_SECRET_ACCESS_KEY}\n".format(**store.env),
        "/etc/fstab": f"s3://data /mnt/fstab cachefs {options} 0 0\n",
        "/etc/tmpfiles.d/mounts.conf": "d /mnt/data\nd /mnt/other\nd /mnt/fstab\n",
        "/opt/reader.py": (Path(__file__).parent / "reader.py").read_text(),
    }


@pytest.fixture(scope="module")
def booted(rootfs: Rootfs, store: LabStore, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine with one mount enabled as a unit and one in fstab."""
    wanted = f"/etc/systemd/system/multi-user.target.wants/{UNIT}"
    links = {wanted: "/etc/systemd/system/cachefs@.service"}
    with Machine(rootfs, tmp_path_factory.mktemp("machine"), machine_files(store), links) as machine:
        yield machine


@pytest.fixture
def machine(booted: Machine) -> Machine:
    """With the unit running, however the test before left it."""
    booted.run("systemctl", "reset-failed", UNIT)
    booted.succeed("systemctl", "start", UNIT)
    return booted


def job_on(machine: Machine) -> subprocess.Popen[str]:
    return begin(machine.popen("python3", "/opt/reader.py", DATA))


def hold(machine: Machine, path: str) -> None:
    """Have a process keep a file open."""
    name = f"hold-{Path(path).name}"
    command = f"exec 3<{path}; touch /run/{name}; exec sleep 600"
    machine.succeed("systemd-run", "--quiet", f"--unit={name}", "sh", "-c", command)
    eventually(lambda: machine.run("test", "-e", f"/run/{name}").returncode == 0, "it is open")


def restarts(machine: Machine) -> int:
    return int(machine.show(UNIT, "NRestarts"))


class TestAtBoot:
    def test_the_unit_and_the_line_in_fstab_are_mounted(self, machine: Machine) -> None:
        for directory in (DATA, "/mnt/fstab"):
            assert machine.layers(directory) == 1, machine.journal("mnt-fstab.mount")
            names = machine.succeed("ls", directory).split()
            assert set(names) == {*FILES, *BIG}
        assert machine.show("mnt-fstab.mount", "Result") == "success"

    def test_what_fstab_says_holds(self, machine: Machine) -> None:
        status = json.loads(machine.succeed("cachefs", "status", "--json", "/mnt/fstab"))
        tiers = {tier["name"]: tier["cap_bytes"] for tier in status["tiers"]}
        assert tiers == {"ssd": 64 << 20}
        assert "allow_other" in machine.succeed("grep", " /mnt/fstab ", "/proc/self/mountinfo")

    def test_nothing_failed_and_nothing_is_hidden(self, machine: Machine) -> None:
        assert machine.succeed("systemctl", "--failed", "--quiet", "--no-legend") == ""
        pid = machine.show(UNIT, "MainPID")
        ours, theirs = machine.succeed("readlink", "/proc/1/ns/mnt", f"/proc/{pid}/ns/mnt").split()
        assert ours == theirs

    def test_the_unit_is_well_formed(self, machine: Machine) -> None:
        done = machine.run("systemd-analyze", "verify", UNIT)  # which exits with 0 on bad keys, too
        assert (done.returncode, done.stderr) == (0, "")


class TestTheHelper:
    def test_umount_and_mount_by_the_line(self, machine: Machine) -> None:
        machine.succeed("umount", "/mnt/fstab")
        eventually(lambda: machine.layers("/mnt/fstab") == 0, "unmounted")
        eventually(lambda: machine.show("mnt-fstab.mount", "ActiveState") == "inactive", "its daemon ended")
        machine.succeed("mount", "/mnt/fstab")
        assert machine.layers("/mnt/fstab") == 1
        assert machine.succeed("sha256sum", "/mnt/fstab/file-1").split()[0] == DIGESTS["file-1"]

    def test_by_hand_with_a_config_file(self, machine: Machine) -> None:
        machine.succeed(
            "env",
            *machine.succeed("cat", "/etc/cachefs/mnt-other.env").split(),
            "mount",
            "-t",
            "cachefs",
            "-o",
            "file-mode=0600,noatime",
            "/etc/cachefs/mnt-other.toml",
            "/mnt/other",
        )
        assert machine.succeed("stat", "-c", "%a", "/mnt/other/file-1").strip() == "600"
        refused = machine.run("mount", "-o", "remount,ro", "/mnt/other")
        assert refused.returncode != 0
        machine.succeed("umount", "/mnt/other")

    def test_a_wrong_option_is_one_line_and_an_exit_code(self, machine: Machine) -> None:
        done = machine.run("mount", "-t", "cachefs", "-o", "cache_sise=1G", "s3://data", "/mnt/other")
        assert done.returncode != 0
        assert "cache_size" in done.stderr
        assert machine.layers("/mnt/other") == 0


class TestDying:
    def test_a_job_that_tries_again_reads_on(self, machine: Machine) -> None:
        before = restarts(machine)
        job = job_on(machine)
        for number in range(5):
            time.sleep(0.5)  # under load: the reader is in the middle of it
            machine.succeed("systemctl", "kill", "--signal=KILL", UNIT)
            eventually(lambda wanted=before + number + 1: restarts(machine) == wanted, "a restart")  # type: ignore[misc]
            eventually(lambda: machine.run("test", "-e", f"{DATA}/big").returncode == 0, "it is back")
            assert machine.layers(DATA) == 1
        said = end(job)
        print(said)
        assert said.wrong == 0
        assert said.reads
        assert said.longest_s <= OUTAGE_S
        assert {"ENOTCONN", "ECONNABORTED"} & said.errors.keys()

    def test_what_hangs_is_ended_and_comes_back(self, machine: Machine) -> None:
        machine.write(f"/run/systemd/system/{UNIT}.d/soon.conf", "[Service]\nWatchdogSec=2\n")
        machine.succeed("systemctl", "daemon-reload")
        machine.succeed("systemctl", "restart", UNIT)
        before = restarts(machine)
        time.sleep(5)  # longer than the watchdog waits
        assert restarts(machine) == before
        job = job_on(machine)
        machine.succeed("systemctl", "kill", "--kill-whom=main", "--signal=STOP", UNIT)
        eventually(lambda: restarts(machine) == before + 1, "the watchdog bit", 20)
        eventually(lambda: machine.run("test", "-e", f"{DATA}/big").returncode == 0, "it is back")
        assert end(job).wrong == 0
        assert machine.layers(DATA) == 1
        assert "most recent call first" in machine.journal(UNIT)  # where it hung
        machine.succeed("rm", f"/run/systemd/system/{UNIT}.d/soon.conf")
        machine.succeed("systemctl", "daemon-reload")


class TestStopping:
    def test_a_busy_mount_is_named_and_goes(self, machine: Machine) -> None:
        hold(machine, f"{DATA}/file-1")
        machine.succeed("systemctl", "stop", UNIT)
        assert machine.show(UNIT, "Result") == "success"
        assert machine.layers(DATA) == 0
        assert "is in use by sleep" in machine.journal(UNIT)
        machine.succeed("systemctl", "stop", "hold-file-1")

    def test_what_is_unmounted_stays_unmounted(self, machine: Machine) -> None:
        before = restarts(machine)
        machine.succeed("cachefs", "umount", DATA)
        eventually(lambda: machine.show(UNIT, "ActiveState") == "inactive", "the unit sees it")
        assert restarts(machine) == before
        assert machine.show(UNIT, "Result") == "success"

    def test_what_was_written_is_uploaded_first(self, machine: Machine, store: LabStore) -> None:
        machine.write(
            f"/run/systemd/system/{OTHER}.d/write.conf",
            "[Service]\nEnvironment=CACHEFS_READ_ONLY=false CACHEFS_WRITEBACK=true\n",
        )
        machine.succeed("systemctl", "daemon-reload")
        machine.succeed("systemctl", "start", OTHER)
        store.shape(latency_ms=1500)  # so that it is not there yet when the stop comes
        machine.succeed("sh", "-c", "echo written > /mnt/other/new")
        machine.succeed("systemctl", "stop", OTHER)
        store.shape(latency_ms=0)
        assert machine.show(OTHER, "Result") == "success"
        assert machine.layers("/mnt/other") == 0
        machine.succeed("cachefs", "refresh", DATA)
        assert machine.succeed("cat", f"{DATA}/new") == "written\n"
        store.delete("data", "new")
        machine.succeed("rm", f"/run/systemd/system/{OTHER}.d/write.conf")
        machine.succeed("systemctl", "daemon-reload")

    def test_a_restart_is_warm(self, machine: Machine, store: LabStore) -> None:
        machine.succeed("sha256sum", f"{DATA}/big")
        store.reset()
        machine.succeed("systemctl", "restart", UNIT)
        machine.succeed("sha256sum", f"{DATA}/big")
        assert store.counters()["bytes_sent"].get("get", 0) == 0


class TestTrouble:
    def test_wrong_options_are_not_tried_again(self, machine: Machine) -> None:
        machine.write("/etc/cachefs/mnt-wrong.toml", 'source = "s3://data"\ncache_sise = "1G"\n')
        assert machine.run("systemctl", "start", "cachefs@mnt-wrong").returncode != 0
        assert machine.show("cachefs@mnt-wrong", "NRestarts") == "0"
        assert machine.show("cachefs@mnt-wrong", "ActiveState") == "failed"
        assert "cache_size" in machine.journal("cachefs@mnt-wrong")

    def test_a_store_that_is_not_there_yet_is_waited_for(self, machine: Machine, store: LabStore) -> None:
        machine.write(
            "/run/systemd/system/cachefs@mnt-other.service.d/place.conf",
            "[Service]\nEnvironment=CACHEFS_ENDPOINT_URL=http://127.0.0.1:1 CACHEFS_TIMEOUT=1\n",
        )
        text = machine_files(store)["/etc/cachefs/mnt-other.toml"]
        lines = [line for line in text.splitlines() if "endpoint" not in line and "timeout" not in line]
        machine.write("/etc/cachefs/mnt-other.toml", "\n".join(lines))
        machine.succeed("systemctl", "daemon-reload")
        machine.succeed("systemctl", "start", "--no-block", OTHER)
        eventually(lambda: int(machine.show(OTHER, "NRestarts")) > 2, "it is tried again", 30)
        assert machine.layers("/mnt/other") == 0
        machine.write("/etc/cachefs/mnt-other.toml", text)
        machine.succeed("rm", "/run/systemd/system/cachefs@mnt-other.service.d/place.conf")
        machine.succeed("systemctl", "daemon-reload")
        eventually(lambda: machine.layers("/mnt/other") == 1, "it is mounted", 30)
        machine.succeed("systemctl", "stop", OTHER)


def test_a_machine_goes_down_with_its_mounts_in_use(rootfs: Rootfs, store: LabStore, tmp_path: Path) -> None:
    with Machine(rootfs, tmp_path, machine_files(store)) as machine:
        machine.succeed("systemctl", "start", UNIT, "mnt-fstab.mount")
        hold(machine, f"{DATA}/file-1")
        hold(machine, "/mnt/fstab/file-2")
        assert machine.power_off() < 30
