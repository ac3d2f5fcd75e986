"""What must be true of the uploads once all of their tasks have ended, however they ended, and no file is open: nothing is
counted as busy, held, under way or locked. Held after every test that runs them (`scripted.desk`)."""

from __future__ import annotations

import math
import os
from pathlib import Path

from cachefs.upload import DirtyFile, Uploads, staging


def check_unused(uploads: Uploads) -> None:
    assert uploads._queue._busy == 0, f"{uploads._queue._busy} uploads are counted, and none is under way"
    assert uploads._disk.busy == 0
    assert uploads.journal._since == math.inf, "the journal is being written"
    dirty_files = uploads._dirty_files.values()
    assert uploads._passthrough._writers == sum(dirty_file.kernel.writers for dirty_file in dirty_files), (
        "writers are miscounted"
    )
    for dirty_file in dirty_files:
        check_dirty_file(dirty_file)
    held = sum(len(dirty_file.file._held or b"") for dirty_file in dirty_files)
    left = uploads._disk.memory_left
    assert left + held == staging.HELD_ALTOGETHER, f"{held} bytes are held in memory, {left} are left"


def check_closed(state: Path) -> None:
    """No descriptor of the journal, nor one through which a staging file is written here, is left."""
    left = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith((f"{state}/staging/", f"{state}/state/")):
            left.append(target)
    assert not left, f"the uploads have ended, and these are open: {left}"


def check_dirty_file(dirty_file: DirtyFile) -> None:
    parts, sender, file, name = dirty_file.parts, dirty_file.sender, dirty_file.file, dirty_file.key
    assert dirty_file.attempt is None, f"{name}: an upload is left"
    locks = {"content": dirty_file.lock, "name": dirty_file.trying.turn, "row": dirty_file.record.turn}
    assert not [what for what, lock in locks.items() if lock.locked()], f"{name}: a lock is held"
    assert not parts.under_way and not parts._bytes_under_way, f"{name}: parts are counted as under way"
    assert not sender._early and not sender._turns, f"{name}: it sends"
    assert not sender.final, f"{name}: a commit is left"
    assert not sender._landing.statistics().tasks_waiting, f"{name}: a part is waited for"
    assert dirty_file.handles == 0
    assert file._users == 0, f"{name}: its file has {file._users} users"
    assert file._fd == -1, f"{name}: its file is open"
    assert not file._landing.locked()
    assert parts.waiting_bytes >= 0
    assert dirty_file.committed is None or dirty_file.committed.size == dirty_file.size
