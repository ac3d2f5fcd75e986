"""Repeating what a client does once: everything around an attempt that is the same for all vendors.

Idea: a client makes one blocking attempt. Here it is run in a worker thread, with a turn at the gate, repetition with
growing waits, resuming a body at the byte where it broke, the deadline, the limits on bytes a second, counting. Only
the trio task changes counters and the limiter; the thread owns nothing but the transfer it was given.

A thread that hangs inside a vendor's library is abandoned when the deadline or a cancellation strikes. It may
wake up much later; its transfer is closed by then, so it ends at its next chunk, and its sink is never called, nor its
file read, again.
"""

from __future__ import annotations

import logging
import math
import random
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TypeVar

import trio

from cachefs.errors import (
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
from cachefs.ledger import Account, current_call
from cachefs.metrics import Metrics
from cachefs.names import ERRORS, OnOutage
from cachefs.origin.bucket import RateLimit, Throughput, TransferRate
from cachefs.origin.gate import Gate, Turn
from cachefs.origin.limiter import Concurrency
from cachefs.origin.outage import BrokenOff, Reach
from cachefs.origin.protocol import AskedToWait, Client
from cachefs.origin.retry import DEFAULT, Backoff
from cachefs.origin.transfer import Sending, Transfer

log = logging.getLogger(__name__)
T = TypeVar("T")
E = TypeVar("E", bound=CachefsError)

PATIENCE = 12
"""Deadlines, and silences, for what the store does by itself (copying, putting parts together). Guessed: S3 speaks of
minutes."""


READS = ("origin_get", "origin_head", "origin_list")
"""What is not asked of a store that is out. Writes are tried all the same: whoever made them decides how long."""


class Attempts:
    """One store's requests, all of them. Raises only `cachefs.errors`."""

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
        self._limit = RateLimit(download_limit) if download_limit else None
        self._upload_limit = RateLimit(upload_limit) if upload_limit else None
        self._throughput, self._upload_throughput = Throughput(), Throughput()
        self._transfer_rate = TransferRate()
        self._last_error = ""
        self._reach = Reach(
            self._label, lambda: client.list_page(prefix, None, None, 1), on_outage, deadline_s, metrics
        )

    @property
    def serves_stale(self) -> bool:
        """Whether the store is out, and what was known of it last is to be believed for so long."""
        return self._reach.serves_stale

    @property
    def transfer_rate(self) -> float:
        """Bytes a second that one read brings; 0 when none has been seen."""
        return self._transfer_rate.bytes_per_s

    @property
    def complaint(self) -> str:
        """One line while the store does not answer at all, else ""."""
        return self._reach.complaint()

    def name(self, key: str) -> str:
        """A key as messages name it."""
        return f"{self._label}/{key}"

    def _count(self, transfer: Transfer) -> None:
        """What has gone by since it was last counted."""
        count = transfer.position - transfer.counted
        transfer.counted += count
        setattr(self._metrics, transfer.counter, getattr(self._metrics, transfer.counter) + count)
        for account in transfer.accounts:
            account[transfer.counter] += count
        self._gate.concurrency.arrived(count)
        received = transfer.counter == "origin_bytes"
        (self._throughput if received else self._upload_throughput).add(count, time.monotonic())

    def _progressed(self, transfer: Transfer) -> None:
        """Bytes went by just now."""
        self._reach.heard()
        self._count(transfer)

    async def call(
        self,
        attempt: Callable[[], T],
        what: str,
        counter: str,
        key: str,
        *,
        turn: Turn | None = None,
        transfer: Transfer | None = None,
        retries: int | None = None,
        patience: int = 1,
    ) -> T:
        """Repeat `attempt` until it succeeds, fails for good, or the deadline (times `patience`) strikes. `counter` and
        `key` say under what, and for which dataset, each attempt is counted. `Unreachable` when a store that is out is not
        asked, or has not come back while this waited."""
        retries = self._backoff.retries if retries is None else retries
        turn = turn or Turn()
        failures = refusals = 0
        renewed = False
        last = "the store did not answer"
        deadline_s = self._deadline_s * patience
        reach, waits_until = self._reach, 0.0
        waits = counter in READS or reach.how.wait_s > 0
        # What sends is left to the client's own timeout: it may have arrived.
        breaks = waits and not isinstance(transfer, Sending)
        with trio.move_on_after(deadline_s) as scope:
            while True:
                if waits and reach.is_out:
                    waits_until = waits_until or trio.current_time() + reach.how.wait_s
                    scope.deadline = math.inf
                    await reach.admit(what, waits_until)
                    scope.deadline = trio.current_time() + deadline_s
                    failures = refusals = 0
                if transfer is not None:
                    transfer.begin(scope)
                since = time.monotonic()
                try:
                    with reach.broken_off() if breaks else nullcontext():
                        return await self._once(attempt, counter, key, turn, transfer, patience)
                    if transfer is not None:
                        raise BrokenOff(f"{what}: {reach.complaint()}")
                    continue
                except PermissionDenied as exc:
                    if renewed or not await self._in_thread(partial(self._client.renew, since)):
                        raise self._failed(exc) from exc.__cause__
                    renewed, wait_s = True, 0.0
                except Transient as exc:
                    last = str(exc)
                    if transfer is not None and transfer.gained:
                        failures = refusals = 0
                    if isinstance(exc, Throttled):
                        refusals += 1
                    else:
                        failures += 1
                        reach.failed(exc)
                    if waits and reach.is_out:
                        continue
                    if failures > retries:
                        gave_up = OriginFailed(f"{what}: gave up after {failures} attempts: {last}")
                        raise self._failed(gave_up) from exc
                    wait_s = self._backoff.wait_s(failures + refusals, self._rng)
                    if isinstance(exc, AskedToWait):
                        wait_s = max(wait_s, exc.seconds)
                    self._last_error = last
                self._metrics.origin_retries += 1
                with reach.broken_off() if breaks else nullcontext():
                    await trio.sleep(wait_s)
        raise self._failed(OriginFailed(f"{what}: gave up after {deadline_s:g} s without progress: {last}"))

    async def _once(
        self,
        attempt: Callable[[], T],
        counter: str,
        key: str,
        turn: Turn,
        transfer: Transfer | None,
        patience: int,
    ) -> T:
        """One attempt, with a slot held, and what it teaches the limiter."""
        metrics, gate = self._metrics, self._gate
        await (gate.enter(turn) if transfer is None else transfer.enter(gate, turn))
        sent_at = trio.current_time()
        setattr(metrics, counter, getattr(metrics, counter) + 1)
        accounts = self._accounts(counter, key, turn)
        for account in accounts:
            account[counter] += 1
        if transfer is not None:
            transfer.accounts = accounts
        try:
            # Who is patient has asked for what takes long: that is no silence.
            with self._reach.asking() if patience == 1 else nullcontext():
                result = await self._in_thread(attempt)
        except Throttled:
            self._reach.heard()
            metrics.origin_throttled += 1
            gate.concurrency.throttled(sent_at, trio.current_time())
            raise
        except (Conflict, NoSuchUpload, NotFound, ObjectChanged, PermissionDenied, Unsupported):
            self._reach.heard()
            gate.concurrency.succeeded()  # a refusal of this request, but not of their number
            raise
        except CachefsError:
            raise
        except Exception as exc:
            log.exception("an origin client raised what it should have translated")
            raise self._failed(OriginFailed(f"{type(exc).__name__}: {exc}".splitlines()[0])) from exc
        else:
            self._reach.heard()
            gate.concurrency.succeeded()
            if transfer is not None:
                self._transfer_rate.add(transfer.received, trio.current_time() - sent_at)
            return result
        finally:
            if transfer is not None:
                self._count(transfer)
                gate.concurrency.finished(len(gate.line) > 0, trio.current_time())
            gate.leave(turn)

    def _accounts(self, counter: str, key: str, turn: Turn) -> list[Account]:
        """Of the dataset, and of the process that it is for: what is fetched ahead is for none."""
        ledger = self._metrics.ledger
        accounts = [ledger.requests.account(self.prefix, key)]
        call = None if counter == "origin_get" else current_call.get()
        thread = turn.thread if call is None else call.thread
        if thread:
            accounts.append(ledger.waits.process(thread).account)
        return accounts

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)

    def _failed(self, exc: E) -> E:
        self._metrics.origin_errors += 1
        self._last_error = str(exc)
        return exc
