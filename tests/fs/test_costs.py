"""What names cost: LIST and HEAD requests are counted, not measured."""

from __future__ import annotations

import os

import trio

from tests.fs.bucket import Bucket
from tests.fs.mount import ROOT, mounted


def flat(count: int, **kwargs: object) -> Bucket:
    return Bucket((f"img_{i:06d}.jpg" for i in range(count)), **kwargs)  # type: ignore[arg-type]


async def test_ls_of_ten_thousand_names_is_ten_lists_and_none_again() -> None:
    bucket = flat(10_000)
    async with mounted(bucket) as mount:
        entries = await mount.entries()
        assert len(entries) == 10_000
        for entry in entries[::97]:
            assert (await mount.stat(entry.name)) == entry.attributes
        assert bucket.counts == (10, 0)
        bucket.reset()
        assert len(await mount.entries()) == 10_000
        assert bucket.counts == (0, 0)


async def test_ten_processes_listing_at_once_cost_as_one() -> None:
    bucket = flat(10_000)
    async with mounted(bucket) as mount:
        counts: list[int] = []

        async def ls() -> None:
            counts.append(len(await mount.entries()))

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(ls)
        assert counts == [10_000] * 10
        assert bucket.counts == (10, 0)


async def test_cold_open_costs_one_list_per_component() -> None:
    bucket = Bucket(f"a/b/c/{i}.bin" for i in range(100))
    async with mounted(bucket) as mount:
        await mount.read("a/b/c/7.bin")
        assert bucket.counts == (4, 0)
        bucket.reset()
        await mount.read("a/b/c/8.bin")
        assert bucket.counts == (0, 0)


async def test_missing_names_in_a_listed_directory_cost_nothing() -> None:
    bucket = flat(50)
    async with mounted(bucket) as mount:
        assert await mount.stat("no") is None
        assert bucket.counts == (1, 0)
        bucket.reset()
        for i in range(100):
            assert await mount.stat(f"no{i}") is None
        assert bucket.counts == (0, 0)
        assert mount.metrics.negative_hits >= 100
        _, ttl = await mount.fs.lookup(ROOT, b"no")
        assert ttl == 5.0


async def test_ten_lookups_share_one_listing() -> None:
    bucket = flat(900)
    async with mounted(bucket) as mount:
        async with trio.open_nursery() as nursery:
            for i in range(10):
                nursery.start_soon(mount.stat, f"img_{i * 7:06d}.jpg")
        assert bucket.counts == (1, 0)


async def test_one_stat_in_an_endless_directory_stays_cheap() -> None:
    bucket = flat(3000, page=10)
    async with mounted(bucket) as mount:
        assert await mount.stat("img_002999.jpg") is not None
        await trio.sleep(20)
        lists, heads = bucket.counts
        assert heads == 1
        assert (
            lists <= 1 + 11 + 1
        )  # the first page, ten beyond it, and the question whether it is a directory
        bucket.reset()
        assert await mount.stat("img_002999.jpg") is not None
        assert bucket.counts == (0, 0)


async def test_misses_let_a_listing_run_on_and_it_is_resumed_where_it_rested() -> None:
    bucket = flat(3000, page=10)
    async with mounted(bucket) as mount:
        for i in range(2999, 2989, -1):
            assert await mount.stat(f"img_{i:06d}.jpg") is not None
            await trio.sleep(0.2)
        await trio.sleep(20)
        tokens = [token for prefix, token, limit in bucket.lists if limit > 1]
        assert len(tokens) == len(set(tokens)) == 300
        bucket.reset()
        assert len(await mount.entries()) == 3000
        assert bucket.counts == (0, 0)


async def test_reading_a_directory_resumes_what_a_lookup_began() -> None:
    bucket = flat(500, page=10)
    async with mounted(bucket) as mount:
        await mount.stat("img_000003.jpg")
        await trio.sleep(20)
        assert bucket.counts == (11, 0)
        assert len(await mount.entries()) == 500
        assert bucket.counts == (50, 0)


async def test_an_abandoned_ls_does_not_list_the_rest() -> None:
    bucket = flat(3000, page=10)
    async with mounted(bucket) as mount:
        handle = await mount.fs.opendir(ROOT)
        assert len(await mount.fs.readdir(handle, 0, 5)) == 5
        mount.fs.releasedir(handle)
        await trio.sleep(20)
        assert bucket.counts[0] <= 12


async def test_after_the_ttl_one_file_costs_one_head() -> None:
    bucket = flat(100)
    async with mounted(bucket) as mount:
        ino = await mount.ino("img_000001.jpg")
        await mount.entries()
        bucket.reset()
        mount.clock.now += 61
        assert mount.fs.attributes_now(ino) is None
        assert mount.fs.open_now(ino, os.O_RDONLY, 1) is None
        await mount.fs.getattr(ino)
        assert bucket.counts == (0, 1)
        fh, keep = await mount.fs.open(ino, os.O_RDONLY, 1)
        mount.fs.release(fh)
        assert keep and bucket.counts == (0, 1)


async def test_ten_stats_of_one_stale_file_cost_one_head() -> None:
    bucket = flat(100)
    async with mounted(bucket) as mount:
        await mount.entries()
        bucket.reset()
        mount.clock.now += 61
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(mount.stat, "img_000001.jpg")
        assert bucket.counts == (0, 1)


async def test_many_stale_names_are_listed_again_instead() -> None:
    bucket = flat(100)
    async with mounted(bucket) as mount:
        await mount.entries()
        bucket.reset()
        mount.clock.now += 61
        for i in range(100):
            assert await mount.stat(f"img_{i:06d}.jpg") is not None
        assert bucket.counts == (1, 3)


async def test_strict_asks_at_every_open() -> None:
    bucket = flat(10)
    async with mounted(bucket, revalidate_at_open=True) as mount:
        await mount.entries()
        bucket.reset()
        for _ in range(5):
            await mount.read("img_000003.jpg")
        assert bucket.counts == (0, 5)


async def test_a_ttl_of_zero_looks_every_time_and_still_answers() -> None:
    bucket = flat(25, page=10)
    async with mounted(bucket, metadata_ttl=0.0, negative_ttl=0.0) as mount:
        assert await mount.stat("img_000003.jpg") is not None
        assert await mount.stat("img_000023.jpg") is not None
        assert await mount.stat("nothing") is None
        assert len(await mount.entries()) == 25
        bucket.put("new")
        await trio.sleep(0.001)
        assert len(await mount.entries()) == 26


async def test_immutable_never_looks_again() -> None:
    bucket = flat(100)
    async with mounted(bucket, immutable=True) as mount:
        await mount.entries()
        bucket.reset()
        mount.clock.now += 10 * 365 * 86400
        assert len(await mount.entries()) == 100
        await mount.read("img_000001.jpg")
        assert await mount.stat("nothing") is None
        assert bucket.counts == (0, 0)
        _, ttl = await mount.fs.lookup(ROOT, b"img_000001.jpg")
        assert 86400 < ttl < 1e9
