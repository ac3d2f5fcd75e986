"""How much memory requests may hold while they wait. Used by both backends.

Requests are always read from the kernel, so that one program's writes that wait for an upload do not hold up the requests
of all others. What bounds them instead is memory: beyond it, a request that would wait is answered with ENOMEM.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cachefs.cgroup import memory_limit

SHARE = 4
"""This part of the memory that the process may have is for requests that wait. Guessed: as much as the RAM tier has by
default."""

LEAST_BYTES = 64 << 20
"""It is never less. Guessed: a few dozen writers of 1 MiB, also in a small container."""

REQUEST_BYTES = 16 << 10
"""What a request that waits takes beside its data. Measured: 9 to 14 KiB for the task, its scope and its closures."""


class Refused(MemoryError):
    """There is no memory for one more request that waits."""


class Admission:
    """The account of both. `held_bytes` is what requests that wait hold now."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        if limit_bytes is None:
            limit_bytes = max(LEAST_BYTES, memory_limit() // SHARE)
        self.limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, data_bytes: int = 0, *, always: bool = False) -> int:
        """Account for a request with so much data; returns what to give back. Raises `Refused`, unless `always`."""
        count = REQUEST_BYTES + data_bytes
        if not always and self.held_bytes + count > self.limit_bytes:
            raise Refused(f"requests that wait hold {self.held_bytes >> 20} MiB already")
        self.held_bytes += count
        return count

    def give_back(self, count: int) -> None:
        self.held_bytes -= count

    @contextmanager
    def holds(self, data_bytes: int = 0) -> Iterator[None]:
        """The same around a request."""
        count = self.take(data_bytes)
        try:
            yield
        finally:
            self.give_back(count)
