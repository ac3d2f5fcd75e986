"""A peer that sends, but slowly: what a reader waits for it is bounded by what the origin would take."""

from __future__ import annotations

import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.names import ObjectId
from cachefs.origin.attempts import TransferRate
from cachefs.peers import health
from cachefs.peers.client import Client
from cachefs.peers.health import ALWAYS_ALLOWED_S, SLOWER_THAN_ORIGIN, Pace
from cachefs.peers.wire import PeerFailed
from tests.fetch.scripted import content
from tests.peers.exchange import KIB, MIB, Kept, asking, in_jumping_time, in_trio, scripted
from tests.peers.nodes import BLOCK, nodes

RATES = st.floats(1e3, 1e9)
SIZES = st.integers(1, 16 * MIB)


# The policy.


@given(RATES, SIZES, st.floats(0, 1e4), st.integers(0, 100))
def test_a_peer_as_slow_as_the_origin_is_not_too_slow(
    rate: float, size: int, elapsed_s: float, others: int
) -> None:
    received = int(elapsed_s * rate)
    assert not Pace(rate, others).too_slow(size, received, elapsed_s, 0.0) or received <= 0


@given(RATES, SIZES, st.integers(0, 100))
def test_a_peer_that_is_clearly_slower_is_given_up_by_the_time_it_may_take(
    rate: float, size: int, others: int
) -> None:
    judged = Pace(rate, others)
    elapsed_s = judged.allowed_s(size) * 1.01
    assert judged.too_slow(size, size - 1, elapsed_s, 0.0)
    assert judged.allowed_s(size) == max(ALWAYS_ALLOWED_S, SLOWER_THAN_ORIGIN * (1 + others) * size / rate)


@given(SIZES, st.floats(0, 100), st.floats(0, ALWAYS_ALLOWED_S * 0.99))
def test_nothing_is_judged_early(size: int, patience_s: float, elapsed_s: float) -> None:
    assert Pace(1e9, 0, patience_s).too_slow(size, 0, elapsed_s, elapsed_s) == (elapsed_s > patience_s)


def test_the_two_peers_of_the_report_are_too_slow_however_little_is_known_of_the_origin() -> None:
    for judged in (Pace(), Pace(50e6), Pace(50e6, others=7)):
        for bytes_per_s in (1, 160 * KIB):
            assert judged.too_slow(16 * MIB, int(6 * bytes_per_s), 6.0, 6.0)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 1e3))))
def test_the_rate_of_the_origin_is_one_of_those_that_were_seen(seen: list[tuple[int, float]]) -> None:
    rate, large = TransferRate(), []
    for count, seconds in seen:
        rate.add(count, seconds)
        if count >= TransferRate.LEAST_BYTES:
            large.append(count / max(seconds, 1e-3))
    assert rate.bytes_per_s == 0 if not large else 0.99 * min(large) <= rate.bytes_per_s <= 1.01 * max(large)


def test_the_rate_of_the_origin_is_that_of_about_ten_large_transfers() -> None:
    rate = TransferRate()
    rate.add(10_000_000, 0.1)
    rate.add(250_000, 1.0)
    assert rate.bytes_per_s == 100e6, "a small one measures the time to the first byte"
    rate.add(300_000, 0.03)
    assert 80e6 < rate.bytes_per_s < 85e6
    for _ in range(10):
        rate.add(10_000_000, 1.0)
    assert 10e6 < rate.bytes_per_s < 20e6


# One transfer.


def body(data: bytes, block_size: int) -> bytes:
    blocks = [data[at : at + block_size] for at in range(0, len(data), block_size)]
    return b"".join(block + struct.pack(">Q", xxhash.xxh3_64_intdigest(block)) for block in blocks)


def dripping(
    data: bytes, block_size: int, drop: int, every_s: float, at_once: int = 0
) -> Callable[[trio.SocketStream, bytes], Awaitable[None]]:
    """A peer that sends a head and the first `at_once` bytes, then `drop` bytes every so often."""

    async def script(stream: trio.SocketStream, head: bytes) -> None:
        said = body(data, block_size)
        await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(said) + said[:at_once])
        for at in range(at_once, len(said), drop):
            await stream.send_all(said[at : at + drop])
            await trio.sleep(every_s)

    return script


def version_of(data: bytes) -> ObjectId:
    return ObjectId("s3://bucket", "key", '"etag"', len(data))


@in_jumping_time
async def test_a_byte_a_second_is_given_up_after_seconds() -> None:
    data, client, sink = content(1, 100 * KIB), Client(), Kept()
    async with scripted(dripping(data, MIB, 1, 1.0)) as address:
        begun = trio.current_time()
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version_of(data)), sink, deadline_s=0.5, pace=Pace(50e6))
        assert caught.value.kind == "slow" and not sink.parts
        assert trio.current_time() - begun < ALWAYS_ALLOWED_S + 1
    client.close()


@in_jumping_time
async def test_a_byte_a_second_is_given_up_within_the_patience_of_a_short_timeout() -> None:
    data, client = content(1, 100 * KIB), Client()
    async with scripted(dripping(data, MIB, 1, 1.0)) as address:
        begun = trio.current_time()
        with pytest.raises(PeerFailed) as caught:
            await client.read(
                address, asking(version_of(data)), Kept(), deadline_s=0.5, pace=Pace(1.0, 0, 1.5)
            )
        assert caught.value.kind == "slow"
        assert trio.current_time() - begun < 2
    client.close()


@pytest.mark.long
@in_jumping_time
async def test_a_peer_on_a_slow_network_is_waited_for_as_long_as_the_origin_would_take() -> None:
    data, client, sink = content(1, 100 * KIB), Client(), Kept()
    async with scripted(dripping(data, MIB, KIB, 0.5)) as address:  # 50 s
        await client.read(address, asking(version_of(data)), sink, deadline_s=0.5, pace=Pace(2 * KIB))
        assert sink.data == data
    client.close()


@pytest.mark.parametrize(("drop", "every_s"), [(1, 0.1), (64 * KIB, 0.1)])
@in_trio
async def test_what_came_before_a_long_body_became_slow_is_kept(
    monkeypatch: pytest.MonkeyPatch, drop: int, every_s: float
) -> None:
    monkeypatch.setattr(health, "ALWAYS_ALLOWED_S", 0.5)
    data, client, sink = content(1, 16 * MIB), Client(), Kept()
    async with scripted(dripping(data, MIB, drop, every_s, at_once=2 * MIB + 500)) as address:
        with pytest.raises(PeerFailed) as caught:
            await client.read(address, asking(version_of(data)), sink, deadline_s=5, pace=Pace(500e6))
        assert caught.value.kind == "slow"
        assert caught.value.delivered == len(sink.data) >= 2 * MIB
        assert sink.data == data[: len(sink.data)]
    client.close()


@in_trio
async def test_a_sink_that_is_slow_is_not_the_peers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "ALWAYS_ALLOWED_S", 0.3)

    class Slow(Kept):
        def write_block(self, data: memoryview, checksum: int) -> None:
            time.sleep(0.4)
            super().write_block(data, checksum)

    data, client, sink = content(1, 4 * MIB), Client(), Slow()
    async with scripted(dripping(data, MIB, MIB, 0.0)) as address:
        await client.read(address, asking(version_of(data)), sink, deadline_s=5, pace=Pace(1e9))
        assert sink.data == data
    client.close()


# Among nodes.


@pytest.mark.parametrize("drop", [1, 8 * KIB])
@in_trio
async def test_the_origin_takes_over_the_rest_and_the_slow_peer_is_left_alone(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, drop: int
) -> None:
    monkeypatch.setattr(health, "ALWAYS_ALLOWED_S", 0.5)
    async with nodes(cache_dir, 2, deadline_s=15.0) as cluster:
        slow, reader = cluster
        cluster.origin.transfer_rate = 50e6
        data = content(1, 12 * BLOCK)
        ids = [cluster.put_owned_by(slow, f"k{n}-", data) for n in range(3)]
        script = dripping(data, BLOCK, drop, 0.1, at_once=3 * BLOCK)
        async with scripted(script) as address:
            read: Any = reader.client.read

            async def redirected(_: object, request: Any, sink: Any, **how: Any) -> float:
                begun: float = await read(address, request, sink, **how)
                return begun

            reader.client.read = redirected  # type: ignore[method-assign]
            with trio.fail_after(20):
                for object_id in ids:
                    assert await reader.read(object_id) == data
            await cluster.quiet()
        (status,) = [row for row in reader.cluster.status() if not row["here"]]
        assert status["state"] in ("suspect", "dead")
        assert reader.metrics.peer_failures >= 1
        first = cluster.origin.gets[0]
        assert first.start >= 2 * BLOCK  # what came is not fetched again


@in_trio
async def test_a_slow_network_leaves_the_peer_healthy(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both send 400 KB/s."""
    monkeypatch.setattr(health, "ALWAYS_ALLOWED_S", 0.3)
    async with nodes(cache_dir, 2) as cluster:
        slow, reader = cluster
        cluster.origin.transfer_rate = 400e3
        data = content(1, 12 * BLOCK)
        object_id = cluster.put_owned_by(slow, "k", data)
        async with scripted(dripping(data, BLOCK, 40_000, 0.1)) as address:
            read: Any = reader.client.read

            async def redirected(_: object, request: Any, sink: Any, **how: Any) -> float:
                begun: float = await read(address, request, sink, **how)
                return begun

            reader.client.read = redirected  # type: ignore[method-assign]
            assert await reader.read(object_id) == data
            await cluster.quiet()
        (status,) = [row for row in reader.cluster.status() if not row["here"]]
        assert status["state"] == "healthy" and not cluster.origin.gets
