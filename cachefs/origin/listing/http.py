"""One GET of a listing page, and what may go wrong with it."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

from cachefs.errors import Transient
from cachefs.origin.replies import one_line

CONNECT_S = 5.0
"""Guessed: a store in reach answers a SYN in milliseconds, one lost packet costs a second."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Fetcher:
    """Pooled connections for listings. Thread-safe. `stall_s`: how long the store may stay silent."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._pools: dict[str, Any] = {}

    def get(self, url: str, headers: Mapping[str, str]) -> Reply:
        """The reply, whatever its status; `Transient` when there is none. Redirects are not followed: a
        signature is good for one host."""
        import urllib3

        pool = self._pool(url)
        try:
            reply = pool.request("GET", url, headers=dict(headers), redirect=False, retries=False)
        except urllib3.exceptions.HTTPError as exc:
            reason = getattr(exc, "reason", None) or exc
            host = urlsplit(url).netloc.rpartition("@")[2]
            raise Transient(one_line(f"{host}: {type(reason).__name__}: {reason}")) from exc
        return Reply(reply.status, reply.headers, reply.data)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.clear()

    def _pool(self, url: str) -> Any:
        import urllib3

        parts = urlsplit(url)
        proxy = urllib.request.getproxies().get(parts.scheme, "")
        if proxy and urllib.request.proxy_bypass(parts.hostname or ""):
            proxy = ""
        if proxy not in self._pools:
            settings: dict[str, Any] = {
                "timeout": urllib3.Timeout(connect=CONNECT_S, read=self._stall_s),
                "maxsize": 16,  # connections kept; as many listings as one `find` or `ls -R` keeps going
                "ca_certs": os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or None,
            }
            manager = urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)
            self._pools[proxy] = manager
        return self._pools[proxy]


def query(parameters: Mapping[str, str | None]) -> str:
    """A query string in the canonical form that signatures are made over: sorted, percent-encoded, no plus
    signs."""
    given = sorted((name, value) for name, value in parameters.items() if value is not None)
    return "&".join(f"{name}={quote(value, safe='-_.~')}" for name, value in given)


def quoted(etag: str) -> str:
    """An etag as If-Match wants it: some listings leave the quotes out."""
    return etag if etag.endswith('"') or not etag else f'"{etag}"'


def seconds_ns(when: datetime) -> int:
    """A time as nanoseconds, cut to seconds: LIST replies have milliseconds, HEAD replies have not, and one
    object must not have two mtimes."""
    return int(when.timestamp()) * 1_000_000_000


MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def http_date_ns(text: str) -> int:
    """`Sat, 21 Nov 2026 08:06:30 GMT` as nanoseconds. By hand: the library's parser takes ten times as long,
    which a page of thousands of them shows."""
    _, day, month, year, clock, _ = text.split()
    return seconds_ns(
        datetime.fromisoformat(f"{year}-{MONTHS.index(month) + 1:02d}-{int(day):02d}T{clock}+00:00")
    )
