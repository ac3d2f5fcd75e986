"""Any store that fsspec knows, through its synchronous face.

fsspec promises neither conditional reads nor pages. Here is what works for every filesystem: a listing is one
page (as much memory as the directory is long), and a read asks for the version before and after it fetches
the bytes, and passes them on only if it was the same both times. `cachefs.origin.fsspec_stores` does better
for S3 and Azure.

fsspec's own listing cache never expires and its instances are shared; both are switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any, NamedTuple

from cachefs.errors import (
    CachefsError,
    ConfigError,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Transient,
    Unsupported,
)
from cachefs.origin.fsspec_writing import FilesystemWriter
from cachefs.origin.listing.http import quoted
from cachefs.origin.obstore_client import made_up
from cachefs.origin.opened import Opened
from cachefs.origin.protocol import ListPage, ObjectInfo
from cachefs.origin.replies import one_line, refusal
from cachefs.origin.writing import Writer

NO_CACHES = {"use_listings_cache": False, "skip_instance_cache": True}
ENVIRONMENT = "check the credentials in the environment or in fsspec's own configuration"


class FsspecClient:
    """The tree below `root` (a path as the filesystem wants it, without its scheme). Keys are relative to
    it."""

    can_list = True

    def __init__(
        self,
        open_filesystem: Callable[[], Any],
        *,
        root: str,
        label: str,
        advice: Callable[[], str] = lambda: ENVIRONMENT,
        credentials: Callable[[], object] = lambda: None,
    ) -> None:
        self.writer: Writer = FilesystemWriter(self)
        self._root = root
        self._label = label
        self._advice = advice
        self._filesystem = Opened(open_filesystem, credentials)

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        """All of the directory, whatever the limit: fsspec has nothing smaller."""
        here = self.path(prefix).rstrip("/")
        try:
            entries = self.opened().ls(here, detail=True)
        except Exception as exc:
            raise self.translated(exc, prefix) from exc
        objects, prefixes = [], []
        for entry in entries:
            name = entry["name"].rstrip("/")
            key = prefix + name.rpartition("/")[2]
            if name == here or (start_after and key <= start_after):
                continue  # some filesystems list a directory's own marker in it
            if entry["type"] == "directory":
                prefixes.append(key + "/")
            else:
                objects.append(self._info(key, entry))
        objects.sort(key=lambda o: o.key.encode("utf-8", "surrogatepass"))
        prefixes.sort(key=lambda p: p.encode("utf-8", "surrogatepass"))
        return ListPage(objects, prefixes, None)

    def head(self, key: str) -> ObjectInfo:
        try:
            entry = self.opened().info(self.path(key))
        except Exception as exc:
            raise self.translated(exc, key) from exc
        if entry["type"] == "directory":
            raise NotFound(f"{self._label}/{key}: no such object")
        return self._info(key, entry)

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        self._same_version(key, etag, self.head(key).etag)
        try:
            # By keyword: the second positional argument is a version in s3fs and a start elsewhere.
            data = self.opened().cat_file(self.path(key), start=start, end=stop)
        except Exception as exc:
            raise self.translated(exc, key) from exc
        self._same_version(key, etag, self.head(key).etag)
        yield data

    def renew(self, since: float) -> bool:
        """The next request opens the filesystem anew; whether with other credentials, only the store can tell."""
        self._filesystem.forget(since)
        return True

    def close(self) -> None:
        self._filesystem.forget()

    def opened(self) -> Any:
        return self._filesystem.get()

    def path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _info(self, key: str, entry: dict[str, Any]) -> ObjectInfo:
        mtime_ns, size = _mtime_ns(entry), entry.get("size")
        size = -1 if size is None else int(size)
        etag = entry.get("ETag") or entry.get("etag") or entry.get("e_tag") or ""
        return ObjectInfo(key, size, mtime_ns, quoted(str(etag)) or made_up(mtime_ns, size))

    def _same_version(self, key: str, wanted: str, found: str) -> None:
        if found != wanted:
            raise ObjectChanged(f"{self._label}/{key}: the object changed at the store")

    def translated(self, exc: BaseException, key: str) -> CachefsError:
        return in_our_words(exc, f"{self._label}/{key}", self._advice())


def in_our_words(exc: BaseException, what: str, advice: str) -> CachefsError:
    """What an fsspec filesystem raised, in our words. Their exceptions share no base, but most carry the HTTP
    status somewhere: it is looked for before the type says anything."""
    if isinstance(exc, CachefsError):
        return exc
    cause: BaseException | None = exc
    while cause is not None:
        found = _http_status(cause)
        if found is not None:
            return refusal(
                found.status,
                what=what,
                code=found.code,
                message=found.message,
                advice=advice,
                date=found.date,
            )
        cause = cause.__cause__
    said = _text(exc)
    line = one_line(f"{what}: {type(exc).__name__}" + (f": {said}" if said else ""))
    if isinstance(exc, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NotFound(f"{what}: no such object")
    name = type(exc).__name__
    if isinstance(exc, PermissionError) or "Credential" in name or "Auth" in name:
        return PermissionDenied(f"{line}; {advice}")
    if isinstance(exc, NotImplementedError | ValueError | TypeError):
        return Unsupported(line)
    # Connections, timeouts (fsspec's and asyncio's own), broken bodies. Every library has its own names for
    # these.
    if isinstance(exc, OSError | EOFError) or any(
        word in name
        for word in ("Timeout", "Connect", "Client", "Service", "Incomplete", "Payload", "Response")
    ):
        return Transient(line)
    return OriginFailed(line)


class _Told(NamedTuple):
    """What an exception knows of the origin's reply."""

    status: int
    code: str
    message: str
    date: str = ""


def _text(value: object) -> str:
    """As text; "" for what libraries put where there is no message."""
    text = "" if value is None else str(value)
    return "" if text in ("None", "(None) None") else text


def _http_status(exc: BaseException) -> _Told | None:
    """What an exception of botocore, azure-core, aiohttp or gcsfs knows."""
    response = getattr(exc, "response", None)
    if isinstance(response, dict) and "Error" in response:
        error = response["Error"]
        metadata = response.get("ResponseMetadata", {})
        code, date = _text(error.get("Code")), _text(metadata.get("HTTPHeaders", {}).get("date"))
        # A HEAD has no body; botocore then says the status where the code would be.
        said = "" if code.isdigit() else code, _text(error.get("Message")), date
        return _Told(int(metadata.get("HTTPStatusCode", 0)), *said)
    # `code` is gcsfs's; elsewhere it may be anything (aiohttp says 400 for a body that breaks).
    for name in ("code",) if type(exc).__name__ == "HttpError" else ("status_code", "status"):
        status = getattr(exc, name, None)
        if isinstance(status, int) and 300 <= status < 600:
            told = getattr(exc, "error_code", None)
            return _Told(
                status, _text(getattr(told, "value", told)), _text(one_line(str(getattr(exc, "message", ""))))
            )
    return None


def _mtime_ns(entry: dict[str, Any]) -> int:
    """The time of an entry, under whichever name and type a filesystem has it; 0 when it has none."""
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
            return round(value * 1_000_000) * 1000  # as exact as a float of today is
    return 0


def any_filesystem(url: str, scheme: str) -> tuple[FsspecClient, str]:
    """The client of a URL of any scheme that fsspec knows, and its store's identity."""
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
        # What the URL itself says, such as a host; credentials come from the environment or fsspec's config
        # files.
        options = kind._get_kwargs_from_urls(url)
        return fsspec.filesystem(scheme, **{**options, **NO_CACHES})

    root = str(kind._strip_protocol(url)).rstrip("/")
    label = url.rstrip("/")
    return FsspecClient(open_filesystem, root=root, label=label), label
