"""A node's id: made once, kept with its cache, replaced when it has to be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachefs.base import durable
from cachefs.peers.node import ID_FILE, fresh_id, node_id


def test_an_id_is_made_once_and_kept(tmp_path: Path) -> None:
    made = node_id(tmp_path)
    assert len(made) == 32 and node_id(tmp_path) == made
    assert os.listdir(tmp_path) == [ID_FILE]
    (tmp_path / "other").mkdir()
    assert node_id(tmp_path / "other") != made


def test_a_fresh_one_takes_its_place(tmp_path: Path) -> None:
    made = node_id(tmp_path)
    fresh = fresh_id(tmp_path)
    assert fresh != made and node_id(tmp_path) == fresh


@pytest.mark.parametrize("found", [b"", b"rubbish", b"\xff\xfe", b"0" * 31])
def test_what_is_no_id_is_replaced(tmp_path: Path, found: bytes) -> None:
    (tmp_path / ID_FILE).write_bytes(found)
    made = node_id(tmp_path)
    assert len(made) == 32 and node_id(tmp_path) == made


def test_a_crash_while_it_is_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = node_id(tmp_path)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(durable.os, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        fresh_id(tmp_path)
    monkeypatch.undo()
    assert node_id(tmp_path) == made


def test_where_nothing_can_be_written_it_is_for_this_life(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = tmp_path / "not there"
    assert node_id(nowhere) != node_id(nowhere)
    assert "cannot be kept" in caplog.text
