"""Any changes at all, over a filesystem that carries them out: each is answered once, nothing is left over, and what the
mount shows afterwards is what the store has."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import trio
from hypothesis import event, given, settings
from hypothesis import strategies as st

from cachefs.base.errors import TooLarge
from cachefs.fuse import protocol
from cachefs.fuse.protocol import Op, Setattr
from tests.conftest import examples
from tests.fs.bucket import WritableBucket
from tests.fs.writers import MemoryDirtyFile, MemoryWriter
from tests.fuse.kernel import OPEN_READ, ROOT, Kernel, kernel, read_in, release_in, request
from tests.fuse.test_fuzz import PROFILE, U32, U64, run
from tests.fuse.test_writing import create_in, flush_in, open_in, setattr_in, write_in

PATHS = ["a", "b", "d", "d/x", "d/e", "d/e/y"]
LARGEST = 1 << 20

names = st.sampled_from([b"a", b"b", b"d", b"e", b"x", b"new", b"", b".", b"..", b"a/b", b"\xff", b"n" * 256])
ended = st.builds(lambda name, end: name + end, names, st.sampled_from([b"\0", b"\0", b"\0", b""]))
handles = st.integers(0, 9) | st.just(U64)
offsets = st.sampled_from([0, 1, 5, 4096, 100_000, LARGEST, 1 << 40, (1 << 63) - 1, U64])
flags = st.sampled_from(
    [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_TRUNC, os.O_RDONLY | os.O_TRUNC, os.O_RDWR | os.O_APPEND, U32]
)
nodes = st.integers(0, len(PATHS)) | st.sampled_from([77, 1 << 63, U64])
data = st.sampled_from([b"", b"x", b"four", b"y" * 5000, b"z" * 100_000])
valid = st.integers(0, 0x7FF) | st.sampled_from([int(Setattr.SIZE), int(Setattr.SIZE | Setattr.FH), U32])
modes = st.sampled_from([0o100644, 0o644, 0o100777, 0o010644, 0, U32])

BODIES: dict[int, st.SearchStrategy[bytes]] = {
    Op.CREATE: st.builds(create_in, names, flags, modes),
    Op.MKNOD: st.builds(lambda mode, name: protocol.MKNOD_IN.pack(mode, 0, 0, 0) + name, modes, ended),
    Op.MKDIR: st.builds(lambda name: protocol.MKDIR_IN.pack(0o755, 0) + name, ended),
    Op.UNLINK: ended,
    Op.RMDIR: ended,
    Op.RENAME: st.builds(lambda to, one, two: (to, one + b"\0" + two), nodes, names, ended),
    Op.RENAME2: st.builds(
        lambda to, one, two, f: (to, one + b"\0" + two, f), nodes, names, ended, st.integers(0, 4)
    ),
    Op.OPEN: st.builds(open_in, flags),
    Op.WRITE: st.builds(write_in, handles, offsets, data),
    Op.FLUSH: st.builds(flush_in, handles),
    Op.FSYNC: handles.map(lambda fh: protocol.FSYNC_IN.pack(fh, 0, 0)),
    Op.FALLOCATE: st.builds(
        lambda fh, offset, length, mode: protocol.FALLOCATE_IN.pack(fh, offset, length, mode, 0),
        handles,
        offsets,
        offsets,
        st.integers(0, 3),
    ),
    Op.SETATTR: st.builds(
        lambda valid, fh, size, mode: setattr_in(valid, fh=fh, size=size, mode=mode, uid=5, gid=6),
        valid,
        handles,
        offsets,
        modes,
    ),
    Op.RELEASE: handles.map(release_in),
    Op.READ: st.builds(read_in, handles, offsets, st.sampled_from([0, 10, 4096])),
    Op.LOOKUP: ended,
    Op.SYMLINK: ended,
    Op.LINK: ended,
}


class Sent(NamedTuple):
    opcode: int
    node: int
    body: Any
    interrupted: bool
    pause: float


@st.composite
def changes(draw: Callable[..., Any]) -> Sent:
    opcode = draw(st.sampled_from(sorted(BODIES)))
    body = draw(BODIES[opcode])
    if isinstance(body, bytes) and draw(st.integers(0, 15)) == 0:
        body = body[: draw(st.integers(0, 20))]
    return Sent(
        opcode,
        draw(nodes),
        body,
        interrupted=draw(st.integers(0, 9)) == 0,
        pause=draw(st.sampled_from([0.0, 0.0, 0.015, 30.0])),
    )


class Bounded(MemoryDirtyFile):
    async def truncate(self, size: int) -> None:
        if size > LARGEST:
            raise TooLarge(f"{size} bytes")
        await trio.lowlevel.checkpoint()
        await super().truncate(size)

    def write_now(self, offset: int, data: Any) -> bool:
        return offset + len(data) <= LARGEST and super().write_now(offset, data)

    async def write(self, offset: int, data: Any) -> None:
        if offset + len(data) > LARGEST:
            raise TooLarge(f"{offset} and {len(data)} bytes")
        await super().write(offset, data)

    async def allocate(self, offset: int, length: int) -> None:
        await self.truncate(max(self.size, offset + length))


class Writer(MemoryWriter):
    async def begin(self, *arguments: Any, **preconditions: Any) -> MemoryDirtyFile:
        dirty_file = await super().begin(*arguments, **preconditions)
        dirty_file.__class__ = Bounded
        return dirty_file


def body_of(sent: Sent, inos: list[int]) -> bytes:
    if isinstance(sent.body, bytes):
        return sent.body
    to, names, *more = sent.body
    to = inos[to] if to < len(inos) else to
    if sent.opcode == Op.RENAME:
        return protocol.RENAME_IN.pack(to) + names
    return protocol.RENAME2_IN.pack(to, more[0], 0) + names


@given(st.lists(changes(), min_size=1, max_size=30), st.booleans())
@settings(PROFILE, max_examples=examples(200))
def test_any_changes(no_threads: None, script: list[Sent], writeback: bool) -> None:
    async def main() -> None:
        bucket = WritableBucket(["a", "b", "d/x", "d/e/y"])
        writer = Writer(writeback=writeback)
        async with kernel(bucket, writer=writer) as asking:
            inos = [await asking.ino(path) for path in PATHS] + [ROOT]
            handles = set()
            for unique, sent in enumerate(script, 1000):
                node = inos[sent.node] if sent.node < len(inos) else sent.node
                asking.send_raw(request(sent.opcode, 2 * unique, node, body_of(sent, inos)))
                if sent.interrupted:
                    await trio.lowlevel.checkpoint()
                    body = protocol.INTERRUPT_IN.pack(2 * unique)
                    asking.send_raw(request(Op.INTERRUPT, 2 * unique + 1, 0, body))
                await trio.sleep(sent.pause)
            await trio.sleep(100)
            await asking.idle()
            for unique, sent in enumerate(script, 1000):
                replies = asking.replies.get(2 * unique, [])
                event(
                    f"{Op(sent.opcode).name} {errno.errorcode.get(replies[0].error, '?') if replies else '-'}"
                )
                assert len(replies) == 1, sent
                if not replies[0].error:
                    if sent.opcode == Op.CREATE:
                        handles.add(int.from_bytes(replies[0].body[128:136], "little"))
                    elif sent.opcode == Op.OPEN:
                        handles.add(int.from_bytes(replies[0].body[:8], "little"))
            for fh in handles:
                await asking.ask(Op.RELEASE, ROOT, release_in(fh))
            await asking.idle()
            assert asking.counts == (0, 0)
            assert asking.line.detached == 0
            assert not asking.backend._waiting
            await writer.upload_all()
            assert not writer.dirty_files
            await same(asking, bucket)

    run(main)


async def same(asking: Kernel, bucket: WritableBucket) -> None:
    """The tree of the mount is that of the store, to the byte."""
    found: dict[str, bytes] = {}

    async def walk(ino: int, prefix: str) -> None:
        dh = await asking.opendir(ino)
        body = (await asking.ask(Op.READDIR, ino, read_in(dh, 0, 1 << 20))).body
        await asking.ask(Op.RELEASEDIR, ino, release_in(dh))
        while body:
            _, _, length, kind = protocol.DIRENT.unpack_from(body)
            name = body[24 : 24 + length]
            body = body[24 + -(-length // 8) * 8 :]
            looked = await asking.ask(Op.LOOKUP, ino, name + b"\0")
            number = int.from_bytes(looked.body[:8], "little")
            assert not looked.error and number, name
            if kind == 4:
                await walk(number, f"{prefix}{name.decode()}/")
            else:
                reply = await asking.ask(Op.OPEN, number, OPEN_READ)
                assert not reply.error, (name, reply.error)
                fh = int.from_bytes(reply.body[:8], "little")
                found[prefix + name.decode()] = (
                    await asking.ask(Op.READ, number, read_in(fh, 0, LARGEST))
                ).body
                await asking.ask(Op.RELEASE, number, release_in(fh))

    await walk(ROOT, "")
    expected = {key: bucket.content(key) for key in bucket.objects if not key.endswith("/")}
    assert {key: value[:100] for key, value in found.items()} == {k: v[:100] for k, v in expected.items()}
    assert found == expected
