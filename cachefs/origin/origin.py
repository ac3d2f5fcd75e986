"""One object store as the rest of the daemon sees it: asynchronous, with retries, deadlines and preconditions that hold."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

import trio

from cachefs.base.errors import CachefsError, Conflict, Transient, Unsupported
from cachefs.origin.attempts import Attempts
from cachefs.origin.gate import Ticket
from cachefs.origin.outcomes import Outcomes
from cachefs.origin.protocol import (
    PATIENCE,
    Limits,
    ListPage,
    ObjectInfo,
    Preconditions,
    Sink,
    Source,
    Writer,
)
from cachefs.origin.uploads import Upload

log = logging.getLogger(__name__)
T = TypeVar("T")

COPIED_PART = 1 << 30
"""The least bytes that one request of a copy in parts covers. Guessed: seconds of the origin's own time."""


class Origin:
    """One origin. All methods raise only `cachefs.base.errors`. `source` is its identity (a URL), `prefix` the mounted key
    prefix, "" or ending in "/". Methods that write raise `Unsupported` where nothing can be written."""

    def __init__(self, attempts: Attempts) -> None:
        self.source, self.prefix = attempts.source, attempts.prefix
        self._client = attempts.client
        self._attempts = attempts
        self._outcomes = Outcomes(attempts)
        self.limit = attempts.limit
        self.read_only = False  # what is written below it is refused

    @property
    def can_list(self) -> bool:
        return self._client.can_list

    @property
    def can_write(self) -> bool:
        return self._client.writer is not None and not self.read_only

    @property
    def limits(self) -> Limits:
        """What the origin takes at most, and the sizes of parts."""
        return self.writer.limits

    @property
    def writer(self) -> Writer:
        return self._attempts.writer

    @property
    def serves_stale(self) -> bool:
        """True while the origin is out and cached metadata of any age is served."""
        return self._attempts.breaker.serves_stale

    @property
    def transfer_rate(self) -> float:
        """Recent bytes a second of one read; 0 before the first."""
        return self._attempts.transfer_rate.bytes_per_s

    @property
    def complaint(self) -> str:
        """One line while the origin is out, else ""."""
        return self._attempts.breaker.complaint()

    def name(self, key: str) -> str:
        """A key as messages name it."""
        return self._attempts.name(key)

    def status(self) -> dict[str, Any]:
        """For `cachefs status`: plain values."""
        return {
            "source": self.source,
            "prefix": self.prefix,
            **self._attempts.status(),
            "ignored_conditions": self._client.writer.conditions.ignored() if self._client.writer else [],
            **self._attempts.breaker.status(),
        }

    async def aclose(self) -> None:
        self._attempts.close()

    # Reading.

    async def check(self) -> None:
        """Send one cheap request when mounting, to see that the origin exists and may be read. An empty prefix is no
        error, nor is a web server without an index page, for which `can_list` is False from then on."""
        attempts = self._attempts
        try:
            await attempts.call(
                lambda: self._client.list_page(self.prefix, None, 1),
                f"opening {self.name(self.prefix)}",
                "origin_list",
                self.prefix,
                retries=min(2, attempts.backoff.retries),
            )
        except Unsupported as exc:
            self._client.can_list = False
            log.warning("%s", exc)

    async def list_page(self, prefix: str, *, token: str | None = None, limit: int = 1000) -> ListPage:
        """One page of the keys and common prefixes directly below `prefix` (a full key prefix, "" or ending in "/")."""
        return await self._attempts.call(
            lambda: self._client.list_page(prefix, token, limit),
            f"listing {self.name(prefix)}",
            "origin_list",
            prefix,
        )

    async def head(self, key: str) -> ObjectInfo:
        """Size, mtime and etag of the current object."""
        return await self._outcomes.head(key)

    async def read(
        self,
        key: str,
        etag: str,
        start: int,
        stop: int,
        sink: Sink,
        *,
        whole: bool = False,
        turn: Ticket | None = None,
    ) -> None:
        """Deliver exactly bytes [start, stop) of the version `etag` to `sink.write`, in order, from a worker thread.
        `whole`: the range is the whole object. `turn` is the request's priority ticket, which may be promoted meanwhile;
        default: a reader waits.

        Once this has returned or raised, `sink` is not and will not be called. An exception of the sink is raised unchanged.
        The deadline counts from the last byte that arrived, so a slow store may take its time and a silent one may not."""
        await self._attempts.receive(key, etag, start, stop, sink, whole=whole, turn=turn or Ticket())

    # Writing.

    async def put(
        self,
        key: str,
        source: Source,
        size: int,
        *,
        content_type: str | None = None,
        if_match: str | None = None,
        if_absent: bool = False,
        token: str = "",
        settle: bool = True,
        turn: Ticket | None = None,
    ) -> ObjectInfo:
        """Write the first `size` bytes of `source` (`FileRange`, `InMemory`) as one object in one request. A key that
        ends in "/" with no bytes is the marker of a directory.

        The object is there whole or not at all; after an error for a lost connection it may be either. `Conflict` when
        the object is not the version `if_match`, or with `if_absent` when there is one; then nothing was written. A
        caller that will want to know whether a failed attempt wrote the object gives a `token` (see `ours`). Without
        `settle` no HEAD follows for the time alone: `mtime_ns` is 0 where the reply did not tell it. `ObjectChanged` when
        another client has replaced the object since. An exception of `source` is raised unchanged; `source` is not read
        after this has returned or raised."""
        attempts, outcomes, writer = self._attempts, self._outcomes, self.writer
        if size > writer.limits.largest_put:
            raise Unsupported(
                f"{self.name(key)}: {size} bytes are too many for one request; upload it in parts"
            )
        if not token and (if_absent or if_match is not None):
            token = new_token()
        preconditions = Preconditions(content_type, if_match, if_absent, token)
        what = f"writing {self.name(key)}"
        try:
            sent = await outcomes.to_send(key, preconditions, outcomes.probes.puts)
            written = await attempts.send(
                lambda body: writer.put(key, body, sent), source, size, what, "origin_put", key, turn
            )
        except Conflict as exc:
            return await outcomes.ours(key, token, size, exc)
        return await outcomes.settled(key, size, written, untimed=not settle)

    async def look(self, key: str) -> tuple[ObjectInfo, str]:
        """The current object and its idempotency token ("": none)."""
        return await self._outcomes.look(key)

    async def ours(self, key: str, token: str, size: int | None, error: CachefsError) -> ObjectInfo:
        """The object if it shows the idempotency token: an earlier attempt wrote it, and only its reply was lost. Else
        raises `error`. `size` None: of any size."""
        return await self._outcomes.ours(key, token, size, error)

    async def begin_upload(self, key: str, *, content_type: str | None = None) -> Upload:
        """Begin to write an object in parts. The key shows its old version until `Upload.complete`.

        An upload that is neither completed nor aborted costs storage: S3 and Google keep its parts until a lifecycle rule
        removes them, Azure a week. `Upload.state` is what resuming it after a crash takes."""
        writer = self.writer
        if not writer.limits.most_parts:
            raise Unsupported(f"{self._attempts.label}: this origin takes no parts; put the object whole")
        preconditions = Preconditions(content_type, token=new_token())
        name = await self._attempts.call(
            lambda: writer.begin(key, preconditions),
            f"beginning to write {self.name(key)}",
            "origin_upload",
            key,
        )
        return Upload(self._attempts, self._outcomes, key, name, preconditions, {})

    def resume_upload(self, key: str, state: Mapping[str, Any]) -> Upload:
        """The upload whose `Upload.state` this is. Sends no request; `Upload.parts` does."""
        return Upload.of_state(self._attempts, self._outcomes, key, state)

    async def copy(self, key: str, to: str, *, size: int, etag: str | None = None) -> ObjectInfo:
        """Copy an object of `size` bytes within the origin, replacing the object at `to`. With `etag` only that version:
        `ObjectChanged` when it is another. An object above `limits.largest_copy` is copied in parts, without its own
        metadata."""
        outcomes, writer = self._outcomes, self.writer
        if size > writer.limits.largest_copy:
            return await self._copy_in_parts(key, to, size, etag)
        compared = etag is None or await outcomes.probes.copies(key)
        if not compared:
            await outcomes.unchanged(key, etag)
        written = await self._attempts.call(
            lambda: writer.copy(key, to, etag),
            f"copying {self.name(key)} to {to}",
            "origin_copy",
            to,
            patience=PATIENCE,
        )
        if not compared and written.etag != etag:
            await outcomes.unchanged(key, etag)  # a store may give copies etags of their own
        return await outcomes.settled(to, size, written, untimed=False)

    async def delete(self, key: str) -> None:
        """Delete an object; a missing object is no error."""
        writer = self.writer
        await self._attempts.call(
            lambda: writer.delete(key), f"deleting {self.name(key)}", "origin_delete", key
        )

    async def delete_many(self, keys: Iterable[str]) -> dict[str, CachefsError]:
        """Delete many objects, `limits.batch` a request. Returns the keys that remain, each with the reason. Where
        directories are real, they are deleted after the files in them."""
        wanted, writer, kept = list(keys), self.writer, dict[str, CachefsError]()
        batch = writer.limits.batch or 1

        async def some(names: list[str]) -> None:
            try:
                if len(names) == 1:
                    return await self.delete(names[0])
                left = await self._attempts.call(
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
            except CachefsError as exc:
                kept.update(dict.fromkeys(names, exc))

        for group in inside_out(wanted) if writer.limits.directories else [wanted]:
            batches = (group[at : at + batch] for at in range(0, len(group), batch))
            await each(some, batches, self._attempts.gate.concurrency.maximum)
        return kept

    async def _copy_in_parts(self, key: str, to: str, size: int, etag: str | None) -> ObjectInfo:
        outcomes, limits = self._outcomes, self.limits
        wanted = etag or (await self.head(key)).etag
        step = min(max(COPIED_PART, -(-size // limits.most_parts)), limits.largest_part)
        upload = await self.begin_upload(to)

        async def one(at: int) -> None:
            await upload.copy_part(1 + at // step, key, wanted, at, min(at + step, size))

        try:
            compared = await outcomes.probes.copies_parts(to, upload.id, key)
            if not compared:
                await outcomes.unchanged(key, wanted)
            await each(one, range(0, size, step), self._attempts.gate.concurrency.maximum)
            if not compared:
                await outcomes.unchanged(key, wanted)
            return await upload.complete()
        except BaseException:
            with trio.CancelScope(shield=True), trio.move_on_after(self._attempts.deadline_s):
                await upload.abort()
            raise


def inside_out(keys: Iterable[str]) -> list[list[str]]:
    """Files, then directories ("d/"), the deepest first. The keys of one list may be deleted in any order."""
    groups: dict[int, list[str]] = {}
    for key in keys:
        groups.setdefault(key.count("/") if key.endswith("/") else -1, []).append(key)
    return [groups[depth] for depth in sorted(groups, key=lambda depth: (depth >= 0, -depth))]


def new_token() -> str:
    """A new idempotency token."""
    return secrets.token_hex(8)


async def each(work: Callable[[T], Awaitable[None]], items: Iterable[T], at_once: int) -> None:
    """Run `work` on every item, `at_once` at a time. The first error cancels the others and is raised unchanged."""
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
