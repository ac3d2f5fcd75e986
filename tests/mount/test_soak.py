"""What a mount holds does not grow with what was done on it: a small soak (the large one is `scripts/bench soak`)."""

from __future__ import annotations

import random

import pytest

from bench import soak
from bench.lab.client import LabStore
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted

pytestmark = ONE_BACKEND


@pytest.mark.parametrize("name", soak.GROWTH)
def test_a_leak_is_noticed(name: str) -> None:
    rng = random.Random(name)
    most = soak.GROWTH[name]
    flat = [{each: rng.uniform(0, 0.3) * soak.GROWTH[each] for each in soak.GROWTH} for _ in range(20)]
    assert all(grown <= allowed for grown, allowed in soak.growth(flat).values())
    leaking = [{**sample, name: sample[name] + most / 8 * n} for n, sample in enumerate(flat)]
    assert {each for each, (grown, allowed) in soak.growth(leaking).items() if grown > allowed} == {name}


@pytest.mark.long
def test_nothing_grows(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    soak.fill(lab, bucket.name)
    mount = mounted(
        bucket, read_only=False, cache_size="16M", ram="4M", metadata_ttl="2s", timeout=9, keep_free="64M"
    )
    mount.allowed += ["WARNING", "ERROR"]  # the store is unwell
    run = soak.Soak(mount.path, mount.cache, mount.pid, lab, bucket.name, lambda: mount.ask("status"))
    run.run(2_400, rounds=12, stops=False)
    assert run.tally.wrong == []
    grown = {name: by for name, by in soak.growth(run.samples).items() if by[0] > by[1]}
    assert not grown, (grown, run.samples)
    counted = mount.metrics()
    assert run.tally.done == 2_400
    assert (
        counted["evicted_blocks"] > 300 and counted["origin_retries"] > 10 and counted["uploaded_files"] > 20
    )
    assert "Traceback" not in mount.log()
