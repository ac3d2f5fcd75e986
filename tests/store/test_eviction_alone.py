"""The order of eviction without a store: what it keeps of copies and forgets, and what it notes and restores."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.base.names import ObjectId
from cachefs.store.catalog import Copy, CopyKey, unit_hash
from cachefs.store.eviction import EPOCHS_SAVED_EVERY, PREFETCHED_S, Eviction, Policy, PriorityClass, Waiting
from cachefs.store.tier import RAM, SSD


class Rows:
    """Stands in for the index and the catalog."""

    def __init__(self, notes: dict[bytes, bytes] | None = None) -> None:
        self.notes, self.clock = notes or {}, 1
        self.changes: list[CopyKey] = []

    def note(self, name: bytes) -> bytes | None:
        return self.notes.get(name)

    def flush_begins(self) -> None:
        pass

    def touch(self, copy: Copy) -> CopyKey:
        self.clock += 1
        copy.clock = copy.used = self.clock
        return copy.key

    def changed(self, copy: Copy) -> None:
        self.changes.append(copy.key)


def order(rows: Rows | None = None, policy: Policy = "auto") -> Any:
    tiers: Any = [SimpleNamespace(number=number) for number in (RAM, SSD)]
    known: Any = rows or Rows()
    return Eviction(known, known, tiers, policy, lambda: 100.0)


def copy_of(number: int, tier: int = SSD) -> Copy:
    return Copy(tier, bytes([number]) * 16, 0, 5, bitmap=1, clock=number, used=number, dataset=7)


def test_what_was_noted_is_restored() -> None:
    rows = Rows()
    before = order(rows)
    ids = [ObjectId("s", f"d{n % 2}/{n}", "1", 5) for n in range(12)]
    for _ in range(3):
        for object_id in ids:
            rows.clock += 1
            before.epochs.used(
                before.datasets(object_id), unit_hash(object_id.digest, 0), rows.clock, 5, hit=True
            )
    notes = before._notes(True)
    numbers = {before.datasets(object_id) for object_id in ids}
    assert {name for name in notes if name.startswith(b"epochs")} == {
        b"epochs",
        *(b"epochs%08x" % number for number in numbers),
    }
    after = order(Rows(notes))
    assert list(after.epochs.status()) == list(before.epochs.status()) and after.epochs._now == rows.clock
    assert {after.datasets.name(number) for number in numbers} == {"d0", "d1"}
    assert after._seen_version == after._saved_version == after.epochs.version


def test_the_epochs_are_noted_now_and_then() -> None:
    rows = Rows()
    order_ = order(rows)
    order_.epochs.used(1, 1, 1, 5, hit=True)
    kept: list[int] = []
    for number in range(1, 3 * EPOCHS_SAVED_EVERY + 1):
        rows.clock += 1
        notes = order_._notes(False)
        if b"epochs" in notes:
            kept.append(number)
            assert json.loads(notes[b"epochs"])[1] == [1] and b"datasets" in notes
    assert kept == [EPOCHS_SAVED_EVERY, 2 * EPOCHS_SAVED_EVERY, 3 * EPOCHS_SAVED_EVERY]
    assert b"epochs" in order_._notes(True), "at the end in any case"
    order_.epochs.version += 1
    assert b"epochs" in order_._notes(False), "and when an epoch has begun"
    assert b"epochs" not in order_._notes(False)


def test_what_has_gone_is_forgotten_everywhere() -> None:
    found, copy, other = order(), copy_of(5), copy_of(6)
    for one in (copy, other):
        found.remote_owned.add(one.key)
        found._evictable_first.add(one.key)
        found._waiting[one.key] = Waiting(1.0, one.clock, 7)
    found.removed(copy)
    found.removed(copy)
    keys = [
        {k for t in kept.tiers.values() for k in t} for kept in (found.remote_owned, found._evictable_first)
    ]
    assert [*keys, set(found._waiting)] == [{other.key}] * 3


@pytest.mark.parametrize("minutes, protected", [(9, True), (15, False)])
def test_prefetched_blocks_outlast_an_evaluation_and_not_a_dead_job(minutes: int, protected: bool) -> None:
    """The training that goes on finds them, and the next job finds a cache that evicts what no job will read."""
    found, copy = order(), copy_of(1)
    found.prefetched(copy)
    found._now = lambda: 100.0 + minutes * 60
    trio.run(found.flush)
    assert found.protected(copy) is protected


def test_a_use_ends_the_wait_and_lets_others_go_first() -> None:
    found, copies = order(), [copy_of(n) for n in range(1, 4)]
    for copy in copies:
        found.prefetched(copy)
        found.remote_owned.add(copy.key)
        assert copy.used == 0 and found._waiting[copy.key] == Waiting(100.0 + PREFETCHED_S, copy.clock, 7)
        assert found.class_of(copy.key, copy.clock, 7) is PriorityClass.REMOTE_PREFETCHED and found.protected(
            copy
        )
    found.touch(copies[0])
    assert list(found._waiting) == [copy.key for copy in copies[1:]] and copies[0].used == copies[0].clock
    assert list(found.remote_owned.tiers[SSD]) == [copies[n].key for n in (1, 2, 0)]
    assert found.class_of(copies[0].key, 9, 7) is PriorityClass.REMOTE_OWNED
    assert found.make_own(copies[1]) and not found.make_own(copies[1])
    assert found.class_of(copies[1].key, 9, 7) is PriorityClass.PROTECTED, "it waits still"
    found.left_behind(SimpleNamespace(copies={(1, 0): copies[1], (1, 1): None, (0, 0): copies[0]}))
    assert list(found._waiting) == [copies[2].key]
    assert found.class_of(copies[1].key, 9, 7) is PriorityClass.EVICTABLE


@pytest.mark.parametrize("passed", [0, 4, 5, 6])
def test_what_waits_no_longer_or_is_ours_is_looked_at_if_the_search_has_passed_it(passed: int) -> None:
    found, copy = order(), copy_of(5)
    found._evictable_walks[SSD].passed = passed
    found.remote_owned.add(copy.key)
    assert found.make_own(copy)
    found._waiting[copy.key] = Waiting(1.0, 5, 7)
    found._give_up(copy.key)
    held = [(b"", copy.key, 5, 7)] if passed >= 5 else []
    assert found._evictable_walks[SSD]._again == held * 2 and not found._evictable_walks[RAM]._again


def test_an_epoch_that_begins_begins_the_searches_and_forgets_what_is_evictable_first() -> None:
    found = order()
    found._evictable_first.add(copy_of(1).key)
    for walk in found._evictable_walks.values():
        walk.passed = 9
    found._look_again()
    assert copy_of(1).key in found._evictable_first and found._evictable_walks[SSD].passed == 9
    found.epochs.version += 1
    found._look_again()
    assert copy_of(1).key not in found._evictable_first
    assert [walk.passed for walk in found._evictable_walks.values()] == [-1, -1]
    for walk in found._evictable_walks.values():
        walk.passed = 9
    found._look_again()
    assert found._evictable_walks[SSD].passed == 9


@pytest.mark.parametrize(
    "pins, pinned, others, immutable", [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 1, 1)]
)
def test_what_is_in_use_or_pinned_cannot_go(pins: int, pinned: int, others: int, immutable: int) -> None:
    found, copy, other = order(), copy_of(1), copy_of(2)
    copy.pins, copy.pinned, other.pins = pins, bool(pinned), others
    obj = SimpleNamespace(is_immutable=lambda tier: bool(immutable), copies_on=lambda tier: [copy, other])
    for moving in (False, True):
        can = not pins and (moving or not pinned) and not (immutable and others)
        assert found._can_go(obj, copy, moving) is can
