"""The cap counts what the disk counts, at every moment and through everything that moves blocks."""

from __future__ import annotations

import errno
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import Transient
from cachefs.base.units import Size
from cachefs.store import tier
from cachefs.store.eviction import ANY, ANY_REMOTE_OWNED, LOWEST, NOTHING, REMOTE_OWNED
from cachefs.store.tier import RAM, SSD
from tests.conftest import examples
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import (
    BLOCK,
    EXTENT,
    KIB,
    MIB,
    as_kill_leaves_it,
    cache_files,
    du,
    flip_bit,
    running,
    until,
)
from tests.store.test_shared_epochs import put


@in_trio
async def test_a_short_last_block_that_did_not_come_whole_gives_its_page_back(cache_dir: Path) -> None:
    async with running(cache_dir, ram=8 * MIB, ssd=0) as lab:
        object_id = lab.origin.put("k", content(1, 2 * BLOCK + 100))
        lab.origin.fail(lambda: Transient("cut"), after=2 * BLOCK + 50)
        with pytest.raises(Transient):
            await lab.read(object_id)
        await lab.quiet()
        assert lab.used() == 2 * BLOCK
        lab.check_accounts()


@pytest.mark.parametrize("ram, ssd", [(0, 6 * MIB), (6 * MIB, 0), (1 * MIB, 6 * MIB)])
@in_trio
async def test_counted_bytes_are_the_disks_bytes_and_never_pass_the_cap(
    cache_dir: Path, ram: int, ssd: int
) -> None:
    rng = random.Random(f"{ram} {ssd}")
    sizes = [1, 4095, 4096, 4097, BLOCK - 1, BLOCK, BLOCK + 1, EXTENT - 1, EXTENT + 1, 2 * EXTENT + 777]
    async with running(cache_dir, ssd=ssd, ram=ram, background=True) as lab:
        data = {i: content(i, rng.choice(sizes)) for i in range(48)}
        ids = {i: lab.origin.put(f"k{i}", d) for i, d in data.items()}
        for step in range(examples(250)):
            i = rng.randrange(48)
            offset = rng.randrange(len(data[i]))
            size = min(len(data[i]) - offset, rng.choice([1, 5000, BLOCK, 300 * KIB]))
            if step % 10 == 7:
                cut = rng.choice([0, BLOCK, BLOCK + 1])
                lab.origin.fail(lambda: Transient("cut"), after=cut, key=f"k{i}")
            try:
                assert await lab.read(ids[i], offset, size) == data[i][offset : offset + size]
            except Transient:
                pass
            for tier in lab.store.tiers:
                assert tier.used_bytes <= tier.limit_bytes()
                held, files = du(tier.path)
                assert held <= tier.cap_bytes + files * 4096
            if step % 40 == 0:
                await lab.store.flush()
            if step % 50 == 49:
                await lab.quiet()
                await trio.sleep(0.01)
                lab.check_accounts()
        await lab.quiet()
        await trio.sleep(0.05)
        lab.check_accounts()
        assert lab.metrics.evicted_blocks or (ram and lab.metrics.spilled_blocks)


@in_trio
async def test_accounts_survive_damage_and_restarts(cache_dir: Path) -> None:
    rng = random.Random(5)
    origin = ScriptedOrigin()
    data = {i: content(i, rng.choice([BLOCK, 5 * BLOCK + 1, EXTENT + 5])) for i in range(8)}
    ids = {i: origin.put(f"k{i}", d) for i, d in data.items()}
    for _ in range(4):
        async with running(cache_dir, origin, ssd=4 * MIB, ram=1 * MIB) as lab:
            lab.check_accounts()
            for i in rng.sample(range(8), 6):
                assert await lab.read(ids[i]) == data[i]
            await lab.quiet()
            lab.check_accounts()
            paths = [t.path for t in lab.store.tiers]
        for path in rng.sample(cache_files(*paths), 2):
            flip_bit(path, rng)


@in_trio
async def test_a_failed_transfer_gives_its_room_back_and_leaves_no_file(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=8 * MIB) as lab:
        for i in range(5):
            object_id = lab.origin.put(f"k{i}", content(i, 10 * BLOCK))
            lab.origin.fail(lambda: Transient("cut"), after=i * 1000)
            with pytest.raises(Transient):
                await lab.read(object_id)
        await lab.quiet()
        assert lab.used() == 0
        assert cache_files(cache_dir) == []


@in_trio
async def test_what_had_wholly_landed_before_a_failure_stays(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=8 * MIB) as lab:
        data = content(1, 10 * BLOCK)
        object_id = lab.origin.put("k", data)
        lab.origin.fail(lambda: Transient("cut"), after=3 * BLOCK + BLOCK // 2)
        with pytest.raises(Transient):
            await lab.read(object_id)
        await lab.quiet()
        assert lab.used() == 3 * BLOCK
        before = lab.origin.delivered
        assert await lab.read(object_id, 0, 3 * BLOCK) == data[: 3 * BLOCK]
        assert lab.origin.delivered == before
        assert await lab.read(object_id) == data
        await lab.quiet()
        assert lab.origin.delivered == before + 7 * BLOCK


@in_trio
async def test_room_is_reserved_before_bytes_come(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=4 * BLOCK) as lab:
        ids = [lab.origin.put(f"k{i}", content(i, 2 * BLOCK)) for i in range(4)]
        holds = [lab.origin.hold(f"k{i}", 0) for i in range(4)]
        async with trio.open_nursery() as nursery:
            for i in ids:
                nursery.start_soon(lab.read, i)
            for hold in holds:
                await hold.reached.wait()
            assert lab.used() == 4 * BLOCK  # two transfers in the tier, the others in the heap
            for hold in holds:
                hold.release.set()
        await lab.quiet()
        lab.check_accounts()
        assert lab.metrics.bypassed_blocks > 0


@in_trio
async def test_a_lower_cap_after_a_restart_is_kept_from_the_next_fill_on(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    ids = [origin.put(f"k{i}", content(i, 4 * BLOCK)) for i in range(16)]
    async with running(cache_dir, origin, ssd=64 * BLOCK) as lab:
        for i in ids[:15]:
            await lab.read(i)
    async with running(cache_dir, origin, ssd=8 * BLOCK) as lab:
        await lab.read(ids[15])
        await lab.quiet()
        assert lab.used() <= 8 * BLOCK
        lab.check_accounts()


@in_trio
async def test_a_lower_ram_cap_after_a_restart_is_kept(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    ids = [origin.put(f"k{i}", content(i, 4 * BLOCK)) for i in range(16)]
    async with running(cache_dir, origin, ssd=64 * BLOCK, ram=64 * BLOCK) as lab:
        for i in ids[:14]:
            await lab.read(i)
        await lab.store.flush()
        killed = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    async with running(killed, origin, ssd=64 * BLOCK, ram=8 * BLOCK, background=True) as lab:
        assert lab.store.tiers[0].used_bytes == 56 * BLOCK
        await lab.read(ids[15])
        await until(lambda: lab.store.tiers[0].used_bytes <= 8 * BLOCK)
        assert lab.store.tiers[0].used_bytes <= 8 * BLOCK


@in_trio
async def test_least_recently_used_goes_first_across_extents_and_objects(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=4 * EXTENT) as lab:
        big = lab.origin.put("big", content("big", 3 * EXTENT))
        for extent in range(3):
            await lab.read(big, extent * EXTENT, EXTENT)
            await lab.store.flush()
        small = lab.origin.put("small", content("small", EXTENT))
        await lab.read(small)
        await lab.store.flush()
        await lab.read(big, 0, 10)  # the oldest extent is used again: now extent 1 is the oldest
        await lab.store.flush()
        await lab.read(lab.origin.put("new", content("new", EXTENT)))
        await lab.quiet()
        assert lab.store.cached_bytes(big) == 2 * EXTENT
        obj = lab.store.object(big)
        assert [lab.store.has(obj, b) for b in (0, 16, 32)] == [True, False, True]
        lab.check_accounts()


@pytest.mark.parametrize("kind", ["clean", "killed"])
@in_trio
async def test_the_order_of_eviction_survives_a_restart(cache_dir: Path, kind: str) -> None:
    origin = ScriptedOrigin()
    ids = [origin.put(f"k{i}", content(i, 2 * BLOCK)) for i in range(8)]
    place = cache_dir
    async with running(cache_dir, origin, ssd=12 * BLOCK) as lab:
        for i in range(6):
            await lab.read(ids[i])
            await lab.store.flush()
        await lab.read(ids[0], 0, 1)
        await lab.store.flush()
        if kind == "killed":
            place = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    async with running(place, origin, ssd=12 * BLOCK) as lab:
        await lab.read(ids[6])
        await lab.read(ids[7])
        await lab.quiet()
        assert [bool(lab.store.cached_bytes(i)) for i in ids] == [
            True, False, False, True, True, True, True, True,
        ]  # fmt: skip


@in_trio
async def test_ram_spills_to_ssd_and_loses_nothing(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 * BLOCK, ram=16 * BLOCK, background=True) as lab:
        data = [content(i, 2 * BLOCK) for i in range(20)]
        ids = [lab.origin.put(f"k{i}", d) for i, d in enumerate(data)]
        for i in ids:
            await lab.read(i)
            await trio.sleep(0.002)
        fetched = lab.origin.delivered
        assert lab.metrics.spilled_blocks > 0
        assert [await lab.read(i) for i in ids] == data
        await lab.quiet()
        assert lab.origin.delivered == fetched == 40 * BLOCK
        await trio.sleep(0.02)
        lab.check_accounts()


@in_trio
async def test_reuse_promotes_from_ssd_to_ram_and_a_second_touch_at_once_does_not(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = ScriptedOrigin()
    data = content(1, 4 * BLOCK)
    object_id = origin.put("k", data)
    other = origin.put("other", b"x" * BLOCK)
    async with running(cache_dir, origin, ssd=64 * BLOCK, ram=16 * BLOCK) as lab:
        await lab.read(object_id)
    ahead = 0.0
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + ahead)
    async with running(cache_dir, origin, ssd=64 * BLOCK, ram=16 * BLOCK, background=True) as lab:
        for _ in range(3):
            assert await lab.read(object_id) == data
            await lab.store.flush()
            await trio.sleep(0.01)
        assert lab.metrics.promoted_blocks == 0
        ahead = 60.0
        await lab.read(other)
        await lab.store.flush()
        assert await lab.read(object_id) == data
        await trio.sleep(0.05)
        assert lab.metrics.promoted_blocks == 4
        hits = lab.metrics.ram_hits
        assert await lab.read(object_id) == data
        assert lab.metrics.ram_hits > hits
        assert lab.store.cached_bytes(object_id) == 4 * BLOCK
        lab.check_accounts()


@in_trio
async def test_stopping_saves_ram_to_ssd(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = [content(i, 3 * BLOCK + 5) for i in range(4)]
    ids = [origin.put(f"k{i}", d) for i, d in enumerate(data)]
    async with running(cache_dir, origin, ram=4 * MIB) as lab:
        for i in ids:
            await lab.read(i)
    fetched = origin.delivered
    async with running(cache_dir, origin, ram=0) as lab:
        assert [await lab.read(i) for i in ids] == data
    assert origin.delivered == fetched


@in_trio
async def test_ram_that_filled_up_at_once_still_spills(cache_dir: Path) -> None:
    """All of RAM is one transfer when the cache write level is looked at: nothing can move then, but must later."""
    async with running(cache_dir, ssd=16 * MIB, ram=EXTENT, background=True) as lab:
        data = content(1, 6 * EXTENT)
        object_id = lab.origin.put("k", data)
        for offset in range(0, len(data), BLOCK):
            assert await lab.read(object_id, offset, BLOCK) == data[offset : offset + BLOCK]
            await trio.sleep(0.002)
        assert lab.metrics.spilled_blocks > 0
        lab.check_accounts()


@in_trio
async def test_blocks_known_only_from_the_index_can_be_moved(cache_dir: Path) -> None:
    """After a kill, what lies in RAM was never named in this process; it must spill and be saved all the same."""
    origin = ScriptedOrigin()
    data = [content(i, 4 * BLOCK) for i in range(8)]
    ids = [origin.put(f"k{i}", d) for i, d in enumerate(data)]
    async with running(cache_dir, origin, ram=4 * MIB) as lab:
        for i in ids:
            await lab.read(i)
        await lab.store.flush()
        killed = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    fetched = origin.delivered
    async with running(killed, origin, ram=4 * MIB):
        pass  # started, stopped, nothing read: all of RAM goes to SSD by its digest
    async with running(killed, origin, ram=0) as lab:
        assert [await lab.read(i) for i in ids] == data
        lab.check_accounts()
    assert origin.delivered == fetched


@in_trio
async def test_saving_ram_keeps_its_deadline(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(cache_dir, ram=4 * MIB) as lab:
        for i in range(12):
            await lab.read(lab.origin.put(f"k{i}", content(i, BLOCK)))
        real = os.sendfile

        def slow(*args: int) -> int:
            time.sleep(0.4)
            return real(*args)

        monkeypatch.setattr(os, "sendfile", slow)
        started = time.monotonic()
        await lab.aclose(0.2)
        assert time.monotonic() - started < 2.5  # all twelve would take twice that


@in_trio
async def test_one_vanished_ram_file_does_not_keep_the_others_from_ssd(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = [content(i, 2 * BLOCK) for i in range(4)]
    ids = [origin.put(f"k{i}", d) for i, d in enumerate(data)]
    async with running(cache_dir, origin, ram=4 * MIB) as lab:
        for i in ids:
            await lab.read(i)
            await lab.store.flush()
        os.unlink(lab.store.tiers[0].file_path(ids[0].digest))
    fetched = origin.delivered
    async with running(cache_dir, origin, ram=0) as lab:
        assert [await lab.read(i) for i in ids] == data
    assert origin.delivered == fetched + 2 * BLOCK


@in_trio
async def test_thousands_of_files_leave_no_descriptors_behind(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=64 * MIB, ram=2 * MIB, background=True) as lab:
        before = len(os.listdir("/proc/self/fd"))
        for i in range(400):
            await lab.read(lab.origin.put(f"k{i}", content(i, 10_000)))
        await trio.sleep(0.05)
        assert lab.metrics.spilled_blocks > 0
        assert len(os.listdir("/proc/self/fd")) <= before + 3


@in_trio
async def test_no_tier_at_all_still_reads(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=0) as lab:
        assert lab.store.tiers == []
        data = content(1, 5 * BLOCK + 3)
        object_id = lab.origin.put("k", data)
        for offset in range(0, len(data), 40_000):
            assert (
                await lab.read(object_id, offset, min(40_000, len(data) - offset)) == data[offset:][:40_000]
            )
        assert lab.metrics.bypassed_blocks > 0
        await lab.quiet()
        assert lab.origin.delivered == len(data), (
            "a block that passed through the heap is kept for the next piece"
        )


@in_trio
async def test_a_zero_length_read_is_empty_anywhere(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, 3 * BLOCK))
        assert await lab.read(object_id, BLOCK, 0) == b""
        await lab.read(object_id)
        for offset in (0, 1, BLOCK, 2 * BLOCK, 3 * BLOCK):
            assert await lab.read(object_id, offset, 0) == b""


@in_trio
async def test_what_comes_into_use_while_it_is_copied_stays_in_ram(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir, ram=4 * BLOCK) as lab:
        store = lab.store
        assert store._moves is not None
        ids = [lab.origin.put(f"k{n}", content(n, 2 * BLOCK)) for n in range(2)]
        for object_id in ids:
            await lab.read(object_id)
            await lab.quiet()
            await store.flush()
        oldest, younger = (store.catalog.copy(store.object(object_id), RAM, 0) for object_id in ids)
        assert oldest is not None and younger is not None
        real = store._moves.move

        async def move(obj: Any, copy: Any, *args: Any, **kwargs: Any) -> bool:
            done = await real(obj, copy, *args, **kwargs)
            if copy is oldest:
                store.space.pin(copy)
            return done

        with monkeypatch.context() as patch:
            patch.setattr(store._moves, "move", move)
            await store._moves._spill()
        assert (oldest.bitmap, younger.bitmap) == (0b11, 0), "the next one went instead"
        store.space.unpin(store.object(ids[0]), oldest)
        assert oldest.bitmap == 0b11
        lab.check_accounts()


@in_trio
async def test_protected_copies_stay_in_ram_while_ssd_gives_its_room_back(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What SSD has dropped is still on its way out: no room yet, though there are copies that may go."""
    monkeypatch.setattr(tier, "GOING_BYTES", 0)
    monkeypatch.setattr(tier, "GOING_SHARE", 1 << 30)
    async with running(cache_dir, ram=4 * BLOCK, ssd=4 * BLOCK) as lab:
        store = lab.store
        assert store._moves is not None
        lower = [lab.origin.put(f"lower{n}", content(n, 2 * BLOCK)) for n in range(2)]
        for object_id in lower:
            await lab.read(object_id)
            await lab.quiet()
        await store._moves.save_all()
        ids = [lab.origin.put(f"k{n}", bytes(BLOCK)) for n in range(4)]

        def places() -> list[int]:
            copies = [store.catalog.find(store.object(object_id), 0) for object_id in ids]
            return [copy.tier if copy is not None else -1 for copy in copies]

        with monkeypatch.context() as patch:
            patch.setattr(tier.Disposal, "_begin", lambda self: None)
            obj = store.object(lower[0])
            copy = store.catalog.copy(obj, SSD, 0)
            assert copy is not None
            store.space.drop(obj, copy, copy.bitmap)
            assert all(put(lab, object_id, prefetched=True) for object_id in ids)
            await store._moves._spill()
            assert places() == [RAM] * 4
        store.tiers[1].disposal._work(0.0)
        await store._moves._spill()
        assert places() == [SSD, RAM, RAM, RAM]
        lab.check_accounts()


GONE = -1


@pytest.mark.parametrize(
    "copies, ssd, expected, expected_over_limit",
    [
        ("evictable", "older copies", [SSD], [SSD, SSD]),
        ("evictable", "younger copies", [GONE], [GONE, GONE]),
        ("evictable", "pinned copies", [RAM], [GONE]),
        ("evictable", "an error", [RAM], [GONE]),
        ("protected", "older copies", [SSD], [SSD, SSD]),
        ("protected", "younger copies", [SSD], [SSD, SSD]),
        ("protected", "pinned copies", [RAM], [GONE]),
        ("protected", "an error", [RAM], [GONE]),
        ("pinned", "older copies", [SSD], [SSD, SSD]),
        ("pinned", "younger copies", [SSD], [SSD, SSD]),
        ("pinned", "pinned copies", [RAM], [RAM, RAM]),
        ("pinned", "an error", [RAM], [RAM, RAM]),
    ],
)
@pytest.mark.parametrize("over_limit", [False, True])
@in_trio
async def test_what_a_spill_does_where_ssd_is_full_or_fails(
    cache_dir: Path,
    copies: str,
    ssd: str,
    expected: list[int],
    expected_over_limit: list[int],
    over_limit: bool,
) -> None:
    """The oldest copy of RAM leaves it, or the oldest two if its limit has sunk by a block. What SSD does not take is
    dropped for copies of SSD that are younger, and as far as the limit demands it; what is pinned is not dropped."""
    async with running(cache_dir, ram=4 * BLOCK, ssd=4 * BLOCK, eviction="lru") as lab:
        store = lab.store
        assert store._moves is not None
        store.pins.budget = Size(percent=100)
        lower = [lab.origin.put(f"lower{n}", content(n, BLOCK)) for n in range(4)]
        assert all(put(lab, object_id) for object_id in lower)
        await store._moves.save_all()
        ids = [lab.origin.put(f"k{n}", content(n, BLOCK)) for n in range(4)]
        assert all(put(lab, object_id, prefetched=copies == "protected") for object_id in ids)
        for object_id in (*(ids if copies == "pinned" else ()), *(lower if ssd == "pinned copies" else ())):
            store.pin(store.object(object_id))
        if ssd == "younger copies":
            await store.flush()  # else it is still their first use
            for object_id in lower:
                await lab.read(object_id)
        if ssd == "an error":
            store.tiers[1].failed(OSError(errno.EIO, "broken"))
        await store.flush()
        if over_limit:
            store.tiers[0].cap_bytes = 3 * BLOCK
        await store._moves._spill()
        found = [store.catalog.find(store.object(object_id), 0) for object_id in ids]
        places = [copy.tier if copy is not None else GONE for copy in found]
        leaving = expected_over_limit if over_limit else expected
        assert places == leaving + [RAM] * (4 - len(leaving))
        moved, gone = leaving.count(SSD), leaving.count(GONE)
        assert lab.metrics.spilled_blocks == moved
        assert lab.metrics.evicted_blocks == gone + moved, "what moves takes the place of a lower one"
        store.tiers[0].cap_bytes = 4 * BLOCK
        lab.check_accounts()


A_READER = [
    ("RAM", REMOTE_OWNED),
    ("SSD", NOTHING),
    ("RAM", ANY_REMOTE_OWNED),
    ("SSD", LOWEST),
    ("RAM", LOWEST),
    ("RAM", ANY_REMOTE_OWNED),
    ("SSD", ANY),
]
ALONE = [
    ("SSD", NOTHING),
    ("SSD", ANY_REMOTE_OWNED),
    ("SSD", LOWEST),
    ("SSD", ANY_REMOTE_OWNED),
    ("SSD", ANY),
]


@pytest.mark.parametrize(
    "ram, ahead, remote_owned, expected",
    [
        ("free", False, False, A_READER),
        ("full", False, False, [*A_READER[:2], *A_READER[3:]]),
        ("full of others'", False, False, A_READER),
        ("failing", False, False, ALONE),
        ("none", False, False, ALONE),
        ("free", True, False, [("RAM", REMOTE_OWNED), ("SSD", LOWEST), ("RAM", LOWEST)]),
        ("full", True, False, [("RAM", REMOTE_OWNED), ("SSD", LOWEST), ("RAM", LOWEST)]),
        ("none", True, False, [("SSD", LOWEST)]),
        ("free", False, True, [("RAM", REMOTE_OWNED)]),
        ("free", True, True, [("RAM", REMOTE_OWNED)]),
        ("failing", False, True, []),
        ("none", False, True, [("SSD", REMOTE_OWNED)]),
    ],
)
@in_trio
async def test_where_blocks_may_come_and_what_goes_for_them(
    cache_dir: Path, ram: str, ahead: bool, remote_owned: bool, expected: list[tuple[str, Any]]
) -> None:
    async with running(cache_dir, ram=0 if ram == "none" else 4 * BLOCK) as lab:
        cache_writes: Any = lab.store.begin_writes.__self__  # type: ignore[attr-defined]
        if ram.startswith("full"):
            for n in range(4):
                assert put(lab, lab.origin.put(f"k{n}", bytes(BLOCK)), remote_owned=ram == "full of others'")
        if ram == "failing":
            lab.store.tiers[0].failed(OSError(errno.EIO, "broken"))
        found = cache_writes._places(prefetched=ahead, remote_owned=remote_owned)
        places = [(tier.name, classes) for tier, classes in found]
        assert [(name.upper(), classes) for name, classes in places] == expected
