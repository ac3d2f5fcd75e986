"""What is read out of replies, and what users are told of refusals."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import formatdate

import pytest

from cachefs.base.errors import PermissionDenied
from cachefs.origin.fsspec_client import in_our_words
from cachefs.origin.http import refusal
from cachefs.origin.s3 import parse_page

ENTRY = "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00Z</LastModified>{}<Size>1</Size></Contents>"


@pytest.mark.parametrize("last", [False, True], ids=["truncated first", "truncated last"])
def test_an_entry_of_a_listing_has_only_its_own_fields(last: bool) -> None:
    truncated = "<IsTruncated>true</IsTruncated><NextContinuationToken>n</NextContinuationToken>"
    entries = (
        ENTRY.format("a", '<ETag>"1"</ETag>')
        + "<CommonPrefixes><Prefix>d/</Prefix></CommonPrefixes>"
        + ENTRY.format("b", "")
    )
    inside = entries + truncated if last else truncated + entries
    page = parse_page(f"<ListBucketResult><Prefix>p</Prefix>{inside}</ListBucketResult>".encode())
    assert [(o.key, o.etag) for o in page.objects] == [("a", '"1"'), ("b", "")]
    assert page.prefixes == ["d/"] and page.next_token == "n"


def test_an_entry_without_a_size_is_no_listing() -> None:
    without = ENTRY.replace("<Size>1</Size>", "").format("b", "")
    with pytest.raises(ValueError, match="no Size in Contents"):
        parse_page(
            f"<ListBucketResult>{ENTRY.format('a', '')}{without}<IsTruncated>false</IsTruncated></ListBucketResult>".encode()
        )


@pytest.mark.parametrize(("off_s", "word"), [(900, "behind"), (-900, "ahead")])
def test_a_clock_that_is_off_is_said(off_s: int, word: str) -> None:
    then = time.time() + off_s
    iso = datetime.fromtimestamp(then, UTC).isoformat()
    body = f"<Error><Code>RequestTimeTooSkewed</Code><ServerTime>{iso}</ServerTime></Error>"
    for said in (
        refusal(403, body, what="s3://b/k"),
        refusal(403, what="s3://b/k", code="RequestTimeTooSkewed", date=formatdate(then, usegmt=True)),
        in_our_words(_Refused("RequestTimeTooSkewed", formatdate(then, usegmt=True)), "s3://b/k", "advice"),
    ):
        assert isinstance(said, PermissionDenied)
        assert any(f"clock of this machine is {n} s {word}" in str(said) for n in (899, 900, 901)), said
        assert "credentials" not in str(said)


@pytest.mark.parametrize("day", range(7))
def test_the_origins_time_is_read_on_any_day_of_the_week(day: int) -> None:
    said = str(
        refusal(
            403, what="s3://b/k", code="RequestTimeTooSkewed", date=formatdate(day * 86400.0, usegmt=True)
        )
    )
    assert " s ahead: set it" in said


def test_a_clock_that_is_off_is_said_without_the_origins() -> None:
    said = str(refusal(403, what="s3://b/k", code="RequestTimeTooSkewed", advice="renew the credentials"))
    assert said.endswith("; the clock of this machine is off: set it")


class _Refused(Exception):
    """As botocore raises it; without a message the library has None there."""

    def __init__(self, code: str, date: str) -> None:
        super().__init__("An error occurred")
        self.response = {
            "Error": {"Code": code, "Message": None},
            "ResponseMetadata": {"HTTPStatusCode": 403, "HTTPHeaders": {"date": date}},
        }


class _OfAzure(Exception):
    """As azure-core raises it."""

    status_code = 403
    message: object = None
    error_code = None


def test_no_message_says_none() -> None:
    odata = _OfAzure()
    odata.message = "(None) None\nCode: None"
    raised = (
        _Refused("AccessDenied", ""),
        _OfAzure(),
        odata,
        PermissionError(None),
        OSError("None"),
        TimeoutError(),
    )
    for exc in raised:
        said = str(in_our_words(exc, "s3://b/k", "advice"))
        assert "None" not in said and ": ;" not in said and not said.endswith(": "), said
