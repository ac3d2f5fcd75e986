"""When a sink is not called any more, and a connection is given back once: with a connection that is scripted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trio
import xxhash

from cachefs.base.http1 import Reply
from cachefs.base.names import ObjectId
from cachefs.peers.client import LITTLE, Delivery, Receiver
from cachefs.peers.health import Pace
from cachefs.peers.wire import CHECKSUM, BlockRequest, PeerFailed
from tests import threads
from tests.peers.exchange import KIB, content, in_trio

BLOCK = 64 * KIB


class Full(Exception):
    pass


class Sink:
    """Takes `room` blocks, then raises."""

    def __init__(self, room: int = 1000) -> None:
        self.room, self.blocks = room, 0

    def write_block(self, data: memoryview, checksum: int) -> None:
        self.blocks += 1
        if self.blocks > self.room:
            raise Full


class Line:
    """A connection whose body is ready; counts blocks read, and how often it was taken from the pool and given back."""

    address = "peer"

    def __init__(self, data: bytes) -> None:
        self.data, self.read, self.passthrough, self.returned = data, 0, 0, 0

    def fill(self, view: memoryview) -> None:
        block = self.data[self.read * BLOCK : (self.read + 1) * BLOCK]
        view[:] = block + CHECKSUM.pack(xxhash.xxh3_64_intdigest(block))
        self.read += 1

    def read_into(self, view: memoryview) -> Iterator[int]:
        self.fill(view)
        yield from ()

    def received(self) -> int:
        return self.read * BLOCK

    def give_to_thread(self, silence_s: float) -> None:
        self.passthrough += 1

    def thread_ended(self) -> None:
        self.returned += 1


def asked(blocks: int) -> tuple[Any, BlockRequest, Reply]:
    data = content(blocks * BLOCK)
    request = BlockRequest(ObjectId("s", "k", "e", len(data)), 0, blocks, BLOCK)
    return Line(data), request, Reply(200, {}, request.body_length(False), False, 0)


async def receive(
    line: Any, head: Reply, request: BlockRequest, delivery: Delivery, *, sink_waits: bool
) -> None:
    await Receiver().blocks(
        line,
        head,
        None,
        request=request,
        delivery=delivery,
        silence_s=5,
        sink_waits=sink_waits,
        pace=Pace(),
    )


FEW, MANY = LITTLE // BLOCK, LITTLE // BLOCK + 1


def test_nothing_reaches_a_sink_behind_the_fence() -> None:
    sink = Sink(1)
    delivery = Delivery(sink)
    block = (memoryview(b"data"), 1)
    assert delivery.write(*block) and (sink.blocks, delivery.bytes) == (1, 4)
    assert not delivery.write(*block), "it has raised: there is no use in going on"
    assert isinstance(delivery.error, Full) and delivery.bytes == 4
    closed = Delivery(Sink())
    trio.run(closed.close)
    assert closed.write(*block) is False and not closed._sink.blocks  # type: ignore[attr-defined]
    assert closed.error is None and not closed.bytes


@pytest.mark.parametrize("sink_waits", [False, True])
@pytest.mark.parametrize("blocks", [FEW, MANY])
@in_trio
async def test_a_sink_that_raised_is_called_no_more_and_nothing_is_read_for_it(
    blocks: int, sink_waits: bool
) -> None:
    line, request, head = asked(blocks)
    sink = Sink(1)
    with pytest.raises(Full):
        await receive(line, head, request, Delivery(sink), sink_waits=sink_waits)
    assert sink.blocks == 2 and line.read == 2 and line.passthrough == line.returned == (blocks == MANY)
    line, request, head = asked(blocks)
    sink = Sink()
    delivery = Delivery(sink)
    await receive(line, head, request, delivery, sink_waits=sink_waits)
    assert sink.blocks == blocks and delivery.bytes == blocks * BLOCK


@in_trio
async def test_a_thread_that_begins_after_its_reader_has_gone_touches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All threads are busy; the reader gives up, and then a thread gets to it."""
    line, request, head = asked(MANY)
    sink = Sink()
    called: list[Any] = []
    reached = trio.Event()

    async def later(function: Any, *args: Any, **how: Any) -> None:
        called.append(function)
        reached.set()
        await trio.sleep_forever()

    with monkeypatch.context() as patch:
        threads.replace(patch, later)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: receive(line, head, request, Delivery(sink), sink_waits=False))
            await reached.wait()
            nursery.cancel_scope.cancel()
    assert line.passthrough == line.returned == 1
    thread = threading.Thread(target=called[0])
    thread.start()
    thread.join(30)
    assert line.returned == 1 and not line.read and not sink.blocks


@pytest.mark.parametrize("blocks", [FEW, MANY])
@in_trio
async def test_a_body_for_which_no_thread_can_be_started_is_a_failure_of_the_peer(
    blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The origin delivers it then."""
    line, request, head = asked(blocks)
    sink = Sink()
    with monkeypatch.context() as patch:
        threads.none_starts(patch)
        with pytest.raises(PeerFailed, match="no thread"):
            await receive(line, head, request, Delivery(sink), sink_waits=True)
    assert not sink.blocks and line.passthrough == line.returned
