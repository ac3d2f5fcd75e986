"""The holder of a connection and the process that notifies the kernel, without a kernel."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cachefs.base import logs
from cachefs.base.errors import MountError
from cachefs.fuse import holder, notifier
from cachefs.fuse.handover import Handover
from cachefs.fuse.holder import LONGEST_WAIT_S, STAND_BY_S, Holder
from tests.upload.scripted import in_trio


def test_one_that_cannot_start_is_loaded_ever_later() -> None:
    """One that was ended by a signal, as one is that has read an older configuration, is not waited for."""
    keeps: Holder = object.__new__(Holder)
    keeps._retry_s, keeps._load_at = STAND_BY_S, 0.0
    keeps._state = os.memfd_create("state")
    os.ftruncate(keeps._state, holder.MOUNTPOINT_AT)
    waits = []
    for status in (256, 256, signal.SIGKILL, 256, 256, 256, 256, 256):
        ours, theirs = socket.socketpair()
        theirs.close()
        keeps._standby, keeps._load_at = (77, ours), 0.0
        keeps._reap(78, status)
        assert keeps._standby is not None, "another child"
        keeps._reap(77, status)
        assert keeps._standby is None
        waits.append(round(keeps._load_at - time.monotonic()) if keeps._load_at else 0)
    assert waits == [2, 4, 0, 8, 16, 32, 60, 60] and waits[-1] == LONGEST_WAIT_S
    os.close(keeps._state)


def died_after(monkeypatch: pytest.MonkeyPatch, lives: list[float]) -> list[bool]:
    """Whether another daemon is started, for each that lived so many seconds."""
    keeps: Holder = object.__new__(Holder)
    keeps._state, now = os.memfd_create("state"), [1000.0]
    os.ftruncate(keeps._state, holder.MOUNTPOINT_AT)
    monkeypatch.setattr(holder, "time", SimpleNamespace(**vars(time) | {"monotonic": lambda: now[0]}))
    started = []
    for life in lives:
        short, _ = holder.LIVES.unpack(keeps._read(holder.LIVES_AT, holder.LIVES.size))
        os.pwrite(keeps._state, holder.LIVES.pack(short, now[0]), holder.LIVES_AT)
        now[0] += life
        started.append(keeps._count_death("exit code 1"))
    os.close(keeps._state)
    return started


def test_ten_daemons_in_a_row_that_lived_for_less_than_ten_seconds_are_a_crash_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert died_after(monkeypatch, [9.9] * 10) == [True] * 9 + [False]
    assert all(died_after(monkeypatch, [9.9] * 9 + [10.0] + [9.9] * 9))


def test_its_log_lines_have_the_time_as_those_of_a_daemon(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(holder, "time", SimpleNamespace(**vars(time) | {"time": lambda: 1700000000.0625}))
    holder._log_line("the daemon has died (SIGKILL)")
    assert logs.entry_of(capfd.readouterr().err.rstrip("\n")) == {
        "time": "2023-11-14T22:13:20.062Z",
        "level": "warning",
        "logger": "fuse.holder",
        "message": "the daemon has died (SIGKILL)",
    }


class Scripted(Holder):
    """A holder whose daemons end with `codes`, and in which no process can be started `refused` times. `signals` come while
    it waits."""

    def __init__(self, codes: list[int], refused: int, signals: list[int | None]) -> None:
        self._codes, self._refused, self._signals = codes, refused, signals
        self._fuse, self._child, self._standby = 7, 1, None
        self._stopping = self._aborting = False
        self._retry_s, self._load_at = STAND_BY_S, 0.0
        self.loaded, self.taken_away = 0, False

    def _load(self) -> Any:
        if self.loaded and self._refused:
            self._refused -= 1
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        self.loaded += 1
        return 10 + self.loaded, socket.socket()

    def _count_death(self, cause: str, *, killed: bool = False) -> bool:
        return self._activate() is None

    def _activate(self) -> None:
        return None

    def _wait_for_daemon(self) -> int:
        self._child = 0
        return self._codes.pop(0)

    def _receive_connection(self) -> None:
        return

    def _unmount_dead(self, code: int) -> int:
        self.taken_away = True
        return code

    def heeded(self) -> SimpleNamespace | None:
        number = self._signals.pop(0)
        return None if number is None else SimpleNamespace(si_signo=number, si_pid=0, si_code=0)


@pytest.mark.parametrize(
    ("signals", "code", "loaded", "taken_away"),
    [
        ([None, signal.SIGCHLD, signal.SIGHUP], 0, 2, False),
        ([None, signal.SIGTERM], 128 + signal.SIGKILL, 1, True),
        ([None, signal.SIGABRT], 128 + signal.SIGKILL, 1, False),
    ],
)
def test_while_no_process_can_be_started_programs_wait(
    monkeypatch: pytest.MonkeyPatch, signals: list[int | None], code: int, loaded: int, taken_away: bool
) -> None:
    """As in a container at its limit of processes; a stop is heeded."""
    keeps = Scripted([128 + signal.SIGKILL, 0], 3, signals)
    monkeypatch.setattr(holder, "has_ended", lambda fuse: False)
    monkeypatch.setattr(holder.signal, "sigtimedwait", lambda *_: keeps.heeded())
    assert (keeps.run(), keeps.loaded, keeps.taken_away) == (code, loaded, taken_away)


def test_a_standby_that_cannot_be_started_is_loaded_later() -> None:
    keeps = Scripted([], 2, [])
    keeps.loaded, waits = 1, []
    for _ in range(3):
        keeps._load_at = 0.0
        keeps._load_standby()
        waits.append(round(keeps._load_at - time.monotonic()) if keeps._load_at else 0)
    assert waits == [2, 4, 0] and keeps._standby is not None
    keeps._standby[1].close()


def test_a_reload_does_not_end_a_daemon_that_has_just_been_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no handler for SIGHUP before it has loaded its modules."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(holder.DESCRIPTORS, "")
    keeps: Holder = object.__new__(Holder)
    keeps._directory, keeps._original_mask, keeps._state = str(tmp_path), set(), os.memfd_create("state")
    signalled = "import os, signal; os.kill(os.getpid(), signal.SIGHUP); os._exit(7)"
    keeps._command = [
        sys.executable,
        "-c",
        f"import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); {signalled}",
    ]
    usual = signal.signal(signal.SIGIO, signal.SIG_IGN)  # the holder's socket sends it
    try:
        pid, ours = keeps._load()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        ours.close()
    finally:
        signal.signal(signal.SIGIO, usual)
        os.close(keeps._state)


@in_trio
async def test_without_its_holder_a_daemon_asks_for_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal to process 0 would end the daemon itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    handover = Handover(os.memfd_create("state"), theirs.detach())
    monkeypatch.setattr(handover, "_holder", os.getppid() + 1)
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a signal is sent"))
    with ours, pytest.raises(MountError, match="would start another daemon has died"):
        await handover.renewed(1.0)
    os.close(handover._state_fd)
    handover._socket.close()


def test_a_notifier_that_was_killed_begins_again_and_tells_the_errno(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "fuse", os.O_RDWR | os.O_CREAT)
    tells = notifier.Notifier(fd)
    assert not children(), "not before there is something to send"
    tells.send(b"one ")
    (first,) = children()
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    tells.send(b"two")
    (second,) = children()
    assert second != first and (tmp_path / "fuse").read_bytes() == b"one two"
    tells.close()
    os.waitpid(second, 0)
    os.close(fd)
    fd = os.open(tmp_path / "fuse", os.O_RDONLY)
    tells = notifier.Notifier(fd)
    with pytest.raises(OSError) as error:
        tells.send(b"three")
    assert error.value.errno == errno.EBADF
    (third,) = children()
    tells.close()
    os.waitpid(third, 0)
    os.close(fd)


def test_a_notifier_whose_daemon_died_amid_a_notice_ends_without_a_word(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(tmp_path / "fuse", "wb") as fuse, theirs:
        ours.send(b"one")
        ours.close()
        notifier.serve(fuse.fileno(), theirs)
    assert (tmp_path / "fuse").read_bytes() == b"one"


def test_a_notifier_whose_daemon_died_before_it_read_the_answer_ends_without_a_word(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open(tmp_path / "fuse", "wb") as fuse, theirs, ThreadPoolExecutor(1) as threads:
        serving = threads.submit(notifier.serve, fuse.fileno(), theirs)
        ours.send(b"one")
        select.select([ours], [], [], 30)
        ours.close()
        serving.result(30)


def children() -> set[int]:
    """This process's, that run the notifier."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    named = (Path(f"/proc/{pid}/cmdline") for pid in found)
    return {int(path.parent.name) for path in named if notifier.__file__.encode() in path.read_bytes()}


def test_what_the_processes_share_does_not_overlap() -> None:
    assert holder.STANDBY_AT + holder.STANDBY.size <= holder.MOUNTPOINT_AT
