"""What changes cost at the store, and what is kept here because the store has no place for it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.fs.bucket import WritableBucket
from tests.fs.mount import ROOT, Mount, mounted
from tests.fs.writers import MemoryWriter

RW: dict[str, Any] = {"file_mode": 0o644, "dir_mode": 0o755}
STRICT: dict[str, Any] = {"metadata_ttl": 0.0, "negative_ttl": 0.0, "revalidate_at_open": True}


async def create(mount: Mount) -> None:
    await mount.write("d/new", b"abc")


async def create_and_read(mount: Mount) -> None:
    await mount.write("d/new", b"abc")
    assert await mount.read("d/new") == b"abc"
    assert await mount.stat("d/new")


async def touch(mount: Mount) -> None:
    await mount.write("d/f", b"", os.O_WRONLY)


async def truncate_to_its_size(mount: Mount) -> None:
    ino = await mount.ino("d/f")
    await mount.fs.setattr(ino, size=10)
    fh = await mount.open("d/f", os.O_WRONLY)
    await mount.fs.setattr(ino, size=10, fh=fh)
    await mount.close_file(fh)


async def truncate_to_the_size_that_was_just_uploaded(mount: Mount) -> None:
    mount.fs._writing._writer.settles = False  # type: ignore[union-attr]
    await mount.write("d/f", b"abc")
    await mount.fs.setattr(await mount.ino("d/f"), size=3)


async def create_and_remove_unseen(mount: Mount) -> None:
    fh = await mount.open("d/new", os.O_RDWR | os.O_CREAT)
    await mount.fs.write(fh, 0, b"abc")
    await mount.unlink("d/new")
    await mount.close_file(fh)


async def two_in_a_new_directory(mount: Mount) -> None:
    await mount.mkdir("d/new")
    await mount.write("d/new/1", b"abc")
    await mount.write("d/new/2", b"abc")
    assert len(await mount.names("d/new")) == 2


async def remove_tree(mount: Mount) -> None:
    for name in await mount.names("t"):
        await mount.unlink(f"t/{name.decode()}")
    await mount.rmdir("t")


async def rename_then_open_writer(mount: Mount) -> None:
    fh = await mount.open("d/new", os.O_RDWR | os.O_CREAT)
    await mount.rename("d/new", "d/f")
    await mount.fs.write(fh, 0, b"abc")
    await mount.close_file(fh)


COSTS: list[tuple[Any, tuple[int, int], tuple[int, int, int]]] = [
    # (LIST, HEAD), (PUT, COPY, DELETE)
    (create, (0, 0), (1, 0, 0)),
    (create_and_read, (0, 0), (1, 0, 0)),
    (touch, (0, 0), (0, 0, 0)),
    (truncate_to_its_size, (0, 0), (0, 0, 0)),
    (truncate_to_the_size_that_was_just_uploaded, (0, 0), (1, 0, 0)),
    (lambda mount: mount.write("d/f", b"abc"), (0, 0), (1, 0, 0)),
    (lambda mount: mount.write("d/f", b"abc", os.O_WRONLY), (0, 0), (1, 0, 0)),
    (lambda mount: mount.write("d/f", b"", os.O_WRONLY | os.O_TRUNC), (0, 0), (1, 0, 0)),
    (create_and_remove_unseen, (0, 0), (0, 0, 0)),
    (lambda mount: mount.unlink("d/f"), (0, 0), (0, 0, 1)),
    (lambda mount: mount.unlink("only/f"), (0, 0), (1, 0, 1)),  # the directory's marker
    (lambda mount: mount.unlink("marked/f"), (0, 0), (0, 0, 1)),
    (lambda mount: mount.rename("d/f", "d/z"), (0, 0), (0, 1, 1)),
    (lambda mount: mount.rename("d/f", "d/g"), (0, 0), (0, 1, 1)),
    (lambda mount: mount.rename("d/f", "t/f"), (0, 0), (0, 1, 1)),
    (rename_then_open_writer, (0, 0), (1, 0, 0)),
    (lambda mount: mount.mkdir("d/new"), (0, 0), (1, 0, 0)),
    (two_in_a_new_directory, (0, 0), (3, 0, 0)),
    (lambda mount: mount.rmdir("empty"), (1, 0), (0, 0, 1)),
    (lambda mount: mount.rmdir("above/empty"), (1, 0), (1, 0, 1)),  # the marker of the directory above
    (remove_tree, (1, 0), (1, 0, 4)),
    (lambda mount: mount.rename("t", "u"), (2, 0), (0, 3, 3)),
]


@pytest.mark.parametrize(("call", "asked", "written"), COSTS, ids=lambda v: getattr(v, "__name__", str(v)))
async def test_costs_in_a_known_tree(
    call: Any, asked: tuple[int, int], written: tuple[int, int, int]
) -> None:
    keys = ["d/f", "d/g", "only/f", "marked/", "marked/f", "empty/", "above/empty/"]
    keys += [f"t/{i}" for i in range(3)]
    bucket = WritableBucket(keys)
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        await mount.walk()
        bucket.reset()
        await call(mount)
        assert (bucket.counts, bucket.writes) == (asked, written)
        async with mounted(bucket) as other:
            assert await other.walk() == await mount.walk()


async def test_a_thousand_files_in_a_directory_that_was_never_listed() -> None:
    bucket = WritableBucket(["d/x"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        for i in range(1000):
            await mount.write(f"d/{i:04}", b"abc")
        assert bucket.counts == (2, 0) and bucket.writes == (1000, 0, 0)


async def test_strict_asks_for_what_it_writes_as_for_what_it_reads() -> None:
    bucket = WritableBucket(["d/f", "d/g"])
    async with mounted(bucket, writer=MemoryWriter(), **RW, **STRICT) as mount:
        await mount.walk()
        await trio.sleep(1)
        fh = await mount.open("d/f", os.O_RDWR)
        await mount.fs.write(fh, 0, b"ours")
        bucket.reset()
        assert (await mount.read("d/f"))[:4] == b"ours"
        assert bucket.counts[1] == 0, "what is written here is asked of nobody"
        await mount.close_file(fh)
        await trio.sleep(1)
        bucket.set("d/f", size=77, version=5)
        assert len(await mount.read("d/f")) == 77


# -- what is kept here --------------------------------------------------------------------------------------


async def test_modes_owners_and_times_are_kept_of_a_version(tmp_path: Path) -> None:
    bucket = WritableBucket(["d/f", "d/g"])
    async with mounted(bucket, path=tmp_path, writer=MemoryWriter(), **RW) as mount:
        ino = await mount.ino("d/f")
        plain = await mount.fs.getattr(ino)
        assert stat.S_IMODE(plain[0].mode) == 0o644 and not mount.fs._writing.overrides.any  # type: ignore[union-attr]
        bucket.reset()
        found, _ = await mount.fs.setattr(ino, mode=0o100755, uid=7, gid=8, mtime_ns=5 * 10**9)
        assert (found.mode, found.uid, found.gid) == (stat.S_IFREG | 0o755, 7, 8)
        assert found.mtime_ns == 5 * 10**9
        await mount.fs.setattr(await mount.ino("d"), mode=0o700)
        await mount.fs.setattr(ROOT, mode=0o711)
        assert bucket.writes == (0, 0, 0)
        await mount.rename("d/f", "d/z")
    async with mounted(bucket, path=tmp_path, writer=MemoryWriter(), **RW) as mount:
        found = await mount.stat("d/z")  # type: ignore[assignment]
        assert (stat.S_IMODE(found.mode), found.uid, found.mtime_ns) == (0o755, 7, 5 * 10**9)
        above = await mount.stat("d")
        assert above is not None and stat.S_IMODE(above.mode) == 0o700
        await mount.write("d/z", b"again")
        found = await mount.stat("d/z")  # type: ignore[assignment]
        assert stat.S_IMODE(found.mode) == 0o755, "it is still the same file"
        assert found.mtime_ns != 5 * 10**9
        bucket.set("d/z", size=33, version=4)
        mount.clock.now += 61
        found = await mount.stat("d/z")  # type: ignore[assignment]
        assert (found.size, stat.S_IMODE(found.mode), found.uid) == (33, 0o644, 1000)


async def test_what_a_file_is_created_with_is_kept() -> None:
    bucket, writer = WritableBucket(["d/x"]), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        _, _, opened = await mount.fs.create(await mount.ino("d"), b"run", os.O_RDWR, 0o755, 1, 5, 6)
        ino = await mount.ino("d/run")
        await mount.fs.write(opened[0], 0, b"#!")
        await mount.fs.setattr(ino, mtime_ns=10**9)
        before = await mount.stat("d/run")
        await mount.close_file(opened[0])
        after = await mount.stat("d/run")
        assert before == after
        assert after is not None and stat.S_IMODE(after.mode) == 0o755
        assert (after.uid, after.gid, after.mtime_ns) == (5, 6, 10**9)
        await mount.unlink("d/run")
        await mount.write("d/run", b"")
        found = await mount.stat("d/run")
        assert found is not None and stat.S_IMODE(found.mode) == 0o644 and found.uid == 1000


async def test_the_time_of_a_directory_says_that_something_in_it_has_changed() -> None:
    bucket = WritableBucket(["d/x", "e/y"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        seen: set[int] = set()
        calls: list[Any] = [
            lambda: mount.stat("d"),
            lambda: mount.write("d/new", b"1"),
            lambda: mount.mkdir("d/sub"),
            lambda: mount.rename("d/new", "d/newer"),
            lambda: mount.rename("e/y", "d/y"),
            lambda: mount.unlink("d/y"),
            lambda: mount.rmdir("d/sub"),
        ]
        for call in calls:
            await trio.sleep(1)
            await call()
            found = await mount.stat("d")
            assert found is not None and found.mtime_ns not in seen
            seen.add(found.mtime_ns)
        await mount.fs.setattr(await mount.ino("d"), mtime_ns=77)
        found = await mount.stat("d")
        assert found is not None and found.mtime_ns == 77


async def test_truncating_without_a_handle_is_done_when_it_returns() -> None:
    bucket = WritableBucket(["f"])
    async with mounted(bucket, writer=MemoryWriter(), **RW) as mount:
        old, ino = bucket.content("f"), await mount.ino("f")
        for size in (10, 4, 8, 0, 3):
            bucket.reset()
            assert (await mount.fs.setattr(ino, size=size))[0].size == size
            old = old[:size] + bytes(size - len(old[:size]))
            assert bucket.content("f") == old == await mount.read("f")
            assert bucket.writes == (int(size != 10), 0, 0)
            assert await mount.ino("f") == ino
