"""The database of names is cut short under a mount: it goes on, and loses nothing that was written."""

from __future__ import annotations

import errno
import os
import signal

import lmdb
import pytest

from tests.mount.conftest import BACKEND_CONTRACT, Bucket, Mounted
from tests.mount.mounts import Mount, alive, eventually


def quiet(mount: Mount, name: bytes) -> bool:
    """Whether the database has the last name that was written, so that no transaction is under way any more."""
    with lmdb.open(str(mount.cache / "names"), max_dbs=10, readonly=True, lock=False) as env:
        table = env.open_db(b"local", create=False)
        with env.begin(db=table) as reading:
            return any(key.endswith(name) for key in reading.cursor().iternext(values=False))


def cut_at_rest(mount: Mount, length: int) -> None:
    """Between two transactions: each looks at the file's length first."""
    eventually(lambda: quiet(mount, b"held"), "the names are written")
    os.truncate(mount.cache / "names/data.mdb", length)


def cut_in_a_transaction(mount: Mount, length: int) -> None:
    """The kernel ends a process by SIGBUS that touches a page behind the end of a mapped file. Here the signal is sent,
    because no transaction takes long enough to be met."""
    daemon, mount.killed = mount.pid, True
    os.kill(daemon, signal.SIGSTOP)
    os.truncate(mount.cache / "names/data.mdb", length)
    os.kill(daemon, signal.SIGBUS)
    os.kill(daemon, signal.SIGCONT)
    eventually(lambda: not alive(daemon), "the daemon has ended")


@BACKEND_CONTRACT
@pytest.mark.parametrize("length", [0, pytest.param(8192, marks=pytest.mark.long)])
def test_names_are_learnt_again(mounted: Mounted, bucket: Bucket, length: int) -> None:
    check(mounted, bucket, length, in_a_transaction=False)


@pytest.mark.long
@pytest.mark.backends("native")
def test_the_next_daemon_goes_on_where_one_ends_of_that(mounted: Mounted, bucket: Bucket) -> None:
    check(mounted, bucket, 0, in_a_transaction=True)


def check(mounted: Mounted, bucket: Bucket, length: int, *, in_a_transaction: bool) -> None:
    data = {f"d/{n}": bucket.put(f"d/{n}", 20_000 + n) for n in range(20)}
    mount = mounted(
        bucket,
        read_only=False,
        writeback=True,
        upload_delay="1h",
        metadata_ttl=1,
        restart=in_a_transaction,
    )
    mount.allowed += ["cut short"] if not in_a_transaction else ["has died", "dropping the database"]
    assert sorted(os.listdir(mount.path / "d")) == sorted(key[2:] for key in data)
    (mount.path / "d/unsent").write_bytes(b"u" * 200_000)
    inside = os.open(mount.path / "d", os.O_RDONLY | os.O_DIRECTORY)
    with (mount.path / "d/0").open("rb") as reader, (mount.path / "d/held").open("wb") as writer:
        writer.write(b"h" * 1000)
        (cut_in_a_transaction if in_a_transaction else cut_at_rest)(mount, length)

        def whole() -> bool:
            try:
                return all((mount.path / key).read_bytes() == known for key, known in data.items())
            except OSError:
                return False

        eventually(whole, "every file is there again")
        assert mount.log().count("it will be learnt again") == 1
        wanted = {*(key[2:] for key in data), "unsent", "held"}
        assert set(os.listdir(mount.path / "d")) == wanted
        if in_a_transaction:  # the next daemon does not know the number of a directory that was open
            with pytest.raises(OSError) as caught:
                os.listdir(inside)
            assert caught.value.errno == errno.ESTALE
        else:
            assert set(os.listdir(inside)) == wanted
        assert reader.read() == data["d/0"]
        writer.write(b"h" * 1000)
    os.close(inside)
    mount.stop()
    mount.start(upload_delay=None)
    assert (mount.path / "d/unsent").read_bytes() == b"u" * 200_000
    assert (mount.path / "d/held").read_bytes() == b"h" * 2000
    assert whole()
