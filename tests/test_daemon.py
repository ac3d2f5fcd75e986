"""The composition root, without a mount."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock

from cachefs.base.metrics import Metrics
from cachefs.base.tasks import RETRY_S
from cachefs.base.units import Size
from cachefs.config.config import Config, Source
from cachefs.daemon import cachedir
from cachefs.daemon.daemon import retried


def test_housekeeping_that_fails_is_logged_and_run_again_later(caplog: pytest.LogCaptureFixture) -> None:
    began: list[float] = []

    async def work() -> None:
        began.append(trio.current_time())
        if len(began) < 3:
            raise ValueError("a bug")

    trio.run(retried, work, "sweeping", clock=MockClock(autojump_threshold=0))
    assert [moment - began[0] for moment in began] == [0, RETRY_S, 2 * RETRY_S]
    assert caplog.text.count(f"sweeping failed; trying again in {RETRY_S} s") == 2


@pytest.mark.parametrize("fails_for_s, most", [(600.0, 2 * 10 + 1), (1.0, 2)])
def test_a_failure_costs_two_log_entries_a_minute_and_is_over_within_half_a_minute(
    fails_for_s: float, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> float:
        began = trio.current_time()

        async def work() -> None:
            if trio.current_time() - began < fails_for_s:
                raise ValueError("the disk is full")

        await retried(work, "sweeping")
        return trio.current_time() - began

    took_s = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert took_s <= fails_for_s + 30
    assert len(caplog.records) <= most


@pytest.mark.parametrize(
    ("cache_size", "free", "lines"),
    [
        ("80%", 1 << 20, ["no ssd tier: --cache-size 80% is 819 KiB here, less than one block"]),
        ("80%", 2 << 20, []),
        ("1B", 2 << 20, ["no ssd tier: --cache-size 1B is 1 B here, less than one block"]),
        ("0", 2 << 20, []),
    ],
)
def test_a_tier_that_is_left_out_for_its_size_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_size: str, free: int, lines: list[str]
) -> None:
    """A share of a full disk is nothing. A size of 0 is a wish, and no reason for a warning."""
    monkeypatch.setattr(cachedir, "_disk_of", lambda _: (free, free))
    monkeypatch.setattr(cachedir, "open_store", lambda *_, **__: SimpleNamespace(warnings=[]))
    config = Config(
        sources=(Source("", "s3://a"),),
        mountpoint=tmp_path,
        cache_dir=tmp_path / "cache",
        cache_size=Size.parse(cache_size),
        ram=Size(bytes=0),
    )
    assert cachedir.open_cache(config, Metrics()).warnings == lines
