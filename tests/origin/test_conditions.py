"""Conditions count only where the store honours them, and what Ceph's RADOS Gateway does otherwise than AWS, by quirks of
the lab store. The gateway itself is in the contract suites."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from cachefs.origin import InMemory, Origin, origin
from cachefs.origin.protocol import HONOURED, Condition, of_endpoint
from tests.origin.pending import abort, pending
from tests.origin.reading import content, run, until
from tests.origin.servers import Lab
from tests.origin.writing import as_shown

BODY = bytes_of("conditions", 700_001)
PART = 300_000
COPIES = "copies-whatever-the-condition"
PUTS = "puts-whatever-the-condition"
COMPLETES = "completes-whatever-the-condition"


@pytest.fixture
def store(lab: Lab) -> Iterator[Lab]:
    for key in ("q/a", "q/b", "q/x"):
        lab.store.delete("bucket", key)
    lab.store.reset()
    yield lab
    lab.store.credentials()
    assert probe_objects(lab) == [], "a probe leaves nothing"


def probe_objects(lab: Lab) -> list[str]:
    async def use(there: Origin) -> list[str]:
        found = [info.key for info in (await there.list_page("")).objects if "cachefs-probe" in info.key]
        return found + [upload.key for upload in await pending(there, ".cachefs-probe")]

    return run(lab.origin(), use)


def requests(store: Lab) -> dict[str, int]:
    return dict(store.store.counters()["requests"])


async def complete(there: Origin, body: bytes = BODY, **preconditions: Any) -> Any:
    upload = await there.begin_upload("q/x")
    for number, at in enumerate(range(0, len(body), PART), 1):
        await upload.part(number, InMemory(body[at : at + PART]), len(body[at : at + PART]))
    try:
        return await upload.complete(**preconditions)
    except BaseException:
        await upload.abort()
        raise


@pytest.mark.parametrize(
    ("endpoint", "trusted"),
    [
        (None, True),
        ("https://s3.eu-central-1.amazonaws.com", True),
        ("https://bucket.vpce-1.s3.us-east-1.vpce.amazonaws.com:443/", True),
        ("https://s3.cn-north-1.amazonaws.com.cn", True),
        ("http://127.0.0.1:7480", False),
        ("https://amazonaws.com.example.org", False),
        ("https://example.org/.amazonaws.com", False),
    ],
)
def test_only_amazon_is_trusted_by_its_endpoint(endpoint: str | None, trusted: bool) -> None:
    conditions = of_endpoint(endpoint)
    assert [conditions.honours(one) for one in Condition] == [True if trusted else None] * len(Condition)


def test_what_probing_costs(store: Lab) -> None:
    """Once for a mount, when the first such write comes; nothing on a store that is known."""

    async def use(there: Origin) -> None:
        info = await there.put("q/a", InMemory(BODY), len(BODY))
        store.store.reset()
        for _ in range(2):
            await there.copy("q/a", "q/b", size=len(BODY), etag=info.etag)
        assert requests(store) == {"copy": 3, "head": 2}
        store.store.reset()
        for _ in range(2):
            await there.put("q/x", InMemory(b"x"), 1, if_absent=True, settle=False)
            await there.delete("q/x")
        # an object of our own, three conditions of which one holds, and its removal
        assert requests(store) == {"put": 6, "delete": 3}
        store.store.reset()
        for _ in range(2):
            await complete(there, if_absent=True, settle=False)
            await there.delete("q/x")
        probing = {"put": 1, "delete": 1, "create_upload": 2, "upload_part": 2, "complete_upload": 2}
        wanted = {"delete": 2, "create_upload": 2, "upload_part": 6, "complete_upload": 2}
        total = {kind: probing.get(kind, 0) + wanted.get(kind, 0) for kind in probing | wanted}
        assert requests(store) == {**total, "abort_upload": 2}

    async def known(there: Origin) -> None:
        there.writer.conditions = HONOURED
        info = await there.put("q/a", InMemory(b"x"), 1, settle=False)
        store.store.reset()
        await there.copy("q/a", "q/b", size=1, etag=info.etag)
        await there.put("q/x", InMemory(b"x"), 1, if_absent=True, settle=False)
        assert requests(store) == {"copy": 1, "head": 1, "put": 1}

    run(store.origin(), use)
    run(store.origin(), known)


@pytest.mark.parametrize("quirk", ["", COPIES])
def test_a_copy_is_of_the_version_that_was_asked_for(store: Lab, quirk: str) -> None:
    store.store.quirks(*filter(None, [quirk]))

    async def use(there: Origin) -> None:
        info = await there.put("q/a", InMemory(BODY), len(BODY))
        await as_shown(there, await there.copy("q/a", "q/b", size=len(BODY), etag=info.etag), BODY)
        store.store.put("bucket", "q/a", BODY[::-1])  # another client; the size is the same
        with pytest.raises(ObjectChanged):
            await there.copy("q/a", "q/b", size=len(BODY), etag=info.etag)
        assert await content(there, await there.head("q/b")) == BODY, "nothing was copied"
        assert there.status()["ignored_conditions"] == ([Condition.COPY.value] if quirk else [])

    run(store.origin(), use)


def test_a_copy_of_a_source_that_changes_just_then_fails(store: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the HEAD before it and the copy itself: the copy's etag tells."""
    store.store.quirks(COPIES)
    there = store.origin()
    copy = there.writer.copy

    def late(key: str, to: str, etag: str | None) -> Any:
        if to == "q/b":
            store.store.replace("bucket", "q/a")
        return copy(key, to, etag)

    monkeypatch.setattr(there.writer, "copy", late)

    async def use(there: Origin) -> None:
        info = await there.put("q/a", InMemory(BODY), len(BODY))
        with pytest.raises(ObjectChanged):
            await there.copy("q/a", "q/b", size=len(BODY), etag=info.etag)

    run(there, use)


def test_a_copy_whose_etag_is_its_own_is_compared_by_its_source(store: Lab) -> None:
    """The lab, as AWS, gives the copy of an object of several parts another etag."""
    store.store.quirks(COPIES)

    async def use(there: Origin) -> None:
        info = await complete(there)
        made = await there.copy("q/x", "q/b", size=len(BODY), etag=info.etag)
        assert made.etag != info.etag
        await as_shown(there, made, BODY)

    run(store.origin(), use)


@pytest.mark.parametrize("quirk", ["", COPIES])
@pytest.mark.parametrize("when", ["before", "between"])
def test_a_copy_in_parts_is_of_one_version(
    store: Lab, quirk: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.store.quirks(*filter(None, [quirk]))
    there = store.origin()
    monkeypatch.setattr(there.writer, "limits", replace(there.limits, largest_copy=500_000))
    monkeypatch.setattr(origin, "COPIED_PART", PART)
    copy_part = there.writer.copy_part

    def late(key: str, upload: str, number: int, *how: Any) -> str:
        if when == "between" and number == 2:
            store.store.put("bucket", "q/a", BODY[::-1])
        return copy_part(key, upload, number, *how)

    async def use(there: Origin) -> None:
        info = await there.put("q/a", InMemory(BODY), len(BODY))
        await as_shown(there, await there.copy("q/a", "q/b", size=len(BODY), etag=info.etag), BODY)
        monkeypatch.setattr(there.writer, "copy_part", late)
        if when == "before":
            store.store.put("bucket", "q/a", BODY[::-1])
        with pytest.raises(ObjectChanged):
            await there.copy("q/a", "q/b", size=len(BODY), etag=info.etag)
        assert await content(there, await there.head("q/b")) == BODY
        assert await pending(there, "q/") == []

    run(there, use)


def test_a_copy_in_parts_that_cannot_be_aborted_fails_as_it_failed(
    store: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = store.origin()
    monkeypatch.setattr(there.writer, "limits", replace(there.limits, largest_copy=500_000))
    monkeypatch.setattr(origin, "COPIED_PART", PART)

    def refused(key: str, upload: str) -> None:
        raise PermissionDenied("no right to abort")

    async def use(there: Origin) -> None:
        info = await there.put("q/a", InMemory(BODY), len(BODY))
        store.store.put("bucket", "q/a", BODY[::-1])
        with monkeypatch.context() as patch, pytest.raises(ObjectChanged):
            patch.setattr(there.writer, "abort", refused)
            await there.copy("q/a", "q/b", size=len(BODY), etag=info.etag)
        for upload in await pending(there, "q/"):
            await abort(there, upload)

    run(there, use)


WAYS: dict[str, Callable[..., Any]] = {
    "put": lambda there, **preconditions: there.put("q/x", InMemory(b"ours"), 4, **preconditions),
    "complete": complete,
}


@pytest.mark.parametrize("quirks", [(), ("ceph",), (PUTS, COMPLETES), ("etags-without-quotes",)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_what_another_client_wrote_is_a_conflict(
    store: Lab, quirks: tuple[str, ...], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    store.store.quirks(*quirks)
    caplog.set_level(logging.WARNING, "cachefs")
    write = WAYS[way]

    async def use(there: Origin) -> None:
        made = await write(there, if_absent=True)
        with pytest.raises(Conflict):
            await write(there, if_absent=True)
        made = await write(there, if_match=made.etag)  # no other client has written
        theirs = store.store.put("bucket", "q/x", b"theirs")
        with pytest.raises(Conflict):
            await write(there, if_match=made.etag)
        assert (await there.head("q/x")).etag == theirs
        store.store.delete("bucket", "q/x")
        with pytest.raises(Conflict):
            await write(there, if_match=theirs)
        with pytest.raises(NotFound):
            await there.head("q/x")
        ignored = there.status()["ignored_conditions"]
        said = [record.message for record in caplog.records if "does not honour" in record.message]
        promised = quirks in ((), ("etags-without-quotes",)) or (quirks == ("ceph",) and way == "put")
        assert bool(ignored) == (not promised) and len(said) == len(ignored)
        assert all("what another client writes between the two is overwritten" in line for line in said)

    run(store.origin(), use)


def test_a_store_that_refuses_probes_is_not_trusted(store: Lab) -> None:
    store.store.credentials(denied=[".cachefs-probe"])

    async def use(there: Origin) -> None:
        info = await there.put("q/x", InMemory(b"x"), 1)
        with pytest.raises(Conflict):
            await there.put("q/x", InMemory(b"y"), 1, if_absent=True)
        info = await there.put("q/x", InMemory(b"z"), 1, if_match=info.etag)
        await there.copy("q/x", "q/b", size=1, etag=info.etag)
        assert Condition.PUT_MATCH.value in there.status()["ignored_conditions"]

    run(store.origin(), use)


def test_a_probe_that_fails_is_made_again(store: Lab) -> None:
    async def use(there: Origin) -> None:
        rule = store.store.fault("500", kind="put")
        with pytest.raises(OriginFailed):
            await there.put("q/x", InMemory(b"x"), 1, if_absent=True)
        assert store.store.faults_fired()[rule] > 0
        store.store.clear_faults()
        await there.put("q/x", InMemory(b"x"), 1, if_absent=True)
        assert there.status()["ignored_conditions"] == []

    run(store.origin(), use)


def test_a_probe_that_is_cancelled_leaves_nothing(store: Lab) -> None:
    """Not even what the origin does later with the request that was cancelled; the fixture looks."""

    async def use(there: Origin) -> None:
        upload = await there.begin_upload("q/x")
        await upload.part(1, InMemory(b"x"), 1)
        rule = store.store.fault("hang", kind="complete_upload")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: upload.complete(if_absent=True))
            await until(lambda: store.store.faults_fired()[rule] > 0)
            nursery.cancel_scope.cancel()
        store.store.clear_faults()
        await upload.abort()

    run(store.origin(), use)


@pytest.mark.parametrize("quirks", [(), ("ceph",)], ids=str)
def test_an_upload_that_is_gone_is_said_to_be(store: Lab, quirks: tuple[str, ...]) -> None:
    store.store.quirks(*quirks)

    async def use(there: Origin) -> None:
        upload = await there.begin_upload("q/x")
        await upload.part(1, InMemory(b"x"), 1)
        await there.resume_upload("q/x", upload.state()).abort()
        store.store.reset()
        for attempt in (
            lambda: upload.parts(),
            lambda: upload.part(2, InMemory(b"x"), 1),
            lambda: upload.complete(),
        ):
            with pytest.raises(NoSuchUpload):
                await attempt()
        assert there._attempts.metrics.origin_retries == 0
        await upload.abort()  # which is no failure

    run(store.origin(), use)


def test_a_completion_without_an_etag_is_ours_by_its_token(
    store: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.store.quirks("ceph")
    there = store.origin()
    done = there.writer.complete

    def overtaken(*how: Any) -> Any:
        written = done(*how)
        store.store.put("bucket", "q/x", BODY[::-1])  # of the same size, just then
        return written

    async def use(there: Origin) -> None:
        await as_shown(there, await complete(there), BODY)
        monkeypatch.setattr(there.writer, "complete", overtaken)
        with pytest.raises(ObjectChanged):
            await complete(there)

    run(there, use)
