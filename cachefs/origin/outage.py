"""A circuit breaker for a store that does not answer at all.

A store that refuses (403, 404, 503) answers; one that is out hangs, or breaks every connection. Requests only raise a
suspicion, by the time in which nothing was heard while a request waited. A *probe* decides: one small LIST that waits in
no queue. So a key that always fails, or a request that takes a minute, is no outage. While the origin is out, it is
probed every second, one probe at a time, and any reply, to a probe or to a request, ends the outage.

`Outage` is the policy and has no clock; `Breaker` has the clock, the probe, and the requests that hang or wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import trio

from cachefs.base.errors import CachefsError, Throttled, Transient, Unreachable
from cachefs.base.metrics import Metrics
from cachefs.base.names import OnOutage

log = logging.getLogger(__name__)

SILENT_S = 5.0
"""Seconds of silence that are suspicious while a request waits, and that a probe may take. Guessed: stores answer in well
under a second, and a slower reply costs one probe."""

FAILING_S, FAILURES = 2.0, 3
"""That many failed attempts in a row, in at least that many seconds, are suspicious, too. Derived: with `Backoff`, a request
fails for good after 3.1 s at the earliest, and is to be told by then that the origin is out."""

LOOK_EVERY_S, PROBE_EVERY_S = 0.5, 1.0
"""Seconds between two looks for a suspicion, and between two probes. Derived: 3.1 s suffice for two failures and a look."""

LEAST_PROBE_S = 1.0
"""A probe may take that long however short the deadline is: a busy machine is no outage. Guessed."""

PROBERS = 16
"""Threads of probes, abandoned ones included. Derived: a client's own timeout ends each after 10 s, one in 6 s is begun."""


class Interrupted(Unreachable):
    """An attempt was left because the origin was found to be out. Its thread may wake up later, so its transfer must not be
    used again."""


@dataclass(slots=True)
class Outage:
    """What was asked and heard of one origin. Times are seconds of any one clock. `since`: the origin is out, and nothing
    was heard from then on. `replies` counts, so that a probe can tell whether anything was heard meanwhile."""

    silent_s: float = SILENT_S
    failing_s: float = FAILING_S
    since: float | None = None
    replies: int = 0
    _waiting: int = 0
    _failures: int = 0
    _quiet_since: float | None = None

    @property
    def idle(self) -> bool:
        """True if no request waits, none has failed since the last reply, and the origin is not out."""
        return not self._waiting and not self._failures and self.since is None

    def asked(self, now: float) -> None:
        self._waiting += 1
        if self._quiet_since is None:
            self._quiet_since = now

    def ended(self) -> None:
        """A request waits no longer, for any reason."""
        self._waiting -= 1
        if not self._waiting and not self._failures:
            self._quiet_since = None

    def failed(self) -> None:
        """An attempt got no reply, or a 5xx, which a proxy sends too."""
        self._failures += 1

    def heard(self, now: float) -> float | None:
        """A reply came, or bytes of one. Returns the seconds of the outage that this ends, if there was one."""
        since, self.since = self.since, None
        self.replies += 1
        self._failures = 0
        self._quiet_since = now if self._waiting else None
        return None if since is None else now - since

    def suspicious(self, now: float) -> float | None:
        """The beginning of the silence, if it is suspicious."""
        if self._quiet_since is None:
            return None
        quiet_s = now - self._quiet_since
        failing = self._failures >= FAILURES and quiet_s >= self.failing_s
        silent = self._waiting > 0 and quiet_s >= self.silent_s
        return self._quiet_since if failing or silent else None

    def probed_in_vain(self, quiet_since: float, replies: int) -> bool:
        """A probe that began with these values got no reply. True when the origin is out from now on."""
        if self.since is not None or self.replies != replies:
            return False
        self.since = quiet_since
        return True


class Breaker:
    """Whether one origin can be reached. `probe` blocks; `deadline_s` is the requests' deadline, and an outage is found
    within it."""

    def __init__(
        self, name: str, probe: Callable[[], object], how: OnOutage, deadline_s: float, metrics: Metrics
    ) -> None:
        self.how = how
        self._name = name
        self._probe = probe
        self._metrics = metrics
        self._outage = Outage(min(SILENT_S, deadline_s / 3), min(FAILING_S, deadline_s / 3))
        self._probe_s = min(SILENT_S, max(LEAST_PROBE_S, deadline_s / 3))
        self._probers = trio.CapacityLimiter(PROBERS)
        self._hanging: set[trio.CancelScope] = set()
        self._back = trio.Event()
        self._watching: trio.CancelScope | None = None
        self._last_error = ""

    @property
    def is_out(self) -> bool:
        return self._outage.since is not None

    @property
    def serves_stale(self) -> bool:
        """True while the origin is out and cached metadata of any age is served."""
        return self.how.stale and self.is_out

    def heard(self) -> None:
        """A reply came, or bytes of one."""
        outage_s = self._outage.heard(trio.current_time())
        if outage_s is not None:
            log.warning("%s answers again, after %.0f s", self._name, outage_s)
            self._back.set()
            self._back = trio.Event()

    def failed(self, exc: Transient) -> None:
        """An attempt broke."""
        self._last_error = str(exc)
        self._outage.failed()
        self._watch()

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Around an attempt that a healthy store answers at once: its silence is suspicious."""
        self._outage.asked(trio.current_time())
        self._watch()
        try:
            yield
        finally:
            self._outage.ended()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around an attempt that ends when the origin is found to be out. The block is left without an exception then; the
        caller looks at `is_out`."""
        with trio.CancelScope() as scope:
            self._hanging.add(scope)
            try:
                yield
            finally:
                self._hanging.discard(scope)

    async def admit(self, what: str, until: float) -> None:
        """Return when a request may be sent; raises `Unreachable` if the origin is still out at `until` (trio's clock)."""
        if self.is_out:
            with trio.move_on_at(until):
                await self._back.wait()
        if self.is_out:
            self._metrics.origin_refused += 1
            raise Unreachable(f"{what}: {self.complaint()}")

    def complaint(self) -> str:
        """One line for the user while the origin is out, else ""."""
        since = self._outage.since
        if since is None:
            return ""
        why = f" ({self._last_error})" if self._last_error else ""
        return f"{self._name} has not answered for {trio.current_time() - since:.0f} s{why}"

    def status(self) -> dict[str, Any]:
        since = self._outage.since
        return {
            "on_outage": str(self.how),
            "out_s": None if since is None else round(trio.current_time() - since, 1),
        }

    def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = trio.CancelScope()
            trio.lowlevel.spawn_system_task(self._run, self._watching, name="cachefs outage")

    async def _run(self, scope: trio.CancelScope) -> None:
        """Look for a suspicion and probe, until nothing waits, failed or is out."""
        try:
            with scope:
                while not self._outage.idle:
                    await trio.sleep(min(PROBE_EVERY_S if self.is_out else LOOK_EVERY_S, self._probe_s / 4))
                    quiet_since = self._outage.suspicious(trio.current_time())
                    if self.is_out or quiet_since is not None:
                        await self._decide(quiet_since or 0.0)
        except Exception:  # in a system task, it would end the process
            log.exception("watching %s failed", self._name)
        finally:
            self._watching = None

    async def _decide(self, quiet_since: float) -> None:
        """Probe once, and open or close the circuit accordingly."""
        self._metrics.origin_list += 1
        replies = self._outage.replies
        if await self._answers():
            self.heard()
        elif self._outage.probed_in_vain(quiet_since, replies):
            self._metrics.origin_outages += 1
            log.warning("%s; %s", self.complaint(), _MEANS[self.how.mode])
            for scope in list(self._hanging):
                scope.cancel()

    async def _answers(self) -> bool:
        with trio.move_on_after(self._probe_s):
            try:
                await trio.to_thread.run_sync(self._probe, abandon_on_cancel=True, limiter=self._probers)
            except Transient as exc:
                if not isinstance(exc, Throttled):
                    self._last_error = str(exc)
                    return False
            except CachefsError:
                pass  # a refusal is an answer
            except Exception:
                log.debug(
                    "a probe of %s raised what its client should have translated", self._name, exc_info=True
                )
            return True
        return False


_MEANS = {
    "serve-stale": "cached names and attributes of any age are served until it answers",
    "eio": "requests for it fail until it answers",
    "wait": "requests wait for it",
}
