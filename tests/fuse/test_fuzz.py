"""Any bytes at all: what has an answer gets one, what has none gets none, and the daemon lives."""

from __future__ import annotations

import errno
import logging
import os
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import trio
import trio.testing
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from cachefs.fuse import protocol
from cachefs.fuse.protocol import Op
from tests.conftest import examples
from tests.fs.bucket import Bucket
from tests.fuse.kernel import OPEN_READ, ROOT, Kernel, kernel, opened, read_in, release_in, request
from tests.fuse.test_replies import listed

U32, U64 = (1 << 32) - 1, (1 << 64) - 1
SILENT = {Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT}
PATHS = ["a", "b", "d", "d/x", "n" * 255, "\u00e9\n"]
SIZES = {
    Op.LOOKUP: protocol.ENTRY_REPLY.size,
    Op.GETATTR: protocol.ATTR_REPLY.size,
    Op.STATFS: protocol.STATFS_REPLY.size,
    Op.OPEN: protocol.OPEN_REPLY.size,
    Op.OPENDIR: protocol.OPEN_REPLY.size,
}
"""Answers of one length."""

settings.register_profile(
    "fuse-fuzz",
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)
PROFILE = settings.get_profile("fuse-fuzz")


class Sent(NamedTuple):
    """`node` below `len(PATHS)` is the inode of that path, else itself. `length` of None is the right one. `deaf`: the
    reply is not taken. `pause`: virtual seconds until the next one, None for none."""

    opcode: int
    node: int
    body: bytes
    unique: int
    length: int | None
    deaf: bool
    pause: float | None


numbers = st.sampled_from([0, 1, 2, 3, 5, 8, 10, 4096, 1 << 20, (1 << 31) - 1, 1 << 31, U32])
offsets = numbers | st.sampled_from([1 << 35, (1 << 63) - 1, 1 << 63, U64]) | st.integers(0, U64)
handles = st.integers(0, 6) | st.sampled_from([U64, 1 << 63])
uniques = st.integers(1, 40) | st.sampled_from([U64, 1 << 63])
names = (
    st.sampled_from([path.encode().rpartition(b"/")[2] for path in PATHS])
    | st.sampled_from([b"", b".", b"..", b"a/b", b"/", b"missing", b"x" * 256, b"x" * 70_000, b"\xff\xfe"])
    | st.sampled_from(
        [b"user.cachefs.key", b"user.cachefs.refresh", b"user.cachefs.cached", b"security.selinux"]
    )
    | st.binary(max_size=20)
)
ended = st.builds(lambda name, end: name + end, names, st.sampled_from([b"\0", b"\0", b"\0", b"", b"\0more"]))
reads = st.builds(read_in, handles, offsets, numbers)

BODIES: dict[int, st.SearchStrategy[bytes]] = {
    Op.LOOKUP: ended,
    Op.FORGET: st.builds(lambda count: struct.pack("=Q", count), offsets),
    Op.BATCH_FORGET: st.builds(
        lambda count, many: struct.pack("=II", count, 0) + b"\xff" * (16 * many), numbers, st.integers(0, 3)
    ),
    Op.OPEN: st.sampled_from([OPEN_READ, protocol.OPEN_IN.pack(os.O_RDWR, 0)]),
    Op.OPENDIR: st.just(OPEN_READ),
    Op.READ: reads,
    Op.READDIR: reads,
    Op.READDIRPLUS: reads,
    Op.RELEASE: handles.map(release_in),
    Op.RELEASEDIR: handles.map(release_in),
    Op.GETXATTR: st.builds(lambda size, name: struct.pack("=II", size, 0) + name, numbers, ended),
    Op.LISTXATTR: numbers.map(lambda size: struct.pack("=II", size, 0)),
    Op.INTERRUPT: uniques.map(protocol.INTERRUPT_IN.pack),
}
OPCODES = [*sorted(BODIES) * 12, *range(61), 4096, U32]
anything = st.binary(max_size=100) | st.sampled_from(
    [b"\xff" * 64, b"\0" * 64, b"a" * 70_000, b"\0" * 100_000]
)


@st.composite
def requests(draw: Callable[..., Any]) -> Sent:
    opcode = draw(st.sampled_from(OPCODES))
    body = draw(BODIES.get(opcode, anything))
    damage = draw(st.integers(0, 14))
    if damage == 0:
        body = body[: draw(st.integers(0, max(0, min(len(body), 100) - 1)))]
    elif damage == 1:
        body = draw(anything)
    elif damage == 2:
        body += draw(st.binary(max_size=9))
    node = draw(
        st.integers(0, len(PATHS))
        | st.sampled_from([77, (1 << 35) + 5, (1 << 63) - 1, 1 << 63, U64 - 1, U64])
    )
    wrong = draw(st.integers(0, 19)) == 0
    length = draw(numbers | st.integers(0, 200)) if wrong else None
    return Sent(
        opcode,
        node,
        body,
        draw(uniques),
        length,
        deaf=draw(st.integers(0, 11)) == 0,
        pause=draw(st.sampled_from([None, None, 0.0, 0.0, 0.015, 30.0])),
    )


class Surprises(logging.Handler):
    """Failures that no table knows: they were answered, and are bugs of ours all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(self.format(record))


def bucket() -> Bucket:
    found = Bucket([*PATHS[:2], "d/x", "d/y", *PATHS[4:]])
    found.put("b", size=50_000)
    return found


def run(main: Callable[[], Any]) -> None:
    surprises = Surprises()
    log = logging.getLogger("cachefs")
    propagates, log.propagate = log.propagate, False
    log.addHandler(surprises)
    try:
        trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    finally:
        log.removeHandler(surprises)
        log.propagate = propagates
    assert not surprises.found, surprises.found[0]


async def still_good(asking: Kernel) -> None:
    """Answers as on the first day, and has nothing left over."""
    reply = await asking.ask(Op.GETATTR, ROOT, bytes(16))
    assert (reply.error, reply.length) == (0, protocol.ATTR_REPLY.size)
    assert not asking.backend._waiting
    assert asking.cache.reading == 0


def check_one(sent: Sent, error: int, body: bytes) -> None:
    """That an answer fits what was asked."""
    if sent.opcode in SIZES and not error:
        assert len(body) + 16 == SIZES[sent.opcode]
    elif sent.opcode in (Op.READ, Op.READDIR, Op.READDIRPLUS) and not error:
        assert len(body) <= protocol.READ_IN.unpack_from(sent.body)[2]
        if sent.opcode != Op.READ:
            listed(body, sent.opcode == Op.READDIRPLUS)
    elif sent.opcode in (Op.GETXATTR, Op.LISTXATTR) and not error:
        size = protocol.GETXATTR_IN.unpack_from(sent.body)[0]
        assert len(body) <= size if size else len(body) == 8
    else:
        assert not body
    if sent.length is not None and sent.length != 40 + len(sent.body):
        assert error == errno.EINVAL


@given(
    st.lists(requests(), min_size=1, max_size=25),
    st.booleans(),
    st.sampled_from(["a", "b", None]),
    st.booleans(),
)
@settings(PROFILE, max_examples=examples(250))
def test_any_requests(
    no_threads: None, script: list[Sent], zero_open: bool, held: str | None, whole: bool
) -> None:
    async def main() -> None:
        strict = {"revalidate_at_open": True, "metadata_ttl": 0.0} if whole else {}
        async with kernel(bucket(), zero_open=zero_open, **strict) as asking:
            inos = [await asking.ino(path) for path in PATHS] + [ROOT]
            told = {await asking.opendir(ROOT), await asking.opendir(inos[2])}
            if not zero_open:
                told |= {await asking.open(inos[0]), await asking.open(inos[1])}
            asking.replies.clear()
            if held:
                asking.cache.hold(held)  # its reads end at the deadline, or with an interrupt
            if whole:
                asking.cache.whole |= {"a", "d/x"}
            expected: Counter[int] = Counter()
            by_unique: dict[int, list[Sent]] = {}
            asking.line.deaf = {sent.unique for sent in script if sent.deaf}
            for sent in script:
                node = inos[sent.node] if sent.node < len(inos) else sent.node
                asking.send_raw(request(sent.opcode, sent.unique, node, sent.body, sent.length))
                by_unique.setdefault(sent.unique, []).append(sent)
                if sent.opcode not in SILENT and sent.unique not in asking.line.deaf:
                    expected[sent.unique] += 1
                if sent.pause is not None:
                    await trio.sleep(sent.pause)
                    asking.drain()
            await trio.sleep(100)
            await asking.idle()
            assert {unique: len(replies) for unique, replies in asking.replies.items()} == dict(expected)
            for unique, sents in by_unique.items():
                for reply in asking.replies.get(unique, []):
                    event(f"errno {errno.errorcode.get(reply.error, reply.error)}")
                    assert 0 <= reply.error < 4096
                    if len(sents) == 1:
                        check_one(sents[0], reply.error, reply.body)
                    if len(reply.body) == 16 and {s.opcode for s in sents} & {Op.OPEN, Op.OPENDIR}:
                        told.add(opened(reply)[0])
            await still_good(asking)
            # Each handle that was reported can be released, and there are no others.
            for fh in told:
                await asking.ask(Op.RELEASE, ROOT, release_in(fh))
                await asking.ask(Op.RELEASEDIR, ROOT, release_in(fh))
            # (Without opens there are ours, which no kernel releases: then one may be gone before we know.)
            files, directories = asking.counts
            assert files <= len(asking.backend.operations.unopened.handles)
            assert directories == 0
            assert asking.cache.open_count == files
            assert sum(backing.users for backing in asking.cache.backings.values()) <= files
            await still_good(asking)

    run(main)


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=20))
@settings(PROFILE, max_examples=examples(100))
def test_noise(no_threads: None, records: list[bytes]) -> None:
    async def main() -> None:
        async with kernel(bucket()) as asking:
            expected: Counter[int] = Counter()
            for record in records:
                asking.send_raw(record)
                if len(record) >= 40:
                    _, opcode, unique, *_ = protocol.IN_HEADER.unpack_from(record)
                    expected[unique] += opcode not in SILENT
            await trio.sleep(100)
            await asking.idle()
            counted = {unique: len(replies) for unique, replies in asking.replies.items()}
            assert counted == dict(+expected)
            await still_good(asking)

    run(main)


@given(
    st.integers(0, 60) | st.sampled_from([4096, U32]),
    st.integers(0, 100),
    st.sampled_from([0, 1, 7, 40, 65536]),
)
@settings(PROFILE, max_examples=examples(150))
def test_every_operation_with_bodies_of_any_length(
    no_threads: None, opcode: int, length: int, more: int
) -> None:
    async def main() -> None:
        async with kernel(bucket()) as asking:
            for node in (ROOT, await asking.ino("a"), 0):
                for filling in (b"\0", b"\xff", b"a"):
                    unique = asking.send(opcode, node, filling * (length + more))
                    await trio.sleep(100)
                    await asking.idle()
                    assert len(asking.replies.get(unique, [])) == (opcode not in SILENT)
            await still_good(asking)
            dirs, files = asking.counts
            assert dirs + files <= 9

    run(main)


def test_every_operation_in_turn(no_threads: None) -> None:
    """All of them, with nothing and with zeros: the table says which are known, nothing else does."""

    async def main() -> None:
        async with kernel(bucket()) as asking:
            for opcode in [*range(61), 4096, U32]:
                for body in (b"", bytes(8), bytes(104)):
                    unique = asking.send(opcode, ROOT, body)
                    await asking.idle()
                    await trio.sleep(1)
                    await asking.idle()
                    assert len(asking.replies.get(unique, [])) == (opcode not in SILENT), opcode
                    if opcode not in SILENT and opcode not in asking.backend._handlers:
                        assert asking.replies[unique][0].error == errno.ENOSYS
            await still_good(asking)

    run(main)
