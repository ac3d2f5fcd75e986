"""A Google Cloud Storage bucket: listed, read and written through its XML interface, so that both show the same
etags."""

from __future__ import annotations

import os
from typing import Any

from cachefs.origin.credentials.google import READ_WRITE, GoogleCredentials
from cachefs.origin.listing.http import Fetcher
from cachefs.origin.listing.s3 import BucketLister
from cachefs.origin.obstore_client import ObstoreClient, client_options, retry_config
from cachefs.origin.s3_writing import GOOGLES, BucketWriter
from cachefs.origin.signed import SignedReader

PUBLIC = "https://storage.googleapis.com"


def google_client(
    name: str, *, endpoint_url: str | None, anonymous: bool, stall_s: float
) -> tuple[ObstoreClient, str]:
    """The client, and its store's identity."""
    endpoint = (endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST") or PUBLIC).rstrip("/")
    credentials = GoogleCredentials(anonymous)
    fetcher = Fetcher(stall_s)
    label = f"gs://{name}"
    lister = BucketLister(
        lambda: f"{endpoint}/{name}",
        credentials.sign,
        fetcher,
        label=label,
        advice=lambda: credentials.advice,
    )

    def open_store() -> Any:
        from obstore.store import GCSStore

        access: dict[str, Any] = (
            {"skip_signature": True} if anonymous else {"credential_provider": credentials.provide}
        )
        return GCSStore(
            name,
            base_url=endpoint,
            client_options=client_options(stall_s),
            retry_config=retry_config(),
            **access,
        )

    signed = SignedReader(
        lambda: f"{endpoint}/{name}",
        lambda method, url, headers: (url, {**headers, **credentials.sign(url)}),
        fetcher,
        label=label,
        advice=lambda: credentials.advice,
    )
    writer = BucketWriter(
        name,
        GOOGLES,
        lambda: f"{endpoint}/{name}",
        lambda method, url, headers, body: (url, {**headers, **credentials.sign(url, READ_WRITE)}),
        fetcher,
        label=label,
        advice=lambda: credentials.advice,
    )
    client = ObstoreClient(
        open_store,
        lister,
        signed=signed,
        writer=writer,
        label=label,
        credentials=credentials,
        close=fetcher.close,
    )
    return client, label if endpoint == PUBLIC else f"{label}@{endpoint}"
