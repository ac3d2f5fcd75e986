"""What must be true of the uploads once all of their tasks have ended, however they ended, and no file is open: nothing is
counted as busy, held, under way or locked. Held after every test that runs them (`scripted.desk`)."""

from __future__ import annotations

from cachefs.upload import Draft, Uploads, staging


def check_unused(uploads: Uploads) -> None:
    assert uploads._queue._busy == 0, f"{uploads._queue._busy} uploads are counted, and none is under way"
    assert uploads._threads.borrowed_tokens == 0
    assert not uploads.journal._turn.locked(), "the journal is locked"
    drafts = uploads._drafts.values()
    assert uploads._lending._writers == sum(draft.writers for draft in drafts), "writers are miscounted"
    for draft in drafts:
        check_draft(draft)
    held = sum(len(draft.file._held or b"") for draft in drafts)
    left = uploads._memory.left
    assert left + held == staging.HELD_ALTOGETHER, f"{held} bytes are held in memory, {left} are left"


def check_draft(draft: Draft) -> None:
    parts, sender, file, name = draft.parts, draft.sender, draft.file, draft.key
    assert draft.attempt is None, f"{name}: an upload is left"
    locks = {"content": draft.lock, "name": draft.turn, "row": draft.row_turn}
    assert not [what for what, lock in locks.items() if lock.locked()], f"{name}: a lock is held"
    assert not parts.under_way and not parts._bytes_under_way, f"{name}: parts are counted as under way"
    assert not sender._early and not sender._turns and not sender._slots.borrowed_tokens, f"{name}: it sends"
    assert not sender.final and not sender._finishing, f"{name}: a commit is left"
    assert not sender._landing.statistics().tasks_waiting, f"{name}: a part is waited for"
    assert draft.handles == 0
    assert file._users == 0, f"{name}: its file has {file._users} users"
    assert file._fd == -1, f"{name}: its file is open"
    assert not file._landing.locked()
    assert parts.waiting_bytes >= 0
    assert draft.committed is None or draft.committed.size == draft.size
