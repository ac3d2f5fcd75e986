"""An owner's store whose share of a dataset is read by four nodes: what it has to fetch again with a little too little
room, while its own readers have what other nodes keep fetched ahead. And the policy alone: whose uses are whose."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cachefs.base.names import ObjectId
from cachefs.store import eviction as policy
from cachefs.store.catalog import unit_hash
from cachefs.store.eviction import Epochs
from tests.fetch.scripted import in_trio
from tests.store.lab import BLOCK, Lab, begin_write, running
from tests.store.test_epochs import Rules

NODES = ("", "a", "b", "c")
"""Who asks; this node's readers are ""."""


def asked(units: int, epoch: object, nodes: Iterable[str] = NODES) -> list[tuple[str, int]]:
    """Each node asks for all units in an order of its own, all at the same pace."""
    orders = [(node, random.Random(f"{epoch} {node}").sample(range(units), units)) for node in nodes]
    return [(node, order[at]) for at in range(units) for node, order in orders]


def put(lab: Lab, object_id: ObjectId, requester: str = "", **how: bool) -> bool:
    """Its block comes; whether there was room for it."""
    obj = lab.store.object(object_id)
    cache_write = begin_write(lab.store, obj, 0, 1, **how)
    if cache_write is None:
        return False
    cache_write.requester = requester
    cache_write.write(bytes(object_id.size))
    lab.store.end_write(obj, cache_write)
    obj.close_if_unused()
    return True


async def use(lab: Lab, object_id: ObjectId, requester: str) -> bool:
    """As a reader here, or as another node through this one. Whether it was cached."""
    obj = lab.store.object(object_id)
    if not lab.store.has(obj, 0):
        assert put(lab, object_id, requester)
        return False
    if not requester:
        assert await lab.store.read(obj, 0, object_id.size) is not None
        obj.close_if_unused()
        return True
    obj.refs += 1
    assert await lab.store.read(obj, 0, 1, count=False) is not None  # so its file is open
    shared = lab.store.pin_block(obj, 0, requester=requester)
    assert shared is not None
    lab.store.unpin_block(obj, shared)
    obj.release()
    return True


async def epoch(lab: Lab, own: list[ObjectId], number: int, others: list[ObjectId] | None = None) -> int:
    """How many units had to be fetched. With `others`, as much of them is fetched ahead as there is room for."""
    missed = 0
    rng = random.Random(number)
    for at, (requester, unit) in enumerate(asked(len(own), number)):
        missed += not await use(lab, own[unit], requester)
        for _ in range(2 if others else 0):
            other = rng.choice(others or [])
            if not lab.store.has(lab.store.object(other), 0):
                put(lab, other, prefetched=True, remote_owned=True)
        if at % 16 == 0:
            await lab.store.flush()
            if lab.store._moves is not None and lab.store._moves._too_full():
                await lab.store._moves._spill()
    return missed


@pytest.mark.long
@pytest.mark.parametrize("ram_share", [pytest.param(0, marks=pytest.mark.long), 0.25])
@in_trio
async def test_what_all_nodes_read_stays_with_its_owner(cache_dir: Path, ram_share: float) -> None:
    share, room = 208, 200
    ram = int(room * ram_share) * BLOCK
    async with running(cache_dir, ssd=room * BLOCK - ram, ram=ram) as lab:
        own = [lab.origin.put(f"train/{n}", bytes(BLOCK)) for n in range(share)]
        others = [lab.origin.put(f"train/other{n}", bytes(BLOCK)) for n in range(400)]
        missed = [await epoch(lab, own, n, others if ram else None) for n in range(4)]
        # A tenth of RAM is for what comes.
        too_much = share - room + ram // BLOCK // 10
        assert missed[0] <= 1.02 * share, missed
        assert max(missed[1:]) <= 3.2 * too_much, missed
        (known,) = lab.store.eviction_status()["datasets"]
        assert (known["mode"], known["epoch"]) == ("epoch", 4)
        lab.check_accounts()


@pytest.mark.long
@in_trio
async def test_by_recency_it_costs_twice_as_much(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=200 * BLOCK, eviction="lru") as lab:
        own = [lab.origin.put(f"train/{n}", bytes(BLOCK)) for n in range(208)]
        missed = [await epoch(lab, own, n) for n in range(3)]
        assert min(missed[1:]) >= 6 * (208 - 200), missed


@in_trio
async def test_what_waits_here_for_others_gives_way_to_what_is_kept(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=32 * BLOCK, ram=32 * BLOCK) as lab:
        ram, ssd = lab.store.tiers
        number = 0
        while put(lab, lab.origin.put(f"other/{number}", bytes(BLOCK)), prefetched=True, remote_owned=True):
            number += 1
        assert ram.own_bytes == 0 and ram.remote_owned_bytes == ram.used_bytes >= 30 * BLOCK
        own = [lab.origin.put(f"own/{n}", bytes(BLOCK)) for n in range(60)]
        for object_id in own:
            assert put(lab, object_id)
        assert ssd.own_bytes == 32 * BLOCK
        assert ram.own_bytes >= 28 * BLOCK, "nine tenths of it"
        assert sum(lab.store.cached_bytes(i) for i in own) == 60 * BLOCK
        lab.check_accounts()


# -- the policy alone ------------------------------------------------------------------------------


def played(epochs: Epochs, uses: Iterable[tuple[str, int]]) -> None:
    for requester, unit in uses:
        epochs._now += 1
        epochs.used(1, key(unit), epochs._now, 1 << 20, hit=True, requester=requester)


def key(unit: int) -> int:
    return unit_hash(random.Random(unit).randbytes(8), 0)


@pytest.mark.parametrize("count", [128, 3000])
def test_each_node_reads_everything_and_an_epoch_is_one(count: int) -> None:
    epochs = Epochs()
    for number in range(3):
        played(epochs, asked(count, number))
        assert epochs.number(1) == number + 1 and epochs.has_epochs(1)
    order = asked(count, 3)
    played(epochs, order[: 2 * count])
    had = {unit: [requester for requester, u in order[: 2 * count] if u == unit] for unit in range(count)}
    first = {unit for unit in had if epochs.evictable_first(1, key(unit))}
    all_had = {unit for unit, requesters in had.items() if len(requesters) == len(NODES)}
    # A filter is wrong now and then; the first uses of an epoch were counted for the one before.
    assert len(first - all_had) <= count // 100 and len(all_had - first) <= max(8, 0.2 * len(all_had))
    here = {unit for unit, requesters in had.items() if "" in requesters}
    assert abs(sum(epochs.was_used(1, key(unit)) for unit in range(count)) - len(here)) <= 0.03 * count + 2


@pytest.mark.parametrize("share", [0.01, 0.1, 0.2])
def test_pairs_that_come_twice_in_an_epoch_begin_none(share: float) -> None:
    """As of what was prefetched here, evicted before it was read, and requested again."""
    rng, epochs = random.Random(1), Epochs()
    for number in range(5):
        before, order = epochs.number(1), asked(1000, number)
        again = [
            (at + rng.randrange(100, 800) + 0.5, use) for at, use in enumerate(order) if rng.random() < share
        ]
        played(epochs, [use for _, use in sorted([*enumerate(order), *again])])
        if number > 1:
            assert epochs.number(1) == before + 1 and epochs.has_epochs(1)


def test_where_each_node_reads_a_part_that_changes_units_have_the_epochs() -> None:
    epochs = Epochs()
    for number in range(4):
        order = random.Random(number).sample(range(1000), 1000)
        played(epochs, [(NODES[at % 4], unit) for at, unit in enumerate(order)])
    assert epochs.number(1) == 4 and epochs.has_epochs(1)
    assert epochs.protects(1, 2990) and not epochs.protects(1, 3990), "used in this epoch"
    assert not any(epochs.evictable_first(1, key(unit)) for unit in range(1000))


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_uses_by_several_nodes_at_random_are_no_epochs(exponent: float) -> None:
    rng, epochs = random.Random(1), Epochs()
    weights = [1 / (rank + 1) ** exponent for rank in range(500)]
    played(epochs, [(rng.choice(NODES), unit) for unit in rng.choices(range(500), weights, k=8000)])
    assert not epochs.has_epochs(1)
    assert not any(epochs.evictable_first(1, key(unit)) for unit in range(500))


# -- against the rules, from the list of all uses ----------------------------------------------------


class Plain:
    """What `Epochs` says, without samples and filters: from all uses of all units and pairs."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.version = self.now = self.looked = 0
        self.units: dict[int, Watch] = {}
        self.pairs: dict[int, Watch] = {}
        self.each: dict[int, int] = {}
        self.nodes: dict[int, dict[int, int]] = {}  # dataset → slot → epoch of its last use
        self.slots = {"": 0}

    def used(self, dataset: int, unit: int, clock: int, length: int, hit: bool, node: str) -> bool:
        self.now = clock
        if clock - self.looked >= 64:
            self.looked = clock
            for watch in (*self.units.values(), *self.pairs.values()):
                if not watch.idle and clock - watch.last > max(64, (watch.start - watch.previous) // 2):
                    watch.idle = True
                    self.version += 1
        units = self.units.get(dataset) or self.add(dataset)
        before = self.decides(dataset)
        begun = units.uses_unit(unit, clock, length, hit)
        if node and dataset not in self.pairs:
            self.pairs[dataset] = Watch(clock, noisy=True)
            self.each[dataset], self.nodes[dataset] = 0, {}
        if dataset in self.pairs:
            pairs, nodes = self.pairs[dataset], self.nodes[dataset]
            slot = self.slots.setdefault(node, min(len(self.slots), policy.SLOTS - 1))
            nodes[slot] = len(pairs.starts)
            begun_pairs = pairs.uses_unit(unit * policy.SLOTS + slot, clock, length, hit)
            if begun_pairs:
                self.nodes[dataset] = {
                    slot: last for slot, last in nodes.items() if last >= len(pairs.starts) - 1
                }
                late = [pair for pair, at in pairs._last().items() if at >= pairs.previous]
                units_of_them = {pair // policy.SLOTS for pair in late}
                self.each[dataset] = math.ceil(len(late) / len(units_of_them) - 0.1) if late else 0
            decides = self.decides(dataset)
            if decides is not before:
                begun = True
            elif decides is pairs:
                begun = begun_pairs
        if begun:
            self.version += 1
        return begun

    def add(self, dataset: int) -> Watch:
        if len(self.units) >= policy.TRACKED:
            gone = min(self.units, key=lambda d: self.units[d].last)
            del self.units[gone]
            self.pairs.pop(gone, None)
            self.version += 1
        self.units[dataset] = watch = Watch(self.now, noisy=False)
        return watch

    def mark_used(self, dataset: int, unit: int) -> None:
        (self.units.get(dataset) or self.add(dataset)).seen.add(unit)
        if dataset in self.pairs:
            self.pairs[dataset].seen.add(unit * policy.SLOTS)

    def pairs_have_epochs(self, dataset: int) -> bool:
        pairs = self.pairs[dataset]
        first = len(pairs.starts) == 1 and len(pairs.uses) >= policy.FIRST_EPOCH_PAIRS
        first = first and len(self.nodes[dataset]) > 1
        return pairs.epochs or (
            first and len(pairs.again) <= policy.FIRST_EPOCH_REREFERENCES * len(pairs.uses)
        )

    def decides(self, dataset: int) -> Watch | None:
        units, pairs = self.units.get(dataset), self.pairs.get(dataset)
        if pairs is None or units is None or (units.epochs and not self.pairs_have_epochs(dataset)):
            return units
        return pairs

    def has_epochs(self, dataset: int) -> bool:
        found = self.decides(dataset)
        if found is None or self.policy == "lru":
            return False
        by_pairs = found is self.pairs.get(dataset)
        return self.policy == "epoch" or (self.pairs_have_epochs(dataset) if by_pairs else found.epochs)

    def protects(self, dataset: int, clock: int) -> bool:
        found = self.decides(dataset)
        if found is None or found.idle or clock < found.previous or not self.has_epochs(dataset):
            return False
        return found is self.pairs.get(dataset) or clock < found.start

    def evictable_first(self, dataset: int, unit: int) -> bool:
        pairs = self.pairs.get(dataset)
        if pairs is None or self.decides(dataset) is not pairs or not self.has_epochs(dataset):
            return False
        slots = self.nodes[dataset]
        had = sum(unit * policy.SLOTS + slot in pairs.seen for slot in slots)
        return had >= (min(self.each[dataset], len(slots)) or len(slots))

    def was_used(self, dataset: int, unit: int) -> bool:
        found = self.decides(dataset)
        if found is None:
            return False
        if found is self.pairs.get(dataset):
            return unit * policy.SLOTS in found.seen
        return unit in found.seen or found._last().get(unit, -1) >= found.start

    def status(self) -> dict[int, dict[str, object]]:
        found = {}
        for dataset in sorted(self.units, key=lambda d: -self.units[d].last):
            watch = self.decides(dataset)
            assert watch is not None
            alive = sum(at >= watch.starts[-policy.EPOCHS_REMEMBERED :][0] for at in watch._last().values())
            each = max(1, self.each[dataset]) if watch is self.pairs.get(dataset) else 1
            found[dataset] = {
                "mode": "epoch" if self.has_epochs(dataset) else "lru",
                "epoch": len(watch.starts),
                "used_share": round(watch.fresh / max(1, alive), 3),
                "footprint_bytes": int(alive / each * watch.bytes),
                "hit_ratio": round(watch.hits / watch.count, 3) if watch.count else None,
                "last_hit_ratio": watch.last_hit_ratio,
            }
        return found


class Watch(Rules):
    """The rules, and what is counted beside them."""

    def __init__(self, clock: int, noisy: bool) -> None:
        super().__init__(clock, noisy)
        self.last, self.idle, self.seen = 0, False, set[int]()
        self.hits = self.count = 0
        self.bytes = 0.0
        self.last_hit_ratio: float | None = None

    def uses_unit(self, unit: int, clock: int, length: int, hit: bool) -> bool:
        self.last, self.idle = clock, False
        self.seen.add(unit)
        before = len(self.uses)
        begun = self.used(unit, clock)
        if len(self.uses) > before:
            self.count += 1
            self.hits += hit
            self.bytes += (length - self.bytes) / min(len(self.uses), 1000)
        if begun:
            self.last_hit_ratio = round(self.hits / self.count, 3)
            self.hits = self.count = 0
            self.seen = set()
        return begun


def lives(rng: random.Random, nodes: list[str], units: int) -> Iterator[tuple[str, int]]:
    """(node, unit): each node all of it, each a part, all at random, one alone; one epoch after the other."""
    for _ in range(rng.randrange(3, 7)):
        order = rng.sample(range(units), units)
        match rng.randrange(5):
            case 0 | 1:
                yield from asked(units, rng.random(), nodes)
            case 2:
                yield from ((nodes[at % len(nodes)], unit) for at, unit in enumerate(order))
            case 3:
                yield from ((rng.choice(nodes), rng.randrange(units)) for _ in range(units))
            case 4:
                yield from ((nodes[0], unit) for unit in order)


@pytest.mark.parametrize("how", ["auto", "epoch", "lru"])
@pytest.mark.parametrize("seed", range(5))
def test_all_that_is_said_is_by_the_rules(monkeypatch: pytest.MonkeyPatch, seed: int, how: str) -> None:
    """Several datasets, of which too many are in use now and then."""
    monkeypatch.setattr(policy, "TRACKED", 3)
    monkeypatch.setattr(policy, "FIRST_EPOCH_PAIRS", 30)
    monkeypatch.setattr(policy, "SLOTS", 4 if seed % 2 else 256)  # the last slot is shared
    rng = random.Random(f"{seed} {how}")
    epochs, plain, clock = Epochs(how), Plain(how), 0  # type: ignore[arg-type]
    nodes = ["", "a", "b", "c", "d"]
    streams = {
        dataset: lives(rng, nodes[: rng.randrange(1, 6)], rng.choice([12, 40])) for dataset in range(4)
    }
    units = {dataset: [key(100 * dataset + unit) for unit in range(40)] for dataset in range(5)}
    while streams:
        dataset = rng.choice(sorted(streams)[:2] if rng.random() < 0.9 else sorted(streams))
        for _ in range(rng.choice([1, 1, 3, 30])):
            use = next(streams[dataset], None)
            if use is None:
                del streams[dataset]
                break
            clock += rng.choice([1, 1, 2, 3])
            node, unit = use[0], units[dataset][use[1]]
            length, hit = rng.randrange(1, 1 << 20), rng.random() < 0.5
            begun = epochs.used(dataset, unit, clock, length, hit=hit, requester=node)
            assert begun == plain.used(dataset, unit, clock, length, hit, node)
            assert epochs.version == plain.version
            if rng.random() < 0.1:
                ahead = rng.choice(units[dataset])
                epochs.mark_used(dataset, ahead)
                plain.mark_used(dataset, ahead)
        for number in range(5):
            found = plain.decides(number)
            said = (epochs.number(number), epochs.start(number), epochs.has_epochs(number))
            if found is None:
                assert said == (0, 0, False)
            else:
                assert said == (len(found.starts), found.start, plain.has_epochs(number))
            edges = [found.previous + by for by in (-1, 0)] if found else []
            edges += [found.start + by for by in (-1, 0)] if found else []
            for at in (0, clock, *edges):
                assert epochs.protects(number, at) == plain.protects(number, at)
            for unit in rng.sample(units[number], 4):
                assert epochs.evictable_first(number, unit) == plain.evictable_first(number, unit)
                assert epochs.was_used(number, unit) == plain.was_used(number, unit)
        assert list(epochs.status()) == list(plain.status().items())
