"""What a killed daemon leaves in a `file:` origin is never shown, and is removed once no client can be writing it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cachefs.base.errors import NotFound, Transient
from cachefs.origin import local
from cachefs.origin.fsspec_client import FsspecClient
from cachefs.origin.local import LocalClient
from cachefs.origin.protocol import BlockingCall, Preconditions, blocking_call
from tests.origin.test_local_versions import Given

LEFT = ".cachefs-0123456789abcdef"


@pytest.fixture
def client(tmp_path: Path) -> LocalClient:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / LEFT).write_bytes(b"half")
    return LocalClient(str(tmp_path))


def put(client: LocalClient) -> None:
    client.put("new", Given(b"1"), Preconditions())


@pytest.mark.parametrize("key", [f"d/{LEFT}", f"d/{LEFT}/", ".cachefs-uploads/"])
def test_it_is_no_name(client: LocalClient, key: str) -> None:
    client.begin("x", Preconditions())
    assert [info.key for info in client.list_page("d/", None, 10).objects] == ["d/"]
    for look in (client.head, lambda key: list(client.read(key, '""', 0, 4, True)), client.look):
        with pytest.raises(NotFound):
            look(key)
    if key.endswith("/"):
        with pytest.raises(NotFound):
            client.list_page(key, None, 10)


def test_a_file_goes_with_the_next_save_behind_a_listing(
    client: LocalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "d" / LEFT
    os.utime(left, (0, 0))  # as a copy of an old file has it
    (users := tmp_path / "d" / ".cachefs-notes").touch()
    for age_s, there in ((local.KILLED_S, True), (0.0, False)):
        monkeypatch.setattr(local, "KILLED_S", age_s)
        put(client)
        assert left.exists(), "no listing has met it"
        client.list_page("d/", None, 10)
        assert left.exists(), "a listing changes nothing"
        put(client)
        assert left.exists() == there
    assert users.exists(), "not ours"


def test_an_upload_in_parts_goes_a_week_after_its_last_part(
    client: LocalClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "KILLED_S", 0.0)
    upload = client.begin("x", Preconditions())
    client.put_part("x", upload, 1, Given(b"part"))
    for age_s, there in ((local.FORGOTTEN_S, True), (0.0, False)):
        monkeypatch.setattr(local, "FORGOTTEN_S", age_s)
        client.list_page("", None, 10)
        put(client)
        assert (client._uploads / upload).exists() == there
    assert not client._uploads.exists()


def test_a_directory_with_nothing_else_in_it_can_be_removed(
    client: LocalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.delete("d/")
    assert (tmp_path / "d" / LEFT).exists(), "another client may be writing it"
    monkeypatch.setattr(local, "KILLED_S", 0.0)
    client.delete("d/")
    assert not (tmp_path / "d").exists()


def test_what_is_remembered_is_bounded(client: LocalClient, tmp_path: Path) -> None:
    for number in range(local.MOST_LEFT + 10):
        (tmp_path / "d" / f".cachefs-{number:016x}").touch()
    client.list_page("d/", None, 10)
    assert len(client._left) == local.MOST_LEFT


@pytest.mark.parametrize("change", ["put", "copy", "delete"])
@pytest.mark.parametrize("kind", ["directory", "fsspec"])
def test_a_call_that_was_abandoned_changes_nothing(tmp_path: Path, kind: str, change: str) -> None:
    """Such as one that was waiting for a disk: its caller may have written since."""
    import fsspec

    (tmp_path / "old").write_bytes(b"1")
    opened = fsspec.filesystem("file")
    client: Any = LocalClient(str(tmp_path))
    if kind == "fsspec":
        client = FsspecClient(lambda: opened, root=str(tmp_path), label="file://")
    changes: dict[str, Callable[[], object]] = {
        "put": lambda: client.put("old", Given(b"2"), Preconditions()),
        "copy": lambda: client.copy("old", "new", None),
        "delete": lambda: client.delete("old"),
    }
    token = blocking_call.set(BlockingCall(abandoned=True))
    try:
        with pytest.raises(Transient):
            changes[change]()
    finally:
        blocking_call.reset(token)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("old", b"1")]
