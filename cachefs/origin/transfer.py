"""One read on its way: the bytes of one range, from a client's chunks into a sink, across as many attempts as
it takes.

It is touched by two parties: a worker thread (`attempt`) and the trio task that waits for it. The flags below
need no lock: each has one writer, and the interpreter shows their order to both sides. `_busy` is raised
*before* `_closed` is looked at, and `_closed` is set before `_busy` is looked at, so either the thread sees
that it is over or the task sees that a write is running.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import trio

from cachefs.errors import Transient
from cachefs.origin.bucket import DownloadLimit
from cachefs.origin.gate import Turn
from cachefs.origin.protocol import Client, Sink

PROGRESS_S = 1.0
"""How often a running transfer reports that it is alive, to push its deadline back. Derived: a call into trio
costs about 0.1 ms, so once a second is free, and a deadline is many seconds."""


class Transfer:
    """State that outlives an attempt: `position` is the next byte to deliver, `sink_error` what the sink
    raised. `on_progress` is called on the trio thread, about once a second, while bytes come."""

    def __init__(
        self,
        client: Client,
        key: str,
        etag: str,
        start: int,
        stop: int,
        sink: Sink,
        whole: bool,
        deadline_s: float,
        limit: DownloadLimit | None,
        turn: Turn,
        on_progress: Callable[[Transfer], None],
    ) -> None:
        self.position = self.counted = start  # `counted` is its owner's
        self.sink_error: Exception | None = None
        self._client, self._key, self._etag = client, key, etag
        self._start, self._stop, self._sink, self._whole = start, stop, sink, whole
        self._deadline_s = deadline_s
        self._limit, self._turn = limit, turn
        self._on_progress = on_progress
        self._scope: trio.CancelScope | None = None
        self._reported = 0.0
        self._busy = False
        self._closed = False

    # On the trio side.

    def begin(self, scope: trio.CancelScope) -> int:
        """Before an attempt: the scope whose deadline progress pushes back. Returns the position now."""
        self._scope = scope
        self._reported = time.monotonic()
        return self.position

    async def close(self) -> None:
        """No write after this. One that is running now is waited for: its buffer must not change hands under
        it."""
        self._closed = True
        while self._busy:
            with trio.CancelScope(shield=True):
                await trio.sleep(0.001)

    # On the worker thread's side.

    def attempt(self) -> None:
        """Ask for what is still missing, and deliver it. Returns early when the sink raised or the reader is
        gone."""
        whole = self._whole and self.position == self._start
        chunks = self._client.read(self._key, self._etag, self.position, self._stop, whole)
        try:
            for chunk in chunks:
                if not self._deliver(chunk):
                    return
        finally:
            chunks.close()
        if self.position != self._stop:
            raise Transient(f"the body ended {self._stop - self.position} bytes too early")

    def _deliver(self, chunk: memoryview | bytes) -> bool:
        size = len(chunk)
        if size > self._stop - self.position:
            raise Transient("the store sent more bytes than were asked for")
        if self._limit is not None:
            trio.from_thread.run(self._pay, self._limit, size)
        elif time.monotonic() - self._reported > PROGRESS_S:
            trio.from_thread.run_sync(self._alive)
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

    async def _pay(self, limit: DownloadLimit, size: int) -> None:
        """On the trio thread: wait until the download limit lets these bytes pass. That wait is ours and not the
        store's, so the deadline stands still meanwhile."""
        if self._scope is not None and not self._closed:
            self._scope.deadline = math.inf
        try:
            await limit.pay(size, self._turn)
        finally:
            self._alive()

    def _alive(self) -> None:
        """On the trio thread: bytes came, so the deadline starts anew."""
        if self._scope is not None and not self._closed:
            self._scope.deadline = trio.current_time() + self._deadline_s
            self._on_progress(self)
        self._reported = time.monotonic()
