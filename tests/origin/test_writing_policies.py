"""Writing without a store: sizes of parts, bodies, and what `Origin` adds to a scripted writer."""

from __future__ import annotations

import hashlib
import http.server
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.errors import (
    Conflict,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
    Throttled,
    Transient,
    Unsupported,
)
from cachefs.base.metrics import Metrics
from cachefs.origin import FileRange, InMemory, ObjectInfo, Origin, Ticket, open_origin
from cachefs.origin.attempts import CHUNK, Attempts, Backoff
from cachefs.origin.azure import LIMITS as AZURE
from cachefs.origin.azure import block_id, number_of
from cachefs.origin.google import LIMITS as GOOGLE
from cachefs.origin.http import refusal
from cachefs.origin.local import LIMITS as LOCAL
from cachefs.origin.local import UPLOADS, LocalClient
from cachefs.origin.protocol import HONOURED, Body, Limits, Preconditions, Written
from cachefs.origin.s3 import LIMITS as S3
from cachefs.origin.s3 import AwsCredentials, Bucket, S3Client
from tests.origin.reading import run, until
from tests.origin.servers import aws_env
from tests.origin.writing import MIB, file_of

# Sizes of parts.


@pytest.mark.parametrize("limits", [S3, GOOGLE, AZURE, LOCAL], ids=["s3", "google", "azure", "local"])
@given(sent=st.integers(0, 1 << 50))
def test_a_part_is_within_the_limits_and_grows(limits: Limits, sent: int) -> None:
    size = limits.part_size(sent)
    assert limits.least_part <= size <= limits.largest_part
    assert size <= limits.part_size(sent + size)
    assert size == limits.largest_part or size % MIB == 0
    assert size <= max(8 * MIB, sent // 1250 + MIB)  # and no faster than that


@pytest.mark.parametrize("limits", [S3, GOOGLE, AZURE], ids=["s3", "google", "azure"])
def test_the_largest_object_needs_no_more_parts_than_there_are(limits: Limits) -> None:
    sent = number = 0
    while sent < limits.largest_object:
        sent += limits.part_size(sent)
        number += 1
    assert limits.most_parts * 0.85 < number <= limits.most_parts


# Bodies and blocks.


class Given:
    """A body of these bytes, in chunks of a few."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def chunks(self) -> Iterator[bytes]:
        return (self.data[at : at + 3] for at in range(0, len(self.data), 3))

    def look(self) -> Iterator[bytes]:
        return self.chunks()


@given(st.text("0123456789abcdef", min_size=1, max_size=16), st.integers(1, 50_000))
def test_blocks_know_their_upload(upload: str, number: int) -> None:
    name = block_id(upload, number)
    assert number_of(upload, name) == number and len(name) == len(block_id(upload, 1))
    assert number_of(upload + "0", name) is None and number_of(upload, "?") is None


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (404, "NoSuchUpload", NoSuchUpload),
        (400, "InvalidBlockList", NoSuchUpload),
        (409, "BlobAlreadyExists", ObjectChanged),
        (409, "ConditionalRequestConflict", Transient),
        (409, "PendingCopyOperation", Transient),
        (400, "BadDigest", Transient),
        (200, "InternalError", Transient),
        (200, "SlowDown", Throttled),
        (403, "AccessDenied", PermissionDenied),
        (400, "EntityTooSmall", OriginFailed),
        (400, "InvalidPart", OriginFailed),
        (412, "ConditionNotMet", ObjectChanged),
        (501, "NotImplemented", Unsupported),
        (504, "", Transient),
        (522, "", Transient),
        (412, "LeaseIdMissing", OriginFailed),
    ],
)
def test_refusals_of_writes(status: int, code: str, kind: type[Exception]) -> None:
    assert type(refusal(status, name="x", code=code)) is kind


# What `Origin` adds.


class Scripted:
    """Each request that sends takes the next step: an exception is raised when half of the body is read, a function is
    called there. Then the object is there, with the token that was given."""

    limits = S3
    conditions = HONOURED

    def __init__(self, *steps: Any) -> None:
        self.steps = list(steps)
        self.sent: list[bytes] = []
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.completed = 0

    @property
    def writer(self) -> Any:
        return self

    def put(self, key: str, body: Body, preconditions: Preconditions) -> Written:
        data = b""
        step = self.steps.pop(0) if self.steps else None
        for chunk in body.chunks():
            data += chunk
            if step is not None and len(data) >= body.size // 2:
                if isinstance(step, Exception):
                    raise step
                step()
                step = None
        self.sent.append(data)
        self.objects[key] = data, preconditions.token
        return Written(f'"{len(data)}"', 1)

    def put_part(self, key: str, upload: str, number: int, body: Body) -> str:
        return self.put(f"{upload}/{number}", body, Preconditions()).etag

    def begin(self, key: str, preconditions: Preconditions) -> str:
        return "upload"

    def complete(
        self, key: str, upload: str, parts: Mapping[int, str], preconditions: Preconditions
    ) -> Written:
        self.completed += 1
        self.objects[key] = b"", preconditions.token
        raise Transient("the reply was lost")

    def look(self, key: str) -> tuple[ObjectInfo, str]:
        if key not in self.objects:
            raise NotFound(key)
        return ObjectInfo(key, 3, 7, '"there"'), self.objects[key][1]

    def head(self, key: str) -> ObjectInfo:
        return self.look(key)[0]

    def renew(self, since: float) -> bool:
        return False

    def close(self) -> None:
        pass


def origin(client: Any, **options: Any) -> Origin:
    given: dict[str, Any] = {
        "metrics": Metrics(),
        "backoff": Backoff(retries=3, first_s=0.001, longest_s=0.01),
    }
    return Origin(Attempts(client, source="test://", **{**given, **options}))


DATA = bytes(range(256)) * 4096


def test_a_repeated_attempt_reads_the_file_again_from_its_beginning(tmp_path: Path) -> None:
    client = Scripted(Transient("broke"), Throttled("slow down"), Transient("broke again"))

    async def use(there: Origin) -> None:
        with file_of(tmp_path / "f", b"head" + DATA + b"tail") as fd:
            await there.put("k", FileRange(fd, 4), len(DATA))
            os.lseek(fd, 17, os.SEEK_SET)  # where the descriptor stands does not matter
            upload = await there.begin_upload("k")
            await upload.part(1, FileRange(fd, 4), len(DATA))
        metrics = there._attempts.metrics
        assert client.sent == [DATA, DATA]
        assert (metrics.origin_put, metrics.origin_put_part, metrics.origin_retries) == (4, 1, 3)
        assert metrics.origin_bytes_sent == 3 * (len(DATA) // 2) + 2 * len(DATA)

    run(origin(client), use)


def test_bytes_sent_are_no_progress_that_lasts() -> None:
    client = Scripted(*[Transient("broke")] * 20)
    with pytest.raises(OriginFailed, match="gave up after 4 attempts: broke"):
        run(origin(client), lambda there: there.put("k", InMemory(DATA), len(DATA)))
    assert len(client.steps) == 16


def test_a_cancelled_write_reads_its_file_no_more() -> None:
    """A descriptor that is closed may be another file's a moment later."""
    in_read, go_on = threading.Event(), threading.Event()
    reads: list[int] = []

    class Slow:
        def read(self, at: int, count: int) -> bytes:
            reads.append(at)
            in_read.set()
            go_on.wait(10)
            return bytes(count)

    client = Scripted()

    async def use(there: Origin) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(there.put, "k", Slow(), 4 * CHUNK)
            await trio.to_thread.run_sync(in_read.wait)
            nursery.cancel_scope.cancel()
            threading.Timer(0.1, go_on.set).start()
        assert go_on.is_set(), "the task ended before its last read did"
        await until(lambda: there._attempts.threads.borrowed_tokens == 0)
        assert there.status()["in_flight"] == 0

    run(origin(client), use)
    assert reads == [0] and client.sent == []


def test_a_write_that_hangs_is_left_behind() -> None:
    go_on = threading.Event()
    client = Scripted(lambda: go_on.wait(10))

    async def use(there: Origin) -> None:
        with pytest.raises(OriginFailed, match=r"gave up after 0\.2 s without progress"):
            await there.put("k", InMemory(DATA), len(DATA))
        go_on.set()
        await until(lambda: there._attempts.threads.borrowed_tokens == 0)

    run(origin(client, deadline_s=0.2), use)
    assert client.sent == []


def test_waiting_for_a_slot_is_not_the_store_being_silent() -> None:
    clock = trio.testing.MockClock()
    client = Scripted()

    async def main() -> None:
        there = origin(client, concurrency=1, deadline_s=60)
        other = Ticket()
        await there._attempts.gate.enter(other)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(there.put, "k", InMemory(DATA), len(DATA))
            await trio.testing.wait_all_tasks_blocked()
            clock.jump(1000)
            await trio.testing.wait_all_tasks_blocked()
            there._attempts.gate.leave(other)
        assert client.sent == [DATA]

    trio.run(main, clock=clock)


def test_the_upload_limit_spans_all_writes() -> None:
    async def use(there: Origin) -> float:
        begin = trio.current_time()
        async with trio.open_nursery() as nursery:
            for key in ("a", "b", "c", "d"):
                nursery.start_soon(there.put, key, InMemory(DATA), len(DATA))
        return trio.current_time() - begin

    there = origin(Scripted(), upload_limit=len(DATA) * 8, download_limit=1)
    assert 0.35 <= run(there, use) < 3
    assert there.status()["upload_limit"] == len(DATA) * 8


def test_completing_that_got_through_is_not_repeated() -> None:
    client = Scripted()

    async def use(there: Origin) -> None:
        upload = await there.begin_upload("k")
        await upload.part(1, InMemory(b"abc"), 3)
        info = await upload.complete()
        assert client.completed == 1
        assert (info.size, info.etag, info.mtime_ns) == (3, '"there"', 7)
        # Another process that only has the state does not even ask once.
        assert await there.resume_upload("k", upload.state()).complete() == info
        assert client.completed == 1
        client.objects["k"] = b"", "of another client"
        await there.resume_upload("k", upload.state()).complete()
        assert client.completed == 2

    run(origin(client), use)


def test_conflicts_are_no_failures_of_the_store() -> None:
    client = Scripted(Conflict("there is one"))

    async def use(there: Origin) -> None:
        with pytest.raises(Conflict):
            await there.put("k", InMemory(DATA), len(DATA), if_absent=True)
        assert there._attempts.metrics.origin_retries == 0 == there._attempts.metrics.origin_errors
        assert there.status()["concurrency"] == 64

    run(origin(client), use)


# Signatures, which neither moto nor the lab store looks at.


class Received(http.server.BaseHTTPRequestHandler):
    """Keeps what came, and says that all is well."""

    requests: list[tuple[str, str, dict[str, str], bytes]] = []  # noqa: RUF012

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.requests.append((self.command, self.path, dict(self.headers.items()), body))
        self.send_response(200)
        for name, value in (("ETag", '"x"'), ("Last-Modified", "Sat, 21 Nov 2026 08:06:30 GMT")):
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_DELETE = do_HEAD = do_POST = answer

    def log_message(self, *args: object) -> None:
        pass


def test_what_is_sent_to_s3_is_what_was_signed(monkeypatch: pytest.MonkeyPatch) -> None:
    from botocore.auth import S3SigV4Auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    for name, value in aws_env().items():
        monkeypatch.setenv(name, value)
    Received.requests.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Received)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"

    async def use(there: Origin) -> None:
        assert isinstance(there.writer, S3Client)
        there.writer.conditions = HONOURED  # this server answers nothing that could be probed
        for key in ("plain", "sp ace+%2F~é/quo'te(*)!"):
            await there.put(key, InMemory(DATA), len(DATA), if_match='"old"')
            await there.put(key, InMemory(b""), 0, if_absent=True)
            await there.resume_upload(key, {"id": "a+b/c="}).part(7, InMemory(DATA), 1000)
            await there.delete(key)

    try:
        run(open_origin("s3://bucket", endpoint_url=endpoint, metrics=Metrics()), use)
    finally:
        server.shutdown()
        server.server_close()
    assert [request[0] for request in Received.requests] == ["PUT", "PUT", "PUT", "DELETE"] * 2
    for method, path, headers, body in Received.requests:
        signed = re.search("SignedHeaders=([^,]+), Signature=(.*)", headers["Authorization"])
        assert signed is not None
        names = signed[1].split(";")
        shown = {name: value for name, value in headers.items() if name.lower() in names}
        assert len(shown) == len(names)
        assert {name for name in map(str.lower, headers) if name.startswith(("x-amz-", "if-"))} <= set(names)
        assert shown["X-Amz-Content-SHA256"] == hashlib.sha256(body).hexdigest()
        request = AWSRequest(method, endpoint + path, shown)
        request.context["timestamp"] = shown["X-Amz-Date"]
        auth = S3SigV4Auth(Credentials("tester", "secret"), "s3", "us-east-1")
        text = auth.string_to_sign(request, auth.canonical_request(request))
        assert auth.signature(text, request) == signed[2]


def test_over_tls_a_body_is_not_read_for_a_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_env().items():
        monkeypatch.setenv(name, value)
    looks: list[int] = []

    class Counted(Given):
        def look(self) -> Iterator[bytes]:
            looks.append(1)
            return super().look()

    bucket = Bucket("b", None, None, AwsCredentials(None, False))
    for url, digest in (
        ("https://x/k", "UNSIGNED-PAYLOAD"),
        ("http://x/k", hashlib.sha256(b"data").hexdigest()),
    ):
        _, headers = bucket.sign("PUT", url, {}, Counted(b"data"))
        assert headers["X-Amz-Content-SHA256"] == digest
    assert looks == [1]


def test_requester_pays_and_encryption_are_asked_for_where_s3_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Payment with every request, encryption where an object begins: S3 refuses it for parts, completions and reads."""
    for name, value in aws_env().items():
        monkeypatch.setenv(name, value)
    bucket = Bucket("b", None, None, AwsCredentials(None, False), requester_pays=True, sse_kms_key="alias/x")
    encrypted = []
    for method, query in (
        ("PUT", ""),
        ("PUT", "?partNumber=1&uploadId=u"),
        ("POST", "?uploads="),
        ("POST", "?uploadId=u"),
        ("DELETE", ""),
        ("POST", "?delete="),
    ):
        _, headers = bucket.sign(method, f"https://x/k{query}", {}, b"")
        assert headers["x-amz-request-payer"] == "requester"
        assert "x-amz-request-payer" in headers["Authorization"]
        if "x-amz-server-side-encryption" in headers:
            assert headers["x-amz-server-side-encryption-aws-kms-key-id"] == "alias/x"
            encrypted.append((method, query))
    assert encrypted == [("PUT", ""), ("POST", "?uploads=")]
    _, headers = bucket.sign("GET", "https://x/k", {}, b"")
    assert headers["x-amz-request-payer"] == "requester"
    assert "x-amz-server-side-encryption" not in headers
    sign = bucket.signer()
    assert sign is not None
    assert sign("GET", "https://x/k", {}, b"") == bucket.sign("GET", "https://x/k", {}, b"")


# A directory.


@pytest.mark.parametrize("way", ["complete", "abort"])
def test_a_part_that_was_given_up_may_still_land_while_its_upload_ends(tmp_path: Path, way: str) -> None:
    writer = LocalClient(str(tmp_path)).writer
    for _ in range(20):
        upload = writer.begin("k", Preconditions())
        etag = writer.put_part("k", upload, 1, Given(b"x"))
        landed = threading.Event()

        def late(upload: str = upload, landed: threading.Event = landed) -> None:
            with suppress(NoSuchUpload, NotFound):
                for number in range(2, 10_000):
                    writer.put_part("k", upload, number, Given(b"x"))
                    landed.set()

        thread = threading.Thread(target=late)
        thread.start()
        landed.wait()
        if way == "complete":
            writer.complete("k", upload, {1: etag}, Preconditions())
        else:
            writer.abort("k", upload)
        thread.join()
        assert not (tmp_path / UPLOADS).exists()
