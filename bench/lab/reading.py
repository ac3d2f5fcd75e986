"""Handlers of reads: objects, listings, buckets."""

from __future__ import annotations

import re
from dataclasses import replace
from email.utils import formatdate

from bench.lab import listing, markup
from bench.lab.exchange import Exchange, S3Error
from bench.lab.markup import element, leaf
from bench.lab.objects import Bucket, InvertedBody, Stored

XML = {"Content-Type": "application/xml"}
_RANGE = re.compile(r"bytes=(\d*)-(\d*)$")


def the_bucket(exchange: Exchange) -> Bucket:
    """The bucket of a request. The caller holds the warehouse's lock."""
    found = exchange.lab.warehouse.buckets.get(exchange.request.bucket)
    if found is None:
        raise S3Error("NoSuchBucket", "The specified bucket does not exist")
    return found


def matches(condition: str, stored: Stored | None) -> bool:
    """Whether an If-Match or If-None-Match header names this version."""
    tags = [tag.strip().removeprefix("W/").strip('"') for tag in condition.split(",")]
    return stored is not None and ("*" in tags or stored.etag.strip('"') in tags)


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """[start, stop) of a Range header; None for the whole object, as S3 replies to a malformed header."""
    found = _RANGE.match(header.strip())
    if found is None or found.groups() == ("", ""):
        return None
    first, last = found.groups()
    if first and last and int(last) < int(first):
        return None
    start, stop = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
    if start >= size:
        raise S3Error(
            "InvalidRange", "The requested range is not satisfiable", {"Content-Range": f"bytes */{size}"}
        )
    return start, min(stop, size)


def get_object(exchange: Exchange) -> None:
    """GET and HEAD."""
    request = exchange.request
    with exchange.lab.warehouse.lock:
        stored = the_bucket(exchange).get(request.key)
        if stored is None:
            raise S3Error("NoSuchKey", "The specified key does not exist.")
        try:
            body = stored.body.opened()  # under the lock: a file replaced later is still there for us
        except FileNotFoundError as exc:
            raise S3Error("NoSuchKey", "The file behind the key was removed.") from exc
    try:
        if exchange.lies:
            body = InvertedBody(body)
            stored = replace(stored, etag=f'"lie{stored.etag[1:]}')
        else:
            if (wanted := request.header("if-match")) and not matches(wanted, stored):
                raise S3Error(
                    "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
                )
            if (known := request.header("if-none-match")) and matches(known, stored):
                raise S3Error("NotModified", headers={"ETag": stored.etag})
        headers = {
            "Content-Type": "binary/octet-stream",
            **stored.headers,
            **{name.replace("x-amz-", "x-goog-"): value for name, value in stored.headers.items()},
            "x-goog-generation": str(stored.generation),
            "ETag": stored.etag,
            "Last-Modified": formatdate(int(stored.mtime), usegmt=True),
            "Accept-Ranges": "bytes",
        }
        span = byte_range(request.header("range"), stored.size)
        if span is None:
            exchange.reply_range(200, headers, body, 0, stored.size)
        else:
            headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{stored.size}"
            exchange.reply_range(206, headers, body, *span)
    finally:
        body.close()


def list_objects(exchange: Exchange) -> None:
    """ListObjectsV2, and version 1 where it differs."""
    query = exchange.request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    version2 = query.get("list-type") == "2"
    try:
        limit = int(query.get("max-keys", "1000"))
        if limit < 0:
            raise ValueError("negative max-keys")  # noqa: TRY301
        cursor = _cursor(query, prefix, delimiter, version2)
    except ValueError as exc:
        raise S3Error("InvalidArgument", str(exc)) from exc
    with exchange.lab.warehouse.lock:
        bucket = the_bucket(exchange)
        page = listing.page(bucket.keys_from, prefix, delimiter, cursor, min(limit, 1000))
        objects = [(key, bucket.get(key)) for key in page.keys]
    encoding = query.get("encoding-type", "")
    name = markup.url_encoded if encoding == "url" else str
    parts = [
        leaf("Name", exchange.request.bucket),
        leaf("Prefix", name(prefix)),
        leaf("MaxKeys", limit),
        leaf("IsTruncated", "true" if page.token is not None else "false"),
    ]
    if delimiter:
        parts.append(leaf("Delimiter", name(delimiter)))
    if encoding:
        parts.append(leaf("EncodingType", encoding))
    if version2:
        parts.append(leaf("KeyCount", len(page.keys) + len(page.prefixes)))
        if "continuation-token" in query:
            parts.append(leaf("ContinuationToken", query["continuation-token"]))
        if "start-after" in query:
            parts.append(leaf("StartAfter", name(query["start-after"])))
        if page.token is not None:
            parts.append(leaf("NextContinuationToken", page.token))
    else:
        parts.append(leaf("Marker", name(query.get("marker", ""))))
        if page.last is not None and delimiter:
            parts.append(leaf("NextMarker", name(page.last)))
    parts += [_contents(name(key), stored) for key, stored in objects if stored is not None]
    parts += [element("CommonPrefixes", leaf("Prefix", name(common))) for common in page.prefixes]
    exchange.reply(200, XML, markup.document("ListBucketResult", *parts))


def _cursor(query: dict[str, str], prefix: str, delimiter: str, version2: bool) -> str | None:
    if not version2:
        marker = query.get("marker", "")
        return listing.after_marker(marker, prefix, delimiter) if marker else ""
    if "continuation-token" in query:
        return listing.from_token(query["continuation-token"])
    start_after = query.get("start-after", "")
    return listing.after(start_after) if start_after else ""


def _contents(name: str, stored: Stored) -> str:
    return element(
        "Contents",
        leaf("Key", name),
        leaf("LastModified", markup.timestamp(int(stored.mtime))),
        leaf("ETag", stored.etag),
        leaf("Size", stored.size),
        "<StorageClass>STANDARD</StorageClass>",
    )


def list_buckets(exchange: Exchange) -> None:
    with exchange.lab.warehouse.lock:
        buckets = [(name, bucket.created) for name, bucket in sorted(exchange.lab.warehouse.buckets.items())]
    rows = [
        element("Bucket", leaf("Name", name), leaf("CreationDate", markup.timestamp(int(created))))
        for name, created in buckets
    ]
    exchange.reply(200, XML, markup.document("ListAllMyBucketsResult", element("Buckets", *rows)))


def head_bucket(exchange: Exchange) -> None:
    with exchange.lab.warehouse.lock:
        the_bucket(exchange)
    exchange.reply(200, {"x-amz-bucket-region": "us-east-1"})


def bucket_location(exchange: Exchange) -> None:
    with exchange.lab.warehouse.lock:
        the_bucket(exchange)
    exchange.reply(200, XML, markup.document("LocationConstraint"))  # empty: us-east-1
