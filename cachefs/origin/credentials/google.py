"""Google credentials by google-auth's own chain: GOOGLE_APPLICATION_CREDENTIALS, gcloud's, the metadata
server."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cachefs.errors import PermissionDenied
from cachefs.origin.replies import one_line

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
        self._found: dict[str, Any] = {}  # by scope: who only reads never holds a token that can write
        self._renewed_at = float("-inf")

    def current(self, scope: str = READ_ONLY) -> Token | None:
        """What google-auth has, renewed when it has expired; None when anonymous."""
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

    def sign(self, url: str, scope: str = READ_ONLY) -> dict[str, str]:
        found = self.current(scope)
        return {} if found is None else {"Authorization": f"Bearer {found.token}"}

    def provide(self) -> dict[str, Any]:
        """For obstore, which asks again before `expires_at`."""
        found = self.current()
        if found is None:  # cannot be: an anonymous store has no provider
            raise PermissionDenied("no credentials")
        return {"token": found.token, "expires_at": found.expires_at}

    def renew(self, since: float) -> bool:
        """Files and metadata are read again at the next request."""
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
