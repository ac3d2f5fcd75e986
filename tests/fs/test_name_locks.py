"""Claims of names: those that conflict wait for each other, in order; others do not wait."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.fs.name_locks import NameLocks


def directory(number: int, parent: Any = None, name: bytes = b"") -> Any:
    return SimpleNamespace(ino=number, parent=parent, mark=name + b"/")


ROOT = directory(0)
A = directory(1, ROOT, b"a")
DEEP = directory(2, A, b"deep")
B = directory(3, ROOT, b"b")


@pytest.mark.parametrize(
    ("one", "other", "waits"),
    [
        (([(ROOT, b"x")], False), ([(ROOT, b"x")], False), True),
        (([(ROOT, b"x")], False), ([(ROOT, b"y")], False), False),
        (([(A, b"x")], False), ([(B, b"x")], False), False),
        (([(ROOT, b"x"), (A, b"x")], False), ([(A, b"x"), (B, b"y")], False), True),
        (([(ROOT, b"a")], False), ([(A, b"x")], False), False),
        (([(ROOT, b"a")], True), ([(A, b"x")], False), True),
        (([(ROOT, b"a")], True), ([(DEEP, b"x")], False), True),
        (([(ROOT, b"a")], True), ([(B, b"x")], True), False),
        (([(ROOT, b"a")], True), ([(A, b"deep")], True), True),
        (([(A, b"deep")], True), ([(ROOT, b"a")], False), False),
        (([(A, b"deep")], True), ([(ROOT, b"a")], True), True),
    ],
)
async def test_what_conflicts(one: Any, other: Any, waits: bool) -> None:
    for first, second in ((one, other), (other, one)):
        locks, entered = NameLocks(), trio.Event()

        async def enter(claim: Any, locks: NameLocks = locks, entered: trio.Event = entered) -> None:
            async with locks.claimed(*claim[0], trees=claim[1]):
                entered.set()

        async with trio.open_nursery() as nursery, locks.claimed(*first[0], trees=first[1]):
            nursery.start_soon(enter, second)
            await trio.testing.wait_all_tasks_blocked()
            assert entered.is_set() is not waits
        assert entered.is_set() and len(locks) == 0


async def test_claims_are_granted_in_their_order() -> None:
    """One that waits is not overtaken by a later one that conflicts with it, so none waits for ever."""
    locks, order = NameLocks(), list[str]()

    async def claim(who: str, *names: bytes) -> None:
        async with locks.claimed(*((ROOT, name) for name in names)):
            order.append(who)

    async with trio.open_nursery() as nursery, locks.claimed((ROOT, b"x")):
        for who, names in (("both", [b"x", b"y"]), ("y", [b"y"]), ("z", [b"z"])):
            nursery.start_soon(claim, who, *names)
            await trio.testing.wait_all_tasks_blocked()
        assert order == ["z"]
    assert order == ["z", "both", "y"]


@pytest.mark.parametrize("seed", range(20))
async def test_no_two_changes_of_a_name_run_at_once(seed: int) -> None:
    """Nor below a tree that is claimed; and a cancelled claim leaves nothing behind."""
    rng, locks, running = random.Random(seed), NameLocks(), list[tuple[set[tuple[int, bytes]], bool]]()
    places = [(ROOT, b"a"), (ROOT, b"b"), (A, b"x"), (A, b"deep"), (DEEP, b"y"), (B, b"x")]
    above = {0: set(), 1: {(0, b"a")}, 2: {(0, b"a"), (1, b"deep")}, 3: {(0, b"b")}}

    async def change() -> None:
        chosen, trees = rng.sample(places, rng.randrange(1, 3)), rng.random() < 0.3
        names = {(at.ino, name) for at, name in chosen}
        covered = {one for number, _ in names for one in above[number]}
        with trio.move_on_after(rng.choice((1, 5, 1000))):
            async with locks.claimed(*chosen, trees=trees):
                for others, whole in running:
                    assert names.isdisjoint(others)
                    assert not whole or covered.isdisjoint(others)
                    assert not trees or {one for n, _ in others for one in above[n]}.isdisjoint(names)
                running.append((names, trees))
                try:
                    await trio.sleep(rng.random())
                finally:
                    running.remove((names, trees))

    async with trio.open_nursery() as nursery:
        for _ in range(60):
            nursery.start_soon(change)
            await trio.sleep(rng.random() / 3)
    assert len(locks) == 0


async def test_a_directory_that_is_moved_while_a_claim_below_it_waits() -> None:
    """What is claimed below it is below its new name when the claim is granted."""
    locks, moved = NameLocks(), directory(4, ROOT, b"c")
    granted, renamed = trio.Event(), trio.Event()

    async def below() -> None:
        async with locks.claimed((moved, b"x")):
            granted.set()
            await trio.testing.wait_all_tasks_blocked()
            assert not renamed.is_set()

    async def rename() -> None:
        async with locks.claimed((ROOT, b"b"), (ROOT, b"d"), trees=True):
            renamed.set()

    async with trio.open_nursery() as nursery:
        async with locks.claimed((ROOT, b"c"), (B, b"c"), trees=True):
            nursery.start_soon(below)
            await trio.testing.wait_all_tasks_blocked()
            moved.parent = B
        await granted.wait()
        nursery.start_soon(rename)
    assert renamed.is_set() and len(locks) == 0
