"""The pure policies: concurrency, the gate's order, backoff, the download limit."""

from __future__ import annotations

import random
import time

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from cachefs.origin.attempts import Backoff, Concurrency, Gate, RateLimit, Throughput, Ticket
from cachefs.origin.fsspec_client import FsspecClient


def test_throttling_halves_once_per_window() -> None:
    limit = Concurrency(64)
    for _ in range(10):  # ten refusals of requests that were all sent before the cut
        limit.throttled(sent_at=1.0, now=2.0)
    assert limit.limit == 32
    limit.throttled(sent_at=2.5, now=3.0)
    assert limit.limit == 16


def test_a_window_of_successes_adds_one() -> None:
    limit = Concurrency(8)
    limit.throttled(0.0, 1.0)
    for expected in (5, 6, 7, 8):
        for _ in range(expected - 1):
            assert limit.limit == expected - 1
            limit.succeeded()
        assert limit.limit == expected
    limit.succeeded()
    assert limit.limit == 8


@given(st.integers(1, 100), st.lists(st.booleans(), max_size=300))
def test_the_limit_stays_in_bounds(maximum: int, replies: list[bool]) -> None:
    limit = Concurrency(maximum)
    for now, good in enumerate(replies):
        if good:
            limit.succeeded()
        else:
            limit.throttled(now, now)
        assert 1 <= limit.limit <= maximum
        assert limit.admits(0, background=True), "background work must never starve for ever"


def test_demand_overtakes_background_and_each_is_in_order() -> None:
    async def main() -> list[str]:
        gate = Gate(Concurrency(1))
        order: list[str] = []

        async def pass_through(name: str, background: bool) -> None:
            ticket = Ticket(background)
            await gate.enter(ticket)
            order.append(name)
            gate.leave(ticket)

        first = Ticket()
        await gate.enter(first)
        async with trio.open_nursery() as nursery:
            for name in ("b1", "b2", "d1", "d2"):
                nursery.start_soon(pass_through, name, name.startswith("b"))
                await trio.testing.wait_all_tasks_blocked()
            assert len(gate.queue) == 4
            gate.leave(first)
        assert (gate.in_flight, len(gate.queue)) == (0, 0)
        return order

    assert trio.run(main) == ["d1", "d2", "b1", "b2"]


def test_background_leaves_room_for_demand() -> None:
    async def main() -> None:
        gate = Gate(Concurrency(16))
        for _ in range(14):
            await gate.enter(Ticket(background=True))
        with trio.move_on_after(1) as waited:
            await gate.enter(Ticket(background=True))
        assert waited.cancelled_caught
        with trio.fail_after(0.5):
            await gate.enter(Ticket())
            await gate.enter(Ticket())
        assert (gate.in_flight, gate.background_in_flight) == (16, 14)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_cancelled_waiter_takes_no_slot() -> None:
    async def main() -> None:
        gate = Gate(Concurrency(1))
        first = Ticket()
        await gate.enter(first)
        with trio.move_on_after(1):
            await gate.enter(Ticket())
        gate.leave(first)
        assert (gate.in_flight, len(gate.queue)) == (0, 0)
        await gate.enter(Ticket())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_lower_limit_admits_no_request_until_it_is_met() -> None:
    async def main() -> None:
        gate = Gate(Concurrency(4))
        tickets = [Ticket() for _ in range(4)]
        for ticket in tickets:
            await gate.enter(ticket)
        gate.concurrency.throttled(0.0, 1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gate.enter, Ticket())
            for waiting in (1, 1, 0):
                gate.leave(tickets.pop())
                await trio.testing.wait_all_tasks_blocked()
                assert len(gate.queue) == waiting
        assert gate.in_flight == 2

    trio.run(main)


@given(st.integers(1, 1000), st.integers())
def test_backoff_grows_to_its_ceiling_and_no_further(failures: int, seed: int) -> None:
    backoff = Backoff(first_s=0.2, longest_s=10.0)
    wait = backoff.wait_s(failures, random.Random(seed))
    ceiling = min(10.0, 0.2 * 2.0 ** min(failures - 1, 50))
    assert ceiling / 2 <= wait <= ceiling


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 0.5)), min_size=1, max_size=50))
def test_the_download_limit_is_kept(takes: list[tuple[int, float]]) -> None:
    """A taker that waits as told gets no more than the rate, but for the burst that a pause leaves."""
    rate = 1e6
    limit, now, done = RateLimit(rate), 0.0, 0
    for count, pause in takes:
        now += pause
        now += limit.take(count, now)
        done += count
        assert done <= rate * (now + RateLimit.BURST_S) * (1 + 1e-9) + 1


def test_a_pause_leaves_a_tenth_of_a_second_of_a_limit() -> None:
    """A task that wakes up late loses nothing, and a link that was idle is not flooded."""
    limit = RateLimit(1000.0)
    assert limit.take(1, 0.0) == pytest.approx(0.001)
    assert limit.take(100, 60.0) == 0.0
    assert limit.take(1, 60.0) == pytest.approx(0.001)


def test_takers_of_a_limit_are_served_in_order() -> None:
    limit = RateLimit(100.0)
    waits = [limit.take(100, 0.0) for _ in range(3)]
    assert waits == pytest.approx([1.0 - 0.0, 2.0, 3.0], abs=RateLimit.BURST_S)


def test_a_readers_bytes_are_paid_for_first() -> None:
    async def main() -> None:
        limit, order = RateLimit(100.0), []

        async def take(name: str, ticket: Ticket) -> None:
            await limit.pay(100, ticket)
            order.append((name, trio.current_time() - start))

        start = trio.current_time()
        tickets = {name: Ticket(name.startswith("b")) for name in ("b1", "b2", "b3", "d1", "d2")}
        async with trio.open_nursery() as nursery:
            for name, ticket in tickets.items():
                nursery.start_soon(take, name, ticket)
                await trio.testing.wait_all_tasks_blocked()
            with trio.move_on_after(0.5):  # a cancelled taker leaves no gap
                await take("d3", Ticket())
            tickets["b3"].promote()
        assert [name for name, _ in order] == ["b1", "d1", "d2", "b3", "b2"]
        assert [when for _, when in order] == pytest.approx([1, 2, 3, 4, 5], abs=RateLimit.BURST_S)
        await take("alone", Ticket())
        assert order[-1][1] == pytest.approx(6, abs=RateLimit.BURST_S)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_throughput_is_of_the_last_seconds() -> None:
    measured = Throughput()
    for tenth in range(100):
        measured.add(100, tenth / 10)
    assert measured.rate(9.95) == 1000.0
    assert measured.rate(12.0) == 400.0
    assert measured.rate(60.0) == 0.0


def test_a_turn_promoted_at_the_gate_takes_the_slots_kept_for_demand() -> None:
    async def main() -> None:
        gate = Gate(Concurrency(8))
        inside = [Ticket(background=True) for _ in range(7)]
        for ticket in inside:
            await gate.enter(ticket)
        late = Ticket(background=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gate.enter, late)
            await trio.testing.wait_all_tasks_blocked()
            assert len(gate.queue.background) == 1
            late.promote()
        assert (gate.in_flight, gate.background_in_flight, len(gate.queue)) == (8, 7, 0)
        inside[0].promote()
        assert gate.background_in_flight == 6
        for ticket in [*inside, late]:
            gate.leave(ticket)
        assert gate.in_flight == 0

    trio.run(main)


def test_what_was_opened_with_other_credentials_is_opened_again() -> None:
    credentials = "a"
    opened: list[str] = []

    def open_it() -> int:
        opened.append(credentials)
        return len(opened)

    client = FsspecClient(open_it, root="", label="", credentials=lambda: "".join(credentials))
    assert (client.opened(), client.opened()) == (1, 1)
    credentials = "b"
    assert (client.opened(), client.opened()) == (2, 2)
    client.renew(since=0.0)  # opened after that
    assert client.opened() == 2
    client.renew(since=time.monotonic())
    assert client.opened() == 3
    client.close()
    assert client.opened() == 4
    assert opened == ["a", "b", "b", "b"]


def test_background_has_its_turn_among_many_demands() -> None:
    """A reader may have joined a transfer that began as readahead: it must not wait until all others are idle."""

    async def main() -> None:
        gate = Gate(Concurrency(1))
        order: list[str] = []

        async def pass_through(name: str, background: bool) -> None:
            ticket = Ticket(background)
            await gate.enter(ticket)
            order.append(name)
            gate.leave(ticket)

        first = Ticket()
        await gate.enter(first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pass_through, "ahead", True)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(12):
                nursery.start_soon(pass_through, f"demand{number}", False)
                await trio.testing.wait_all_tasks_blocked()
            gate.leave(first)
        assert order.index("ahead") == 4

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
