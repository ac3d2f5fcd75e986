"""The loop over /dev/fuse: one request after the other, answered at once or in a task of its own.

No request is understood here: `handlers` maps an operation to who answers it, with (unique, nodeid, pid, arguments). What
has to wait becomes a task, so that the loop goes on; what changes something is then carried out to its end. While requests
come closely, the loop looks for the next one instead of going to sleep; the other tasks get their turn in between.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import struct
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import trio

from cachefs.fuse import protocol, signals
from cachefs.fuse.admission import Admission
from cachefs.fuse.device import Device
from cachefs.fuse.errno_table import GRACE_S, tell
from cachefs.fuse.protocol import Op
from cachefs.ledger import NAMES, WRITES, Call, current_call
from cachefs.logs import Repeats
from cachefs.metrics import Metrics
from cachefs.tasks import contained

log = logging.getLogger(__name__)

T = TypeVar("T")

Handler = Callable[[int, int, int, memoryview], None]
"""(unique, nodeid, pid, arguments): the arguments are valid until it returns."""

CLOSE_S, LOOK_AGAIN_S = 100e-6, 60e-6
"""While requests come closer than the first, how long to look for the next one before going to sleep. Measured: waking a
thread that sleeps on another processor takes 20 to 40 µs, which is all that a small file's open costs otherwise."""

SLICE_S = 1e-3
"""How long the other tasks wait at most while requests come in a stream. Guessed: shorter than any round trip they wait
for."""

SIGNALS_EVERY_S = 0.2
"""How often an interrupted request is looked at that went on: of a second signal, which may end the one who waits, the
kernel says nothing. Guessed."""

_HEADER = protocol.IN_HEADER.size
_REPLY = protocol.OUT_HEADER.size
_CALLED: dict[int, tuple[str, str]] = {int(op): (NAMES, op.name.lower()) for op in Op} | {
    Op.WRITE: (WRITES, "write"),
    Op.FLUSH: (WRITES, "close"),
    Op.FSYNC: (WRITES, "fsync"),
    Op.FALLOCATE: (WRITES, "fallocate"),
}
"""What requests that wait are for the ledger. Reads say it themselves."""

_NO_REPLY = (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT)

_ALWAYS = frozenset({Op.GETATTR, Op.FLUSH, Op.FSYNC})
"""Requests that wait however little memory is left: stat(2), and what says whether a file is in the store. All that is
answered at once is admitted anyway, STATFS, FORGET and INTERRUPT among it."""


class Malformed(ValueError):
    """A request that no kernel sends."""


class _Waiting:
    """A request that has to wait. Without a scope, it goes on when nobody waits for it any more. Reads have no call."""

    __slots__ = ("call", "held_bytes", "interrupted", "scope", "thread")

    def __init__(
        self, thread: int, scope: trio.CancelScope | None, call: Call | None, held_bytes: int
    ) -> None:
        self.thread = thread
        self.held_bytes = held_bytes
        self.scope = scope
        self.call = call
        self.interrupted = False

    def end(self) -> None:
        if self.call is not None:
            self.call.end()


class Session:
    """Serves one connection. `deadline_s` bounds every operation that has to wait, `admission` the memory of those that
    do."""

    def __init__(
        self,
        device: Device,
        handlers: Mapping[int, Handler],
        metrics: Metrics,
        deadline_s: float,
        admission: Admission,
    ) -> None:
        self._device = device
        self._admission = admission
        self._handlers = handlers
        self._metrics = metrics
        self._repeats = Repeats()
        self._deadline_s = deadline_s + GRACE_S
        self._waiting: dict[int, _Waiting] = {}
        self._signalled: set[int] = set()
        self._thread = 0  # who sent the request that is being handled
        self.user = (0, 0)  # and for which user and group
        # Looking again takes a processor: with only one, it is the one that the next request would come from.
        self._eager = len(os.sched_getaffinity(0)) > 1
        self._gap_s = 1.0  # between an answer and the next request, lately
        self._answered_at = 0.0

    async def serve(self) -> None:
        """Answer the kernel until the mount is gone, or this is cancelled."""
        async with trio.open_nursery() as self._nursery:
            while True:
                await trio.lowlevel.wait_readable(self._device.fd)
                while (more := self._answer()) is True:
                    await trio.lowlevel.checkpoint()
                if more is None:
                    break
            self._nursery.cancel_scope.cancel()

    def _answer(self) -> bool | None:
        """Answer what has come. Whether there is more (the others get their turn first); None when the mount is gone."""
        clock, read, handle = time.perf_counter, self._device.read, self.handle
        begun = clock()
        while True:
            request = read()
            if request is None:
                return None
            now = clock()
            gap = now - self._answered_at
            if request:
                self._gap_s += (min(gap, 1e-3) - self._gap_s) / 8
                handle(request)
                self._answered_at = now = clock()
                if now - begun > SLICE_S:
                    return True
            elif self._waiting or not self._eager or self._gap_s > CLOSE_S or gap > LOOK_AGAIN_S:
                return False
            elif now - begun > SLICE_S:
                return True

    def handle(self, request: memoryview) -> None:
        """Answer one request, now or in a task. Whatever the bytes are, it returns."""
        if len(request) < _HEADER:
            log.warning("a request of %d bytes: ignored", len(request))
            return
        length, opcode, unique, nodeid, uid, gid, pid, _, _ = protocol.IN_HEADER.unpack_from(request)
        handler = self._handlers.get(opcode)
        self._thread = pid
        self.user = uid, gid
        try:
            if length != len(request):
                self._fail(unique, opcode, Malformed(f"{len(request)} bytes that say they are {length}"))
            elif handler is None:
                self._metrics.fuse_other += 1
                self.error(unique, errno.ENOSYS)
            else:
                handler(unique, nodeid, pid, request[_HEADER:])
        except Exception as exc:
            self._fail(unique, opcode, exc)

    def error(self, unique: int, number: int) -> None:
        """Answer with an errno; 0 is "done"."""
        self._device.write(protocol.OUT_HEADER.pack(_REPLY, -number, unique))

    def _fail(self, unique: int, opcode: int, exc: Exception) -> None:
        """Total: whatever went wrong, the one who asked gets an errno and the daemon lives."""
        if isinstance(exc, struct.error | Malformed):
            log.warning("a malformed request (operation %d): %s", opcode, exc)
            number = errno.EINVAL
        else:
            operation = Op(opcode).name.lower() if opcode in self._handlers else str(opcode)
            number = tell(operation, exc, self._metrics, self._deadline_s, self._repeats)
        if opcode in _NO_REPLY:
            return
        try:
            self.error(unique, number)
        except OSError as failure:
            log.warning("the kernel does not take an answer: %s", failure)

    def wait(
        self,
        unique: int,
        opcode: int,
        answer: Callable[[], Awaitable[T]],
        reply: Callable[[int, T], object],
        *,
        patient: bool = False,
    ) -> None:
        """Find the answer in a task of its own; `patient`, however long that takes."""
        deadline = math.inf if patient else trio.current_time() + self._deadline_s
        scope = trio.CancelScope(deadline=deadline)
        waiting = self._admit(unique, opcode, scope)
        work = partial(self._finish, unique, opcode, waiting, scope, answer, reply)
        contained(self._nursery, "a request", work)

    def change(
        self,
        unique: int,
        opcode: int,
        work: Callable[[], Awaitable[T]],
        reply: Callable[[int, T], object],
        *,
        data_bytes: int = 0,
    ) -> None:
        """The same for what must not be left half done: a signal ends the wait, and the work goes on. It has no deadline, as
        each of its requests to the store has one. `reply` is called in any case, and finds out whether anybody listens.
        `data_bytes` is what `work` holds."""
        waiting = self._admit(unique, opcode, None, data_bytes)
        contained(self._nursery, "a request", self._carry_out, unique, opcode, waiting, work, reply)

    def _admit(
        self, unique: int, opcode: int, scope: trio.CancelScope | None, data_bytes: int = 0
    ) -> _Waiting:
        """Raises `Refused`."""
        held = self._admission.take(data_bytes, always=opcode in _ALWAYS)
        waiting = self._waiting[unique] = _Waiting(self._thread, scope, self._call(opcode), held)
        return waiting

    def _done(self, unique: int, waiting: _Waiting) -> None:
        waiting.end()
        self._waiting.pop(unique, None)
        self._admission.give_back(waiting.held_bytes)

    def _call(self, opcode: int) -> Call | None:
        if opcode == Op.READ:
            return None
        return self._metrics.ledger.waits.call(self._thread, *_CALLED[opcode])

    async def _finish(
        self,
        unique: int,
        opcode: int,
        waiting: _Waiting,
        scope: trio.CancelScope,
        answer: Callable[[], Awaitable[T]],
        reply: Callable[[int, T], object],
    ) -> None:
        current_call.set(waiting.call)
        try:
            with scope:
                found = await answer()
                # No checkpoint up to the reply: what was opened is either told of or never opened.
                reply(unique, found)
                return
            if waiting.interrupted:
                self.error(unique, errno.EINTR)
            else:
                self._fail(unique, opcode, trio.TooSlowError())
        except Exception as exc:
            self._fail(unique, opcode, exc)
        finally:
            self._done(unique, waiting)

    async def _carry_out(
        self,
        unique: int,
        opcode: int,
        waiting: _Waiting,
        work: Callable[[], Awaitable[T]],
        reply: Callable[[int, T], object],
    ) -> None:
        current_call.set(waiting.call)
        try:
            reply(unique, await work())
        except Exception as exc:
            if waiting.interrupted:
                log.debug("%s, of which nobody hears: %s", Op(opcode).name.lower(), exc)
            else:
                self._fail(unique, opcode, exc)
        finally:
            self._done(unique, waiting)

    def interrupt(self, unique: int) -> None:
        """Who waits for that request has a signal. The kernel says so after the request itself, so a request that is not
        waiting is answered already."""
        if unique in self._waiting and not self._give_up(unique):
            if not self._signalled:
                contained(self._nursery, "interrupt", self._watch)
            self._signalled.add(unique)

    async def _watch(self) -> None:
        """As long as somebody waits who had a signal and was not ended by it."""
        while self._signalled:
            await trio.sleep(SIGNALS_EVERY_S)
            self._signalled = {u for u in self._signalled if u in self._waiting and not self._give_up(u)}

    def _give_up(self, unique: int) -> bool:
        """End the request if the one who waits for it is at its end; whether that was so."""
        waiting = self._waiting[unique]
        if not waiting.interrupted and signals.ends(waiting.thread):
            waiting.interrupted = True
            waiting.end()
            if waiting.scope is None:
                self.error(unique, errno.EINTR)
            else:
                waiting.scope.cancel()
        return waiting.interrupted
