"""The cache against a dict: whatever is done to it, a read gives the bytes of its version, or a documented error."""

from __future__ import annotations

import itertools
import math
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from cachefs.base.errors import (
    CachefsError,
    NoRoom,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
)
from cachefs.base.names import ObjectId
from cachefs.store import scrub
from cachefs.store.ram import ram_directory, remove_ram
from tests.conftest import examples
from tests.fetch.scripted import ScriptedOrigin, content
from tests.store.lab import KIB, Lab, as_kill_leaves_it, cache_files, flip_bit, running

BLOCK = 4 * KIB
EXTENT = 16 * BLOCK
KEYS = 4
SIZES = [0, 1, BLOCK - 1, BLOCK, 5 * BLOCK + 17, EXTENT - 1, EXTENT, EXTENT + 1, 3 * EXTENT + 99, 5 << 20]
TROUBLES = [Transient, Throttled, OriginFailed, PermissionDenied]
CACHES = {"ssd": (0, 2 * EXTENT), "ram": (2 * EXTENT, 0), "both": (EXTENT, 4 * EXTENT), "none": (0, 0)}

keys = st.integers(0, KEYS - 1)
part = st.floats(0, 1)
length = st.sampled_from([0, 1, 100, BLOCK, 3 * BLOCK + 5, 128 * KIB])
read = st.tuples(st.just("read"), keys, part, length)
step = st.one_of(
    read,
    read,
    st.tuples(st.just("read by handle"), keys, part, length),
    st.tuples(st.just("open"), keys),
    st.tuples(st.just("together"), st.lists(st.tuples(keys, part, length), min_size=2, max_size=6)),
    st.tuples(st.just("overwrite"), keys, st.sampled_from(SIZES)),
    st.tuples(st.just("pressure"), st.integers(1, 4)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("scrub")),
    st.tuples(st.just("cancel"), keys, part, length),
    st.tuples(
        st.just("fail"), st.integers(0, 3), st.integers(1, 3), st.sampled_from([0, 10, BLOCK, 3 * BLOCK])
    ),
    st.tuples(st.just("prefetch"), keys, st.booleans(), st.sampled_from([None, 0.0005])),
    st.tuples(st.just("objects vanish")),
    st.tuples(
        st.just("stop"), st.sampled_from(["clean", "killed"]), st.sampled_from(["", "flip", "cut", "lose"])
    ),
)


class World:
    """The model: every version ever made, by its ObjectId, and what is true now."""

    def __init__(self) -> None:
        self.origin = ScriptedOrigin(chunk=3000)
        self.bytes: dict[ObjectId, bytes] = {}
        self.now: dict[int, ObjectId] = {}
        self.numbers = itertools.count()
        for key in range(KEYS):
            self.overwrite(key, SIZES[4 + key])

    def overwrite(self, key: int, size: int) -> None:
        data = content(next(self.numbers), size)
        object_id = self.origin.put(f"k{key}", data)
        self.bytes[object_id] = data
        self.now[key] = object_id


class Run:
    """One list of steps against one cache."""

    def __init__(self, world: World, base: Path, cache: str, verify: str) -> None:
        self.world, self.base, self.verify = world, base, verify
        self.ram, self.ssd = CACHES[cache]
        self.place = base / "cache-0"
        self.handles: dict[int, Any] = {}
        self.troubled = False
        self.told: set[Any] = set()

    async def go(self, steps: list[tuple[Any, ...]]) -> None:
        steps = [*steps, ("stop", "clean", "")]
        stops = itertools.count(1)
        while steps:
            async with running(
                self.place,
                self.world.origin,
                ssd=self.ssd,
                ram=self.ram,
                block=BLOCK,
                verify=self.verify,
                readahead=16 * BLOCK,
                background=True,
            ) as lab:
                stop = None
                while stop is None:
                    name, *how = steps.pop(0)
                    if name == "stop":
                        stop = how
                    else:
                        await getattr(self, name.replace(" ", "_"))(lab, *how)
                    for tier in lab.store.tiers:
                        assert 0 <= tier.used_bytes <= tier.cap_bytes
                for handle in self.handles.values():
                    lab.fetcher.close(handle)
                self.handles.clear()
                await lab.quiet()
                await trio.lowlevel.checkpoint()
                kind, damage = stop
                if kind == "killed":
                    self.place = as_kill_leaves_it(self.place, self.base / f"cache-{next(stops)}")
            self.damage(damage, len(steps))

    def damage(self, kind: str, seed: int) -> None:
        rng = random.Random(seed)
        files = [p for p in cache_files(self.place, ram_directory(self.place)) if p.stat().st_size]
        if self.verify == "none" and kind == "flip":
            return  # the user does not want to know
        for path in rng.sample(files, min(2, len(files))):
            if kind == "flip":
                flip_bit(path, rng)
            elif kind == "cut":
                path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
            elif kind == "lose":
                path.unlink()

    async def check(self, lab: Lab, handle: Any, where: float, size: int) -> None:
        data = self.world.bytes[handle.id]
        offset = int(where * max(0, len(data) - 1))
        size = min(size, len(data) - offset)
        current = self.world.now[int(handle.id.key[1:])] == handle.id
        failing = sum(f.times for f in self.world.origin.failures)
        try:
            got = await lab.read_open(handle, offset, size)
        except ObjectChanged:
            assert not current
        except CachefsError as exc:
            after = sum(f.times for f in self.world.origin.failures)
            self.troubled = after < failing or self.troubled
            if self.troubled:
                self.told.add(handle)
            else:  # the kernel's repetition is answered with the same failure, once
                assert handle in self.told, f"nothing was wrong, and yet: {exc!r}"
                self.told.remove(handle)
        else:
            assert got == data[offset : offset + size]

    async def read(self, lab: Lab, key: int, where: float, size: int) -> None:
        handle = lab.fetcher.open(self.world.origin, self.world.now[key])  # type: ignore[arg-type]
        self.troubled = self.world.origin.doomed > 0
        try:
            await self.check(lab, handle, where, size)
        finally:
            lab.fetcher.close(handle)

    async def open(self, lab: Lab, key: int) -> None:
        if key in self.handles:
            lab.fetcher.close(self.handles.pop(key))
        self.handles[key] = lab.fetcher.open(self.world.origin, self.world.now[key])  # type: ignore[arg-type]

    async def read_by_handle(self, lab: Lab, key: int, where: float, size: int) -> None:
        if key not in self.handles:
            await self.open(lab, key)
        self.troubled = self.world.origin.doomed > 0
        await self.check(lab, self.handles[key], where, size)

    async def together(self, lab: Lab, reads: list[tuple[int, float, int]]) -> None:
        # A failure that comes now may end any of these reads.
        self.troubled = self.world.origin.doomed + sum(f.times for f in self.world.origin.failures) > 0
        handles = [lab.fetcher.open(self.world.origin, self.world.now[k]) for k, _, _ in reads]  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            for handle, (_, where, size) in zip(handles, reads, strict=True):
                nursery.start_soon(self.check, lab, handle, where, size)
        for handle in handles:
            lab.fetcher.close(handle)

    async def overwrite(self, lab: Lab, key: int, size: int) -> None:
        self.world.overwrite(key, size)

    async def pressure(self, lab: Lab, count: int) -> None:
        await lab.quiet()
        failures, self.world.origin.failures = self.world.origin.failures, []
        for _ in range(count):
            data = content(next(self.world.numbers), 10 * BLOCK)
            object_id = self.world.origin.put("filler", data)
            assert await lab.read(object_id, 0, 7 * BLOCK) == data[: 7 * BLOCK]
            await lab.quiet()
        self.world.origin.failures = failures

    async def flush(self, lab: Lab) -> None:
        await lab.store.flush()

    async def scrub(self, lab: Lab) -> None:
        await scrub(lab.store)

    async def cancel(self, lab: Lab, key: int, where: float, size: int) -> None:
        with trio.move_on_after(0.0005):
            await self.read(lab, key, where, size)

    async def prefetch(self, lab: Lab, key: int, ahead: bool, for_s: float | None) -> None:
        """What it brings, the reads judge."""
        object_id = self.world.now[key]
        troubled = self.world.origin.doomed + sum(f.times for f in self.world.origin.failures) > 0
        with trio.move_on_after(math.inf if for_s is None else for_s):
            try:
                brought = await lab.fetcher.prefetch(self.world.origin, object_id, prefetched=ahead)  # type: ignore[arg-type]
            except NoRoom:
                pass
            except CachefsError:
                assert troubled
            else:
                assert 0 <= brought <= object_id.size

    async def fail(self, lab: Lab, kind: int, times: int, after: int) -> None:
        self.world.origin.fail(lambda: TROUBLES[kind]("scripted"), times=times, after=after)

    async def objects_vanish(self, lab: Lab) -> None:
        for tier in lab.store.tiers:
            shutil.rmtree(tier.path / "objects", ignore_errors=True)


def play(cache: str, verify: str, steps: list[tuple[Any, ...]]) -> None:
    base = Path(tempfile.mkdtemp(prefix="model-"))

    async def main() -> None:
        with trio.fail_after(20):
            await Run(World(), base, cache, verify).go(steps)

    try:
        trio.run(main)
    finally:
        for place in base.glob("cache-*"):
            remove_ram(place)
        shutil.rmtree(base, ignore_errors=True)


@pytest.mark.parametrize("cache", CACHES)
@settings(
    max_examples=examples(15),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
)
@given(
    verify=st.sampled_from(["first", "first", "full", "none"]), steps=st.lists(step, min_size=5, max_size=25)
)
@example(  # once a spill of a version that this process knew only by its digest
    verify="first",
    steps=[("open", 0), ("pressure", 3), ("pressure", 4), ("stop", "clean", ""), ("read", 0, 0.0, 1)],
)
@example(  # a handle is told of a failure twice: the kernel repeats a read-ahead that failed
    verify="first", steps=[("fail", 0, 1, 0), *[("read by handle", 0, 0.0, 1)] * 3]
)
@example(verify="none", steps=[("read", 2, 0.0, 100), ("stop", "clean", "cut"), ("read", 2, 0.0, 100)])
def test_no_history_makes_a_wrong_byte(cache: str, verify: str, steps: list[tuple[Any, ...]]) -> None:
    play(cache, verify, steps)
