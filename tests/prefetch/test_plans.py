"""Plans: where a job is in the order that it announced, and what comes next."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.errors import ConfigError
from cachefs.prefetch.plans import (
    DROP_AFTER_S,
    LOOKAHEAD,
    MOST_PLANS,
    NEAR_MOST,
    Files,
    Item,
    Order,
    Plan,
    Plans,
)


def files_of(count: int) -> Files:
    files = Files(count)
    files.extend(b"d/%06d" % i for i in range(count))
    return files


def order_of(epoch: int, numbers: Sequence[int], files: int) -> Order:
    order = Order(epoch, len(numbers), files)
    order.extend(array("I", numbers))
    return order


def plan_of(count: int, *epochs: Sequence[int]) -> Plan:
    plan = Plan("p", files_of(count), 0.0)
    for epoch, numbers in enumerate(epochs):
        plan.put(order_of(epoch, numbers, count))
    return plan


def shuffled(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)


def run(plan: Plan, numbers: Sequence[int]) -> None:
    for number in numbers:
        plan.opened(plan.files[number], 0.0)


def test_files_are_found_by_path_and_survive_their_text() -> None:
    files = files_of(1000)
    again = Files.from_text(files.text)
    assert again.digest == files.digest != files_of(999).digest
    for number in (0, 1, 500, 999):
        assert again.find(again[number]) == number
    assert again.find(b"d/1000000") is None and again.find(b"") is None
    with pytest.raises(ConfigError):
        files.extend([b"one more"])
    with pytest.raises(ValueError):
        Files.from_text(files.text[:-1])


@given(
    st.lists(st.binary(max_size=5).map(lambda b: b.replace(b"\0", b"")), max_size=60), st.binary(max_size=5)
)
def test_files_agree_with_a_dict(paths: list[bytes], other: bytes) -> None:
    files = Files(len(paths))
    files.extend(paths)
    expected = {path: i for i, path in reversed(list(enumerate(paths)))}
    assert [files[i] for i in range(len(files))] == paths
    assert all(files.find(path) == i for path, i in expected.items())
    assert files.find(other) == expected.get(other)
    assert Files.from_text(files.text).digest == files.digest


def test_a_million_paths_stay_compact() -> None:
    count = 100_000
    files = Files(count)
    files.extend(b"train/n%08d/n%08d_%08d_some_words_long.JPEG" % (i // 1000, i, i) for i in range(count))
    order = order_of(0, shuffled(count, 1), count)
    text = len(files[0])
    held = len(files._text) + 4 * (len(files._ends) + len(files._table))
    orders = 2 * 4 * (len(order.numbers) + len(order._places))
    assert (held + orders) / count <= text + 4 + 4 * 2.7 + 16 <= 90


@pytest.mark.parametrize("count", [20, 300, 5000])
def test_the_position_follows_the_opens(count: int) -> None:
    order = shuffled(count, 1)
    plan = plan_of(count, order)
    for place, number in enumerate(order):
        plan.opened(plan.files[number], 0.0)
        assert 0 <= place + 1 - plan.position < 8


@pytest.mark.parametrize(("workers", "batch"), [(4, 8), (4, 256), (16, 32)])
def test_workers_take_batches_in_turns(workers: int, batch: int) -> None:
    count = workers * batch * 12
    order = shuffled(count, 2)
    plan = plan_of(count, order)
    turns = [
        order[start + i]
        for group in range(0, count, workers * batch)
        for i in range(batch)
        for start in range(group, group + workers * batch, batch)
    ]
    rng = random.Random(1)
    for at, number in enumerate(turns):
        if rng.random() < 0.98:  # one in fifty is skipped
            plan.opened(plan.files[number], 0.0)
        assert abs(plan.position - at) <= workers * batch + 16


def test_a_job_that_begins_elsewhere_is_followed_forward_and_back() -> None:
    order = shuffled(20_000, 3)
    plan = plan_of(20_000, order)
    run(plan, order[9000:9100])
    assert 9000 <= plan.ahead <= 9090 <= plan.position <= 9100
    run(plan, order[:100])
    assert 90 <= plan.position <= 100
    item = plan.take()
    assert item is not None and item.place <= plan.position  # what is behind is looked at again


def test_another_job_on_the_same_files_does_not_move_the_plan() -> None:
    order, other = shuffled(20_000, 4), shuffled(20_000, 5)
    plan = plan_of(20_000, order)
    run(plan, order[:500])
    run(plan, other[:1000])
    assert plan.position <= 500 + 2 * 2500  # those that happen to be near, and no further
    both = [n for pair in zip(order[500:2000], other[1000:2500], strict=True) for n in pair]
    run(plan, both)
    assert 2000 - 50 <= plan.position <= 2000 + 2500


def test_opens_that_the_plan_does_not_name_are_none_of_its() -> None:
    plan = plan_of(100, range(50))
    assert not plan.opened(b"elsewhere", 5.0) and not plan.opened(b"d/000070", 5.0)
    assert plan.used_at == 0.0
    assert plan.opened(b"d/000007", 5.0) and plan.used_at == 5.0
    assert not Plan("p", files_of(3), 0.0).opened(b"d/000001", 0.0)


@pytest.mark.parametrize("count", [20, 64, 1000, 20_000])
def test_the_next_order_is_entered(count: int) -> None:
    epochs = [shuffled(count, seed) for seed in range(3)]
    plan = plan_of(count, *epochs[:2])
    run(plan, epochs[0])
    assert plan.epoch == 0
    run(plan, epochs[1][: count // 2])
    assert plan.epoch == 1 and abs(plan.position - count // 2) <= count // 4
    plan.put(order_of(2, epochs[2], count))
    run(plan, epochs[1][count // 2 :])
    run(plan, epochs[2][: count // 2])
    assert plan.epoch == 2


def test_the_same_order_again_is_entered_as_the_next() -> None:
    """As of a sampler that does not shuffle: its first files are at the beginning of both orders."""
    plan = plan_of(1000, range(1000), range(1000))
    run(plan, range(1000))
    assert plan.epoch == 0
    run(plan, range(40))
    assert plan.epoch == 1 and 30 <= plan.position <= 40


def test_an_epoch_may_end_early() -> None:
    epochs = [shuffled(20_000, seed) for seed in range(2)]
    plan = plan_of(20_000, *epochs)
    run(plan, epochs[0][:5000])
    run(plan, epochs[1][:100])
    assert plan.epoch == 1 and 90 <= plan.position <= 100


def test_each_file_is_taken_once_and_across_the_epochs() -> None:
    plan = plan_of(10, range(10), [*range(5, 10), *range(5)])
    items = []
    while (item := plan.take()) is not None:
        items.append(item)
    assert [item.path for item in items] == [b"d/%06d" % i for i in [*range(10), *range(5, 10), *range(5)]]
    assert (items[12].epoch, items[12].place) == (1, 2)
    plan.put_back(items[12])
    again = plan.take()
    assert again == items[12]
    assert not plan.is_past(0, 0) and not plan.is_past(1, 0)
    run(plan, range(10))
    assert plan.is_past(0, 5) and not plan.is_past(0, 6) and not plan.is_past(1, 0)  # which may come late


def test_what_is_needed_soon_is_looked_at_once_more() -> None:
    plan = plan_of(400, range(400))
    taken = Counter[int]()
    for number in range(400):
        while (item := plan.take()) is not None:
            taken[item.place] += 1
        plan.opened(plan.files[number], 0.0)
    assert set(taken) == set(range(400)) and max(taken.values()) == 2
    assert sum(taken.values()) == 800 - 50  # but those that were needed soon at the first look


def test_the_look_ahead_is_bounded() -> None:
    count = LOOKAHEAD + 500
    plan = plan_of(count, range(count))
    taken = 0
    while plan.take() is not None:
        taken += 1
    assert taken == LOOKAHEAD
    run(plan, range(300))
    assert plan.take() is not None


def test_orders_replace_and_push_each_other() -> None:
    plan = plan_of(10, range(10))
    run(plan, range(5))
    plan.put(order_of(0, range(10), 10))  # the same once more: the job goes on
    assert plan.position == 5
    plan.put(order_of(1, range(10), 10))
    plan.put(order_of(2, range(10), 10))
    assert [o.epoch for o in plan.orders] == [1, 2] and plan.position == 0
    plan.put(order_of(2, range(9, -1, -1), 10))
    assert [o.numbers[0] for o in plan.orders] == [0, 9]
    plan.put(order_of(0, range(10), 10))  # a job begins anew
    assert [o.epoch for o in plan.orders] == [0]


def test_a_next_order_that_is_replaced_is_taken_from_its_beginning() -> None:
    plan = plan_of(10, range(10), range(10))
    while plan.take() is not None:
        pass
    plan.put(order_of(1, range(9, -1, -1), 10))
    item = plan.take()
    assert item is not None and (item.epoch, item.place, item.path) == (1, 0, b"d/000009")
    assert plan.soon <= plan.ahead


def test_orders_are_checked() -> None:
    order = Order(0, 3, 5)
    with pytest.raises(ValueError):
        order.extend(array("I", [5]))
    with pytest.raises(ValueError):
        order.extend(array("I", [1, 2, 3, 4]))
    order.extend(array("I", [1, 1]))
    assert len(order.numbers) < order.total and order.place(1) == 0 and order.place(2) is None


def test_ranks_share_fairly_and_hold_one_list() -> None:
    plans = Plans()
    for rank in range(4):
        files = plans.sharing(files_of(100))
        plan = Plan(f"rank{rank}", files, 0.0)
        plan.put(order_of(0, range(rank, 100, 4), 100))
        plans.put(plan)
    assert len({id(plan.files) for plan in plans.by_name.values()}) == 1
    items: list[Item] = [item for _ in range(20) if (item := plans.take())]
    assert all(a.plan is not b.plan for a, b in pairwise(items))
    assert sorted(item.place for item in items) == sorted([0, 1, 2, 3, 4] * 4)
    assert plans.opened(b"d/000009", 7.0)
    assert [plan.used_at for plan in plans.by_name.values()] == [0, 7, 0, 0]


def test_plans_go_by_time_and_by_number() -> None:
    plans = Plans()
    files = files_of(1)
    for i in range(MOST_PLANS):
        assert plans.put(Plan(str(i), files, float(i))) is None
    gone = plans.put(Plan("new", files, 1e9))
    assert gone is not None and gone.name == "0" and len(plans.by_name) == MOST_PLANS
    assert plans.drop("new") is not None and plans.drop("new") is None
    assert plans.expired(100.5 + DROP_AFTER_S) == [str(i) for i in range(1, 101)]


@given(st.data())
def test_whatever_is_opened_places_stay_within_the_orders(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 40))
    plan = plan_of(count)
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["put", "open", "take", "back"]))
        if what == "put":
            numbers = data.draw(st.lists(st.integers(0, count - 1), max_size=60))
            plan.put(order_of(data.draw(st.integers(0, 4)), numbers, count))
        elif what == "open":
            plan.opened(plan.files[data.draw(st.integers(0, count - 1))], 0.0)
        elif (item := plan.take()) is not None and what == "back":
            plan.put_back(item)
        assert len(plan.orders) <= 2
        assert min(plan.position, plan.ahead) >= 0
        assert plan.position - NEAR_MOST <= plan.ahead <= max(len(plan), plan.position)
        assert [o.epoch for o in plan.orders] == sorted({o.epoch for o in plan.orders})
