"""The client's end of a connection.

The socket never blocks. What is done with it is written once, as generators that yield what they wait for, and driven in
two ways: by a trio task, which a request and the head of its reply cost no thread, and by a worker thread, which can take
a long body off the event loop's hands.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from cachefs.peers.heads import Head, NotHttp, ReplyReader, spell_request
from cachefs.peers.protocol import PeerFailed
from cachefs.peers.wire import Address

READ_BYTES = 16 << 10
"""Of a head at once; what comes of the body with it is copied once more."""

READ, WRITE = select.POLLIN, select.POLLOUT
WORKING = 0
"""Nothing to wait for: the peer has said that the answer comes."""

T = TypeVar("T")
Steps: TypeAlias = Generator[int, None, T]
"""Yields `READ` or `WRITE`: go on when the socket is ready for that. Only `Connection.ask` yields `WORKING`."""


class Connection:
    """To one peer. The generators and `wait` raise `PeerFailed`, nothing else."""

    def __init__(self, sock: socket.socket, address: Address, tls: ssl.SSLContext | None = None) -> None:
        """Takes over a connected socket that does not block. `shake_hands` comes first."""
        self._socket = sock
        self._tls = tls
        self.address = address
        self._early = memoryview(b"")  # of the body, received with the head
        self.used = False
        """Whether it has brought a reply."""
        self._lent = False
        self._unwanted = False

    def shake_hands(self) -> Steps[None]:
        """Before the first request."""
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                return
            secure = self._tls.wrap_socket(
                self._socket, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            self._socket = secure
            while True:
                try:
                    secure.do_handshake()
                except ssl.SSLWantReadError:
                    yield READ
                except ssl.SSLWantWriteError:
                    yield WRITE
                else:
                    return
        except OSError as exc:
            raise self._lost(exc, trusted=False) from exc

    def ask(self, target: str, authorization: str | None) -> Steps[Head]:
        """Send a request and receive the head of its reply."""
        request, reply = spell_request(target, str(self.address), authorization), ReplyReader()
        try:
            while request:
                try:
                    request = request[self._socket.send(request) :]
                except (BlockingIOError, ssl.SSLWantWriteError):
                    yield WRITE
                except ssl.SSLWantReadError:
                    yield READ
            yield READ
            while (found := reply.next()) is None or found == "working":
                if found is not None:
                    yield WORKING
                    continue
                try:
                    received = self._socket.recv(READ_BYTES)
                except (BlockingIOError, ssl.SSLWantReadError):
                    yield READ
                    continue
                if not received and not reply.rest:
                    raise PeerFailed("reset", f"{self.address} hung up")
                reply.feed(received)
        except NotHttp as exc:
            raise PeerFailed("refused", f"{self.address} does not speak this protocol") from exc
        except OSError as exc:
            raise self._lost(exc, trusted=False) from exc
        self._early = memoryview(reply.rest)
        return found

    def read_into(self, view: memoryview) -> Steps[None]:
        """Fill `view` with the next bytes of the body."""
        early = self._early[: len(view)]
        view[: len(early)] = early
        self._early = self._early[len(early) :]
        at = len(early)
        while at < len(view):
            try:
                count = self._socket.recv_into(view[at:])
            except (BlockingIOError, ssl.SSLWantReadError):
                yield READ
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            if not count:
                raise PeerFailed("reset", f"{self.address} hung up within its reply")
            at += count

    def fileno(self) -> int:
        return self._socket.fileno()

    def wait(self, event: int, silence_s: float) -> None:
        """For a worker thread: block until the socket is ready."""
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(silence_s * 1000):
            raise self.silent()

    def silent(self) -> PeerFailed:
        return PeerFailed("timeout", f"{self.address} was silent for too long")

    def quiet(self) -> bool:
        """Whether nothing has come beyond the body, neither bytes nor an end: then another request may follow."""
        if self._early or (isinstance(self._socket, ssl.SSLSocket) and self._socket.pending()):
            return False
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK)  # below TLS, where silence is silence
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def lend(self) -> None:
        """To a worker thread, which calls `give_back`."""
        self._lent = True

    def give_back(self) -> None:
        """From the worker thread. The flag falls before the other is looked at, so one of the two sides closes."""
        self._lent = False
        if self._unwanted:
            self._socket.close()

    def close(self) -> None:
        """While it is lent: shut down, so that the thread ends at once, and closed by `give_back`. A descriptor must not
        be closed, and perhaps given to another file, while somebody waits on it."""
        self._unwanted = True
        if self._lent:
            try:
                socket.socket.shutdown(
                    self._socket, socket.SHUT_RDWR
                )  # not TLS's, which would touch its state
            except OSError:
                pass
        else:
            self._socket.close()

    def _lost(self, exc: OSError, *, trusted: bool = True) -> PeerFailed:
        if isinstance(exc, ssl.SSLError) and not trusted and not isinstance(exc, ssl.SSLEOFError):
            # Also while waiting for a head: in TLS 1.3 a server judges our certificate after the handshake.
            return PeerFailed("refused", f"{self.address}: TLS: {exc.reason or exc}")
        return PeerFailed("reset", f"{self.address}: {exc.strerror or exc}")
