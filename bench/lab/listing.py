"""One page of a listing, as S3 defines it.

Keys are ordered by code point, which for valid Unicode is the order of their UTF-8 bytes. A page is found by seeking,
never by scanning what it does not show: once a common prefix is known, the cursor jumps past everything below it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_LAST = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Page:
    keys: list[str]
    prefixes: list[str]
    last: str | None
    """The last name in the page (key or prefix) if more follow, else None."""
    token: str | None
    """The start of the next page, opaque to clients."""


def beyond(prefix: str) -> str | None:
    """The smallest string greater than all strings that start with `prefix`; None if there is none."""
    stem = prefix.rstrip(_LAST)
    return stem[:-1] + chr(ord(stem[-1]) + 1) if stem else None


def after(key: str) -> str:
    """The smallest string greater than `key`."""
    return key + "\0"


def after_marker(marker: str, prefix: str, delimiter: str) -> str | None:
    """The start of the next page of a version 1 listing: after the marker, and after the common prefix that the marker is
    in."""
    cut = marker.find(delimiter, len(prefix)) if delimiter and marker.startswith(prefix) else -1
    return after(marker) if cut < 0 else beyond(marker[: cut + len(delimiter)])


def from_token(token: str) -> str:
    """The cursor in a token of this module; ValueError for any other."""
    return base64.urlsafe_b64decode(token.encode("ascii")).decode("utf-8", "surrogatepass")


def _to_token(cursor: str) -> str:
    return base64.urlsafe_b64encode(cursor.encode("utf-8", "surrogatepass")).decode("ascii")


def page(
    keys_from: Callable[[str], Iterator[str]], prefix: str, delimiter: str, cursor: str | None, limit: int
) -> Page:
    """At most `limit` names at or after `cursor`; None is the end of all keys."""
    keys: list[str] = []
    prefixes: list[str] = []
    last, resume = "", None
    if cursor is not None:
        cursor = max(cursor, prefix)
    while cursor is not None and limit:
        for key in keys_from(cursor):
            if not key.startswith(prefix):
                return Page(keys, prefixes, None, None)
            if len(keys) + len(prefixes) == limit:
                return Page(keys, prefixes, last, _to_token(resume or ""))
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                last = key[: cut + len(delimiter)]
                prefixes.append(last)
                resume = cursor = beyond(last)
                break
            keys.append(key)
            last, resume = key, after(key)
        else:
            break
    return Page(keys, prefixes, None, None)
