"""The servers of the origin's tests, and what holds after each test of the uploads."""

import pytest

from tests.origin.conftest import bare_environment, lab, servers, start

__all__ = ["bare_environment", "closed", "lab", "servers", "start"]


@pytest.fixture(autouse=True)
def closed(descriptors: None) -> None:
    """No file is left open."""
