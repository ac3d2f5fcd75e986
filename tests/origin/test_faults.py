"""The fault table: what the lab store does wrong, and what comes of it, in results and in requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from bench.lab.dataset import content as bytes_of
from cachefs.errors import NotFound, ObjectChanged, OriginFailed, PermissionDenied
from cachefs.origin import Origin
from tests.origin.reading import Collect, content, pages, run
from tests.origin.servers import Lab, aws_env

SIZE = 3_000_000
BODY = bytes_of("faulty", SIZE)
CLIENTS = ["obstore", "fsspec"]

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
        assert there._metrics.origin_errors == 0
        assert gets(store) == requests
        if (client, action, arguments.get("after")) != ("fsspec", "reset", None):
            # aiohttp repeats a GET by itself when a kept connection breaks before the reply.
            assert there._metrics.origin_get == requests
            assert there._metrics.origin_retries == requests - 1
        # What arrived before a body broke is not asked for again.
        if client == "obstore":
            assert there._metrics.origin_bytes == SIZE
            assert store.store.counters()["bytes_sent"]["get"] <= SIZE * 1.7

    run(store.origin(client, stall_s=0.3), use)


@pytest.mark.parametrize("action", ["500", "truncate", "reset"])
def test_faults_that_stay(store: Lab, client: str, action: str) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.fault(action, after=0 if action == "truncate" else None)
        with pytest.raises(OriginFailed, match="gave up after 6 attempts") as failure:
            await content(there, info)
        assert "\n" not in str(failure.value) and "X-Amz" not in str(failure.value)
        assert gets(store) == (
            12 if (client, action) == ("fsspec", "reset") else 6
        )  # aiohttp's own repetition
        store.store.clear_faults()
        assert await content(there, info) == BODY

    run(store.origin(client), use)


def test_a_throttled_store_is_asked_less(store: Lab, client: str) -> None:
    async def use(there: Origin) -> None:
        info = await there.head("faulty")
        store.store.fault("503", count=3)
        assert await content(there, info, 0, 100) == BODY[:100]
        assert there.status()["concurrency"] == 8
        assert there._metrics.origin_throttled == 3
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


def credentials_file(path: Path, key: str) -> None:
    path.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = SECRETSECRET\n")


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
        assert there._metrics.origin_errors == 0

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
