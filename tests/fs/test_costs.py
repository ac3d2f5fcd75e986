"""What names cost: LIST and HEAD requests are counted, not measured."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import trio

from cachefs.base.errors import ObjectChanged
from cachefs.origin.protocol import ListPage, UnreadPage
from tests.fs.bucket import Bucket
from tests.fs.mount import ROOT, Mount, mounted


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


class Unread(Bucket):
    """Its pages are read when their keys are asked for, which takes until the page behind them is requested."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.requested: dict[str | None, threading.Event] = {}
        self.late: list[str | None] = []

    async def list_page(self, prefix: str, *, token: str | None = None, limit: int = 1000) -> ListPage:
        self.requested.setdefault(token, threading.Event()).set()
        page = await super().list_page(prefix, token=token, limit=limit)
        if page.next_token is None or limit == 1:
            return page
        following = self.requested.setdefault(page.next_token, threading.Event())

        def read() -> ListPage:
            if not following.wait(5):
                self.late.append(token)
            return page

        return UnreadPage(page.next_token, read)


@pytest.mark.threads
async def test_the_next_page_is_requested_before_one_is_read() -> None:
    bucket = Unread(f"img_{i:06d}.jpg" for i in range(500))
    bucket.page = 100
    async with mounted(bucket) as mount:
        assert len(await mount.entries()) == 500
        assert bucket.counts == (5, 0) and not bucket.late


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


async def test_what_is_mounted_is_listed_before_the_first_reader_comes() -> None:
    bucket = Bucket([*(f"a/{i}.bin" for i in range(100)), *(f"f{i:04d}" for i in range(3000))])
    async with mounted(bucket) as mount:
        mount.fs.list_tops()
        await trio.sleep(1)
        assert bucket.counts == (1, 0)  # one page of three
        await mount.read("a/7.bin")
        assert bucket.counts == (2, 0)
        bucket.put("b")  # by another client, before a reader has asked for it
        assert await mount.stat("b") is not None
        assert len(await mount.entries()) == 3002
        listed = bucket.counts
        mount.fs.list_tops()
        await trio.sleep(1)
        assert bucket.counts == listed  # it is fresh
    async with mounted(bucket, metadata_ttl=0.0) as mount:
        bucket.reset()
        mount.fs.list_tops()
        await trio.sleep(1)
        assert bucket.counts == (0, 0)  # nothing of it could be used


async def test_what_came_since_an_early_listing_is_shown() -> None:
    bucket = flat(3)
    async with mounted(bucket) as mount:
        mount.fs.list_tops()
        await trio.sleep(1)
        bucket.put("b")
        assert "b" in {os.fsdecode(entry.name) for entry in await mount.entries()}
        assert bucket.counts == (2, 0)


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
        # The first page, ten beyond it, and the question whether it is a directory.
        assert lists <= 1 + 11 + 1
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
        handle = mount.fs.opendir(ROOT)
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
        fh, _ = await mount.fs.open(ino, os.O_RDONLY, 1)
        mount.fs.release(fh)
        assert bucket.counts == (0, 1)


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


STRICT: dict[str, Any] = {"metadata_ttl": 0.0, "negative_ttl": 0.0, "revalidate_at_open": True}


async def walk_and_open(mount: Mount, path: str) -> tuple[int, int]:
    """What the kernel sends for an open when nothing may be kept: names and, for their modes, attributes on the way."""
    fs, ino = mount.fs, ROOT
    for name in path.encode().split(b"/"):
        found = (fs.lookup_now(ino, name) or await fs.lookup(ino, name))[0]
        if found is None:
            raise FileNotFoundError(path)
        ino = found.ino
        assert fs.attributes_now(ino) or await fs.getattr(ino)
    return ino, (fs.open_now(ino, os.O_RDONLY, 1) or await fs.open(ino, os.O_RDONLY, 1))[0]


async def cat(mount: Mount, path: str) -> bytes:
    """What the kernel sends for `cat`: an open, with the walk once more after ESTALE; attributes again with every read."""
    fs = mount.fs
    try:
        ino, handle = await walk_and_open(mount, path)
    except ObjectChanged:
        ino, handle = await walk_and_open(mount, path)
    data = b""
    for _ in range(2):
        size = (fs.attributes_now(ino) or await fs.getattr(ino))[0].size
        data = bytes(await fs.read(handle, 0, size))
        await trio.sleep(0.3)
    fs.release(handle)
    return data


async def test_strict_opens_a_known_file_with_one_head() -> None:
    bucket = Bucket(f"a/b/{i:03d}" for i in range(100))
    async with mounted(bucket, **STRICT) as mount:
        assert len(await mount.walk()) == 102
        await trio.sleep(1)
        bucket.reset()
        for i in range(50):
            before = bucket.counts[1]
            await cat(mount, f"a/b/{i:03d}")
            assert bucket.counts[1] == before + 1
        # Slow readers: each walk asks once for either directory.
        assert bucket.counts == (100, 50)
        bucket.reset()
        async with trio.open_nursery() as nursery:
            for i in range(50):
                nursery.start_soon(cat, mount, f"a/b/{i:03d}")
        assert bucket.counts == (2, 50)


@pytest.mark.parametrize("delay", [0.001, 0.01, 0.3])
async def test_strict_asks_for_no_directory_while_files_below_it_are_asked_for(delay: float) -> None:
    bucket = Bucket((f"a/b/{i:03d}" for i in range(100)), delay=delay)
    async with mounted(bucket, **STRICT) as mount:
        await mount.walk()
        await trio.sleep(1)
        bucket.reset()
        for i in range(50):
            await mount.read(f"a/b/{i:03d}")
        assert bucket.counts == (2, 50)


async def test_strict_rests_no_open_on_an_answer_from_before_it_began() -> None:
    bucket = Bucket(["d/f", "d/g"], delay=0.001)
    async with mounted(bucket, **STRICT) as mount:
        for version in range(1, 10):
            bucket.put("d/f", size=10 + version)
            if version % 3:
                assert len(await cat(mount, "d/f")) == 10 + version
            if version % 2:
                await mount.entries(await mount.ino("d"))
                bucket.put("d/f", size=30 + version)
            assert len(await mount.read("d/f")) == bucket.objects["d/f"].size
            bucket.put("d/f", size=100 + version)
            assert len(await mount.read("d/f")) == 100 + version


async def test_strict_shows_a_listing_that_has_just_come_without_asking_again() -> None:
    bucket = flat(900)
    async with mounted(bucket, **STRICT) as mount:
        for entry in await mount.entries():
            assert await mount.stat(entry.name) is not None
        assert bucket.counts == (1, 0)
        await mount.read("img_000003.jpg")
        assert bucket.counts == (1, 1)


async def test_strict_sees_names_come_and_go() -> None:
    bucket = Bucket(["d/a"])
    async with mounted(bucket, **STRICT) as mount:
        assert await mount.stat("d/a") is not None
        assert await mount.stat("d/b") is None
        bucket.put("d/b")
        await trio.sleep(0.001)
        assert await mount.stat("d/b") is not None
        del bucket.objects["d/a"]
        await trio.sleep(0.11)
        assert await mount.stat("d/a") is None
        del bucket.objects["d/b"]
        await trio.sleep(0.11)
        assert await mount.stat("d") is None
        bucket.put("d")
        found = await mount.stat("d")
        assert found is not None and not found.is_dir


async def test_strict_asks_for_a_file_of_an_unfinished_listing_with_one_head() -> None:
    bucket = flat(3000, page=10)
    async with mounted(bucket, **STRICT) as mount:
        handle = mount.fs.opendir(ROOT)
        await mount.fs.readdir(handle, 0, 5)
        mount.fs.releasedir(handle)
        await trio.sleep(20)
        # The last one shown: a directory of its name could be on the next page.
        await mount.read("img_000109.jpg")
        bucket.reset()
        for _ in range(3):
            await mount.read("img_000109.jpg")
        assert bucket.counts == (0, 3)


async def test_a_file_that_is_looked_up_and_opened_is_looked_for_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernel sends a lookup and then an open: what the first has read of the database, the second need not."""
    async with mounted(flat(10)) as mount:
        await mount.entries()
        reads = []
        for name in ("get", "get_many"):
            real = getattr(mount.database, name)
            monkeypatch.setattr(
                mount.database, name, lambda *key, real=real: (reads.append(key), real(*key))[1]
            )
        found = mount.fs.lookup_now(ROOT, b"img_000003.jpg")
        assert found is not None and found[0] is not None
        looked_up = len(reads)
        assert looked_up == 1
        assert mount.fs.open_now(found[0].ino, os.O_RDONLY, 1) is not None
        assert len(reads) == looked_up


async def test_an_open_uses_no_lookup_from_before_the_news() -> None:
    bucket = flat(10)
    async with mounted(bucket) as mount:
        ino = await mount.ino("img_000003.jpg")
        bucket.set("img_000003.jpg", version=1)
        await mount.fs.refresh()
        assert mount.fs.open_now(ino, os.O_RDONLY, 1) is None
        with pytest.raises(ObjectChanged):
            await mount.fs.open(ino, os.O_RDONLY, 1)
        ino = await mount.ino("img_000004.jpg")
        del bucket.objects["img_000004.jpg"]
        mount.clock.now += 3600  # what was looked up is too old
        with pytest.raises(ObjectChanged):
            await mount.fs.open(ino, os.O_RDONLY, 1)


async def test_after_a_refresh_a_tree_costs_one_list_a_directory() -> None:
    bucket = Bucket(f"t/{i}/{j}" for i in range(5) for j in range(5))
    async with mounted(bucket, immutable=True) as mount:
        await mount.walk()
        for way in ("", "t"):
            await mount.fs.refresh(way)
            bucket.reset()
            for i in range(5):
                for j in range(5):
                    await mount.read(f"t/{i}/{j}")
            assert bucket.counts == (7, 0), way


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
