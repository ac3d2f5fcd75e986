"""Coroutine tests run as those of the filesystem do: under trio, with a clock that jumps, transactions in place."""

from __future__ import annotations

from tests.fs.conftest import no_threads, pytest_pyfunc_call

__all__ = ["no_threads", "pytest_pyfunc_call"]
