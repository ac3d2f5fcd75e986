"""The verb that plays eviction over a trace: how much cache is enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cachefs.base.errors import ConfigError
from cachefs.base.units import about_bytes, format_bytes, parse_capacity
from cachefs.cli import show
from cachefs.cli.show import as_json, say
from cachefs.config.config import Eviction

POLICIES: tuple[Eviction, ...] = ("lru", "epoch", "auto")
SHAPES = (
    "shuffled-files",
    "shuffled-shards",
    "scan",
    "zipf",
    "uniform",
    "opened-twice",
    "validated",
    "takeover",
    "turns",
    "two-jobs",
)
SHOWN = 8
"""Epochs that fit a line; of more, the last."""


@click.command(short_help="How much cache is enough: eviction played over a trace.")
@click.option(
    "--trace", metavar="FILE", type=click.Path(path_type=Path), help="What cachefs record has written."
)
@click.option("--shape", type=click.Choice(SHAPES), help="A made-up order of reading instead.")
@click.option("--cache-size", required=True, metavar="SIZE,…", help="One size or several: 100G,200G.")
@click.option("--policy", type=click.Choice([*POLICIES, "all"]), default="all", help="As --eviction.  [all]")
@click.option("--block-size", metavar="SIZE", default="1M", help="As of the mount.  [1M]")
@click.option("--dataset-size", metavar="SIZE", default="10G", help="Of a shape.  [10G]")
@click.option("--file-size", metavar="SIZE", help="Of a shape.  [64M for shards, else 1M]")
@click.option("--epochs", type=click.IntRange(1, 1000), default=5, help="Of a shape.  [5]")
@click.option("--seed", type=int, default=0, help="Of a shape.  [0]")
@as_json()
def simulate(
    trace: Path | None,
    shape: str | None,
    cache_size: str,
    policy: str,
    block_size: str,
    dataset_size: str,
    file_size: str | None,
    epochs: int,
    seed: int,
    as_json: bool,
) -> None:
    """Say for each size of cache how much would be read from it, epoch by epoch, and how much from the store.

    \b
    cachefs record /mnt/data -o trace.jsonl --for 2h
    cachefs simulate --trace trace.jsonl --cache-size 500G,1T,2T
    cachefs simulate --shape shuffled-files --dataset-size 1T --cache-size 500G

    Nothing is mounted and nothing fetched. RAM and SSD count together; what is fetched ahead is not simulated.
    """
    from cachefs.observe import simulate as simulation

    if (trace is None) == (shape is None):
        raise ConfigError("give it either --trace FILE or --shape NAME")
    sizes = [_bytes(text, "cache-size") for text in cache_size.split(",")]
    blocks = _bytes(block_size, "block-size")
    if blocks < 4096:
        raise ConfigError(f"--block-size {block_size!r} is smaller than 4K")
    if trace is not None:
        played = simulation.load(trace)
    else:
        assert shape is not None
        each = _bytes(file_size or format_bytes(simulation.FILE_BYTES.get(shape, 1 << 20)), "file-size")
        whole = _bytes(dataset_size, "dataset-size")
        if whole // each > simulation.MOST_FILES:
            raise ConfigError(
                f"a shape of more than {simulation.MOST_FILES:,} files: give it a larger --file-size"
            )
        played = simulation.shape(shape, whole, each, epochs, seed)
    policies = POLICIES if policy == "all" else [p for p in POLICIES if p == policy]
    results = [simulation.simulate(played, size, p, blocks) for size in sizes for p in policies]
    if as_json:
        show.data([result.as_dict() for result in results])
    else:
        say("\n".join(_table(results)))


def _bytes(text: str, option: str) -> int:
    try:
        count = parse_capacity(text)
    except ValueError as exc:
        raise ConfigError(f"--{option} {text!r} is {exc}") from None
    if not count:
        raise ConfigError(f"--{option} {text!r} is nothing")
    return count


def _table(results: list[Any]) -> list[str]:
    epochs = sorted(results[0].asked)
    shown = epochs if len(epochs) <= SHOWN else [*epochs[: SHOWN - 1], epochs[-1]]
    rows = []
    for result in results:
        ratios = [f"{100 * result.ratio(epoch):.1f} %" for epoch in shown]
        rows.append(
            [about_bytes(result.cache_bytes), result.policy, *ratios, about_bytes(result.store_bytes)]
        )
    return show.table(
        ["#cache", "#policy", *(f"#epoch {epoch}" for epoch in shown), "#from the origin"], rows
    )
