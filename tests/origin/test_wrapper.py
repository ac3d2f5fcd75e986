"""What `Origin` adds to a client, on a scripted client: repetition, resuming, deadlines, silence after the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest
import trio

from cachefs.base.errors import (
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
)
from cachefs.base.metrics import Metrics
from cachefs.origin import ListPage, ObjectInfo, Origin, Ticket
from cachefs.origin.attempts import Attempts, Backoff
from cachefs.origin.protocol import AskedToWait
from tests.origin.reading import Collect, run, until

Step = Exception | int | Callable[[], None]
BODY = bytes(range(256)) * 40


class Scripted:
    """Each attempt takes the next step: an exception is raised; a number is how many bytes arrive before the body
    breaks; a function is called in the middle of the body."""

    writer = None

    def __init__(self, *steps: Step) -> None:
        self.steps = list(steps)
        self.asked: list[tuple[int, int, bool]] = []
        self.renewed = False
        self.renewals = 0

    def _step(self) -> Step | None:
        step = self.steps.pop(0) if self.steps else None
        if isinstance(step, Exception):
            raise step
        return step

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        self._step()
        return ListPage([], [], None)

    def head(self, key: str) -> ObjectInfo:
        self._step()
        return ObjectInfo(key, len(BODY), 1, '"e"')

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        self.asked.append((start, stop, whole))
        step = self._step()
        if isinstance(step, int):
            yield BODY[start : start + step]
            raise Transient("the connection broke")
        for at in range(start, stop, 1000):
            if callable(step) and at > start:
                step()
                step = None
            yield BODY[at : min(at + 1000, stop)]

    def renew(self, since: float) -> bool:
        self.renewals += 1
        return self.renewed

    def close(self) -> None:
        pass


def origin(client: Scripted, **options: Any) -> Origin:
    given: dict[str, Any] = {
        "metrics": Metrics(),
        "backoff": Backoff(retries=3, first_s=0.001, longest_s=0.01),
    }
    return Origin(Attempts(client, source="test://", **{**given, **options}))


def read_all(client: Scripted, **options: Any) -> tuple[bytes, Origin]:
    sink = Collect()
    there = origin(client, **options)
    run(there, lambda o: o.read("k", '"e"', 0, len(BODY), sink, whole=True))
    return bytes(sink.data), there


def test_a_broken_body_is_resumed_where_it_broke() -> None:
    client = Scripted(5000, 1, 3000)
    data, there = read_all(client)
    assert data == BODY
    end = len(BODY)
    assert client.asked == [(0, end, True), (5000, end, False), (5001, end, False), (8001, end, False)]
    metrics = there._attempts.metrics
    assert (metrics.origin_get, metrics.origin_retries, metrics.origin_bytes) == (4, 3, end)


def test_progress_renews_the_budget_and_silence_uses_it_up() -> None:
    data, _ = read_all(Scripted(*[500] * 15))
    assert data == BODY
    client = Scripted(*[0] * 20)
    with pytest.raises(OriginFailed, match=r"gave up after 4 attempts: the connection broke"):
        read_all(client)
    assert len(client.asked) == 4


@pytest.mark.parametrize("error", [NotFound("gone"), ObjectChanged("new"), PermissionDenied("no")])
def test_answers_are_not_repeated(error: Exception) -> None:
    client = Scripted(error)
    with pytest.raises(type(error), match=str(error)):
        read_all(client)
    assert len(client.asked) == 1


def test_renewed_credentials_are_tried_at_once() -> None:
    client = Scripted(PermissionDenied("expired"))
    client.renewed = True
    assert read_all(client)[0] == BODY
    client = Scripted(PermissionDenied("expired"), PermissionDenied("still"))
    client.renewed = True
    with pytest.raises(PermissionDenied, match="still"):
        read_all(client)
    assert client.renewals == 1


def test_no_thread_to_renew_the_credentials_in(monkeypatch: pytest.MonkeyPatch) -> None:
    client, begin = Scripted(PermissionDenied("expired")), trio.lowlevel.start_thread_soon
    client.renewed = True
    refused: list[bool] = []

    def start(*arguments: Any) -> None:
        if client.asked and not refused:
            refused.append(True)
            raise RuntimeError("can't start new thread")
        begin(*arguments)

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", start)
    assert read_all(client)[0] == BODY
    assert refused and client.renewals == 1


def test_throttling_lowers_the_limit_and_uses_up_no_attempts() -> None:
    data, there = read_all(Scripted(*[Throttled("slow down")] * 10), concurrency=64)
    assert data == BODY
    status = there.status()
    # Six cuts lead from 64 to 1, and the success that ended it led to 2.
    assert (
        status["concurrency"] == 2
        and status["limited_by"] == "throttled"
        and status["last_error"] == "slow down"
    )
    assert there._attempts.metrics.origin_throttled == 10


def test_the_store_says_how_long_to_wait() -> None:
    begin = time.monotonic()
    read_all(Scripted(AskedToWait("slow down", 0.2)))
    assert time.monotonic() - begin >= 0.2


def test_what_the_sink_raises_comes_back_unchanged() -> None:
    class Full(Collect):
        def write(self, data: memoryview | bytes) -> None:
            raise error

    for error in (Transient("mine, not the store's"), OSError(28, "full")):
        client = Scripted()
        with pytest.raises(type(error)) as caught:
            run(origin(client), lambda o: o.read("k", '"e"', 0, 100, Full()))
        assert caught.value is error
        assert len(client.asked) == 1


def test_a_client_that_raises_something_foreign(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OriginFailed, match="ZeroDivisionError: oops"):
        read_all(Scripted(ZeroDivisionError("oops")))
    assert "should have translated" in caplog.text


def test_a_hanging_thread_is_left_behind_and_never_heard_of_again() -> None:
    go_on = threading.Event()
    sink = Collect()
    client = Scripted(lambda: go_on.wait(10) and None)

    async def use(there: Origin) -> None:
        with pytest.raises(OriginFailed, match=r"gave up after 0\.2 s without progress"):
            await there.read("k", '"e"', 0, len(BODY), sink)
        assert len(sink.data) == 1000
        assert there.status()["in_flight"] == 0
        go_on.set()
        await until(lambda: there._attempts.threads.borrowed_tokens == 0)

    run(origin(client, deadline_s=0.2), use)
    assert len(sink.data) == 1000


def test_cancelling_waits_for_the_write_that_runs_and_allows_no_other() -> None:
    in_write, go_on = threading.Event(), threading.Event()

    class Slow(Collect):
        def write(self, data: memoryview | bytes) -> None:
            in_write.set()
            go_on.wait(10)
            super().write(data)

    sink = Slow()

    async def use(there: Origin) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(there.read, "k", '"e"', 0, len(BODY), sink)
            await trio.to_thread.run_sync(in_write.wait)
            nursery.cancel_scope.cancel()
            threading.Timer(0.1, go_on.set).start()
        assert sink.chunks == 1, "the task ended before its last write did"
        await until(lambda: there._attempts.threads.borrowed_tokens == 0)

    run(origin(Scripted()), use)
    assert sink.chunks == 1


def test_a_slow_body_outlives_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.origin.attempts.PROGRESS_S", 0.05)

    class Trickle(Scripted):
        def read(self, *args: Any) -> Generator[memoryview | bytes, None, None]:
            for chunk in super().read(*args):
                time.sleep(0.05)
                yield chunk

    assert read_all(Trickle(), deadline_s=0.25)[0] == BODY


def test_the_download_limit_spans_all_reads() -> None:
    async def use(there: Origin) -> float:
        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(there.read, "k", '"e"', 0, len(BODY), Collect())
        return trio.current_time() - begin

    took = run(origin(Scripted(), download_limit=4 * len(BODY) * 2), use)
    assert 0.35 <= took < 2


def test_too_many_or_too_few_bytes_are_an_error_not_data() -> None:
    class Wrong(Scripted):
        def __init__(self, extra: int) -> None:
            super().__init__()
            self.extra = extra

        def read(self, *args: Any) -> Generator[memoryview | bytes, None, None]:
            yield bytes(args[3] - args[2] + self.extra)

    sink = Collect()
    with pytest.raises(OriginFailed, match="more bytes than were asked for"):
        run(origin(Wrong(1)), lambda o: o.read("k", '"e"', 0, 100, sink))
    assert sink.data == b""


class Slow(Scripted):
    """Answers when told, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()
        self.order: list[str] = []

    def read(self, key: str, *rest: Any) -> Generator[memoryview | bytes, None, None]:
        self.release.wait(10)
        self.order.append(key)
        yield bytes(rest[2] - rest[1])


@pytest.mark.parametrize(
    "promoted, order",
    [
        ("", ["first", "wanted", "ahead1", "ahead2"]),
        ("ahead2", ["first", "wanted", "ahead2", "ahead1"]),
    ],
)
def test_background_work_waits_behind_demand_until_a_reader_waits_for_it(
    promoted: str, order: list[str]
) -> None:
    client = Slow()

    async def use(there: Origin) -> None:
        tickets = {key: Ticket(key.startswith("ahead")) for key in ("first", "ahead1", "ahead2", "wanted")}
        async with trio.open_nursery() as nursery:
            for key, ticket in tickets.items():
                nursery.start_soon(lambda k=key, t=ticket: there.read(k, "e", 0, 9, Collect(), ticket=t))
                await trio.sleep(0.02)
            status = there.status()
            assert (status["demand_waiting"], status["background_waiting"]) == (1, 2)
            if promoted:
                tickets[promoted].promote()
                assert there.status()["demand_waiting"] == 2
            client.release.set()

    run(origin(client, concurrency=1), use)
    assert client.order == order
