"""A stop that does not come to its end by itself is ended; one that does is left alone."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading

import pytest

from cachefs.base import logs
from cachefs.daemon import stopping
from cachefs.daemon.stopping import EXIT_CODE, STAGE_S, Stopping

SLACK_S = 30.0


class Watched:
    """A stop by a clock of ours. `left` is what it ended with."""

    def __init__(self) -> None:
        self.now = 0.0
        self.signalled = False
        self.left: list[int] = []
        self.stopping = Stopping(lambda: self.now, lambda: self.signalled, self.left.append)

    def after(self, seconds: float) -> list[int]:
        self.now += seconds
        self.stopping.look()
        return self.left


def test_nothing_ends_a_daemon_that_is_not_stopping() -> None:
    assert Watched().after(1e9) == []


def test_each_stage_has_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    watched = Watched()
    for doing, seconds in (("one", 0.0), ("two", 300.0), ("three", 10.0)):
        watched.stopping.stage(doing, seconds)
        assert watched.after(STAGE_S + seconds - 1) == []
    assert watched.after(2) == [EXIT_CODE]
    assert "three took too long" in capsys.readouterr().err


def test_a_signal_that_is_not_taken_is_a_stop() -> None:
    watched = Watched()
    watched.signalled = True
    assert watched.after(1) == []
    assert watched.after(STAGE_S + 1) == [EXIT_CODE]


def test_a_log_that_hangs_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    watched, may, written = Watched(), threading.Event(), threading.Event()

    def say(line: str) -> None:
        may.wait(SLACK_S)
        written.set()

    monkeypatch.setattr(stopping, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(stopping, "_say", say)
    watched.stopping.stage("one")
    assert watched.after(STAGE_S + 1) == [EXIT_CODE] and not written.is_set()
    may.set()


HELD_UP = """
import ctypes, signal
import cachefs.daemon.stopping as stopping
stopping.STAGE_S, stopping.LOOK_EVERY_S = 0.1, 0.05
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
stopping.Stopping().start()
print("ready", flush=True)
while True:
    ctypes.CDLL(None).sleep(60)
"""


def test_the_thread_ends_a_process_whose_loop_is_held_up() -> None:
    """In a call that no signal ends; here signals are blocked instead."""
    with subprocess.Popen(
        [sys.executable, "-c", HELD_UP], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as held:
        try:
            assert held.stdout is not None and held.stdout.readline() == b"ready\n"
            os.kill(held.pid, signal.SIGTERM)
            _, said = held.communicate(timeout=SLACK_S)
        finally:
            if held.poll() is None:
                held.kill()
    assert held.returncode == EXIT_CODE
    assert b"stopped without closing cleanly: answering a signal took too long" in said


TWICE = """
import os, signal, sys
from contextlib import ExitStack
import trio
from cachefs.daemon.stopping import Stopping

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP

def signal_again():
    for number in SIGNALS:
        os.kill(os.getpid(), number)

async def main():
    with trio.open_signal_receiver(*SIGNALS) as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        await anext(signals)
        stopping.stage("saving memory to disk")
        signal_again()
        await trio.sleep(0)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
stopping = Stopping()
with ExitStack() as cleanup:
    cleanup.callback(stopping.done)
    cleanup.callback(print, "closed")
    stopping.start()
    cleanup.callback(signal_again)
    cleanup.callback(stopping.stage, "closing the names database")
    if "stop" in sys.argv:
        trio.run(main)
    else:
        os.kill(os.getpid(), int(sys.argv[1]))
signal_again()
"""


@pytest.mark.parametrize(
    ("when", "code"),
    [
        ("stop", 0),
        (str(signal.SIGTERM.value), 128 + signal.SIGTERM),
        (str(signal.SIGHUP.value), 128 + signal.SIGHUP),
        (str(signal.SIGINT.value), -signal.SIGINT),
    ],
)
def test_all_is_closed_whatever_signals_come(when: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", TWICE, when], capture_output=True, timeout=SLACK_S)
    assert (done.returncode, done.stdout) == (code, b"closed\n"), done.stderr


def test_the_end_waits_for_a_log_that_hangs_until_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    logs.setup("info", "text")
    root, may = logging.getLogger(), threading.Event()
    (handler,) = (h for h in root.handlers if h.get_name() == logs.HANDLER)
    handler.emit = lambda record: may.wait(SLACK_S)  # type: ignore[method-assign]
    monkeypatch.setattr(logs, "HANGS_AFTER_S", 0.01)
    try:
        with logs.in_background():
            logging.getLogger("cachefs.test").info("never written")
        assert not may.is_set() and handler not in root.handlers
    finally:
        may.set()


def test_a_log_that_cannot_be_written_holds_up_nothing() -> None:
    """As on a disk that hangs; what it takes again is in it."""
    logs.setup("info", "text")
    root = logging.getLogger()
    (handler,) = (h for h in root.handlers if h.get_name() == logs.HANDLER)
    may, lines = threading.Event(), queue.Queue()  # type: ignore[var-annotated]

    def emit(record: logging.LogRecord) -> None:
        assert may.wait(SLACK_S)
        lines.put(handler.format(record))

    handler.emit = emit  # type: ignore[method-assign]
    log = logging.getLogger("cachefs.test")
    mutable = ["as it was"]
    try:
        with logs.in_background():
            for number in range(logs.QUEUED_RECORDS + 100):
                log.info("%d %s", number, mutable)
            mutable[0] = "changed"
            may.set()
        log.info("afterwards")
        said = [lines.get_nowait() for _ in range(lines.qsize())]
    finally:
        root.removeHandler(handler)
    assert said[0].endswith("test: 0 ['as it was']")
    assert logs.QUEUED_RECORDS <= len(said) - 1 <= logs.QUEUED_RECORDS + 1
    assert said[-1].endswith("afterwards")
