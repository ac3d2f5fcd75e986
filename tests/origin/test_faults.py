"""The fault table: what the lab store does wrong, and what comes of it, in results and in requests."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import trio
from botocore.exceptions import ClientError

from bench.lab.dataset import content as bytes_of
from cachefs.base.errors import NotFound, ObjectChanged, OriginFailed, PermissionDenied, Unsupported
from cachefs.origin import InMemory, Origin
from tests import threads
from tests.origin.reading import CLIENTS, Collect, content, pages, run, until
from tests.origin.servers import Lab, aws_env

SIZE = 3_000_000
BODY = bytes_of("faulty", SIZE)

# action and its arguments → how many GETs, and whether the body arrives in the end.
TABLE: list[tuple[str, dict[str, Any], int]] = [
    ("503", {"count": 2}, 3),
    ("503", {"count": 1, "seconds": 0.1}, 2),
    ("429", {"count": 2}, 3),
    ("500", {"count": 2}, 3),
    ("hang", {"count": 1}, 2),
    ("hang-body", {"count": 1, "after": 1_000_000}, 2),
    ("truncate", {"count": 2, "after": 600_000}, 3),
    ("reset", {"count": 1}, 2),
    ("reset", {"count": 1, "after": 1_000_000}, 2),
    ("garbage", {"count": 1}, 2),
]


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def store(lab: Lab) -> Lab:
    lab.store.put("bucket", "faulty", BODY)
    lab.store.reset()
    return lab


def gets(lab: Lab) -> int:
    return sum(1 for request in lab.store.requests() if request["kind"] == "get")


@pytest.mark.parametrize(("action", "arguments", "requests"), TABLE, ids=lambda v: str(v))
def test_faults_that_pass(
    store: Lab, client: str, action: str, arguments: dict[str, Any], requests: int
) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.fault(action, **arguments)
        assert await content(there, info) == BODY
        assert there._attempts.metrics.origin_errors == 0
        assert gets(store) == requests
        if (client, action, arguments.get("after")) != ("fsspec", "reset", None):
            # aiohttp repeats a GET by itself when a kept connection breaks before the reply.
            assert there._attempts.metrics.origin_get == requests
            assert there._attempts.metrics.origin_retries == requests - 1
        # What arrived before a body broke is not asked for again.
        if client == "curl":
            assert there._attempts.metrics.origin_bytes == SIZE
            assert store.store.counters()["bytes_sent"]["get"] <= SIZE * 1.7

    run(store.origin(client, stall_s=0.3), use)


@pytest.mark.parametrize(("action", "arguments", "requests"), TABLE, ids=lambda v: str(v))
def test_faults_that_pass_for_a_key_that_no_path_can_hold(
    store: Lab, action: str, arguments: dict[str, Any], requests: int
) -> None:
    store.store.put("bucket", "faulty\x01", BODY)

    async def use(there: Origin) -> None:
        info = await there.head("faulty\x01")
        store.store.fault(action, **arguments)
        assert await content(there, info) == BODY
        assert gets(store) == requests == there._attempts.metrics.origin_get
        assert there._attempts.metrics.origin_throttled == (
            arguments["count"] if action in ("503", "429") else 0
        )
        assert there._attempts.metrics.origin_errors == 0 and there._attempts.metrics.origin_bytes == SIZE
        assert store.store.counters()["bytes_sent"]["get"] <= SIZE * 1.7

    try:
        run(store.origin(stall_s=0.3), use)
    finally:
        store.store.clear_faults()
        store.remove("faulty\x01")


def test_refusals_for_a_key_that_no_path_can_hold(store: Lab) -> None:
    store.store.put("bucket", "faulty\x01", BODY)

    async def use(there: Origin) -> None:
        info = await there.head("faulty\x01")
        for action, error, line in (
            ("403", PermissionDenied, r"the origin answered 403 AccessDenied.*credentials came from"),
            ("wrong-etag", ObjectChanged, r"the object changed at the origin"),
            ("500", OriginFailed, r"gave up after 6 attempts: .*500 InternalError"),
        ):
            store.store.fault(action)
            for start, stop in ((0, SIZE), (5, 10)):
                with pytest.raises(error, match=line) as failure:
                    await content(there, info, start, stop)
                assert "\n" not in str(failure.value) and "Signature" not in str(failure.value)
            store.store.clear_faults()
        for key in ("a/../faulty\x01", "./faulty\x01", "../x"):  # HTTP would ask for another object
            with pytest.raises(Unsupported):
                await there.head(key)
        store.store.reset()
        sink = Collect()
        with pytest.raises(RuntimeError):  # a reader that goes away in the middle leaves no connection in use
            await there.read(info.key, info.etag, 0, SIZE, Leaving())
        await there.read(info.key, info.etag, 0, SIZE, sink, whole=True)
        assert sink.data == BODY and gets(store) == 2

    run(store.origin(), use)
    store.remove("faulty\x01")


class Leaving(Collect):
    def write(self, data: memoryview | bytes) -> None:
        raise RuntimeError("gone")


@pytest.mark.parametrize("action", ["500", "truncate", "reset"])
def test_faults_that_stay(store: Lab, client: str, action: str) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.fault(action, after=0 if action == "truncate" else None)
        with pytest.raises(OriginFailed, match="gave up after 6 attempts") as failure:
            await content(there, info)
        assert "\n" not in str(failure.value) and "X-Amz" not in str(failure.value)
        # Aiohttp's own repetition.
        assert gets(store) == (12 if (client, action) == ("fsspec", "reset") else 6)
        store.store.clear_faults()
        assert await content(there, info) == BODY

    run(store.origin(client), use)


def test_a_throttled_store_is_asked_less(store: Lab, client: str) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.fault("503", count=3)
        assert await content(there, info, 0, 100) == BODY[:100]
        assert there.status()["concurrency"] == 8
        assert there._attempts.metrics.origin_throttled == 3
        for _ in range(8):
            await content(there, info, 0, 100)
        assert there.status()["concurrency"] == 9

    run(store.origin(client), use)


def test_an_object_that_changes_while_it_is_read(store: Lab, client: str) -> None:
    """The bytes that come belong to the version that was asked for; the rest is refused."""

    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.fault("etag", count=1, after=500_000)
        sink = Collect()
        await there.read("faulty", info.etag, 0, 1_000_000, sink)
        assert sink.data == BODY[:1_000_000]
        with pytest.raises(ObjectChanged):
            await there.read("faulty", info.etag, 1_000_000, SIZE, sink)
        assert sink.data == BODY[:1_000_000]

    run(store.origin(client), use)


def test_a_body_that_breaks_and_whose_object_changed(store: Lab, client: str) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.fault("truncate", count=1, after=1_000_000)

        class Replacing(Collect):
            def write(self, data: memoryview | bytes) -> None:
                if not self.data:
                    store.store.replace("bucket", "faulty")
                super().write(data)

        sink = Replacing()
        with pytest.raises(ObjectChanged):
            await there.read("faulty", info.etag, 0, SIZE, sink)
        assert BODY.startswith(bytes(sink.data))

    run(store.origin(client), use)


def test_a_store_that_ignores_conditions(store: Lab, client: str) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.fault("wrong-etag")
        sink = Collect()
        for start, stop in ((0, 100), (0, SIZE)):
            with pytest.raises(ObjectChanged):
                await there.read("faulty", info.etag, start, stop, sink, whole=stop == SIZE)
        assert sink.data == b""

    run(store.origin(client), use)


@pytest.mark.parametrize("kind", ["list", "head"])
@pytest.mark.parametrize("action", ["503", "500", "reset", "hang"])
def test_faults_of_listings_and_heads(store: Lab, client: str, kind: str, action: str) -> None:
    async def use(there: Origin) -> None:
        await there.check()
        store.store.reset()
        store.store.fault(action, kind=kind, count=1)
        if kind == "list":
            assert [o.key for o in (await there.list_page("")).objects] == ["faulty"]
        else:
            assert (await there.head("faulty")).size == SIZE
        assert store.store.counters()["requests"][kind] == 2

    store.store.put("faults", "faulty", BODY)
    run(store.origin(client, stall_s=0.3, url="s3://faults"), use)


def test_ten_thousand_names_are_ten_requests(store: Lab, client: str) -> None:
    store.store.synthesize("many", "d/", 10_000, 10)
    store.store.reset()

    async def use(there: Origin) -> None:
        found = await pages(there, "d/")
        assert sum(len(page.objects) for page in found) == 10_000
        assert store.store.counters()["requests"] == {"list": 10}

    run(store.origin(client, url="s3://many"), use)


def test_a_missing_bucket_is_one_clear_line(store: Lab, client: str) -> None:
    with pytest.raises(NotFound, match=r"s3://nowhere/: no such bucket .*check its name") as failure:
        run(store.origin(client, url="s3://nowhere"), lambda o: o.check())
    assert "\n" not in str(failure.value)


def test_an_empty_prefix_is_fine(store: Lab, client: str) -> None:
    run(store.origin(client, url="s3://bucket/nothing/yet"), lambda o: o.check())


def test_a_store_that_is_not_there(client: str, start: Any) -> None:
    server = start("lab")
    options = {"endpoint_url": "http://127.0.0.1:9", "stall_s": 0.3}
    with pytest.raises(
        OriginFailed, match=r"s3://bucket/: gave up after 3 attempts: .*(refused|connect)"
    ) as failure:
        run(server.origin(client, **options), lambda o: o.check())
    assert "\n" not in str(failure.value)


def credentials_file(path: Path, key: str, profile: str = "default", token: str = "") -> None:
    lines = [f"[{profile}]", f"aws_access_key_id = {key}", "aws_secret_access_key = SECRETSECRET"]
    path.write_text("\n".join(lines + ([f"aws_session_token = {token}"] if token else [])) + "\n")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty credentials file, and no other place to find any."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    path.write_text("")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    return path


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One entry each time that environment and files were read again."""
    found: list[float] = []

    class Counted(botocore.session.Session):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            found.append(time.monotonic())
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(botocore.session, "Session", Counted)
    return found


@pytest.mark.parametrize("key", ["faulty", "faulty\x01"])
@pytest.mark.parametrize("profile", ["default", "work"])
def test_new_keys_while_the_first_read_still_opens_its_store(
    store: Lab, client: str, file: Path, profile: str, key: str
) -> None:
    """The listing has the old keys, and the client that reads is opened with them in the very attempt that fails."""
    store.store.put("bucket", key, BODY)
    credentials_file(file, "old", profile, token="t1")

    async def use(there: Origin) -> None:
        info = next(o for o in (await there.list_page("")).objects if o.key == key)
        for number in range(3):  # and each time again
            store.store.credentials(allowed=[f"new{number}"], expired=["old"])
            credentials_file(file, f"new{number}", profile, token=f"t{number}")
            store.store.reset()
            assert await content(there, info) == BODY
            assert gets(store) == 2
        assert there._attempts.metrics.origin_errors == 0

    options = {} if profile == "default" else {"profile": profile}
    run(store.origin(client, **options), use)
    if key != "faulty":
        store.remove(key)


def test_an_expired_token_beside_the_same_key(file: Path) -> None:
    """Temporary credentials may keep their id; the token alone makes them others."""
    from cachefs.origin.s3 import AwsCredentials

    credentials_file(file, "same", token="first")
    credentials = AwsCredentials(None, False)
    assert credentials.current().token == "first"
    since = time.monotonic()
    assert not credentials.renew(since)
    credentials_file(file, "same", token="second")
    assert credentials.renew(since)
    assert credentials.current().token == "second"
    file.write_text("")
    since = time.monotonic()
    assert not credentials.renew(since)
    with pytest.raises(PermissionDenied):
        credentials.current()
    since = time.monotonic()
    credentials_file(file, "same", token="second")  # as before it was gone
    assert credentials.renew(since)


def test_a_wrong_key_that_stays_is_looked_up_once_a_request(
    store: Lab, client: str, file: Path, looks: list[float]
) -> None:
    credentials_file(file, "old")

    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.credentials(allowed=["new"])
        for _ in range(3):
            looks.clear()
            store.store.reset()
            with pytest.raises(PermissionDenied):
                await content(there, info)
            assert (len(looks), gets(store)) == (1, 1)
        looks.clear()
        store.store.reset()
        refused = []

        async def one(at: int) -> None:
            try:
                await content(there, info, at, at + 10)
            except PermissionDenied:
                refused.append(at)

        async with trio.open_nursery() as nursery:
            for at in range(20):
                nursery.start_soon(one, at)
        assert (len(refused), gets(store)) == (20, 20)
        assert 1 <= len(looks) <= 20

    run(store.origin(client), use)


@pytest.mark.parametrize(
    "raised",
    [
        ClientError({"Error": {"Code": "ExpiredTokenException", "Message": "too late"}}, "AssumeRole"),
        FileNotFoundError(2, "No such file or directory", "/var/run/token"),
        RuntimeError("Credentials were refreshed, but the refreshed credentials are still expired."),
    ],
    ids=lambda raised: type(raised).__name__,
)
def test_a_role_that_cannot_be_had_any_more(
    store: Lab, monkeypatch: pytest.MonkeyPatch, raised: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """botocore raises what the token service answers, and what a token's file and its own clock say, as it comes."""

    def fails(_: object) -> None:
        raise raised

    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.credentials(expired=["tester"])
        monkeypatch.setattr(botocore.session.Session, "get_credentials", fails)
        for _ in range(2):  # the origin refuses the old credentials, then there are none
            with pytest.raises(PermissionDenied):
                await content(there, info)
        with pytest.raises(PermissionDenied, match="AWS credentials cannot be had: ") as refused:
            await there.head("faulty")
        assert "\n" not in str(refused.value)

    run(store.origin(), use)
    assert not caplog.records


def credentials_wait(
    there: Origin, monkeypatch: pytest.MonkeyPatch
) -> tuple[threading.Event, threading.Event]:
    """Have the credentials of each request wait. Returns (set when a request asks for them, to be set for them to come)."""
    place = there._client.place  # type: ignore[attr-defined]
    asked, come, sign = threading.Event(), threading.Event(), place.sign

    def slow(*request: Any) -> Any:
        asked.set()
        come.wait(10)
        return sign(*request)

    monkeypatch.setattr(place, "signer", lambda: None)
    monkeypatch.setattr(place, "sign", slow)
    return asked, come


def test_credentials_that_take_long_hold_no_threads_of_others(
    store: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal, the index and the names are written in trio's own threads, of which there are forty."""
    others = trio.to_thread.current_default_thread_limiter

    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        asked, come = credentials_wait(there, monkeypatch)
        async with trio.open_nursery() as nursery:
            for at in range(50):
                nursery.start_soon(content, there, info, at, at + 10)
            await until(asked.is_set)
            assert others().borrowed_tokens == 0
            come.set()

    run(store.origin(), use)
    assert gets(store) == 50


@pytest.mark.parametrize("change", ["delete", "put", "copy", "upload"])
def test_a_change_whose_caller_has_given_up_is_not_sent_when_the_credentials_come(
    store: Lab, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Its caller was told that it failed, and may have written to the key since."""

    async def use(there: Origin) -> None:
        await there.head("faulty")
        asked, come = credentials_wait(there, monkeypatch)
        store.store.reset()
        async with trio.open_nursery() as nursery:
            if change == "delete":
                nursery.start_soon(there.delete, "faulty")
            elif change == "put":
                nursery.start_soon(there.put, "faulty", InMemory(b""), 0)
            elif change == "copy":
                nursery.start_soon(lambda: there.copy("faulty", "other", size=SIZE))
            else:
                nursery.start_soon(there.begin_upload, "faulty")
            await until(asked.is_set)
            nursery.cancel_scope.cancel()
        come.set()
        await until(lambda: there._attempts.threads.borrowed_tokens == 0)

    run(store.origin(), use)
    assert store.store.requests() == []


def test_no_thread_to_look_for_credentials_in(
    store: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        monkeypatch.setattr(there._client.place, "signer", lambda: None)  # type: ignore[attr-defined]
        threads.first_fails(monkeypatch)
        assert await content(there, info, 0, 10) == BODY[:10]
        assert there._attempts.metrics.origin_retries == 1

    run(store.origin(), use)
    assert not caplog.records


def test_no_thread_to_read_a_page_of_a_listing_in(
    store: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("cachefs.origin.s3.UNREAD_BYTES", 1)

    async def use(there: Origin) -> None:
        await there.head("faulty")
        threads.first_fails(monkeypatch)
        assert "faulty" in [found.key for found in (await there.list_page("")).objects]
        assert there._attempts.metrics.origin_retries == 1

    run(store.origin(), use)
    assert not caplog.records


class Crowded:
    """A lock that knows how many have come to it."""

    def __init__(self) -> None:
        self.came = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.came += 1
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("key", ["old", "new"])
def test_refused_together_means_looking_together(file: Path, looks: list[float], key: str) -> None:
    """Threads that wait for one reading of the files take its answer; one that was refused later reads again."""
    from cachefs.origin.s3 import AwsCredentials

    credentials_file(file, "old")
    credentials = AwsCredentials(None, False)
    credentials.current()
    since = time.monotonic()
    credentials_file(file, key)
    looks.clear()
    answers: list[bool] = []
    lock = credentials._lock = Crowded()  # type: ignore[assignment]
    threads = [
        threading.Thread(target=lambda: answers.append(credentials.renew(since)), daemon=True)
        for _ in range(20)
    ]
    with lock:  # all are refused before the first can look
        for thread in threads:
            thread.start()
        for _ in range(1000):
            if lock.came == 21:
                break
            time.sleep(0.01)
    for thread in threads:
        thread.join()
    assert answers == [key == "new"] * 20
    assert len(looks) == 1
    assert credentials.renew(since) is (key == "new")
    assert len(looks) == (1 if key == "new" else 2)


def test_expired_credentials_and_their_renewal(
    store: Lab, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in aws_env():
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    credentials_file(path, "old")

    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        assert await content(there, info) == BODY
        store.store.credentials(expired=["old"])
        attempts = [there.head("faulty"), there.list_page(""), content(there, info)]
        for attempt in attempts:
            with pytest.raises(PermissionDenied) as refused:
                await attempt
            line = str(refused.value)
            assert line.startswith("s3://bucket/") and "credentials file" in line and "renew" in line
            assert "\n" not in line and "SECRET" not in line
        store.store.reset()
        credentials_file(path, "new")
        # Found at the very next request, which therefore is two.
        assert await content(there, info) == BODY
        assert gets(store) == 2
        assert await there.head("faulty") == info
        assert (await there.list_page("")).objects

    run(store.origin(client), use)


def test_readers_that_are_refused_together_recover_together(
    store: Lab, client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    credentials_file(path, "old")

    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.credentials(expired=["old"])
        credentials_file(path, "new")
        async with trio.open_nursery() as nursery:
            for at in range(20):
                nursery.start_soon(content, there, info, at, at + 10)
        assert there._attempts.metrics.origin_errors == 0

    run(store.origin(client), use)


def test_wrong_and_missing_credentials(store: Lab, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store.store.credentials(allowed=["somebody"])
    with pytest.raises(PermissionDenied, match=r"403.*the environment \(AWS_ACCESS_KEY_ID\)"):
        run(store.origin(client), lambda o: o.check())
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    with pytest.raises(PermissionDenied, match="no AWS credentials found: set AWS_ACCESS_KEY_ID"):
        run(store.origin(client), lambda o: o.check())
    store.store.credentials()
    run(store.origin(client, anonymous=True), lambda o: o.check())


def test_one_denied_object(store: Lab, client: str) -> None:
    store.store.put("bucket", "secret/x", b"x")
    store.store.credentials(denied=["secret/"])

    async def use(there: Origin) -> None:
        with pytest.raises(PermissionDenied):
            await there.head("secret/x")
        assert await there.head("faulty")

    run(store.origin(client), use)
    store.store.credentials()
    store.remove("secret/x")


def test_many_reads_at_once_stay_within_the_limit(store: Lab, client: str) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.shape(latency_ms=20)
        wrong: list[int] = []

        async def one(at: int) -> None:
            if await content(there, info, at, at + 1000) != BODY[at : at + 1000]:
                wrong.append(at)

        async with trio.open_nursery() as nursery:
            for at in range(0, 30_000, 1000):
                nursery.start_soon(one, at)
        assert not wrong
        assert store.store.counters()["max_in_flight"] <= 8

    try:
        run(store.origin(client, concurrency=8), use)
    finally:
        store.store.shape(latency_ms=0)
    assert threading.active_count() < 60
