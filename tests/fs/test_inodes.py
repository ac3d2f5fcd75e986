"""Numbers: none is given out twice, whatever a kill leaves of the rows that were on their way to the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachefs.base.behind import MOST_ROWS, WriteBehind
from cachefs.base.database import Database
from cachefs.fs import FORMAT, TABLES, inodes
from cachefs.fs.inodes import RESERVED, ROOT, Numbers


class Killed(WriteBehind):
    """What is written once it is `dead` does not come to the disk."""

    dead = False

    def write(self, *rows: object, **how: bool) -> None:
        if not self.dead:
            super().write(*rows, **how)  # type: ignore[arg-type]


def opened(path: Path) -> Killed:
    return Killed(Database(path, TABLES, version=FORMAT, fsync=False))


def test_numbers_do_not_come_again_after_a_kill(tmp_path: Path) -> None:
    seen: set[int] = set()
    for count in (1, 1000, RESERVED // 2 - 1):
        database = opened(tmp_path)
        numbers = Numbers(database)
        database.dead = True
        given = {numbers.next() for _ in range(count)}
        database.close()
        assert len(given) == count and not given & seen and min(given) > ROOT
        seen |= given


def test_the_next_reservation_is_on_the_disk_before_its_first_number_is_given_out(tmp_path: Path) -> None:
    assert MOST_ROWS < RESERVED // 2
    database = opened(tmp_path)
    numbers = Numbers(database)
    given = {numbers.next() for _ in range(RESERVED // 2 + 2)}
    database.flush()
    database.dead = True
    given |= {numbers.next() for _ in range(RESERVED)}
    database.close()
    database = opened(tmp_path)
    assert Numbers(database).next() not in given
    database.close()


def test_a_lost_database_begins_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inodes.secrets, "randbits", lambda bits: len(asked.append(bits) or asked) << 30)
    asked: list[int] = []
    first, second = opened(tmp_path / "a"), opened(tmp_path / "b")
    assert abs(Numbers(first).next() - Numbers(second).next()) == 1 << 30
    assert asked == [inodes.START_BITS] * 2 and inodes.START_BITS < 8 * inodes.NUMBER_BYTES - 1
    first.close()
    second.close()
