"""What training jobs have fetched before they ask for it, on a real mount: counted by the store, every byte compared."""

from __future__ import annotations

import hashlib
import io
import os
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from bench import training
from bench.lab.client import LabStore
from cachefs import hints
from cachefs.prefetch.shards import AHEAD, MOST_UNREAD
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, eventually, in_python

MIB = 1 << 20
SHARD = 5 * MIB + 321
"""Above what counts as a small file."""

FAR_MS = 20
"""How far away the store is where something has to come before its reader does."""

READERS = 4

READ = "import sys, hashlib; print(*(hashlib.file_digest(open(p, 'rb'), 'md5').hexdigest() for p in sys.argv[1:]))"


def fill(bucket: Bucket, count: int, size: int, folder: str = "train") -> list[str]:
    """Small files in one directory; their keys in an order nobody foresees."""
    keys = [f"{folder}/{number:05d}.jpg" for number in range(count)]
    for key in keys:
        bucket.put(key, size)
    random.Random(folder).shuffle(keys)
    return keys


def prefetch(mount: Mount) -> dict[str, Any]:
    said: dict[str, Any] = mount.ask("status")["prefetch"]
    return said


def quiet(mount: Mount) -> None:
    """Wait until the daemon fetches nothing more by itself."""

    def still() -> bool:
        mount.settled()
        return not prefetch(mount)["in_flight"]

    eventually(still, "nothing is fetched ahead any more", 30)


def gets(bucket: Bucket) -> Counter[str]:
    """GETs by key."""
    seen = bucket.store.requests()
    return Counter(r["key"] for r in seen if r["bucket"] == bucket.name and r["kind"] == "get")


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def same(mount: Mount, bucket: Bucket, keys: Sequence[str]) -> None:
    for key in keys:
        assert (mount.path / key).read_bytes() == bucket.objects[key], key


class TestDirectories:
    def test_all_files_in_any_order_cost_one_get_each(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        keys = fill(bucket, 240, 20_000)
        mount = mounted(bucket)
        lab.shape(latency_ms=FAR_MS)
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda n: same(mount, bucket, keys[n::READERS]), range(READERS)))
        quiet(mount)
        assert gets(bucket) == Counter(keys)
        counted = mount.metrics()
        # The readers have asked for a few themselves: most were there, or on their way, when they came.
        assert counted["prefetch_files"] > len(keys) // 2
        # One may be taken up between its reader's open and read: it is fetched once, and not seen to be used.
        assert counted["prefetch_files"] - counted["prefetch_used_files"] <= READERS
        assert [(shown["name"], shown["files"]) for shown in prefetch(mount)["directories"]] == [
            ("train", 240)
        ]

    def test_a_twentieth_costs_at_most_a_tenth(self, mounted: Mounted, bucket: Bucket) -> None:
        keys = fill(bucket, 400, 5_000)
        wanted = keys[:20]
        mount = mounted(bucket)
        same(mount, bucket, wanted)
        quiet(mount)
        seen = gets(bucket)
        assert set(wanted) < set(seen) <= set(keys) and set(seen.values()) == {1}
        assert len(seen) <= len(wanted) + len(keys) // 10

    @ONE_BACKEND
    def test_two_files_say_nothing(self, mounted: Mounted, bucket: Bucket) -> None:
        keys = fill(bucket, 100, 5_000)
        mount = mounted(bucket)
        same(mount, bucket, keys[:2])
        quiet(mount)
        assert gets(bucket) == Counter(keys[:2])


class TestShards:
    def test_the_next_of_a_stride_comes_before_it_is_opened(self, mounted: Mounted, bucket: Bucket) -> None:
        keys = [f"shards/train-{number:04d}.tar" for number in range(8)]
        for key in keys:
            bucket.put(key, SHARD)
        mount = mounted(bucket)
        same(mount, bucket, keys[0:4:2])
        quiet(mount)
        seen = gets(bucket)
        assert keys[4] in seen and not set(keys[1::2]) & set(seen)
        with mount.counting() as counted:
            same(mount, bucket, keys[4:5])
        quiet(mount)
        assert gets(bucket)[keys[4]] == seen[keys[4]] and counted["prefetch_used_files"] == 1
        same(mount, bucket, keys[6:7])
        quiet(mount)
        assert mount.metrics()["origin_bytes"] == 4 * SHARD  # 0, 2, 4 and 6, once each

    @ONE_BACKEND
    def test_workers_that_stride_have_each_shard_fetched_once(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        keys = [f"shards/{number}.tar" for number in range(8)]
        for key in keys:
            bucket.put(key, SHARD)
        mount = mounted(bucket)
        lab.shape(latency_ms=FAR_MS)

        def worker(number: int) -> list[str]:  # a process of its own, as loader workers are
            return in_python(READ, *(mount.path / key for key in keys[number::2])).split()

        with ThreadPoolExecutor(2) as pool:
            digests = [digest for of in pool.map(worker, range(2)) for digest in of]
        assert digests == [md5(bucket.objects[key]) for key in [*keys[0::2], *keys[1::2]]]
        quiet(mount)
        counted = mount.metrics()
        assert counted["origin_bytes"] == len(keys) * SHARD
        assert counted["prefetch_used_files"] > 0


TABLES, COLUMNS = 6, 10

METADATA = "import sys, pyarrow.parquet as pq; print(sum(pq.read_metadata(p).num_rows for p in sys.argv[1:]))"
ROWS = "import sys, pyarrow.dataset as ds; print(ds.dataset(sys.argv[1:]).count_rows())"
COLUMN = """if True:
    import sys, pyarrow.parquet as pq
    print(sum(pq.read_table(p, columns=["c3"]).num_rows for p in sys.argv[1:]))"""
IN_TURN = "import sys, pyarrow.parquet as pq; print(sum(pq.read_table(p).num_rows for p in sys.argv[1:]))"
DATASET = "import sys, pyarrow.dataset as ds; print(ds.dataset(sys.argv[1:]).to_table().num_rows)"


@pytest.fixture(scope="module")
def table() -> bytes:
    """Ten columns, in four row groups: 16 MB that do not get any smaller."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rng, out = random.Random(1), io.BytesIO()
    columns = {f"c{n}": array("d", rng.randbytes(1_600_000)) for n in range(COLUMNS)}
    table = pa.table({name: pa.array(memoryview(column)) for name, column in columns.items()})
    pq.write_table(table, out, row_group_size=50_000, compression="none", use_dictionary=False)
    return out.getvalue()


class TestTables:
    """Columnar files, read by the library that everybody reads them with."""

    @pytest.mark.long
    @ONE_BACKEND
    @pytest.mark.parametrize(
        ("code", "least", "most"),
        [
            pytest.param(METADATA, 0, 0.1, id="metadata", marks=pytest.mark.long),
            pytest.param(ROWS, 0, 0.1, id="count", marks=pytest.mark.long),
            # Blocks of 1 MiB around pieces of 400 kB.
            pytest.param(COLUMN, 0.1, 0.6, id="one-column", marks=pytest.mark.long),
            pytest.param(IN_TURN, 1, 1, id="in-turn", marks=pytest.mark.long),
            pytest.param(DATASET, 1, 1, id="dataset"),
        ],
    )
    def test_only_what_is_read_through_is_fetched_ahead(
        self,
        mounted: Mounted,
        bucket: Bucket,
        lab: LabStore,
        table: bytes,
        code: str,
        least: float,
        most: float,
    ) -> None:
        keys = [f"t/part-{number:03d}.parquet" for number in range(TABLES)]
        for key in keys:
            bucket.put(key, table)
        mount = mounted(bucket)
        lab.shape(latency_ms=FAR_MS)
        assert in_python(code, *(mount.path / key for key in keys)) == f"{TABLES * 200_000}\n"
        quiet(mount)
        counted, said = mount.metrics(), prefetch(mount)
        assert least <= counted["origin_bytes"] / (TABLES * len(table)) <= most
        assert (counted["prefetch_files"] > 0) == (least == 1)
        assert said["used_bytes"] <= said["fetched_bytes"]

    @pytest.mark.long
    def test_who_reads_shards_and_then_looks_at_them_wastes_a_few(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        keys = [f"shards/{number:03d}.tar" for number in range(22)]
        for key in keys:
            bucket.put(key, SHARD)
        mount = mounted(bucket)
        for key in keys[:6]:  # each waits until the next is here, whole: it may be opened in passthrough
            same(mount, bucket, [key])
            quiet(mount)
        assert mount.metrics()["origin_bytes"] == 8 * SHARD
        for key in keys[6:]:
            with open(mount.path / key, "rb", buffering=0) as file:
                file.seek(-100, os.SEEK_END)
                assert file.read() == bucket.objects[key][-100:]
            quiet(mount)
        assert mount.metrics()["prefetch_files"] <= 6 + MOST_UNREAD + AHEAD


class TestHints:
    def test_what_was_announced_is_there_before_any_open(self, mounted: Mounted, bucket: Bucket) -> None:
        keys = [*fill(bucket, 60, 20_000), "large.bin"]
        bucket.put("large.bin", SHARD)
        mount = mounted(bucket)
        hints.announce([mount.path / key for key in keys], plan="mine", wait_s=10)
        eventually(lambda: set(gets(bucket)) == set(keys), "all files are asked for")
        quiet(mount)
        assert mount.metrics()["fuse_open"] == 0
        before = bucket.gets()
        same(mount, bucket, keys)
        assert bucket.gets() == before
        assert mount.settled()["prefetch_used_files"] == len(keys)

    @ONE_BACKEND
    def test_what_is_opened_on_its_way_is_passthrough_when_it_has_come(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        keys = fill(bucket, 120, 200_000)
        mount = mounted(bucket)
        os.listdir(mount.path / "train")
        lab.shape(latency_ms=100)  # so that a reader comes up with it, however busy the machine is
        hints.announce([mount.path / key for key in keys], plan="mine", wait_s=10)
        same(mount, bucket, keys)
        counted = mount.settled()
        assert (
            counted["misses_prefetch_in_flight"]
            and counted["fuse_read"] < counted["misses_prefetch_in_flight"]
        )
        assert counted["passthrough_opens"] + counted["fuse_read"] >= len(keys)

    @ONE_BACKEND
    def test_a_wrong_hint_costs_requests_and_no_byte(self, mounted: Mounted, bucket: Bucket) -> None:
        keys = fill(bucket, 40, 5_000)
        told = [*keys[20:], "train/gone", "gone/too", "train"]
        mount = mounted(bucket)
        hints.announce([mount.path / key for key in told], plan="wrong", wait_s=10)
        eventually(lambda: set(keys[20:]) <= set(gets(bucket)), "what is there is asked for")
        same(mount, bucket, keys[:20])
        quiet(mount)
        assert gets(bucket) == Counter(keys)
        assert prefetch(mount)["unknown_paths"] >= 2
        assert mount.settled()["prefetch_errors"] <= 2

    @pytest.mark.long
    @ONE_BACKEND
    def test_a_plan_larger_than_the_cache_is_followed(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        keys = fill(bucket, 200, 100_000)
        mount = mounted(bucket, cache_size="10M", ram="0")
        lab.shape(latency_ms=FAR_MS)
        hints.announce([mount.path / key for key in keys], plan="large", wait_s=10)
        same(mount, bucket, keys)
        quiet(mount)
        assert gets(bucket) == Counter(keys)  # what was not used yet was never displaced
        assert mount.metrics()["prefetch_used_files"] > len(keys) // 2

    @ONE_BACKEND
    def test_an_order_is_followed_and_known_to_the_next_daemon(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        keys = fill(bucket, 100, 5_000)
        order = random.Random(2).sample(range(100), 100)
        mount = mounted(bucket)
        hints.send_files(mount.path, "kept", keys)
        hints.send_order(mount.path, "kept", 0, array("I", order))
        eventually(lambda: mount.metrics()["prefetch_files"] == 100, "all are fetched")
        assert "plan" in mount.cli("status", mount.path).stdout
        assert gets(bucket) == Counter(keys)
        mount.kill()
        mount.start()
        eventually(lambda: prefetch(mount)["plans"], "the plan is remembered")
        same(mount, bucket, [keys[number] for number in order])
        (plan,) = prefetch(mount)["plans"]
        assert plan["files"] == 100 and plan["position"] >= 90
        assert mount.ask("hint_drop", plan="kept") and not prefetch(mount)["plans"]

    def test_a_training_loop_that_announces_finds_its_files(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        keys = fill(bucket, 200, 20_000)
        mount = mounted(bucket)
        lab.shape(latency_ms=FAR_MS)
        shape = replace(training.SHAPES["resnet50"], decode_ms_per_mb=0.0)
        loop = training.Loop(shape, workers=2, batch=8, step_s=0.0, hints=True)
        epochs = list(loop.epochs([f"{mount.path}/{key}" for key in keys], 2))
        assert [epoch.bytes for epoch in epochs] == [200 * 20_000] * 2
        quiet(mount)
        assert gets(bucket) == Counter(keys)
        assert mount.metrics()["prefetch_used_files"] > len(keys) // 2


class TestOff:
    @pytest.fixture
    def off(self, mounted: Mounted, bucket: Bucket) -> Mount:
        return mounted(bucket, prefetch="off")

    @ONE_BACKEND
    def test_nothing_but_what_is_opened_is_fetched(self, off: Mount, bucket: Bucket) -> None:
        keys = fill(bucket, 100, 5_000)
        shards = [f"shards/{number}.tar" for number in range(4)]
        for key in shards:
            bucket.put(key, SHARD)
        same(off, bucket, [*keys[:50], *shards[:2]])
        counted = off.settled()
        assert set(gets(bucket)) == {*keys[:50], *shards[:2]}
        assert counted["prefetch_files"] == 0 and not prefetch(off)

    @ONE_BACKEND
    def test_an_announcement_disturbs_nobody(self, off: Mount, bucket: Bucket) -> None:
        keys = fill(bucket, 10, 5_000)
        code = (
            "import sys; from cachefs import hints; hints.announce(sys.argv[1:], wait_s=10); print('went on')"
        )
        assert in_python(code, *(off.path / key for key in keys)) == "went on\n"
        off.settled()
        assert bucket.gets() == 0
