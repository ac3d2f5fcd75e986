"""The store as the rooms above see it: asynchronous, patient, and honest.

Reading is here, writing in `cachefs.origin.writes`, and what surrounds every attempt in `cachefs.origin.attempts`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from cachefs.errors import Unsupported
from cachefs.origin.gate import Turn
from cachefs.origin.outage import BrokenOff
from cachefs.origin.protocol import ListPage, Sink
from cachefs.origin.transfer import Receiving
from cachefs.origin.writes import Writes

log = logging.getLogger(__name__)


class Origin(Writes):
    """One store. All methods raise only `cachefs.errors`."""

    @property
    def can_list(self) -> bool:
        return self._client.can_list

    async def list_page(
        self, prefix: str, *, token: str | None = None, start_after: str | None = None, limit: int = 1000
    ) -> ListPage:
        """One page of the keys and common prefixes directly below `prefix` (a full key prefix, "" or ending
        in "/")."""
        return await self.call(
            lambda: self._client.list_page(prefix, token, start_after, limit),
            f"listing {self.name(prefix)}",
            "origin_list",
            prefix,
        )

    async def read(
        self,
        key: str,
        etag: str,
        start: int,
        stop: int,
        sink: Sink,
        *,
        whole: bool = False,
        turn: Turn | None = None,
    ) -> None:
        """Deliver exactly bytes [start, stop) of the version `etag` to `sink.write`, in order, from a worker
        thread. `turn` says whether a reader waits for them, and may be promoted meanwhile; without one, it does.

        Once this has returned or raised, `sink` is not and will not be called. What the sink raises is
        re-raised unchanged. The deadline counts from the last byte that arrived, so a slow store may take its
        time and a silent one may not."""
        if start >= stop:
            return
        turn = turn or Turn()
        what = f"reading {self.name(key)}"
        at, done = start, False
        while not done:
            transfer = Receiving(
                self._client,
                key,
                etag,
                at,
                stop,
                sink,
                whole and at == start,
                self._deadline_s,
                self._limit,
                turn,
                self._progressed,
            )
            try:
                await self.call(transfer.attempt, what, "origin_get", key, turn=turn, transfer=transfer)
                done = True
            except BrokenOff:
                if not self._reach.how.wait_s:
                    raise
            finally:
                await transfer.close()
                self._count(transfer)  # a thread that was given up may have gone on until now
            at = transfer.position
            if transfer.sink_error is not None:
                raise transfer.sink_error
            done = done or at == stop

    async def check(self) -> None:
        """One cheap request at mount time: is there such a store, and may we read it? An empty prefix is fine. A web
        server that has no index page is, too, but from then on `can_list` is False."""
        try:
            await self.call(
                lambda: self._client.list_page(self.prefix, None, None, 1),
                f"opening {self.name(self.prefix)}",
                "origin_list",
                self.prefix,
                retries=min(2, self._backoff.retries),
            )
        except Unsupported as exc:
            self._client.can_list = False
            log.warning("%s", exc)

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values. `limited_by` says why `concurrency` is below its maximum; rates are in
        bytes a second."""
        gate = self._gate
        return {
            "source": self.source,
            "prefix": self.prefix,
            "concurrency": gate.concurrency.limit,
            "concurrency_max": gate.concurrency.maximum,
            "in_flight": gate.in_flight,
            "background_in_flight": gate.background_in_flight,
            "demand_waiting": len(gate.line.demand),
            "background_waiting": len(gate.line.background),
            "limited_by": gate.concurrency.reason,
            "download_limit": self._limit.bytes_per_s if self._limit else 0,
            "upload_limit": self._upload_limit.bytes_per_s if self._upload_limit else 0,
            "throughput": round(self._throughput.rate(time.monotonic())),
            "upload_throughput": round(self._upload_throughput.rate(time.monotonic())),
            "last_error": self._last_error,
            "ignored_conditions": self._client.writer.conditions.ignored() if self._client.writer else [],
            **self._reach.status(),
        }

    async def aclose(self) -> None:
        self._reach.close()
        self._client.close()
