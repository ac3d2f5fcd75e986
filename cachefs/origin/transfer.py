"""One transfer: the bytes of one range, from a client into a sink or from a source into a client's request, across all its
attempts.

Two parties touch it: a thread that moves bytes (the HTTP client's, or a worker) and the trio task that waits for it. The
flags below need no lock: each has one writer, and the interpreter shows their order to both sides. The thread sets `_busy`
*before* it reads `_closed`; the task sets `_closed` before it reads `_busy`. So either the thread sees that the transfer is
closed, or the task sees that a write (or a read of the source) is running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import trio

from cachefs.base.errors import OriginFailed, Transient
from cachefs.base.ledger import Account
from cachefs.origin.gate import Gate, Ticket
from cachefs.origin.protocol import Sink, Source
from cachefs.origin.rates import RateLimit

T = TypeVar("T")

PROGRESS_S = 1.0
"""Seconds between two reports of a running transfer, which push its deadline back. Derived: a call into trio costs about 0.1
ms, so once a second is free, and a deadline is many seconds."""

CHUNK = 128 << 10
"""Bytes that are read from a source and handed to a connection at once. Derived: a connection waits as long for a chunk
to be taken as for being made (5 s), which at this size is 25 kB/s."""


class Transfer:
    """What both directions share. `position` counts bytes that went by; `counted` and `accounts` belong to `Attempts`.
    `on_progress` is called on the trio thread, about once a second, while bytes go by."""

    counter = ""
    """The metric that counts the bytes."""

    def __init__(
        self,
        deadline_s: float,
        limit: RateLimit | None,
        turn: Ticket,
        on_progress: Callable[[Transfer], None],
    ) -> None:
        self.position = self.counted = 0
        self.accounts: list[Account] = []
        self._deadline_s = deadline_s
        self._limit, self._turn = limit, turn
        self._on_progress = on_progress
        self._scope: trio.CancelScope | None = None
        self._reported = 0.0
        self._busy = False
        self._closed = False
        self._trio = trio.lowlevel.current_trio_token()

    # On the trio side.

    def begin(self, scope: trio.CancelScope) -> None:
        """Called before each attempt. Progress pushes the deadline of `scope` back."""
        self._scope = scope
        self._reported = time.monotonic()

    async def enter(self, gate: Gate, turn: Ticket) -> None:
        """Wait for a slot of the gate."""
        await gate.enter(turn)

    @property
    def gained(self) -> bool:
        """True if the last attempt brought bytes that the next one need not repeat."""
        return False

    @property
    def received(self) -> int:
        """Bytes that the last attempt brought from the origin."""
        return 0

    async def close(self) -> None:
        """After this, neither the sink is written to nor the source read. A call that is running now is waited for: the
        caller may reuse its buffer (its descriptor) next."""
        self._closed = True
        while self._busy:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.001)

    # On the side of other threads.

    def _pace(self, size: int) -> None:
        """Called before `size` bytes go by."""
        if self._limit is not None:
            trio.from_thread.run(self._pay, self._limit, size, trio_token=self._trio)
        else:
            self._report()

    def _report(self) -> None:
        now = time.monotonic()
        if now - self._reported > PROGRESS_S:
            self._reported = now
            self._trio.run_sync_soon(self._alive)

    async def _pay(self, limit: RateLimit, size: int) -> None:
        """On the trio thread: wait until the limit lets these bytes pass. The origin did not cause this wait, so the
        deadline is suspended."""
        if self._scope is not None and not self._closed:
            self._scope.deadline = math.inf
        try:
            await limit.pay(size, self._turn)
        finally:
            self._alive()

    def _alive(self) -> None:
        """On the trio thread: bytes went by, so the deadline starts again."""
        if self._scope is not None and not self._closed:
            self._scope.deadline = trio.current_time() + self._deadline_s
            self._on_progress(self)
        self._reported = time.monotonic()


class Receiving(Transfer):
    """Bytes [start, stop) of one version into a sink: a `Taker`. `position` is the next byte to deliver, `sink_error` the
    exception that the sink raised."""

    counter = "origin_bytes"

    def __init__(
        self,
        start: int,
        stop: int,
        sink: Sink,
        deadline_s: float,
        limit: RateLimit | None,
        turn: Ticket,
        on_progress: Callable[[Transfer], None],
    ) -> None:
        super().__init__(deadline_s, limit, turn, on_progress)
        self.position = self.counted = self._began_at = start
        self.sink_error: Exception | None = None
        self._stop, self._sink = stop, sink
        self.waits = limit is not None or bool(getattr(sink, "waits", False))

    def begin(self, scope: trio.CancelScope) -> None:
        super().begin(scope)
        self._began_at = self.position

    @property
    def gained(self) -> bool:
        return self.position > self._began_at

    @property
    def received(self) -> int:
        return self.position - self._began_at

    def drain(self, chunks: Generator[memoryview | bytes, None, None]) -> None:
        """Take chunks until they end, the sink raises or the transfer is closed."""
        try:
            for chunk in chunks:
                if not self.take(chunk):
                    return
        finally:
            chunks.close()

    def check(self) -> None:
        """After an attempt that raised nothing: `Transient` if bytes are missing all the same."""
        if self.position != self._stop and self.sink_error is None and not self._closed:
            raise Transient(f"the body ended {self._stop - self.position} bytes too early")

    def take(self, chunk: memoryview | bytes) -> bool:
        """As `Taker.take`."""
        size = len(chunk)
        if size > self._stop - self.position:
            raise Transient("the origin sent more bytes than were asked for")
        self._pace(size)
        self._busy = True
        try:
            if self._closed:
                return False
            self._sink.write(chunk)
            self.position += size
        except Exception as exc:
            self.sink_error = exc
            return False
        finally:
            self._busy = False
        return True


class Sending(Transfer):
    """The first `size` bytes of a source into a request (`Body`); each attempt starts at the first byte. `source_error`
    is the exception that the source raised, or that it ended early."""

    counter = "origin_bytes_sent"

    def __init__(
        self,
        source: Source,
        size: int,
        deadline_s: float,
        limit: RateLimit | None,
        turn: Ticket,
        on_progress: Callable[[Transfer], None],
    ) -> None:
        super().__init__(deadline_s, limit, turn, on_progress)
        self.size = size
        self.source_error: Exception | None = None
        self._source = source

    async def enter(self, gate: Gate, turn: Ticket) -> None:
        """Wait for a slot, with the deadline suspended: a file may have more parts than there are slots, and the origin
        does not cause that wait."""
        scope = self._scope
        assert scope is not None
        left, scope.deadline = scope.deadline - trio.current_time(), math.inf
        await gate.enter(turn)
        scope.deadline = trio.current_time() + left

    def attempt(self, send: Callable[[], T]) -> T | None:
        """The result of `send`; None when the source failed or the transfer is closed, whatever a library raises then.
        Libraries may read the body in threads of their own."""
        try:
            return send()
        except Exception:
            if self.source_error is None and not self._closed:
                raise
            return None

    def chunks(self) -> Iterator[bytes]:
        for at in range(0, self.size, CHUNK):
            count = min(CHUNK, self.size - at)
            self._pace(count)
            data = self._read(at, count)
            self.position += count
            yield data

    def look(self) -> Iterator[bytes]:
        for at in range(0, self.size, 8 * CHUNK):
            self._report()
            yield self._read(at, min(8 * CHUNK, self.size - at))

    def _read(self, at: int, count: int) -> bytes:
        data = b""
        self._busy = True
        try:
            if not self._closed:
                data = self._source.read(at, count)
        except Exception as exc:
            self.source_error = exc
        finally:
            self._busy = False
        if len(data) != count:
            if not self._closed and self.source_error is None:
                self.source_error = OriginFailed("the source of a write is shorter than was said")
            raise Abandoned
        return data


class Abandoned(Exception):
    """No more bytes of this request will come. Not an OSError, which libraries take for a broken connection."""
