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
import random
import re
import time
from collections.abc import Callable
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
from cachefs.ledger import Account
from cachefs.metrics import Metrics
from cachefs.origin.bucket import RateLimit, Throughput
from cachefs.origin.gate import Gate, Turn
from cachefs.origin.limiter import Concurrency
from cachefs.origin.protocol import AskedToWait, Client
from cachefs.origin.retry import DEFAULT, Backoff
from cachefs.origin.transfer import Transfer

log = logging.getLogger(__name__)
T = TypeVar("T")
E = TypeVar("E", bound=CachefsError)

PATIENCE = 12
"""Deadlines, and silences, for what the store does by itself (copying, putting parts together). Guessed: S3 speaks of
minutes."""


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
        self._last_error = ""

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
        `key` say under what, and for which dataset, each attempt is counted."""
        retries = self._backoff.retries if retries is None else retries
        turn = turn or Turn()
        failures = refusals = 0
        renewed = False
        last = "the store did not answer"
        deadline_s = self._deadline_s * patience
        with trio.move_on_after(deadline_s) as scope:
            while True:
                if transfer is not None:
                    transfer.begin(scope)
                since = time.monotonic()
                try:
                    return await self._once(attempt, counter, key, turn, transfer)
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
                    if failures > retries:
                        gave_up = OriginFailed(f"{what}: gave up after {failures} attempts: {last}")
                        raise self._failed(gave_up) from exc
                    wait_s = self._backoff.wait_s(failures + refusals, self._rng)
                    if isinstance(exc, AskedToWait):
                        wait_s = max(wait_s, exc.seconds)
                    self._last_error = last
                self._metrics.origin_retries += 1
                await trio.sleep(wait_s)
        raise self._failed(OriginFailed(f"{what}: gave up after {deadline_s:g} s without progress: {last}"))

    async def _once(
        self, attempt: Callable[[], T], counter: str, key: str, turn: Turn, transfer: Transfer | None
    ) -> T:
        """One attempt, with a slot held, and what it teaches the limiter."""
        metrics, gate = self._metrics, self._gate
        await (gate.enter(turn) if transfer is None else transfer.enter(gate, turn))
        sent_at = trio.current_time()
        setattr(metrics, counter, getattr(metrics, counter) + 1)
        accounts = self._accounts(key, turn)
        for account in accounts:
            account[counter] += 1
        if transfer is not None:
            transfer.accounts = accounts
        try:
            result = await self._in_thread(attempt)
        except Throttled:
            metrics.origin_throttled += 1
            gate.concurrency.throttled(sent_at, trio.current_time())
            raise
        except (Conflict, NoSuchUpload, NotFound, ObjectChanged, PermissionDenied, Unsupported):
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

    def _accounts(self, key: str, turn: Turn) -> list[Account]:
        """Of the dataset, and of the process whose read it is for."""
        ledger = self._metrics.ledger
        accounts = [ledger.requests.account(self.prefix, key)]
        if turn.thread:
            accounts.append(ledger.waits.process(turn.thread).account)
        return accounts

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._threads)

    def _failed(self, exc: E) -> E:
        self._metrics.origin_errors += 1
        self._last_error = str(exc)
        return exc
