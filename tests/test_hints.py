"""Hints: what a sampler yields stays what it was, and what is told of it is what comes."""

from __future__ import annotations

import base64
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import trio

from cachefs import hints
from cachefs.base import client, ownership
from cachefs.base import linux as mountinfo
from cachefs.base.client import control_path
from cachefs.base.errors import MountError, NotFound
from cachefs.base.linux import Finder, Mount
from cachefs.daemon import control
from cachefs.hints import HintedSampler, announce, hinted
from cachefs.prefetch.plans import Files

PATHS = 100


def listed(paths: list[str]) -> str:
    """The digest of a list as the daemon has it."""
    files = Files(len(paths))
    files.extend([os.fsencode(path) for path in paths])
    return files.digest.hex()


class FakeDaemon:
    """A real control socket; `heard` is what was asked of it, pieces put together again."""

    def __init__(self, mountpoint: Path) -> None:
        self.mountpoint = mountpoint
        self.files: dict[str, list[str]] = {}
        self.orders: list[tuple[str, int, list[int]]] = []
        self.requests = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=[self._main])
        self._thread.start()
        assert self._ready.wait(10)

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with trio.open_nursery() as nursery:
            verbs = {
                "hint_files": self._hint_files,
                "hint_order": self._hint_order,
                "hint_drop": self._hint_drop,
            }
            await nursery.start(control.serve, control_path(self.mountpoint), verbs)
            self._ready.set()
            await self._stop.wait()
            nursery.cancel_scope.cancel()

    async def _hint_files(self, plan: str, paths: list[str], at: int, total: int) -> None:
        self.requests += 1
        known = self.files.setdefault(plan, [])
        del known[at:]
        assert len(known) == at
        known += paths
        assert len(known) <= total

    async def _hint_drop(self, plan: str) -> bool:
        self.requests += 1
        return self.files.pop(plan, None) is not None

    async def _hint_order(
        self, plan: str, epoch: int, indices_b64: str, at: int, total: int, files: str
    ) -> None:
        self.requests += 1
        if plan not in self.files or files != listed(self.files[plan]):
            raise NotFound("no such plan, or not of this list")
        indices = array("I", base64.b64decode(indices_b64)).tolist()
        if at == 0:
            self.orders.append((plan, epoch, []))
        assert self.orders[-1][:2] == (plan, epoch)
        assert len(self.orders[-1][2]) == at
        self.orders[-1][2].extend(indices)
        assert len(self.orders[-1][2]) <= total

    def told(self, plan: str, epoch: int) -> list[str]:
        """The paths last told of an epoch, in their order. The digest in a plan's name is left out."""
        assert hints.wait(10)
        (plan,) = [name for name in self.files if name == plan or re.fullmatch(plan + "-[0-9a-f]{8}", name)]
        order = [indices for p, e, indices in self.orders if (p, e) == (plan, epoch)][-1]
        return [self.files[plan][i] for i in order]

    def close(self) -> None:
        self._token.run_sync_soon(self._stop.set)
        self._thread.join(10)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(hints, "_warned", False)
    monkeypatch.setattr(hints, "_samplers", Counter())
    monkeypatch.setattr(hints, "_last_plans", {})
    monkeypatch.setattr(hints, "_claims", {})
    for name in hints.RANKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    yield
    assert hints.wait(10)


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What /proc is made to say: two mounts."""
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    table = [Mount("0:1", "/", str(place), "fuse.cachefs", "s3://x", ()) for place in places]
    monkeypatch.setattr(mountinfo, "mounts", lambda: table)
    return places


@pytest.fixture
def daemon(mounted: list[Path]) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(mounted[0])
    yield daemon
    daemon.close()


def paths_in(place: Path, count: int = PATHS) -> list[str]:
    return [f"{place}/train/{n:05}.jpg" for n in range(count)]


class Shuffled:
    """As DistributedSampler: seed and epoch decide."""

    def __init__(self, length: int = PATHS) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        random.Random(self.epoch).shuffle(order)
        return iter(order)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Batches:
    def __init__(self, sampler: Any, size: int) -> None:
        self.sampler, self.batch_size = sampler, size

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        items = list(self.sampler)
        for at in range(0, len(items), self.batch_size):
            yield items[at : at + self.batch_size]


class Drawing:
    """Draws from a generator of its own, one number at a time, and can be asked where it is."""

    def __init__(self) -> None:
        self.rng = random.Random(7)
        self.yielded = 0
        self.epoch = 0

    def __len__(self) -> int:
        return PATHS

    def __iter__(self) -> Iterator[int]:
        for _ in range(PATHS):
            self.yielded += 1
            yield self.rng.randrange(PATHS)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Saved(Drawing):
    def state_dict(self) -> dict[str, int]:
        return {"yielded": self.yielded}


class Wrapped:
    """Has its sampler under a name of its own, and hands the epoch on."""

    def __init__(self, base: Any) -> None:
        self.base = base
        self.around = self

    def __len__(self) -> int:
        return PATHS

    def __iter__(self) -> Iterator[int]:
        return iter(self.base)

    def set_epoch(self, epoch: int) -> None:
        self.base.set_epoch(epoch)


# -- what is told ----------------------------------------------------------------------------------


def test_announced_paths_arrive_in_their_order(daemon: FakeDaemon) -> None:
    paths = [Path(p) for p in paths_in(daemon.mountpoint)]
    random.Random(0).shuffle(paths)
    announce(paths, epoch=5, wait_s=10)
    assert daemon.told("node-3", 5) == [str(p.relative_to(daemon.mountpoint)) for p in paths]


def test_a_sampler_is_passed_on_unchanged_and_told_an_epoch_ahead(daemon: FakeDaemon) -> None:
    paths = paths_in(daemon.mountpoint)
    sampler = HintedSampler(Shuffled(), paths)
    assert (len(sampler), sampler.length) == (PATHS, PATHS)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        reading = iter(sampler)
        order = list(islice(reading, PATHS // 4))
        relative = daemon.told("node-3", epoch)
        assert daemon.orders[-1][1] == epoch, "the first batches do not wait for the next epoch"
        order += islice(reading, PATHS // 2)
        assert hints.wait(10) and daemon.orders[-1][1] == epoch + 1
        order += reading
        plain = Shuffled()
        plain.set_epoch(epoch)
        assert order == list(plain)
        assert relative == [f"train/{n:05}.jpg" for n in order]
        plain.set_epoch(epoch + 1)
        assert daemon.told("node-3", epoch + 1) == [f"train/{n:05}.jpg" for n in plain]
        assert sampler.sampler.epoch == epoch
    # Paths once, each epoch once: what was told ahead is not told again.
    assert [epoch for _, epoch, _ in daemon.orders] == [0, 1, 2, 3]
    assert daemon.requests == 5


def test_what_was_told_ahead_is_told_again_if_it_comes_out_otherwise(daemon: FakeDaemon) -> None:
    sampler = HintedSampler(Shuffled(), paths_in(daemon.mountpoint))
    list(sampler)
    list(sampler)  # the epoch was not set: the same order once more
    assert hints.wait(10)
    assert [epoch for _, epoch, _ in daemon.orders] == [0, 1, 0, 1]


def test_batches_are_told_flat_and_their_sampler_has_the_epoch(daemon: FakeDaemon) -> None:
    inner = Shuffled()
    sampler = HintedSampler(Batches(inner, 8), paths_in(daemon.mountpoint), plan="mine")
    inner.set_epoch(4)
    batches = list(sampler)
    assert [len(batch) for batch in batches] == [8] * 12 + [4]
    assert daemon.told("mine", 4) == [f"train/{n:05}.jpg" for batch in batches for n in batch]
    inner.set_epoch(5)
    assert daemon.told("mine", 5) == [f"train/{n:05}.jpg" for n in inner]


@pytest.mark.parametrize("kind", [Drawing, Saved, lambda: Wrapped(Drawing()), lambda: Wrapped(Saved())])
def test_drawing_ahead_disturbs_no_generator(daemon: FakeDaemon, kind: Callable[[], Any]) -> None:
    plain, sampler = kind(), HintedSampler(kind(), paths_in(daemon.mountpoint))
    random.seed(1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        assert list(sampler) == list(plain)
    assert random.random() == random.Random(1).random()
    assert daemon.told("node-3", 0) != daemon.told("node-3", 2)


def test_drawing_ahead_sets_no_epoch_of_the_sampler(daemon: FakeDaemon) -> None:
    sampler = HintedSampler(Wrapped(Shuffled()), paths_in(daemon.mountpoint))
    for _ in range(2):
        assert list(sampler) == list(Shuffled())
    later = Shuffled()
    later.set_epoch(2)
    assert daemon.told("node-3", 2) == [f"train/{n:05}.jpg" for n in later]


def test_a_sampler_that_is_saved_knows_where_its_reader_is(daemon: FakeDaemon) -> None:
    sampler = HintedSampler(Saved(), paths_in(daemon.mountpoint))
    reading = iter(sampler)
    seen = [next(reading) for _ in range(30)]
    assert sampler.state_dict() == {"yielded": 30}
    assert daemon.told("node-3", 0)[:30] == [f"train/{n:05}.jpg" for n in seen]


@pytest.mark.long
def test_long_lists_take_few_requests(daemon: FakeDaemon) -> None:
    paths = paths_in(daemon.mountpoint, 200_000)
    list(HintedSampler(range(199_999, -1, -1), paths))
    assert daemon.told("node-3", 0) == [f"train/{n:05}.jpg" for n in reversed(range(200_000))]
    assert daemon.requests <= 4_600_000 / client.BATCH_BYTES + 5 + 2


def test_each_sampler_of_a_process_has_a_plan(daemon: FakeDaemon) -> None:
    for _ in range(2):
        list(HintedSampler(range(PATHS), paths_in(daemon.mountpoint)))
    assert hints.wait(10)
    plan = f"node-3-{listed(next(iter(daemon.files.values())))[:8]}"
    assert list(daemon.files) == [plan, f"{plan}-2"]
    assert len(hints._claims) == 1, "one descriptor for all samplers of a list"


def test_two_jobs_on_a_node_have_a_plan_each(daemon: FakeDaemon) -> None:
    """They say the same of themselves, and have lists of one length: neither's order counts in the other's list."""
    one, other = (paths_in(daemon.mountpoint / place) for place in ("a", "b"))
    first, second = HintedSampler(Shuffled(), one), HintedSampler(Shuffled(), other)
    list(first)
    list(second)
    list(first)
    assert hints.wait(10)
    for paths in daemon.files.values():
        assert len({path.partition("/")[0] for path in paths}) == 1
    assert len(daemon.files) == 2
    for plan, _, order in daemon.orders:
        assert len(order) == len(daemon.files[plan])


def test_two_jobs_with_the_same_files_have_a_plan_each(daemon: FakeDaemon) -> None:
    """A job that ends, and is started again, has its plan again."""
    paths = paths_in(daemon.mountpoint)
    for _ in range(2):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                list(HintedSampler(range(PATHS - 1, -1, -1), paths))
                hints.wait(10)
                os.write(writing, b"sent")
                signal.pause()
            finally:
                os._exit(0)
        assert os.read(reading, 4) == b"sent"
        list(HintedSampler(range(PATHS), paths))
        assert hints.wait(10)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
        hints._samplers.clear()
        while hints._claims:
            hints._claims.popitem()[1].close()
    orders = {plan: order for plan, _, order in daemon.orders}
    plan = min(daemon.files)
    assert orders == {plan: list(range(PATHS))[::-1], f"{plan}.2": list(range(PATHS))}
    assert len(daemon.orders) == 4


def test_an_order_is_for_its_own_list(daemon: FakeDaemon) -> None:
    """Of two who gave a plan the same name, the one who speaks says which files it means."""
    one, other = (paths_in(daemon.mountpoint / place) for place in ("a", "b"))
    first, second = HintedSampler(range(PATHS), one, plan="p"), HintedSampler(range(PATHS), other, plan="p")
    for sampler, place in ((first, "a"), (second, "b"), (first, "a")):
        list(sampler)
        assert daemon.told("p", sampler._iterations - 1) == [
            f"{place}/train/{n:05}.jpg" for n in range(PATHS)
        ]


def test_what_is_announced_anew_replaces_what_was(daemon: FakeDaemon) -> None:
    for count in (5, 7):
        announce(paths_in(daemon.mountpoint, count), wait_s=10)
    assert [len(paths) for paths in daemon.files.values()] == [7]


def test_a_forked_process_replaces_what_it_announced_itself(daemon: FakeDaemon) -> None:
    announce(paths_in(daemon.mountpoint, 5), wait_s=10)
    child = os.fork()
    if not child:
        try:
            for count in (6, 7):
                announce(paths_in(daemon.mountpoint, count), wait_s=10)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [len(paths) for paths in daemon.files.values()] == [5, 7]


class OfRank:
    def __init__(self, rank: int) -> None:
        self.rank = rank


@pytest.mark.parametrize(
    ("sampler", "environment", "rank"),
    [
        (None, {}, "0"),
        (None, {"LOCAL_RANK": "2"}, "2"),
        (None, {"PMI_RANK": "4", "LOCAL_RANK": "0"}, "4"),
        (None, {"OMPI_COMM_WORLD_RANK": "5"}, "5"),
        (None, {"SLURM_PROCID": "6", "OMPI_COMM_WORLD_RANK": "0"}, "6"),
        (None, {"RANK": "7", "SLURM_PROCID": "0"}, "7"),
        (OfRank(1), {"RANK": "0"}, "1"),  # started by mp.spawn: the environment is the parent's
        (Batches(OfRank(1), 2), {"RANK": "0"}, "1"),
    ],
)
def test_which_rank_it_is(
    monkeypatch: pytest.MonkeyPatch, sampler: Any, environment: dict[str, str], rank: str
) -> None:
    monkeypatch.delenv("RANK")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert hints._rank(sampler) == rank


def test_a_daemon_that_has_lost_its_plans_is_told_them_again(daemon: FakeDaemon) -> None:
    sampler = HintedSampler(range(PATHS), paths_in(daemon.mountpoint))
    list(sampler)
    assert hints.wait(10)
    daemon.files.clear()
    list(sampler)
    assert daemon.told("node-3", 1) == [f"train/{n:05}.jpg" for n in range(PATHS)]


def test_an_epoch_that_could_not_be_told_ahead_is_told_at_its_beginning(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(*_: object, **__: object) -> None:
        raise MountError("it starts again")

    sampler = HintedSampler(Shuffled(), paths_in(daemon.mountpoint))
    reading = iter(sampler)
    next(reading)
    assert hints.wait(10)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="it starts again"):
        patch.setattr(client, "ask", ask)
        list(reading)
        assert hints.wait(10)
    sampler.set_epoch(1)
    order = list(sampler)
    assert daemon.told("node-3", 1) == [f"train/{n:05}.jpg" for n in order]


def test_files_whose_mount_comes_later_are_told_with_the_next_epoch(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = HintedSampler(range(PATHS), paths_in(daemon.mountpoint))
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="none of these paths lies below"):
        patch.setattr(mountinfo, "mounts", list)
        list(sampler)
        assert hints.wait(10)
    list(sampler)
    assert daemon.told("node-3", 1) == [f"train/{n:05}.jpg" for n in range(PATHS)]


def test_files_of_two_mounts_and_of_none(daemon: FakeDaemon, mounted: list[Path], tmp_path: Path) -> None:
    other = FakeDaemon(mounted[1])
    try:
        mixed = [
            path
            for trio_of in zip(
                paths_in(mounted[0]), paths_in(mounted[1]), paths_in(tmp_path / "c"), strict=True
            )
            for path in trio_of
        ]
        list(HintedSampler(range(len(mixed) - 1, -1, -1), mixed, plan="p"))
        expected = [f"train/{n:05}.jpg" for n in reversed(range(PATHS))]
        assert daemon.told("p", 0) == expected
        assert other.told("p", 0) == expected
    finally:
        other.close()


# -- what must not happen --------------------------------------------------------------------------


def test_without_a_daemon_there_is_one_warning_and_the_same_samples(mounted: list[Path]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            sampler = HintedSampler(Shuffled(), paths_in(mounted[0]))
            assert list(sampler) == list(Shuffled())
        announce(paths_in(mounted[0], 3))
        assert hints.wait(10)
    assert len(caught) == 1
    assert "cachefs hints:" in str(caught[0].message)


@pytest.mark.parametrize(
    ("sampler", "samples"), [(range(3), [0, 1, 2]), (["a", "b"], ["a", "b"]), ([-1, 5_000], [-1, 5_000])]
)
def test_samples_that_are_no_indices_are_passed_on(
    sampler: Any, samples: list[Any], tmp_path: Path, daemon: FakeDaemon
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert list(HintedSampler(sampler, paths_in(daemon.mountpoint))) == samples
    assert hints.wait(10)
    assert [order for _, _, order in daemon.orders] == ([[0, 1, 2]] if samples[0] == 0 else [])


def test_a_sampler_without_an_end_is_passed_on(daemon: FakeDaemon) -> None:
    class Endless:
        def __iter__(self) -> Iterator[int]:
            while True:
                yield 0

    with pytest.warns(UserWarning, match="without a length"):
        reading = iter(HintedSampler(Endless(), paths_in(daemon.mountpoint)))
        assert [next(reading) for _ in range(1000)] == [0] * 1000
    assert daemon.requests == 0


def test_warnings_that_are_errors_stop_nobody(mounted: list[Path]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(HintedSampler(["a"], paths_in(mounted[0]))) == ["a"]
        announce(["/nowhere"], wait_s=10)


def test_a_process_without_threads_to_spare_is_warned_once_and_told_later(
    daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names = paths_in(daemon.mountpoint, 3)
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(threading.Thread, "start", start)
        announce(names)
        announce(names, wait_s=5)
        assert hints.wait(0)
    assert ["can't start new thread" in str(one.message) for one in caught] == [True]
    announce(names, wait_s=10)
    assert daemon.requests == 2


def test_the_module_imports_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import cachefs.hints\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "assert new <= sys.stdlib_module_names | {'cachefs'}, new - sys.stdlib_module_names\n"
        "assert not {'cachefs.config.config', 'subprocess'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def end_after_announcing(mountpoint: Path, before: str = "") -> None:
    """Run a process that announces a file and ends. It runs `before` first."""
    code = (
        "import threading; from cachefs import hints; from cachefs.base import client, linux\n"
        f"table = [linux.Mount('0:1', '/', {str(mountpoint)!r}, 'fuse.cachefs', 'x', ())]\n"
        f"linux.mounts = lambda: table\n{before}\n"
        f"hints.announce(['{mountpoint}/one'], plan='last')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_a_process_that_ends_has_sent_what_it_announced(daemon: FakeDaemon) -> None:
    end_after_announcing(daemon.mountpoint)
    assert daemon.told("last", 0) == ["one"]


def test_a_daemon_that_hangs_does_not_hold_up_the_end_of_a_process(mounted: list[Path]) -> None:
    end_after_announcing(
        mounted[0], "hints.EXIT_DEADLINE_S = 0.01; client.ask = lambda *_, **__: threading.Event().wait()"
    )


def test_a_request_that_is_not_answered_in_time_is_given_up(
    mounted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints, "ASK_DEADLINE_S", 0.01)
    place = control_path(mounted[0])
    ownership.claim(place.parent, whole=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(place))
        silent.listen()
        try:
            with pytest.warns(UserWarning, match="did not answer within 0.01 s"):
                announce([f"{mounted[0]}/one"], wait_s=10)
                assert hints.wait(0)
        finally:
            place.unlink()


def test_what_waits_for_a_daemon_that_hangs_is_bounded(
    mounted: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, sent = threading.Event(), list[int]()

    def ask(_mountpoint: Path, verb: str, *_: object, **how: Any) -> None:
        assert answers.wait(10)
        sent.extend([how["epoch"]] if verb == "hint_order" else [])

    monkeypatch.setattr(client, "ask", ask)
    for epoch in range(1000):
        announce(paths_in(mounted[0], 1), epoch=epoch)
    answers.set()
    assert hints.wait(10)
    assert sent[-hints.MOST_WAITING :] == list(range(1000 - hints.MOST_WAITING, 1000))
    assert len(sent) <= hints.MOST_WAITING + 1


# -- which mount -----------------------------------------------------------------------------------


def test_the_mount_of_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: list[Path]) -> None:
    a, b = mounted
    (tmp_path / "link").symlink_to(a)
    (tmp_path / "sibling").mkdir()
    finder = Finder()
    monkeypatch.chdir(tmp_path)
    table = {
        f"{a}/x/y": (str(a), "x/y"),
        f"{a}//x/./y": (str(a), "x/y"),
        f"{a}/.hidden": (str(a), ".hidden"),
        f"{a}/../b/y": (str(b), "y"),
        f"{tmp_path}/link/x": (str(a), "x"),
        "a/x": (str(a), "x"),
        "link/deep/x": (str(a), "deep/x"),
        str(a): (str(a), ""),
        f"{a}b/x": None,
        f"{tmp_path}/sibling/x": None,
    }
    assert {path: finder.find(path) for path in table} == table


# -- with the real thing ---------------------------------------------------------------------------


class TestTorch:
    @pytest.fixture
    def data(self) -> Any:
        return pytest.importorskip("torch.utils.data")

    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_shuffling_loader(self, data: Any, daemon: FakeDaemon, workers: int) -> None:
        torch = sys.modules["torch"]
        paths = paths_in(daemon.mountpoint)

        def loader() -> Any:
            torch.manual_seed(11)
            return data.DataLoader(list(range(PATHS)), batch_size=8, shuffle=True, num_workers=workers)

        expected = [[batch.tolist() for batch in plain] for plain in [loader()] for _ in range(2)]
        told = hinted(loader(), paths)
        for epoch in range(2):
            batches = [batch.tolist() for batch in told]
            assert batches == expected[epoch]
            order = [n for batch in batches for n in batch]
            assert daemon.told("node-3", epoch) == [f"train/{n:05}.jpg" for n in order]

    def test_ranks_that_set_the_epoch(self, data: Any, daemon: FakeDaemon) -> None:
        inner = data.DistributedSampler(range(PATHS), num_replicas=4, rank=1, seed=5)
        loader = hinted(
            data.DataLoader(list(range(PATHS)), batch_size=None, sampler=inner), paths_in(daemon.mountpoint)
        )
        for epoch in range(3):
            inner.set_epoch(epoch)
            order = [int(n) for n in loader]
            assert len(order) == 25
            assert daemon.told("node-1", epoch) == [f"train/{n:05}.jpg" for n in order]
        assert [epoch for _, epoch, _ in daemon.orders] == [0, 1, 2, 3]

    def test_ranks_that_are_spawned_have_plans_of_their_own(self, data: Any, daemon: FakeDaemon) -> None:
        paths, distributed = paths_in(daemon.mountpoint), sys.modules["torch"].distributed
        for rank in range(2):
            inner = data.DistributedSampler(range(PATHS), num_replicas=2, rank=rank)
            list(hinted(data.DataLoader(list(range(PATHS)), batch_size=None, sampler=inner), paths))
        assert hints.wait(10)
        assert [name[:7] for name in daemon.files] == ["node-0-", "node-1-"]
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            assert hints._rank() == "0"  # and not 3
        finally:
            distributed.destroy_process_group()

    def test_a_stream_is_left_alone(self, data: Any, daemon: FakeDaemon) -> None:
        class Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
            def __iter__(self) -> Iterator[int]:
                return iter(range(10))

        with pytest.warns(UserWarning, match="without a length"):
            assert (
                len(list(hinted(data.DataLoader(Stream(), batch_size=5), paths_in(daemon.mountpoint)))) == 2
            )
        assert daemon.requests == 0
