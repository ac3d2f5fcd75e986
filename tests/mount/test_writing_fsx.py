"""Any sequence of changes of a file, by any of the calls there are, against a bytearray: through the real kernel, at every
step; at the store in the end; and once more behind a new mount.

In the manner of fsx. `CACHEFS_FSX_STEPS` and `CACHEFS_FSX_SEED` make it longer or another one; what fails names its steps.
"""

from __future__ import annotations

import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.lab.dataset import content
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, eventually, run, succeed
from tests.mount.written import keys, stored

KIB, MIB = 1 << 10, 1 << 20
STEPS = int(os.environ.get("CACHEFS_FSX_STEPS", "150"))
SEED = int(os.environ.get("CACHEFS_FSX_SEED", "1"))


class Fsx:
    """One file, under one name or another, and what it must hold. `largest` is the size it never exceeds."""

    def __init__(self, root: Path, seed: int, largest: int) -> None:
        self._root, self._largest = root, largest
        self._dice = random.Random(seed)
        self.name = "a"
        self.model = bytearray()
        self.other: bytes | None = None  # what is in the file beside it, "keep"
        self.steps: list[str] = []
        self._count = 0
        self._fd = os.open(root / "a", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._reader = -1
        self._calls: list[Callable[[], str]] = [
            *[self._write] * 6,
            *[self._append, self._truncate, self._map] * 3,
            *[self._by_path, self._allocate, self._sync, self._reopen, self._anew, self._second] * 2,
            self._rename,
            self._replace,
            self._aside,
            self._forget,
            self._copy,
        ]

    def run(self, steps: int, look_every: int = 1) -> None:
        try:
            for number in range(steps):
                self.steps.append(self._dice.choice(self._calls)())
                self._read()
                if number % look_every == 0:
                    self._look()
            self._look()
        except BaseException as exc:
            exc.add_note("\n".join(self.steps[-40:]))
            raise

    def close(self) -> None:
        for fd in (self._fd, self._reader):
            if fd >= 0:
                os.close(fd)
        self._reader = -1

    # -- looking -----------------------------------------------------------------------------------

    def _look(self) -> None:
        """All of it, by a descriptor and by its name."""
        size = len(self.model)
        assert os.fstat(self._fd).st_size == size
        assert os.stat(self._path).st_size == size
        self._equal(os.pread(self._fd, size + 1, 0), self.model, 0)
        self._equal(self._path.read_bytes(), self.model, 0)

    def _read(self) -> None:
        at = self._dice.randrange(len(self.model) + 1)
        length = self._length()
        self._equal(os.pread(self._fd, length, at), self.model[at : at + length], at)
        if self._reader >= 0:
            self._equal(os.pread(self._reader, length, at), self.model[at : at + length], at)

    def _equal(self, got: bytes, wanted: bytes | bytearray, at: int) -> None:
        if got != wanted:
            first = next((n for n, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), -1)
            raise AssertionError(f"{len(got)} bytes for {len(wanted)} at {at}; differ at {at + first}")

    @property
    def _path(self) -> Path:
        return self._root / self.name

    def _length(self) -> int:
        return round(min(300 * KIB, self._largest) ** self._dice.random())

    def _bytes(self, length: int) -> bytes:
        self._count += 1
        return content(self._count, length)

    def _put(self, at: int, data: bytes) -> None:
        self.model.extend(bytes(max(0, at - len(self.model))))
        self.model[at : at + len(data)] = data

    def _cut(self, size: int) -> None:
        del self.model[size:]
        self.model.extend(bytes(size - len(self.model)))

    # -- steps -------------------------------------------------------------------------------------

    def _write(self) -> str:
        length = self._length()
        within = min(len(self.model) + 50 * KIB, self._largest - length)
        at = self._dice.randrange(within + 1)
        data = self._bytes(length)
        assert os.pwrite(self._fd, data, at) == length
        self._put(at, data)
        return f"write {length} at {at}"

    def _append(self) -> str:
        length = min(self._length(), self._largest - len(self.model))
        data = self._bytes(length)
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            assert os.write(fd, data) == length
        finally:
            os.close(fd)
        self._put(len(self.model), data)
        return f"append {length}"

    def _truncate(self) -> str:
        size = self._dice.randrange(min(self._largest, len(self.model) + 100 * KIB) + 1)
        os.ftruncate(self._fd, size)
        self._cut(size)
        return f"ftruncate {size}"

    def _by_path(self) -> str:
        size = self._dice.randrange(min(self._largest, len(self.model) + 100 * KIB) + 1)
        os.truncate(self._path, size)
        self._cut(size)
        return f"truncate {size}"

    def _map(self) -> str:
        if not self.model:
            return "map nothing"
        at = self._dice.randrange(len(self.model))
        data = self._bytes(min(self._length(), len(self.model) - at))
        flush = self._dice.random() < 0.5
        with mmap.mmap(self._fd, len(self.model)) as mapped:
            mapped[at : at + len(data)] = data
            if flush:
                mapped.flush()
            self._put(at, data)
            self._equal(mapped[:], self.model, 0)
        return f"map {len(data)} at {at}{', msync' if flush else ''}"

    def _allocate(self) -> str:
        at = self._dice.randrange(len(self.model) + 1)
        length = min(self._length(), self._largest - at)
        if length:
            os.posix_fallocate(self._fd, at, length)
            self._cut(max(len(self.model), at + length))
        return f"fallocate {length} at {at}"

    def _sync(self) -> str:
        os.fsync(self._fd)
        return "fsync"

    def _reopen(self) -> str:
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_RDWR)
        return "reopen"

    def _anew(self) -> str:
        if self._dice.random() < 0.5:
            return self._reopen()
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_RDWR | os.O_TRUNC)
        self._cut(0)
        return "reopen, O_TRUNC"

    def _second(self) -> str:
        """Somebody reads beside, or no longer."""
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1
            return "the reader goes"
        self._reader = os.open(self._path, os.O_RDONLY)
        return "a reader comes"

    def _rename(self) -> str:
        to = self._dice.choice([name for name in ("a", "b", "d/c") if name != self.name])
        os.rename(self._path, self._root / to)
        self.name = to
        return f"rename to {to}"

    def _replace(self) -> str:
        """Another file takes its place, with everything that comes."""
        data = self._bytes(self._length())
        with (self._root / "new").open("wb") as file:
            file.write(data)
        self.close()
        os.replace(self._root / "new", self._path)
        self._fd = os.open(self._path, os.O_RDWR)
        self.model[:] = data
        return f"replace by {len(data)}"

    def _aside(self) -> str:
        """It is renamed over another file, and that name is where it goes on."""
        (self._root / "keep").write_bytes(b"soon gone")
        os.replace(self._path, self._root / "keep")
        os.rename(self._root / "keep", self._path)
        return "rename over another and back"

    def _forget(self) -> str:
        os.fsync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return "fsync, drop pages"

    def _copy(self) -> str:
        length = min(self._length(), len(self.model))
        at = self._dice.randrange(len(self.model) - length + 1)
        to = self._dice.randrange(self._largest - length + 1) if length else 0
        if at < to + length and to < at + length:
            return "copy nothing"
        done = 0
        while done < length:
            done += os.copy_file_range(self._fd, self._fd, length - done, at + done, to + done)
        self._put(to, bytes(self.model[at : at + length]))
        return f"copy {length} from {at} to {to}"


def exercised(mount: Mount, bucket: Bucket, seed: int, steps: int, largest: int, look_every: int = 1) -> None:
    root = mount.path / f"fsx-{seed}"
    (root / "d").mkdir(parents=True)
    fsx = Fsx(root, seed, largest)
    try:
        fsx.run(steps, look_every)
    finally:
        fsx.close()
    key = f"fsx-{seed}/{fsx.name}"
    assert mount.cli("flush", mount.path).returncode == 0
    assert stored(bucket, key) == fsx.model, "\n".join(fsx.steps[-20:])
    assert [k for k in keys(bucket, f"fsx-{seed}/") if not k.endswith("/")] == [key]
    eventually(lambda: not os.listdir(mount.cache / "staging"), "no staging file is left")
    mount.stop()
    mount.start()
    assert (root / fsx.name).read_bytes() == fsx.model
    found = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
    assert found == [fsx.name]


MODES: list[Any] = [{}, {"writeback": True, "upload_delay": "20ms"}]


@pytest.mark.parametrize("options", MODES, ids=["durable", "writeback"])
@pytest.mark.parametrize("seed", [SEED, pytest.param(SEED + 1, marks=pytest.mark.long)])
def test_small(mounted: Mounted, bucket: Bucket, options: dict[str, Any], seed: int) -> None:
    mount = mounted(bucket, read_only=False, **options)
    exercised(mount, bucket, seed, STEPS, 700 * KIB)


@ONE_BACKEND
@pytest.mark.parametrize("options", MODES, ids=["durable", "writeback"])
def test_in_parts(mounted: Mounted, bucket: Bucket, options: dict[str, Any]) -> None:
    """Large enough that parts of it are sent while it is changed, over a store that takes its time."""
    bucket.store.shape(latency_ms=2, bandwidth=200 * MIB)
    mount = mounted(bucket, read_only=False, **options)
    root = mount.path / f"fsx-{SEED + 2}"
    root.mkdir()
    (root / "d").mkdir()
    fsx = Fsx(root, SEED + 2, 40 * MIB)
    fsx.model[:] = content("begin", 30 * MIB)
    with (root / "a").open("wb") as file:
        file.write(fsx.model)
    try:
        fsx.run(STEPS // 4, 10)
    finally:
        fsx.close()
    assert mount.cli("flush", mount.path).returncode == 0
    assert stored(bucket, f"{root.name}/{fsx.name}") == fsx.model
    mount.drop_kernel_pages()
    assert (root / fsx.name).read_bytes() == fsx.model


@pytest.fixture
def real_fsx() -> Iterator[str]:
    found = shutil.which("fsx") or shutil.which("fsx-linux")
    if found is None:
        pytest.skip("fsx is not installed")
    yield found


@ONE_BACKEND
def test_the_real_one(mounted: Mounted, bucket: Bucket, real_fsx: str, tmp_path: Path) -> None:
    mount = mounted(bucket, read_only=False)
    done = run([real_fsx, "-N", str(STEPS * 10), "-l", str(MIB), "-P", tmp_path, mount.path / "f"])
    assert done.returncode == 0, done.stdout


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@ONE_BACKEND
@pytest.mark.parametrize(
    "options",
    [pytest.param(MODES[0], marks=pytest.mark.long), MODES[1]],
    ids=["durable", "writeback"],
)
def test_fio_verifies_behind_a_new_mount(mounted: Mounted, bucket: Bucket, options: dict[str, Any]) -> None:
    mount = mounted(bucket, read_only=False, **options)
    words = ["fio", "--name=j", f"--directory={mount.path}", "--size=12M", "--bs=4k-128k", "--rw=randwrite"]
    words += ["--verify=crc32c", "--verify_fatal=1", "--numjobs=2", "--ioengine=psync", "--verify_backlog=64"]
    words.append("--verify_state_save=0")  # which would be left where the tests were started
    succeed(words, timeout=80)
    mount.stop()
    mount.start()
    succeed([*words, "--verify_only"], timeout=80)
