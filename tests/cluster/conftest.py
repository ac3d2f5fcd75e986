"""Fixtures of the tests over several hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lab.netns import why_not

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    reason = why_not() if ours else ""
    for item in ours:
        item.add_marker(pytest.mark.root)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))
