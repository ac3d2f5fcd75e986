"""Recording which files are opened and which parts of them are read, to be replayed (`warm --profile`) or simulated.

During a recording a hook records each open, and a wrapper around the reader records reads. Both are removed afterwards, so a
mount that is not recorded pays nothing. Lines stay in memory, up to a bound, until the client drains them over the control
socket. A client that drains too slowly loses lines, and the answer says how many. If it stops draining, the recording ends.

The line of an open stands for the whole file (``offset`` 0, ``length`` its size): the daemon does not see which parts are
read of a file that is fetched in one piece or that the kernel reads by itself. A file over `LARGE` that is read through the
daemon has an open of length 0, and a line for each run of reads when the run ends.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import trio

from cachefs.base.errors import ConfigError, NotFound
from cachefs.base.names import ObjectId
from cachefs.base.tasks import contained
from cachefs.fs import EVERY_FILE, LARGE, FileSystem
from cachefs.fs.reader import Buffer, Reader
from cachefs.origin import Origin

LINES_KEPT = 200_000
"""Lines that may wait to be drained, about 150 bytes each. Derived: two seconds of opens at the highest rate, 30 MB."""

LINES_AT_ONCE = 2_000
"""Lines in one reply. Measured: writing them takes 6 ms of the daemon's loop."""

RUNS_KEPT = 8
"""Most runs of reads that one handle has at a time; another one ends the oldest. A bound, because each random read begins a
run. So many threads of a process may read a file in order."""

DRAIN_DEADLINE_S = 60.0
"""A recording ends when no client has drained it for so long. Derived: its client drains twice a second."""

MOST_BYTES = 1 << 62
"""Larger than any object."""

FORMAT = 1
"""The format of a line without a member `format`."""


class Line(NamedTuple):
    """What a line of a recording says was opened or read. Sizes are in bytes."""

    path: str
    size: int
    offset: int
    length: int


def parsed(text: str) -> Line:
    """Parse a line of a recording, which any program may have written. Raises `ValueError`, whose text is for users. Unknown
    members are ignored, because a later version may add some without a new format."""
    try:
        line = json.loads(text)
        path, size = line["path"], line["size"]
        form, offset, length = line.get("format", FORMAT), line.get("offset", 0), line.get("length", size)
    except KeyError as exc:
        raise ValueError(f"no {exc.args[0]}") from None
    except TypeError as exc:
        raise ValueError(str(exc)) from None
    except (json.JSONDecodeError, RecursionError):
        raise ValueError("not JSON") from None
    if form != FORMAT:
        raise ValueError(f"its format is {form}, this version reads {FORMAT}")
    if type(path) is not str:
        raise ValueError("its path is not text")
    path.encode("utf-8", "surrogateescape")  # a ValueError for "\ud800", which is JSON and no path
    if any(type(value) is not int or not 0 <= value < MOST_BYTES for value in (size, offset, length)):
        raise ValueError("size, offset and length are bytes")
    if offset + length > size:
        raise ValueError("its range goes beyond the size")
    return Line(path, size, offset, length)


Recorded = tuple[float, Origin, ObjectId, int, int, int]
"""(time by the recorder's clock, origin, version, offset, length, pid)."""


class Recorder:
    """Records opens and reads. `path_of` gives the path below the mount, `clock` is in seconds."""

    def __init__(self, path_of: Callable[[Origin, ObjectId], str], clock: Callable[[], float]) -> None:
        self._path_of = path_of
        self._clock = clock
        self._began = clock()
        self._lines: deque[Recorded] = deque()
        self._runs: dict[Any, list[_Run]] = {}
        self._dropped = 0

    def opened(self, ino: int, pid: int, origin: Origin, obj: ObjectId, passthrough: bool) -> None:
        in_parts = obj.size > LARGE and not passthrough
        self._note(self._clock(), origin, obj, 0, 0 if in_parts else obj.size, pid)

    def read(self, opened: Any, offset: int, size: int, pid: int) -> None:
        """A part of a file was read; `opened` has its `origin` and its `id`."""
        if opened.id.size <= LARGE or size <= 0:
            return
        runs = self._runs.setdefault(opened, [])
        end = offset + size
        touching = [run for run in runs if run.pid == pid and offset <= run.stop and run.start <= end]
        run = touching[0] if touching else _Run(self._clock(), offset, end, pid)
        for other in touching:  # reads come out of order: one may close the gap between two runs
            run.start, run.stop = min(run.start, other.start, offset), max(run.stop, other.stop, end)
            runs.remove(other)
        runs.append(run)
        if len(runs) > RUNS_KEPT:
            self._end(opened, runs.pop(0))

    def closed(self, opened: Any) -> None:
        for run in self._runs.pop(opened, ()):
            self._end(opened, run)

    def finish(self) -> None:
        """Write lines for runs that have not ended."""
        for opened in list(self._runs):
            self.closed(opened)

    def drain(self) -> tuple[list[str], int]:
        """Remove up to `LINES_AT_ONCE` lines. Returns (lines, how many were lost since the last call)."""
        lines: list[str] = []
        while self._lines and len(lines) < LINES_AT_ONCE:
            at, origin, obj, offset, length, pid = self._lines.popleft()
            line = {
                "t": round(at - self._began, 6),
                "path": self._path_of(origin, obj),
                "size": obj.size,
                "offset": offset,
                "length": length,
                "pid": pid,
            }
            lines.append(json.dumps(line))
        dropped, self._dropped = self._dropped, 0
        return lines, dropped

    def _end(self, opened: Any, run: _Run) -> None:
        self._note(run.at, opened.origin, opened.id, run.start, run.stop - run.start, run.pid)

    def _note(self, at: float, origin: Origin, obj: ObjectId, offset: int, length: int, pid: int) -> None:
        if len(self._lines) < LINES_KEPT:
            self._lines.append((at, origin, obj, offset, length, pid))
        else:
            self._dropped += 1


@dataclass(slots=True)
class _Run:
    """Bytes [start, stop) of one handle, read by one process without a gap since `at`."""

    at: float
    start: int
    stop: int
    pid: int


class RecordedReader:
    """Passes everything to `reader`, and reports reads to the recorder."""

    reader: Reader

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reader, name)

    def close(self, opened: Any, unread_blocks: int | None = 0) -> None:
        self._recorder.closed(opened)
        self.reader.close(opened, unread_blocks)

    def read_now(self, opened: Any, offset: int, size: int, pid: int) -> Buffer | None:
        data = self.reader.read_now(opened, offset, size, pid)
        if data is not None:
            self._recorder.read(opened, offset, size, pid)
        return data

    async def read(self, opened: Any, offset: int, size: int, pid: int) -> Buffer:
        data = await self.reader.read(opened, offset, size, pid)
        self._recorder.read(opened, offset, size, pid)
        return data


class Recordings:
    """The recording of a mount, one at a time. It ends if no client drains it. `first` is the number of the first one."""

    def __init__(
        self,
        fs: FileSystem,
        path_of: Callable[[Origin, ObjectId], str],
        nursery: trio.Nursery,
        first: int = 1,
    ) -> None:
        self._fs = fs
        self._path_of = path_of
        self._nursery = nursery
        self._number = first - 1  # of the last recording
        self._recorder: Recorder | None = None
        self._unhook: Callable[[], None] | None = None
        self._drained = 0.0

    async def start(self) -> int:
        """Begin a recording. Returns its number. Raises `ConfigError` during another one."""
        if self._unhook is not None:
            raise ConfigError("this mount is being recorded already: one recording at a time")
        self._number += 1
        self._drained = trio.current_time()
        recorder = self._recorder = Recorder(self._path_of, trio.current_time)
        self._unhook = self._hook(recorder)
        contained(self._nursery, "recording", self._watch, self._number)
        return self._number

    async def drain(self, recording: int) -> dict[str, Any]:
        """Lines, and how many were lost. After `stop`, an answer without lines is the last; then raises `NotFound`."""
        if recording != self._number or self._recorder is None:
            raise NotFound(f"recording {recording} has ended")
        self._drained = trio.current_time()
        lines, dropped = self._recorder.drain()
        if not lines and self._unhook is None:
            self._recorder = None
        return {"lines": lines, "dropped": dropped}

    async def stop(self, recording: int) -> None:
        """End the recording. Lines that wait can still be drained."""
        if recording == self._number and self._unhook is not None:
            self._unhook()
            self._unhook = None
            assert self._recorder is not None
            self._recorder.finish()

    async def _watch(self, recording: int) -> None:
        while self._recorder is not None and self._number == recording:
            if trio.current_time() - self._drained > DRAIN_DEADLINE_S:
                await self.stop(recording)
                self._recorder = None
            await trio.sleep(DRAIN_DEADLINE_S / 4)

    def _hook(self, recorder: Recorder) -> Callable[[], None]:
        hook, awaited = before = self._fs.watch_opens(None)

        def opened(ino: int, pid: int, origin: Origin, obj: ObjectId, passthrough: bool) -> None:
            recorder.opened(ino, pid, origin, obj, passthrough)
            if hook is not None and (not passthrough or obj.size > LARGE or obj.digest in awaited):
                hook(ino, pid, origin, obj, passthrough)

        recorded = RecordedReader(recorder)
        recorded.reader = reader = self._fs.read_through(recorded)
        self._fs.watch_opens(opened, EVERY_FILE)

        def unhook() -> None:
            self._fs.watch_opens(*before)
            self._fs.read_through(reader)

        return unhook
