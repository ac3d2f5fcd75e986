"""Azure Blob Storage: credentials, where a container is, listing, writing block blobs, and the client.

A part is a *block*, which waits beside the blob under an id until a list of ids is put; then those blocks are the blob.
Azure has no uploads as such. Here an upload is a random word that the ids of its blocks begin with. So beginning and
aborting send no request: Azure removes blocks a week after the last of them, unless a list names them. Of two uploads of
one blob, the first to be completed discards the other's blocks, and the other is then `NoSuchUpload`."""

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
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree.ElementTree import Element

from cachefs.base.errors import ConfigError, NotFound, OriginFailed, PermissionDenied, Transient
from cachefs.origin.http import (
    ANY_TYPE,
    HttpClient,
    Request,
    Sign,
    Signed,
    Transport,
    child,
    http_date_ns,
    one_line,
    quoted,
    written,
    xml,
)
from cachefs.origin.protocol import (
    HONOURED,
    MIB,
    TIB,
    Body,
    Limits,
    ListPage,
    ObjectInfo,
    Part,
    Preconditions,
    Writer,
    Written,
    conflicts,
)

LIMITS = Limits(190 * TIB, 1, 4000 * MIB, 50_000, 150 * TIB)
"""As documented for block blobs, except for the largest: 190 TiB would need the largest blocks from the beginning, and
growing ones reach 150. Keys have 1,024 characters; counting bytes instead is stricter."""

TOKEN_HEADER = "x-ms-meta-cachefs_token"
"""Azure's names of metadata have no hyphens."""

STORAGE_SCOPE = "https://storage.azure.com/.default"
FRESH_S = 360
"""A token that is valid for so long is used without azure-identity, which renews it five minutes before its end."""

API_VERSION = "2021-12-02"
"""The first version that marks names which XML cannot carry (`Encoded="true"`); every Azure service has it by now."""

SIGNED_HEADERS = (
    "Content-Encoding",
    "Content-Language",
    "Content-Length",
    "Content-MD5",
    "Content-Type",
    "Date",
    "If-Modified-Since",
    "If-Match",
    "If-None-Match",
    "If-Unmodified-Since",
    "Range",
)
"""In the order in which the signed text has them."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What authorises requests: key, SAS or token, exactly one of which is set; none for an anonymous mount. `expires_at` is
    a token's end, in seconds since the epoch."""

    key: str = field(default="", repr=False)
    sas: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    expires_at: float = 0.0


def settings() -> dict[str, str]:
    """What the environment tells, by the names of a connection string."""
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
        self._last: Proof | None = None  # a token
        self._renewed_at = float("-inf")

    def current(self) -> Proof:
        """What authorises requests now. azure-identity renews tokens before they expire."""
        return self._configured() or self._token()

    def at_hand(self) -> Proof | None:
        """As `current`, if no service has to be asked for it; else None."""
        last = self._last
        fresh = last is not None and last.expires_at - time.time() > FRESH_S
        return self._configured() or (last if fresh else None)

    def _configured(self) -> Proof | None:
        """The proof that the options and the environment give; None if they give none."""
        if self.anonymous:
            return Proof()
        configured = settings()
        # The key of a connection string belongs to the account that the string names.
        if configured.get("AccountName", self.account) == self.account:
            if "AccountKey" in configured:
                return Proof(key=configured["AccountKey"])
            if "SharedAccessSignature" in configured:
                return Proof(sas=configured["SharedAccessSignature"].lstrip("?"))
        return None

    def renew(self, since: float) -> bool:
        """Get a new token at the next request. Keys and SAS are not read again: a process's environment does not change."""
        with self._lock:
            if self._identity is not None and self._renewed_at <= since:
                self._identity = self._last = None
                self._renewed_at = time.monotonic()
            return self._renewed_at > since

    @property
    def advice(self) -> str:
        if self.anonymous:
            return "the mount is --anonymous; a private container needs credentials"
        return (
            "check AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
            "AZURE_STORAGE_SAS_TOKEN, or the identity's role Storage Blob Data Reader (Contributor, to write)"
        )

    def sign(self, method: str, url: str, headers: Mapping[str, str], proof: Proof) -> Signed:
        """The URL and headers that authorise a request, made from those of the request."""
        date = format_datetime(datetime.now(UTC), usegmt=True)
        headers = {**headers, "x-ms-date": date, "x-ms-version": API_VERSION}
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
                    # azure-identity's warnings say in twenty lines what the error below says in one.
                    logging.getLogger("azure.identity").setLevel(logging.ERROR)
                    self._identity = DefaultAzureCredential()
                token = self._identity.get_token(STORAGE_SCOPE)
                self._last = Proof(token=token.token, expires_at=token.expires_on)
            except (AzureError, ValueError) as exc:
                reason = one_line(str(exc))
                raise PermissionDenied(f"no Azure credentials: {self.advice} ({reason})") from exc
            return self._last


def _shared_key(account: str, key: str, method: str, url: str, headers: Mapping[str, str]) -> str:
    """The signature of a request, as in Azure's "Authorize with Shared Key". It does not cover the body."""
    parts = urlsplit(url)
    signed = {name: value for name, value in headers.items() if (name, value) != ("Content-Length", "0")}
    usual = "".join(f"{signed.get(name, '')}\n" for name in SIGNED_HEADERS)
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


@dataclass(frozen=True, slots=True)
class Container:
    """A container. `endpoint` is the URL of its account; an emulator's ends in the account's name."""

    container: str
    account: str
    endpoint: str
    credentials: AzureCredentials

    @property
    def label(self) -> str:
        return f"az://{self.account}/{self.container}"

    @property
    def source(self) -> str:
        usual = self.endpoint == f"https://{self.account}.blob.core.windows.net"
        return self.label if usual else f"{self.label}@{self.endpoint}"

    def url(self) -> str:
        return f"{self.endpoint}/{self.container}"

    def url_for_azure(self, key: str) -> str:
        """The URL of a blob for Azure itself to read, with the rights of the request that names it, or of a SAS in it."""
        sas = self.credentials.current().sas
        return f"{self.url()}/{quote(key)}" + (f"?{sas}" if sas else "")

    def sign(self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes) -> Signed:
        return self.credentials.sign(method, url, headers, self.credentials.current())

    def signer(self) -> Sign | None:
        proof = self.credentials.at_hand()
        if proof is None:
            return None
        return lambda method, url, headers, _: self.credentials.sign(method, url, headers, proof)


def container_of(authority: str, endpoint_url: str | None, anonymous: bool) -> Container:
    """The container of an authority: `container` or `container@account[.dfs.core.windows.net]`."""
    configured = settings()
    container, _, host = authority.partition("@")
    account = host.partition(".")[0] or configured.get("AccountName", "")
    if not account:
        raise ConfigError(
            f"which Azure account has the container {container!r}? Write "
            f"abfs://{container}@ACCOUNT.dfs.core.windows.net, or set AZURE_STORAGE_ACCOUNT_NAME or "
            "AZURE_STORAGE_CONNECTION_STRING"
        )
    suffix = configured.get("EndpointSuffix", "core.windows.net")
    if "." in host:
        suffix = host.partition(".")[2].removeprefix("dfs.").removeprefix("blob.")
    own = configured.get("BlobEndpoint") if configured.get("AccountName", account) == account else None
    endpoint = endpoint_url or own or f"https://{account}.blob.{suffix}"
    return Container(container, account, endpoint.rstrip("/"), AzureCredentials(account, anonymous))


class AzureClient(HttpClient, Writer):
    """Reads, lists and writes one container."""

    limits = LIMITS
    conditions = HONOURED

    def __init__(self, container: Container, stall_s: float) -> None:
        super().__init__(container, Transport(stall_s))
        self.writer = self
        self._container = container

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        parameters = {
            "restype": "container",
            "comp": "list",
            "delimiter": "/",
            "maxresults": str(limit),
            "prefix": prefix or None,
            "marker": token,
        }
        reply = self.ask(Request("GET", parameters=parameters, about=prefix))
        try:
            return parse_page(reply.body)
        except ValueError as exc:
            raise OriginFailed(f"{self.name(prefix)}: the listing is not Azure's XML: {exc}") from exc

    def put(self, key: str, body: Body, preconditions: Preconditions) -> Written:
        headers = {"x-ms-blob-type": "BlockBlob", **_stored_headers(preconditions)}
        with conflicts(preconditions):
            return written(self.ask(Request("PUT", key, headers=headers, body=body)))

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        condition = {} if etag is None else {"x-ms-source-if-match": etag}
        headers = {"x-ms-copy-source": self._container.url_for_azure(key), **condition}
        reply = self.ask(Request("PUT", to, headers=headers, slow=True, about=key))
        # Within an account a copy ends before its reply, so "pending" is not expected.
        if reply.headers.get("x-ms-copy-status") == "pending":
            raise Transient(f"{self.name(to)}: Azure is still copying")
        return written(reply)

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        info, headers = self.looked_up(key)
        return info, headers.get(TOKEN_HEADER, "")

    # Multipart uploads.

    def begin(self, key: str, preconditions: Preconditions) -> str:
        return preconditions.token

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        name = block_id(upload, number)
        self.ask(Request("PUT", key, {"comp": "block", "blockid": name}, body=body))
        return name

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        try:
            reply = self.ask(Request("GET", key, {"comp": "blocklist", "blocklisttype": "uncommitted"}))
        except NotFound:
            return {}  # neither a blob nor a block of one
        found = {}
        for node in self.document(reply, key).iter("Block"):
            name = node.findtext("Name", "")
            number = number_of(upload, name)
            if number is not None:
                found[number] = Part(name, int(node.findtext("Size", "0")))
        return found

    def complete(
        self, key: str, upload: str, parts: Mapping[int, str], preconditions: Preconditions
    ) -> Written:
        # Only uncommitted blocks: if an earlier attempt has succeeded, this one fails, and the token shows that.
        rows = "".join(f"<Uncommitted>{name}</Uncommitted>" for _, name in sorted(parts.items()))
        body = f'<?xml version="1.0" encoding="utf-8"?><BlockList>{rows}</BlockList>'.encode()
        headers = {**_stored_headers(preconditions), "Content-Type": "application/xml"}
        with conflicts(preconditions):
            request = Request("PUT", key, {"comp": "blocklist"}, headers, body, slow=True)
            return written(self.ask(request))

    def abort(self, key: str, upload: str) -> None:
        """Nothing to do: the blocks expire."""


def _stored_headers(preconditions: Preconditions) -> dict[str, str]:
    """The conditions of a write, and the headers that the origin stores with the blob."""
    headers = {"x-ms-blob-content-type": ANY_TYPE}
    if preconditions.token:
        headers[TOKEN_HEADER] = preconditions.token
    if preconditions.if_match is not None:
        headers["If-Match"] = preconditions.if_match
    if preconditions.if_absent:
        headers["If-None-Match"] = "*"
    return headers


def parse_page(body: bytes) -> ListPage:
    """The page in an EnumerationResults document. Raises `ValueError` if it is none."""
    page = xml(body)
    objects = []
    for blob in page.iter("Blob"):
        about = blob.find("Properties")
        if about is None:
            raise ValueError("a Blob without Properties")
        # With a hierarchical namespace, a directory is listed twice: as a prefix, and as an empty blob.
        if about.findtext("ResourceType") != "directory":
            size, modified = int(child(about, "Content-Length")), http_date_ns(child(about, "Last-Modified"))
            objects.append(ObjectInfo(_name(blob), size, modified, quoted(child(about, "Etag"))))
    prefixes = [_name(prefix) for prefix in page.iter("BlobPrefix")]
    if page.tag != "EnumerationResults":
        raise ValueError("no EnumerationResults in it")
    return ListPage(objects, prefixes, page.findtext("NextMarker") or None)


def _name(node: Element) -> str:
    """The name of a blob or prefix, decoded: Azure encodes names that XML cannot carry."""
    name = node.find("Name")
    if name is None:
        raise ValueError(f"a {node.tag} without a Name")
    return unquote(name.text or "") if name.get("Encoded") == "true" else name.text or ""


def block_id(upload: str, number: int) -> str:
    """The id of a part's block. All ids of a blob must have the same length."""
    return base64.b64encode(f"{upload}-{number:05d}".encode()).decode()


def number_of(upload: str, name: str) -> int | None:
    """The part number of the block `name`; None if the block belongs to another upload."""
    try:
        word, _, number = base64.b64decode(name).decode("ascii", "replace").rpartition("-")
    except binascii.Error:
        return None
    return int(number) if word == upload and number.isdecimal() else None
