"""LIST of S3 (ListObjectsV2), and of Google Cloud Storage, whose XML interface speaks the same protocol and
shows the etags that its GETs show (its JSON interface shows others)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from urllib.parse import unquote_plus
from xml.parsers import expat

from cachefs.errors import OriginFailed
from cachefs.origin.listing.http import Fetcher, Reply, query, quoted, seconds_ns
from cachefs.origin.protocol import ListPage, ObjectInfo
from cachefs.origin.replies import refusal

Sign = Callable[[str], Mapping[str, str]]
"""Headers that authorise a GET of this URL."""


class BucketLister:
    """Pages of one bucket. `base` gives the bucket's URL at each call, for it may turn out to lie in another
    region: `moved` is told of a reply that says so, and answers whether asking again makes sense."""

    def __init__(
        self,
        base: Callable[[], str],
        sign: Sign,
        fetcher: Fetcher,
        *,
        label: str,
        advice: Callable[[], str],
        moved: Callable[[Reply], bool] = lambda reply: False,
    ) -> None:
        self._base, self._sign, self._fetcher = base, sign, fetcher
        self._label, self._advice, self._moved = label, advice, moved

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        parameters = {
            "list-type": "2",
            "delimiter": "/",
            "encoding-type": "url",  # or control characters in keys would make the XML invalid
            "max-keys": str(limit),
            "prefix": prefix,
            "continuation-token": token,
            "start-after": start_after if token is None else None,
        }
        reply = self._get(parameters)
        if reply.status != 200 and self._moved(reply):
            reply = self._get(parameters)
        if reply.status != 200:
            raise refusal(
                reply.status,
                reply.body.decode("utf-8", "replace"),
                what=f"{self._label}/{prefix}",
                advice=self._advice(),
                retry_after=reply.headers.get("retry-after"),
                date=reply.headers.get("date"),
            )
        try:
            return parse_page(reply.body)
        except (expat.ExpatError, KeyError, ValueError) as exc:
            raise OriginFailed(f"{self._label}/{prefix}: the store's listing is not S3's XML: {exc}") from exc

    def _get(self, parameters: Mapping[str, str | None]) -> Reply:
        url = f"{self._base()}?{query(parameters)}"
        return self._fetcher.get(url, self._sign(url))


def parse_page(body: bytes) -> ListPage:
    """A ListBucketResult. One pass of expat: element text is kept by name, and taken when its parent ends. An entry has
    fields of its own, so that one without an etag does not get its neighbour's."""
    objects: list[ObjectInfo] = []
    prefixes: list[str] = []
    page: dict[str, str] = {}
    fields = page
    text: list[str] = []

    def end(name: str) -> None:
        nonlocal fields
        if name == "Contents":
            key, modified = fields["Key"], datetime.fromisoformat(fields["LastModified"])
            objects.append(
                ObjectInfo(key, int(fields["Size"]), seconds_ns(modified), quoted(fields.get("ETag", "")))
            )
            fields = page
        elif name == "CommonPrefixes":
            prefixes.append(fields["Prefix"])
            fields = page
        else:
            fields[name] = "".join(text)
        text.clear()

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal fields
        text.clear()
        if name in ("Contents", "CommonPrefixes"):
            fields = {}

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text.append
    parser.Parse(body, True)
    if "IsTruncated" not in page:
        raise ValueError("no IsTruncated in it")
    if page.get("EncodingType") == "url":
        prefixes = [unquote_plus(p) for p in prefixes]
        objects = [ObjectInfo(unquote_plus(o.key), o.size, o.mtime_ns, o.etag) for o in objects]
    more = page["IsTruncated"] == "true"
    return ListPage(objects, prefixes, page["NextContinuationToken"] if more else None)
