"""Requests to one origin: everything around an attempt that is the same for all vendors.

A client makes one blocking attempt. Here it runs in a worker thread, with a slot of the gate, repetition with growing waits,
resumption of a body at the byte where it broke, the deadline, the limits on bytes a second, and counting. Only the trio task
changes counters and the limiter; the thread owns nothing but its transfer.

A thread that hangs inside a vendor's library is abandoned at the deadline or a cancellation. It may wake up much later; its
transfer is closed by then, so it ends at its next chunk, and neither its sink is called nor its file read again.
"""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import trio

from cachefs.base.errors import (
    CachefsError,
    Conflict,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
    Unsupported,
)
from cachefs.base.ledger import Account, current_call
from cachefs.base.metrics import Metrics
from cachefs.base.names import ERRORS, OnOutage
from cachefs.origin.gate import Gate, Ticket
from cachefs.origin.limiter import Concurrency
from cachefs.origin.outage import Breaker, Interrupted
from cachefs.origin.protocol import AskedToWait, Body, Client, ConnectionEnded, Sink, Source, Writer
from cachefs.origin.rates import RateLimit, Throughput, TransferRate
from cachefs.origin.transfer import Receiving, Sending, Transfer

log = logging.getLogger(__name__)
T = TypeVar("T")
E = TypeVar("E", bound=CachefsError)

READS = ("origin_get", "origin_head", "origin_list")
"""Counters of the requests that are not sent to a store that is out. Writes are sent all the same: their caller decides for
how long."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits between attempts, doubling from `first_s` up to `longest_s`. Jitter cuts each to between half and all of it, so
    that the requests of a node, refused together, do not come back together. Borrowed: the usual figures of S3 clients.

    Not a retry library's: `retries` bounds failures *without progress* (a body that breaks at byte 900 of 1000 and is
    resumed there has not used an attempt), throttling does not count against it, and the origin's Retry-After wins."""

    retries: int = 5
    first_s: float = 0.2
    longest_s: float = 10.0

    def wait_s(self, failures: int, rng: random.Random) -> float:
        """Seconds to wait after the `failures`-th failure in a row (1 is the first)."""
        ceiling = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return ceiling * rng.uniform(0.5, 1.0)


DEFAULT = Backoff()


@dataclass(slots=True)
class _Tries:
    """What has become of one request so far. `failures` and `refusals` (throttling) count since the last progress."""

    retries: int
    failures: int = 0
    refusals: int = 0
    renewed: bool = False  # the credentials
    last: str = "the origin did not answer"

    def failed(self, exc: Transient, gained: bool) -> None:
        """An attempt failed; `gained`: it brought bytes that the next one need not repeat."""
        self.last = str(exc)
        if gained:
            self.failures = self.refusals = 0
        if isinstance(exc, Throttled):
            self.refusals += 1
        else:
            self.failures += 1

    @property
    def used_up(self) -> bool:
        return self.failures > self.retries

    def wait_s(self, exc: Transient, backoff: Backoff, rng: random.Random) -> float:
        """Seconds to wait before the next attempt."""
        if isinstance(exc, ConnectionEnded):
            return 0.0
        wait_s = backoff.wait_s(self.failures + self.refusals, rng)
        return max(wait_s, exc.seconds) if isinstance(exc, AskedToWait) else wait_s


class Attempts:
    """The requests of one origin. All methods raise only `cachefs.base.errors`."""

    def __init__(
        self,
        client: Client,
        *,
        source: str,
        prefix: str = "",
        concurrency: int = 64,
        download_limit: int = 0,
        upload_limit: int = 0,
        deadline_s: float = 60.0,
        on_outage: OnOutage = ERRORS,
        metrics: Metrics,
        backoff: Backoff = DEFAULT,
    ) -> None:
        self.client = client
        # A client has one of the two.
        self._fetch: Callable[..., Awaitable[None]] | None = getattr(client, "fetch", None)
        self._read: Callable[..., Generator[memoryview | bytes, None, None]] | None
        self._read = getattr(client, "read", None)
        self.source = source
        self.prefix = prefix
        self.label = re.split("@(?=https?://)", source)[0]  # as the user wrote it, for messages
        self.deadline_s = deadline_s
        self.backoff = backoff
        self.metrics = metrics
        self.gate = Gate(Concurrency(concurrency))
        # The gate bounds requests in flight. This bounds threads, abandoned ones included, which end at the vendor's own
        # read timeout: a few times the concurrency suffice (guessed).
        self.threads = trio.CapacityLimiter(4 * concurrency + 4)
        self.transfer_rate = TransferRate()
        self.breaker = Breaker(
            self.label, lambda: client.list_page(prefix, None, 1), on_outage, deadline_s, metrics
        )
        self._rng = random.Random()
        self.limit(download_limit, upload_limit)
        self._download, self._upload = Throughput(), Throughput()
        self._last_error = ""

    def limit(self, download: int, upload: int) -> None:
        """Bound the bytes a second of transfers that begin from now on; 0 is no limit."""
        self._download_limit = RateLimit(download) if download else None
        self._upload_limit = RateLimit(upload) if upload else None

    @property
    def writer(self) -> Writer:
        """The writing of the client; `Unsupported` where nothing can be written."""
        found = self.client.writer
        if found is None:
            raise Unsupported(f"{self.label}: this origin can only be read")
        return found

    def name(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self.label}/{key}"

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values. `limited_by` tells why `concurrency` is below its maximum; rates are in
        bytes a second."""
        gate, now = self.gate, time.monotonic()
        return {
            "concurrency": gate.concurrency.limit,
            "concurrency_max": gate.concurrency.maximum,
            "in_flight": gate.in_flight,
            "background_in_flight": gate.background_in_flight,
            "demand_waiting": len(gate.line.demand),
            "background_waiting": len(gate.line.background),
            "limited_by": gate.concurrency.reason,
            "download_limit": self._download_limit.bytes_per_s if self._download_limit else 0,
            "upload_limit": self._upload_limit.bytes_per_s if self._upload_limit else 0,
            "throughput": round(self._download.rate(now)),
            "upload_throughput": round(self._upload.rate(now)),
            "last_error": self._last_error,
        }

    def close(self) -> None:
        self.breaker.close()
        self.client.close()

    async def receive(
        self, key: str, etag: str, start: int, stop: int, sink: Sink, *, whole: bool, turn: Ticket
    ) -> None:
        """As `Origin.read`."""

        fetch, read = self._fetch, self._read

        async def attempt() -> None:
            at = transfer.position
            given = key, etag, at, stop, whole and at == start
            if fetch is not None:
                await fetch(*given, transfer)
            elif read is not None:
                await self._in_thread(lambda: transfer.drain(read(*given)))
            transfer.check()

        what = f"reading {self.name(key)}"
        at, done = start, start >= stop
        while not done:
            transfer = Receiving(
                at, stop, sink, self.deadline_s, self._download_limit, turn, self._progressed
            )
            try:
                await self.repeat(attempt, what, "origin_get", key, turn=turn, transfer=transfer)
                done = True
            except Interrupted:
                if not self.breaker.how.wait_s:
                    raise
            finally:
                await transfer.close()
                self._count(transfer)  # an abandoned thread may have gone on until now
            at = transfer.position
            if transfer.sink_error is not None:
                raise transfer.sink_error
            done = done or at == stop

    async def send(
        self,
        request: Callable[[Body], T],
        source: Source,
        size: int,
        what: str,
        counter: str,
        key: str,
        turn: Ticket | None = None,
    ) -> T:
        """The result of `request`, which sends the first `size` bytes of `source`. Arguments as for `call`. An error of
        `source` is raised unchanged."""
        turn = turn or Ticket()
        body = Sending(source, size, self.deadline_s, self._upload_limit, turn, self._progressed)
        try:
            result = await self.call(
                lambda: body.attempt(lambda: request(body)), what, counter, key, turn=turn, transfer=body
            )
        finally:
            await body.close()
            self._count(body)  # an abandoned thread may have gone on until now
        if body.source_error is not None:
            raise body.source_error
        assert result is not None
        return result

    async def call(
        self,
        attempt: Callable[[], T],
        what: str,
        counter: str,
        key: str,
        *,
        turn: Ticket | None = None,
        transfer: Transfer | None = None,
        retries: int | None = None,
        patience: int = 1,
    ) -> T:
        """The result of `attempt`, a call that blocks. As `repeat`."""
        return await self.repeat(
            lambda: self._in_thread(attempt),
            *(what, counter, key),
            turn=turn,
            transfer=transfer,
            retries=retries,
            patience=patience,
        )

    async def repeat(
        self,
        attempt: Callable[[], Awaitable[T]],
        what: str,
        counter: str,
        key: str,
        *,
        turn: Ticket | None = None,
        transfer: Transfer | None = None,
        retries: int | None = None,
        patience: int = 1,
    ) -> T:
        """Repeat `attempt` until it succeeds, fails for good, or the deadline (times `patience`) has passed. Each attempt is
        counted under the metric `counter`, for the dataset of `key`. `what` begins error messages. `Unreachable` when the
        store is out and the request is not sent, or the origin has not come back while the request waited."""
        turn = turn or Ticket()
        tries = _Tries(self.backoff.retries if retries is None else retries)
        deadline_s = self.deadline_s * patience
        breaker, waits_until = self.breaker, 0.0
        waits = counter in READS or breaker.how.wait_s > 0
        # A body that is being sent is left to the client's own timeout: it may have arrived.
        interruptible = waits and not isinstance(transfer, Sending)
        with trio.move_on_after(deadline_s) as scope:
            while True:
                if waits and breaker.is_out:
                    waits_until = waits_until or trio.current_time() + breaker.how.wait_s
                    scope.deadline = math.inf
                    await breaker.admit(what, waits_until)
                    scope.deadline = trio.current_time() + deadline_s
                    tries.failures = tries.refusals = 0
                if transfer is not None:
                    transfer.begin(scope)
                since = time.monotonic()
                try:
                    with breaker.interruptible() if interruptible else nullcontext():
                        return await self._once(attempt, counter, key, turn, transfer, patience)
                    if transfer is not None:
                        raise Interrupted(f"{what}: {breaker.complaint()}")
                    continue
                except PermissionDenied as exc:
                    if tries.renewed or not await self._in_thread(partial(self.client.renew, since)):
                        raise self._failed(exc) from exc.__cause__
                    tries.renewed, wait_s = True, 0.0
                except Transient as exc:
                    tries.failed(exc, gained=transfer is not None and transfer.gained)
                    if not isinstance(exc, Throttled):
                        breaker.failed(exc)
                    if waits and breaker.is_out:
                        continue
                    if tries.used_up:
                        gave_up = f"{what}: gave up after {tries.failures} attempts: {tries.last}"
                        raise self._failed(OriginFailed(gave_up)) from exc
                    wait_s = tries.wait_s(exc, self.backoff, self._rng)
                    self._last_error = tries.last
                self.metrics.origin_retries += 1
                with breaker.interruptible() if interruptible else nullcontext():
                    await trio.sleep(wait_s)
        failed = OriginFailed(f"{what}: gave up after {deadline_s:g} s without progress: {tries.last}")
        raise self._failed(failed)

    async def _once(
        self,
        attempt: Callable[[], Awaitable[T]],
        counter: str,
        key: str,
        turn: Ticket,
        transfer: Transfer | None,
        patience: int,
    ) -> T:
        """One attempt with a slot of the gate, reported to the limiter and the breaker."""
        metrics, gate = self.metrics, self.gate
        await (gate.enter(turn) if transfer is None else transfer.enter(gate, turn))
        sent_at = trio.current_time()
        setattr(metrics, counter, getattr(metrics, counter) + 1)
        accounts = self._accounts(counter, key, turn)
        for account in accounts:
            account[counter] += 1
        if transfer is not None:
            transfer.accounts = accounts
        try:
            # A patient request expects a long silence, so its silence raises no suspicion.
            with self.breaker.asking() if patience == 1 else nullcontext():
                result = await attempt()
        except Throttled:
            self.breaker.heard()
            metrics.origin_throttled += 1
            gate.concurrency.throttled(sent_at, trio.current_time())
            raise
        except (Conflict, NoSuchUpload, NotFound, ObjectChanged, PermissionDenied, Unsupported):
            self.breaker.heard()
            gate.concurrency.succeeded()  # this request was refused, not the number of requests
            raise
        except CachefsError:
            raise
        except Exception as exc:
            log.exception("an origin client raised what it should have translated")
            raise self._failed(OriginFailed(f"{type(exc).__name__}: {exc}".splitlines()[0])) from exc
        else:
            self.breaker.heard()
            gate.concurrency.succeeded()
            if transfer is not None:
                self.transfer_rate.add(transfer.received, trio.current_time() - sent_at)
            return result
        finally:
            if transfer is not None:
                self._count(transfer)
                gate.concurrency.finished(len(gate.line) > 0, trio.current_time())
            gate.leave(turn)
            metrics.ledger.origin_seconds[counter.removeprefix("origin_")].add(trio.current_time() - sent_at)

    def _accounts(self, counter: str, key: str, turn: Ticket) -> list[Account]:
        """The accounts of the dataset, and of the process that waits for the request (prefetching has none)."""
        ledger = self.metrics.ledger
        accounts = [ledger.requests.account(self.prefix, key)]
        call = None if counter == "origin_get" else current_call.get()
        thread = turn.thread if call is None else call.thread
        if thread:
            accounts.append(ledger.waits.process(thread).account)
        return accounts

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self.threads)

    def _failed(self, exc: E) -> E:
        self.metrics.origin_errors += 1
        self._last_error = str(exc)
        return exc

    def _count(self, transfer: Transfer) -> None:
        """Count the bytes of a transfer since it was last counted."""
        count = transfer.position - transfer.counted
        transfer.counted += count
        setattr(self.metrics, transfer.counter, getattr(self.metrics, transfer.counter) + count)
        for account in transfer.accounts:
            account[transfer.counter] += count
        self.gate.concurrency.arrived(count)
        received = transfer.counter == "origin_bytes"
        (self._download if received else self._upload).add(count, time.monotonic())

    def _progressed(self, transfer: Transfer) -> None:
        """Called about once a second while bytes of a transfer arrive or leave."""
        self.breaker.heard()
        self._count(transfer)
