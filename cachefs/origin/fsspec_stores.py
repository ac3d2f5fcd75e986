"""S3 through s3fs and Azure through adlfs, with what their fsspec faces lack: pages, and conditional reads.

Both are asynchronous underneath and offer the vendor's calls there; fsspec's `sync` runs those on fsspec's
own loop. Every call has the silence of the store (`stall_s`) as its timeout.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from cachefs.origin.azure import account_and_endpoint
from cachefs.origin.conditions import of_endpoint
from cachefs.origin.credentials.aws import AwsCredentials
from cachefs.origin.credentials.azure import AzureCredentials
from cachefs.origin.fsspec_client import NO_CACHES, FsspecClient
from cachefs.origin.fsspec_store_writing import AdlfsWriter, BodyFile, S3fsWriter
from cachefs.origin.listing.http import CONNECT_S, quoted, seconds_ns
from cachefs.origin.protocol import ListPage, ObjectInfo
from cachefs.origin.s3 import Bucket

CHUNK = 1 << 20


def watched(loop: Any, call: Any, silence_s: float, body: BodyFile | None) -> Any:
    """`call` with an end when nothing happens for that long: neither is the body read nor does a reply come. aiohttp
    itself watches only what it reads."""

    async def watch(*args: Any, **kwargs: Any) -> Any:
        task, silent, seen = loop.create_task(call(*args, **kwargs)), False, -1
        timer: Any = None

        def look() -> None:
            nonlocal silent, seen, timer
            silent = body is None or (body.tell() == seen and not body.waits)
            if silent:
                task.cancel()
            else:
                assert body is not None
                seen = body.tell()
                timer = loop.call_later(silence_s, look)

        timer = loop.call_later(silence_s, look)
        try:
            return await task
        except BaseException as exc:
            if silent:
                raise TimeoutError("the store stayed silent for too long") from exc
            raise
        finally:
            timer.cancel()

    return watch


class S3fsClient(FsspecClient):
    """An S3 bucket through s3fs."""

    def __init__(self, bucket: Bucket, stall_s: float) -> None:
        label = f"s3://{bucket.name}"
        super().__init__(
            self._s3fs,
            root=bucket.name,
            label=label,
            advice=lambda: bucket.credentials.advice,
            credentials=bucket.credentials.current,
        )
        self._bucket, self._stall_s, self.name = bucket, stall_s, bucket.name
        self.writer = S3fsWriter(self, of_endpoint(bucket.endpoint_url))

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        arguments: dict[str, Any] = {"Prefix": prefix, "Delimiter": "/", "MaxKeys": limit}
        if token is not None:
            arguments["ContinuationToken"] = token
        elif start_after is not None:
            arguments["StartAfter"] = start_after
        reply = self.call(prefix, "list_objects_v2", **arguments)
        objects = [
            ObjectInfo(o["Key"], o["Size"], seconds_ns(o["LastModified"]), quoted(o["ETag"]))
            for o in reply.get("Contents", ())
        ]
        prefixes = [p["Prefix"] for p in reply.get("CommonPrefixes", ())]
        return ListPage(objects, prefixes, reply.get("NextContinuationToken"))

    def head(self, key: str) -> ObjectInfo:
        reply = self.call(key, "head_object", Key=key)
        return ObjectInfo(
            key, reply["ContentLength"], seconds_ns(reply["LastModified"]), quoted(reply["ETag"])
        )

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        arguments: dict[str, Any] = {"Key": key, "IfMatch": etag}
        if not whole:
            arguments["Range"] = f"bytes={start}-{stop - 1}"
        reply = self.call(key, "get_object", **arguments)
        body = reply["Body"]
        try:
            self._same_version(key, etag, quoted(reply["ETag"]))
            while data := self.sync(key, body.read, CHUNK):
                yield data
        finally:
            body.close()

    def renew(self, since: float) -> bool:
        return self._bucket.credentials.renew(since)

    def call(
        self, key: str, method: str, *, body: BodyFile | None = None, patience: int = 1, **arguments: Any
    ) -> Any:
        """One request. `patience`: so many times the usual silence, where the store has to work for it."""
        try:
            loop, call = self.opened().loop, self.opened()._call_s3
        except Exception as exc:
            raise self.translated(exc, key) from exc
        if body is not None:
            arguments |= {"Body": body, "ContentLength": body.size}
        call = watched(loop, call, (self._stall_s + CONNECT_S) * patience, body)
        return self.sync(key, call, method, timeout=None, Bucket=self._bucket.name, **arguments)

    def sync(self, key: str, call: Any, *args: Any, timeout: float | None = 0, **kwargs: Any) -> Any:
        from fsspec.asyn import sync

        timeout = self._stall_s + CONNECT_S if timeout == 0 else timeout
        try:
            return sync(self.opened().loop, call, *args, timeout=timeout, **kwargs)
        except Exception as exc:
            raise self.translated(exc, key) from exc

    def _s3fs(self) -> Any:
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
                # A body is read once, when it is sent, and not before for digests; over TLS it needs none.
                "request_checksum_calculation": "when_required",
                "s3": {"payload_signing_enabled": False},
            },
            **NO_CACHES,
        )
        filesystem.retries = 1
        return filesystem


class AdlfsClient(FsspecClient):
    """An Azure container through adlfs. A read arrives whole: azure-storage-blob fetches it as it likes."""

    def __init__(self, container: str, endpoint: str, credentials: AzureCredentials, stall_s: float) -> None:
        label = f"az://{credentials.account}/{container}"
        super().__init__(
            self._adlfs,
            root=container,
            label=label,
            advice=lambda: credentials.advice,
            credentials=credentials.current,
        )
        self._container, self._endpoint = container, endpoint
        self._credentials, self._stall_s = credentials, stall_s
        self.writer = AdlfsWriter(self)

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        async def page(service: Any) -> tuple[list[Any], str | None]:
            container = service.get_container_client(self._container)
            blobs = container.walk_blobs(name_starts_with=prefix, delimiter="/", results_per_page=limit)
            pages = blobs.by_page(continuation_token=token)
            async for found in pages:
                return [blob async for blob in found], pages.continuation_token
            return [], None

        blobs, next_token = self.sync(prefix, page)
        objects = [_blob(b.name, b) for b in blobs if not b.name.endswith("/") or hasattr(b, "etag")]
        prefixes = [b.name for b in blobs if b.name.endswith("/") and not hasattr(b, "etag")]
        return ListPage(objects, prefixes, next_token or None)

    def head(self, key: str) -> ObjectInfo:
        async def properties(service: Any) -> Any:
            blob = service.get_blob_client(self._container, key)
            return await blob.get_blob_properties()

        return _blob(key, self.sync(key, properties))

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        from azure.core import MatchConditions

        async def download(service: Any) -> tuple[str, bytes]:
            blob = service.get_blob_client(self._container, key)
            stream = await blob.download_blob(
                offset=start,
                length=stop - start,
                etag=etag,
                match_condition=MatchConditions.IfNotModified,
                max_concurrency=1,
            )
            return quoted(stream.properties.etag), await stream.readall()

        found, data = self.sync(key, download)
        self._same_version(key, etag, found)
        yield data

    def renew(self, since: float) -> bool:
        return self._credentials.renew(since)

    def on_blob(
        self, key: str, call: Callable[[Any], Any], *, body: BodyFile | None = None, patience: int = 1
    ) -> Any:
        """What a call of the blob's own client gives."""

        async def ask(service: Any) -> Any:
            return await call(service.get_blob_client(self._container, key))

        silence_s = (self._stall_s + CONNECT_S) * patience
        return self.sync(key, watched(self.opened().loop, ask, silence_s, body), timeout=None)

    def blob_url(self, key: str) -> str:
        """A URL that Azure itself may read."""
        service = self.opened().service_client
        return str(service.get_blob_client(self._container, key).url)

    def sync(self, key: str, call: Any, *, timeout: float | None = 0) -> Any:
        from fsspec.asyn import sync

        timeout = self._stall_s + CONNECT_S if timeout == 0 else timeout
        try:
            filesystem = self.opened()  # not on fsspec's loop, which opening may wait for
            return sync(filesystem.loop, call, filesystem.service_client, timeout=timeout)
        except Exception as exc:
            raise self.translated(exc, key) from exc

    def _adlfs(self) -> Any:
        import adlfs

        proof, account = self._credentials.current(), self._credentials.account
        access: dict[str, Any] = {"account_name": account, "anon": self._credentials.anonymous}
        for name, value in (("AccountKey", proof.key), ("SharedAccessSignature", proof.sas)):
            if value:
                text = f"BlobEndpoint={self._endpoint};AccountName={account};{name}={value}"
                access = {"connection_string": text}
        return adlfs.AzureBlobFileSystem(
            **access, connection_timeout=CONNECT_S, read_timeout=self._stall_s, **NO_CACHES
        )


def _blob(key: str, properties: Any) -> ObjectInfo:
    return ObjectInfo(
        key, int(properties.size), seconds_ns(properties.last_modified), quoted(str(properties.etag))
    )


def s3fs_client(
    name: str,
    *,
    endpoint_url: str | None,
    region: str | None,
    profile: str | None,
    anonymous: bool,
    stall_s: float,
) -> tuple[S3fsClient, str]:
    """The client, and its store's identity (the same as obstore's: the cache is shared between the two)."""
    bucket = Bucket(name, endpoint_url, region, AwsCredentials(profile, anonymous))
    return S3fsClient(bucket, stall_s), bucket.source


def adlfs_client(
    authority: str, *, endpoint_url: str | None, anonymous: bool, stall_s: float
) -> tuple[AdlfsClient, str]:
    """The client, and its store's identity (the same as obstore's)."""
    place = account_and_endpoint(authority, endpoint_url)
    credentials = AzureCredentials(place.account, anonymous)
    return AdlfsClient(place.container, place.endpoint, credentials, stall_s), place.source
