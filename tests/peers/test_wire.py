"""What is said on the wire: every request has one spelling, and what is not one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.names import ObjectId
from cachefs.peers.wire import (
    BLOCKS,
    MAX_TARGET_BYTES,
    Address,
    BlockRequest,
    Handshake,
    Malformed,
    pack_bitmap,
    parse_bitmap,
    parse_query,
)

MIB = 1 << 20
NAMES = st.text(st.characters(), min_size=1, max_size=300)
WITHOUT_ZERO = NAMES.filter(lambda text: "\0" not in text)


@st.composite
def requests(draw: st.DrawFn) -> BlockRequest:
    size = draw(st.integers(1, 1 << 45))
    last = (size - 1) // MIB
    start = draw(st.integers(0, last))
    stop = draw(st.integers(start, last)) + 1
    version = ObjectId(draw(WITHOUT_ZERO), draw(NAMES), draw(WITHOUT_ZERO), size)
    return BlockRequest(version, start, stop, MIB, draw(st.integers(0, 15)))


@given(requests())
def test_a_request_is_read_as_it_was_written(request: BlockRequest) -> None:
    try:
        target = request.target(BLOCKS)
    except Malformed:
        return
    assert target.isascii() and " " not in target and len(target) <= MAX_TARGET_BYTES
    path, _, query = target.partition("?")
    assert path == BLOCKS
    read = parse_query(query, MIB)
    assert read == request
    assert read.object.digest == request.object.digest


def test_an_ordinary_name_is_spelled_as_it_is_and_may_be_spelled_otherwise() -> None:
    request = BlockRequest(ObjectId("s3://bucket", "train/n0144/0001.tar", '"0123-4"', 5), 0, 1, MIB)
    target = request.target(BLOCKS)
    assert "%" not in target and request.object.key in target
    encoded = target.replace("/", "%2F").replace('"', "%22").replace("%2F", "/", 3)
    assert encoded != target and parse_query(encoded.partition("?")[2], MIB) == request


def test_the_longest_key_of_a_store_can_be_asked_for() -> None:
    request = BlockRequest(ObjectId("az://container", "\U0001f600" * 1024, '"etag"', 5), 0, 1, MIB)
    assert parse_query(request.target(BLOCKS).partition("?")[2], MIB) == request


def test_a_name_that_no_peer_would_take_is_not_asked_for() -> None:
    with pytest.raises(Malformed):
        BlockRequest(ObjectId("s3://b", "k" * MAX_TARGET_BYTES, "e", 5), 0, 1, MIB).target(BLOCKS)


GOOD = "source=s&key=k&etag=e&size=100&block=1048576&start=0&stop=1&rank=0"


@pytest.mark.parametrize(
    "query",
    [
        "",
        "source=s",
        GOOD + "&more=1",
        GOOD.replace("source=s&key=k", "key=k&source=s"),
        GOOD.replace("key=k", "key=k&key=l"),
        GOOD.replace("key=k", "key="),
        GOOD.replace("source=s", "source=s%00"),
        GOOD.replace("etag=e", "etag=%00"),
        GOOD.replace("key=k", "key=%ff"),
        GOOD.replace("size=100", "size=-1"),
        GOOD.replace("size=100", "size=1e3"),
        GOOD.replace("size=100", "size=" + "9" * 5000),
        GOOD.replace("size=100", "size=٣"),
        GOOD.replace("size=100", "size=0"),
        GOOD.replace("block=1048576", "block=4096"),
        GOOD.replace("stop=1", "stop=0"),
        GOOD.replace("stop=1", "stop=2"),
        GOOD.replace("start=0", "start=1"),
        GOOD.replace("rank=0", "rank=16"),
    ],
)
def test_what_is_no_request_is_refused(query: str) -> None:
    assert parse_query(GOOD, MIB)
    with pytest.raises(Malformed):
        parse_query(query, MIB)


@given(st.text())
def test_any_text_is_a_request_or_refused(query: str) -> None:
    try:
        request = parse_query(query, MIB)
    except Malformed:
        return
    assert 0 <= request.start < request.stop <= request.object.size


def test_lengths_and_extents() -> None:
    version = ObjectId("s", "k", "e", 20 * MIB + 5)
    whole = BlockRequest(version, 0, 16, MIB)
    assert whole.within_extent() and (whole.start, whole.stop) == (0, 16 * MIB)
    assert whole.body_length(False) == 16 * (MIB + 8)
    assert whole.body_length(True) == 16 * (MIB + 24)
    tail = BlockRequest(version, 16, 21, MIB)
    assert tail.within_extent() and tail.stop == version.size and tail.length(20) == 5
    assert tail.body_length(False) == 4 * MIB + 5 + 5 * 8
    assert not BlockRequest(version, 15, 17, MIB).within_extent()


@given(st.lists(st.booleans(), min_size=1, max_size=200))
def test_a_bitmap_is_read_as_it_was_written(held: list[bool]) -> None:
    body = pack_bitmap(held)
    assert parse_bitmap(body, len(held)) == held
    with pytest.raises(Malformed):
        parse_bitmap(body + b"\0", len(held))


def test_a_handshake_is_read_as_it_was_written() -> None:
    handshake = Handshake("node", 1, "group", "sources", 0.0)
    assert Handshake.parse(handshake.pack()) == handshake
    assert Handshake.parse(handshake.pack()[:-1] + b', "later": []}') == handshake


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b"[" * 9000,
        b'{"node": 1, "version": 1, "group": "", "sources": "", "weight": 1}',
        b'{"node": "n", "version": true, "group": "", "sources": "", "weight": 1}',
        b'{"node": "n", "version": 1, "group": "", "sources": "", "weight": NaN}',
        b'{"node": "n", "version": 1, "group": "", "sources": "", "weight": -1}',
        b'{"node": "n", "version": 1, "group": "", "sources": "", "weight": Infinity}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_handshake_is_refused(body: bytes) -> None:
    with pytest.raises(Malformed):
        Handshake.parse(body)


def test_addresses_are_said_as_a_host_header_has_them() -> None:
    assert str(Address("node-1", 80)) == "node-1:80"
    assert str(Address("::1", 80)) == "[::1]:80"
