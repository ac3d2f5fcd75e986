"""Azure credentials: what the environment says (connection string, key, SAS), else azure-identity's chain."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from cachefs.errors import ConfigError, PermissionDenied
from cachefs.origin.replies import one_line

STORAGE_SCOPE = "https://storage.azure.com/.default"
API_VERSION = "2021-12-02"
"""The first that marks names which XML cannot carry (`Encoded="true"`) in use everywhere by now."""

SIGNED_HEADERS = (
    *("Content-Encoding", "Content-Language", "Content-Length", "Content-MD5", "Content-Type", "Date"),
    *("If-Modified-Since", "If-Match", "If-None-Match", "If-Unmodified-Since", "Range"),
)
"""In the order of the text that is signed."""


@dataclass(frozen=True, slots=True)
class Proof:
    """One way to show who we are: exactly one of these is set, or none when anonymous."""

    key: str = field(default="", repr=False)
    sas: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    expires_at: datetime | None = None


def settings() -> dict[str, str]:
    """What the environment says: AccountName, AccountKey, SharedAccessSignature, BlobEndpoint,
    EndpointSuffix."""
    found: dict[str, str] = {}
    for part in os.environ.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";"):
        name, _, value = part.partition("=")
        if value:
            found[name.strip()] = value.strip()
    for name, variables in {
        "AccountName": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT"),
        "AccountKey": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_KEY"),
        "SharedAccessSignature": ("AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY"),
        "BlobEndpoint": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    }.items():
        for variable in variables:
            if name not in found and os.environ.get(variable):
                found[name] = os.environ[variable]
    return found


class AzureCredentials:
    """Credentials of one mount for one account. Thread-safe."""

    def __init__(self, account: str, anonymous: bool) -> None:
        self.account = account
        self.anonymous = anonymous
        self._lock = threading.Lock()
        self._identity: Any = None
        self._renewed_at = float("-inf")

    def current(self) -> Proof:
        """What to show the store now. Tokens are renewed by azure-identity before they expire."""
        if self.anonymous:
            return Proof()
        said = settings()
        # A connection string is a whole; its key belongs to its own account only.
        if said.get("AccountName", self.account) == self.account:
            if "AccountKey" in said:
                return Proof(key=said["AccountKey"])
            if "SharedAccessSignature" in said:
                return Proof(sas=said["SharedAccessSignature"].lstrip("?"))
        return self._token()

    def renew(self, since: float) -> bool:
        """Environment variables do not change under a process; a token is asked for anew."""
        with self._lock:
            if self._identity is not None and self._renewed_at <= since:
                self._identity, self._renewed_at = None, time.monotonic()
            return self._renewed_at > since

    @property
    def advice(self) -> str:
        if self.anonymous:
            return "the mount is --anonymous; a private container needs credentials"
        return (
            "check AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
            "AZURE_STORAGE_SAS_TOKEN, or the identity's role Storage Blob Data Reader (Contributor, to write)"
        )

    def sign(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        """The URL to use for a request of `url`, and its headers together with those that authorise it."""
        date = format_datetime(datetime.now(UTC), usegmt=True)
        headers = {**headers, "x-ms-date": date, "x-ms-version": API_VERSION}
        proof = self.current()
        if proof.sas:
            return f"{url}{'&' if '?' in url else '?'}{proof.sas}", headers
        if proof.token:
            headers["Authorization"] = f"Bearer {proof.token}"
        elif proof.key:
            signature = _shared_key(self.account, proof.key, method, url, headers)
            headers["Authorization"] = f"SharedKey {self.account}:{signature}"
        return url, headers

    def _token(self) -> Proof:
        try:
            from azure.core.exceptions import AzureError
            from azure.identity import DefaultAzureCredential
        except ImportError as exc:
            raise PermissionDenied(f"no Azure credentials: {self.advice}") from exc
        with self._lock:
            try:
                if self._identity is None:
                    # Its warnings say what failed in twenty lines; the error below says it in one.
                    logging.getLogger("azure.identity").setLevel(logging.ERROR)
                    self._identity = DefaultAzureCredential()
                token = self._identity.get_token(STORAGE_SCOPE)
            except (AzureError, ValueError) as exc:
                reason = one_line(str(exc))
                raise PermissionDenied(f"no Azure credentials: {self.advice} ({reason})") from exc
        return Proof(token=token.token, expires_at=datetime.fromtimestamp(token.expires_on, UTC))


def _shared_key(account: str, key: str, method: str, url: str, headers: Mapping[str, str]) -> str:
    """The signature of a request, as Azure's "Authorize with Shared Key" lays down; it is not over the body."""
    parts = urlsplit(url)
    shown = {name: value for name, value in headers.items() if (name, value) != ("Content-Length", "0")}
    usual = "".join(f"{shown.get(name, '')}\n" for name in SIGNED_HEADERS)
    named = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers) if name.startswith("x-ms-"))
    resource = f"/{account}{parts.path}"
    for name, value in sorted(parse_qsl(parts.query, keep_blank_values=True)):
        resource += f"\n{unquote(name).lower()}:{value}"
    text = f"{method}\n{usual}{named}{resource}"
    try:
        secret = base64.b64decode(key, validate=True)
    except binascii.Error as exc:
        raise ConfigError("the Azure account key is not base64: copy it whole, with its trailing =") from exc
    return base64.b64encode(hmac.new(secret, text.encode(), hashlib.sha256).digest()).decode()
