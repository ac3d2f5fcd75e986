"""`scripts/mutate`: which faults it makes, and that each is a program again."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.mutation.__main__ import _harmless, _is_harmless, _named, _stages
from bench.mutation.mutants import Mutant, functions_of, mutants_of, within
from bench.mutation.running import Cost, Coverage
from tests.conftest import ROOT

SOURCE = b'''
"""A text: 1 < 2."""
import logging
log = logging.getLogger(__name__)
SECONDS = 30.0


class Tier:
    limit: int = 5

    def fits(self, need: int, spare: bool = False) -> bool:
        """Whether `need` fits."""
        log.info("%d bytes", need + 1)
        if need <= self.limit and not self.full:
            self.used += need
            self.told()
            return True
        raise ValueError(f"{need + 1} bytes")
'''


def changes() -> set[str]:
    return {f"{mutant.function}: {mutant.change}" for mutant in mutants_of("tier.py", SOURCE)}


def test_the_faults_of_a_function() -> None:
    fits = {change.removeprefix("Tier.fits: ") for change in changes() if change.startswith("Tier.fits")}
    assert fits >= {
        "need <= self.limit -> (need < self.limit)",
        "need <= self.limit -> (need > self.limit)",
        "need <= self.limit and not self.full -> (need <= self.limit or not self.full)",
        "need <= self.limit and not self.full -> (need <= self.limit)",
        "not self.full -> self.full",
        "self.used += need -> pass",
        "self.told() -> pass",
        "return [True] -> False",
    }
    assert any("spare: bool = [False]" in change for change in fits)
    assert 'raise ValueError(f"{need + 1} bytes") -> pass' in fits
    assert not any("log" in change or "need + 1]" in change for change in fits), "not what is said or logged"


def test_texts_and_constants_stay() -> None:
    outside = {change for change in changes() if not change.startswith("Tier.fits")}
    assert outside == {"Tier: limit: int = [5] -> 6", "Tier: limit: int = [5] -> 4"}


def test_each_fault_is_a_program_that_differs_in_one_place() -> None:
    path = ROOT / "cachefs" / "base" / "http1.py"
    source = path.read_bytes()
    functions = functions_of(source)
    found = mutants_of("http1.py", source)
    assert len(found) > 20
    for mutant in found:
        changed = mutant.apply(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), str(mutant)
        assert changed[: mutant.start] == source[: mutant.start]
        assert mutant.function == "(module)" or mutant.line >= 1
        assert all(function in functions for function, _ in mutant.lines)
    assert within(functions, 1) == ("", 0)


def test_named_and_harmless_faults_are_of_the_code_as_it_is() -> None:
    """Each line of `named.txt` has one place where it applies, each of `harmless.txt` a fault that it speaks of."""
    named = _named()  # ends with the line's text where it does not apply
    for mutant in named:
        ast.parse(mutant.apply((ROOT / mutant.path).read_bytes()))
    faults: dict[str, list[Mutant]] = {}
    for known in _harmless():
        path = known[0]
        if path not in faults:
            faults[path] = mutants_of(path, (ROOT / path).read_bytes())
        assert any(_is_harmless(mutant, [known]) for mutant in (*faults[path], *named)), known


class Covered:
    """What `Coverage.of` says: test → (processor seconds, seconds, functions)."""

    def __init__(self, tests: Mapping[str, tuple[Any, ...]]) -> None:
        self.tests = {name: Cost(*cost) for name, cost in tests.items()}

    def of(self, mutant: Mutant, near: tuple[str, ...]) -> dict[str, Cost]:
        assert near == ("tests/store/", "tests/test_store.py", "tests/test_space.py")
        return self.tests


def test_the_tests_of_a_module_come_first_and_waiting_costs_nothing() -> None:
    mutant = Mutant("cachefs/store/space.py", "f", 1, 0, 1, "a", "b", frozenset())
    tests = {
        "tests/fs/test_fast.py::a": (0.1, 0.1),
        "tests/store/test_other.py::dear": (5.0, 5.0),
        "tests/store/test_other.py::waits": (0.2, 900.0),
        "tests/store/test_space.py::b": (3.0, 3.0),
        "tests/store/test_space.py::a": (1.0, 100.0),
    }
    order = [
        "tests/store/test_space.py::a",
        "tests/store/test_space.py::b",
        "tests/store/test_other.py::waits",
        "tests/store/test_other.py::dear",
    ]
    coverage: Any = Covered(tests)
    assert [list(stage) for stage in _stages(mutant, coverage, 9.3)] == [order, ["tests/fs/test_fast.py::a"]]
    assert [list(stage) for stage in _stages(mutant, coverage, 4.3)] == [order[:3], []]
    assert [list(stage) for stage in _stages(mutant, coverage, 0.0)] == [order[:1], []], "one at least"


def test_of_tests_that_cost_the_same_the_one_that_runs_little_else_comes_first() -> None:
    mutant = Mutant("cachefs/store/space.py", "f", 1, 0, 1, "a", "b", frozenset())
    tests = {"all": (0.001, 1, 300), "none seen": (0.001, 1, 0), "much": (0.5, 1, 2), "little": (0.05, 1, 5)}
    coverage: Any = Covered({f"tests/store/test_a.py::{name}": cost for name, cost in tests.items()})
    own, _ = _stages(mutant, coverage, 9.0)
    assert [name.split("::")[1] for name in own] == ["little", "much", "all", "none seen"]


def test_a_test_that_starts_a_process_may_run_any_line_of_its_room(tmp_path: Path) -> None:
    path = "cachefs/store/space.py"
    coverage = Coverage(ROOT, tmp_path, {path}, [])
    inside = next(
        m for m in mutants_of(path, (ROOT / path).read_bytes()) if m.function == "Space.make_own" and m.lines
    )
    [(function, line)] = inside.lines
    digest = functions_of((ROOT / path).read_bytes())[function][2]

    def test(lines: list[int] | None, *, spawned: bool = False, failed: bool = False) -> dict[str, Any]:
        ran = {} if lines is None else {path: {function: [digest, lines]}}
        return {"ran": ran, "spawned": spawned, "failed": failed, "processor_s": 1.0, "seconds": 2.0}

    coverage.tests = {
        "tests/store/test_a.py::runs_it": test([line]),
        "tests/store/test_a.py::runs_another": test([line + 1000]),
        "tests/store/test_a.py::starts_one": test(None, spawned=True),
        "tests/store/test_a.py::fails": test([line], spawned=True, failed=True),
        "tests/fs/test_a.py::runs_it": test([line]),
        "tests/fs/test_a.py::starts_one": test(None, spawned=True),
    }
    found = coverage.of(inside, ("tests/store/",))
    assert set(found) == {
        "tests/store/test_a.py::runs_it",
        "tests/store/test_a.py::starts_one",
        "tests/fs/test_a.py::runs_it",
    }
    assert {cost[:2] for cost in found.values()} == {(1.0, 2.0)}
    assert {cost.functions for cost in found.values()} == {0, 1}
