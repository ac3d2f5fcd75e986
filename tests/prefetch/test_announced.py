"""What is announced comes from anybody who may speak to the daemon, and is kept where anything may be written: neither
stops it, and what is never finished takes no memory for long."""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest

from cachefs.errors import ConfigError
from cachefs.prefetch import announced
from cachefs.prefetch import shelf as on_disk
from cachefs.prefetch.announced import UNFINISHED_S, Announced
from cachefs.prefetch.files import MOST_FILES, Files
from cachefs.prefetch.plans import Plans
from cachefs.prefetch.shelf import Shelf, Snapshot
from tests.prefetch.test_plans import order_of, plan_of


def numbers(*indices: int) -> str:
    return base64.b64encode(array("I", indices).tobytes()).decode()


class Told:
    def __init__(self, shelf: Shelf | None = None) -> None:
        self.now = 1000.0
        self.plans = Plans()
        self.announced = Announced(self.plans, shelf, lambda: self.now)


WRONG: list[Any] = [2.0, "2", None, [2], True, float("nan")]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["epoch", "at", "total"])
async def test_numbers_are_whole(name: str, wrong: Any) -> None:
    told = Told()
    order: dict[str, Any] = {"epoch": 0, "at": 0, "total": 2}
    if name != "epoch":
        with pytest.raises(ConfigError):
            await told.announced.files(**{"plan": "p", "paths": ["a", "b"], "at": 0, "total": 2, name: wrong})
    await told.announced.files("p", ["a", "b"], 0, 2)
    with pytest.raises(ConfigError):
        await told.announced.order(plan="p", indices_b64=numbers(0, 1), **{**order, name: wrong})
    assert told.plans.take() is None
    await told.announced.order(plan="p", indices_b64=numbers(0, 1), **order)
    assert told.plans.take() is not None and told.plans.opened(b"a", 0.0)


@pytest.mark.parametrize("paths", ["ab", [1], [None], ["a\0b"], ["\ud800"], None])
async def test_paths_are_paths(paths: Any) -> None:
    told = Told()
    with pytest.raises(ConfigError):
        await told.announced.files("p", paths, 0, 1)
    for name in (1, None, ["p"], "", "p" * 1000):
        with pytest.raises(ConfigError):
            await told.announced.files(name, ["a"], 0, 1)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            await told.announced.order(name, 0, "", 0, 0)  # type: ignore[arg-type]
    assert not told.plans.by_name


def test_a_list_takes_memory_as_its_paths_come() -> None:
    files = Files(MOST_FILES)
    files.extend([b"a", b"b"])
    assert sum(map(sys.getsizeof, vars(files).values())) < 4096
    with pytest.raises(ConfigError):
        files.extend([b"a\0b"])


async def test_what_is_not_finished_is_forgotten() -> None:
    told = Told()
    await told.announced.files("p", ["a"], 0, 2)
    told.now += UNFINISHED_S - 1
    await told.announced.drop_unused()
    assert await told.announced.files("p", ["b"], 1, 2) == 2
    await told.announced.order("p", 0, numbers(0), 0, 2)
    await told.announced.files("q", ["a"], 0, 2)
    told.now += UNFINISHED_S - 1
    await told.announced.order("p", 0, "", 1, 2)
    told.now += 2
    await told.announced.drop_unused()
    with pytest.raises(ConfigError):
        await told.announced.files("q", ["b"], 1, 2)
    assert await told.announced.order("p", 0, numbers(1), 1, 2) == 2
    assert list(told.plans.by_name) == ["p"]


async def test_who_has_to_go_leaves_no_part_of_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.prefetch.plans.MOST_PLANS", 2)
    told = Told()
    for name in "pqr":
        told.now += 1
        await told.announced.files(name, ["a", "b"], 0, 2)
        await told.announced.order(name, 0, numbers(0), 0, 2)
    assert list(told.plans.by_name) == ["q", "r"]
    assert list(told.announced._orders) == ["q", "r"]
    monkeypatch.setattr(announced, "MOST_PLANS", 2)
    for name in "stu":
        await told.announced.files(name, ["a"], 0, 2)
    assert list(told.announced._files) == ["t", "u"]


# -- the shelf -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body", [b"", b"no json\n", b"{}\n", b"[]\n", b"7\n", b"\xff\xfe\n", b'{"files": []}\n']
)
async def test_rubbish_among_the_plans_stops_nobody(tmp_path: Path, body: bytes) -> None:
    shelf = Shelf(tmp_path)
    shelf.save(Snapshot.of(plan_of(3, [0, 1, 2])))
    (tmp_path / "rubbish.plan").write_bytes(body)
    told = Told(shelf)
    told.plans.put(plan_of(3, [0, 1, 2]))
    assert await told.announced.drop("p")
    assert os.listdir(tmp_path) == ["rubbish.plan"]
    assert shelf.load() == []
    assert os.listdir(tmp_path) == []


def test_a_plan_of_a_later_format_is_dropped_and_one_from_before_formats_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf(tmp_path)
    monkeypatch.setattr(on_disk, "FORMAT", 2)
    shelf.save(Snapshot.of(plan_of(3, [0, 1, 2])))
    monkeypatch.undo()
    assert shelf.load() == [] and os.listdir(tmp_path) == []
    (line,) = caplog.records
    assert "cannot be read, and is dropped: its format is 2, this version reads 1" in line.message
    plan = plan_of(3, [0, 1, 2])
    shelf.save(Snapshot.of(plan))
    (path,) = tmp_path.glob("*.plan")
    body = path.read_bytes()[:-16].replace(b'"format": 1, ', b"")
    path.write_bytes(body + hashlib.blake2b(body, digest_size=16).digest())
    assert [loaded.name for loaded in shelf.load()] == [plan.name]


def test_a_directory_that_is_read_only_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    shelf = Shelf(tmp_path)
    plan = plan_of(3, [0, 1, 2])
    shelf.save(Snapshot.of(plan))
    (tmp_path / "rubbish.plan").write_bytes(b"rubbish")
    (tmp_path / "old.files").write_bytes(b"rubbish")
    monkeypatch.setattr(Path, "unlink", unlink)
    assert [loaded.name for loaded in shelf.load()] == ["p"]
    shelf.drop("p")
    assert len([r for r in caplog.records if "cannot be removed" in r.message]) >= 3
    Shelf(tmp_path / "none").load()


def test_an_order_without_numbers_is_damage(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path)
    plan = plan_of(3)
    plan.orders = [order_of(0.5, [0, 1, 2], 3)]  # type: ignore[arg-type]
    shelf.save(Snapshot.of(plan))
    assert shelf.load() == []
