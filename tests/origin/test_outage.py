"""An origin that does not answer at all: how that is found, what requests get meanwhile, and how it ends."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.errors import (
    CachefsError,
    NotFound,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
    Unreachable,
)
from cachefs.base.metrics import Metrics
from cachefs.base.names import OnOutage
from cachefs.origin import InMemory, ListPage, ObjectInfo, Origin, protocol
from cachefs.origin.attempts import FAILING_S, FAILURES, SILENT_S, Attempts, Outage
from cachefs.origin.local import LocalClient
from cachefs.origin.protocol import PATIENCE, STALL_S, AskedToWait, Body, Conditions, Preconditions, Writer
from cachefs.origin.s3 import LIMITS
from tests import threads
from tests.origin.reading import Collect

# -- the policy ----------------------------------------------------------------------------------------


def outage(*steps: tuple[str, float]) -> Outage:
    made = Outage()
    for what, at in steps:
        match what:
            case "asked" | "heard":
                getattr(made, what)(at)
            case _:
                getattr(made, what)()
    return made


BROKEN = [("asked", 0.0)] + [("failed", 0.0)] * FAILURES + [("ended", 0.0)]


@pytest.mark.parametrize(
    ("steps", "at", "suspicious"),
    [
        ([], 1000, False),
        ([("asked", 0)], SILENT_S - 0.1, False),
        ([("asked", 0)], SILENT_S, True),
        ([("asked", 0), ("heard", 3)], SILENT_S + 1, False),
        ([("asked", 0), ("asked", 0), ("heard", 3), ("ended", 3)], 3 + SILENT_S, True),
        ([("asked", 0), ("ended", 1)], 1000, False),  # the caller has gone
        ([("asked", 0), ("ended", 1), ("asked", 1000)], 1001, False),
        (BROKEN, FAILING_S - 0.1, False),
        (BROKEN, FAILING_S, True),
        ([*BROKEN, ("heard", 1)], 1000, False),
        (BROKEN[:-2] + BROKEN[-1:], FAILING_S, False),  # one failure less
    ],
)
def test_what_is_suspicious(steps: list[tuple[str, float]], at: float, suspicious: bool) -> None:
    assert (outage(*steps).suspicious(at) is not None) is suspicious


def test_a_probe_in_vain_decides_only_if_nothing_was_heard_meanwhile() -> None:
    here = outage(*BROKEN)
    probed = 0.0, here.replies
    here.heard(FAILING_S)
    assert not here.probed_in_vain(*probed)
    out = outage(*BROKEN)
    assert out.suspicious(FAILING_S) == 0
    assert out.probed_in_vain(*probed) and out.since == 0
    assert not out.probed_in_vain(*probed)  # said once
    assert out.heard(9.0) == 9.0 and out.since is None and out.heard(10.0) is None and out.idle


def test_who_gives_up_while_it_is_probed_was_met_with_silence_all_the_same() -> None:
    out = outage(("asked", 1.0))
    assert out.suspicious(1 + SILENT_S) == 1
    out.ended()
    assert out.probed_in_vain(1, out.replies) and out.since == 1


@given(st.lists(st.tuples(st.sampled_from(["asked", "ended", "failed", "heard", "probe"]), st.floats(0, 4))))
def test_it_is_never_out_unless_all_was_quiet_for_long_enough(steps: list[tuple[str, float]]) -> None:
    here, now, heard_at, waiting = Outage(), 0.0, 0.0, 0
    probed: tuple[float, int] | None = None
    for what, wait in steps:
        now += wait
        if what == "ended" and not waiting:
            continue
        waiting += (what == "asked") - (what == "ended")
        match what:
            case "heard":
                here.heard(now)
                heard_at = now
                assert here.since is None
            case "asked":
                here.asked(now)
            case "probe" if probed is None:
                quiet_since = here.suspicious(now)
                if quiet_since is not None:
                    assert now - heard_at >= FAILING_S
                    probed = quiet_since, here.replies
            case "probe":
                here.probed_in_vain(*probed)
                probed = None
            case _:
                getattr(here, what)()
        if here.since is not None:
            assert here.since >= heard_at and not here.idle


# -- requests ------------------------------------------------------------------------------------------

BODY = bytes(range(256)) * 8


class Hang(Exception):
    """Stands for a call that does not return."""


class Store:
    """A client whose store is in a state: `ok`, `hangs`, `breaks`, or an error for all or for one key."""

    writer = None
    can_write = False

    def __init__(self) -> None:
        self.state: str | CachefsError = "ok"
        self.bad: dict[str, CachefsError | str] = {}
        self.asked: list[str] = []
        self.hang_after: int | None = None
        self.then: type[Exception] = Hang

    def _meet(self, what: str) -> None:
        self.asked.append(what)
        state = self.bad.get(what, self.state)
        if state == "hangs":
            raise Hang
        if state == "breaks":
            raise Transient("connection refused")
        if isinstance(state, CachefsError):
            raise state

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        self._meet("probe" if limit == 1 else "list")
        return ListPage([], [], None)

    def head(self, key: str) -> ObjectInfo:
        self._meet(key)
        return ObjectInfo(key, len(BODY), 1, '"e"')

    def read(self, key: str, etag: str, start: int, stop: int, whole: bool) -> Generator[bytes, None, None]:
        self._meet(key)
        for at in range(start, stop, 512):
            if self.hang_after is not None and at >= self.hang_after:
                raise self.then
            yield BODY[at : min(at + 512, stop)]
        if self.hang_after == stop:
            raise self.then

    def renew(self, since: float) -> bool:
        return False

    def close(self) -> None:
        pass


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocking calls run in place, and those that hang wait for their cancellation."""

    async def run_sync(call: Callable[[], Any], **_: Any) -> Any:
        await trio.lowlevel.checkpoint()
        try:
            return call()
        except Hang:
            await trio.sleep_forever()

    threads.replace(monkeypatch, run_sync)


def play(
    how: OnOutage,
    scenario: Callable[[Origin, Store, Metrics], Awaitable[None]],
    make: Callable[[], Any] = Store,
) -> None:
    async def main() -> None:
        store, metrics = make(), Metrics()
        origin = Origin(Attempts(store, source="s3://b", on_outage=how, metrics=metrics))
        try:
            with trio.fail_after(1000):
                await scenario(origin, store, metrics)
        finally:
            await origin.aclose()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


STALE, EIO, WAIT = OnOutage("serve-stale"), OnOutage("eio"), OnOutage("wait", 30.0)
pytestmark = pytest.mark.usefixtures("in_place")


async def fails(ask: Awaitable[object]) -> float:
    """After how long `Unreachable` is raised."""
    began = trio.current_time()
    with pytest.raises(Unreachable):
        await ask
    return trio.current_time() - began


def test_an_outage_is_known_before_a_reply_counts_as_stalled() -> None:
    """It is suspected first, and then its probe takes as long. What the origin does before it replies may take minutes."""
    assert STALL_S == SILENT_S + SILENT_S
    assert STALL_S * PATIENCE == 120


@pytest.mark.parametrize("state", ["hangs", "breaks"])
@pytest.mark.parametrize("how", [STALE, EIO], ids=str)
def test_an_outage_is_found_ends_by_itself_and_is_said_twice(
    how: OnOutage, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        await origin.head("a")
        assert not origin.serves_stale and origin.complaint == ""
        store.state = state
        assert await fails(origin.head("a")) <= SILENT_S + SILENT_S + 1
        assert origin.serves_stale is how.stale
        assert "s3://b has not answered for" in origin.complaint and origin.status()["out_s"] >= FAILING_S
        store.asked.clear()
        for _ in range(50):
            assert await fails(origin.head("a")) == await fails(origin.list_page("")) == 0
        assert store.asked == [] and metrics.origin_refused >= 100
        await trio.sleep(60)
        assert set(store.asked) == {"probe"} and len(store.asked) <= 60
        store.state = "ok"
        await trio.sleep(SILENT_S + 1.1)
        assert origin.complaint == "" and origin.status()["out_s"] is None
        assert (await origin.head("a")).size == len(BODY)
        store.asked.clear()
        await trio.sleep(60)
        assert store.asked == []  # no probes of a store that is well
        assert metrics.origin_outages == 1

    with caplog.at_level(logging.WARNING):
        play(how, scenario)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and "has not answered for" in lines[0] and "answers again, after" in lines[1]


@pytest.mark.parametrize("said", [NotFound("no"), PermissionDenied("no"), Throttled("slow down")])
def test_a_store_that_refuses_everything_answers(said: CachefsError) -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.state = said
        for _ in range(5):
            with pytest.raises(CachefsError) as caught:
                await origin.head("a")
            assert not isinstance(caught.value, Unreachable)
        assert metrics.origin_outages == 0 and origin.complaint == ""

    play(STALE, scenario)


@pytest.mark.parametrize("state", ["hangs", "breaks"])
def test_one_key_that_never_answers_is_no_outage(state: str) -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.bad["a"] = state
        with pytest.raises(OriginFailed) as caught:
            await origin.head("a")
        assert not isinstance(caught.value, Unreachable)
        assert "probe" in store.asked and metrics.origin_outages == 0

    play(STALE, scenario)


def test_who_hangs_when_the_outage_is_found_is_let_go() -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.hang_after, store.state = 1024, "ok"
        sink, took = Collect(), []

        async def read() -> None:
            took.append(await fails(origin.read("a", '"e"', 0, len(BODY), sink)))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read)
            await trio.sleep(1)
            store.state = "hangs"
        assert max(took) <= SILENT_S + SILENT_S + 2

    play(EIO, scenario)


@pytest.mark.parametrize("state", ["hangs", "breaks"])
def test_waiting_for_a_store(state: str) -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.state = state
        sink, done = Collect(), []

        async def read() -> None:
            await origin.read("a", '"e"', 0, len(BODY), sink, whole=True)
            done.append(trio.current_time())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await trio.sleep(25)
            assert not done
            store.state = "ok"
        assert bytes(sink.data) == BODY and done[0] <= 25 + SILENT_S + 1.1

    play(WAIT, scenario)


@pytest.mark.parametrize("how", [EIO, WAIT], ids=str)
def test_a_read_whose_last_byte_came_before_the_outage_is_done(how: OnOutage) -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.hang_after, store.bad["probe"] = len(BODY), "hangs"
        sink = Collect()
        await origin.read("a", '"e"', 0, len(BODY), sink, whole=True)
        assert bytes(sink.data) == BODY and metrics.origin_outages == metrics.origin_get == 1

    play(how, scenario)


@pytest.mark.parametrize(("then", "state"), [(Hang, "hangs"), (Transient, "breaks")])
def test_a_read_waits_for_each_outage_after_which_bytes_came(then: type[Exception], state: str) -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.then = then
        sink = Collect()
        async with trio.open_nursery() as nursery:
            for outage in range(1, 4):
                store.hang_after, store.bad["probe"] = 512 * outage, state
                if outage == 1:
                    nursery.start_soon(lambda: origin.read("a", '"e"', 0, len(BODY), sink, whole=True))
                while metrics.origin_outages < outage:  # noqa: ASYNC110
                    await trio.sleep(0.1)
                assert len(sink.data) == 512 * outage
                await trio.sleep(20)
                store.hang_after = 512 * (outage + 1) if outage < 3 else None
                store.bad.clear()
                while len(sink.data) == 512 * outage:  # noqa: ASYNC110
                    await trio.sleep(0.1)
        assert bytes(sink.data) == BODY

    play(WAIT, scenario)


def test_a_body_that_hung_goes_on_where_it_was_when_the_store_is_back() -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.hang_after = 1024
        store.bad["probe"] = "hangs"
        sink = Collect()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: origin.read("a", '"e"', 0, len(BODY), sink, whole=True))
            await trio.sleep(15)
            assert metrics.origin_outages == 1 and len(sink.data) == 1024
            store.hang_after = None
            store.bad.clear()
        assert bytes(sink.data) == BODY and metrics.origin_bytes == len(BODY)

    play(WAIT, scenario)


def test_the_deadline_counts_from_the_last_byte_of_a_body_that_breaks_often() -> None:
    class Breaking(Store):
        def read(
            self, key: str, etag: str, start: int, stop: int, whole: bool
        ) -> Generator[bytes, None, None]:
            yield BODY[start : start + 512]
            raise AskedToWait("slow down", 25)

    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        sink = Collect()
        await origin.read("a", '"e"', 0, len(BODY), sink, whole=True)
        assert bytes(sink.data) == BODY and trio.current_time() > origin._attempts.deadline_s

    play(EIO, scenario, Breaking)


def test_waiting_ends() -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.state = "breaks"
        first = await fails(origin.head("a"))
        assert 30 <= first <= 30 + SILENT_S + SILENT_S
        assert await fails(origin.head("a")) == 30

    play(WAIT, scenario)


def test_any_reply_ends_it() -> None:
    """A request that got through says as much as a probe."""

    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.state = "breaks"
        await fails(origin.head("a"))
        store.state, store.bad["probe"] = "ok", "hangs"
        await trio.sleep(1)
        assert origin.complaint
        # Writes are tried all the same.
        assert await origin._attempts.call(lambda: 7, "writing", "origin_put", "a") == 7
        assert origin.complaint == ""

    play(EIO, scenario)


def test_a_probe_that_no_thread_can_make_ends_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        store.state = "breaks"
        await fails(origin.head("a"))
        monkeypatch.undo()
        threads.none_starts(monkeypatch)
        probes = metrics.origin_list
        await trio.sleep(10)
        assert origin.complaint and metrics.origin_list == probes

    play(EIO, scenario)


def test_a_directory_whose_listing_takes_long_is_no_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of millions of names, or on a server. A probe does not list it, too."""

    def endless(*_: object, **__: object) -> None:
        raise Hang

    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        with pytest.raises(OriginFailed, match="without progress"):
            await origin.list_page("")
        assert metrics.origin_outages == 0 and metrics.origin_list > 1

    monkeypatch.setattr(LocalClient, "_sorted_names", endless)
    play(EIO, scenario, lambda: LocalClient(str(tmp_path)))


class Written(Store, Writer):
    """A store that is written to, and whose state is `breaks` after the first object."""

    limits = LIMITS

    def __init__(self) -> None:
        super().__init__()
        self.conditions = Conditions()

    @property
    def writer(self) -> Writer:  # type: ignore[override]
        return self

    def put(self, key: str, body: Body, preconditions: Preconditions) -> protocol.Written:
        self._meet("put")
        self.state = "breaks"
        return protocol.Written('"e"', 1)

    def delete(self, key: str) -> None:
        self._meet("delete")


def test_a_cancelled_write_does_not_wait_for_the_store_to_remove_its_probe() -> None:
    """The end of a mount cancels it, and would wait as long as requests may wait for the store."""

    async def scenario(origin: Origin, store: Store, metrics: Metrics) -> None:
        began = trio.current_time()
        with trio.move_on_after(30):
            await origin.put("k", InMemory(b"x"), 1, if_absent=True)
        assert metrics.origin_outages == 1
        assert trio.current_time() - began <= 30 + origin._attempts.deadline_s

    play(OnOutage("wait", 900.0), scenario, Written)
