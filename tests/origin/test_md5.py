"""Whole objects are compared with etags that are MD5s: real sockets, and a server that changes bytes on their way."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.lab.dataset import content as bytes_of
from cachefs.base.errors import OriginFailed, Transient
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.fetch import Fetcher
from cachefs.origin import Origin, http, open_origin
from cachefs.store import open_store
from tests.fetch.scripted import in_trio
from tests.origin.reading import Collect, run
from tests.origin.servers import QUICK, Lab
from tests.origin.test_transport import DATE, Server, Wire
from tests.origin.test_transport import serve as serve  # a fixture
from tests.store.lab import MIB

SIZE = 100_000
BODY = bytes_of("compared", SIZE)


def etag_of(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def damaged(data: bytes, at: int = 777) -> bytes:
    return data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]


def opened(server: Server, **options: Any) -> Origin:
    return open_origin(server.url, metrics=Metrics(), backoff=QUICK, stall_s=5.0, **options)


def compared_by(origin: Origin) -> http.Md5Etags:
    assert origin.md5 is not None
    return origin.md5


async def read(origin: Origin, size: int = SIZE, key: str = "k", etag: str = etag_of(BODY)) -> bytes:
    sink = Collect()
    await origin.read(key, etag, 0, size, sink, whole=True)
    return bytes(sink.data)


def replies(*bodies: bytes, etag: str = etag_of(BODY), more: str = "") -> Callable[[Wire, bytes], None]:
    """Answers the n-th request with the n-th body, and from the last on with the last."""
    left = list(bodies)

    def answer(wire: Wire, head: bytes) -> None:
        wire.reply(left.pop(0) if len(left) > 1 else left[0], more=f"ETag: {etag}\r\n{DATE}{more}")

    return answer


@pytest.mark.parametrize("at", [0, 777, SIZE - 1])
def test_bytes_that_were_changed_on_their_way_are_fetched_again(
    serve: Callable[..., Server], at: int
) -> None:
    server = serve(replies(damaged(BODY, at), BODY))
    origin = opened(server)

    async def use(there: Origin) -> None:
        assert await read(there) == BODY
        assert (compared_by(there).compared, compared_by(there).unlike) == (2, 1)
        assert there._attempts.metrics.origin_get == len(server.heads) == 2
        assert there._attempts.metrics.origin_bytes == SIZE  # no reader got any of the others

    run(origin, use)


def test_bytes_that_come_otherwise_each_time_are_an_error(serve: Callable[..., Server]) -> None:
    server = serve(replies(*(damaged(BODY, at) for at in range(10))))

    async def use(there: Origin) -> None:
        with pytest.raises(OriginFailed, match="not those of its etag"):
            await read(there)
        assert there._attempts.metrics.origin_bytes == 0

    run(opened(server), use)


def test_the_small_file_of_a_mount_is_compared_before_its_reader_has_any_of_it(
    serve: Callable[..., Server], cache_dir: Path
) -> None:
    """The way without a task."""
    server = serve(replies(damaged(BODY), BODY))

    async def play() -> None:
        metrics, origin = Metrics(), opened(server)
        cache = open_store(cache_dir, 64 * MIB, 32 * MIB, 0, MIB, "first", metrics)
        try:
            async with trio.open_nursery() as nursery:
                fetcher = Fetcher(cache.store, nursery, metrics, max_readahead=8 * MIB)
                opened_file = fetcher.open(origin, ObjectId(origin.source, "k", etag_of(BODY), SIZE))
                assert bytes(await fetcher.read(opened_file, 0, 4096, 1)) == BODY[:4096]
                assert bytes(await fetcher.read(opened_file, 0, SIZE, 1)) == BODY
                fetcher.close(opened_file)
                assert len(server.heads) == 2 and compared_by(origin).unlike == 1
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await cache.store.aclose(0)
                await origin.aclose()

    in_trio(play)()


@pytest.mark.parametrize(
    ("verify", "size", "compared"),
    [
        ("first", 1, True),
        ("first", http.LARGEST_COMPARED, True),
        ("first", http.LARGEST_COMPARED + 1, False),
        ("full", http.LARGEST_COMPARED_OF_ALL, True),
        ("full", http.LARGEST_COMPARED_OF_ALL + 1, False),
        ("none", 1, False),
    ],
)
def test_which_objects_are_compared(
    serve: Callable[..., Server], verify: str, size: int, compared: bool
) -> None:
    body = bytes_of("size", size)
    server = serve(replies(damaged(body, size // 2), body, etag=etag_of(body)))

    async def use(there: Origin) -> None:
        came = await read(there, size, etag=etag_of(body))
        assert (came == body) == compared
        assert len(server.heads) == 1 + compared

    run(opened(server, verify=verify), use)


def test_a_part_of_an_object_is_not_compared(serve: Callable[..., Server]) -> None:
    def answer(wire: Wire, head: bytes) -> None:
        more = f"ETag: {etag_of(BODY)}\r\n{DATE}Content-Range: bytes 0-99/{SIZE}\r\n"
        wire.reply(BODY[:100], "206 Partial Content", more)

    server = serve(answer)

    async def use(there: Origin) -> None:
        sink = Collect()
        await there.read("k", etag_of(BODY), 0, 100, sink)
        assert bytes(sink.data) == BODY[:100] and not compared_by(there).compared

    run(opened(server), use)


@pytest.mark.parametrize("header", sorted(http.ENCRYPTED))
def test_an_object_that_is_encrypted_with_a_key_has_another_etag(
    serve: Callable[..., Server], header: str
) -> None:
    server = serve(replies(damaged(BODY), more=f"{header.title()}: something\r\n"))

    async def use(there: Origin) -> None:
        assert await read(there) == damaged(BODY)
        assert len(server.heads) == 1 and not compared_by(there).compared

    run(opened(server), use)


def test_an_origin_whose_etags_only_look_like_md5s_costs_a_twentieth_more_requests_for_a_hundred_files(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    server = serve(replies(damaged(BODY)))

    async def use(there: Origin) -> None:
        for number in range(100):
            assert await read(there, key=str(number)) == damaged(BODY)
        assert len(server.heads) <= 100 + 100 // 20
        assert "not compared with their etags any more" in caplog.text
        assert f"{http.UNLIKE} in a row" in caplog.text

    run(opened(server), use)


def test_a_damaged_object_and_its_copy_do_not_end_the_comparison(serve: Callable[..., Server]) -> None:
    """Two in a row. What the network changes afterwards is still found."""
    bad = damaged(BODY, 1)
    server = serve(replies(bad, bad, bad, bad, damaged(BODY), BODY))

    async def use(there: Origin) -> None:
        assert [await read(there, key=key) for key in ("bad", "copy")] == [bad, bad]
        assert await read(there, key="good") == BODY

    run(opened(server), use)


def test_an_object_that_is_damaged_at_its_origin_is_told_of_and_ends_no_comparison(
    serve: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    def answer(wire: Wire, head: bytes) -> None:
        wire.reply(damaged(BODY) if b"/bad" in head else BODY, more=f"ETag: {etag_of(BODY)}\r\n{DATE}")

    server = serve(answer)

    async def use(there: Origin) -> None:
        assert await read(there, key="good") == BODY
        for number in range(2 * http.UNLIKE):
            assert await read(there, key=f"bad{number}") == damaged(BODY)
            assert await read(there, key="good") == BODY
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(told) == 1 and "bad0: the origin has other bytes than its etag says" in told[0]
        compared = compared_by(there).compared
        assert await read(there, key="good") == BODY and compared_by(there).compared == compared + 1

    run(opened(server), use)


@pytest.mark.long
def test_beyond_its_share_of_a_processor_only_some_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(http.time, "monotonic", lambda: now)  # type: ignore[attr-defined]
    some, every = http.Md5Etags(), http.Md5Etags()
    every.verify("full")
    chosen = 0
    for _ in range(10_000):  # 1,000 files of 100 KB a second
        now += 0.001
        chosen += bool(some.choose("k", etag_of(BODY), SIZE))
        assert every.choose("k", etag_of(BODY), SIZE)
    assert chosen * SIZE == pytest.approx(11 * http.HASHED_PER_S, rel=0.02)
    for _ in range(1_000):  # 100 a second
        now += 0.01
        chosen -= bool(some.choose("k", etag_of(BODY), SIZE))
    assert chosen * SIZE == pytest.approx(11 * http.HASHED_PER_S - 1_000 * SIZE, rel=0.02)


def test_so_many_objects_are_remembered_until_they_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_REFUSED", 3)
    md5s = http.Md5Etags()
    for number in range(10):
        with pytest.raises(Transient):
            md5s.compare(f"{number}", "name", etag_of(BODY).strip('"'), damaged(BODY))
        assert len(md5s._refused) == number % 3 + 1


@pytest.mark.long
def test_an_object_that_comes_slowly_and_is_held_back_keeps_its_deadline(
    serve: Callable[..., Server],
) -> None:
    """It takes twice the deadline, and no byte reaches the reader before the last."""
    pieces = 8

    def answer(wire: Wire, head: bytes) -> None:
        if b"GET /k " not in head:
            return wire.reply(b"")  # to a probe: is it there at all?
        wire.send(f"HTTP/1.1 200 OK\r\nETag: {etag_of(BODY)}\r\n{DATE}Content-Length: {SIZE}\r\n\r\n")
        for at in range(pieces):
            wire.send("", BODY[at * SIZE // pieces : (at + 1) * SIZE // pieces])
            gone.wait(0.5)

    gone = threading.Event()
    server = serve(answer)

    async def use(there: Origin) -> None:
        assert await read(there) == BODY
        assert sum(b"GET /k " in head for head in server.heads) == 1

    run(opened(server, deadline_s=2.0), use)


def test_an_object_of_the_lab_store_is_compared(lab: Lab) -> None:
    lab.put("file", BODY)

    async def use(there: Origin) -> None:
        info = await there.head("file")
        assert await read(there, key="file", etag=info.etag) == BODY
        assert (there.status()["compared"], there.status()["unlike_etag"]) == (1, 0)

    run(lab.origin(), use)
