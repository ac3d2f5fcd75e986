"""Heads of HTTP/1.1: read back as they were spelled, alike in any pieces, and never more freely than h11 reads them."""

from __future__ import annotations

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.http1 import (
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    NotHttp,
    parse_reply,
    parse_request,
    spell_reply,
    spell_request,
)

TARGET = "/v1/handshake?key=a%20b/c&etag=%22x%22"
PIECES = st.sampled_from(
    [
        b"GET ",
        b"POST ",
        b"/v1/handshake",
        b"?x=%20",
        b" HTTP/1.1\r\n",
        b" HTTP/1.0\r\n",
        b"Host: a:1\r\n",
        b"Authorization: S 1 ab cd\r\n",
        b"Authorization:\r\n",
        b"Connection: close\r\n",
        b"x: y\r\n",
        b"\r\n",
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 404 Not Found\r\n",
        b"HTTP/1.1 102 Processing\r\n\r\n",
        b"Content-Length: 5\r\n",
        b"Content-Length: 05\r\n",
        b"Content-Length: -1\r\n",
        b"Host : a\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"body",
        b"\n",
        b" ",
        b"\0",
        b"\xff",
    ]
)
TEXTS = st.one_of(
    st.lists(PIECES, max_size=8).map(b"".join),
    st.tuples(
        st.sampled_from(
            [
                spell_request(TARGET, {"Host": "node-1:7070", "Authorization": "Scheme 1 ab"}),
                spell_request(TARGET, {"Host": "[::1]:7070"}) * 2,
                spell_reply(102, {}) + spell_reply(200, {"Content-Length": "100"}),
                spell_reply(503, {"Content-Length": "4", "Connection": "close"}) + b"busy",
            ]
        ),
        st.integers(0, 200),
        st.integers(0, 3),
        st.binary(max_size=3),
    ).map(lambda said: said[0][: said[1]] + said[3] + said[0][said[1] + said[2] :]),
)


def test_a_request_is_read_as_it_was_spelled() -> None:
    text = spell_request(TARGET, {"Host": "node-1:7070", "Authorization": "Scheme 1 ab"})
    found = parse_request(text + b"more")
    assert found is not None
    assert (found.method, found.target, found.body, found.last) == ("GET", TARGET, False, False)
    assert found.headers == {"host": "node-1:7070", "authorization": "Scheme 1 ab"} and found.stop == len(
        text
    )


def test_a_reply_is_read_as_it_was_spelled() -> None:
    text = spell_reply(503, {"Content-Length": "4", "Connection": "close"})
    found = parse_reply(text + b"busy")
    assert found is not None
    assert (found.status, found.length, found.last, found.stop) == (503, 4, True, len(text))


@pytest.mark.parametrize("parse", [parse_request, parse_reply])
@given(text=TEXTS)
def test_a_head_is_read_alike_in_pieces(parse: object, text: bytes) -> None:
    def outcome(data: bytes) -> object:
        try:
            return parse(data)  # type: ignore[operator]
        except NotHttp as exc:
            return exc.status

    whole = outcome(text)
    for stop in range(len(text)):
        found = outcome(text[:stop])
        if found is not None:  # a refusal is final, and a head does not depend on what follows it
            assert found == whole
            break


@given(TEXTS)
def test_every_request_that_is_accepted_means_the_same_to_h11(text: bytes) -> None:
    try:
        found = parse_request(text)
    except NotHttp:
        return
    if found is None:
        return
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(text)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        assert found.body, "only lengths of bodies, which no server here reads, are judged later"
        return
    assert isinstance(event, h11.Request)
    assert (event.method.decode(), event.target.decode()) == (found.method, found.target)
    assert {
        name.decode(): value.decode("latin-1") for name, value in event.headers
    }.keys() == found.headers.keys()
    assert dict(event.headers).get(b"host", b"").decode("latin-1") == found.headers.get("host", "")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"\x16\x03\x01\x02\x00", 400),
        (b"GET /\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nHost: a\n\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * MAX_HEADERS + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nx: " + b"y" * MAX_HEAD_BYTES, 431),
    ],
)
def test_what_is_not_http_is_refused_at_once(text: bytes, status: int) -> None:
    with pytest.raises(NotHttp) as refused:
        parse_request(text)
    assert refused.value.status == status


@pytest.mark.parametrize(
    "more", [b"", b"Content-Length: 1x\r\n", b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n"]
)
def test_a_reply_has_a_length(more: bytes) -> None:
    with pytest.raises(NotHttp):
        parse_reply(b"HTTP/1.1 200 OK\r\n" + more + b"\r\n")


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(NotHttp):
        parse_reply(b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n")
    found = parse_request(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nContent-Length: 5\r\n\r\n")
    assert found is not None and found.body
