"""A container engine of our own, with the images of `docker/Dockerfile`, and what runs in it.

`dockerd` is started in a directory of its own and leaves this machine's rules for packets alone. No registry is asked: the
base image is a Debian made here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cachefs.base.linux import mounts
from tests.mount.mounts import Completed, eventually, run
from tests.operations.debian import CERTIFICATES, SUITE, source_tree, succeed

DOCKER = "/usr/bin/docker"  # the one that belongs to this dockerd
BASE = f"cachefs-test/debian:{SUITE}-slim"


class Engine:
    """`place` keeps images from run to run; what else there is goes at the end."""

    def __init__(self, place: Path, scratch: Path) -> None:
        self._data = place / "docker"
        self._scratch = scratch
        self._socket = f"unix://{scratch}/docker.sock"
        self._stack = ExitStack()
        self.environ = {**os.environ, "DOCKER_HOST": self._socket, "DOCKER_BUILDKIT": "0"}

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            words = [
                "/usr/sbin/dockerd",
                "--iptables=false",
                "--ip6tables=false",
                "--bridge=none",
                "-s",
                "overlay2",
            ]
            words += ["--data-root", self._data, "--exec-root", self._scratch / "exec"]
            words += ["-p", self._scratch / "docker.pid", "-H", self._socket]
            with (self._scratch / "dockerd.log").open("wb") as log:
                process = subprocess.Popen(
                    [str(word) for word in words], stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            stack.callback(self._end, process)
            eventually(lambda: self.run("info").returncode == 0, "dockerd answers", 30)
            self._build()
            self._stack = stack.pop_all()
        return self

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        left = self.run("ps", "-aq").stdout.split()
        if left:
            self.run("rm", "-f", *left)
        self.run("network", "prune", "-f")
        self.run("volume", "prune", "-f")
        self.run("image", "prune", "-f")
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        run(["umount", self._scratch / "exec" / "netns" / "default"])

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _build(self) -> None:
        if self.run("image", "inspect", BASE).returncode != 0:
            tar = self._scratch / "base.tar"
            bring = f"copy-in {CERTIFICATES} {CERTIFICATES.parent}"  # this machine's may know more
            words = ["--quiet", "--variant=minbase", "--include=ca-certificates", f"--customize-hook={bring}"]
            succeed("mmdebstrap", *words, SUITE, tar)
            self.succeed("import", tar, BASE)
            tar.unlink()
        tree = self._scratch / "tree"
        source_tree(tree)
        # All stages have names, so that they are still there the next time.
        stages = {
            "build": "cachefs-build",
            "build-lab": "cachefs-build-lab",
            "runtime": "cachefs",
            "lab": "cachefs-lab",
        }
        for target, tag in stages.items():
            words = [
                "--network=host",
                "--build-arg",
                f"BASE={BASE}",
                "-f",
                tree / "docker/Dockerfile",
                "-t",
                tag,
            ]
            self.succeed("build", *words, "--target", target, tree, timeout=900)
        shutil.rmtree(tree)

    # -- commands ----------------------------------------------------------------------------------

    def run(self, *words: object, timeout: float = 60) -> Completed:
        return run([DOCKER, *words], timeout=timeout, env=self.environ)

    def succeed(self, *words: object, timeout: float = 120) -> str:
        return succeed(DOCKER, *words, timeout=timeout, env=self.environ)

    def popen(self, *words: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [DOCKER, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environ,
        )

    @contextmanager
    def container(self, *words: object) -> Iterator[str]:
        """``docker run -d`` of these words: its id. It goes at the end, whatever it does."""
        name = self.succeed("run", "-d", *words).strip()
        try:
            yield name
        except BaseException:
            print(self.logs(name))
            raise
        finally:
            self.run("rm", "-f", name)

    def logs(self, name: str) -> str:
        done = self.run("logs", name)
        return done.stdout + done.stderr

    def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.succeed("inspect", name))[0]
        return {**found["State"], "RestartCount": found["RestartCount"]}

    def kill(self, name: str) -> None:
        """As the kernel does it when memory runs out: nobody has asked the engine to."""
        os.kill(int(self.state(name)["Pid"]), signal.SIGKILL)


@contextmanager
def shared_directory(path: Path) -> Iterator[Path]:
    """A directory whose mounts are seen in all that share it, as everything is where systemd runs."""
    path.mkdir()
    succeed("mount", "--bind", path, path)
    succeed("mount", "--make-shared", path)
    try:
        yield path
    finally:
        for mount in reversed([mount for mount in mounts() if mount.path.startswith(f"{path}/")]):
            run(["umount", "-l", mount.path])
        succeed("umount", path)


def layers(path: Path) -> int:
    """How many cachefs mounts lie at `path`, one upon the other."""
    return sum(mount.path == str(path) and mount.is_cachefs for mount in mounts())


def answers(path: Path, seconds: float = 30) -> None:
    """Wait until a mount is there."""
    until = time.monotonic() + seconds
    while run(["stat", "-f", path]).returncode != 0 or not layers(path):
        assert time.monotonic() < until, f"no mount at {path}"
        time.sleep(0.05)
