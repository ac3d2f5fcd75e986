"""Datasets of which a part is sampled, against the same rules over that part; what a row keeps of them; their progress."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from cachefs.base.names import ObjectId
from cachefs.store import eviction
from cachefs.store.catalog import UNITS, unit_hash
from cachefs.store.eviction import (
    FIRST_EPOCH_PAIRS,
    FIRST_EPOCH_REREFERENCES,
    MOST,
    Dataset,
    Datasets,
    EpochProgress,
    Epochs,
    SharedDataset,
)
from cachefs.store.tier import SSD
from tests.fetch.scripted import in_trio
from tests.store.lab import BLOCK, running
from tests.store.test_epochs import Rules, mixed
from tests.store.test_shared_epochs import put


class SampledRules(Rules):
    """The rules, of the units below `threshold` that are still known."""

    def __init__(self, clock: int, noisy: bool) -> None:
        super().__init__(clock, noisy)
        self.threshold = UNITS
        self.forgotten: set[int] = set()

    def _last(self) -> dict[int, int]:
        return {unit: at for unit, at in dict(self.uses).items() if unit not in self.forgotten}

    def correlated(self) -> float:
        units = len(self._last()) * UNITS / self.threshold
        return min(max(units / 8, eviction.CORRELATED_LEAST), eviction.CORRELATED_MOST)

    def is_together(self, unit: int) -> bool:
        others = (len(self.uses) - self.joined[unit]) * UNITS / self.threshold
        return others <= self.correlated()

    def edge_uses(self) -> float:
        return self.correlated() * self.threshold / UNITS

    def used(self, unit: int, clock: int) -> bool:
        fresh = self.fresh
        begun = super().used(unit, clock)
        self.forgotten.discard(unit)
        if self.fresh > fresh and not begun and len(self._last()) > eviction.SAMPLE:
            self.sample_less()
        return begun

    def sample_less(self) -> None:
        last, oldest = self._last(), self.starts[-eviction.EPOCHS_REMEMBERED :][0]
        if sum(at >= oldest for at in last.values()) > 0.75 * eviction.SAMPLE:
            self.threshold //= 2
            self.forgotten |= {unit for unit in last if unit >= self.threshold}
        else:
            self.forgotten |= {unit for unit, at in last.items() if at < oldest}
        self.fresh = sum(at >= self.start for at in self._last().values())
        self.size, self.again = 0, []


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("units", [20, 70, 300])
@pytest.mark.parametrize("seed", range(6))
def test_a_sample_has_epochs_by_the_rules(
    monkeypatch: pytest.MonkeyPatch, seed: int, units: int, noisy: bool
) -> None:
    """Of more units than are sampled, of which some are left for good."""
    monkeypatch.setattr(eviction, "SAMPLE", 32)
    monkeypatch.setattr(eviction, "CORRELATED_LEAST", 2)
    monkeypatch.setattr(eviction, "CORRELATED_MOST", 3 if seed % 2 else 256)
    rng = random.Random(f"{seed} {units}")
    dataset, rules, clock = Dataset.begun(1, noisy=noisy), SampledRules(1, noisy), 0
    hashes = [rng.getrandbits(64) for _ in range(units + 60)]
    uses = [unit + shift for shift in (0, 0, 30, 60) for unit in mixed(rng, units)]
    for number in uses:
        unit = hashes[number]
        clock += rng.randrange(1, 4)
        assert dataset.threshold == rules.threshold
        if unit >= dataset.threshold:
            continue
        assert dataset.used(unit, clock, 1 << 20, False) == rules.used(unit, clock)
        assert (dataset.start, dataset.previous, dataset.edge) == (rules.start, rules.previous, rules.edge)
        assert (dataset.number, dataset.epochs) == (len(rules.starts), rules.epochs)
        assert (dataset.fresh, dataset.size, dataset.count) == (rules.fresh, rules.size, len(rules.uses))
        assert {unit: at for unit, (at, _) in dataset.sample.items()} == rules._last()
    assert units < 70 or dataset.rate < 1.0


@pytest.mark.parametrize("others", [1, 3, 4, 5])
def test_a_use_is_a_separate_one_after_so_many_of_others(
    monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    monkeypatch.setattr(eviction, "CORRELATED_LEAST", 4)
    monkeypatch.setattr(eviction, "CORRELATED_MOST", 4)
    dataset = Dataset.begun(1)
    for clock, unit in enumerate([*range(40), 99, *range(40, 40 + others), 99], 1):
        dataset.used(unit, clock, 1, False)
    assert dataset.count == 41 + others + (others > 4)


@pytest.mark.parametrize("slots", [[5], [0], [0, 5], [1, 2, 3]])
def test_in_the_first_epoch_pairs_decide_where_several_nodes_read(slots: list[int]) -> None:
    shared, clock = SharedDataset(1), 1
    for number in range(FIRST_EPOCH_PAIRS):
        assert not shared.epochs
        clock += 1
        shared.used((number // len(slots) + 1) << 40, slots[number % len(slots)], clock, 5, False)
    assert shared.pairs.count == FIRST_EPOCH_PAIRS and shared.epochs is (len(slots) > 1)
    for number in range(len(slots) * 20):  # pairs that come again
        clock += 1
        shared.used((number // len(slots) + 1) << 40, slots[number % len(slots)], clock, 5, False)
        if shared.pairs.number == 1:
            few = len(shared.pairs.rereferences) <= FIRST_EPOCH_REREFERENCES * shared.pairs.count
            assert shared.epochs is (len(slots) > 1 and few)


def test_of_units_beyond_the_sample_only_the_filter_knows() -> None:
    shared = SharedDataset(1)
    shared.pairs.threshold = UNITS // 2
    for unit, sampled in ((UNITS // 2 - 1, 1), (UNITS // 2, 1), (UNITS - 1, 1), (5, 2)):
        assert shared.used(unit, 0, 2, 5, True) is False
        assert len(shared.pairs.sample) == sampled and unit in shared.pairs.access_filter
    assert 6 not in shared.pairs.access_filter and shared.pairs.last == 2 and shared._requesters == {0: 1}


def test_the_length_of_a_unit_is_a_mean_that_forgets() -> None:
    dataset, mean = Dataset.begun(1), 0.0
    rng = random.Random(1)
    for number in range(1, 2501):
        length = rng.randrange(1, 1000) * (1 if number < 1500 else 10)
        mean += (length - mean) / min(number, 1000)
        dataset.used(number << 32, number, length, False)
        assert dataset.unit_bytes == mean


def test_a_row_keeps_the_last_re_references_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "SAMPLE", 32)
    for count in (0, 3, 4, 5, 20, 40):
        dataset = Dataset.begun(1)
        dataset.rereferences.extend((number, 2 * number) for number in range(count))
        again = Dataset.unpacked(dataset.packed())
        assert again is not None
        assert list(again.rereferences) == list(dataset.rereferences)[-4:]
        assert again.rereferences.maxlen == dataset.rereferences.maxlen == 32
        assert list(again.starts) == [1] and again.starts.maxlen == eviction.EPOCHS_REMEMBERED


def test_a_damaged_row_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.begun(1)
    for number in range(3):
        dataset.used(number, number + 2, 5, True)
    row = dataset.packed()
    assert Dataset.unpacked(row) is not None
    for cut in (0, 3, 4, 10, len(row) - 24, len(row) - 16, len(row) - 8, len(row) - 1):
        found = Dataset.unpacked(row[:cut])
        assert found is None or (cut == len(row) - 24 and len(found.sample) == 2), cut
    assert Dataset.unpacked(row + b"\0") is None


@in_trio
async def test_a_copy_is_of_the_dataset_that_its_version_is_of_now(cache_dir: Path) -> None:
    """What is mounted may change that, and so may one component too many."""
    async with running(cache_dir) as lab:
        datasets, object_id = lab.store.datasets, lab.origin.put("data/train/1", bytes(BLOCK))
        datasets.mounted([(object_id.source, "")])
        assert put(lab, object_id)
        [copy] = lab.store.catalog.copies(lab.store.object(object_id), SSD)
        before, version = copy.dataset, datasets.version
        assert datasets.name(before) == "data"
        datasets.mounted([(object_id.source, "data/")])
        assert datasets.version > version
        await lab.store.flush()
        await lab.read(object_id)
        assert copy.dataset == datasets(object_id) != before and datasets.name(copy.dataset) == "data/train"
        version = datasets.version
        for number in range(MOST + 1):
            datasets(ObjectId(object_id.source, f"data/n{number}/1", "1", 1))
        assert datasets.version == version + 1
        await lab.store.flush()
        await lab.read(object_id)
        assert copy.dataset == datasets(object_id) and datasets.name(copy.dataset) == "data/"
        assert copy.dataset_version == datasets.version


def test_what_prefetch_asks_is_asked_of_the_beginning_of_a_version() -> None:
    epochs, datasets = Epochs(), Datasets()
    progress = EpochProgress(epochs, datasets)
    one, other = (ObjectId("s", f"d/{n}", "1", 1) for n in range(2))
    assert (progress.epoch(one), progress.was_used(one)) == (0, False)
    epochs.used(datasets(one), unit_hash(one.digest, 1), 1, 1, hit=False)
    assert (progress.epoch(one), progress.was_used(one)) == (1, False), "a later part of it was used"
    epochs.used(datasets(one), unit_hash(one.digest, 0), 2, 1, hit=False)
    assert progress.was_used(one) and not progress.was_used(other)
    progress.mark_used(other)
    assert progress.was_used(other)
