"""Saving and renaming on Ceph's RADOS Gateway: on the lab store with its quirks, and the cases that need it on itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from bench.lab.dataset import content as bytes_of
from cachefs.base.errors import Conflict, ObjectChanged
from cachefs.base.names import ObjectId
from cachefs.origin import ObjectInfo, Upload
from tests.origin.pending import abort, pending
from tests.origin.servers import Lab, Server
from tests.upload.test_servers import BODY, LARGE, at_the_store, daemon, none_of, run, until


@pytest.fixture(params=["lab", "rgw"])
def ceph(request: pytest.FixtureRequest, start: Any) -> Any:
    server = start(request.param)
    if isinstance(server, Lab):
        server.store.clear_faults()
        server.store.quirks("ceph")
    yield server
    if isinstance(server, Lab):
        server.store.quirks()


@pytest.mark.long
def test_a_copy_under_another_clients_overwrite_takes_nothing_of_theirs(ceph: Server, tmp_path: Path) -> None:
    """Else the cached blocks of the old version would be read under the new name, beside those of the newer one."""
    theirs = bytes_of("theirs", LARGE)

    async def use() -> None:
        async with daemon(ceph, tmp_path) as (d, _, _):
            for key in ("a", "b"):
                await none_of(d.store, key)
            await d.save("a", BODY)
            info = await d.store.head("a")
            made = await d.store.copy("a", "b", size=LARGE, etag=info.etag)
            assert await at_the_store(d.store, "b") == BODY
            ceph.put("a", theirs)
            with pytest.raises(ObjectChanged):
                await d.store.copy("a", "b", size=LARGE, etag=info.etag)
            assert await at_the_store(d.store, "a") == theirs
            assert await d.store.head("b") == made

    run(use)


def test_an_upload_that_vanished_while_the_daemon_was_dead_is_begun_again(
    ceph: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: Any, **kwargs: Any) -> None:
        await trio.sleep_forever()

    async def use() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(Upload, "complete", never)
            async with daemon(ceph, tmp_path, writeback=True, upload_delay_s=0.0) as (d, _, _):
                await none_of(d.store, "k")
                dirty_file = await d.create("k", BODY)
                await d.uploads.commit(dirty_file)
                await until(lambda: dirty_file.parts.sent_bytes > 0)
        async with daemon(ceph, tmp_path, writeback=True) as (d, _, _):
            [upload] = await pending(d.store, "k")
            await abort(d.store, upload)
            assert await d.uploads.flush() == []
            assert await at_the_store(d.store, "k") == BODY
            assert await pending(d.store, "k") == []

    run(use)


def test_an_upload_that_vanishes_before_its_completion_is_begun_again(
    ceph: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete = Upload.complete
    vanished: list[str] = []

    async def vanishing(upload: Upload, *args: Any, **kwargs: Any) -> ObjectInfo:
        if not vanished:
            vanished.append(upload.id)
            await upload.abort()
        return await complete(upload, *args, **kwargs)

    monkeypatch.setattr(Upload, "complete", vanishing)

    async def use() -> None:
        async with daemon(ceph, tmp_path) as (d, _, _):
            await none_of(d.store, "k")
            await d.save("k", BODY)
            assert await at_the_store(d.store, "k") == BODY
            assert d.metrics.upload_failures == d.metrics.origin_retries == 0

    run(use)


@pytest.mark.parametrize("size", [1000, LARGE])
def test_an_overwrite_that_nobody_disturbed_is_no_conflict_and_another_is(
    ceph: Server, tmp_path: Path, size: int
) -> None:
    async def use() -> None:
        async with daemon(ceph, tmp_path, on_conflict="fail") as (d, _, _):
            await none_of(d.store, "k")
            await d.save("k", BODY[:size])
            info = await d.store.head("k")
            version = ObjectId(d.store.source, "k", info.etag, size)
            changed = BODY[::-1][:size]
            dirty_file = await d.create("k", changed, base=version)
            await d.close(dirty_file)
            assert await at_the_store(d.store, "k") == changed
            ceph.put("k", b"theirs")
            now = await d.store.head("k")
            assert now.etag != info.etag
            dirty_file = await d.create("k", BODY[:size], base=version)
            with pytest.raises(Conflict):
                await d.close(dirty_file)
            assert await at_the_store(d.store, "k") == b"theirs"

    run(use)
