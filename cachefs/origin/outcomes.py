"""Whether a write may happen, and whether it did: preconditions before it, the object after it.

A write returns what a later HEAD or LIST shows. Most stores tell an object's time only there, so a HEAD follows a write.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cachefs.base.errors import CachefsError, NotFound, ObjectChanged
from cachefs.origin.attempts import Attempts
from cachefs.origin.probing import Probes
from cachefs.origin.protocol import ObjectInfo, Preconditions, Written, conflicts


class Outcomes:
    """The objects that writes of one origin are about."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self.probes = Probes(attempts)

    async def head(self, key: str) -> ObjectInfo:
        """As `Origin.head`."""
        attempts = self._attempts
        return await attempts.call(
            lambda: attempts.client.head(key), f"looking up {attempts.name(key)}", "origin_head", key
        )

    async def look(self, key: str) -> tuple[ObjectInfo, str]:
        """As `Origin.look`."""
        attempts, writer = self._attempts, self._attempts.writer
        return await attempts.call(
            lambda: writer.look(key), f"looking up {attempts.name(key)}", "origin_head", key
        )

    async def unchanged(self, key: str, etag: str | None) -> None:
        """Return if the object is the version `etag`, else raise `ObjectChanged`."""
        if (await self.head(key)).etag != etag:
            raise ObjectChanged(f"{self._attempts.name(key)}: the object changed at the origin")

    async def to_send(
        self, key: str, preconditions: Preconditions, honours: Callable[[Preconditions], Awaitable[bool]]
    ) -> Preconditions:
        """The preconditions to send with a write. Those that the origin does not honour are compared here with a HEAD and
        not sent; `Conflict` when they do not hold."""
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
                    raise ObjectChanged(f"{self._attempts.name(key)}: the object changed at the origin")
        return preconditions.unconditional()

    async def settled(self, key: str, size: int, written: Written, *, untimed: bool) -> ObjectInfo:
        """The object that was written, as the origin shows it. `untimed`: without a HEAD for its time alone, so `mtime_ns`
        may be 0. `ObjectChanged` when another client has replaced it."""
        if written.etag and (untimed or written.mtime_ns is not None):
            return ObjectInfo(key, size, written.mtime_ns or 0, written.etag)
        try:
            info = await self.head(key)
        except NotFound as exc:
            raise ObjectChanged(f"{self._attempts.name(key)}: was removed as soon as it was written") from exc
        if info.size != size or (written.etag and info.etag != written.etag):
            raise ObjectChanged(f"{self._attempts.name(key)}: was replaced as soon as it was written")
        return info

    async def ours(self, key: str, token: str, size: int | None, error: CachefsError) -> ObjectInfo:
        """As `Origin.ours`."""
        try:
            info, shown = await self.look(key)
        except NotFound:
            shown = ""
        if token and shown == token and size in (None, info.size):
            return info
        raise error
