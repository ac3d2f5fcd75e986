"""Heads: read back as they were spelled, and alike whether they are recognised as a whole or come in pieces, for h11."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.peers.heads import WORKING, Head, NotHttp, ReplyReader, Request, RequestReader
from cachefs.peers.heads import spell_reply as spelled
from cachefs.peers.heads import spell_request as asked
from cachefs.peers.wire import HELLO

SEAL = "0123456789abcdef" * 4
TARGET = f"{HELLO}?key=a%20b/c&etag=%22x%22"
PIECES = st.sampled_from(
    [
        *(b"GET ", b"POST ", b"/v1/hello", b"?x=%20", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b"Host: a:1\r\n"),
        *(
            b"Authorization: S 1 ab cd\r\n",
            b"Authorization:\r\n",
            b"Connection: close\r\n",
            b"x: y\r\n",
            b"\r\n",
        ),
        *(
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 404 Not Found\r\n",
            b"HTTP/1.1 204 No\r\n",
            WORKING,
            b"\n",
            b" ",
            b"\0",
        ),
        *(
            b"Content-Length: 5\r\n",
            b"Content-Length: 05\r\n",
            b"Content-Length: 6\r\n",
            b"Content-Length: -1\r\n",
        ),
        *(
            f"Cachefs-Seal: {SEAL}\r\n".encode(),
            b"Retry-After: 1\r\n",
            b"Transfer-Encoding: chunked\r\n",
            b"body",
        ),
    ]
)
TEXTS = st.one_of(
    st.lists(PIECES, max_size=8).map(b"".join),
    st.tuples(
        st.sampled_from(
            [
                asked(TARGET, "node-1:7070", f"Scheme 1 ab {SEAL}"),
                asked(TARGET, "[::1]:7070", None) * 2,
                WORKING + spelled(Head(200, 100, SEAL, 0, False)),
                spelled(Head(503, 4, "", 1, True)) + b"busy",
            ]
        ),
        st.integers(0, 200),
        st.integers(0, 3),
        st.binary(max_size=3),
    ).map(lambda said: said[0][: said[1]] + said[3] + said[0][said[1] + said[2] :]),
)


def request_in(*parts: bytes) -> object:
    """What the parts are together: a request and what followed it, None while there should be more, or a refusal."""
    reader = RequestReader()
    for number, part in enumerate(parts):
        try:
            found = reader.feed(part)
        except NotHttp as exc:
            return exc.status
        except EOFError:
            return "end"
        if found is not None:
            return found, reader.rest + b"".join(parts[number + 1 :])
    return None


def reply_in(*parts: bytes) -> object:
    """The head, how many signs of life came before it, and what followed."""
    reader, lived = ReplyReader(), 0
    for number, part in enumerate(parts):
        reader.feed(part)
        try:
            while (found := reader.next()) == "working":
                lived += 1
        except NotHttp:
            return "refused", lived
        if found is not None:
            return found, lived, reader.rest + b"".join(parts[number + 1 :])
    return None, lived


@pytest.mark.parametrize("authorization", [None, f"Scheme 1 ab {SEAL}"])
def test_a_request_is_read_as_it_was_spelled(authorization: str | None) -> None:
    text = asked(TARGET, "node-1:7070", authorization)
    said = Request("GET", TARGET, "node-1:7070", authorization or "", 1 + bool(authorization), last=False)
    for parts in ((text + b"more",), (text[:9], text[9:] + b"more")):
        assert request_in(*parts) == (said, b"more")


@pytest.mark.parametrize(
    "head", [Head(200, 10**17, SEAL, 0, False), Head(503, 4, "", 1, False), Head(404, 0, SEAL, 0, True)]
)
def test_a_reply_is_read_as_it_was_spelled(head: Head) -> None:
    text = WORKING + spelled(head)
    for parts in ((text + b"more",), (text[:9], text[9:] + b"more"), (WORKING, spelled(head) + b"more")):
        assert reply_in(*parts) == (head, 1, b"more")


@given(TEXTS)
def test_a_request_is_read_alike_in_pieces(text: bytes) -> None:
    assert request_in(text) == request_in(*(text[at : at + 1] for at in range(len(text)))) or not text


@given(TEXTS)
def test_a_reply_is_read_alike_in_pieces(text: bytes) -> None:
    assert reply_in(text) == reply_in(*(text[at : at + 1] for at in range(len(text))))


@pytest.mark.parametrize("said", [b"Tue, 1 Jan", b"9" * 5000, b"-1"])
def test_a_strange_wait_is_none_or_bounded(said: bytes) -> None:
    found = reply_in(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nRetry-After: %s\r\n\r\n" % said)
    assert isinstance(found, tuple) and isinstance(found[0], Head) and 0 <= found[0].retry_after_s <= 60
