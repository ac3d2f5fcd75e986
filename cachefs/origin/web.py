"""A web server as a store: index pages list, plain GETs read. Versions are etags, or mtime and size without
them."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from cachefs.errors import ConfigError
from cachefs.origin.listing.html import IndexLister
from cachefs.origin.listing.http import Fetcher
from cachefs.origin.obstore_client import ObstoreClient, client_options, retry_config


def web_client(url: str, *, stall_s: float) -> tuple[ObstoreClient, str, str]:
    """The client, its store's identity, and the key prefix of `url`."""
    parts = urlsplit(url)
    if not parts.hostname:
        raise ConfigError(f"{url!r} names no host")
    if parts.query or parts.fragment:
        raise ConfigError(
            f"{parts.hostname}: a URL with a query cannot be mounted; names are appended to its path"
        )
    if "@" in parts.netloc:
        raise ConfigError(
            f"{parts.hostname}: credentials do not belong in a URL; everybody on this host could see them"
        )
    host = f"{parts.scheme}://{parts.netloc}"
    fetcher = Fetcher(stall_s)

    def open_store() -> Any:
        from obstore.store import HTTPStore

        return HTTPStore(host, client_options=client_options(stall_s), retry_config=retry_config())

    prefix = unquote(parts.path.lstrip("/"), errors="surrogateescape")
    if prefix and not prefix.endswith("/"):
        prefix += "/"
    return (
        ObstoreClient(open_store, IndexLister(host, fetcher), label=host, close=fetcher.close),
        host,
        prefix,
    )
