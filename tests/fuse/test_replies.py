"""What is answered, byte for byte: names, attributes, directories, extended attributes."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing

from cachefs.fs import Attributes, Entry
from cachefs.fuse import protocol
from cachefs.fuse.protocol import Op, OpenFlags
from tests.fs.bucket import MTIME, Bucket, Bytes, WritableBucket
from tests.fs.writers import MemoryWriter
from tests.fuse.kernel import OPEN_READ, ROOT, Kernel, Reply, kernel, opened, read_in, release_in
from tests.fuse.test_writing import CASES

LONG = "n" * 255
WIDE = "é" * 127 + "x"  # 255 bytes
HEAD, HEAD_PLUS = protocol.DIRENT.size, protocol.DIRENTPLUS.size


class Shown(NamedTuple):
    name: bytes
    ino: int
    offset: int
    kind: int
    size: int


def attr(body: bytes) -> tuple[int, ...]:
    return protocol.ATTR_REPLY.unpack(bytes(16) + body)[6:]


def entry(body: bytes) -> tuple[int, ...]:
    """nodeid, generation, entry_valid, attr_valid, nanoseconds of both, attributes"""
    return protocol.ENTRY_REPLY.unpack(bytes(16) + body)[3:]


def listed(body: bytes, plus: bool) -> list[Shown]:
    """As the kernel reads a buffer of entries (parse_dirfile)."""
    found: list[Shown] = []
    while body:
        if plus:
            fields = protocol.DIRENTPLUS.unpack_from(body)
            size, (ino, offset, length, kind) = fields[7], fields[-4:]
            assert fields[0] == fields[6] == ino
        else:
            size, (ino, offset, length, kind) = 0, protocol.DIRENT.unpack_from(body)
        head = HEAD_PLUS if plus else HEAD
        padded = -(-(head + length) // 8) * 8
        assert 0 < length <= 1024
        assert padded <= len(body)
        name = body[head : head + length]
        assert b"/" not in name
        assert b"\0" not in name
        assert not body[head + length : padded].strip(b"\0")
        found.append(Shown(name, ino, offset, kind, size))
        body = body[padded:]
    return found


async def page(asking: Kernel, dh: int, offset: int, size: int, plus: bool) -> list[Shown]:
    reply = await asking.ask(Op.READDIRPLUS if plus else Op.READDIR, ROOT, read_in(dh, offset, size))
    assert not reply.error
    assert len(reply.body) <= size
    return listed(reply.body, plus)


async def everything(asking: Kernel, size: int, plus: bool) -> list[Shown]:
    dh = await asking.opendir()
    found: list[Shown] = []
    while more := await page(asking, dh, found[-1].offset if found else 0, size, plus):
        found += more
    assert not (await asking.ask(Op.RELEASEDIR, ROOT, release_in(dh))).error
    return found


# -- names and attributes --------------------------------------------------------------------------


async def test_attributes() -> None:
    bucket = Bucket(["d/f"])
    bucket.put("d/f", size=1025, mtime_ns=MTIME + 123)
    async with kernel(bucket, metadata_ttl=60.5) as asking:
        ino = await asking.ino("d/f")
        reply = await asking.ask(Op.GETATTR, ino, bytes(16))
        assert reply.length == protocol.ATTR_REPLY.size
        valid, nanoseconds, _ = protocol.ATTR_REPLY.unpack(bytes(16) + reply.body)[3:6]
        assert 60.4 <= valid + nanoseconds / 1e9 <= 60.5
        seconds = MTIME // 10**9
        expected = (
            ino,
            1025,
            3,
            seconds,
            seconds,
            seconds,
            123,
            123,
            123,
            stat.S_IFREG | 0o444,
            1,
            1000,
            1000,
        )
        assert attr(reply.body) == (*expected, 0, 1 << 20, 0)
        looked = entry((await asking.ask(Op.LOOKUP, await asking.ino("d"), b"f\0")).body)
        assert looked[0] == ino
        assert looked[6:] == attr(reply.body)
        root = attr((await asking.ask(Op.GETATTR, ROOT, bytes(16))).body)
        assert (root[0], root[9]) == (ROOT, stat.S_IFDIR | 0o555)


@pytest.mark.parametrize(
    ("mtime_ns", "seconds", "nanoseconds"),
    [
        (0, 0, 0),
        (-1, -1, 999_999_999),
        (-1_500_000_000, -2, 500_000_000),
        (-(2**63), -9_223_372_037, 145_224_192),
        (2**63 - 1, 9_223_372_036, 854_775_807),
        (253_402_300_799 * 10**9, 253_402_300_799, 0),  # the year 9999
        (2**80, 2**80 // 10**9 & 2**64 - 1, 2**80 % 10**9),  # absurd, and still no failure
        (-(2**80), -(2**80) // 10**9 & 2**64 - 1, -(2**80) % 10**9),
    ],
)
def test_times(mtime_ns: int, seconds: int, nanoseconds: int) -> None:
    shown = protocol.attr(Attributes(7, stat.S_IFREG | 0o444, 1, 1, mtime_ns, 1, 1, mtime_ns, mtime_ns))
    packed = protocol.ATTR_REPLY.pack(protocol.ATTR_REPLY.size, 0, 2, 0, 0, 0, *shown)
    times = protocol.ATTR_REPLY.unpack(packed)[9:15]
    assert times == (*(seconds % 2**64,) * 3, *(nanoseconds,) * 3)


@pytest.mark.parametrize("mtime_ns", [-1_500_000_000, 253_402_300_799 * 10**9 // 30])
async def test_strange_times_arrive(mtime_ns: int) -> None:
    bucket = Bucket()
    bucket.put("f", mtime_ns=mtime_ns)
    async with kernel(bucket) as asking:
        shown = attr((await asking.ask(Op.GETATTR, await asking.ino("f"), bytes(16))).body)
        assert shown[3] == mtime_ns // 10**9 % 2**64
        assert shown[6] == mtime_ns % 10**9


async def test_a_missing_name_that_is_believed_is_a_reply_without_inode() -> None:
    async with kernel(Bucket(["a"]), negative_ttl=5.25) as asking:
        for _ in range(2):  # asked, and known
            reply = await asking.ask(Op.LOOKUP, ROOT, b"b\0")
            nodeid, generation, valid, attr_valid, nanoseconds, _, *attributes = entry(reply.body)
            assert (nodeid, generation, attr_valid, reply.error) == (0, 0, 0, 0)
            assert 5.2 <= valid + nanoseconds / 1e9 <= 5.25
            assert not any(attributes)


async def test_a_missing_name_that_is_not_believed_is_an_errno() -> None:
    async with kernel(Bucket(["a"]), negative_ttl=0.0) as asking:
        for _ in range(2):
            assert (await asking.ask(Op.LOOKUP, ROOT, b"b\0")).error == errno.ENOENT


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (b"", errno.EINVAL),
        (b"\0", errno.EINVAL),
        (b"f", errno.EINVAL),  # no end
        (b"x" * 256 + b"\0", errno.ENAMETOOLONG),
        (b"x" * 70_000 + b"\0", errno.ENAMETOOLONG),
        (b"x" * 70_000, errno.EINVAL),
        (b"f\0more\0", 0),
        (b".\0", errno.ENOENT),
        (b"..\0", errno.ENOENT),
        (b"d/f\0", errno.ENOENT),
        (b"\xff\xfe\0", errno.ENOENT),
        (b"\xed\xb2\x80\0", errno.ENOENT),
    ],
)
async def test_names(name: bytes, number: int) -> None:
    async with kernel(Bucket(["f", "d/f"]), negative_ttl=0.0) as asking:
        assert (await asking.ask(Op.LOOKUP, ROOT, name)).error == number


@pytest.mark.parametrize("nodeid", [0, 2, 12345, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("opcode", [Op.LOOKUP, Op.GETATTR, Op.OPEN, Op.OPENDIR, Op.GETXATTR])
async def test_inodes_that_are_not_there(nodeid: int, opcode: Op) -> None:
    bodies = {Op.LOOKUP: b"f\0", Op.GETXATTR: protocol.GETXATTR_IN.pack(9, 0) + b"user.cachefs.key\0"}
    async with kernel(Bucket(["f"])) as asking:
        reply = await asking.ask(opcode, nodeid, bodies.get(opcode, OPEN_READ))
        assert reply.error in (errno.ENOENT, errno.ESTALE)


async def test_files_and_directories_are_told_apart() -> None:
    async with kernel(Bucket(["d/f"])) as asking:
        directory, file = await asking.ino("d"), await asking.ino("d/f")
        assert (await asking.ask(Op.LOOKUP, file, b"x\0")).error == errno.ENOTDIR
        assert (await asking.ask(Op.OPENDIR, file, OPEN_READ)).error == errno.ENOTDIR
        assert (await asking.ask(Op.OPEN, directory, OPEN_READ)).error == errno.EISDIR
        assert (await asking.ask(Op.OPEN, ROOT, OPEN_READ)).error == errno.EISDIR
        writing = protocol.OPEN_IN.pack(os.O_RDWR, 0)
        assert (await asking.ask(Op.OPEN, file, writing)).error == errno.EROFS


# -- reading ---------------------------------------------------------------------------------------


async def test_reads_are_clipped_to_the_object() -> None:
    bucket = Bucket()
    bucket.put("f", size=10_000)
    async with kernel(bucket) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        whole = (await asking.ask(Op.READ, ino, read_in(fh, 0, 1 << 20))).body
        assert whole == Bytes.content(next(iter(asking.cache.warm)))
        assert len(whole) == 10_000
        for offset, size in [
            (0, 0),
            (0, 1),
            (9_999, 4096),
            (10_000, 1),
            (1 << 40, 1),
            ((1 << 64) - 1, 9),
            (5, (1 << 32) - 1),
        ]:
            for cold in (False, True):
                if cold:
                    asking.cache.warm.clear()
                reply = await asking.ask(Op.READ, ino, read_in(fh, offset, size))
                assert reply.body == whole[offset : offset + size]
        assert (await asking.ask(Op.READ, ino, read_in(999, 0, 1))).error
        assert not (await asking.ask(Op.RELEASE, ino, release_in(fh))).error
        assert (await asking.ask(Op.READ, ino, read_in(fh, 0, 1))).error
        assert not (await asking.ask(Op.RELEASE, ino, release_in(fh))).error  # twice
        assert asking.counts == (0, 0)
        assert asking.cache.open_count == 0


# -- directories -----------------------------------------------------------------------------------

KEYS = [f"file{i:04}" for i in range(300)] + ["sub/x", LONG, WIDE, "a\nb", "x"]
NAMES = sorted([*(key.encode() for key in KEYS if "/" not in key), b"sub"])


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("size", [408, 416, 4096, 4097, 65536, 1 << 20, (1 << 32) - 1])
async def test_a_directory_is_read_whole_through_any_buffer(size: int, plus: bool) -> None:
    async with kernel(Bucket(KEYS)) as asking:
        for _ in range(2):  # the second begins with as many names as the first came to
            found = await everything(asking, size, plus)
            assert sorted(shown.name for shown in found) == NAMES
            assert {shown.name: shown.kind for shown in found}[b"sub"] == stat.S_IFDIR >> 12
            assert {shown.kind for shown in found} == {stat.S_IFDIR >> 12, stat.S_IFREG >> 12}
            assert len({shown.offset for shown in found}) == len(found)
            assert 0 not in {shown.offset for shown in found}
        assert asking.counts == (0, 0)


@pytest.mark.parametrize("plus", [False, True])
async def test_a_buffer_that_fits_exactly(plus: bool) -> None:
    head = HEAD_PLUS if plus else HEAD
    async with kernel(Bucket(["12345678", "123456789"])) as asking:
        dh = await asking.opendir()
        assert len(await page(asking, dh, 0, head + 8, plus)) == 1
        assert len(await page(asking, dh, 0, 2 * head + 23, plus)) == 1
        (first, second) = await page(asking, dh, 0, 2 * head + 24, plus)
        assert await page(asking, dh, first.offset, head + 16, plus) == [second]
        assert await page(asking, dh, second.offset, 4096, plus) == []
        assert await page(asking, dh, second.offset, 0, plus) == []


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("size", [0, 1, 24, 31, 151, 159])
async def test_a_buffer_too_small_for_one_entry_is_not_the_end(size: int, plus: bool) -> None:
    """An empty reply means that there are no more names: getdents says EINVAL, and so do we."""
    head = HEAD_PLUS if plus else HEAD
    async with kernel(Bucket(["12345678"])) as asking:
        dh = await asking.opendir()
        reply = await asking.ask(Op.READDIRPLUS if plus else Op.READDIR, ROOT, read_in(dh, 0, size))
        if size < head + 8:
            assert reply.error == errno.EINVAL
        else:
            assert len(listed(reply.body, plus)) == 1


@pytest.mark.parametrize("plus", [False, True])
async def test_offsets_that_no_reply_had(plus: bool) -> None:
    async with kernel(Bucket(["d/a", "d/b", "c"])) as asking:
        directory = await asking.ino("d")
        dh = await asking.opendir(directory)
        for offset in (1, 2, 12345, 1 << 35, (1 << 63) - 1, 1 << 63, (1 << 64) - 1):
            reply = await asking.ask(Op.READDIRPLUS if plus else Op.READDIR, directory, read_in(dh, offset))
            assert reply.error in (0, errno.EIO)
        assert (await asking.ask(Op.READDIR, ROOT, read_in(77))).error == errno.ENOENT
        assert not (await asking.ask(Op.RELEASEDIR, directory, release_in(dh))).error
        assert not (await asking.ask(Op.RELEASEDIR, directory, release_in(dh))).error
        assert (await asking.ask(Op.READDIR, directory, read_in(dh))).error == errno.ENOENT


@pytest.mark.parametrize("name", [b"x", b"n" * 255, b"\xff\xfe", b"\xed\xb2\x80", b"1234567", b"12345678"])
@pytest.mark.parametrize("plus", [False, True])
def test_one_entry(name: bytes, plus: bool) -> None:
    """Names are bytes here, whatever the filesystem lets through."""
    attributes = Attributes(77, stat.S_IFREG | 0o444, 1, 5, MTIME, 1, 1, MTIME, MTIME)
    packed = (protocol.direntplus if plus else protocol.dirent)(Entry(name, attributes, 99, 1.5))
    assert len(packed) % 8 == 0
    assert listed(packed, plus) == [Shown(name, 77, 99, 8, 5 if plus else 0)]


async def opendir_flags(asking: Kernel) -> tuple[int, int]:
    """(handle, flags) of the root, opened once more."""
    dh, flags, _ = opened(await asking.ask(Op.OPENDIR, ROOT, OPEN_READ))
    return dh, flags


MAY_KEEP, KEPT = OpenFlags.CACHE_DIR, OpenFlags.CACHE_DIR | OpenFlags.KEEP_CACHE


async def test_no_listing_is_kept_where_the_kernel_cannot() -> None:
    async with kernel(Bucket(["a"])) as asking:
        for dh in (1, 2):
            assert await opendir_flags(asking) == (dh, 0)
            assert await page(asking, dh, 0, 4096, plus=True)


async def nothing(asking: Kernel) -> None:
    pass


async def time_passes(asking: Kernel) -> None:
    clock: Any = asking.fs._tree.clock
    clock.now += 61


async def all_is_refreshed(asking: Kernel) -> None:
    await asking.fs.refresh()


async def one_name_is_refreshed(asking: Kernel) -> None:
    await asking.fs.refresh("a")
    await asking.ino("a")


async def a_name_goes(asking: Kernel) -> None:
    assert asking.cache.bucket is not None
    del asking.cache.bucket.objects["a"]
    await asking.fs.refresh("a")
    reply = await asking.ask(Op.LOOKUP, ROOT, b"a\0")
    assert reply.error == errno.ENOENT or not entry(reply.body)[0]


async def a_directory_is_made(asking: Kernel) -> None:
    await asking.fs.mkdir(ROOT, b"d", 0o755, 1000, 1000)


async def a_file_is_removed(asking: Kernel) -> None:
    await asking.fs.unlink(ROOT, b"a")


@pytest.mark.parametrize(
    ("event", "flags"),
    [
        (nothing, KEPT),
        (time_passes, MAY_KEEP),
        (all_is_refreshed, MAY_KEEP),
        (one_name_is_refreshed, KEPT),
        (a_name_goes, MAY_KEEP),
        (a_directory_is_made, MAY_KEEP),
        (a_file_is_removed, MAY_KEEP),
    ],
)
async def test_a_listing_is_kept_while_it_is_fresh_and_no_name_comes_or_goes(
    event: Callable[[Kernel], Awaitable[None]], flags: int
) -> None:
    bucket = WritableBucket(["a", "b"])
    async with kernel(bucket, keep_listings=True, writer=MemoryWriter()) as asking:
        assert await opendir_flags(asking) == (1, MAY_KEEP)
        assert await opendir_flags(asking) == (2, MAY_KEEP)  # no one has read it yet
        assert await page(asking, 2, 0, 4096, plus=True)
        assert not (await asking.ask(Op.RELEASEDIR, ROOT, release_in(2))).error
        await event(asking)
        dh, first = await opendir_flags(asking)
        assert first == flags
        assert await page(asking, dh, 0, 4096, plus=True)
        assert (await opendir_flags(asking))[1] == KEPT  # the one that is read now


async def test_a_listing_of_which_a_reader_has_an_older_half_is_not_kept() -> None:
    async with kernel(Bucket([f"{n:03}" for n in range(100)]), keep_listings=True) as asking:
        old, _ = await opendir_flags(asking)
        half = await page(asking, old, 0, 1000, plus=True)
        await asking.fs.refresh()
        for _ in range(2):
            dh, flags = await opendir_flags(asking)
            assert flags == MAY_KEEP
            assert await page(asking, dh, 0, 4096, plus=True)
        assert await page(asking, old, half[-1].offset, 4096, plus=True)
        assert not (await asking.ask(Op.RELEASEDIR, ROOT, release_in(old))).error
        dh, flags = await opendir_flags(asking)
        assert flags == MAY_KEEP
        assert await page(asking, dh, 0, 4096, plus=True)
        assert (await opendir_flags(asking))[1] == KEPT


async def test_a_listing_that_the_kernel_was_not_told_to_drop_is_dropped_later() -> None:
    async with kernel(Bucket(["a"]), keep_listings=True) as asking:
        dh, _ = await opendir_flags(asking)
        assert await page(asking, dh, 0, 4096, plus=True)
        await asking.fs.refresh()
        asking.line.deaf.add(4)
        asking.send(Op.OPENDIR, ROOT, OPEN_READ, unique=4)
        await trio.testing.wait_all_tasks_blocked()
        assert await page(asking, dh, 0, 4096, plus=True)
        assert (await opendir_flags(asking))[1] == MAY_KEEP


# -- extended attributes ---------------------------------------------------------------------------


async def test_extended_attributes() -> None:
    async with kernel(Bucket(["f"])) as asking:
        ino = await asking.ino("f")

        async def get(name: bytes, size: int) -> Reply:
            return await asking.ask(Op.GETXATTR, ino, protocol.GETXATTR_IN.pack(size, 0) + name + b"\0")

        async def names(size: int) -> Reply:
            return await asking.ask(Op.LISTXATTR, ino, protocol.GETXATTR_IN.pack(size, 0))

        key = b"s3://test/f"
        size, padding = protocol.XATTR_SIZE_REPLY.unpack(
            bytes(16) + (await get(b"user.cachefs.key", 0)).body
        )[3:]
        assert (size, padding) == (len(key), 0)
        for short in (1, size - 1):
            assert (await get(b"user.cachefs.key", short)).error == errno.ERANGE
        for enough in (size, size + 1, 65536, (1 << 32) - 1):
            assert (await get(b"user.cachefs.key", enough)).body == key
        assert (await names(0)).body == bytes(8)
        assert (await names(4096)).body == b""  # they are not listed

        assert (await get(b"user.cachefs.nothing", 0)).error == errno.ENODATA
        assert (await get(b"user.other", 0)).error == errno.ENODATA
        assert (await get(b"security.capability", 0)).error == errno.EOPNOTSUPP
        assert (await get(b"", 0)).error == errno.EINVAL
        assert (await asking.ask(Op.GETXATTR, ino, bytes(7))).error == errno.EINVAL


# -- everything else -------------------------------------------------------------------------------


async def test_operations_that_would_change_something_are_refused() -> None:
    async with kernel(Bucket(["f"])) as asking:
        for opcode, body, _ in CASES.values():
            if opcode not in (Op.FLUSH, Op.FSYNC):
                assert (await asking.ask(opcode, ROOT, body)).error == errno.EROFS
        for opcode in (Op.SYMLINK, Op.LINK):
            assert (await asking.ask(opcode, ROOT, b"name\0target\0")).error == errno.EROFS
        attribute = b"user.cachefs.etag\0"
        assert (await asking.ask(Op.REMOVEXATTR, ROOT, attribute)).error == errno.EROFS
        assert (await asking.ask(Op.SETXATTR, ROOT, bytes(8) + attribute)).error == errno.EROFS
        assert asking.metrics.fuse_change == asking.metrics.fuse_write == asking.metrics.fuse_create == 0


@pytest.mark.parametrize(
    ("opcode", "number"),
    [
        (Op.READLINK, errno.EINVAL),
        (Op.IOCTL, errno.ENOTTY),
        (Op.FLUSH, errno.ENOSYS),
        (Op.ACCESS, 0),
        (Op.FSYNC, 0),
        (Op.FSYNCDIR, 0),
        (Op.DESTROY, 0),
        (Op.INIT, errno.ENOSYS),
        (31, errno.ENOSYS),  # GETLK: the kernel keeps locks by itself
        (46, errno.ENOSYS),  # LSEEK
        (52, errno.ENOSYS),  # STATX
        (4096, errno.ENOSYS),
    ],
)
async def test_the_rest(opcode: int, number: int) -> None:
    async with kernel(Bucket(["f"])) as asking:
        assert (await asking.ask(opcode, ROOT, bytes(64))).error == number


async def test_space() -> None:
    async with kernel(Bucket(["f"])) as asking:
        fields = protocol.STATFS_REPLY.unpack(bytes(16) + (await asking.ask(Op.STATFS)).body)[3:]
        blocks, free, available, _, files_free, size, name_max, fragment, _ = fields
        assert blocks == free == available > 0
        assert (files_free, name_max, size) == (0, 255, fragment)


async def test_invalidations_are_notes_without_a_request() -> None:
    async with kernel(Bucket(["f"])) as asking:
        notes: list[bytes] = []
        asking.line.write = lambda *parts: notes.append(b"".join(parts)) or True  # type: ignore[method-assign]
        asking.backend.invalidate((1 << 64) - 1, 1, b"name")
        asking.backend.invalidate(0, 7, b"x" * 255)
        asking.backend.invalidate(5, 1, b"")
        codes = [protocol.OUT_HEADER.unpack_from(note) for note in notes]
        assert codes == [(40, 2, 0), (37, 3, 0), (16 + 16 + 256, 3, 0), (40, 2, 0)]
        assert protocol.INVAL_INODE.unpack_from(notes[0], 16) == (-1, 0, 0)
        assert notes[1][16:] == protocol.INVAL_ENTRY.pack(1, 4, 0) + b"name\0"

        def refuse(*parts: bytes) -> bool:
            raise OSError(errno.ENOTEMPTY, "not now")

        asking.line.write = refuse  # type: ignore[method-assign]
        asking.backend.invalidate(5, 1, b"name")  # told, and not taken: no failure


async def test_a_name_is_dropped_whose_inode_the_kernel_does_not_know() -> None:
    """A process beside the daemon sends the notices, and answers with the kernel's errno."""
    async with kernel(Bucket(["f"])) as asking:
        codes: list[int] = []

        def send(message: bytes) -> None:
            codes.append(protocol.OUT_HEADER.unpack_from(message)[1])
            raise OSError(errno.ENOENT, "no such inode")

        asking.line._notifier = SimpleNamespace(send=send, close=lambda: None)  # type: ignore[assignment]
        asking.backend.invalidate(5, 1, b"name")
        assert codes == [protocol.NOTIFY_INVAL_INODE, protocol.NOTIFY_INVAL_ENTRY]
