"""The control socket: one JSON line in, one JSON line out.

A request is ``{"verb": "status", …arguments}``; the reply is ``{"ok": true, "result": …}`` or ``{"ok": false, "error": "one
line"}``. The daemon passes in the verbs; this module only transports them. Only the user that runs the daemon, and root, may
connect: the socket is 0600, in a directory of that user alone.

No client can block the daemon: requests and connections are bounded, and every step has a deadline.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from cachefs.base import ownership
from cachefs.base.client import CREDENTIALS, MAX_REQUEST_BYTES, ControlError, NotRunning, connected
from cachefs.base.errors import CachefsError
from cachefs.base.listening import Listener
from cachefs.base.tasks import contained

log = logging.getLogger(__name__)

Verbs = Mapping[str, Callable[..., Awaitable[Any]]]

MAX_CONNECTIONS = 16
"""Most connections at a time. As many again wait in the kernel, and further clients wait in connect(2)."""

TALK_DEADLINE_S = 5.0
"""How long a client may take to send its line, and again to receive the reply."""

VERB_DEADLINE_S = 60.0


async def serve(path: Path, verbs: Verbs, *, task_status: Any = trio.TASK_STATUS_IGNORED) -> None:
    """Answer requests at `path` until cancelled. Raises `ControlError` if it cannot listen there."""
    listener = _listen(path)
    inode = os.stat(path).st_ino
    slots = trio.Semaphore(MAX_CONNECTIONS)

    async def handle(stream: trio.SocketStream) -> None:
        try:
            async with stream:
                await _answer(stream, verbs)
        finally:
            slots.release()

    task_status.started()
    accepting = Listener(trio.SocketListener(trio.socket.from_stdlib_socket(listener)), "the control socket")
    try:
        async with accepting, trio.open_nursery() as nursery:
            while True:
                await slots.acquire()
                contained(nursery, "a control connection", handle, await accepting.accept())
    finally:
        with suppress(OSError):
            if os.stat(path).st_ino == inode:  # else another daemon has its socket there
                os.unlink(path)


async def _answer(stream: trio.SocketStream, verbs: Verbs) -> None:
    line: bytes | None = None
    with trio.move_on_after(TALK_DEADLINE_S):
        try:
            line = await _read_line(stream)
        except trio.BrokenResourceError:
            return
    if line is None:
        return
    await _send(stream, await _perform(line, verbs))


async def _read_line(stream: trio.SocketStream) -> bytes:
    received = bytearray()
    while b"\n" not in received and len(received) <= MAX_REQUEST_BYTES:
        chunk = await stream.receive_some(64 << 10)
        if not chunk:
            break
        received += chunk
    return bytes(received)


async def _perform(line: bytes, verbs: Verbs) -> dict[str, Any]:
    if len(line) > MAX_REQUEST_BYTES:
        return {"ok": False, "error": f"request longer than {MAX_REQUEST_BYTES} bytes"}
    try:
        arguments = json.loads(line)
        name = arguments.pop("verb")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return {"ok": False, "error": 'not a request: write {"verb": "status"}'}
    verb = verbs.get(name) if isinstance(name, str) else None
    if verb is None:
        return {"ok": False, "error": f"unknown verb {name!r}: this daemon knows {', '.join(sorted(verbs))}"}
    try:
        inspect.signature(verb).bind(**arguments)
    except TypeError as exc:
        return {"ok": False, "error": f"{name}: {exc}"}
    try:
        with trio.fail_after(VERB_DEADLINE_S):
            return {"ok": True, "result": await verb(**arguments)}
    except trio.TooSlowError:
        return {"ok": False, "error": f"{name}: not done within {VERB_DEADLINE_S:.0f} s"}
    except CachefsError as exc:
        return {"ok": False, "error": str(exc)}
    except OSError as exc:  # the kernel refuses something, such as one more descriptor
        reason = ": ".join(str(part) for part in (exc.strerror or exc, exc.filename) if part)
        log.info("control verb %s: %s", name, reason)
        return {"ok": False, "error": " ".join(f"{name}: {reason}".split())}
    except Exception as exc:
        log.exception("control verb %s failed", name)
        return {"ok": False, "error": f"{name}: internal error ({type(exc).__name__}): the log has more"}


async def _send(stream: trio.SocketStream, reply: Mapping[str, Any]) -> None:
    # The client may have closed the connection.
    with trio.move_on_after(TALK_DEADLINE_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await stream.send_all(json.dumps(reply, default=str).encode() + b"\n")


def _listen(path: Path) -> socket.socket:
    try:
        ownership.claim(path.parent, whole=True)
    except OSError as exc:
        raise ControlError(f"cannot make the control socket {path}: {exc.strerror}") from exc
    except ownership.ForeignDirectory as exc:
        raise ControlError(f"cannot make the control socket: {exc}") from exc
    try:
        with connected(path, TALK_DEADLINE_S) as other:
            credentials = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
            raise ControlError(
                f"another cachefs (pid {CREDENTIALS.unpack(credentials)[0]}) answers at {path}: after umount --lazy it goes "
                "on until its last user has gone: wait for that, or choose another mountpoint"
            )
    except NotRunning:
        pass
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # It gets its name when it listens: `cachefs status` removes sockets that refuse connections.
    nameless = path.with_suffix(".new")
    try:
        nameless.unlink(missing_ok=True)
        listener.bind(str(nameless))
        nameless.chmod(0o600)
        listener.listen(MAX_CONNECTIONS)
        nameless.rename(path)
    except OSError as exc:
        listener.close()
        raise ControlError(f"cannot make the control socket {path}: {exc.strerror or exc}") from exc
    return listener
