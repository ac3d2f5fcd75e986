"""A peer that does not do what it should: it has the cluster's key, and a host of its own.

Of itself it says what the requesting peer says of itself, but for the name, so that one takes it for a member with the usual
share. How it answers a request for blocks is for the `Lie`: given the request and the MACs of an honest answer, the bytes
to send, and whether to hang up or to keep silent after them. It knows the bytes of all that `Dataset.many` made, and may as
well be honest."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from typing import NamedTuple

import xxhash

from bench.lab.dataset import content
from bench.lab.netns import Host
from cachefs.peers.auth import Key, Macs, Signer, Verifier
from cachefs.peers.wire import BLOCKS, CHECKSUM, HANDSHAKE, BlockRequest, Handshake, parse_query
from tests.cluster.nodes import PORT

MIB = 1 << 20


class Answer(NamedTuple):
    """`then` is what happens after these bytes: the next request, the end of the connection, or nothing."""

    sent: bytes
    then: str = "next"  # or "close" or "hang"


Lie = Callable[[BlockRequest, Macs], Answer]


def body(request: BlockRequest, macs: Macs) -> bytes:
    """As an honest peer sends it."""
    parts = []
    for block in range(request.start_block, request.stop_block):
        data = content(request.object.key, request.length(block), block * MIB)
        check = CHECKSUM.pack(xxhash.xxh3_64_intdigest(data))
        parts += [data, check, macs.block(block, check)]
    return b"".join(parts)


def head(macs: Macs, length: int, status: str = "200 OK", immutable: bytes = b"", more: str = "") -> bytes:
    """Of a reply, with its MAC. `immutable` is the body, but for blocks."""
    mac = macs.reply(int(status[:3]), length, immutable)
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nCachefs-MAC: {mac}\r\n{more}\r\n".encode()


def honest(request: BlockRequest, macs: Macs) -> Answer:
    sent = body(request, macs)
    return Answer(head(macs, len(sent)) + sent)


def flipped(request: BlockRequest, macs: Macs) -> Answer:
    """One bit went wrong after it was hashed."""
    sent = bytearray(body(request, macs))
    sent[len(sent) // 2] ^= 0x10
    return Answer(head(macs, len(sent)) + sent)


def another_object(request: BlockRequest, macs: Macs) -> Answer:
    """The right checksums, under other bytes."""
    sent = bytearray(body(request, macs))
    length = request.length(request.start_block)
    sent[:length] = content("of nobody", length)
    return Answer(head(macs, len(sent)) + sent)


def too_short(request: BlockRequest, macs: Macs) -> Answer:
    sent = body(request, macs)[:-1]
    return Answer(head(macs, len(sent)) + sent)


def too_long(request: BlockRequest, macs: Macs) -> Answer:
    sent = body(request, macs) + b"x"
    return Answer(head(macs, len(sent)) + sent)


def broken_off(request: BlockRequest, macs: Macs) -> Answer:
    sent = body(request, macs)
    return Answer(head(macs, len(sent)) + sent[: len(sent) // 2], "close")


def silent(request: BlockRequest, macs: Macs) -> Answer:
    return Answer(b"", "hang")


def silent_within(request: BlockRequest, macs: Macs) -> Answer:
    sent = body(request, macs)
    return Answer(head(macs, len(sent)) + sent[: len(sent) // 2], "hang")


def for_ever_working(request: BlockRequest, macs: Macs) -> Answer:
    """It is just coming, and does not come."""
    return Answer(b"HTTP/1.1 102 Processing\r\n\r\n", "again")


def endless_headers(request: BlockRequest, macs: Macs) -> Answer:
    return Answer(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000, "hang")


def of_a_stranger(request: BlockRequest, macs: Macs) -> Answer:
    """All is right but the key."""
    return honest(request, macs._replace(key=Key(b"another key than the others have")))


def without_mac(request: BlockRequest, macs: Macs) -> Answer:
    sent = body(request, macs)
    return Answer(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(sent) + sent)


def refusing(status: str, more: str = "") -> Lie:
    def refuse(request: BlockRequest, macs: Macs) -> Answer:
        return Answer(head(macs, 0, status, more=more))

    return refuse


LIES: dict[str, Lie] = {
    lie.__name__.replace("_", " "): lie
    for lie in (
        flipped,
        another_object,
        too_short,
        too_long,
        broken_off,
        silent,
        silent_within,
        for_ever_working,
        endless_headers,
        of_a_stranger,
        without_mac,
    )
} | {
    "not here": refusing("404 Not Found"),
    "changed": refusing("412 Precondition Failed"),
    "busy for ever": refusing("503 Service Unavailable", "Retry-After: 99999999\r\n"),
    "a redirection": refusing("307 Temporary Redirect", "Location: http://10.77.0.9/\r\n"),
}


class Liar:
    """`asked` counts the requests for blocks."""

    def __init__(self, host: Host, key: Key, lie: Lie) -> None:
        self.lie = lie
        self.asked = 0
        self._host = host
        self._signer = Signer(key)
        self._verifier = Verifier(key)
        self._ended = threading.Event()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        with connection:
            try:
                while (request := _next_request(connection)) is not None:
                    if not self._answer(connection, *request):
                        return
            except OSError:
                pass  # the requesting peer has enough

    def _answer(self, connection: socket.socket, target: str, headers: dict[str, str]) -> bool:
        """Whether the connection goes on."""
        path, _, query = target.partition("?")
        macs = self._verifier.verify(target, headers["host"], headers["authorization"])
        if path != BLOCKS:
            said = self._mirror(connection.getpeername()[0]).pack()
            connection.sendall(head(macs, len(said), immutable=said) + said)
            return True
        self.asked += 1
        answer = self.lie(parse_query(query, MIB), macs)
        connection.sendall(answer.sent)
        while answer.then == "again" and not self._ended.wait(0.5):
            connection.sendall(answer.sent)
        if answer.then == "hang":
            self._ended.wait()
        return answer.then == "next"

    def _mirror(self, requester: str) -> Handshake:
        name = f"{requester}:{PORT}"
        asking = HTTPConnection(requester, PORT, timeout=2)
        with self._host.inside():
            asking.connect()
        signed, _ = self._signer.sign(HANDSHAKE, name)
        asking.request("GET", HANDSHAKE, headers={"Host": name, "Authorization": signed})
        said = Handshake.parse(asking.getresponse().read())
        asking.close()
        return replace(said, node="liar", life="liar")


def _next_request(connection: socket.socket) -> tuple[str, dict[str, str]] | None:
    """(target, headers) of a GET; None when the connection has ended."""
    received = b""
    while b"\r\n\r\n" not in received:
        part = connection.recv(16 << 10)
        if not part:
            return None
        received += part
    first, *lines = received.decode().split("\r\n\r\n")[0].split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    return first.split(" ")[1], {name.lower(): value for name, value in pairs}


@contextmanager
def lying(host: Host, key: Key, lie: Lie) -> Iterator[Liar]:
    """It listens where a node of this host would."""
    liar = Liar(host, key, lie)
    with host.inside():
        listener = socket.create_server((host.address, PORT))
    thread = threading.Thread(target=liar._serve, args=(listener,), daemon=True)
    thread.start()
    try:
        yield liar
    finally:
        liar._ended.set()
        listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        listener.close()
        thread.join(5)
