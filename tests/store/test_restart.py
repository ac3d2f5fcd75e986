"""A restart is warm at once; damaged bytes are noticed, dropped, fetched again and counted; never served."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import CacheInUse
from cachefs.base.metrics import Metrics
from cachefs.store import open_store, opening, scrub
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import (
    BLOCK,
    EXTENT,
    MIB,
    Lab,
    as_kill_leaves_it,
    cache_files,
    flip_bit,
    running,
    until,
)


async def filled(cache_dir: Path, origin: ScriptedOrigin, count: int = 6, **how: int) -> dict[int, bytes]:
    """Objects of every awkward size, read once, and a clean stop."""
    sizes = [1, 4097, BLOCK, BLOCK + 1, EXTENT + 5, 3 * BLOCK - 1]
    data = {i: content(i, sizes[i % len(sizes)]) for i in range(count)}
    async with running(cache_dir, origin, **how) as lab:
        for i, d in data.items():
            assert await lab.read(origin.put(f"k{i}", d)) == d
    return data


def ids_of(origin: ScriptedOrigin) -> list[object]:
    from cachefs.base.names import ObjectId
    from tests.fetch.scripted import SOURCE

    return [ObjectId(SOURCE, k, etag, len(d)) for k, (etag, d) in origin.objects.items()]


@pytest.mark.parametrize("stop", ["clean", "killed"])
@in_trio
async def test_a_restart_is_warm_at_once_and_scans_no_files(
    cache_dir: Path, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = ScriptedOrigin()
    data = [content(i, 3 * BLOCK) for i in range(30)]
    ids = [origin.put(f"k{i}", d) for i, d in enumerate(data)]
    place = cache_dir
    async with running(cache_dir, origin, ssd=16 * MIB, ram=3 * MIB) as lab:
        for i in ids:
            await lab.read(i)
        await lab.store.flush()
        if stop == "killed":
            place = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    fetched = origin.delivered
    touched: list[str] = []
    for name in ("scandir", "listdir", "open", "stat"):
        real = getattr(os, name)

        def spy(*args: object, _real=real, _name=name, **kwargs: object) -> object:
            if args and "/objects/" in str(args[0]):
                touched.append(_name)
            return _real(*args, **kwargs)

        monkeypatch.setattr(os, name, spy)
    async with running(place, origin, ssd=16 * MIB, ram=3 * MIB) as lab:
        assert touched == []
        assert await lab.read(ids[7]) == data[7]
        assert touched == ["open"]
        assert [await lab.read(i) for i in ids] == data
        assert set(touched) == {"open"}
        assert len(touched) <= 31
    assert origin.delivered == fetched


@pytest.mark.parametrize("verify", ["first", "full"])
@pytest.mark.parametrize("seed", range(4))
@in_trio
async def test_flipped_bits_in_cache_files_are_never_served(cache_dir: Path, verify: str, seed: int) -> None:
    rng = random.Random(seed)
    origin = ScriptedOrigin()
    data = await filled(cache_dir, origin)
    ids = ids_of(origin)
    flipped = cache_files(cache_dir)
    for path in flipped:
        flip_bit(path, rng)
    fetched = origin.delivered
    async with running(cache_dir, origin, verify=verify) as lab:
        for i in data:
            assert await lab.read(ids[i]) == data[i]
        assert lab.metrics.checksum_failures == len(flipped)
        await lab.quiet()
        assert (
            0
            < origin.delivered - fetched
            <= len(flipped) * BLOCK + sum(min(len(d), 4 * MIB) for d in data.values())
        )
        for i in data:
            assert await lab.read(ids[i]) == data[i]
        assert lab.metrics.checksum_failures == len(flipped)
        lab.check_accounts()


@in_trio
async def test_only_the_bad_block_is_fetched_again(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = content("k", 5 * EXTENT)  # larger than what comes whole
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        await lab.read(object_id)
    flip_bit(cache_files(cache_dir)[0], random.Random(1), offset=20 * BLOCK + 17)
    fetched = origin.delivered
    async with running(cache_dir, origin) as lab:
        assert await lab.read(object_id) == data
        await lab.quiet()
        assert origin.delivered - fetched == BLOCK
        assert lab.metrics.checksum_failures == 1
        lab.check_accounts()


@in_trio
async def test_verify_full_notices_damage_done_while_running(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = content("k", 4 * BLOCK)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin, verify="full") as lab:
        assert await lab.read(object_id) == data
        for _ in range(5):
            await lab.quiet()
            flip_bit(cache_files(cache_dir)[0], random.Random(1))
            assert await lab.read(object_id) == data
        assert lab.metrics.checksum_failures == 5


@in_trio
async def test_verify_none_trusts_a_clean_stop_but_not_a_crash(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = content("k", 4 * BLOCK)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin, verify="none") as lab:
        await lab.read(object_id)
    flip_bit(cache_files(cache_dir)[0], random.Random(1), offset=5)
    async with running(cache_dir, origin, verify="none") as lab:
        assert (await lab.read(object_id)) != data, "the user asked for it"
        await lab.store.flush()
        killed = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    async with running(killed, origin, verify="none") as lab:
        assert await lab.read(object_id) == data
        assert lab.metrics.checksum_failures == 1


@pytest.mark.parametrize("verify", ["none", "first"])
@pytest.mark.parametrize("keep", [0, 1, BLOCK, BLOCK + 100])
@in_trio
async def test_a_shortened_cache_file_is_a_miss(cache_dir: Path, verify: str, keep: int) -> None:
    origin = ScriptedOrigin()
    data = content("k", 3 * BLOCK)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        await lab.read(object_id)
    os.truncate(cache_files(cache_dir)[0], keep)
    async with running(cache_dir, origin, verify=verify) as lab:
        assert await lab.read(object_id) == data
        assert await lab.read(object_id) == data
        await lab.quiet()
        lab.check_accounts()


@in_trio
async def test_files_exchanged_between_two_objects_are_noticed(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = [content(i, 2 * BLOCK) for i in range(2)]
    ids = [origin.put(f"k{i}", d) for i, d in enumerate(data)]
    async with running(cache_dir, origin) as lab:
        for i in ids:
            await lab.read(i)
    a, b = cache_files(cache_dir)
    a.rename(a.with_name("x"))
    b.rename(a)
    a.with_name("x").rename(b)
    async with running(cache_dir, origin) as lab:
        assert [await lab.read(i) for i in ids] == data
        assert lab.metrics.checksum_failures > 0


@in_trio
async def test_two_readers_of_one_bad_block_leave_no_row_that_lies(cache_dir: Path) -> None:
    """Both find the block bad at the same time; after that no restart may take its hole for its bytes."""
    origin = ScriptedOrigin()
    data = content("k", BLOCK)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin) as lab:
        await lab.read(object_id)
    flip_bit(cache_files(cache_dir)[0], random.Random(1))
    async with running(cache_dir, origin) as lab:
        obj = lab.store.object(object_id)
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(lab.store.read, obj, 0, BLOCK)
        assert not lab.store.has(obj, 0)
        assert lab.used() == 0
    async with running(cache_dir, origin, verify="none") as lab:
        assert await lab.read(object_id) == data
        lab.check_accounts()


@in_trio
async def test_another_block_size_starts_empty_and_frees_the_old_files(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    data = await filled(cache_dir, origin)
    async with running(cache_dir, origin, block=2 * BLOCK) as lab:
        for object_id, d in zip(ids_of(origin), data.values(), strict=True):
            assert await lab.read(object_id) == d
        assert any("empty" in w for w in lab.opened.warnings)
        await until(lambda: not list(cache_dir.glob("trash-*")), 5)
        lab.check_accounts()


@in_trio
async def test_a_cache_that_is_dropped_keeps_its_tier_whenever_its_files_go(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are deleted in the background: here at the moment when the directory has been listed and is looked through."""
    origin = ScriptedOrigin()
    data = await filled(cache_dir, origin)
    trash: list[Path] = []
    deleted: set[str] = set()
    monkeypatch.setattr(opening, "_delete_in_background", trash.append)
    listdir = os.listdir

    def then_deleted(*of: Any) -> list[str]:
        names = listdir(*of)
        for path in trash:
            if path.name in names:
                shutil.rmtree(path, ignore_errors=True)
                deleted.add(path.name)
        return names

    monkeypatch.setattr(os, "listdir", then_deleted)
    async with running(cache_dir, origin, block=2 * BLOCK) as lab:
        assert deleted
        assert [tier.name for tier in lab.store.tiers] == ["ssd"]
        assert all("empty" in line for line in lab.opened.warnings), lab.opened.warnings
        for object_id, d in zip(ids_of(origin), data.values(), strict=True):
            assert await lab.read(object_id) == d
        assert lab.used() > 0
        lab.check_accounts()


@in_trio
async def test_rubbish_that_an_interrupted_cleaning_left_is_cleaned_by_the_next_start(
    cache_dir: Path,
) -> None:
    async with running(cache_dir):
        pass
    rubbish = cache_dir / f"trash-{'0123456789abcdef' * 2}"
    rubbish.mkdir()
    (rubbish / "file").write_bytes(b"x" * MIB)
    async with running(cache_dir) as lab:
        await scrub(lab.store)
        await until(lambda: not rubbish.exists())
        assert not rubbish.exists()


@in_trio
async def test_a_disabled_ram_tier_frees_its_tmpfs(cache_dir: Path) -> None:
    origin = ScriptedOrigin()
    async with running(cache_dir, origin, ram=4 * MIB) as lab:
        await lab.read(origin.put("k", content(1, MIB)))
        await lab.store.flush()
        ram = lab.store.tiers[0].path
        killed = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    from cachefs.store.ram import ram_directory

    ram = ram_directory(killed)
    assert cache_files(ram)
    async with running(killed, origin, ram=0):
        await until(lambda: not cache_files(ram))
    assert cache_files(ram) == []


@in_trio
async def test_a_second_daemon_on_the_same_directory_is_refused(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data = content(1, BLOCK)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id)
        for path in (cache_dir, cache_dir / ".", cache_dir.parent / "cache"):
            with pytest.raises(CacheInUse, match=str(os.getpid())):
                open_store(path, MIB, MIB, 0, BLOCK, "first", Metrics())
        assert await lab.read(object_id) == data
    async with running(cache_dir, lab.origin) as again:
        assert await again.read(object_id) == data


async def pressure(lab: Lab, rng: random.Random, ids: list[object], data: list[bytes], reads: int) -> None:
    for _ in range(reads):
        i = rng.randrange(len(ids))
        offset = rng.randrange(len(data[i]))
        size = min(len(data[i]) - offset, rng.randrange(1, 3 * BLOCK))
        assert await lab.read(ids[i], offset, size) == data[i][offset : offset + size]


@in_trio
async def test_after_a_crash_in_the_middle_of_transfers_scrub_makes_disk_and_count_one(
    cache_dir: Path,
) -> None:
    rng = random.Random(11)
    origin = ScriptedOrigin()
    data = [content(i, rng.choice([2 * BLOCK, EXTENT, EXTENT + 3 * BLOCK])) for i in range(12)]
    ids = [origin.put(f"k{i}", d) for i, d in enumerate(data)]
    place = cache_dir
    for crash in range(3):
        async with running(place, origin, ssd=8 * MIB, ram=2 * MIB) as lab:
            await scrub(lab.store)
            lab.check_accounts()
            await pressure(lab, rng, ids, data, 20)
            hold = origin.hold(f"k{crash}x", BLOCK)
            late = origin.put(f"k{crash}x", content(crash, 8 * BLOCK))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(lab.read, late)
                await hold.reached.wait()
                await lab.store.flush()  # with a transfer under way: its reservation is not the disk's
                await pressure(lab, rng, ids, data, 5)  # what the index has not yet heard of
                place = as_kill_leaves_it(place, cache_dir.with_name(f"cache-{crash}"))
                hold.release.set()
    async with running(place, origin, ssd=8 * MIB, ram=2 * MIB) as lab:
        await scrub(lab.store)
        lab.check_accounts()
        for i, d in zip(ids, data, strict=True):
            assert await lab.read(i) == d
        await lab.quiet()
        lab.check_accounts()


@pytest.mark.parametrize("verify", ["first", "none"])
@in_trio
async def test_what_is_handed_over_is_there_for_the_next_daemon_in_memory_too(
    cache_dir: Path, verify: str
) -> None:
    origin = ScriptedOrigin()
    data = [content(i, 3 * BLOCK) for i in range(20)]
    ids = [origin.put(f"k{i}", d) for i, d in enumerate(data)]
    async with running(cache_dir, origin, ssd=16 * MIB, ram=3 * MIB, verify=verify) as lab:
        for i in ids:
            await lab.read(i)
        lab.closed = True
        await lab.store.hand_over()
        in_memory = lab.store.tiers[0].used_bytes
        assert in_memory > MIB
    fetched = origin.delivered
    async with running(cache_dir, origin, ssd=16 * MIB, ram=3 * MIB, verify=verify) as lab:
        assert lab.store.was_clean and lab.store.tiers[0].used_bytes == in_memory
        assert [bytes(await lab.read(i)) for i in ids] == data
    assert origin.delivered == fetched


@in_trio
async def test_files_that_are_still_to_go_when_it_is_handed_over_are_looked_for(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        monkeypatch.setattr(lab.store.tiers[0].disposal, "idle", lambda within_s: within_s > 0)
        lab.closed = True
        await lab.store.hand_over()
    async with running(cache_dir) as lab:
        assert not lab.store.was_clean, "so the scrub runs"


@in_trio
async def test_a_scrub_that_a_stop_cut_short_is_begun_again_by_the_next_daemon(cache_dir: Path) -> None:
    """The bytes that a kill left in no row took space for ever, beside what the cap counts."""
    killed = cache_dir.with_name("killed")
    async with running(cache_dir) as lab:
        await lab.read(lab.origin.put("k", content(1, BLOCK)))
        await lab.quiet()
        as_kill_leaves_it(cache_dir, killed)
    for _ in range(2):
        async with running(killed) as lab:
            assert not lab.store.was_clean and lab.used() == 0
            assert len(cache_files(killed)) == 1
    async with running(killed) as lab:
        await scrub(lab.store)
        lab.check_accounts()
        assert not cache_files(killed)
    async with running(killed) as lab:
        assert lab.store.was_clean


@in_trio
async def test_a_file_that_could_not_be_removed_is_looked_for_by_the_next_daemon(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, BLOCK))
        await lab.read(object_id)
        await lab.quiet()

        def refuse(path: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        with monkeypatch.context() as patch:
            patch.setattr("cachefs.store.tier._remove", refuse)
            assert lab.store.evict(lab.store.object(object_id))
    assert cache_files(cache_dir)
    async with running(cache_dir) as lab:
        assert not lab.store.was_clean
        await scrub(lab.store)
        assert not cache_files(cache_dir)


@pytest.mark.parametrize("removed", [True, False])
@in_trio
async def test_a_stop_waits_for_the_removal_of_files_in_use_that_no_row_has(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """As of a file that was evicted while a program had it open in passthrough."""
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        lab.counts = False  # the file stays open
        backing = lab.store.open_backing(lab.store.object(object_id))
        assert backing is not None
        assert lab.store.evict(lab.store.object(object_id))
        (tier,) = lab.store.tiers
        if not removed:  # its thread does not come to it
            monkeypatch.setattr(tier.disposal, "_begin", lambda: None)
            monkeypatch.setattr(tier.disposal, "idle", lambda within_s: not tier.disposal.going_files)
    assert bool(cache_files(cache_dir)) is not removed
    async with running(cache_dir) as lab:
        assert lab.store.was_clean is removed
