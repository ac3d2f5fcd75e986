"""Which conditions of writes a store honours: a pure record, for the lifetime of a mount.

Stores that speak S3 differ here. A store that ignores a condition answers as if the condition had held, so its success
proves nothing. Seen on Ceph's RADOS Gateway 16.2: both kinds of copy ignore `x-amz-copy-source-if-match`, completing an
upload ignores `If-Match` and `If-None-Match`, and a PUT takes an etag in `If-Match` only without its quotes.

`cachefs.origin.probing` finds out by requests that must fail; `cachefs.origin.outcomes` compares the objects itself where a
condition is not honoured.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Condition(StrEnum):
    """A condition, and the request that carries it."""

    COPY = "copy-source-if-match on CopyObject"
    COPY_PART = "copy-source-if-match on UploadPartCopy"
    PUT_MATCH = "If-Match on PutObject"
    PUT_ABSENT = "If-None-Match on PutObject"
    COMPLETE_MATCH = "If-Match on CompleteMultipartUpload"
    COMPLETE_ABSENT = "If-None-Match on CompleteMultipartUpload"


@dataclass(slots=True)
class Conditions:
    """What one origin does with each condition. `trusted`: the vendor documents that it honours all of them, so none is
    probed. `bare_etags`: its `If-Match` takes etags without quotes."""

    trusted: bool = False
    bare_etags: bool = False
    _seen: dict[Condition, bool] = field(default_factory=dict)

    def honours(self, condition: Condition) -> bool | None:
        """None while the condition has not been probed."""
        return True if self.trusted else self._seen.get(condition)

    def saw(self, condition: Condition, honoured: bool) -> None:
        """Record the result of a probe."""
        self._seen[condition] = honoured

    def ignored(self) -> list[str]:
        """Names of the conditions that the origin does not honour."""
        return [condition.value for condition, honoured in self._seen.items() if not honoured]

    def as_sent(self, etag: str) -> str:
        """The etag in the form that this origin's `If-Match` takes."""
        return etag.strip('"') if self.bare_etags else etag


HONOURED = Conditions(trusted=True)
"""Of AWS, Google, Azure and a directory of this machine."""


def of_endpoint(endpoint_url: str | None) -> Conditions:
    """Of an S3 endpoint: AWS documents all conditions, any other endpoint is probed."""
    host = (endpoint_url or "").partition("://")[2].partition("/")[0].partition(":")[0].lower()
    amazon = host.endswith((".amazonaws.com", ".amazonaws.com.cn"))
    return HONOURED if endpoint_url is None or amazon else Conditions()
