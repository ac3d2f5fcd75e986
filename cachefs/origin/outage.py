"""A store that does not answer at all: noticing it, asking it no more meanwhile, and noticing that it is back.

Idea: a store that refuses (403, 404, 503) answers; one that is out hangs, or breaks every connection. Requests only raise a
suspicion, by how long nothing was heard while something was asked; what decides is a *probe*, one small LIST of our own
that waits in no queue. So a key that fails for ever, or a request that takes a minute, is no outage. While the store
is out, it is probed every second, one at a time, and the first sign of life ends it, whoever has it.

`Outage` is the policy and knows no clock; `Reach` has the clock, the probe, and the requests that hang or wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from cachefs.errors import CachefsError, Throttled, Transient, Unreachable
from cachefs.metrics import Metrics
from cachefs.names import OnOutage

log = logging.getLogger(__name__)

SILENT_S = 5.0
"""Nothing heard for so long while something is asked is suspicious. Guessed: stores answer in well under a second, and what
takes longer costs one probe."""

FAILING_S, FAILURES = 2.0, 3
"""The same when that many attempts in a row broke. Derived: repeated with `Backoff`, a request is given up after 3.1 s at
the earliest, and should still hear that the store is out."""

LOOK_EVERY_S = 0.5
"""How often one looks whether there is reason for suspicion. Derived: so that 3.1 s are enough."""

PROBE_EVERY_S = 1.0
PROBE_S = 5.0
"""How long a probe may take. Guessed, like `SILENT_S`."""

LEAST_PROBE_S = 1.0
"""However short the deadline is: a busy machine is no outage. Guessed."""

PROBERS = 16
"""Threads of probes, abandoned ones included. Derived: a client's own timeout ends each after 10 s, one in 6 s is begun."""


class BrokenOff(Unreachable):
    """An attempt under way was left to itself. Its thread may wake up yet: what it was given is not to be used again."""


class Outage:
    """What was asked and heard of one store. Times are seconds of any one clock."""

    def __init__(self, silent_s: float = SILENT_S, failing_s: float = FAILING_S) -> None:
        self._silent_s, self._failing_s = silent_s, failing_s
        self._waiting = self._failures = 0
        self._quiet_since: float | None = None
        self._probed_since: float | None = None  # of which silence the probe under way is
        self.since: float | None = None  # out, and nothing heard from then on

    @property
    def idle(self) -> bool:
        """Nothing is asked, and nothing was asked in vain."""
        return not self._waiting and not self._failures and self.since is None

    def asked(self, now: float) -> None:
        self._waiting += 1
        if self._quiet_since is None:
            self._quiet_since = now

    def ended(self) -> None:
        """One that was asked waits no more, for whatever reason."""
        self._waiting -= 1
        if not self._waiting and not self._failures:
            self._quiet_since = None

    def failed(self) -> None:
        """An attempt broke: no reply, or one that says that something before the store is at a loss (5xx)."""
        self._failures += 1

    def heard(self, now: float) -> float | None:
        """A reply, or bytes of one. For how long it was out, if this is the end of an outage."""
        since, self.since = self.since, None
        self._failures = 0
        self._probed_since = None
        self._quiet_since = now if self._waiting else None
        return None if since is None else now - since

    def suspicious(self, now: float) -> bool:
        """Whether to probe."""
        if self._quiet_since is None:
            return False
        quiet_s = now - self._quiet_since
        if self._failures >= FAILURES and quiet_s >= self._failing_s:
            return True
        return self._waiting > 0 and quiet_s >= self._silent_s

    def probing(self) -> None:
        """A probe begins, because of what is suspicious now: whoever was silent that long need not be asked any more when it
        ends."""
        self._probed_since = self._quiet_since

    def probed_in_vain(self) -> bool:
        """True when it is out from now on. Not if it was heard while the probe was under way."""
        if self.since is None and self._probed_since is not None:
            self.since = self._probed_since
            return True
        return False


class Reach:
    """Whether one store can be reached, for its requests. `probe` blocks; `deadline_s` is that of requests, and being out is
    found within it."""

    def __init__(
        self, name: str, probe: Callable[[], object], how: OnOutage, deadline_s: float, metrics: Metrics
    ) -> None:
        self.how = how
        self._name = name
        self._probe = probe
        self._metrics = metrics
        self._outage = Outage(min(SILENT_S, deadline_s / 3), min(FAILING_S, deadline_s / 3))
        self._probe_s = min(PROBE_S, max(LEAST_PROBE_S, deadline_s / 3))
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
        """Whether what was known last is to be believed now, however old."""
        return self.how.stale and self._outage.since is not None

    def heard(self) -> None:
        """Any sign of life."""
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
        """Around an attempt that is answered at once by a healthy store: silence is suspicious."""
        self._outage.asked(trio.current_time())
        self._watch()
        try:
            yield
        finally:
            self._outage.ended()

    @contextmanager
    def broken_off(self) -> Iterator[None]:
        """Around an attempt that does not go on when the store is found to be out: leaves the block early, then. Look at
        `is_out` behind it."""
        with trio.CancelScope() as scope:
            self._hanging.add(scope)
            try:
                yield
            finally:
                self._hanging.discard(scope)

    async def admit(self, what: str, until: float) -> None:
        """Return when the store may be asked; at `until`, a time of trio's, it must have come back. Raises `Unreachable`."""
        if self.is_out and until > trio.current_time():
            with trio.move_on_at(until):
                await self._back.wait()
        if self.is_out:
            self._metrics.origin_refused += 1
            raise Unreachable(f"{what}: {self.complaint()}")

    def complaint(self) -> str:
        """One line for people while the store is out, else ""."""
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
        """As long as there is something to wait for."""
        try:
            with scope:
                while not self._outage.idle:
                    await trio.sleep(min(PROBE_EVERY_S if self.is_out else LOOK_EVERY_S, self._probe_s / 4))
                    if self.is_out or self._outage.suspicious(trio.current_time()):
                        await self._ask()
        except Exception:  # of a system task, it would end the process
            log.exception("watching %s failed", self._name)
        finally:
            self._watching = None

    async def _ask(self) -> None:
        self._metrics.origin_list += 1
        self._outage.probing()
        with trio.move_on_after(self._probe_s):
            try:
                await trio.to_thread.run_sync(self._probe, abandon_on_cancel=True, limiter=self._probers)
            except Transient as exc:
                if not isinstance(exc, Throttled):
                    self._last_error = str(exc)
                    return self._in_vain()
            except CachefsError:
                pass  # a refusal is an answer
            except Exception:
                log.debug("a probe of %s failed strangely", self._name, exc_info=True)
            return self.heard()
        self._in_vain()

    def _in_vain(self) -> None:
        if self._outage.probed_in_vain():
            self._metrics.origin_outages += 1
            log.warning("%s; %s", self.complaint(), _MEANS[self.how.mode])
            for scope in list(self._hanging):
                scope.cancel()


_MEANS = {
    "serve-stale": "what is known of it is believed until it answers",
    "eio": "nothing is asked of it until it answers",
    "wait": "requests wait for it",
}
