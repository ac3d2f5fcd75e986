"""A node's id: made once, kept with its cache, replaced when it has to be."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.base import durable
from cachefs.base.metrics import Metrics
from cachefs.peers.membership import COPIED
from cachefs.peers.node import ID_FILE, PeerNode, fresh_id, node_id
from cachefs.peers.settings import settings
from cachefs.peers.wire import Address, Handshake, PeerFailed
from tests.peers.test_settings import ALONE


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


def test_a_copy_that_does_not_answer_at_first_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        config = replace(ALONE, peers="static:127.0.0.1:7070,127.0.0.1:7071", peer_listen="127.0.0.1:7070")
        chosen = settings(config)
        assert chosen is not None
        node = PeerNode(config, chosen, chosen.listen, ["s3://b"], Metrics(), tmp_path)
        asked = 0

        async def handshake(address: Address) -> Handshake:
            nonlocal asked
            asked += 1
            if asked < 3:
                raise PeerFailed("timeout", f"{address} was silent for too long")
            return replace(node._handshake, life="")  # the lowest, which keeps the id

        monkeypatch.setattr(node._client, "handshake", handshake)
        node._membership.incompatible = {Address("127.0.0.1", 7071): COPIED}
        node._changed()
        with trio.fail_after(60):
            await node._id_lost()
        assert asked == 3

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
