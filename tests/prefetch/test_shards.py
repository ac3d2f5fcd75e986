"""Which large file is predicted from the order in which others were opened."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.prefetch.shards import AHEAD, MOST_UNREAD, STREAMS, Shards


class Names:
    """A directory's listing."""

    def __init__(self, names: Iterable[str | bytes]) -> None:
        self.names = sorted(n.encode() if isinstance(n, str) else n for n in names)

    def holds(self, name: bytes) -> bool:
        return name in self.names

    def behind(self, name: bytes, count: int) -> list[bytes]:
        at = bisect_right(self.names, name)
        return self.names[at : at + count]


class Reader:
    """Reads each shard through before the next is opened."""

    def __init__(self) -> None:
        self.shards = Shards()

    def opened(self, directory: int, pid: int, name: bytes, listing: Names) -> list[bytes]:
        predicted = self.shards.opened(directory, pid, name, listing)
        return list(dict.fromkeys(predicted + self.shards.was_read(directory, pid, listing)))


def told(names: Names, opened: Sequence[str], pid: int = 1) -> list[list[str]]:
    reader = Reader()
    return [[n.decode() for n in reader.opened(1, pid, name.encode(), names)] for name in opened]


PADDED = Names(f"train-{i:05d}-of-01000.tar" for i in range(1000))
PLAIN = Names(f"shard.{i}.bin" for i in range(200))
TAGGED = Names(f"{random.Random(i).randbytes(4).hex()}x.parquet" for i in range(50))


@pytest.mark.parametrize(
    ("names", "opened", "expected"),
    [
        (PADDED, ["train-00000-of-01000.tar"], []),
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (0, 1)], ["train-00002-of-01000.tar"]),
        (
            PADDED,
            [f"train-{i:05d}-of-01000.tar" for i in (0, 1, 2)],
            ["train-00003-of-01000.tar", "train-00004-of-01000.tar"],
        ),
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (3, 35)], ["train-00067-of-01000.tar"]),
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (0, 400)], []),
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (0, 400, 800)], []),  # its end
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (0, 300, 600)], ["train-00900-of-01000.tar"]),
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (998, 999)], []),
        (
            PADDED,
            [f"train-{i:05d}-of-01000.tar" for i in (9, 8, 7)],
            ["train-00006-of-01000.tar", "train-00005-of-01000.tar"],
        ),
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (1, 0)], []),
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (5, 5, 5, 6)], ["train-00007-of-01000.tar"]),
        (PADDED, [f"train-{i:05d}-of-01000.tar" for i in (0, 1, 50, 51)], []),  # a wrong guess: once more
        (
            PADDED,
            [f"train-{i:05d}-of-01000.tar" for i in (0, 1, 50, 51, 52)],
            ["train-00053-of-01000.tar", "train-00054-of-01000.tar"],
        ),
        (PLAIN, ["shard.8.bin", "shard.9.bin"], ["shard.10.bin"]),
        (PLAIN, ["shard.11.bin", "shard.10.bin"], ["shard.9.bin"]),
        (PLAIN, ["shard.97.bin", "shard.98.bin", "shard.99.bin"], ["shard.100.bin", "shard.101.bin"]),
    ],
)
def test_the_number_in_the_name(names: Names, opened: list[str], expected: list[str]) -> None:
    assert told(names, opened)[-1] == expected


@pytest.mark.parametrize("stride", [1, 3, 20])
def test_names_without_an_order_go_by_their_place_in_the_listing(stride: int) -> None:
    order = [name.decode() for name in TAGGED.names][::stride]
    assert told(TAGGED, order[:2])[-1] == order[2:3]
    assert told(TAGGED, order[:3])[-1] == order[3:5]
    assert told(TAGGED, order)[-1] == []


def test_a_shuffled_order_wastes_few_shards() -> None:
    order = [name.decode() for name in PADDED.names]
    random.Random(1).shuffle(order)
    assert sum(map(len, told(PADDED, order[:300]))) <= 9


def test_workers_by_stride_each_have_theirs() -> None:
    shards, hits, opened = Reader(), 0, set()
    predicted: set[bytes] = set()
    for turn in range(40):
        for worker in range(8):
            name = PADDED.names[turn * 8 + worker]
            hits += name in predicted
            opened.add(name)
            predicted |= set(shards.opened(1, 100 + worker, name, PADDED))
    assert hits >= 40 * 8 - 8
    assert len(predicted - opened) <= 2 * 8


def test_workers_that_share_a_queue_are_predicted_the_directory_s_next() -> None:
    rng = random.Random(2)
    shards, predicted, hits = Reader(), set[bytes](), 0
    for name in PADDED.names[:200]:
        hits += name in predicted
        predicted |= set(shards.opened(1, rng.randrange(4), name, PADDED))
    assert hits >= 195
    assert len(predicted - set(PADDED.names[:200])) <= 2 * AHEAD


@pytest.mark.parametrize("node", range(4))
def test_of_shards_that_are_dealt_out_to_nodes_only_this_node_s_are_predicted(node: int) -> None:
    rng = random.Random(node)
    shards, predicted, hits, own = Reader(), set[bytes](), 0, PADDED.names[node:800:4]
    for name in own:
        hits += name in predicted
        predicted |= set(shards.opened(1, rng.randrange(4), name, PADDED))
    assert hits >= len(own) - 5
    assert len(predicted - set(own)) <= 2 * AHEAD


def blocks(processes: int, size: int) -> list[tuple[int, int]]:
    """(process, shard), where each process has shards of its own that follow each other."""
    return [(process, process * size + turn) for turn in range(size) for process in range(processes)]


def queue(shards: Iterable[int]) -> list[tuple[int, int]]:
    """(process, shard), where four processes take what comes next."""
    rng = random.Random(7)
    return [(rng.randrange(4), shard) for shard in shards]


def turns(nodes: int, size: int) -> list[int]:
    """Of one node, where nodes take turns by so many shards."""
    return [start + number for start in range(0, 960, nodes * size) for number in range(size)]


@pytest.mark.parametrize(
    ("order", "runs"),
    [
        (blocks(4, 8), 4),
        (blocks(8, 10), 8),
        (queue(turns(4, 4)), 60),
        (queue(turns(2, 2)), 240),
        (queue(turns(8, 8)), 15),
        (queue([0, *range(1, 800, 4)]), 1),
    ],
    ids=["4 blocks of 8", "8 blocks of 10", "4 of 16", "2 of 4", "8 of 64", "every fourth, and the first"],
)
def test_a_run_of_shards_that_ends_costs_two(order: list[tuple[int, int]], runs: int) -> None:
    readers, predicted = Reader(), set[bytes]()
    for process, shard in order:
        predicted |= set(readers.opened(1, process, PADDED.names[shard], PADDED))
    wasted = predicted - {PADDED.names[shard] for _, shard in order}
    assert len(wasted) <= AHEAD * (runs + 8)


def test_at_the_end_of_a_number_the_next_directory_of_names_is_not_guessed() -> None:
    """part-0-9, part-0-10, part-0-11, part-1-0: the step from one to the other is of the listing."""
    names = Names(f"part-{a}-{b}" for a in range(4) for b in range(12))
    for processes in (2, 4, 8):
        rng = random.Random(processes)
        reader, predicted = Reader(), set[bytes]()
        order = [f"part-{a}-{b}".encode() for a in range(4) for b in range(12)]
        for name in order[:36]:
            predicted |= set(reader.opened(1, rng.randrange(processes), name, names))
        assert len(predicted - set(order[:36])) <= AHEAD * processes


def test_readers_of_scattered_shards_predict_little() -> None:
    rng = random.Random(3)
    shards = Reader()
    count = sum(len(shards.opened(1, rng.randrange(4), rng.choice(PADDED.names), PADDED)) for _ in range(300))
    assert count <= 9


def test_directories_and_processes_are_told_apart() -> None:
    shards = Reader()
    a, b = Names(f"a{i}" for i in range(9)), Names(f"b{i}" for i in range(9))
    for i in range(3):
        first = shards.opened(1, 1, b"a%d" % i, a)
        second = shards.opened(2, 1, b"b%d" % (2 * i), b)
    assert (first, second) == ([b"a3", b"a4"], [b"b6", b"b8"])
    assert len(shards.shards) == 2


# -- looking and reading ----------------------------------------------------------------------------


def test_looking_at_shards_predicts_nothing() -> None:
    shards = Shards()
    for number, name in enumerate(PADDED.names):
        assert shards.opened(1, 1 + number % 3, name, PADDED) == []
    assert not shards.worth_fetching(1, 1)


def test_the_next_is_predicted_when_one_has_been_read() -> None:
    shards, names = Shards(), PADDED.names
    assert [shards.opened(1, 1, name, PADDED) for name in names[:4]] == [[], [], [], []]
    assert shards.was_read(1, 1, PADDED) == names[4:6]  # while others are in flight, in another thread
    assert shards.opened(1, 1, names[4], PADDED) == names[5:7]


@pytest.mark.parametrize("read", [1, 2, 5, 100])
def test_a_reader_that_turns_to_looking_costs_a_few(read: int) -> None:
    shards, predicted = Shards(), set[bytes]()
    for number, name in enumerate(PADDED.names[:200]):
        predicted |= set(shards.opened(1, 1, name, PADDED))
        if number < read:
            predicted |= set(shards.was_read(1, 1, PADDED))
    assert len(predicted - set(PADDED.names[:read])) <= MOST_UNREAD + AHEAD
    assert shards.opened(1, 1, PADDED.names[200], PADDED) == [] and not shards.worth_fetching(1, 1)
    assert shards.was_read(1, 1, PADDED) == PADDED.names[201:203]  # and begins again


@pytest.mark.parametrize("processes", [1, 2, 4, 16])
def test_one_in_three_is_seen_and_no_prediction_is_lost(processes: int) -> None:
    """Passthrough hides reads: the shards that are opened without it because of a doubt keep the trust."""
    shards, seen, count = Shards(), 0, 60 * processes
    for number, name in enumerate(PADDED.names[:count]):
        pid = number % processes
        doubts = shards.must_see_reads(1, pid) or number < processes
        predicted = shards.opened(1, pid, name, PADDED)
        if doubts:
            seen += 1
            shards.was_read(1, pid, PADDED)
        elif number > 2 * processes:
            assert predicted
    assert seen <= count * 0.4 + processes


@pytest.mark.parametrize("processes", [2, 4, 16])
def test_processes_that_turn_to_looking_cost_a_few_each(processes: int) -> None:
    shards, predicted, opened = Shards(), set[bytes](), PADDED.names[:400]
    for number, name in enumerate(opened):
        pid = number % processes
        predicted |= set(shards.opened(1, pid, name, PADDED))
        if number < 200:
            predicted |= set(shards.was_read(1, pid, PADDED))
    assert predicted >= set(opened[processes + 2 : 200])
    assert len(predicted - set(opened[:200])) <= (MOST_UNREAD + AHEAD) * processes


def test_what_was_here_already_says_nothing() -> None:
    shards, names = Shards(), PADDED.names
    shards.opened(1, 1, names[0], PADDED)
    shards.was_read(1, 1, PADDED)
    for name in names[1:50]:  # of an earlier epoch, out of the kernel's memory
        assert shards.opened(1, 1, name, PADDED, counts=False)
    assert shards.worth_fetching(1, 1)


def test_streams_are_bounded() -> None:
    shards = Shards()
    for pid in range(2 * STREAMS):
        shards.opened(pid, pid, b"a1", PLAIN)
    assert len(shards._streams) == STREAMS


@given(
    st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=6)), max_size=60), st.sets(st.binary(max_size=6))
)
def test_whatever_the_names_only_files_that_exist_are_predicted(
    opened: list[tuple[int, bytes]], names: set[bytes]
) -> None:
    listing = Names(names)
    shards = Reader()
    for pid, name in opened:
        predicted = shards.opened(1, pid, name, listing)
        assert set(predicted) <= names
        assert len(predicted) <= 2 * AHEAD
