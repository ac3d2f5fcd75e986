"""Plans on disk, so that a daemon that starts again goes on where the opens say the job is.

Two kinds of files: a list of paths under the digest of the list, written once for all plans that share it, and for each plan
its name, its list's digest and its orders. Each is written aside and renamed, and carries a checksum; what is damaged
is dropped with one line. Nothing here is worth an fsync: a plan that is lost costs its prefetch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from array import array
from pathlib import Path
from typing import NamedTuple

from cachefs import ownership
from cachefs.errors import ConfigError
from cachefs.prefetch.files import Files
from cachefs.prefetch.plans import Order, Plan

log = logging.getLogger(__name__)

FORMAT = 1
"""Of a plan's file, in its head. A file without one is of the first."""

_SUM = 16


class Snapshot(NamedTuple):
    """A plan as it is written: taken in the trio thread, written in a worker. The list of files never changes."""

    name: str
    files: Files
    orders: list[tuple[int, bytes]]  # epoch, numbers

    @classmethod
    def of(cls, plan: Plan) -> Snapshot:
        return cls(plan.name, plan.files, [(order.epoch, order.numbers.tobytes()) for order in plan.orders])


class Shelf:
    """All methods block, and none raises for what the directory holds or cannot do: an error is one line in the log."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, plan: Snapshot) -> None:
        digest = plan.files.digest.hex()
        head = {
            "format": FORMAT,
            "plan": plan.name,
            "files": digest,
            "orders": [[e, len(n) // 4] for e, n in plan.orders],
        }
        body = json.dumps(head).encode() + b"\n" + b"".join(numbers for _, numbers in plan.orders)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            paths = self._directory / f"{digest}.files"
            if not paths.exists():
                self._write(paths, plan.files.text)
            self._write(self._of(plan.name), body)
        except OSError as exc:
            log.warning("plan %s is not kept over a restart: %s", plan.name, exc)

    def drop(self, name: str) -> None:
        self._remove(self._of(name))
        self._sweep()

    def load(self) -> list[Plan]:
        """What was saved, each used last when its file was written."""
        lists: dict[str, Files] = {}
        plans = []
        for path in sorted(self._directory.glob("*.plan")):
            try:
                plans.append(self._read(path, lists))
            except (OSError, ValueError, KeyError, TypeError, OverflowError, ConfigError) as exc:
                log.warning("plan %s cannot be read, and is dropped: %s", path.name, exc)
                self._remove(path)
        self._sweep()
        return plans

    def _of(self, name: str) -> Path:
        named = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return self._directory / f"{named}.plan"

    def _write(self, path: Path, body: bytes) -> None:
        aside = path.with_suffix(".new")
        with open(aside, "wb", opener=ownership.open_file) as file:
            file.write(body)
            file.write(hashlib.blake2b(body, digest_size=_SUM).digest())
        aside.rename(path)

    def _body(self, path: Path) -> bytes:
        data = path.read_bytes()
        body, checksum = data[:-_SUM], data[-_SUM:]
        if hashlib.blake2b(body, digest_size=_SUM).digest() != checksum:
            raise ValueError("its checksum does not match")
        return body

    def _read(self, path: Path, lists: dict[str, Files]) -> Plan:
        line, _, numbers = self._body(path).partition(b"\n")
        head = json.loads(line)
        digest = head["files"]
        if head.get("format", 1) != FORMAT:
            raise ValueError(f"its format is {head['format']}, this version reads {FORMAT}")
        if digest not in lists:
            lists[digest] = Files.from_text(self._body(self._directory / f"{digest}.files"))
        plan = Plan(head["plan"], lists[digest], os.stat(path).st_mtime)
        for epoch, count in head["orders"]:
            if type(epoch) is not int or type(count) is not int:
                raise ValueError("an order without numbers")
            order = Order(epoch, count, len(plan.files))
            order.extend(array("I", numbers[: 4 * count]))
            numbers = numbers[4 * count :]
            plan.put(order)
        return plan

    def _sweep(self) -> None:
        """Remove lists that no plan has any more."""
        wanted = set()
        for path in self._directory.glob("*.plan"):
            try:
                with path.open("rb") as file:
                    wanted.add(json.loads(file.readline())["files"])
            except (OSError, ValueError, KeyError, TypeError):
                continue  # damaged: the next start drops it
        for path in self._directory.glob("*.files"):
            if path.stem not in wanted:
                self._remove(path)

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s cannot be removed: %s", path, exc)
