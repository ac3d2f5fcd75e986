"""What every client that writes owes the rooms above, on every server it can talk to."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from cachefs.base.errors import (
    CacheUnusable,
    Conflict,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    Unsupported,
)
from cachefs.origin import FileRange, InMemory, Origin, Part
from tests.origin.pending import pending
from tests.origin.reading import content, one_a_vendor, run
from tests.origin.servers import Server
from tests.origin.writing import LEAST, THREE, as_shown, file_of

PAIRS = [
    ("curl", "moto"),
    ("fsspec", "moto"),
    ("curl", "lab"),
    ("fsspec", "lab"),
    ("curl", "rgw"),
    ("fsspec", "rgw"),
    ("curl", "lab-google"),
    ("curl", "azurite"),
    ("fsspec", "azurite"),
    ("auto", "directory"),
    ("fsspec", "directory"),
    ("auto", "memory"),
]
WHOLE_ONLY = [("fsspec", "directory"), ("auto", "memory")]
"""fsspec's plain filesystems: no parts, no conditions."""


@pytest.fixture(params=[one_a_vendor(pair) for pair in PAIRS], ids="-".join)
def any_place(request: pytest.FixtureRequest, start: Callable[[str], Server]) -> Origin:
    client, name = request.param
    return start(name).origin(client)


@pytest.fixture(params=[one_a_vendor(pair) for pair in PAIRS if pair not in WHOLE_ONLY], ids="-".join)
def place(request: pytest.FixtureRequest, start: Callable[[str], Server]) -> Origin:
    client, name = request.param
    return start(name).origin(client)


@pytest.fixture
def moto(request: pytest.FixtureRequest) -> bool:
    """Whether the server is moto: it answers 500 for parts of an upload that is gone."""
    return "moto" in request.node.name


def test_putting(any_place: Origin, tmp_path: Path) -> None:
    async def use(there: Origin) -> None:
        for key in ("w/a", "w/sp ace+plus", "w/100% #?&=;", "w/%2F", "w/日本", "w/quo'te\"d", "w/deep/er/x"):
            await as_shown(
                there, await there.put(key, InMemory(key.encode()), len(key.encode())), key.encode()
            )
        await as_shown(there, await there.put("w/empty", InMemory(b""), 0), b"")
        with file_of(tmp_path / "f", b"before" + THREE) as fd:
            info = await there.put("w/large", FileRange(fd, 6), len(THREE))
            await as_shown(there, info, THREE)
            again = await there.put("w/large", FileRange(fd), 100)  # what was there is replaced
            await as_shown(there, again, b"before" + THREE[:94])
            assert again.etag != info.etag
        metrics = there._attempts.metrics
        assert metrics.origin_put == 10 and metrics.origin_retries == 0
        assert metrics.origin_bytes_sent == len(THREE) + 100 + len(
            "w/aw/sp ace+plusw/100% #?&=;w/%2Fw/日本w/quo'te\"dw/deep/er/x".encode()
        )

    run(any_place, use)


def test_a_source_that_fails_writes_nothing(any_place: Origin, tmp_path: Path) -> None:
    class Broken:
        def read(self, at: int, count: int) -> bytes:
            if at > 100_000:
                raise OSError(5, "the disk is broken")
            return bytes(count)

    async def use(there: Origin) -> None:
        with pytest.raises(OSError, match="the disk is broken"):
            await there.put("w/broken", Broken(), LEAST)
        with file_of(tmp_path / "f", THREE) as fd, pytest.raises(OriginFailed, match="shorter than was said"):
            await there.put("w/broken", FileRange(fd), len(THREE) + 1)
        if not there.source.startswith("memory"):  # which shows a file while it is written
            with pytest.raises(NotFound):
                await there.head("w/broken")
        assert there._attempts.metrics.origin_retries == 0

    run(any_place, use)


def test_a_block_that_the_disk_cannot_read_is_told_with_its_file(
    any_place: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that meets it ends before it. Only the next one has the error."""
    good, real = 100_000, os.pread

    async def use(there: Origin) -> None:
        with file_of(tmp_path / "f", THREE) as file:

            def pread(fd: int, count: int, at: int) -> bytes:
                if fd == file and at >= good:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return real(fd, min(count, good - at) if fd == file else count, at)

            monkeypatch.setattr(os, "pread", pread)
            with pytest.raises(CacheUnusable, match=f"{tmp_path}/f, .* cannot be read: Input/output error"):
                await there.put("w/broken", FileRange(file), len(THREE))
        assert there._attempts.metrics.origin_retries == 0

    run(any_place, use)


def test_markers_of_directories(any_place: Origin) -> None:
    async def use(there: Origin) -> None:
        await there.put("m/marked/", InMemory(b""), 0)
        await there.put("m/marked/x", InMemory(b"x"), 1)
        assert "m/marked/" in (await there.list_page("m/")).prefixes
        await there.delete("m/marked/")
        assert (await there.head("m/marked/x")).size == 1
        await there.delete("m/marked/x")
        await there.delete("m/marked/")

    run(any_place, use)


def test_deleting_and_copying(any_place: Origin) -> None:
    async def use(there: Origin) -> None:
        data = b"to be copied" * 1000
        info = await there.put("c/sp ace%41", InMemory(data), len(data))
        copied = await there.copy("c/sp ace%41", "c/new/日本", size=len(data))
        await as_shown(there, copied, data)
        await as_shown(there, await there.copy(info.key, "c/two", size=len(data), etag=info.etag), data)
        await there.put("c/sp ace%41", InMemory(b"other"), 5)
        with pytest.raises(ObjectChanged):
            await there.copy(info.key, "c/three", size=len(data), etag=info.etag)
        with pytest.raises(NotFound):
            await there.copy("c/missing", "c/three", size=1)
        for _ in range(2):  # what is not there can be deleted, too
            await there.delete("c/two")
        for key in ("c/two", "c/three"):
            with pytest.raises(NotFound):
                await there.head(key)
        there._attempts.metrics.origin_delete = 0
        names = [f"c/many &<{number}>" for number in range(5)]
        for key in names:
            await there.put(key, InMemory(b"x"), 1)
        assert await there.delete_many([*names, "c/never was"]) == {}
        assert there._attempts.metrics.origin_delete == (1 if there.limits.batch else 6)
        left = {found.key for found in (await there.list_page("c/")).objects}
        assert left - {"c/"} == {"c/sp ace%41"}  # the marker is there where directories are real

    run(any_place, use)


def test_an_empty_directory_is_its_marker(place: Origin) -> None:
    async def use(there: Origin) -> None:
        made = await there.put("m/e/", InMemory(b""), 0)
        assert (await there.list_page("m/")).prefixes == ["m/e/"]
        assert [info.key for info in (await there.list_page("m/e/")).objects] == ["m/e/"]
        assert await there.head("m/e/") == made
        copied = await there.copy("m/e/", "m/f/", size=0, etag=made.etag)
        assert await there.head("m/f/") == copied
        for key, other in (("m/e", "m/g/"), ("m/g/", "m/g")):
            with pytest.raises(NotFound):
                await there.head(key)
            with pytest.raises(NotFound):
                await there.copy(key, other, size=0)
        await there.put("m/f/g/h", InMemory(b"x"), 1)
        everything = ["m/", "m/e/", "m/f/", "m/f/g/", "m/f/g/h"]
        assert await there.delete_many(everything) == {}  # whatever the order: all of it is gone
        for key in everything:
            with pytest.raises(NotFound):
                await there.head(key)

    run(place, use)


def test_a_directory_goes_when_nothing_is_in_it(start: Callable[[str], Server], tmp_path: Path) -> None:
    server = start("directory")
    root = Path(server.root)  # type: ignore[attr-defined]

    async def use(there: Origin) -> None:
        await there.put("dd/a/b", InMemory(b"x"), 1)
        os.symlink("a", root / "dd/link")
        for key in ("dd/", "dd/a/", "dd/link/"):
            await there.delete(key)  # which keeps what has something in it, as a store would
        assert sorted(os.listdir(root / "dd")) == ["a", "link"]
        await there.delete("dd/a/b")
        await there.delete("dd/link/")
        assert os.listdir(root / "dd") == ["a"]
        for key in ("dd/a/", "dd/", "dd/"):
            await there.delete(key)
        assert "dd" not in os.listdir(root)

    run(server.origin(), use)


def test_conditions(place: Origin) -> None:
    async def use(there: Origin) -> None:
        await there.delete("if/x")
        first = await there.put("if/x", InMemory(b"one"), 3, if_absent=True)
        await as_shown(there, first, b"one")
        with pytest.raises(Conflict, match="nothing was written"):
            await there.put("if/x", InMemory(b"two!"), 4, if_absent=True)
        second = await there.put("if/x", InMemory(b"two"), 3, if_match=first.etag)
        for etag in (first.etag, '"nonsense"'):
            with pytest.raises(Conflict, match="nothing was written"):
                await there.put("if/x", InMemory(b"three"), 5, if_match=etag)
        await as_shown(there, second, b"two")
        await there.delete("if/x")
        with pytest.raises(Conflict):
            await there.put("if/x", InMemory(b"four"), 4, if_match=second.etag)
        with pytest.raises(NotFound):
            await there.head("if/x")

    run(place, use)


def test_parts(place: Origin, tmp_path: Path) -> None:
    async def use(there: Origin) -> None:
        await there.put("p/x", InMemory(b"before"), 6)
        upload = await there.begin_upload("p/x")
        with file_of(tmp_path / "f", THREE) as fd:
            etags: dict[int, str] = {}

            async def send(number: int) -> None:
                at = (number - 1) * LEAST
                etags[number] = await upload.part(number, FileRange(fd, at), min(LEAST, len(THREE) - at))

            async with trio.open_nursery() as nursery:
                for number in (3, 1, 2):
                    nursery.start_soon(send, number)
            assert await upload.part(2, FileRange(fd, LEAST), LEAST) is not None  # once more
        assert {n: (p.etag, p.size) for n, p in (await upload.parts()).items()}.keys() == {1, 2, 3}
        assert sum(part.size for part in upload.known.values()) == len(THREE)
        assert (await there.head("p/x")).size == 6  # nothing is seen yet
        info = await upload.complete()
        await as_shown(there, info, THREE)
        assert await upload.complete() == info  # as when the reply had been lost
        assert there._attempts.metrics.origin_put_part == 4
        assert there._attempts.metrics.origin_bytes_sent == len(THREE) + LEAST + 6

    run(place, use)


def test_resuming(place: Origin, moto: bool, tmp_path: Path) -> None:
    import json

    async def use(there: Origin) -> None:
        upload = await there.begin_upload("r/x")
        with file_of(tmp_path / "f", THREE) as fd:
            await upload.part(1, FileRange(fd, 0), LEAST)
            state = json.loads(json.dumps(upload.state()))
            await upload.part(2, FileRange(fd, LEAST), LEAST)  # landed, and the state does not know
            resumed = there.resume_upload("r/x", state)
            assert set(resumed.known) == {1}
            assert {number: part.size for number, part in (await resumed.parts()).items()} == {
                1: LEAST,
                2: LEAST,
            }
            last = await resumed.part(3, FileRange(fd, 2 * LEAST), len(THREE) - 2 * LEAST)
            assert resumed.known[3].etag == last
        state = resumed.state()
        info = await resumed.complete()
        await as_shown(there, info, THREE)
        # A crash after that, and before anybody wrote down that it is complete.
        assert await there.resume_upload("r/x", state).complete([1, 2, 3]) == info
        await there.put("r/x", InMemory(b"other"), 5)
        with pytest.raises(OriginFailed if moto else NoSuchUpload):
            await there.resume_upload("r/x", state).complete()

    run(place, use)


def test_aborting(place: Origin, moto: bool, tmp_path: Path) -> None:
    async def use(there: Origin) -> None:
        azure = there.source.startswith("az")
        upload = await there.begin_upload("a/x y&z")
        with file_of(tmp_path / "f", THREE) as fd:
            await upload.part(1, FileRange(fd, 0), LEAST)
            if not azure:
                found = [p for p in await pending(there, "a/") if p.id == upload.id]
                assert [p.key for p in found] == ["a/x y&z"]
                upload = there.resume_upload(upload.key, upload.state())
            for _ in range(2):
                await upload.abort()
            if not azure:
                assert await pending(there, "a/") == []
                with pytest.raises(NoSuchUpload):
                    await upload.parts()
                if not moto:
                    with pytest.raises(NoSuchUpload):
                        await upload.part(2, FileRange(fd, 0), LEAST)
                    with pytest.raises(NoSuchUpload):
                        await upload.complete()
        with pytest.raises(NotFound):
            await there.head("a/x y&z")

    run(place, use)


def test_conditions_of_an_upload(place: Origin, tmp_path: Path) -> None:
    async def use(there: Origin) -> None:
        await there.delete("ic/x")
        upload = await there.begin_upload("ic/x")
        with file_of(tmp_path / "f", b"part") as fd:
            await upload.part(1, FileRange(fd, 0), 4)
        with pytest.raises(Conflict):
            await upload.complete(if_match='"nonsense"')
        await as_shown(there, await upload.complete(if_absent=True), b"part")
        upload = await there.begin_upload("ic/x")
        with file_of(tmp_path / "f", b"other") as fd:
            await upload.part(1, FileRange(fd, 0), 5)
        with pytest.raises(Conflict):
            await upload.complete(if_absent=True)
        assert await content(there, await there.head("ic/x")) == b"part"
        await upload.abort()

    run(place, use)


def test_an_upload_without_parts_is_not_completed(place: Origin) -> None:
    async def use(there: Origin) -> None:
        upload = await there.begin_upload("l/x")
        with pytest.raises(OriginFailed):
            await upload.complete()
        await upload.abort()

    run(place, use)


@pytest.mark.parametrize("pair", WHOLE_ONLY, ids="-".join)
def test_what_plain_fsspec_cannot_do_is_said(pair: tuple[str, str], start: Callable[[str], Server]) -> None:
    async def use(there: Origin) -> None:
        assert there.can_write and there.limits.most_parts == 0
        with pytest.raises(Unsupported):
            await there.begin_upload("x")
        with pytest.raises(Unsupported):
            await there.put("x", InMemory(b"x"), 1, if_absent=True)

    run(start(pair[1]).origin(pair[0]), use)


def test_a_web_server_cannot_be_written(start: Callable[[str], Server]) -> None:
    async def use(there: Origin) -> None:
        assert not there.can_write
        for attempt in (
            there.put("x", InMemory(b"x"), 1),
            there.delete("x"),
            there.copy("x", "y", size=1),
            there.begin_upload("x"),
        ):
            with pytest.raises(Unsupported, match="can only be read"):
                await attempt

    run(start("web").origin(), use)


def test_a_local_file_is_never_half_there(start: Callable[[str], Server], tmp_path: Path) -> None:
    server = start("directory")

    async def use(there: Origin) -> None:
        upload = await there.begin_upload("half/x")
        with file_of(tmp_path / "f", THREE) as fd:
            await upload.part(1, FileRange(fd, 0), len(THREE))
        assert ".cachefs-uploads/" not in (await there.list_page("")).prefixes
        assert "half" not in os.listdir(server.root)  # type: ignore[attr-defined]
        await upload.complete()
        assert os.listdir(f"{server.root}/half") == ["x"]  # type: ignore[attr-defined]
        with pytest.raises(Unsupported):
            await there.put("../x", InMemory(b"x"), 1)
        os.symlink("/", f"{server.root}/out")  # type: ignore[attr-defined]
        try:
            with pytest.raises(NotFound):
                await there.put("out/tmp/x", InMemory(b"x"), 1)
        finally:
            os.unlink(f"{server.root}/out")  # type: ignore[attr-defined]

    run(server.origin(), use)


@pytest.mark.parametrize("name", ["lab", pytest.param("azurite", marks=pytest.mark.long)])
@pytest.mark.parametrize("clients", [("curl", "fsspec"), ("fsspec", "curl")], ids="-".join)
def test_an_upload_goes_on_through_the_other_client(
    name: str, clients: tuple[str, str], start: Callable[[str], Server], tmp_path: Path
) -> None:
    server = start(name)
    first, second = (server.origin(client) for client in clients)

    async def use(there: Origin) -> None:
        upload = await first.begin_upload("o/x")
        with file_of(tmp_path / "f", THREE) as fd:
            await upload.part(1, FileRange(fd, 0), LEAST)
            await upload.part(2, FileRange(fd, LEAST), LEAST)
            resumed = second.resume_upload("o/x", upload.state())
            assert await resumed.parts() == upload.known
            await resumed.part(3, FileRange(fd, 2 * LEAST), len(THREE) - 2 * LEAST)
        info = await resumed.complete()
        await as_shown(first, info, THREE)
        assert await first.resume_upload("o/x", resumed.state()).complete() == info
        await first.aclose()

    run(second, use)


@pytest.mark.parametrize("client", ["curl", "fsspec"])
def test_azure_with_a_sas(
    client: str, start: Callable[[str], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    from datetime import UTC, datetime, timedelta

    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    server = start("azurite")
    text = server.env["AZURE_STORAGE_CONNECTION_STRING"]
    said = dict(part.split("=", 1) for part in text.strip(";").split(";"))
    sas = generate_container_sas(
        said["AccountName"],
        "bucket",
        account_key=said["AccountKey"],
        permission=ContainerSasPermissions(read=True, list=True, write=True, create=True, delete=True),
        expiry=datetime.now(UTC) + timedelta(hours=1),
    )
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", said["AccountName"])
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", sas)

    async def use(there: Origin) -> None:
        info = await there.put("s/a b", InMemory(b"one"), 3)
        await as_shown(there, await there.copy("s/a b", "s/c", size=3, etag=info.etag), b"one")
        upload = await there.begin_upload("s/p")
        await upload.part(1, InMemory(b"two"), 3)
        await as_shown(there, await upload.complete(), b"two")
        for key in ("s/a b", "s/c", "s/p"):
            await there.delete(key)
        assert (await there.list_page("s/")).objects == []

    run(server.origin(client, endpoint_url=said["BlobEndpoint"]), use)


def test_a_local_upload_of_another_key_is_no_upload(start: Callable[[str], Server]) -> None:
    async def use(there: Origin) -> None:
        upload = await there.begin_upload("own/x")
        await upload.part(1, InMemory(b"x"), 1)
        for key, name in (("own/y", upload.id), ("own/x", "../own"), ("own/x", "nothing")):
            with pytest.raises(NoSuchUpload):
                await there.resume_upload(key, {"id": name}).parts()
        upload.known[1] = Part('"another"', 1)
        with pytest.raises(OriginFailed, match="is not the one that was sent"):
            await upload.complete()
        await upload.part(1, InMemory(b"yy"), 2)  # instead of the first
        await as_shown(there, await upload.complete(), b"yy")

    run(start("directory").origin(), use)
