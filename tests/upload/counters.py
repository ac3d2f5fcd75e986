"""What must be true of the uploads once all of their tasks have ended, however they ended, and no file is open: nothing is
counted as busy, held, under way or locked. Held after every test that runs them (`scripted.desk`)."""

from __future__ import annotations

import math
import os
from pathlib import Path

from cachefs.upload import DirtyFile, Uploads, staging
from cachefs.upload.content import Row, State
from cachefs.upload.dirty_file import Way
from cachefs.upload.journal import DIRTY_FILES


def check_unused(uploads: Uploads) -> None:
    assert uploads._queue._busy == 0, f"{uploads._queue._busy} uploads are counted, and none is under way"
    assert uploads._disk.busy == 0
    assert uploads.journal._since == math.inf, "the journal is being written"
    dirty_files = uploads._dirty_files.values()
    assert uploads.passthrough._writers == sum(dirty_file.kernel.writers for dirty_file in dirty_files), (
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
    assert not parts.under_way, f"{name}: parts are counted as under way"
    assert not sender._early and not sender._tickets, f"{name}: it sends"
    assert not sender.final, f"{name}: a commit is left"
    assert not sender._part_ended.statistics().tasks_waiting, f"{name}: a part is waited for"
    assert dirty_file.handles == 0
    assert file._users == 0, f"{name}: its file has {file._users} users"
    assert file._fd == -1, f"{name}: its file is open"
    assert not file._spilling.locked()
    assert parts.waiting_bytes >= 0
    assert dirty_file.committed is None or dirty_file.committed.size == dirty_file.size
    check_content(dirty_file)
    check_parts(dirty_file)


def check_content(dirty_file: DirtyFile) -> None:
    """The state agrees with its content and with the owner of its file, and its size is the size of the file."""
    content, kernel, file, name = dirty_file.content, dirty_file.kernel, dirty_file.file, dirty_file.key
    assert content.state is State.ADOPTED or content.state is (
        State.DIRTY if content.dirty else State.CLEAN
    ), f"{name}: {content.state}, and it is {'dirty' if content.dirty else 'clean'}"
    assert content.synced <= content.generation, f"{name}: more is on the disk than there was"
    assert content.stored is None or content.stored.generation <= content.generation, (
        f"{name}: the origin has what never was"
    )
    assert (kernel.shape is None) <= (kernel.way is Way.HERE), (
        f"{name}: no look was taken of what others write"
    )
    assert file.in_passthrough is (kernel.way is not Way.HERE) or content.adopted, (
        f"{name}: {kernel.way}, and its file says otherwise"
    )
    if file._held is not None:
        assert file._start + len(file._held) == dirty_file.size, f"{name}: in memory it has another length"
    elif kernel.way is Way.HERE and content.is_ours and file.path.exists():
        assert file.path.stat().st_size == dirty_file.size, f"{name}: its file has another length"


def check_parts(dirty_file: DirtyFile) -> None:
    """What is to be sent early lies within the file, and what was sent is of the upload that there is."""
    parts, sender, name = dirty_file.parts, dirty_file.sender, dirty_file.key
    assert parts._frontier >= 0, name
    assert parts._next >= 1, name
    sent = set(parts._sent)
    known = set() if sender.upload is None else set(sender.upload.known)
    assert sent <= known, f"{name}: parts {sent - known} are counted, and no upload has them"


def check_rows(uploads: Uploads) -> None:
    """The journal has what is said of it, except for rows that are being written."""
    if uploads.journal._database._closed:
        return
    rows = uploads.journal.rows(DIRTY_FILES)
    for dirty_file in uploads._dirty_files.values():
        if dirty_file.record.turn.locked():
            continue
        row, name = rows.get(dirty_file.id), dirty_file.key
        acknowledged = row is not None and row["acknowledged"]
        assert acknowledged or not dirty_file.acknowledged, f"{name}: it would not come back after a crash"
        if (DIRTY_FILES, dirty_file.id.encode()) not in uploads.journal._left:
            assert dirty_file.acknowledged or not acknowledged, f"{name}: it would come back after a crash"
            assert dirty_file.content.row is not Row.NONE or row is None, f"{name}: a row is left of it"
