"""From a URL to an `Origin`: which client serves which scheme, and what is wrong with a URL that none
does."""

from __future__ import annotations

import re
from typing import Any

from cachefs.errors import ConfigError
from cachefs.metrics import Metrics
from cachefs.names import ERRORS, OnOutage
from cachefs.origin.origin import Origin
from cachefs.origin.protocol import Client
from cachefs.origin.retry import DEFAULT, Backoff

CLIENTS = ("auto", "obstore", "fsspec")
STALL_S = 10.0
"""How long a store may stay silent within a reply before the attempt is given up. Guessed: ten times what a
busy store takes to its first byte."""


def open_origin(
    url: str,
    *,
    client: str = "auto",
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    concurrency: int = 64,
    download_limit: int = 0,
    upload_limit: int = 0,
    deadline_s: float = 60.0,
    stall_s: float = STALL_S,
    on_outage: OnOutage = ERRORS,
    backoff: Backoff = DEFAULT,
    metrics: Metrics,
) -> Origin:
    """The origin behind `url`. Nothing is asked of the store yet; `Origin.check` does that.

    Raises `ConfigError`, with one line that says what to change, for a URL or client that cannot be
    served."""
    if client not in CLIENTS:
        raise ConfigError(f"unknown client {client!r}; use one of {', '.join(CLIENTS)}")
    if endpoint_url and not re.match(r"https?://[^/]", endpoint_url):
        raise ConfigError(f"the endpoint {endpoint_url!r} must begin with http:// or https://")
    scheme, place = split_url(url)
    made: tuple[Client, str]
    prefix = ""
    if scheme in ("s3", "s3a"):
        bucket, prefix = split_bucket(url, place)
        access: dict[str, Any] = {"region": region, "profile": profile}
        access |= {"endpoint_url": endpoint_url, "anonymous": anonymous, "stall_s": stall_s}
        if client == "fsspec":
            from cachefs.origin.fsspec_stores import s3fs_client

            made = s3fs_client(bucket, **access)
        else:
            from cachefs.origin.s3 import s3_client

            made = s3_client(bucket, **access)
    elif scheme in ("az", "azure", "abfs", "abfss"):
        container, prefix = split_bucket(url, place)
        access = {"endpoint_url": endpoint_url, "anonymous": anonymous, "stall_s": stall_s}
        if client == "fsspec":
            from cachefs.origin.fsspec_stores import adlfs_client

            made = adlfs_client(container, **access)
        else:
            from cachefs.origin.azure import azure_client

            made = azure_client(container, **access)
    elif scheme in ("gs", "gcs") and client != "fsspec":
        from cachefs.origin.google import google_client

        bucket, prefix = split_bucket(url, place)
        made = google_client(bucket, endpoint_url=endpoint_url, anonymous=anonymous, stall_s=stall_s)
    elif scheme in ("http", "https") and client != "fsspec":
        from cachefs.origin.web import web_client

        found, host, prefix = web_client(url, stall_s=stall_s)
        made = (found, host)
    elif scheme == "file" and client != "fsspec":
        from cachefs.origin.local import local_client

        made = local_client(place)
    elif client == "obstore":
        raise ConfigError(f"obstore knows no {scheme}://; use --client fsspec")
    else:
        from cachefs.origin.fsspec_client import any_filesystem

        made = any_filesystem(url, scheme)
    return Origin(
        made[0],
        source=made[1],
        prefix=prefix,
        concurrency=concurrency,
        download_limit=download_limit,
        upload_limit=upload_limit,
        deadline_s=deadline_s,
        on_outage=on_outage,
        backoff=backoff,
        metrics=metrics,
    )


def split_url(url: str) -> tuple[str, str]:
    """(scheme, what follows `://`); a plain absolute path is scheme `file`."""
    if url.startswith("/"):
        return "file", url
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", url, re.DOTALL)
    if not match:
        raise ConfigError(f"{url!r} is not a URL such as s3://bucket/prefix, nor an absolute path")
    scheme, place = match[1].lower(), match[2]
    if scheme == "file":
        place = place.removeprefix("localhost")
        if not place.startswith("/"):
            raise ConfigError(f"{url!r}: a file URL has three slashes, file:///directory")
    return scheme, place


def split_bucket(url: str, place: str) -> tuple[str, str]:
    """(bucket, prefix), the prefix "" or ending in "/" and otherwise exactly as written."""
    bucket, _, prefix = place.partition("/")
    if not bucket:
        raise ConfigError(f"{url!r} names no bucket; write s3://BUCKET or s3://BUCKET/PREFIX")
    return bucket, as_prefix(prefix)


def as_prefix(path: str) -> str:
    return path if not path or path.endswith("/") else path + "/"
