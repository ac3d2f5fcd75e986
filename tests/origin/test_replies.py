"""What is read out of replies, and what users are told of refusals."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import formatdate

import pytest

from cachefs.base.errors import (
    CachefsError,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
)
from cachefs.origin.fsspec_client import in_our_words
from cachefs.origin.http import Reply, refusal, xml
from cachefs.origin.protocol import ListPage, ObjectInfo, UnreadPage, of_endpoint
from cachefs.origin.s3 import AMAZON, AwsCredentials, Bucket, S3Client, next_token, parse_page

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


def test_an_encoding_that_is_not_known_is_no_listing() -> None:
    with pytest.raises(ValueError, match="unknown encoding"):
        parse_page(b'<?xml version="1.0" encoding="latin-99"?><ListBucketResult/>')
    with pytest.raises(ValueError, match="unknown encoding"):
        xml(b'<?xml version="1.0" encoding="latin-99"?><EnumerationResults/>')


NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


@pytest.mark.parametrize("outer", ["", NAMESPACE])
@pytest.mark.parametrize("inner", ["", ' xmlns=""', NAMESPACE])
def test_namespaces_of_a_listing_do_not_matter(outer: str, inner: str) -> None:
    entries = ENTRY.format("a+b%2Fc", "<ETag>&quot;1&quot;</ETag>") + ENTRY.format("d", "")
    said = f"<EncodingType>url</EncodingType><IsTruncated>false</IsTruncated>{entries}"
    said += "<CommonPrefixes><Prefix>e%2F</Prefix></CommonPrefixes>"
    for name in ("EncodingType", "IsTruncated", "Contents", "CommonPrefixes"):
        said = said.replace(f"<{name}>", f"<{name}{inner}>")
    page = parse_page(f"<ListBucketResult{outer}>{said}</ListBucketResult>".encode())
    assert [(o.key, o.etag, o.size, o.mtime_ns) for o in page.objects] == [
        ("a b/c", '"1"', 1, 1_767_225_600 * 10**9),
        ("d", "", 1, 1_767_225_600 * 10**9),
    ]
    assert page.prefixes == ["e/"] and page.next_token is None


@pytest.mark.parametrize(
    ("said", "token"),
    [
        ("<IsTruncated>true</IsTruncated><NextContinuationToken>n=/+</NextContinuationToken>", "n=/+"),
        ("<NextContinuationToken>n</NextContinuationToken><IsTruncated>true</IsTruncated>", "n"),
        ("<IsTruncated>false</IsTruncated><NextContinuationToken>n</NextContinuationToken>", None),
        ("<IsTruncated>true</IsTruncated>", None),
        ("<IsTruncated>true</IsTruncated><NextContinuationToken>a&amp;b</NextContinuationToken>", None),
        ("<IsTruncated>true</IsTruncated><NextContinuationToken></NextContinuationToken>", None),
        (
            "<IsTruncated>true</IsTruncated>"
            "<Contents><Key><![CDATA[<NextContinuationToken>x</NextContinuationToken>]]></Key></Contents>",
            None,
        ),
        ("<IsTruncated>true</IsTruncated>" + 2 * "<NextContinuationToken>n</NextContinuationToken>", None),
    ],
)
def test_the_token_is_found_before_a_page_is_read_or_not_at_all(said: str, token: str | None) -> None:
    assert next_token(f"<ListBucketResult>{said}</ListBucketResult>".encode()) == token


def test_an_unread_page_is_read_once_when_its_keys_are_asked_for() -> None:
    reads: list[str] = []
    objects = [ObjectInfo("a", 1, 0, "")]

    def read() -> ListPage:
        reads.append("")
        return ListPage(objects, ["d/"], "n")

    page = UnreadPage("n", read)
    assert page.unread and page.next_token == "n" and page.ordered and not reads
    assert (page.objects, page.prefixes) == (objects, ["d/"]) and len(reads) == 1
    assert not page.unread and not ListPage([], [], None).unread


@pytest.mark.parametrize(("count", "unread"), [(10, False), (1000, True)])
@pytest.mark.parametrize("whole", [True, False], ids=["", "cut short"])
def test_a_long_page_is_read_later(count: int, unread: bool, whole: bool) -> None:
    entries = "".join(ENTRY.format(f"k{number}", "") for number in range(count))
    said = f"<IsTruncated>true</IsTruncated><NextContinuationToken>n</NextContinuationToken>{entries}"
    body = f"<ListBucketResult>{said}{'</ListBucketResult>' if whole else ''}".encode()

    class Listing(S3Client):
        def exchange(self, request: object) -> Reply:
            return Reply(200, {}, body, "")

    bucket = Bucket("b", None, None, AwsCredentials(None, anonymous=True))
    listing = Listing(bucket, "b", AMAZON, of_endpoint(None), 1.0)
    if not whole and not unread:
        with pytest.raises(OriginFailed, match="s3://b/d/: the origin's listing is not S3's XML"):
            listing.list_page("d/", None, 1000)
        return
    page = listing.list_page("d/", None, 1000)
    assert page.unread is unread and page.next_token == "n"
    if whole:
        assert [info.key for info in page.objects] == [f"k{number}" for number in range(count)]
    else:
        with pytest.raises(OriginFailed, match="s3://b/d/: the origin's listing is not S3's XML"):
            assert page.objects


def test_a_page_that_names_two_tokens_is_no_listing() -> None:
    page = UnreadPage("n", lambda: ListPage([], [], "m"))
    for _ in range(2):
        with pytest.raises(OriginFailed, match="two places"):
            assert page.objects


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("PreconditionFailed", ObjectChanged),
        ("NoSuchKey", NotFound),
        ("AccessDenied", PermissionDenied),
        ("ServiceUnavailable", Throttled),
        ("SlowDown", Throttled),
        ("InternalError", Transient),
        ("InvalidPart", OriginFailed),
    ],
)
def test_an_error_in_a_successful_reply_is_the_one_that_its_status_would_be(
    code: str, error: type[CachefsError]
) -> None:
    """S3 begins to answer a copy or a completion with 200 before it has done it."""
    client = S3Client(
        Bucket("b", None, None, AwsCredentials(None, anonymous=True)), "b", AMAZON, of_endpoint(None), 1.0
    )
    body = f'<?xml version="1.0"?>\n  <Error><Code>{code}</Code><Message>it failed</Message></Error>'
    with pytest.raises(CachefsError, match=f"s3://b/k: .*({code}|changed)") as caught:
        client.document(Reply(200, {}, body.encode(), ""), "k")
    assert type(caught.value) is error


@pytest.mark.parametrize(("off_s", "word"), [(900, "behind"), (-900, "ahead")])
def test_a_clock_that_is_off_is_said(off_s: int, word: str) -> None:
    then = time.time() + off_s
    iso = datetime.fromtimestamp(then, UTC).isoformat()
    body = f"<Error><Code>RequestTimeTooSkewed</Code><ServerTime>{iso}</ServerTime></Error>"
    for said in (
        refusal(403, body, name="s3://b/k"),
        refusal(
            403, name="s3://b/k", code="RequestTimeTooSkewed", headers={"date": formatdate(then, usegmt=True)}
        ),
        in_our_words(_Refused("RequestTimeTooSkewed", formatdate(then, usegmt=True)), "s3://b/k", "advice"),
    ):
        assert isinstance(said, PermissionDenied)
        assert any(f"clock of this machine is {n} s {word}" in str(said) for n in (899, 900, 901)), said
        assert "credentials" not in str(said)


@pytest.mark.parametrize("day", range(7))
def test_the_origins_time_is_read_on_any_day_of_the_week(day: int) -> None:
    said = str(
        refusal(
            403,
            name="s3://b/k",
            code="RequestTimeTooSkewed",
            headers={"date": formatdate(day * 86400.0, usegmt=True)},
        )
    )
    assert " s ahead: set it" in said


def test_a_clock_that_is_off_is_said_without_the_origins() -> None:
    said = str(refusal(403, name="s3://b/k", code="RequestTimeTooSkewed", advice="renew the credentials"))
    assert said.endswith("; the clock of this machine is off: set it")


@pytest.mark.parametrize(("status", "code"), [(403, "InvalidObjectState"), (409, "BlobArchived")])
def test_an_archived_object_needs_no_other_credentials(status: int, code: str) -> None:
    said = refusal(status, name="s3://b/k", code=code, advice="renew the credentials")
    assert type(said) is OriginFailed
    assert (
        str(said)
        == f"s3://b/k: the origin answered {status} {code}; the object is archived: restore it first"
    )


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
