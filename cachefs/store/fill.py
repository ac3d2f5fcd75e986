"""Bytes on their way in: a run of blocks being written to a tier, or to the heap when no tier has room.

A fill is an origin's sink. `write` runs in a worker thread and touches nothing but the fill itself; everything that
others see happens in `settle`, on the trio thread. Until a block is settled it does not exist for anybody but the
readers that wait for this very transfer: they may read bytes below `landed`, which never goes back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import xxhash

from cachefs.errors import NoRoom
from cachefs.names import block_length
from cachefs.store.index import Copy
from cachefs.store.tier import Tier


class FillClosed(Exception):
    """The transfer outlived its fill; whoever delivers must stop."""


class Fill:
    """Blocks [start_block, stop_block) of one version, delivered in order from the first byte on.

    `kept` says whether its bytes can be read after it was closed; `waits`, whether writing may wait for a disk; `ahead`,
    that nobody has asked for them when it began; `asker` is the node that has; `counted`, that a use of it was."""

    kept = False
    waits = False
    ahead = False
    asker = ""
    counted = False

    def __init__(self, size: int, block_size: int, start_block: int, stop_block: int) -> None:
        self.start_block = start_block
        self.stop_block = stop_block
        self.start = start_block * block_size
        self.stop = min(size, stop_block * block_size)
        self.landed = self.start
        self.wake_at = (
            self.stop + 1
        )  # the lowest offset anybody waits for: below it, landing bytes disturb nobody
        self.on_landed: Callable[[], None] | None = None
        self.settled = 0  # blocks that exist for everybody
        self._size = size
        self.block_size = block_size
        self._completed: list[tuple[int, int]] = []
        self._hash = xxhash.xxh3_64()
        self._lock = threading.Lock()
        self._closed = False

    def write(self, data: memoryview | bytes) -> None:
        """Take the next bytes. Worker thread. Raises `NoRoom` when the tier cannot take them, `FillClosed` when late."""
        view = memoryview(data)
        with self._lock:
            self._place(view)
            position = self.landed
            while len(view):
                block = position // self.block_size
                end = block * self.block_size + block_length(block, self._size, self.block_size)
                part = view[: end - position]
                self._hash.update(part)
                position += len(part)
                view = view[len(part) :]
                if position == end:
                    self._completed.append((block, self._hash.intdigest()))
                    self._hash = xxhash.xxh3_64()
            self.landed = position
        self._disturb()

    def write_block(self, data: memoryview, checksum: int) -> None:
        """The same for a whole block, of which whoever brings it has found this checksum: no byte is hashed twice."""
        with self._lock:
            block, within = divmod(self.landed, self.block_size)
            if within or len(data) != block_length(block, self._size, self.block_size):
                raise ValueError("not a whole block")
            self._place(data)
            self._completed.append((block, checksum))
            self.landed += len(data)
        self._disturb()

    def _place(self, view: memoryview) -> None:
        if self._closed:
            raise FillClosed
        if self.landed + len(view) > self.stop:
            raise ValueError("more bytes than the range has")
        self._put(view, self.landed)

    def _disturb(self) -> None:
        """Those who wait for what has landed."""
        if self.landed >= self.wake_at and self.on_landed is not None:
            self.on_landed()

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for it, or has read from it."""
        return not self.ahead or self.wake_at <= self.stop

    def take_completed(self) -> list[tuple[int, int]]:
        """(block, checksum) pairs that became whole since the last call."""
        completed = self._completed[self.settled :]
        self.settled += len(completed)
        return completed

    def close(self) -> None:
        """No bytes are taken from here on. Waits for a `write` under way."""
        with self._lock:
            self._closed = True
            self._release()

    def read(self, offset: int, size: int) -> bytes:
        """Bytes that have landed (offset + size <= landed), for a reader."""
        return self.look(offset, size)

    def look(self, offset: int, size: int) -> bytes:
        """The same, for no reader."""
        raise NotImplementedError

    def _put(self, view: memoryview, offset: int) -> None:
        raise NotImplementedError

    def _release(self) -> None:
        raise NotImplementedError


class TierFill(Fill):
    """Into a tier's file."""

    def __init__(
        self,
        tier: Tier,
        copy: Copy,
        file: int | Callable[[], int],
        size: int,
        block_size: int,
        start: int,
        stop: int,
    ) -> None:
        """`file` is a descriptor, or opens one at the first write: on a disk that may take long."""
        super().__init__(size, block_size, start, stop)
        self.tier = tier
        self.waits = tier.blocking
        self.copy = copy
        # Its own: the object's may be closed while a transfer is still being abandoned.
        self._fd = os.dup(file) if isinstance(file, int) else -1
        self._open = file if callable(file) else None
        self.not_opened: OSError | None = None
        self.failure: OSError | None = None

    def _put(self, view: memoryview, offset: int) -> None:
        try:
            if self._fd < 0:
                self._open_file()
            with self.tier.disk.busy():
                while len(view):
                    count = os.pwrite(self._fd, view, offset)
                    offset += count
                    view = view[count:]
        except OSError as exc:
            if exc is not self.not_opened:
                self.failure = exc
            raise NoRoom(f"{self.tier.name} tier: {exc.strerror}") from exc

    def _open_file(self) -> None:
        assert self._open is not None
        try:
            self._fd = self._open()
        except OSError as exc:
            self.not_opened = exc
            raise

    def read(self, offset: int, size: int) -> bytes:
        self.ahead = False
        return self.look(offset, size)

    def look(self, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class HeapFill(Fill):
    """Into memory: for readers that must be served although no tier can take the blocks."""

    kept = True

    def __init__(self, size: int, block_size: int, start: int, stop: int) -> None:
        super().__init__(size, block_size, start, stop)
        self._buffer = bytearray()

    def _put(self, view: memoryview, offset: int) -> None:
        if not self._buffer:  # not before: it may have waited for its turn
            self._buffer = bytearray(self.stop - self.start)
        at = offset - self.start
        self._buffer[at : at + len(view)] = view

    def look(self, offset: int, size: int) -> bytes:
        at = offset - self.start
        return bytes(memoryview(self._buffer)[at : at + size])

    def _release(self) -> None:
        pass
