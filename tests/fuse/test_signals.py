"""Which signals end a request that waits, and which do not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import trio

from cachefs.base.linux import descendants, identify, mounts
from cachefs.daemon.mounting import holders
from cachefs.fuse.callers import has_fatal_signal, is_ending
from cachefs.fuse.handover import LOOK_S
from cachefs.fuse.protocol import Op
from tests.fs.bucket import Bucket
from tests.fuse.kernel import kernel, read_in
from tests.fuse.test_waiting import interrupt


def status(**masks: set[int]) -> str:
    names = ("SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt")
    lines = [f"{name}:\t{sum(1 << (n - 1) for n in masks.get(name, set())):016x}" for name in names]
    return "Name:\tcat\nSigQ:\t1/95000\n" + "\n".join(lines) + "\nCapInh:\t0\n"


@pytest.mark.parametrize(
    ("masks", "dies"),
    [
        ({}, False),
        ({"SigPnd": {signal.SIGKILL}}, True),
        ({"ShdPnd": {signal.SIGTERM}}, True),
        ({"ShdPnd": {signal.SIGTERM}, "SigCgt": {signal.SIGTERM}}, False),
        ({"ShdPnd": {signal.SIGTERM}, "SigIgn": {signal.SIGTERM}}, False),
        ({"ShdPnd": {signal.SIGTERM}, "SigBlk": {signal.SIGTERM}}, False),
        ({"ShdPnd": {signal.SIGINT}, "SigCgt": {signal.SIGINT}}, True),
        ({"ShdPnd": {signal.SIGINT}, "SigIgn": {signal.SIGINT}}, False),
        ({"SigPnd": {signal.SIGALRM}, "SigCgt": {signal.SIGALRM}}, False),
        ({"SigPnd": {signal.SIGALRM}}, True),
        ({"ShdPnd": {signal.SIGCHLD, signal.SIGCONT, signal.SIGTSTP, signal.SIGWINCH}}, False),
        ({"SigPnd": {34}}, True),
        ({"SigPnd": {34}, "SigCgt": {34}}, False),
        ({"SigPnd": {signal.SIGSEGV}}, True),
    ],
)
def test_what_is_pending_has_fatal_signal(masks: dict[str, set[int]], dies: bool) -> None:
    assert has_fatal_signal(status(**masks)) is dies


def test_a_process_is_looked_at_as_it_is() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not is_ending(process.pid)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 5
        while not is_ending(process.pid) and time.monotonic() < deadline:
            pass
        assert is_ending(process.pid)
    assert not is_ending(0)


NAMED = r"""
open("/proc/self/comm", "wb").write(b"trainingslauf-\xc3")
print(flush=True)
input()
"""


@pytest.fixture
def named(tmp_path: Path) -> Iterator[int]:
    """A process in `tmp_path` with a name that is no text: the kernel cuts names at 15 bytes, also within a character."""
    with subprocess.Popen(
        [sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield process.pid
        process.kill()


def test_a_process_may_have_any_name(named: int, tmp_path: Path) -> None:
    assert not is_ending(named)
    assert holders(replace(mounts()[0], path=str(tmp_path))) == [f"trainingslauf-\ufffd (pid {named})"]
    assert identify(named)[::3] == (named, "trainingslauf-\ufffd")
    assert named in descendants(os.getpid())


async def test_a_signal_that_ends_no_process_ends_no_request(
    dying: Callable[[bool], None],
) -> None:
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        release = asking.cache.hold("f")
        dying(False)
        reading = asking.send(Op.READ, ino, read_in(fh))
        await asking.idle()
        interrupt(asking, reading)
        await trio.sleep(10 * LOOK_S)
        assert reading not in asking.replies
        release.set()
        assert len((await asking.reply(reading)).body) == 10
        await trio.sleep(2 * LOOK_S)
        assert not asking.backend._signalled


async def test_a_later_signal_that_does_is_seen(dying: Callable[[bool], None]) -> None:
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        asking.cache.hold("f")
        dying(False)
        readers = [asking.send(Op.READ, ino, read_in(fh)) for _ in range(2)]
        await asking.idle()
        interrupt(asking, readers[0])
        await trio.sleep(1)
        dying(True)
        before = trio.current_time()
        assert (await asking.reply(readers[0])).error == errno.EINTR
        assert trio.current_time() - before <= LOOK_S
        assert readers[1] not in asking.replies
