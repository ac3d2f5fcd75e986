"""What was asked for: counters per kind of request, and a log of the requests themselves.

Everything is written down *before* the bytes that let a client notice leave the store: a client that has its answer
finds it counted. For the same reason a request stops being in flight just before its last bytes are sent, so clients
that ask one after another are never seen as concurrent.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import Any

_LOG_LENGTH = 200_000


class Ledger:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight = 0
        self.reset()

    def reset(self) -> None:
        """Reset the counters and the log; requests in flight stay in flight."""
        with self._lock:
            self._requests: Counter[str] = Counter()
            self._statuses: Counter[str] = Counter()
            self._sent: Counter[str] = Counter()
            self._received: Counter[str] = Counter()
            self._max_in_flight = self._in_flight
            self._log: deque[dict[str, Any]] = deque(maxlen=_LOG_LENGTH)
            self._epoch = time.monotonic()

    def begin(self, kind: str, bucket: str, key: str, span: str) -> dict[str, Any]:
        """Record a request; `span` is its Range header. Returns its log entry."""
        with self._lock:
            entry = {
                "at": round(time.monotonic() - self._epoch, 6),
                "kind": kind,
                "bucket": bucket,
                "key": key,
                "range": span,
                "status": None,
            }
            self._log.append(entry)
            self._requests[kind] += 1
            self._in_flight += 1
            self._max_in_flight = max(self._max_in_flight, self._in_flight)
            return entry

    def answer(self, entry: dict[str, Any], status: int) -> None:
        with self._lock:
            entry["status"] = status
            self._statuses[str(status)] += 1

    def end(self) -> None:
        with self._lock:
            self._in_flight -= 1

    def sent(self, kind: str, count: int) -> None:
        with self._lock:
            self._sent[kind] += count

    def received(self, kind: str, count: int) -> None:
        with self._lock:
            self._received[kind] += count

    def counters(self) -> dict[str, Any]:
        with self._lock:
            return {
                "requests": dict(self._requests),
                "statuses": dict(self._statuses),
                "bytes_sent": dict(self._sent),
                "bytes_received": dict(self._received),
                "in_flight": self._in_flight,
                "max_in_flight": self._max_in_flight,
            }

    def log(self) -> list[dict[str, Any]]:
        with self._lock:
            return [dict(entry) for entry in self._log]
