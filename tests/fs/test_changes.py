"""The store changes, fails and hangs behind the mount; the tree follows and never lies."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base.errors import (
    CachefsError,
    ConfigError,
    IsADirectory,
    NotADirectory,
    NotFound,
    NotPermitted,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    ReadOnly,
    Unsupported,
)
from cachefs.fs import NoAttribute, Volume
from cachefs.fs.xattrs import OF_DIRECTORIES, OF_FILES
from cachefs.origin.protocol import ListPage
from tests.fs.bucket import Bucket
from tests.fs.mount import ROOT, Clock, Mount, mounted


def names(count: int) -> list[str]:
    return [f"f{i:03d}" for i in range(count)]


async def test_listing_again_keeps_inodes_but_of_what_has_changed_and_removes_what_is_gone() -> None:
    bucket = Bucket(names(30), page=7)
    async with mounted(bucket) as mount:
        before = {e.name: e for e in await mount.entries()}
        bucket.put("f003", size=99)
        bucket.put("new")
        del bucket.objects["f010"]
        await trio.sleep(61)
        after = {e.name: e for e in await mount.entries()}
        await trio.sleep(1)
        assert set(after) == set(before) - {b"f010"} | {b"new"}
        for name, entry in after.items():
            if name in before:
                same = entry.attributes.ino == before[name].attributes.ino
                assert same == (entry.attributes == before[name].attributes) == (name != b"f003")
        assert sorted(name for _, _, name in mount.invalidated) == [b"f003", b"f010"]
        gone = before[b"f010"].attributes
        with pytest.raises(ObjectChanged):
            await mount.fs.getattr(gone.ino)
        mount.database.flush()
        assert mount.database.stored.count("names") == mount.database.stored.count("inodes") == 30


async def test_an_unchanged_listing_says_nothing_to_the_kernel() -> None:
    bucket = Bucket(names(20))
    async with mounted(bucket) as mount:
        first = await mount.entries()
        await trio.sleep(61)
        second = await mount.entries()
        assert [(e.name, e.attributes) for e in first] == [(e.name, e.attributes) for e in second]
        assert not mount.invalidated


async def test_a_directory_that_is_gone_takes_all_below_with_it() -> None:
    bucket = Bucket([*(f"d/{i}/{j}/x" for i in range(3) for j in range(3)), "keep"])
    async with mounted(bucket) as mount:
        await mount.walk()
        for key in list(bucket.objects):
            if key.startswith("d/"):
                del bucket.objects[key]
        await trio.sleep(61)
        assert await mount.walk() == {b"keep": 10}
        await trio.sleep(1)
        mount.database.flush()
        for table in ("names", "inodes", "directories"):
            assert mount.database.stored.count(table) == 1


@pytest.mark.parametrize("failure", [PermissionDenied, OriginFailed])
async def test_a_failure_is_never_an_absence(failure: type[CachefsError]) -> None:
    bucket = Bucket(names(5))
    async with mounted(bucket) as mount:
        bucket.before = lambda kind, key: failure("no")
        for name in (b"f001", b"nothing"):
            with pytest.raises(failure):
                await mount.fs.lookup(ROOT, name)
        with pytest.raises(failure):
            await mount.entries()
        bucket.before = lambda kind, key: None
        assert await mount.stat("f001") is not None
        assert await mount.stat("nothing") is None
        await trio.sleep(61)
        bucket.before = lambda kind, key: failure("no")
        with pytest.raises(failure):
            await mount.fs.lookup(ROOT, b"f001")
        with pytest.raises(failure):
            await mount.fs.getattr((await mount.entries())[0].next_offset)


async def test_a_listing_that_fails_midway_raises_and_goes_on_from_there() -> None:
    bucket = Bucket(names(50), page=10)
    async with mounted(bucket) as mount:
        failures = [OriginFailed("reset")]
        bucket.before = lambda kind, key: failures.pop() if len(bucket.lists) == 3 and failures else None
        handle = mount.fs.opendir(ROOT)
        found: list[bytes] = []
        offset, raised = 0, 0
        while True:
            try:
                page = await mount.fs.readdir(handle, offset, 100)
            except OriginFailed:
                raised += 1
                continue
            if not page:
                break
            found += [e.name for e in page]
            offset = page[-1].next_offset
        assert raised == 1
        assert found == [n.encode() for n in names(50)]
        assert len(bucket.lists) == 6


async def test_a_listing_that_keeps_failing_never_looks_complete() -> None:
    bucket = Bucket(names(50), page=10)
    async with mounted(bucket) as mount:
        bucket.before = lambda kind, key: OriginFailed("down") if len(bucket.lists) > 2 else None
        for _ in range(5):
            with pytest.raises(OriginFailed):
                await mount.entries()
        with pytest.raises(OriginFailed):
            await mount.fs.lookup(ROOT, b"f049x")
        bucket.before = lambda kind, key: None
        assert len(await mount.entries()) == 50


async def test_a_store_that_repeats_a_page_is_an_error_not_a_loop() -> None:
    bucket = Bucket(names(30), page=10)
    plain = bucket.list_page

    async def stuck(prefix: str, **kwargs: Any) -> Any:
        page = await plain(prefix, **{**kwargs, "token": None})
        object.__setattr__(page, "next_token", "same")
        return page

    bucket.list_page = stuck  # type: ignore[method-assign]
    async with mounted(bucket) as mount:
        with pytest.raises(OriginFailed):
            await mount.entries()


async def test_who_gives_up_waiting_harms_nobody() -> None:
    bucket = Bucket(names(50), page=10, delay=1)
    async with mounted(bucket) as mount:

        async def impatient() -> None:
            with trio.move_on_after(0.5):
                await mount.entries()
            with trio.move_on_after(0.5):
                await mount.stat("f044")

        async def patient() -> None:
            assert len(await mount.entries()) == 50

        async with trio.open_nursery() as nursery:
            nursery.start_soon(impatient)
            nursery.start_soon(patient)
        assert len([1 for _, _, limit in bucket.lists if limit > 1]) == 5


async def test_a_cancelled_question_is_asked_again_by_who_waited_for_it() -> None:
    bucket = Bucket(names(50), page=10, delay=1)
    async with mounted(bucket) as mount:
        await mount.stat("f003")

        async def first() -> None:
            with trio.move_on_after(0.5):
                await mount.stat("f049")

        async def second() -> None:
            assert await mount.stat("f049") is not None

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first)
            nursery.start_soon(second)


async def test_a_changed_object_is_estale_to_its_handle_and_new_to_the_next() -> None:
    bucket = Bucket(names(3))
    async with mounted(bucket) as mount:
        ino = await mount.ino("f001")
        old, _ = await mount.fs.open(ino, os.O_RDONLY, 1)
        first = await mount.fs.read(old, 0, 4)
        bucket.put("f001", size=20, version=1)
        mount.bytes.warm.clear()
        for _ in range(2):
            with pytest.raises(ObjectChanged):
                await mount.fs.read(old, 4, 4)
        assert mount.metrics.objects_changed == 1
        assert mount.fs.attributes_now(ino) is None
        assert mount.invalidated == [(0, ROOT, b"f001")]  # the pages it has are of the version that is open
        for _ in range(2):
            with pytest.raises(ObjectChanged):
                await mount.fs.open(ino, os.O_RDONLY, 1)
        other = await mount.ino("f001")
        assert other != ino
        new, _ = await mount.fs.open(other, os.O_RDONLY, 1)
        assert bytes(await mount.fs.read(new, 0, 4)) != bytes(first)
        assert len(await mount.fs.read(new, 0, 100)) == 20
        mount.fs.release(old)
        # The pages that the kernel may have of it are of the older version.
        with pytest.raises(ObjectChanged):
            await mount.fs.open(ino, os.O_RDONLY, 1)
        for fh in (old, new):
            mount.fs.release(fh)
            mount.fs.release(fh)
        assert mount.bytes.open_count == 0


async def test_a_removed_object_is_estale_to_its_handle_and_then_no_more() -> None:
    bucket = Bucket(names(3))
    async with mounted(bucket) as mount:
        ino, fh = await see(mount, "f001")
        del bucket.objects["f001"]
        with pytest.raises(ObjectChanged):
            await mount.fs.read(fh, 0, 4)
        assert await mount.stat("f001") is None
        with pytest.raises(ObjectChanged):
            await mount.fs.open(ino, os.O_RDONLY, 1)
        mount.fs.release(fh)
        with pytest.raises(ObjectChanged):  # the kernel walks again, and finds that the name is missing
            await mount.fs.open(ino, os.O_RDONLY, 1)
        assert await mount.names() == [b"f000", b"f002"]


async def test_an_older_handle_goes_on_with_what_is_cached_when_a_newer_version_is_known() -> None:
    bucket = Bucket(names(3))
    async with mounted(bucket, revalidate_at_open=True) as mount:
        ino = await mount.ino("f001")
        old, _ = await mount.fs.open(ino, os.O_RDONLY, 1)
        await mount.fs.read(old, 0, 4)
        assert mount.fs.read_now(old, 0, 4) is not None
        bucket.put("f001", version=1)
        with pytest.raises(ObjectChanged):
            await mount.fs.open(ino, os.O_RDONLY, 1)
        before = mount.fs.read_now(old, 0, 4)
        new, _ = await mount.fs.open(await mount.ino("f001"), os.O_RDONLY, 1)
        assert bytes(await mount.fs.read(new, 0, 4)) != before == mount.fs.read_now(old, 0, 4)
        mount.bytes.warm.clear()
        with pytest.raises(ObjectChanged):
            await mount.fs.read(old, 0, 4)
        assert await mount.fs.read(new, 0, 4)


async def see(mount: Mount, path: str) -> tuple[int, int]:
    """Open as the kernel does, which walks the path again after ESTALE: the number and the handle."""
    ino = await mount.ino(path)
    try:
        fh, _ = await mount.fs.open(ino, os.O_RDONLY, 1)
    except ObjectChanged:
        ino = await mount.ino(path)
        fh, _ = await mount.fs.open(ino, os.O_RDONLY, 1)
    return ino, fh


async def test_every_version_has_a_number_of_its_own() -> None:
    bucket = Bucket(["d/f", "d/g"])
    async with mounted(bucket, metadata_ttl=0.0, negative_ttl=0.0, revalidate_at_open=True) as mount:
        fs = mount.fs
        numbers, handles, etags, sizes = [], [], [], [10, 20, 30]
        for version, size in enumerate(sizes):
            bucket.put("d/f", size=size, version=version)
            ino, fh = await see(mount, "d/f")
            etags.append(bucket.objects["d/f"].etag.encode())
            numbers.append(ino)
            handles.append(fh)
            assert len(await fs.read(fh, 0, 100)) == size
            assert (await fs.getattr(ino))[0].ino == ino
            assert (await fs.getattr(ino))[0].size == size
        assert len(set(numbers)) == 3
        for ino, fh, size, etag in zip(numbers[:2], handles[:2], sizes[:2], etags[:2], strict=True):
            for attributes, ttl in (await fs.getattr(ino), fs.attributes_now(ino) or (None, 1.0)):
                assert attributes is not None and ttl == 0
                assert (attributes.ino, attributes.size, attributes.nlink) == (ino, size, 1)
            assert await fs.getxattr(ino, b"user.cachefs.etag") == etag
            assert len(await mount.pread(fh)) == size  # it is cached
            with pytest.raises(ObjectChanged):  # a name leads elsewhere
                await fs.open(ino, os.O_RDONLY, 1)
        mount.bytes.warm.clear()
        for fh in handles[:2]:
            with pytest.raises(ObjectChanged):
                await fs.read(fh, 0, 4)
        listed = {e.name: e for e in await mount.entries(await mount.ino("d"))}
        assert listed[b"f"].attributes.ino == numbers[2]
        assert listed[b"f"].attributes.size == 30
        etag = bucket.objects["d/f"].etag.encode()
        assert await fs.getxattr(numbers[2], b"user.cachefs.etag") == etag
        await fs.getxattr(numbers[2], b"user.cachefs.refresh")
        assert mount.invalidated[-1] == (0, await mount.ino("d"), b"f")
        # The first version is what the store has again: another inode, for its number is of the past.
        bucket.put("d/f", size=10, version=0)
        ino, fh = await see(mount, "d/f")
        assert ino not in numbers
        assert len(await fs.read(handles[0], 0, 100)) == (await fs.getattr(ino))[0].size == 10
        assert len(await fs.read(fh, 0, 100)) == 10
        for old in [*handles, fh]:
            fs.release(old)
        for old in numbers:
            with pytest.raises(ObjectChanged):
                await fs.getattr(old)
        assert await see(mount, "d/f") == (ino, fh + 1)
        fs.release(fh + 1)
        assert mount.bytes.open_count == 0


async def test_a_name_that_was_gone_does_not_come_back_under_the_number_of_its_readers() -> None:
    bucket = Bucket(names(3))
    async with mounted(bucket) as mount:
        ino, old = await see(mount, "f001")
        first = await mount.fs.read(old, 0, 100)
        del bucket.objects["f001"]
        await mount.fs.refresh("")
        assert await mount.stat("f001") is None
        bucket.put("f001", size=12)
        await mount.fs.refresh("")
        other, new = await see(mount, "f001")
        assert other != ino
        assert len(await mount.fs.read(new, 0, 100)) == 12
        assert mount.fs.read_now(old, 0, 100) == first
        found = mount.fs.attributes_now(ino)
        assert found is not None and (found[0].ino, found[0].size) == (ino, 10)
        mount.fs.release(old)
        assert await mount.ino("f001") == other


async def test_reads_are_clipped() -> None:
    bucket = Bucket(["a"])
    bucket.put("empty", size=0)
    async with mounted(bucket) as mount:
        fh, _ = await mount.fs.open(await mount.ino("a"), os.O_RDONLY, 1)
        assert len(await mount.fs.read(fh, 8, 100)) == 2
        assert mount.fs.read_now(fh, 10, 1) == b"" == await mount.fs.read(fh, 10, 1)
        assert mount.fs.read_now(fh, 1 << 60, 1) == b""
        empty, _ = await mount.fs.open(await mount.ino("empty"), os.O_RDONLY, 1)
        assert mount.fs.read_now(empty, 0, 4096) == b""
        with pytest.raises(NotFound):
            mount.fs.read_now(999, 0, 1)


async def test_errors_of_kind() -> None:
    bucket = Bucket(["d/a", "f"])
    async with mounted(bucket) as mount:
        d, f = await mount.ino("d"), await mount.ino("f")
        with pytest.raises(NotADirectory):
            await mount.fs.lookup(f, b"x")
        with pytest.raises(NotADirectory):
            mount.fs.opendir(f)
        for ino in (ROOT, d):
            with pytest.raises(IsADirectory):
                await mount.fs.open(ino, os.O_RDONLY, 1)
        for flags in (os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_CREAT):
            with pytest.raises(ReadOnly):
                await mount.fs.open(f, flags, 1)
        with pytest.raises(ObjectChanged):
            await mount.fs.getattr(12345)
        mount.fs.release(12345)
        mount.fs.releasedir(12345)


async def test_attributes() -> None:
    bucket = Bucket(["d/a"])
    bucket.put("d/", mtime_ns=5 * 10**9)
    bucket.put("big", size=1 << 40, mtime_ns=1_600_000_000_123_456_789)
    async with mounted(bucket, file_mode=0o440, dir_mode=0o550) as mount:
        big = await mount.stat("big")
        assert big is not None
        assert (big.size, big.mtime_ns, big.nlink, big.uid, big.gid) == (
            1 << 40,
            1_600_000_000_123_456_789,
            1,
            1000,
            1000,
        )
        assert big.mode == stat.S_IFREG | 0o440
        await mount.names("d")
        d = await mount.stat("d")
        assert d is not None
        assert (d.mode, d.nlink, d.size, d.mtime_ns) == (stat.S_IFDIR | 0o550, 2, 4096, 5 * 10**9)
        await trio.sleep(61)
        await mount.entries()
        assert await mount.stat("d") == d


async def test_an_emptied_directory_is_looked_at_again() -> None:
    bucket = Bucket(["d/a", "e/"])
    async with mounted(bucket) as mount:
        d = await mount.ino("d")
        assert await mount.names("e") == []
        assert await mount.stat("e") is not None
        del bucket.objects["d/a"]
        assert await mount.entries(d) == []
        assert await mount.stat("d") is None


async def test_seeking_in_a_directory() -> None:
    bucket = Bucket(names(1000), page=100)
    async with mounted(bucket) as mount:
        handle = mount.fs.opendir(ROOT)
        seen: list[tuple[int, bytes]] = []
        offset = 0
        while page := await mount.fs.readdir(handle, offset, 7):
            seen += [(e.next_offset, e.name) for e in page]
            offset = page[2].next_offset if len(page) > 2 else page[-1].next_offset
            seen = seen[: len(seen) - len(page) + 3]
        assert [n for _, n in seen] == [n.encode() for n in names(1000)]
        for place in (0, 500, 998):
            assert (await mount.fs.readdir(handle, seen[place][0], 1))[0].name == seen[place + 1][1]
        assert await mount.fs.readdir(handle, seen[-1][0], 1) == []
        assert (await mount.fs.readdir(handle, 0, 1))[0].name == b"f000"
        other = mount.fs.opendir(ROOT)
        assert (await mount.fs.readdir(other, seen[500][0], 1))[0].name == seen[501][1]
        with pytest.raises(OriginFailed):
            await mount.fs.readdir(other, 77, 1)


async def test_a_reader_survives_a_listing_that_runs_beside_it() -> None:
    bucket = Bucket(names(1000), page=100)
    async with mounted(bucket) as mount:
        await mount.entries()
        slow = mount.fs.opendir(ROOT)
        page = await mount.fs.readdir(slow, 0, 100)
        found = [e.name for e in page]
        for i in range(500, 600):
            del bucket.objects[f"f{i:03d}"]
        await trio.sleep(61)
        await mount.entries()
        await trio.sleep(1)
        while page := await mount.fs.readdir(slow, page[-1].next_offset, 100):
            found += [e.name for e in page]
        assert len(found) == len(set(found))
        assert set(found) >= {n.encode() for n in names(1000)} - {
            f"f{i:03d}".encode() for i in range(500, 600)
        }


async def test_refresh_looks_again_at_everything_below() -> None:
    bucket = Bucket([f"d/e/{i}" for i in range(10)] + ["x/y"])
    async with mounted(bucket, immutable=True) as mount:
        await mount.walk()
        bucket.put("d/e/new")
        bucket.put("d/e/3", size=99)
        assert await mount.stat("d/e/new") is None
        bucket.reset()
        await mount.fs.refresh("/d")
        assert bucket.counts == (0, 0)
        assert b"e" in [name for _, _, name in mount.invalidated]
        assert await mount.stat("d/e/new") is not None
        changed = await mount.stat("d/e/3")
        assert changed is not None and changed.size == 99
        bucket.reset()
        assert await mount.stat("x/y") is not None
        assert bucket.counts == (0, 0)


async def test_only_the_owner_and_root_refresh_by_attribute() -> None:
    bucket = Bucket(["d/a"])
    async with mounted(bucket, immutable=True) as mount:
        ino = await mount.ino("d/a")
        found = await mount.stat("d/a")
        assert found is not None
        bucket.reset()
        for inode in (ROOT, await mount.ino("d"), ino):
            with pytest.raises(NotPermitted):
                await mount.fs.getxattr(inode, b"user.cachefs.refresh", found.uid + 1)
        assert mount.invalidated == []
        assert await mount.stat("d/a") == found and bucket.counts == (0, 0)
        await mount.fs.getxattr(ino, b"user.cachefs.refresh", found.uid)
        assert mount.invalidated == [(ino, await mount.ino("d"), b"a")]


async def test_refresh_of_a_file_by_attribute_and_of_a_missing_name() -> None:
    bucket = Bucket(["d/a", "d/b"])
    async with mounted(bucket, immutable=True) as mount:
        ino = await mount.ino("d/a")
        bucket.put("d/a", size=5)
        await mount.fs.getxattr(ino, b"user.cachefs.refresh")
        assert mount.invalidated == [(ino, await mount.ino("d"), b"a")]
        found = await mount.stat("d/a")
        assert found is not None and found.size == 5
        assert await mount.stat("d/c") is None
        bucket.put("d/c")
        assert await mount.stat("d/c") is None
        await mount.fs.refresh("d/c")
        assert await mount.stat("d/c") is not None
        await mount.fs.refresh("")
        await mount.fs.refresh("no/such/path")
        with pytest.raises(NotFound):
            await mount.fs.refresh("../..")


async def test_refresh_forgets_single_answers_that_a_name_is_missing() -> None:
    """Of a directory that was never listed, too."""
    bucket = Bucket([f"d/{n:04}" for n in range(2000)], page=10)
    async with mounted(bucket, negative_ttl=3600.0) as mount:
        assert await mount.stat("d/zzz") is None
        bucket.put("d/zzz")
        bucket.reset()
        assert await mount.stat("d/zzz") is None and bucket.counts == (0, 0)
        await mount.fs.refresh("d")
        assert await mount.stat("d/zzz") is not None


async def test_refresh_of_a_directory_tells_of_the_names_that_the_kernel_believes_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cachefs.fs.refreshing.REMEMBERED", 3)
    bucket = Bucket(["d/a", "e/a"])
    async with mounted(bucket, immutable=True) as mount:
        d, e, a = [await mount.ino(path) for path in ("d", "e", "d/a")]
        found = [await mount.fs.lookup(parent, name) for parent in (d, e) for name in (b"x", b"y")]
        ttl = found[0][1]
        # The kernel asks for the last one each time.
        assert ttl > 0 and found == [(None, ttl)] * 3 + [(None, 0.0)]
        assert await mount.fs.lookup(d, b"x") == (None, ttl)
        await mount.fs.refresh("d")
        assert sorted(mount.invalidated) == sorted([(a, d, b"a"), (0, d, b"x"), (0, d, b"y")])
        assert await mount.fs.lookup(e, b"y") == (None, ttl)  # there is room again
        mount.invalidated.clear()
        await mount.fs.refresh("d")
        assert b"x" not in [name for _, _, name in mount.invalidated]
        mount.clock.now += ttl + 1
        assert [await mount.fs.lookup(d, bytes([name])) for name in b"pqrs"].count((None, ttl)) == 3


async def test_refresh_outlives_a_restart(tmp_path: Path) -> None:
    bucket = Bucket(["d/a"])
    async with mounted(bucket, path=tmp_path, immutable=True) as mount:
        await mount.walk()
        await mount.fs.refresh("")
    bucket.put("d/b")
    async with mounted(bucket, path=tmp_path, immutable=True) as mount:
        assert await mount.stat("d/b") is not None


async def test_names_and_inodes_survive_a_restart_and_a_loss(tmp_path: Path) -> None:
    bucket = Bucket([f"d{i}/e/{j}" for i in range(5) for j in range(5)])
    clock = Clock()
    async with mounted(bucket, path=tmp_path / "a", clock=clock) as mount:
        tree = await mount.walk()
        inodes = {path: await mount.ino(path) for path in tree}
    bucket.reset()
    async with mounted(bucket, path=tmp_path / "a", clock=clock) as mount:
        assert {path: await mount.ino(path) for path in tree} == inodes
        assert await mount.walk() == tree
        assert bucket.counts == (0, 0)
    async with mounted(bucket, path=tmp_path / "b", clock=clock) as mount:
        # A kernel that outlives the database must not take one for the other.
        assert not set(inodes.values()) & {await mount.ino(path) for path in tree}


async def test_another_source_never_shows_the_names_of_the_last(tmp_path: Path) -> None:
    async with mounted(Bucket(["a", "b"]), path=tmp_path, immutable=True) as mount:
        assert await mount.names() == [b"a", b"b"]
    other = Bucket(["c"])
    other.source = "s3://other"
    async with mounted(other, path=tmp_path, immutable=True) as mount:
        assert await mount.names() == [b"c"]


async def test_several_volumes_and_prefixes() -> None:
    one = Bucket(["data/x/1", "data/2", "other"], prefix="data/")
    two = Bucket(["3"], prefix="")
    volumes: list[Any] = [Volume("one", one), Volume("two", two)]  # type: ignore[arg-type]
    async with mounted(one, volumes=volumes) as mount:
        tree = {b"one": None, b"one/2": 10, b"one/x": None, b"one/x/1": 10, b"two": None, b"two/3": 10}
        assert await mount.walk() == tree
        assert await mount.stat("three") is None
        await mount.read("one/x/1")
        key = await mount.fs.getxattr(await mount.ino("one/x/1"), b"user.cachefs.key")
        assert key == b"s3://test/data/x/1"
        await mount.fs.refresh("one")
        await mount.fs.getxattr(await mount.ino("two"), b"user.cachefs.refresh")
        await mount.fs.refresh("")
        assert await mount.walk() == tree
    for bad in (["a", "a"], ["a/b", "c"], ["..", "c"]):
        with pytest.raises(ConfigError):
            async with mounted(one, volumes=[Volume(n, two) for n in bad]):  # type: ignore[arg-type]
                pass


async def test_attributes_by_name() -> None:
    bucket = Bucket(["d/a"])
    async with mounted(bucket) as mount:
        ino, d = await mount.ino("d/a"), await mount.ino("d")
        etag = bucket.objects["d/a"].etag.encode()
        assert await mount.fs.getxattr(ino, b"user.cachefs.etag") == etag
        assert await mount.fs.getxattr(ino, b"user.cachefs.cached") == b"0"
        await mount.read("d/a")
        assert await mount.fs.getxattr(ino, b"user.cachefs.cached") == b"10"
        assert await mount.fs.getxattr(d, b"user.cachefs.hidden") == b"0"
        assert (await mount.fs.getxattr(d, b"user.cachefs.listed")).startswith(b"2023-11-14T22:13:")
        for inode, wrong in (
            (ino, b"security.capability"),
            (ino, b"user.cachefs.hidden"),
            (d, b"user.cachefs.etag"),
        ):
            with pytest.raises(NoAttribute):
                await mount.fs.getxattr(inode, wrong)
        for inode, names in ((ino, OF_FILES), (d, OF_DIRECTORIES), (ROOT, OF_DIRECTORIES)):
            for name in names:
                await mount.fs.getxattr(inode, name)
        mount.database.flush()
        assert mount.fs.statfs().files == 2
        mount.database.flush()
        assert mount.fs.status()["names"] == 2


async def test_a_store_that_cannot_list() -> None:
    bucket = Bucket(["a/b", "c"])
    bucket.can_list = False
    bucket.put("a/", size=0)
    async with mounted(bucket) as mount:
        assert (await mount.stat("c")) is not None
        assert (await mount.stat("a/b")) is not None
        assert await mount.stat("nothing") is None
        assert bucket.counts[0] == 0
        bucket.reset()
        assert (await mount.stat("c")) is not None
        assert await mount.stat("nothing") is None
        assert bucket.counts == (0, 0)
        with pytest.raises(Unsupported):
            await mount.entries()


async def test_a_listing_that_tells_no_sizes() -> None:
    bucket = Bucket(["a", "b", "d/c"])
    bucket.tells_sizes = False
    async with mounted(bucket) as mount:
        assert [(e.name, e.ttl == 0.0) for e in await mount.entries()] == [
            (b"a", True),
            (b"b", True),
            (b"d", False),
        ]
        assert bucket.counts == (1, 0)
        for _ in range(3):
            found = await mount.stat("a")
            assert found is not None and found.size == 10
        assert bucket.counts == (1, 1)
        await mount.read("a")
        await trio.sleep(61)
        await mount.entries()
        await mount.read("a")
        assert not mount.invalidated
        bucket.put("a", size=12)
        await trio.sleep(61)
        await mount.entries()
        fh, _ = await mount.fs.open(await mount.ino("a"), os.O_RDONLY, 1)
        assert len(await mount.fs.read(fh, 0, 100)) == 12


async def test_a_store_that_claims_an_order_it_does_not_keep(caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket(["b1", "a2", "c0", "a1", "b0"], page=2)
    bucket.ordered = False
    plain = bucket.list_page

    async def liar(prefix: str, **kwargs: Any) -> Any:
        page = await plain(prefix, **kwargs)
        object.__setattr__(page, "ordered", True)
        return page

    bucket.list_page = liar  # type: ignore[method-assign]
    async with mounted(bucket) as mount:
        with pytest.raises(OriginFailed):
            await mount.names()
        assert sorted(await mount.names()) == [b"a1", b"a2", b"b0", b"b1", b"c0"]
        assert "out of order" in caplog.text


async def test_negative_answers_expire() -> None:
    bucket = Bucket(names(300), page=10)
    async with mounted(bucket) as mount:
        assert await mount.stat("zzz") is None
        bucket.put("zzz")
        bucket.reset()
        assert await mount.stat("zzz") is None
        assert bucket.counts[1] == 0
        await trio.sleep(6)
        assert await mount.stat("zzz") is not None


class Late(Bucket):
    """Each LIST of many names is answered as it was when it was asked for, once it is `released`."""

    def __init__(self, keys: Iterable[str]) -> None:
        super().__init__(keys)
        self.released = trio.Event()

    async def list_page(self, prefix: str, *, token: str | None = None, limit: int = 1000) -> ListPage:
        page = await super().list_page(prefix, token=token, limit=limit)
        if limit > 1:
            await self.released.wait()
        return page


async def found_after_it_came(mount: Mount, bucket: Late) -> bool:
    """Whether a lookup shows a name that another client has made before it, while a listing was on its way."""
    await trio.sleep(1)
    bucket.put("new")
    found: list[object] = []

    async def look() -> None:
        found.append(await mount.stat("new"))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(look)
        await trio.sleep(1)
        bucket.released.set()
    return found != [None]


async def test_a_name_that_came_while_the_early_listing_was_on_its_way_is_not_missing() -> None:
    bucket = Late(names(3))
    async with mounted(bucket) as mount:
        mount.fs.list_tops()
        assert await found_after_it_came(mount, bucket)
        assert await mount.stat("f001") is not None
        assert bucket.counts == (2, 1)  # the listing, and what was asked for the new name


async def test_with_a_ttl_of_0_no_absence_is_taken_from_a_listing_that_began_before() -> None:
    bucket = Late(names(3))
    async with mounted(bucket, metadata_ttl=0.0, negative_ttl=0.0) as mount, trio.open_nursery() as nursery:
        nursery.start_soon(mount.entries)
        assert await found_after_it_came(mount, bucket)


async def test_the_directory_wins_over_a_file_of_its_name_where_the_listing_has_only_shown_the_file() -> None:
    """The keys between the two are more than a lookup waits for."""
    async with mounted(Bucket(["a", *(f"a-{n:02d}" for n in range(50)), "a/x"], page=1)) as mount:
        found = await mount.stat("a")
        assert found is not None and found.is_dir
        assert await mount.stat("a/x") is not None


async def test_an_open_directory_that_another_client_has_removed_keeps_its_attributes() -> None:
    bucket = Bucket(["d/x"])
    async with mounted(bucket) as mount:
        ino = await mount.ino("d")
        handle = mount.fs.opendir(ino)
        del bucket.objects["d/x"]
        await mount.fs.refresh()
        assert await mount.stat("d") is None
        shown, _ = await mount.fs.getattr(ino)
        assert shown.is_dir and shown.nlink == 0
        mount.fs.releasedir(handle)
        with pytest.raises(ObjectChanged):
            await mount.fs.getattr(ino)
