"""The HTTP server, its pages, and the page in a browser."""

from __future__ import annotations

import functools
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from cachefs.base.errors import MountError
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.observe.endpoint import MAX_CONNECTIONS, Endpoint, Page, open_endpoint, plain
from cachefs.observe.watch import Watch
from tests.observe.test_exposition import STATUS

PAGE = Path(__file__).parents[2] / "cachefs/observe/page.html"


def in_trio(function: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """With a clock that jumps where nothing else happens: what a deadline is for costs no time."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        async def in_an_hour() -> None:
            with trio.fail_after(3600):
                await function(*args, **kwargs)

        trio.run(in_an_hour, clock=MockClock(autojump_threshold=0.05))

    return run


@asynccontextmanager
async def serving(pages: dict[str, Page] | Any, where: str = "127.0.0.1:0") -> AsyncIterator[Endpoint]:
    endpoint = await open_endpoint(where)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(endpoint.serve, pages)
        yield endpoint
        nursery.cancel_scope.cancel()


async def connect(endpoint: Endpoint) -> trio.SocketStream:
    host, _, port = endpoint.address.rpartition(":")
    return await trio.open_tcp_stream(host, int(port))


async def exchange(endpoint: Endpoint, request: bytes) -> bytes:
    stream = await connect(endpoint)
    async with stream:
        await stream.send_all(request)
        return b"".join([part async for part in stream])


async def get(endpoint: Endpoint, path: str, host: str = "localhost") -> tuple[int, bytes]:
    reply = await exchange(endpoint, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    head, _, body = reply.partition(b"\r\n\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    return int(head.split()[1]), body


async def handshake() -> Any:
    return plain("hello")


async def broken() -> Any:
    raise RuntimeError("a secret")


@in_trio
async def test_replies() -> None:
    async with serving({"/": handshake, "/broken": broken}) as endpoint:
        assert await get(endpoint, "/") == (200, b"hello\n")
        assert await get(endpoint, "/?x=1") == (200, b"hello\n")
        assert await get(endpoint, "/nothing") == (404, b"here are /, /broken\n")
        status, body = await get(endpoint, "/broken")
        assert status == 500 and b"secret" not in body
        for request, code in (
            (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", b"405"),
            (b"nonsense\r\n\r\n", b"400"),
            (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 50_000 + b"\r\n\r\n", b"431"),
        ):
            assert (await exchange(endpoint, request)).split()[1] == code
        head = await exchange(endpoint, b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert head.endswith(b"\r\n\r\n") and b"Content-Length: 6" in head


@in_trio
async def test_no_page_of_the_web_reads_it_under_its_own_name() -> None:
    async with serving({"/": handshake}) as endpoint:
        for host in ("localhost", "localhost:9400", "127.0.0.1:1", "127.1.2.3", "[::1]:9400", "[::1]"):
            assert (await get(endpoint, "/", host))[0] == 200
        for host in ("evil.example", "evil.example:9400", "localhost.evil.example", "10.0.0.1", ""):
            assert (await get(endpoint, "/", host))[0] == 403
    async with serving({"/": handshake}, "0.0.0.0:0") as endpoint:
        assert (await get(endpoint, "/", "node-7.cluster"))[0] == 200
        assert "no password" in endpoint.warning and endpoint.address in endpoint.warning


@in_trio
async def test_nobody_holds_it_up() -> None:
    async with serving({"/": handshake, "/hangs": trio.sleep_forever}) as endpoint:
        assert await exchange(endpoint, b"GET /hangs HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        idle = [await connect(endpoint) for _ in range(MAX_CONNECTIONS)]
        await trio.sleep(0.5)
        assert await exchange(endpoint, b"") == b""  # no room
        for stream in idle:  # until their time is over
            assert await stream.receive_some() == b""
            await stream.aclose()
        assert (await get(endpoint, "/"))[0] == 200


@in_trio
async def test_a_port_in_use_is_one_line() -> None:
    async with serving({"/": handshake}) as endpoint:
        with pytest.raises(
            MountError, match=r"cannot listen at .*: Address already in use: choose another --metrics"
        ):
            await open_endpoint(endpoint.address)
    with pytest.raises(MountError, match="cannot listen at"):
        await open_endpoint("no.such.host.invalid:1")


# -- what is on the pages --------------------------------------------------------------------------


async def status() -> dict[str, Any]:
    return STATUS


@in_trio
async def test_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(Metrics(), status, tmp_path)
    async with serving(watch.pages()) as endpoint:
        assert await get(endpoint, "/healthz") == (200, b"ok\n")
        assert (await get(endpoint, "/readyz"))[0] == 503
        watch.ready = True
        assert await get(endpoint, "/readyz") == (200, b"ready\n")

        free = threading.Event()
        monkeypatch.setattr(os, "statvfs", lambda path: free.wait(60))
        assert await get(endpoint, "/healthz") == (503, f"{tmp_path} does not answer within 3 s\n".encode())
        assert (await get(endpoint, "/readyz"))[0] == 503  # waits for no second thread
        free.set()
        monkeypatch.undo()

        watch._mountpoint = tmp_path / "gone"
        assert await get(endpoint, "/healthz") == (
            503,
            f"{tmp_path}/gone: No such file or directory\n".encode(),
        )


def test_a_mount_is_waited_for_until_it_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch(Metrics(), status, tmp_path / "later")

    async def go() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch.answers)
            await trio.sleep(0.5)
            (tmp_path / "later").mkdir()
            assert trio.lowlevel.current_statistics().tasks_living > 1

    trio.run(go, clock=MockClock(rate=100))
    assert f"not ready: {tmp_path}/later: No such file or directory" in caplog.text


def test_samples_are_bounded_and_complete(tmp_path: Path) -> None:
    metrics = Metrics()
    pages = (watch := Watch(metrics, status, tmp_path)).pages()

    async def go() -> None:
        with trio.move_on_after(2 * 1000 + 1):
            await watch.run()
        metrics.misses = 5
        watch._sample()
        history = json.loads((await pages["/history.json"]()).body)
        assert len(history["samples"]) == 450
        assert dict(zip(history["names"], history["samples"][-1], strict=True))["misses"] == 5
        state = json.loads((await pages["/status.json"]()).body)
        assert state["reads"]["waiting"] == 0 and state["mountpoint"] == "/mnt"
        assert (await pages["/metrics"]()).body.startswith(b"# HELP cachefs_")

    trio.run(go, clock=MockClock(autojump_threshold=0))


def test_the_page_brings_everything_along() -> None:
    text = PAGE.read_text()
    assert "innerHTML" not in text and "document.write" not in text and "eval(" not in text
    outside = text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in outside and "https://" not in outside and "@import" not in outside
    assert len(text) < 32 << 10


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
HOSTILE = "<img src=x onerror=\"document.title='taken'\"><b>bold</b>"


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here: apt-get install chromium")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    metrics = Metrics()
    metrics.ram_hits, metrics.misses, metrics.misses_cold = 30, 10, 10
    ledger = metrics.ledger
    ledger.account("", f"{HOSTILE}/x")["origin_get"] += 12
    wait = ledger.waits.begin(os.getpid(), ObjectId("s3://b", f"train/{HOSTILE}.jpg", "e", 9), 0)
    wait.now_for("origin")
    wait.began -= 1.5
    wait.end(9)
    shown = {**STATUS, "metrics": metrics.as_dict()}

    async def with_metrics() -> dict[str, Any]:
        return shown

    watch = Watch(metrics, with_metrics, tmp_path)
    watch.ready = True

    async def look() -> str:
        async with serving(watch.pages()) as endpoint:
            command = [
                CHROMIUM,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                f"--user-data-dir={tmp_path / 'profile'}",
            ]
            command += ["--virtual-time-budget=3000", "--dump-dom", f"http://{endpoint.address}/"]
            while True:  # on a busy machine its virtual time may pass before the page has asked
                done = await trio.run_process(command, capture_stdout=True, capture_stderr=True)
                if 'data-shown="yes"' in (page := done.stdout.decode()):
                    return page

    with_deadline = functools.partial(_within, 90, look)
    page = trio.run(with_deadline)
    assert "<title>/mnt: cachefs</title>" in page
    assert "<img" not in page and "&lt;b&gt;bold" in page
    for words in (
        "SSD: 10 B of 20 B (50.0 %)",
        "there:1",
        "shows other stores",
        "s3://b/c",
        "2 timeout",
        "1.5 s",
        "100 % cold",
        "one",
    ):
        assert words in page, words
    assert page.count(">b:1</td>") == 1, "a node is in the list of peers once"


async def _within(seconds: float, what: Callable[[], Awaitable[str]]) -> str:
    with trio.fail_after(seconds):
        return await what()
