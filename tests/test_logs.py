"""The log: what is in a line, and how often the same is said."""

from __future__ import annotations

import json
import logging

import pytest

from cachefs.base.errors import OriginFailed, PermissionDenied
from cachefs.base.logs import JsonFormatter, Repeats, TextFormatter, entry_of
from cachefs.base.metrics import Metrics
from cachefs.base.units import printable
from cachefs.fuse.errno_table import report_failure

EVIL = "a\x1b]0;owned\x07\x1b[2J\r\nb\x9b31m\udcff"


def record(message: str, exc: Exception | None = None) -> logging.LogRecord:
    info = None if exc is None else (type(exc), exc, None)
    return logging.LogRecord("cachefs.fs", logging.WARNING, "", 0, "%s: failed", (message,), info)


def test_a_terminal_obeys_nothing_of_a_log() -> None:
    line = TextFormatter().format(record(EVIL))
    assert line.isprintable() and r"a\x1b]0;owned\x07\x1b[2J\r\nb\x9b31m\udcff: failed" in line
    lines = TextFormatter().format(record("key", ValueError(EVIL))).split("\n")
    assert len(lines) > 1 and all(line.isprintable() for line in lines)
    assert json.loads(JsonFormatter().format(record(EVIL)))["message"] == f"{EVIL}: failed"


def test_a_line_is_read_as_it_was_formatted() -> None:
    one, same = record("key"), record("key")
    same.created, same.msecs = one.created, one.msecs
    text, machine = TextFormatter().format(one), JsonFormatter().format(same)
    assert entry_of(machine) == json.loads(machine)
    assert entry_of(text) == json.loads(machine) | {"logger": "fs"}


def test_printable_text_is_left_as_it_is() -> None:
    assert printable("Ünï/cødé 文") == "Ünï/cødé 文"
    assert printable(printable(EVIL)) == printable(EVIL)


def test_the_same_is_said_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cachefs.base.logs.REPEATS_REMEMBERED", 2)
    now = 0.0
    repeats = Repeats(clock=lambda: now)
    assert repeats.admit("a") == 0
    assert [repeats.admit("a") for _ in range(5)] == [None] * 5
    assert repeats.admit("b") == 0
    now = 59.0
    assert repeats.admit("a") is None
    now = 60.0
    assert repeats.admit("a") == 6
    assert repeats.admit("a") is None
    assert repeats.admit("c") == 0  # there is room for two: "a" is forgotten
    assert repeats.admit("a") == 0


def test_failing_requests_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    repeats, metrics = Repeats(clock=lambda: now), Metrics()
    caplog.set_level(logging.INFO, "cachefs")
    for _ in range(1000):
        report_failure("read", OriginFailed("s3://b/k: gave up"), metrics, 1.0, repeats)
        report_failure("open", OriginFailed("s3://b/k: gave up"), metrics, 1.0, repeats)
        report_failure("read", PermissionDenied("s3://b/k: 403"), metrics, 1.0, repeats)
    assert len(caplog.records) == 3 and metrics.fuse_errors == 3000
    now = 61.0
    report_failure("read", OriginFailed("s3://b/k: gave up"), metrics, 1.0, repeats)
    assert "999 more" in caplog.records[-1].getMessage()
    caplog.set_level(logging.DEBUG, "cachefs")  # then each is wanted
    report_failure("read", OriginFailed("s3://b/k: gave up"), metrics, 1.0, repeats)
    assert len(caplog.records) == 5
