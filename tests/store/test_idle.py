"""A store that has nothing to do does nothing: its loops wait."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from cachefs.store import space
from cachefs.store.tier import SSD
from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, MIB, running, until


class Steps(trio.abc.Instrument):
    """How often a task went on."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


@in_trio
async def test_after_spilling_promoting_and_preparing_its_loops_wait(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "REUSE_AFTER_S", 0.0)
    async with running(cache_dir, ram=16 * BLOCK, ssd=64 * MIB, background=True) as lab:
        ids = [lab.origin.put(str(n), content(n, 2 * BLOCK)) for n in range(12)]
        for object_id in ids:
            await lab.read(object_id)
        await lab.quiet()
        await until(lambda: lab.metrics.spilled_blocks > 0, 10.0)
        spilled = next(i for i in ids if lab.store.catalog.copies(lab.store.object(i), SSD))
        for _ in range(2):
            await lab.store.flush()
            await lab.read(spilled)
        await until(lambda: lab.metrics.promoted_blocks > 0, 10.0)
        assert lab.metrics.promoted_blocks > 0
        for object_id in ids:
            await lab.read(object_id)
            lab.store.prepare_later(lab.store.object(object_id))
        await lab.quiet()
        await until(lambda: not lab.store.backing_files._queue, 10.0)
        steps, passed = Steps(), 0.3
        trio.lowlevel.add_instrument(steps)
        with trio.move_on_after(passed):
            await trio.sleep_forever()
        trio.lowlevel.remove_instrument(steps)
        assert steps.count < 40, "of which a few look whether something has changed"
