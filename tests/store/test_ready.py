"""What is made ready for the kernel and what is left as it is: each reason by itself, with nothing moved or held after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cachefs.base.names import ObjectId
from cachefs.store import Backing, CacheWrite, backing, catalog
from cachefs.store.backing import Passthrough
from cachefs.store.catalog import CachedObject
from cachefs.store.tier import RAM, SSD
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, MIB, Lab, begin_write, running
from tests.store.test_passthrough import Backend, cache_object, split, spread

SIZE = EXTENT + 3 * BLOCK


def parts(lab: Lab) -> Passthrough:
    return lab.store.backing_files


async def halves(lab: Lab) -> tuple[ObjectId, CachedObject]:
    """A version of which RAM has some blocks, and SSD the others."""
    object_id = lab.origin.put("k", content(1, SIZE))
    await cache_object(lab, object_id)
    await split(lab, object_id)
    return object_id, lab.store.object(object_id)


@pytest.mark.parametrize(
    "why",
    [
        "",
        "no second tier",
        "refused",
        "failing",
        "too large",
        "exactly as large",
        "immutable",
        "missing",
        "in_progress",
        "in_progress there",
        "owned by others",
        "no room",
        "in use",
        "lost on the way",
    ],
)
@in_trio
async def test_what_lies_in_two_tiers_comes_together_unless_something_is_against_it(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        object_id, obj = await halves(lab)
        ram, ssd = lab.store.tiers
        above, below = lab.store.catalog.copies(obj, RAM), lab.store.catalog.copies(obj, SSD)
        before = spread(lab, object_id, RAM), spread(lab, object_id, SSD)
        used = (ram.used_bytes, ssd.used_bytes)
        match why:
            case "no second tier":
                monkeypatch.setattr(parts(lab), "_moves", None)
            case "refused":
                lab.store.refuse(ssd, "a test")
            case "failing":
                ssd.errors_in_a_row, ssd._retry_at = 1, 1e18
            case "too large":
                monkeypatch.setattr(ssd, "limit_bytes", lambda already_there=0: SIZE - 1)
            case "exactly as large":
                monkeypatch.setattr(ssd, "limit_bytes", lambda already_there=0: SIZE)
            case "immutable":
                os.chmod(ssd.file_path(object_id.digest), 0o400)
            case "missing":
                lab.store.space.drop(obj, above[1], 0b10)
                before = spread(lab, object_id, RAM), spread(lab, object_id, SSD)
                used = (ram.used_bytes, ssd.used_bytes)
            case "in_progress":
                above[1].in_progress = 1 << 9
            case "in_progress there":
                below[0].in_progress = 1 << 9
            case "owned by others":
                lab.store.eviction.remote_owned.add(above[1].key)
                ram.remote_owned_bytes += 2 * BLOCK
            case "no room":
                monkeypatch.setattr(lab.store.space, "evict_for", lambda *_, **__: False)
            case "in use":
                lab.store.space.pin(above[0])
            case "lost on the way":
                move = lab.store._moves.move  # type: ignore[union-attr]

                async def moved(obj: Any, copy: Any, *rest: Any) -> bool:
                    result = await move(obj, copy, *rest)
                    if copy.extent == 1:
                        below[0].bitmap &= ~(1 << 5)
                    return result

                monkeypatch.setattr(lab.store._moves, "move", moved)
        gathered = why in ("", "exactly as large", "in use")
        assert await parts(lab)._gather(obj) is gathered
        for copy in above + below:
            copy.in_progress = 0
            assert copy.pins == (why == "in use" and copy is above[0])
        if why == "lost on the way":
            below[0].bitmap |= 1 << 5
        elif not gathered:
            assert before == (spread(lab, object_id, RAM), spread(lab, object_id, SSD))
            assert used == (ram.used_bytes, ssd.used_bytes)
        else:
            assert spread(lab, object_id, SSD) == [0xFFFF, 0b111]
            assert spread(lab, object_id, RAM) == [0b11 if why == "in use" else 0, 0]
        monkeypatch.undo()
        if why == "owned by others":
            lab.store.space.make_own(above[1])
        if why == "in use":
            lab.store.space.unpin(obj, above[0])
        if why == "immutable":
            os.chmod(ssd.file_path(object_id.digest), 0o600)
            obj.immutable.clear()
        ssd.errors_in_a_row = 0


@pytest.mark.parametrize("ram", [0, 8 * MIB])
@in_trio
async def test_what_is_ready_or_cannot_be_is_not_waited_for(cache_dir: Path, ram: int) -> None:
    async with running(cache_dir, ram=ram) as lab:
        whole, half = (lab.origin.put(n, content(1, 2 * BLOCK)) for n in ("whole", "half"))
        await cache_object(lab, whole)
        await cache_object(lab, half)
        for copy in lab.store.catalog.all_copies(lab.store.object(half)):
            lab.store.space.drop(lab.store.object(half), copy, 0b10)
        queue = parts(lab)._queue
        lab.store.prepare_later(lab.store.object(whole))
        assert not queue and not parts(lab)._wake.is_set(), "it is ready"
        lab.store.prepare_later(lab.store.object(half))
        lab.store.prepare_later(lab.store.object(half))
        assert list(queue.values()) == [half] and parts(lab)._wake.is_set()
        assert not await parts(lab)._prepare(lab.store.object(half))
        assert not await parts(lab)._prepare(lab.store.object(whole)), "nothing was to be done"
        queue.clear()
        [copy] = lab.store.catalog.all_copies(lab.store.object(whole))
        copy.verified = 0b01
        lab.store.prepare_later(lab.store.object(whole))
        assert list(queue.values()) == [whole]
        assert await parts(lab)._prepare(lab.store.object(whole)) and copy.verified == 0b11
        queue.clear()
        copy.verified = 0
        for tier in lab.store.tiers:
            lab.store.refuse(tier, "a test")
        assert not lab.store.passthrough
        lab.store.prepare_later(lab.store.object(whole))
        assert not queue and not await parts(lab)._prepare(lab.store.object(whole))
        assert copy.verified == 0, "no kernel would take it"


@pytest.mark.parametrize(
    "why", ["", "open", "closed", "down", "refused", "immutable", "not whole", "not verified", "in memory"]
)
@in_trio
async def test_a_disk_is_waited_for_once_before_a_file_is_given_to_the_kernel(
    cache_dir: Path, why: str
) -> None:
    async with running(cache_dir, **({"ram": 8 * MIB} if why == "in memory" else {})) as lab:
        object_id = lab.origin.put("k", content(1, 2 * BLOCK))
        await cache_object(lab, object_id)
        obj, tier = lab.store.object(object_id), lab.store.tiers[0]
        [copy] = lab.store.catalog.all_copies(obj)
        held: Backing | None = None
        match why:
            case "open":
                held = lab.store.open_backing(obj)
                assert held is not None
            case "closed":
                parts(lab)._closed = True
            case "down":
                tier.disk.down = True
            case "refused":
                lab.store.refuse(tier, "a test")
            case "immutable":
                os.close(tier.make_immutable(object_id.digest, object_id.size))
            case "not whole":
                lab.store.space.drop(obj, copy, 0b10)
            case "not verified":
                copy.verified = 0b01
        assert (lab.store.to_make_immutable(obj) is not None) is (why == "")
        await lab.store.make_immutable(obj)
        assert (os.stat(tier.file_path(object_id.digest)).st_mode & 0o222 == 0) is (
            why in ("", "open", "immutable")
        )
        assert lab.store.to_make_immutable(obj) is None and obj.refs == 0
        assert copy.pins == (1 if held is not None else 0)
        if why == "":
            assert SSD in obj.immutable
        found = lab.store.open_backing(obj) if held is None else None
        assert (found is not None) is (why in ("", "immutable", "in memory"))
        for given in (found, held):
            if given is not None:
                lab.store.release_backing(given)
        tier.disk.down = False


@in_trio
async def test_who_may_have_a_file_and_who_is_the_last(cache_dir: Path) -> None:
    """Users are counted; each other state of its tier and file is a refusal."""
    async with running(cache_dir) as lab:
        backend, data = Backend(lab), content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        obj, [tier] = lab.store.object(object_id), lab.store.tiers
        [copy] = lab.store.catalog.all_copies(obj)
        first = backend.open_backing(object_id, data)
        assert first is not None and (first.users, copy.pins, tier.registered) == (1, 1, 1)
        for forbidden in ("down", "leaving"):
            tier.disk.down = forbidden == "down"
            if forbidden == "leaving":
                obj.leaving.add(SSD)
            assert lab.store.open_backing(obj) is None and first.users == 1
            tier.disk.down = False
            obj.leaving.discard(SSD)
        assert lab.store.open_backing(obj, on_disk=True) is first and (first.users, copy.pins) == (2, 1)
        lab.store.reopen_backing(first)
        assert first.users == 3
        assert lab.metrics.passthrough_blocks == 3 * 2
        for users in (2, 1, 0):
            lab.store.release_backing(first)
            assert (first.users, copy.pins) == (users, 1 if users else 0)
        assert obj.backing is first and list(parts(lab)._idle) == [first] and not backend.retired
        tier.disk.down = True
        assert lab.store.open_backing(obj) is None and list(parts(lab)._idle) == [first]
        tier.disk.down = False
        assert lab.store.open_backing(obj) is first and not parts(lab)._idle and copy.pins == 1
        parts(lab).close()
        assert not backend.retired
        lab.store.release_backing(first)
        assert backend.retired == [first] and obj.backing is None and tier.registered == 0
        assert lab.store.open_backing(obj) is None, "no more after the end"
        backend.check()


@pytest.mark.parametrize("whole", [True, False])
@in_trio
async def test_what_an_earlier_daemon_registered_is_on_the_tier_that_has_it_or_on_the_last(
    cache_dir: Path, whole: bool
) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, 2 * BLOCK))
        await cache_object(lab, object_id)
        obj, (ram, ssd) = lab.store.object(object_id), lab.store.tiers
        [copy] = lab.store.catalog.copies(obj, RAM)
        copy.verified = 0  # since then
        if whole:
            os.close(ram.make_immutable(object_id.digest, object_id.size))
        backing = lab.store.restore_backing(obj, 7)
        assert (backing.tier, backing.copies) == ((ram, [copy]) if whole else (ssd, []))
        assert (ram.registered, ssd.registered, copy.pins) == ((1, 0, 1) if whole else (0, 1, 0))
        assert lab.store.restore_backing(obj, 7) is backing and (backing.users, copy.pins) == (2, int(whole))
        for _ in range(2):
            lab.store.release_backing(backing)
        assert ram.registered + ssd.registered == 1 and copy.pins == 0


@in_trio
async def test_what_an_earlier_daemon_registered_is_kept_until_its_last_close_by_one_that_checks_each_read(
    cache_dir: Path,
) -> None:
    async with running(cache_dir, verify="full") as lab:
        object_id = lab.origin.put("k", content(1, 2 * BLOCK))
        await cache_object(lab, object_id)
        obj, (ssd,), retired = lab.store.object(object_id), lab.store.tiers, list[Any]()
        lab.store.backing_files.on_retired = retired.append
        backing = lab.store.restore_backing(obj, 7)
        assert (backing.tier, backing.copies, ssd.registered) == (ssd, [], 1)
        assert lab.store.open_backing(obj) is backing, "the opens of one inode share it"
        lab.store.release_backing(backing)
        assert not retired
        lab.store.release_backing(backing)
        assert retired == [backing] and ssd.registered == 0
        assert lab.store.open_backing(obj) is None


@in_trio
async def test_what_an_earlier_daemon_registered_is_kept_until_its_last_close_without_a_tier(
    cache_dir: Path,
) -> None:
    """The cache disk was lost between the two daemons, and there is no RAM tier. A file that is open in passthrough can be
    opened by others only in the same way."""
    async with running(cache_dir, ssd=0) as lab:
        assert not lab.store.tiers
        obj, retired = lab.store.object(lab.origin.put("k", content(1, 2 * BLOCK))), list[Any]()
        lab.store.backing_files.on_retired = retired.append
        backing = lab.store.restore_backing(obj, 7)
        assert (backing.fd, backing.id, backing.copies, backing.users) == (-1, 7, [], 1)
        assert lab.store.open_backing(obj) is backing
        assert lab.store.take_out(backing, 2, cache_dir / "out") is None
        lab.store.release_backing(backing)
        assert not retired
        lab.store.release_backing(backing)
        assert retired == [backing] and obj.backing is None
        assert await lab.read(obj.id) == content(1, 2 * BLOCK)


@in_trio
async def test_what_an_earlier_daemon_registered_is_not_forgotten_while_it_is_open(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index has lost its blocks, so no pin says that it is in use."""
    monkeypatch.setattr(catalog, "OBJECTS_IN_MEMORY", 8)
    async with running(cache_dir) as lab:
        obj, (ssd,), retired = lab.store.object(lab.origin.put("k", b"1")), lab.store.tiers, list[Any]()
        lab.store.backing_files.on_retired = retired.append
        backing = lab.store.restore_backing(obj, 7)
        for number in range(32):
            lab.store.object(lab.origin.put(f"k{number}", b"2"))
        assert not retired and ssd.registered == 1 and lab.store.object(obj.id).backing is backing
        lab.store.release_backing(backing)
        for number in range(32):
            lab.store.object(lab.origin.put(f"k{number}", b"2"))
        assert retired == [backing] and ssd.registered == 0


@pytest.mark.parametrize("users", [0, 1])
@pytest.mark.parametrize("same", [True, False])
@in_trio
async def test_a_passthrough_file_is_retired_with_its_own_file_alone(
    cache_dir: Path, same: bool, users: int
) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        backend, data = Backend(lab), content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        obj, (ram, ssd) = lab.store.object(object_id), lab.store.tiers
        [copy] = lab.store.catalog.copies(obj, RAM)
        assert lab.store._moves is not None and await lab.store._moves.move(obj, copy, ssd, ())
        backing = backend.open_backing(object_id, data)
        assert backing is not None and backing.tier is ram
        if not users:
            lab.store.release_backing(backing)
        assert lab.store.space.drop_file(obj, ram if same else ssd) == 2
        assert backend.retired == ([backing] if same and not users else [])
        assert (obj.backing is None) is (same and not users)
        if users:
            lab.store.release_backing(backing)
        assert (obj.backing is None) is same and lab.store.cached_bytes(object_id) == 2 * BLOCK


@in_trio
async def test_what_has_gone_while_it_was_read_is_no_use(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, BLOCK))
        await cache_object(lab, object_id)
        obj, rows = lab.store.object(object_id), lab.store.catalog
        [copy] = rows.copies(obj, SSD)
        await lab.store.flush()
        lab.store.evict(obj)
        clock, hits = copy.clock, lab.metrics.ssd_hits
        lab.store._hit(obj, copy, 1)
        assert copy.clock == clock and copy.key not in rows._dirty and lab.metrics.ssd_hits == hits + 1


@in_trio
async def test_a_version_that_is_evicted_and_fetched_again_while_it_is_verified(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is verified is not there any more, and what is being written in its place stays."""
    async with running(cache_dir) as lab:
        data = content(1, 3 * BLOCK)
        object_id = lab.origin.put("k", data)
        await cache_object(lab, object_id)
        obj = lab.store.object(object_id)
        [copy] = lab.store.catalog.copies(obj, SSD)
        copy.verified = 0
        take, writes = lab.store._take, list[CacheWrite]()

        async def taken(*what: Any) -> Any:
            found = await take(*what)
            if not writes:  # behind the first block
                lab.store.evict(obj)
                write = begin_write(lab.store, obj, 0, 3)
                assert write is not None
                write.write(data[:BLOCK])
                writes.append(write)
            return found

        monkeypatch.setattr(lab.store, "_take", taken)
        with obj.held():
            assert not await lab.store._verify(obj, copy)
            writes[0].write(data[BLOCK:])
            lab.store.end_write(obj, writes[0])
        assert lab.store.cached_bytes(object_id) == len(data)
        lab.check_accounts()


@in_trio
async def test_of_an_empty_version_there_is_nothing_for_the_kernel(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(cache_dir) as lab:
        obj, [tier] = lab.store.object(lab.origin.put("k", b"")), lab.store.tiers
        monkeypatch.setattr(tier, "make_immutable", None)
        assert lab.store.to_make_immutable(obj) is None and lab.store.open_backing(obj) is None
        assert parts(lab)._whole(obj, tier, verified=True) is None and not parts(lab)._ready(obj)
        await lab.store.make_immutable(obj)
        assert not await parts(lab)._prepare(obj)


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@in_trio
async def test_so_many_files_are_kept_registered(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(backing, "IDLE_BACKINGS", 2)
    async with running(cache_dir) as lab:
        backend = Backend(lab)
        for at in range(number):
            object_id = lab.origin.put(f"k{at}", content(at, BLOCK))
            await cache_object(lab, object_id)
            found = backend.open_backing(object_id)
            assert found is not None
            lab.store.release_backing(found)
        assert len(parts(lab)._idle) == lab.store.tiers[0].registered == min(number, 2)
        assert backend.retired == backend.all[: max(0, number - 2)]
        # One that the kernel never took is not kept.
        object_id = lab.origin.put("odd", content(9, BLOCK))
        await cache_object(lab, object_id)
        odd = lab.store.open_backing(lab.store.object(object_id))
        assert odd is not None and odd.id == 0 and odd.fd >= 0
        lab.store.release_backing(odd)
        assert odd.fd == -1 and odd not in parts(lab)._idle
        assert lab.store.tiers[0].registered == min(number, 2)
