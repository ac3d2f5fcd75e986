"""Several processes change the same names of a mount (`scripts/races` does it for longer, and everywhere)."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from tests.conftest import LEVEL
from tests.mount.conftest import ONE_BACKEND, why_no_native_backend
from tests.mount.racing import series

pytestmark = ONE_BACKEND


@pytest.mark.parametrize(
    ("source", "mode", "fuse", "kills"),
    [
        pytest.param("file", "writeback", "native", 0, marks=pytest.mark.long),
        ("s3", "durable", "native", 0),
        ("file", "writeback", "native", 1),
    ],
)
def test_the_names_stay_right(tmp_path: Path, source: str, mode: str, fuse: str, kills: int) -> None:
    if fuse == "native" and (reason := why_no_native_backend()):
        pytest.skip(reason)
    chosen = argparse.Namespace(
        seconds=2 if LEVEL == "short" else 3,
        processes=4,
        names=6,
        seed=1,
        directories=True,
        harsh=True,
        kills=kills,
        log=None,
    )
    result, wrong = series(chosen, source, mode, fuse, tmp_path / "race")
    assert wrong == []
    assert sum(counts.get("ok", 0) for counts in result.values()) > 20
