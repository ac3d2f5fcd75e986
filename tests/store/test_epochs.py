"""The policy alone: when epochs begin, what is protected, and that it never costs what recency gives. No store, no clock."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.base.names import ObjectId
from cachefs.cli import status as statusview
from cachefs.store import eviction
from cachefs.store.catalog import unit_hash
from cachefs.store.eviction import (
    FILTER_FIRST,
    SAMPLE,
    TRACKED,
    AccessFilter,
    Dataset,
    Datasets,
    Epochs,
    SharedDataset,
)
from tests.conftest import examples


class Watched:
    """An `Epochs` and a clock; units are numbers."""

    def __init__(self, epochs: Epochs | None = None) -> None:
        self.epochs = epochs or Epochs()
        self.clock = 0
        self.begun: list[int] = []

    def use(self, units: Iterable[int], dataset: int = 1) -> Watched:
        for unit in units:
            self.clock += 1
            key = unit_hash(random.Random(unit).randbytes(8), 0)
            if self.epochs.used(dataset, key, self.clock, 1 << 20, hit=False):
                self.begun.append(self.clock)
        return self

    def status(self, dataset: int = 1) -> dict[str, object]:
        return dict(self.epochs.status())[dataset]


def orders(count: int, epochs: int, seed: int = 1) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.sample(range(count), count) for _ in range(epochs)]


@pytest.mark.parametrize("count", [10, FILTER_FIRST, FILTER_FIRST + 1, 5 * FILTER_FIRST + 1, 20_000])
def test_what_was_seen_is_known_and_little_else(count: int) -> None:
    rng, seen = random.Random(count), AccessFilter()
    units, others = ([rng.getrandbits(64) for _ in range(20_000)] for _ in range(2))
    for unit in units[:count]:
        seen.add(unit)
        seen.add(unit)
    assert all(unit in seen for unit in units[:count])
    assert sum(unit in seen for unit in others) < 0.01 * len(others)
    size = sum(len(bits) for bits, _ in seen._filters)
    assert size <= max(2 * FILTER_FIRST, 2 * 5 * count), (
        "two bytes a unit, and room for four times as many as before"
    )


def test_all_units_of_a_small_dataset_are_sampled_and_fewer_of_a_large_one() -> None:
    watched = Watched()
    watched.use(range(SAMPLE))
    dataset = watched.epochs._datasets[1]
    assert (dataset.rate, len(dataset.sample), dataset.fresh) == (1.0, SAMPLE, SAMPLE)
    watched.use(range(SAMPLE, SAMPLE + 1))
    assert dataset.rate == 0.5 and 0.4 * SAMPLE < len(dataset.sample) < 0.6 * SAMPLE
    assert dataset.fresh == len(dataset.sample) and all(unit < dataset.threshold for unit in dataset.sample)


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_how_many_nodes_use_a_unit_is_counted_in_the_last_epoch(nodes: int) -> None:
    """Not in those before it: then there were four."""
    epochs, clock = Epochs(), 0
    for epoch in range(5):
        for order in orders(300, 1, seed=epoch):
            for unit in order:
                for node in range(4 if epoch < 2 else nodes):
                    clock += 10  # other datasets are used, too
                    key = unit_hash(random.Random(unit).randbytes(8), 0)
                    epochs.used(1, key, clock, 1 << 20, hit=False, requester=f"node{node}")
    assert epochs._datasets[1].shared.each == nodes


class Rules:
    """When an epoch of one dataset begins, from the list of all of its uses; the constants are those of the policy."""

    def __init__(self, clock: int, noisy: bool) -> None:
        self.noisy, self.epochs, self.size = noisy, False, 0
        self.starts, self.start, self.previous, self.edge = [clock], clock, clock, clock
        self.uses: list[tuple[int, int]] = []  # (unit, clock) of separate uses
        self.joined: dict[int, int] = {}  # unit → how many uses there were at its last one, separate or not
        self.again: list[int] = []  # places in `uses`, of this epoch's re-references
        self.fresh = 0

    def _last(self) -> dict[int, int]:
        return dict(self.uses)

    def correlated(self) -> float:
        return min(max(len(self._last()) / 8, eviction.CORRELATED_LEAST), eviction.CORRELATED_MOST)

    def is_together(self, unit: int) -> bool:
        return len(self.uses) - self.joined[unit] <= self.correlated()

    def edge_uses(self) -> float:
        return self.correlated()

    def used(self, unit: int, clock: int) -> bool:
        before = self._last().get(unit)
        together = before is not None and self.is_together(unit)
        if not together:
            self.uses.append((unit, clock))
        self.joined[unit] = len(self.uses)
        if together:
            return False
        if before is None or before < self.start:
            self.fresh += 1
            return False
        self.again.append(len(self.uses) - 1)
        enough = max(eviction.FEWEST_REREFERENCES, math.ceil(eviction.REREFERENCE_SHARE * self.fresh))
        if self.epochs and not self.noisy and self.size and self.fresh >= eviction.DONE_SHARE * self.size:
            enough = 1
        for count in (enough, eviction.PATIENCE * enough) if self.noisy else (enough,):
            if len(self.again) < count:
                return False
            first = self.again[-count]
            density = count / (len(self.uses) - first)
            if not self.noisy or density >= eviction.EPOCH_SHARE or count > enough:
                break
        if density < eviction.REREFERENCE_DENSITY:
            return False
        self._begin(self.uses[first][1], density)
        return True

    def _begin(self, clock: int, density: float) -> None:
        last = self._last()
        self.starts.append(clock)
        self.size = sum(at >= self.starts[-eviction.EPOCHS_REMEMBERED :][0] for at in last.values())
        used = sum(at >= self.start for at in last.values())
        self.epochs = min(density, used / self.size) >= eviction.EPOCH_SHARE
        self.fresh = sum(at >= clock for at in last.values())
        before = [at for _, at in self.uses[-eviction.CORRELATED_MOST :] if at < clock]
        edge = before[-min(len(before), math.ceil(self.edge_uses()))] if before else clock
        self.previous, self.start, self.edge, self.again = self.edge, clock, edge, []


def mixed(rng: random.Random, units: int) -> list[int]:
    """Uses of all kinds: whole orders, cut ones, streams that come back, a few units again and again, uses at random."""
    found: list[int] = []
    for _ in range(rng.randrange(3, 9)):
        order = rng.sample(range(units), units)
        match rng.randrange(5):
            case 0 | 1:
                found += order
            case 2:
                found += order[: rng.randrange(1, units)]
            case 3:
                found += [unit for at in range(0, units, 8) for unit in (*order[at : at + 8], order[0])]
            case 4:
                found += rng.choices(order, k=units)
    return found


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("units", [8, 30, 150])
@pytest.mark.parametrize("seed", range(6))
def test_epochs_begin_by_the_rules(seed: int, units: int, noisy: bool) -> None:
    rng = random.Random(f"{seed} {units}")
    dataset, rules, clock = Dataset.begun(1, noisy=noisy), Rules(1, noisy), 0
    for unit in mixed(rng, units):
        clock += rng.randrange(1, 4)
        hit = rng.random() < 0.5
        begun = dataset.used(unit, clock, 1 << 20, hit)
        assert begun == rules.used(unit, clock)
        assert (dataset.start, dataset.previous, dataset.edge) == (rules.start, rules.previous, rules.edge)
        assert (dataset.number, dataset.epochs) == (len(rules.starts), rules.epochs)
        assert (dataset.fresh, dataset.size, dataset.count) == (rules.fresh, rules.size, len(rules.uses))
        if begun:
            again = Dataset.unpacked(dataset.packed())
            assert again is not None
            again.noisy, again.lately = noisy, dataset.lately  # which a restart forgets
            dataset = again


def test_a_footprint_is_that_of_the_units_unless_pairs_decide() -> None:
    watched = Watched()
    for order in orders(1000, 3):
        watched.use(order)
    footprint = watched.status()["footprint_bytes"]
    assert footprint == 1000 << 20
    shared = watched.epochs._datasets[1].shared = SharedDataset(watched.clock)
    shared.each = 4  # as of an epoch that has passed
    assert not shared.epochs and watched.status()["footprint_bytes"] == footprint


@pytest.mark.parametrize("count", [64, 1000, 3 * SAMPLE])
def test_an_epoch_begins_where_everything_is_used_again(count: int) -> None:
    watched = Watched()
    for order in orders(count, 5):
        watched.use(order)
    assert len(watched.begun) == 4
    for number, noticed in enumerate(watched.begun, 1):
        assert number * count < noticed <= number * count + max(16, 0.05 * count)
    assert watched.status()["mode"] == "epoch"
    assert watched.status()["epoch"] == 5


def test_what_was_used_in_the_last_epoch_and_not_in_this_is_protected() -> None:
    watched = Watched()
    for order in orders(1000, 3):
        watched.use(order)
    start = watched.epochs.start(1)
    assert 2000 < start <= 2250  # the first uses after the turn may still belong to those before it
    # Where one epoch becomes the next, an eighth of the units may have been used for either.
    clocks = (700, 1000, start - 1, start, 2999)
    assert [watched.epochs.protects(1, clock) for clock in clocks] == [False, True, True, False, False]
    assert not watched.epochs.protects(2, start - 1), "another dataset"


@pytest.mark.parametrize("policy, mode", [("auto", "lru"), ("epoch", "epoch")])
def test_uses_at_random_are_no_epochs_unless_told_so(policy: str, mode: str) -> None:
    rng = random.Random(3)
    watched = Watched(Epochs(policy))  # type: ignore[arg-type]
    watched.use(rng.randrange(2000) for _ in range(20_000))
    assert watched.status()["mode"] == mode


def test_plain_recency_protects_nothing() -> None:
    watched = Watched(Epochs("lru"))
    for order in orders(300, 4):
        watched.use(order)
    assert not any(watched.epochs.protects(1, clock) for clock in range(1300))
    assert watched.status()["mode"] == "lru"


def test_a_few_files_read_again_and_again_begin_nothing() -> None:
    watched = Watched()
    order = orders(4000, 1)[0]
    for at in range(0, 4000, 40):
        watched.use(order[at : at + 40]).use(order[:1])
    assert watched.begun == []


@pytest.mark.parametrize("again", [2, 3])
def test_of_a_small_dataset_a_few_files_read_again_begin_nothing(again: int) -> None:
    """A user looks at two or three of the first files again, in the middle of an epoch. If that began one, the files read
    until then would be protected, and those still to come would be evicted."""
    watched = Watched().use(range(40)).use(range(again)).use(range(40, 80))
    assert watched.begun == []


def test_the_second_epoch_of_a_few_shards_is_noticed_in_its_first_eighth() -> None:
    """Until then recency evicts shards that are all needed in this epoch."""
    watched = Watched()
    for order in orders(40, 1) * 2:
        watched.use(order)
    assert watched.begun[0] - 40 <= 40 // 8


def test_each_opened_twice_is_one_use() -> None:
    watched = Watched()
    for order in orders(500, 3):
        watched.use(unit for unit in order for _ in range(2))
    assert len(watched.begun) == 2
    assert watched.status()["mode"] == "epoch"


@pytest.mark.long
def test_readers_of_large_files_use_one_extent_for_a_while() -> None:
    """64 streams; each comes back to its extent once a second, ten times. Until so much has been read that this is known
    to be a part, it looks like small epochs."""
    watched = Watched()
    for order in orders(6400, 3):
        for at in range(0, 6400, 64):
            for _ in range(10):
                watched.use(order[at : at + 64])
    begun = [clock for clock in watched.begun if clock > 6400]
    assert [round(clock / 64_000, 1) for clock in begun] == [1.0, 2.0]
    assert watched.status()["mode"] == "epoch"


def test_a_dataset_that_is_left_in_the_middle_is_given_up() -> None:
    watched = Watched()
    for order in orders(1000, 3):
        watched.use(order)
    watched.use(orders(1000, 1, seed=9)[0][:500])
    kept = watched.epochs.start(1) - 1
    assert watched.epochs.protects(1, kept)
    version = watched.epochs.version
    watched.use(range(10_000, 10_400), dataset=2)
    assert watched.epochs.protects(1, kept), "a pause is not the end"
    watched.use(range(10_400, 10_700), dataset=2)
    assert not watched.epochs.protects(1, kept)
    assert watched.epochs.version > version, "whoever passed it over looks again"


@given(seed=st.integers(0, 1000), at=st.integers(0, 1199))
@settings(max_examples=examples(25), deadline=None)
def test_a_restart_at_any_moment_changes_nothing(seed: int, at: int) -> None:
    uses = [unit for order in orders(300, 4, seed) for unit in order]
    whole = Watched().use(uses)
    first = Watched().use(uses[:at])
    second = Watched()
    second.epochs.restore(first.epochs.changes().get)
    assert second.epochs._now == at
    second.clock = at
    second.use(uses[at:])
    assert first.begun + second.begun == whole.begun
    assert second.status() == whole.status()


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_damaged_state_is_learnt_again(listed: bytes, row: bytes) -> None:
    epochs = Epochs()
    epochs.restore(lambda name: listed if name == b"epochs" else row)
    Watched(epochs).use(range(100))
    good = Watched()
    good.use(range(300))
    notes = good.epochs.changes()
    notes[b"epochs00000001"] = notes[b"epochs00000001"][: len(row)]
    cut = Epochs()
    cut.restore(notes.get)
    assert list(cut.status()) == []


def test_only_what_changed_is_written_again() -> None:
    watched = Watched().use(range(50)).use(range(50), dataset=2)
    assert set(watched.epochs.changes()) == {b"epochs", b"epochs00000001", b"epochs00000002"}
    watched.use(range(50, 60), dataset=2)
    assert set(watched.epochs.changes()) == {b"epochs", b"epochs00000002"}


def test_memory_is_bounded_whatever_is_read() -> None:
    watched = Watched()
    watched.use(range(20_000))
    found = watched.epochs._datasets[1]
    assert len(found.sample) <= SAMPLE
    assert 0.8 < found.alive / found.rate / 20_000 < 1.2
    for dataset in range(TRACKED + 10):
        watched.use([1, 2], dataset)
    assert len(watched.epochs._datasets) == TRACKED


def test_status_says_what_is_known() -> None:
    watched = Watched()
    watched.use(range(1000)).use(range(600))
    assert watched.status() | {"used_share": 0.6} == {
        "mode": "epoch",
        "epoch": 2,
        "used_share": 0.6,
        "footprint_bytes": 1000 << 20,
        "hit_ratio": 0.0,
        "last_hit_ratio": 0.0,
    }
    assert abs(float(str(watched.status()["used_share"])) - 0.6) < 0.02


def test_status_shows_datasets_with_epochs_and_what_is_pinned() -> None:
    watched = Watched()
    watched.use(range(1000)).use(range(500))
    watched.use([1, 2, 3], dataset=2)
    datasets = [{"name": "a b", **known} for _, known in watched.epochs.status()]
    status = {"eviction": {"policy": "auto", "datasets": datasets}, "pinned_bytes": 3 << 20}
    shown = dict(statusview.lines(status))
    assert shown["epochs"].startswith("a b: epoch 2, 5") and shown["epochs"].endswith(
        "of 1000 MiB read, 0 % cached"
    )
    assert shown["pinned"] == "3.0 MiB"


# -- datasets --------------------------------------------------------------------------------------


def version(key: str, source: str = "s3://b") -> ObjectId:
    return ObjectId(source, key, '"1"', 10)


def test_a_dataset_is_the_first_component_below_what_is_mounted() -> None:
    datasets = Datasets()
    datasets.mounted([("s3://b", "data/"), ("s3://b", "data/deep/"), ("s3://c", "")])
    same = datasets(version("data/train/1.jpg"))
    assert datasets(version("data/train/x/2.jpg")) == same
    others = [
        version("data/val/1"),
        version("data/1"),
        version("data/deep/train/1"),
        version("data/train/1", "s3://c"),
    ]
    assert len({same, *map(datasets, others)}) == 5
    assert datasets.name(same) == "data/train"
    assert datasets(version("data/2")) == datasets(version("data/3")), "files at the root are one"


def test_fifty_datasets_of_one_bucket_are_told_apart() -> None:
    """Each has epochs of its own."""
    datasets = Datasets()
    for _ in range(2):
        assert len({datasets(version(f"dataset-{number}/1")) for number in range(50)}) == 50


def test_a_hundred_classes_are_one_dataset_and_stay_one() -> None:
    """As those of CIFAR-100: a class alone has too few files for its epochs to be noticed."""
    datasets = Datasets()
    for number in range(100):
        last = datasets(version(f"n{number}/1"))
    assert datasets(version("n0/1")) == last == datasets(version("other/1"))
    again = Datasets()
    again.restore(datasets.dump())
    assert again(version("n0/1")) == last
    again.restore(b"rubbish")


@pytest.mark.parametrize("policy", ["auto", "lru"])
@pytest.mark.parametrize("count", [300, 3 * SAMPLE])
def test_what_an_epoch_has_had_is_known_of_all_units(policy: str, count: int) -> None:
    watched = Watched(Epochs(policy))  # type: ignore[arg-type]
    keys = [unit_hash(random.Random(unit).randbytes(8), 0) for unit in range(count)]

    def had(units: Iterable[int]) -> int:
        return sum(watched.epochs.was_used(1, keys[unit]) for unit in units)

    first, second = orders(count, 2)
    assert watched.epochs.number(1) == 0 and not had(first)
    watched.use(first[: count // 2])
    assert had(first[: count // 2]) == count // 2
    assert had(first[count // 2 :]) <= count // 100
    watched.use(first[count // 2 :])
    number = watched.epochs.number(1)
    watched.use(second[: count // 2])
    assert watched.epochs.number(1) == number + 1
    # Those before it showed that an epoch had begun are known as far as they are sampled.
    assert had(second[: count // 2]) >= count // 2 - max(4, count // 100)
    assert had(second[count // 2 :]) <= max(2, count // 100)


def test_a_grown_filter_knows_all_and_is_seldom_wrong() -> None:
    rng = random.Random(5)
    seen = AccessFilter()
    units = [rng.getrandbits(64) for _ in range(20_000)]
    for unit in units:
        seen.add(unit)
    assert all(unit in seen for unit in units)
    assert sum(rng.getrandbits(64) in seen for _ in range(20_000)) < 20_000 / 100


def test_a_filter_grows_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "FILTER_FIRST", 64)
    monkeypatch.setattr(eviction, "FILTER_MOST", 1024)
    rng, seen = random.Random(5), AccessFilter()
    units = [rng.getrandbits(64) for _ in range(5000)]
    for unit in units:
        seen.add(unit)
    assert all(unit in seen for unit in units[: 64 + 256 + 1024])
    assert sum(unit in seen for unit in units[1500:]) < 3500 / 50, "and takes no more"


KEYS = st.lists(
    st.tuples(
        st.sampled_from(["s3://a", "s3://b", "s3://c"]),
        st.sampled_from(["", "data/", "data/deep/", "/", "da"]),
        st.sampled_from(["x", "y", "z", "data", "deep", "w", "é"]),
        st.sampled_from(["", "/1", "/1/2", "//"]),
    ),
    max_size=30,
)


@given(KEYS, st.integers(0, 30))
@settings(max_examples=examples(150))
def test_datasets_are_numbered_by_the_plain_rule(keys: list[tuple[str, str, str, str]], restart: int) -> None:
    """The first component below the longest mounted prefix; all as one, from one too many on."""
    mounted = {"s3://a": ["", "data/", "data/deep/"], "s3://b": ["data/"]}
    places = [(source, prefix) for source, prefixes in mounted.items() for prefix in prefixes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction, "MOST", 2)
        datasets, seen, whole, names = Datasets(), dict[tuple[str, str], set[str]](), set(), dict[int, str]()
        datasets.mounted(places)
        for number, (source, start, middle, end) in enumerate(keys):
            key = start + middle + end
            fits = [prefix for prefix in mounted.get(source, []) if key.startswith(prefix)]
            prefix = max(fits, key=len, default="")
            parts = key[len(prefix) :].lstrip("/").split("/", 1)
            first = parts[0] if len(parts) == 2 and (source, prefix) not in whole else ""
            if (source, prefix) not in whole:
                known = seen.setdefault((source, prefix), set())
                known.add(first)
                if len(known) > 2:
                    whole.add((source, prefix))
                    first = ""
            found = datasets(version(key, source))
            assert found == zlib.crc32(f"{source}\0{prefix}\0{first}".encode())
            assert datasets.name(found) == names.setdefault(found, prefix + first)
            if number == restart:
                again = Datasets()
                again.mounted(places)
                again.restore(datasets.dump())
                assert {n: again.name(n) for n in names} == names
                datasets, seen = again, {place: set() for place in whole}
        assert datasets.name(5) == "00000005"
