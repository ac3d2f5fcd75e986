"""`python -m bench NAME [--json] [--rounds N]`: measure a scenario, all of them, or report what was measured."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from bench import (
    backends,
    change,
    cluster,
    cold,
    epochs,
    opens,
    operating,
    passthrough,
    peers,
    prefetching,
    ring,
    soak,
    tree,
    warm,
    writing,
)
from bench.harness import SCENARIOS, keep, run, show
from bench.workspace import Workspace

ORDER = (
    "cold-seq",
    "ttfb",
    "cold-small",
    "epoch-cold",
    "epoch-few",
    "shards-cold",
    "warm-up",
    "random-in-large",
    "epoch-hits",
    "epoch-turnover",
    "epoch-again",
    "warm-seq",
    "ssd-seq",
    "warm-small",
    "pass-tier",
    "pass-seq",
    "pass-random",
    "pass-small",
    "open-close",
    "backend-requests",
    "training",
    "training-cold",
    "save-durable",
    "save-writeback",
    "save-again",
    "save-replace",
    "save-memory",
    "save-small",
    "ls",
    "list-again",
    "ten-readers",
    "overwrite",
    "restart",
    "restart-million",
    "memory-million",
    "ring",
    "peer-wire",
    "peers-read",
    "peers-epoch",
    "peers-checkpoint",
    "peers-killed",
    "peers-training",
    "watching",
    "outage",
    "soak",
)
"""As the table has them."""

MODULES = (
    cold,
    prefetching,
    epochs,
    warm,
    passthrough,
    opens,
    backends,
    writing,
    tree,
    change,
    ring,
    peers,
    cluster,
    operating,
    soak,
)
"""Importing them is what registers the scenarios."""


def measure(names: Sequence[str], rounds: int | None, as_json: bool) -> int:
    """0 when every figure is met."""
    records = []
    with Workspace() as work:
        for name in names:
            record = run(name, work, rounds)
            keep(record)
            records.append(record)
            if not as_json:
                print(show(record), flush=True)
    if as_json:
        print(json.dumps(records if len(records) > 1 else records[0], indent=1, ensure_ascii=False))
    figures = [figure for record in records for figure in record["figures"]]
    met = sum(figure["ok"] for figure in figures)
    if not as_json:
        print(f"{met} of {len(figures)} figures met")
    return 0 if met == len(figures) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Measure cachefs.")
    parser.add_argument("name", choices=[*ORDER, "all", "list", "report"])
    parser.add_argument("--json", action="store_true", help="print the records as JSON")
    parser.add_argument("--rounds", type=int, help="how often each contender takes its turn")
    options = parser.parse_args()
    # So that every `with` is left and nothing stays mounted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.name == "list":
        for name in ORDER:
            print(f"{name:<16} {SCENARIOS[name].about}")
        return 0
    if options.name == "report":
        from bench.report import write

        print(write(ORDER))
        return 0
    return measure(ORDER if options.name == "all" else [options.name], options.rounds, options.json)


if __name__ == "__main__":
    sys.exit(main())
