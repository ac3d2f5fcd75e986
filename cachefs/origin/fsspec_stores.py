"""S3 through s3fs and Azure through adlfs, with conditional reads, which their fsspec interfaces lack.

Only HEADs and bytes go through the filesystem. Listing and writing go over `cachefs.origin.http`:
fsspec has no pages, no parts and no conditions. Both libraries are asynchronous underneath and offer the
vendor's calls there; fsspec's `sync` runs those on fsspec's own loop. Every call has the longest silence of the origin as
its timeout.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from cachefs.origin.azure import AzureObjects, Container
from cachefs.origin.conditions import of_endpoint
from cachefs.origin.fsspec_client import NO_CACHES, FsspecClient
from cachefs.origin.http import SignedHttp, quoted, seconds_ns
from cachefs.origin.protocol import ListPage, ObjectInfo
from cachefs.origin.s3 import AMAZON, Bucket, S3Objects
from cachefs.origin.transport import CONNECT_S, Transport

CHUNK = 1 << 20


class _StoreClient(FsspecClient):
    """What both have in common. `_call` runs a coroutine function on fsspec's loop."""

    def __init__(
        self, place: Bucket | Container, root: str, http: SignedHttp, objects: S3Objects | AzureObjects
    ) -> None:
        super().__init__(
            self._open,
            root=root,
            label=place.label,
            advice=lambda: place.credentials.advice,
            credentials=place.credentials.current,
        )
        self.writer = objects
        self._objects, self._transport, self._credentials = objects, http.transport, place.credentials

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        return self._objects.list_page(prefix, token, limit)

    def renew(self, since: float) -> bool:
        return self._credentials.renew(since)

    def close(self) -> None:
        super().close()
        self._transport.close()

    def _call(self, key: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        from fsspec.asyn import sync

        try:
            return sync(
                self.opened().loop, call, *args, timeout=self._transport.stall_s + CONNECT_S, **kwargs
            )
        except Exception as exc:
            raise self.translated(exc, key) from exc

    def _open(self) -> Any:
        raise NotImplementedError


class S3fsClient(_StoreClient):
    """An S3 bucket through s3fs."""

    def __init__(self, bucket: Bucket, stall_s: float) -> None:
        http = SignedHttp(bucket, Transport(stall_s))
        objects = S3Objects(http, bucket.name, AMAZON, of_endpoint(bucket.endpoint_url))
        super().__init__(bucket, bucket.name, http, objects)
        self._bucket = bucket

    def head(self, key: str) -> ObjectInfo:
        reply = self._s3(key, "head_object")
        return ObjectInfo(
            key, reply["ContentLength"], seconds_ns(reply["LastModified"]), quoted(reply["ETag"])
        )

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        part = {} if whole else {"Range": f"bytes={start}-{stop - 1}"}
        reply = self._s3(key, "get_object", IfMatch=etag, **part)
        body = reply["Body"]
        try:
            self._same_version(key, etag, quoted(reply["ETag"]))
            while data := self._call(key, body.read, CHUNK):
                yield data
        finally:
            body.close()

    def _s3(self, key: str, method: str, **arguments: Any) -> Any:
        async def ask() -> Any:
            return await filesystem._call_s3(method, Bucket=self._bucket.name, Key=key, **arguments)

        try:
            filesystem = self.opened()  # not on fsspec's loop, for which opening may wait
        except Exception as exc:
            raise self.translated(exc, key) from exc
        return self._call(key, ask)

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
                "read_timeout": self._transport.stall_s,
                "max_pool_connections": 64,
            },
            **NO_CACHES,
        )
        filesystem.retries = 1
        return filesystem


class AdlfsClient(_StoreClient):
    """An Azure container through adlfs. A read arrives whole: azure-storage-blob fetches it in its own pieces."""

    def __init__(self, container: Container, stall_s: float) -> None:
        http = SignedHttp(container, Transport(stall_s))
        super().__init__(container, container.container, http, AzureObjects(http, container))
        self._container = container

    def head(self, key: str) -> ObjectInfo:
        async def properties(blob: Any) -> Any:
            return await blob.get_blob_properties()

        found = self._on_blob(key, properties)
        return ObjectInfo(key, int(found.size), seconds_ns(found.last_modified), quoted(str(found.etag)))

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        from azure.core import MatchConditions

        async def download(blob: Any) -> tuple[str, bytes]:
            stream = await blob.download_blob(
                offset=start,
                length=stop - start,
                etag=etag,
                match_condition=MatchConditions.IfNotModified,
                max_concurrency=1,
            )
            return quoted(stream.properties.etag), await stream.readall()

        found, data = self._on_blob(key, download)
        self._same_version(key, etag, found)
        yield data

    def _on_blob(self, key: str, call: Any) -> Any:
        """The result of a coroutine function that is given the blob's client."""

        async def ask() -> Any:
            return await call(filesystem.service_client.get_blob_client(self._container.container, key))

        try:
            filesystem = self.opened()  # not on fsspec's loop, for which opening may wait
        except Exception as exc:
            raise self.translated(exc, key) from exc
        return self._call(key, ask)

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
            **access, connection_timeout=CONNECT_S, read_timeout=self._transport.stall_s, **NO_CACHES
        )
