"""What can be said of the unit, the manifests and the image by looking at them. No cluster has seen the manifests: they
are held to Kubernetes' own schema, and to the rules that the schema does not know."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from cachefs.base.errors import ConfigError, MountError
from cachefs.cli.main import cli, mount
from cachefs.config import layers
from cachefs.config.config import Config
from tests.conftest import ROOT
from tests.mount.mounts import COMMAND, run, succeed

UNIT = ROOT / "systemd" / "cachefs@.service"
HELPER = ROOT / "systemd" / "mount.cachefs"
MANIFESTS = sorted((ROOT / "docker" / "kubernetes").glob("*.yaml"))
COMPOSE = ROOT / "docker" / "compose.yaml"
SCRIPTS = [
    HELPER,
    ROOT / "docker" / "entrypoint",
    *(ROOT / "scripts" / name for name in ("install", "test-operations")),
]

PRIVATE = re.compile(
    r"^(Protect(System|Home|KernelTunables|KernelModules|KernelLogs|ControlGroups|Proc|Hostname|Clock)|Private\w+|"
    r"(ReadWrite|ReadOnly|Inaccessible|Exec|NoExec)Paths|Bind\w*Paths|TemporaryFileSystem|DynamicUser|MountFlags|"
    r"MountAPIVFS|Root\w+|RuntimeDirectory)\s*=",
    re.MULTILINE,
)
"""Options that give a service a mount namespace of its own. RuntimeDirectory is here because it goes with the first of
several instances that stops, with the sockets of the others."""


def options_of(words: list[str]) -> Config:
    """What `cachefs mount` makes of its arguments. Only ``-o``, places and ``--config`` are understood."""
    given: dict[str, Any] = {}
    o: list[str] = []
    places: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == "-o":
            o.append(next(rest))
        elif word == "--config":
            given["config"] = next(rest)
        elif word == "-f":
            given["foreground"] = True
        else:
            places.append(word)
    given["mountpoint"] = places[-1]
    if len(places) > 1:
        given["source"] = places[0]
    return layers.load(given, o, {})


class TestTheEntrypoint:
    @pytest.mark.parametrize("where", ["argument", "variable", "file"])
    def test_it_makes_the_mountpoint_and_nothing_else(self, tmp_path: Path, where: str) -> None:
        """The values of options are paths, too."""
        mountpoint, log = tmp_path / "share/data", tmp_path / "log"
        command = tmp_path / "bin/cachefs"
        command.parent.mkdir()
        command.write_text(
            f'#!/bin/sh\ncase "$*" in *--print-config) exec {shlex.join(COMMAND)} "$@" ;; esac\necho "$@"\n'
        )
        command.chmod(0o755)
        file = tmp_path / "c.toml"
        file.write_text(f'source = "s3://bucket"\nmountpoint = "{mountpoint}"\n')
        words, env = {
            "argument": (["s3://bucket", str(mountpoint)], {}),
            "variable": ([], {"CACHEFS_SOURCE": "s3://bucket", "CACHEFS_MOUNTPOINT": str(mountpoint)}),
            "file": (["--config", str(file)], {}),
        }[where]
        words = ["mount", "-f", *words, "--log-file", str(log)]
        path = f"{command.parent}:{os.environ['PATH']}"
        done = run([str(ROOT / "docker" / "entrypoint"), *words], env={**os.environ, **env, "PATH": path})
        assert (done.returncode, done.stdout, done.stderr) == (0, " ".join(words) + "\n", "")
        assert mountpoint.is_dir()
        assert not log.exists()

    @pytest.mark.parametrize(
        "name", ['it\'s "quoted"', "two\nlines", "back\\slash", os.fsdecode(b"no \xff utf-8")]
    )
    def test_it_makes_a_mountpoint_of_any_name(self, tmp_path: Path, name: str) -> None:
        mountpoint = tmp_path / name / "data"
        command = tmp_path / "bin/cachefs"
        command.parent.mkdir()
        command.write_text(
            f'#!/bin/sh\ncase "$*" in *--print-config) exec {shlex.join(COMMAND)} "$@" ;; esac\n'
        )
        command.chmod(0o755)
        path = f"{command.parent}:{os.environ['PATH']}"
        words = ["mount", "-f", "s3://bucket", str(mountpoint)]
        succeed([str(ROOT / "docker" / "entrypoint"), *words], env={**os.environ, "PATH": path})
        assert mountpoint.is_dir()


class TestTheUnit:
    def test_nothing_hides_the_mount(self) -> None:
        assert not PRIVATE.search(UNIT.read_text())

    def test_the_example_is_understood(self, monkeypatch: pytest.MonkeyPatch) -> None:
        example = ROOT / "systemd" / "example.toml"
        config = options_of(["-f", "--config", str(example), "/mnt/data"])
        assert [source.name for source in config.sources] == ["imagenet"]
        assert config.allow_other
        assert tomllib.loads(example.read_text())["cache_dir"] == "/var/cache/cachefs/mnt-data"

    def test_a_stop_during_the_start_is_no_failure(self) -> None:
        """The holder exits with this code where its daemon was ended by SIGTERM."""
        assert f"\nSuccessExitStatus={128 + signal.SIGTERM}\n" in UNIT.read_text()

    def test_a_stop_has_time_for_what_was_written(self) -> None:
        waits = dict(re.findall(r"^(\w+)=(\d+)$", UNIT.read_text(), re.MULTILINE))
        deadline = options_of(["s3://bucket", "/mnt/data"]).flush_deadline
        assert int(waits["TimeoutStopSec"]) >= deadline + 30

    @pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing")
    def test_systemd_understands_it(self, tmp_path: Path) -> None:
        unit = tmp_path / "cachefs@mnt-data.service"
        # It must not look whether it is installed here.
        unit.write_text(re.sub(r"/usr/local/bin/cachefs", "/bin/true", UNIT.read_text()))
        done = run(["systemd-analyze", "verify", unit])
        about = [line for line in done.stderr.splitlines() if unit.name in line]
        assert about == []


class TestTheHelper:
    @pytest.fixture
    def calls(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A function: the arguments of mount(8) → what `cachefs mount` is given, or the exit code."""
        given: list[dict[str, Any]] = []
        monkeypatch.setattr(mount, "callback", lambda **options: given.append(options))

        def call(*words: str) -> dict[str, Any] | int:
            given.clear()
            code = CliRunner().invoke(cli, ["mount.cachefs", *words]).exit_code
            if code or not given:
                return code
            return {name: value for name, value in given[0].items() if value not in (None, ())}

        return call

    def test_the_script_hands_over(self, tmp_path: Path) -> None:
        stand_in = tmp_path / "cachefs"
        stand_in.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\nexit 32\n')
        stand_in.chmod(0o755)
        helper = tmp_path / "mount.cachefs"
        helper.write_text(HELPER.read_text().replace("PATH=/usr", f"PATH={tmp_path}:/usr"))
        done = run(["sh", helper, "s3://b", "/mnt/a b", "-o", "rw"])
        assert done.returncode == 32
        assert done.stdout.split("\0") == ["mount.cachefs", "s3://b", "/mnt/a b", "-o", "rw", ""]

    @pytest.mark.parametrize(
        ("words", "o"),
        [
            ((), None),
            (("-o", "rw"), None),
            (("-o", "rw,cache_size=1G,noatime"), "cache_size=1G,noatime"),
            (("-o", "ro,cache-size=1G,x-systemd.automount"), "ro,cache-size=1G,x-systemd.automount"),
            (("-s", "-n", "-v", "-o", "_netdev", "-o", "nofail"), "_netdev,nofail"),
            (("-sn", "-r"), "ro"),
            (("-o", r"rw,profile=a\,b"), r"profile=a\,b"),
            (("-t", "cachefs", "-o", "rw,relatime"), "relatime"),
        ],
    )
    def test_what_is_called(self, calls: Any, words: tuple[str, ...], o: str | None) -> None:
        found = calls("s3://b/p", "/mnt/a b", *words)
        assert found.pop("places") == ("s3://b/p", "/mnt/a b")
        assert found == ({} if o is None else {"o": (o,)})

    def test_a_config_file_is_a_source(self, calls: Any) -> None:
        assert calls("/etc/cachefs/a.toml", "/mnt/a") == {
            "config": "/etc/cachefs/a.toml",
            "places": ("/mnt/a",),
        }

    def test_a_fake_mount_mounts_nothing(self, calls: Any) -> None:
        assert calls("s3://b", "/mnt/a", "-f") == 0

    @pytest.mark.parametrize("words", [("-o", "remount,ro"), ("-N", "/proc/1/ns/mnt"), ("-x",)])
    def test_what_it_cannot_do(self, calls: Any, words: tuple[str, ...]) -> None:
        assert calls("s3://b", "/mnt/a", *words) == 1

    def test_too_few_arguments(self, calls: Any) -> None:
        assert calls("s3://b") == 1

    @pytest.mark.parametrize(
        ("failure", "code"),
        [(MountError("no"), 32), (ConfigError("no"), 1), (KeyboardInterrupt(), 8), (OSError(5), 32)],
    )
    def test_it_exits_as_mount_8_has_it(
        self, monkeypatch: pytest.MonkeyPatch, failure: BaseException, code: int
    ) -> None:
        def fail(**_: Any) -> None:
            raise failure

        monkeypatch.setattr(mount, "callback", fail)
        assert CliRunner().invoke(cli, ["mount.cachefs", "s3://b", "/mnt/a"]).exit_code == code

    def test_what_others_mean_is_nobodys_option(self, calls: Any) -> None:
        line = (
            "rw,_netdev,nofail,ro,noatime,x-systemd.mount-timeout=5,X-mount.mkdir,allow-other,cache_size=500G"
        )
        found = calls("s3://b", "/mnt/a", "-o", line)
        config = layers.load({"source": "s3://b", "mountpoint": "/mnt/a"}, found["o"], {})
        assert config.read_only
        assert config.allow_other
        assert config.cache_size.bytes == 500 << 30


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_run(path: Path) -> None:
    assert path.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", path], check=True)


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def pod_of(document: dict[str, Any]) -> dict[str, Any] | None:
    if document["kind"] == "Pod":
        spec: dict[str, Any] = document["spec"]
        return spec
    spec = document["spec"].get("template", {}).get("spec")
    return spec


PODS = [(path.stem, pod) for path in MANIFESTS for d in documents(path) if (pod := pod_of(d)) is not None]


def daemon_of(pod: dict[str, Any]) -> dict[str, Any]:
    found = [c for c in [*pod.get("initContainers", ()), *pod["containers"]] if c["name"] == "cachefs"]
    assert len(found) == 1
    container: dict[str, Any] = found[0]
    return container


def shares_of(container: dict[str, Any]) -> list[dict[str, Any]]:
    return [mount for mount in container["volumeMounts"] if mount["name"] == "share"]


class TestManifests:
    @pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
    def test_kubernetes_would_take_them(self, path: Path) -> None:
        for document in documents(path):
            kubernetes_validate.validate(document, "1.29", strict=True)

    def test_there_are_some(self) -> None:
        assert {name for name, _ in PODS} == {"sidecar", "daemonset"}

    @pytest.mark.parametrize(("name", "pod"), PODS)
    def test_the_mount_gets_out(self, name: str, pod: dict[str, Any]) -> None:
        daemon = daemon_of(pod)
        assert daemon["securityContext"]["privileged"], "nobody else may have Bidirectional"
        [share] = shares_of(daemon)
        assert share["mountPropagation"] == "Bidirectional"
        mountpoint = daemon["args"][-1]
        assert mountpoint.startswith(share["mountPath"] + "/"), (
            "at its root a dead mount would stay with who has it"
        )
        assert {volume["name"] for volume in pod["volumes"]} >= {m["name"] for m in daemon["volumeMounts"]}

    @pytest.mark.parametrize(("name", "pod"), PODS)
    def test_what_it_is_told_is_understood(self, name: str, pod: dict[str, Any]) -> None:
        daemon = daemon_of(pod)
        assert daemon["args"][0] == "mount"
        environ = {e["name"]: e.get("value", str(200 << 30)) for e in daemon["env"]}
        assert all(variable.startswith("CACHEFS_") for variable in environ)
        words = daemon["args"][1:]
        config = layers.load({"foreground": True, "source": words[1], "mountpoint": words[2]}, (), environ)
        assert config.foreground

    @pytest.mark.parametrize(("name", "pod"), PODS)
    def test_it_is_asked_and_has_time_to_end(self, name: str, pod: dict[str, Any]) -> None:
        daemon = daemon_of(pod)
        for probe in ("startupProbe", "livenessProbe"):
            command = " ".join(daemon[probe]["exec"]["command"])
            # What is below the mount would answer statfs, too; that it is mounted, a dead daemon's mount is as well.
            assert "mountpoint -q" in command
            assert "stat -f" in command
        stop = daemon["lifecycle"]["preStop"]["exec"]["command"]
        assert stop[:2] == ["cachefs", "flush"]
        wait = int(stop[stop.index("--timeout") + 1].removesuffix("s"))
        assert pod["terminationGracePeriodSeconds"] >= wait + 30
        assert {"limits", "requests"} == daemon["resources"].keys()
        assert "memory" in daemon["resources"]["limits"], "the RAM tier is a share of it"

    def test_a_sidecar_is_native_and_its_job_sees_it_come_back(self) -> None:
        pod = dict(PODS)["sidecar"]
        [daemon] = pod["initContainers"]
        assert daemon["restartPolicy"] == "Always"
        resources = daemon["resources"]
        assert resources["requests"]["ephemeral-storage"] < resources["limits"]["ephemeral-storage"]
        for job in pod["containers"]:
            [share] = shares_of(job)
            assert share["mountPropagation"] == "HostToContainer"
            assert share["mountPath"] == shares_of(daemon)[0]["mountPath"]

    def test_the_nodes_find_each_other(self) -> None:
        service, nodes = documents(ROOT / "docker/kubernetes/daemonset.yaml")
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
        assert service["spec"]["selector"] == nodes["spec"]["template"]["metadata"]["labels"]
        environ = {e["name"]: e.get("value") for e in daemon_of(nodes["spec"]["template"]["spec"])["env"]}
        [port] = service["spec"]["ports"]
        assert environ["CACHEFS_PEERS"] == f"dns:{service['metadata']['name']}:{port['port']}"
        [secret] = [v["secret"] for v in nodes["spec"]["template"]["spec"]["volumes"] if "secret" in v]
        assert secret["defaultMode"] == 0o400, "a key that all can read is refused"


class TestImage:
    def test_compose_knows_the_options(self) -> None:
        services = yaml.safe_load(COMPOSE.read_text())["services"]
        assert services.keys() == {"s3", "etcd", "key", "node-a", "node-b", "trainer"}
        for name in ("node-a", "node-b"):
            node = services[name]
            environ = {k: v for k, v in node["environment"].items() if k.startswith("CACHEFS_")}
            listen, source, mountpoint = node["command"].split()[-3:]
            given = {"foreground": True, "peer_listen": listen, "source": source, "mountpoint": mountpoint}
            assert layers.load(given, (), environ).peers == "etcd:http://etcd:2379/cachefs"
            assert node["cap_add"] == ["SYS_ADMIN"]
            [share] = [v for v in node["volumes"] if isinstance(v, dict)]
            assert share["bind"]["propagation"] == "rshared"
            assert mountpoint.startswith(share["target"] + "/")

    def test_nothing_of_a_registry_but_the_base(self) -> None:
        text = (ROOT / "docker/Dockerfile").read_text()
        assert "# syntax=" not in text  # which would be fetched
        stages = {m[1] for m in re.finditer(r"^FROM \S+ AS (\S+)", text, re.MULTILINE)}
        bases = {m[1] for m in re.finditer(r"^FROM (\S+)", text, re.MULTILINE)}
        assert bases - stages == {"${BASE}"}
        assert re.search(r"^ARG BASE=debian:\S+-slim$", text, re.MULTILINE)
