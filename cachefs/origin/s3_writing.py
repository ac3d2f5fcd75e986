"""Writing to S3, and to Google Cloud Storage, whose XML interface has the same multipart uploads.

Where they differ is a `Dialect`. Google's writes are conditional on a number, the generation, and not on the etag: the
generation that belongs to an etag is looked up first, and the store compares it at the moment of writing.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from urllib.parse import quote, unquote_plus
from xml.etree.ElementTree import Element
from xml.sax.saxutils import escape

from cachefs.errors import CachefsError, Conflict, NoSuchUpload, OriginFailed
from cachefs.origin.conditions import HONOURED, Conditions
from cachefs.origin.http_writing import ANY_TYPE, HttpWriter, Sign, plain, written
from cachefs.origin.listing.http import Fetcher, quoted, seconds_ns
from cachefs.origin.replies import refusal
from cachefs.origin.writing import (
    GOOGLE,
    S3,
    Body,
    Limits,
    Part,
    Pending,
    Terms,
    Written,
    conflicts,
    of_an_upload,
)

FORBIDDEN = {"AccessDenied": 403}
"""The status that a code would have in a reply of its own."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """`vendor` begins the names of the vendor's own headers; `generations`: conditions are on those."""

    vendor: str
    generations: bool
    limits: Limits


AMAZON = Dialect("x-amz-", False, S3)
GOOGLES = Dialect("x-goog-", True, GOOGLE)


class BucketWriter(HttpWriter):
    """The writing half of a bucket's client."""

    def __init__(
        self,
        name: str,
        dialect: Dialect,
        base: Callable[[], str],
        sign: Sign,
        fetcher: Fetcher,
        *,
        label: str,
        advice: Callable[[], str],
        conditions: Conditions = HONOURED,
    ) -> None:
        stamp_header = f"{dialect.vendor}meta-cachefs-stamp"
        super().__init__(base, sign, fetcher, label=label, advice=advice, stamp_header=stamp_header)
        self.limits = dialect.limits
        self.conditions = conditions
        self._bucket, self._dialect = name, dialect

    def put(self, key: str, body: Body, terms: Terms) -> Written:
        with conflicts(terms):
            headers = {**self._kept(terms), **self._conditions(key, terms)}
            return written(self._ask("PUT", key, headers=headers, body=body))

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        reply = self._ask("PUT", to, headers=self._source(key, etag), slow=True, about=key)
        return Written(_etag(self._document(reply, key)))

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        named = [key for key in keys if plain(key)]
        left: dict[str, CachefsError] = {}
        for key in set(keys).difference(named):
            try:
                self.delete(key)
            except CachefsError as exc:
                left[key] = exc
        if not named:
            return left
        objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in named)
        body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = {"Content-MD5": digest, "Content-Type": "application/xml"}
        reply = self._ask("POST", "", {"delete": ""}, headers, body)
        for node in self._document(reply, "").iter("Error"):
            key, code = node.findtext("Key", ""), node.findtext("Code", "")
            if code != "NoSuchKey":
                left[key] = refusal(
                    FORBIDDEN.get(code, reply.status),
                    what=self._name(key),
                    code=code,
                    message=node.findtext("Message", ""),
                    advice=self._advice(),
                )
        return left

    # Multipart uploads.

    def begin(self, key: str, terms: Terms) -> str:
        reply = self._ask("POST", key, {"uploads": ""}, self._kept(terms))
        name = self._document(reply, key).findtext("UploadId")
        if not name:
            raise OriginFailed(f"{self._name(key)}: the store's new upload has no id")
        return name

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        with of_an_upload():
            reply = self._ask("PUT", key, {"uploadId": upload, "partNumber": str(number)}, body=body)
        return quoted(reply.headers.get("etag", ""))

    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str:
        headers = {
            **self._source(source, etag),
            f"{self._dialect.vendor}copy-source-range": f"bytes={start}-{stop - 1}",
        }
        parameters = {"uploadId": upload, "partNumber": str(number)}
        reply = self._ask("PUT", key, parameters, headers, slow=True, about=source)
        return _etag(self._document(reply, key))

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        found: dict[int, Part] = {}
        marker: str | None = None
        while True:
            with of_an_upload():
                reply = self._ask("GET", key, {"uploadId": upload, "part-number-marker": marker})
            page = self._document(reply, key)
            for node in page.iter("Part"):
                part = Part(_etag(node), int(node.findtext("Size", "0")))
                found[int(node.findtext("PartNumber", "0"))] = part
            following = page.findtext("NextPartNumberMarker")
            if page.findtext("IsTruncated") != "true" or following == marker:
                return found
            marker = following

    def complete(self, key: str, upload: str, parts: Mapping[int, str], terms: Terms) -> Written:
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in sorted(parts.items())
        )
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        with of_an_upload(), conflicts(terms):
            headers = {"Content-Type": "application/xml", **self._conditions(key, terms)}
            reply = self._ask("POST", key, {"uploadId": upload}, headers, body, slow=True)
            return Written(_etag(self._document(reply, key)))

    def abort(self, key: str, upload: str) -> None:
        with suppress(NoSuchUpload), of_an_upload():
            self._ask("DELETE", key, {"uploadId": upload})

    def list_uploads(self, prefix: str) -> list[Pending]:
        # Ceph's RADOS Gateway encodes keys where that is wanted, and does not say that it did.
        try:
            return self._uploads(prefix, None)
        except OriginFailed:  # keys of characters that XML cannot carry
            return self._uploads(prefix, "url")

    def _uploads(self, prefix: str, encoding: str | None) -> list[Pending]:
        found: list[Pending] = []
        markers: dict[str, str | None] = {}
        while True:
            parameters = {"uploads": "", "prefix": prefix or None, "encoding-type": encoding, **markers}
            reply = self._ask("GET", "", parameters, about=prefix)
            page = self._document(reply, prefix)
            encoded = page.findtext("EncodingType") == "url"
            for node in page.iter("Upload"):
                key = node.findtext("Key", "")
                begun = datetime.fromisoformat(node.findtext("Initiated", ""))
                name = node.findtext("UploadId", "")
                found.append(Pending(unquote_plus(key) if encoded else key, name, seconds_ns(begun)))
            after = page.findtext("NextKeyMarker")
            following = {
                "key-marker": unquote_plus(after) if after and encoded else after,
                "upload-id-marker": page.findtext("NextUploadIdMarker"),
            }
            if page.findtext("IsTruncated") != "true" or following == markers:
                return found
            markers = following

    def _kept(self, terms: Terms) -> dict[str, str]:
        """Headers that become the object's own."""
        stamp = {self._stamp_header: terms.stamp} if terms.stamp else {}
        return {"Content-Type": terms.content_type or ANY_TYPE, **stamp}

    def _conditions(self, key: str, terms: Terms) -> dict[str, str]:
        if not self._dialect.generations:
            match = {} if terms.if_match is None else {"If-Match": self.conditions.as_sent(terms.if_match)}
            return match | ({"If-None-Match": "*"} if terms.if_absent else {})
        if terms.if_match is not None:
            reply = self._ask("HEAD", key)
            if quoted(reply.headers.get("etag", "")) != terms.if_match:
                raise Conflict(f"{self._name(key)}: the object changed at the store; nothing was written")
            return {"x-goog-if-generation-match": reply.headers.get("x-goog-generation", "")}
        return {"x-goog-if-generation-match": "0"} if terms.if_absent else {}

    def _source(self, key: str, etag: str | None) -> dict[str, str]:
        """Which object to copy, and which version of it."""
        name = f"{self._dialect.vendor}copy-source"
        condition = {} if etag is None else {f"{name}-if-match": etag}
        return {name: f"/{self._bucket}/{quote(key)}", **condition}


def _etag(node: Element) -> str:
    return quoted(node.findtext("ETag", "").strip())
