"""Plans as they arrive over the control socket: in parts, because a request is one bounded line.

A list of files or an order takes effect when it is complete; until then the plan stays as it was.
"""

from __future__ import annotations

import base64
import binascii
import os
import sys
import time
from array import array
from collections.abc import Callable

import trio

from cachefs.base.errors import ConfigError
from cachefs.prefetch.files import Files
from cachefs.prefetch.plan_store import PlanStore, Snapshot
from cachefs.prefetch.plans import MOST_PLANS, Order, Plan, Plans

LONGEST_NAME = 256

UNFINISHED_S = 600.0
"""An incomplete list or order of which no part came for so long is dropped; a job sends its parts at once."""

TOUCH_EVERY_S = 3600.0
"""How often the time of last use of a plan is saved. Derived: a small part of `plans.DROP_AFTER_S`."""


class Announced:
    """`on_change` is called when plans were added, changed or dropped."""

    def __init__(
        self, plans: Plans, plan_store: PlanStore | None, clock: Callable[[], float] = time.time
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._plans = plans
        self._plan_store = plan_store
        self._clock = clock
        self._files: dict[str, Files] = {}
        self._orders: dict[str, Order] = {}
        self._unfinished: dict[str, float] = {}  # plan → time of the last part of an incomplete list or order
        self._writing = trio.Lock()
        self._swept_at = clock()

    async def load(self) -> None:
        """Load the plans of an earlier daemon."""
        if self._plan_store is None:
            return
        async with self._writing:
            plans = await trio.to_thread.run_sync(self._plan_store.load)
        for plan in plans:
            if plan.name not in self._plans.by_name:
                self._plans.put(plan)
        await self.drop_unused()
        self.on_change()

    async def files(self, plan: str, paths: list[str], at: int, total: int) -> int:
        """A part of a plan's list, from its `at`th path on. Returns how many are known. Raises `ConfigError`."""
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
            del self._files[plan]
            known = self._plans.by_name.get(plan)
            if known is not None and known.files.digest == files.digest:
                known.used_at = self._clock()
            else:
                self._orders.pop(plan, None)
                if self._plans.sharing(files) is files:
                    await trio.to_thread.run_sync(files.make_table)
                await self._put(Plan(plan, self._plans.sharing(files), self._clock()))
        return len(files)

    async def order(
        self, plan: str, epoch: int, indices_b64: str, at: int, total: int, files: str = ""
    ) -> int:
        """A part of the order of an epoch, little-endian 32-bit numbers of files, from its `at`th on. Returns how many are
        known. Raises `ConfigError`, also when `files` is not the digest of the plan's list: the numbers would name other
        files."""
        _check_types(plan, epoch=epoch, at=at, total=total)
        known = self._plans.by_name.get(plan)
        if known is None:
            raise ConfigError(f"plan {plan}: its files were not announced")
        if files and files != known.files.digest.hex():
            raise ConfigError(f"plan {plan}: it has another list of files, which another job announced")
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
        if order.complete:
            del self._orders[plan]
            known.put(order)
            known.used_at = self._clock()
            self.on_change()
            await self._save(known)
        return len(order.numbers)

    async def drop(self, plan: str) -> bool:
        """Forget a plan; True if there was one."""
        self._forget_unfinished(plan)
        found = self._plans.drop(plan) is not None
        self.on_change()
        if self._plan_store is not None and found:
            async with self._writing:
                await trio.to_thread.run_sync(self._plan_store.drop, plan)
        return found

    async def drop_unused(self) -> None:
        """Forget plans of jobs that are over, and incomplete ones; save which plans are in use."""
        now = self._clock()
        for name in [name for name, at in self._unfinished.items() if now - at > UNFINISHED_S]:
            self._forget_unfinished(name)
        for name in self._plans.unused(now):
            await self.drop(name)
        if now - self._swept_at > TOUCH_EVERY_S:
            for plan in list(self._plans.by_name.values()):
                if plan.used_at > self._swept_at:
                    await self._save(plan)
            self._swept_at = now

    async def aclose(self) -> None:
        if self._plan_store is not None:
            with trio.CancelScope(shield=True):
                async with self._writing:
                    await trio.to_thread.run_sync(self._plan_store.close)

    def _forget_unfinished(self, plan: str) -> None:
        self._files.pop(plan, None)
        self._orders.pop(plan, None)
        self._unfinished.pop(plan, None)

    async def _put(self, plan: Plan) -> None:
        gone = self._plans.put(plan)
        if gone is not None:
            self._orders.pop(gone.name, None)
        self.on_change()
        if gone is not None and self._plan_store is not None:
            async with self._writing:
                await trio.to_thread.run_sync(self._plan_store.drop, gone.name)

    async def _save(self, plan: Plan) -> None:
        if self._plan_store is None:
            return
        async with self._writing:
            if self._plans.by_name.get(plan.name) is plan:
                await trio.to_thread.run_sync(self._plan_store.save, Snapshot.of(plan))


def _check_types(plan: object, **numbers: object) -> None:
    """The values come as JSON from any client of the control socket."""
    if not isinstance(plan, str) or not 0 < len(plan) <= LONGEST_NAME:
        raise ConfigError(f"the name of a plan has 1 to {LONGEST_NAME} characters")
    for name, number in numbers.items():
        if type(number) is not int:
            raise ConfigError(f"plan {plan}: {name} is a whole number, not {number!r}")
