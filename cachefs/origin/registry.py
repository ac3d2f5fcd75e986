"""Open an `Origin` by its URL: choose the client by scheme, and say what is wrong with a URL that no client serves."""

from __future__ import annotations

import importlib
import re

from cachefs.base.errors import ConfigError
from cachefs.base.metrics import Metrics
from cachefs.base.names import ERRORS, OnOutage
from cachefs.origin.attempts import DEFAULT, Attempts, Backoff
from cachefs.origin.origin import Origin
from cachefs.origin.protocol import STALL_S, Client


def open_origin(
    url: str,
    *,
    client: str = "auto",
    endpoint_url: str | None = None,
    region: str | None = None,
    profile: str | None = None,
    anonymous: bool = False,
    requester_pays: bool = False,
    sse_kms_key: str | None = None,
    verify: str = "first",
    concurrency: int = 64,
    download_limit: int = 0,
    upload_limit: int = 0,
    deadline_s: float = 60.0,
    stall_s: float = STALL_S,
    on_outage: OnOutage = ERRORS,
    backoff: Backoff = DEFAULT,
    metrics: Metrics,
) -> Origin:
    """The origin at `url`. Sends no request; `Origin.check` does. `client` and `verify` are as the options. Raises
    `ConfigError` for what cannot be served; its one line tells what to change."""
    if endpoint_url and not re.match(r"https?://[^/]", endpoint_url):
        raise ConfigError(f"the endpoint {endpoint_url!r} must begin with http:// or https://")
    scheme, place = split_url(url)
    made: Client
    prefix = ""
    if (requester_pays or sse_kms_key) and (scheme not in ("s3", "s3a") or client == "fsspec"):
        name = "--requester-pays" if requester_pays else "--sse-kms-key"
        raise ConfigError(f"{name} is for s3:// with curl, not for {url} with --client {client}")
    if scheme in ("s3", "s3a"):
        from cachefs.origin.s3 import AwsCredentials, Bucket, s3_client

        name, prefix = split_bucket(url, place)
        credentials = AwsCredentials(profile, anonymous)
        bucket = Bucket(
            name, endpoint_url, region, credentials, requester_pays=requester_pays, sse_kms_key=sse_kms_key
        )
        if client == "fsspec":
            from cachefs.origin.fsspec_client import S3fsClient

            made = S3fsClient(bucket, stall_s)
        else:
            made = s3_client(bucket, stall_s)
    elif scheme in ("az", "azure", "abfs", "abfss"):
        from cachefs.origin.azure import AzureClient, container_of

        name, prefix = split_bucket(url, place)
        container = container_of(name, endpoint_url, anonymous)
        if client == "fsspec":
            from cachefs.origin.fsspec_client import AdlfsClient

            made = AdlfsClient(container, stall_s)
        else:
            made = AzureClient(container, stall_s)
    elif scheme in ("gs", "gcs") and client != "fsspec":
        from cachefs.origin import google

        name, prefix = split_bucket(url, place)
        made = google.google_client(google.Bucket(name, endpoint_url, anonymous), stall_s)
    elif scheme in ("http", "https") and client != "fsspec":
        from cachefs.origin.web import web_client

        made, prefix = web_client(url, stall_s)
    elif scheme == "file" and client != "fsspec":
        from cachefs.origin.local import LocalClient

        made = LocalClient(place)
    elif client == "curl":
        raise ConfigError(f"curl knows no {scheme}://; use --client fsspec")
    else:
        from cachefs.origin.fsspec_client import any_filesystem

        made = any_filesystem(url, scheme)
    attempts = Attempts(
        made,
        source=made.source,
        prefix=prefix,
        concurrency=concurrency,
        download_limit=download_limit,
        upload_limit=upload_limit,
        deadline_s=deadline_s,
        on_outage=on_outage,
        backoff=backoff,
        metrics=metrics,
    )
    origin = Origin(attempts)
    if origin.md5 is not None:
        origin.md5.verify(verify)
    return origin


def load_origin(url: str) -> None:
    """Import the modules that `open_origin` will need for this URL, where that takes long."""
    if split_url(url)[0] == "s3":
        importlib.import_module("botocore.session")
        importlib.import_module("cachefs.origin.s3")


def split_url(url: str) -> tuple[str, str]:
    """(scheme, the rest after `://`); a plain absolute path has the scheme `file`."""
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
    """(bucket, prefix) of the part of a URL after its scheme. The prefix is "" or ends in "/"."""
    bucket, _, prefix = place.partition("/")
    if not bucket:
        raise ConfigError(f"{url!r} names no bucket; write s3://BUCKET or s3://BUCKET/PREFIX")
    return bucket, prefix if not prefix or prefix.endswith("/") else prefix + "/"
