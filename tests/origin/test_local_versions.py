"""Versions of files in a directory: an edit makes a new one, whatever it does to mtime; our own renames do not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.base.errors import ObjectChanged
from cachefs.origin.local import LocalClient
from cachefs.origin.protocol import Preconditions, Written

KEY = "d/f"


class Given:
    """A body of these bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def chunks(self) -> Iterator[bytes]:
        return iter([self.data])

    def look(self) -> Iterator[bytes]:
        return self.chunks()


@pytest.fixture
def client(tmp_path: Path) -> LocalClient:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_bytes(b"old bytes")
    return LocalClient(str(tmp_path))


def later(path: Path) -> None:
    """Wait until a change of this file gets another ctime: on some file systems clocks tick every 4 ms."""
    before = path.stat().st_ctime_ns
    until = time.monotonic() + 30
    while path.stat().st_ctime_ns == before:
        assert time.monotonic() < until
        os.chmod(path, path.stat().st_mode)


def edit_in_place(path: Path, data: bytes) -> None:
    """Other bytes of the same number, with the old mtime."""
    about = path.stat()
    later(path)
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (about.st_size, about.st_mtime_ns)


def test_an_edit_that_sets_mtime_back_makes_a_new_version(client: LocalClient, tmp_path: Path) -> None:
    before = client.head(KEY)
    edit_in_place(tmp_path / KEY, b"new bytes")
    after = client.head(KEY)
    assert (after.size, after.mtime_ns) == (before.size, before.mtime_ns)
    assert after.etag != before.etag
    with pytest.raises(ObjectChanged):
        list(client.read(KEY, before.etag, 0, before.size, True))
    assert b"".join(client.read(KEY, after.etag, 0, after.size, True)) == b"new bytes"


def test_a_file_put_back_from_a_copy_is_a_new_version(client: LocalClient, tmp_path: Path) -> None:
    """As `rsync -t` and `cp -p` do it over an existing file: size and mtime are those of another version."""
    path = tmp_path / KEY
    first = client.head(KEY)
    edit_in_place(path, b"new bytes")
    edit_in_place(path, b"old bytes")
    assert client.head(KEY).etag != first.etag


def test_a_hard_link_has_the_bytes_of_its_file(client: LocalClient, tmp_path: Path) -> None:
    """A link sets ctime: one more version of the same bytes, and an edit through either name shows under both."""
    os.link(tmp_path / KEY, tmp_path / "link")
    for key in (KEY, "link"):
        about = client.head(key)
        assert b"".join(client.read(key, about.etag, 0, about.size, True)) == b"old bytes"
    before = client.head("link").etag
    edit_in_place(tmp_path / KEY, b"new bytes")
    assert client.head("link").etag != before
    assert client.head("link").etag == client.head(KEY).etag


def _upload(client: LocalClient) -> Written:
    name = client.writer.begin("to", Preconditions())
    part = client.writer.put_part("to", name, 1, Given(b"part"))
    return client.writer.complete("to", name, {1: part}, Preconditions())


WAYS: dict[str, Callable[[LocalClient], Written]] = {
    "put": lambda client: client.writer.put("to", Given(b"x"), Preconditions()),
    "put a new one": lambda client: client.writer.put("to", Given(b"x"), Preconditions(if_absent=True)),
    "copy": lambda client: client.writer.copy(KEY, "to", client.head(KEY).etag),
    "upload": _upload,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_write_returns_is_the_version_that_is_there(client: LocalClient, way: str) -> None:
    """Else what was written or renamed here would be fetched again."""
    made = WAYS[way](client)
    found = client.head("to")
    assert (found.etag, found.mtime_ns) == (made.etag, made.mtime_ns)


def test_a_file_that_is_edited_while_it_is_put_is_not_the_one_that_was_put(
    client: LocalClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def replace_and_edit(fresh: str, path: str) -> None:
        replace(fresh, path)
        Path(path).write_bytes(b"another's")

    monkeypatch.setattr(os, "replace", replace_and_edit)
    made = client.writer.put("to", Given(b"x"), Preconditions())
    assert client.head("to").etag != made.etag
