"""Where log records go: one line each, as text for people or as JSON for machines.

The loggers of this package are set up, not the root logger's level, so that `debug` does not mean the debug
output of every library; warnings of the libraries still get through.
"""

from __future__ import annotations

import copy
import json
import logging
import logging.handlers
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MAX_FILE_BYTES = 10 << 20
KEPT_FILES = 3
HANDLER = "cachefs"

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
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        # Names of objects may hold line breaks; a record is one line all the same.
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


class JsonFormatter(TextFormatter):
    """One JSON object a line; `extra` fields are members, an exception is one escaped string."""

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


def setup(level: str, format: str, file: Path | None = None) -> None:
    """Send records to `file`, rotated, or to stderr. Replaces what an earlier call set up. Raises `OSError`
    when the file cannot be written; then nothing has changed."""
    handler: logging.Handler
    if file is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.handlers.RotatingFileHandler(
            file, maxBytes=MAX_FILE_BYTES, backupCount=KEPT_FILES, encoding="utf-8", errors="backslashreplace"
        )
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    root = logging.getLogger()
    for old in list(root.handlers):
        if old.get_name() == HANDLER:
            root.removeHandler(old)
            old.close()
    handler.set_name(HANDLER)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.raiseExceptions = False  # a full disk under the log is no reason to write tracebacks
    set_level(level)


QUEUED_RECORDS, DRAINED_WITHIN_S = 10_000, 2.0
"""Records that wait for a log that cannot be written, and how long the end waits for them. Guessed."""


class _Queue(logging.handlers.QueueHandler):
    """Takes records without waiting; of too many, the new ones are lost."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record = copy.copy(record)
        record.msg, record.args = record.getMessage(), None  # as it is now
        return record


@contextmanager
def beside() -> Iterator[None]:
    """Meanwhile records are written by a thread: the log may lie on a disk that hangs, or be a pipe that is not read."""
    root = logging.getLogger()
    written = [handler for handler in root.handlers if handler.get_name() == HANDLER]
    records: queue.Queue[logging.LogRecord | None] = queue.Queue(QUEUED_RECORDS)
    taking = _Queue(records)
    taking.set_name(HANDLER)

    def write() -> None:
        while (record := records.get()) is not None:
            for handler in written:
                handler.handle(record)

    thread = threading.Thread(target=write, name="log", daemon=True)
    thread.start()
    root.handlers = [*(handler for handler in root.handlers if handler not in written), taking]
    try:
        yield
    finally:
        try:
            records.put(None, timeout=DRAINED_WITHIN_S)
        except queue.Full:
            pass
        thread.join(DRAINED_WITHIN_S)
        root.handlers = [handler for handler in root.handlers if handler is not taking]
        if not thread.is_alive():
            root.handlers += written


def set_level(level: str) -> None:
    """Change how much this package logs, at once: debug, info, warning or error."""
    logging.getLogger("cachefs").setLevel(level.upper())
