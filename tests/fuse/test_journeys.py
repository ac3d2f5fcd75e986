"""How many files of this room a request passes: what a reader of the code has to open to follow it."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import cachefs
from cachefs.fuse.protocol import Op
from tests.fs.bucket import Bucket
from tests.fuse.kernel import OPEN_READ, Kernel, kernel, opened, read_in

ROOM = Path(cachefs.__file__).parent / "fuse"
WARM = {"native_backend.py", "operations.py"}


async def passed(asking: Kernel, opcode: int, inode: int, body: bytes) -> tuple[set[str], Any]:
    """The files whose functions run, from the read of the request to the reply."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.parent == ROOM:
            files.add(path.name)

    unique = asking.send(opcode, inode, body)
    sys.setprofile(note)
    try:
        await asking.idle()
    finally:
        sys.setprofile(None)
    (reply,) = asking.replies[unique]
    return files, reply


async def test_a_read_from_the_cache() -> None:
    async with kernel(Bucket(["f"])) as asking:
        fh = await asking.open(ino := await asking.ino("f"))
        await asking.ask(Op.READ, ino, read_in(fh))
        files, reply = await passed(asking, Op.READ, ino, read_in(fh))
        assert (reply.error, len(reply.body)) == (0, 10)
        assert files == WARM


async def test_an_open_in_passthrough() -> None:
    async with kernel(Bucket(["f"])) as asking:
        ino = await asking.ino("f")
        asking.cache.whole.add("f")
        await asking.open(ino)
        files, reply = await passed(asking, Op.OPEN, ino, OPEN_READ)
        assert opened(reply)[2] == 1
        assert files == WARM


async def test_a_lookup_that_waits_for_the_origin() -> None:
    async with kernel(Bucket(["f"], delay=0.0), metadata_ttl=0.0, negative_ttl=0.0) as asking:
        files, reply = await passed(asking, Op.LOOKUP, 1, b"missing\0")
        assert reply.error == errno.ENOENT
        assert files == {*WARM, "protocol.py"}
