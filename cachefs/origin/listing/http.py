"""One signed request and its reply, and what may go wrong with it."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from cachefs.errors import ConfigError, Transient
from cachefs.origin.replies import one_line

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

CONNECT_S = 5.0
"""Guessed: a store in reach answers a SYN in milliseconds, one lost packet costs a second."""

CA_VARIABLES = ("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
"""Where a user may have named a PEM file of authorities to trust; the first that is set counts, as in botocore."""


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Fetcher:
    """Pooled connections. Thread-safe. `stall_s`: how long the store may stay silent."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._pools: dict[str, Any] = {}  # by proxy
        self._ways: dict[tuple[str, str], Any] = {}  # by scheme and host

    def get(self, url: str, headers: Mapping[str, str]) -> Reply:
        """The reply, whatever its status; `Transient` when there is none."""
        reply = self._request("GET", url, headers, preload_content=True)
        return Reply(reply.status, reply.headers, reply.data)

    def open(self, method: str, url: str, headers: Mapping[str, str]) -> BaseHTTPResponse:
        """The same with the body still to come, through `chunks`. Whoever asked closes it."""
        return self._request(method, url, headers, preload_content=False)

    def send(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | Iterable[bytes] | None,
        patience: int = 1,
    ) -> Reply:
        """The reply to a request with a body, whose length `headers` say. `patience`: so many times the usual silence
        before the reply."""
        reply = self._request(method, url, headers, preload_content=True, body=body, patience=patience)
        return Reply(reply.status, reply.headers, reply.data)

    def chunks(self, reply: BaseHTTPResponse, size: int, what: str) -> Iterator[bytes]:
        """The body as the store keeps it; `Transient`, which names `what`, where it breaks."""
        import urllib3

        try:
            yield from reply.stream(size, decode_content=False)
        except urllib3.exceptions.HTTPError as exc:
            raise _broken(what, exc) from exc

    def close(self) -> None:
        for pool in self._pools.values():
            pool.clear()

    def _request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        *,
        preload_content: bool,
        body: bytes | Iterable[bytes] | None = None,
        patience: int = 1,
    ) -> BaseHTTPResponse:
        """Redirects are not followed: a signature is good for one host."""
        import urllib3

        how: dict[str, Any] = {"redirect": False, "retries": False, "preload_content": preload_content}
        how["timeout"] = urllib3.Timeout(connect=CONNECT_S, read=self._stall_s * patience)
        pool = self._pool(url)
        try:
            reply: BaseHTTPResponse = pool.request(method, url, headers=dict(headers), body=body, **how)
        except urllib3.exceptions.HTTPError as exc:
            raise _broken(urlsplit(url).netloc.rpartition("@")[2], exc) from exc
        return reply

    def _pool(self, url: str) -> Any:
        """The connections to a host. The environment's proxies are looked up once: that takes as long as a small request
        takes to be signed."""
        parts = urlsplit(url)
        where = parts.scheme, parts.hostname or ""
        found = self._ways.get(where)
        if found is None:
            found = self._ways[where] = self._manager(*where)
        return found

    def _manager(self, scheme: str, host: str) -> Any:
        import urllib3

        proxy = urllib.request.getproxies().get(scheme, "")
        if proxy and urllib.request.proxy_bypass(host):
            proxy = ""
        if proxy not in self._pools:
            if scheme == "https":
                authorities()  # urllib3 would not say which file it cannot read
            settings: dict[str, Any] = {
                "maxsize": 64,  # connections kept: as many parts of files as are written at once
                "ca_certs": _authorities_file()[1] or None,
            }
            manager = urllib3.ProxyManager(proxy, **settings) if proxy else urllib3.PoolManager(**settings)
            self._pools[proxy] = manager
        return self._pools[proxy]


def authorities() -> bytes | None:
    """The certificates (PEM) of the authorities that the environment names."""
    name, path = _authorities_file()
    try:
        return Path(path).read_bytes() if path else None
    except OSError as exc:
        raise ConfigError(f"{name}={path} cannot be read ({exc.strerror}): name a PEM file") from exc


def _authorities_file() -> tuple[str, str]:
    """(variable, path), or two empty strings."""
    named = ((name, os.environ.get(name, "")) for name in CA_VARIABLES)
    return next(((name, path) for name, path in named if path), ("", ""))


def _broken(what: str, exc: Exception) -> Transient:
    reason = getattr(exc, "reason", None) or exc
    return Transient(one_line(f"{what}: {type(reason).__name__}: {reason}"))


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
