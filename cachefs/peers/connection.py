"""The client's end of a connection.

What is done with the socket is written as generators that yield what they wait for, and driven by a trio task, so that a
request, the head of its reply and a short body cost no thread. A long body is received by a worker thread, which waits in
the kernel: one call for some hundred KiB, where a socket that does not block takes several calls and polls, each of them
another fight over the interpreter's lock (measured, with what `SCOOP_BYTES` saves: a quarter of what an extent costs both
sides).
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
from collections.abc import Generator
from typing import TypeAlias, TypeVar

from cachefs.peers.heads import Head, NotHttp, ReplyReader, spell_request
from cachefs.peers.protocol import PeerFailed
from cachefs.peers.wire import Address

READ_BYTES = 16 << 10
"""Of a head at once; what comes of the body with it is copied once more."""

SCOOP_BYTES = 256 << 10
"""A thread that receives a block is woken when that much more of it is there. Measured, of all that an extent costs both
sides: a sixth less than when any byte wakes it, as at 512 KiB; 64 KiB save a twelfth."""

READ, WRITE = select.POLLIN, select.POLLOUT
WORKING = 0
"""Nothing to wait for: the peer has said that the answer comes."""

_TIMEVAL = struct.Struct("@ll")
_BYTES_RECEIVED = struct.Struct("@128xQ")
"""The end of what is wanted of `struct tcp_info` (linux/tcp.h), tcpi_bytes_received."""

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
        self._silence_s = 0.0
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
        at = self._take_early(view)
        while at < len(view):
            try:
                count = self._socket.recv_into(view[at:])
            except (BlockingIOError, ssl.SSLWantReadError):
                yield READ
                continue
            except OSError as exc:
                raise self._lost(exc) from exc
            if not count:
                raise self._broken_off()
            at += count

    def fill(self, view: memoryview) -> None:
        """`read_into` for the worker thread that this is lent to. Silence is told of when it has lasted for as long as was
        said to `lend`, or up to twice that."""
        if self._tls is not None:
            for event in self.read_into(view):
                self._wait(event)
            return
        at, scoops = self._take_early(view), len(view) - SCOOP_BYTES
        if at < scoops:
            # Never more than is to come: behind these bytes there are as many that the server sends with them.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, SCOOP_BYTES)
            at = self._receive(view, at, scoops)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        self._receive(view, at, len(view))

    def _receive(self, view: memoryview, at: int, stop: int) -> int:
        """Fill [at, stop) of `view`, on a socket that blocks. Returns `stop`."""
        while at < stop:
            try:
                count = self._socket.recv_into(view[at:stop], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise self.silent() from None
            except OSError as exc:
                raise self._lost(exc) from exc
            if not count:
                raise self._broken_off()
            at += count
        return at

    def _broken_off(self) -> PeerFailed:
        return PeerFailed("reset", f"{self.address} hung up within its reply")

    def _take_early(self, view: memoryview) -> int:
        early = self._early[: len(view)]
        view[: len(early)] = early
        self._early = self._early[len(early) :]
        return len(early)

    def fileno(self) -> int:
        return self._socket.fileno()

    def _wait(self, event: int) -> None:
        poll = select.poll()
        poll.register(self._socket, event)
        if not poll.poll(self._silence_s * 1000):
            raise self.silent()

    def silent(self) -> PeerFailed:
        return PeerFailed("timeout", f"{self.address} was silent for too long")

    def slow(self) -> PeerFailed:
        return PeerFailed("slow", f"{self.address} sends much more slowly than the origin")

    def received(self) -> int:
        """Bytes that the kernel has received on this connection so far, those not read yet included."""
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        count: int = _BYTES_RECEIVED.unpack(info)[0]
        return count

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

    def lend(self, silence_s: float) -> None:
        """To a worker thread, which calls `fill` and `give_back`."""
        self._lent = True
        self._silence_s = silence_s
        if self._tls is None:  # TLS waits outside of its own calls
            silence = _TIMEVAL.pack(*divmod(int(silence_s * 1e6), 1_000_000))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
            self._socket.setblocking(True)

    def give_back(self) -> None:
        """From the worker thread. The flag falls before the other is looked at, so one of the two sides closes."""
        self._socket.setblocking(False)
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
