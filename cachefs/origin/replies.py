"""Translate a store's refusal into an error of ours: one table for every HTTP store and every library in front of it.

The message is one line that a user can act on. It is made of the status, the origin's error code and message, and never of
a URL (which may carry a signature) or a library's dump of several lines.
"""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from cachefs.base.errors import (
    CachefsError,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
    Unsupported,
)
from cachefs.origin.protocol import AskedToWait, CompletionInProgress

LONGEST_LINE = 300
NO_STORE = {
    "NoSuchBucket",
    "ContainerNotFound",
    "AccountNotFound",
    "InvalidBucketName",
    "InvalidResourceName",
}
BAD_CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "TokenRefreshRequired",
    "AuthorizationHeaderMalformed",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "AuthenticationFailed",
    "InvalidAuthenticationInfo",
}
CLOCK_IS_OFF = {"RequestTimeTooSkewed", "RequestExpired"}
BUSY = {"SlowDown", "ServerBusy", "TooManyRequests", "RequestLimitExceeded", "ThrottlingException"}
BROKEN = {
    "RequestTimeout",
    "InternalError",
    "OperationTimedOut",
    "IncompleteBody",
    # The body was damaged on its way.
    "BadDigest",
    "XAmzContentSHA256Mismatch",
    "Md5Mismatch",
    # Another request is writing to the key.
    "OperationAborted",
    "ConditionalRequestConflict",
    "PendingCopyOperation",
}
NO_UPLOAD = {"NoSuchUpload", "InvalidBlockList"}
OCCUPIED = {"BlobAlreadyExists"}


def refusal(
    status: int,
    body: str = "",
    *,
    what: str,
    code: str = "",
    message: str = "",
    advice: str = "check the credentials",
    retry_after: str | None = None,
    date: str | None = None,
) -> CachefsError:
    """The error for an HTTP reply that is not a success. `what` names the object; `advice` tells what to change when the
    store does not accept the credentials; `body` (XML, JSON, or a library's text with one of them in it) is searched for
    the code and message when they are not given. `date` is the reply's header, the origin's clock."""
    code = code or _tag("Code", body)
    message = message or _tag("Message", body)
    told = f"{status} {code}".strip() + (f" ({message})" if message else "")
    line = one_line(f"{what}: the origin answered {told}")
    if code in NO_STORE:
        return NotFound(
            one_line(f"{what}: no such bucket or container ({told}); check its name and the endpoint")
        )
    if code in NO_UPLOAD:
        return NoSuchUpload(line)
    if code in OCCUPIED:
        return ObjectChanged(f"{what}: there is such an object at the origin")
    if code in BUSY or status in (429, 503):
        seconds = _seconds(retry_after)
        return Throttled(line) if seconds is None else AskedToWait(line, seconds)
    if code == "InternalError" and "completion is already in progress" in message:
        return CompletionInProgress(line)
    if code in BROKEN or status in (408, 500, 502, 504):
        return Transient(line)
    if code in CLOCK_IS_OFF:
        return PermissionDenied(f"{line}; {_clock(date or _tag('ServerTime', body))}")
    # A HEAD's reply has no body. On S3, a 400 without one means an expired token or a wrong region.
    if code in BAD_CREDENTIALS or status in (401, 403) or (status == 400 and not code):
        return PermissionDenied(one_line(f"{line}; {advice}"))
    if status == 404:
        return NotFound(line)
    if status in (412, 416):
        return ObjectChanged(f"{what}: the object changed at the origin")
    if status in (301, 302, 307, 308):
        return OriginFailed(f"{line}: the origin lives elsewhere; set --region or --endpoint-url")
    if status in (405, 501):
        return Unsupported(line)
    return OriginFailed(line)


def one_line(text: str) -> str:
    """The first line of `text`, without signatures or secrets in URLs, cut to a readable length."""
    first = text.strip().partition("\n")[0]
    first = re.sub(r"(https?://)[^/\s@]*@", r"\1", first)
    first = re.sub(r"\?[^\s)]*=[^\s)]*", "", first)
    return first if len(first) <= LONGEST_LINE else first[: LONGEST_LINE - 1] + "…"


def _tag(name: str, body: str) -> str:
    found = re.search(rf"<{name}>\s*([^<]*?)\s*</{name}>", body) or re.search(
        rf'"{name.lower()}"\s*:\s*"([^"]*)"', body
    )
    return found.group(1).partition("\n")[0] if found else ""


def _clock(origin_time: str) -> str:
    """How far this machine's clock is off, by the origin's time (an HTTP or ISO date; "" where it is unknown)."""
    try:
        when = (
            datetime.fromisoformat(origin_time)
            if "T" in origin_time[:11]
            else parsedate_to_datetime(origin_time)
        )
    except ValueError:
        return "the clock of this machine is off: set it"
    off_s = time.time() - (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()
    return f"the clock of this machine is {abs(off_s):.0f} s {'ahead' if off_s > 0 else 'behind'}: set it"


def _seconds(retry_after: str | None) -> float | None:
    try:
        return float(retry_after) if retry_after else None
    except ValueError:
        return None  # an HTTP date: the backoff serves as well
