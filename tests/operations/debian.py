"""Debians of our own: a root filesystem with cachefs installed by scripts/install, and machines that boot it.

The root filesystem is made once (`mmdebstrap`) and kept, and this tree is installed on it anew by each run. A machine boots
a systemd of its own from an overlay above it (`systemd-nspawn`); it shares this machine's kernel and network, so that it
reaches the lab store on the loopback.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from cachefs.base.linux import parse
from tests.mount.mounts import Completed, eventually, run

ROOT = Path(__file__).resolve().parents[2]
PLACE = ROOT / ".venv" / "operations"
SUITE = os.environ.get("CACHEFS_SUITE", "bookworm")
PACKAGES = (
    "systemd",
    "systemd-sysv",
    "dbus",
    "mount",
    "ca-certificates",
    # What the README says that an installation needs.
    "python3",
    "python3-venv",
    "python3-dev",
    "gcc",
    "libc6-dev",
    "pkg-config",
    "libfuse3-dev",
    "fuse3",
)
PATH = "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
BOOT_S = 60.0


def succeed(*command: object, timeout: float = 600, **options: object) -> str:
    done = run(command, timeout=timeout, **options)
    assert done.returncode == 0, (
        f"{command}: exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout


def source_tree(target: Path) -> None:
    """This tree as it is now, without what is not the project's."""
    target.mkdir(parents=True)
    names = succeed("git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    command = ["rsync", "-a", "--from0", "--ignore-missing-args", "--files-from=-", f"{ROOT}/", f"{target}/"]
    subprocess.run(command, input=names.encode(), check=True)


class Rootfs:
    """The root filesystem below `place`."""

    def __init__(self, place: Path) -> None:
        self.path = place / f"{SUITE}-root"
        self._tar = place / f"{SUITE}.tar"

    def build(self) -> None:
        """Make it, or install this tree on the one there is."""
        made = self.path / "etc" / "cachefs-packages"
        if not made.exists() or made.read_text() != " ".join(PACKAGES):
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir()
            include = f"--include={','.join(PACKAGES)}"
            succeed("mmdebstrap", "--quiet", "--variant=minbase", include, SUITE, self.path)
            made.write_text(" ".join(PACKAGES))
        # This machine's may know more.
        shutil.copyfile(CERTIFICATES, self.path / CERTIFICATES.relative_to("/"))
        shutil.copyfile("/etc/resolv.conf", self.path / "etc/resolv.conf")
        tree = self.path / "root" / "cachefs"
        shutil.rmtree(tree, ignore_errors=True)
        source_tree(tree)
        with bound("/proc", self.path / "proc"):
            environment = {"PATH": PATH, "HOME": "/root", "PIP_CERT": str(CERTIFICATES)}
            succeed("chroot", self.path, "/root/cachefs/scripts/install", env=environment)


@contextmanager
def bound(source: str | Path, target: Path) -> Iterator[None]:
    succeed("mount", "--bind", source, target)
    try:
        yield
    finally:
        succeed("umount", target)


class Machine:
    """A booted systemd. `files` are laid over the root filesystem before it boots, and `links` after them."""

    def __init__(
        self, rootfs: Rootfs, place: Path, files: Mapping[str, str], links: Mapping[str, str] | None = None
    ) -> None:
        self._rootfs = rootfs
        self._place = place
        self._files = dict(files)
        self._links = dict(links or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._leader = 0
        self._stack = ExitStack()
        self.console = place / "console"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            root = self._overlay(stack)
            for name, text in self._files.items():
                path = root / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            for name, target in self._links.items():
                path = root / name.lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.symlink_to(target)
            self._boot(root, stack)
            self._stack = stack.pop_all()
        return self

    def _overlay(self, stack: ExitStack) -> Path:
        layers = {name: self._place / name for name in ("upper", "work", "root", "cache")}
        for path in layers.values():
            path.mkdir(parents=True)
        options = f"lowerdir={self._rootfs.path},upperdir={layers['upper']},workdir={layers['work']}"
        succeed("mount", "-t", "overlay", "-o", options, "cachefs-test", layers["root"])
        stack.callback(succeed, "umount", layers["root"])
        return layers["root"]

    def _boot(self, root: Path, stack: ExitStack) -> None:
        words = ["systemd-nspawn", "--quiet", f"--directory={root}", "--boot", "--register=no", "--keep-unit"]
        words += [f"--machine=cachefs-{os.getpid()}", "--kill-signal=SIGRTMIN+4", "--console=pipe"]
        # The cache on a real disk: files on an overlay are a layer deeper than most kernels take for passthrough.
        words += ["--bind=/dev/fuse", f"--bind={self._place / 'cache'}:/var/cache/cachefs"]
        with self.console.open("wb") as console:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        stack.callback(self._end)
        eventually(self._find_leader, f"the machine began: {self.console}", BOOT_S)
        eventually(self._is_up, f"the machine booted: {self.console}", BOOT_S)

    def _find_leader(self) -> int:
        assert self._process is not None
        assert self._process.poll() is None, self.console.read_text()
        own = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        for child in own.read_text().split():  # another one is there for a moment, and sets up
            try:
                lines = Path(f"/proc/{child}/status").read_text().splitlines()
            except OSError:
                continue
            if next(line for line in lines if line.startswith("NSpid:")).split()[-1] == "1":
                self._leader = int(child)
        return self._leader

    def _is_up(self) -> bool:
        return self.run("systemctl", "is-system-running").stdout.strip() in ("running", "degraded")

    def _end(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)  # which it passes on as --kill-signal: an orderly shutdown
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and its machine with it
            self._process.wait(10)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._process is not None and self._process.poll() is None:
            sys.stderr.write(self.run("journalctl", "--no-pager", "-n", "100").stdout)
        self._stack.close()

    # -- from outside ------------------------------------------------------------------------------

    def _inside(self, command: tuple[object, ...]) -> list[str]:
        words = [
            "nsenter",
            "-t",
            self._leader,
            "-m",
            "-p",
            "-u",
            "-i",
            "-n",
            "-C",
            "-r",
            "-w",
            "env",
            "-i",
            f"PATH={PATH}",
        ]
        return [str(word) for word in (*words, *command)]

    def run(self, *command: object, timeout: float = 60) -> Completed:
        return run(self._inside(command), timeout=timeout)

    def popen(self, *command: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self._inside(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def succeed(self, *command: object, timeout: float = 60) -> str:
        return succeed(*self._inside(command), timeout=timeout)

    def outside(self, path: str) -> Path:
        """The name that a file of the machine has outside of it."""
        return Path(f"/proc/{self._leader}/root") / path.lstrip("/")

    def write(self, path: str, text: str) -> None:
        target = self.outside(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def show(self, unit: str, name: str) -> str:
        """A property of a unit."""
        return self.succeed("systemctl", "show", "--value", "-p", name, unit).strip()

    def journal(self, unit: str) -> str:
        return self.succeed("journalctl", "--no-pager", "-o", "cat", "-u", unit)

    def layers(self, mountpoint: str) -> int:
        """How many cachefs mounts lie at `mountpoint`, one upon the other."""
        seen = parse(Path(f"/proc/{self._leader}/mountinfo").read_text())
        return sum(mount.path == mountpoint and mount.is_cachefs for mount in seen)

    def has(self, pid: int) -> bool:
        """Whether the process `pid` (of this machine's number) runs on that one."""
        try:
            mine = os.stat(f"/proc/{pid}/ns/pid")
        except OSError:
            return False
        return mine.st_ino == os.stat(f"/proc/{self._leader}/ns/pid").st_ino

    def wakeups(self) -> int:
        """How often its process 1 has been woken."""
        lines = Path(f"/proc/{self._leader}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])

    def power_off(self) -> float:
        """Seconds it took."""
        assert self._process is not None
        began = time.monotonic()
        self.run("systemctl", "poweroff")
        self._process.wait(60)
        return time.monotonic() - began
