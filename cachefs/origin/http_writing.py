"""Requests that write, over the signed HTTP that lists: what S3, Google and Azure have in common.

Not through obstore, although it can put: it takes a file only as a whole, numbers the parts itself, and neither resumes
an upload nor lists any.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from urllib.parse import quote
from xml.etree import ElementTree

from cachefs.errors import NotFound, OriginFailed, Unsupported
from cachefs.origin.attempts import PATIENCE
from cachefs.origin.listing.http import Fetcher, Reply, http_date_ns, query, quoted
from cachefs.origin.protocol import ObjectInfo
from cachefs.origin.replies import refusal
from cachefs.origin.writing import Body, Written

Sign = Callable[[str, str, Mapping[str, str], Body | bytes], tuple[str, Mapping[str, str]]]
"""(method, URL, headers, body) → URL and headers of the request that is authorised to be just that."""

ANY_TYPE = "application/octet-stream"


class HttpWriter:
    """Requests to the objects below the URL that `base` gives at each call. `stamp_header` is what an object shows its
    stamp in."""

    def __init__(
        self,
        base: Callable[[], str],
        sign: Sign,
        fetcher: Fetcher,
        *,
        label: str,
        advice: Callable[[], str],
        stamp_header: str,
    ) -> None:
        self._base, self._sign, self._fetcher = base, sign, fetcher
        self._label, self._advice, self._stamp_header = label, advice, stamp_header

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        reply = self._ask("HEAD", key)
        try:
            headers = reply.headers
            size, mtime_ns = int(headers["content-length"]), http_date_ns(headers["last-modified"])
            info = ObjectInfo(key, size, mtime_ns, quoted(headers["etag"]))
        except (KeyError, ValueError) as exc:
            raise OriginFailed(f"{self._name(key)}: the store's reply does not describe an object") from exc
        return info, headers.get(self._stamp_header, "")

    def delete(self, key: str) -> None:
        with suppress(NotFound):
            self._ask("DELETE", key)

    def _name(self, key: str) -> str:
        return f"{self._label}/{key}"

    def _ask(
        self,
        method: str,
        key: str,
        parameters: Mapping[str, str | None] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body | bytes = b"",
        *,
        slow: bool = False,
        about: str | None = None,
    ) -> Reply:
        """The reply to a request for `key` ("" for the bucket), or its refusal raised. `slow`: the store may think about
        it; `about` is the key to name in an error, when it is another."""
        what = self._name(key if about is None else about)
        if any(segment in (".", "..") for segment in key.split("/")):
            raise Unsupported(f"{what}: HTTP drops the segments . and .. of a path")
        url = f"{self._base()}/{quote(key)}" if key else self._base()
        if parameters:
            url += f"?{query(parameters)}"
        given = dict(headers or {})
        sent: Iterator[bytes] | bytes | None = None
        if method in ("PUT", "POST"):
            given["Content-Length"] = str(len(body) if isinstance(body, bytes) else body.size)
            given.setdefault("Content-Type", ANY_TYPE)
            sent = body if isinstance(body, bytes) else body.chunks()
        signed = self._sign(method, url, given, body)
        reply = self._fetcher.send(method, *signed, sent, PATIENCE if slow else 1)
        if 200 <= reply.status < 300:
            return reply
        raise refusal(
            reply.status,
            reply.body.decode("utf-8", "replace"),
            what=what,
            code=reply.headers.get("x-ms-error-code", ""),
            advice=self._advice(),
            retry_after=reply.headers.get("retry-after"),
            date=reply.headers.get("date"),
        )

    def _document(self, reply: Reply, key: str) -> ElementTree.Element:
        """The reply's XML without namespaces. S3 sends the head of a reply before it knows what will come of a slow
        request, so that an error may stand in a success."""
        try:
            found = ElementTree.fromstring(reply.body)
        except ElementTree.ParseError as exc:
            raise OriginFailed(f"{self._name(key)}: the store's reply is not XML: {exc}") from exc
        for node in found.iter():
            node.tag = node.tag.rpartition("}")[2]
        if found.tag == "Error":
            body = reply.body.decode("utf-8", "replace")
            raise refusal(reply.status, body, what=self._name(key), advice=self._advice())
        return found


def written(reply: Reply) -> Written:
    """What a reply's headers tell of the new version."""
    told = reply.headers.get("last-modified")
    return Written(quoted(reply.headers.get("etag", "")), http_date_ns(told) if told else None)


def plain(key: str) -> bool:
    """Whether XML can carry the key."""
    return not re.search("[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]", key)
