"""What is known of a passed descriptor before it is served."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cachefs.base.linux import Mount
from cachefs.fuse import connection


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/dev/fd/0", 0),
        ("/dev/fd/27", 27),
        ("/dev/fd/", None),
        ("/dev/fd/-1", None),
        ("/dev/fd/1/x", None),
        ("/dev/fd/\u0663", None),
        ("/dev/fd/9999999999", None),  # no int of C's
        ("/dev/fuse", None),
        ("/mnt/dev/fd/3", None),
    ],
)
def test_its_name(path: str, number: int | None) -> None:
    assert connection.descriptor(Path(path)) == number


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("rw,user_id=7,group_id=7", ""),
        ("rw,user_id=7,group_id=7,default_permissions", ""),
        ("rw,user_id=0,group_id=0,default_permissions,allow_other", ""),
        ("rw,user_id=7,group_id=7,allow_other", "without default_permissions"),
        ("rw,user_id=0,group_id=0,default_permissions", "for user 0 alone: user 7"),
    ],
)
def test_remarks_on_options_that_are_probably_mistakes(options: str, says: str) -> None:
    mount = Mount("0:54", "/", "/mnt/data", "fuse.cachefs", "store", tuple(options.split(",")))
    remarks = connection.remarks(mount, uid=7)
    assert len(remarks) == bool(says)
    assert says in "".join(remarks)


def test_where_a_part_of_it_is_mounted_is_not_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        ("0:9", "/", "/other"),
        ("0:54", "/train", "/part"),
        ("0:54", "/", "/whole"),
        ("0:54", "/", "/again"),
    ]
    found = [Mount(device, root, path, "fuse.cachefs", "store", ()) for device, root, path in places]
    monkeypatch.setattr(connection, "mounts", lambda: found)
    monkeypatch.setattr(connection, "device_of", lambda fd: "0:54")
    mount = connection.mount_of(3)
    assert mount is not None
    assert mount.path == "/whole"


def test_a_descriptor_without_a_connection_is_mounted_nowhere() -> None:
    with open(os.devnull) as file:
        assert connection.device_of(file.fileno()) == ""
        assert connection.mount_of(file.fileno()) is None
