"""The pages of documentation that are read off the tables: options and metrics. ``scripts/docs`` writes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from cachefs.config import GROUPS, option_name, rows
from cachefs.metrics import SERIES, Metrics

NOTE = "<!-- Written by scripts/docs from the tables in the code: change those. -->"

LAYERS = """\
Each option can be given in four ways; the first of these that has it decides:

1. on the command line: `--cache-size 500G`
2. in `-o`, as in fstab, with dashes or underscores: `-o cache_size=500G`
3. in the environment: `CACHEFS_CACHE_SIZE=500G`
4. in the TOML file that `--config` or `CACHEFS_CONFIG` names: `cache_size = "500G"`

`cachefs mount --print-config …` shows what they add up to, and where each value came from. `--no-SWITCH` turns a
switch off again. Sizes: K, M, G, T and KiB, … are powers of 1024, KB, MB, … of 1000. Times: 500ms, 60s, 5m, 1h, 2d, forever.
No secret is an option: credentials come from where the stores' own tools take them.
"""

METRICS = """\
`cachefs mount --metrics 9400 …` shows these at `http://127.0.0.1:9400/metrics`; `cachefs status --json` has the counters
under the names in the first column without `cachefs_` and `_total`. [grafana.json](grafana.json) is a dashboard of them, and
[operations](operations.md) says what to look at.
"""

IDENTITIES = """\
## What adds up
When nothing is under way, and held by tests:

- `ram_hits + ssd_hits + heap_hits + misses` are the blocks that reads asked of the daemon.
- `misses` is the sum of the six `misses_…`.
- `origin_bytes + peer_bytes_in` is `admitted_bytes + bypassed_bytes + discarded_bytes`, as far as it was not for uploads.
- Each `origin_…` counter of requests or bytes is the sum over all datasets.
- `read_wait_seconds_count` are the reads that could not be answered at once; its sum is that of `waited_seconds` for
  `store`, `peer` and `disk`.
"""


def configuration() -> str:
    """docs/configuration.md"""
    return "\n".join(_configuration())


def _configuration() -> Iterator[str]:
    yield f"# Configuration\n\n{NOTE}\n\n{LAYERS}"
    for group in GROUPS:
        yield f"## {group}\n\n| option | value | default | |\n|---|---|---|---|"
        for item, row in rows():
            if row.group != group:
                continue
            name = option_name(item, row)
            flags = ", ".join(f"`{flag}`" for flag in ("--" + name.replace("_", "-"), *row.flags))
            value = "" if not row.metavar else f"`{row.metavar}`".replace("|", "\\|")
            default = row.default or ("no" if not row.metavar else "")
            where = " (command line only)" if row.flag_only else ""
            yield f"| {flags} | {value} | {_cell(default)} | {_cell(row.help)}{where} |"
        yield ""


def metrics() -> str:
    """docs/metrics.md"""
    lines = [f"# Metrics\n\n{NOTE}\n\n{METRICS}", "## Counters", "", "| counter | unit | |", "|---|---|---|"]
    lines += [
        f"| `cachefs_{name}_total` | {unit} | {_cell(meaning)} |" for name, unit, meaning in Metrics.table()
    ]
    lines += [
        "",
        "## Looked up when asked for",
        "",
        "| metric | kind | unit | labels | |",
        "|---|---|---|---|---|",
    ]
    for row in SERIES:
        name = f"cachefs_{row.name}" + ("_total" if row.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in row.labels)
        lines.append(f"| `{name}` | {row.kind} | {row.unit} | {labels} | {_cell(row.meaning)} |")
    return "\n".join([*lines, "", IDENTITIES])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


PAGES = {"configuration.md": configuration, "metrics.md": metrics}


def main(directory: Path) -> None:
    for name, page in PAGES.items():
        (directory / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
