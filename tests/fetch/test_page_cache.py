"""Reads that the kernel's page cache answered: what is counted when a handle is closed of which no READ came."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachefs.base.metrics import hit_ratios
from cachefs.fetch import fetcher
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, MIB, running


@pytest.mark.parametrize("size", [BLOCK // 2, 20 * MIB])
@in_trio
async def test_an_open_without_a_read_of_what_is_all_here_counts_with_the_size_of_its_file(
    cache_dir: Path, size: int
) -> None:
    blocks = -(-size // BLOCK)
    async with running(cache_dir, ssd=64 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, size))
        unread = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        lab.fetcher.close(unread, None)
        assert lab.metrics.page_cache_blocks == 0, "it is not here"
        await lab.read(object_id, 0, size)
        await lab.quiet()
        missed, counted = lab.metrics.misses, dict(lab.metrics.as_dict())
        assert missed and not counted["page_cache_blocks"], "a READ came"
        for times in range(1, 4):
            unread = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
            lab.fetcher.close(unread, None)
            assert lab.metrics.page_cache_blocks == times * blocks
        overall, _ = hit_ratios(lab.metrics.as_dict())
        assert overall is not None and overall >= 3 * blocks / (3 * blocks + missed)
        unread = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        lab.fetcher.close(unread)
        assert lab.metrics.page_cache_blocks == 3 * blocks, "it was in passthrough, or written"


@in_trio
async def test_a_very_large_file_is_not_looked_at(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(cache_dir, ssd=64 * MIB) as lab:
        object_id = lab.origin.put("k", content(1, 2 * BLOCK))
        await lab.read(object_id, 0, 2 * BLOCK)
        await lab.quiet()
        monkeypatch.setattr(fetcher, "COUNTED_BYTES", 2 * BLOCK - 1)
        unread = lab.fetcher.open(lab.origin, object_id)  # type: ignore[arg-type]
        lab.fetcher.close(unread, None)
        assert lab.metrics.page_cache_blocks == 0
