"""Recording: which lines opens and reads leave behind, and that nothing of it stays when nobody listens."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base.errors import ConfigError, NotFound
from cachefs.base.names import ObjectId
from cachefs.daemon import recording
from cachefs.daemon.recording import Recorder, Recordings

MIB = 1 << 20
LARGE = ObjectId("s", "dir/large", "e", 100 * MIB)
SMALL = ObjectId("s", "dir/small", "e", MIB)
ORIGIN: Any = object()


class Opened:
    def __init__(self, obj: ObjectId) -> None:
        self.id, self.origin = obj, ORIGIN


def recorder() -> Recorder:
    times = iter(range(10_000))
    return Recorder(lambda origin, obj: obj.key, lambda: float(next(times)))


def lines(of: Recorder) -> list[tuple[str, int, int]]:
    of.finish()
    found = [json.loads(line) for line in of.drain()[0]]
    return [(line["path"], line["offset"], line["length"]) for line in found]


def test_a_line_says_all() -> None:
    made = recorder()
    made.opened(2, 77, ORIGIN, SMALL, False)
    line = json.loads(made.drain()[0][0])
    assert line == {"t": 1.0, "path": "dir/small", "size": MIB, "offset": 0, "length": MIB, "pid": 77}


@pytest.mark.parametrize(
    ("obj", "passthrough", "length"), [(SMALL, True, MIB), (LARGE, True, 100 * MIB), (LARGE, False, 0)]
)
def test_an_open_stands_for_all_of_a_file_unless_its_reads_are_seen(
    obj: ObjectId, passthrough: bool, length: int
) -> None:
    made = recorder()
    made.opened(2, 77, ORIGIN, obj, passthrough)
    assert lines(made) == [(obj.key, 0, length)]


@pytest.mark.parametrize(
    ("reads", "runs"),
    [
        ([(0, 10), (10, 10), (20, 5)], [(0, 25)]),
        ([(20, 5), (10, 10), (0, 10)], [(0, 25)]),
        ([(0, 10), (5, 10)], [(0, 15)]),
        ([(0, 10), (20, 10), (10, 10)], [(0, 30)]),
        ([(20, 10), (40, 10), (0, 10), (10, 30)], [(0, 50)]),
        ([(0, 10), (50, 10), (10, 10), (60, 10)], [(0, 20), (50, 20)]),
        ([(100 * i, 10) for i in range(20)], [(100 * i, 10) for i in range(20)]),
        ([(0, 0)], []),
    ],
)
def test_reads_without_a_gap_are_one_line(reads: list[tuple[int, int]], runs: list[tuple[int, int]]) -> None:
    made, opened = recorder(), Opened(LARGE)
    for offset, size in reads:
        made.read(opened, offset, size, 1)
    made.closed(opened)
    assert lines(made) == [("dir/large", *run) for run in runs]


def test_readers_and_handles_are_told_apart_and_small_files_have_no_parts() -> None:
    made, one, other = recorder(), Opened(LARGE), Opened(LARGE)
    made.read(one, 0, 10, 1)
    made.read(one, 10, 10, 2)
    made.read(other, 20, 10, 1)
    made.read(Opened(SMALL), 0, 10, 1)
    assert lines(made) == [("dir/large", 0, 10), ("dir/large", 10, 10), ("dir/large", 20, 10)]


def test_runs_of_a_handle_are_bounded() -> None:
    made, opened = recorder(), Opened(LARGE)
    for number in range(20):
        made.read(opened, 100 * number, 10, 1)
    ended = [json.loads(line)["offset"] for line in made.drain()[0]]
    assert ended == [100 * number for number in range(20 - recording.RUNS_KEPT)]
    assert len(lines(made)) == recording.RUNS_KEPT


def test_lines_that_nobody_takes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "LINES_KEPT", 5)
    monkeypatch.setattr(recording, "LINES_AT_ONCE", 3)
    made = recorder()
    for _ in range(7):
        made.opened(2, 1, ORIGIN, SMALL, True)
    assert [(len(found), lost) for found, lost in (made.drain(), made.drain(), made.drain())] == [
        (3, 2),
        (2, 0),
        (0, 0),
    ]


class FakeFs:
    """What `Recordings` changes of a filesystem."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.hook: Any = lambda ino, pid, origin, obj, passthrough: self.heard.append(obj.key)
        self.awaited: Container[bytes] = {SMALL.digest}
        self.reader: Any = FakeReader()

    def watch_opens(self, hook: Any, awaited: Container[bytes] = frozenset()) -> Any:
        before, self.hook, self.awaited = (self.hook, self.awaited), hook, awaited
        return before

    def read_through(self, reader: Any) -> Any:
        before, self.reader = self.reader, reader
        return before


class FakeReader:
    passthrough = True

    def __init__(self) -> None:
        self.closed: list[Any] = []

    def read_now(self, opened: Any, offset: int, size: int, pid: int) -> bytes | None:
        return b"x" * size if offset == 0 else None

    async def read(self, opened: Any, offset: int, size: int, pid: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return b"y" * size

    def close(self, opened: Any, unread_blocks: int | None = 0) -> None:
        self.closed.append(opened)


def test_everything_is_as_before_when_nobody_records() -> None:
    async def main() -> None:
        fs = FakeFs()
        before = (fs.hook, fs.awaited, fs.reader)
        async with trio.open_nursery() as nursery:
            recordings = Recordings(fs, lambda origin, obj: obj.key, nursery)  # type: ignore[arg-type]
            number = await recordings.start()
            with pytest.raises(ConfigError, match="recorded already"):
                await recordings.start()
            assert fs.reader.passthrough
            other = ObjectId("s", "other", "e", 1)
            for obj, passthrough in ((SMALL, True), (other, True), (other, False), (LARGE, False)):
                assert obj.digest in fs.awaited
                fs.hook(2, 1, ORIGIN, obj, passthrough)
            # Who listened before hears what it would have heard.
            assert fs.heard == ["dir/small", "other", "dir/large"]
            opened = Opened(LARGE)
            assert fs.reader.read_now(opened, 0, 10, 1) == b"x" * 10
            assert fs.reader.read_now(opened, 10, 10, 1) is None
            assert await fs.reader.read(opened, 10, 10, 1) == b"y" * 10
            fs.reader.close(opened)
            await recordings.stop(number)
            assert (fs.hook, fs.awaited, fs.reader) == before
            assert fs.reader.closed == [opened]
            drained = await recordings.drain(number)
            found = [json.loads(line) for line in drained["lines"]]
            assert [(line["path"], line["length"]) for line in found] == [
                ("dir/small", MIB),
                ("other", 1),
                ("other", 1),
                ("dir/large", 0),
                ("dir/large", 20),
            ]
            assert await recordings.drain(number) == {"lines": [], "dropped": 0}
            with pytest.raises(NotFound):
                await recordings.drain(number)
            assert await recordings.start() != number
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_recording_that_nobody_drains_ends() -> None:
    async def main() -> None:
        fs = FakeFs()
        reader = fs.reader
        async with trio.open_nursery() as nursery:
            recordings = Recordings(fs, lambda origin, obj: obj.key, nursery)  # type: ignore[arg-type]
            number = await recordings.start()
            for _ in range(4):
                await trio.sleep(recording.DRAIN_DEADLINE_S / 2)
                await recordings.drain(number)
            assert fs.reader is not reader
            await trio.sleep(recording.DRAIN_DEADLINE_S * 2)
            assert fs.reader is reader
            with pytest.raises(NotFound):
                await recordings.drain(number)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
