"""An object store that does as it is told: holds back bytes, fails, hangs, changes versions, and counts."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from cachefs.base.errors import ObjectChanged, Transient
from cachefs.base.names import ObjectId
from cachefs.origin import ByteRange, Ticket

SOURCE = "scripted://"


def in_trio(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An async test, run with a watchdog: a hang is a failure with a traceback, not a stuck suite."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        async def guarded() -> None:
            with trio.fail_after(30):
                await function(*args, **kwargs)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", trio.TrioDeprecationWarning)
            trio.run(guarded, strict_exception_groups=False)  # as the daemon runs

    return run


def content(seed: object, size: int) -> bytes:
    return random.Random(str(seed)).randbytes(size)


@dataclass
class Get:
    """One request as the origin saw it when it came; `delivered` grows."""

    key: str
    start: int
    stop: int
    whole: bool
    background: bool
    ticket: Ticket | None = None
    delivered: int = 0


@dataclass
class Hold:
    """Bytes of `key` from `offset` on do not come until `release` is set; `reached` says that a transfer waits there."""

    key: str
    offset: int
    reached: trio.Event = field(default_factory=trio.Event)
    release: trio.Event = field(default_factory=trio.Event)


@dataclass
class Failure:
    """The next `times` requests (of `key`, if given; in the background or not, if given) fail after `after` bytes."""

    error: Callable[[], Exception]
    times: int = 1
    after: int = 0
    key: str | None = None
    background: bool | None = None


class ScriptedOrigin:
    """Stands in for `cachefs.origin.Origin`, without its patience."""

    def __init__(self, chunk: int = 64 << 10) -> None:
        self.chunk = chunk
        self.objects: dict[str, tuple[str, bytes]] = {}
        self.gets: list[Get] = []
        self.holds: list[Hold] = []
        self.failures: list[Failure] = []
        self.in_flight = 0
        self.doomed = 0  # transfers under way that will fail as scripted
        self.most_in_flight = 0
        self.transfer_rate = 0.0
        self._versions = 0

    def name(self, key: str) -> str:
        return f"{SOURCE}{key}"

    def begin(self, *_: Any, **__: Any) -> Callable[[], None] | None:
        """Every attempt has a task here."""
        return None

    def put(self, key: str, data: bytes) -> ObjectId:
        self._versions += 1
        etag = f'"{self._versions}"'
        self.objects[key] = (etag, data)
        return ObjectId(SOURCE, key, etag, len(data))

    def hold(self, key: str, offset: int) -> Hold:
        self.holds.append(Hold(key, offset))
        return self.holds[-1]

    def fail(self, error: Callable[[], Exception], **how: Any) -> Failure:
        self.failures.append(Failure(error, **how))
        return self.failures[-1]

    @property
    def delivered(self) -> int:
        return sum(get.delivered for get in self.gets)

    async def read(
        self,
        key: str,
        etag: str,
        start: int,
        stop: int,
        sink: Any,
        *,
        whole: bool = False,
        ticket: Ticket | None = None,
        failed_attempt: object = None,
    ) -> None:
        get = Get(key, start, stop, whole, ticket is not None and ticket.background, ticket)
        self.gets.append(get)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await trio.lowlevel.checkpoint()
            await self._deliver(get, etag, sink)
        finally:
            self.in_flight -= 1

    async def _deliver(self, get: Get, etag: str, sink: Any) -> None:
        found, data = self.objects.get(get.key, ("", b""))
        if found != etag:
            raise ObjectChanged(f"{get.key} was replaced")
        assert 0 <= get.start < get.stop <= len(data), "a range that the object does not have"
        assert get.whole == (get.start == 0 and get.stop == len(data)) or not get.whole
        failure = self._failure(get)
        if failure is None:
            await self._send(get, data, sink, get.stop)
            return
        self.doomed += 1
        try:
            await self._send(get, data, sink, min(get.stop, get.start + failure.after))
            raise failure.error()
        finally:
            self.doomed -= 1

    async def _send(self, get: Get, data: bytes, sink: Any, end: int) -> None:
        position = get.start
        while position < end:
            stop = min(end, position + self.chunk)
            hold = next((h for h in self.holds if h.key == get.key and position <= h.offset < stop), None)
            if hold is not None and not hold.release.is_set():
                if hold.offset > position:
                    stop = hold.offset
                else:
                    hold.reached.set()
                    await hold.release.wait()
            view = memoryview(data)[position:stop]
            await trio.to_thread.run_sync(sink.write, view)
            get.delivered += stop - position
            position = stop

    def _failure(self, get: Get) -> Failure | None:
        for failure in self.failures:
            if (
                failure.times > 0
                and failure.key in (None, get.key)
                and failure.background in (None, get.background)
            ):
                failure.times -= 1
                return failure
        return None


class BeginningOrigin(ScriptedOrigin):
    """Begins each attempt at once, as HTTP clients do, in a task of `nursery` in place of a client's thread."""

    def __init__(self, nursery: trio.Nursery) -> None:
        super().__init__()
        self._nursery = nursery

    def begin(
        self, wanted: ByteRange, sink: Any, ended: Callable[[Exception | None], None], *, ticket: Ticket
    ) -> Callable[[], None]:
        key, etag, start, stop, whole = wanted
        get = Get(key, start, stop, whole, ticket.background, ticket)
        self.gets.append(get)
        scope = trio.CancelScope()

        async def go_on() -> None:
            error: Exception | None = Transient("ended early")
            try:
                with scope:
                    await self._deliver(get, etag, sink)
                    error = None
            except Exception as exc:
                error = exc
            finally:
                ended(error)

        self._nursery.start_soon(go_on)
        return scope.cancel
