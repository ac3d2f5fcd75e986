"""Writing to Azure: block blobs.

A part is a block, which waits beside the blob under an id until a list of ids is put; then those blocks are the blob.
Azure has no uploads as such: an upload here is a random word that its blocks' ids begin with, and its parts are the
blocks which show it. What follows from that: beginning asks nothing of the store, aborting neither (blocks that are
not put in a list within a week of the last go by themselves), nobody can list uploads, and of two uploads of one blob
the first to be completed throws the other's blocks away, which then is `NoSuchUpload`.
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Mapping, Sequence

from cachefs.errors import CachefsError, NotFound, Transient, Unsupported
from cachefs.origin.conditions import HONOURED
from cachefs.origin.http_writing import ANY_TYPE, HttpWriter, Sign, written
from cachefs.origin.listing.http import Fetcher
from cachefs.origin.writing import AZURE, Body, Part, Pending, Terms, Written, conflicts

STAMP = "cachefs_stamp"
"""Azure's names of metadata have no hyphens."""

COPYING_S = 10.0
"""How long to wait for a copy that Azure goes on with after its reply, until the attempt counts as failed. Guessed:
within an account it is over with the reply."""


class ContainerWriter(HttpWriter):
    """The writing half of a container's client. `source_url` makes a URL that Azure itself may read."""

    limits = AZURE
    conditions = HONOURED

    def __init__(
        self,
        base: Callable[[], str],
        sign: Sign,
        fetcher: Fetcher,
        *,
        label: str,
        advice: Callable[[], str],
        source_url: Callable[[str], str],
    ) -> None:
        stamp_header = f"x-ms-meta-{STAMP}"
        super().__init__(base, sign, fetcher, label=label, advice=advice, stamp_header=stamp_header)
        self._source_url = source_url

    def put(self, key: str, body: Body, terms: Terms) -> Written:
        kind = {"x-ms-blob-type": "BlockBlob", **self._kept(terms)}
        with conflicts(terms):
            return written(self._ask("PUT", key, headers=kind, body=body))

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        condition = {} if etag is None else {"x-ms-source-if-match": etag}
        headers = {"x-ms-copy-source": self._source_url(key), **condition}
        reply = self._ask("PUT", to, headers=headers, slow=True, about=key)
        over_at = time.monotonic() + COPYING_S
        while reply.headers.get("x-ms-copy-status") == "pending":
            if time.monotonic() > over_at:
                raise Transient(f"{self._name(to)}: the copy is still on its way")
            time.sleep(0.1)
            reply = self._ask("HEAD", to)
        return written(reply)

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        raise Unsupported(f"{self._label}: one deletion names one blob")

    # Multipart uploads.

    def begin(self, key: str, terms: Terms) -> str:
        return terms.stamp

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        name = block_id(upload, number)
        self._ask("PUT", key, {"comp": "block", "blockid": name}, body=body)
        return name

    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str:
        raise Unsupported(f"{self._name(key)}: Azure copies a blob of any size in one request")

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        try:
            reply = self._ask("GET", key, {"comp": "blocklist", "blocklisttype": "uncommitted"})
        except NotFound:
            return {}  # neither a blob nor a block of one
        found = {}
        for node in self._document(reply, key).iter("Block"):
            name = node.findtext("Name", "")
            number = number_of(upload, name)
            if number is not None:
                found[number] = Part(name, int(node.findtext("Size", "0")))
        return found

    def complete(self, key: str, upload: str, parts: Mapping[int, str], terms: Terms) -> Written:
        # Only uncommitted blocks: when an earlier attempt has put the list, this one fails, and the stamp tells.
        rows = "".join(f"<Uncommitted>{name}</Uncommitted>" for _, name in sorted(parts.items()))
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{rows}</BlockList>'.encode()
        headers = {**self._kept(terms), "Content-Type": "application/xml"}
        with conflicts(terms):
            return written(self._ask("PUT", key, {"comp": "blocklist"}, headers, body, slow=True))

    def abort(self, key: str, upload: str) -> None:
        """There is nothing to ask for: the blocks expire."""

    def list_uploads(self, prefix: str) -> list[Pending]:
        raise Unsupported(
            f"{self._label}: Azure keeps no list of uploads; what is not completed goes after a week"
        )

    def _kept(self, terms: Terms) -> dict[str, str]:
        """Headers that become the blob's own, and the conditions."""
        kept = {"x-ms-blob-content-type": terms.content_type or ANY_TYPE}
        if terms.stamp:
            kept[self._stamp_header] = terms.stamp
        if terms.if_match is not None:
            kept["If-Match"] = terms.if_match
        if terms.if_absent:
            kept["If-None-Match"] = "*"
        return kept


def block_id(upload: str, number: int) -> str:
    """All of a blob's ids have one length."""
    return base64.b64encode(f"{upload}-{number:05d}".encode()).decode()


def number_of(upload: str, name: str) -> int | None:
    """The part that a block is, if it is one of this upload."""
    try:
        word, _, number = base64.b64decode(name).decode("ascii", "replace").rpartition("-")
    except binascii.Error:
        return None
    return int(number) if word == upload and number.isdecimal() else None
