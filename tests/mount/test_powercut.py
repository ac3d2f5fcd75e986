"""A mount comes up after a power cut, and what was acknowledged is there. `scripts/powercut` makes many more cuts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mount.conftest import ONE_BACKEND
from tests.mount.power_cuts import MODES, one_life, system_command

pytestmark = [ONE_BACKEND, pytest.mark.root]


@pytest.mark.skipif(system_command("mkfs.ext4") is None, reason="apt-get install e2fsprogs")
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "writeback" else pytest.mark.long) for mode in MODES]
)
def test_what_was_acknowledged_survives_a_cut(tmp_path: Path, mode: str) -> None:
    """After the first operation, in the middle, and a moment after a clean stop."""
    results = one_life(tmp_path / "life", "ext4", mode, "ci", during=2, afterwards=(0.0,), most=30)
    assert len(results) == 3
    assert not [(when, wrong) for when, wrong in results if wrong]
