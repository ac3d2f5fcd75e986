"""A multipart upload on its way, as the rooms above see it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cachefs.errors import Conflict, NoSuchUpload, NotFound, ObjectChanged, OriginFailed, Unsupported
from cachefs.origin.attempts import PATIENCE
from cachefs.origin.gate import Turn
from cachefs.origin.protocol import CompletionInProgress, ObjectInfo
from cachefs.origin.writing import FileRange, Part, Source, Terms, Written

if TYPE_CHECKING:
    from cachefs.origin.writes import Writes


class Upload:
    """One object being written in parts. `known` are the parts that the store has, by number from 1 on.

    Parts may be sent in any order and several at once; the gate bounds how many are in flight. A number sent again
    replaces what was sent before under it. The object is its parts in the order of their numbers."""

    def __init__(self, origin: Writes, key: str, name: str, terms: Terms, known: dict[int, Part]) -> None:
        self.key, self.id, self.known = key, name, known
        self._origin, self._terms = origin, terms
        self._perhaps_complete = False

    @classmethod
    def of_state(cls, origin: Writes, key: str, state: Mapping[str, Any]) -> Upload:
        terms = Terms(state.get("content_type"), stamp=state.get("stamp", ""))
        known = {int(number): Part(etag, size) for number, (etag, size) in state.get("parts", {}).items()}
        upload = cls(origin, key, state["id"], terms, known)
        upload._perhaps_complete = True  # nobody knows how far the process came that took it
        return upload

    def state(self) -> dict[str, Any]:
        """What `Origin.resume_upload` needs, as JSON can hold it. Parts that landed after it was taken are found by
        `parts`."""
        return {
            "id": self.id,
            "stamp": self._terms.stamp,
            "content_type": self._terms.content_type,
            "parts": {str(number): [part.etag, part.size] for number, part in self.known.items()},
        }

    async def part(self, number: int, fd: int, offset: int, length: int, *, turn: Turn | None = None) -> str:
        """Send bytes [offset, offset + length) of an open file as part `number`; returns its etag. `fd` stays open, and
        the bytes stay the same, until this has returned or raised; a repeated attempt reads them again.

        All parts but the last have at least `limits.least_part`. `NoSuchUpload` when the upload is gone."""
        return await self.part_from(number, FileRange(fd, offset), length, turn=turn)

    async def part_from(self, number: int, source: Source, length: int, *, turn: Turn | None = None) -> str:
        """The same from any source."""
        origin, writer = self._origin, self._origin.writer
        self._within_limits(number, length)
        etag = await origin.send(
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
        """Bytes [start, stop) of the version `etag` of another object as part `number`, copied at the store."""
        origin, writer = self._origin, self._origin.writer
        self._within_limits(number, stop - start)
        found = await origin.call(
            lambda: writer.copy_part(self.key, self.id, number, key, etag, start, stop),
            f"copying part {number} of {self._what}",
            "origin_put_part",
            self.key,
            patience=PATIENCE,
        )
        self.known[number] = Part(found, stop - start)
        return found

    async def parts(self) -> dict[int, Part]:
        """The parts that the store has now, which become `known`. `NoSuchUpload` when the upload is gone."""
        writer = self._origin.writer
        self.known = await self._origin.call(
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
        """Make the object of `parts` (number → etag; all that are known by default), replacing what is there.

        Repeating this is harmless, even by another process after a crash: once it has succeeded, it returns the object,
        as long as nobody has replaced it. `settle` as for `Origin.put`. `NoSuchUpload` when the upload is gone and the
        object is not ours; `Conflict` when the condition does not hold, and then the upload is still there."""
        origin, writer = self._origin, self._origin.writer
        if parts is None:
            parts = {number: part.etag for number, part in self.known.items()}
        if not parts:
            raise OriginFailed(f"{self._what}: an upload without parts cannot be completed")
        given = {number: parts[number] for number in sorted(parts)}
        terms = Terms(self._terms.content_type, if_match, if_absent, self._terms.stamp)
        size = None
        if given.keys() <= self.known.keys():
            size = sum(self.known[number].size for number in given)

        def attempt() -> Written:
            if self._perhaps_complete and terms.stamp:
                with suppress(NotFound):
                    info, shown = writer.look(self.key)
                    if shown == terms.stamp:
                        return Written(info.etag, info.mtime_ns)
            self._perhaps_complete = True
            try:
                return writer.complete(self.key, self.id, given, sent)
            except CompletionInProgress:
                writer.parts(self.key, self.id)  # NoSuchUpload: it is not in progress, but gone
                raise

        try:
            sent = await origin.held(self.key, terms, origin.probes.completes)
            written = await origin.call(
                attempt,
                f"completing {self._what}",
                "origin_upload",
                self.key,
                patience=PATIENCE,
            )
        except (NoSuchUpload, Conflict) as exc:  # an attempt that was given up may have got through meanwhile
            return await origin.ours(self.key, terms.stamp, size, exc)
        if not written.etag and terms.stamp:
            replaced = ObjectChanged(f"{origin.name(self.key)}: was replaced as soon as it was written")
            return await origin.ours(self.key, terms.stamp, size, replaced)
        if size is None:
            size = (await origin.head(self.key)).size
        return await origin.settled(self.key, size, written, untimed=not settle)

    async def abort(self) -> None:
        """Give the upload up; that it is gone already is fine. A part that is just being sent may land afterwards, so
        no `part` shall be under way. Azure knows no such request: its blocks go a week after the last of them came."""
        writer = self._origin.writer
        await self._origin.call(
            lambda: writer.abort(self.key, self.id), f"aborting {self._what}", "origin_upload", self.key
        )

    @property
    def _what(self) -> str:
        return f"the upload of {self._origin.name(self.key)}"

    def _within_limits(self, number: int, length: int) -> None:
        limits = self._origin.limits
        if not 1 <= number <= limits.most_parts:
            raise Unsupported(f"{self._what}: part {number} is not within 1 and {limits.most_parts}")
        if length > limits.largest_part:
            raise Unsupported(
                f"{self._what}: a part of {length} bytes is too long, {limits.largest_part} is most"
            )
