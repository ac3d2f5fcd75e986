"""The store as the rooms above see it: asynchronous, patient, and honest.

Idea: a client makes one blocking attempt. Here it is run in a worker thread, and everything around the
attempt is the same for all vendors: a turn at the gate, repetition with growing waits, resuming a body at the
byte where it broke, the deadline, the download limit, counting. Only the trio task changes counters and the
limiter; the thread owns nothing but the transfer it was given.

A thread that hangs inside a vendor's library is abandoned when the deadline or a cancellation strikes. It may
wake up much later; its transfer is closed by then, so it ends at its next chunk and its sink is never called
again.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import trio

from cachefs.errors import (
    CachefsError,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
    Unsupported,
)
from cachefs.metrics import Metrics
from cachefs.origin.bucket import DownloadLimit, Throughput
from cachefs.origin.gate import Gate, Turn
from cachefs.origin.limiter import Concurrency
from cachefs.origin.protocol import AskedToWait, Client, ListPage, ObjectInfo, Sink
from cachefs.origin.retry import DEFAULT, Backoff
from cachefs.origin.transfer import Transfer

log = logging.getLogger(__name__)
T = TypeVar("T")
E = TypeVar("E", bound=CachefsError)


class Origin:
    """One store. All methods raise only `cachefs.errors`."""

    def __init__(
        self,
        client: Client,
        *,
        source: str,
        prefix: str = "",
        concurrency: int = 64,
        download_limit: int = 0,
        deadline_s: float = 60.0,
        metrics: Metrics,
        backoff: Backoff = DEFAULT,
    ) -> None:
        self.source = source
        self.prefix = prefix
        self._label = re.split("@(?=https?://)", source)[0]  # as the user wrote it, for messages
        self._client = client
        self._deadline_s = deadline_s
        self._metrics = metrics
        self._backoff = backoff
        self._rng = random.Random()
        self._gate = Gate(Concurrency(concurrency))
        # The gate bounds what is in flight; this only bounds threads, abandoned ones included. Those end when
        # the vendor's own read timeout strikes, so a few times the concurrency is room enough (guessed).
        self._threads = trio.CapacityLimiter(4 * concurrency + 4)
        self._limit = DownloadLimit(download_limit) if download_limit else None
        self._throughput = Throughput()
        self._last_error = ""

    @property
    def can_list(self) -> bool:
        return self._client.can_list

    async def list_page(
        self, prefix: str, *, token: str | None = None, start_after: str | None = None, limit: int = 1000
    ) -> ListPage:
        """One page of the keys and common prefixes directly below `prefix` (a full key prefix, "" or ending
        in "/")."""
        return await self._call(
            lambda: self._client.list_page(prefix, token, start_after, limit),
            f"listing {self._name(prefix)}",
            "origin_list",
        )

    async def head(self, key: str) -> ObjectInfo:
        """Size, mtime and etag of one object as it is now."""
        return await self._call(
            lambda: self._client.head(key), f"looking up {self._name(key)}", "origin_head"
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
        transfer = Transfer(
            self._client,
            key,
            etag,
            start,
            stop,
            sink,
            whole,
            self._deadline_s,
            self._limit,
            turn,
            self._count,
        )
        what = f"reading {self._name(key)}"
        try:
            await self._call(transfer.attempt, what, "origin_get", turn=turn, transfer=transfer)
        finally:
            await transfer.close()
        if transfer.sink_error is not None:
            raise transfer.sink_error

    async def check(self) -> None:
        """One cheap request at mount time: is there such a store, and may we read it? An empty prefix is fine. A web
        server that has no index page is, too, but from then on `can_list` is False."""
        try:
            await self._call(
                lambda: self._client.list_page(self.prefix, None, None, 1),
                f"opening {self._name(self.prefix)}",
                "origin_list",
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
            "throughput": round(self._throughput.rate(time.monotonic())),
            "last_error": self._last_error,
        }

    async def aclose(self) -> None:
        self._client.close()

    def _name(self, key: str) -> str:
        return f"{self._label}/{key}"

    def _count(self, transfer: Transfer) -> None:
        """What has been delivered since it was last counted."""
        count = transfer.position - transfer.counted
        transfer.counted += count
        self._metrics.origin_bytes += count
        self._gate.concurrency.arrived(count)
        self._throughput.add(count, time.monotonic())

    async def _call(
        self,
        attempt: Callable[[], T],
        what: str,
        counter: str,
        *,
        turn: Turn | None = None,
        transfer: Transfer | None = None,
        retries: int | None = None,
    ) -> T:
        """Repeat `attempt` until it succeeds, fails for good, or the deadline strikes."""
        retries = self._backoff.retries if retries is None else retries
        turn = turn or Turn()
        failures = refusals = 0
        renewed = False
        last = "the store did not answer"
        with trio.move_on_after(self._deadline_s) as scope:
            while True:
                position = 0 if transfer is None else transfer.begin(scope)
                since = time.monotonic()
                try:
                    return await self._once(attempt, counter, turn, transfer)
                except PermissionDenied as exc:
                    if renewed or not await self._in_thread(partial(self._client.renew, since)):
                        raise self._failed(exc) from exc.__cause__
                    renewed, wait_s = True, 0.0
                except Transient as exc:
                    last = str(exc)
                    if transfer is not None and transfer.position > position:
                        failures = refusals = 0
                    if isinstance(exc, Throttled):
                        refusals += 1
                    else:
                        failures += 1
                    if failures > retries:
                        gave_up = OriginFailed(f"{what}: gave up after {failures} attempts: {last}")
                        raise self._failed(gave_up) from exc
                    wait_s = self._backoff.wait_s(failures + refusals, self._rng)
                    if isinstance(exc, AskedToWait):
                        wait_s = max(wait_s, exc.seconds)
                    self._last_error = last
                self._metrics.origin_retries += 1
                await trio.sleep(wait_s)
        raise self._failed(
            OriginFailed(f"{what}: gave up after {self._deadline_s:g} s without progress: {last}")
        )

    async def _once(self, attempt: Callable[[], T], counter: str, turn: Turn, transfer: Transfer | None) -> T:
        """One attempt, with a slot held, and what it teaches the limiter."""
        metrics, gate = self._metrics, self._gate
        await gate.enter(turn)
        sent_at = trio.current_time()
        setattr(metrics, counter, getattr(metrics, counter) + 1)
        try:
            result = await self._in_thread(attempt)
        except Throttled:
            metrics.origin_throttled += 1
            gate.concurrency.throttled(sent_at, trio.current_time())
            raise
        except (NotFound, ObjectChanged, PermissionDenied, Unsupported):
            gate.concurrency.succeeded()  # a refusal of this request, but not of their number
            raise
        except CachefsError:
            raise
        except Exception as exc:
            log.exception("an origin client raised what it should have translated")
            raise self._failed(OriginFailed(f"{type(exc).__name__}: {exc}".splitlines()[0])) from exc
        else:
            gate.concurrency.succeeded()
            return result
        finally:
            if transfer is not None:
                self._count(transfer)
                gate.concurrency.finished(len(gate.line) > 0, trio.current_time())
            gate.leave(turn)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)

    def _failed(self, exc: E) -> E:
        self._metrics.origin_errors += 1
        self._last_error = str(exc)
        return exc
