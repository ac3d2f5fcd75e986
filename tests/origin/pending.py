"""Multipart uploads that were begun and neither completed nor aborted, as a store lists them.

The product never lists uploads; tests do, to show that none are left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import unquote_plus

import trio

from cachefs.base.errors import OriginFailed
from cachefs.origin import Origin
from cachefs.origin.http import Request
from cachefs.origin.local import LocalClient
from cachefs.origin.s3 import S3Client


class Pending(NamedTuple):
    key: str
    id: str


async def pending(origin: Origin, prefix: str = "") -> list[Pending]:
    """The uploads of keys that begin with `prefix`, by key; none of a store that has no such list."""
    listing: Callable[[Any, str], list[Pending]]
    writer = origin.writer
    if isinstance(writer, S3Client):
        listing = _at_a_store
    elif isinstance(writer, LocalClient):
        listing = _in_a_directory
    else:
        return []
    return await trio.to_thread.run_sync(listing, writer, prefix)


async def abort(origin: Origin, upload: Pending) -> None:
    await origin.resume_upload(upload.key, {"id": upload.id}).abort()


def _at_a_store(client: S3Client, prefix: str) -> list[Pending]:
    # Ceph's RADOS Gateway encodes keys when asked to, and does not tell that it did.
    try:
        return _pages(client, prefix, None)
    except OriginFailed:  # keys of characters that XML cannot carry
        return _pages(client, prefix, "url")


def _pages(client: S3Client, prefix: str, encoding: str | None) -> list[Pending]:
    found: list[Pending] = []
    markers: dict[str, str | None] = {}
    while True:
        asked = {"uploads": "", "prefix": prefix or None, "encoding-type": encoding, **markers}
        page = client.document(client.ask(Request("GET", "", asked)), prefix)
        decode = unquote_plus if page.findtext("EncodingType") == "url" else str
        for node in page.iter("Upload"):
            found.append(Pending(decode(node.findtext("Key", "")), node.findtext("UploadId", "")))
        after = page.findtext("NextKeyMarker")
        following = {
            "key-marker": decode(after) if after else after,
            "upload-id-marker": page.findtext("NextUploadIdMarker"),
        }
        if page.findtext("IsTruncated") != "true" or following == markers:
            return found
        markers = following


def _in_a_directory(client: LocalClient, prefix: str) -> list[Pending]:
    folders = client._uploads.iterdir() if client._uploads.is_dir() else ()
    found = [Pending((folder / "key").read_text(), folder.name) for folder in folders]
    return sorted(upload for upload in found if upload.key.startswith(prefix))
