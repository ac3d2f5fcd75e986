"""The lab store against clients that know S3, and against a raw socket where a client would hide what happened."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import quote

import botocore.config
import botocore.exceptions
import botocore.session
import obstore
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import S3Store

from bench.lab import listing
from bench.lab.client import LabError, LabStore
from bench.lab.dataset import content, make_image_folder, make_shards
from bench.lab.shaping import Pipe
from tests.conftest import examples


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabStore]:
    with LabStore(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture
def lab(module_lab: LabStore) -> LabStore:
    """The module's store as if new, but for what is in other tests' buckets."""
    module_lab.clear_faults()
    module_lab.credentials()
    module_lab.shape(latency_ms=0, bandwidth=0)
    module_lab.reset()
    return module_lab


@pytest.fixture
def bucket(lab: LabStore, request: pytest.FixtureRequest) -> str:
    name = "b-" + hashlib.sha1(request.node.nodeid.encode()).hexdigest()[:12]
    lab.bucket(name)
    return name


@pytest.fixture(scope="module")
def s3(module_lab: LabStore) -> Any:
    return make_s3(module_lab)


def make_s3(lab: LabStore, access_key: str = "lab") -> Any:
    return botocore.session.Session().create_client(
        "s3",
        region_name="us-east-1",
        endpoint_url=lab.endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key="lab",
        config=botocore.config.Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )


def refused(call: Callable[..., Any], **arguments: Any) -> tuple[str, int]:
    """The code and status an S3 call is refused with."""
    with pytest.raises(botocore.exceptions.ClientError) as caught:
        call(**arguments)
    reply = caught.value.response
    return reply["Error"]["Code"], reply["ResponseMetadata"]["HTTPStatusCode"]


def ask(
    lab: LabStore,
    target: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", lab.port, timeout=10)
    try:
        connection.request(method, target, body, headers or {})
        reply = connection.getresponse()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
    finally:
        connection.close()


def raw_get(lab: LabStore, target: str, timeout: float = 5) -> tuple[bytes, str]:
    """Everything a GET brings, and how it ended: "closed", "reset" or "silent"."""
    with socket.create_connection(("127.0.0.1", lab.port), timeout=timeout) as sock:
        sock.sendall(f"GET {target} HTTP/1.1\r\nHost: lab\r\nConnection: close\r\n\r\n".encode())
        received = b""
        try:
            while data := sock.recv(1 << 20):
                received += data
        except ConnectionResetError:
            return received, "reset"
        except TimeoutError:
            return received, "silent"
        return received, "closed"


def body_of(reply: bytes) -> bytes:
    return reply.partition(b"\r\n\r\n")[2]


HOSTILE = [
    "..", "../up", "a/../b", "./x", "/", "//", "/lead", "a//b", "a/", "a", "a/b", "a/b/c", "a/b/", "a.b", "a0", "a b",
    "a+b", "a%2Fb", "a%b", "a?b", "a#b", "a&b=c", "<&>\"'", "tab\there", "nl\nx", "cr\rx", "\x01\x7f", "ü", "日本/語",
    "\U0001f600", "\U0010ffff/x", "\U0010ffff\U0010ffff", "\ud7ff/x", "\ue000/x", "x" * 1024,
]  # fmt: skip


def reference(keys: list[str], prefix: str, delimiter: str) -> list[tuple[str, str]]:
    """What a complete listing shows, in order, by definition."""
    shown: list[tuple[str, str]] = []
    for key in sorted(keys, key=lambda key: key.encode()):
        if key.startswith(prefix):
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            name = ("key", key) if cut < 0 else ("prefix", key[: cut + len(delimiter)])
            if name not in shown:
                shown.append(name)
    return shown


NAMES = st.text(st.sampled_from("ab/.\0\x7fü\ud7ff\ue000\U0010ffff"), min_size=1, max_size=6)


@settings(max_examples=examples(200), deadline=None)
@given(
    st.lists(NAMES, unique=True, max_size=20),
    st.one_of(st.just(""), NAMES),
    st.sampled_from(["", "/", "ab", "\U0010ffff"]),
    st.integers(1, 4),
)
def test_pages_join_to_the_whole_listing(keys: list[str], prefix: str, delimiter: str, limit: int) -> None:
    keys.sort()
    shown: list[tuple[str, str]] = []
    cursor: str | None = ""
    while True:
        page = listing.page(
            lambda start: iter([key for key in keys if key >= start]), prefix, delimiter, cursor, limit
        )
        names = [("key", key) for key in page.keys] + [("prefix", common) for common in page.prefixes]
        assert len(names) == limit or page.token is None
        shown += sorted(names, key=lambda name: name[1].encode())
        if page.token is None:
            break
        assert page.last == shown[-1][1]
        cursor = listing.from_token(page.token)
    assert shown == reference(keys, prefix, delimiter)


@pytest.mark.parametrize("version", ["list_objects_v2", "list_objects"])
@pytest.mark.parametrize(
    ("prefix", "delimiter"), [("", ""), ("", "/"), ("a", "/"), ("a/", "/"), ("a", "b"), ("/", "/")]
)
def test_hostile_keys_list_alike(
    lab: LabStore, s3: Any, bucket: str, version: str, prefix: str, delimiter: str
) -> None:
    for key in HOSTILE:
        lab.put(bucket, key, key.encode())
    shown: list[tuple[str, str]] = []
    pages = s3.get_paginator(version).paginate(
        Bucket=bucket, Prefix=prefix, Delimiter=delimiter, PaginationConfig={"PageSize": 3}
    )
    for page in pages:
        names = [("key", entry["Key"]) for entry in page.get("Contents", [])]
        names += [("prefix", entry["Prefix"]) for entry in page.get("CommonPrefixes", [])]
        assert len(names) <= 3
        shown += sorted(names, key=lambda name: name[1].encode())
    assert shown == reference(HOSTILE, prefix, delimiter)


def test_every_key_is_read_back(lab: LabStore, bucket: str) -> None:
    for key in HOSTILE:
        assert ask(lab, f"/{bucket}/{quote(key, safe='')}", "PUT", body=key.encode())[0] == 200
    for key in HOSTILE:
        assert ask(lab, f"/{bucket}/{quote(key, safe='')}")[2] == key.encode()
        lab.delete(bucket, key)
        assert ask(lab, f"/{bucket}/{quote(key, safe='')}")[0] == 404


def test_start_after_and_limits(lab: LabStore, s3: Any, bucket: str) -> None:
    for key in ("a", "b/1", "b/2", "c"):
        lab.put(bucket, key, b"")
    page = s3.list_objects_v2(Bucket=bucket, StartAfter="b/1", Delimiter="/")
    assert [entry["Prefix"] for entry in page["CommonPrefixes"]] == ["b/"]
    assert [entry["Key"] for entry in page["Contents"]] == ["c"]
    assert page["KeyCount"] == 2
    page = s3.list_objects_v2(Bucket=bucket, StartAfter="b/2")
    assert [entry["Key"] for entry in page["Contents"]] == ["c"]
    page = s3.list_objects(Bucket=bucket, Marker="b/", Delimiter="/")
    assert "CommonPrefixes" not in page
    page = s3.list_objects_v2(Bucket=bucket, MaxKeys=0)
    assert page["KeyCount"] == 0
    assert not page["IsTruncated"]
    assert refused(s3.list_objects_v2, Bucket=bucket, MaxKeys=-1) == ("InvalidArgument", 400)
    assert refused(s3.list_objects_v2, Bucket="none") == ("NoSuchBucket", 404)


@pytest.mark.alone
def test_a_million_keys_cost_nothing(lab: LabStore, s3: Any, bucket: str) -> None:
    began = time.monotonic()
    lab.synthesize(bucket, "many/", 1_000_000, 5000)
    lab.put(bucket, "many/name-0000001.bin", b"mine")
    lab.delete(bucket, "many/name-0000002.bin")
    lab.put(bucket, "zoo", b"")
    page = s3.list_objects_v2(Bucket=bucket, Delimiter="/")
    assert [entry["Prefix"] for entry in page["CommonPrefixes"]] == ["many/"]
    assert [entry["Key"] for entry in page["Contents"]] == ["zoo"]
    page = s3.list_objects_v2(Bucket=bucket, Prefix="many/", MaxKeys=3)
    assert [(entry["Key"][-5], entry["Size"]) for entry in page["Contents"]] == [
        ("0", 5000),
        ("1", 4),
        ("3", 5000),
    ]
    page = s3.list_objects_v2(Bucket=bucket, StartAfter="many/name-0999998.bin")
    assert [entry["Key"] for entry in page["Contents"]] == ["many/name-0999999.bin", "zoo"]
    key = "many/name-0777777.bin"
    got = s3.get_object(Bucket=bucket, Key=key, Range="bytes=4000-4999")
    assert got["Body"].read() == content(key, 5000)[4000:]
    assert refused(s3.head_object, Bucket=bucket, Key="many/name-1000000.bin") == ("404", 404)
    assert refused(s3.get_object, Bucket=bucket, Key="many/name-0000002.bin") == ("NoSuchKey", 404)
    with pytest.raises(LabError, match="interleave"):
        lab.synthesize(bucket, "many/name-00", 10, 1)
    assert time.monotonic() - began < 3


def test_ranges(lab: LabStore, s3: Any, bucket: str) -> None:
    data = content(1, 100_000)
    lab.put(bucket, "k", data)
    lab.put(bucket, "empty", b"")
    for header, expected in {
        "bytes=0-0": data[:1],
        "bytes=10-19": data[10:20],
        "bytes=99990-200000": data[99_990:],
        "bytes=5-": data[5:],
        "bytes=-7": data[-7:],
        "bytes=-200000": data,
    }.items():
        status, headers, body = ask(lab, f"/{bucket}/k", headers={"Range": header})
        assert (status, body) == (206, expected)
        start = len(data) - len(expected) if header.endswith(("-", "7", "-200000")) else data.index(expected)
        assert headers["content-range"] == f"bytes {start}-{start + len(expected) - 1}/100000"
    for header in ("bytes=9-3", "lines=1-2", "bytes=-", "bytes=0-1,4-5"):
        assert ask(lab, f"/{bucket}/k", headers={"Range": header})[::2] == (200, data)
    for key, header in (
        ("k", "bytes=100000-"),
        ("k", "bytes=-0"),
        ("empty", "bytes=0-0"),
        ("empty", "bytes=-1"),
    ):
        assert refused(s3.get_object, Bucket=bucket, Key=key, Range=header) == ("InvalidRange", 416)
    status, headers, body = ask(lab, f"/{bucket}/k", "HEAD", {"Range": "bytes=0-9"})
    assert (status, headers["content-length"], body) == (206, "10", b"")
    assert headers["accept-ranges"] == "bytes"
    assert s3.get_object(Bucket=bucket, Key="empty")["Body"].read() == b""


def test_conditions(s3: Any, bucket: str) -> None:
    etag = s3.put_object(Bucket=bucket, Key="k", Body=b"one", Metadata={"who": "me"})["ETag"]
    assert etag == f'"{hashlib.md5(b"one").hexdigest()}"'
    got = s3.get_object(Bucket=bucket, Key="k", IfMatch=etag)
    assert (got["Body"].read(), got["ETag"], got["Metadata"]) == (b"one", etag, {"who": "me"})
    assert refused(s3.get_object, Bucket=bucket, Key="k", IfMatch='"x"') == ("PreconditionFailed", 412)
    assert refused(s3.get_object, Bucket=bucket, Key="k", IfNoneMatch=etag)[1] == 304
    assert refused(s3.head_object, Bucket=bucket, Key="k", IfMatch='"x"')[1] == 412
    assert refused(s3.put_object, Bucket=bucket, Key="k", Body=b"", IfNoneMatch="*") == (
        "PreconditionFailed",
        412,
    )
    assert refused(s3.put_object, Bucket=bucket, Key="k", Body=b"", IfMatch='"x"') == (
        "PreconditionFailed",
        412,
    )
    assert refused(s3.put_object, Bucket=bucket, Key="no", Body=b"", IfMatch=etag) == ("NoSuchKey", 404)
    s3.put_object(Bucket=bucket, Key="k", Body=b"two", IfMatch=etag)
    s3.put_object(Bucket=bucket, Key="new", Body=b"", IfNoneMatch="*")
    head = s3.head_object(Bucket=bucket, Key="k")
    entry = s3.list_objects_v2(Bucket=bucket)["Contents"][0]
    assert (entry["ETag"], entry["Size"], entry["LastModified"]) == (head["ETag"], 3, head["LastModified"])


def test_multipart(s3: Any, bucket: str) -> None:
    where = {"Bucket": bucket, "Key": "deep/k"}
    upload = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    parts = [content(number, 70_000) for number in (1, 2, 3)]
    etags = [s3.upload_part(**upload, PartNumber=i, Body=part)["ETag"] for i, part in enumerate(parts, 1)]
    assert [part["ETag"] for part in s3.list_parts(**upload)["Parts"]] == etags
    assert [entry["Key"] for entry in s3.list_multipart_uploads(Bucket=bucket)["Uploads"]] == ["deep/k"]
    listed = [{"PartNumber": i, "ETag": etag} for i, etag in enumerate(etags, 1)]
    complete = s3.complete_multipart_upload
    assert refused(complete, **upload, MultipartUpload={"Parts": listed[::-1]})[0] == "InvalidPartOrder"
    wrong = [{"PartNumber": 1, "ETag": etags[1]}]
    assert refused(complete, **upload, MultipartUpload={"Parts": wrong})[0] == "InvalidPart"
    done = complete(**upload, MultipartUpload={"Parts": listed})
    digests = b"".join(hashlib.md5(part).digest() for part in parts)
    assert done["ETag"] == f'"{hashlib.md5(digests).hexdigest()}-3"'
    assert s3.get_object(**where)["Body"].read() == b"".join(parts)
    assert refused(s3.list_parts, **upload) == ("NoSuchUpload", 404)
    upload = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    s3.upload_part(**upload, PartNumber=1, Body=b"x")
    s3.abort_multipart_upload(**upload)
    assert "Uploads" not in s3.list_multipart_uploads(Bucket=bucket)


@pytest.mark.parametrize("count", [1, 3, 70])  # 70 parts are more than an object keeps as they are
def test_an_object_of_parts_is_whole(s3: Any, bucket: str, count: int) -> None:
    where = {"Bucket": bucket, "Key": "k"}
    parts = [content(number, 5_000) for number in range(count)]
    upload = {**where, "UploadId": s3.create_multipart_upload(**where)["UploadId"]}
    etags = [s3.upload_part(**upload, PartNumber=i, Body=part)["ETag"] for i, part in enumerate(parts, 1)]
    listed = {"Parts": [{"PartNumber": i, "ETag": etag} for i, etag in enumerate(etags, 1)]}
    before = s3.put_object(**where, Body=b"before")["ETag"]
    complete = s3.complete_multipart_upload
    assert refused(complete, **upload, MultipartUpload=listed, IfNoneMatch="*")[0] == "PreconditionFailed"
    complete(**upload, MultipartUpload=listed, IfMatch=before)  # the refused request has taken no part away
    whole = b"".join(parts)
    assert s3.get_object(**where, Range="bytes=4000-11000")["Body"].read() == whole[4000:11001]
    s3.copy_object(Bucket=bucket, Key="copy", CopySource=f"{bucket}/k")
    body = s3.get_object(**where)["Body"]
    first = body.read(10)
    s3.put_object(**where, Body=b"after")
    assert first + body.read() == whole  # a reader has the version that it opened
    assert s3.get_object(Bucket=bucket, Key="copy")["Body"].read() == whole


def test_copy_delete_and_buckets(s3: Any, bucket: str) -> None:
    s3.create_bucket(Bucket="another-bucket")
    s3.put_object(Bucket=bucket, Key="ä/k", Body=b"bytes")
    s3.copy_object(Bucket="another-bucket", Key="copy", CopySource={"Bucket": bucket, "Key": "ä/k"})
    assert s3.get_object(Bucket="another-bucket", Key="copy")["Body"].read() == b"bytes"
    names = {entry["Name"] for entry in s3.list_buckets()["Buckets"]}
    assert {bucket, "another-bucket"} <= names
    assert s3.get_bucket_location(Bucket=bucket)["LocationConstraint"] is None
    assert s3.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPStatusCode"] == 200
    assert refused(s3.head_bucket, Bucket="none") == ("404", 404)
    s3.put_object(Bucket=bucket, Key="k2", Body=b"")
    s3.delete_object(Bucket=bucket, Key="k2")
    assert refused(s3.get_object, Bucket=bucket, Key="k2") == ("NoSuchKey", 404)
    gone = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": "ä/k"}, {"Key": "never"}]})
    assert [entry["Key"] for entry in gone["Deleted"]] == ["ä/k", "never"]
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 0
    assert refused(s3.get_object_tagging, Bucket=bucket, Key="k") == ("NotImplemented", 501)


def test_obstore_agrees(lab: LabStore, bucket: str) -> None:
    store = S3Store(
        bucket,
        endpoint=lab.endpoint,
        region="us-east-1",
        access_key_id="lab",
        secret_access_key="lab",
        client_options={"allow_http": True},
    )
    data = content("obstore", 12_000_000)
    obstore.put(store, "dir/big", data, chunk_size=5 << 20)  # goes as a multipart upload
    obstore.put(store, "dir/small", b"small")
    assert bytes(obstore.get(store, "dir/big").bytes()) == data
    assert bytes(obstore.get_range(store, "dir/big", start=100, end=200)) == data[100:200]
    assert [entry["path"] for entry in obstore.list(store).collect()] == ["dir/big", "dir/small"]
    assert obstore.list_with_delimiter(store)["common_prefixes"] == ["dir"]
    assert obstore.head(store, "dir/big")["e_tag"].endswith('-3"')
    obstore.delete(store, ["dir/big", "dir/small"])
    assert obstore.list(store).collect() == []


def test_a_tree_is_served_as_it_lies(lab: LabStore, s3: Any, tmp_path: Path) -> None:
    manifest = make_image_folder(tmp_path / "images", classes=2, per_class=3, seed=7)
    (tmp_path / "images" / os.fsdecode(b"not-utf8-\xff")).write_bytes(b"")
    assert lab.serve("tree", tmp_path / "images") == 6
    entries = s3.list_objects_v2(Bucket="tree")["Contents"]
    assert [entry["Key"] for entry in entries] == sorted(manifest)
    for entry in entries:
        data = s3.get_object(Bucket="tree", Key=entry["Key"], IfMatch=entry["ETag"])["Body"].read()
        assert (len(data), xxhash.xxh3_64_hexdigest(data)) == manifest[entry["Key"]]
    before = (tmp_path / "images" / entries[0]["Key"]).read_bytes()
    lab.put("tree", entries[0]["Key"], b"put over it")
    lab.delete("tree", entries[1]["Key"])
    assert (tmp_path / "images" / entries[0]["Key"]).read_bytes() == before
    assert (tmp_path / "images" / entries[1]["Key"]).exists()
    assert lab.serve("tree", tmp_path / "images") == 6


def test_datasets_are_deterministic(tmp_path: Path) -> None:
    assert content(3, 10_000)[5000:9000] == content(3, 4000, 5000)
    pages = {content(seed, 4096, 4096 * page) for seed in range(10) for page in range(10)}
    assert len(pages) == 100
    manifest = make_shards(tmp_path / "one", count=2, size=1_000_000)
    assert manifest == make_shards(tmp_path / "two", count=2, size=1_000_000)
    for name, (size, digest) in manifest.items():
        data = (tmp_path / "one" / name).read_bytes()
        assert (len(data), xxhash.xxh3_64_hexdigest(data)) == (size, digest)
        with tarfile.open(tmp_path / "one" / name) as tar:
            names = tar.getnames()
        assert [Path(member).suffix for member in names[:2]] == [".jpg", ".cls"]
        assert len(names) > 10


def test_counters_are_exact(lab: LabStore, s3: Any, bucket: str) -> None:
    lab.put(bucket, "a/k", b"x" * 1000)
    lab.reset()
    for _ in range(20):
        s3.get_object(Bucket=bucket, Key="a/k", Range="bytes=0-99")["Body"].read()
        assert lab.counters()["in_flight"] == 0
    s3.head_object(Bucket=bucket, Key="a/k")
    s3.put_object(Bucket=bucket, Key="up", Body=b"y" * 5000)
    refused(s3.get_object, Bucket=bucket, Key="none")
    s3.list_objects_v2(Bucket=bucket)
    counters = lab.counters()
    assert counters["requests"] == {"get": 21, "head": 1, "put": 1, "list": 1}
    assert counters["statuses"] == {"206": 20, "200": 3, "404": 1}
    assert counters["bytes_received"] == {"put": 5000}
    assert counters["max_in_flight"] == 1
    log = lab.requests()
    assert [entry["kind"] for entry in log[19:]] == ["get", "head", "put", "get", "list"]
    assert (log[0]["bucket"], log[0]["key"], log[0]["range"], log[0]["status"]) == (
        bucket,
        "a/k",
        "bytes=0-99",
        206,
    )
    lab.reset()
    s3.get_object(Bucket=bucket, Key="a/k")["Body"].read()
    assert lab.counters()["bytes_sent"] == {"get": 1000}


def test_concurrency_is_seen(lab: LabStore, bucket: str) -> None:
    lab.put(bucket, "k", b"x")
    lab.shape(latency_ms=300)
    threads = [threading.Thread(target=ask, args=(lab, f"/{bucket}/k")) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lab.counters()["max_in_flight"] == 64


def test_connections_stay_open_unless_told(lab: LabStore, bucket: str) -> None:
    lab.put(bucket, "k", b"fine")
    received, how = raw_get(lab, f"/{bucket}/k", timeout=1)
    assert (body_of(received), how) == (b"fine", "closed")
    connection = HTTPConnection("127.0.0.1", lab.port, timeout=1)
    for _ in range(2):
        connection.request("GET", f"/{bucket}/k")
        sock = connection.sock
        assert connection.getresponse().read() == b"fine"
        assert connection.sock is sock
    connection.close()


def test_streaming_uploads(lab: LabStore, bucket: str) -> None:
    body = b"5;chunk-signature=00\r\nhello\r\n6;chunk-signature=00\r\n world\r\n0;chunk-signature=00\r\n"
    body += b"x-amz-checksum-crc32:AAAAAA==\r\n\r\n"
    headers = {
        "x-amz-content-sha256": "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER",
        "Content-Encoding": "aws-chunked",
    }
    assert ask(lab, f"/{bucket}/k", "PUT", headers, body)[0] == 200
    assert ask(lab, f"/{bucket}/k")[2] == b"hello world"
    assert lab.counters()["bytes_received"] == {"put": 11}
    assert ask(lab, f"/{bucket}/k", "PUT", headers, b"5\r\nhel")[0] == 400
    assert ask(lab, f"/{bucket}/k")[2] == b"hello world"


def test_credentials(lab: LabStore, s3: Any, bucket: str) -> None:
    lab.put(bucket, "open/k", b"")
    lab.put(bucket, "secret/k", b"")
    lab.credentials(allowed=["lab"], denied=["secret/"])
    s3.get_object(Bucket=bucket, Key="open/k")
    assert refused(s3.get_object, Bucket=bucket, Key="secret/k") == ("AccessDenied", 403)
    assert refused(s3.list_objects_v2, Bucket=bucket, Prefix="secret/") == ("AccessDenied", 403)
    assert refused(make_s3(lab, "other").get_object, Bucket=bucket, Key="open/k") == (
        "InvalidAccessKeyId",
        403,
    )
    assert ask(lab, f"/{bucket}/open/k")[0] == 403
    lab.credentials(expired=["lab"])
    assert refused(s3.get_object, Bucket=bucket, Key="open/k") == ("ExpiredToken", 400)
    lab.credentials()
    assert ask(lab, f"/{bucket}/secret/k")[0] == 200


@pytest.mark.parametrize(
    ("action", "code", "status"),
    [
        ("503", "SlowDown", 503),
        ("429", "TooManyRequests", 429),
        ("500", "InternalError", 500),
        ("403", "AccessDenied", 403),
    ],
)
def test_error_faults(lab: LabStore, bucket: str, action: str, code: str, status: int) -> None:
    lab.put(bucket, "k", b"fine")
    rule = lab.fault(action, key="k*", first=2, count=2, seconds=3)
    replies = [ask(lab, f"/{bucket}/k") for _ in range(4)]
    assert [reply[0] for reply in replies] == [200, status, status, 200]
    assert code.encode() in replies[1][2]
    assert replies[1][1]["retry-after"] == "3"
    assert ask(lab, f"/{bucket}/k", "HEAD")[0] == 200
    assert lab.faults_fired() == {rule: 2}
    assert lab.counters()["statuses"] == {"200": 3, str(status): 2}


def test_faults_by_kind(lab: LabStore, bucket: str) -> None:
    lab.fault("503", kind="*", key="x/*")
    assert ask(lab, f"/{bucket}?list-type=2&prefix=x/")[0] == 503
    assert ask(lab, f"/{bucket}/x/k", "PUT", body=b"1" * 300_000)[0] == 503
    assert ask(lab, f"/{bucket}?list-type=2&prefix=y/")[0] == 200
    assert ask(lab, f"/{bucket}/x/k", "HEAD")[::2] == (503, b"")


def test_hang(lab: LabStore, bucket: str) -> None:
    lab.put(bucket, "k", b"fine")
    lab.fault("hang", seconds=0.3, count=1)
    began = time.monotonic()
    assert ask(lab, f"/{bucket}/k")[2] == b"fine"
    assert 0.3 <= time.monotonic() - began < 2
    lab.fault("hang", count=1)
    assert raw_get(lab, f"/{bucket}/k", timeout=0.2) == (b"", "silent")
    lab.fault("hang", count=1)
    thread = threading.Timer(0.2, lab.clear_faults)
    thread.start()
    assert ask(lab, f"/{bucket}/k")[2] == b"fine"
    thread.join()


@pytest.mark.parametrize(
    ("action", "after", "ending"),
    [
        ("hang-body", 0, "silent"),
        ("hang-body", 1234, "silent"),
        ("truncate", 0, "closed"),
        ("truncate", 300_000, "closed"),
        ("truncate", 10**9, "closed"),
        ("reset", 0, "reset"),
        ("reset", 300_000, "reset"),
    ],
)
def test_faults_within_the_body(lab: LabStore, bucket: str, action: str, after: int, ending: str) -> None:
    data = content(5, 500_000)
    lab.put(bucket, "k", data)
    lab.fault(action, after=after)
    received, how = raw_get(lab, f"/{bucket}/k", timeout=0.3)
    assert how == ending
    assert b"Content-Length: 500000\r\n" in received
    sent = min(after, 499_999)
    assert body_of(received) == data[:sent]
    assert lab.counters()["bytes_sent"] == ({"get": sent} if sent else {})


def test_hang_body_goes_on(lab: LabStore, bucket: str) -> None:
    data = content(6, 10_000)
    lab.put(bucket, "k", data)
    lab.fault("hang-body", after=10, seconds=0.2)
    began = time.monotonic()
    assert ask(lab, f"/{bucket}/k")[2] == data
    assert time.monotonic() - began >= 0.2


def test_reset_and_garbage_instead_of_headers(lab: LabStore, bucket: str) -> None:
    lab.put(bucket, "k", b"fine")
    lab.fault("reset", count=1)
    assert raw_get(lab, f"/{bucket}/k") == (b"", "reset")
    lab.fault("garbage", count=1)
    received, _ = raw_get(lab, f"/{bucket}/k")
    assert received
    assert not received.startswith(b"HTTP/")
    assert ask(lab, f"/{bucket}/k")[2] == b"fine"


def test_an_object_changes_while_it_is_read(lab: LabStore, bucket: str) -> None:
    data = content(8, 300_000)
    etag = lab.put(bucket, "k", data)
    lab.fault("etag", after=1000, count=1)
    status, headers, body = ask(lab, f"/{bucket}/k", headers={"If-Match": etag})
    assert (status, headers["etag"], body) == (200, etag, data)
    assert ask(lab, f"/{bucket}/k", headers={"If-Match": etag})[0] == 412
    status, headers, body = ask(lab, f"/{bucket}/k")
    assert headers["etag"] != etag
    assert len(body) == len(data)
    assert all(new != old for new, old in zip(body, data, strict=True))
    assert lab.replace(bucket, "k") == etag
    assert ask(lab, f"/{bucket}/k")[2] == data
    with pytest.raises(LabError):
        lab.replace(bucket, "none")


def test_a_store_that_lies(lab: LabStore, bucket: str) -> None:
    etag = lab.put(bucket, "k", b"truth")
    lab.fault("wrong-etag", kind="*", count=2)
    for method in ("HEAD", "GET"):
        status, headers, body = ask(lab, f"/{bucket}/k", method, {"If-Match": etag})
        assert status == 200
        assert headers["etag"] != etag
        assert body != b"truth"
    assert ask(lab, f"/{bucket}/k", headers={"If-Match": etag})[2] == b"truth"


@pytest.mark.alone
def test_slow(lab: LabStore, bucket: str) -> None:
    lab.put(bucket, "k", bytes(100_000))
    lab.fault("slow", rate=500_000, count=1)
    began = time.monotonic()
    ask(lab, f"/{bucket}/k")
    assert 0.15 < time.monotonic() - began < 1


@pytest.mark.alone
def test_latency_and_bandwidth_change_live(lab: LabStore, bucket: str) -> None:
    data = content(9, 2_000_000)
    lab.put(bucket, "k", data)
    lab.shape(latency_ms=100)
    began = time.monotonic()
    ask(lab, f"/{bucket}/k", "HEAD")
    assert 0.1 <= time.monotonic() - began < 0.5
    lab.shape(latency_ms=0, bandwidth=5_000_000)
    began = time.monotonic()
    assert ask(lab, f"/{bucket}/k")[2] == data
    assert 0.38 < time.monotonic() - began < 0.6
    began = time.monotonic()
    assert ask(lab, f"/{bucket}/up", "PUT", body=data)[0] == 200
    assert 0.3 < time.monotonic() - began < 0.8


@pytest.mark.alone
def test_a_pipe_keeps_its_rate() -> None:
    pipe = Pipe(100e6)
    began = time.monotonic()
    total = 0
    while total < 50_000_000:
        pipe.take(pipe.quantum)
        total += pipe.quantum
    assert time.monotonic() - began == pytest.approx(0.5, rel=0.05)


@pytest.mark.alone
def test_bandwidth_is_shared_fairly(lab: LabStore, bucket: str) -> None:
    lab.put(bucket, "large", bytes(20_000_000))
    lab.put(bucket, "small", bytes(131_072))
    lab.shape(bandwidth=10_000_000)
    done = threading.Event()
    amounts = [0] * 4

    def drain(index: int) -> None:
        connection = HTTPConnection("127.0.0.1", lab.port, timeout=10)
        connection.request("GET", f"/{bucket}/large")
        reply = connection.getresponse()
        while not done.is_set():
            amounts[index] += len(reply.read(16_384))
        connection.close()

    threads = [threading.Thread(target=drain, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.6)
    began = time.monotonic()
    ask(lab, f"/{bucket}/small")
    waited = time.monotonic() - began
    done.set()
    for thread in threads:
        thread.join()
    assert max(amounts) < 1.3 * min(amounts)
    # A fifth of the rate is 66 ms for the small one; behind even one large body it would be seconds.
    assert waited < 0.3


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import sys, time; from bench.lab.client import LabStore\n"
        "with LabStore(sys.argv[1]) as lab: print(lab.pid, flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[1]
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, cwd=root
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 5
    while _alive(child):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "demo"], "--serve demo: write BUCKET=DIR"),
        (["--serve", "demo=/nowhere"], "with a directory that is there"),
        (["--port", "70000"], "choose another --port"),
        (["--port", "USED"], "Address already in use"),
    ],
)
def test_what_it_cannot_do_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    """It is the first command that the README shows."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        used = str(other.getsockname()[1])
        command = [sys.executable, "-m", "bench.lab.store", "--root", str(tmp_path)]
        command += [used if word == "USED" else word for word in words]
        done = subprocess.run(
            command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=30
        )
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
