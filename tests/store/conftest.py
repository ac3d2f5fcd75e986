"""What holds after each test of the cache."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def closed(descriptors: None) -> None:
    """No file is left open."""
