"""Where tests take the place of worker threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import outcome
import pytest
import trio

from cachefs.base import tasks
from cachefs.store import tier


def replace(monkeypatch: pytest.MonkeyPatch, run_sync: Callable[..., Any]) -> None:
    """`run_sync` runs what would run in a thread: of ours, of a tier's disk, and of trio's own way."""

    def start(call: Callable[[], Any], end: Callable[[outcome.Outcome[Any]], object]) -> None:
        async def run() -> None:
            end(await outcome.acapture(run_sync, call))

        trio.lowlevel.spawn_system_task(run)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    monkeypatch.setattr(tasks, "in_worker", run_sync)
    monkeypatch.setattr(tier, "start_in_thread", start)


def none_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container at its limit of processes."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", fails)
    monkeypatch.setattr(trio._threads, "start_thread_soon", fails)


def first_fails(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The next thread cannot be started, those after it can. Returns a list that has an entry once one was refused."""
    begin, refused = trio.lowlevel.start_thread_soon, list[bool]()

    def start(*arguments: Any) -> None:
        if refused:
            return begin(*arguments)
        refused.append(True)
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(trio.lowlevel, "start_thread_soon", start)
    return refused
