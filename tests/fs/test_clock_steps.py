"""The wall clock is set, forward and back: nothing is shown for longer than the configured TTL."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.base.behind import WriteBehind
from cachefs.base.clock import Machine, SteadyClock
from cachefs.base.database import Database
from cachefs.fs import FORMAT, TABLES, Options, Ttls, Volume
from cachefs.fs.tree import clock_of
from tests.conftest import examples
from tests.fs.bucket import Bucket
from tests.fs.mount import Mount

TTL = 60.0
HOUR = 3600.0


class World:
    """A machine with true time and a wall clock that is `off` by something. Virtual time of trio is not used: time passes
    here only when a test says so."""

    def __init__(self) -> None:
        self.true = 1_700_000_000.0
        self.off = 0.0
        self.booted = self.true - 1000
        self.boots = 1

    @property
    def machine(self) -> Machine:
        return Machine(
            lambda: self.true + self.off, lambda: self.true - self.booted, lambda: f"boot-{self.boots}"
        )

    def boot(self, takes_s: float) -> None:
        self.true += takes_s
        self.booted, self.boots = self.true, self.boots + 1


def test_the_clock_starts_at_the_wall_clock_and_does_not_step() -> None:
    world = World()
    clock = SteadyClock(None, world.machine)
    assert clock() == world.true
    world.off = -HOUR
    world.true += 5
    assert clock() == world.true
    again = SteadyClock(clock.state, world.machine)  # a restart
    assert again() == world.true and again.state == clock.state
    world.boot(10)
    assert SteadyClock(clock.state, world.machine)() == world.true - HOUR


def test_the_clock_of_this_machine() -> None:
    clock = SteadyClock()
    assert abs(clock() - time.time()) < 60
    before = clock()
    assert clock() >= before and SteadyClock(clock.state).state == clock.state


class Daemon(Mount):
    """A mount by the clocks of `world`."""

    def __init__(self, path: Path, world: World, bucket: Any, ttls: Ttls) -> None:
        database = WriteBehind(Database(path, TABLES, version=FORMAT, fsync=False))
        clock: Any = clock_of(database, world.machine)
        database.close()
        super().__init__(path, [Volume("", bucket, ttls)], Options(), clock)


@pytest.mark.parametrize("strict", [False, True])
async def test_a_clock_set_back_by_an_hour_shows_nothing_for_that_hour(tmp_path: Path, strict: bool) -> None:
    world, bucket = World(), Bucket(["d/f"])
    ttls = Ttls(0.0, revalidate=True) if strict else Ttls(TTL)
    daemon = Daemon(tmp_path, world, bucket, ttls)
    first = await daemon.stat("d/f")
    world.off = -HOUR
    _, seconds = await daemon.fs.getattr(await daemon.ino("d/f"))
    assert seconds <= (0.0 if strict else TTL)  # what the kernel is told
    bucket.put("d/f", 16)
    bucket.put("d/g")
    world.true += TTL + 1
    second = await daemon.stat("d/f")
    assert first is not None and second is not None and second.size == 16 != first.size
    assert await daemon.stat("d/g") is not None
    assert await daemon.names("d") == [b"f", b"g"]
    await daemon.fs.aclose()
    daemon.close()


@pytest.mark.parametrize("booted", [False, True])
async def test_a_clock_set_back_while_no_daemon_runs(tmp_path: Path, booted: bool) -> None:
    world, bucket = World(), Bucket(["d/f"])
    daemon = Daemon(tmp_path, world, bucket, Ttls(TTL))
    await daemon.names("d")
    await daemon.fs.aclose()
    daemon.close()
    bucket.put("d/g")
    if booted:
        world.boot(20)
        world.off = -HOUR
    else:
        world.true += 2 * HOUR
        world.off = -2 * HOUR
    daemon = Daemon(tmp_path, world, bucket, Ttls(TTL))
    assert await daemon.names("d") == [b"f", b"g"]
    await daemon.fs.aclose()
    daemon.close()


async def test_a_restart_without_a_step_asks_for_nothing(tmp_path: Path) -> None:
    world, bucket = World(), Bucket(["d/f"])
    for _ in range(3):
        daemon = Daemon(tmp_path, world, bucket, Ttls(TTL))
        assert await daemon.names("d") == [b"f"]
        await daemon.fs.aclose()
        daemon.close()
        world.true += 10
        world.off += HOUR
    assert bucket.counts == (2, 0)


STEPS = st.one_of(
    st.tuples(st.just("wait"), st.sampled_from([1.0, 20.0, TTL, TTL + 1, HOUR])),
    st.tuples(st.just("set"), st.sampled_from([-86400.0, -HOUR, -30.0, 30.0, HOUR])),
    st.tuples(st.just("restart"), st.just(0.0)),
    st.tuples(st.just("change"), st.just(0.0)),
    st.tuples(st.just("stat"), st.just(0.0)),
    st.tuples(st.just("list"), st.just(0.0)),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_no_step_extends_what_is_shown_beyond_the_ttl(steps: list[tuple[str, float]]) -> None:
    """`d/f` grows by a byte with each change, and a name comes: what is shown was true at most a TTL ago."""

    async def main() -> None:
        world, bucket = World(), Bucket(["d/f"])
        bucket.put("d/f", 1)
        changed = [(0.0, 1)]  # (when, size since)
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            daemon = Daemon(Path(place), world, bucket, Ttls(TTL))
            for what, seconds in steps:
                oldest = max(size for at, size in changed if at < world.true - TTL)
                if what == "wait":
                    world.true += seconds
                elif what == "set":
                    world.off += seconds
                elif what == "change":
                    changed.append((world.true, changed[-1][1] + 1))
                    bucket.put("d/f", changed[-1][1])
                    bucket.put(f"d/{changed[-1][1]:03d}")
                elif what == "stat":
                    found = await daemon.stat("d/f")
                    assert found is not None and found.size >= oldest
                    _, seconds = await daemon.fs.getattr(found.ino)
                    assert seconds <= TTL
                elif what == "list":
                    assert len(await daemon.names("d")) >= oldest
                else:
                    await daemon.fs.aclose()
                    daemon.close()
                    daemon = Daemon(Path(place), world, bucket, Ttls(TTL))
            await daemon.fs.aclose()
            daemon.close()

    trio.run(main)
