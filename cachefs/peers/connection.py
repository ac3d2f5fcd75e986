"""The client's end of a connection: requests out; heads, small bodies and blocks in, each block checked before it goes to a
sink.

Socket operations are generators that yield what they wait for. A trio task drives them, so a request, the head of its reply
and a body up to `LITTLE` cost no thread: for 100 KB that costs less than the hop to a worker thread (measured: twice as many
a second). A longer body is received by a worker thread, because at gigabytes a second the event loop would do nothing but
copy (measured: twice as fast with eight at once). The thread waits in the kernel: one call for some hundred KiB, where a
non-blocking socket takes several calls and polls, each of them another fight over the interpreter's lock (measured, with
what `SCOOP_BYTES` saves: a quarter of what an extent costs both sides).
"""

from __future__ import annotations

import hmac
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Generator
from typing import NamedTuple, TypeAlias, TypeVar

import trio
import xxhash

from cachefs.base.http1 import NotHttp, Reply, parse_reply, spell_request
from cachefs.peers.auth import Macs
from cachefs.peers.health import LOOK_EVERY_S, Pace
from cachefs.peers.wire import (
    CHECKSUM,
    MAC,
    MAC_BYTES,
    MAX_SMALL_BODY,
    WORKING,
    Address,
    BlockRequest,
    PeerFailed,
    Sink,
)

READ_BYTES = 16 << 10
"""Of a head at once; bytes of the body that come with it are copied once more."""

SCOOP_BYTES = 256 << 10
"""A thread that receives a block is woken for that many more bytes. Measured, of all that an extent costs both sides: a
sixth less than when any byte wakes it, as with 512 KiB; 64 KiB save a twelfth."""

THREADS = 64
"""Long bodies received at once, from all peers; each holds a buffer of one block."""

LITTLE = 256 << 10
"""Bytes of a body that the trio task receives itself. Derived: about 0.1 ms, as long as the hop to a thread takes."""

SPARE_BUFFERS = 16
"""Kept between requests."""

READ, WRITE = select.POLLIN, select.POLLOUT
ALIVE = 0
"""Nothing to wait for: the peer has sent a sign of life."""

_TIMEVAL = struct.Struct("@ll")
_BYTES_RECEIVED = struct.Struct("@128xQ")
"""The end of the used part of `struct tcp_info` (linux/tcp.h), tcpi_bytes_received."""

T = TypeVar("T")
Steps: TypeAlias = Generator[int, None, T]
"""Yields `READ` or `WRITE`: continue when the socket is ready for that. Only `Connection.ask` yields `ALIVE`."""


class Connection:
    """To one peer. Everything that reads or writes raises only `PeerFailed`."""

    def __init__(self, sock: socket.socket, address: Address, tls: ssl.SSLContext | None = None) -> None:
        """Takes over a connected, non-blocking socket. `shake_hands` comes first."""
        self._socket = sock
        self._tls = tls
        self.address = address
        self._early = memoryview(b"")  # of the body, received with the head
        self.used = False
        """It has brought a reply."""
        self._handed_over = False
        self._silence_s = 0.0
        self._unwanted = False

    def shake_hands(self) -> Steps[None]:
        """Set up TLS, if it is used."""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                return
            secure = self._tls.wrap_socket(
                self._socket, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            self._socket = secure
            while True:
                try:
                    secure.do_handshake()
                except ssl.SSLWantReadError:
                    yield READ
                except ssl.SSLWantWriteError:
                    yield WRITE
                else:
                    return
        except OSError as exc:
            raise self._lost(exc, trusted=False) from exc

    def ask(self, target: str, authorization: str | None) -> Steps[Reply]:
        """Send a request and receive the head of its reply."""
        headers = {"Host": str(self.address)}
        if authorization is not None:
            headers["Authorization"] = authorization
        request, received = spell_request(target, headers), b""
        try:
            while request:
                try:
                    request = request[self._socket.send(request) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    yield WRITE
                except ssl.SSLWantReadError:
                    yield READ
            yield READ
            while True:
                while received.startswith(WORKING) or (
                    (reply := parse_reply(received)) is not None and reply.status < 200
                ):
                    received = received[received.index(b"\r\n\r\n") + 4 :]
                    yield ALIVE
                if reply is not None:
                    break
                try:
                    more = self._socket.recv(READ_BYTES)
                except (BlockingIOError, ssl.SSLWantReadError):
                    yield READ
                    continue
                if not more:
                    raise PeerFailed("reset", f"{self.address} hung up")
                received += more
        except NotHttp as exc:
            raise PeerFailed("refused", f"{self.address} does not speak this protocol") from exc
        except OSError as exc:
            raise self._lost(exc, trusted=False) from exc
        self._early = memoryview(received)[reply.stop :]
        return reply

    def read_into(self, view: memoryview) -> Steps[None]:
        """Fill `view` with the next bytes of the body."""
        at = self._take_early(view)
        while at < len(view):
            try:
                count = self._socket.recv_into(view[at:])
            except (BlockingIOError, ssl.SSLWantReadError):
                yield READ
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            if not count:
                raise self._broken_off()
            at += count

    def fill(self, view: memoryview) -> None:
        """`read_into` for a worker thread, between `hand_over` and `take_back`. Raises after a silence of what was given to
        `hand_over`, or up to twice that."""
        if self._tls is not None:
            for event in self.read_into(view):
                self._wait(event)
            return
        at, scoops = self._take_early(view), len(view) - SCOOP_BYTES
        if at < scoops:
            # Never more than is to come: behind these bytes there are as many that the server sends with them.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, SCOOP_BYTES)
            at = self._receive(view, at, scoops)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._receive(view, at, len(view))

    def _receive(self, view: memoryview, at: int, stop: int) -> int:
        """Fill [at, stop) of `view` from a blocking socket. Returns `stop`."""
        while at < stop:
            try:
                count = self._socket.recv_into(view[at:stop], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise self.silent() from None
            except OSError as exc:
                raise self._lost(exc) from exc
            if not count:
                raise self._broken_off()
            at += count
        return at

    def _broken_off(self) -> PeerFailed:
        return PeerFailed("reset", f"{self.address} hung up within its reply")

    def _take_early(self, view: memoryview) -> int:
        early = self._early[: len(view)]
        view[: len(early)] = early
        self._early = self._early[len(early) :]
        return len(early)

    def fileno(self) -> int:
        return self._socket.fileno()

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(self._silence_s * 1000):
            raise self.silent()

    def silent(self) -> PeerFailed:
        return PeerFailed("timeout", f"{self.address} was silent for too long")

    def slow(self) -> PeerFailed:
        return PeerFailed("slow", f"{self.address} sends much more slowly than the origin")

    def received(self) -> int:
        """Bytes that the kernel has received on this connection so far, unread ones included."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        count: int = _BYTES_RECEIVED.unpack(info)[0]
        return count

    def quiet(self) -> bool:
        """True if nothing has come beyond the body, neither bytes nor an end: then another request may follow."""
        if self._early or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return False
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK)  # below TLS
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def hand_over(self, silence_s: float) -> None:
        """To a worker thread, which calls `fill` and `take_back`."""
        self._handed_over = True
        self._silence_s = silence_s
        if self._tls is None:  # with TLS, `_wait` does the waiting
            silence = _TIMEVAL.pack(*divmod(int(silence_s * 1e6), 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
            self._socket.setblocking(True)

    def take_back(self) -> None:
        """From the worker thread. It clears its flag before it reads the other one, so one of the two sides closes."""
        self._socket.setblocking(False)
        self._handed_over = False
        if self._unwanted:
            self._socket.close()

    def close(self) -> None:
        """Close the socket. While a worker thread has it: shut it down, so that the thread ends at once, and let `take_back`
        close it. A descriptor that a thread waits on must not be closed, and perhaps reused for another file."""
        self._unwanted = True
        if self._handed_over:
            try:
                socket.socket.shutdown(
                    self._socket, socket.SHUT_RDWR
                )  # not TLS's, which would touch its state
            except OSError:
                pass
        else:
            self._socket.close()

    def _lost(self, exc: OSError, *, trusted: bool = True) -> PeerFailed:
        if isinstance(exc, ssl.SSLError) and not trusted and not isinstance(exc, ssl.SSLEOFError):
            # Also while waiting for a head: in TLS 1.3 a server judges our certificate after the handshake.
            return PeerFailed("refused", f"{self.address}: TLS: {exc.reason or exc}")
        return PeerFailed("reset", f"{self.address}: {exc.strerror or exc}")


class Checked(NamedTuple):
    """A received block, valid until the next one is received, and its checksum, which matched."""

    data: memoryview
    checksum: int


class Delivery:
    """A sink that can be closed while another thread writes to it. One writer (a worker thread, or the trio task) calls
    `write`, the task calls `close`.

    The flags need no lock: each has one writer. `write` sets `_writing` *before* it reads `_closed`, and `close` sets
    `_closed` before it reads `_writing`, so one of the two sides sees the other."""

    def __init__(self, sink: Sink) -> None:
        self.bytes = 0
        self.error: Exception | None = None
        """What the sink raised."""
        self._sink = sink
        self._wrote_s = 0.0
        self._since: float | None = None  # begin of the write that runs now
        self._writing = False
        self._closed = False

    def write(self, block: Checked) -> bool:
        """False when the transfer should stop."""
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
        """Seconds spent in the sink so far: they are not the peer's."""
        since = self._since
        return self._wrote_s + (time.monotonic() - since if since is not None else 0.0)

    async def close(self) -> None:
        """Wait for a write that runs now. The sink is not called after this."""
        self._closed = True
        while self._writing:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.001)


class _Body(NamedTuple):
    """The blocks of one reply, where they come from and go to."""

    connection: Connection
    request: BlockRequest
    macs: Macs | None
    delivery: Delivery


class Receiver:
    """Buffers and threads, bounded, for all requests of one client."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(THREADS)
        self._buffers: deque[bytearray] = deque(maxlen=SPARE_BUFFERS)
        self._little: deque[bytearray] = deque(maxlen=SPARE_BUFFERS)

    async def blocks(
        self,
        connection: Connection,
        head: Reply,
        request: BlockRequest,
        macs: Macs | None,
        delivery: Delivery,
        *,
        silence_s: float,
        sink_waits: bool,
        pace: Pace,
    ) -> None:
        """Deliver the body of a blocks reply. Once this has returned or raised, the sink is not and will not be called; what
        the sink raised is raised."""
        check_mac(connection, head, macs, b"")
        body = _Body(connection, request, macs, delivery)
        if head.length != request.body_length(macs is not None):
            raise PeerFailed("corrupt", f"{connection.address}: a reply of {head.length} bytes")
        if request.stop - request.start > LITTLE:
            await self._in_thread(body, silence_s, pace)
        else:
            await self._here(body, silence_s, sink_waits, pace)
        if delivery.error is not None:
            raise delivery.error

    async def _here(self, body: _Body, silence_s: float, sink_waits: bool, pace: Pace) -> None:
        connection, request, macs, delivery = body
        left_s = min(pace.allowed_s(request.stop - request.start), pace.patience_s)
        buffer = _buffer(self._little, LITTLE + CHECKSUM.size + MAC_BYTES)
        try:
            view, check = memoryview(buffer), _check_bytes(macs)
            for index in range(request.start_block, request.stop_block):
                received = view[: request.length(index) + check]
                for step in connection.read_into(received):
                    since = trio.current_time()
                    with trio.move_on_after(min(silence_s, left_s)) as scope:
                        await ready(connection, step)
                    left_s -= trio.current_time() - since
                    if scope.cancelled_caught:
                        raise connection.silent() if left_s > 0 else connection.slow()
                block = checked(connection, index, received, macs)
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

    async def _in_thread(self, body: _Body, silence_s: float, pace: Pace) -> None:
        connection, request, macs, delivery = body
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

        claim = [connection]  # popped by the thread when it begins, or below when it never did

        def receive() -> None:
            try:
                claim.pop()
            except IndexError:
                return
            try:
                buffer = _buffer(self._buffers, request.block_size + CHECKSUM.size + MAC_BYTES)
                view, check = memoryview(buffer), _check_bytes(macs)
                for block in range(request.start_block, request.stop_block):
                    received = view[: request.length(block) + check]
                    connection.fill(received)
                    if not delivery.write(checked(connection, block, received, macs)):
                        return
                self._buffers.append(buffer)  # not after a failure
            finally:
                connection.take_back()

        connection.hand_over(silence_s)
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
                claim.pop().take_back()
            except IndexError:
                pass
            await delivery.close()
        if failure is not None:
            raise failure
        if slow:
            raise connection.slow()


def _buffer(spare: deque[bytearray], size: int) -> bytearray:
    """A spare buffer, or a new one. From any thread."""
    try:
        buffer = spare.pop()
    except IndexError:
        return bytearray(size)
    return buffer if len(buffer) >= size else bytearray(size)


def _check_bytes(macs: Macs | None) -> int:
    """Bytes that follow each block."""
    return CHECKSUM.size + (MAC_BYTES if macs is not None else 0)


def checked(connection: Connection, block: int, received: memoryview, macs: Macs | None) -> Checked:
    """The block in `received`, which ends in its check. Raises `PeerFailed` if they do not match."""
    length = len(received) - _check_bytes(macs)
    data, said = received[:length], bytes(received[length:])
    checksum = xxhash.xxh3_64_intdigest(data)
    packed = CHECKSUM.pack(checksum)
    if said[: CHECKSUM.size] != packed:
        raise PeerFailed("corrupt", f"{connection.address}: block {block} does not match its checksum")
    if macs is not None and not hmac.compare_digest(macs.block(block, packed), said[CHECKSUM.size :]):
        raise PeerFailed("corrupt", f"{connection.address}: block {block} is not signed with our key")
    return Checked(data, checksum)


async def small_body(connection: Connection, head: Reply, macs: Macs | None, deadline_s: float) -> bytes:
    """The body of a reply that is not blocks, its MAC checked. A refusal may come without a MAC: a server cannot sign for a
    request that it does not accept."""
    if head.length > MAX_SMALL_BODY:
        raise PeerFailed("corrupt", f"{connection.address}: a reply of {head.length} bytes")
    body = bytearray(head.length)
    await drive(connection, connection.read_into(memoryview(body)), deadline_s)
    if head.status not in (400, 401, 431):
        check_mac(connection, head, macs, bytes(body))
    return bytes(body)


def check_mac(connection: Connection, head: Reply, macs: Macs | None, body: bytes) -> None:
    """Raises `PeerFailed` unless the head carries the MAC of this reply."""
    if macs is None:
        return
    mac = macs.reply(head.status, head.length, body)
    if not hmac.compare_digest(mac.encode(), head.headers.get(MAC.lower(), "").encode()):
        raise PeerFailed("refused", f"{connection.address}: the reply is not signed with our key")


async def drive(connection: Connection, steps: Steps[T], deadline_s: float) -> T:
    """Run the generator to its end, within the deadline. Raises `PeerFailed`."""
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
