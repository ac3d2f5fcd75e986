"""What comes back: heads, small bodies, and blocks, each checked before it goes on to a sink.

A little body is received by the trio task: for 100 KB that costs less than the hop to a worker thread (measured: twice as
many a second). Longer ones are a thread's, because at gigabytes a second the event loop would do nothing but copy
(measured: twice as fast with eight at once).
"""

from __future__ import annotations

import hmac
import time
from collections import deque
from typing import NamedTuple, TypeVar

import trio
import xxhash

from cachefs.peers.auth import Seals
from cachefs.peers.connection import READ, Connection, Steps
from cachefs.peers.heads import Head
from cachefs.peers.pace import LOOK_EVERY_S, Pace
from cachefs.peers.protocol import PeerFailed, Sink
from cachefs.peers.wire import CHECKSUM, MAX_SMALL_BODY, SEAL_BYTES, BlockRequest

T = TypeVar("T")

THREADS = 64
"""Long bodies received at once, from all peers; each holds a buffer of one block."""

LITTLE = 256 << 10
"""Bytes of a body that the trio task receives itself. Derived: about 0.1 ms, as long as the hop to a thread takes."""

SPARE_BUFFERS = 16
"""Kept between requests."""


class Checked(NamedTuple):
    """A block as it was received, valid until the next one is, and its checksum, which was compared."""

    data: memoryview
    checksum: int


class Delivery:
    """A sink, behind a fence. Touched by whoever writes (a worker thread, or the trio task) and by the task (`close`).

    The flags need no lock: each has one writer. `_writing` is raised *before* `_closed` is looked at, and `_closed` set
    before `_writing` is looked at, so one of the two sides sees the other."""

    def __init__(self, sink: Sink) -> None:
        self.bytes = 0
        self.error: Exception | None = None
        """What the sink raised."""
        self._sink = sink
        self._wrote_s = 0.0
        self._since: float | None = None  # when the write that runs now began
        self._writing = False
        self._closed = False

    def write(self, block: Checked) -> bool:
        """False when there is no use in going on."""
        self._writing = True
        self._since = since = time.monotonic()
        try:
            if self._closed:
                return False
            self._sink.write_block(*block)
            self.bytes += len(block.data)
        except Exception as exc:
            self.error = exc
            return False
        finally:
            self._since = None
            self._wrote_s += time.monotonic() - since
            self._writing = False
        return True

    def in_sink_s(self) -> float:
        """Seconds that the sink took so far: they are not the peer's."""
        since = self._since
        return self._wrote_s + (time.monotonic() - since if since is not None else 0.0)

    async def close(self) -> None:
        """The sink is not called after this. A write that runs now is waited for."""
        self._closed = True
        while self._writing:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.001)


class Receiver:
    """Buffers and threads, bounded, for all requests of one client."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(THREADS)
        self._buffers: deque[bytearray] = deque(maxlen=SPARE_BUFFERS)
        self._little: deque[bytearray] = deque(maxlen=SPARE_BUFFERS)

    async def blocks(
        self,
        connection: Connection,
        head: Head,
        request: BlockRequest,
        seals: Seals | None,
        delivery: Delivery,
        *,
        silence_s: float,
        sink_waits: bool,
        pace: Pace,
    ) -> None:
        """Deliver the body of a blocks reply. The sink is not called any more once this ends, in whatever way; what it
        raised is raised."""
        check_seal(connection, head, seals, b"")
        if head.length != request.body_length(seals is not None):
            raise PeerFailed("corrupt", f"{connection.address}: a reply of {head.length} bytes")
        if request.stop - request.start > LITTLE:
            await self._in_thread(connection, request, seals, delivery, silence_s, pace)
        else:
            await self._here(connection, request, seals, delivery, silence_s, sink_waits, pace)
        if delivery.error is not None:
            raise delivery.error

    async def _here(
        self,
        connection: Connection,
        request: BlockRequest,
        seals: Seals | None,
        delivery: Delivery,
        silence_s: float,
        sink_waits: bool,
        pace: Pace,
    ) -> None:
        left_s = min(pace.allowed_s(request.stop - request.start), pace.patience_s)
        buffer = _buffer(self._little, LITTLE + CHECKSUM.size + SEAL_BYTES)
        try:
            view, check = memoryview(buffer), _check_bytes(seals)
            for index in range(request.start_block, request.stop_block):
                received = view[: request.length(index) + check]
                for step in connection.read_into(received):
                    since = trio.current_time()
                    with trio.move_on_after(min(silence_s, left_s)) as scope:
                        await ready(connection, step)
                    left_s -= trio.current_time() - since
                    if scope.cancelled_caught:
                        raise connection.silent() if left_s > 0 else connection.slow()
                block = checked(connection, index, received, seals)
                if not sink_waits:
                    delivery.write(block)
                else:
                    await trio.to_thread.run_sync(
                        delivery.write, block, abandon_on_cancel=True, limiter=self._threads
                    )
                if delivery.error is not None:
                    return
        finally:
            await delivery.close()
            self._little.append(buffer)

    async def _in_thread(
        self,
        connection: Connection,
        request: BlockRequest,
        seals: Seals | None,
        delivery: Delivery,
        silence_s: float,
        pace: Pace,
    ) -> None:
        size, slow = request.stop - request.start, False

        async def watch(scope: trio.CancelScope) -> None:
            nonlocal slow
            before, complete, complete_s = connection.received(), 0, 0.0
            while claim:  # noqa: ASYNC110 - it waits for a thread, which sets no event
                await trio.sleep(LOOK_EVERY_S)
            begun = trio.current_time()
            while not slow:
                await trio.sleep(LOOK_EVERY_S)
                elapsed_s = trio.current_time() - begun - delivery.in_sink_s()
                if delivery.bytes != complete:
                    complete, complete_s = delivery.bytes, elapsed_s
                received = max(complete, connection.received() - before)
                slow = pace.too_slow(size, received, elapsed_s, elapsed_s - complete_s)
            scope.cancel()

        claim = [connection]  # taken by the thread when it begins, or below when it never did

        def receive() -> None:
            try:
                claim.pop()
            except IndexError:
                return
            try:
                buffer = _buffer(self._buffers, request.block_size + CHECKSUM.size + SEAL_BYTES)
                view, check = memoryview(buffer), _check_bytes(seals)
                for block in range(request.start_block, request.stop_block):
                    received = view[: request.length(block) + check]
                    connection.fill(received)
                    if not delivery.write(checked(connection, block, received, seals)):
                        return
                self._buffers.append(buffer)  # but for one of a reply that failed
            finally:
                connection.give_back()

        connection.lend(silence_s)
        failure: Exception | None = None
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, nursery.cancel_scope)
                try:
                    await trio.to_thread.run_sync(receive, abandon_on_cancel=True, limiter=self._threads)
                except Exception as exc:
                    failure = exc  # without a group around it
                nursery.cancel_scope.cancel()
        finally:
            try:
                claim.pop().give_back()
            except IndexError:
                pass
            await delivery.close()
        if failure is not None:
            raise failure
        if slow:
            raise connection.slow()


def _buffer(spare: deque[bytearray], size: int) -> bytearray:
    """One that was used before, or a new one. From any thread."""
    try:
        buffer = spare.pop()
    except IndexError:
        return bytearray(size)
    return buffer if len(buffer) >= size else bytearray(size)


def _check_bytes(seals: Seals | None) -> int:
    """What follows each block."""
    return CHECKSUM.size + (SEAL_BYTES if seals is not None else 0)


def checked(connection: Connection, block: int, received: memoryview, seals: Seals | None) -> Checked:
    """What was received as a block, if it is right. Raises `PeerFailed`."""
    length = len(received) - _check_bytes(seals)
    data, said = received[:length], bytes(received[length:])
    checksum = xxhash.xxh3_64_intdigest(data)
    packed = CHECKSUM.pack(checksum)
    if said[: CHECKSUM.size] != packed:
        raise PeerFailed("corrupt", f"{connection.address}: block {block} does not match its checksum")
    if seals is not None and not hmac.compare_digest(seals.block(block, packed), said[CHECKSUM.size :]):
        raise PeerFailed("corrupt", f"{connection.address}: block {block} is not signed with our key")
    return Checked(data, checksum)


async def small_body(connection: Connection, head: Head, seals: Seals | None, deadline_s: float) -> bytes:
    """Of a reply that is not blocks, its seal checked. Without one, a peer may only refuse: it cannot seal what it says to
    somebody whose request it does not believe."""
    if head.length > MAX_SMALL_BODY:
        raise PeerFailed("corrupt", f"{connection.address}: a reply of {head.length} bytes")
    body = bytearray(head.length)
    await drive(connection, connection.read_into(memoryview(body)), deadline_s)
    if head.status not in (400, 401, 431):
        check_seal(connection, head, seals, bytes(body))
    return bytes(body)


def check_seal(connection: Connection, head: Head, seals: Seals | None, body: bytes) -> None:
    """Raises `PeerFailed` unless the head carries the seal it must."""
    if seals is None:
        return
    seal = seals.reply(head.status, head.length, body)
    if not hmac.compare_digest(seal.encode(), head.seal.encode()):
        raise PeerFailed("refused", f"{connection.address}: the reply is not signed with our key")


async def drive(connection: Connection, steps: Steps[T], deadline_s: float) -> T:
    """To the end, which must come within the deadline."""
    with trio.move_on_after(deadline_s):
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            await ready(connection, step)
    raise connection.silent()


async def ready(connection: Connection, step: int) -> None:
    if step == READ:
        await trio.lowlevel.wait_readable(connection.fileno())
    else:
        await trio.lowlevel.wait_writable(connection.fileno())
