"""Find out whether an origin honours a condition, with a request whose condition cannot hold: it must be refused.

Each probe is made once for an `Origin`, when the first write needs its result; writes that come meanwhile wait for it. A
probe writes to keys of its own, `.cachefs-probe-…` below the mounted prefix, and deletes them; a daemon that is killed
during a probe may leave one. An origin that does not permit these keys counts as one that does not honour the condition."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import trio

from cachefs.base.errors import CachefsError, Conflict, ObjectChanged, PermissionDenied, Unsupported
from cachefs.origin.attempts import Attempts
from cachefs.origin.protocol import PATIENCE, Condition, InMemory, Preconditions

log = logging.getLogger(__name__)
T = TypeVar("T")

IMPOSSIBLE = f'"{"0" * 32}"'
"""An etag that no object has: no bytes are known whose MD5 is zero."""

ACTION = "finding out which conditions the origin honours"


class Probes:
    """Fills in the `Conditions` of an origin's writer. Methods raise what their requests raise, and record nothing then."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self._lock = trio.Lock()

    async def copies(self, key: str) -> bool:
        """True if CopyObject compares the etag of its source. Where it does not, the probe copies `key`."""
        return await self._honours(Condition.COPY, lambda: self._copy(key))

    async def copies_parts(self, to: str, upload: str, key: str) -> bool:
        """The same of UploadPartCopy. The probe writes part 1 of an upload without parts; the real part replaces it."""
        return await self._honours(Condition.COPY_PART, lambda: self._copy_part(to, upload, key))

    async def puts(self, preconditions: Preconditions) -> bool:
        """True if a PUT with these preconditions is refused exactly where they do not hold."""
        condition = Condition.PUT_ABSENT if preconditions.if_absent else Condition.PUT_MATCH
        return await self._honours(condition, self._put)

    async def completes(self, preconditions: Preconditions) -> bool:
        """True if completing an upload with these preconditions is refused exactly where they do not hold."""
        if preconditions.if_match is not None and not await self.puts(preconditions):
            return False  # only the probe of a PUT finds the form of etags that `If-Match` takes
        condition = Condition.COMPLETE_ABSENT if preconditions.if_absent else Condition.COMPLETE_MATCH
        return await self._honours(condition, self._complete)

    async def _honours(self, condition: Condition, probe: Callable[[], Awaitable[None]]) -> bool:
        conditions = self._attempts.writer.conditions
        if conditions.honours(condition) is None:
            async with self._lock:
                if conditions.honours(condition) is None:
                    try:
                        await probe()
                    except (PermissionDenied, Unsupported) as exc:
                        log.info("%s; counted as not honoured", exc)
                        self._saw(condition, False)
        return bool(conditions.honours(condition))

    async def _call(self, counter: str, key: str, call: Callable[[], T], patience: int = 1) -> T:
        return await self._attempts.call(call, ACTION, counter, key, patience=patience)

    async def _copy(self, key: str) -> None:
        name = self._name()
        copy = partial(self._attempts.writer.copy, key, name, IMPOSSIBLE)
        refused = await _refused(self._call("origin_copy", name, copy, PATIENCE))
        if not refused:
            await self._delete(name)
        self._saw(Condition.COPY, refused)

    async def _copy_part(self, to: str, upload: str, key: str) -> None:
        copy = partial(self._attempts.writer.copy_part, to, upload, 1, key, IMPOSSIBLE, 0, 1)
        self._saw(Condition.COPY_PART, await _refused(self._call("origin_put_part", to, copy)))

    async def _put(self) -> None:
        conditions = self._attempts.writer.conditions
        match = False
        async with self._object() as (name, etag):
            absent = await _refused(self._write(name, Preconditions(if_absent=True)))
            if await _refused(self._write(name, Preconditions(if_match=IMPOSSIBLE))):
                for bare in (False, True):
                    conditions.bare_etags = bare
                    match = not await _refused(self._write(name, Preconditions(if_match=etag)))
                    if match:
                        break
        self._saw(Condition.PUT_ABSENT, absent)
        self._saw(Condition.PUT_MATCH, match)

    async def _complete(self) -> None:
        async with self._object() as (name, _):
            absent = await self._completion_refused(name, Preconditions(if_absent=True))
            match = await self._completion_refused(name, Preconditions(if_match=IMPOSSIBLE))
        self._saw(Condition.COMPLETE_ABSENT, absent)
        self._saw(Condition.COMPLETE_MATCH, match)

    async def _completion_refused(self, name: str, preconditions: Preconditions) -> bool:
        attempts, writer = self._attempts, self._attempts.writer
        upload = await self._call("origin_upload", name, partial(writer.begin, name, Preconditions()))
        refused = True
        try:
            send = partial(writer.put_part, name, upload, 1)
            etag = await attempts.send(send, InMemory(b"p"), 1, ACTION, "origin_put_part", name)
            complete = partial(writer.complete, name, upload, {1: etag}, preconditions)
            refused = await _refused(self._call("origin_upload", name, complete, PATIENCE))
        finally:
            if refused:
                with trio.move_on_after(attempts.deadline_s, shield=True):
                    await self._call("origin_upload", name, partial(writer.abort, name, upload))
        return refused

    async def _write(self, name: str, preconditions: Preconditions) -> str:
        """Write an empty object. Returns its etag."""
        attempts, writer = self._attempts, self._attempts.writer
        written = await attempts.send(
            lambda body: writer.put(name, body, preconditions), InMemory(b""), 0, ACTION, "origin_put", name
        )
        return written.etag

    async def _delete(self, name: str) -> None:
        await self._call("origin_delete", name, partial(self._attempts.writer.delete, name))

    @asynccontextmanager
    async def _object(self) -> AsyncIterator[tuple[str, str]]:
        """(key, etag) of an empty object, which is deleted after the block."""
        name = self._name()
        try:
            yield name, await self._write(name, Preconditions())
        finally:
            # Bounded, because where requests wait for an origin that is out, the end of a mount would wait with them.
            with suppress(CachefsError), trio.move_on_after(self._attempts.deadline_s, shield=True):
                await self._delete(name)

    def _saw(self, condition: Condition, honoured: bool) -> None:
        self._attempts.writer.conditions.seen[condition] = honoured
        if honoured:
            return
        source = self._attempts.source
        if condition in (Condition.COPY, Condition.COPY_PART):
            log.info("%s does not honour %s: copies are compared", source, condition)
        else:
            instead = (
                "instead, the object is looked at just before such a write, and what another client writes between"
                " the two is overwritten"
            )
            log.warning("%s does not honour %s: %s", source, condition, instead)

    def _name(self) -> str:
        return f"{self._attempts.prefix}.cachefs-probe-{secrets.token_hex(8)}"


async def _refused(request: Awaitable[object]) -> bool:
    """True if a request is refused because its condition does not hold."""
    try:
        await request
    except (Conflict, ObjectChanged):
        return True
    return False
