"""Which bytes of a file go to the store in which part, and when: pure policy.

The cuts are fixed by the store's limits alone (part n begins where part n-1 ends, as long as `Limits.part_size` says), so
a part's number follows from its offset. While the file is written, a part is *ready* once the *frontier*, as far as the
file was written from its beginning without a gap, has gone beyond it: who writes in order does not come back. Who does
come back makes the part *stale*, and it is sent again at the commit, with all else that is *missing*.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from cachefs.origin import Limits


class Piece(NamedTuple):
    """Part `number` as bytes [start, stop) of the file; `touches` tells one content of it from the next."""

    number: int
    start: int
    stop: int
    touches: int


class Parts:
    """What of a file of `size` bytes the store has, of one multipart upload."""

    def __init__(self, limits: Limits, size: int = 0) -> None:
        self.size = size
        self.under_way: dict[int, Piece] = {}
        self._limits = limits
        self._cuts = [0]
        self._frontier = 0
        self._next = 1  # the first part that was not ready yet
        self._touches: dict[int, int] = {}
        self._rewrites = 0
        self._sent: dict[int, Piece] = {}
        self._bytes_under_way = 0

    # What happens to the file.

    def wrote(self, offset: int, length: int) -> None:
        """Bytes [offset, offset + length) have other content; a gap before them is zeros, and its parts are longer now."""
        if not length:
            return
        end = offset + length
        self._touch(offset, end)
        self.size = max(self.size, end)
        if offset <= self._frontier < end:
            self._frontier = end

    def resized(self, size: int) -> None:
        """The file ends at `size`; what is new of it is zeros."""
        if size == self.size:
            return
        self._touch(min(size, self.size), max(size, self.size))
        self.size = size
        self._frontier = min(self._frontier, size)
        self._next = min(self._next, self._number(self._frontier))

    def rewritten(self, size: int) -> None:
        """All of it may have other content, and it ends at `size`."""
        self.size = size
        self._rewrites += 1

    # What is to be sent.

    @property
    def count(self) -> int:
        """How many parts the object has."""
        return self._number(self.size - 1) if self.size else 0

    def ready(self) -> Piece | None:
        """The next part that can be sent while the file is being written."""
        number = self._next
        if not self._limits.most_parts or number in self.under_way or self._cut(number) >= self._frontier:
            return None
        return self._piece(number)

    def pieces(self) -> list[Piece]:
        """All parts of the file as it is now."""
        return [self._piece(number) for number in range(1, self.count + 1)]

    def missing(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Those of `pieces` that the store does not have just so, except where something is under way for their number."""
        return [p for p in pieces if self._sent.get(p.number) != p and p.number not in self.under_way]

    @property
    def waiting_bytes(self) -> int:
        """What is ready and has not landed."""
        return max(0, self._frontier - self._cut(self._next - 1)) + self._bytes_under_way

    @property
    def sent_bytes(self) -> int:
        """What the store has as it is now."""
        return sum(p.stop - p.start for p in self._sent.values() if p == self._piece(p.number))

    # What becomes of it.

    def begin(self, piece: Piece) -> None:
        self.under_way[piece.number] = piece
        self._bytes_under_way += piece.stop - piece.start
        if piece.number == self._next:
            self._next += 1

    def ended(self, piece: Piece, *, landed: bool) -> None:
        """It is under way no more. What was written meanwhile makes it stale."""
        del self.under_way[piece.number]
        self._bytes_under_way -= piece.stop - piece.start
        if landed:
            self._sent[piece.number] = piece

    def is_current(self, piece: Piece) -> bool:
        """Whether its bytes are still those that it was cut from."""
        return piece.stop <= self.size and piece == self._piece(piece.number)

    def forget(self) -> None:
        """The store has nothing of it: the upload is completed, or gone. What is under way lands nowhere."""
        self._sent.clear()
        self._next = 1

    def bounds(self, number: int) -> tuple[int, int]:
        """[start, stop) of a part."""
        return self._cut(number - 1), min(self._cut(number), self.size)

    def _piece(self, number: int) -> Piece:
        return Piece(number, *self.bounds(number), self._touches.get(number, 0) + self._rewrites)

    def _touch(self, start: int, stop: int) -> None:
        for number in range(self._number(start), self._number(stop - 1) + 1):
            self._touches[number] = self._touches.get(number, 0) + 1

    def _cut(self, number: int) -> int:
        """Where part `number` ends, in a file that goes on."""
        while len(self._cuts) <= number:
            self._cuts.append(self._cuts[-1] + self._limits.part_size(self._cuts[-1]))
        return self._cuts[number]

    def _number(self, offset: int) -> int:
        """The part that holds the byte at `offset`."""
        while self._cuts[-1] <= offset:
            self._cut(len(self._cuts))
        return bisect_right(self._cuts, offset)
