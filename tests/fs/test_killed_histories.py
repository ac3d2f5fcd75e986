"""Files and names are changed while the daemon is killed again and again, at any line, also while the next one recovers.

Each daemon of a history is a process of its own (`killed`). What outlives it is as in a mount that root makes: its memory,
its cache directory, the origin, and the kernel's handles; or, without its memory and handles, as after a kill of any other
mount. The next daemon shows what a local disk would show, but for the one change that was not answered.

A history is made from its seed, so a failing one is often replayed by its number (not always, because the thread that
writes names goes by the machine's clock):

    CACHEFS_KILLED_HISTORY=1234 pytest tests/fs/test_killed_histories.py -k replay

`CACHEFS_KILLED_HISTORIES=1000 pytest tests/fs/test_killed_histories.py` is the long series.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fs.killed import Script, run_lives

HISTORIES = int(os.environ.get("CACHEFS_KILLED_HISTORIES", "0"))
"""None by default, because 100 take half a minute, and one in some hundreds may still fail, and not each time."""
IN_A_TEST = 10


@pytest.fixture
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
        yield Path(place)


def check(place: Path, *scripts: Script, **settings: Any) -> None:
    """Run a history of these lives, and one more in which all is uploaded."""
    world = {
        "outlives": True,
        "writeback": True,
        "quick": True,
        "delay_s": 0.0,
        "large": False,
        "takes": False,
    }
    found = run_lives(place, scripts=scripts, puts_fail=0.0, journal_fails=0.0, **world | settings)
    assert not found, found


def test_a_file_that_is_open_for_writing_can_be_opened_by_its_new_name_after_a_kill(place: Path) -> None:
    """Its copy under the new name has another etag."""
    check(place, [("open", "a", 1, True, False), ("rename", "a", "b")])


def test_a_file_in_a_renamed_directory_that_is_open_for_writing_can_be_opened_after_a_kill(
    place: Path,
) -> None:
    check(place, [("open", "d/x", 1, True, False), ("movedir", "d", "e")], directories=True)


@pytest.mark.parametrize("writes", [(True, True), (True, False), (False, True), (False, False)])
def test_all_handles_of_a_removed_file_that_were_opened_around_its_rename_go_on(
    place: Path, writes: tuple[bool, bool]
) -> None:
    first, second = writes
    opens: Script = [("open", "a", 1, first, False), ("rename", "a", "b"), ("open", "b", 2, second, False)]
    check(place, [*opens, ("unlink", "b")])


@pytest.mark.parametrize("function", ["outlive", "resumed_row", "pin", "write_pinned", "_make_pending"])
def test_a_kill_at_the_first_change_of_a_file_leaves_its_inode_and_its_mode(
    place: Path, function: str
) -> None:
    check(
        place,
        [("chmod", "a", 0o600), ("open", "a", 1, False, False), ("die in", function), ("truncate", "a", 2)],
    )


@pytest.mark.parametrize("again", ["", "give", "_make_pending", "forget_local"])
def test_a_kill_between_an_upload_and_the_removal_of_its_row_leaves_the_inode_and_the_mode(
    place: Path, again: str
) -> None:
    lives: list[Script] = [[("save", "c", b"data"), ("pause", 0.01), ("chmod", "c", 0o600)]]
    if again:
        lives.append([("die at the start in", again)])
    check(place, *lives)


@pytest.mark.parametrize("function", ["_record_copy", "_switch_to_copy", "put"])
@pytest.mark.parametrize("outlives", [True, False])
def test_a_kill_amid_the_renaming_of_a_directory_leaves_the_times_of_its_files(
    place: Path, function: str, outlives: bool
) -> None:
    times: Script = [("utimens", "d/x", 10**18), ("chmod", "d/x", 0o600)]
    check(
        place,
        [*times, ("die in", function), ("movedir", "d", "e")],
        directories=True,
        outlives=outlives,
        attributes=True,
    )


@pytest.mark.parametrize("function", ["copy_comes", "note_removed", "_moved"])
@pytest.mark.parametrize("older", [True, False])
def test_a_file_that_a_rename_was_to_replace_keeps_its_name_alone(
    place: Path, function: str, older: bool
) -> None:
    """The daemon dies before, behind the copy, and when the journal knows of it. Then the file is renamed."""
    name = "d/x" if older else "c"
    check(
        place,
        [("save", name, b"to be replaced"), ("die in", function), ("rename", "a", name)],
        [("rename", name, "b")],
        outlives=False,
        delay_s=100.0,
        directories=older,
    )


@pytest.mark.parametrize("seed", [4, 7, 8])  # with these the origin takes its time for the upload
def test_a_kill_amid_a_removal_that_has_waited_for_an_upload_leaves_the_mode(place: Path, seed: int) -> None:
    saves: Script = [("save", "c", b"data"), ("chmod", "c", 0o600), ("pause", 0.001)]
    check(place, [*saves, ("die in", "leaves"), ("unlink", "c")], seed=seed, quick=False)


@pytest.mark.parametrize("function", ["written", "write_answer", "lose_name"])
@pytest.mark.parametrize("again", ["", "found", "_look_for_change"])
def test_a_file_that_a_removal_has_deleted_can_be_written_after_a_kill(
    place: Path, function: str, again: str
) -> None:
    lives: list[Script] = [[("open", "a", 1, True, False), ("die in", function), ("unlink", "a")]]
    if again:
        lives.append([("die at the start in", again)])
    check(place, *lives, [("write", 1, 0, b"more"), ("read", 1)], outlives=True)


def test_a_removed_file_that_two_handles_have_open_does_not_take_the_place_of_the_next_one(
    place: Path,
) -> None:
    opens: Script = [("open", "a", 1, True, False), ("open", "a", 2, True, False)]
    check(
        place,
        [*opens, ("unlink", "a"), ("open", "a", 3, True, False), ("write", 3, 0, b"next")],
        [("rename", "d/x", "a"), ("check",), ("write", 3, 0, b"more")],
    )


ADOPTED: Script = [
    ("save", "c", bytes(300_000)),
    ("pause", 0.2),
    ("open", "c", 1, True, False),
    ("pause", 1.0),
]
"""`c` is opened while the cache adopts its file, so the dirty file stays, and has no staging file."""


@pytest.mark.parametrize("function", ["moved", "look", "copy", "copied", "keep_bytes", "moves"])
@pytest.mark.parametrize("over", ["b", "a"])
def test_an_open_file_that_the_cache_has_adopted_keeps_its_inode_after_a_kill_amid_its_rename(
    place: Path, function: str, over: str
) -> None:
    check(place, [*ADOPTED, ("die in", function), ("rename", "c", over)], writeback=False, adopts_s=0.5)


@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("function", [("has_promised", 3), ("copied",), ("_moved",)])
def test_a_file_that_a_clean_one_was_to_replace_comes_back_after_a_kill_before_the_copy(
    place: Path, function: tuple[Any, ...], opens: bool
) -> None:
    adopted = ADOPTED if opens else ADOPTED[:2]
    check(
        place,
        [
            *adopted,
            ("open", "a", 2, True, False),
            ("write", 2, 0, b"not sent"),
            ("die in", *function),
            ("rename", "c", "a"),
        ],
        writeback=False,
        adopts_s=0.5,
    )


@pytest.mark.parametrize("function", ["copy_comes", "moved", "_moved", "moves", "_delete"])
@pytest.mark.parametrize("change", [("write", 1, 0, b"more"), ("ftruncate", 1, 4)])
def test_a_file_that_a_rename_has_replaced_can_be_written_after_a_kill_behind_the_copy(
    place: Path, function: str, change: Any
) -> None:
    """It was open for writing, and not changed yet."""
    check(
        place,
        [("open", "a", 1, True, False), ("die in", function), ("rename", "d/x", "a")],
        [change],
        directories=True,
    )


@pytest.mark.parametrize("function", ["moves", "_moved", "note_change", "lose_name", "switch"])
def test_a_file_that_an_uploaded_one_has_replaced_can_be_written_after_a_kill(
    place: Path, function: str
) -> None:
    """It was open for writing, and not changed yet. The cache has not adopted the other one."""
    replacing: Script = [("save", "c", b"content"), ("die in", function), ("rename", "c", "b")]
    check(
        place,
        [("save", "b", b"old"), ("pause", 1.0), ("open", "b", 1, True, False), *replacing],
        [("write", 1, 0, b"more"), ("read", 1)],
        writeback=False,
    )


@pytest.mark.parametrize("first", range(0, HISTORIES, IN_A_TEST))
def test_the_next_daemon_shows_what_a_local_disk_would(first: int) -> None:
    for seed in range(first, min(first + IN_A_TEST, HISTORIES)):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            found = run_lives(Path(place), seed, journal_fails=0.0)
        assert not found, found


@pytest.mark.parametrize("first", range(0, HISTORIES // 2, IN_A_TEST))
def test_processes_that_change_the_same_names_leave_nothing_behind(first: int) -> None:
    for seed in range(first, min(first + IN_A_TEST, HISTORIES // 2)):
        with tempfile.TemporaryDirectory(dir="/dev/shm") as place:
            found = run_lives(Path(place), seed, journal_fails=0.0, clients=3)
        assert not found, found


@pytest.mark.skipif("CACHEFS_KILLED_HISTORY" not in os.environ, reason="replays one")
@pytest.mark.parametrize("clients", [0, 3])
def test_replay(place: Path, clients: int) -> None:
    found = run_lives(place, int(os.environ["CACHEFS_KILLED_HISTORY"]), journal_fails=0.0, clients=clients)
    assert not found, found
