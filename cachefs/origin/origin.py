"""One object store as the rest of the daemon sees it: asynchronous, with retries, deadlines and preconditions that hold."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from cachefs.base.errors import (
    CachefsError,
    Conflict,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    Transient,
    Unsupported,
)
from cachefs.origin.attempts import Attempts, Ticket
from cachefs.origin.probes import Probes
from cachefs.origin.protocol import (
    PATIENCE,
    CompletionInProgress,
    Limits,
    ListPage,
    ObjectInfo,
    Part,
    Preconditions,
    Source,
    Writer,
    Written,
    conflicts,
)

if TYPE_CHECKING:
    from cachefs.origin.http import Md5Etags

log = logging.getLogger(__name__)
T = TypeVar("T")

COPIED_PART = 1 << 30
"""The least bytes that one request of a copy in parts covers. Guessed: seconds of the origin's own time."""


class Origin:
    """One origin. All methods raise only `cachefs.base.errors`. `source` is its identity (a URL), `prefix` the mounted key
    prefix, "" or ending in "/". Methods that write raise `Unsupported` if nothing can be written."""

    def __init__(self, attempts: Attempts) -> None:
        self.source, self.prefix = attempts.source, attempts.prefix
        self._client = attempts.client
        self._attempts = attempts
        self._probes = Probes(attempts)
        # A client that can ask without a thread has these, too.
        self._list_without_thread: Callable[..., Awaitable[ListPage | None]] | None
        self._list_without_thread = getattr(attempts.client, "list_without_thread", None)
        self._head_without_thread: Callable[[str], Awaitable[ObjectInfo | None]] | None
        self._head_without_thread = getattr(attempts.client, "head_without_thread", None)
        self.set_rate_limits, self.name = attempts.set_rate_limits, attempts.name
        self.read, self.begin = attempts.read, attempts.begin
        self.concurrency = attempts.gate.concurrency.maximum  # the greatest number of requests in flight
        # Compares whole objects with their etags; None if the client does not.
        self.md5: Md5Etags | None = getattr(attempts.client, "md5", None)
        self.can_list = True
        self.read_only = False  # True: callers refuse writes, although the client could

    @property
    def can_write(self) -> bool:
        return self._client.writer is not None and not self.read_only

    @property
    def limits(self) -> Limits:
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
        """One line for the user while the origin is out, else ""."""
        return self._attempts.breaker.complaint()

    def status(self) -> dict[str, Any]:
        """For `cachefs status`."""
        return {
            "source": self.source,
            "prefix": self.prefix,
            **self._attempts.status(),
            "ignored_conditions": self._client.writer.conditions.ignored() if self._client.writer else [],
            "compared": self.md5.compared if self.md5 else 0,
            "unlike_etag": self.md5.unlike if self.md5 else 0,
            **self._attempts.breaker.status(),
        }

    async def aclose(self) -> None:
        self._attempts.close()

    # Reading.

    async def check(self) -> None:
        """Send one cheap request when mounting, to see that the origin exists and may be read. An empty prefix is no
        error, nor is a web server without an index page, for which `can_list` is False from then on."""
        attempts, look = self._attempts, partial(self._client.list_page, self.prefix, None, 1)
        action, retries = f"opening {self.name(self.prefix)}", min(2, attempts.backoff.retries)
        try:
            await attempts.call(look, action, "origin_list", self.prefix, retries=retries)
        except Unsupported as exc:
            self.can_list = False
            log.warning("%s", exc)

    async def list_page(self, prefix: str, *, token: str | None = None, limit: int = 1000) -> ListPage:
        """One page of the keys and common prefixes directly below `prefix` (a full key prefix, "" or ending in "/")."""
        ask, at_once = partial(self._client.list_page, prefix, token, limit), self._list_without_thread
        return await self._attempts.call(
            ask,
            f"listing {self.name(prefix)}",
            "origin_list",
            prefix,
            without_thread=None if at_once is None else partial(at_once, prefix, token, limit),
        )

    async def head(self, key: str) -> ObjectInfo:
        """Size, mtime and etag of the current object."""
        ask, at_once = partial(self._client.head, key), self._head_without_thread
        return await self._attempts.call(
            ask,
            f"looking up {self.name(key)}",
            "origin_head",
            key,
            without_thread=None if at_once is None else partial(at_once, key),
        )

    async def look(self, key: str) -> tuple[ObjectInfo, str]:
        """The current object and its idempotency token ("": none)."""
        look = partial(self.writer.look, key)
        return await self._attempts.call(look, f"looking up {self.name(key)}", "origin_head", key)

    # Writing. A write returns the object as a later HEAD or LIST shows it. Most stores tell an object's time only there, so
    # a HEAD follows a write.

    async def ours(self, key: str, token: str, size: int, error: CachefsError) -> ObjectInfo:
        """The object, if it has this token and size: only the reply of an earlier attempt was lost. Else raises `error`."""
        try:
            info, found_token = await self.look(key)
        except NotFound:
            found_token = ""
        if token and found_token == token and info.size == size:
            return info
        raise error

    async def _unchanged(self, key: str, etag: str | None) -> None:
        """Raise `ObjectChanged` if the object is not the version `etag`."""
        if (await self.head(key)).etag != etag:
            raise ObjectChanged(f"{self.name(key)}: the object changed at the origin")

    async def _to_send(
        self, key: str, preconditions: Preconditions, honours: Callable[[Preconditions], Awaitable[bool]]
    ) -> Preconditions:
        """The preconditions to send with a write. Those that the origin ignores are checked here: raises `Conflict`."""
        if not preconditions.conditional or await honours(preconditions):
            return preconditions
        with conflicts(preconditions):
            try:
                info = await self.head(key)
            except NotFound:
                if not preconditions.if_absent:
                    raise
            else:
                if preconditions.if_absent or info.etag != preconditions.if_match:
                    raise ObjectChanged(f"{self.name(key)}: the object changed at the origin")
        return Preconditions(token=preconditions.token)

    async def _settled(self, key: str, size: int, written: Written, *, untimed: bool) -> ObjectInfo:
        """The object that was written, as the origin shows it. `untimed`: send no HEAD for its time alone, so `mtime_ns`
        may be 0. Raises `ObjectChanged` if another client has replaced it."""
        if written.etag and (untimed or written.mtime_ns is not None):
            return ObjectInfo(key, size, written.mtime_ns or 0, written.etag)
        try:
            info = await self.head(key)
        except NotFound as exc:
            raise ObjectChanged(f"{self.name(key)}: was removed as soon as it was written") from exc
        if info.size != size or (written.etag and info.etag != written.etag):
            raise ObjectChanged(f"{self.name(key)}: was replaced as soon as it was written")
        return info

    async def put(
        self,
        key: str,
        source: Source,
        size: int,
        *,
        if_match: str | None = None,
        if_absent: bool = False,
        token: str = "",
        settle: bool = True,
        ticket: Ticket | None = None,
    ) -> ObjectInfo:
        """Write the first `size` bytes of `source` (`FileRange`, `InMemory`) as one object in one request. A key that
        ends in "/" with no bytes is the marker of a directory.

        The object is there whole or not at all; after an error for a lost connection it may be either. Raises `Conflict` if
        the object is not the version `if_match`, or with `if_absent` if there is one; then nothing was written. With a
        `token`, a caller can find out later whether a failed attempt wrote the object (see `ours`). Without `settle` no
        HEAD follows for the time alone: `mtime_ns` is 0 if the reply did not tell it. Raises `ObjectChanged` if another
        client has replaced the object since. An exception of `source` is raised unchanged."""
        writer = self.writer
        if not token and (if_absent or if_match is not None):
            token = new_token()
        try:
            sent = await self._to_send(key, Preconditions(if_match, if_absent, token), self._probes.puts)
            written = await self._attempts.send(
                lambda body: writer.put(key, body, sent),
                source,
                size,
                f"writing {self.name(key)}",
                "origin_put",
                key,
                ticket,
                without_thread=lambda body: writer.put_without_thread(key, body, sent),
            )
        except Conflict as exc:
            return await self.ours(key, token, size, exc)
        return await self._settled(key, size, written, untimed=not settle)

    async def begin_upload(self, key: str) -> Upload:
        """Begin to write an object in parts. The key shows its old version until `Upload.complete`.

        An upload that is neither completed nor aborted costs storage: S3 and Google keep its parts until a lifecycle rule
        removes them, Azure for a week. `Upload.state` has what `resume_upload` needs after a crash."""
        writer = self.writer
        if not writer.limits.most_parts:
            raise Unsupported(f"{self._attempts.label}: this origin takes no parts; put the object whole")
        token = new_token()
        begin, what = (
            partial(writer.begin, key, Preconditions(token=token)),
            f"beginning to write {self.name(key)}",
        )
        name = await self._attempts.call(begin, what, "origin_upload", key)
        return Upload(self, key, name, token, {})

    def resume_upload(self, key: str, state: Mapping[str, Any]) -> Upload:
        """The upload that has this `Upload.state`. Sends no request; `Upload.parts` does."""
        known = {int(number): Part(etag, size) for number, (etag, size) in state.get("parts", {}).items()}
        upload = Upload(self, key, state["id"], state.get("stamp", ""), known)
        upload.perhaps_complete = True  # the process that took the state may have completed it
        return upload

    async def copy(self, key: str, to: str, *, size: int, etag: str | None = None) -> ObjectInfo:
        """Copy an object of `size` bytes within the origin, replacing the object at `to`. With `etag`, copies only that
        version, and raises `ObjectChanged` if the object is another. An object above `limits.largest_copy` is copied in
        parts, without its own metadata."""
        writer = self.writer
        if size > writer.limits.largest_copy:
            return await self._copy_in_parts(key, to, size, etag)
        compared = etag is None or await self._probes.copies(key)
        if not compared:
            await self._unchanged(key, etag)
        copy, action = partial(writer.copy, key, to, etag), f"copying {self.name(key)} to {to}"
        written = await self._attempts.call(copy, action, "origin_copy", to, patience=PATIENCE)
        if not compared and written.etag != etag:
            await self._unchanged(key, etag)  # a store may give copies etags of their own
        return await self._settled(to, size, written, untimed=False)

    async def delete(self, key: str) -> None:
        """Delete an object; a missing object is no error."""
        delete, without_thread = (
            partial(self.writer.delete, key),
            partial(self.writer.delete_without_thread, key),
        )
        await self._attempts.call(
            delete, f"deleting {self.name(key)}", "origin_delete", key, without_thread=without_thread
        )

    async def delete_many(self, keys: Iterable[str]) -> dict[str, CachefsError]:
        """Delete many objects, `limits.batch` a request. Returns the keys that remain, each with its error. Where
        directories are real, they are deleted after the files in them."""
        wanted, writer, kept = list(keys), self.writer, dict[str, CachefsError]()
        batch = writer.limits.batch or 1

        async def some(names: list[str]) -> None:
            try:
                if len(names) == 1:
                    return await self.delete(names[0])
                delete, action = partial(writer.delete_many, names), f"deleting {len(names)} objects"
                left = await self._attempts.call(delete, action, "origin_delete", names[0])
                for key, error in left.items():
                    if isinstance(error, Transient):
                        await some([key])  # alone, as a request with retries
                    else:
                        kept[key] = error
            except CachefsError as exc:
                kept.update(dict.fromkeys(names, exc))

        for group in inside_out(wanted) if writer.limits.directories else [wanted]:
            batches = (group[at : at + batch] for at in range(0, len(group), batch))
            await each(some, batches, self.concurrency)
        return kept

    async def _copy_in_parts(self, key: str, to: str, size: int, etag: str | None) -> ObjectInfo:
        limits = self.limits
        wanted = etag or (await self.head(key)).etag
        step = min(max(COPIED_PART, -(-size // limits.most_parts)), limits.largest_part)
        upload = await self.begin_upload(to)

        async def one(at: int) -> None:
            await upload.copy_part(1 + at // step, key, wanted, at, min(at + step, size))

        try:
            compared = await self._probes.copies_parts(to, upload.id, key)
            if not compared:
                await self._unchanged(key, wanted)
            await each(one, range(0, size, step), self.concurrency)
            if not compared:
                await self._unchanged(key, wanted)
            return await upload.complete()
        except BaseException:
            with suppress(CachefsError), trio.move_on_after(self._attempts.deadline_s, shield=True):
                await upload.abort()
            raise


def inside_out(keys: Iterable[str]) -> list[list[str]]:
    """Groups of keys in the order to delete them: files, then directories ("d/"), the deepest first."""
    groups: dict[int, list[str]] = {}
    for key in keys:
        groups.setdefault(key.count("/") if key.endswith("/") else -1, []).append(key)
    return [groups[depth] for depth in sorted(groups, key=lambda depth: (depth >= 0, -depth))]


def new_token() -> str:
    """A new idempotency token."""
    return secrets.token_hex(8)


async def each(
    work: Callable[[T], Awaitable[None]], items: Iterable[T], at_once: int, *, abort: bool = True
) -> None:
    """Run `work` on every item, `at_once` at a time. After the first error no other begins, and it is raised unchanged:
    at once (`abort`: it cancels those under way), or when they have ended."""
    pending = iter(items)
    failed: list[CachefsError] = []

    async def worker() -> None:
        for item in pending:
            if failed:
                return
            try:
                await work(item)
            except CachefsError as exc:
                failed.append(exc)
                if abort:
                    nursery.cancel_scope.cancel()

    if at_once == 1:  # without the cost of a nursery
        for item in pending:
            await work(item)
        return
    async with trio.open_nursery() as nursery:
        for _ in range(at_once):
            nursery.start_soon(worker)
    if failed:
        raise failed[0]


class Upload:
    """One object being written in parts. `known` has the parts that the origin has, by number from 1 on.

    Parts may be sent in any order and several at once; the gate bounds how many are in flight. Sending a number again
    replaces its part. The object is its parts in the order of their numbers."""

    def __init__(self, origin: Origin, key: str, name: str, token: str, known: dict[int, Part]) -> None:
        self.key, self.id, self.known = key, name, known
        self._origin, self._attempts, self._token = origin, origin._attempts, token
        self.perhaps_complete = False

    def state(self) -> dict[str, Any]:
        """The upload in JSON's types, for `Origin.resume_upload`. `parts` finds the parts that were written after this."""
        return {
            "id": self.id,
            "stamp": self._token,
            "parts": {str(number): [part.etag, part.size] for number, part in self.known.items()},
        }

    async def part(self, number: int, source: Source, length: int, *, ticket: Ticket | None = None) -> str:
        """Send the first `length` bytes of `source` as part `number`; returns its etag. All parts but the last have at least
        `limits.least_part` bytes. Raises `NoSuchUpload` if the upload is gone."""
        put = partial(self._attempts.writer.put_part, self.key, self.id, number)
        action = f"writing part {number} of {self._label}"
        etag = await self._attempts.send(put, source, length, action, "origin_put_part", self.key, ticket)
        self.known[number] = Part(etag, length)
        return etag

    async def copy_part(self, number: int, key: str, etag: str, start: int, stop: int) -> str:
        """Bytes [start, stop) of the version `etag` of another object as part `number`, copied at the origin."""
        writer, what = self._attempts.writer, f"copying part {number} of {self._label}"
        copy = partial(writer.copy_part, self.key, self.id, number, key, etag, start, stop)
        found = await self._attempts.call(copy, what, "origin_put_part", self.key, patience=PATIENCE)
        self.known[number] = Part(found, stop - start)
        return found

    async def parts(self) -> dict[int, Part]:
        """The parts that the origin has now; they become `known`. Raises `NoSuchUpload` if the upload is gone."""
        look = partial(self._attempts.writer.parts, self.key, self.id)
        what = f"looking up parts of {self._label}"
        self.known = await self._attempts.call(look, what, "origin_upload", self.key)
        return self.known

    async def complete(
        self,
        numbers: Collection[int] | None = None,
        *,
        if_match: str | None = None,
        if_absent: bool = False,
        settle: bool = True,
    ) -> ObjectInfo:
        """Make the object of the parts `numbers` (default: all that are known), replacing the object at the key.

        Repeating this is harmless, even by another process after a crash: after a success it returns the object, until
        another client replaces it. `settle` is as in `Origin.put`. Raises `NoSuchUpload` if the upload is gone and the
        object has another token, and `Conflict` if the condition does not hold; then the upload remains."""
        origin, writer = self._origin, self._origin.writer
        given = {number: self.known[number] for number in (self.known if numbers is None else numbers)}
        if not given:
            raise OriginFailed(f"{self._label}: an upload without parts cannot be completed")
        etags, size = {n: part.etag for n, part in given.items()}, sum(part.size for part in given.values())
        preconditions, token = Preconditions(if_match, if_absent, self._token), self._token

        def attempt() -> Written:
            if self.perhaps_complete and token:
                with suppress(NotFound):
                    info, found_token = writer.look(self.key)
                    if found_token == token:
                        return Written(info.etag, info.mtime_ns)
            self.perhaps_complete = True
            try:
                return writer.complete(self.key, self.id, etags, sent)
            except CompletionInProgress:
                writer.parts(self.key, self.id)  # raises NoSuchUpload if the upload is gone, not in progress
                raise

        try:
            sent = await origin._to_send(self.key, preconditions, origin._probes.completes)
            action = f"completing {self._label}"
            written = await self._attempts.call(attempt, action, "origin_upload", self.key, patience=PATIENCE)
        except (NoSuchUpload, Conflict) as exc:  # an abandoned attempt may have succeeded meanwhile
            return await origin.ours(self.key, token, size, exc)
        if not written.etag and token:
            replaced = ObjectChanged(f"{origin.name(self.key)}: was replaced as soon as it was written")
            return await origin.ours(self.key, token, size, replaced)
        return await origin._settled(self.key, size, written, untimed=not settle)

    async def abort(self) -> None:
        """Discard the upload; a missing upload is no error. No `part` may be in flight, because it could be written
        afterwards. Azure has no such request: it discards blocks a week after the last of them."""
        abort = partial(self._attempts.writer.abort, self.key, self.id)
        await self._attempts.call(abort, f"aborting {self._label}", "origin_upload", self.key)

    @property
    def _label(self) -> str:
        return f"the upload of {self._attempts.name(self.key)}"
