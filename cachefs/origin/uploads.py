"""Multipart uploads, as the rest of the daemon sees them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from cachefs.base.errors import Conflict, NoSuchUpload, NotFound, ObjectChanged, OriginFailed, Unsupported
from cachefs.origin.attempts import Attempts
from cachefs.origin.gate import Ticket
from cachefs.origin.outcomes import Outcomes
from cachefs.origin.protocol import (
    PATIENCE,
    CompletionInProgress,
    FileRange,
    ObjectInfo,
    Part,
    Preconditions,
    Source,
    Written,
)


class Upload:
    """One object being written in parts. `known` are the parts that the origin has, by number from 1 on.

    Parts may be sent in any order and several at once; the gate bounds how many are in flight. A number that is sent again
    replaces its part. The object is its parts in the order of their numbers."""

    def __init__(
        self,
        attempts: Attempts,
        outcomes: Outcomes,
        key: str,
        name: str,
        preconditions: Preconditions,
        known: dict[int, Part],
    ) -> None:
        self.key, self.id, self.known = key, name, known
        self._attempts, self._outcomes, self._preconditions = attempts, outcomes, preconditions
        self._perhaps_complete = False

    @classmethod
    def of_state(cls, attempts: Attempts, outcomes: Outcomes, key: str, state: Mapping[str, Any]) -> Upload:
        preconditions = Preconditions(state.get("content_type"), token=state.get("stamp", ""))
        known = {int(number): Part(etag, size) for number, (etag, size) in state.get("parts", {}).items()}
        upload = cls(attempts, outcomes, key, state["id"], preconditions, known)
        upload._perhaps_complete = True  # the process that took the state may have completed it
        return upload

    def state(self) -> dict[str, Any]:
        """What `Origin.resume_upload` takes, of JSON's types. `parts` finds parts that were written after it was taken."""
        return {
            "id": self.id,
            "stamp": self._preconditions.token,
            "content_type": self._preconditions.content_type,
            "parts": {str(number): [part.etag, part.size] for number, part in self.known.items()},
        }

    async def part(
        self, number: int, fd: int, offset: int, length: int, *, turn: Ticket | None = None
    ) -> str:
        """Send bytes [offset, offset + length) of an open file as part `number`; returns its etag. The caller keeps `fd`
        open and the bytes unchanged until this has returned or raised: a repeated attempt reads them again.

        All parts but the last have at least `limits.least_part` bytes. `NoSuchUpload` when the upload is gone."""
        return await self.part_from(number, FileRange(fd, offset), length, turn=turn)

    async def part_from(self, number: int, source: Source, length: int, *, turn: Ticket | None = None) -> str:
        """The same from any source."""
        writer = self._attempts.writer
        self._within_limits(number, length)
        etag = await self._attempts.send(
            lambda body: writer.put_part(self.key, self.id, number, body),
            source,
            length,
            f"writing part {number} of {self._what}",
            "origin_put_part",
            self.key,
            turn,
        )
        self.known[number] = Part(etag, length)
        return etag

    async def copy_part(self, number: int, key: str, etag: str, start: int, stop: int) -> str:
        """Bytes [start, stop) of the version `etag` of another object as part `number`, copied at the origin."""
        writer = self._attempts.writer
        self._within_limits(number, stop - start)
        found = await self._attempts.call(
            lambda: writer.copy_part(self.key, self.id, number, key, etag, start, stop),
            f"copying part {number} of {self._what}",
            "origin_put_part",
            self.key,
            patience=PATIENCE,
        )
        self.known[number] = Part(found, stop - start)
        return found

    async def parts(self) -> dict[int, Part]:
        """The parts that the origin has now; they become `known`. `NoSuchUpload` when the upload is gone."""
        writer = self._attempts.writer
        self.known = await self._attempts.call(
            lambda: writer.parts(self.key, self.id),
            f"looking up parts of {self._what}",
            "origin_upload",
            self.key,
        )
        return self.known

    async def complete(
        self,
        parts: Mapping[int, str] | None = None,
        *,
        if_match: str | None = None,
        if_absent: bool = False,
        settle: bool = True,
    ) -> ObjectInfo:
        """Make the object of `parts` (number → etag; default: all that are known), replacing the object at the key.

        Repeating this is harmless, even by another process after a crash: after a success it returns the object, until
        another client replaces it. `settle` as for `Origin.put`. `NoSuchUpload` when the upload is gone and the object is
        not ours; `Conflict` when the condition does not hold, and then the upload remains."""
        attempts, outcomes, writer = self._attempts, self._outcomes, self._attempts.writer
        if parts is None:
            parts = {number: part.etag for number, part in self.known.items()}
        if not parts:
            raise OriginFailed(f"{self._what}: an upload without parts cannot be completed")
        given = {number: parts[number] for number in sorted(parts)}
        preconditions = Preconditions(
            self._preconditions.content_type, if_match, if_absent, self._preconditions.token
        )
        size = None
        if given.keys() <= self.known.keys():
            size = sum(self.known[number].size for number in given)

        def attempt() -> Written:
            if self._perhaps_complete and preconditions.token:
                with suppress(NotFound):
                    info, shown = writer.look(self.key)
                    if shown == preconditions.token:
                        return Written(info.etag, info.mtime_ns)
            self._perhaps_complete = True
            try:
                return writer.complete(self.key, self.id, given, sent)
            except CompletionInProgress:
                writer.parts(self.key, self.id)  # NoSuchUpload: not in progress, but gone
                raise

        try:
            sent = await outcomes.to_send(self.key, preconditions, outcomes.probes.completes)
            written = await attempts.call(
                attempt,
                f"completing {self._what}",
                "origin_upload",
                self.key,
                patience=PATIENCE,
            )
        except (NoSuchUpload, Conflict) as exc:  # an abandoned attempt may have succeeded meanwhile
            return await outcomes.ours(self.key, preconditions.token, size, exc)
        if not written.etag and preconditions.token:
            replaced = ObjectChanged(f"{attempts.name(self.key)}: was replaced as soon as it was written")
            return await outcomes.ours(self.key, preconditions.token, size, replaced)
        if size is None:
            size = (await outcomes.head(self.key)).size
        return await outcomes.settled(self.key, size, written, untimed=not settle)

    async def abort(self) -> None:
        """Discard the upload; a missing upload is no error. No `part` may be in flight: it could be written afterwards.
        Azure has no such request and discards blocks a week after the last of them."""
        writer = self._attempts.writer
        await self._attempts.call(
            lambda: writer.abort(self.key, self.id), f"aborting {self._what}", "origin_upload", self.key
        )

    @property
    def _what(self) -> str:
        return f"the upload of {self._attempts.name(self.key)}"

    def _within_limits(self, number: int, length: int) -> None:
        limits = self._attempts.writer.limits
        if not 1 <= number <= limits.most_parts:
            raise Unsupported(f"{self._what}: part {number} is not within 1 and {limits.most_parts}")
        if length > limits.largest_part:
            raise Unsupported(
                f"{self._what}: a part of {length} bytes is too long, {limits.largest_part} is most"
            )
