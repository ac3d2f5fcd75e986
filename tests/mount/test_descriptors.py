"""All descriptors of one file on one node show one content, whichever was opened first: a reader that was there before the
writer, in the same process and in another, sees what a local disk would show it, and their locks meet."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bench.lab.dataset import content
from tests.mount import forked
from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import Mount, eventually, in_python
from tests.mount.written import stored

MIB = 1 << 20
SIZE = 3 * MIB + 5

Opened = Callable[[str], Path]


@pytest.fixture(params=["durable", "writeback"])
def mount(request: pytest.FixtureRequest, mounted: Mounted, bucket: Bucket) -> Mount:
    """Without RAM, so that a file that was read is whole on disk, and opened in passthrough where there is that."""
    return mounted(
        bucket, read_only=False, ram=0, writeback=request.param == "writeback", upload_delay="50ms"
    )


def settle(mount: Mount, backend: str, *names: str) -> None:
    """Have the files whole in the cache: the next open is in passthrough, where the backend has that."""
    for name in names:
        (mount.path / name).read_bytes()
    if backend == "native":
        eventually(lambda: all(_in_passthrough(mount, name) for name in names), "they are whole")


def _in_passthrough(mount: Mount, name: str) -> bool:
    before = mount.metrics()["passthrough_opens"]
    os.close(os.open(mount.path / name, os.O_RDONLY))
    return mount.metrics()["passthrough_opens"] > before


def flushed(mount: Mount) -> None:
    done = mount.cli("flush", mount.path)
    assert done.returncode == 0, done.stderr


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"appended")


def patch(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, b"patched", 4096 - 3)
    os.close(fd)


def patch_mapped(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[4096 - 3 : 4096 + 3] = b"mapped"


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


def ftruncate(path: Path) -> None:
    with path.open("r+b") as file:
        os.ftruncate(file.fileno(), 5001)


def lengthen(path: Path) -> None:
    os.truncate(path, SIZE + 4096)


def empty_and_write(path: Path) -> None:
    with path.open("wb") as file:
        file.write(content("new", 6000))


CHANGES = [append, patch, patch_mapped, truncate, ftruncate, lengthen, empty_and_write]


def by_this_process(change: Callable[[Path], None], path: Path) -> None:
    change(path)


def by_another(change: Callable[[Path], None], path: Path) -> None:
    code = "import sys; from pathlib import Path; from tests.mount import test_descriptors\n"
    code += "getattr(test_descriptors, sys.argv[1])(Path(sys.argv[2]))"
    in_python(code, change.__name__, path, cwd=Path(__file__).parents[2])


class TestAReaderThatWasThereBefore:
    @pytest.mark.parametrize("writer", [by_this_process, by_another])
    @pytest.mark.parametrize("change", CHANGES)
    def test_sees_the_change(
        self,
        mount: Mount,
        bucket: Bucket,
        backend: str,
        tmp_path: Path,
        change: Callable[[Path], None],
        writer: Callable[[Callable[[Path], None], Path], None],
    ) -> None:
        path, there = mount.path / "f", tmp_path / "f"
        there.write_bytes(bucket.put("f", SIZE))
        settle(mount, backend, "f")
        reader = os.open(path, os.O_RDONLY)
        number = os.fstat(reader).st_ino
        with mmap.mmap(reader, 0, access=mmap.ACCESS_READ) as mapping:
            assert mapping[:] == there.read_bytes()
            writer(change, path)
            change(there)
            wanted = there.read_bytes()
            found = os.fstat(reader)
            assert (found.st_size, found.st_ino) == (len(wanted), number)
            assert os.stat(path).st_ino == number
            assert os.pread(reader, SIZE + MIB, 0) == wanted
            assert os.read(reader, SIZE + MIB) == wanted
            assert mapping[: min(SIZE, len(wanted))] == wanted[:SIZE]
            assert path.read_bytes() == wanted
        flushed(mount)
        assert stored(bucket, "f") == wanted
        assert os.pread(reader, SIZE + MIB, 0) == wanted
        os.close(reader)
        eventually(lambda: path.read_bytes() == wanted, "it is settled")
        mount.drop_kernel_pages()
        assert path.read_bytes() == wanted
        assert mount.metrics()["checksum_failures"] == 0
