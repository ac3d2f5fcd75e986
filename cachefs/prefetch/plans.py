"""What a job announced that it will read: lists of files in order, one *plan* for each of its ranks. Pure.

A plan has a list of files, and the orders of this epoch and of the next as numbers into it; the two are one sequence, the
next behind this one. The job's opens tell where it is: the *position* is behind the furthest of the recently opened files
that lie together in the order, if at least half of them do. So files that come late or are skipped are not waited for; a job
that begins again, or elsewhere, is followed forward and back; and another job on the same files, whose opens are scattered
over this order, does not move it. Opens that fit nowhere cost only the prefetch. When the position enters the next order,
that becomes the current one.

Memory, measured for 1.2 M paths of 50 bytes: 65 bytes a file for the list, which plans with the same files share, and 8
bytes a file for each order."""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from cachefs.prefetch.files import Files

RECENT = 64
"""Opens that tell where the job is (of a short order, a quarter): a few of each worker."""

NEAR_MOST, NEAR_LEAST, NEAR_PART = 8192, 4, 8
"""How far around their middle these lie together: an eighth of the order, within bounds. Workers times batches times their
look-ahead are a few thousand files out of order."""

SETTLE_EVERY = 8
"""Opens between two looks at them: a look takes 15 µs (measured)."""

BEGUN = 6
"""So many last opens must be at the begin of the next order, when this one is nearly done, for it to have begun. Derived: by
chance other files are there once in 8^6, and this order is nearly done for a thousand looks."""

LOOKAHEAD = 16_384
"""Files behind the position that are looked at; cached ones cost a look each, the others are bounded by their bytes."""

SOON_MOST, SOON_LEAST, SOON_PART = 512, 16, 8
"""Files behind the position that are looked at again (in a short order an eighth), since a file that was cached at the first
look may be gone: a tenth of a second of the fastest readers, several round trips."""

DROP_AFTER_S = 86_400.0
"""A plan without a use for a day belongs to a job that is over. Given."""

QUIET_S = 600.0
"""After so long without a use nothing more is fetched for a plan, until its files are opened again: most such jobs are dead.
A job's start or evaluation takes less."""

FOLLOWED_S = 7200.0
"""So long after its last use a plan hears of every open: beyond an evaluation, and beyond `announced.TOUCH_EVERY_S`."""

MOST_PLANS = 256
"""Plans at a time: the ranks of several jobs on a node."""


class Order:
    """One epoch: numbers of files in the order of their use. `total` of them, added in order."""

    def __init__(self, epoch: int, total: int, files: int) -> None:
        self.epoch = epoch
        self.total = total
        self.numbers = array("I")
        self._places = array("I", bytes(4 * files))  # by number: its first place + 1

    def __len__(self) -> int:
        return self.total

    def extend(self, numbers: array[int]) -> None:
        """Raises ValueError for too many numbers, or one beyond the list of files."""
        if len(self.numbers) + len(numbers) > self.total:
            raise ValueError("more of the order than was announced")
        if len(numbers) and max(numbers) >= len(self._places):
            raise ValueError(f"the order names file {max(numbers)} of {len(self._places)}")
        places = self._places
        for place, number in enumerate(numbers, len(self.numbers) + 1):
            if not places[number]:
                places[number] = place
        self.numbers += numbers

    @property
    def complete(self) -> bool:
        return len(self.numbers) == self.total

    def place(self, number: int) -> int | None:
        found = self._places[number]
        return found - 1 if found else None


class Item(NamedTuple):
    """One file of a plan that should be fetched. `place` counts from the beginning of the order of `epoch`."""

    plan: Plan
    epoch: int
    place: int
    path: bytes

    @property
    def passed(self) -> bool:
        """True if the furthest of the job's workers is past it."""
        return self.epoch == self.plan.epoch and self.place < self.plan.position


class Plan:
    """One plan. Places are counted from the beginning of the current order, through the next one."""

    def __init__(self, name: str, files: Files, now: float) -> None:
        self.name = name
        self.files = files
        self.used_at = now
        self.orders: list[Order] = []  # the current one and the next
        self.position = 0
        self.ahead = 0  # the first place that was not looked at yet
        self.soon = 0  # the first that was not looked at again
        self.jumped = False  # the position moved far at once; cleared by the reader
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._opens = 0

    @property
    def epoch(self) -> int | None:
        return self.orders[0].epoch if self.orders else None

    def __len__(self) -> int:
        """Places in all orders."""
        return sum(map(len, self.orders))

    def put(self, order: Order) -> None:
        """An order was announced. It replaces the one of its epoch; an earlier epoch restarts the plan; a later one becomes
        the next, and the next one the current."""
        known = {old.epoch: i for i, old in enumerate(self.orders)}
        if (at := known.get(order.epoch)) is not None:
            if self.orders[at].numbers == order.numbers:
                return
            self.orders[at] = order
            if at == 0:
                self._begin()
            else:
                self.ahead = min(self.ahead, len(self.orders[0]))
                self.soon = min(self.soon, self.ahead)
        elif self.orders and order.epoch < self.orders[-1].epoch:
            self.orders = [order]
            self._begin()
        else:
            if len(self.orders) == 2:
                self._advance()
            self.orders.append(order)

    def _begin(self) -> None:
        self.position = self.ahead = self.soon = 0
        self._recent.clear()

    def opened(self, path: bytes, now: float) -> bool:
        """A file was opened; True if the plan names it."""
        number = self.files.find(path)
        if number is None or not any(order.place(number) is not None for order in self.orders):
            return False
        self.used_at = now
        self._recent.append(number)
        self._opens += 1
        if self._opens % SETTLE_EVERY == 0 or self._opens < RECENT:
            self._settle()
        return True

    def _settle(self) -> None:
        """Find the position from the recent opens."""
        current, following = self.orders[0], self.orders[1] if len(self.orders) == 2 else None
        if following is not None and self.position >= len(current) - _near(current):
            last = [following.place(number) for number in list(self._recent)[-BEGUN:]]
            begun = [place for place in last if place is not None and place < max(BEGUN, _near(following))]
            if len(begun) == BEGUN:
                self._advance()
                self._be_at(max(begun) + 1)
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
                self._be_at(together[-1] + 1)
                return

    def _be_at(self, position: int) -> None:
        if abs(position - self.position) > 2 * _near(self.orders[0]):
            self.jumped = True
            self.ahead = self.soon = position  # what it reads again may be gone
        self.position = position
        # The job's workers are batches apart: the others may still read what the furthest has passed.
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
        """True if it was not used for so long."""
        return now - self.used_at > seconds

    def passed(self, epoch: int, place: int) -> bool:
        """True if the job is so far past that place that its file will not be opened late."""
        if not self.orders:
            return True
        near, current = _near(self.orders[0]), self.orders[0].epoch
        return (epoch < current and self.position > near) or (
            epoch == current and place < self.position - near
        )

    def take(self) -> Item | None:
        """The next file to look at: each when it comes within the look-ahead, and again when it is needed soon."""
        soon = self.position + _soon(self.orders[0]) if self.orders else 0
        if self.soon < min(self.ahead, soon):
            self.soon += 1
            return self._item(self.soon - 1)
        if self.ahead < min(len(self), self.position + LOOKAHEAD):
            if self.soon == self.ahead < soon:
                self.soon += 1  # one look is enough
            self.ahead += 1
            return self._item(self.ahead - 1)
        return None

    def _item(self, place: int) -> Item:
        order = self.orders[0]
        if place >= len(order):
            place, order = place - len(order), self.orders[1]
        return Item(self, order.epoch, place, self.files[order.numbers[place]])

    def give_back(self, item: Item) -> None:
        """It could not be fetched now: look at it and at what follows again."""
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
        self.by_name: dict[str, Plan] = {}
        self.jumped = False  # any of them
        self._turn: deque[Plan] = deque()

    def __len__(self) -> int:
        return len(self.by_name)

    def put(self, plan: Plan) -> Plan | None:
        """Add or replace. Returns the plan that was dropped for it, the one unused for longest."""
        self.drop(plan.name)
        gone = None
        if len(self.by_name) >= MOST_PLANS:
            gone = min(self.by_name.values(), key=lambda p: p.used_at)
            self.drop(gone.name)
        self.by_name[plan.name] = plan
        self._turn.append(plan)
        return gone

    def drop(self, name: str) -> Plan | None:
        plan = self.by_name.pop(name, None)
        if plan is not None:
            self._turn.remove(plan)
        return plan

    def unused(self, now: float) -> list[str]:
        """Plans that are over."""
        return [name for name, plan in self.by_name.items() if now - plan.used_at > DROP_AFTER_S]

    def opened(self, path: bytes, now: float) -> bool:
        """True if any plan names the file."""
        named = False
        for plan in self.by_name.values():
            named |= plan.opened(path, now)
            self.jumped |= plan.jumped
            plan.jumped = False
        return named

    def take(self, now: float = 0.0) -> Item | None:
        """The next file of the next plan that has one and is not quiet."""
        for _ in range(len(self._turn)):
            self._turn.rotate(-1)
            plan = self._turn[-1]
            if not plan.quiet(now) and (item := plan.take()) is not None:
                return item
        return None

    def sharing(self, files: Files) -> Files:
        """The same list, if a plan has it already."""
        return next((p.files for p in self.by_name.values() if p.files.digest == files.digest), files)
