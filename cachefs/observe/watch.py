"""The pages of the endpoint, and the data only they need: recent samples, whether the mount answers, pauses of the loop."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trio

from cachefs.base.ledger import WAITED_FOR
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import in_thread
from cachefs.observe.endpoint import Page, Reply, plain

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.1
"""Seconds between two checks of the clock: a pause is measured up to this much too short; a shorter one may be missed. The
metric `loop_pause_seconds_max` promises it. Measured: ten checks a second take 0.24 % of a processor."""

RECENT_S = 60.0
"""How long a pause counts as recent. Derived: scrapes come at least once a minute."""


class Pauses:
    """Pauses of the event loop: how late a sleeping task was woken."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        # (time of a check, seconds that it was late); bounded by the checks that fit into `RECENT_S`.
        self._recent: deque[tuple[float, float]] = deque(maxlen=round(RECENT_S / LOOK_EVERY_S) + 1)

    async def run(self) -> None:
        """Measure until cancelled."""
        due = trio.current_time()
        while True:
            due += LOOK_EVERY_S
            await trio.sleep_until(due)
            now = trio.current_time()
            self._longest_s = max(self._longest_s, now - due)
            self._recent.append((now, now - due))
            due = now

    def status(self) -> dict[str, float]:
        """The longest pause of the last minute, and since the start, in seconds."""
        since = trio.current_time() - RECENT_S
        recent = (pause_s for when, pause_s in self._recent if when >= since)
        return {"minute": max(recent, default=0.0), "run": self._longest_s}


SAMPLE_EVERY_S = 2.0
SAMPLES = 450
"""Samples on the page, and the seconds between them. Derived: a quarter of an hour, 100 KB."""

PROBE_S = 3.0
"""Deadline of the mount's answer to its own daemon. Derived: the page's reply, with the reason, comes within the 5 s that
probes of Docker and Kubernetes wait."""

PAGE = Path(__file__).with_name("page.html")

SAMPLED = (
    "ram_hits",
    "ssd_hits",
    "heap_hits",
    "misses",
    "peer_hits",
    "fuse_open",
    "passthrough_opens",
    "passthrough_blocks",
    "page_cache_blocks",
    "fuse_read",
    "fuse_read_bytes",
    "origin_bytes",
    "origin_bytes_sent",
    "peer_bytes_in",
    "peer_bytes_out",
    "origin_get",
    "origin_head",
    "origin_list",
    "evicted_blocks",
)
"""Counters that the page shows over time."""

Status = Callable[[], Awaitable[dict[str, Any]]]


class Watch:
    """Answers the pages. The daemon sets `ready` while the mount answers and is not being unmounted."""

    def __init__(self, metrics: Metrics, status: Status, mountpoint: Path) -> None:
        self.ready = False
        self._metrics = metrics
        self._status = status
        self._mountpoint = mountpoint
        self._one_thread = trio.CapacityLimiter(1)  # a mount that hangs blocks one thread for all probes
        self._samples: deque[list[float]] = deque(maxlen=SAMPLES)

    def pages(self) -> Mapping[str, Page]:
        return {
            "/": self._page,
            "/metrics": self._exposition,
            "/healthz": self._health,
            "/readyz": self._readiness,
            "/status.json": self._state,
            "/history.json": self._history,
        }

    async def run(self) -> None:
        """Take samples until cancelled."""
        while True:
            self._sample()
            await trio.sleep(SAMPLE_EVERY_S)

    # -- pages -------------------------------------------------------------------------------------

    async def _page(self) -> Reply:
        return Reply(200, "text/html; charset=utf-8", PAGE.read_bytes())

    async def _exposition(self) -> Reply:
        # It is slow to import, and not every mount is scraped.
        from cachefs.observe.exposition import CONTENT_TYPE, expose

        return Reply(200, CONTENT_TYPE, expose(self._metrics, await self._known()))

    async def _state(self) -> Reply:
        return _json({**await self.everything(), "now": time.time()})

    async def _history(self) -> Reply:
        return _json({"names": ["time", "blocked_s", *SAMPLED], "samples": list(self._samples)})

    async def _health(self) -> Reply:
        """Status 200 while the mount answers, else 503; no reply while the event loop hangs."""
        reason = await self.illness()
        return plain(reason, 503) if reason else plain("ok")

    async def _readiness(self) -> Reply:
        reason = "" if self.ready else "not mounted (yet, or any more)"
        reason = reason or await self.illness()
        return plain(reason, 503) if reason else plain("ready")

    async def illness(self) -> str:
        """Why the mount does not answer a statfs, which always reaches the daemon and never the origin; "" if it does."""
        with trio.move_on_after(PROBE_S):
            try:
                ask = partial(os.statvfs, self._mountpoint)
                await in_thread(ask, limiter=self._one_thread, abandon_on_cancel=True)
            except OSError as exc:
                return f"{self._mountpoint}: {exc.strerror}"
            return ""
        return f"{self._mountpoint} does not answer within {PROBE_S:g} s"

    async def answers(self) -> None:
        """Return once the mount answers."""
        while reason := await self.illness():
            log.warning("not ready: %s", reason)
            await trio.sleep(1)

    # -- their data ---------------------------------------------------------------------------------

    async def _known(self) -> dict[str, Any]:
        return {**await self._status(), "ready": int(self.ready)}

    async def everything(self) -> dict[str, Any]:
        """Status and ledger, also for `cachefs top`."""
        return {**await self._known(), **shown(self._metrics)}

    def _sample(self) -> None:
        blocked_s = self._metrics.ledger.waits.totals()["blocked_s"]
        self._samples.append([time.time(), blocked_s, *(getattr(self._metrics, name) for name in SAMPLED)])


def shown(metrics: Metrics) -> dict[str, Any]:
    """The ledger as JSON values, for the page and for `cachefs top`."""
    waits = metrics.ledger.waits
    return {
        "datasets": {name: dict(account) for name, account in metrics.ledger.datasets.items()},
        "processes": waits.processes(),
        "reads": waits.totals(),
        "waiting": waits.waiting()[:32],
        "slowest": waits.slowest(),
        "waited_for": list(WAITED_FOR),
    }


def _json(value: Any) -> Reply:
    return Reply(200, "application/json", json.dumps(value, default=str).encode())
