"""Writing, as the rooms above see it: put, multipart uploads, copy, delete.

What is returned is what a later HEAD or LIST shows: most stores tell an object's time only there, so one follows a write.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import trio

from cachefs.errors import CachefsError, Conflict, NotFound, ObjectChanged, Transient, Unsupported
from cachefs.origin.attempts import PATIENCE, Attempts
from cachefs.origin.gate import Turn
from cachefs.origin.probing import Probes
from cachefs.origin.protocol import ObjectInfo
from cachefs.origin.transfer import Sending
from cachefs.origin.uploads import Upload
from cachefs.origin.writing import Body, Limits, Pending, Source, Terms, Writer, Written, conflicts

T = TypeVar("T")

COPIED_PART = 1 << 30
"""The least that one request of a copy in parts covers. Guessed: seconds of the store's own time."""


class Writes(Attempts):
    """The half of `Origin` that changes something. What cannot be written raises `Unsupported`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.probes = Probes(self)

    async def head(self, key: str) -> ObjectInfo:
        """Size, mtime and etag of one object as it is now."""
        return await self.call(
            lambda: self._client.head(key), f"looking up {self.name(key)}", "origin_head", key
        )

    @property
    def can_write(self) -> bool:
        return self._client.writer is not None

    @property
    def limits(self) -> Limits:
        """What this store takes at most, and the sizes of parts (`limits.part_size`)."""
        return self.writer.limits

    @property
    def writer(self) -> Writer:
        found = self._client.writer
        if found is None:
            raise Unsupported(f"{self._label}: this store can only be read")
        return found

    async def put(
        self,
        key: str,
        source: Source,
        size: int,
        *,
        content_type: str | None = None,
        if_match: str | None = None,
        if_absent: bool = False,
        stamp: str = "",
        settle: bool = True,
        turn: Turn | None = None,
    ) -> ObjectInfo:
        """Write the first `size` bytes of `source` (`FileRange`, `InMemory`) as one object in one request. A key that
        ends in "/" with no bytes is the marker of a directory.

        The object is there whole or not at all; when this raises for a lost connection, nobody knows which. `Conflict`
        when the object is not (any more) the version `if_match`, or with `if_absent` when there is one, and then
        nothing was written; who wants to know later whether an attempt that failed was the one that wrote it gives a `stamp`
        (see `ours`). Without `settle` no HEAD follows for the time alone: `mtime_ns` is 0 where the reply did not tell it.
        `ObjectChanged` when somebody else has replaced it since. What `source` raises is re-raised
        unchanged, and it is not read any more once this has returned or raised."""
        writer = self.writer
        if size > writer.limits.largest_put:
            raise Unsupported(
                f"{self.name(key)}: {size} bytes are too many for one request; upload it in parts"
            )
        terms = Terms(content_type, if_match, if_absent)
        if terms.conditional or stamp:
            terms = Terms(content_type, if_match, if_absent, stamp=stamp or new_stamp())
        what = f"writing {self.name(key)}"
        try:
            sent = await self.held(key, terms, self.probes.puts)
            written = await self.send(
                lambda body: writer.put(key, body, sent), source, size, what, "origin_put", key, turn
            )
        except Conflict as exc:
            return await self.ours(key, terms.stamp, size, exc)
        return await self.settled(key, size, written, untimed=not settle)

    async def begin_upload(self, key: str, *, content_type: str | None = None) -> Upload:
        """Begin to write an object in parts. Nothing is seen of it until `Upload.complete`.

        An upload that is neither completed nor aborted costs storage: S3 and Google keep its parts until a lifecycle
        rule says otherwise, Azure a week. `Upload.state` is what it takes to go on after a crash."""
        writer = self.writer
        if not writer.limits.most_parts:
            raise Unsupported(f"{self._label}: this store takes no parts; put the object whole")
        terms = Terms(content_type, stamp=new_stamp())
        name = await self.call(
            lambda: writer.begin(key, terms), f"beginning to write {self.name(key)}", "origin_upload", key
        )
        return Upload(self, key, name, terms, {})

    def resume_upload(self, key: str, state: Mapping[str, Any]) -> Upload:
        """The upload that `Upload.state` (or `Pending.state`) was taken of. Asks nothing of the store:
        `Upload.parts` does."""
        return Upload.of_state(self, key, state)

    async def list_uploads(self, prefix: str = "") -> list[Pending]:
        """The multipart uploads of keys that begin with `prefix`, whoever began them. `Unsupported` where the store keeps
        no such list (Azure: what is not completed goes after a week)."""
        writer = self.writer
        return await self.call(
            lambda: writer.list_uploads(prefix),
            f"listing uploads of {self.name(prefix)}",
            "origin_upload",
            prefix,
        )

    async def copy(self, key: str, to: str, *, size: int, etag: str | None = None) -> ObjectInfo:
        """Copy an object of `size` bytes within the store, replacing what is at `to`. With `etag` only that version:
        `ObjectChanged` when it is another by now. Above what one request may copy it is done in parts, which does not
        take the object's own metadata along."""
        writer = self.writer
        if size > writer.limits.largest_copy:
            return await self._copy_in_parts(key, to, size, etag)
        compared = etag is None or await self.probes.copies(key)
        if not compared:
            await self._unchanged(key, etag)
        written = await self.call(
            lambda: writer.copy(key, to, etag),
            f"copying {self.name(key)} to {to}",
            "origin_copy",
            to,
            patience=PATIENCE,
        )
        if not compared and written.etag != etag:
            await self._unchanged(key, etag)  # a store may give copies etags of their own
        return await self.settled(to, size, written)

    async def delete(self, key: str) -> None:
        """Remove an object; that there is none is fine."""
        writer = self.writer
        await self.call(lambda: writer.delete(key), f"deleting {self.name(key)}", "origin_delete", key)

    async def delete_many(self, keys: Iterable[str]) -> dict[str, CachefsError]:
        """Remove many, a thousand a request where the store takes that. Returns those that are still there, and why. Where
        directories are real, they go behind what is in them."""
        wanted, writer, kept = list(keys), self.writer, dict[str, CachefsError]()
        batch = writer.limits.batch or 1

        async def some(names: list[str]) -> None:
            try:
                if len(names) > 1:
                    left = await self.call(
                        lambda: writer.delete_many(names),
                        f"deleting {len(names)} objects",
                        "origin_delete",
                        names[0],
                    )
                    for key, error in left.items():
                        if isinstance(error, Transient):
                            await some([key])  # by itself, with attempts of its own
                        else:
                            kept[key] = error
                else:
                    await self.delete(names[0])
            except CachefsError as exc:
                kept.update(dict.fromkeys(names, exc))

        for turn in inside_out(wanted) if writer.limits.directories else [wanted]:
            batches = (turn[at : at + batch] for at in range(0, len(turn), batch))
            await each(some, batches, self._gate.concurrency.maximum)
        return kept

    # For the other modules of this room.

    async def send(
        self,
        request: Callable[[Body], T],
        source: Source,
        size: int,
        what: str,
        counter: str,
        key: str,
        turn: Turn | None,
    ) -> T:
        """What `request` gives, which sends the first `size` bytes of `source`."""
        turn = turn or Turn()
        body = Sending(source, size, self._deadline_s, self._upload_limit, turn, self._progressed)
        try:
            result = await self.call(
                lambda: body.attempt(lambda: request(body)), what, counter, key, turn=turn, transfer=body
            )
        finally:
            await body.close()
            self._count(body)  # a thread that was given up may have gone on until now
        if body.source_error is not None:
            raise body.source_error
        assert result is not None
        return result

    async def held(self, key: str, terms: Terms, honours: Callable[[Terms], Awaitable[bool]]) -> Terms:
        """The terms to send with a write. Those that the store does not honour are compared here, and not sent: `Conflict`
        when they do not hold."""
        if not terms.conditional or await honours(terms):
            return terms
        with conflicts(terms):
            try:
                info = await self.head(key)
            except NotFound:
                if not terms.if_absent:
                    raise
            else:
                if terms.if_absent or info.etag != terms.if_match:
                    raise ObjectChanged(f"{self.name(key)}: the object changed at the store")
        return terms.unconditional()

    async def _unchanged(self, key: str, etag: str | None) -> None:
        """Return if the object is the version `etag`, else raise `ObjectChanged`."""
        if (await self.head(key)).etag != etag:
            raise ObjectChanged(f"{self.name(key)}: the object changed at the store")

    async def settled(self, key: str, size: int, written: Written, *, untimed: bool = False) -> ObjectInfo:
        """The object that was written, as the store shows it; `untimed`: its time does not matter."""
        if written.etag and (untimed or written.mtime_ns is not None):
            return ObjectInfo(key, size, written.mtime_ns or 0, written.etag)
        try:
            info = await self.head(key)
        except NotFound as exc:
            raise ObjectChanged(f"{self.name(key)}: was removed as soon as it was written") from exc
        if info.size != size or (written.etag and info.etag != written.etag):
            raise ObjectChanged(f"{self.name(key)}: was replaced as soon as it was written")
        return info

    async def ours(self, key: str, stamp: str, size: int | None, error: CachefsError) -> ObjectInfo:
        """The object if it shows our stamp: an earlier attempt wrote it, and only its reply was lost. Else raises
        `error`."""
        try:
            info, shown = await self.look(key)
        except NotFound:
            shown = ""
        if stamp and shown == stamp and size in (None, info.size):
            return info
        raise error

    async def look(self, key: str) -> tuple[ObjectInfo, str]:
        """One object as it is now, and the stamp that it shows ("": none)."""
        writer = self.writer
        return await self.call(lambda: writer.look(key), f"looking up {self.name(key)}", "origin_head", key)

    async def _copy_in_parts(self, key: str, to: str, size: int, etag: str | None) -> ObjectInfo:
        limits, etag = self.limits, etag or (await self.head(key)).etag
        step = min(max(COPIED_PART, -(-size // limits.most_parts)), limits.largest_part)
        upload = await self.begin_upload(to)

        async def one(at: int) -> None:
            await upload.copy_part(1 + at // step, key, etag, at, min(at + step, size))

        try:
            compared = await self.probes.copies_parts(to, upload.id, key)
            if not compared:
                await self._unchanged(key, etag)
            await each(one, range(0, size, step), self._gate.concurrency.maximum)
            if not compared:
                await self._unchanged(key, etag)
            return await upload.complete()
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(self._deadline_s):
                await upload.abort()
            raise


def inside_out(keys: Iterable[str]) -> list[list[str]]:
    """Files, then directories ("d/"), the deepest first: each list may be deleted at once."""
    turns: dict[int, list[str]] = {}
    for key in keys:
        turns.setdefault(key.count("/") if key.endswith("/") else -1, []).append(key)
    return [turns[depth] for depth in sorted(turns, key=lambda depth: (depth >= 0, -depth))]


def new_stamp() -> str:
    return secrets.token_hex(8)


async def each(work: Callable[[T], Awaitable[None]], items: Iterable[T], at_once: int) -> None:
    """`work` on every item, a few at a time. The first error ends the others and is raised as it is."""
    pending = iter(items)
    failed: list[CachefsError] = []

    async def worker() -> None:
        for item in pending:
            try:
                await work(item)
            except CachefsError as exc:
                failed.append(exc)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(worker)
    if failed:
        raise failed[0]
