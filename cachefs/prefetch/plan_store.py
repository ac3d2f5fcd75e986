"""Plans on disk, in a database of their own, so that a restarted daemon continues where the job is.

Three tables: `lists` has a list of paths under the digest of the list, once for all plans that share it; `plans` has each
plan's name, digest and time of last use; `orders` has its orders. Nothing here is worth an fsync: a lost plan costs its
prefetch.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from pathlib import Path
from typing import NamedTuple

from cachefs.base.database import Database
from cachefs.base.errors import CachefsError
from cachefs.prefetch.files import Files
from cachefs.prefetch.plans import Order, Plan

log = logging.getLogger(__name__)

FORMAT = "plans-1"
TABLES = ("lists", "plans", "orders")


class Snapshot(NamedTuple):
    """A plan to be written: taken on the trio thread, written in a worker thread. The list of files never changes."""

    name: str
    files: Files
    used_at: float
    orders: list[tuple[int, bytes]]
    """(epoch, numbers)."""

    @classmethod
    def of(cls, plan: Plan) -> Snapshot:
        orders = [(order.epoch, order.numbers.tobytes()) for order in plan.orders]
        return cls(plan.name, plan.files, plan.used_at, orders)


class PlanStore:
    """All methods block, and one runs at a time. None raises for a database that cannot be used: that is a line in the
    log."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened: Database | None = None

    def save(self, plan: Snapshot) -> None:
        key, digest = _key(plan.name), plan.files.digest
        head = [plan.name, digest.hex(), plan.used_at, [epoch for epoch, _ in plan.orders]]
        try:
            database = self._database()
            puts = [("orders", key + bytes([place]), row) for place, (_, row) in enumerate(plan.orders)]
            puts.append(("plans", key, json.dumps(head).encode()))
            if database.get("lists", digest) is None:
                puts.append(("lists", digest, plan.files.text))
            database.write(puts, [("orders", key, key + b"\xff")])
        except CachefsError as exc:
            log.warning("plan %s is not kept over a restart: %s", plan.name, exc)

    def drop(self, name: str) -> None:
        """Forget a plan, and its list of files if no other plan has it."""
        key = _key(name)
        try:
            heads = dict(self._database().scan("plans"))
            digest = json.loads(heads.pop(key, b"[0, null]"))[1]
            unused = digest is not None and all(json.loads(head)[1] != digest for head in heads.values())
            lists = [("lists", bytes.fromhex(digest), None)] if unused else []
            self._database().write([("plans", key, None), *lists], [("orders", key, key + b"\xff")])
        except CachefsError as exc:
            log.warning("plan %s may come back with a restart: %s", name, exc)

    def load(self) -> list[Plan]:
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
            database.write([], [(table, b"", b"\xff" * 18) for table in TABLES])
            plans.clear()
        return plans

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def _database(self) -> Database:
        if self._opened is None:
            self._opened = Database(self._directory, TABLES, version=FORMAT, fsync=False)
        return self._opened


def _key(name: str) -> bytes:
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).digest()
