"""The ledger: who waited for what, why blocks were missed, for which dataset the store was asked; and its bounds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base import ledger
from cachefs.base.ledger import (
    DISK,
    NAMES,
    ORIGIN,
    OTHERS,
    PEER,
    WRITES,
    Identity,
    Ledger,
    Misses,
    Waits,
    about,
    current_call,
    identify,
)
from cachefs.base.names import ObjectId


def version(key: str = "k", etag: str = "1") -> ObjectId:
    return ObjectId("s3://b", key, etag, 1 << 24)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def waits(clock: Callable[[], float]) -> Waits:
    """Threads 10 to 19 are process 1, 20 to 29 process 2, and so on."""
    return Waits(clock, lambda thread: Identity(thread // 10, 1, 0, f"p{thread // 10}"))


def test_two_reads_of_one_process_at_once_block_it_once() -> None:
    clock = Clock()
    table = waits(clock)
    first = table.begin(10, version(), 0)
    first.now_for(ORIGIN)
    clock.now += 2
    second = table.begin(11, version(), 0)  # from the disk, beside the first
    clock.now += 1
    assert [wait["seconds"] for wait in table.waiting()] == [3, 1]
    first.end(100)
    clock.now += 1
    second.end(10)
    [row] = table.processes()
    assert (row["pid"], row["reads"], row["bytes"], row["waiting"]) == (1, 2, 110, 0)
    assert row["blocked_s"] == 4
    assert row["waited_s"] == {ORIGIN: 3, PEER: 0, DISK: 2, NAMES: 0, WRITES: 0}
    assert table.totals()["blocked_s"] == 4
    assert [read["seconds"] for read in table.slowest()] == [3, 2]


def test_what_a_read_waits_for_may_change() -> None:
    clock = Clock()
    table = waits(clock)
    wait = table.begin(10, version(), 0)
    for what, seconds in ((PEER, 2), (ORIGIN, 5), (DISK, 1)):
        wait.now_for(what)
        clock.now += seconds
    assert table.waiting()[0]["on"] == DISK
    wait.end(0)
    assert table.totals()["waited_s"] == {PEER: 2, ORIGIN: 5, DISK: 1, NAMES: 0, WRITES: 0}
    assert table.slowest()[0]["on"] == ORIGIN


def test_a_close_beside_a_read_blocks_its_process_once_and_says_of_which_file() -> None:
    clock = Clock()
    table = waits(clock)
    wait = table.begin(10, version(), 0)
    clock.now += 1
    call = table.call(11, WRITES, "close")
    token = current_call.set(call)
    about("ckpt")
    clock.now += 1
    wait.end(5)
    [row] = table.waiting()
    assert (row["request"], row["on"], row["key"], row["pid"]) == ("close", WRITES, "ckpt", 1)
    clock.now += 1
    current_call.reset(token)
    call.end()
    about("nobody's")  # nothing is answered here: forgotten
    assert current_call.get() is None and table.waiting() == []
    [row] = table.processes()
    assert (row["blocked_s"], row["reads"], row["calls"], row["bytes"]) == (3, 1, 1, 5)
    assert row["waited_s"] == {ORIGIN: 0, PEER: 0, DISK: 2, NAMES: 0, WRITES: 2}
    assert table.totals()["blocked_s"] == 3 and sum(table.read_seconds.counts) == 1  # which are of reads


def test_a_call_that_is_ended_early_is_ended_once() -> None:
    clock = Clock()
    table = waits(clock)
    call = table.call(10, NAMES, "lookup")
    clock.now += 1
    call.end()  # who waited is gone; the work goes on
    clock.now += 5
    call.end()
    [row] = table.processes()
    assert (row["blocked_s"], row["calls"], row["waiting"]) == (1, 1, 0)


def test_a_process_that_blocks_now_shows_the_time_so_far() -> None:
    clock = Clock()
    table = waits(clock)
    table.begin(10, version(), 0)
    clock.now += 7
    assert table.processes()[0]["blocked_s"] == table.totals()["blocked_s"] == 7


@given(
    st.lists(
        st.tuples(st.integers(10, 999), st.floats(0, 2), st.sampled_from([ORIGIN, PEER, DISK])), max_size=60
    )
)
def test_rows_add_up_to_the_total_whatever_is_forgotten(
    reads: list[tuple[int, float, str]],
) -> None:
    clock = Clock()
    table = waits(clock)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "PROCESSES", 4)
        for thread, seconds, what in reads:
            wait = table.begin(thread, version(), 0)
            wait.now_for(what)
            table.process(thread).account["origin_get"] += 1
            clock.now += seconds
            wait.end(5)
    rows, total = table.processes(), table.totals()
    assert len(rows) <= 5  # and the row of the others
    assert sum(row["reads"] for row in rows) == total["reads"] == sum(table.read_seconds.counts) == len(reads)
    assert sum(row["bytes"] for row in rows) == 5 * len(reads)
    assert sum(row["requests"].get("origin_get", 0) for row in rows) == len(reads)
    for what in (ORIGIN, PEER, DISK):
        assert sum(row["waited_s"][what] for row in rows) == pytest.approx(total["waited_s"][what])


def test_only_the_slowest_of_the_last_quarter_of_an_hour() -> None:
    clock = Clock()
    table = waits(clock)

    def read(seconds: float) -> None:
        wait = table.begin(10, version(f"{seconds:g}"), 0)
        clock.now += seconds
        wait.end(0)

    for number in range(1, 101):
        read(number / 10)
    assert [read["key"] for read in table.slowest()[:2]] == ["10", "9.9"]
    assert len(table.slowest()) == ledger.SLOWEST
    clock.now += ledger.SLOW_FOR_S + 1
    assert table.slowest() == []
    for _ in range(ledger.SLOWEST):
        read(0.5)
    assert [read["seconds"] for read in table.slowest()] == pytest.approx([0.5] * ledger.SLOWEST)
    read(0.001)
    assert table.slowest()[-1]["seconds"] > ledger.SLOW_S


def test_a_thread_leads_to_its_process() -> None:
    found = identify(os.getpid())
    assert (found.pid, found.parent) == (os.getpid(), os.getppid())
    assert found.name == Path(f"/proc/{os.getpid()}/comm").read_text().strip()
    assert found.started
    assert identify(0) == identify(1 << 30) == ledger.UNSEEN


def test_why_a_block_was_missed() -> None:
    misses = Misses(lambda: 0.0)
    one = version()
    assert misses.missed(one, 0, prefetch_in_flight=False) == "cold"
    misses.fetched(one)
    misses.asked(one.digest, 0, "origin")
    assert [(extent, miss.reason, miss.asked) for extent, miss in misses.last(one.digest, 4)] == [
        (0, "cold", ["origin"])
    ]
    misses.gone(one.digest, 0, "evicted")
    assert misses.missed(one, 0, prefetch_in_flight=False) == "evicted"
    misses.gone(one.digest, 0, "damaged")
    assert misses.missed(one, 0, prefetch_in_flight=False) == "damaged"
    assert misses.missed(one, 1, prefetch_in_flight=False) == "cold"
    assert misses.missed(one, 1, prefetch_in_flight=True) == "prefetch_in_flight"
    two = version(etag="2")
    assert misses.missed(two, 0, prefetch_in_flight=False) == "changed"
    misses.fetched(two)
    assert misses.missed(two, 5, prefetch_in_flight=False) == "changed"  # the rest of it
    assert misses.missed(version("other"), 0, prefetch_in_flight=False) == "cold"


def test_misses_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "REMEMBERED", 3)
    misses = Misses(lambda: 0.0)
    for extent in range(10):
        misses.gone(version().digest, extent, "evicted")
        misses.missed(version(), extent, prefetch_in_flight=False)
    assert [extent for extent, _ in misses.last(version().digest, 10)] == [7, 8, 9]
    assert misses.missed(version(), 0, prefetch_in_flight=False) == "cold"


def test_datasets_are_first_components_and_bounded() -> None:
    requests = Ledger()
    for key in ("data/a/x/1", "data/a/2", "data/b/", "data/readme", "data/"):
        requests.account("data/", key)["origin_get"] += 1
    assert {name: account["origin_get"] for name, account in requests.datasets.items()} == {
        "data/a": 2,
        "data/b": 1,
        "data/": 2,
    }
    for number in range(1000):
        requests.account("", f"d{number}/x")["origin_get"] += 1
    assert len(requests.datasets) == ledger.DATASETS + 1
    assert sum(account["origin_get"] for account in requests.datasets.values()) == 1005
    assert requests.datasets[OTHERS]["origin_get"] > 900
