"""Looking up one name with as few requests as possible.

A fresh answer costs no request. Otherwise:

- A name that was known, and whose answer is too old, is asked for alone: one HEAD, or one LIST of one key for a directory.
  After three such names within a TTL, or after a refresh of the whole directory, a new listing of it is cheaper.
- A name in a directory that was not listed starts the listing. In most directories its first page decides.
- If the first page does not reach the name, a HEAD of the key and a LIST of one key below it are sent side by side, while
  the listing goes on for a bounded number of pages.

Lookups of the same name at the same time share one question to the origin.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from cachefs.base.errors import CachefsError, NameTooLong, NotFound, ObjectChanged, Unreachable
from cachefs.base.ledger import about
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import Outcome
from cachefs.fs.freshness import Freshness
from cachefs.fs.keys import MAX_NAME, nameable, text_of
from cachefs.fs.listing import AHEAD, Lister
from cachefs.fs.pages import write_answer
from cachefs.fs.tree import Directory, Found, Tree

if TYPE_CHECKING:
    from cachefs.fs.rows import Row
    from cachefs.origin import Origin
    from cachefs.origin.protocol import ObjectInfo

SINGLE_ASKS = 3
"""Names of one directory asked for one by one within a TTL before it is listed again. Guessed: a LIST page costs an origin
about as much time as two HEADs and answers a thousand."""


@dataclass(slots=True, eq=False, repr=False)
class _Question:
    """A question to the origin that is under way. `doubts` is `Freshness.doubts` when it was asked. It ends without an
    answer if its caller is cancelled."""

    doubts: int
    answer: Outcome[Found | float] = field(default_factory=Outcome)


@dataclass(eq=False, repr=False)
class Looker:
    """Answers about names: a `Found`, or for how many seconds the name is missing."""

    _tree: Tree
    _freshness: Freshness
    _lister: Lister
    _metrics: Metrics
    _questions: dict[tuple[int, bytes], _Question] = field(default_factory=dict)

    def now(self, directory: Directory, name: bytes) -> Found | float | None:
        """The fresh answer; None if `look` has to be awaited. Raises `NameTooLong`."""
        if not nameable(name):
            if len(name) > MAX_NAME:
                raise NameTooLong(f"a name of {len(name)} bytes")
            return directory.ttls.negative_ttl
        now = self._tree.clock()
        answer = self._freshness.decide(directory, name, now, now)
        return self._last_known(directory, name) if answer is None else answer

    def _last_known(self, directory: Directory, name: bytes) -> Found | float | None:
        """The last known answer, whatever its age, if the origin does not answer and may serve stale answers; else None."""
        if directory.origin is None or not directory.origin.serves_stale:
            return None
        answer = self._freshness.last_known(directory, name, self._tree.clock())
        if answer is not None:
            self._metrics.stale_answers += 1
        return answer

    async def look(self, directory: Directory, name: bytes, *, share: bool = True) -> Found | float:
        """The fresh answer, or one from the origin. Without `share`, an answer about a file that is already under way is not
        used."""
        about(directory.prefix + name.decode("utf-8", "surrogateescape"))
        try:
            return await self._look(directory, name, share)
        except Unreachable:
            answer = self._last_known(directory, name)
            if answer is None:
                raise
            return answer

    async def _look(self, directory: Directory, name: bytes, share: bool) -> Found | float:
        since = self._tree.clock()
        while True:
            now = self._tree.clock()
            answer = self._freshness.decide(directory, name, since, now)
            if answer is not None:
                return answer
            origin = directory.origin
            # Without an origin, the directory has only the names of sources. Keys are UTF-8, so none has any other name.
            if origin is None or text_of(name) is None:
                return directory.ttls.negative_ttl
            if (answer := self._last_known(directory, name)) is not None:
                return answer
            if not origin.can_list or self._ask_itself(directory, name, now):
                share = share or self._tree.find(directory, name)[0] is not None
                return await self.ask(directory, name, share=share)
            listing = self._lister.demand(directory, self._freshness.horizon(directory, since))
            if listing.pages:
                break
            page = listing.next_page
            self._lister.allow(directory, listing, AHEAD + 1 if directory.ttls.ttl else 1)
            await page.wait()
            answer = self._freshness.decide(directory, name, since, self._tree.clock())
            if answer is not None:
                return answer
            if directory.listing is listing or directory.listed.complete == listing.generation:
                break
        if directory.listing is listing and directory.ttls.ttl:
            self._lister.missed(directory, listing)
        return await self.ask(directory, name)

    async def sure(self, directory: Directory, name: bytes, *, below: bool = False) -> Found | float:
        """`look` for a name that is about to be made and must replace nothing. If the known answer says that it is missing,
        the origin is asked again, unless it was asked a moment ago: one HEAD of the key and, with `below`, one LIST of one
        key below it. While the origin does not answer, the fresh answer counts."""
        found = await self.look(directory, name)
        text, origin = text_of(name), directory.origin
        if isinstance(found, Found) or text is None or origin is None:
            return found
        if self._freshness.just_absent(directory, name):
            return found
        try:
            if not below and await _head(origin, directory.prefix + text) is None:
                return found
            found = await self.ask(directory, name)
        except Unreachable:
            return found
        if isinstance(found, Found):
            self._lister.tell(directory, name)  # the kernel has cached that it is missing
        return found

    def _ask_itself(self, directory: Directory, name: bytes, now: float) -> bool:
        """True if the name was known, and one or two requests for it are cheaper than a listing of the directory."""
        as_dir, as_file = self._tree.find(directory, name)
        row = as_dir or as_file
        if row is None:
            return False
        if not row.known:
            return True
        if not directory.ttls.ttl:
            return True  # with a TTL of 0 a listing serves no more lookups than an answer
        listed = directory.listed
        if listed.complete and not listed.doubtful and self._freshness.whole(directory) is None:
            return False
        return directory.asks.one_more(now, directory.ttls.ttl) <= SINGLE_ASKS

    async def ask(self, directory: Directory, name: bytes, *, share: bool = True) -> Found | float:
        """Ask the origin about this one name. With `share`, wait for a question about it that is already under way."""
        key = (directory.ino, name)
        while share and (under_way := self._questions.get(key)) is not None:
            if under_way.doubts != self._freshness.doubts:
                break  # its answer may be from before a change that was found since
            answer = await under_way.answer.wait()
            # The row of a dirty file has no size. It counts only at once: before this caller went on, the file may have been
            # uploaded, and would be opened by that row as an empty one.
            if answer is not None and not (isinstance(answer, Found) and not answer.row.known):
                return answer
        question = _Question(self._freshness.doubts)
        if share:
            self._questions[key] = question
        try:
            answer = question.answer.value = await self._ask(directory, name)
        except CachefsError as exc:
            answer = self._last_known(directory, name) if isinstance(exc, Unreachable) else None
            if answer is None:
                question.answer.failure = exc
                raise
            question.answer.value = answer
        finally:
            if self._questions.get(key) is question:
                del self._questions[key]
            question.answer.end()
        return answer

    async def _ask(self, directory: Directory, name: bytes) -> Found | float:
        """Ask the origin, and record the answer. Asks again if the name or the directory changed during the request."""
        text, origin = text_of(name), directory.origin
        if text is None or origin is None:
            return directory.ttls.negative_ttl
        while True:
            requested_at, epoch, changes = self._tree.clock(), self._tree.epoch, self._tree.changes
            if self._freshness.is_hidden(directory, name):
                return 0.0
            if (pending := self._freshness.pending.get((directory.ino, name))) is not None:
                return pending.found(requested_at)
            before = self._tree.find(directory, name)
            cover = self._freshness.coverage(directory, name)
            as_dir, as_file = before
            if (
                as_file is not None
                and as_file.generation > (cover[0] if cover else 0)
                and not self._freshness.was_asked(as_file.ino)
            ):
                # A listing showed the file, and has not reached the place of a directory of its name. Ask for both, once.
                as_file = None
            prefix = directory.prefix
            answer = await _ask_origin(origin, prefix + text, as_dir, as_file)
            answer = name in self._freshness.pending.names_in(directory) or answer
            if prefix == directory.prefix and await self._write(directory, name, answer, before, changes):
                break
        row = None if answer is False else self._tree.row(directory, name + b"/" if answer is True else name)
        ino = None if row is None else row.ino
        if epoch == self._tree.epoch:
            self._freshness.note_answer(directory, name, ino, requested_at)
        if row is None or ino is None:
            return directory.ttls.negative_ttl
        return Found(ino, answer is True, row, requested_at + directory.ttls.ttl)

    async def _write(
        self,
        directory: Directory,
        name: bytes,
        answer: ObjectInfo | bool,
        before: tuple[Row | None, Row | None],
        changes: int,
    ) -> bool:
        """Record an answer. False if the name was written during the request, so the origin has to be asked again. Raises
        `ObjectChanged` if the directory was removed."""
        async with self._tree.writing:
            if self._tree.find(directory, name) != before:
                return False
            if self._tree.changed_since(directory, name, changes):
                return False
            cover = self._freshness.coverage(directory, name)
            generation = cover[0] if cover else 0
            if _is_written(answer, *before, generation):
                return True
            if self._tree.known(directory.ino) is not directory:
                # Rows below a removed directory would stay for ever.
                raise ObjectChanged(f"{directory.prefix} was removed")
            written = write_answer(self._tree, directory, name, answer, generation)
        await self._lister.lost(directory, written.lost)
        return True


def _is_written(answer: ObjectInfo | bool, as_dir: Row | None, as_file: Row | None, generation: int) -> bool:
    """True if the rows have this answer already, and are not about to be swept."""
    if answer is False:
        return as_dir is None and as_file is None
    if answer is True:
        return as_dir is not None and as_dir.generation >= generation
    return (
        as_dir is None
        and as_file is not None
        and as_file.known
        and as_file.generation >= generation
        and (as_file.size, as_file.etag, as_file.mtime_ns) == (answer.size, answer.etag, answer.mtime_ns)
    )


async def _ask_origin(origin: Origin, key: str, as_dir: Row | None, as_file: Row | None) -> ObjectInfo | bool:
    """The object `key`; True if there are keys below it; False for neither. If a row exists, its kind is asked for first."""
    if not origin.can_list:
        return await _head(origin, key) or await _head(origin, key + "/") is not None
    if as_dir is not None:
        return await _has_keys(origin, key + "/") or await _head(origin, key) or False
    if as_file is not None:
        return await _head(origin, key) or await _has_keys(origin, key + "/")
    found: list[ObjectInfo | CachefsError | None] = []
    below: bool | CachefsError

    async def head() -> None:
        try:
            found.append(await _head(origin, key))
        except CachefsError as exc:
            found.append(exc)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(head)
        try:
            below = await _has_keys(origin, key + "/")
        except CachefsError as exc:
            below = exc
        if below:
            nursery.cancel_scope.cancel()
    answer = below or found[0]
    if isinstance(answer, CachefsError):
        raise answer
    return answer or False


async def _head(origin: Origin, key: str) -> ObjectInfo | None:
    try:
        return await origin.head(key)
    except NotFound:
        return None


async def _has_keys(origin: Origin, prefix: str) -> bool:
    """True if any key begins with `prefix`."""
    token: str | None = None
    while True:
        try:
            page = await origin.list_page(prefix, token=token, limit=1)
        except NotFound:
            return False  # an origin with real directories (files, an index page) answers so
        if page.objects or page.prefixes:
            return True
        if page.next_token is None or page.next_token == token:
            return False
        token = page.next_token
