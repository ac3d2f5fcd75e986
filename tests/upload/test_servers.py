"""The room on stores that are real servers, and on the real cache: what is saved is there, and costs what it should."""

from __future__ import annotations

import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.lab.dataset import content as bytes_of
from cachefs.base.errors import NotFound, PermissionDenied
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.fetch import Fetcher
from cachefs.origin import Origin, Upload
from cachefs.store import open_store, ram
from cachefs.upload import Uploads
from tests.conftest import LEVEL
from tests.origin.pending import abort, pending
from tests.origin.reading import content as object_content
from tests.origin.servers import Lab, Server
from tests.origin.test_faults import credentials_file
from tests.origin.test_writing_faults import forget_peak, peak
from tests.upload.scripted import Desk, Room, add, let_go

MIB = 1 << 20
LARGE = 18 * MIB + 5
"""Three parts."""

BODY = bytes_of("saved", LARGE)


@asynccontextmanager
async def daemon(server: Server, path: Path, **how: Any) -> AsyncIterator[tuple[Desk, Any, Fetcher]]:
    """Cache, reading and writing over one store, as a daemon has them; in the end as a kill leaves them."""
    origin = server.origin(metrics=(metrics := Metrics()))
    ram.HUGE = "huge=never"
    opened = open_store(path / "cache", 256 * MIB, 0, 0, MIB, "first", metrics)
    async with trio.open_nursery() as nursery:
        fetcher = Fetcher(opened.store, nursery, metrics, max_readahead=8 * MIB)
        uploads = Uploads(
            path / "state",
            path / "cache" / "staging",
            [origin],
            opened.store,
            metrics,
            nursery=nursery,
            reader=fetcher,
            **how,
        )
        desk = Desk(uploads, origin, Room(), metrics, path)
        desk.staging = path / "cache" / "staging"
        try:
            await uploads.recover()
            nursery.start_soon(uploads.run)
            yield desk, opened.store, fetcher
        finally:
            nursery.cancel_scope.cancel()
            uploads.journal.close()
            let_go(uploads)
            with trio.CancelScope(shield=True):
                await opened.store.aclose(1)
                await origin.aclose()


def run(use: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with trio.fail_after(60):
            await use()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", trio.TrioDeprecationWarning)
        trio.run(main, strict_exception_groups=False)


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():  # noqa: ASYNC110 - a server has no event for it
            await trio.sleep(0.005)


async def none_of(origin: Origin, key: str) -> None:
    """Neither the object nor uploads of it, not even those whose begin got no reply."""
    await origin.delete(key)
    for upload in await pending(origin, key):
        await abort(origin, upload)


async def at_the_store(origin: Origin, key: str) -> bytes:
    return await object_content(origin, await origin.head(key))


MOTO = pytest.param("moto", marks=pytest.mark.long)


@pytest.fixture(params=[MOTO, "lab", "directory", "memory"])
def server(request: pytest.FixtureRequest, start: Any) -> Server:
    server: Server = start(request.param)
    if isinstance(server, Lab):
        server.store.clear_faults()
        server.store.reset()
    return server


@pytest.mark.parametrize("size", [0, 1000, LARGE])
def test_saved_changed_and_read_back(server: Server, tmp_path: Path, size: int) -> None:
    async def use() -> None:
        async with daemon(server, tmp_path) as (d, _, fetcher):
            data = bytearray(BODY[:size])
            dirty_file = await d.create("dir/k")
            for at in range(0, size, MIB):
                await dirty_file.write(at, data[at : min(at + MIB, size)])
            await d.close(dirty_file)
            await until(lambda: len(d.settled) == 1)
            info = dirty_file.committed
            assert info is not None and (await d.store.head("dir/k")).etag == info.etag
            assert info.mtime_ns > 0
            assert await at_the_store(d.store, "dir/k") == data
            got = d.metrics.origin_get
            version = ObjectId(d.store.source, "dir/k", info.etag, size)
            opened = fetcher.open(d.store, version)
            for at in range(0, size, MIB):
                assert await fetcher.read(opened, at, min(MIB, size - at), 1) == data[at : at + MIB]
            fetcher.close(opened)
            assert d.metrics.origin_get == got, "what was written here is warm here"
            dirty_file = await d.create("dir/k", base=version)
            await dirty_file.write(3, b"changed")
            wanted = data[:3].ljust(3, b"\0") + b"changed" + data[10:]
            await d.uploads.rename(dirty_file, "dir/l", base=None)
            await d.close(dirty_file)
            assert await at_the_store(d.store, "dir/l") == wanted
            await until(lambda: len(d.settled) == 2)
            assert await d.files() == [] and d.metrics.origin_get <= got + 60

    run(use)


def asked(store: Lab) -> dict[str, int]:
    counted: dict[str, int] = dict(store.store.counters()["requests"])
    return counted


def test_what_saving_costs(lab: Lab, tmp_path: Path) -> None:
    async def use() -> None:
        async with daemon(lab, tmp_path) as (d, store, _):
            await d.save("small", b"small")
            assert asked(lab) == {"put": 1}
            lab.store.reset()
            dirty_file = await d.create("large")
            for at in range(0, LARGE, MIB):
                await dirty_file.write(at, BODY[at : at + MIB])
            await until(lambda: dirty_file.parts.sent_bytes == 16 * MIB)
            assert asked(lab) == {"create_upload": 1, "upload_part": 2}, (
                "all but the last while it is written"
            )
            await d.close(dirty_file)
            assert asked(lab) == {"create_upload": 1, "upload_part": 3, "complete_upload": 1}
            await until(lambda: len(d.settled) == 2)
            info = d.told[-1][1]
            backing = store.open_backing(store.object(ObjectId(d.store.source, "large", info.etag, LARGE)))
            assert backing is not None and os.pread(backing.fd, 100, 5) == BODY[5:105]
            store.release_backing(backing)

    run(use)


STEPS = [("put", 1000), ("create_upload", LARGE), ("upload_part", LARGE), ("complete_upload", LARGE)]
FAULTS = [
    ("503", 2),
    pytest.param("500", 2, marks=pytest.mark.long),
    ("reset", 1),
    ("lost-reply", 1),
    ("garbage", 1),
]


@pytest.mark.parametrize(("action", "count"), FAULTS, ids=lambda v: str(v))
@pytest.mark.parametrize(("kind", "size"), STEPS, ids=lambda v: str(v))
def test_faults_that_pass_are_seen_by_nobody(
    lab: Lab, tmp_path: Path, kind: str, size: int, action: str, count: int
) -> None:
    async def use() -> None:
        async with daemon(lab, tmp_path, on_conflict="fail") as (d, _, _):
            await none_of(d.store, "k")
            lab.store.fault(action, kind=kind, count=count)
            await d.save("k", BODY[:size])
            assert await at_the_store(d.store, "k") == BODY[:size]
            assert d.metrics.upload_failures == 0
            left = 1 if kind == "create_upload" and action in ("lost-reply", "reset") else 0
            assert len(await pending(d.store, "k")) <= left, "one without a reply"

    run(use)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "size"), STEPS, ids=lambda v: str(v))
def test_a_silent_store(lab: Lab, tmp_path: Path, kind: str, size: int) -> None:
    lab.options["stall_s"] = 0.3

    async def use() -> None:
        async with daemon(lab, tmp_path) as (d, _, _):
            await none_of(d.store, "k")
            rule = lab.store.fault("hang", kind=kind, count=1)
            await d.save("k", BODY[:size])
            assert lab.store.faults_fired()[rule] == 1 and d.metrics.upload_failures == 0
            assert await at_the_store(d.store, "k") == BODY[:size]

    try:
        run(use)
    finally:
        del lab.options["stall_s"]


@pytest.mark.parametrize(("kind", "size"), STEPS, ids=lambda v: str(v))
def test_faults_that_stay_are_told_and_pass_in_the_end(
    lab: Lab, tmp_path: Path, kind: str, size: int
) -> None:
    async def use() -> None:
        async with daemon(lab, tmp_path) as (d, _, _):
            await none_of(d.store, "k")
            lab.store.fault("403", kind=kind)
            with pytest.raises(PermissionDenied):
                await d.save("k", BODY[:size])
            with pytest.raises(NotFound):
                await d.store.head("k")
            assert [dirty_file.key for dirty_file in d.uploads.pending()] == ["k"]
            lab.store.clear_faults()
            assert await d.uploads.flush() == []
            assert await at_the_store(d.store, "k") == BODY[:size]
            assert await pending(d.store, "k") == []

    run(use)


def test_credentials_that_expire_and_come_back(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    credentials_file(path, "key0")

    async def use() -> None:
        async with daemon(lab, tmp_path) as (d, _, _):
            dirty_file = await d.create("k", BODY[: LARGE // 2])
            lab.store.credentials(expired=["key0"])
            with pytest.raises(PermissionDenied):
                await d.uploads.commit(dirty_file)
            credentials_file(path, "key1")
            await add(dirty_file, BODY[LARGE // 2 :])
            await d.close(dirty_file)
            assert await at_the_store(d.store, "k") == BODY

    run(use)


@pytest.mark.parametrize("name", [MOTO, "lab", "directory"])
@pytest.mark.parametrize("writeback", [True, False])
def test_after_a_kill_in_the_middle(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, writeback: bool
) -> None:
    server: Server = start(name)

    async def never(*args: Any, **kwargs: Any) -> None:
        await trio.sleep_forever()

    async def use() -> None:
        with monkeypatch.context() as patched:
            # A thread outlives this kill, and would complete it yet.
            patched.setattr(Upload, "complete", never)
            await begin()
        await go_on()

    async def begin() -> None:
        async with daemon(server, tmp_path, writeback=writeback, upload_delay_s=0.0) as (d, _, _):
            await none_of(d.store, "k")
            dirty_file = await d.create("k", BODY)
            if writeback:
                await d.uploads.commit(dirty_file)
                await until(lambda: dirty_file.parts.sent_bytes > 0)
            else:
                await until(lambda: dirty_file.parts.sent_bytes == 16 * MIB)

    async def go_on() -> None:
        async with daemon(server, tmp_path, writeback=writeback) as (d, _, _):
            if writeback:
                assert await d.uploads.flush() == []
                assert await at_the_store(d.store, "k") == BODY
                assert d.metrics.origin_put_part <= 3
            else:
                await until(lambda: not d.uploads._records.orphans)
                with pytest.raises(NotFound):
                    await d.store.head("k")
            assert await pending(d.store, "k") == []

    run(use)


@pytest.mark.parametrize("writeback", [pytest.param(False, marks=pytest.mark.long), True])
def test_memory_stays_flat(lab: Lab, tmp_path: Path, writeback: bool) -> None:
    size, piece = (128 if LEVEL == "short" else 256) * MIB, bytes(MIB)

    async def use() -> None:
        async with daemon(lab, tmp_path, writeback=writeback) as (d, _, _):
            await d.save("warm", BODY)
            forget_peak()
            before = peak()
            dirty_file = await d.create("big")
            for at in range(0, size, MIB):
                await dirty_file.write(at, piece)
            await d.close(dirty_file)
            assert await d.uploads.flush() == []
            grown = peak() - before
            assert grown < 32 * MIB, f"{grown / MIB:.0f} MiB for {size / MIB:.0f}"

    run(use)
    lab.store.delete("bucket", "big")
