from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.behind import WriteBehind
from tests import threads


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run coroutine tests under trio with a clock that jumps to the next thing to happen."""
    function: Callable[..., Any] = pyfuncitem.obj
    if not inspect.iscoroutinefunction(function):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}

    async def main() -> None:
        await function(**arguments)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return True


async def commit_inline(names: WriteBehind, within_s: float = 0.0) -> None:
    await trio.lowlevel.checkpoint()
    names.flush()


async def run_inline(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    await trio.lowlevel.checkpoint()
    result = function(*arguments)
    await trio.lowlevel.checkpoint()
    return result


@pytest.fixture(autouse=True)
def no_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transactions run in place: a jumping clock does not wait for threads, and order becomes the same every time."""
    if "threads" not in request.keywords:
        threads.replace(monkeypatch, run_inline)
        monkeypatch.setattr(WriteBehind, "written", commit_inline)
