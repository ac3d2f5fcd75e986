"""Coroutine tests run as those of the filesystem do: under trio, with a clock that jumps, transactions in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cachefs.fuse import signals
from tests.fs.conftest import no_threads, pytest_pyfunc_call

__all__ = ["no_threads", "pytest_pyfunc_call"]


@pytest.fixture(autouse=True)
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether signals end who waits; they do, unless a test says otherwise. No kernel's threads are here to be looked at."""

    def say(answer: bool) -> None:
        monkeypatch.setattr(signals, "ends", lambda thread: answer)

    say(True)
    return say
