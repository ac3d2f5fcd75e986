"""`scripts/mutate`: see its head, or `--help`."""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from bench.mutation.mutants import Mutant, functions_of, mutants_of, within
from bench.mutation.running import Cost, Coverage, Session, Verdicts, copy_project, preload

ROOT = Path(__file__).parents[2]
HARMLESS = Path(__file__).with_name("harmless.txt")
NAMED = Path(__file__).with_name("named.txt")
ROOMS = ("store", "upload", "fs")
TESTS = (
    "tests/store",
    "tests/upload",
    "tests/test_database.py",
    "tests/test_behind.py",
    "tests/fetch",
    "tests/fs",
    "tests/peers/test_receiving.py",
)
"""Tests that take seconds: without mounts or servers."""

TICK_S = 0.01
"""Seconds of a clock tick, in which the kernel counts processor time."""


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    trees, place = [], Path(tempfile.mkdtemp(prefix="cachefs-mutation-"))
    try:
        paths, chosen = _mutants(options)
        harmless = _harmless()
        aside = [mutant for mutant in chosen if _is_harmless(mutant, harmless)]
        harmful = [mutant for mutant in chosen if mutant not in aside]
        _say(f"{len(chosen)} mutants of {len(paths)} files, {len(aside)} of them harmless")
        if options.list:
            for mutant in chosen:
                print(mutant)
            return 0
        for number in range(options.jobs):
            trees.append(place / f"tree{number}")
            copy_project(ROOT, trees[-1])
        preload()
        cache = Path(tempfile.gettempdir()) / f"cachefs-coverage-{os.getuid()}"
        coverage = Coverage(ROOT, cache, _mapped(paths), _test_files(options.tests))
        coverage.collect(trees, _say, again=options.again)
        return _report(options, harmful, aside, coverage, trees)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/mutate",
        description="Put small faults into copies of modules, run the tests that cover them, and list what they miss.",
    )
    parser.add_argument("paths", nargs="*", help="files or directories of cachefs/")
    parser.add_argument("--named", action="store_true", help="the faults of bench/mutation/named.txt instead")
    parser.add_argument("--seed", type=int, default=1, help="of the choice (1)")
    parser.add_argument("--sample", type=int, default=60, help="mutants to choose, 0: all (60)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="test files or directories")
    parser.add_argument(
        "--budget", type=float, default=240.0, help="processor seconds of tests for one mutant (240)"
    )
    parser.add_argument("--again", action="store_true", help="find out again which test covers what")
    parser.add_argument("--only", default="", help="mutants whose line in the report matches this expression")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    options = parser.parse_args()
    if not options.paths and not options.named:
        parser.error("a path of cachefs/ is needed, or --named")
    return options


def _say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def _mutants(options: argparse.Namespace) -> tuple[list[str], list[Mutant]]:
    if options.named:
        found = _named()
        paths = sorted({mutant.path for mutant in found})
    else:
        paths = sorted(
            str(file.resolve().relative_to(ROOT))
            for given in options.paths
            for file in ([Path(given)] if Path(given).is_file() else sorted(Path(given).rglob("*.py")))
        )
        found = [mutant for path in paths for mutant in mutants_of(path, (ROOT / path).read_bytes())]
        if options.sample and options.sample < len(found):
            # In random order: if the run is stopped early, the mutants so far are a sample, too.
            found = random.Random(options.seed).sample(found, options.sample)
    return paths, [mutant for mutant in found if re.search(options.only, str(mutant))]


def _named() -> list[Mutant]:
    """Lines `path | function | old text | new text` of faults that survived earlier runs."""
    found = []
    for line in _lines(NAMED):
        parts = [part.strip() for part in line.split(" | ")]
        path, function, old, new = (part.replace("\\n", "\n").replace("\\|", "|") for part in parts)
        source = (ROOT / path).read_bytes()
        node = _function(ast.parse(source), function.split("."))
        starts = [0]
        for text in source.splitlines(keepends=True):
            starts.append(starts[-1] + len(text))
        begin, end = starts[node.lineno - 1], starts[node.end_lineno or node.lineno]
        if source[begin:end].count(old.encode()) != 1:
            raise SystemExit(f"named.txt: {old!r} is not in {path} {function} once: look what became of it")
        start = begin + source[begin:end].index(old.encode())
        number = source[:start].count(b"\n") + 1
        around = functions_of(source)
        lines = frozenset(within(around, line) for line in range(number, number + old.count("\n") + 1))
        found.append(Mutant(path, function, number, start, start + len(old.encode()), old, new, lines))
    return found


def _function(tree: ast.AST, names: list[str]) -> ast.stmt:
    for name in names:
        tree = next(
            node
            for node in getattr(tree, "body", [])
            if isinstance(node, ast.stmt) and getattr(node, "name", "") == name
        )
    assert isinstance(tree, ast.stmt)
    return tree


def _lines(file: Path) -> list[str]:
    text = file.read_text().splitlines() if file.exists() else []
    return [line for line in text if line.strip() and not line.startswith("#")]


def _harmless() -> list[tuple[str, str, str]]:
    """(path, function, change): `*` stands for any text."""
    return [(p.strip(), f.strip(), c.strip()) for p, f, c, _ in (x.split(" | ", 3) for x in _lines(HARMLESS))]


def _is_harmless(mutant: Mutant, known: list[tuple[str, str, str]]) -> bool:
    def fits(pattern: str, text: str) -> bool:
        return pattern == text or re.fullmatch(re.escape(pattern).replace(r"\*", ".*"), text) is not None

    return any(
        fits(path, mutant.path) and fits(function, mutant.function) and fits(change, mutant.change)
        for path, function, change in known
    )


def _mapped(paths: list[str]) -> set[str]:
    """The rooms whose coverage is collected: whole ones, so that further commands can use it."""
    files = {str(f.relative_to(ROOT)) for room in ROOMS for f in (ROOT / "cachefs" / room).rglob("*.py")}
    return files | {"cachefs/base/database.py", "cachefs/base/behind.py", "cachefs/peers/client.py", *paths}


def _test_files(given: list[str]) -> list[str]:
    files = [
        file
        for name in given
        for file in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).glob("test_*.py")))
    ]
    return [str(file.relative_to(ROOT)) for file in files]


def _stages(mutant: Mutant, coverage: Coverage, budget_s: float) -> list[dict[str, Cost]]:
    """The tests of its own module, then of its room, then the others, within the budget; of each the cheapest first, and of
    those that cost the same the ones that run little else, which look at what is changed. The budget counts processor time,
    so that a busy machine runs the same tests as an idle one."""
    path = Path(mutant.path).with_suffix("")
    room, module = path.parts[1], path.stem
    near = (f"tests/{room}/", f"tests/test_{room}.py", f"tests/test_{module}.py")

    def rank(name: str) -> int:
        return 0 if Path(name.split("::")[0]).stem == f"test_{module}" else 1 if name.startswith(near) else 2

    found = coverage.of(mutant, near)
    own: dict[str, Cost] = {}
    others: dict[str, Cost] = {}
    spent = 0.0
    for name in sorted(found, key=lambda name: (rank(name), _dearness(found[name]))):
        spent += found[name].processor_s
        if spent > budget_s and (own or others):
            continue
        (own if rank(name) < 2 else others)[name] = found[name]
    return [own, others]


def _dearness(cost: Cost) -> float:
    """The key by which tests are sorted. A test counts as one clock tick at least; one without a known line may run all of
    them."""
    return max(cost.processor_s, TICK_S) * (cost.functions or 1000)


def _report(
    options: argparse.Namespace,
    harmful: list[Mutant],
    aside: list[Mutant],
    coverage: Coverage,
    trees: list[Path],
) -> int:
    survivors: list[str] = []
    killed = 0

    def done(mutant: Mutant, outcome: str, took_s: float) -> None:
        nonlocal killed
        if outcome.startswith("killed"):
            killed += 1
        else:
            survivors.append(f"{mutant}" + (f"   ({outcome})" if outcome else ""))
        _say(f"{killed + len(survivors)}/{len(harmful)} {mutant}   {outcome or 'SURVIVES'} ({took_s:.0f} s)")

    tests = {mutant: _stages(mutant, coverage, options.budget) for mutant in harmful}
    files = sorted({name.split("::")[0] for stages in tests.values() for stage in stages for name in stage})
    sessions = [Session(tree, files) for tree in trees]
    verdicts = Verdicts(sessions, tests.__getitem__)
    verdicts.of_all(harmful, done)
    for session in sessions:
        session.close()
    broken = {name for name, test in coverage.tests.items() if test["failed"]} | verdicts.broken
    if broken:
        print(f"left out, because they fail without a fault (or skip): {len(broken)}")
    print(
        f"killed {killed} of {len(harmful)} harmful ({killed / max(1, len(harmful)):.3f}); harmless {len(aside)}"
    )
    for line in sorted(survivors):
        print(f"survives: {line}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
