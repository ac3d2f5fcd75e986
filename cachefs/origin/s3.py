"""Amazon S3 and stores that speak it: credentials, where a bucket is, listing, writing, and the client.

Google's XML interface has the same listings and multipart uploads; `Dialect` names the differences. Google's writes are
conditional on a number, the generation, and not on the etag: the generation of an etag is looked up first.

Credentials come from botocore's own chain. Only botocore's session is used; its S3 client would cost 15 MB, and 44 ms of
CPU a LIST page (measured; 3 ms here)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any
from urllib.parse import quote, unquote_plus
from xml.etree.ElementTree import Element, ParseError, fromstring, tostring
from xml.sax.saxutils import escape

from cachefs.base.errors import (
    CachefsError,
    ConfigError,
    Conflict,
    NoSuchUpload,
    NotFound,
    OriginFailed,
    PermissionDenied,
    Transient,
)
from cachefs.base.tasks import in_thread
from cachefs.origin.http import (
    ANY_TYPE,
    HttpClient,
    Place,
    Reply,
    Request,
    Sign,
    Signed,
    Transport,
    child,
    one_line,
    quoted,
    seconds_ns,
    written,
    xml,
)
from cachefs.origin.protocol import (
    GIB,
    MIB,
    TIB,
    Body,
    Conditions,
    Limits,
    ListPage,
    ObjectInfo,
    Part,
    Preconditions,
    UnreadPage,
    Writer,
    Written,
    conflicts,
    of_an_upload,
    of_endpoint,
)

LIMITS = Limits(5 * GIB, 5 * MIB, 5 * GIB, 10_000, 5 * TIB, batch=1000)
"""As documented for AWS, where an object may be larger by now; other S3 stores kept to this. Keys have 1,024 bytes."""

UNREAD_BYTES = 32 << 10
"""Bytes of a listing page from which on it is parsed only after the next page was requested, by another call in a worker
thread. Derived: that call takes 0.1 ms, and parsing so many bytes 0.6 ms."""


WHERE = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the AWS config file",
    "iam-role": "the instance's role",
    "container-role": "the container's role",
}

NO_BODY = hashlib.sha256(b"").hexdigest()

UNSEEN = object()
"""Credentials were not looked for yet. None means that there are none."""


class AwsCredentials:
    """Credentials of one mount. Thread-safe."""

    def __init__(self, profile: str | None, anonymous: bool) -> None:
        self.anonymous = anonymous
        self._profile = profile
        self._lock = threading.Lock()
        self._session: Any = None
        self._found: Any = None
        self._last: Any = UNSEEN
        self._changed_at = self._read_at = float("-inf")
        if profile is not None and not anonymous and profile not in self.session().available_profiles:
            known = ", ".join(self.session().available_profiles) or "none"
            raise ConfigError(f"no AWS profile {profile!r}; the config files have: {known}")

    def session(self) -> Any:
        """The botocore session, which has read the config files."""
        import botocore.session

        session = self._session
        if session is None:
            session = self._session = botocore.session.Session(profile=self._profile)
        return session

    def setting(self, name: str) -> str | None:
        """A setting of the profile, such as `region` or `endpoint_url`."""
        from botocore.exceptions import BotoCoreError

        try:
            value = self.session().get_scoped_config().get(name)
        except BotoCoreError:  # the environment names an unknown profile: `current` reports it
            return None
        return value if isinstance(value, str) else None

    def current(self) -> Any:
        """Frozen credentials (access_key, secret_key, token) as they are now; None when anonymous."""
        if self.anonymous:
            return None
        with self._lock:
            return self._look()

    def at_hand(self) -> Any:
        """The credentials, if getting them waits for neither files nor services; else None."""
        found, last = self._found, self._last
        # Credentials of botocore that expire can tell whether they must be refreshed.
        if found is None or last is UNSEEN or (hasattr(found, "refresh_needed") and found.refresh_needed()):
            return None
        return last

    def renew(self, since: float) -> bool:
        """Read environment and files again, unless the credentials have changed after `since`, or another request has read
        them after this caller's was refused. True if the credentials in use now differ from those at `since`."""
        if self.anonymous:
            return False
        refused_at = time.monotonic()
        with self._lock:
            if self._changed_at <= since and self._read_at < refused_at:
                self._read_at = time.monotonic()
                self._session = self._found = None
                try:
                    self._look()
                except PermissionDenied:
                    return False
            return self._changed_at > since

    def _look(self) -> Any:
        frozen = None
        try:
            if self._found is None:
                self._found = self.session().get_credentials()
            frozen = self._found and self._found.get_frozen_credentials()
        except Exception as exc:  # botocore passes on what files, services and programs raise
            raise PermissionDenied(one_line(f"AWS credentials cannot be had: {exc}")) from exc
        finally:
            if frozen != self._last:
                if self._last is not UNSEEN:  # finding the first credentials is no change
                    self._changed_at = time.monotonic()
                self._last = frozen
        if frozen is None:
            raise PermissionDenied(
                "no AWS credentials found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a --profile, "
                "or use --anonymous for a public bucket"
            )
        return frozen

    @property
    def advice(self) -> str:
        """What to change when the origin refuses these credentials."""
        if self.anonymous:
            return "the mount is --anonymous; a private bucket needs credentials"
        rights = "s3:ListBucket and s3:GetObject (to write, s3:PutObject and s3:DeleteObject)"
        method = getattr(self._found, "method", None)
        if method is None:
            return f"renew the credentials, or grant them {rights}"
        where = WHERE.get(str(method), str(method))
        if method in ("shared-credentials-file", "config-file"):
            where += f" (profile {self._profile or os.environ.get('AWS_PROFILE', 'default')})"
        return f"credentials came from {where}: renew them, or grant them {rights}"


class Bucket:
    """A bucket: name, endpoint, region, signatures. Without an endpoint it is on AWS, whose replies may name its region."""

    def __init__(
        self,
        name: str,
        endpoint_url: str | None,
        region: str | None,
        credentials: AwsCredentials,
        *,
        requester_pays: bool = False,
        sse_kms_key: str | None = None,
    ) -> None:
        self.name = name
        self.label = f"s3://{name}"
        self._always = {"x-amz-request-payer": "requester"} if requester_pays else {}
        self._for_new = {}
        if sse_kms_key:
            self._for_new["x-amz-server-side-encryption"] = "aws:kms"
            self._for_new["x-amz-server-side-encryption-aws-kms-key-id"] = sse_kms_key
        self.credentials = credentials
        environ = os.environ.get
        self.endpoint_url = (
            endpoint_url
            or environ("AWS_ENDPOINT_URL_S3")
            or environ("AWS_ENDPOINT_URL")
            or credentials.setting("endpoint_url")
        )
        self.region = (
            region or environ("AWS_REGION") or environ("AWS_DEFAULT_REGION") or credentials.setting("region")
        ) or "us-east-1"
        # A dot in a bucket's name breaks the wildcard certificate of virtual hosts, so such a name goes into the path.
        self.virtual_host = not self.endpoint_url and "." not in name

    @property
    def source(self) -> str:
        return self.label + (f"@{self.endpoint_url.rstrip('/')}" if self.endpoint_url else "")

    def url(self) -> str:
        if self.endpoint_url:
            return f"{self.endpoint_url.rstrip('/')}/{self.name}"
        domain = "amazonaws.com.cn" if self.region.startswith("cn-") else "amazonaws.com"
        if self.virtual_host:
            return f"https://{self.name}.s3.{self.region}.{domain}"
        return f"https://s3.{self.region}.{domain}/{self.name}"

    def moved(self, reply: Reply) -> bool:
        """Take the region that a reply names (301, 307 and 400 do that, on AWS). True if it is another one."""
        region = reply.headers.get("x-amz-bucket-region")
        if not region or region == self.region or self.endpoint_url:
            return False
        self.region = region
        return True

    def sign(self, method: str, url: str, headers: Mapping[str, str], body: Body | bytes) -> Signed:
        """As `Place.sign`. Without TLS, a body from a source is read for a digest, which the origin compares."""
        return self._signed(self.credentials.current(), method, url, headers, body)

    def signer(self) -> Sign | None:
        credentials = self.credentials.at_hand()
        if credentials is None and not self.credentials.anonymous:
            return None
        return partial(self._signed, credentials)

    def _signed(
        self, credentials: Any, method: str, url: str, headers: Mapping[str, str], body: Body | bytes
    ) -> Signed:
        # S3 takes the headers of encryption in requests that begin an object, and refuses them for parts and completions.
        query = url.partition("?")[2]
        begins = (method == "PUT" and "uploadId" not in query) or (
            method == "POST" and query.startswith("uploads")
        )
        headers = {**headers, **self._always, **(self._for_new if begins else {})}
        if credentials is None:
            return url, headers
        if isinstance(body, bytes):
            payload = hashlib.sha256(body).hexdigest() if body else NO_BODY
        elif url.startswith("https:"):
            payload = "UNSIGNED-PAYLOAD"
        else:
            digest = hashlib.sha256()
            for piece in body.look():
                digest.update(piece)
            payload = digest.hexdigest()
        return url, signed_v4(method, url, headers, payload, credentials, self.region)


def signed_v4(
    method: str,
    url: str,
    headers: Mapping[str, str],
    payload: str,
    credentials: Any,
    region: str,
    now: float | None = None,
) -> dict[str, str]:
    """`headers` with those added that authorise the request, by AWS Signature Version 4 for S3. `url` has its path
    percent-encoded and its query in canonical form; `payload` is the SHA-256 of the body in hex. botocore's signer takes
    several times as long: it parses the URL again and derives the key again for each request."""
    scheme, _, rest = url.partition("://")
    address, parameters = rest.partition("?")[::2]
    host, _, path = address.partition("/")
    time_of_day = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    given = {
        **headers,
        "Host": host.removesuffix({"http": ":80", "https": ":443"}[scheme]),
        "X-Amz-Content-SHA256": payload,
        "X-Amz-Date": time_of_day,
    }
    if credentials.token:
        given["X-Amz-Security-Token"] = credentials.token
    canonical = sorted([(name.lower(), " ".join(value.split())) for name, value in given.items()])
    names = ";".join([name for name, _ in canonical])
    lines = "".join([f"{name}:{value}\n" for name, value in canonical])
    request = f"{method}\n/{path}\n{parameters}\n{lines}\n{names}\n{payload}"
    scope = f"{time_of_day[:8]}/{region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{time_of_day}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    signature = _key_of_the_day(credentials.secret_key, time_of_day[:8], region).copy()
    signature.update(text.encode())
    credential, proof = f"{credentials.access_key}/{scope}", signature.hexdigest()
    given["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={proof}"
    )
    return given


@lru_cache(maxsize=8)
def _key_of_the_day(secret: str, day: str, region: str) -> hmac.HMAC:
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.new(key, digestmod="sha256")


@dataclass(frozen=True, slots=True)
class Dialect:
    """The differences between S3 and Google. `vendor` is the prefix of the vendor's own headers; `generations`: conditions
    are on generations, not on etags."""

    vendor: str
    generations: bool
    limits: Limits


AMAZON = Dialect("x-amz-", False, LIMITS)


class S3Client(HttpClient, Writer):
    """Reads, lists and writes one bucket."""

    def __init__(
        self, place: Place, name: str, dialect: Dialect, conditions: Conditions, stall_s: float
    ) -> None:
        super().__init__(place, Transport(stall_s))
        self.writer = self
        self.limits, self.conditions = dialect.limits, conditions
        self._bucket, self._dialect = name, dialect
        self._token_header = f"{dialect.vendor}meta-cachefs-stamp"

    def list_page(self, prefix: str, token: str | None, limit: int) -> ListPage:
        request = _listing(prefix, token, limit)
        reply = self.exchange(request)
        if self._moved(reply):
            reply = self.exchange(request)
        return self._page(request, reply)

    async def list_without_thread(self, prefix: str, token: str | None, limit: int) -> ListPage | None:
        """As `list_page`, on the trio thread. None if `list_page` must ask: nothing was sent, or the bucket has moved."""
        request = _listing(prefix, token, limit)
        reply = await self.exchange_without_thread(request)
        if reply is None or self._moved(reply):
            return None
        if len(reply.body) < UNREAD_BYTES or next_token(reply.body) is not None:
            return self._page(request, reply)
        try:
            return await in_thread(partial(self._page, request, reply))
        except OSError as exc:
            raise Transient(f"{self.place.label}: {exc.strerror}") from exc

    def _moved(self, reply: Reply) -> bool:
        """True if the reply has told another region of the bucket, so the request must be repeated."""
        return reply.status != 200 and isinstance(self.place, Bucket) and self.place.moved(reply)

    def _page(self, request: Request, reply: Reply) -> ListPage:
        self.checked(request, reply)

        def read() -> ListPage:
            try:
                return parse_page(reply.body)
            except ValueError as exc:
                raise OriginFailed(
                    f"{self.name(request.about or '')}: the origin's listing is not S3's XML: {exc}"
                ) from exc

        following = next_token(reply.body) if len(reply.body) >= UNREAD_BYTES else None
        return read() if following is None else UnreadPage(following, read)

    def put(self, key: str, body: Body, preconditions: Preconditions) -> Written:
        with conflicts(preconditions):
            return written(self.ask(self._put(key, body, preconditions)))

    async def put_without_thread(self, key: str, body: Body, preconditions: Preconditions) -> Written | None:
        if not isinstance(self.place, Bucket):
            return None
        with conflicts(preconditions):
            reply = await self.ask_without_thread(self._put(key, body, preconditions))
            return None if reply is None else written(reply)

    def _put(self, key: str, body: Body, preconditions: Preconditions) -> Request:
        headers = {**self._stored_headers(preconditions), **self._conditions(key, preconditions)}
        return Request("PUT", key, headers=headers, body=body)

    def copy(self, key: str, to: str, etag: str | None) -> Written:
        reply = self.ask(Request("PUT", to, headers=self._source(key, etag), slow=True, about=key))
        return Written(_etag(self.document(reply, key)))

    async def delete_without_thread(self, key: str) -> bool | None:
        if not isinstance(self.place, Bucket):
            return None
        with suppress(NotFound):
            return True if await self.ask_without_thread(Request("DELETE", key)) else None
        return True

    def delete_many(self, keys: Sequence[str]) -> dict[str, CachefsError]:
        named = [key for key in keys if plain(key)]
        left: dict[str, CachefsError] = {}
        for key in set(keys).difference(named):
            try:
                self.delete(key)
            except CachefsError as exc:
                left[key] = exc
        if not named:
            return left
        objects = "".join(f"<Object><Key>{escape(key)}</Key></Object>" for key in named)
        body = f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = {"Content-MD5": digest, "Content-Type": "application/xml"}
        reply = self.ask(Request("POST", "", {"delete": ""}, headers, body))
        for node in self.document(reply, "").iter("Error"):
            key, code = node.findtext("Key", ""), node.findtext("Code", "")
            if code != "NoSuchKey":
                left[key] = self.refusal(reply.status, {}, tostring(node), self.name(key))
        return left

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        info, headers = self.looked_up(key)
        return info, headers.get(self._token_header, "")

    # Multipart uploads.

    def begin(self, key: str, preconditions: Preconditions) -> str:
        reply = self.ask(Request("POST", key, {"uploads": ""}, self._stored_headers(preconditions)))
        name = self.document(reply, key).findtext("UploadId")
        if not name:
            raise OriginFailed(f"{self.name(key)}: the origin's new upload has no id")
        return name

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        parameters = {"uploadId": upload, "partNumber": str(number)}
        with of_an_upload():
            reply = self.ask(Request("PUT", key, parameters, body=body))
        return quoted(reply.headers.get("etag", ""))

    def copy_part(
        self, key: str, upload: str, number: int, source: str, etag: str, start: int, stop: int
    ) -> str:
        headers = {
            **self._source(source, etag),
            f"{self._dialect.vendor}copy-source-range": f"bytes={start}-{stop - 1}",
        }
        parameters = {"uploadId": upload, "partNumber": str(number)}
        reply = self.ask(Request("PUT", key, parameters, headers, slow=True, about=source))
        return _etag(self.document(reply, key))

    def parts(self, key: str, upload: str) -> dict[int, Part]:
        found: dict[int, Part] = {}
        marker: str | None = None
        while True:
            with of_an_upload():
                reply = self.ask(Request("GET", key, {"uploadId": upload, "part-number-marker": marker}))
            page = self.document(reply, key)
            for node in page.iter("Part"):
                part = Part(_etag(node), int(node.findtext("Size", "0")))
                found[int(node.findtext("PartNumber", "0"))] = part
            following = page.findtext("NextPartNumberMarker")
            if page.findtext("IsTruncated") != "true" or following == marker:
                return found
            marker = following

    def complete(
        self, key: str, upload: str, parts: Mapping[int, str], preconditions: Preconditions
    ) -> Written:
        rows = "".join(
            f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag></Part>"
            for number, etag in sorted(parts.items())
        )
        body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
        with of_an_upload(), conflicts(preconditions):
            headers = {"Content-Type": "application/xml", **self._conditions(key, preconditions)}
            reply = self.ask(Request("POST", key, {"uploadId": upload}, headers, body, slow=True))
            return Written(_etag(self.document(reply, key)))

    def abort(self, key: str, upload: str) -> None:
        with suppress(NoSuchUpload), of_an_upload():
            self.ask(Request("DELETE", key, {"uploadId": upload}))

    # Headers.

    def _stored_headers(self, preconditions: Preconditions) -> dict[str, str]:
        """Headers that the origin stores with the object."""
        token = {self._token_header: preconditions.token} if preconditions.token else {}
        return {"Content-Type": ANY_TYPE, **token}

    def _conditions(self, key: str, preconditions: Preconditions) -> dict[str, str]:
        wanted = preconditions.if_match
        if not self._dialect.generations:
            match = {} if wanted is None else {"If-Match": self.conditions.as_sent(wanted)}
            return match | ({"If-None-Match": "*"} if preconditions.if_absent else {})
        if wanted is not None:
            info, headers = self.looked_up(key)
            if info.etag != wanted:
                raise Conflict(f"{self.name(key)}: the object changed at the origin; nothing was written")
            return {"x-goog-if-generation-match": headers.get("x-goog-generation", "")}
        return {"x-goog-if-generation-match": "0"} if preconditions.if_absent else {}

    def _source(self, key: str, etag: str | None) -> dict[str, str]:
        """Headers that name the object to copy, and the version it must have."""
        name = f"{self._dialect.vendor}copy-source"
        condition = {} if etag is None else {f"{name}-if-match": etag}
        return {name: f"/{self._bucket}/{quote(key)}", **condition}


_TRUNCATED, _TOKEN = b"<IsTruncated>true<", re.compile(rb"<NextContinuationToken>([^<&]+)<")


def _listing(prefix: str, token: str | None, limit: int) -> Request:
    parameters = {
        "list-type": "2",
        "delimiter": "/",
        "encoding-type": "url",  # or control characters in keys would make the XML invalid
        "max-keys": str(limit),
        "prefix": prefix,
        "continuation-token": token,
    }
    return Request("GET", parameters=parameters, about=prefix)


def next_token(body: bytes) -> str | None:
    """The token of a truncated page, found without parsing the page; None if the page must be parsed. No key can look like
    the token's tag, because a "<" in a key is escaped."""
    found = _TOKEN.findall(body)
    return found[0].decode() if len(found) == 1 and _TRUNCATED in body and b"<![CDATA[" not in body else None


def parse_page(body: bytes) -> ListPage:
    """The page in a ListBucketResult document. Raises `ValueError` if it is none."""
    try:
        page = fromstring(body)
    except (ParseError, LookupError) as exc:  # LookupError: an encoding that Python does not know
        raise ValueError(str(exc)) from exc
    # The namespace, in braces. Removing it from each node would take a third of the time.
    space = page.tag[: page.tag.find("}") + 1]
    if page.find(f"{space}IsTruncated") is None:
        page, space = xml(body), ""
    truncated = child(page, f"{space}IsTruncated") == "true"
    encoded = page.findtext(f"{space}EncodingType") == "url"
    tags = [f"{space}{name}" for name in ("Key", "Size", "LastModified", "ETag")]
    objects = [_listed(node, encoded, *tags) for node in page.iterfind(f"{space}Contents")]
    prefixes = [child(node, f"{space}Prefix") for node in page.iterfind(f"{space}CommonPrefixes")]
    if encoded:
        prefixes = [unquote_plus(prefix) for prefix in prefixes]
    following = child(page, f"{space}NextContinuationToken") if truncated else None
    return ListPage(objects, prefixes, following)


def _listed(node: Element, encoded: bool, key: str, size: str, modified: str, etag: str) -> ObjectInfo:
    name, length, time = node.findtext(key), node.findtext(size), node.findtext(modified)
    if name is None or length is None or time is None:
        raise ValueError(
            f"no {'Key' if name is None else 'Size' if length is None else 'LastModified'} in Contents"
        )
    if encoded:
        name = unquote_plus(name)
    return ObjectInfo(
        name, int(length), seconds_ns(datetime.fromisoformat(time)), quoted(node.findtext(etag, ""))
    )


def plain(key: str) -> bool:
    """True if XML can represent the key."""
    return not re.search("[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]", key)


def _etag(node: Element) -> str:
    return quoted(node.findtext("ETag", "").strip())


def s3_client(bucket: Bucket, stall_s: float) -> S3Client:
    return S3Client(bucket, bucket.name, AMAZON, of_endpoint(bucket.endpoint_url), stall_s)
