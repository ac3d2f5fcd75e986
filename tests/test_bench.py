"""The benchmarks at a scale where only counts mean something: each scenario runs, and asks of the store and of the kernel
exactly what the table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bench import __main__ as bench
from bench import disposal, readers, report, training
from bench.harness import SCENARIOS, Result, Series, interleave, show
from bench.harness import run as measure
from bench.mounts import Unavailable
from bench.profiling import Profile
from bench.workspace import TINY, Workspace

COUNTS = {
    "side-by-side": (),
    "cold-seq": ("bytes from the store",),
    "cold-small": ("GETs a file", "bytes from the store"),
    "epoch-cold": ("GETs a file",),
    "epoch-few": ("wasted",),
    "shards-cold": ("bytes from the store",),
    "warm-up": ("bytes from the store",),
    "random-in-large": ("bytes fetched", "blocks fetched"),
    "epoch-hits": (),
    "epoch-turnover": (),
    "epoch-again": (),
    "warm-seq": ("READ messages", "GETs"),
    "warm-small": ("OPENs", "RELEASEs", "other messages"),
    "pass-tier": ("READ messages",),
    "pass-seq": ("READ messages",),
    "pass-random": ("READ messages",),
    "pass-small": ("READ messages",),
    "open-close": (),
    "backend-requests": (),
    "training": (),
    "training-cold": (),
    "save-durable": ("bytes sent", "objects"),
    "save-writeback": ("objects",),
    "save-again": ("GETs", "objects"),
    "save-replace": ("objects", "copies", "bytes sent", "names left", "left at the store"),
    "save-memory": ("resident", "growth"),
    "save-small": ("objects",),
    "create-small": (),
    "ls": ("LIST", "HEAD"),
    "list-again": ("READDIRPLUS",),
    "ten-readers": ("bytes from the store",),
    "overwrite": ("bytes fetched", "old bytes"),
    "restart": ("bytes from the store",),
    "restart-million": ("bytes from the store",),
    "restart-unnoticed": ("reads that failed",),
    "watching": (),
    "outage": ("reads that failed", "anything but EIO", "D state"),
}
"""Scenario → words of those of its figures that are counts."""


@pytest.fixture(scope="module")
def workspace() -> Iterator[Workspace]:
    with Workspace(TINY) as work:
        yield work


@pytest.mark.long
@pytest.mark.mount
@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str, workspace: Workspace) -> None:
    record = measure(name, workspace, rounds=1)
    json.dumps(record)
    if not record["figures"] and os.geteuid():
        pytest.skip(" ".join(record["notes"]))
    assert record["figures"], record["notes"]
    failed = [
        figure
        for figure in record["figures"]
        if not figure["ok"] and any(words in figure["what"] for words in COUNTS[name])
    ]
    assert not failed, show(record)


def test_every_scenario_is_in_the_table() -> None:
    assert set(bench.ORDER) == set(SCENARIOS)
    assert set(COUNTS) <= set(SCENARIOS)


def test_a_training_loop_reads_each_sample_once_an_epoch(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"{number}.jpg").write_bytes(bytes(1000 + number))
    said = training.apart(tmp_path, "--batch", 2, "--workers", 3, "--epochs", 3, "--step-ms", 5)
    epochs = said["epochs"]
    assert [(epoch["samples"], epoch["bytes"]) for epoch in epochs] == [(7, 7 * 1000 + 21)] * 3
    assert all(epoch["seconds"] >= 4 * 0.005 and 0 < epoch["utilisation"] <= 1 for epoch in epochs)


@pytest.mark.root
@pytest.mark.skipif(
    os.geteuid() != 0 or not os.path.exists("/dev/loop-control"), reason="mounts an image, as root"
)
def test_files_are_dropped_while_the_loop_is_watched(tmp_path: Path) -> None:
    found = disposal.measure(tmp_path, 1, 100)
    assert found.keys() == {"unlink s", "punch s"}
    assert all(0 < seconds < 60 for seconds in found.values())
    assert not list((tmp_path / "disk").iterdir()), "the image is unmounted"


def test_orders_are_the_same_for_whoever_knows_the_seed() -> None:
    mine, theirs = training.Shuffled(50, seed=3), training.Shuffled(50, seed=3)
    theirs.set_epoch(1)
    assert list(mine) == list(mine) != list(theirs)
    mine.set_epoch(1)
    assert list(mine) == list(theirs)
    assert sorted(mine) == list(training.Listed(50)) == list(range(50))


def test_a_training_loop_stops_at_its_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    loop = training.Loop(training.SHAPES["resnet50"], workers=2, batch=1, step_s=0.02, limit_s=0.01)
    (epoch,) = loop.epochs([str(tmp_path / "x")] * 1000, 1)
    # What was asked for before the limit is waited for.
    assert 2 * training.AHEAD <= epoch.samples < 1000 and epoch.bytes == epoch.samples


def test_a_training_loop_announces_its_orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cachefs import hints

    paths = []
    for number in range(16):
        paths.append(str(tmp_path / f"{number}"))
        Path(paths[-1]).write_bytes(b"x")
    told: list[tuple[int, list[int]]] = []

    def send(self: hints._Files, epoch: int, order: Sequence[int], *, ahead: bool = False) -> None:
        told.append((epoch, list(order)))

    monkeypatch.setattr(hints._Files, "send", send)
    loop = training.Loop(training.SHAPES["resnet50"], workers=2, batch=2, step_s=0, hints=True)
    epochs = list(loop.epochs(paths, 2))
    assert hints.wait(10)
    assert [epoch.samples for epoch in epochs] == [16, 16]
    orders = training.Shuffled(16), training.Shuffled(16)
    orders[1].set_epoch(1)
    assert told[:2] == [(0, list(orders[0])), (1, list(orders[1]))]


def test_a_training_loop_ends_when_a_sample_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"x")
    loop = training.Loop(training.SHAPES["resnet50"], workers=2, batch=1, step_s=0)
    paths = [str(tmp_path / "there")] * 20 + [str(tmp_path / "gone")]
    with pytest.raises(OSError, match="gone"):
        list(loop.epochs(paths, 1))


def test_processes_that_read_together_are_waited_for(tmp_path: Path) -> None:
    assert readers.together([lambda: time.sleep(0.05)] * 3) >= 0.05
    with pytest.raises(threading.BrokenBarrierError):
        readers.together([lambda: os.stat(tmp_path / "gone")])


def test_contenders_take_turns_and_the_absent_are_named() -> None:
    calls: list[str] = []

    def take(name: str, value: float) -> float:
        calls.append(name)
        return value

    def absent() -> float:
        raise Unavailable("c is not installed")

    result = Result()
    series = interleave(
        2,
        {"a": lambda: take("a", 2.0), "b": lambda: take("b", 4.0), "c": absent},
        result,
        what="rate",
        unit="1/s",
    )
    assert calls == ["a", "b", "b", "a"]
    assert series.ratio("a", "b") == 0.5
    assert result.notes == ["c is not installed"] and "c" not in series.values


def test_ratios_are_of_the_same_round() -> None:
    # The machine was three times as fast in the second round: the ratio does not see it.
    series = Series("rate", "1/s", {"a": [1.0, 3.0, 1.0], "b": [2.0, 6.0, 2.0]})
    assert series.ratio("a", "b") == 0.5


def test_report_shows_what_is_not_met() -> None:
    row = {"what": "rate / ext4", "value": 0.5, "sense": "≥", "target": 0.75, "unit": "", "ok": False}
    text = report.table([{"figures": [row], "command": "scripts/bench warm-seq"}])
    assert "| rate / ext4 | 0.50 | ≥ 0.75 | **not yet** | `scripts/bench warm-seq` |" in text


@pytest.mark.skipif(
    not Path(sys.prefix, "bin", "py-spy").exists(), reason="needs py-spy (scripts/setup bench)"
)
def test_a_profile_names_the_line_that_is_busy() -> None:
    program = "import time\ndef busy():\n    while True:\n        sum(range(1000))\nbusy()\n"
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        profile = Profile()
        profile.watch(child.pid)
        time.sleep(2)
        profile.end(child.pid)
    finally:
        child.kill()
        child.wait()
    head, _, line, *_ = str(profile).splitlines()
    assert head.startswith("main thread: ")
    assert "busy (<string>:4)" in line
