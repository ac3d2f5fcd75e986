"""Any store that fsspec knows, through its synchronous interface.

fsspec promises no pages, no conditional reads or writes, and no parts. So a listing is one page (memory grows with the
directory); a read asks for the version before and after it fetches the bytes, and passes them on only if both are the
wanted one; a file of any size is written from its beginning to its end. fsspec's own listing cache never expires and its
instances are shared; both are switched off. S3 and Azure have clients of their own below, which do better."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

from cachefs.base.errors import (
    CachefsError,
    ConfigError,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Transient,
    Unsupported,
)
from cachefs.origin.azure import AzureClient, Container
from cachefs.origin.http import CONNECT_S, one_line, quoted, refusal
from cachefs.origin.protocol import (
    HONOURED,
    UNLIMITED,
    Body,
    Limits,
    ListPage,
    ObjectInfo,
    Preconditions,
    Writer,
    Written,
    made_up,
    raise_if_abandoned,
)
from cachefs.origin.s3 import Bucket, S3Client, s3_client

LIMITS = Limits(UNLIMITED, 1, UNLIMITED, 0, UNLIMITED, directories=True, longest_key=UNLIMITED)

VERSIONS = ("ETag", "etag", "e_tag", "blob_id", "sha", "hex")
"""Fields of an entry that name its version: the last three for Hugging Face, GitHub and git, which tell no times."""

BROKEN = ("Timeout", "Connect", "Client", "Service", "Incomplete", "Payload", "Response")
"""Words in the libraries' names of errors that mean a connection, a timeout (fsspec's, asyncio's) or a broken body."""

NO_CACHES = {"use_listings_cache": False, "skip_instance_cache": True}
ENVIRONMENT = "check the credentials in the environment or in fsspec's own configuration"


class FsspecClient(Writer):
    """The tree below `root` (a path in the filesystem's form, without its scheme). Keys are relative to it. The filesystem
    is opened again when its credentials change: libraries keep those that they were opened with for minutes or for ever."""

    limits = LIMITS
    conditions = HONOURED

    def __init__(
        self,
        open_filesystem: Callable[[], Any],
        *,
        root: str,
        label: str,
        advice: Callable[[], str] = lambda: ENVIRONMENT,
        credentials: Callable[[], object] = lambda: None,
    ) -> None:
        self.writer: Writer | None = self
        self._root = root
        self._label = self.source = label
        self._advice = advice
        self._open_filesystem, self._credentials = open_filesystem, credentials
        self._filesystem: Any = None
        self._opened_with: object = None
        self._opened_at = float("-inf")
        self._lock = threading.Lock()

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        """The whole directory in one page, whatever `limit` is: fsspec has no smaller listing."""
        directory = self.path(prefix).rstrip("/")
        with self.translated(prefix):
            entries = self.opened().ls(directory, detail=True)
        objects, prefixes = [], []
        for entry in entries:
            name = entry["name"].rstrip("/")
            key = prefix + name.rpartition("/")[2]
            if name == directory:
                continue  # some filesystems list a directory's own marker in it
            if entry["type"] == "directory":
                prefixes.append(key + "/")
            else:
                objects.append(self._info(key, entry))
        objects.sort(key=lambda o: o.key.encode("utf-8", "surrogatepass"))
        prefixes.sort(key=lambda p: p.encode("utf-8", "surrogatepass"))
        return ListPage(objects, prefixes, None)

    def head(self, key: str) -> ObjectInfo:
        with self.translated(key):
            entry = self.opened().info(self.path(key))
        if entry["type"] == "directory":
            raise NotFound(f"{self._label}/{key}: no such object")
        return self._info(key, entry)

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        self._same_version(key, etag, self.head(key).etag)
        with self.translated(key):
            # By keyword: the second positional argument is a version in s3fs and a start elsewhere.
            data = self.opened().cat_file(self.path(key), start=start, end=stop)
        self._same_version(key, etag, self.head(key).etag)
        yield data

    def renew(self, since: float) -> bool:
        """As `Client.renew`. True always: only the origin can tell whether the credentials changed."""
        if self._opened_at <= since:
            self._filesystem = None
        return True

    def close(self) -> None:
        self._filesystem = None  # without the lock: an opening that hangs must not hold this up

    def opened(self) -> Any:
        # The credentials are read with the lock held, so that a slower thread cannot bring older ones back.
        with self._lock:
            current = self._credentials()
            filesystem = self._filesystem
            if filesystem is None or current != self._opened_with:
                filesystem = self._filesystem = self._open_filesystem()
                self._opened_with, self._opened_at = current, time.monotonic()
        raise_if_abandoned()
        return filesystem

    def path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _info(self, key: str, entry: dict[str, Any]) -> ObjectInfo:
        mtime_ns, size = _mtime_ns(entry), entry.get("size")
        size = -1 if size is None else int(size)
        etag = next((str(entry[name]) for name in VERSIONS if entry.get(name)), "")
        return ObjectInfo(key, size, mtime_ns, quoted(etag) or made_up(mtime_ns, size))

    def _same_version(self, key: str, wanted: str, found: str) -> None:
        if found != wanted:
            raise ObjectChanged(f"{self._label}/{key}: the object changed at the origin")

    @contextmanager
    def translated(self, key: str) -> Iterator[None]:
        """Turn what the filesystem raises into errors of `base.errors`."""
        try:
            yield
        except Exception as exc:
            raise in_our_words(exc, f"{self._label}/{key}", self._advice()) from exc

    # Writing. Conditions on a copy are compared here; conditional writes raise `Unsupported`.

    def put(self, key: str, body: Body, preconditions: Preconditions) -> Written:
        if preconditions.conditional:
            raise Unsupported(f"{key}: fsspec promises no conditional writes")
        path = self.path(key)
        with self.translated(key):
            filesystem = self.opened()
            if key.endswith("/") and not body.size:
                filesystem.makedirs(path, exist_ok=True)
                return Written("directory", 0)  # filesystems have no version of a directory
            data = b"".join(body.chunks()) if body.size <= CHUNK else None
            _in_directory(filesystem, path, lambda: self._write(filesystem, path, body, data))
        return Written()

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        if etag is not None and self.head(key).etag != etag:
            raise ObjectChanged(f"{key}: the object changed at the origin")
        source, target = self.path(key), self.path(to)
        with self.translated(key):
            filesystem = self.opened()
            _in_directory(filesystem, target, lambda: filesystem.cp_file(source, target))
        return Written()

    def delete(self, key: str) -> None:
        with suppress(NotFound), self.translated(key):
            filesystem = self.opened()
            if not key.endswith("/"):
                filesystem.rm_file(self.path(key))
            else:
                with suppress(OSError):  # other keys are in it
                    filesystem.rmdir(self.path(key).rstrip("/"))

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        return self.head(key), ""

    @staticmethod
    def _write(filesystem: Any, path: str, body: Body, data: bytes | None) -> None:
        if data is not None:
            filesystem.pipe_file(path, data)
            return
        file = filesystem.open(path, "wb", autocommit=False)
        try:
            for chunk in body.chunks():
                file.write(chunk)
            file.close()
            if hasattr(file, "commit"):
                file.commit()
        except BaseException:
            with suppress(Exception):  # the first error tells more
                file.discard()
            raise


def _in_directory(filesystem: Any, path: str, write: Callable[[], None]) -> None:
    """Write to a path. Some filesystems want a directory before its files."""
    try:
        write()
    except FileNotFoundError:
        filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        write()


def in_our_words(exc: BaseException, object_name: str, advice: str) -> CachefsError:
    """The error of `base.errors` for an exception of a filesystem. These exceptions share no base class, but most carry an
    HTTP status somewhere, which says more than the type."""
    if isinstance(exc, CachefsError):
        return exc
    cause: BaseException | None = exc
    while cause is not None:
        refused = _refusal(cause, object_name, advice)
        if refused is not None:
            return refused
        cause = cause.__cause__
    text = _text(exc)
    line = one_line(f"{object_name}: {type(exc).__name__}" + (f": {text}" if text else ""))
    if isinstance(exc, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NotFound(f"{object_name}: no such object")
    name = type(exc).__name__
    if isinstance(exc, PermissionError) or "Credential" in name or "Auth" in name:
        return PermissionDenied(f"{line}; {advice}")
    if isinstance(exc, NotImplementedError | ValueError | TypeError):
        return Unsupported(line)
    broken = isinstance(exc, OSError | EOFError) or any(word in name for word in BROKEN)
    return Transient(line) if broken else OriginFailed(line)


def _text(value: object) -> str:
    """The value as text; "" for what libraries put in place of a missing message."""
    text = "" if value is None else str(value)
    return "" if text in ("None", "(None) None") else text


def _refusal(exc: BaseException, name: str, advice: str) -> CachefsError | None:
    """The error for the reply that an exception of botocore, azure-core, aiohttp or gcsfs carries; None if it has none."""
    refused = partial(refusal, name=name, advice=advice)
    response = getattr(exc, "response", None)
    if isinstance(response, dict) and "Error" in response:
        error, metadata = response["Error"], response.get("ResponseMetadata", {})
        code, headers = _text(error.get("Code")), metadata.get("HTTPHeaders", {})
        if code.isdigit():  # the reply to a HEAD has no body: botocore puts the status in place of the code
            code = ""
        status: Any = int(metadata.get("HTTPStatusCode", 0))
        return refused(status, code=code, message=_text(error.get("Message")), headers=headers)
    # Only gcsfs's `code` is a status; aiohttp's is 400 for a body that breaks.
    for attribute in ("code",) if type(exc).__name__ == "HttpError" else ("status_code", "status"):
        status = getattr(exc, attribute, None)
        if isinstance(status, int) and 300 <= status < 600:
            told = getattr(exc, "error_code", None)
            message = _text(one_line(str(getattr(exc, "message", ""))))
            return refused(status, code=_text(getattr(told, "value", told)), message=message)
    return None


def _mtime_ns(entry: dict[str, Any]) -> int:
    """The mtime of an entry; 0 if it has none. Its name and type differ between filesystems."""
    for name in ("LastModified", "last_modified", "mtime", "updated", "modified", "modify", "created"):
        value = entry.get(name)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value)
            except ValueError:
                continue
        if isinstance(value, datetime):
            aware = value if value.tzinfo else value.replace(tzinfo=UTC)
            return int(aware.timestamp()) * 1_000_000_000 + aware.microsecond * 1000
        if isinstance(value, int | float):
            return round(value * 1_000_000) * 1000  # a float of today is exact to a microsecond
    return 0


def any_filesystem(url: str, scheme: str) -> FsspecClient:
    """A client for a URL of any scheme that fsspec knows."""
    import fsspec

    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ImportError as exc:
        raise ConfigError(one_line(f"{scheme}:// needs a package that is not installed: {exc}")) from exc
    except ValueError as exc:
        raise ConfigError(
            f"unknown scheme {scheme!r}; s3, az, abfs, gs, http, https, file, or one fsspec knows"
        ) from exc

    def open_filesystem() -> Any:
        # The URL gives options such as the host; credentials come from the environment or fsspec's config files.
        options = kind._get_kwargs_from_urls(url)
        return fsspec.filesystem(scheme, **{**options, **NO_CACHES})

    root = str(kind._strip_protocol(url)).rstrip("/")
    return FsspecClient(open_filesystem, root=root, label=url.rstrip("/"))


# S3 through s3fs and Azure through adlfs, with conditional reads, which their fsspec interfaces lack.
#
# Only reads go through the filesystem. HEADs, listing and writing go through `cachefs.origin.http`: fsspec has no pages, no
# parts and no conditions. Both libraries are asynchronous underneath and offer the vendor's calls there; fsspec's `sync`
# runs those on fsspec's own loop. The timeout of a call is the longest silence of the origin.

CHUNK = 1 << 20


class _StoreClient(FsspecClient):
    """The common part of both."""

    def __init__(
        self, place: Bucket | Container, curl: S3Client | AzureClient, open_filesystem: Callable[[], Any]
    ) -> None:
        super().__init__(
            open_filesystem,
            root="",
            label=place.label,
            advice=lambda: place.credentials.advice,
            credentials=place.credentials.current,
        )
        self.source, self.writer = place.source, curl.writer
        self._curl, self._stall_s = curl, curl.patience_s

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        return self._curl.list_page(prefix, token, limit)

    def head(self, key: str) -> ObjectInfo:
        return self._curl.head(key)

    def renew(self, since: float) -> bool:
        return self._curl.renew(since)

    def close(self) -> None:
        super().close()
        self._curl.close()

    def _call(self, key: str, call: Callable[[Any], Any]) -> Any:
        """The result of a coroutine function that is given the filesystem, on fsspec's loop. The filesystem is opened before
        that, because opening it may wait for that loop."""
        from fsspec.asyn import sync

        with self.translated(key):
            filesystem = self.opened()
            return sync(filesystem.loop, call, filesystem, timeout=self._stall_s + CONNECT_S)


class S3fsClient(_StoreClient):
    """An S3 bucket through s3fs."""

    def __init__(self, bucket: Bucket, stall_s: float) -> None:
        super().__init__(bucket, s3_client(bucket, stall_s), self._open)
        self._bucket = bucket

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        wanted = {"Bucket": self._bucket.name, "Key": key, "IfMatch": etag}
        if not whole:
            wanted["Range"] = f"bytes={start}-{stop - 1}"
        reply = self._call(key, lambda filesystem: filesystem._call_s3("get_object", **wanted))
        body = reply["Body"]
        try:
            self._same_version(key, etag, quoted(reply["ETag"]))
            while data := self._call(key, lambda _: body.read(CHUNK)):
                yield data
        finally:
            body.close()

    def _open(self) -> Any:
        import s3fs

        bucket = self._bucket
        found = bucket.credentials.current()
        access: dict[str, Any] = {"anon": True} if found is None else {}
        if found is not None:
            access = {"key": found.access_key, "secret": found.secret_key, "token": found.token}
        filesystem = s3fs.S3FileSystem(
            **access,
            endpoint_url=bucket.endpoint_url,
            client_kwargs={"region_name": bucket.region},
            config_kwargs={
                "retries": {"max_attempts": 0},
                "connect_timeout": CONNECT_S,
                "read_timeout": self._stall_s,
                "max_pool_connections": 64,
            },
            **NO_CACHES,
        )
        filesystem.retries = 1
        return filesystem


class AdlfsClient(_StoreClient):
    """An Azure container through adlfs. A read is one chunk: azure-storage-blob fetches it piecewise."""

    def __init__(self, container: Container, stall_s: float) -> None:
        super().__init__(container, AzureClient(container, stall_s), self._open)
        self._container = container

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        from azure.core import MatchConditions

        async def download(filesystem: Any) -> tuple[str, bytes]:
            blob = filesystem.service_client.get_blob_client(self._container.container, key)
            stream = await blob.download_blob(
                offset=start,
                length=stop - start,
                etag=etag,
                match_condition=MatchConditions.IfNotModified,
                max_concurrency=1,
            )
            return quoted(stream.properties.etag), await stream.readall()

        found, data = self._call(key, download)
        self._same_version(key, etag, found)
        yield data

    def _open(self) -> Any:
        import adlfs

        place = self._container
        proof = place.credentials.current()
        access: dict[str, Any] = {"account_name": place.account, "anon": place.credentials.anonymous}
        for name, value in (("AccountKey", proof.key), ("SharedAccessSignature", proof.sas)):
            if value:
                text = f"BlobEndpoint={place.endpoint};AccountName={place.account};{name}={value}"
                access = {"connection_string": text}
        return adlfs.AzureBlobFileSystem(
            **access, connection_timeout=CONNECT_S, read_timeout=self._stall_s, **NO_CACHES
        )
