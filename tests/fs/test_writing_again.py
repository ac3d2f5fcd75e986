"""A file that was removed while it was open, and another of its name: they have nothing in common, whatever they hold."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from cachefs.base.errors import CacheUnusable, ObjectChanged
from cachefs.fs.tree import Volume
from tests.fs import bucket as buckets
from tests.fs.bucket import WritableBucket
from tests.fs.mount import Mount, mounted
from tests.fs.writers import MemoryWriter

RW: dict[str, Any] = {"file_mode": 0o644, "dir_mode": 0o755}


@pytest.fixture
def by_content(monkeypatch: pytest.MonkeyPatch) -> None:
    """Etags are of the content alone, as S3 makes them."""
    etag_of = buckets.etag_of
    monkeypatch.setattr(buckets, "etag_of", lambda what: etag_of(what.partition(" ")[2]))


async def replaced(mount: Mount, how: str) -> None:
    """Another file of the same content is at `d/f`."""
    if how == "rename":
        await mount.write("d/g", b"same")
        await mount.rename("d/g", "d/f")
    else:
        await mount.unlink("d/f")
        await mount.write("d/f", b"same")


@pytest.mark.usefixtures("by_content")
@pytest.mark.parametrize("how", ["unlink", "rename"])
@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_RDONLY])
async def test_the_next_file_of_that_name_and_content_is_another_one(how: str, flags: int) -> None:
    bucket = WritableBucket(["d/x"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.write("d/f", b"same")
        etag = bucket.objects["d/f"].etag
        old = await mount.open("d/f", flags)
        if flags == os.O_RDWR:
            await mount.fs.write(old, 0, b"same")
            await mount.fs.fsync(old)
        ino = await mount.ino("d/f")
        await replaced(mount, how)
        assert bucket.objects["d/f"].etag == etag and await mount.ino("d/f") != ino
        await mount.write("d/f", b"other", os.O_WRONLY)
        assert bucket.content("d/f") == b"other" == await mount.read("d/f")
        if flags == os.O_RDWR:
            assert await mount.pread(old) == b"same"
            await mount.fs.write(old, 0, b"mine")
            assert await mount.pread(old) == b"mine" and await mount.read("d/f") == b"other"
        await mount.close_file(old)
        assert bucket.content("d/f") == b"other" == await mount.read("d/f")
        await mount.write("d/f", b"third", os.O_WRONLY)
        assert bucket.content("d/f") == b"third" == await mount.read("d/f")


@pytest.mark.usefixtures("by_content")
async def test_and_so_is_the_one_after_that() -> None:
    """Removed ones of the same version may be open under several numbers."""
    bucket = WritableBucket(["d/x"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        handles, numbers = [], []
        for _ in range(4):
            await mount.write("d/f", b"same")
            handles.append(await mount.open("d/f", os.O_RDWR))
            numbers.append(await mount.ino("d/f"))
            await mount.unlink("d/f")
        assert len(set(numbers)) == 4
        for handle in handles:
            await mount.close_file(handle)
        await mount.write("d/f", b"last")
        assert bucket.content("d/f") == b"last" == await mount.read("d/f")


async def test_one_that_moves_away_and_back_is_the_same_one() -> None:
    bucket = WritableBucket(["d/f", "d/x"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        ino = await mount.ino("d/f")
        fh = await mount.open("d/f")
        await mount.rename("d/f", "d/g")
        await mount.rename("d/g", "d/f")
        assert await mount.ino("d/f") == ino
        await mount.close_file(fh)
        assert await mount.ino("d/f") == ino


async def test_a_dirty_file_that_cannot_be_opened_leaves_no_handle() -> None:
    class Failing(MemoryWriter):
        fails = False

        def open(self, dirty_file: Any) -> None:
            if self.fails:
                raise CacheUnusable("gone")
            super().open(dirty_file)

    bucket, writer = WritableBucket(["d/x"]), Failing(writeback=True)
    async with mounted(bucket, writer=writer, **RW) as mount:
        await mount.write("d/f", b"abc")
        writer.fails = True
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            with pytest.raises(CacheUnusable):
                await mount.open("d/f", flags)
        assert len(mount.fs._files) == 0 and writer.pending()[0].handles == 0
        writer.fails = False
        await mount.write("d/f", b"XYZ", os.O_WRONLY)
        assert await mount.read("d/f") == b"XYZ"
        assert len(mount.fs._files) == 0 and writer.pending()[0].handles == 0


@pytest.mark.parametrize("order", [1, -1])
async def test_what_an_earlier_run_left_is_shown_at_the_prefix_that_it_was_written_at(
    tmp_path: Path, order: int
) -> None:
    """Two prefixes of one bucket, one within the other: the inner one has its own dirty files."""
    outer, inner = WritableBucket(["a/1"]), WritableBucket(["a/b/2"], prefix="a/b/")
    volumes: Any = [Volume("outer", outer), Volume("inner", inner)][::order]  # type: ignore[arg-type]
    writer = MemoryWriter(writeback=True)
    async with mounted(outer, volumes=volumes, path=tmp_path / "1", writer=writer, **RW) as mount:
        await mount.write("inner/f", b"abc")
    again = MemoryWriter(writeback=True)
    again.dirty_files = writer.pending()
    async with mounted(outer, volumes=volumes, path=tmp_path / "2", writer=again, **RW) as mount:
        await mount.fs.recover()
        assert await mount.read("inner/f") == b"abc"
        assert await mount.stat("outer/a/b/f") is None


async def test_a_file_whose_rename_a_kill_has_cut_short_has_not_the_inode_of_the_file_that_it_replaced(
    tmp_path: Path,
) -> None:
    """Its row in the journal has the new key, and the tree has both names as they were."""
    bucket, writer = WritableBucket(["d/f"]), MemoryWriter(writeback=True)
    async with mounted(bucket, path=tmp_path, writer=writer, **RW) as mount:
        await mount.write("d/g", b"new")
        old, new = await mount.ino("d/f"), await mount.ino("d/g")
    again = MemoryWriter(writeback=True)
    again.dirty_files = writer.pending()
    again.dirty_files[0].key = "d/f"
    async with mounted(bucket, path=tmp_path, writer=again, **RW) as mount:
        await mount.fs.recover()
        assert await mount.ino("d/f") == new != old
        assert await mount.read("d/f") == b"new" and await mount.stat("d/g") is None
        with pytest.raises(ObjectChanged):
            await mount.fs.getattr(old)
