"""The control socket: verbs, refusals, clients that misbehave, sockets that are left over."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cachefs.base import client
from cachefs.base.client import ControlError, NotRunning, request
from cachefs.base.errors import MountError, NotFound
from cachefs.base.linux import Mount, is_dead, probe
from cachefs.daemon import asking, control

SLACK_S = 30.0


async def status() -> dict[str, Any]:
    return {"pid": os.getpid(), "path": Path("/x")}


async def echo(text: str = "", times: int = 1) -> str:
    return text * times


async def missing() -> None:
    raise NotFound("no such thing")


async def broken() -> None:
    raise ZeroDivisionError


async def exhausted() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/self/statm")


async def silent() -> None:
    raise TimeoutError("no answer\nfrom the disk")


VERBS: dict[str, Callable[..., Any]] = {
    "status": status,
    "echo": echo,
    "missing": missing,
    "broken": broken,
    "exhausted": exhausted,
    "silent": silent,
}


@asynccontextmanager
async def serving(path: Path, verbs: dict[str, Callable[..., Any]] = VERBS) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        await nursery.start(control.serve, path, verbs)
        yield
        nursery.cancel_scope.cancel()


async def ask(path: Path, verb: str, timeout_s: float = 5.0, **arguments: Any) -> Any:
    return await trio.to_thread.run_sync(partial(request, path, verb, timeout_s, **arguments))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "mount.sock"


def test_verbs(path: Path) -> None:
    async def main() -> None:
        async with serving(path):
            assert await ask(path, "status") == {"pid": os.getpid(), "path": "/x"}
            assert await ask(path, "echo", text="é\n\0", times=3) == "é\n\0" * 3
            assert len(await ask(path, "echo", text="x", times=5_000_000)) == 5_000_000
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700

    trio.run(main)
    assert not path.exists()


@pytest.mark.parametrize(
    ("verb", "arguments", "words"),
    [
        ("missing", {}, "no such thing"),
        (
            "frobnicate",
            {},
            "unknown verb 'frobnicate': this daemon knows broken, echo, exhausted, missing, silent, status",
        ),
        ("echo", {"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
        ("broken", {}, "broken: internal error (ZeroDivisionError)"),
        ("exhausted", {}, "exhausted: Too many open files: /proc/self/statm"),
        ("silent", {}, "silent: no answer from the disk"),
    ],
)
def test_refusals(path: Path, verb: str, arguments: dict[str, Any], words: str) -> None:
    async def main() -> None:
        async with serving(path):
            with pytest.raises(ControlError) as caught:
                await ask(path, verb, **arguments)
            assert words in str(caught.value)
            assert await ask(path, "echo", text="alive") == "alive"

    trio.run(main)


def raw(path: Path, data: bytes) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(str(path))
        try:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        except BrokenPipeError:
            pass
        with client.makefile("rb") as reader:
            reply: dict[str, Any] = json.loads(reader.readline())
            return reply


@pytest.mark.parametrize(
    "data",
    [
        b"rubbish\n",
        b"[]\n",
        b'"status"\n',
        b"{}\n",
        b'{"verb": ["status"]}\n',
        b"\xff\n",
        b"[" * 60_000 + b"\n",
        b"\n",
    ],
)
def test_rubbish(path: Path, data: bytes) -> None:
    async def main() -> None:
        async with serving(path):
            reply = await trio.to_thread.run_sync(raw, path, data)
            assert reply["ok"] is False
            assert await ask(path, "echo", text="alive") == "alive"

    trio.run(main)


def test_a_request_of_512_kib_is_the_largest(path: Path) -> None:
    async def main() -> None:
        async with serving(path):
            assert await ask(path, "echo", text="x" * 500_000) == "x" * 500_000
            with pytest.raises(ControlError):
                await ask(path, "echo", text="x" * (512 << 10))
            assert await ask(path, "echo", text="alive") == "alive"

    trio.run(main)


def test_long_lists_travel_in_pieces_that_fit() -> None:
    paths = [f"näme-{n:07}/\udcff" for n in range(50_000)]
    pieces = list(client.batches(paths))
    assert [path for piece in pieces for path in piece] == paths
    assert len(pieces) > 1
    assert max(len(json.dumps(piece)) for piece in pieces) <= client.BATCH_BYTES
    assert list(client.batches([])) == []
    assert list(client.batches(["x" * client.BATCH_BYTES, "y"])) == [["x" * client.BATCH_BYTES], ["y"]]


def test_slow_and_many_clients_hold_nobody_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "TALK_DEADLINE_S", 0.3)

    async def main() -> None:
        async with serving(path):
            silent = [await trio.open_unix_socket(path) for _ in range(control.MAX_CONNECTIONS)]
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert await ask(path, "echo", text="waits") == "waits"
            for stream in silent:  # each is hung up on at the deadline
                with trio.fail_after(3):
                    assert await stream.receive_some(1) == b""
                await stream.aclose()
            assert await ask(path, "echo", text="alive") == "alive"

            lazy = await trio.open_unix_socket(path)  # asks for much and takes nothing
            await lazy.send_all(b'{"verb": "echo", "text": "x", "times": 50000000}\n')
            assert await ask(path, "echo", text="alive") == "alive"
            await lazy.aclose()

    trio.run(main)


def test_no_request_of_many_ranks_is_lost(path: Path) -> None:
    """More at once than there are connections and places in the kernel's queue."""
    ranks = 4 * control.MAX_CONNECTIONS
    most = under_way = 0
    free = trio.Event()

    async def hint(rank: int) -> int:
        nonlocal most, under_way
        under_way += 1
        most = max(most, under_way)
        await free.wait()
        under_way -= 1
        return rank

    async def main() -> None:
        async with serving(path, {"hint": hint}):
            with ThreadPoolExecutor(ranks) as threads:
                asked = [threads.submit(request, path, "hint", SLACK_S, rank=rank) for rank in range(ranks)]
                while under_way < control.MAX_CONNECTIONS:
                    await trio.testing.wait_all_tasks_blocked(0.01)
                free.set()
                await trio.to_thread.run_sync(partial(wait, asked))
        assert [one.result() for one in asked] == list(range(ranks))
        assert most == control.MAX_CONNECTIONS

    trio.run(main)


def test_a_slow_verb_ends_at_its_deadline(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "VERB_DEADLINE_S", 0.1)

    async def main() -> None:
        async with serving(path, {"sleep": partial(trio.sleep, 60)}):
            with pytest.raises(ControlError, match="sleep: not done within"):
                await ask(path, "sleep")

    trio.run(main)


def test_a_socket_left_over_is_replaced_and_a_live_one_is_not(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NotRunning):
        request(path, "status")

    async def main() -> None:
        async with serving(path):
            assert await ask(path, "echo", text="alive") == "alive"
            words = rf"another cachefs \(pid {os.getpid()}\) answers at .*: wait .* choose another mountpoint"
            with pytest.raises(ControlError, match=words):
                await control.serve(path, VERBS)
            assert await ask(path, "echo", text="alive") == "alive"

    trio.run(main)


def test_a_status_amid_a_start_takes_no_socket_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` removes the socket of a dead daemon, at which no process listens, and none of a daemon that starts."""
    monkeypatch.setattr(asking, "runtime_dir", lambda: path.parent)
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    looked: list[bool] = []

    class Slow(socket.socket):
        def listen(self, *backlog: int) -> None:
            looked.append(bool(asking.all_statuses()))
            super().listen(*backlog)

    async def main() -> None:
        monkeypatch.setattr(control.socket, "socket", Slow)
        async with serving(path):
            assert looked == [False]
            assert await ask(path, "echo", text="alive") == "alive"
            assert os.listdir(path.parent) == [path.name] and os.stat(path).st_mode & 0o777 == 0o600

    trio.run(main)
    assert not path.exists()


def test_a_status_that_found_a_dead_daemon_leaves_the_socket_of_the_next(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "runtime_dir", lambda: path.parent)
    path.parent.mkdir(mode=0o700)
    path.touch()

    def refused(place: Path, *_: Any, **__: Any) -> None:
        if replaced:
            path.with_suffix(".new").touch()
            path.with_suffix(".new").rename(path)
        raise NotRunning("no cachefs answers")

    monkeypatch.setattr(client, "request", refused)
    for replaced in (True, False):
        assert asking.all_statuses() == []
        assert path.exists() is replaced


def test_a_directory_that_is_not_ours_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ControlError, match="is a link of"):
        trio.run(control.serve, tmp_path / "run" / "x.sock", VERBS)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_socket_of_another_user_is_not_asked(path: Path) -> None:
    """Any user may make /tmp/cachefs-N and a socket in it that answers as a daemon would."""
    code = f"import os, socket; os.setgid(65534); os.setuid(65534)\n{_FALSE_DAEMON.format(path=str(path))}"
    path.parent.mkdir()
    os.chown(path.parent, 65534, 65534)
    for above in path.parents[1:]:
        if above.is_relative_to(tempfile.gettempdir()) and above != Path(tempfile.gettempdir()):
            above.chmod(0o755)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as false:
        try:
            assert false.stdout is not None and false.stdout.readline() == b"listens\n"
            with pytest.raises(client.OfAnother, match="another user"):
                request(path, "status")
            assert request(path, "status", owners={65534}) == "false"
            os.chown(path.parent, 0, 0)  # a socket that was left in a directory of ours
            with pytest.raises(client.OfAnother, match="another user"):
                request(path, "status")
            path.parent.chmod(0o777)
            with pytest.raises(client.OfAnother, match="another user"):
                request(path, "status", owners={65534})
        finally:
            false.kill()


_FALSE_DAEMON = """
listener = socket.socket(socket.AF_UNIX)
listener.bind({path!r})
listener.listen()
print("listens", flush=True)
while True:
    connection, _ = listener.accept()
    if connection.recv(100):
        connection.sendall(b'{{"ok": true, "result": "false"}}' + b"\\n")
"""


def test_nobody_there(path: Path) -> None:
    with pytest.raises(NotRunning, match="no cachefs answers"):
        request(path, "status")


def test_a_reply_without_an_end_is_read_up_to_a_bound(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root asks daemons of users."""
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 1 << 20)
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def flood() -> int:
            connection, _ = listener.accept()
            sent = 0
            with connection, suppress(OSError):
                while sent < 64 << 20:
                    sent += connection.send(b"x" * (64 << 10))
            return sent

        with ThreadPoolExecutor(1) as thread:
            flooding = thread.submit(flood)
            with pytest.raises(ControlError, match="hung up"):
                request(path, "status", timeout_s=30.0)
        assert flooding.result() < 8 << 20


def test_a_mount_that_hangs_is_given_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(os, "statvfs", lambda path: goes_on.wait(30))
    answer = probe(Path("/"), 0.01)
    hung = not goes_on.is_set()
    goes_on.set()
    assert hung and isinstance(answer, OSError) and answer.errno == errno.ETIMEDOUT and not is_dead(answer)


@pytest.mark.parametrize("dies", [1, 2])
def test_a_daemon_that_dies_before_it_answers_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, dies: int
) -> None:
    """Once the mount answers again. A second one in a row is told of."""
    steps: list[str] = []

    def asked(*_: Any, **__: Any) -> str:
        steps.append("ask")
        if steps.count("ask") <= dies:
            raise client.HungUp("the daemon hung up: Connection reset by peer")
        return "answer"

    mount = Mount("0:1", "/", "/mnt", "fuse.cachefs", "s3://b", ("user_id=0",))
    monkeypatch.setattr(client, "mount_at", lambda path: mount)
    monkeypatch.setattr(client, "request", asked)
    monkeypatch.setattr(client, "probe", lambda path: steps.append("probe"))
    monkeypatch.setattr(client, "is_dead", lambda answer: False)
    with pytest.raises(ControlError, match="hung up"):
        client.ask(Path("/mnt"), "upgrade")
    assert steps == ["ask"]
    steps.clear()
    if dies == 1:
        assert client.ask(Path("/mnt"), "status") == "answer"
    else:
        with pytest.raises(ControlError, match="hung up"):
            client.ask(Path("/mnt"), "status")
    assert steps == ["ask", "probe", "ask"]


def test_a_daemon_that_says_nothing(path: Path) -> None:
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        with (
            client.connected(path, SLACK_S),
            pytest.raises(ControlError, match=r"did not answer within 0\.1 s"),
        ):
            request(path, "status", timeout_s=0.1)  # there is no place in the kernel's queue
        listener.listen()
        with pytest.raises(ControlError, match=r"did not answer within 0\.1 s"):
            request(path, "status", timeout_s=0.1)


@pytest.mark.parametrize(
    ("uid", "words"), [(0, "run this where it runs"), (1000, "as the user who mounted it")]
)
def test_a_daemon_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, uid: int, words: str) -> None:
    """It is another user's, or in another container; root is not told to become root."""
    mount = Mount("0:99", "/", "/mnt/x", "fuse.cachefs", "s3://a", (f"user_id={uid}",))
    monkeypatch.setattr(client, "mount_at", lambda _: mount)
    monkeypatch.setattr(client, "sockets", lambda _: iter(()))
    monkeypatch.setattr(client, "probe", lambda *_: os.stat("/"))
    monkeypatch.setattr(os, "getuid", lambda: uid)
    with pytest.raises(MountError, match=words):
        client.ask(Path("/mnt/x"), "status")


@contextmanager
def without_descriptors() -> Iterator[None]:
    """This process can open no more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open("/dev/null", os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_process_without_descriptors_answers(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One connection after the other; that one waits is logged once."""

    async def main() -> None:
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            clients = [trio.socket.from_stdlib_socket(client) for client in (one, two)]
            async with serving(path):
                await trio.testing.wait_all_tasks_blocked()
                with without_descriptors(), trio.fail_after(10):
                    for client in clients:
                        await client.connect(str(path))
                    for client in clients:
                        await client.send(b'{"verb": "echo", "text": "alive"}\n')
                        assert b"alive" in await client.recv(1000)
                        assert await client.recv(1000) == b""

    before = len(os.listdir("/proc/self/fd"))
    trio.run(main)
    assert len(os.listdir("/proc/self/fd")) == before
    assert (
        "Traceback" not in caplog.text and caplog.text.count("a connection for the control socket waits") <= 1
    )
