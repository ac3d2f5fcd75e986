"""Waiting is not silence: who has to fetch first says so, and who hangs is given up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio

from cachefs.base.errors import ObjectChanged
from cachefs.peers.auth import Signer, Verifier
from cachefs.peers.client import SILENCE_S, Client
from cachefs.peers.wire import PeerFailed
from tests.peers.exchange import (
    KEY,
    KIB,
    MIB,
    Kept,
    PlanStore,
    asking,
    content,
    in_jumping_time,
    scripted,
    serving,
)

PROMISE = b"HTTP/1.1 102 Processing\r\n\r\n"
DATA = content(100 * KIB)


@pytest.mark.parametrize("key", [None, KEY])
@in_jumping_time
async def test_a_slow_owner_is_waited_for_far_beyond_the_deadline(key: object) -> None:
    plan_store = PlanStore()
    plan_store.held_back = 0
    version = plan_store.put(DATA)
    signer, verifier = (Signer(KEY), Verifier(KEY)) if key else (None, None)
    client, sink = Client(signer=signer), Kept()
    async with serving(plan_store, verifier=verifier) as (address, _), trio.open_nursery() as nursery:

        async def later() -> None:
            await trio.sleep(20)
            plan_store.more.set()

        nursery.start_soon(later)
        begun = trio.current_time()
        first_s = await client.read(address, asking(version), sink, deadline_s=0.5, sink_waits=False)
        assert trio.current_time() - begun >= 20
        assert first_s < 1
        assert sink.data == DATA
    client.close()


@pytest.mark.parametrize("failure", [ObjectChanged("replaced")])
@in_jumping_time
async def test_a_status_may_follow_signs_of_life(failure: ObjectChanged) -> None:
    plan_store = PlanStore()
    plan_store.held_back = 0
    plan_store.failure_in_body = failure
    version = plan_store.put(DATA)
    client = Client()
    async with serving(plan_store) as (address, _):
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version), Kept(), deadline_s=0.5)
        assert caught.value.kind == "changed"
    client.close()


@in_jumping_time
async def test_a_reply_that_would_have_to_pause_is_broken_off_after_whole_blocks() -> None:
    plan_store = PlanStore()
    plan_store.block_size = 16 * KIB
    plan_store.held_back = 3
    version = plan_store.put(DATA)
    client, sink = Client(), Kept()
    async with serving(plan_store) as (address, _):
        begun = trio.current_time()
        with pytest.raises(PeerFailed) as caught:
            await client.read(
                address, asking(version, block_size=16 * KIB), sink, deadline_s=5, sink_waits=False
            )
        assert caught.value.kind == "reset"
        assert caught.value.delivered == len(sink.data) == 48 * KIB
        assert 0.9 < trio.current_time() - begun < 1.5
    client.close()


def promising(times: int, every_s: float) -> Callable[[trio.SocketStream, bytes], Awaitable[None]]:
    async def script(stream: trio.SocketStream, head: bytes) -> None:
        for _ in range(times):
            await stream.send_all(PROMISE)
            await trio.sleep(every_s)
        await trio.sleep(1000)

    return script


@pytest.mark.parametrize(
    ("times", "every_s", "working_s", "expected_s"),
    [
        (0, 0, 60, 0.5),
        (1, 0, 60, SILENCE_S),
        (5, 1, 60, 4 + SILENCE_S),
        (900, 1, 60, 60),
        (1000, 0, 60, SILENCE_S),
    ],
)
@in_jumping_time
async def test_promises_renew_the_deadline_up_to_a_total(
    times: int, every_s: float, working_s: float, expected_s: float
) -> None:
    client = Client()
    async with scripted(promising(times, every_s)) as address:
        begun = trio.current_time()
        with pytest.raises(PeerFailed) as caught:
            await client.read(
                address,
                asking(PlanStore().put(DATA)),
                Kept(),
                deadline_s=0.5,
                working_s=working_s,
                sink_waits=False,
            )
        assert caught.value.kind == "timeout"
        assert expected_s - 0.01 <= trio.current_time() - begun < expected_s + 0.5
    client.close()


@in_jumping_time
async def test_bringing_is_answered_when_all_blocks_are_there_and_sends_none() -> None:
    plan_store = PlanStore()
    plan_store.held_back = 2
    version = plan_store.put(content(3 * MIB))
    client = Client()
    async with serving(plan_store) as (address, counted), trio.open_nursery() as nursery:
        done = trio.Event()

        async def prefetch() -> None:
            await client.prefetch(address, asking(version), deadline_s=0.5)
            done.set()

        nursery.start_soon(prefetch)
        await trio.sleep(10)
        assert not done.is_set()
        plan_store.more.set()
        await done.wait()
        assert counted.peer_bytes_out == 0
    client.close()
