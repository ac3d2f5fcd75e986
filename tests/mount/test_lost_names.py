"""The database of names is cut short under a mount: it goes on, and loses nothing that was written."""

from __future__ import annotations

import os

import pytest

from tests.mount.conftest import BACKEND_CONTRACT, Bucket, Mounted
from tests.mount.mounts import eventually

pytestmark = [BACKEND_CONTRACT]


@pytest.mark.parametrize("length", [0, 8192])
def test_names_are_learnt_again(mounted: Mounted, bucket: Bucket, length: int) -> None:
    data = {f"d/{n}": bucket.put(f"d/{n}", 20_000 + n) for n in range(20)}
    mount = mounted(bucket, read_only=False, writeback=True, upload_delay="1h", metadata_ttl=1)
    mount.allowed.append("cut short")
    assert sorted(os.listdir(mount.path / "d")) == sorted(key[2:] for key in data)
    (mount.path / "d/unsent").write_bytes(b"u" * 200_000)
    inside = os.open(mount.path / "d", os.O_RDONLY | os.O_DIRECTORY)
    with (mount.path / "d/0").open("rb") as reader, (mount.path / "d/held").open("wb") as writer:
        writer.write(b"h" * 1000)
        os.truncate(mount.cache / "names/data.mdb", length)

        def whole() -> bool:
            try:
                return all((mount.path / key).read_bytes() == known for key, known in data.items())
            except OSError:
                return False

        eventually(whole, "every file is there again")
        assert mount.log().count("it will be learnt again") == 1
        wanted = {*(key[2:] for key in data), "unsent", "held"}
        assert set(os.listdir(mount.path / "d")) == wanted == set(os.listdir(inside))
        assert reader.read() == data["d/0"]
        writer.write(b"h" * 1000)
    os.close(inside)
    mount.stop()
    mount.start(upload_delay=None)
    assert (mount.path / "d/unsent").read_bytes() == b"u" * 200_000
    assert (mount.path / "d/held").read_bytes() == b"h" * 2000
    assert whole()
