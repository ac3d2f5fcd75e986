"""The way of one dirty file to one key: parts while it is written, the rest at the commit, or all in one request.

A commit that finds no part sent puts a small file whole: one request. A larger one goes in parts, several at a time. What
the origin has forgotten (`NoSuchUpload`) is begun again, once.

`Parts` says which bytes go in which part, and when: pure policy.

The cuts are fixed by the origin's limits alone (part n begins where part n-1 ends, as long as `Limits.part_size` says), so
a part's number follows from its offset. While the file is written, a part is *ready* once the *frontier*, as far as the
file was written from its beginning without a gap, has gone beyond it: a program that writes in order does not come back.
One that does makes the part *stale*, and it is sent again at the commit, with all else that is *missing*.
"""

from __future__ import annotations

import hashlib
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import trio

from cachefs.base.errors import CachefsError, NoSuchUpload, OriginFailed
from cachefs.base.tasks import contained
from cachefs.origin import Limits, ObjectInfo, Origin, Part, Source, Ticket, Upload, each
from cachefs.upload.staging import StagingFile

log = logging.getLogger(__name__)

PUT_BYTES = 16 << 20
"""Up to this size a file that nothing was sent of goes in one request. Derived: at 100 MB/s a connection and 20 ms a
round trip, two parts at once and the requests around them take as long."""

HASHED = 1 << 20
"""Read at once for a digest."""

AT_ONCE = 16
"""Parts of one dirty file in flight while it is written, and as many at its commit. Derived: 128 MiB hide a round trip of
100 ms at 1 GB/s; the gate bounds all dirty files."""


@dataclass(frozen=True, slots=True)
class Preconditions:
    """What the object is to replace: the version `if_match`, or nothing with `if_absent`; whatever there is without. It
    shows `token` when it was put whole."""

    if_match: str | None = None
    if_absent: bool = False
    token: str = ""


class Piece(NamedTuple):
    """Part `number` as bytes [start, stop) of the file; `touches` tells one content of it from the next."""

    number: int
    start: int
    stop: int
    touches: int


class Parts:
    """What of a file of `size` bytes the origin has, of one multipart upload."""

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

    def resumed(self) -> None:
        """An earlier run has sent parts of it: those that are whole now are left to the commit, which compares them."""
        self._frontier, self._next = self.size, self._number(self.size)

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
        """Those of `pieces` that the origin does not have just so, except where something is under way for their number."""
        return [p for p in pieces if self._sent.get(p.number) != p and p.number not in self.under_way]

    @property
    def waiting_bytes(self) -> int:
        """What is ready, and not at the origin yet."""
        return max(0, self._frontier - self._cut(self._next - 1)) + self._bytes_under_way

    @property
    def sent_bytes(self) -> int:
        """What the origin has as it is now."""
        return sum(p.stop - p.start for p in self._sent.values() if p == self._piece(p.number))

    # What becomes of it.

    def begin(self, piece: Piece) -> None:
        self.under_way[piece.number] = piece
        self._bytes_under_way += piece.stop - piece.start
        if piece.number == self._next:
            self._next += 1

    def ended(self, piece: Piece, *, stored: bool) -> None:
        """It is under way no more. What was written meanwhile makes it stale."""
        del self.under_way[piece.number]
        self._bytes_under_way -= piece.stop - piece.start
        if stored:
            self._sent[piece.number] = piece

    def is_current(self, piece: Piece) -> bool:
        """Whether its bytes are still those that it was cut from."""
        return piece == self._piece(piece.number)

    def forget(self) -> None:
        """The origin has nothing of it: the upload is completed, or gone. What is under way counts for nothing."""
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


class Sent(Protocol):
    """What is sent, where to, and what remembers over a crash that something is there."""

    origin: Origin
    key: str
    file: StagingFile

    async def source(self, size: int) -> Source:
        """The first `size` bytes, in one request."""

    async def begun(self, upload: Upload) -> None:
        """There is an upload, and no part of it yet."""

    async def orphaned(self, upload: Upload) -> None:
        """It could not be aborted now."""


class Sender:
    """`final` is True while the outcome of a commit is out of our hands; `failed` is why no part is sent early any more."""

    def __init__(self, what: Sent, parts: Parts) -> None:
        self.parts = parts
        self.failed: CachefsError | None = None
        self.final = False
        self.background = True
        self.upload: Upload | None = None
        self._what = what
        self._quiet = False  # no part is sent early
        self._found: dict[int, Part] | None = {}  # of an earlier run; None: not looked at yet
        self._beginning = trio.Lock()
        self._early: dict[int, trio.CancelScope] = {}
        self._tickets: set[Ticket] = set()
        self._part_ended = trio.lowlevel.ParkingLot()

    # While the file is written.

    def push(self, nursery: trio.Nursery) -> None:
        """Send what is ready, as many parts as may be in flight. A failure ends this until the commit, which reports it."""
        if self._quiet or self.failed is not None:
            return
        while len(self._early) < AT_ONCE and (piece := self.parts.ready()):
            self.parts.begin(piece)
            self._early[piece.number] = scope = trio.CancelScope()
            contained(nursery, f"a part of {self._what.key}", self._send_early, piece, scope, nursery)

    async def _send_early(self, piece: Piece, scope: trio.CancelScope, nursery: trio.Nursery) -> None:
        try:
            with scope:
                await self._send(piece)
        except Exception as exc:
            # Else the file was cut, or rewritten under it; and a commit sends by itself what is missing.
            if self.parts.is_current(piece) and not self._quiet:
                self.failed = expected(exc)
                bug = None if isinstance(exc, CachefsError) else exc
                log.info("%s; trying again at the commit", self.failed, exc_info=bug)
        finally:
            del self._early[piece.number]  # before the tasks that its end has woken go on
            self.push(nursery)

    async def part_ended(self) -> None:
        """Return when the next part has ended, one way or the other."""
        await self._part_ended.park()

    async def break_off(self) -> None:
        """Nothing is under way afterwards, nor sent early any more. Parts that the origin has stay."""
        self._quiet = True
        for scope in self._early.values():
            scope.cancel()
        while self._early:
            await self._part_ended.park()

    def resume(self, upload: Upload) -> None:
        """Go on with what an earlier run has begun. Parts that hold what the file holds are not sent again."""
        self.upload, self._found = upload, None

    # At the commit.

    def promote(self) -> None:
        """A caller waits for it now."""
        self.background = False
        for ticket in self._tickets:
            ticket.promote()

    async def finish(self, pieces: list[Piece], size: int, preconditions: Preconditions) -> ObjectInfo:
        """Make the object of the first `size` bytes, which are `pieces` and stay as they are until this has returned or
        raised; more may follow them. What is returned has no `mtime_ns` (0) where only a HEAD would tell it. Raises what
        `Origin.put` and `Upload` raise."""
        self.failed, self._quiet = None, True
        try:
            try:
                return await self._finish(pieces, size, preconditions)
            except NoSuchUpload as exc:
                await self.break_off()
                self.upload, self._found = None, {}
                self.parts.forget()
                log.info("%s; beginning again", exc)
                return await self._finish(pieces, size, preconditions)
        finally:
            self._quiet = self.final = False

    async def abandon(self) -> None:
        """Nothing is in progress afterwards, and no unrecorded upload is left at the origin, also when this is cancelled."""
        self._quiet = True
        if self._early:  # a scope costs as much as all the rest of a removal here
            with trio.CancelScope(shield=True):
                await self.break_off()
        upload, self.upload, self._found = self.upload, None, {}
        self.parts.forget()
        if upload is not None:
            try:
                await upload.abort()
            except (
                BaseException
            ) as exc:  # also of a caller that is cancelled: nothing else knows of it any more
                await self._what.orphaned(upload)
                if not isinstance(exc, CachefsError):
                    raise
                log.info("%s; trying again later", exc)

    async def _finish(self, pieces: list[Piece], size: int, preconditions: Preconditions) -> ObjectInfo:
        parts = self.parts
        if not pieces:
            await self.abandon()
        small = size <= PUT_BYTES or not self._what.origin.limits.most_parts
        if small and self.upload is None and not parts.under_way:
            self.final = True
            with self._ticket() as ticket, self._what.file.used():
                return await self._what.origin.put(
                    self._what.key,
                    await self._what.source(size),
                    size,
                    if_match=preconditions.if_match,
                    if_absent=preconditions.if_absent,
                    token=preconditions.token,
                    settle=False,
                    ticket=ticket,
                )
        if self._found is None:
            assert self.upload is not None
            self._found = dict(await self.upload.parts())
        while True:
            missing = parts.missing(pieces)
            if missing:
                await each(self._send_begun, missing, AT_ONCE)
            elif parts.under_way:
                await self._part_ended.park()
            else:
                break
        upload = self.upload
        assert upload is not None
        etags = {piece.number: upload.known[piece.number].etag for piece in pieces}
        self.final = True
        info = await upload.complete(
            etags, if_match=preconditions.if_match, if_absent=preconditions.if_absent, settle=False
        )
        self.upload = None
        parts.forget()
        return info

    async def _send_begun(self, piece: Piece) -> None:
        self.parts.begin(piece)
        await self._send(piece)

    async def _send(self, piece: Piece) -> None:
        """`piece` is under way, and is no more afterwards."""
        upload, stored = None, False
        try:
            upload = await self._open_upload()
            with self._ticket() as ticket, self._what.file.used():
                await self._what.file.spill()
                fd, length = self._what.file.fd, piece.stop - piece.start
                found = self._found.pop(piece.number, None) if self._found else None
                if found is None or not await trio.to_thread.run_sync(same, found, fd, piece.start, length):
                    await upload.part(piece.number, fd, piece.start, length, ticket=ticket)
            stored = upload is self.upload
        finally:
            self.parts.ended(piece, stored=stored)
            self._part_ended.unpark_all()

    async def _open_upload(self) -> Upload:
        async with self._beginning:
            if self.upload is None:
                if self.failed is not None:
                    raise self.failed  # just now, and no other early part asks again
                with trio.CancelScope(shield=True):  # within the origin's deadline: nothing else records it
                    await self._begin()
            assert self.upload is not None
            return self.upload

    async def _begin(self) -> None:
        upload = await self._what.origin.begin_upload(self._what.key)
        try:
            await self._what.begun(upload)
        except CachefsError:
            await upload.abort()
            raise
        self.upload = upload

    @contextmanager
    def _ticket(self) -> Iterator[Ticket]:
        ticket = Ticket(self.background)
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)


def expected(exc: Exception) -> CachefsError:
    """A failure as the committing caller is told it. One that is our bug ends neither the task's nursery nor the file."""
    if isinstance(exc, CachefsError):
        return exc
    return OriginFailed(f"unexpected {type(exc).__name__}")


def same(part: Part, fd: int, start: int, length: int) -> bool:
    """Whether the origin's part holds these bytes: its etag is their MD5, as S3 has it. Elsewhere it is unknown."""
    wanted = part.etag.strip('"').lower()
    if part.size != length or len(wanted) != 32:
        return False
    digest = hashlib.md5(usedforsecurity=False)
    for at in range(start, start + length, HASHED):
        digest.update(os.pread(fd, min(HASHED, start + length - at), at))
    return digest.hexdigest() == wanted
