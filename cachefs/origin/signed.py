"""HEAD and GET over the signed HTTP that lists, for the few keys that obstore cannot name.

obstore takes a key for a path: it refuses control characters and empty segments, and reads `lead` when `/lead` is
asked for. A store has no such notions, and its listings show these keys. They are rare, so what counts here is
that bytes and errors are the same as obstore's, and not the CPU a gigabyte costs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from typing import Any
from urllib.parse import quote

from cachefs.errors import ObjectChanged, OriginFailed, Transient, Unsupported
from cachefs.origin.listing.http import Fetcher, http_date_ns, quoted
from cachefs.origin.protocol import ObjectInfo
from cachefs.origin.replies import refusal

Sign = Callable[[str, str, Mapping[str, str]], tuple[str, Mapping[str, str]]]
"""(method, URL, headers) → URL and headers of the request that is authorised to be just that."""

CHUNK = 128 << 10
"""As much as obstore's chunks have."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def expressible(key: str) -> bool:
    """Whether obstore's idea of a path can hold `key` as it is."""
    return not (_CONTROL.search(key) or any(segment in ("", ".", "..") for segment in key.split("/")))


class SignedReader:
    """The objects below the URL that `base` gives at each call (a bucket may turn out to lie in another region)."""

    def __init__(
        self,
        base: Callable[[], str],
        sign: Sign,
        fetcher: Fetcher,
        *,
        label: str,
        advice: Callable[[], str],
    ) -> None:
        self._base, self._sign, self._fetcher = base, sign, fetcher
        self._label, self._advice = label, advice

    def head(self, key: str) -> ObjectInfo:
        reply = self._ask("HEAD", key, {})
        try:
            headers = reply.headers
            size, mtime_ns = int(headers["content-length"]), http_date_ns(headers["last-modified"])
            return ObjectInfo(key, size, mtime_ns, quoted(headers["etag"]))
        except (KeyError, ValueError) as exc:
            raise OriginFailed(f"{self._label}/{key}: the store's reply does not describe an object") from exc
        finally:
            reply.close()

    def read(
        self, key: str, etag: str, start: int, stop: int, whole: bool
    ) -> Generator[memoryview | bytes, None, None]:
        headers = {"If-Match": etag}
        if not whole:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        reply = self._ask("GET", key, headers)
        try:
            if quoted(reply.headers.get("etag", "")) != etag:
                raise ObjectChanged(f"{self._label}/{key}: the object changed at the store")
            sent = reply.headers.get("content-range", "the whole object")
            if not whole and not sent.startswith(f"bytes {start}-{stop - 1}/"):
                raise Transient(
                    f"{self._label}/{key}: asked for bytes {start} to {stop}, the store sent {sent}"
                )
            yield from self._fetcher.chunks(reply, CHUNK, f"{self._label}/{key}")
        finally:
            reply.close()  # one that was read to its end has given its connection back before

    def _ask(self, method: str, key: str, headers: Mapping[str, str]) -> Any:
        """The reply, its body still to come; refusals raised."""
        what = f"{self._label}/{key}"
        if any(segment in (".", "..") for segment in key.split("/")):
            raise Unsupported(f"{what}: HTTP drops the segments . and .. of a path")
        reply = self._fetcher.open(method, *self._sign(method, f"{self._base()}/{quote(key)}", headers))
        if reply.status in (200, 206):
            return reply
        try:
            body = b"".join(self._fetcher.chunks(reply, CHUNK, what))
        finally:
            reply.close()
        raise refusal(
            reply.status,
            body.decode("utf-8", "replace"),
            what=what,
            advice=self._advice(),
            retry_after=reply.headers.get("retry-after"),
            date=reply.headers.get("date"),
        )
