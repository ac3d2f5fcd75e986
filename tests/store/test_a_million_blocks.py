"""A start does not depend on how much is cached: a million blocks, and the first read within a second."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cachefs.store.catalog import Copy, Index, pack_copy
from tests.conftest import ROOT
from tests.fetch.scripted import ScriptedOrigin, content, in_trio
from tests.store.lab import MIB, as_kill_leaves_it, running

ROWS = 62_500  # extents of sixteen blocks

START = """
    import resource, sys, time
    from pathlib import Path
    import trio
    from cachefs.base.metrics import Metrics
    from cachefs.store import open_store
    from tests.fetch.scripted import SOURCE
    from cachefs.base.names import ObjectId

    async def main():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.monotonic()
        opened = open_store(Path(sys.argv[1]), 2 << 40, 0, 0, 1 << 20, "first", Metrics())
        object_id = ObjectId(SOURCE, "k", sys.argv[2], 3 << 20)
        data = await opened.store.read(opened.store.object(object_id), 5, 100)
        took = time.monotonic() - started
        assert data == bytes.fromhex(sys.argv[3]), "cold"
        print(took, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, opened.store.was_clean)
    trio.run(main)
"""


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.parametrize("stop", ["clean", "killed"])
@in_trio
async def test_restart_with_a_million_blocks_reads_within_a_second(cache_dir: Path, stop: str) -> None:
    origin = ScriptedOrigin()
    data = content("k", 3 * MIB)
    object_id = origin.put("k", data)
    async with running(cache_dir, origin, ssd=2 << 40, block=MIB) as lab:
        await lab.read(object_id)
        await lab.quiet()
        blocks, used = lab.store.tiers[0].blocks, lab.store.tiers[0].used_bytes
    index = Index(cache_dir / "index", MIB)
    for batch in range(0, ROWS, 5000):
        saved = []
        for number in range(batch, min(ROWS, batch + 5000)):
            digest = (number * 0x9E3779B97F4A7C15 % (1 << 128)).to_bytes(16, "little")
            copy = Copy(
                1, digest, 0, 16 * MIB, bitmap=0xFFFF, clock=100_000 + number, checksums=[number] * 16
            )
            saved.append((copy.key, pack_copy(copy), 0, copy.clock, None))
        notes = {b"clock": (100_000 + ROWS).to_bytes(8, "big")}
        index.write(saved, [], {1: (used + ROWS * 16 * MIB, blocks + ROWS * 16, 0)}, notes)
    place = cache_dir
    if stop == "killed":
        place = as_kill_leaves_it(cache_dir, cache_dir.with_name("cache-killed"))
    index.close()
    done = subprocess.run(  # noqa: ASYNC221
        [sys.executable, "-c", textwrap.dedent(START), str(place), object_id.etag, data[5:105].hex()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    took, grown_mib, clean = done.stdout.split()
    assert clean == str(stop == "clean")
    assert float(took) <= 1.0
    assert float(grown_mib) <= 64
