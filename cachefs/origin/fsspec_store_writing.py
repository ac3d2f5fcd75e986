"""Writing to S3 through s3fs and to Azure through adlfs, with what their fsspec faces lack: parts and conditions.

As for reading, the vendors' asynchronous calls underneath are used. They read a body through a file object, in a thread
of fsspec's own.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from cachefs.errors import (
    CachefsError,
    NoSuchUpload,
    NotFound,
    Transient,
    Unsupported,
)
from cachefs.origin.attempts import PATIENCE
from cachefs.origin.azure_writing import STAMP, block_id, number_of
from cachefs.origin.conditions import HONOURED, Conditions
from cachefs.origin.http_writing import ANY_TYPE
from cachefs.origin.listing.http import quoted, seconds_ns
from cachefs.origin.protocol import ObjectInfo
from cachefs.origin.replies import refusal
from cachefs.origin.s3_writing import FORBIDDEN
from cachefs.origin.writing import (
    AZURE,
    S3,
    Body,
    Part,
    Pending,
    Terms,
    Written,
    conflicts,
    of_an_upload,
)

S3_STAMP = "cachefs-stamp"


class BodyFile(io.RawIOBase):
    """A body as a file that is read from the beginning, as often as a library likes. `waits`: for the bytes, or for the
    limit on them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.size, self.waits = body.size, False
        self._body, self._at = body, 0
        self._chunks: Iterator[bytes] | None = None
        self._left = b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._body.size}[whence]
        self._chunks, self._left = None, b""
        return self._at

    def read(self, size: int = -1) -> bytes:
        if self._at >= self._body.size or size == 0:
            return b""
        if self._chunks is None:
            if self._at:
                raise io.UnsupportedOperation("a body is read from its beginning")
            self._chunks = self._body.chunks()
        pieces, count = [self._left], len(self._left)
        while size < 0 or count < size:  # as many as are wanted: azure-storage-blob takes fewer for the end
            self.waits = True
            try:
                piece = next(self._chunks, b"")
            finally:
                self.waits = False
            if not piece:
                break
            pieces.append(piece)
            count += len(piece)
        data, self._left = b"".join(pieces), b""
        if size >= 0:
            data, self._left = data[:size], data[size:]
        self._at += len(data)
        return data


class Bucket(Protocol):
    """The client that reads through s3fs."""

    name: str

    def call(
        self, key: str, method: str, *, body: BodyFile | None = None, patience: int = 1, **arguments: Any
    ) -> Any: ...


class S3fsWriter:
    """The writing half of `S3fsClient`."""

    limits = S3

    def __init__(self, client: Bucket, conditions: Conditions) -> None:
        self._client, self.conditions = client, conditions

    def put(self, key: str, body: Body, terms: Terms) -> Written:
        given = {**self._kept(terms), **self._conditions(terms)}
        with conflicts(terms):
            reply = self._client.call(key, "put_object", body=BodyFile(body), Key=key, **given)
        return Written(quoted(reply["ETag"]))

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        source = self._source(key, etag)
        reply = self._client.call(key, "copy_object", patience=PATIENCE, Key=to, **source)
        return Written(quoted(reply["CopyObjectResult"]["ETag"]))

    def delete(self, key: str) -> None:
        with suppress(NotFound):
            self._client.call(key, "delete_object", Key=key)

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        wanted = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        reply = self._client.call("", "delete_objects", Delete=wanted)
        return {
            row["Key"]: refusal(
                FORBIDDEN.get(row["Code"], 200),
                what=row["Key"],
                code=row["Code"],
                message=row.get("Message", ""),
            )
            for row in reply.get("Errors", ())
        }

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        reply = self._client.call(key, "head_object", Key=key)
        info = ObjectInfo(
            key, reply["ContentLength"], seconds_ns(reply["LastModified"]), quoted(reply["ETag"])
        )
        return info, reply.get("Metadata", {}).get(S3_STAMP, "")

    def begin(self, key: str, terms: Terms) -> str:
        reply = self._client.call(key, "create_multipart_upload", Key=key, **self._kept(terms))
        return str(reply["UploadId"])

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        which: dict[str, Any] = {"Key": key, "UploadId": upload, "PartNumber": number}
        with of_an_upload():
            reply = self._client.call(key, "upload_part", body=BodyFile(body), **which)
        return quoted(reply["ETag"])

    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str:
        which: dict[str, Any] = {
            "Key": key,
            "UploadId": upload,
            "PartNumber": number,
            **self._source(source, etag),
        }
        which["CopySourceRange"] = f"bytes={start}-{stop - 1}"
        reply = self._client.call(source, "upload_part_copy", patience=PATIENCE, **which)
        return quoted(reply["CopyPartResult"]["ETag"])

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        found: dict[int, Part] = {}
        after = 0
        while True:
            with of_an_upload():
                reply = self._client.call(key, "list_parts", Key=key, UploadId=upload, PartNumberMarker=after)
            for row in reply.get("Parts", ()):
                found[row["PartNumber"]] = Part(quoted(row["ETag"]), row["Size"])
            if not reply.get("IsTruncated"):
                return found
            after = reply["NextPartNumberMarker"]

    def complete(self, key: str, upload: str, parts: Mapping[int, str], terms: Terms) -> Written:
        rows = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(parts.items())]
        which: dict[str, Any] = {"Key": key, "UploadId": upload, "MultipartUpload": {"Parts": rows}}
        with of_an_upload(), conflicts(terms):
            reply = self._client.call(
                key, "complete_multipart_upload", patience=PATIENCE, **which, **self._conditions(terms)
            )
        return Written(quoted(reply.get("ETag", "")))

    def abort(self, key: str, upload: str) -> None:
        with suppress(NoSuchUpload), of_an_upload():
            self._client.call(key, "abort_multipart_upload", Key=key, UploadId=upload)

    def list_uploads(self, prefix: str) -> list[Pending]:
        found: list[Pending] = []
        markers: dict[str, Any] = {}
        while True:
            reply = self._client.call(prefix, "list_multipart_uploads", Prefix=prefix, **markers)
            found += [
                Pending(row["Key"], row["UploadId"], seconds_ns(row["Initiated"]))
                for row in reply.get("Uploads", ())
            ]
            if not reply.get("IsTruncated"):
                return found
            markers = {"KeyMarker": reply["NextKeyMarker"], "UploadIdMarker": reply["NextUploadIdMarker"]}

    def _kept(self, terms: Terms) -> dict[str, Any]:
        stamp = {"Metadata": {S3_STAMP: terms.stamp}} if terms.stamp else {}
        return {"ContentType": terms.content_type or ANY_TYPE, **stamp}

    def _conditions(self, terms: Terms) -> dict[str, Any]:
        match = {} if terms.if_match is None else {"IfMatch": self.conditions.as_sent(terms.if_match)}
        return match | ({"IfNoneMatch": "*"} if terms.if_absent else {})

    def _source(self, key: str, etag: str | None) -> dict[str, Any]:
        condition = {} if etag is None else {"CopySourceIfMatch": etag}
        return {"CopySource": {"Bucket": self._client.name, "Key": key}, **condition}


class Container(Protocol):
    """The client that reads through adlfs. `call` is given the blob's client and awaited on fsspec's loop."""

    def on_blob(
        self, key: str, call: Callable[[Any], Any], *, body: BodyFile | None = None, patience: int = 1
    ) -> Any: ...
    def blob_url(self, key: str) -> str: ...


class AdlfsWriter:
    """The writing half of `AdlfsClient`. What uploads are at Azure, `cachefs.origin.azure_writing` says."""

    limits = AZURE
    conditions = HONOURED

    def __init__(self, client: Container) -> None:
        self._client = client

    def put(self, key: str, body: Body, terms: Terms) -> Written:
        given = {"length": body.size, "overwrite": not terms.if_absent, "max_concurrency": 1}
        kept = self._kept(terms)
        file = BodyFile(body)
        with conflicts(terms):
            reply = self._client.on_blob(
                key, lambda blob: blob.upload_blob(file, **{**given, **kept}), body=file
            )
        return _written(reply)

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        condition: dict[str, Any] = {}
        if etag is not None:
            from azure.core import MatchConditions

            condition = {"source_etag": etag, "source_match_condition": MatchConditions.IfNotModified}
        source = self._client.blob_url(key)
        reply = self._client.on_blob(
            to, lambda blob: blob.start_copy_from_url(source, **condition), patience=PATIENCE
        )
        if reply.get("copy_status") == "pending":
            raise Transient(f"{to}: the copy is still on its way")
        return _written(reply)

    def delete(self, key: str) -> None:
        with suppress(NotFound):
            self._client.on_blob(key, lambda blob: blob.delete_blob())

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        raise Unsupported("one deletion names one blob")

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        found = self._client.on_blob(key, lambda blob: blob.get_blob_properties())
        info = ObjectInfo(key, int(found.size), seconds_ns(found.last_modified), quoted(str(found.etag)))
        return info, str((found.metadata or {}).get(STAMP, ""))

    def begin(self, key: str, terms: Terms) -> str:
        return terms.stamp

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        name = block_id(upload, number)
        file = BodyFile(body)
        self._client.on_blob(
            key, lambda blob: blob.stage_block(_bare(name), file, length=body.size), body=file
        )
        return name

    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str:
        raise Unsupported(f"{key}: Azure copies a blob of any size in one request")

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        try:
            _, blocks = self._client.on_blob(key, lambda blob: blob.get_block_list("uncommitted"))
        except NotFound:
            return {}
        found = {}
        for block in blocks:
            name = base64.b64encode(block.id.encode()).decode()
            number = number_of(upload, name)
            if number is not None:
                found[number] = Part(name, block.size)
        return found

    def complete(self, key: str, upload: str, parts: Mapping[int, str], terms: Terms) -> Written:
        from azure.storage.blob import BlobBlock, BlockState

        blocks = [BlobBlock(_bare(name), BlockState.UNCOMMITTED) for _, name in sorted(parts.items())]
        kept = self._kept(terms)
        with conflicts(terms):
            return _written(self._client.on_blob(key, lambda blob: blob.commit_block_list(blocks, **kept)))

    def abort(self, key: str, upload: str) -> None:
        """There is nothing to ask for: the blocks expire."""

    def list_uploads(self, prefix: str) -> list[Pending]:
        raise Unsupported("Azure keeps no list of uploads; what is not completed goes after a week")

    def _kept(self, terms: Terms) -> dict[str, Any]:
        from azure.core import MatchConditions
        from azure.storage.blob import ContentSettings

        kept: dict[str, Any] = {
            "content_settings": ContentSettings(content_type=terms.content_type or ANY_TYPE)
        }
        if terms.stamp:
            kept["metadata"] = {STAMP: terms.stamp}
        if terms.if_match is not None:
            kept |= {"etag": terms.if_match, "match_condition": MatchConditions.IfNotModified}
        if terms.if_absent:
            kept |= {"match_condition": MatchConditions.IfMissing}
        return kept


def _bare(name: str) -> str:
    """A block's id as azure-storage-blob wants it, which encodes it itself."""
    return base64.b64decode(name).decode()


def _written(reply: Mapping[str, Any]) -> Written:
    return Written(quoted(str(reply["etag"])), seconds_ns(reply["last_modified"]))
