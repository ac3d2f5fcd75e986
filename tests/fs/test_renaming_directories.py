"""A directory that is renamed changes its name in one step for everybody on this node, whatever that takes at the store."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.lowlevel

from cachefs.base.errors import CachefsError, NotFound, OriginFailed
from cachefs.fs.changing import keys_below
from cachefs.origin.protocol import ListPage
from tests.fs.bucket import WritableBucket
from tests.fs.mount import Mount, mounted
from tests.fs.writers import MemoryWriter

RW = {"file_mode": 0o644, "dir_mode": 0o755, "metadata_ttl": 0.0}
NAMES = {
    "a": None,
    "in": None,
    "in/b": None,
    "in/deep": None,
    "in/deep/c": None,
    "new": None,
    "written": None,
}


async def below(mount: Mount, name: str) -> frozenset[str]:
    """What is shown below a name; nothing if that is missing."""
    try:
        shown = await mount.walk()
    except NotFound:  # a directory went between its listing and the next
        return await below(mount, name)
    return frozenset(
        path.decode().removeprefix(f"{name}/") for path in shown if path.decode().startswith(f"{name}/")
    )


async def there(mount: Mount, path: str) -> bool:
    try:
        return await mount.stat(path) is not None
    except NotFound:
        return False


def filled() -> WritableBucket:
    return WritableBucket(["d/a", "d/in/b", "d/in/deep/c", "d/written", "other/x"], delay=0.001)


async def begin(mount: Mount) -> int:
    """A file that the store does not have, and one that is open and changed."""
    await mount.walk()
    await mount.write("d/new", b"new")
    fh = await mount.open("d/written", os.O_RDWR)
    await mount.fs.write(fh, 0, b"changed")
    return fh


@pytest.mark.parametrize("over", [False, True], ids=["to a new name", "over an empty directory"])
async def test_nobody_meets_it_half_way(over: bool) -> None:
    bucket, writer = filled(), MemoryWriter(writeback=True)
    async with mounted(bucket, writer=writer, **RW) as mount:
        fh = await begin(mount)
        if over:
            await mount.mkdir("e")
        seen: list[tuple[bool, bool]] = []
        done = False

        async def look() -> None:
            while not done:
                before = [await there(mount, f"{top}/in/b") for top in "de"]
                assert before.count(True) <= 1  # it may have gone from the one to the other in between
                old, new = await there(mount, "d/a"), await there(mount, "e/a")
                assert not (old and new)
                seen.append((old, new))
                listed = await below(mount, "e")
                assert not listed or listed == NAMES.keys(), listed
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(look)
            await trio.sleep(0.002)
            await mount.rename("d", "e")
            await trio.sleep(0.02)
            done = True
        assert (True, False) in seen and (False, True) in seen
        assert seen == sorted(seen, reverse=True), "it went once, and not back"
        assert await below(mount, "e") == NAMES.keys() and not await there(mount, "d")
        assert (await mount.pread(fh))[:7] == b"changed"
        await mount.close_file(fh)
        await writer.upload_all()
        assert {key for key in bucket.objects if key.startswith("d")} == set()
        assert bucket.content("e/new") == b"new" and bucket.content("e/written")[:7] == b"changed"


@pytest.mark.parametrize("fails", range(12))
async def test_what_fails_leaves_the_old_name_alone_or_says_what_is_left(fails: int) -> None:
    """The store refuses the n-th change."""
    bucket, writer = filled(), MemoryWriter(writeback=True)
    async with mounted(bucket, writer=writer, **RW) as mount:
        fh = await begin(mount)
        count, refused = 0, ""

        def refuse(kind: str, key: str) -> CachefsError | None:
            nonlocal count, refused
            if kind in ("copy", "delete"):
                count += 1
                if count == fails + 1:
                    refused = kind
                    return OriginFailed("no")
            return None

        bucket.before = refuse
        failed = False
        try:
            await mount.rename("d", "e")
        except OriginFailed:
            failed = True
        bucket.before = lambda kind, key: None
        assert failed == bool(refused)
        if refused == "copy":
            assert await below(mount, "d") == NAMES.keys() and not await there(mount, "e")
            assert not {key for key in bucket.objects if key.startswith("e/")}
        else:
            assert await below(mount, "e") == NAMES.keys()
        assert (await mount.pread(fh))[:7] == b"changed"
        await mount.close_file(fh)
        await writer.upload_all()
        top = "d" if refused == "copy" else "e"
        assert bucket.content(f"{top}/new") == b"new" and bucket.content(f"{top}/written")[:7] == b"changed"


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR])
async def test_a_file_keeps_its_number_beside_one_that_had_its_name(flags: int) -> None:
    """Both are open when the directory moves: the older one has no name, and was known under the same one."""
    async with mounted(filled(), writer=MemoryWriter(), **RW) as mount:
        old = await mount.open("d/a")
        await mount.rename("d/written", "d/a")
        new = await mount.open("d/a", flags)
        ino = await mount.ino("d/a")
        for path, to in (("d", "e"), ("e", "d"), ("d", "e")):
            await mount.rename(path, to)
            assert await mount.ino(f"{to}/a") == ino == (await mount.fstat(new)).ino
            again = await mount.open(f"{to}/a", flags)
            await mount.close_file(again)
        assert (await mount.fstat(old)).nlink == 0
        await mount.close_file(old)
        await mount.close_file(new)
        assert await mount.ino("e/a") == ino and (await mount.fs.getattr(ino))[0].ino == ino


@pytest.mark.parametrize("left", range(10))
async def test_what_was_set_below_goes_along_also_after_a_crash(left: int, tmp_path: Path) -> None:
    """The store takes so many changes, then the daemon dies."""
    bucket, writer = filled(), MemoryWriter()
    async with mounted(bucket, path=tmp_path, writer=writer, **RW) as mount:
        for path, mode in (("d/a", 0o600), ("d/in", 0o711), ("d/in/deep/c", 0o640), ("d", 0o750)):
            await mount.fs.setattr(await mount.ino(path), mode=mode, uid=7, mtime_ns=5 * 10**9)
        noted: dict[str, dict[str, str]] = {}
        steps = 0

        def die(kind: str, key: str) -> CachefsError | None:
            nonlocal steps
            steps += kind in ("copy", "delete")
            if steps <= left or kind not in ("copy", "delete"):
                return None
            noted.update(noted or writer.noted)
            return OriginFailed("dead")

        bucket.before = die
        try:
            await mount.rename("d", "e")
        except OriginFailed:
            pass
    bucket.before = lambda kind, key: None
    again = MemoryWriter()
    again.noted = dict(noted)
    async with mounted(bucket, path=tmp_path, writer=again, **RW) as mount:
        await mount.fs.recover()
        top = "e" if noted or not await there(mount, "d") else "d"
        for path, mode in (("/a", 0o600), ("/in", 0o711), ("/in/deep/c", 0o640), ("", 0o750)):
            found = await mount.stat(top + path)
            assert found is not None and (stat.S_IMODE(found.mode), found.uid) == (mode, 7), path
            assert found.mtime_ns == 5 * 10**9, path


async def test_what_was_set_below_goes_along_twice() -> None:
    """Also when nothing looks at the directory between the two renames."""
    async with mounted(filled(), writer=MemoryWriter(), **RW) as mount:
        for path, mode in (("d/a", 0o600), ("d/in/b", 0o640)):
            await mount.fs.setattr(await mount.ino(path), mode=mode)
        await mount.rename("d", "e")
        await mount.rename("e", "f")
        for path, mode in (("f/a", 0o600), ("f/in/b", 0o640)):
            found = await mount.stat(path)
            assert found is not None and stat.S_IMODE(found.mode) == mode, path


async def test_a_directory_that_is_replaced_is_shown_to_processes_in_it() -> None:
    async with mounted(filled(), writer=MemoryWriter(), **RW) as mount:
        number = await mount.mkdir("e")
        await mount.rename("d", "e")
        for path in ("e/a", "e/in/b"):
            assert await mount.stat(path) is not None
        assert (await mount.fs.getattr(number))[0].nlink == 0
        with pytest.raises(NotFound):  # the C library takes that for the end
            await mount.entries(number)


@pytest.mark.parametrize("moved", [False, True])
async def test_the_pages_of_a_file_are_of_no_other_one_after_its_directory_came_back(moved: bool) -> None:
    async with mounted(filled(), writer=MemoryWriter(), **RW) as mount:
        await mount.rename("d", "e")
        if moved:
            await mount.write("n", b"first")
            await mount.rename("n", "e/f")
        else:
            await mount.write("e/f", b"first")
        number = await mount.ino("e/f")
        assert await mount.read("e/f") == b"first"
        await mount.rename("e", "d")
        await mount.unlink("d/f")
        await mount.write("d/f", b"other")
        await mount.rename("d", "e")
        assert await mount.ino("e/f") != number, "the kernel reads the first one"


@pytest.mark.parametrize("settles_in", ["note", "rename"])  # before the file has its new key, and behind
async def test_a_file_that_is_settled_while_its_directory_is_renamed(settles_in: str) -> None:
    bucket, writer = filled(), MemoryWriter()
    async with mounted(bucket, writer=writer, **RW) as mount:
        writer.settles = False
        await mount.write("d/f", b"data")
        step = getattr(writer, settles_in)

        async def step_and_settle(*what: Any, **how: Any) -> Any:
            answer = await step(*what, **how)
            writer.settles = True
            for dirty_file in writer.dirty_files[:]:
                writer._settle(dirty_file)
            return answer

        setattr(writer, settles_in, step_and_settle)
        await mount.rename("d", "e")
        assert await mount.read("e/f") == b"data"
        assert [key for key in bucket.objects if key.endswith("/f")] == ["e/f"]


async def test_a_directory_that_another_client_removes_while_it_is_renamed() -> None:
    """The new name has the copies: the listing of the directory was forgotten with its old name."""
    bucket = WritableBucket(["d/a", "d/b", "other"])
    async with (
        mounted(bucket, writer=MemoryWriter(), **RW | {"metadata_ttl": 60.0}) as mount,
        trio.open_nursery() as nursery,
    ):
        assert await mount.names() == [b"d", b"other"]
        mount.clock.now += 50
        assert await mount.names("d") == [b"a", b"b"]
        go_on, copied = trio.Event(), bucket.copy

        async def copy(*what: Any, **how: Any) -> Any:
            made = await copied(*what, **how)
            await go_on.wait()
            return made

        bucket.copy = copy  # type: ignore[method-assign]
        nursery.start_soon(mount.rename, "d", "e")
        await trio.sleep(1)
        del bucket.objects["d/a"], bucket.objects["d/b"]
        mount.clock.now += 15
        assert await mount.names() == [b"other"]
        await trio.sleep(1)  # until its rows are erased
        go_on.set()
        await trio.sleep(1)
        assert await mount.names("e") == [b"a", b"b"] and await mount.read("e/a")


async def test_what_is_below_keeps_its_inodes_at_no_cost() -> None:
    bucket = WritableBucket(["d/a", "d/in/b", "d/in/deep/c", "other/x"])
    async with mounted(bucket, writer=MemoryWriter(), **RW | {"metadata_ttl": 60.0}) as mount:
        before = {
            path.removeprefix(b"d"): size for path, size in (await mount.walk()).items() if path[:1] == b"d"
        }
        numbers = [await mount.ino(f"d{path.decode()}") for path in before]
        await mount.rename("d", "other/e")
        bucket.reset()
        for again in range(2):
            assert [await mount.ino(f"other/e{path.decode()}") for path in before] == numbers
            assert set(await mount.walk()) == {
                b"other",
                b"other/x",
                *(b"other/e" + path for path in before),
            }
            assert bucket.counts == (0, 0) or again
            await trio.sleep(61)  # and the listings say the same


async def test_a_listing_that_repeats_a_page_ends_the_rename() -> None:
    class Repeats:
        """Each page is empty and names the same next one."""

        concurrency, asked = 1, 0

        async def list_page(self, prefix: str, *, token: str | None = None) -> ListPage:
            self.asked += 1
            assert self.asked < 10
            return ListPage([], [], "again")

    with pytest.raises(OriginFailed, match="repeats the same page"):
        await keys_below(cast(Any, Repeats()), "d/")
