"""Coroutine tests run as those of the filesystem do: under trio, with a clock that jumps, transactions in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachefs.fuse import callers
from tests.fs.conftest import no_threads, pytest_pyfunc_call

__all__ = ["no_threads", "pytest_pyfunc_call"]


@pytest.fixture(autouse=True)
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Set whether signals end the calling processes; they do by default. There are no real processes to examine."""

    def say(answer: bool) -> None:
        monkeypatch.setattr(callers, "is_ending", lambda thread: answer)

    say(True)
    return say
