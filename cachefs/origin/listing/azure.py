"""LIST of Azure Blob Storage (List Blobs with a delimiter)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from urllib.parse import unquote
from xml.parsers import expat

from cachefs.errors import OriginFailed
from cachefs.origin.listing.http import Fetcher, http_date_ns, query, quoted
from cachefs.origin.protocol import ListPage, ObjectInfo
from cachefs.origin.replies import refusal


class ContainerLister:
    """Pages of one container. `sign` turns a URL into the one to ask for and the headers to send."""

    def __init__(
        self,
        url: str,
        sign: Callable[[str], tuple[str, Mapping[str, str]]],
        fetcher: Fetcher,
        *,
        label: str,
        advice: Callable[[], str],
    ) -> None:
        self._url, self._sign, self._fetcher, self._label, self._advice = url, sign, fetcher, label, advice

    def list_page(self, prefix: str, token: str | None, start_after: str | None, limit: int) -> ListPage:
        # Azure has no start-after: `start_after` is best effort, so the page begins at the beginning.
        parameters = {
            "restype": "container",
            "comp": "list",
            "delimiter": "/",
            "maxresults": str(limit),
            "prefix": prefix or None,
            "marker": token,
        }
        reply = self._fetcher.get(*self._sign(f"{self._url}?{query(parameters)}"))
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
            raise OriginFailed(f"{self._label}/{prefix}: the listing is not Azure's XML: {exc}") from exc


def parse_page(body: bytes) -> ListPage:
    """An EnumerationResults."""
    objects: list[ObjectInfo] = []
    prefixes: list[str] = []
    fields: dict[str, str] = {}
    text: list[str] = []
    encoded = False

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal encoded
        text.clear()
        if name == "Name":
            encoded = attributes.get("Encoded") == "true"
        elif name in ("Blob", "BlobPrefix"):
            fields.clear()

    def end(name: str) -> None:
        if name == "Name":
            value = "".join(text)
            fields[name] = unquote(value) if encoded else value
        elif name == "BlobPrefix":
            prefixes.append(fields["Name"])
        elif name == "Blob":
            # With a hierarchical namespace, directories are listed twice: as a prefix, and as an empty blob.
            if fields.get("ResourceType") != "directory":
                size, modified = int(fields["Content-Length"]), http_date_ns(fields["Last-Modified"])
                objects.append(ObjectInfo(fields["Name"], size, modified, quoted(fields["Etag"])))
        else:
            fields[name] = "".join(text)
        text.clear()

    parser = expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = text.append
    parser.Parse(body, True)
    if "EnumerationResults" not in fields:
        raise ValueError("no EnumerationResults in it")
    return ListPage(objects, prefixes, fields.get("NextMarker") or None)
