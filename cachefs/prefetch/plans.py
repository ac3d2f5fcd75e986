"""Access plans: the files that a job will read, in order, one *plan* for each of its ranks. Pure.

A plan has a list of files, and the orders of this epoch and of the next as numbers into it. The two orders are one
sequence, the next one behind the current one. The job's opens show its progress. The *position* is the place behind the
furthest of the recently opened files that lie together in the order, if at least half of them do. So files that are opened
out of order or skipped do not hold the plan up, the plan follows a job that starts again, or elsewhere, and another job on
the same files does not move it. When the position enters the next order, that becomes the current one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import os
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import trio

from cachefs.base.database import Database, Put
from cachefs.base.errors import CachefsError, ConfigError

RECENT = 64
"""Recent opens from which the position is computed: a few of each worker. In a short order, a quarter of its length."""

NEAR_MOST, NEAR_LEAST, NEAR_PART = 8192, 4, 8
"""Recent opens lie together if each is within an eighth of the order from their median; the eighth is bounded. Workers with
their batches and their look-ahead open a few thousand files out of order."""

FIND_EVERY = 8
"""Opens after which the position is computed again, which takes 15 µs (measured)."""

BEGUN = 6
"""When the current order is nearly done, the next one has begun if so many last opens are at its beginning. Derived: by
chance other files are there once in 8^6, and the position is computed a thousand times while an order is nearly done."""

LOOKAHEAD = 16_384
"""Files behind the position that are candidates. A cached one costs a lookup; the others are bounded by their bytes."""

SOON_MOST, SOON_LEAST, SOON_PART = 512, 16, 8
"""Files behind the position that are candidates again (in a short order an eighth): one that was cached at its first lookup
may have been evicted since. The fastest readers need a tenth of a second for so many, which is several round trips."""

DROP_AFTER_S = 86_400.0
"""A plan that was not used for a day is dropped, because its job is over. Given."""

QUIET_S = 600.0
"""When a plan was not used for so long, nothing more is fetched for it until its files are opened again. Most such jobs are
dead; the start or the evaluation of a job takes less."""

FOLLOWED_S = 7200.0
"""For so long after its last use, a plan is told of every open: longer than an evaluation, and than `TOUCH_EVERY_S`."""

MOST_PLANS = 256
"""Plans at a time: the ranks of several jobs on a node."""


class Order:
    """The order of one epoch: `total` numbers of files, in the order of their use. They are added in that order."""

    def __init__(self, epoch: int, total: int, files: int) -> None:
        self.epoch = epoch
        self.total = total
        self.numbers = array("I")
        self._places = array("I", bytes(4 * files))  # by number: its first place + 1

    def __len__(self) -> int:
        return self.total

    def extend(self, numbers: array[int]) -> None:
        """Add numbers. Raises ValueError for too many of them, or for one beyond the list of files."""
        if len(self.numbers) + len(numbers) > self.total:
            raise ValueError("more numbers than the order has")
        if len(numbers) and max(numbers) >= len(self._places):
            raise ValueError(f"the order names file {max(numbers)} of {len(self._places)}")
        places = self._places
        for place, number in enumerate(numbers, len(self.numbers) + 1):
            if not places[number]:
                places[number] = place
        self.numbers += numbers

    def place(self, number: int) -> int | None:
        """The first place of a file in the order."""
        found = self._places[number]
        return found - 1 if found else None


class Item(NamedTuple):
    """One file of a plan that should be fetched. `place` counts from the beginning of the order of `epoch`."""

    plan: Plan
    epoch: int
    place: int
    path: bytes

    @property
    def is_behind(self) -> bool:
        """True if it lies before the position: the furthest of the job's workers has passed it."""
        return self.epoch == self.plan.epoch and self.place < self.plan.position


@dataclass(eq=False)
class Plan:
    """One plan. Places are counted from the beginning of the current order on, and go on through the next one."""

    name: str
    files: Files
    used_at: float
    orders: list[Order] = field(default_factory=list)  # the current one and the next
    position: int = 0
    ahead: int = 0  # the first place that was no candidate yet
    soon: int = 0  # the first that was no candidate a second time
    jumped: bool = False  # the position moved far at once; the next sweep clears it
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    _opens: int = 0

    @property
    def epoch(self) -> int | None:
        return self.orders[0].epoch if self.orders else None

    def __len__(self) -> int:
        """Places in all orders."""
        return sum(map(len, self.orders))

    def put(self, order: Order) -> None:
        """Take an order. It replaces the one of its epoch. An earlier epoch restarts the plan. A later one becomes the next
        order, and the next one the current."""
        known = {old.epoch: i for i, old in enumerate(self.orders)}
        if (at := known.get(order.epoch)) is not None:
            if self.orders[at].numbers == order.numbers:
                return
            self.orders[at] = order
            if at == 0:
                self._restart()
            else:
                self.ahead = min(self.ahead, len(self.orders[0]))
                self.soon = min(self.soon, self.ahead)
        elif self.orders and order.epoch < self.orders[-1].epoch:
            self.orders = [order]
            self._restart()
        else:
            if len(self.orders) == 2:
                self._advance()
            self.orders.append(order)

    def _restart(self) -> None:
        self.position = self.ahead = self.soon = 0
        self._recent.clear()

    def opened(self, path: bytes, now: float) -> bool:
        """Note that a file was opened. True if the plan names it."""
        number = self.files.find(path)
        if number is None or not any(order.place(number) is not None for order in self.orders):
            return False
        self.used_at = now
        self._recent.append(number)
        self._opens += 1
        if self._opens % FIND_EVERY == 0 or self._opens < RECENT:
            self._find_position()
        return True

    def _find_position(self) -> None:
        """Find the position from the recent opens."""
        current, following = self.orders[0], self.orders[1] if len(self.orders) == 2 else None
        if following is not None and self.position >= len(current) - _near(current):
            last = [following.place(number) for number in list(self._recent)[-BEGUN:]]
            begun = [place for place in last if place is not None and place < max(BEGUN, _near(following))]
            if len(begun) == BEGUN:
                self._advance()
                self._move_to(max(begun) + 1)
                return
        for order in self.orders:
            recent = list(self._recent)[-max(BEGUN, len(order) // 4) :]
            places = sorted(place for number in recent if (place := order.place(number)) is not None)
            if 2 * len(places) < len(recent):
                continue
            middle = places[len(places) // 2]
            together = [place for place in places if abs(place - middle) <= _near(order)]
            if 2 * len(together) >= len(recent):
                if order is following:
                    self._advance()
                self._move_to(together[-1] + 1)
                return

    def _move_to(self, position: int) -> None:
        if abs(position - self.position) > 2 * _near(self.orders[0]):
            self.jumped = True
            self.ahead = self.soon = position  # files that it reads again may have been evicted
        self.position = position
        # The job's workers are batches apart: the others may still read files that the furthest has passed.
        self.ahead = max(self.ahead, position - _near(self.orders[0]))
        self.soon = max(self.soon, position)

    def _advance(self) -> None:
        """The next order is the current one."""
        done = len(self.orders.pop(0))
        self.position = max(0, self.position - done)
        self.ahead, self.soon = max(0, self.ahead - done), max(0, self.soon - done)
        if self.orders:
            self._recent.clear()

    def quiet(self, now: float, seconds: float = QUIET_S) -> bool:
        """True if the plan was not used for `seconds`."""
        return now - self.used_at > seconds

    def is_past(self, epoch: int, place: int) -> bool:
        """True if the job is so far past that place that no worker will open its file."""
        if not self.orders:
            return True
        near, current = _near(self.orders[0]), self.orders[0].epoch
        return (epoch < current and self.position > near) or (
            epoch == current and place < self.position - near
        )

    def take(self) -> Item | None:
        """The next candidate. Each file is one when it comes within the look-ahead, and again when it is needed soon."""
        soon = self.position + _soon(self.orders[0]) if self.orders else 0
        if self.soon < min(self.ahead, soon):
            self.soon += 1
            return self._item(self.soon - 1)
        if self.ahead < min(len(self), self.position + LOOKAHEAD):
            if self.soon == self.ahead < soon:
                self.soon += 1  # it becomes a candidate now, so not a second time
            self.ahead += 1
            return self._item(self.ahead - 1)
        return None

    def _item(self, place: int) -> Item:
        order = self.orders[0]
        if place >= len(order):
            place, order = place - len(order), self.orders[1]
        return Item(self, order.epoch, place, self.files[order.numbers[place]])

    def put_back(self, item: Item) -> None:
        """Make a file that could not be fetched now, and those behind it, candidates again."""
        start = 0
        for order in self.orders:
            if order.epoch == item.epoch:
                place = max(self.position, start + item.place)
                self.ahead, self.soon = min(self.ahead, place), min(self.soon, place)
                return
            start += len(order)


def _near(order: Order) -> int:
    return max(NEAR_LEAST, min(NEAR_MOST, len(order) // NEAR_PART))


def _soon(order: Order) -> int:
    return max(SOON_LEAST, min(SOON_MOST, len(order) // SOON_PART))


class Plans:
    """All plans, taken round-robin."""

    def __init__(self) -> None:
        self.by_name: OrderedDict[str, Plan] = OrderedDict()  # the next to take from comes first

    def put(self, plan: Plan) -> Plan | None:
        """Add or replace a plan. Returns the plan that was dropped for it: the one unused for longest."""
        self.drop(plan.name)
        dropped = None
        if len(self.by_name) >= MOST_PLANS:
            dropped = min(self.by_name.values(), key=lambda p: p.used_at)
            self.drop(dropped.name)
        self.by_name[plan.name] = plan
        return dropped

    def drop(self, name: str) -> Plan | None:
        return self.by_name.pop(name, None)

    def expired(self, now: float) -> list[str]:
        """The names of plans whose jobs are over."""
        return [name for name, plan in self.by_name.items() if plan.quiet(now, DROP_AFTER_S)]

    def opened(self, path: bytes, now: float) -> bool:
        """Note that a file was opened. True if any plan names it."""
        named = [plan.opened(path, now) for plan in self.by_name.values()]
        return any(named)

    def take(self, now: float = 0.0) -> Item | None:
        """The next file of the next plan that has one and is not quiet."""
        for plan in list(self.by_name.values()):
            self.by_name.move_to_end(plan.name)
            if not plan.quiet(now) and (item := plan.take()) is not None:
                return item
        return None

    def sharing(self, files: Files) -> Files:
        """The same list, if a plan has it already."""
        return next((p.files for p in self.by_name.values() if p.files.digest == files.digest), files)


# A compact list of paths: a plan may have over a million. The paths lie in one buffer. An open-addressed hash table of
# their numbers finds them, and is built when the list is complete. Measured: 1.2 M paths of 50 bytes take 66 bytes each, a
# third of a dict of strings.

MOST_FILES = 1 << 26
"""Files of one list. Derived: with paths of 60 bytes they fill the four gigabytes that the offsets can address."""


class Files:
    """`total` paths, added in order, each found by its bytes. Paths are relative to the mount, without a leading slash."""

    def __init__(self, total: int) -> None:
        if not 0 <= total <= MOST_FILES:
            raise ConfigError(f"a list of {total} files: at most {MOST_FILES} are taken")
        self.total = total
        self._text = bytearray()  # each path with a NUL behind it, which no path has
        self._ends = array("I")
        self._hash = hashlib.blake2b(digest_size=16)
        self._table = array("I")  # number + 1; 0 is free

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def digest(self) -> bytes:
        """Of the paths in their order: lists with the same digest are the same."""
        return self._hash.digest()

    @property
    def text(self) -> bytes:
        """The paths as `from_text` takes them."""
        return bytes(self._text)

    @classmethod
    def from_text(cls, text: bytes) -> Files:
        """The list whose `text` this was. Raises ValueError if it cannot have been one."""
        paths = text.split(b"\0")
        if paths.pop() != b"":
            raise ValueError("the last path has no end")
        files = cls(len(paths))
        files.extend(paths)
        files.make_table()
        return files

    def extend(self, paths: Iterable[bytes]) -> None:
        """Add paths. Raises `ConfigError` if there are more than `total`, or one has a NUL in it."""
        for path in paths:
            number = len(self._ends)
            end = len(self._text) + len(path) + 1
            if number >= self.total or end > 0xFFFFFFFF:
                raise ConfigError("more paths than the list has, or four gigabytes of them")
            if b"\0" in path:
                raise ConfigError("a path with a NUL in it")
            ended = path + b"\0"
            self._text += ended
            self._ends.append(end)
            self._hash.update(ended)

    def make_table(self) -> None:
        """Build the table of the complete list. Takes seconds for a million; any thread may do it."""
        slots = 8
        while slots < len(self) + len(self) // 2:
            slots *= 2
        table = array("I", bytes(4 * slots))
        for number in range(len(self)):
            slot = self._slot(table, self[number])
            if not table[slot]:
                table[slot] = number + 1  # of paths given twice, the first is found
        self._table = table

    def __getitem__(self, number: int) -> bytes:
        start = self._ends[number - 1] if number else 0
        return bytes(self._text[start : self._ends[number] - 1])

    def find(self, path: bytes) -> int | None:
        """The number of a path; None if the list does not have it."""
        if not self._table:
            self.make_table()
        found = self._table[self._slot(self._table, path)]
        return found - 1 if found else None

    def _slot(self, table: array[int], path: bytes) -> int:
        """Where `path` is in the table, or would be."""
        mask = len(table) - 1
        slot = hash(path) & mask
        while (found := table[slot]) and self[found - 1] != path:
            slot = (slot + 1) & mask
        return slot


# Plans on disk, in a database of their own, so that a restarted daemon continues where the job is. The table `lists` has a
# list of paths under its digest, once for all plans that share it; `plans` has each plan's name, digest and time of last
# use; `orders` has its orders. Nothing here is worth an fsync: a lost plan costs its prefetch.

log = logging.getLogger(__name__)

FORMAT = "plans-1"
TABLES = ("lists", "plans", "orders")


class PlanStore:
    """Plans on disk. All methods block, and one runs at a time. A failure of the database is logged, and raises nothing."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened: Database | None = None

    def save(self, plan: Plan, orders: list[Order]) -> None:
        """Save a plan with its present `orders`, which never change once a plan has them: its own list of them may."""
        key, digest = _key(plan.name), plan.files.digest
        head = [plan.name, digest.hex(), plan.used_at, [order.epoch for order in orders]]
        try:
            database = self._database()
            puts: list[Put] = [
                ("orders", key + bytes([place]), order.numbers.tobytes())
                for place, order in enumerate(orders)
            ]
            puts.append(("plans", key, json.dumps(head).encode()))
            if database.get("lists", digest) is None:
                puts.append(("lists", digest, plan.files.text))
            puts += [row for row in self._last_use(key) if row[1] != digest]
            database.write(puts, [("orders", key, key + b"\xff")])
        except CachefsError as exc:
            log.warning("plan %s is not kept over a restart: %s", plan.name, exc)

    def drop(self, name: str) -> None:
        """Forget a plan, and its list of files if no other plan has it."""
        key = _key(name)
        try:
            lists = self._last_use(key)
            self._database().write([("plans", key, None), *lists], [("orders", key, key + b"\xff")])
        except CachefsError as exc:
            log.warning("plan %s may come back with a restart: %s", name, exc)

    def load(self) -> list[Plan]:
        """The plans that an earlier daemon saved."""
        plans: list[Plan] = []
        if not self._directory.exists():
            return plans
        try:
            database, lists = self._database(), dict[str, Files]()
            for key, head in database.scan("plans"):
                name, digest, used_at, epochs = json.loads(head)
                if digest not in lists:
                    text = database.get("lists", bytes.fromhex(digest)) or b"missing"
                    lists[digest] = Files.from_text(text)
                plan = Plan(name, lists[digest], used_at)
                for place, epoch in enumerate(epochs):
                    numbers = array("I", database.get("orders", key + bytes([place])) or b"")
                    order = Order(epoch, len(numbers), len(plan.files))
                    order.extend(numbers)
                    plan.put(order)
                plans.append(plan)
        except CachefsError as exc:
            log.warning("the plans of an earlier daemon cannot be read: %s", exc)
        except (ValueError, TypeError) as exc:
            log.warning("the plans of an earlier daemon cannot be read, and are dropped: %s", exc)
            plans.clear()
            with suppress(CachefsError):  # then the next start drops them
                database.write([], [(table, b"", b"\xff" * 18) for table in TABLES])
        return plans

    def close(self) -> None:
        """Close the database. The next call opens it again: prefetch that failed is run again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _last_use(self, key: bytes) -> list[Put]:
        """The removal of this plan's list of files, if no other plan has it."""
        heads = dict(self._database().scan("plans"))
        digest = json.loads(heads.pop(key, b"[0, null]"))[1]
        unused = digest is not None and all(json.loads(head)[1] != digest for head in heads.values())
        return [("lists", bytes.fromhex(digest), None)] if unused else []

    def _database(self) -> Database:
        if self._opened is None:
            self._opened = Database(self._directory, TABLES, version=FORMAT, fsync=False)
        return self._opened


def _key(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()


# Plans arrive over the control socket in parts, because a request is one bounded line. A list of files or an order takes
# effect when it is complete; until then the plan stays as it was.

LONGEST_NAME = 256

UNFINISHED_S = 600.0
"""An incomplete list or order is dropped when no part of it came for so long. A job sends its parts one after the other."""

TOUCH_EVERY_S = 3600.0
"""How often the time of last use of a plan is saved. Derived: a small part of `DROP_AFTER_S`."""


@dataclass(eq=False, repr=False)
class Hints:
    """Receives plans. `_on_change` is called when plans were added, changed or dropped."""

    _plans: Plans
    _plan_store: PlanStore
    _on_change: Callable[[], None]
    _clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._files: dict[str, Files] = {}
        self._orders: dict[str, Order] = {}
        self._unfinished: dict[str, float] = {}  # plan → time of the last part of an incomplete list or order
        self._writing = trio.Lock()
        self._swept_at = self._clock()

    def verbs(self) -> dict[str, Callable[..., Awaitable[int]]]:
        """For the control socket."""
        return {"hint_files": self.files, "hint_order": self.order, "hint_drop": self.drop}

    async def load(self) -> None:
        """Load the plans of an earlier daemon."""
        async with self._writing:
            plans = await trio.to_thread.run_sync(self._plan_store.load)
        for plan in plans:
            if plan.name not in self._plans.by_name:
                self._plans.put(plan)
        await self.drop_unused()
        self._on_change()

    async def files(self, plan: str, paths: list[str], at: int, total: int) -> int:
        """A part of a plan's list of `total` paths, relative to the mount, from the `at`th on. Returns how many are known.
        Raises `ConfigError`."""
        _check_types(plan, at=at, total=total)
        if not isinstance(paths, list) or not all(type(path) is str and "\0" not in path for path in paths):
            raise ConfigError(f"plan {plan}: paths are strings without a NUL")
        if at == 0:
            self._files[plan] = Files(total)
            if len(self._files) > MOST_PLANS:
                self._forget_unfinished(next(iter(self._files)))
        files = self._files.get(plan)
        if files is None or len(files) != at or files.total != total:
            raise ConfigError(f"plan {plan}: a list of files begins at 0 and goes on where it stopped")
        try:
            files.extend([os.fsencode(path).lstrip(b"/") for path in paths])
        except UnicodeEncodeError as exc:
            raise ConfigError(f"plan {plan}: {exc}") from exc
        self._unfinished[plan] = self._clock()
        if len(files) == total:
            known = self._plans.by_name.get(plan)
            if known is not None and known.files.digest == files.digest:
                del self._files[plan]
                known.used_at = self._clock()
            else:
                self._orders.pop(plan, None)
                if self._plans.sharing(files) is files:
                    await trio.to_thread.run_sync(files.make_table)
                if self._files.get(plan) is not files:
                    return total  # the plan was dropped meanwhile, or a job has begun to send another list
                del self._files[plan]
                dropped = self._plans.put(Plan(plan, self._plans.sharing(files), self._clock()))
                self._on_change()
                if dropped is not None:
                    self._orders.pop(dropped.name, None)
                    await self._forget_saved(dropped.name)
        return len(files)

    async def order(
        self, plan: str, epoch: int, indices_b64: str, at: int, total: int, files: str = ""
    ) -> int:
        """A part of the order of an epoch, which has `total` numbers: those from the `at`th on, as little-endian 32-bit
        numbers in base64. Each is a place in the plan's list of files. Returns how many are known. Raises `ConfigError`,
        also when `files` is not the digest of the plan's list: the numbers would name other files."""
        _check_types(plan, epoch=epoch, at=at, total=total)
        known = self._plans.by_name.get(plan)
        if known is None:
            raise ConfigError(f"plan {plan}: its files are not known")
        if files and files != known.files.digest.hex():
            raise ConfigError(f"plan {plan}: it has another list of files, which another job sent")
        if at == 0:
            if not 0 <= total <= 64 * max(len(known.files), 1):
                raise ConfigError(f"plan {plan}: an order of {total} for {len(known.files)} files")
            self._orders[plan] = Order(epoch, total, len(known.files))
        order = self._orders.get(plan)
        if order is None or len(order.numbers) != at or (order.total, order.epoch) != (total, epoch):
            raise ConfigError(f"plan {plan}: an order begins at 0 and goes on where it stopped")
        try:
            numbers = array("I", base64.b64decode(indices_b64, validate=True))
            if sys.byteorder == "big":
                numbers.byteswap()
            order.extend(numbers)
        except (binascii.Error, ValueError, TypeError) as exc:
            raise ConfigError(f"plan {plan}: {exc}") from exc
        self._unfinished[plan] = self._clock()
        if len(order.numbers) == total:
            del self._orders[plan]
            known.put(order)
            known.used_at = self._clock()
            self._on_change()
            await self._save(known)
        return len(order.numbers)

    async def drop(self, plan: str) -> bool:
        """Forget a plan; True if there was one."""
        self._forget_unfinished(plan)
        found = self._plans.drop(plan) is not None
        self._on_change()
        if found:
            await self._forget_saved(plan)
        return found

    async def drop_unused(self) -> None:
        """Forget plans of jobs that are over, and incomplete ones; save which plans are in use."""
        now = self._clock()
        for name in [name for name, at in self._unfinished.items() if now - at > UNFINISHED_S]:
            self._forget_unfinished(name)
        for name in self._plans.expired(now):
            await self.drop(name)
        if now - self._swept_at > TOUCH_EVERY_S:
            for plan in list(self._plans.by_name.values()):
                if plan.used_at > self._swept_at:
                    await self._save(plan)
            self._swept_at = now

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            async with self._writing:
                await trio.to_thread.run_sync(self._plan_store.close)

    def _forget_unfinished(self, plan: str) -> None:
        self._files.pop(plan, None)
        self._orders.pop(plan, None)
        self._unfinished.pop(plan, None)

    async def _forget_saved(self, name: str) -> None:
        async with self._writing:
            await trio.to_thread.run_sync(self._plan_store.drop, name)

    async def _save(self, plan: Plan) -> None:
        async with self._writing:
            if self._plans.by_name.get(plan.name) is plan:
                await trio.to_thread.run_sync(self._plan_store.save, plan, list(plan.orders))


def _check_types(plan: object, **numbers: object) -> None:
    """Check the values of a hint, which come as JSON from any client of the control socket. Raises `ConfigError`."""
    if not isinstance(plan, str) or not 0 < len(plan) <= LONGEST_NAME:
        raise ConfigError(f"the name of a plan has 1 to {LONGEST_NAME} characters")
    for name, number in numbers.items():
        if type(number) is not int:
            raise ConfigError(f"plan {plan}: {name} is a whole number, not {number!r}")
