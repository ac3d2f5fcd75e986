"""Sending one dirty file to one key of an origin: in one request, or in parts, some of them while the file is written.

`Parts` decides which bytes are sent in which part, and when. It is pure policy. The origin's limits alone determine the
cuts, so a part's number follows from its offset. While the file is written, a part is *ready* once the *frontier* has passed
its end: the frontier is the end of what was written from the beginning without a gap, and a program that writes in order
does not go back. If a program does, the part is *stale*, and is sent again at the commit, with all other *missing* parts.
"""

from __future__ import annotations

import hashlib
import logging
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import trio

from cachefs.base.errors import CachefsError, NoSuchUpload, OriginFailed
from cachefs.base.tasks import Lock, contained
from cachefs.origin import (
    FileRange,
    Limits,
    ObjectInfo,
    Origin,
    Part,
    Preconditions,
    Source,
    Ticket,
    Upload,
    each,
)
from cachefs.upload.staging import StagingFile

log = logging.getLogger(__name__)

PUT_BYTES = 16 << 20
"""Most bytes of a file that is sent in one request, if no part was sent before. Derived: at 100 MB/s a connection and 20 ms
a round trip, two concurrent parts and the requests around them take as long."""

HASHED = 1 << 20
"""Bytes of each read when a part is hashed."""

AT_ONCE = 16
"""Parts of one dirty file in flight while it is written, and as many at its commit. Derived: 128 MiB hide a round trip of
100 ms at 1 GB/s. The gate bounds the requests of all dirty files."""


class Piece(NamedTuple):
    """Part `number` as bytes [start, stop) of the file. `touches` counts the changes of these bytes, so two pieces are equal
    only if they have the same content."""

    number: int
    start: int
    stop: int
    touches: int


class Parts:
    """The parts of a file of `size` bytes: which the origin has, and which are in flight (`under_way`)."""

    def __init__(self, limits: Limits, size: int = 0) -> None:
        self.size = size
        self.under_way: dict[int, Piece] = {}
        self._limits = limits
        self._cuts = [0]  # ends of parts, as far as they were needed: part n is [_cuts[n - 1], _cuts[n])
        self._frontier = 0
        self._next = 1  # number of the first part that was not sent early
        self._touches: dict[int, int] = {}  # changes of each part, by number
        self._rewrites = 0  # changes of all parts
        self._sent: dict[int, Piece] = {}  # parts that the origin has, as they were when they were sent

    # Changes of the file.

    def wrote(self, offset: int, length: int) -> None:
        """Note a write of [offset, offset + length). If it begins behind the file's end, the gap is filled with zeros."""
        if not length:
            return
        end = offset + length
        self._touch(offset, end)
        self.size = max(self.size, end)
        if offset <= self._frontier < end:
            self._frontier = end

    def resized(self, size: int) -> None:
        """Note that the file was cut or extended with zeros to `size` bytes."""
        self._touch(min(size, self.size), max(size, self.size))
        self.size = size
        self._frontier = min(self._frontier, size)
        self._next = min(self._next, self._number(self._frontier))

    def rewritten(self, size: int) -> None:
        """Note that all bytes of the file may have changed, and that it has `size` bytes."""
        self.size = size
        self._rewrites += 1

    def resumed(self) -> None:
        """Have no present part sent before the commit, which compares the parts that an earlier run has sent."""
        self._frontier, self._next = self.size, self._number(self.size)

    # Parts to send.

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
        """Those of `pieces` that the origin does not have with their present content, and whose number is not in flight."""
        return [p for p in pieces if self._sent.get(p.number) != p and p.number not in self.under_way]

    @property
    def waiting_bytes(self) -> int:
        """Bytes that could be sent now, or are in flight."""
        under_way = sum(piece.stop - piece.start for piece in self.under_way.values())
        return max(0, self._frontier - self._cut(self._next - 1)) + under_way

    @property
    def sent_bytes(self) -> int:
        """Bytes that the origin has with their present content."""
        return sum(p.stop - p.start for p in self._sent.values() if self.is_current(p))

    # Progress of parts.

    def begin(self, piece: Piece) -> None:
        """Note that a part is in flight."""
        self.under_way[piece.number] = piece
        if piece.number == self._next:
            self._next += 1

    def ended(self, piece: Piece, *, stored: bool) -> None:
        """Note that a part is no longer in flight; `stored`: the origin has it. A write meanwhile makes it stale."""
        del self.under_way[piece.number]
        if stored:
            self._sent[piece.number] = piece

    def is_current(self, piece: Piece) -> bool:
        """True if its bytes have not changed since it was made."""
        return piece == self._piece(piece.number)

    def forget(self) -> None:
        """Note that the origin has no parts, because the multipart upload is completed, aborted or lost. Parts in flight
        do not count as stored when they end."""
        self._sent.clear()
        self._next = 1

    def _piece(self, number: int) -> Piece:
        start, stop = self._cut(number - 1), min(self._cut(number), self.size)
        return Piece(number, start, stop, self._touches.get(number, 0) + self._rewrites)

    def _touch(self, start: int, stop: int) -> None:
        for number in range(self._number(start), self._number(stop - 1) + 1):
            self._touches[number] = self._touches.get(number, 0) + 1

    def _cut(self, number: int) -> int:
        """The offset where part `number` ends, if the file is long enough."""
        while len(self._cuts) <= number:
            self._cuts.append(self._cuts[-1] + self._limits.part_size(self._cuts[-1]))
        return self._cuts[number]

    def _number(self, offset: int) -> int:
        """The number of the part with the byte at `offset`."""
        while self._cuts[-1] <= offset:
            self._cut(len(self._cuts))
        return bisect_right(self._cuts, offset)


class Sent(Protocol):
    """What a `Sender` needs of a dirty file. It records multipart uploads, so that a crash does not leave them."""

    origin: Origin
    key: str
    file: StagingFile

    async def source(self, size: int) -> Source: ...
    async def begun(self, upload: Upload) -> None: ...
    async def orphaned(self, upload: Upload) -> None: ...


class Sender:
    """Sends a dirty file. `final`: the origin may be carrying out the last request, so it must not be cancelled. `failed`:
    the error of a part that was sent early; no more parts are sent before the commit. `background`: no caller waits.
    `upload` is the multipart upload, if one is begun."""

    def __init__(self, what: Sent, parts: Parts) -> None:
        self.parts = parts
        self.failed: CachefsError | None = None
        self.final = False
        self.background = True
        self.upload: Upload | None = None
        self._what = what
        self._quiet = False  # True: no part is sent early
        self._found: dict[int, Part] | None = {}  # parts sent by an earlier run; None: not listed yet
        self._beginning = Lock()
        self._early: dict[int, trio.CancelScope] = {}
        self._tickets: set[Ticket] = set()
        self._part_ended = trio.lowlevel.ParkingLot()

    # While the file is written.

    def push(self, nursery: trio.Nursery) -> None:
        """Send parts that are ready, up to `AT_ONCE` in flight. After a failure no part is sent until the commit, which
        sends the missing parts and reports their failures."""
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
            # The failure does not count if the part has changed meanwhile, or if a commit (`_quiet`) sends it again itself.
            if self.parts.is_current(piece) and not self._quiet:
                self.failed = expected(exc)
                bug = None if isinstance(exc, CachefsError) else exc
                log.info("%s; trying again at the commit", self.failed, exc_info=bug)
        finally:
            del self._early[piece.number]  # before any task runs that the part's end has woken
            self.push(nursery)

    async def part_ended(self) -> None:
        """Wait until the next part in flight has succeeded or failed."""
        await self._part_ended.park()

    async def break_off(self) -> None:
        """Cancel the parts that are being sent early, and send no more of them. Parts that the origin has are kept."""
        self._quiet = True
        for scope in self._early.values():
            scope.cancel()
        while self._early:
            await self._part_ended.park()

    def resume(self, upload: Upload) -> None:
        """Continue the multipart upload of an earlier run. Parts at the origin that have the file's bytes are not sent
        again."""
        self.upload, self._found = upload, None

    # At the commit.

    def promote(self) -> None:
        """Give its requests the priority of demand, because a caller waits now."""
        self.background = False
        for ticket in self._tickets:
            ticket.promote()

    async def finish(self, pieces: list[Piece], size: int, preconditions: Preconditions) -> ObjectInfo:
        """Upload the first `size` bytes as the object. They are the `pieces`, and must not change until this has returned or
        raised; the file may be longer. An upload that the origin does not know any more is begun again, once. The result has
        no `mtime_ns` (0) if only a HEAD would give it. Raises the errors of `Origin.put` and `Upload`."""
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

    @property
    def has_begun(self) -> bool:
        """True if bytes are being sent, or a multipart upload is there: `abandon` waits for them."""
        return bool(self._early) or self.upload is not None

    async def abandon(self) -> None:
        """End all transfers and abort the multipart upload. An upload that cannot be aborted is recorded, also if this is
        cancelled."""
        self._quiet = True
        if self._early:  # only then, because a cancel scope costs as much as the rest of a removal
            with trio.CancelScope(shield=True):
                await self.break_off()
        upload, self.upload, self._found = self.upload, None, {}
        self.parts.forget()
        if upload is not None:
            await self._abort(upload)

    async def _abort(self, upload: Upload) -> None:
        """Abort a multipart upload, or have it recorded that it is to be aborted later."""
        try:
            await upload.abort()
        # Also if cancelled, because no other object refers to the upload any more.
        except BaseException as exc:
            await self._what.orphaned(upload)
            if not isinstance(exc, CachefsError):
                raise
            log.info("%s; trying again later", exc)

    async def _finish(self, pieces: list[Piece], size: int, preconditions: Preconditions) -> ObjectInfo:
        """Upload in one request, or send the missing parts and complete the multipart upload."""
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
        numbers = [piece.number for piece in pieces]
        self.final = True
        info = await upload.complete(
            numbers, if_match=preconditions.if_match, if_absent=preconditions.if_absent, settle=False
        )
        self.upload = None
        parts.forget()
        return info

    async def _send_begun(self, piece: Piece) -> None:
        self.parts.begin(piece)
        await self._send(piece)

    async def _send(self, piece: Piece) -> None:
        """Send a part, unless the origin has it with these bytes from an earlier run. The caller has noted that it is in
        flight; this notes its end."""
        upload, stored = None, False
        try:
            upload = await self._open_upload()
            with self._ticket() as ticket, self._what.file.used():
                await self._what.file.spill()
                fd, length = self._what.file.fd, piece.stop - piece.start
                found = self._found.pop(piece.number, None) if self._found else None
                if found is None or not await trio.to_thread.run_sync(same, found, fd, piece.start, length):
                    await upload.part(piece.number, FileRange(fd, piece.start), length, ticket=ticket)
            stored = upload is self.upload
        finally:
            self.parts.ended(piece, stored=stored)
            self._part_ended.unpark_all()

    async def _open_upload(self) -> Upload:
        """The multipart upload, which is begun if there is none."""
        async with self._beginning:
            if self.upload is None:
                if self.failed is not None:
                    # The task of another early part has failed to begin the upload, so this one does not try.
                    raise self.failed
                # Shielded for at most the origin's deadline, because an upload must be recorded once it exists.
                with trio.CancelScope(shield=True):
                    upload = await self._what.origin.begin_upload(self._what.key)
                    try:
                        await self._what.begun(upload)
                    except CachefsError:
                        await self._abort(upload)
                        raise
                self.upload = upload
            return self.upload

    @contextmanager
    def _ticket(self) -> Iterator[Ticket]:
        """A ticket for one request, which `promote` gives the priority of demand while the block runs."""
        ticket = Ticket(self.background)
        self._tickets.add(ticket)
        try:
            yield ticket
        finally:
            self._tickets.discard(ticket)


def expected(exc: Exception) -> CachefsError:
    """The error that the caller of a commit gets for an exception. An unexpected exception, which is a bug, becomes
    `OriginFailed`; so it ends neither the nursery nor the dirty file."""
    if isinstance(exc, CachefsError):
        return exc
    return OriginFailed(f"unexpected {type(exc).__name__}")


def same(part: Part, fd: int, start: int, length: int) -> bool:
    """True if the etag of the origin's part is the MD5 of these bytes of the file, as on S3. False if the bytes differ, or
    if the etag is no MD5. Blocking."""
    wanted = part.etag.strip('"').lower()
    if part.size != length or len(wanted) != 32:
        return False
    digest = hashlib.md5(usedforsecurity=False)
    for at in range(start, start + length, HASHED):
        digest.update(os.pread(fd, min(HASHED, start + length - at), at))
    return digest.hexdigest() == wanted
