"""The part of S3's XML that the lab uses."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

from bench.lab.exchange import S3Error

_PROLOG = '<?xml version="1.0" encoding="UTF-8"?>\n'
_NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
# References even for what XML 1.0 has no reference for: so does S3, which is why clients ask for encoding-type=url.
_ESCAPES = {code: f"&#{code};" for code in (*range(32), 127)} | {
    ord("&"): "&amp;",
    ord("<"): "&lt;",
    ord(">"): "&gt;",
    ord('"'): "&quot;",
}


def element(name: str, *children: str) -> str:
    """An element around markup."""
    return f"<{name}>{''.join(children)}</{name}>"


def leaf(name: str, value: object) -> str:
    """An element around text."""
    return f"<{name}>{str(value).translate(_ESCAPES)}</{name}>"


def document(name: str, *children: str) -> bytes:
    return f'{_PROLOG}<{name} xmlns="{_NAMESPACE}">{"".join(children)}</{name}>'.encode()


def error_document(*children: str) -> bytes:
    """Only errors have no namespace; clients depend on that."""
    return (_PROLOG + element("Error", *children)).encode()


def url_encoded(text: str) -> str:
    """A name as in encoding-type=url."""
    return quote(text, safe="/*~")


@lru_cache(maxsize=64)
def timestamp(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(seconds))


def parse(pieces: Iterable[bytes]) -> ET.Element:
    """A request's document without its namespaces."""
    try:
        root = ET.fromstring(b"".join(pieces))
    except ET.ParseError as exc:
        raise S3Error("MalformedXML", str(exc)) from exc
    for node in root.iter():
        node.tag = node.tag.rpartition("}")[2]
    return root
