"""Google Cloud Storage through its XML interface: listings and reads show the same etags there (the JSON interface shows
others), and the protocol is S3's.

Credentials come from google-auth's own chain: GOOGLE_APPLICATION_CREDENTIALS, gcloud's, the metadata server.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from cachefs.base.errors import PermissionDenied
from cachefs.origin.conditions import HONOURED
from cachefs.origin.http import SignedHttp, Transport
from cachefs.origin.obstore_client import ObstoreClient, client_options, retry_config
from cachefs.origin.protocol import GIB, MIB, TIB, Body, Limits
from cachefs.origin.replies import one_line
from cachefs.origin.s3 import Dialect, S3Objects

if TYPE_CHECKING:
    from obstore.store import ObjectStore

LIMITS = Limits(5 * TIB, 5 * TIB, 5 * MIB, 5 * GIB, 10_000, 5 * TIB)
"""As documented for the XML interface, which copies any size in one request. Keys have 1,024 bytes."""

GOOGLE = Dialect("x-goog-", True, LIMITS)
PUBLIC = "https://storage.googleapis.com"
READ_ONLY = "https://www.googleapis.com/auth/devstorage.read_only"
READ_WRITE = "https://www.googleapis.com/auth/devstorage.read_write"


@dataclass(frozen=True, slots=True)
class Token:
    token: str = field(repr=False)
    expires_at: datetime | None


class GoogleCredentials:
    """Credentials of one mount. Thread-safe."""

    def __init__(self, anonymous: bool) -> None:
        self.anonymous = anonymous
        self._lock = threading.Lock()
        # By scope: a mount that only reads never holds a token that can write.
        self._found: dict[str, Any] = {}
        self._renewed_at = float("-inf")

    def current(self, scope: str = READ_ONLY) -> Token | None:
        """The token of a scope, refreshed when it has expired; None when anonymous."""
        if self.anonymous:
            return None
        import google.auth
        import google.auth.transport.urllib3
        import urllib3
        from google.auth.exceptions import GoogleAuthError

        with self._lock:
            try:
                if scope not in self._found:
                    self._found[scope], _ = google.auth.default(scopes=[scope])
                found = self._found[scope]
                if not found.valid:
                    found.refresh(google.auth.transport.urllib3.Request(urllib3.PoolManager()))
            except (GoogleAuthError, OSError) as exc:
                raise PermissionDenied(one_line(f"no Google credentials: {exc}; {self.advice}")) from exc
            expiry = found.expiry
            expires_at = expiry.replace(tzinfo=UTC) if isinstance(expiry, datetime) else None
            return Token(found.token, expires_at)

    def provide(self) -> dict[str, Any]:
        """For obstore, which asks again before `expires_at`."""
        found = self.current()
        if found is None:  # cannot be: an anonymous store has no provider
            raise PermissionDenied("no credentials")
        return {"token": found.token, "expires_at": found.expires_at}

    def renew(self, since: float) -> bool:
        """Read files and metadata again at the next request."""
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
        """The origin's identity."""
        return self.label if self.endpoint == PUBLIC else f"{self.label}@{self.endpoint}"

    def url(self) -> str:
        return f"{self.endpoint}/{self.name}"

    def sign(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes
    ) -> tuple[str, Mapping[str, str]]:
        """As `Place.sign`. Listing the parts of an upload belongs to writing."""
        reads = method in ("GET", "HEAD") and "uploadId=" not in url
        found = self.credentials.current(READ_ONLY if reads else READ_WRITE)
        return url, headers if found is None else {**headers, "Authorization": f"Bearer {found.token}"}

    def open_store(self, stall_s: float) -> ObjectStore:
        from obstore.store import GCSStore

        access: dict[str, Any] = {"credential_provider": self.credentials.provide}
        return GCSStore(
            self.name,
            base_url=self.endpoint,
            client_options=client_options(stall_s),
            retry_config=retry_config(),
            **({"skip_signature": True} if self.credentials.anonymous else access),
        )


def google_client(bucket: Bucket, stall_s: float) -> ObstoreClient:
    http = SignedHttp(bucket, Transport(stall_s))
    objects = S3Objects(http, bucket.name, GOOGLE, HONOURED)
    return ObstoreClient(bucket, http.transport, lister=objects, writer=objects, http=http)
