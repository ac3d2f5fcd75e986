"""Google Cloud Storage through its XML interface, whose protocol is S3's. Listings and reads show the same etags there; the
JSON interface shows others. Credentials come from google-auth's own chain: GOOGLE_APPLICATION_CREDENTIALS, gcloud's, the
metadata server."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from cachefs.base.errors import CachefsError, PermissionDenied
from cachefs.origin.http import Exchange, Sign, Signed, Transport, one_line
from cachefs.origin.protocol import GIB, HONOURED, MIB, STALL_S, TIB, Body, Limits
from cachefs.origin.s3 import Dialect, S3Client

LIMITS = Limits(5 * TIB, 5 * MIB, 5 * GIB, 10_000, 5 * TIB)
"""As documented for the XML interface, which copies any size in one request. Keys have 1,024 bytes."""

GOOGLE = Dialect("x-goog-", True, LIMITS)
PUBLIC = "https://storage.googleapis.com"

READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
READ_WRITE = "https://www.googleapis.com/auth/devstorage.read_write"


def _request(
    url: str,
    method: str = "GET",
    body: bytes | str | None = None,
    headers: Mapping[str, str] | None = None,
    timeout: float | None = None,
    **_: object,
) -> SimpleNamespace:
    """google-auth's transport to its services: sends one request. Returns the reply in the form that google-auth takes."""
    from google.auth.exceptions import TransportError

    transport = Transport(timeout or STALL_S)
    sent = body.encode() if isinstance(body, str) else body or b""
    try:
        reply = transport.send(Exchange(method, url, headers or {}, size=len(sent)), sent)
    except CachefsError as exc:
        raise TransportError(exc) from exc
    finally:
        transport.close()
    return SimpleNamespace(status=reply.status, headers=reply.headers, data=reply.body)


class GoogleCredentials:
    """Credentials of one mount. Thread-safe."""

    def __init__(self, anonymous: bool) -> None:
        self.anonymous = anonymous
        self._lock = threading.Lock()
        # Credentials by scope: a mount that only reads never holds a token that can write.
        self._found: dict[str, Any] = {}
        self._renewed_at = float("-inf")

    def current(self, scope: str = READ_ONLY) -> str | None:
        """The token of a scope, refreshed when it has expired; None when anonymous."""
        if self.anonymous:
            return None
        import google.auth
        from google.auth.exceptions import GoogleAuthError

        with self._lock:
            try:
                if scope not in self._found:
                    self._found[scope], _ = google.auth.default(scopes=[scope], request=_request)
                found = self._found[scope]
                if not found.valid:
                    found.refresh(_request)
            except (GoogleAuthError, OSError) as exc:
                raise PermissionDenied(one_line(f"no Google credentials: {exc}; {self.advice}")) from exc
            return str(found.token)

    def at_hand(self) -> str | None:
        """The token for reading, if no service has to be asked for it; else None."""
        found = self._found.get(READ_ONLY)
        return found.token if found is not None and found.valid else None

    def renew(self, since: float) -> bool:
        """Read the credentials' files and metadata again at the next request."""
        with self._lock:
            if self._found and self._renewed_at <= since:
                self._found, self._renewed_at = {}, time.monotonic()
            return self._renewed_at > since

    @property
    def advice(self) -> str:
        if self.anonymous:
            return "the mount is --anonymous; a private bucket needs credentials"
        return (
            "set GOOGLE_APPLICATION_CREDENTIALS, or grant the account Storage Object Viewer (User, to write)"
        )


class Bucket:
    """A bucket: name, endpoint, signatures."""

    def __init__(self, name: str, endpoint_url: str | None, anonymous: bool) -> None:
        self.name = name
        self.endpoint = (endpoint_url or os.environ.get("STORAGE_EMULATOR_HOST") or PUBLIC).rstrip("/")
        self.credentials = GoogleCredentials(anonymous)
        self.label = f"gs://{name}"

    @property
    def source(self) -> str:
        return self.label if self.endpoint == PUBLIC else f"{self.label}@{self.endpoint}"

    def url(self) -> str:
        return f"{self.endpoint}/{self.name}"

    def sign(self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes) -> Signed:
        """As `Place.sign`. Listing the parts of an upload takes the right to write."""
        reads = method in ("GET", "HEAD") and "uploadId=" not in url
        return _authorised(method, url, headers, self.credentials.current(READ_ONLY if reads else READ_WRITE))

    def signer(self) -> Sign | None:
        token = self.credentials.at_hand()
        if not (token or self.credentials.anonymous):
            return None
        return lambda method, url, headers, body: _authorised(method, url, headers, token)


def _authorised(method: str, url: str, headers: Mapping[str, str], token: str | None) -> Signed:
    given = dict(headers)
    if token is not None:
        given["Authorization"] = f"Bearer {token}"
    if method in ("GET", "HEAD") and "?" not in url:
        # Else Google decompresses objects whose Content-Encoding is gzip, and sends other bytes than the listing's size.
        given["Accept-Encoding"] = "gzip"
    return url, given


def google_client(bucket: Bucket, stall_s: float) -> S3Client:
    return S3Client(bucket, bucket.name, GOOGLE, HONOURED, stall_s)
