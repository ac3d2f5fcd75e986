"""Containers: a sidecar whose mount others see, users without rights, and what compose.yaml starts."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.lab.client import LabStore
from tests.conftest import ROOT
from tests.mount.mounts import eventually, run
from tests.operations.debian import PLACE
from tests.operations.engine import DOCKER, Engine, answers, layers, shared_directory
from tests.operations.jobs import BIG, DIGESTS, FILES, OUTAGE_S, begin, end, fill, no_job_notices

pytestmark = pytest.mark.operations

MIB = 1 << 20
TO_MOUNT = ("--device", "/dev/fuse", "--cap-add", "SYS_ADMIN", "--security-opt", "apparmor:unconfined")


@pytest.fixture(scope="module")
def store(lab: LabStore) -> LabStore:
    return fill(lab)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    PLACE.mkdir(parents=True, exist_ok=True)
    with Engine(PLACE, tmp_path_factory.mktemp("docker")) as engine:
        yield engine


@pytest.fixture
def share(tmp_path: Path) -> Iterator[Path]:
    with shared_directory(tmp_path / "share") as path:
        yield path


def to_the_store(store: LabStore) -> list[str]:
    """The lab store listens on this machine's loopback."""
    environ = {**store.env, "CACHEFS_CACHE_SIZE": "256M", "CACHEFS_KEEP_FREE": "16M", "CACHEFS_RAM": "32M"}
    return [
        "--network=host",
        *(word for name, value in environ.items() for word in ("-e", f"{name}={value}")),
    ]


class TestSidecar:
    """What docker/kubernetes/sidecar.yaml describes, without a cluster."""

    @pytest.fixture
    def sidecar(self, engine: Engine, store: LabStore, share: Path) -> Iterator[str]:
        words = [*TO_MOUNT, *to_the_store(store), "--restart=on-failure", "-v", f"{share}:/mnt/share:rshared"]
        with engine.container(*words, "cachefs", "mount", "-f", "s3://data", "/mnt/share/data") as name:
            answers(share / "data")
            yield name

    def job(self, engine: Engine, share: Path) -> subprocess.Popen[str]:
        reader = Path(__file__).parent / "reader.py"
        words = [
            "--rm",
            "-i",
            "--network=none",
            "-v",
            f"{share}:/mnt/share:rslave",
            "-v",
            f"{reader}:/reader.py:ro",
        ]
        words += ["--entrypoint", "python3", "cachefs", "/reader.py", "/mnt/share/data"]
        return begin(engine.popen("run", *words))

    def test_a_job_reads_through_the_death_of_its_sidecar(
        self, engine: Engine, share: Path, sidecar: str
    ) -> None:
        job = self.job(engine, share)
        for number in range(3):
            time.sleep(0.5)  # under load: the reader is in the middle of it
            engine.kill(sidecar)
            eventually(lambda wanted=number + 1: engine.state(sidecar)["RestartCount"] == wanted, "a restart")  # type: ignore[misc]
            answers(share / "data")
            assert layers(share / "data") == 1
        time.sleep(0.5)
        said = end(job)
        print(said)
        assert said.wrong == 0
        assert said.longest_s <= OUTAGE_S + 1  # of which the engine takes its part, and more each time
        assert {"ENOTCONN", "ECONNABORTED"} & said.errors.keys()

    def test_it_has_a_cache_on_disk(self, engine: Engine, sidecar: str) -> None:
        status = json.loads(engine.succeed("exec", sidecar, "cachefs", "status", "--json", "/mnt/share/data"))
        assert {tier["name"]: tier["path"] for tier in status["tiers"]}.get("ssd") == "/cache/0"
        assert status["warnings"] == []

    def test_a_stop_takes_the_mount_away(self, engine: Engine, share: Path, sidecar: str) -> None:
        engine.succeed("stop", "-t", "60", sidecar)
        assert layers(share / "data") == 0
        assert engine.state(sidecar)["ExitCode"] == 0

    def test_what_the_probes_ask(self, engine: Engine, sidecar: str) -> None:
        engine.succeed(
            "exec", sidecar, "sh", "-c", "mountpoint -q /mnt/share/data && stat -f /mnt/share/data"
        )
        engine.succeed("exec", sidecar, "cachefs", "flush", "--timeout", "120s", "/mnt/share/data")

    def test_memory_is_a_share_of_the_containers(self, engine: Engine, store: LabStore, share: Path) -> None:
        words = [*TO_MOUNT, *to_the_store(store), "-e", "CACHEFS_RAM=", "--memory=256m"]
        words += [
            "-v",
            f"{share}:/mnt/share:rshared",
            "cachefs",
            "mount",
            "-f",
            "s3://data",
            "/mnt/share/data",
        ]
        with engine.container(*words) as name:
            answers(share / "data")
            said = engine.succeed(
                "exec", name, "cachefs", "mount", "--print-config", "s3://data", "/mnt/other"
            )
            [line] = [line for line in said.splitlines() if line.startswith("ram = ")]
            assert line.startswith('ram = "64M"')


class TestNothingIsNoticed:
    """As the manifests have it: process 1 stays when the daemon dies."""

    @pytest.fixture
    def sidecar(self, engine: Engine, store: LabStore, share: Path) -> Iterator[str]:
        words = [*TO_MOUNT, *to_the_store(store), "--restart=on-failure"]
        words += ["-v", f"{share}:/mnt/share:rshared"]
        with engine.container(*words, "cachefs", "mount", "-f", "s3://held", "/mnt/share/data") as name:
            answers(share / "data")
            yield name

    def job(self, engine: Engine, share: Path) -> AbstractContextManager[None]:
        worker = Path(__file__).parent / "worker.py"
        words = ["--rm", "-i", "--network=none"]
        words += ["-v", f"{share}:/mnt/share:rslave", "-v", f"{worker}:/worker.py:ro"]
        words += ["--entrypoint", "python3", "cachefs", "/worker.py", "/mnt/share/data"]
        return no_job_notices(engine.popen("run", *words))

    def status(self, engine: Engine, name: str) -> Any:
        return json.loads(engine.succeed("exec", name, "cachefs", "status", "--json", "/mnt/share/data"))

    def next_daemon(self, engine: Engine, name: str, restarts: int) -> Any:
        def back() -> bool:
            done = engine.run("exec", name, "cachefs", "status", "--json", "/mnt/share/data")
            return done.returncode == 0 and json.loads(done.stdout)["holder"]["restarts"] == restarts

        eventually(back, f"daemon {restarts}", 60)
        return self.status(engine, name)

    def test_of_a_daemon_that_was_killed(self, engine: Engine, share: Path, sidecar: str) -> None:
        with self.job(engine, share):
            for number in (1, 2, 3):
                found = self.status(engine, sidecar)
                assert found["holder"]["pid"] == 1
                engine.succeed("exec", sidecar, "sh", "-c", f"kill -9 {found['pid']}")
                self.next_daemon(engine, sidecar, number)
        assert engine.state(sidecar)["RestartCount"] == 0
        assert layers(share / "data") == 1

    def test_of_an_upgrade_inside_of_the_container(self, engine: Engine, share: Path, sidecar: str) -> None:
        """As docs/how-to/containers.md describes it: an image of another version is unpacked over the present one."""
        module = "/opt/cachefs/lib/python3*/site-packages/cachefs/__init__.py"
        another = f"""sed -i 's/^__version__ = .*/__version__ = "99.0"/' {module}"""
        with self.job(engine, share):
            image = engine.popen(
                "run", "--rm", "--entrypoint", "sh", "cachefs", "-c", f"{another}; tar -C /opt -cf - cachefs"
            )
            done = subprocess.run(
                [DOCKER, "exec", "-i", sidecar, "tar", "-C", "/opt", "-xf", "-"],
                stdin=image.stdout,
                env=engine.environ,
                capture_output=True,
            )
            assert (image.wait(60), done.returncode) == (0, 0), done.stderr
            said = engine.run("exec", sidecar, "cachefs", "upgrade", "/mnt/share/data")
            assert said.returncode == 0, said.stderr
            assert "→ 99.0" in said.stderr
            found = self.next_daemon(engine, sidecar, 1)
        assert (found["version"], found["holder"]["handed_over"]) == ("99.0", 1)
        assert engine.state(sidecar)["RestartCount"] == 0

    def test_of_the_end_of_process_1_all_is_noticed(self, engine: Engine, share: Path, sidecar: str) -> None:
        """Its descriptors end with it, and so does the connection. The next container mounts again."""
        with (share / "data" / "file-1").open("rb") as kept:
            engine.kill(sidecar)
            eventually(lambda: engine.state(sidecar)["RestartCount"] == 1, "a restart")
            answers(share / "data")
            assert layers(share / "data") == 1
            with pytest.raises(OSError, match=r"not connected|connection abort"):
                kept.read()
            assert (share / "data" / "file-1").read_bytes() == FILES["file-1"]
        eventually(lambda: self.status(engine, sidecar)["holder"]["restarts"] == 0, "a holder of its own")


class TestUsersWithoutRights:
    def read(self, engine: Engine, name: str, *words: str) -> str:
        eventually(lambda: engine.run("exec", name, "stat", "-f", "/mnt/data").returncode == 0, "it answers")
        return engine.succeed("exec", *words, name, "sha256sum", "/mnt/data/file-1").split()[0]

    @contextmanager
    def plain(self, engine: Engine, store: LabStore, *words: str) -> Iterator[str]:
        """As with --user, where everybody may open the device, as udev has it."""
        become = "chmod 666 /dev/fuse; exec setpriv --reuid=cachefs --regid=cachefs --clear-groups"
        command = f"{become} cachefs-entrypoint mount -f s3://data /mnt/data"
        words = (*TO_MOUNT, *to_the_store(store), *words, "--entrypoint", "sh", "cachefs", "-c", command)
        with engine.container(*words) as name:
            eventually(lambda: "mounted s3://data" in engine.logs(name), "it is mounted")
            yield name

    def test_a_plain_user_mounts_in_a_container(self, engine: Engine, store: LabStore) -> None:
        with self.plain(engine, store) as name:
            assert self.read(engine, name, "--user", "cachefs") == DIGESTS["file-1"]
            log = engine.logs(name)
            # What it could not raise, and what that costs.
            assert "only root may register backing files" in log
            assert "read_ahead_kb not raised" in log
            assert "2-3 times slower" in log
            engine.succeed("stop", "-t", "30", name)
            assert engine.state(name)["ExitCode"] == 0

    def test_a_cache_directory_that_one_may_not_look_at_is_none(
        self, engine: Engine, store: LabStore
    ) -> None:
        with self.plain(engine, store, "-e", "CACHEFS_CACHE_DIR=/root/cache") as name:
            assert self.read(engine, name, "--user", "cachefs") == DIGESTS["file-1"]
            assert "no ssd tier" in engine.logs(name)

    @pytest.mark.parametrize("user", ["root", "cachefs"])
    def test_the_device_alone_is_not_enough_and_says_what_is(
        self, engine: Engine, store: LabStore, user: str
    ) -> None:
        words = ["--rm", "--device", "/dev/fuse", *to_the_store(store), "--user", user, "cachefs"]
        done = engine.run("run", *words, "mount", "-f", "s3://data", "/mnt/data")
        assert done.returncode == 1
        assert "--cap-add SYS_ADMIN" in done.stderr.splitlines()[-1]

    def test_without_the_device(self, engine: Engine, store: LabStore) -> None:
        done = engine.run(
            "run", "--rm", *to_the_store(store), "cachefs", "mount", "-f", "s3://data", "/mnt/data"
        )
        assert done.returncode == 1
        assert "--device /dev/fuse" in done.stderr.splitlines()[-1]


class TestImage:
    def test_it_holds_what_serves_and_nothing_that_builds(self, engine: Engine) -> None:
        for tool in ("gcc", "pip", "git"):
            assert engine.run(
                "run", "--rm", "--entrypoint", "sh", "cachefs", "-c", f"command -v {tool}"
            ).returncode
        base = int(engine.succeed("image", "inspect", "-f", "{{.Size}}", "cachefs-test/debian:bookworm-slim"))
        size = int(engine.succeed("image", "inspect", "-f", "{{.Size}}", "cachefs"))
        print(f"{(size - base) / MIB:.0f} MiB above the base")
        assert size - base < 250 * MIB

    def test_what_it_does_by_itself(self, engine: Engine) -> None:
        assert engine.succeed("run", "--rm", "cachefs", "version").startswith("cachefs ")
        done = engine.run("run", "--rm", "cachefs")
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert "no MOUNTPOINT" in done.stderr


def test_two_nodes_of_the_compose_file_share_one_cache(engine: Engine, share: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for name, content in {**FILES, **BIG}.items():
        (data / name).write_bytes(content)
    environ = {**engine.environ, "CACHEFS_DATA": str(data), "CACHEFS_SHARE": str(share)}
    compose = ["docker-compose", "-f", ROOT / "docker/compose.yaml", "-p", "cachefs-test"]
    try:
        done = run([*compose, "up", "--no-build", "-d"], env=environ, timeout=180)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        assert engine.succeed("wait", "cachefs-test_trainer_1").strip() == "0"
        done = run([*compose, "logs", "--no-color"], env=environ)
        for name, content in {**FILES, **BIG}.items():
            digest = hashlib.sha256(content).hexdigest()
            for node in ("a", "b"):
                assert f"{digest}  /mnt/share/{node}/{name}" in done.stdout, done.stdout
        assert "peer node-a:7070 joined" in done.stdout
        assert "peer node-b:7070 joined" in done.stdout
    finally:
        run([*compose, "down", "-v", "-t", "30"], env=environ, timeout=120)
    assert layers(share / "a") == layers(share / "b") == 0
