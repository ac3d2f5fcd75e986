"""`python -m bench NAME [--json] [--rounds N] [--profile]`: measure a scenario, all of them, or report what was measured.

`python -m bench --profile NAME` shows where the daemons of a scenario spend their time; its figures are slower then, and not
kept."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence

from bench import (
    backends,
    beside,
    change,
    cluster,
    cold,
    epochs,
    opens,
    operating,
    passthrough,
    peers,
    prefetching,
    restarting,
    ring,
    soak,
    tree,
    warm,
    writing,
)
from bench.harness import SCENARIOS, keep, run, show
from bench.mounts import Cachefs
from bench.profiling import Profile
from bench.workspace import Workspace

ORDER = (
    "side-by-side",
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
    "create-small",
    "ls",
    "list-again",
    "ten-readers",
    "overwrite",
    "restart",
    "restart-million",
    "restart-unnoticed",
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
"""In the order of the table."""

MODULES = (
    beside,
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
    restarting,
    soak,
)
"""Modules that register their scenarios when they are imported."""


def measure(names: Sequence[str], rounds: int | None, as_json: bool, profiled: bool) -> int:
    """Measure scenarios. Returns 0 if all figures are met."""
    records = []
    with Workspace() as work:
        for name in names:
            record = run(name, work, rounds)
            if not profiled:
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
    parser.add_argument("--profile", action="store_true", help="show where the daemons spend their time")
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
    names = ORDER if options.name == "all" else [options.name]
    if not options.profile:
        return measure(names, options.rounds, options.json, profiled=False)
    Cachefs.profile = profile = Profile()
    measure(names, options.rounds, options.json, profiled=True)
    print(profile)
    return 0


if __name__ == "__main__":
    sys.exit(main())
