"""Finding out whether a store honours a condition: a request whose condition cannot hold must be refused.

Each probe is made once for an `Origin`, when the first write needs its answer; writes that come meanwhile wait for it. It
writes to keys of its own, `.cachefs-probe-…` below the mounted prefix, and deletes them; a daemon that is killed within a
probe may leave one. A store that does not let us write there counts as one that does not honour the condition.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import trio

from cachefs.errors import CachefsError, Conflict, ObjectChanged, PermissionDenied, Unsupported
from cachefs.origin.attempts import PATIENCE
from cachefs.origin.conditions import Condition
from cachefs.origin.writing import InMemory, Terms, Written

if TYPE_CHECKING:
    from cachefs.origin.writes import Writes

log = logging.getLogger(__name__)

IMPOSSIBLE = f'"{"0" * 32}"'
"""An etag that no object has: no bytes are known whose MD5 is zero."""

WHAT = "finding out which conditions the store honours"


class Probes:
    """Completes the `Conditions` of an origin's writer. All methods raise what requests to the store do, and then nothing is
    remembered."""

    def __init__(self, origin: Writes) -> None:
        self._origin = origin
        self._lock = trio.Lock()

    async def copies(self, key: str) -> bool:
        """Whether CopyObject compares the etag of its source. `key` is copied where it does not."""
        return await self._honours(Condition.COPY, lambda: self._copy(key))

    async def copies_parts(self, to: str, upload: str, key: str) -> bool:
        """Whether UploadPartCopy does. It is asked for part 1 of an upload that has no parts yet, which the real part 1
        replaces."""
        return await self._honours(Condition.COPY_PART, lambda: self._copy_part(to, upload, key))

    async def puts(self, terms: Terms) -> bool:
        """Whether a PUT with these terms is refused where they do not hold, and only there."""
        condition = Condition.PUT_ABSENT if terms.if_absent else Condition.PUT_MATCH
        return await self._honours(condition, self._put)

    async def completes(self, terms: Terms) -> bool:
        """The same of completing an upload."""
        if terms.if_match is not None and not await self.puts(terms):
            return False  # the form of etags that `If-Match` takes is not known
        condition = Condition.COMPLETE_ABSENT if terms.if_absent else Condition.COMPLETE_MATCH
        return await self._honours(condition, self._complete)

    async def _honours(self, condition: Condition, probe: Callable[[], Awaitable[None]]) -> bool:
        conditions = self._origin.writer.conditions
        if conditions.honours(condition) is None:
            async with self._lock:
                if conditions.honours(condition) is None:
                    try:
                        await probe()
                    except (PermissionDenied, Unsupported) as exc:
                        log.info("%s; counted as not honoured", exc)
                        self._saw(condition, False)
        return bool(conditions.honours(condition))

    async def _copy(self, key: str) -> None:
        origin = self._origin
        writer = origin.writer

        async def request() -> object:
            return await origin.call(
                lambda: writer.copy(key, name, IMPOSSIBLE), WHAT, "origin_copy", name, patience=PATIENCE
            )

        name = self._name()
        refused = await _refused(request)
        if not refused:
            await origin.delete(name)
        self._saw(Condition.COPY, refused)

    async def _copy_part(self, to: str, upload: str, key: str) -> None:
        origin = self._origin
        writer = origin.writer

        async def request() -> object:
            return await origin.call(
                lambda: writer.copy_part(to, upload, 1, key, IMPOSSIBLE, 0, 1), WHAT, "origin_put_part", to
            )

        self._saw(Condition.COPY_PART, await _refused(request))

    async def _put(self) -> None:
        conditions = self._origin.writer.conditions
        match = False
        async with self._object() as (name, etag):
            absent = await _refused(lambda: self._write(name, Terms(if_absent=True)))
            if await _refused(lambda: self._write(name, Terms(if_match=IMPOSSIBLE))):
                for bare in (False, True):
                    conditions.bare_etags = bare
                    match = not await _refused(lambda: self._write(name, Terms(if_match=etag)))
                    if match:
                        break
        self._saw(Condition.PUT_ABSENT, absent)
        self._saw(Condition.PUT_MATCH, match)

    async def _complete(self) -> None:
        async with self._object() as (name, _):
            absent = await self._completion_refused(name, Terms(if_absent=True))
            match = await self._completion_refused(name, Terms(if_match=IMPOSSIBLE))
        self._saw(Condition.COMPLETE_ABSENT, absent)
        self._saw(Condition.COMPLETE_MATCH, match)

    async def _completion_refused(self, name: str, terms: Terms) -> bool:
        origin = self._origin
        writer = origin.writer
        upload = await origin.begin_upload(name)
        etag = await upload.part_from(1, InMemory(b"p"), 1)

        async def request() -> object:
            return await origin.call(
                lambda: writer.complete(name, upload.id, {1: etag}, terms),
                *(WHAT, "origin_upload", name),
                patience=PATIENCE,
            )

        try:
            refused = await _refused(request)
        except CachefsError:
            await upload.abort()
            raise
        if refused:
            await upload.abort()
        return refused

    async def _write(self, name: str, terms: Terms) -> Written:
        origin = self._origin
        writer = origin.writer
        return await origin.send(
            lambda body: writer.put(name, body, terms), InMemory(b""), 0, WHAT, "origin_put", name, None
        )

    @asynccontextmanager
    async def _object(self) -> AsyncIterator[tuple[str, str]]:
        """An empty object of our own, and its etag."""
        name = self._name()
        try:
            yield name, (await self._write(name, Terms())).etag
        finally:
            with trio.CancelScope(shield=True), suppress(CachefsError):
                await self._origin.delete(name)

    def _saw(self, condition: Condition, honoured: bool) -> None:
        self._origin.writer.conditions.saw(condition, honoured)
        if honoured:
            return
        if condition in (Condition.COPY, Condition.COPY_PART):
            log.info("%s does not honour %s: copies are compared", self._origin.source, condition.value)
        else:
            log.warning(
                "%s does not honour %s: instead, the object is looked at just before such a write, and what another"
                " client writes between the two is overwritten",
                self._origin.source,
                condition.value,
            )

    def _name(self) -> str:
        return f"{self._origin.prefix}.cachefs-probe-{secrets.token_hex(8)}"


async def _refused(request: Callable[[], Awaitable[object]]) -> bool:
    """Whether a request with a condition that does not hold is refused for that."""
    try:
        await request()
    except (Conflict, ObjectChanged):
        return True
    return False
