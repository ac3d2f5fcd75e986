"""What the store refuses: each condition by itself, with nothing changed and nothing held after it."""

from __future__ import annotations

import errno
import os
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs.base import linux
from cachefs.base.names import ObjectId
from cachefs.store.catalog import CachedObject
from cachefs.store.scrub import reclaim
from cachefs.store.tier import RAM, SSD, next_data
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, EXTENT, MIB, Lab, begin_write, cache_files, running
from tests.store.test_adopting import adopt, dirty_file
from tests.store.test_passthrough import Backend

scrub_module = sys.modules["cachefs.store.scrub"]

SIZE = EXTENT + 2 * BLOCK + 5


def copies(lab: Lab, obj: CachedObject, tier: int = SSD) -> list[Any]:
    return lab.store.catalog.copies(obj, tier)


def come(lab: Lab, obj: CachedObject, data: bytes, first: int, stop: int) -> None:
    """These blocks come."""
    cache_write = begin_write(lab.store, obj, first, stop)
    assert cache_write is not None
    cache_write.write(data[cache_write.start : cache_write.stop])
    lab.store.end_write(obj, cache_write)
    obj.close_if_unused()


def state(lab: Lab, *ids: ObjectId) -> list[object]:
    """What is here of these, and what is counted."""
    found: list[object] = [sorted(path.name for path in cache_files(lab.store.tiers[-1].path))]
    for object_id in ids:
        obj = lab.store.object(object_id)
        known = lab.store.catalog.all_copies(obj)
        found.append([(c.key, c.bitmap, c.verified, c.pins, c.in_progress) for c in known])
        found.append((obj.refs, sorted(obj.leaving), obj.backing))
    tiers = lab.store.tiers
    found.append([(t.used_bytes, t.unlisted_bytes, t.blocks, t.state, t._used_at_reading) for t in tiers])
    found.append((lab.metrics.evicted_blocks, lab.metrics.adopted_versions))
    return found


RECAST = [
    "",
    "empty",
    "another size",
    "a tier that fails",
    "not whole",
    "not verified",
    "not immutable",
    "new in use",
    "new arrives",
    "new in part",
    "new on its way out",
    "the link fails",
]


@pytest.mark.parametrize("why", RECAST)
@in_trio
async def test_a_file_goes_on_under_a_new_name_unless_something_is_against_it(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    async with running(cache_dir, ram=8 * MIB) as lab:
        data = content(1, 0 if why == "empty" else SIZE)
        old, new = lab.origin.put("old", data), lab.origin.put("new", data)
        if why == "another size":
            new = lab.origin.put("new", data + b"x")
        assert await adopt(lab, old)
        ram, ssd = lab.store.tiers
        was, obj, store = lab.store.object(old), lab.store.object(new), lab.store
        coming: Any = None
        if why.startswith("new") and why != "new on its way out":
            ram.errors_in_a_row, ram._retry_at = (0, 0.0) if why == "new arrives" else (1, 1e18)
            coming = begin_write(store, obj, 0, 1)
            assert coming is not None and coming.copy.tier == (RAM if why == "new arrives" else SSD)
            if why != "new arrives":
                coming.write(data[:BLOCK])
                store.end_write(obj, coming)
            ram.errors_in_a_row = 0
        match why:
            case "a tier that fails":
                ssd.failed(OSError(errno.EIO, "broken"))
            case "not whole":
                copy = copies(lab, was)[1]
                copy.bitmap &= ~1
            case "not verified":
                copies(lab, was)[1].verified &= ~2
            case "not immutable":
                os.chmod(ssd.file_path(old.digest), 0o600)
            case "new in use":
                store.space.pin(*copies(lab, obj))
            case "new on its way out":
                monkeypatch.setattr(ssd.disposal, "pending", lambda digest: digest == new.digest)
            case "the link fails":
                monkeypatch.setattr(os, "link", lambda *_: os.stat("/none"))
        before = state(lab, old, new)
        assert await store.recast(old, new) is (why == "")
        monkeypatch.undo()
        if why:
            assert state(lab, old, new) == before
        else:
            assert store.cached_bytes(new) == SIZE and not store.cached_bytes(old)
            assert [(c.pins, c.used) for c in copies(lab, obj)] == [(0, 0), (0, 0)] and not obj.refs
        if why == "not whole":
            copy.bitmap |= 1
        if why == "not immutable":
            os.chmod(ssd.file_path(old.digest), 0o400)
        if why == "new in use":
            store.space.unpin(obj, *copies(lab, obj))
        if why == "new arrives":
            store.end_write(obj, coming)
        ssd.errors_in_a_row = 0
        was.close_if_unused()
        obj.close_if_unused()
        lab.check_accounts()


@pytest.mark.parametrize("gone", ["all", "a block", "nothing"])
@in_trio
async def test_what_went_while_it_got_its_new_name_is_gone_under_both(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    async with running(cache_dir) as lab:
        data = content(1, SIZE)
        old, new = lab.origin.put("old", data), lab.origin.put("new", data)
        assert await adopt(lab, old)
        [tier], store = lab.store.tiers, lab.store
        link = tier.link

        def slow(digest: bytes, other: bytes) -> bool:
            done = link(digest, other)
            trio.from_thread.run_sync(go)
            return done

        def go() -> None:
            obj = store.object(old)
            if gone == "all":
                store.evict(obj)
            elif gone == "a block":
                copies(lab, obj)[0].verified &= ~1

        monkeypatch.setattr(tier, "link", slow)
        run = tier.disk.run
        monkeypatch.setattr(
            tier.disk,
            "run",
            lambda call, finish: run(call, finish) if gone == "nothing" else beside(call, finish),
        )

        async def beside(call: Any, finish: Any) -> Any:
            done = await trio.to_thread.run_sync(call)
            finish(done)
            return done

        if gone == "nothing":
            monkeypatch.setattr(tier, "link", link)
        assert await store.recast(old, new) is (gone == "nothing")
        assert store.cached_bytes(new) == (SIZE if gone == "nothing" else 0)
        assert store.cached_bytes(old) == (SIZE if gone == "a block" else 0)
        assert not store.object(new).leaving and not store.object(new).refs and not store.object(old).refs
        tier.disposal.idle(5)
        assert len(cache_files(tier.path)) == (0 if gone == "all" else 1)
        lab.check_accounts()


TAKEN = ["", "closed", "down", "leaving", "others", "fewer", "read", "in_progress", "no file"]


@pytest.mark.parametrize("why", TAKEN)
@in_trio
async def test_a_file_is_taken_out_unless_something_is_against_it(cache_dir: Path, why: str) -> None:
    async with running(cache_dir) as lab:
        backend, store, [tier] = Backend(lab), lab.store, lab.store.tiers
        object_id = lab.origin.put("k", content(1, SIZE))
        assert await adopt(lab, object_id)
        obj = store.object(object_id)
        backing = backend.open_backing(object_id)
        assert backing is not None
        first, second = copies(lab, obj)
        path, there, aside = cache_dir / "taken", tier.file_path(object_id.digest), cache_dir / "aside"
        match why:
            case "closed":
                store.backing_files._closed = True
            case "down":
                tier.disk.down = True
            case "leaving":
                obj.leaving.add(SSD)
            case "read":
                store.space.pin(second)
            case "in_progress":
                second.in_progress = 8
            case "no file":
                there.rename(aside)
        users = {"others": 0, "fewer": 2}.get(why, 1)
        before = (tier.registered, tier.used_bytes, first.bitmap, second.bitmap, first.pins, second.pins)
        fd = store.take_out(backing, users, path)
        assert (fd is not None) is (why == "")
        if fd is None:
            assert before == (
                tier.registered,
                tier.used_bytes,
                first.bitmap,
                second.bitmap,
                first.pins,
                second.pins,
            )
            assert obj.backing is backing and not path.exists()
        else:
            assert os.pread(fd, 10, 0) == content(1, SIZE)[:10] and path.exists() and not there.exists()
            assert (tier.registered, tier.used_bytes, obj.backing, obj.leaving) == (0, 0, None, set())
            assert not store.cached_bytes(object_id) and not obj.fds and not backend.retired
            why_gone = lab.metrics.ledger.misses.missed(object_id, 0, prefetch_in_flight=False)
            assert why_gone == "changed"
            os.close(fd)
        store.backing_files._closed = tier.disk.down = False
        obj.leaving.clear()
        second.in_progress = 0
        if why == "read":
            store.space.unpin(obj, second)
        if aside.exists():
            aside.rename(there)
        if why:
            store.release_backing(backing)
        obj.close_if_unused()
        lab.check_accounts()


@pytest.mark.parametrize("tier", ["ram", "ssd"])
@pytest.mark.parametrize(
    "why", ["", "missing", "not verified", "checked", "always checked", "not open", "lost"]
)
@in_trio
async def test_a_block_is_given_to_another_node_unless_it_is_doubtful(
    cache_dir: Path, tier: str, why: str
) -> None:
    where: dict[str, Any] = {"ram": 8 * MIB, "ssd": 0} if tier == "ram" else {}
    verify = "full" if why == "always checked" else "first"
    async with running(cache_dir, verify=verify, **where) as lab:
        data = content(1, SIZE)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id)
        await lab.quiet()
        obj, store, [only] = lab.store.object(object_id), lab.store, lab.store.tiers
        [first, last] = copies(lab, obj, only.number)
        with obj.held():
            if why not in ("not open", "lost"):
                obj.file(only)
            if why == "lost":
                only.file_path(object_id.digest).unlink()
            if why in ("not verified", "checked"):
                last.verified = 0b011
            if why == "missing":
                store.space.drop(obj, last, 0b100)
            await store.flush()
            clock = last.clock
            shared = store.pin_block(obj, 18, checked=why == "checked")
            refused = why in ("missing", "not verified", "always checked", "lost") or (
                why == "not open" and tier == "ssd"
            )
            assert (shared is None) is refused
            lost = why == "lost" and tier == "ram"
            left = EXTENT if lost else SIZE - 5 if why == "missing" else SIZE
            assert store.cached_bytes(object_id) == left
            if shared is None:
                assert first.pins == last.pins == 0 and last.clock == clock
            else:
                assert (shared.copy, first.pins, last.pins) == (last, 0, 1) and last.clock > clock
                assert (shared.offset, shared.length, shared.in_ram) == (18 * BLOCK, 5, tier == "ram")
                assert os.pread(shared.fd, 5, shared.offset) == data[-5:]
                assert shared.checksum == last.checksums[2]
                store.unpin_block(obj, shared)
                assert last.pins == 0
        if why == "lost":
            for copy in copies(lab, obj, only.number):
                store.space.drop(obj, copy, copy.bitmap)


@in_trio
async def test_two_fills_of_one_file_leave_one_descriptor(cache_dir: Path) -> None:
    async with running(cache_dir) as lab:
        data, store = content(1, 4 * BLOCK), lab.store
        object_id = lab.origin.put("k", data)
        obj = store.object(object_id)
        before = len(os.listdir("/proc/self/fd"))
        with obj.held():
            one, other = (begin_write(store, obj, at, at + 2) for at in (0, 2))
            assert one is not None and other is not None
            for cache_write in (one, other):
                cache_write.write(data[cache_write.start : cache_write.stop])
            assert len(os.listdir("/proc/self/fd")) == before + 2
            for cache_write in (one, other):
                store.end_write(obj, cache_write)
                assert obj.fds == {SSD: one.fd}  # type: ignore[attr-defined]
            assert len(os.listdir("/proc/self/fd")) == before + 1
        assert len(os.listdir("/proc/self/fd")) == before and not obj.fds
        assert await lab.read(object_id) == data and not lab.origin.gets


@pytest.mark.parametrize("size, why", [(SIZE, "one that can be written"), (SIZE - 1, "another size")])
@in_trio
async def test_a_file_becomes_immutable_with_its_size_alone(cache_dir: Path, size: int, why: str) -> None:
    async with running(cache_dir) as lab:
        object_id = lab.origin.put("k", content(1, SIZE))
        await lab.read(object_id)
        await lab.quiet()
        [tier], before = lab.store.tiers, len(os.listdir("/proc/self/fd"))
        path = tier.file_path(object_id.digest)
        if size == SIZE:
            os.close(tier.make_immutable(object_id.digest, size))
            assert path.stat().st_mode & 0o777 == 0o400
        else:
            with pytest.raises(OSError, match="another size"):
                tier.make_immutable(object_id.digest, size)
            assert path.stat().st_mode & 0o777 == 0o600
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("size", [1, BLOCK])
@in_trio
async def test_what_is_adopted_while_a_part_of_it_is_in_use_stays_where_it_is(
    cache_dir: Path, size: int
) -> None:
    async with running(cache_dir) as lab:
        data = content(1, size + BLOCK)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id, 0, 1)
        await lab.quiet()
        obj, store = lab.store.object(object_id), lab.store
        [copy] = copies(lab, obj)
        copy.verified = 0
        path = dirty_file(lab, data)
        for leaving in (True, False):
            if leaving:
                obj.leaving.add(SSD)
            else:
                store.space.pin(copy)
            before = state(lab, object_id)
            assert not await store.adopt(object_id, path)
            assert await store.adopt_bytes([(object_id, data)]) == [False]
            assert state(lab, object_id) == before and path.exists()
            obj.leaving.clear()
        store.space.unpin(obj, copy)
        assert await store.adopt(object_id, path)
        lab.check_accounts()


@pytest.mark.parametrize("meanwhile", ["", "it comes into use", "it was used", "a block comes", "it goes"])
@in_trio
async def test_what_is_used_while_the_scrub_looks_at_it_is_left_as_it_is(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    async with running(cache_dir) as lab:
        [tier], store, data = lab.store.tiers, lab.store, content(1, 4 * BLOCK)
        object_id = lab.origin.put("k", data)
        obj, path = store.object(object_id), tier.file_path(object_id.digest)
        come(lab, obj, data, 0, 3)
        fd = os.open(path, os.O_RDWR)
        linux.punch(fd, BLOCK, BLOCK)
        os.close(fd)
        look = scrub_module._inspect

        def looked(*arguments: Any) -> Any:
            found = look(*arguments)
            trio.from_thread.run_sync(use)
            return found

        def use() -> None:
            match meanwhile:
                case "it comes into use":
                    obj.hold()
                case "it was used":
                    store.eviction.touch(copies(lab, obj)[0])
                case "a block comes":
                    come(lab, obj, data, 3, 4)
                case "it goes":
                    store.evict(obj)

        monkeypatch.setattr(scrub_module, "_inspect", looked)
        on_disk = path.stat().st_blocks * 512
        right = meanwhile in ("", "it was used")
        assert await reclaim(store, tier, object_id.digest, on_disk) == (BLOCK if right else 0)
        held = {"it goes": 0, "a block comes": 4, "it comes into use": 3}.get(meanwhile, 2)
        assert store.cached_bytes(object_id) == held * BLOCK
        if meanwhile == "it comes into use":
            obj.release()
        if held > 2:  # the hole is there yet
            store.evict(obj)


@pytest.mark.parametrize("seed", range(4))
def test_what_a_file_has_is_told_to_the_page(tmp_path: Path, seed: int) -> None:
    """Of ranges within it, over its end and behind it."""
    rng, page, pages = random.Random(seed), 4096, 12
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    there = {at for at in range(pages) if rng.random() < 0.6}
    for at in there:
        os.pwrite(fd, bytes([1]) * page, at * page)
    size = max(there) + 1
    for start in range(pages + 2):
        for count in (1, 2, 5):
            held = [at in there for at in range(start, start + count)]
            assert (next_data(fd, start * page) < (start + count) * page) is any(held)
            assert scrub_module._is_whole(fd, start * page, count * page) is all(held)
    assert os.fstat(fd).st_size == size * page
    os.close(fd)
    with pytest.raises(OSError):
        next_data(fd, 0)
    with pytest.raises(OSError):
        scrub_module._is_whole(fd, 0, page)


@pytest.mark.parametrize("holes", [1, 2])
@in_trio
async def test_an_immutable_file_that_lacks_blocks_goes_whole(cache_dir: Path, holes: int) -> None:
    async with running(cache_dir) as lab:
        [tier], data = lab.store.tiers, content(1, 4 * BLOCK)
        object_id = lab.origin.put("k", data)
        assert await adopt(lab, object_id)
        path = tier.file_path(object_id.digest)
        path.chmod(0o600)
        fd = os.open(path, os.O_RDWR)
        linux.punch(fd, BLOCK, holes * BLOCK)
        os.close(fd)
        path.chmod(0o400)
        on_disk = path.stat().st_blocks * 512
        assert await reclaim(lab.store, tier, object_id.digest, on_disk) == holes * BLOCK
        assert not lab.store.cached_bytes(object_id) and not path.exists()
        assert lab.metrics.ledger.misses.missed(object_id, 0, prefetch_in_flight=False) == "damaged"
