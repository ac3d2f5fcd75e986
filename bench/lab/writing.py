"""Handlers of writes: objects, multipart uploads, buckets."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import unquote

from bench.lab import markup
from bench.lab.exchange import Exchange, Quirk, S3Error
from bench.lab.markup import element, leaf
from bench.lab.objects import OpenBody, Stored, Upload
from bench.lab.reading import XML, byte_range, matches, the_bucket
from bench.lab.wire import Request


def _kept(request: Request) -> dict[str, str]:
    """Headers of a write that every read returns."""
    return {
        name: value
        for name, value in request.headers.items()
        if name == "content-type" or name.startswith("x-amz-meta-")
    }


def _check(exchange: Exchange, current: Stored | None) -> None:
    """Check the conditions of a write against the object that it would replace."""
    request, quirks = exchange.request, exchange.lab.quirks
    if (Quirk.COMPLETE if exchange.kind == "complete_upload" else Quirk.PUT) in quirks:
        return
    if Quirk.BARE_ETAGS in quirks and request.header("if-match").startswith('"'):
        raise S3Error("PreconditionFailed")
    if (known := request.header("if-none-match")) and matches(known, current):
        raise S3Error("PreconditionFailed")
    if wanted := request.header("if-match"):
        if current is None:
            raise S3Error("NoSuchKey")
        if not matches(wanted, current):
            raise S3Error("PreconditionFailed")
    wanted = request.header("x-amz-if-generation-match")
    if wanted and int(wanted) != (0 if current is None else current.generation):
        raise S3Error("PreconditionFailed")


def _commit(exchange: Exchange, stored: Stored) -> None:
    """Put the new version under its key, if the request's conditions hold now."""
    key = exchange.request.key
    try:
        with exchange.lab.warehouse.lock:
            bucket = the_bucket(exchange)
            _check(exchange, bucket.get(key))
            bucket.put(key, stored)
    except S3Error:
        stored.body.discard()
        raise


def put_object(exchange: Exchange) -> None:
    with exchange.lab.warehouse.lock:
        the_bucket(exchange)
    stored = exchange.lab.warehouse.store(exchange.payload(), _kept(exchange.request))
    _commit(exchange, stored)
    exchange.reply(200, {"ETag": stored.etag})


@contextmanager
def _source(exchange: Exchange) -> Iterator[tuple[Stored, OpenBody]]:
    """The object to copy, with its bytes pinned."""
    request, warehouse = exchange.request, exchange.lab.warehouse
    bucket, _, key = unquote(request.header("x-amz-copy-source")).removeprefix("/").partition("/")
    with warehouse.lock:
        source = warehouse.buckets[bucket].get(key) if bucket in warehouse.buckets else None
        if source is None:
            raise S3Error("NoSuchKey")
        opened = source.body.opened()
    try:
        wanted = "" if Quirk.COPY in exchange.lab.quirks else request.header("x-amz-copy-source-if-match")
        if wanted and not matches(wanted, source):
            raise S3Error("PreconditionFailed")
        yield source, opened
    finally:
        opened.close()


def copy_object(exchange: Exchange) -> None:
    request = exchange.request
    with _source(exchange) as (source, opened):
        stored = exchange.lab.warehouse.store(opened.pieces(source.size), source.headers)
    if request.header("x-amz-metadata-directive") == "REPLACE":
        stored = replace(stored, headers=_kept(request))
    _commit(exchange, stored)
    parts = leaf("LastModified", markup.timestamp(int(stored.mtime))), leaf("ETag", stored.etag)
    exchange.reply(200, XML, markup.document("CopyObjectResult", *parts))


def delete_object(exchange: Exchange) -> None:
    with exchange.lab.warehouse.lock:
        the_bucket(exchange).delete(exchange.request.key)
    exchange.reply(204, {})


def delete_objects(exchange: Exchange) -> None:
    wanted = markup.parse(exchange.payload())
    keys = [node.findtext("Key", "") for node in wanted.iter("Object")]
    if len(keys) > 1000:
        raise S3Error("MalformedXML", "more than a thousand keys")
    rows = []
    with exchange.lab.warehouse.lock:
        bucket = the_bucket(exchange)
        for key in keys:
            try:
                exchange.lab.credentials.check(exchange.request.header("authorization"), key)
            except S3Error as refused:
                rows.append(element("Error", leaf("Key", key), leaf("Code", refused.code)))
                continue
            bucket.delete(key)
            if wanted.findtext("Quiet") != "true":
                rows.append(element("Deleted", leaf("Key", key)))
    exchange.reply(200, XML, markup.document("DeleteResult", *rows))


def create_bucket(exchange: Exchange) -> None:
    exchange.lab.warehouse.bucket(exchange.request.bucket)
    exchange.reply(200, {"Location": f"/{exchange.request.bucket}"})


def create_upload(exchange: Exchange) -> None:
    request, name = exchange.request, uuid.uuid4().hex
    with exchange.lab.warehouse.lock:
        the_bucket(exchange)
        exchange.lab.warehouse.uploads[name] = Upload(request.bucket, request.key, _kept(request))
    names = leaf("Bucket", request.bucket), leaf("Key", request.key), leaf("UploadId", name)
    exchange.reply(200, XML, markup.document("InitiateMultipartUploadResult", *names))


def _upload(exchange: Exchange) -> Upload:
    request = exchange.request
    upload = exchange.lab.warehouse.uploads.get(request.query["uploadId"])
    if upload is None or (upload.bucket, upload.key) != (request.bucket, request.key):
        if Quirk.GONE in exchange.lab.quirks and exchange.kind == "list_parts":
            raise S3Error("NoSuchKey")
        if Quirk.GONE in exchange.lab.quirks and exchange.kind == "complete_upload":
            raise S3Error("InternalError", "This multipart completion is already in progress")
        raise S3Error("NoSuchUpload")
    return upload


def upload_part(exchange: Exchange) -> None:
    number = exchange.request.query["partNumber"]
    if not (number.isdecimal() and 1 <= int(number) <= 10_000):
        raise S3Error("InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
    _upload(exchange)
    _keep_part(exchange, int(number), exchange.lab.warehouse.store(exchange.payload()))


def copy_part(exchange: Exchange) -> None:
    """A part copied from another object."""
    request = exchange.request
    _upload(exchange)
    with _source(exchange) as (source, opened):
        span = byte_range(request.header("x-amz-copy-source-range"), source.size) or (0, source.size)
        step = 1 << 20
        pieces = (opened.read(at, min(step, span[1] - at)) for at in range(*span, step))
        part = exchange.lab.warehouse.store(pieces)
    _keep_part(exchange, int(request.query["partNumber"]), part)


def _keep_part(exchange: Exchange, number: int, part: Stored) -> None:
    with exchange.lab.warehouse.lock:
        try:
            parts = _upload(exchange).parts
        except S3Error:
            part.body.discard()
            raise
        before = parts.get(number)
        parts[number] = part
    if before is not None:
        before.body.discard()
    if exchange.kind == "copy_part":
        exchange.reply(200, XML, markup.document("CopyPartResult", leaf("ETag", part.etag)))
    else:
        exchange.reply(200, {"ETag": part.etag})


def complete_upload(exchange: Exchange) -> None:
    warehouse, request = exchange.lab.warehouse, exchange.request
    wanted = [
        (int(node.findtext("PartNumber", "0")), node.findtext("ETag", "").strip('"'))
        for node in markup.parse(exchange.payload()).iter("Part")
    ]
    if not wanted:
        raise S3Error("MalformedXML", "no parts")
    if [number for number, _ in wanted] != sorted({number for number, _ in wanted}):
        raise S3Error("InvalidPartOrder")
    tag = hashlib.md5(b"".join(bytes.fromhex(etag) for _, etag in wanted), usedforsecurity=False).hexdigest()
    with warehouse.lock:
        upload = _upload(exchange)
        parts = []
        for number, etag in wanted:
            part = upload.parts.get(number)
            if part is None or part.etag.strip('"') != etag:
                raise S3Error("InvalidPart")
            parts.append(part)
        bucket = the_bucket(exchange)
        # Before the object gets the parts, for another try may follow.
        _check(exchange, bucket.get(request.key))
        stored = warehouse.join(parts, f'"{tag}-{len(parts)}"', upload.headers)
        bucket.put(request.key, stored)
        _forget(exchange, used={number for number, _ in wanted})
    etag = "" if Quirk.NO_ETAG in exchange.lab.quirks else stored.etag
    names = leaf("Bucket", request.bucket), leaf("Key", request.key), leaf("ETag", etag)
    exchange.reply(200, XML, markup.document("CompleteMultipartUploadResult", *names))


def _forget(exchange: Exchange, used: Container[int] = ()) -> None:
    """End the upload. Its parts are discarded, but not those that an object has."""
    with exchange.lab.warehouse.lock:
        upload = _upload(exchange)
        del exchange.lab.warehouse.uploads[exchange.request.query["uploadId"]]
    for number, part in upload.parts.items():
        if number not in used:
            part.body.discard()


def abort_upload(exchange: Exchange) -> None:
    _forget(exchange)
    exchange.reply(204, {})


def list_parts(exchange: Exchange) -> None:
    request = exchange.request
    with exchange.lab.warehouse.lock:
        parts = sorted(_upload(exchange).parts.items())
    after, limit = (
        int(request.query.get("part-number-marker", "0")),
        int(request.query.get("max-parts", "1000")),
    )
    parts = [(number, part) for number, part in parts if number > after]
    more, parts = len(parts) > limit, parts[:limit]
    rows = [
        element(
            "Part",
            leaf("PartNumber", number),
            leaf("LastModified", markup.timestamp(int(part.mtime))),
            leaf("ETag", part.etag),
            leaf("Size", part.size),
        )
        for number, part in parts
    ]
    head = [
        leaf("Bucket", request.bucket),
        leaf("Key", request.key),
        leaf("UploadId", request.query["uploadId"]),
        leaf("IsTruncated", "true" if more else "false"),
    ]
    if more:
        head.append(leaf("NextPartNumberMarker", parts[-1][0]))
    exchange.reply(200, XML, markup.document("ListPartsResult", *head, *rows))


def list_uploads(exchange: Exchange) -> None:
    request, prefix = exchange.request, exchange.request.query.get("prefix", "")
    with exchange.lab.warehouse.lock:
        the_bucket(exchange)
        uploads = [
            (upload.key, name, upload.begun)
            for name, upload in exchange.lab.warehouse.uploads.items()
            if upload.bucket == request.bucket and upload.key.startswith(prefix)
        ]
    after = request.query.get("key-marker", ""), request.query.get("upload-id-marker", "")
    page = sorted(upload for upload in uploads if upload[:2] > after)
    limit = int(request.query.get("max-uploads", "1000"))
    more, page = len(page) > limit, page[:limit]
    encoding = request.query.get("encoding-type", "")
    encoded = markup.url_encoded if encoding == "url" else str
    rows = [
        element(
            "Upload",
            leaf("Key", encoded(key)),
            leaf("UploadId", name),
            leaf("Initiated", markup.timestamp(int(begun))),
        )
        for key, name, begun in page
    ]
    head = [leaf("Bucket", request.bucket), leaf("IsTruncated", "true" if more else "false")]
    if more:
        head += [leaf("NextKeyMarker", encoded(page[-1][0])), leaf("NextUploadIdMarker", page[-1][1])]
    if encoding:
        head.append(leaf("EncodingType", encoding))
    exchange.reply(200, XML, markup.document("ListMultipartUploadsResult", *head, *rows))
