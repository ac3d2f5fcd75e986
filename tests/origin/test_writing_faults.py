"""The fault table of writing: what the lab store does wrong at each step, and what comes of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from bench.lab.dataset import content as bytes_of
from cachefs.base.errors import (
    Conflict,
    NoSuchUpload,
    NotFound,
    ObjectChanged,
    OriginFailed,
    PermissionDenied,
)
from cachefs.origin import FileRange, InMemory, Origin, each, origin
from cachefs.origin.s3 import S3Client
from tests.origin.pending import abort, pending
from tests.origin.reading import content, run
from tests.origin.servers import Lab
from tests.origin.test_faults import credentials_file
from tests.origin.writing import MIB, as_shown, file_of

BODY = bytes_of("written", 700_001)
PART = 300_000


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    with file_of(tmp_path / "body", BODY) as fd:
        yield fd


@pytest.fixture
def store(lab: Lab) -> Lab:
    lab.store.put("bucket", "source", BODY)
    for key in ("w/x", "w/y"):
        lab.store.delete("bucket", key)
    lab.store.reset()
    return lab


def asked(store: Lab, kind: str) -> int:
    return sum(1 for request in store.store.requests() if request["kind"] == kind)


async def in_parts(there: Origin, fd: int, key: str = "w/x") -> None:
    """All of BODY in three parts."""
    upload = await there.begin_upload(key)
    for number, at in enumerate(range(0, len(BODY), PART), 1):
        await upload.part(number, FileRange(fd, at), min(PART, len(BODY) - at))
    await upload.parts()
    await as_shown(there, await upload.complete(), BODY)


async def whole(there: Origin, fd: int) -> None:
    await as_shown(there, await there.put("w/x", FileRange(fd), len(BODY)), BODY)


async def copied(there: Origin, fd: int) -> None:
    await as_shown(there, await there.copy("source", "w/x", size=len(BODY)), BODY)


async def given_up(there: Origin, fd: int) -> None:
    upload = await there.begin_upload("w/x")
    await upload.part(1, FileRange(fd, 0), PART)
    assert upload.id in {found.id for found in await pending(there, "w/")}
    await upload.abort()
    with pytest.raises(NoSuchUpload):
        await upload.parts()


async def deleted(there: Origin, fd: int) -> None:
    await there.put("w/x", InMemory(b"x"), 1)
    await there.delete("w/x")
    assert await there.delete_many(["w/y", "w/z"]) == {}
    with pytest.raises(NotFound):
        await there.head("w/x")


STEPS = [
    ("put", whole),
    ("create_upload", in_parts),
    ("upload_part", in_parts),
    ("list_parts", in_parts),
    ("complete_upload", in_parts),
    ("copy", copied),
    ("abort_upload", given_up),
    ("delete", deleted),
    ("delete_many", deleted),
]
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("503", {"count": 2}),
    ("429", {"count": 1, "seconds": 0.05}),
    ("500", {"count": 2}),
    ("reset", {"count": 1}),
    ("lost-reply", {"count": 1}),
    ("truncate", {"count": 1, "after": 10}),
    ("garbage", {"count": 1}),
]
BODILESS = {"put", "upload_part", "abort_upload", "delete"}
"""Kinds whose reply has no body that could be cut short."""


@pytest.mark.parametrize(("action", "arguments"), FAULTS, ids=lambda v: v if isinstance(v, str) else "")
@pytest.mark.parametrize(("kind", "use"), STEPS, ids=lambda v: v if isinstance(v, str) else "")
def test_faults_that_pass(
    store: Lab,
    fd: int,
    kind: str,
    use: Callable[[Origin, int], Any],
    action: str,
    arguments: dict[str, Any],
) -> None:
    if action == "truncate" and kind in BODILESS:
        return
    rule = store.store.fault(action, kind=kind, **arguments)
    there = store.origin(stall_s=2.0)
    run(there, lambda there: use(there, fd))
    assert store.store.faults_fired()[rule] == arguments["count"]
    assert there._attempts.metrics.origin_errors <= (1 if kind == "abort_upload" else 0)
    assert there._attempts.metrics.origin_throttled == (arguments["count"] if action in ("503", "429") else 0)
    usual = 3 if kind == "upload_part" else 1
    done = action in ("lost-reply", "truncate") and kind == "complete_upload"
    assert asked(store, kind) == usual + (0 if done else arguments["count"])


@pytest.mark.parametrize(
    ("kind", "use"),
    [*STEPS[:4], *(pytest.param(*step, marks=pytest.mark.long) for step in STEPS[4:6])],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_silent_store(store: Lab, fd: int, kind: str, use: Callable[..., Any]) -> None:
    rule = store.store.fault("hang", kind=kind, count=1)
    there = store.origin(stall_s=0.25)
    run(there, lambda there: use(there, fd))
    assert store.store.faults_fired()[rule] == 1 and there._attempts.metrics.origin_errors == 0
    assert there._attempts.metrics.origin_retries >= 1  # a busy machine may be silent for so long, too


@pytest.mark.parametrize(("kind", "use"), [STEPS[0], STEPS[2], STEPS[4]], ids=["put", "part", "complete"])
def test_faults_that_stay(store: Lab, fd: int, kind: str, use: Callable[..., Any]) -> None:
    async def fail(there: Origin) -> None:
        store.store.fault("500", kind=kind)
        with pytest.raises(OriginFailed, match="gave up after 6 attempts") as failure:
            await use(there, fd)
        assert "\n" not in str(failure.value) and "Signature" not in str(failure.value)
        assert asked(store, kind) == 6
        store.store.clear_faults()
        store.store.fault("403", kind=kind)
        with pytest.raises(PermissionDenied, match=r"403 AccessDenied.*credentials came from"):
            await use(there, fd)
        with pytest.raises(NotFound):
            await there.head("w/x")
        for upload in await pending(there, "w/"):
            await abort(there, upload)

    run(store.origin(), fail)


def test_completing_is_found_to_have_happened(store: Lab, fd: int) -> None:
    """The reply is lost and the store remembers no upload: the object shows our idempotency token."""

    async def use(there: Origin) -> None:
        store.store.fault("lost-reply", kind="complete_upload", count=1)
        await in_parts(there, fd)
        assert asked(store, "complete_upload") == 1
        assert await pending(there, "w/") == []

    run(store.origin(), use)


def test_an_object_of_another_client_is_not_taken_for_ours(store: Lab, fd: int) -> None:
    async def use(there: Origin) -> None:
        upload = await there.begin_upload("w/x")
        await upload.part(1, FileRange(fd, 0), len(BODY))
        await store_aborts(store, upload.id)
        store.store.put("bucket", "w/x", BODY)  # the very same bytes
        with pytest.raises(NoSuchUpload):
            await upload.complete()

    async def store_aborts(store: Lab, name: str) -> None:
        await other.resume_upload("w/x", {"id": name}).abort()

    other = store.origin()
    run(store.origin(), use)


@pytest.mark.parametrize("scheme", ["lab", "lab-google"])
def test_a_conditional_put_is_found_to_have_happened(start: Any, scheme: str) -> None:
    lab = start(scheme)
    lab.store.delete("bucket", "w/once")

    async def use(there: Origin) -> None:
        lab.store.fault("lost-reply", kind="put", count=1)
        info = await there.put("w/once", InMemory(b"mine"), 4, if_absent=True)
        await as_shown(there, info, b"mine")
        lab.store.clear_faults()
        lab.store.fault("lost-reply", kind="put", count=1)
        if scheme == "lab":
            again = await there.put("w/once", InMemory(b"mine too"), 8, if_match=info.etag)
            await as_shown(there, again, b"mine too")
        lab.store.clear_faults()
        with pytest.raises(Conflict):
            await there.put("w/once", InMemory(b"mine"), 4, if_absent=True)

    run(lab.origin(), use)


def test_what_is_replaced_at_once_is_said(store: Lab) -> None:
    """Between the PUT and the HEAD that tells its time."""

    async def use(there: Origin) -> None:
        writer = there.writer
        put = writer.put

        def and_then(*args: Any) -> Any:
            written = put(*args)
            store.store.put("bucket", "w/x", b"of another client")
            return written

        writer.put = and_then  # type: ignore[method-assign]
        with pytest.raises(ObjectChanged, match="was replaced as soon as it was written"):
            await there.put("w/x", InMemory(b"mine"), 4)

    run(store.origin(), use)


def test_bytes_that_do_not_arrive_as_they_were_are_sent_again(store: Lab) -> None:
    class Changing:
        """Other bytes when read a second time, as if they had been damaged on the way."""

        reads = 0

        def read(self, at: int, count: int) -> bytes:
            self.reads += 1
            return bytes([self.reads == 2]) * count

    async def use(there: Origin) -> None:
        info = await there.put("w/x", Changing(), 1000)
        assert await content(there, info) == bytes(1000)
        assert there._attempts.metrics.origin_retries == 1 and asked(store, "put") == 2

    run(store.origin(), use)


def test_renewed_credentials(store: Lab, fd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    credentials_file(path, "key0")

    async def use(there: Origin) -> None:
        upload = await there.begin_upload("w/x")
        steps = [
            lambda: upload.part(1, FileRange(fd, 0), len(BODY)),
            lambda: upload.parts(),
            lambda: upload.complete(),
            lambda: there.put("w/y", FileRange(fd), len(BODY)),
            lambda: there.delete("w/y"),
        ]
        for number, step in enumerate(steps, 1):
            store.store.credentials(expired=[f"key{number - 1}"])
            credentials_file(path, f"key{number}")
            await step()
        assert await content(there, await there.head("w/x")) == BODY
        assert there._attempts.metrics.origin_errors == 0

    run(store.origin(), use)


def test_parts_at_once_are_bounded_and_all_land(store: Lab, fd: int) -> None:
    async def use(there: Origin) -> None:
        upload = await there.begin_upload("w/x")
        step = 20_000
        store.store.shape(latency_ms=10)

        async def send(number: int) -> None:
            at = (number - 1) * step
            await upload.part(number, FileRange(fd, at), min(step, len(BODY) - at))

        async with trio.open_nursery() as nursery:
            for number in range(1, 1 + -(-len(BODY) // step)):
                nursery.start_soon(send, number)
        counters = store.store.counters()
        assert 2 <= counters["max_in_flight"] <= 4
        assert (
            counters["bytes_received"]["upload_part"]
            == len(BODY)
            == there._attempts.metrics.origin_bytes_sent
        )
        store.store.shape(latency_ms=0)
        await as_shown(there, await upload.complete(), BODY)

    try:
        run(store.origin(concurrency=4), use)
    finally:
        store.store.shape(latency_ms=0)
    assert threading.active_count() < 60


def test_a_throttled_store_is_asked_less(store: Lab) -> None:
    async def use(there: Origin) -> None:
        store.store.fault("503", kind="put", count=3)
        await there.put("w/x", InMemory(b"x"), 1)
        assert there.status()["concurrency"] == 8 and there._attempts.metrics.origin_throttled == 3

    run(store.origin(), use)


def peak() -> int:
    """The most memory this process has had since `forget_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@pytest.mark.parametrize("way", [pytest.param("put", marks=pytest.mark.long), "part"])
def test_memory_stays_flat(store: Lab, tmp_path: Path, way: str) -> None:
    size = 256 * MIB

    async def use(there: Origin) -> None:
        await there.put("w/x", InMemory(b"warm"), 4)
        with file_of(tmp_path / "large", b"") as fd:
            (tmp_path / "large").open("r+b").truncate(size)
            forget_peak()
            before = peak()
            if way == "put":
                info = await there.put("w/x", FileRange(fd), size)
            else:
                upload = await there.begin_upload("w/x")
                async with trio.open_nursery() as nursery:
                    for number in range(1, 9):
                        part = size // 8
                        nursery.start_soon(upload.part, number, FileRange(fd, (number - 1) * part), part)
                info = await upload.complete()
            grown = peak() - before
        assert info.size == size
        assert grown < 24 * MIB, f"{grown / MIB:.0f} MiB for {size / MIB:.0f}"

    run(store.origin(), use)
    store.store.delete("bucket", "w/x")


def test_a_copy_in_parts_asks_once_a_gibibyte(store: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or less often, where the origin takes no more parts."""
    there, lengths = store.origin(), list[int]()

    async def copy_part(number: int, key: str, etag: str, start: int, stop: int) -> None:
        lengths.append(stop - start)

    async def made(*_: object) -> Any:
        return SimpleNamespace(id="1", copy_part=copy_part, complete=trio.lowlevel.checkpoint)

    async def compares(*_: object) -> bool:
        return True

    monkeypatch.setattr(there, "begin_upload", made)
    monkeypatch.setattr(there._probes, "copies_parts", compares)
    gib = 1 << 30
    for size, most, wanted in (
        (gib, 1, [gib]),
        (6 * gib + 1, 9, [1, *[gib] * 6]),
        (6 * gib, 3, [2 * gib] * 3),
    ):
        monkeypatch.setattr(there.writer, "limits", replace(there.limits, most_parts=most))
        run(there, lambda there, size=size: there._copy_in_parts("a", "b", size, '"1"'))
        assert sorted(lengths) == wanted
        lengths.clear()


def test_copying_in_parts(store: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    there = store.origin()
    monkeypatch.setattr(there.writer, "limits", replace(there.limits, largest_copy=500_000))
    monkeypatch.setattr(origin, "COPIED_PART", PART)

    async def use(there: Origin) -> None:
        for upload in await pending(there, "w/"):
            await abort(there, upload)  # another test has lost the reply that named it
        info = await there.head("source")
        await as_shown(there, await there.copy("source", "w/x", size=len(BODY), etag=info.etag), BODY)
        assert (asked(store, "copy_part"), asked(store, "copy"), asked(store, "upload_part")) == (4, 0, 0)
        # the first of them was to find out whether the store compares
        store.store.put("bucket", "source", BODY[::-1])
        with pytest.raises(ObjectChanged):
            await there.copy("source", "w/y", size=len(BODY), etag=info.etag)
        assert await pending(there, "w/") == []
        with pytest.raises(NotFound):
            await there.head("w/y")

    run(there, use)


def test_deleting_many(store: Lab) -> None:
    names = [f"many/{number} &<>" for number in range(2500)]
    store.store.synthesize("victims", "d/", 1500, 10)

    async def use(there: Origin) -> None:
        assert await there.delete_many(names) == {}
        assert store.store.counters()["requests"] == {"delete_many": 3}
        keys = [f"d/name-{number:07d}.bin" for number in range(1500)]
        store.store.credentials(denied=[keys[3]])
        left = await there.delete_many([*keys, "d/\x01"])
        assert left.keys() == {keys[3]} and isinstance(left[keys[3]], PermissionDenied)
        store.store.credentials()
        assert [found.key for found in (await there.list_page("d/")).objects] == [keys[3]]

    run(store.origin(url="s3://victims"), use)


@pytest.mark.long
def test_more_parts_than_a_page_holds(store: Lab, fd: int) -> None:
    async def use(there: Origin) -> None:
        upload = await there.begin_upload("w/x")
        await each(lambda number: upload.part(number, FileRange(fd, number), 1), range(1, 1004), 16)
        sent = dict(upload.known)
        assert await upload.parts() == sent and len(sent) == 1003
        await upload.abort()

    run(store.origin(), use)


def test_keys_that_no_path_can_hold(store: Lab) -> None:
    async def use(there: Origin) -> None:
        assert isinstance(there.writer, S3Client)
        for key in ("h/\x01", "h//b", "/lead", "h/new\nline", "h/marker/"):
            info = await there.put(key, InMemory(b"?"), 1)
            assert await there.head(key) == info
            await there.copy(key, key + "2", size=1)
            await there.delete(key)
            await there.delete(key + "2")
            with pytest.raises(NotFound):
                await there.head(key)

    run(store.origin(), use)
