"""What the policy is worth: hit ratios of whole runs, and traces as people record them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cachefs.base.errors import ConfigError
from cachefs.cli import cache as command
from cachefs.cli.main import cli
from cachefs.cli.places import parts_in_recording
from cachefs.daemon import asking
from cachefs.observe.simulate import SHAPES, Result, load, shape, simulate

KIB, MIB = 1 << 10, 1 << 20
UNITS = {"files": (2000, 100 * KIB), "shards": (125, 64 * MIB)}


def run(name: str, policy: str, of: str = "files", share: float = 0.5, epochs: int = 6) -> Result:
    count, size = UNITS[of]
    trace = shape(name, count * size, size, epochs, seed=1)
    return simulate(trace, int(count * size * share), policy)  # type: ignore[arg-type]


def later(result: Result, first: int = 3, last: int = 99) -> list[float]:
    return [result.ratio(epoch) for epoch in sorted(result.asked) if first <= epoch <= last]


@pytest.mark.parametrize("of", UNITS)
@pytest.mark.parametrize("name, recency", [("shuffled-files", 0.2), ("scan", 0.0)])
def test_half_a_dataset_cached_is_half_the_hits(name: str, recency: float, of: str) -> None:
    assert min(later(run(name, "auto", of))) >= 0.48
    assert min(later(run(name, "epoch", of))) >= 0.48
    assert max(later(run(name, "lru", of))) <= recency


@pytest.mark.parametrize("share", [0.1, 0.25, 0.75, 0.9])
def test_hits_are_the_share_that_is_cached(share: float) -> None:
    assert min(later(run("shuffled-files", "auto", share=share))) >= share - 0.03


@pytest.mark.parametrize("of", UNITS)
def test_another_dataset_takes_over(of: str) -> None:
    result = run("takeover", "auto", of, epochs=4)
    assert min(later(result, 3, 4)) >= 0.48
    assert min(later(result, 6)) >= 0.48, "its second epoch is as good as can be"


@pytest.mark.parametrize(
    "name",
    ["zipf", *(pytest.param(name, marks=pytest.mark.long) for name in ("uniform", "two-jobs")), "turns"],
)
def test_what_has_no_epochs_is_left_to_recency(name: str) -> None:
    for auto, lru in zip(later(run(name, "auto"), 1), later(run(name, "lru"), 1), strict=True):
        assert auto >= lru - 0.02


def test_each_opened_twice_and_validation_between() -> None:
    assert min(later(run("opened-twice", "auto"))) >= 0.74, "the second open of each always hits"
    assert min(later(run("validated", "auto"))) >= 0.48 / 1.05 - 0.05


def test_every_shape_can_be_played_under_every_policy() -> None:
    for name in SHAPES:
        trace = shape(name, 40 * MIB, MIB, 2, 1)
        for policy in ("lru", "epoch", "auto"):
            result = simulate(trace, 10 * MIB, policy)  # type: ignore[arg-type]
            asked = sum(result.asked.values())
            assert asked == sum(trace.lengths)
            assert result.store_bytes == asked - sum(result.hit.values())


def test_a_cache_as_large_as_the_dataset_asks_for_each_byte_once() -> None:
    for policy in ("lru", "epoch", "auto"):
        assert run("shuffled-files", policy, share=1.0).store_bytes == 2000 * 100 * KIB


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_recorded_trace_finds_its_epochs_by_itself(tmp_path: Path) -> None:
    made = shape("shuffled-files", 500 * MIB, MIB, 4, 1)
    rows = [
        {"t": n / 10, "path": f"train/{file}", "size": MIB, "offset": 0, "length": MIB, "pid": 7}
        for n, file in enumerate(made.files)
    ]
    result = simulate(load(lines(tmp_path / "t", *rows)), 250 * MIB, "auto")
    assert sorted(result.asked) == [1, 2, 3, 4]
    assert all(abs(asked - 500 * MIB) <= 70 * MIB for asked in result.asked.values())
    assert min(later(result)) >= 0.46


def test_ranges_of_large_files_are_blocks(tmp_path: Path) -> None:
    big = {"path": "a/big", "size": 100 * MIB}
    rows = [
        {**big, "offset": 5 * MIB + 7, "length": 10},
        {**big, "offset": 5 * MIB, "length": MIB},
        {**big, "offset": 15 * MIB + 5, "length": 2 * MIB},
        {"path": "small", "size": 3 * MIB + 1, "offset": 0, "length": 1},
        {"path": "empty", "size": 0},
    ]
    result = simulate(load(lines(tmp_path / "t", *rows, "")), 1 << 40, "auto")
    assert result.store_bytes == MIB + 3 * MIB + 3 * MIB + 1
    assert (result.asked, result.hit) == ({1: 3 * MIB + 11}, {1: MIB})


@pytest.mark.parametrize(
    "row, why",
    [
        ("rubbish", "not JSON"),
        ('["a"]', "list indices"),
        ({"size": 1}, "no path"),
        ({"path": "a"}, "no size"),
        ({"path": 5, "size": 1}, "its path is not text"),
        ('{"path": "a\\ud800", "size": 1}', "surrogates not allowed"),
        ({"path": "a", "size": -1}, "size, offset and length are bytes"),
        ({"path": "a", "size": True}, "size, offset and length are bytes"),
        ({"path": "a", "size": 1, "format": 2}, "its format is 2, this version reads 1"),
        ({"path": "a", "size": 10, "offset": 5, "length": 6}, "beyond the size"),
        ({"path": "a", "size": 10, "offset": -5, "length": 6}, "size, offset and length are bytes"),
        ('{"path": "a", "size": 10, "offset": 1e400, "length": 1}', "size, offset and length are bytes"),
    ],
)
def test_a_bad_line_is_refused_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: object, why: str
) -> None:
    """By who simulates it, and by who fetches what it names."""
    path = lines(tmp_path / "t", {"path": "a", "size": 1}, row)
    with pytest.raises(ConfigError, match=f"line 2 is no line of a trace: .*{why}"):
        load(path)
    monkeypatch.setattr(asking, "mount_of", lambda base: (base, ""))
    with pytest.raises(ConfigError, match=f"line 2: not a line of cachefs record .*{why}"):
        parts_in_recording(str(path), tmp_path)


def test_no_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        load(lines(tmp_path / "t"))
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "none")


# -- the verb --------------------------------------------------------------------------------------


def verb(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["simulate", *arguments])
    return result.exit_code, result.output


def test_the_verb_shows_a_row_for_each_size_and_policy() -> None:
    code, shown = verb(
        "--shape", "scan", "--dataset-size", "1G", "--cache-size", "256M,512M", "--epochs", "3"
    )
    assert code == 0
    head, *rows = shown.splitlines()
    assert head.split() == [
        "cache",
        "policy",
        "epoch",
        "1",
        "epoch",
        "2",
        "epoch",
        "3",
        "from",
        "the",
        "origin",
    ]
    assert [row.split()[2] for row in rows] == ["lru", "epoch", "auto"] * 2
    assert rows[-1].split()[5:9:2] == ["49.0", "49.9"]


def test_the_verb_reads_a_trace_and_writes_json(tmp_path: Path) -> None:
    path = lines(tmp_path / "t", *({"path": f"d/{i % 9}", "size": 10} for i in range(18)))
    code, shown = verb("--trace", str(path), "--cache-size", "1M", "--policy", "auto", "--json")
    assert code == 0
    (result,) = json.loads(shown)
    assert (result["policy"], result["cache_bytes"], result["store_bytes"]) == ("auto", MIB, 90)
    assert result["hit_ratio"] == 0.5


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--cache-size", "1G"], "either --trace FILE or --shape NAME"),
        (["--shape", "scan", "--cache-size", "big"], "--cache-size 'big' is not a number of bytes"),
        (["--shape", "scan", "--cache-size", "0"], "'0' is nothing"),
        (["--shape", "scan", "--cache-size", "500"], "'500' is a number without a unit: write 500G or 500M"),
        (
            ["--shape", "scan", "--cache-size", "1G", "--dataset-size", "10T", "--file-size", "1K"],
            "larger --file-size",
        ),
        (["--shape", "scan", "--cache-size", "1G", "--block-size", "1K"], "smaller than 4K"),
        (["--trace", "/nowhere", "--cache-size", "1G"], "cannot read the trace /nowhere"),
    ],
)
def test_the_verb_refuses_in_one_line(arguments: list[str], why: str) -> None:
    code, shown = verb(*arguments)
    assert code == 2
    assert why in shown and len(shown.splitlines()) == 1


def test_the_verb_knows_the_shapes_there_are() -> None:
    assert set(command.SHAPES) == set(SHAPES)
