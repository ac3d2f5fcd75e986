"""`scripts/mutate`: which faults it makes, and that each is a program again."""

from __future__ import annotations

import ast

from bench.mutation.__main__ import _harmless, _is_harmless, _named
from bench.mutation.mutants import Mutant, functions_of, mutants_of, within
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
    path = ROOT / "cachefs" / "store" / "pins.py"
    source = path.read_bytes()
    functions = functions_of(source)
    found = mutants_of("pins.py", source)
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
