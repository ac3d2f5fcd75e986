"""One request and its reply, with everything that the lab does to them.

A handler decides on the reply. The `Exchange` counts it, delays it by the latency, applies the fault rule that matches, and
sends it no faster than the bandwidth allows.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from bench.lab.faults import Action, Rule, Script
from bench.lab.ledger import Ledger
from bench.lab.objects import BytesBody, OpenBody, Warehouse
from bench.lab.shaping import Pipe
from bench.lab.wire import Connection, Request, unchunk

_ACCESS_KEY = re.compile(r"Credential=([^/,\s]+)|^AWS ([^:\s]+):")

_STATUS = {
    "AccessDenied": 403,
    "ExpiredToken": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "MalformedXML": 400,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NotImplemented": 501,
    "NotModified": 304,
    "PreconditionFailed": 412,
    "SlowDown": 503,
    "TooManyRequests": 429,
    "XAmzContentSHA256Mismatch": 400,
}

_BY_STATUS = {
    Action.SLOW_DOWN: "SlowDown",
    Action.TOO_MANY: "TooManyRequests",
    Action.INTERNAL: "InternalError",
    Action.DENIED: "AccessDenied",
}
_WITHIN_BODY = {Action.TRUNCATE, Action.HANG_BODY, Action.CHANGE}


class S3Error(Exception):
    """An error reply of S3."""

    def __init__(self, code: str, message: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(message or code)
        self.code = code
        self.status = _STATUS[code]
        self.headers = headers or {}


class Hangup(Exception):
    """The connection ends here."""


@dataclass
class Credentials:
    """Access rights, by access key id. The lab does not check signatures."""

    allowed: frozenset[str] | None = None
    expired: frozenset[str] = frozenset()
    denied: tuple[str, ...] = ()

    def check(self, authorization: str, key: str) -> None:
        found = _ACCESS_KEY.search(authorization)
        access_key = (found[1] or found[2]) if found else None
        if access_key in self.expired:
            raise S3Error("ExpiredToken", "The provided token has expired.")
        if self.allowed is not None and access_key not in self.allowed:
            raise S3Error("InvalidAccessKeyId" if access_key else "AccessDenied")
        if key.startswith(self.denied):
            raise S3Error("AccessDenied")


class Quirk(StrEnum):
    """Deviations of stores from what AWS documents. They hold for all requests."""

    COPY = (
        "copies-whatever-the-condition"  # x-amz-copy-source-if-match means nothing, of objects and of parts
    )
    PUT = "puts-whatever-the-condition"  # If-Match and If-None-Match of a PUT mean nothing
    COMPLETE = "completes-whatever-the-condition"  # nor do those of CompleteMultipartUpload
    BARE_ETAGS = "etags-without-quotes"  # If-Match of a PUT holds only for an etag without them
    GONE = (
        "gone-uploads-in-other-words"  # list_parts says NoSuchKey, complete_upload 500 "already in progress"
    )
    NO_ETAG = "completes-without-an-etag"  # the reply to CompleteMultipartUpload has an empty one


CEPH = frozenset({Quirk.COPY, Quirk.COMPLETE, Quirk.BARE_ETAGS, Quirk.GONE, Quirk.NO_ETAG})
"""Observed with Ceph's RADOS Gateway 16.2.15."""


@dataclass
class Lab:
    """The state of the store."""

    warehouse: Warehouse
    latency: float = 0
    down: Pipe = field(default_factory=Pipe)
    up: Pipe = field(default_factory=Pipe)
    ledger: Ledger = field(default_factory=Ledger)
    script: Script = field(default_factory=Script)
    credentials: Credentials = field(default_factory=Credentials)
    quirks: frozenset[Quirk] = frozenset()

    def shape(self, latency: float | None = None, bandwidth: float | None = None) -> None:
        """Change the given parts. Both directions get the same rate, as on a full-duplex link."""
        if latency is not None:
            self.latency = latency
        if bandwidth is not None:
            self.down.rate = self.up.rate = bandwidth


class Exchange:
    def __init__(self, lab: Lab, conn: Connection, request: Request, kind: str) -> None:
        self.lab = lab
        self.request = request
        self.kind = kind
        self.subject = request.key or request.query.get("prefix", "")
        """What key globs and denied prefixes are matched with: the key, or the prefix of a listing."""
        self._conn = conn
        self._entry = lab.ledger.begin(kind, request.bucket, self.subject, request.header("range"))
        self._in_flight = True
        self._rule = lab.script.pick(kind, self.subject)

    @property
    def lies(self) -> bool:
        """Whether a rule wants other bytes in this reply."""
        return self._rule is not None and self._rule.action is Action.LIE

    def admit(self) -> None:
        """Admit the request, or carry out a rule, or refuse its credentials."""
        rule = self._rule
        if rule is not None:
            if rule.action in _BY_STATUS:
                headers = {} if rule.seconds is None else {"Retry-After": f"{rule.seconds:g}"}
                raise S3Error(_BY_STATUS[rule.action], headers=headers)
            if rule.action is Action.HANG:
                self._wait(rule)
            elif rule.action is Action.GARBAGE:
                self._conn.send(b"\x15\x03\x01\x00\x02 this is not HTTP\r\n\r\n")
                raise Hangup
            elif rule.action is Action.RESET and rule.after is None:
                self._conn.reset()
                raise Hangup
        self.lab.credentials.check(self.request.header("authorization"), self.subject)

    def payload(self) -> Iterator[bytes]:
        """The uploaded bytes."""
        signed = self.request.header("x-amz-content-sha256").startswith("STREAMING-")
        chunked = signed or "aws-chunked" in self.request.header("content-encoding")
        pieces = self._conn.body()
        said = self.request.header("x-amz-content-sha256")
        digest = hashlib.sha256() if len(said) == 64 else None
        for piece in unchunk(pieces) if chunked else pieces:
            self.lab.ledger.received(self.kind, len(piece))
            self.lab.up.take(len(piece))
            if digest is not None:
                digest.update(piece)
            yield piece
        if digest is not None and digest.hexdigest() != said:
            raise S3Error("XAmzContentSHA256Mismatch")

    def reply(self, status: int, headers: dict[str, str], data: bytes = b"") -> None:
        self.reply_range(status, headers, BytesBody(data), 0, len(data))

    def reply_range(
        self, status: int, headers: dict[str, str], body: OpenBody, start: int, stop: int
    ) -> None:
        """Reply with the bytes [start, stop) of `body`; to a HEAD, with their number alone."""
        conn, length = self._conn, stop - start
        conn.skip_body()
        if self._rule is not None and self._rule.action is Action.LOSE:
            conn.reset()
            raise Hangup
        if status not in (204, 304):
            headers = {**headers, "Content-Length": str(length)}
        time.sleep(self.lab.latency)
        self.lab.ledger.answer(self._entry, status)
        head = conn.head(status, headers)
        if self.request.method == "HEAD" or not length:
            self.finish()
            conn.send(head)
        else:
            conn.send(head, more=self._rule is None)
            self._send_body(body, start, stop)

    def _send_body(self, body: OpenBody, start: int, stop: int) -> None:
        lab, rule = self.lab, self._rule
        own = Pipe(rule.rate if rule is not None and rule.action is Action.SLOW else 0)
        cut = None
        if rule is not None and (rule.action in _WITHIN_BODY or rule.action is Action.RESET):
            cut = start + min(rule.after or 0, stop - start - 1)
        while start < stop:
            if rule is not None and start == cut:
                self._strike(rule)
                cut = None
            count = min((stop if cut is None else cut) - start, lab.down.quantum, own.quantum)
            lab.down.take(count)
            own.take(count)
            if start + count == stop:
                self.finish()
            lab.ledger.sent(self.kind, count)
            body.send(self._conn.sock, start, count)
            start += count

    def _strike(self, rule: Rule) -> None:
        """Carry out a rule in the middle of a body."""
        if rule.action is Action.CHANGE:
            self.lab.warehouse.change(self.request.bucket, self.request.key)
        elif rule.action is Action.HANG_BODY:
            self._wait(rule)
        else:
            if rule.action is Action.RESET:
                self._conn.reset()
            raise Hangup

    def _wait(self, rule: Rule) -> None:
        """Hang until the time is over, the rule is cleared, or the client has left."""
        deadline = time.monotonic() + rule.wait
        while time.monotonic() < deadline and not rule.cleared.wait(0.02):
            if self._conn.gone():
                raise Hangup

    def finish(self) -> None:
        """Note that the request is no longer in flight."""
        if self._in_flight:
            self._in_flight = False
            self.lab.ledger.end()
