"""The store does not answer: which answers serve-stale keeps, and that there are none without."""

from __future__ import annotations

from collections.abc import Awaitable

import pytest
import trio

from cachefs.base.errors import CachefsError, OriginFailed, Unreachable
from cachefs.fs import Ttls
from tests.fs.bucket import Bucket, WritableBucket
from tests.fs.mount import Mount, mounted
from tests.fs.writers import MemoryWriter

KEYS = ["d/a", "d/b", "d/sub/c", "top"]
TTL_S = Ttls().ttl


def out(bucket: Bucket, *, stale: bool = True) -> None:
    bucket.serves_stale = stale
    bucket.before = lambda kind, key: Unreachable("no answer for 12 s")
    bucket.reset()


def back(bucket: Bucket) -> None:
    bucket.serves_stale = False
    bucket.before = lambda kind, key: None
    bucket.reset()


async def fails(ask: Awaitable[object]) -> None:
    began = trio.current_time()
    with pytest.raises(Unreachable):
        await ask
    assert trio.current_time() - began < 0.1


async def known(mount: Mount) -> None:
    """Everything is looked at once; `d/a` is cached."""
    assert await mount.walk() == {
        b"d": None,
        b"d/a": 10,
        b"d/b": 10,
        b"d/sub": None,
        b"d/sub/c": 10,
        b"top": 10,
    }
    await mount.read("d/a")


async def test_what_is_known_is_believed_however_old_and_costs_no_request() -> None:
    bucket = Bucket(KEYS, page=2)
    async with mounted(bucket) as mount:
        await known(mount)
        content = await mount.read("d/a")
        out(bucket)
        for hours in range(3):
            await trio.sleep(3600 * hours + TTL_S + 1)
            await known(mount)
            assert await mount.read("d/a") == content
            assert await mount.stat("d/missing") is None  # so says the last listing
        assert bucket.counts == (0, 0)
        assert mount.metrics.stale_answers > 0


async def test_the_kernel_keeps_such_an_answer_for_a_moment() -> None:
    bucket = Bucket(KEYS)
    async with mounted(bucket) as mount:
        await known(mount)
        out(bucket)
        await trio.sleep(TTL_S + 1)
        d = await mount.ino("d")
        found = mount.fs.lookup_now(d, b"a")
        missing = mount.fs.lookup_now(d, b"no")
        assert found is not None and missing is not None
        assert found[0] is not None and missing[0] is None
        assert 0 < found[1] <= 1 and 0 < missing[1] <= 1


async def test_what_is_unknown_fails_at_once() -> None:
    bucket = Bucket(KEYS)
    async with mounted(bucket) as mount:
        await mount.names()
        out(bucket)
        await fails(mount.stat("d/a"))  # d was listed, but not what is in it
        await fails(mount.names("d"))
        assert await mount.names() == [b"d", b"top"]


async def test_a_change_that_fails_leaves_what_is_known() -> None:
    bucket = WritableBucket(KEYS)
    async with mounted(bucket, writer=MemoryWriter(), file_mode=0o644, dir_mode=0o755) as mount:
        await known(mount)
        out(bucket)
        await fails(mount.mkdir("d/new"))
        await fails(mount.rename("d/a", "d/z"))
        await known(mount)
        assert await mount.stat("d/z") is None and await mount.stat("d/missing") is None
        bucket.set("d/z")  # the copy was made, and its reply is lost
        back(bucket)
        assert await mount.names("d") == [b"a", b"b", b"sub", b"z"]


async def test_when_it_is_back_the_next_look_sees_what_changed() -> None:
    bucket = Bucket(KEYS)
    async with mounted(bucket) as mount:
        await known(mount)
        out(bucket)
        await trio.sleep(TTL_S + 1)
        assert (await mount.stat("d/a")).size == 10  # type: ignore[union-attr]
        bucket.set("d/a", size=77)
        bucket.set("d/new")
        del bucket.objects["d/b"]
        back(bucket)
        await trio.sleep(1.1)
        assert await mount.names("d") == [b"a", b"new", b"sub"]
        assert (await mount.stat("d/a")).size == 77  # type: ignore[union-attr]
        assert await mount.stat("d/b") is None


async def test_a_look_under_way_when_the_outage_is_found_gets_what_was_known() -> None:
    bucket = Bucket(KEYS)
    async with mounted(bucket) as mount:
        await known(mount)
        await trio.sleep(TTL_S + 1)
        bucket.delay, asked = 5.0, trio.current_time()
        bucket.before = lambda kind, key: Unreachable("no answer")

        async def found_out() -> None:
            await trio.sleep(1)
            bucket.serves_stale = True

        async with trio.open_nursery() as nursery:
            nursery.start_soon(found_out)
            assert await mount.names("d") == [b"a", b"b", b"sub"]
        assert trio.current_time() - asked < 20


async def test_asking_to_look_again_waits_for_the_store_to_be_back() -> None:
    bucket = Bucket(KEYS)
    async with mounted(bucket) as mount:
        await known(mount)
        out(bucket)
        await mount.fs.refresh("d")
        await known(mount)
        bucket.set("d/a", size=77)
        back(bucket)
        await trio.sleep(1.1)
        assert (await mount.stat("d/a")).size == 77  # type: ignore[union-attr]


async def test_what_is_known_to_have_changed_is_not_believed() -> None:
    bucket = Bucket(KEYS)
    async with mounted(bucket) as mount:
        await known(mount)
        fh = await mount.open("d/b")
        bucket.set("d/b", size=10, version=2)
        with pytest.raises(CachefsError):
            await mount.pread(fh, 0, 10)
        mount.fs.release(fh)
        out(bucket)
        await fails(mount.stat("d/b"))
        assert await mount.stat("d/a") is not None


async def test_without_serve_stale_nothing_is_believed_past_its_time() -> None:
    bucket = Bucket(KEYS)
    async with mounted(bucket) as mount:
        await known(mount)
        out(bucket, stale=False)
        await trio.sleep(TTL_S - 10)
        assert await mount.stat("d/a") is not None and await mount.read("d/a")
        await trio.sleep(11)
        await fails(mount.stat("d/a"))
        await fails(mount.names())
        assert mount.metrics.stale_answers == 0


@pytest.mark.parametrize("stale", [True, False])
async def test_strict_mounts_do_as_they_are_told(stale: bool) -> None:
    bucket = Bucket(KEYS)
    async with mounted(bucket, metadata_ttl=0.0, negative_ttl=0.0, revalidate_at_open=True) as mount:
        await known(mount)
        await trio.sleep(1)
        out(bucket, stale=stale)
        if stale:
            assert await mount.read("d/a")
        else:
            with pytest.raises(OriginFailed):
                await mount.read("d/a")
