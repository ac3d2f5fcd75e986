"""Guards, each with what it keeps out; and what is told of what happens, in counters, modes and states."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.base import linux
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.store import Store, open_store, ram
from cachefs.store import tier as tier_module
from cachefs.store.eviction import EPOCHS_SAVED_EVERY
from cachefs.store.scrub import reclaim
from cachefs.store.space import READERS_SHARE
from cachefs.store.tier import RAM, SSD, Tier
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, Lab, begin_write, running
from tests.store.test_shared_epochs import put

SMALL = 4096


def cache_object(
    lab: Lab, object_id: ObjectId, first: int, stop: int, count: int | None = None, **how: bool
) -> Any:
    """The blocks come, or so many of their bytes; None where there is no room."""
    obj = lab.store.object(object_id)
    begun = begin_write(lab.store, obj, first, stop, **how)
    if begun is not None:
        begun.write(bytes(begun.stop - begun.start if count is None else count))
        lab.store.end_write(obj, begun)
    obj.close_if_unused()
    return begun


@in_trio
async def test_all_that_is_made_is_for_its_owner_alone(cache_dir: Path) -> None:
    umask = os.umask(0)
    try:
        async with running(cache_dir, ram=64 * BLOCK) as lab:
            places = [cache_dir, *(tier.path for tier in lab.store.tiers)]
            for number in range(4):
                object_id = lab.origin.put(f"k{number}", content(number, 2 * BLOCK))
                await lab.read(object_id)
                obj, [ram_tier, ssd] = lab.store.object(object_id), lab.store.tiers
                assert lab.store._moves is not None
                await lab.quiet()
                [copy] = lab.store.catalog.copies(obj, RAM)
                assert await lab.store._moves.move(obj, copy, ssd, ())
                shutil.rmtree(ssd.path / "objects") if number == 2 else None
                shutil.rmtree(ram_tier.path / "objects") if number == 1 else None
                lab.counts = False  # files are gone
            backing = lab.store.open_backing(lab.store.object(object_id))
            assert backing is not None
            lab.store.release_backing(backing)
            seen = 0
            for place in places:
                for folder, _, names in os.walk(place):
                    assert stat.S_IMODE(os.lstat(folder).st_mode) == 0o700, folder
                    for name in names:
                        mode = stat.S_IMODE(os.lstat(f"{folder}/{name}").st_mode)
                        assert mode in (0o600, 0o400), f"{folder}/{name}: {mode:o}"
                        seen += 1
            assert seen > 8
    finally:
        os.umask(umask)


@in_trio
async def test_what_a_disk_does_not_remove_is_its_failure(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk, in its thread; in memory at once. What is gone already is none."""
    async with running(cache_dir, ram=64 * BLOCK) as lab:
        for tier in lab.store.tiers:
            for number, failed in ((errno.EIO, 1), (errno.ENOENT, 1)):
                object_id = lab.origin.put(f"k{tier.number}{number}", bytes(BLOCK))
                tier.new_file(object_id.digest, BLOCK)

                def refuse(path: Any, *_: object, number: int = number, **__: object) -> None:
                    raise OSError(number, os.strerror(number))

                with monkeypatch.context() as patch:
                    patch.setattr(os, "unlink", refuse)
                    tier.unlink(object_id.digest, 0)
                assert tier.errors_in_a_row == failed
            tier.worked()
            assert (tier.disposal.going_bytes, tier.disposal.going_files) == (0, 0)
        for name in counters_fds(cache_dir, lab.store):
            os.close(name)


def counters_fds(cache_dir: Path, store: Store) -> list[int]:
    """What the test itself has opened."""
    places = tuple(f"{tier.path}/objects" for tier in store.tiers)
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith(places):
                found.append(int(name))
        except OSError:
            continue
    return found


@in_trio
async def test_a_share_is_a_use_whoever_it_is_for(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=0, ram=64 * BLOCK) as lab:
        object_id = lab.origin.put("k", bytes(BLOCK))
        cache_object(lab, object_id, 0, 1)
        await lab.store.flush()
        obj = lab.store.object(object_id)
        for requester in ("", "node"):
            [copy] = lab.store.catalog.copies(obj, RAM)
            uses, clock = lab.store.eviction.epochs._now, copy.clock
            await lab.store.flush()
            shared = lab.store.pin_block(obj, 0, requester=requester)
            assert shared is not None and copy.pins == 1 and shared.in_ram
            assert (shared.offset, shared.length, shared.checksum) == (0, BLOCK, copy.checksums[0])
            lab.store.unpin_block(obj, shared)
            assert copy.clock > clock and lab.store.eviction.epochs._now > uses and not copy.pins
            known = lab.store.eviction.epochs._datasets[copy.dataset]
            assert known.uses == known.hits + 1, "all but the cache write found it here"
        copy.verified = 0
        assert lab.store.pin_block(obj, 0) is None and not copy.pins, "it has yet to be verified"
        shared = lab.store.pin_block(obj, 0, checked=True)
        assert shared is not None, "just now, by a read"
        lab.store.unpin_block(obj, shared)
        obj.close_if_unused()
        assert lab.store.pin_block(obj, 1) is None


@in_trio
async def test_what_is_pinned_is_this_nodes_own_from_its_first_block_on(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=0, ram=64 * BLOCK) as lab:
        object_id = lab.origin.put("k", bytes(EXTENT + BLOCK))
        cache_object(lab, object_id, 0, 1)
        lab.store.pin(lab.store.object(object_id))
        cache_object(lab, object_id, 16, 17, remote_owned=True)
        cache_object(lab, object_id, 1, 2, remote_owned=True)
        [tier] = lab.store.tiers
        assert (tier.remote_owned_bytes, tier.pinned_bytes, tier.used_bytes) == (0, 3 * BLOCK, 3 * BLOCK)
        lab.store.unpin(lab.store.object(object_id))


@in_trio
async def test_a_tier_works_again_when_a_transfer_has_come_whole(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        [tier] = lab.store.tiers
        tier.failed(OSError(errno.EIO, "broken"))
        tier._retry_at = 0.0
        cache_object(lab, lab.origin.put("half", bytes(2 * BLOCK)), 0, 2, count=BLOCK)
        assert tier.errors_in_a_row == 1
        cache_object(lab, lab.origin.put("whole", bytes(2 * BLOCK)), 0, 2)
        assert tier.errors_in_a_row == 0
        assert lab.metrics.discarded_bytes == 0
        cache_object(lab, lab.origin.put("part", bytes(2 * BLOCK)), 0, 2, count=BLOCK + 5)
        assert lab.metrics.discarded_bytes == 5


@in_trio
async def test_what_passes_by_is_told_as_not_admitted(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", bytes(EXTENT + BLOCK + 3))
        obj = lab.store.object(object_id)
        passing = lab.store.begin_bypass(obj, 17)
        passing.write(b"123")
        lab.store.end_write(obj, passing)
        misses = lab.metrics.ledger.misses
        assert misses.missed(object_id, 1, prefetch_in_flight=False) == "not_admitted"
        assert misses.missed(object_id, 0, prefetch_in_flight=False) == "cold"
        assert (lab.metrics.bypassed_blocks, lab.metrics.bypassed_bytes) == (1, 3)
        assert lab.store.has(obj, 17) and lab.store.read_now(obj, EXTENT + BLOCK, 3) == b"123"
        assert lab.metrics.heap_hits == 1
        assert lab.store.evict(obj) == 3 and not lab.store.has(obj, 17)


@pytest.mark.parametrize("aclosed", [True, False])
@in_trio
async def test_a_cache_that_is_given_up_can_be_opened_again(cache_dir: Path, aclosed: bool) -> None:
    """In this very process: nothing is locked, mounted or open."""
    before = set(os.listdir("/proc/self/fd"))
    for number in range(2):
        opened = open_store(cache_dir, 64 * BLOCK, 16 * BLOCK, 0, BLOCK, "first", Metrics())
        assert opened.store.was_clean is (aclosed and number == 1)
        place = ram.ram_directory(cache_dir)
        assert place.exists()
        if aclosed:
            await opened.store.aclose(0.0)
        opened.close()
        opened.close()
        assert not place.exists()
    assert set(os.listdir("/proc/self/fd")) == before


@in_trio
async def test_a_flush_writes_when_there_is_something_to_write(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        index, written = lab.store.catalog._index, list[dict[bytes, bytes]]()
        write = index.write

        def noted(saved: Any, removed: Any, totals: Any, notes: Any) -> None:
            written.append(notes)
            write(saved, removed, totals, notes)

        monkeypatch.setattr(index, "write", noted)
        await lab.store.flush()
        assert not written
        for number in range(2 * EPOCHS_SAVED_EVERY):
            cache_object(lab, lab.origin.put(f"k{number}", bytes(5)), 0, 1)
            await lab.store.flush()
            await lab.store.flush()
        assert len(written) == 2 * EPOCHS_SAVED_EVERY
        clocks = [int.from_bytes(notes[b"clock"], "big") for notes in written]
        assert clocks == sorted(set(clocks)) and clocks[-1] == lab.store.catalog.clock
        assert [n + 1 for n, notes in enumerate(written) if b"epochs" in notes] == [
            EPOCHS_SAVED_EVERY,
            2 * EPOCHS_SAVED_EVERY,
        ]
        await lab.store.flush(closing=True)
        assert len(written) == 2 * EPOCHS_SAVED_EVERY + 1 and b"epochs" in written[-1]


@pytest.mark.parametrize("remote", [False, True])
@in_trio
async def test_prefetch_leaves_a_share_to_readers_and_they_take_it(cache_dir: Path, remote: bool) -> None:
    share = READERS_SHARE
    blocks = 4 * share
    tier = {"ssd": 0, "ram": blocks * SMALL} if remote else {"ssd": blocks * SMALL}
    async with running(cache_dir, block=SMALL, eviction="lru", **tier) as lab:
        [only] = lab.store.tiers
        limit = only.limit_bytes() // SMALL
        ids = [lab.origin.put(f"k{number}", bytes(SMALL)) for number in range(blocks + 8)]
        came = 0
        while cache_object(lab, ids[came], 0, 1, prefetched=True, remote_owned=remote) is not None:
            came += 1
            if came == limit or lab.metrics.evicted_blocks:
                break
        left = limit - only.used_bytes // SMALL
        assert left == limit // share, "what waits for a reader is not displaced by more of it"
        for number in range(left):
            assert cache_object(lab, ids[-1 - number], 0, 1) is not None
        assert only.used_bytes == limit * SMALL
        assert lab.metrics.evicted_blocks == (1 if came > limit - left else 0)
        before = lab.metrics.evicted_blocks
        assert cache_object(lab, ids[-1 - left], 0, 1) is not None
        assert lab.metrics.evicted_blocks == before + 1, "no more than it needs"


@in_trio
async def test_prefetch_fills_the_cache_but_for_the_files_of_eight_workers(cache_dir: Path) -> None:
    """As in a cache of 128 MiB, of which 1,280 files of 100 KB are all. The files that eight workers read without a
    prediction displace no prefetched one, which would be fetched twice; and a data set of 99 % of the cache fits."""
    files = 1280
    async with running(cache_dir, block=SMALL, eviction="lru", ssd=files * SMALL) as lab:
        ids = [lab.origin.put(f"k{number}", bytes(SMALL)) for number in range(files + 8)]
        fetched = [object_id for object_id in ids[:files] if put(lab, object_id, prefetched=True)]
        kept = [object_id for object_id in fetched if lab.store.has(lab.store.object(object_id), 0)]
        assert len(kept) >= files * 99 // 100
        assert all(put(lab, object_id) for object_id in ids[-8:])
        assert all(lab.store.has(lab.store.object(object_id), 0) for object_id in [*kept, *ids[-8:]])


def test_nothing_is_taken_away_where_there_is_nothing(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    for path in (tmp_path / "none", Path("/proc/self/fd/none")):
        ram.take_away(path)
        ram.forget(path)
    (tmp_path / "file").write_bytes(b"not ours")
    ram.take_away(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"not ours"
    assert sorted(os.listdir("/proc/self/fd")) == before
    os.fstat(0)


def test_a_directory_of_another_user_is_not_taken_away(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("gives a directory to another user")
    other = tmp_path / "theirs"
    (other / "objects").mkdir(parents=True)
    os.chown(other, 12345, 12345)
    before = len(os.listdir("/proc/self/fd"))
    ram.take_away(other)
    assert (other / "objects").is_dir() and len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def tier(tmp_path: Path) -> Tier:
    now = [0.0]
    made = Tier(SSD, tmp_path / "tier", 1 << 30, keep_free_bytes=0, clock=lambda: now[0])
    made.test_now = now  # type: ignore[attr-defined]
    return made


def test_a_directory_that_goes_is_told_once(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    shutil.rmtree(tier.path)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tier.spare_bytes()
    assert [
        record.message.count("was removed") for record in caplog.records if "removed" in record.message
    ] == [1]


@pytest.mark.parametrize("flags", [0, 0x20, 0x80, 0xA0])
def test_no_access_times_are_kept_where_that_can_be_said(
    monkeypatch: pytest.MonkeyPatch, tier: Tier, flags: int
) -> None:
    """The file's other flags stay."""
    said: list[int] = []

    def ioctl(fd: int, request: int, argument: Any) -> int:
        if request == tier_module._GETFLAGS:
            argument[:] = flags.to_bytes(4, "little") + b"\xff" * 4  # of which the first half is the answer
        else:
            said.append(int.from_bytes(argument, "little"))
        return 0

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    tier_module._set_noatime(1)
    assert said == ([] if flags & 0x80 else [flags | 0x80])


@pytest.mark.parametrize("mounted_so", [True, False])
def test_a_file_system_that_keeps_no_access_times_is_not_told_so_of_each_file(
    monkeypatch: pytest.MonkeyPatch, tier: Tier, mounted_so: bool
) -> None:
    told: list[int] = []
    monkeypatch.setattr(tier_module, "_set_noatime", told.append)
    found = SimpleNamespace(f_flag=os.ST_NOATIME | os.ST_NODEV if mounted_so else os.ST_NODEV)
    monkeypatch.setattr(os, "fstatvfs", lambda fd: found)
    for digest in (b"a" * 16, b"b" * 16):
        os.close(tier.new_file(digest, 0) or -1)
        os.close(tier.make_immutable(digest, 0))
    assert len(told) == (0 if mounted_so else 2)


@in_trio
async def test_what_is_in_use_is_left_to_its_user_by_the_scrub(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        [tier] = lab.store.tiers
        object_id = lab.origin.put("k", content(1, 3 * BLOCK))
        cache_object(lab, object_id, 0, 3)
        obj = lab.store.object(object_id)
        obj.hold()
        assert await reclaim(lab.store, tier, object_id.digest, 17) == 0
        obj.release()
        assert lab.store.cached_bytes(object_id) == 3 * BLOCK
        # A hole, and a stray block behind the end.
        path = tier.file_path(object_id.digest)
        fd = os.open(path, os.O_RDWR)
        linux.punch(fd, BLOCK, BLOCK)
        os.pwrite(fd, bytes([1]) * BLOCK, 4 * BLOCK)
        os.close(fd)
        await lab.store.flush()
        on_disk = path.stat().st_blocks * 512
        assert await reclaim(lab.store, tier, object_id.digest, on_disk) == 2 * BLOCK
        assert lab.store.cached_bytes(object_id) == 2 * BLOCK
        assert path.stat().st_blocks * 512 == 2 * BLOCK
        assert await reclaim(lab.store, tier, object_id.digest, 2 * BLOCK) == 0
        other = lab.origin.put("no rows", bytes(BLOCK))
        os.close(tier.new_file(other.digest, BLOCK) or -1)
        assert await reclaim(lab.store, tier, other.digest, 5 * SMALL) == 5 * SMALL
        assert not tier.file_path(other.digest).exists()
        lab.check_accounts()


def test_a_disk_whose_call_lasts_too_long_is_down_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(tier_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one = tier_module.Disk("ssd", tmp_path)
    went: list[str] = []
    monkeypatch.setattr(one, "goes_down", lambda: went.append("down"))
    one.look()
    with one.busy():
        now[0] += tier_module.HANGS_AFTER_S
        with one.busy():
            one.look()
            assert not went
            now[0] += 0.01
            one.look()
        assert went == ["down"]
        one.down = True
        one.look()
        assert went == ["down"]
        one.down = False
    now[0] += 100.0
    one.look()
    assert went == ["down"] and not one._calls


@pytest.mark.parametrize("size", [1, BLOCK, 2 * BLOCK])
@in_trio
async def test_what_is_cached_and_verified_is_not_adopted_once_more(
    cache_dir: Path, tmp_path: Path, size: int
) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, size))
        written = cache_dir / "written"
        written.write_bytes(content(1, size))
        assert await lab.store.adopt(object_id, written) and not written.exists()
        written.write_bytes(content(1, size))
        assert not await lab.store.adopt(object_id, written) and written.exists()
        assert lab.metrics.adopted_versions == 1
        [copy] = lab.store.catalog.all_copies(lab.store.object(object_id))
        copy.verified = 0
        lab.store.tiers[0].failed(OSError(errno.EIO, "broken"))
        assert not await lab.store.adopt(object_id, written), "the disk is left alone"
        lab.store.tiers[0].worked()
        assert await lab.store.adopt(object_id, written), "what no reader has checked is superseded"


@in_trio
async def test_verified_blocks_that_lie_together_are_read_at_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        data = content(1, EXTENT + 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id)
        await lab.quiet()
        obj, pread, calls = lab.store.object(object_id), os.pread, list[tuple[int, int]]()

        def counted(fd: int, size: int, offset: int) -> bytes:
            calls.append((offset, size))
            return pread(fd, size, offset)

        monkeypatch.setattr(os, "pread", counted)
        found = await lab.store.read(obj, 5, EXTENT + BLOCK)
        assert found == data[5 : 5 + EXTENT + BLOCK]
        assert calls == [(5, EXTENT - 5), (EXTENT, BLOCK + 5)], "one for each copy"
        calls.clear()
        lab.store.catalog.copies(obj, SSD)[0].verified &= ~(1 << 3)
        assert await lab.store.read(obj, BLOCK + 1, 4 * BLOCK) == data[BLOCK + 1 : 5 * BLOCK + 1]
        assert calls == [(BLOCK + 1, 2 * BLOCK - 1), (3 * BLOCK, BLOCK), (4 * BLOCK, BLOCK + 1)]
        calls.clear()
        assert await lab.store.read(obj, BLOCK + 1, 4 * BLOCK) == data[BLOCK + 1 : 5 * BLOCK + 1]
        assert calls == [(BLOCK + 1, 4 * BLOCK)], "it is checked once"
        obj.close_if_unused()


@in_trio
async def test_bytes_that_are_not_all_of_a_version_are_not_taken_for_it(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", data := content(1, 5000))
        for cut in (b"", data[:-1], data + b"x"):
            assert await lab.store.adopt_bytes([(object_id, cut)]) == [False]
        assert await lab.store.adopt_bytes([(object_id, data)]) == [True]
        assert await lab.read(object_id) == data and not lab.origin.gets


@in_trio
async def test_blocks_that_are_wrong_are_told_one_by_one(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, 5 * BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)
        [copy] = lab.store.catalog.copies(obj, SSD)
        lab.store.space.corrupt(obj, copy, 0b110100)
        told = [message for message in caplog.messages if "fails its checksum" in message]
        assert [message.split()[1] for message in told] == ["2", "4"], "block 5 is not here"
        assert lab.metrics.checksum_failures == 2


@in_trio
async def test_a_read_over_several_blocks_counts_each_once(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", data := content(1, 20 * BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        await lab.read(object_id)  # verifies them
        obj = lab.store.object(object_id)
        with obj.held():
            obj.file(lab.store.tiers[0])
            for first, count in ((0, 1), (1, 3), (14, 4)):  # the last are of two extents
                before = lab.metrics.ssd_hits
                start, size = first * BLOCK + 1, count * BLOCK - 2
                assert bytes(lab.store.read_now(obj, start, size) or b"") == data[start : start + size]
                assert lab.metrics.ssd_hits - before == count


@in_trio
async def test_clocks_go_on_behind_those_of_an_earlier_daemon(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        for number in range(3):
            await lab.read(lab.origin.put(f"k{number}", content(number, BLOCK)))
        await lab.quiet()
        lab.store.catalog.clock += 1000  # uses of what is not cached any more
        last = lab.store.catalog.clock
    async with running(cache_dir) as lab:
        assert lab.store.catalog.clock > last


@in_trio
async def test_a_file_that_an_earlier_daemon_registered_is_no_descriptor_here(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, BLOCK))
        backing = lab.store.restore_backing(lab.store.object(object_id), 7)
        assert (backing.fd, backing.id, backing.users) == (-1, 7, 1)
        assert lab.store.restore_backing(lab.store.object(object_id), 7) is backing and backing.users == 2
        for _ in range(2):
            lab.store.release_backing(backing)


@in_trio
async def test_a_use_that_goes_on_is_no_second_one(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id, other = lab.origin.put("k", content(1, BLOCK)), lab.origin.put("o", content(2, BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)
        [copy] = lab.store.catalog.copies(obj, SSD)
        clock = copy.clock
        await lab.read(other)
        await lab.read(object_id)
        assert copy.clock == clock
        await lab.store.flush()
        await lab.read(object_id)
        assert copy.clock > clock


@in_trio
async def test_what_is_written_to_a_tier_is_counted_in_bytes(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        await lab.read(lab.origin.put("k", content(1, 2 * BLOCK + 5)))
        await lab.quiet()
        assert (lab.metrics.admitted_blocks, lab.metrics.admitted_bytes) == (3, 2 * BLOCK + 5)


@in_trio
async def test_a_stop_that_is_killed_while_it_waits_for_the_disk_has_written_all_rows(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        await lab.read(lab.origin.put("k", content(1, BLOCK)))
        await lab.quiet()
        assert lab.store.catalog.changes
        unwritten: list[bool] = []
        [tier] = lab.store.tiers
        idle = tier.disposal.idle

        def waits(within_s: float) -> bool:
            unwritten.append(lab.store.catalog.changes)
            return idle(within_s)

        monkeypatch.setattr(tier.disposal, "idle", waits)
        await lab.aclose()
        assert unwritten == [False]


@in_trio
async def test_a_version_that_was_met_by_its_digest_gets_its_name(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, BLOCK))
        obj = lab.store.catalog.by_digest(object_id.digest)
        assert lab.store.object(object_id) is obj and obj.id == object_id
        obj.close_if_unused()
