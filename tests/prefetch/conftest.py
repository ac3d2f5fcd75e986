from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cachefs.base.behind import WriteBehind
from tests import threads
from tests.fs.conftest import commit_inline, pytest_pyfunc_call, run_inline

__all__ = ["pytest_pyfunc_call"]


async def run_in_place(function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
    return await run_inline(function, *arguments)


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A jumping clock does not wait for threads."""
    threads.replace(monkeypatch, run_in_place)
    monkeypatch.setattr(WriteBehind, "written", commit_inline)
