"""Files that the kernel opens without asking: reads by inode, with handles of our own."""

from __future__ import annotations

import errno

import pytest
import trio

from cachefs.base.errors import OriginFailed
from cachefs.fuse import zero_open
from cachefs.fuse.protocol import Op
from tests.fs.bucket import Bucket
from tests.fuse.kernel import OPEN_READ, ROOT, Kernel, kernel, read_in

FOREVER = {"immutable": True, "zero_open": True}


async def read(asking: Kernel, ino: int) -> bytes:
    reply = await asking.ask(Op.READ, ino, read_in(0))
    assert not reply.error, reply
    return reply.body


async def test_an_open_is_not_implemented() -> None:
    async with kernel(Bucket(["f"]), **FOREVER) as asking:
        ino = await asking.ino("f")
        assert (await asking.ask(Op.OPEN, ino, OPEN_READ)).error == errno.ENOSYS
        assert asking.counts == (0, 0)
        assert await asking.opendir()  # directories are opened as ever


async def test_reads_without_an_open_share_a_handle() -> None:
    async with kernel(Bucket(["f", "g"]), **FOREVER) as asking:
        inos = [await asking.ino(name) for name in "fg"]
        for _ in range(3):
            data = [await read(asking, ino) for ino in inos]
            assert [len(found) for found in data] == [10, 10]
            assert data[0] != data[1]
            assert asking.counts == (2, 0)
        assert (await asking.ask(Op.READ, ROOT, read_in(0))).error == errno.EISDIR
        assert (await asking.ask(Op.READ, 12345, read_in(0))).error == errno.ESTALE
        assert asking.counts == (2, 0)


async def test_reads_at_the_same_time_open_once() -> None:
    async with kernel(Bucket(["f"]), **FOREVER) as asking:
        ino = await asking.ino("f")
        release = asking.cache.hold("f")
        readers = [asking.send(Op.READ, ino, read_in(0)) for _ in range(5)]
        await asking.idle()
        assert asking.counts == (1, 0)
        release.set()
        for reader in readers:
            assert len((await asking.reply(reader)).body) == 10
        assert asking.counts == (1, 0)


async def test_a_store_that_has_to_be_asked_is_asked_once_for_many_readers() -> None:
    """All of them open, and all but one give theirs back."""
    bucket = Bucket(["f"], delay=1.0)
    async with kernel(bucket, zero_open=True, metadata_ttl=0.0, revalidate_at_open=True) as asking:
        ino = await asking.ino("f")
        await trio.sleep(1)
        readers = [asking.send(Op.READ, ino, read_in(0)) for _ in range(5)]
        for reader in readers:
            assert len((await asking.reply(reader)).body) == 10
        assert asking.counts == (1, 0)
        assert asking.cache.open_count == 1


async def test_files_that_a_nodes_workers_interleave_are_opened_once() -> None:
    """64 workers read 16 shards each in turns. A file that is opened again has lost its readahead."""
    bucket = Bucket([f"{shard}" for shard in range(64 * 16)])
    async with kernel(bucket, **FOREVER) as asking:
        inos = [await asking.ino(name) for name in bucket.objects]
        for ino in inos:
            await read(asking, ino)
        handles = dict(asking.backend.operations.unopened.handles)
        for ino in inos:
            await read(asking, ino)
        assert asking.backend.operations.unopened.handles == handles


async def test_files_that_no_program_closes_leave_descriptors_to_others() -> None:
    """A process may have 4,096 by default. Connections, files in passthrough and databases need theirs, too."""
    bucket = Bucket([f"{number}" for number in range(4096 // 2)])
    async with kernel(bucket, **FOREVER) as asking:
        for name in bucket.objects:
            await read(asking, await asking.ino(name))
        assert asking.cache.open_count < 4096 // 2


async def test_handles_are_few_and_the_oldest_unused_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_open, "MOST_HANDLES", 4)
    async with kernel(Bucket([f"{i}" for i in range(10)]), **FOREVER) as asking:
        inos = [await asking.ino(f"{i}") for i in range(10)]
        await read(asking, inos[0])
        used = asking.backend.operations.unopened.handles[inos[0]]
        for ino in inos:
            await read(asking, ino)
            await read(asking, inos[0])  # in use all the time
        assert asking.backend.operations.unopened.handles[inos[0]] is used
        assert asking.counts == (4, 0)
        assert set(asking.backend.operations.unopened.handles) == {inos[0], *inos[-3:]}
        for ino in inos:
            assert len(await read(asking, ino)) == 10
        assert asking.counts == (4, 0)
        assert asking.cache.open_count == 4


async def test_a_handle_is_not_released_under_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_open, "MOST_HANDLES", 2)
    async with kernel(Bucket(["slow", "a", "b", "c"]), **FOREVER) as asking:
        release = asking.cache.hold("slow")
        ino = await asking.ino("slow")
        readers = [asking.send(Op.READ, ino, read_in(0)) for _ in range(3)]
        await asking.idle()
        for name in "abc":
            await read(asking, await asking.ino(name))
        assert ino not in asking.backend.operations.unopened.handles
        asking.send(Op.INTERRUPT, 0, readers[0].to_bytes(8, "little"))
        assert (await asking.reply(readers[0])).error == errno.EINTR
        assert asking.counts == (3, 0)
        release.set()
        for reader in readers[1:]:
            assert len((await asking.reply(reader)).body) == 10
        assert asking.cache.closed_while_read == []
        assert asking.counts == (2, 0)


@pytest.mark.parametrize("reads_before", [0, 1, 2])
async def test_a_changed_object_is_another_file(reads_before: int) -> None:
    """No open drops the pages that the kernel has, so the new version is shown under a number of its own."""
    bucket = Bucket(["f"])
    async with kernel(bucket, **FOREVER) as asking:
        told: list[tuple[int, int, bytes]] = []
        asking.fs.on_invalidate = lambda *what: told.append(what)
        ino = await asking.ino("f")
        before = [await read(asking, ino) for _ in range(reads_before)]
        bucket.put("f", version=1)
        asking.cache.warm.clear()
        assert (await asking.ask(Op.READ, ino, read_in(0))).error == errno.ESTALE
        assert asking.counts == (0, 0)
        assert (ino, 0, b"") in told  # the kernel has pages of the old version
        assert any((parent, name) == (ROOT, b"f") for _, parent, name in told)
        other = await asking.ino("f")
        assert other != ino
        after = await read(asking, other)
        assert after not in before
        assert len(after) == 10
        for _ in range(2):
            assert (await asking.ask(Op.READ, ino, read_in(0))).error == errno.ESTALE
            assert await read(asking, other) == after
        assert asking.counts == (1, 0)


async def test_a_version_that_is_known_to_be_old_is_read_as_long_as_it_is_cached() -> None:
    """A refresh found a new version meanwhile: the name shows that, and the handle of the old one is released when the first
    byte is missing."""
    bucket = Bucket(["f"])
    async with kernel(bucket, **FOREVER) as asking:
        ino = await asking.ino("f")
        old = await read(asking, ino)
        bucket.put("f", version=1)
        await asking.fs.refresh("f")
        other = await asking.ino("f")
        assert other != ino
        assert await read(asking, ino) == old != await read(asking, other)
        asking.cache.warm.clear()
        for _ in range(2):
            assert (await asking.ask(Op.READ, ino, read_in(0))).error == errno.ESTALE
            assert asking.counts == (1, 0)
        assert await read(asking, other) != old


async def test_a_removed_object_is_given_up() -> None:
    bucket = Bucket(["f"])
    async with kernel(bucket, **FOREVER) as asking:
        ino = await asking.ino("f")
        await read(asking, ino)
        del bucket.objects["f"]
        asking.cache.warm.clear()
        assert (await asking.ask(Op.READ, ino, read_in(0))).error == errno.ESTALE
        assert (await asking.ask(Op.READ, ino, read_in(0))).error in (errno.ENOENT, errno.ESTALE)
        assert asking.counts == (0, 0)


async def test_a_store_that_fails_costs_the_handle_and_not_the_file() -> None:
    async with kernel(Bucket(["f"]), **FOREVER) as asking:
        ino = await asking.ino("f")
        reads = asking.cache.read

        async def fail(*_: object) -> bytes:
            await trio.lowlevel.checkpoint()
            raise OriginFailed("not now")

        asking.cache.read = fail  # type: ignore[method-assign]
        assert (await asking.ask(Op.READ, ino, read_in(0))).error == errno.EIO
        assert asking.counts == (0, 0)
        asking.cache.read = reads  # type: ignore[method-assign]
        assert len(await read(asking, ino)) == 10


async def test_the_end_releases_all() -> None:
    async with kernel(Bucket(["f"]), **FOREVER) as asking:
        cache = asking.cache
        await read(asking, await asking.ino("f"))
        assert cache.open_count == 1
    assert cache.open_count == 0
