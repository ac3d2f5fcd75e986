"""What those are told who fetch before anybody asks: opens, neighbours, and what lies below a path."""

from __future__ import annotations

import os
from contextlib import aclosing
from typing import Any

import pytest
import trio

from cachefs.base.errors import CachefsError, IsADirectory, NotFound, OriginFailed
from cachefs.base.names import ObjectId
from cachefs.fs import EVERY_FILE, LARGE, Volume
from tests.fs.bucket import Bucket
from tests.fs.mount import Mount, mounted


async def walked(mount: Mount, path: str = "") -> list[str]:
    return [name async for name, _, _ in mount.fs.tree_queries.walk(path)]


async def test_walk_gives_every_file_once_in_the_order_of_the_listing() -> None:
    keys = ["a.bin", "a/1.bin", "a/b/2.bin", "b.bin", "c/3.bin", "c/4.bin", "z"]
    bucket = Bucket(keys)
    bucket.put("empty/")
    async with mounted(bucket) as mount:
        assert await walked(mount) == keys
        bucket.reset()
        assert await walked(mount, "/a/") == ["a/1.bin", "a/b/2.bin"]
        assert await walked(mount, "a/b/2.bin") == ["a/b/2.bin"]
        assert bucket.counts == (0, 0)
        found = {name: obj async for name, _, obj in mount.fs.tree_queries.walk("")}
        assert found["c/3.bin"] == ObjectId(
            bucket.source, "c/3.bin", bucket.objects["c/3.bin"].etag, bucket.objects["c/3.bin"].size
        )


async def test_walk_lists_as_it_goes() -> None:
    bucket = Bucket((f"{i:05d}" for i in range(3000)), page=100)
    async with mounted(bucket) as mount:
        async with aclosing(mount.fs.tree_queries.walk("")) as files:
            async for _ in files:
                break
        assert len(bucket.lists) < 15
        await trio.sleep(100)
        assert len(bucket.lists) < 15
        assert len(await walked(mount)) == 3000


async def test_walk_asks_for_sizes_that_a_listing_did_not_tell() -> None:
    bucket = Bucket(["d/a", "d/b"])
    bucket.tells_sizes = False
    async with mounted(bucket) as mount:
        sizes = [obj.size async for _, _, obj in mount.fs.tree_queries.walk("d")]
        assert sizes == [10, 10]


async def test_walk_says_what_is_missing_and_what_failed() -> None:
    bucket = Bucket(["d/a"])
    async with mounted(bucket) as mount:
        for path in ("no", "d/no", "d/a/no"):
            with pytest.raises(NotFound):
                await walked(mount, path)
    bucket.before = lambda kind, key: OriginFailed("down")
    async with mounted(bucket) as mount:
        with pytest.raises(OriginFailed):
            await walked(mount)


async def test_walk_goes_on_behind_a_directory_that_is_removed_meanwhile() -> None:
    bucket = Bucket(["a/x", "b/x", "c/x"])
    async with mounted(bucket) as mount:
        found = []
        async with aclosing(mount.fs.tree_queries.walk("")) as files:
            async for path, _, _ in files:
                found.append(path)
                bucket.objects.pop("b/x", None)
                await mount.fs.refresh()
                assert await mount.names() == [b"a", b"c"]
        assert found == ["a/x", "c/x"]


async def test_walk_passes_through_volumes() -> None:
    one: Any = Bucket(["x/1"], prefix="x")
    two: Any = Bucket(["2"])
    async with mounted(one, volumes=[Volume("one", one), Volume("two", two)]) as mount:
        assert [(n, o.key, origin) async for n, origin, o in mount.fs.tree_queries.walk("")] == [
            ("one/1", "x/1", one),
            ("two/2", "2", two),
        ]
        assert mount.fs.tree_queries.known("one/1") == await mount.fs.tree_queries.resolve("one/1")


async def test_resolve_asks_once_and_a_listing_primes_the_siblings() -> None:
    bucket = Bucket(f"d/{i:03d}" for i in range(500))
    async with mounted(bucket) as mount:
        assert mount.fs.tree_queries.known("d/007") is None
        found = await mount.fs.tree_queries.resolve("d/007")
        assert found is not None and found[1].key == "d/007"
        assert bucket.counts == (2, 0)
        for i in range(500):
            assert (await mount.fs.tree_queries.resolve(f"/d/{i:03d}")) == mount.fs.tree_queries.known(
                f"d/{i:03d}"
            )
        assert bucket.counts == (2, 0)
        assert await mount.fs.tree_queries.resolve("d/no") is None
        assert mount.fs.tree_queries.known("d/no") is None and mount.fs.tree_queries.known("d") is None
        with pytest.raises(IsADirectory):
            await mount.fs.tree_queries.resolve("d")
        mount.clock.now += 3600
        assert mount.fs.tree_queries.known("d/007") is not None  # however old
        bucket.before = lambda kind, key: OriginFailed("down")
        with pytest.raises(CachefsError):
            await mount.fs.tree_queries.resolve("d/007")


async def test_a_file_that_was_replaced_is_looked_up_again_once() -> None:
    bucket = Bucket(["d/a", "d/b", "d/c"])
    async with mounted(bucket) as mount:
        queries = mount.fs.tree_queries
        old = {name: obj async for name, _, obj in queries.walk("d")}
        bucket.put("d/a", 20)
        del bucket.objects["d/b"]
        bucket.reset()
        for _ in range(2):
            found = await queries.look_again("d/a", old["d/a"])
            assert found is not None and found[1].size == 20
        assert await queries.look_again("d/b", old["d/b"]) is None
        assert len(bucket.heads) == 2
        assert await walked(mount, "d") == ["d/a", "d/c"]
        assert queries.known("d/a") == found


async def neighbours(mount: Mount, ino: int, limit: int = 10) -> tuple[list[bytes], bytes | None]:
    names: list[bytes] = []
    after: bytes | None = b""
    while after is not None:
        before = after
        files, after = mount.fs.tree_queries.siblings(ino, after, limit)
        names += [file.mark for file in files]
        if after == before:
            return names, after
    return names, None


async def test_siblings_are_the_files_of_the_directory_in_order_and_cost_nothing() -> None:
    bucket = Bucket([*(f"d/{i:03d}" for i in range(100)), *(f"d/{i:03d}x/sub" for i in range(50)), "e/1"])
    bucket.put("d/040x")  # hidden behind a directory
    async with mounted(bucket) as mount:
        ino = await mount.ino("d/007")
        before = bucket.counts
        names, end = await neighbours(mount, ino)
        assert names == [b"%03d" % i for i in range(100)] and end is None
        files, _ = mount.fs.tree_queries.siblings(ino, b"041", 1)
        assert [(f.mark, f.ino, f.object.key) for f in files] in (
            [],
            [(b"042", await mount.ino("d/042"), "d/042")],
        )
        assert await mount.fs.tree_queries.count_files(ino, 10) == (100, 1000)
        assert await mount.fs.tree_queries.count_files(ino, 9) == (0, 0)
        assert bucket.counts == before


async def test_siblings_of_a_listing_that_is_not_complete_are_what_has_landed() -> None:
    bucket = Bucket((f"{i:04d}" for i in range(3000)), page=100)
    async with mounted(bucket) as mount:
        ino = await mount.ino("0007")
        await trio.sleep(10)
        landed = len(bucket.lists) * 100
        names, end = await neighbours(mount, ino, 64)
        assert landed - 2 <= len(names) <= landed < 3000
        assert end == names[-1]
        assert await mount.fs.tree_queries.count_files(ino, 10) is None
        await mount.names()
        assert len((await neighbours(mount, ino, 64))[0]) == 3000
        assert await mount.fs.tree_queries.count_files(ino, 10) == (3000, 30_000)
        await mount.fs.refresh()
        assert mount.fs.tree_queries.siblings(ino, b"", 10) == ([], b"")
        assert await mount.fs.tree_queries.count_files(ino, 10) is None


class Backing:
    id = 7
    fd = -1


@pytest.mark.parametrize(
    ("size", "passthrough", "awaited", "told"),
    [
        (10, False, False, True),
        (10, True, False, False),
        (10, True, True, True),
        (LARGE + 1, True, False, True),
    ],
)
async def test_opens_are_told_but_those_of_small_passthrough_files_nobody_awaits(
    size: int, passthrough: bool, awaited: bool, told: bool
) -> None:
    bucket = Bucket()
    bucket.put("d/f", size)
    async with mounted(bucket) as mount:
        heard: list[tuple[int, int, str, bool]] = []
        digests = {mount.fs.tree_queries.known("d/f") or (await mount.fs.tree_queries.resolve("d/f"))}
        wanted = {found[1].digest for found in digests if found and awaited}
        reader: Any = mount.bytes
        reader.open_backing = lambda opened: Backing() if passthrough else None
        reader.release_backing = lambda backing: None
        mount.fs.enable_passthrough(lambda backing: True)
        mount.fs.watch_opens(
            lambda ino, pid, origin, obj, passthrough: heard.append((ino, pid, obj.key, passthrough)), wanted
        )
        ino = await mount.ino("d/f")
        for pid in (5, 6):  # the second one is remembered as warm
            fh, _ = await mount.fs.open(ino, os.O_RDONLY, pid)
            mount.fs.release(fh)
        assert heard == ([(ino, 5, "d/f", passthrough), (ino, 6, "d/f", passthrough)] if told else [])
        assert (ino in mount.fs._files._known.closed) is (passthrough and not told), (
            "its next open is not told"
        )
        mount.fs.watch_opens(lambda *news: heard.append((0, 0, "", True)), EVERY_FILE)
        assert not mount.fs._files._known.closed
        heard.clear()
        fh, _ = await mount.fs.open(ino, os.O_RDONLY, 1)
        assert len(heard) == 1
        mount.fs.release(fh)
        assert not mount.fs._files._known.closed, "all its opens are told"
        mount.fs.watch_opens(None)
