"""Where tests take the place of worker threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import trio

from cachefs.base import tasks


def replace(monkeypatch: pytest.MonkeyPatch, run_sync: Callable[..., Any]) -> None:
    """`run_sync` runs what would run in a thread: of ours, and of trio's own way."""
    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    monkeypatch.setattr(tasks, "in_worker", run_sync)
