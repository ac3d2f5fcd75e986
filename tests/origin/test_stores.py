"""What is particular to one store: links in directories, index pages, Azure's and Google's credentials."""

from __future__ import annotations

import http.server
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cachefs.base.errors import ConfigError, NotFound, ObjectChanged, OriginFailed, PermissionDenied
from cachefs.base.metrics import Metrics
from cachefs.origin import Origin, open_origin
from cachefs.origin.attempts import Attempts
from cachefs.origin.azure import parse_page as parse_azure
from cachefs.origin.fsspec_client import FsspecClient
from cachefs.origin.http import authorities
from cachefs.origin.web import names_in
from tests.origin.reading import Collect, content, pages, run
from tests.origin.servers import QUICK, Azurite, Web


async def seen(origin: Origin, prefix: str) -> set[str]:
    """What is in a directory, without its own marker."""
    found = await pages(origin, prefix, 3)
    keys = {o.key for page in found for o in page.objects} | {p for page in found for p in page.prefixes}
    return keys - {prefix}


def test_links_are_followed_inside_the_root_only(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "d/e").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("no")
    (root / "d/file").write_text("yes")
    (root / "inside").symlink_to("d/file")
    (root / "dir").symlink_to("d")
    (root / "escape").symlink_to(outside / "secret")
    (root / "escapes").symlink_to(outside)
    (root / "broken").symlink_to("nowhere")
    (root / "d/e/loop").symlink_to("..")
    (root / "itself").symlink_to("itself")
    os.mkfifo(root / "pipe")

    async def use(origin: Origin) -> None:
        assert await seen(origin, "") == {"d/", "dir/", "inside"}
        assert await seen(origin, "dir/") == {"dir/e/", "dir/file"}
        assert await seen(origin, "d/e/") == set()
        for key in ("inside", "dir/file"):
            assert await content(origin, await origin.head(key)) == b"yes"
        for key in (
            "escape",
            "escapes/secret",
            "../outside/secret",
            "d/../../outside/secret",
            "pipe",
            "d",
            "broken",
            "itself",
            "itself/file",
        ):
            with pytest.raises(NotFound):
                await origin.head(key)
            with pytest.raises(NotFound):
                await origin.read(key, '"x"', 0, 1, None)  # type: ignore[arg-type]

    run(open_origin(str(root), metrics=Metrics()), use)


def test_names_of_a_directory_are_bytes(tmp_path: Path) -> None:
    raw = [b"a\\b", b"#", b"%41", b"\x01", b"new\nline", b"\xff\xfe", "é".encode(), b"x" * 255]
    for name in raw:
        (tmp_path / os.fsdecode(name)).write_bytes(name)

    async def use(origin: Origin) -> None:
        assert {os.fsencode(name) for name in await seen(origin, "")} == set(raw)
        for name in raw:
            assert await content(origin, await origin.head(os.fsdecode(name))) == name

    run(open_origin(str(tmp_path), metrics=Metrics()), use)


def test_whether_there_is_a_directory_takes_none_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d/e").mkdir(parents=True)
    (tmp_path / "d/f").write_text("x")
    reads: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: reads.append(path) or scandir(path))

    async def use(origin: Origin) -> None:
        assert [o.key for o in (await origin.list_page("d/", limit=1)).objects] == ["d/"]
        for name in ("nowhere/", "d/f/"):
            with pytest.raises(NotFound):
                await origin.list_page(name, limit=1)
        assert not reads
        for name, keys in (("d/", ["d/", "d/f"]), ("d/e/", ["d/e/"])):
            assert [o.key for page in await pages(origin, name, 1) for o in page.objects] == keys

    run(open_origin(str(tmp_path), metrics=Metrics()), use)


def test_a_local_file_that_changes_in_place(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a" * 100)

    async def use(origin: Origin) -> None:
        info = await origin.head("f")
        path.write_bytes(b"b" * 100)
        os.utime(path, ns=(1, 1))
        with pytest.raises(ObjectChanged):
            await content(origin, info)

    run(open_origin(str(tmp_path), metrics=Metrics()), use)


class _Files(http.server.BaseHTTPRequestHandler):
    """A server without an index, with etags and ranges left to chance."""

    etag = '"1"'

    def _head(self) -> None:
        if self.path in ("/f", "/pages/", "/pages/f"):
            self.send_response(200)
            self.send_header("ETag", self.etag)
            self.send_header("Last-Modified", "Sat, 21 Nov 2026 08:06:30 GMT")
            self.send_header("Content-Length", "5")
        elif self.path in ("/dir", "/pages"):
            self.send_response(301)
            self.send_header("Location", f"{self.path}/")
            self.send_header("Content-Length", "0")
        else:
            self.send_response(403 if self.path in ("/", "/dir/") else 404)
            self.send_header("Content-Length", "0")
        self.end_headers()

    def do_HEAD(self) -> None:
        self._head()

    def do_GET(self) -> None:
        self._head()
        if self.path == "/f":
            self.wfile.write(b"hello")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def files() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_web_server_without_an_index_can_still_be_read(files: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(origin: Origin) -> None:
        await origin.check()
        assert not origin.can_list
        info = await origin.head("f")
        assert (info.size, info.etag) == (5, '"1"')
        assert await content(origin, info, 1, 3) == b"el"
        monkeypatch.setattr(_Files, "etag", '"2"')
        with pytest.raises(ObjectChanged):
            await content(origin, info)

    run(open_origin(files, metrics=Metrics(), backoff=QUICK), use)


def test_directories_of_a_web_server_without_an_index(files: str) -> None:
    """It leads from the name of a directory to one with a slash, and refuses that, or shows a page: no file in either
    case. So names below it can be looked up."""

    async def use(origin: Origin) -> None:
        for name in ("dir", "pages"):
            with pytest.raises(NotFound, match="is a directory"):
                await origin.head(name)
            await origin.head(f"{name}/")
        assert (await origin.head("pages/f")).size == 5
        for name in ("nowhere", "nowhere/"):
            with pytest.raises(NotFound, match="404"):
                await origin.head(name)

    run(open_origin(files, metrics=Metrics(), backoff=QUICK), use)


AUTHORITIES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")


def test_the_authorities_a_user_trusts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in AUTHORITIES:
        monkeypatch.delenv(name, raising=False)
    system = ssl.get_default_verify_paths()
    assert authorities() in (system.cafile, system.capath)
    for name in reversed(AUTHORITIES):  # the first that is set counts
        (tmp_path / name).write_text(f"-----{name}-----")
        monkeypatch.setenv(name, str(tmp_path / name))
        assert authorities() == str(tmp_path / name)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE=/.* cannot be read .*: name a PEM file"):
        run(open_origin("https://127.0.0.1:9", metrics=Metrics()), lambda o: o.check())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_listings_and_reads_trust_the_same_authorities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root").mkdir()
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    )
    command += " -addext subjectAltName=IP:127.0.0.1 -addext basicConstraints=critical,CA:FALSE"
    command += f" -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    server = Web(tmp_path / "root", certificate, key)
    server.put("f", b"hello")

    async def use(origin: Origin) -> None:
        assert [o.key for o in (await origin.list_page("")).objects] == ["f"]
        assert await content(origin, await origin.head("f")) == b"hello"

    try:
        for name in AUTHORITIES:
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(OriginFailed, match="certificate verify failed"):
            run(server.origin(), use)
        for name in AUTHORITIES:
            with monkeypatch.context() as patch:
                patch.setenv(name, str(certificate))
                run(server.origin(), use)
    finally:
        server.stop()


def test_index_pages_of_several_servers() -> None:
    page = """<a href="../">../</a> <a href="?C=N;O=D">Name</a> <a href="/data/">Parent</a> <a href="/">top</a>
      <a href="sub/">sub/</a> <a href="a%20b.txt">a b</a> <a href="./c">c</a> <A HREF="/data/x/d">d</A>
      <a href="http://elsewhere/data/x/e">e</a> <a href="http://h/data/x/f#part">f</a> <a href="deep/er/g">g</a>
      <a href="mailto:me">me</a> <a href="h%2Fi">h/i</a> <a href="..">up</a> <a>nothing</a>
      <a href="http://[your-host]/">an example</a> <a href="//[">no link</a>"""
    assert names_in(page, "http://h/data/x/") == ["a b.txt", "c", "d", "f", "sub/"]


def test_azure_credentials(start: Callable[[str], Azurite], monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import UTC, datetime, timedelta

    from azure.storage.blob import ContainerSasPermissions, generate_container_sas

    server = start("azurite")
    strange = "k//k \x01%?#&é"  # no path can hold it
    server.put("k", b"hello")
    server.put(strange, b"hello")
    text = server.env["AZURE_STORAGE_CONNECTION_STRING"]
    said = dict(part.split("=", 1) for part in text.strip(";").split(";"))
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", said["AccountName"])

    async def use(origin: Origin) -> None:
        await origin.check()
        for key in ("k", strange):
            info = await origin.head(key)
            assert await content(origin, info) == b"hello"
            assert await content(origin, info, 1, 3) == b"el"
            with pytest.raises(ObjectChanged):
                await origin.read(key, '"0x1"', 0, 3, Collect())
        with pytest.raises(NotFound):
            await origin.head(strange + "?")

    sas = generate_container_sas(
        said["AccountName"],
        "bucket",
        account_key=said["AccountKey"],
        permission=ContainerSasPermissions(read=True, list=True),
        expiry=datetime.now(UTC) + timedelta(hours=1),
    )
    for client in ("curl", "fsspec"):
        for name, value in (("ACCOUNT_KEY", said["AccountKey"]), ("SAS_TOKEN", sas)):
            with monkeypatch.context() as patch:
                patch.setenv(f"AZURE_STORAGE_{name}", value)
                run(server.origin(client, endpoint_url=said["BlobEndpoint"]), use)
        with monkeypatch.context() as patch:
            patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "c2VjcmV0")
            with pytest.raises(PermissionDenied, match=r"403.*AZURE_STORAGE_CONNECTION_STRING") as refused:
                run(server.origin(client, endpoint_url=said["BlobEndpoint"]), lambda o: o.check())
            assert "\n" not in str(refused.value) and "c2VjcmV0" not in str(refused.value)
    with monkeypatch.context() as patch:
        patch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
        for client in ("curl", "fsspec"):
            with pytest.raises(NotFound, match="no such bucket or container"):
                run(server.origin(client, url="az://nowhere"), lambda o: o.check())
    server.remove(strange)  # Azurite's listings answer 500 as long as there is such a key


def test_names_that_azure_encodes_and_directories_it_lists_twice() -> None:
    blob = (
        "<Blob>{}<Properties><Last-Modified>Sat, 21 Nov 2026 08:06:30 GMT</Last-Modified><Etag>0x1</Etag>"
        "<Content-Length>7</Content-Length>{}</Properties></Blob>"
    )
    body = (
        '\ufeff<?xml version="1.0" encoding="utf-8"?><EnumerationResults><Blobs>'
        + blob.format('<Name Encoded="true">a%01b</Name>', "")
        + blob.format("<Name>dir</Name>", "<ResourceType>directory</ResourceType>")
        + blob.format("<Name>a%01b</Name>", "")
        + "<BlobPrefix><Name>dir/</Name></BlobPrefix></Blobs><NextMarker>m</NextMarker></EnumerationResults>"
    )
    page = parse_azure(body.encode())
    assert [o.key for o in page.objects] == ["a\x01b", "a%01b"]
    assert (page.objects[0].etag, page.objects[0].size, page.prefixes, page.next_token) == (
        '"0x1"',
        7,
        ["dir/"],
        "m",
    )
    assert page.objects[0].mtime_ns == 1_795_248_390_000_000_000


def test_google_without_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "missing.json"))
    with pytest.raises(
        PermissionDenied, match=r"no Google credentials: .*missing\.json.*GOOGLE_APPLICATION_CREDENTIALS"
    ):
        run(open_origin("gs://bucket", metrics=Metrics(), backoff=QUICK), lambda o: o.check())


@pytest.mark.parametrize("field", ["ETag", "blob_id", "sha", "hex"])
def test_a_new_version_of_the_same_size_on_a_filesystem_without_times(field: str) -> None:
    """As new weights of a model on a hub have."""

    class Hub:
        version, data = "1", b"first"

        def info(self, path: str) -> dict[str, object]:
            return {"name": path, "type": "file", "size": len(self.data), field: self.version}

        def ls(self, path: str, detail: bool) -> list[dict[str, object]]:
            return [self.info(f"{path}/weights")]

        def cat_file(self, path: str, start: int, end: int) -> bytes:
            return self.data[start:end]

    hub = Hub()

    async def use(origin: Origin) -> None:
        old = await origin.head("weights")
        assert await content(origin, old) == b"first"
        hub.version, hub.data = "2", b"other"
        with pytest.raises(ObjectChanged):
            await content(origin, old)
        (new,) = (await origin.list_page("")).objects
        assert new == await origin.head("weights") and new.etag != old.etag
        assert await content(origin, new) == b"other"

    client = FsspecClient(lambda: hub, root="repo", label="hf://repo")
    run(Origin(Attempts(client, source="hf://repo", metrics=Metrics())), use)
