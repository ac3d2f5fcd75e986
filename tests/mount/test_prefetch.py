"""Prefetch as an application meets it: the store is asked before the application asks, and for nothing twice."""

from __future__ import annotations

import base64
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import Mount, eventually

KIB, MIB = 1 << 10, 1 << 20


def filled(bucket: Bucket, count: int, size: int = 4 * KIB) -> list[str]:
    names = [f"d/{i:04d}" for i in range(count)]
    for name in names:
        bucket.put(name, size)
    return names


def asked(bucket: Bucket) -> Counter[str]:
    return Counter(
        r["key"] for r in bucket.store.requests() if r["bucket"] == bucket.name and r["kind"] == "get"
    )


def read(mount: Mount, bucket: Bucket, names: Sequence[str]) -> None:
    for name in names:
        assert (mount.path / name).read_bytes() == bucket.objects[name]


def quiet(mount: Mount) -> dict[str, Any]:
    """The status, once nothing is on its way."""
    eventually(lambda: not mount.status()["prefetch"]["in_flight"], "prefetch rests")
    status: dict[str, Any] = mount.status()["prefetch"]
    return status


def announce(mount: Mount, names: Sequence[str], order: Sequence[int]) -> None:
    mount.ask("hint_files", plan="p", paths=list(names), at=0, total=len(names))
    text = base64.b64encode(array("I", order).tobytes()).decode()
    mount.ask("hint_order", plan="p", epoch=0, indices_b64=text, at=0, total=len(order))


def test_a_directory_in_any_order(mounted: Mounted, bucket: Bucket) -> None:
    names = filled(bucket, 300)
    bucket.store.shape(latency_ms=10)
    mount = mounted(bucket)
    order = random.Random(1).sample(names, 300)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda worker: read(mount, bucket, order[worker::4]), range(4)))
    status = quiet(mount)
    assert asked(bucket) == Counter(names)
    assert mount.metrics()["prefetch_used_files"] == mount.metrics()["prefetch_files"] > 100
    assert (status["unused_bytes"], status["directories"][0]["files"]) == (0, 300)


def test_off_means_off(mounted: Mounted, bucket: Bucket) -> None:
    names = filled(bucket, 60)
    mount = mounted(bucket, prefetch="off")
    read(mount, bucket, names[:30])
    assert asked(bucket) == Counter(names[:30])
    assert mount.status()["prefetch"] is None


def test_the_next_shard(mounted: Mounted, bucket: Bucket) -> None:
    names = [f"s/train-{i:02d}.tar" for i in range(6)]
    for name in names:
        bucket.put(name, 5 * MIB)
    mount = mounted(bucket)
    for name in names:
        with mount.counting() as grown:
            read(mount, bucket, [name])
        quiet(mount)
    assert not grown.get("misses")
    assert mount.metrics()["origin_bytes"] == 30 * MIB
    assert mount.metrics()["prefetch_used_files"] == 4


@pytest.mark.parametrize("right", [True, False])
def test_a_hinted_order(mounted: Mounted, bucket: Bucket, right: bool) -> None:
    names = filled(bucket, 200)
    mount = mounted(bucket)
    order = random.Random(2).sample(range(200), 200)
    announce(mount, names if right else [f"wrong/{name}" for name in names], order)
    eventually(lambda: mount.metrics()["prefetch_files"] == 200 or not right, "the plan is here")
    status = quiet(mount)
    assert [plan["files"] for plan in status["plans"]] == [200]
    with mount.counting() as grown:
        read(mount, bucket, [names[number] for number in order])
    assert asked(bucket) == Counter(names)
    if right:
        assert not grown.get("misses") and not grown.get("origin_get")
        assert "plan" in mount.cli("status", mount.path).stdout
    else:
        assert status["unknown_paths"] == 200


def test_a_plan_survives_kill(mounted: Mounted, bucket: Bucket) -> None:
    names = filled(bucket, 100)
    mount = mounted(bucket)
    announce(mount, names, range(100))
    eventually(lambda: mount.metrics()["prefetch_files"] == 100, "the plan is here")
    mount.kill()
    mount.start()
    eventually(lambda: mount.status()["prefetch"]["plans"], "the plan is remembered")
    read(mount, bucket, names)
    assert mount.status()["prefetch"]["plans"][0]["position"] >= 90
    mount.ask("hint_drop", plan="p")
    assert not mount.status()["prefetch"]["plans"]
