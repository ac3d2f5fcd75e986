"""Files that are known are opened from a table, in a few steps (`NativeBackend.direct`, `KnownFiles`), and what is shown of
them is found in another one (`OpenFiles.warm`), or was found by the lookup before (`OpenFiles.walked`).

Each answer is the one that the general way gives: histories of requests, refreshes and changes from a seed are played both
ways, and compared byte for byte."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import trio
from trio._core import _run

from cachefs.base.errors import CachefsError
from cachefs.fuse import protocol
from cachefs.fuse.native_backend import NativeBackend
from cachefs.fuse.protocol import Op, Setattr
from tests.fs.bucket import WritableBucket
from tests.fs.mount import Clock
from tests.fs.writers import MemoryWriter
from tests.fuse.kernel import ROOT, Kernel, kernel, opened, read_in, release_in
from tests.fuse.test_writing import setattr_in

FILES = ("a", "b", "d/a", "d/b")
STEPS = 120
HELD_S = 1.0
"""Instead of ten seconds, in which the names would become too old to be opened directly."""


class History:
    """What the kernel and other clients do; `told` is what the kernel was answered."""

    def __init__(self, asking: Kernel, bucket: WritableBucket, seed: int, *, writes: bool) -> None:
        self.asking, self.bucket = asking, bucket
        self.dice = random.Random(seed)
        self.told: list[tuple[Any, ...]] = []
        self.kept_s: list[int] = []
        self.inos: dict[str, int] = {}
        self.handles: list[tuple[str, int]] = []
        self.version = 0
        self.steps = [self.open] * 8 + [self.release] * 6 + [self.look, self.stat, self.read] * 2
        self.steps += [self.replace, self.remove, self.refresh, self.wait, self.whole, self.retire]
        if writes:
            self.steps += [self.write, self.unlink, self.rename, self.truncate, self.chmod]

    async def play(self) -> None:
        for _ in range(STEPS):
            step = self.dice.choice(self.steps)
            self.told.append((step.__name__,))
            await step(self.dice.choice(FILES))
            await trio.sleep(HELD_S + 0.5)  # what is held open for a second walk of the path is closed again

    async def ask(self, op: Op, ino: int, body: bytes) -> Any:
        reply = await self.asking.ask(op, ino, body)
        if op is Op.GETATTR and not reply.error:
            # A table may know less of how long attributes may be kept.
            self.kept_s.append(int.from_bytes(reply.body[:8], "little"))
            self.told.append((op.name, ino, reply.body[16:]))
        else:
            self.told.append((op.name, ino, reply.error, reply.body))
        return reply

    async def look(self, path: str) -> int:
        found = ROOT
        for name in path.split("/"):
            reply = await self.ask(Op.LOOKUP, found, name.encode() + b"\0")
            found = 0 if reply.error else int.from_bytes(reply.body[:8], "little")
            if not found:
                return 0
        self.inos[path] = found
        return found

    async def open(self, path: str, flags: int = os.O_RDONLY) -> int | None:
        ino = self.inos.get(path) or await self.look(path)  # the kernel may have had the number for long
        if not ino:
            return None
        reply = await self.ask(Op.OPEN, ino, protocol.OPEN_IN.pack(flags, 0))
        if reply.error:
            del self.inos[path]
            return None
        self.handles.append((path, opened(reply)[0]))
        return self.handles[-1][1]

    async def release(self, path: str) -> None:
        if self.handles:
            at = self.dice.randrange(len(self.handles))
            path, fh = self.handles.pop(at)
            await self.ask(Op.RELEASE, self.inos.get(path, ROOT), release_in(fh))

    async def stat(self, path: str) -> None:
        if path in self.inos:
            await self.ask(Op.GETATTR, self.inos[path], bytes(16))

    async def read(self, path: str) -> None:
        if self.handles:
            path, fh = self.dice.choice(self.handles)
            await self.ask(Op.READ, self.inos.get(path, ROOT), read_in(fh))

    # -- others ------------------------------------------------------------------------------------

    async def replace(self, path: str) -> None:
        self.version += 1
        self.bucket.set(path, 10 + self.version % 3, self.version)
        self.asking.cache.backings.pop(path, None)

    async def remove(self, path: str) -> None:
        self.bucket.objects.pop(path, None)

    async def refresh(self, path: str) -> None:
        try:
            await self.asking.fs.refresh(self.dice.choice(("", path)))
        except CachefsError as exc:
            self.told.append((type(exc),))

    async def wait(self, path: str) -> None:
        await trio.sleep(self.dice.choice((0.2, 3, 40, 100)))

    async def whole(self, path: str) -> None:
        (self.asking.cache.whole.discard if self.dice.random() < 0.2 else self.asking.cache.whole.add)(path)

    async def retire(self, path: str) -> None:
        backing = self.asking.cache.backings.get(path)
        if backing is not None and not backing.users:
            del self.asking.cache.backings[path]

    # -- changes -----------------------------------------------------------------------------------

    async def write(self, path: str) -> None:
        fh = await self.open(path, os.O_WRONLY)
        if fh is not None:
            data = b"w" * self.dice.randrange(1, 9)
            body = protocol.WRITE_IN.pack(fh, 0, len(data), 0, 0, 0, 0) + data
            await self.ask(Op.WRITE, self.inos[path], body)
            await self.ask(Op.FLUSH, self.inos[path], protocol.FLUSH_IN.pack(fh, 0, 0, 0))

    async def unlink(self, path: str) -> None:
        await self.at(path, Op.UNLINK, b"")

    async def rename(self, path: str) -> None:
        target = self.dice.choice([other for other in FILES if other[:-1] == path[:-1]])
        parent = await self.parent(path)
        if parent:
            names = path[-1:].encode() + b"\0" + target[-1:].encode() + b"\0"
            await self.ask(Op.RENAME, parent, protocol.RENAME_IN.pack(parent) + names)

    async def truncate(self, path: str) -> None:
        if path in self.inos:
            await self.ask(Op.SETATTR, self.inos[path], setattr_in(Setattr.SIZE, size=3))

    async def chmod(self, path: str) -> None:
        if path in self.inos:
            await self.ask(Op.SETATTR, self.inos[path], setattr_in(Setattr.MODE, mode=0o600))

    async def parent(self, path: str) -> int:
        return await self.look("d") if "/" in path else ROOT

    async def at(self, path: str, op: Op, body: bytes) -> None:
        parent = await self.parent(path)
        if parent:
            await self.ask(op, parent, body + path[-1:].encode() + b"\0")


class Forgetful(dict[int, Any]):
    """A table that keeps nothing."""

    def __setitem__(self, key: int, value: Any) -> None:
        pass


async def played(
    seed: int, monkeypatch: pytest.MonkeyPatch, *, writes: bool, direct: bool
) -> tuple[History, int]:
    """What was told, and how many files were opened directly."""
    monkeypatch.setattr(NativeBackend, "direct", direct)
    # The same order of as many tasks, however many had their turns before: in one of the two ways these are fewer.
    monkeypatch.setattr(_run._r, "shuffle", lambda tasks: random.Random(seed).shuffle(tasks))
    begun = trio.current_time()
    # To the millisecond, so that both histories have the same times.
    monkeypatch.setattr(Clock, "__call__", lambda clock: clock.now + round(trio.current_time() - begun, 3))
    bucket = WritableBucket(FILES)
    async with kernel(bucket, writer=MemoryWriter() if writes else None) as asking:
        if not direct:
            asking.fs._files.warm = Forgetful()
            asking.fs._files.walked = Forgetful()
        asking.backend.operations.walks.held_s = HELD_S
        asking.backend._may_poll = False  # or real time would decide which tasks run first
        asking.cache.whole.update(FILES)
        history = History(asking, bucket, seed, writes=writes)
        await history.play()
        counted = asking.metrics
        history.told.append(
            (counted.fuse_open, counted.fuse_release, counted.passthrough_opens, asking.counts)
        )
        assert all(backing.users >= 0 for backing in asking.cache.backings.values())
        table = asking.fs._files._known
        assert not table.closed.keys() & asking.fs._files._by_ino.keys()
        assert table.open.keys() <= asking.fs.handles.keys()
        return history, asking.cache.reused


@pytest.fixture(autouse=True)
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trio lets tasks that can run have their turns in an order of the seed (`played`)."""
    monkeypatch.setattr(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    state = _run._r.getstate()
    yield
    _run._r.setstate(state)


@pytest.mark.parametrize("writes", [False, True], ids=["read-only", "writable"])
async def test_what_is_opened_directly_is_answered_as_ever(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    directly = 0
    monkeypatch.setattr("cachefs.fs.inodes.secrets.randbits", lambda bits: 0)  # the same numbers each time
    for seed in range(int(os.environ.get("CACHEFS_HISTORIES", "20"))):
        found, count = await played(seed, monkeypatch, writes=writes, direct=True)
        directly += count
        expected, none = await played(seed, monkeypatch, writes=writes, direct=False)
        assert not none
        told = found.told
        for step, (one, other) in enumerate(zip(told, expected.told, strict=True)):
            assert one == other, f"seed {seed}, {step}: {told[max(0, step - 8) : step + 1]}"
        assert all(one <= other for one, other in zip(found.kept_s, expected.kept_s, strict=True))
    assert directly > 15, "hardly any"
