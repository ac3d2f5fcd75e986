"""The servers of the origin's tests."""

from tests.origin.conftest import bare_environment, lab, servers, start

__all__ = ["bare_environment", "lab", "servers", "start"]
