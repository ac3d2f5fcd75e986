"""Set-up of logging: one line for each record, as text or as JSON.

The level is set on this package's loggers and not on the root logger, so that `debug` does not include the debug output of
every library; warnings of libraries are logged.
"""

from __future__ import annotations

import copy
import json
import logging
import logging.handlers
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cachefs.base import ownership
from cachefs.base.linux import HANGS_AFTER_S
from cachefs.base.units import printable

MAX_FILE_BYTES, OLD_FILES = 10 << 20, 3
"""The log is rotated at this size, and this many rotated files stay. Promised in `cachefs mount --help`."""
HANDLER = "cachefs"

REPEATED_EVERY_S = 60.0
"""Seconds between equal lines. Derived: a line a minute fills the 40 MiB of log files in months."""

REPEATS_REMEMBERED = 256
"""Different lines that a `Repeats` remembers. Derived: there are fewer pairs of operation and error."""

LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextFormatter(logging.Formatter):
    """``2024-05-01T12:00:00.123Z WARNING fetch: message`` and, for exceptions, a traceback below it."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(shortname)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        record.shortname = record.name.removeprefix("cachefs.")
        return "\n".join(printable(line) for line in super().format(record).split("\n"))

    def formatMessage(self, record: logging.LogRecord) -> str:
        # Names of objects may contain line breaks, which must not begin another line.
        return printable(super().formatMessage(record))


class JsonFormatter(TextFormatter):
    """One JSON object a line; `extra` fields are members, a traceback is one string."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = self.formatStack(record.stack_info)
        return json.dumps(entry, default=str)


_TEXT_LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z) (?P<level>[A-Z]+) (?P<logger>[\w.-]+): (?P<message>.*)", re.DOTALL
)


def entry_of(line: str) -> dict[str, Any]:
    """The members of a line that one of the formatters made. The logger of a text line is without "cachefs.".
    Any other line, such as one of a traceback, is a message alone."""
    try:
        if isinstance(entry := json.loads(line), dict):
            return entry
    except ValueError:
        pass
    if (match := _TEXT_LINE.fullmatch(line)) is None:
        return {"message": line}
    return match.groupdict() | {"level": match["level"].lower()}


class _Rotating(logging.handlers.RotatingFileHandler):
    """A log that only its owner may read."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            path, maxBytes=MAX_FILE_BYTES, backupCount=OLD_FILES, encoding="utf-8", errors="backslashreplace"
        )

    def follow_rotation(self) -> None:
        """As the function below. Without a change, or if the file cannot be opened, it goes on with the one it has."""
        if self.stream is None:
            return
        try:
            if os.path.samestat(os.stat(self.baseFilename), os.fstat(self.stream.fileno())):
                return
            opened = self._open()
        except OSError:
            return
        self.stream.close()
        self.stream = opened

    def _open(self) -> TextIOWrapper:
        fd = open_file(Path(self.baseFilename), ours=False)
        return open(fd, "a", encoding=self.encoding, errors=self.errors)


def open_file(path: Path, *, ours: bool) -> int:
    """Open a log for appending, and create it with mode 0600. `ours`: an existing file gets that mode, too, and a link is
    refused. A file that the user named keeps its mode, and may be a link (/dev/stdout). Raises `OSError`."""
    if ours:
        return ownership.open_file(path, LOG_FLAGS)
    path.parent.mkdir(mode=ownership.DIRECTORY_MODE, parents=True, exist_ok=True)
    # A pipe without a reader is refused (ENXIO). Without the flag, opening it would wait for a reader.
    fd = os.open(path, LOG_FLAGS | os.O_NONBLOCK, ownership.FILE_MODE)
    os.set_blocking(fd, True)
    return fd


class Repeats:
    """Admits the first of equal log lines, and then one in `REPEATED_EVERY_S`, with the number of those left out.

    Without this, a user of a mount could fill the log by making one operation fail."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # line → [when it was logged last, how many were left out since]
        self._seen: dict[Hashable, list[float]] = {}

    def admit(self, what: Hashable) -> int | None:
        """How many equal lines were left out since the last one; None if this one must be left out, too."""
        now = self._clock()
        seen = self._seen.get(what)
        if seen is None:
            if len(self._seen) >= REPEATS_REMEMBERED:
                del self._seen[next(iter(self._seen))]
            self._seen[what] = [now, 0]
            return 0
        if now - seen[0] < REPEATED_EVERY_S:
            seen[1] += 1
            return None
        left_out = int(seen[1])
        seen[:] = now, 0
        return left_out


def setup(level: str, format: str, file: Path | None = None) -> None:
    """Send records to `file`, which is rotated, or to stderr. Replaces the handler of an earlier call. Raises `OSError` if
    the file cannot be opened; then nothing has changed."""
    handler = logging.StreamHandler(sys.stderr) if file is None else _Rotating(file)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        if old.get_name() == HANDLER:
            root.removeHandler(old)
            old.close()
    handler.set_name(HANDLER)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.raiseExceptions = False  # otherwise a full disk under the log would put tracebacks on stderr
    set_level(level)


def follow_rotation() -> None:
    """Open the log again if another process has renamed it. Otherwise records would go to an old file, which is full."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Rotating):
            handler.follow_rotation()


QUEUED_RECORDS = 10_000
"""Most records that wait while the log cannot be written. A bound of memory: about 5 MB."""


class _Queue(logging.handlers.QueueHandler):
    """Queues records without waiting, and drops new ones when the queue is full. `SimpleQueue.put` is reentrant: a
    destructor that the garbage collector runs within it may log, too."""

    def __init__(self, records: queue.SimpleQueue[logging.LogRecord | None]) -> None:
        super().__init__(records)
        self._records = records

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._records.qsize() < QUEUED_RECORDS:
            self._records.put(record)

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None  # formatted now, because its arguments may change
        return record


@contextmanager
def in_background() -> Iterator[None]:
    """Have a thread write the log in this context: the log may be on a disk that hangs, or a pipe without a reader. The end
    of the context waits for the thread, `HANGS_AFTER_S` at most."""
    root = logging.getLogger()
    handlers = [handler for handler in root.handlers if handler.get_name() == HANDLER]
    records: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
    queued = _Queue(records)
    queued.set_name(HANDLER)

    def write() -> None:
        while (record := records.get()) is not None:
            for handler in handlers:
                handler.handle(record)

    thread = threading.Thread(target=write, name="log", daemon=True)
    thread.start()
    root.handlers = [*(handler for handler in root.handlers if handler not in handlers), queued]
    try:
        yield
    finally:
        records.put(None)
        thread.join(HANGS_AFTER_S)
        root.handlers = [handler for handler in root.handlers if handler is not queued]
        if not thread.is_alive():
            root.handlers += handlers


def set_level(level: str) -> None:
    """Set the level of this package's loggers: debug, info, warning or error."""
    logging.getLogger("cachefs").setLevel(level.upper())
