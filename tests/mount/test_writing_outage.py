"""Writing while the store does not answer, or refuses: what waits for it, what does not, and what is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, eventually
from tests.mount.test_writing import refused
from tests.mount.written import keys, stored

pytestmark = ONE_BACKEND

OF_THE_STORE: dict[str, Callable[[Path], object]] = {
    "mkdir": lambda place: (place / "new").mkdir(),
    "rm": lambda place: (place / "f").unlink(),
    "rmdir": lambda place: (place / "empty").rmdir(),
    "mv": lambda place: (place / "f").rename(place / "g"),
}
"""Names that go to the store at once, with `--writeback` too."""


@pytest.fixture
def mount(mounted: Mounted, bucket: Bucket) -> Mount:
    bucket.put("f", b"stored")
    bucket.put("empty/", b"")
    mount = mounted(bucket, read_only=False, writeback=True, metadata_ttl="1h")
    mount.allowed.append(r".*")
    assert sorted(os.listdir(mount.path)) == ["empty", "f"]
    assert os.listdir(mount.path / "empty") == []
    return mount


@pytest.mark.parametrize(
    ("action", "number", "call"),
    [
        *(("403", errno.EACCES, call) for call in OF_THE_STORE),
        *(pytest.param("reset", errno.EIO, call, marks=pytest.mark.long) for call in OF_THE_STORE),
    ],
)
def test_names_are_the_stores_and_fail_with_it(
    mount: Mount, bucket: Bucket, call: str, action: str, number: int
) -> None:
    bucket.store.fault(action, kind="*")
    with refused(number):
        OF_THE_STORE[call](mount.path)
    bucket.store.clear_faults()
    assert keys(bucket) == ["empty/", "f"]
    # On a busy machine it was out for long enough to be taken for gone.
    eventually(
        lambda: not any("has not answered" in line for line in mount.ask("status")["warnings"]), "it is back"
    )
    mount.refresh()
    OF_THE_STORE[call](mount.path)
    assert keys(bucket) != ["empty/", "f"]


def test_what_is_not_sent_yet_needs_no_store(mount: Mount, bucket: Bucket) -> None:
    bucket.store.fault("reset", kind="*")
    for name in ("one", "two", "three"):
        (mount.path / name).write_bytes(name.encode())
    (mount.path / "one").rename(mount.path / "moved")
    (mount.path / "two").unlink()
    bucket.store.clear_faults()
    assert mount.cli("flush", mount.path).returncode == 0
    assert keys(bucket) == ["empty/", "f", "moved", "three"]
    assert stored(bucket, "moved") == b"one"
