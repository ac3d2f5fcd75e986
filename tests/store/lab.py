"""A store and a fetcher in one trio program, and what can be measured of them from outside."""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
import subprocess
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.fetch import Fetcher
from cachefs.store import CachedObject, CacheWrite, OpenStore, Store, open_store, ram
from cachefs.store.tier import Disposal
from tests.fetch.scripted import ScriptedOrigin
from tests.store import counters

KIB, MIB = 1 << 10, 1 << 20
BLOCK = 64 * KIB
EXTENT = 16 * BLOCK
PAGE = 4096

ram.HUGE = "huge=never"
"""Here counts are compared with what the file system says, to the page. `test_ram.py` has huge pages."""


Disposal._begin = lambda self: self._work(0.0)  # type: ignore[method-assign]
"""Here files are looked at as soon as they were dropped. `test_disk.py` has the thread."""


class Lab:
    """What a test holds in its hand while the cache runs."""

    def __init__(self, opened: OpenStore, fetcher: Fetcher, origin: ScriptedOrigin, metrics: Metrics) -> None:
        self.opened = opened
        self.store: Store = opened.store
        self.fetcher = fetcher
        self.origin = origin
        self.metrics = metrics
        self.closed = False
        self.counts = True
        """False: the test leaves handles open, or damages what is counted."""
        self.closes_files = True

    async def read(
        self, object_id: ObjectId, offset: int = 0, size: int | None = None, pid: int = 1
    ) -> bytes:
        """As a handle that is opened for one read."""
        opened = self.fetcher.open(self.origin, object_id)  # type: ignore[arg-type]
        try:
            return await self.read_open(
                opened, offset, object_id.size - offset if size is None else size, pid
            )
        finally:
            self.fetcher.close(opened)

    async def read_open(self, opened: Any, offset: int, size: int, pid: int = 1) -> bytes:
        """As the skin does: at once if possible, else waiting."""
        data = self.fetcher.read_now(opened, offset, size, pid)
        if data is None:
            data = await self.fetcher.read(opened, offset, size, pid)
        return bytes(data)

    async def quiet(self) -> None:
        """Until no transfer is under way."""
        await until(lambda: not self.fetcher.in_flight_fetches, 30.0)

    async def aclose(self, spill_deadline_s: float = 10.0) -> None:
        if not self.closed:
            self.closed = True
            await self.store.aclose(spill_deadline_s)

    def used(self) -> int:
        return sum(t.used_bytes for t in self.store.tiers)

    async def check_counters(self) -> None:
        """All tasks have ended: whatever they used or reserved was given back. See `counters.py`."""
        if self.closed or not self.counts:
            return
        with trio.CancelScope(shield=True):
            await self.store.flush()
        counters.check_unused(self.store, files=self.closes_files)
        counters.check_counted(self.store)

    def check_accounts(self) -> None:
        """Nothing is in flight: what is counted is what the disk holds, and no more than allowed."""
        for tier in self.store.tiers:
            held, files = du(tier.path)
            if held < tier.used_bytes:
                # Measured on ext4: for a moment, bytes on their way to the disk count neither as delayed nor as allocated.
                assert tier.sync()
                held, files = du(tier.path)
            # ext4 takes a page for its own map of a file in more than four pieces.
            slack = 0 if tier.number == 0 else files * PAGE
            assert tier.used_bytes <= held <= tier.used_bytes + slack, (
                f"{tier.name}: counts {tier.used_bytes}, disk has {held} in {files} files"
            )
            assert tier.used_bytes <= tier.cap_bytes
            assert tier.used_bytes >= 0
            assert tier.blocks >= 0


@asynccontextmanager
async def running(
    cache_dir: Path,
    origin: ScriptedOrigin | None = None,
    *,
    ssd: int = 64 * MIB,
    ram: int = 0,
    block: int = BLOCK,
    verify: str = "first",
    keep_free: int = 0,
    readahead: int = 0,
    background: bool = False,
    clean: bool = True,
    eviction: str = "auto",
) -> AsyncIterator[Lab]:
    """`background` runs the store's own loop (flush every second, spill, promote)."""
    metrics = Metrics()
    opened = open_store(cache_dir, ssd, ram, keep_free, block, verify, metrics, eviction)  # type: ignore[arg-type]
    try:
        async with trio.open_nursery() as nursery:
            fetcher = Fetcher(opened.store, nursery, metrics, max_readahead=readahead)
            lab = Lab(opened, fetcher, origin or ScriptedOrigin(), metrics)
            if background:
                nursery.start_soon(opened.store.run)
            try:
                yield lab
            finally:
                nursery.cancel_scope.cancel()
        await lab.check_counters()
        await lab.aclose(10.0 if clean else 0.0)
        # The kernel may keep passthrough files.
        left = [name for name in counters.open_files(cache_dir) if "/objects/" not in name]
        assert not left, f"the store is closed, and these are open: {left}"
    finally:
        with trio.CancelScope(shield=True):
            await lab.aclose(10.0 if clean else 0.0)
        while opened.claims:  # as the end of a process does, also of one that was "killed"
            os.close(opened.claims.pop())
        for obj in opened.store.catalog._objects.values():
            if obj.backing is not None:
                obj.backing.close()
        for path in opened.temporary:
            shutil.rmtree(path, ignore_errors=True)


def begin_write(store: Store, obj: CachedObject, start: int, stop: int, **how: bool) -> CacheWrite | None:
    """`Store.begin_writes` for one range."""
    return store.begin_writes([(obj, start, stop)], **how)[0]


async def until(condition: Callable[[], bool], seconds: float = 1.0) -> None:
    """Return when it holds, or the time is over (the caller looks again)."""
    with trio.move_on_after(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await trio.sleep(0.001)


def du(tier_path: Path) -> tuple[int, int]:
    """(allocated bytes, files) below a tier's directory, trash included."""
    total = files = 0
    for folder, _, names in os.walk(tier_path):
        if "objects" not in Path(folder).parts and not any(p.startswith("trash") for p in Path(folder).parts):
            continue
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
            files += 1
    return total, files


def cache_files(*tier_paths: Path) -> list[Path]:
    """Of each tier in the order of their paths; directories may vanish meanwhile."""
    return [
        path
        for tier in tier_paths
        for path in sorted(
            Path(folder, name) for folder, _, names in os.walk(tier / "objects") for name in names
        )
    ]


def as_kill_leaves_it(cache_dir: Path, copy: Path) -> Path:
    """Copy a running cache to another place, as if the daemon had been killed now."""
    memory = ram.ram_directory(cache_dir)
    pairs = [(cache_dir, copy)]
    if memory == ram.own_directory(cache_dir):
        ram.provide(copy, os.statvfs(memory).f_blocks * os.statvfs(memory).f_frsize)
        pairs.append((memory, ram.own_directory(copy)))
    else:
        pairs.append((memory, ram.shared_directory(copy)))
    for source, target in pairs:
        if source.exists():
            subprocess.run(["cp", "-aT", "--sparse=auto", source, target], check=True)
    return copy


def flip_bit(path: Path, rng: random.Random, offset: int | None = None) -> None:
    size = path.stat().st_size
    at = rng.randrange(size) if offset is None else offset
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def in_child(work: Callable[[], None], report: Path, seconds: float = 30.0) -> str:
    """How `work` ends in a process of its own: "" or the reason it did not end well."""
    pid = os.fork()
    if pid == 0:
        status = 1
        faulthandler.disable()  # what is expected to crash need not be told
        try:
            out = os.open(report, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(out, 2)
            work()
            status = 0
        except BaseException:
            traceback.print_exc(file=open(report, "a"))  # noqa: SIM115
        finally:
            os._exit(status)
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "hangs"
        time.sleep(0.002)
    if os.WIFSIGNALED(status):
        return f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    return "" if os.WEXITSTATUS(status) == 0 else report.read_text()[-1500:]


def killed_at_random(
    work: Callable[[Path, int, Callable[[], None]], Awaitable[None]], cache_dir: Path, kills: int
) -> Iterator[int]:
    """Run `work`(directory, number, ready) in a forked process, and kill it at a random moment after it has called `ready`;
    so many times. Yields the number, each time when it is dead."""
    rng = random.Random(kills)
    for number in range(kills):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                trio.run(work, cache_dir, number, partial(os.write, writing, b"ready"))
            except BaseException:
                os.write(writing, traceback.format_exc().encode())
            finally:
                os._exit(1)
        os.close(writing)
        with open(reading, "rb", buffering=0) as said:
            assert (first := said.read(3000)) == b"ready", first.decode()
            time.sleep(rng.uniform(0.02, 0.5))
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, said.read(3000).decode()
        yield number
