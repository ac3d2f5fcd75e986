"""Plans come from any client of the control socket, and are kept in a directory that other programs may write. Neither stops
the daemon, and a plan that is never finished takes no memory for long."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.base.errors import ConfigError, NoRoom
from cachefs.prefetch import plans
from cachefs.prefetch.plans import DROP_AFTER_S, MOST_FILES, UNFINISHED_S, Files, Hints, Plans, PlanStore
from tests.prefetch.test_plans import plan_of


def numbers(*indices: int) -> str:
    return base64.b64encode(array("I", indices).tobytes()).decode()


class Told:
    def __init__(self, plan_store: PlanStore | None = None) -> None:
        """Without a plan store, nothing is kept over a restart."""
        self.now = 1000.0
        self.plans = Plans()
        store: Any = plan_store or SimpleNamespace(save=lambda *_: None, drop=lambda *_: None)
        self.hints = Hints(self.plans, store, lambda: None, lambda: self.now)


WRONG: list[Any] = [2.0, "2", None, [2], True, float("nan")]


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["epoch", "at", "total"])
async def test_numbers_are_whole(name: str, wrong: Any) -> None:
    told = Told()
    order: dict[str, Any] = {"epoch": 0, "at": 0, "total": 2}
    if name != "epoch":
        with pytest.raises(ConfigError):
            await told.hints.files(**{"plan": "p", "paths": ["a", "b"], "at": 0, "total": 2, name: wrong})
    await told.hints.files("p", ["a", "b"], 0, 2)
    with pytest.raises(ConfigError):
        await told.hints.order(plan="p", indices_b64=numbers(0, 1), **{**order, name: wrong})
    assert told.plans.take() is None
    await told.hints.order(plan="p", indices_b64=numbers(0, 1), **order)
    assert told.plans.take() is not None and told.plans.opened(b"a", 0.0)


@pytest.mark.parametrize("paths", ["ab", [1], [None], ["a\0b"], ["\ud800"], None])
async def test_paths_are_paths(paths: Any) -> None:
    told = Told()
    with pytest.raises(ConfigError):
        await told.hints.files("p", paths, 0, 1)
    for name in (1, None, ["p"], "", "p" * 1000):
        with pytest.raises(ConfigError):
            await told.hints.files(name, ["a"], 0, 1)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            await told.hints.order(name, 0, "", 0, 0)  # type: ignore[arg-type]
    assert not told.plans.by_name


def test_a_list_takes_memory_as_its_paths_come() -> None:
    files = Files(MOST_FILES)
    files.extend([b"a", b"b"])
    assert sum(map(sys.getsizeof, vars(files).values())) < 4096
    with pytest.raises(ConfigError):
        files.extend([b"a\0b"])


async def test_what_is_not_finished_is_forgotten() -> None:
    told = Told()
    await told.hints.files("p", ["a"], 0, 2)
    told.now += UNFINISHED_S - 1
    await told.hints.drop_unused()
    assert await told.hints.files("p", ["b"], 1, 2) == 2
    await told.hints.order("p", 0, numbers(0), 0, 2)
    await told.hints.files("q", ["a"], 0, 2)
    told.now += UNFINISHED_S - 1
    await told.hints.order("p", 0, "", 1, 2)
    told.now += 2
    await told.hints.drop_unused()
    with pytest.raises(ConfigError):
        await told.hints.files("q", ["b"], 1, 2)
    assert await told.hints.order("p", 0, numbers(1), 1, 2) == 2
    assert list(told.plans.by_name) == ["p"]


async def test_who_has_to_go_leaves_no_part_of_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.prefetch.plans.MOST_PLANS", 2)
    told = Told()
    for name in "pqr":
        told.now += 1
        await told.hints.files(name, ["a", "b"], 0, 2)
        await told.hints.order(name, 0, numbers(0), 0, 2)
    assert list(told.plans.by_name) == ["q", "r"]
    assert list(told.hints._orders) == ["q", "r"]
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    for name in "stu":
        await told.hints.files(name, ["a"], 0, 2)
    assert list(told.hints._files) == ["t", "u"]


@pytest.mark.parametrize("meanwhile", ["another list", "dropped"])
async def test_a_list_that_is_out_of_date_when_its_table_is_made_is_not_taken(
    meanwhile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of a million paths takes a second, in which the job may start again."""
    making, may = trio.Event(), trio.Event()

    async def run_sync(call: Callable[..., Any], *arguments: Any) -> Any:
        if not making.is_set():
            making.set()
            await may.wait()
        return call(*arguments)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    told = Told()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(told.hints.files, "p", ["old"], 0, 1)
        await making.wait()
        if meanwhile == "dropped":
            await told.hints.drop("p")
        else:
            await told.hints.files("p", ["new"], 0, 1)
        may.set()
    assert [plan.files[0] for plan in told.plans.by_name.values()] == [b"new"] * (meanwhile != "dropped")
    assert not told.hints._files


# -- the plan store -----------------------------------------------------------------------------------------


def test_plans_and_the_list_that_they_share_are_read_again_and_dropped(tmp_path: Path) -> None:
    plans = [plan_of(3, [0, 1, 2], [2, 1, 0]), plan_of(3, [1, 0, 2])]
    plan_store = PlanStore(tmp_path / "plans")
    for name, plan in zip("pq", plans, strict=True):
        plan.name, plan.used_at = name, 7.0
        plan_store.save(plan, plan.orders)
    plans[0].orders.pop()
    plan_store.save(plans[0], plans[0].orders)  # fewer orders than before
    plan_store.close()

    plan_store = PlanStore(tmp_path / "plans")
    loaded = {plan.name: plan for plan in plan_store.load()}
    assert [[order.numbers.tolist() for order in loaded[name].orders] for name in "pq"] == [
        [[0, 1, 2]],
        [[1, 0, 2]],
    ]
    assert loaded["p"].files is loaded["q"].files and loaded["p"].used_at == 7.0
    plan_store.drop("p")
    plan_store.drop("never there")
    assert [plan.name for plan in plan_store.load()] == ["q"]
    plan_store.drop("q")
    assert plan_store.load() == [] and plan_store._database().count("lists") == 0
    plan_store.close()


async def test_a_list_that_was_replaced_goes_with_its_last_plan(tmp_path: Path) -> None:
    plan_store = PlanStore(tmp_path / "plans")
    told = Told(plan_store)

    async def put(name: str, *paths: str) -> int:
        await told.hints.files(name, list(paths), 0, len(paths))
        await told.hints.order(name, 0, numbers(0), 0, 1)
        return plan_store._database().count("lists")

    assert [await put("p", "a"), await put("q", "a"), await put("p", "b")] == [1, 1, 2]
    assert [await put("p", "c"), await put("q", "c")] == [2, 1]
    plan_store.close()
    plan_store = PlanStore(tmp_path / "plans")
    assert [plan.files.text for plan in plan_store.load()] == [b"c\0", b"c\0"]
    plan_store.close()


@pytest.mark.parametrize(
    "row", [b"no json", b"{}", b"[]", b"7", b"\xff", b'["p", "00", 1.0, []]', b'["p", 7, 1.0, []]']
)
def test_rubbish_in_the_database_is_a_line_in_the_log(
    tmp_path: Path, row: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    plan_store = PlanStore(tmp_path)
    plan_store._database().write([("plans", b"x" * 16, row)])
    assert plan_store.load() == []
    plan = plan_of(3, [0, 1, 2])
    plan_store.save(plan, plan.orders)
    plan_store.drop(plan.name)
    plan_store.close()
    assert any("cannot be read" in record.message for record in caplog.records)


def test_rubbish_on_a_full_disk_raises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise NoRoom("full")

    plan_store = PlanStore(tmp_path)
    plan_store._database().write([("plans", b"x" * 16, b"no json")])
    with monkeypatch.context() as patch:
        patch.setattr(plan_store._database(), "write", write)
        assert plan_store.load() == []
    assert plan_store.load() == [] and plan_store._database().count("plans") == 0
    plan_store.close()


def test_a_place_that_cannot_be_used_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "plans").write_text("not a directory")
    plan_store = PlanStore(tmp_path / "plans")
    assert plan_store.load() == []
    plan = plan_of(3, [0, 1, 2])
    plan_store.save(plan, plan.orders)
    plan_store.drop("p")
    plan_store.close()
    assert len(caplog.records) == 3
    assert PlanStore(tmp_path / "none").load() == []


async def test_a_plan_that_is_used_longer_than_a_day_is_read_again(tmp_path: Path) -> None:
    told = Told(PlanStore(tmp_path / "plans"))
    await told.hints.files("p", ["a"], 0, 1)
    await told.hints.order("p", 0, numbers(0), 0, 1)
    for _ in range(8):
        told.now += DROP_AFTER_S / 4
        assert told.plans.opened(b"a", told.now)
        await told.hints.drop_unused()
    await told.hints.aclose()

    later = Told(PlanStore(tmp_path / "plans"))
    later.now = told.now
    await later.hints.load()
    assert list(later.plans.by_name) == ["p"]
    await later.hints.aclose()


def test_a_prefetch_that_is_run_again_after_a_failure_keeps_its_plans(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, plan = PlanStore(tmp_path / "plans"), plan_of(2, [0, 1])
    store.save(plan, plan.orders)
    store.close()
    assert [found.name for found in store.load()] == [plan.name]
    store.drop(plan.name)
    store.close()
    assert store.load() == [] and not caplog.records
    store.close()
