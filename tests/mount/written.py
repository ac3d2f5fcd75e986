"""What is at a lab store, read by another client: plain HTTP."""

from __future__ import annotations

import re
import urllib.request
from html import unescape
from urllib.parse import quote, unquote

from tests.mount.conftest import Bucket


def stored(bucket: Bucket, key: str) -> bytes:
    """The bytes of an object. Raises `HTTPError` when there is none."""
    with urllib.request.urlopen(f"{bucket.store.endpoint}/{bucket.name}/{quote(key)}") as reply:
        return bytes(reply.read())


def keys(bucket: Bucket, prefix: str = "") -> list[str]:
    """All keys that begin with `prefix`, in the store's order."""
    found: list[str] = []
    after = ""
    while True:
        query = f"list-type=2&encoding-type=url&prefix={quote(prefix)}&start-after={quote(after)}"
        with urllib.request.urlopen(f"{bucket.store.endpoint}/{bucket.name}?{query}") as reply:
            page = reply.read().decode()
        batch = [unquote(unescape(key)) for key in re.findall(r"<Key>(.*?)</Key>", page)]
        found += batch
        if "<IsTruncated>true</IsTruncated>" not in page:
            return found
        after = batch[-1]
