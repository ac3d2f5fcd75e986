"""Mounts that somebody else has made: the daemon gets a descriptor of /dev/fuse, and has no rights."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.lab.client import LabStore
from cachefs.base import client
from cachefs.store.ram import SHM, own_directory, ram_directory, remove_ram
from tests.mount.conftest import ONE_BACKEND, Bucket, why_no_native_backend
from tests.mount.mounts import (
    COMMAND,
    NOISE,
    Completed,
    eventually,
    mounts_at,
    plain_environment,
    processes_with,
    run,
)

pytestmark = pytest.mark.root

UNSEEN = 65534
CONNECTIONS = Path("/sys/fs/fuse/connections")

# Whoever may mount: opens /dev/fuse, mounts it, gives up every right, and becomes the daemon. {fd} is the descriptor.
MOUNTS_AND_GOES = """
import ctypes, json, os, subprocess, sys
given = json.loads(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
def done(result):
    assert result == 0, os.strerror(ctypes.get_errno())
fd = os.open("/dev/fuse", os.O_RDWR)
os.set_inheritable(fd, True)
path = given["path"].encode()
options = f"fd={fd},rootmode=40000,user_id={given['uid']},group_id={given['uid']}{given['options']}"
done(libc.mount(b"the-store", path, b"fuse.cachefs", 2 | 4 | given["flags"], options.encode()))
if given["hidden"]:
    done(libc.unshare(0x20000))
    done(libc.mount(b"none", b"/", None, 1 << 14 | 1 << 18, None))
    done(libc.umount2(path, 2))
if given["asked"]:
    os.read(fd, 1 << 20)
if given["kept"]:
    subprocess.Popen(["sleep", "60"], pass_fds=[fd], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
words = [word.replace("{fd}", str(fd)) for word in given["words"]]
os.execvp(words[0], words)
"""


def as_user(uid: int) -> list[str]:
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--inh-caps=-all"]


@cache
def why_not_as_nobody() -> str:
    done = run([*as_user(UNSEEN), *COMMAND, "version"], cwd="/")
    return "" if done.returncode == 0 else f"another user cannot run this Python: {done.stderr.strip()}"


class Passed:
    """A mount at `path` whose daemon runs as `uid`. `place` is the daemon's own."""

    def __init__(self, place: Path, source: str, env: dict[str, str], uid: int) -> None:
        self.place = place
        self.path = place / "mnt"
        self.cache = place / "cache"
        self.log_file = place / "log"
        self.source = source
        self.uid = uid
        self.runtime = place / "run"
        self.env = {**plain_environment(), **env, "XDG_RUNTIME_DIR": str(self.runtime), "HOME": str(place)}
        place.chmod(0o755)
        for directory in (self.path, self.cache, self.runtime):
            directory.mkdir()
            os.chown(directory, uid, uid)
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *words: str, target: str = "/dev/fd/{fd}", foreground: bool = True) -> list[str]:
        sizes = ["--cache-dir", str(self.cache), "--cache-size", "1G", "--ram", "64M", "--keep-free", "64M"]
        flags = [*(["-f"] if foreground else []), "--timeout", "5"]
        return [*COMMAND, "mount", *sizes, *flags, *words, self.source, target]

    def start(self, *words: str, visible: bool = True, **more: Any) -> subprocess.Popen[bytes]:
        """Mount and serve, until the daemon says that it is mounted."""
        process = self.begin(self.command(*words), hidden=not visible, **more)
        self.served()
        return process

    def served(self) -> None:
        process = self.process
        assert process is not None
        eventually(lambda: "mounted " in self.log() or process.poll() is not None, "served", 20)
        assert process.poll() is None, self.log()

    def begin(
        self,
        command: list[str],
        *,
        options: str = ",default_permissions,allow_other",
        read_only: bool = False,
        hidden: bool = False,
        kept: bool = False,
        asked: bool = False,
    ) -> subprocess.Popen[bytes]:
        if self.uid:
            command = [*as_user(self.uid), "--bounding-set=-all", "--no-new-privs", *command]
        given = {
            **{"path": str(self.path), "uid": self.uid, "options": options, "flags": int(read_only)},
            **{"hidden": hidden, "kept": kept, "asked": asked, "words": command},
        }
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MOUNTS_AND_GOES, json.dumps(given)],
                env=self.env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def log(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def as_daemon(self, *words: object) -> Completed:
        """A command of ours as the daemon's user."""
        return run([*as_user(self.uid), *COMMAND, *words], env=self.env, cwd="/")

    def status(self) -> dict[str, Any]:
        where = self.runtime / "cachefs" if self.uid else Path("/run/cachefs")
        name = "*.sock" if self.uid else f"*{self.place.name}*.sock"
        eventually(lambda: list(where.glob(name)), "it can be asked")
        (socket,) = where.glob(name)
        status: dict[str, Any] = client.request(socket, "status", 10.0, owners={self.uid})
        return status

    def end(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(20)

    @property
    def memory(self) -> Path:
        """Where its RAM tier is: only root has one of its own."""
        if not self.uid:
            return ram_directory(self.cache)
        return SHM / own_directory(self.cache).name.replace(f"-{os.getuid()}-", f"-{self.uid}-")

    def umount(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.umount2(os.fsencode(self.path), 2) == 0, os.strerror(ctypes.get_errno())

    def finish(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        while mounts_at(self.path):
            self.umount()
        held = [file for file in self.memory.rglob("*") if file.is_file() and file.name != "tag"]
        remove_ram(self.cache)
        shutil.rmtree(self.memory, ignore_errors=True)
        assert not processes_with(str(self.place))
        if self.process is not None and self.process.returncode == 0:
            assert not held


Make = Callable[..., Passed]


@pytest.fixture
def passed(lab: LabStore, bucket: Bucket) -> Iterator[Make]:
    made: list[Passed] = []

    def make(uid: int = UNSEEN) -> Passed:
        if uid and (reason := why_not_as_nobody()):
            pytest.skip(reason)
        # Not below pytest's directories: they are root's alone.
        mount = Passed(Path(tempfile.mkdtemp(prefix="cfp-", dir="/tmp")), bucket.url, lab.env, uid)
        made.append(mount)
        return mount

    yield make
    for mount in made:
        mount.finish()
        shutil.rmtree(mount.place)


def errno_of(action: Callable[[], object]) -> int:
    with pytest.raises(OSError) as caught:
        action()
    assert caught.value.errno is not None
    return caught.value.errno


class TestServing:
    def test_without_any_right(self, passed: Make, bucket: Bucket, backend: str) -> None:
        wanted = {f"d/{n}": bucket.put(f"d/{n}", size) for n, size in enumerate((0, 1, 70_000, 5_000_000))}
        mount = passed()
        process = mount.start("--fuse", backend, "--read-only")
        shown = Path(f"/proc/{process.pid}/status").read_text()
        assert "CapEff:\t0000000000000000" in shown
        for _ in range(2):
            assert {key: (mount.path / key).read_bytes() for key in wanted} == wanted
        assert sorted(os.listdir(mount.path / "d")) == ["0", "1", "2", "3"]
        status = mount.status()
        assert status["fuse"] == backend
        assert status["mountpoint"] == str(mount.path)
        assert any("read_ahead_kb not raised" in line for line in status["tuning"])
        if os.path.ismount(CONNECTIONS):
            connection = CONNECTIONS / mounts_at(mount.path)[0].device.partition(":")[2]
            assert (connection / "max_background").read_text() == "128\n"
        done = mount.as_daemon("status", "--json", mount.path)
        assert json.loads(done.stdout)["pid"] == process.pid
        assert not [line for line in mount.log().splitlines() if NOISE.search(line)]

    def test_a_stop_ends_it_and_unmounts_nothing(self, passed: Make, bucket: Bucket, backend: str) -> None:
        bucket.put("file", 100)
        mount = passed()
        mount.start("--fuse", backend, "--read-only")
        fd = os.open(mount.path / "file", os.O_RDONLY)
        try:
            assert mount.end() == 0
            assert errno_of(lambda: os.pread(fd, 10, 50)) == errno.ENOTCONN
        finally:
            with suppress(OSError):  # a close that is to be told of finds nobody, either
                os.close(fd)
        assert len(mounts_at(mount.path)) == 1
        assert errno_of(lambda: os.listdir(mount.path)) == errno.ENOTCONN
        assert "stopped (SIGTERM)" in mount.log()
        assert not [line for line in mount.log().splitlines() if NOISE.search(line)]

    @pytest.mark.skipif(not os.path.ismount(CONNECTIONS), reason="fusectl is not mounted")
    def test_a_stop_ends_it_though_somebody_kept_a_copy(
        self, passed: Make, bucket: Bucket, backend: str
    ) -> None:
        bucket.put("file", 100)
        mount = passed()
        process = mount.start("--fuse", backend, "--read-only", kept=True)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert mount.end() == 0
        os.kill(int(children[0]), 0)  # who has the copy is still there
        try:
            assert errno_of(lambda: os.listdir(mount.path)) == errno.ENOTCONN
        finally:
            os.kill(int(children[0]), signal.SIGKILL)

    def test_who_is_killed_leaves_an_error(self, passed: Make, bucket: Bucket, backend: str) -> None:
        bucket.put("file", 100)
        mount = passed()
        mount.start("--fuse", backend, "--read-only")
        assert (mount.path / "file").stat().st_size == 100
        assert mount.end(signal.SIGKILL) == -signal.SIGKILL
        assert errno_of(lambda: os.listdir(mount.path)) == errno.ENOTCONN

    def test_whoever_mounted_unmounts(self, passed: Make, bucket: Bucket, backend: str) -> None:
        mount = passed()
        process = mount.start("--fuse", backend, "--read-only")
        mount.umount()
        assert process.wait(20) == 0
        assert "stopped (umount)" in mount.log()

    def test_where_the_mount_is_not_seen(self, passed: Make, bucket: Bucket, backend: str) -> None:
        data = bucket.put("file", 3_000_000)
        mount = passed()
        mount.start("--fuse", backend, "--read-only", visible=False)
        assert (mount.path / "file").read_bytes() == data
        name = mount.status()["mountpoint"]
        assert name.startswith("/dev/fd/")
        assert json.loads(mount.as_daemon("status", "--json", name).stdout)["mountpoint"] == name
        assert any("not seen from here" in line for line in mount.status()["tuning"])
        assert mount.end() == 0
        assert errno_of(lambda: os.listdir(mount.path)) == errno.ENOTCONN

    def test_a_shell_that_mounts(self, passed: Make, bucket: Bucket) -> None:
        """As docs/how-to/containers.md has it."""
        data = bucket.put("file", 100)
        mount = passed()
        options = f"fd=7,rootmode=40000,user_id={UNSEEN},group_id={UNSEEN},allow_other,default_permissions"
        script = f"exec 7<>/dev/fuse; mount -i -t fuse.cachefs -o {options} the-store {mount.path}"
        daemon = shlex.join([*as_user(UNSEEN), *mount.command("--read-only", target="/dev/fd/7")])
        with mount.log_file.open("ab") as log:
            mount.process = subprocess.Popen(
                ["bash", "-ec", f"{script}; exec {daemon}"],
                env=mount.env,
                stdin=subprocess.DEVNULL,
                stderr=log,
            )
        mount.served()
        assert (mount.path / "file").read_bytes() == data
        assert mount.end() == 0


def stored(bucket: Bucket, key: str) -> bytes:
    """What another client gets."""
    with urllib.request.urlopen(f"{bucket.store.endpoint}/{bucket.name}/{key}", timeout=10) as reply:
        data: bytes = reply.read()
    return data


class TestWriting:
    def test_what_is_written_is_in_the_store(self, passed: Make, bucket: Bucket, backend: str) -> None:
        data = os.urandom(3_000_000)
        mount = passed()
        mount.start("--fuse", backend)
        (mount.path / "new").write_bytes(data)
        assert stored(bucket, "new") == data
        os.rename(mount.path / "new", mount.path / "final")
        assert mount.end() == 0
        assert stored(bucket, "final") == data

    def test_a_daemon_that_only_reads(self, passed: Make, bucket: Bucket, backend: str) -> None:
        data = bucket.put("file", 100)
        mount = passed()
        mount.start("--fuse", backend, "--read-only")
        assert "rw" in mounts_at(mount.path)[0].options
        for change in (
            lambda: (mount.path / "file").write_bytes(b"x"),
            lambda: (mount.path / "new").write_bytes(b"x"),
            lambda: os.truncate(mount.path / "file", 0),
            lambda: os.unlink(mount.path / "file"),
            lambda: os.mkdir(mount.path / "d"),
            lambda: os.rename(mount.path / "file", mount.path / "other"),
        ):
            assert errno_of(change) == errno.EROFS
        assert (mount.path / "file").read_bytes() == data

    def test_a_mount_that_is_read_only(self, passed: Make, bucket: Bucket, backend: str) -> None:
        data = bucket.put("file", 100)
        mount = passed()
        mount.start("--fuse", backend, read_only=True)
        assert mount.status()["read_only"] is True
        assert errno_of(lambda: (mount.path / "new").write_bytes(b"x")) == errno.EROFS
        assert (mount.path / "file").read_bytes() == data


@ONE_BACKEND
class TestRights:
    def test_root_still_uses_passthrough_files(self, passed: Make, bucket: Bucket) -> None:
        if reason := why_no_native_backend():
            pytest.skip(reason)
        data = bucket.put("file", 3_000_000)
        mount = passed(uid=0)
        mount.start("--read-only")
        assert mount.status()["fuse"] == "native"

        def passthrough() -> bool:
            assert (mount.path / "file").read_bytes() == data
            return bool(mount.status()["metrics"]["passthrough_opens"])

        eventually(passthrough, "the kernel reads it by itself")
        assert mount.end() == 0
        assert len(mounts_at(mount.path)) == 1

    def test_one_who_may_not_lend_is_served_by_libfuse(self, passed: Make) -> None:
        mount = passed()
        mount.start()
        assert mount.status()["fuse"] == "pyfuse3"

    def test_modes_that_mean_nothing_are_told(self, passed: Make) -> None:
        mount = passed()
        mount.start(options=",allow_other")
        assert "without default_permissions" in mount.log()


@ONE_BACKEND
class TestRefusals:
    def refused(self, mount: Passed, command: list[str], **more: Any) -> str:
        done = run(command, env=mount.env, cwd="/", **more)
        assert done.returncode == 1
        assert done.stdout == ""
        assert done.stderr.startswith("cachefs: ")
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def test_no_descriptor(self, passed: Make) -> None:
        mount = passed(uid=0)
        assert "/dev/fd/77 is not open" in self.refused(mount, mount.command(target="/dev/fd/77"))

    def test_another_file(self, passed: Make) -> None:
        mount = passed(uid=0)
        with open("/dev/null") as file:
            command = mount.command(target=f"/dev/fd/{file.fileno()}")
            assert "is not /dev/fuse" in self.refused(mount, command, pass_fds=[file.fileno()])

    def test_not_mounted(self, passed: Make) -> None:
        mount = passed(uid=0)
        with open("/dev/fuse", "rb+", buffering=0) as file:
            command = mount.command(target=f"/dev/fd/{file.fileno()}")
            assert "is not mounted" in self.refused(mount, command, pass_fds=[file.fileno()])

    def test_in_the_background(self, passed: Make) -> None:
        mount = passed(uid=0)
        command = mount.command(target="/dev/fd/7", foreground=False)
        assert "add -f" in self.refused(mount, command)

    @pytest.mark.parametrize("backend", ["native", "pyfuse3"])
    def test_served_before(self, passed: Make, backend: str) -> None:
        """The kernel asks its first question once, and it was answered."""
        mount = passed()
        process = mount.begin(mount.command("--fuse", backend), asked=True)
        assert process.wait(20) == 1
        assert "has been served" in mount.log()

    def test_a_cache_inside_of_it(self, passed: Make) -> None:
        """Which must not be looked at: nobody serves it yet."""
        mount = passed()
        process = mount.begin(mount.command("--cache-dir", f"{mount.path}/cache"))
        assert process.wait(20) == 1
        assert "is inside the mountpoint" in mount.log()
