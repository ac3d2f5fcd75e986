"""How a store begins and ends, part by part: with stand-ins for what is beside each part."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cachefs.base.errors import CacheUnusable, NoRoom
from cachefs.base.linux import HANGS_AFTER_S
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.store import opening, ram, space
from cachefs.store import tier as tier_module
from cachefs.store.backing import Passthrough
from cachefs.store.catalog import CachedObject, Catalog, Copy
from cachefs.store.store import Store
from cachefs.store.tier import RAM, SSD
from tests.fetch.scripted import in_trio
from tests.store.lab import until


class Index:
    """Knows nothing, and notes what it is told."""

    def __init__(self, trusted: bool = True, clock: int = 0) -> None:
        self.was_clean, self.trusted, self.clock = True, trusted, clock
        self.told: list[tuple[object, ...]] = []
        self.fails = self.unfinished = False

    def totals(self, tier: int) -> tuple[int, int, int]:
        return 10 + tier, 20 + tier, 30 + tier

    def note(self, name: bytes) -> bytes | None:
        return self.clock.to_bytes(8, "big") if self.clock and name == b"clock" else None

    def forget_tier(self, tier: int, tag: bytes) -> None:
        self.told.append(("forget", tier, tag))
        if self.fails:
            raise NoRoom("full")

    def close(self, whole: bool = True, trusted: bool = False) -> None:
        self.told.append(("close", whole, trusted))


def tiers_of(*numbers: int) -> list[Any]:
    return [
        SimpleNamespace(number=number, name=f"tier {number}", passthrough=True, unlinked=[])
        for number in numbers
    ]


@pytest.mark.parametrize("numbers", [(), (RAM,), (SSD,), (RAM, SSD)])
@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("verify", ["first", "full", "none"])
@in_trio
async def test_what_a_store_is_made_of(verify: str, trusted: bool, numbers: tuple[int, ...]) -> None:
    index: Any = Index(trusted)
    tiers = tiers_of(*numbers)
    store = Store(index, tiers, 4096, verify, Metrics(), lambda: 7.0)
    assert store._check_always is (verify == "full") and store._trusting is (verify == "none")
    assert store.catalog._trust is (verify == "none" and trusted) and not store._closed
    assert store.backing_files._tiers == ([] if verify == "full" else tiers)
    assert store.passthrough is (bool(numbers) and verify != "full")
    moves = store._moves
    assert (moves is not None) is (len(numbers) == 2)
    if moves is not None:
        assert [moves._ram, moves._ssd] == tiers and moves._now() == 7.0
    assert [(t.used_bytes, t.blocks, t.pinned_bytes) for t in tiers] == [index.totals(n) for n in numbers]
    assert store.catalog.clock == store.catalog.recent and not store.catalog.unfinished
    assert store.catalog._loaded == 0 and store.was_clean


@pytest.mark.parametrize("clock", [0, 5])
def test_a_catalog_begins_behind_the_clock_that_was_noted(clock: int) -> None:
    index: Any = Index(clock=clock)
    rows = Catalog(index, [], 4096, trust=False)
    assert rows.clock == clock + 1 and not rows.unfinished
    index.unfinished = True
    assert Catalog(index, [], 4096, trust=False).unfinished


class Ending:
    """A store whose parts only note that they are called, in which order."""

    def __init__(self, numbers: tuple[int, ...], verify: str) -> None:
        self.called: list[Any] = []
        index: Any = Index()
        tiers = tiers_of(*numbers)
        self.store = store = Store(index, tiers, 4096, verify, Metrics(), lambda: 0.0)
        self.idle = self.syncs = True
        self.closed: dict[str, Any] = {}
        for tier in tiers:
            tier.remove = lambda: self.called.append("remove RAM")
            tier.sync = lambda number=tier.number: (self.called.append(f"sync {number}"), self.syncs)[1]
            tier.disposal = SimpleNamespace(
                idle=lambda s, number=tier.number: (self.called.append(f"idle {number} {s}"), self.idle)[1]
            )
        changed: Any = store
        changed.backing_files.close = lambda: self.called.append("no passthrough")
        if store._moves is not None:
            changed._moves.save_all = self.save_all
        changed.flush = self.flush
        changed.catalog.remove_leaving = lambda: self.called.append("remove leaving")
        changed.catalog.forget_tier = lambda number: self.called.append(f"forget rows {number}")
        changed.catalog.aclose = self.close
        changed.catalog.abandon = lambda: self.called.append("abandon")

    async def save_all(self) -> None:
        self.called.append("save")
        await trio.sleep(0.01)
        self.called.append("saved")

    async def flush(self, closing: bool = False) -> None:
        self.called.append("flush, closing" if closing else "flush")
        await trio.lowlevel.checkpoint()

    async def close(self, **how: bool) -> None:
        self.closed = how
        self.called.append("close")


@pytest.mark.parametrize("numbers", [(), (RAM,), (SSD,), (RAM, SSD)])
@pytest.mark.parametrize("verify", ["first", "none"])
@pytest.mark.parametrize("trouble", ["", "not idle", "not synced", "the index"])
@in_trio
async def test_a_stop_takes_its_steps_in_order(trouble: str, verify: str, numbers: tuple[int, ...]) -> None:
    end = Ending(numbers, verify)
    end.idle, end.syncs = trouble != "not idle", trouble != "not synced"
    if trouble == "the index":
        end.store.catalog.index_error = "full"
    await end.store.aclose(5.0)
    both = len(numbers) == 2
    forgets = [f"forget rows {RAM}", "remove RAM"] if RAM in numbers else []
    syncs = [f"sync {SSD}"] if verify == "none" and SSD in numbers else []
    assert end.called == [
        "no passthrough",
        *(["save", "saved"] if both else []),
        "flush",
        *forgets,
        "remove leaving",
        *(f"idle {number} {HANGS_AFTER_S}" for number in numbers),
        *syncs,
        "flush, closing",
        "close",
    ]
    trusted = verify == "none" and not (trouble == "not synced" and SSD in numbers)
    assert end.closed == {"whole": trouble != "the index", "trusted": trusted}
    assert end.store.catalog.unfinished is (trouble == "not idle" and bool(numbers))
    end.called.clear()
    end.store.abandon()
    assert not end.called, "it has stopped"


@in_trio
async def test_what_is_saved_at_a_stop_is_saved_though_its_task_is_cancelled() -> None:
    end = Ending((RAM, SSD), "first")
    with trio.CancelScope() as scope:
        scope.cancel()
        await end.store.aclose(5.0)
    assert end.called == ["no passthrough", "save", "saved", "flush"] and not end.closed
    late = Ending((RAM, SSD), "first")
    await late.store.aclose(0.0)
    assert late.called[:3] == ["no passthrough", "save", "flush"], "no longer than its deadline"
    assert late.called[-1] == "close"


@pytest.mark.parametrize("numbers", [(), (RAM,), (SSD,), (RAM, SSD)])
@in_trio
async def test_a_store_is_given_up_once(numbers: tuple[int, ...]) -> None:
    end = Ending(numbers, "first")
    for _ in range(2):
        end.store.abandon()
    assert end.called == [*(["remove RAM"] if RAM in numbers else []), "abandon"]


# -- the catalog -----------------------------------------------------------------------------------------


def catalog_with(index: Any) -> tuple[Catalog, CachedObject, dict[tuple[int, int], Copy]]:
    """One version with a copy on each tier, and none of its second extent."""
    rows = Catalog(index, tiers_of(RAM, SSD), 4096, trust=False)
    object_id = ObjectId("s", "k", "1", 5)
    obj = CachedObject(object_id)
    copies = {(tier, 0): Copy(tier, object_id.digest, 0, 5, bitmap=1) for tier in (RAM, SSD)}
    obj.copies = {**copies, (RAM, 1): None, (SSD, 1): None}  # type: ignore[dict-item]
    rows._objects[object_id.digest] = obj
    rows._loaded = 2
    rows._dirty = {copy.key: copy for copy in copies.values()}
    rows._removed = {(tier, bytes(16), 7): 5 for tier in (RAM, SSD)}
    rows._peeked = {bytes(16): CachedObject(object_id)}
    rows._checked.add((SSD, bytes(16), 9))
    return rows, obj, copies


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("tier", [RAM, SSD])
def test_a_tier_that_is_given_up_leaves_nothing_in_memory(tmp_path: Path, tier: int, fails: bool) -> None:
    index: Any = Index()
    index.fails = fails
    rows, obj, copies = catalog_with(index)
    (tmp_path / "f").touch()
    obj.fds = {number: os.open(tmp_path / "f", os.O_RDONLY) for number in (RAM, SSD)}
    other = SSD if tier == RAM else RAM
    rows.forget_tier(tier)
    assert obj.copies == {(other, 0): copies[other, 0], (other, 1): None} and rows._loaded == 1
    assert list(rows._dirty) == [copies[other, 0].key] and list(rows._removed) == [(other, bytes(16), 7)]
    assert list(obj.fds) == [other] and not rows._peeked and (SSD, bytes(16), 9) not in rows._checked
    assert index.told == [("forget", tier, b"")] and bool(rows.index_error) is fails
    obj.close_files()


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("trouble", ["", "an error", "files are left"])
@in_trio
async def test_a_catalog_says_at_its_end_how_it_ends(
    tmp_path: Path, trouble: str, trusted: bool, whole: bool
) -> None:
    index: Any = Index()
    rows, obj, _ = catalog_with(index)
    (tmp_path / "f").touch()
    obj.fds = {SSD: os.open(tmp_path / "f", os.O_RDONLY)}
    obj.leaving = {SSD}
    gone: list[bytes] = []
    rows._tier[SSD].unlink = gone.append  # type: ignore[method-assign,assignment]
    rows.index_error, rows.unfinished = "full" if trouble == "an error" else "", trouble == "files are left"
    rows.remove_leaving()
    assert gone == [obj.id.digest] and obj.fds
    await rows.aclose(whole=whole, trusted=trusted)
    assert index.told == [("close", whole and not trouble, trusted)]
    assert not obj.fds
    rows.abandon()
    assert index.told[1:] == [("close", False, False)]


# -- opening ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [None, b"", b"one", b"two"])
@pytest.mark.parametrize("in_index", [None, b"", b"one"])
@pytest.mark.parametrize("objects", [True, False])
def test_a_directory_that_is_not_the_one_of_the_rows_begins_empty(
    tmp_path: Path, objects: bool, in_index: bytes | None, on_disk: bytes | None
) -> None:
    told: list[tuple[int, bytes]] = []
    index: Any = SimpleNamespace(
        tag=lambda number: in_index, forget_tier=lambda number, tag: told.append((number, tag))
    )
    tier: Any = SimpleNamespace(number=SSD, name="ssd", path=tmp_path)
    if objects:
        (tmp_path / "objects").mkdir()
        (tmp_path / "objects" / "f").touch()
    if on_disk is not None:
        (tmp_path / "tag").write_bytes(on_disk)
    opening._check_tag(index, tier)
    same = bool(on_disk) and on_disk == in_index
    assert (tmp_path / "objects" / "f").exists() is (same and objects)
    tag = (tmp_path / "tag").read_bytes()
    assert told == ([] if same else [(SSD, tag)]) and (tag == on_disk) is same
    assert same or ((tmp_path / "objects").is_dir() and len(tag) == 16)
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("Thread") and "rmtree" in thread.name:
            thread.join(5)


def test_what_is_ours_was_made_by_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    places = [tmp_path, tmp_path / "none", tmp_path / "file", tmp_path / "link", tmp_path / "file" / "below"]
    assert [opening._ours(place) for place in places] == [True, True, False, False, False]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert not opening._ours(tmp_path) and opening._ours(tmp_path / "none")


@pytest.mark.parametrize(
    "blocks, left", [(0, 0), (16, 8 * 4096), (1 << 18, 1 << 29), (1 << 19, 1 << 30), (1 << 20, 1 << 30)]
)
def test_shared_memory_is_left_to_others_by_half(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, blocks: int, left: int
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=blocks, f_frsize=4096))
    assert ram._left_to_others(tmp_path) == left

    def fails(path: object) -> None:
        raise OSError(5, "broken")

    monkeypatch.setattr(os, "statvfs", fails)
    assert ram._left_to_others(tmp_path) == 0


@pytest.mark.parametrize(
    "mounts, found",
    [
        ("1 0 0:1 / /dev/shm rw - tmpfs tmpfs rw", True),
        ("2 0 0:2 / /dev/shm rw - tmpfs shm rw\n1 0 0:1 / / rw - ext4 none rw", True),
        ("1 0 0:1 / / rw - ext4 none rw\n2 0 0:2 / /dev/shm rw shared:3 - tmpfs shm rw", True),
        ("1 0 0:1 / /dev/shm rw - ext4 tmpfs rw", False),
        ("1 0 0:1 / /other rw - tmpfs /dev/shm rw", False),
        ("1 0 0:1 / tmpfs rw - tmpfs /dev/shm rw", False),
        ("1 0 0:1 / /other rw - tmpfs x rw\n2 0 0:2 / /dev/shm rw - ext4 y rw", False),
        ("", False),
        (None, False),
    ],
)
def test_a_tmpfs_is_told_by_its_mount(
    monkeypatch: pytest.MonkeyPatch, mounts: str | None, found: bool
) -> None:
    def read(path: Path, **_: object) -> str:
        assert str(path) == "/proc/self/mountinfo"
        if mounts is None:
            raise OSError(2, "none")
        return mounts

    monkeypatch.setattr(Path, "read_text", read)
    assert ram._is_tmpfs(Path("/dev/shm")) is found
    if not found:
        with pytest.raises(CacheUnusable, match="is not a tmpfs"):
            ram._shared(Path("/dev/shm/cachefs-none"))


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("more", [-5, 0, 5 << 20])
def test_ram_lies_in_one_place_and_nothing_is_left_in_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, own: bool, more: int
) -> None:
    """A tmpfs that could not be made as small as the cap keeps that much free."""
    cap, forgotten = 64 << 20, list[Path]()

    def mounted(path: Path, cap_bytes: int) -> str:
        assert (path, cap_bytes) == (ram.own_directory(tmp_path), cap)
        if not own:
            raise OSError(1, "not permitted")
        return "as it is"

    size = cap + ram.SLACK_BYTES + more
    monkeypatch.setattr(ram, "_own", mounted)
    monkeypatch.setattr(ram, "forget", lambda *paths: forgotten.extend(paths))
    monkeypatch.setattr(ram, "_shared", lambda path: ram.Place(path, 77))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=size, f_frsize=1))
    found = ram.provide(tmp_path, cap)
    places = [ram.own_directory(tmp_path), ram.shared_directory(tmp_path)]
    assert found == ram.Place(places[not own], max(0, more) if own else 77)
    assert forgotten == [places[own]]


# -- the disk --------------------------------------------------------------------------------------------


class Clock:
    """The machine's, as a test sets it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        patch.setattr(tier_module, "time", SimpleNamespace(monotonic=lambda: self.now))


@pytest.mark.parametrize(
    "since_s, down, answers",
    [(None, False, True), (0.0, False, True), (0.5, False, True), (0.51, False, False), (None, True, False)],
)
@in_trio
async def test_a_disk_is_asked_at_once_unless_it_is_known_to_be_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, since_s: float | None, down: bool, answers: bool
) -> None:
    clock, disk, asked = Clock(monkeypatch), tier_module.Disk("ssd", tmp_path), list[int]()
    disk.down = down
    if since_s is not None:
        disk._calls["another"] = clock.now - since_s
    assert disk.at_once(lambda: asked.append(len(disk._calls)) or 5) == (5 if answers else None)
    assert asked == ([1 + (since_s is not None)] if answers else []), "it is noted while it lasts"
    assert len(disk._calls) == (since_s is not None)
    if answers:
        with pytest.raises(ZeroDivisionError):
            disk.at_once(lambda: 1 // 0)
        monkeypatch.setattr(trio.lowlevel, "start_thread_soon", raises(RuntimeError("no thread")))
        assert disk.at_once(lambda: 5) is None


@in_trio
async def test_a_disk_that_does_not_answer_at_once_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_module, "AT_ONCE_S", 0.01)
    disk, answers, ended = tier_module.Disk("ssd", tmp_path), threading.Event(), threading.Event()
    assert disk.at_once(lambda: answers.wait(30) and ended.set()) is None and not ended.is_set()
    await until(lambda: len(disk._calls) == 1, 10)
    answers.set()
    await until(lambda: ended.is_set() and not disk._calls, 10)
    assert ended.is_set() and not disk._calls


def raises(error: Exception) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


@pytest.mark.parametrize("number", range(3))
def test_what_is_still_to_go_is_waited_for_unless_its_disk_is_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is begun again, if no thread could be started before."""
    monkeypatch.setattr(tier_module, "LOOK_EVERY_S", 0.01)
    disk = tier_module.Disk("ssd", tmp_path)
    going, refused = tier_module.Disposal(disk, lambda exc: None), [number]

    def begin() -> None:
        if refused[0]:
            refused[0] -= 1
            raise RuntimeError("no thread")
        going._work(0.0)

    monkeypatch.setattr(going, "_begin", begin)
    going._changed = threading.Condition(threading.RLock())
    (tmp_path / "f").touch()
    going.remove(b"digest", str(tmp_path / "f"), (), 5)
    going.wait_for(b"other")
    assert going.pending(b"digest") is (number > 0)
    disk.down = True
    if number:
        with pytest.raises(TimeoutError):
            going.wait_for(b"digest")
        assert going.pending(b"digest") and (tmp_path / "f").exists()
    disk.down = False
    going.wait_for(b"digest")
    assert not going.pending(b"digest") and not (tmp_path / "f").exists() and not refused[0]


@pytest.mark.parametrize("hangs_s, goes", [(4.9, False), (5.0, False), (5.1, True)])
@in_trio
async def test_a_disk_goes_down_once_and_comes_back_when_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs_s: float, goes: bool
) -> None:
    clock, disk, heard = Clock(monkeypatch), tier_module.Disk("ssd", tmp_path), list[str]()
    answers = threading.Event()
    monkeypatch.setattr(
        tier_module, "_write_and_remove", lambda path: heard.append(path.name) or answers.wait(30)
    )
    disk.on_down = [lambda: heard.append("one"), lambda: heard.append("other")]
    disk.look()
    disk._calls["a call"] = clock.now - hangs_s
    disk._calls["a later one"] = clock.now
    disk.look()
    disk.look()
    assert disk.down is goes and heard[:2] == (["one", "other"] if goes else [])
    if goes:
        ended: list[object] = []
        with pytest.raises(TimeoutError):
            await disk.run(lambda: 5, ended.append)
        assert ended == [None], "what it would have used is given back"
    answers.set()
    await until(lambda: not disk.down, 10)
    assert heard == (["one", "other", "probe"] if goes else [])
    assert await disk.run(lambda: 5, heard.append) == 5 and heard[-1] == 5
    with pytest.raises(ZeroDivisionError):
        await disk.run(lambda: 1 // 0, heard.append)
    assert heard[-1] is None and not disk._readers


# -- making room -------------------------------------------------------------------------------------------


class Room:
    """A tier and what lies in it: files of one or two copies, of ten bytes each."""

    def __init__(
        self, files: int, *, going: int = 0, limit: int = 100, inodes: bool = True, kept: str = ""
    ) -> None:
        self.number, self.disposal = SSD, None
        self.going, self.limit, self.inodes = going, limit, inodes
        self.files = {number: [number, number + 0.5] for number in range(files)}
        self.gone: list[float] = []
        self.here: list[int] = []
        self.kept = kept

    @property
    def used_bytes(self) -> int:
        return 10 * sum(map(len, self.files.values()))

    def counted_bytes(self) -> int:
        return self.used_bytes + self.going

    def limit_bytes(self, already_there: int = 0) -> int:
        self.here.append(already_there)
        return self.limit

    @property
    def takes_files(self) -> bool:
        return self.inodes or any(not held for held in self.files.values())

    def victim(self, tier: int, classes: Any, *, older_than: int | None) -> Any:
        number = next((n for n, held in self.files.items() if held), None) if classes else None
        return None if number is None else (number, SimpleNamespace(bitmap=self.files[number][0]))

    def copies(self, obj: int, tier: int) -> list[Any]:
        pins, pinned = int(self.kept == "in use"), self.kept == "pinned"
        return [SimpleNamespace(pins=0, pinned=False), SimpleNamespace(pins=pins, pinned=pinned)]

    def drop(self, obj: int, copy: Any, bits: Any) -> int:
        self.gone.append(self.files[obj].pop(0))
        return 1

    def drop_file(self, obj: int, tier: Any) -> int:
        count = len(self.files[obj])
        self.gone += self.files[obj]
        self.files[obj] = []
        return count


ROOMS: list[tuple[Room, int, tuple[int, ...], bool, list[float]]] = [
    (Room(0), 100, (), True, []),
    (Room(0), 101, (1,), False, []),
    (Room(1), 80, (), True, []),
    (Room(1), 81, (), False, []),
    (Room(1), 81, (1,), True, [0]),
    (Room(1), 91, (1,), True, [0, 0.5]),
    (Room(2), 75, (1,), True, [0, 0.5]),
    (Room(1, going=80), 1, (1,), False, []),
    (Room(1, going=80), 80, (1,), False, []),
    (Room(1, going=80), 81, (1,), False, [0]),
    (Room(1, inodes=False), 0, (1,), True, []),
    (Room(2, inodes=False), 5, (1,), True, [0, 0.5]),
    (Room(2, inodes=False, kept="pinned"), 5, (1,), True, [0, 0.5]),
    (Room(2, inodes=False, kept="in use"), 5, (1,), True, [0, 0.5]),
    (Room(2, inodes=False), 5, (), False, []),
    (Room(2, inodes=False), 65, (1,), True, [0, 0.5]),
]


@pytest.mark.parametrize("number", range(len(ROOMS)))
def test_room_is_made_as_far_as_it_is_wanted(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    room, need, classes, fits, gone = ROOMS[number]
    room.files, room.gone, room.here = {n: [n, n + 0.5] for n in room.files}, [], []
    metrics = Metrics()
    parts: Any = SimpleNamespace(victim=room.victim), SimpleNamespace(copies=room.copies)
    made = space.Space(parts[1], parts[0], [], 4096, metrics)
    monkeypatch.setattr(made, "drop", room.drop)
    dropped: list[int] = []

    def drop_file(obj: int, tier: Any) -> int:
        dropped.append(obj)
        return room.drop_file(obj, tier)

    monkeypatch.setattr(made, "drop_file", drop_file)
    wanted: Any = classes
    there: Any = room
    assert made.evict_for(there, need, wanted) is fits
    assert room.gone == gone and metrics.evicted_blocks == len(gone)
    assert set(room.here) == {0}
    whole = bool(gone) and not (room.inodes or room.kept)
    assert dropped == ([0] if whole else []), "for an inode the whole file goes, if it may"


def test_one_call_makes_no_more_room_than_a_reader_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(space, "VICTIMS_AT_ONCE", 3)
    room = Room(5)
    parts: Any = SimpleNamespace(victim=room.victim), SimpleNamespace(copies=room.copies)
    made = space.Space(parts[1], parts[0], [], 4096, Metrics())
    monkeypatch.setattr(made, "drop", room.drop)
    there: Any = room
    assert not made.evict_for(there, 40, (1,)) and len(room.gone) == 3  # type: ignore[arg-type]
    assert made.evict_for(there, 40, (1,), already_there=7) and len(room.gone) == 4  # type: ignore[arg-type]
    assert room.here[-1] == 7


# -- passthrough -------------------------------------------------------------------------------------------


def test_after_the_end_no_file_is_opened_and_the_idle_ones_are_retired() -> None:
    parts: Any = SimpleNamespace(catalog=None, eviction=None, metrics=None)
    tier = SimpleNamespace(registered=0)
    files = Passthrough(parts, [], None, None)  # type: ignore[arg-type]
    retired: list[Any] = []
    files.on_retired = retired.append
    assert not files._closed and not files.possible
    made: list[Any] = []
    for number in range(3):
        obj: Any = SimpleNamespace(backing=None)
        there: Any = tier
        backing = files._backing(obj, there, -1, [])
        made.append(backing)
        if number:
            files._idle[backing] = None
    files.close()
    assert files._closed and not files._idle and retired == made[1:] and tier.registered == 1
    assert [backing.object.backing for backing in made] == [made[0], None, None]
    files.close()
    assert retired == made[1:]


@pytest.mark.parametrize("takes", [(), (False,), (True,), (False, True), (True, True), (False, False)])
def test_passthrough_is_possible_where_the_kernel_takes_files(takes: tuple[bool, ...]) -> None:
    parts: Any = SimpleNamespace(catalog=None, eviction=None, metrics=None)
    tiers: list[Any] = [SimpleNamespace(passthrough=one, name="tier") for one in takes]
    files = Passthrough(parts, tiers, None, None)  # type: ignore[arg-type]
    assert files.possible is any(takes)
    for tier in tiers:
        files.refuse(tier, "a test")
        files.refuse(tier, "a test")
    assert not files.possible and not any(tier.passthrough for tier in tiers)
