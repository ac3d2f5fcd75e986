"""Whether the disk under a tier answers.

A disk may hang instead of failing: a call on it does not return, and no signal ends it. So what may wait for it runs in
worker threads. Each such call is noted while it lasts (`busy`); one that lasts too long takes the disk *down*. Then its
readers are turned away at once, and nothing new is begun there, until a probe in a thread of its own has come back.

`goes_down` and `goes_up` are the only two transitions.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import trio

log = logging.getLogger(__name__)

T = TypeVar("T")

HANGS_AFTER_S = 5.0
"""A call that lasts longer hangs. Guessed: disks retry a bad sector for a second or two, and a reader has 30 s."""

LOOK_EVERY_S = 0.5
"""How often calls under way are looked at. Derived: a tenth of that."""

READ_THREADS = 8
"""Reads of one disk at a time; more only lengthen its queue. Guessed."""


class _Call(Generic[T]):
    """One call in a thread. `finish` is given its result on the trio thread, also when its reader has gone."""

    def __init__(self, call: Callable[[], T], finish: Callable[[T | None], None]) -> None:
        self.call = call
        self.finish = finish
        self.ended = trio.Event()
        self.result: T | None = None
        self.failure: BaseException | None = None
        self.reader: trio.CancelScope | None = None


class Disk:
    """The disk that `path` lies on. `name` is the tier's. The clock is the machine's, for threads note calls, too."""

    def __init__(self, name: str, path: Path) -> None:
        self.down = False
        self.on_down: list[Callable[[], object]] = []
        self._name = name
        self._path = path
        self._calls: dict[object, float] = {}
        self._readers: set[trio.CancelScope] = set()
        self._threads = trio.CapacityLimiter(READ_THREADS)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Around a call on the disk, in the thread that makes it."""
        call = object()
        self._calls[call] = time.monotonic()
        try:
            yield
        finally:
            del self._calls[call]

    # -- calls that have a reader ------------------------------------------------------------------

    async def run(self, call: Callable[[], T], finish: Callable[[T | None], None]) -> T:
        """What `call` gives, or raises, in a thread. OSError(ETIMEDOUT) when the disk is down, or goes down meanwhile.

        `finish` is called once in any case, when the call has ended and not before: its descriptors are in use until then,
        however long that takes."""
        if self.down:
            finish(None)
            raise self._hangs()
        work = _Call(call, finish)
        trio.lowlevel.spawn_system_task(self._carry_out, work)
        with trio.CancelScope() as scope:
            self._readers.add(scope)
            try:
                await work.ended.wait()
            finally:
                self._readers.discard(scope)
                work.reader = None
        if not work.ended.is_set():
            raise self._hangs()
        if work.failure is not None:
            raise work.failure
        return work.result  # type: ignore[return-value]

    async def _carry_out(self, work: _Call[T]) -> None:
        def noted() -> T | None:
            if self.down:
                raise self._hangs()  # it waited for a thread until now
            with self.busy():
                return work.call()

        try:
            work.result = await trio.to_thread.run_sync(noted, abandon_on_cancel=True, limiter=self._threads)
        except trio.Cancelled:
            raise  # the program ends
        except BaseException as exc:
            work.failure = exc
        work.finish(work.result)
        work.ended.set()

    def _hangs(self) -> OSError:
        return TimeoutError(errno.ETIMEDOUT, f"the disk of {self._path} does not answer")

    # -- the state ---------------------------------------------------------------------------------

    def look(self) -> None:
        """Take the disk down if a call on it lasts too long."""
        since = min(list(self._calls.values()), default=None)
        if not self.down and since is not None and time.monotonic() - since > HANGS_AFTER_S:
            self.goes_down()

    def goes_down(self) -> None:
        self.down = True
        log.warning(
            "cache tier %s (%s) is down: its disk has not answered for %.0f s; reads go to the origin",
            *(self._name, self._path, HANGS_AFTER_S),
        )
        for scope in list(self._readers):
            scope.cancel()
        for hear in self.on_down:
            hear()
        trio.lowlevel.spawn_system_task(self._probe)

    def goes_up(self) -> None:
        self.down = False
        log.warning("cache tier %s (%s) answers again", self._name, self._path)

    async def _probe(self) -> None:
        await trio.to_thread.run_sync(
            _write_and_remove, self._path / "probe", abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
        )
        self.goes_up()


def _write_and_remove(path: Path) -> None:
    """Return when the disk has answered, well or not: errors are the tier's business, at its next write."""
    try:
        with open(path, "wb") as file:
            file.write(b"probe")
            os.fsync(file.fileno())
        path.unlink()
    except OSError as exc:
        log.debug("probing %s: %s", path, exc)
