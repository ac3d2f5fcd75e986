"""Whatever happens to the index's files: opening does not crash the process, and no wrong byte comes out."""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from cachefs.base.database import Database
from cachefs.base.names import ObjectId
from cachefs.store.ram import remove_ram
from tests.conftest import LEVEL
from tests.fetch.scripted import SOURCE, ScriptedOrigin, content, in_trio
from tests.store.lab import BLOCK, EXTENT, MIB, Lab, as_kill_leaves_it, in_child, running

SIZES = [1, 4097, BLOCK, BLOCK + 1, EXTENT + 5, 3 * BLOCK - 1]
COUNT = 24


@functools.cache
def bytes_of(i: int) -> bytes:
    return content(i, SIZES[i % len(SIZES)])


def object_of(i: int) -> ObjectId:
    return ObjectId(SOURCE, f"k{i}", f'"{i + 1}"', SIZES[i % len(SIZES)])


def scripted() -> ScriptedOrigin:
    origin = ScriptedOrigin()
    for i in range(COUNT):
        assert origin.put(f"k{i}", bytes_of(i)) == object_of(i)
    return origin


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(cleanly stopped cache, the same as a kill leaves it): made once, copied for each trial."""
    base = tmp_path_factory.mktemp("warm")

    async def fill_cache() -> None:
        async with running(base / "clean", scripted(), ssd=32 * MIB) as lab:
            for round_ in range(3):  # several transactions: pages are freed and reused
                for i in range(COUNT):
                    await lab.read(object_of(i), 0, min(SIZES[i % len(SIZES)], (round_ + 1) * 50_000))
                    if i % 10 == 9:
                        await lab.store.flush()
            await lab.store.flush()
            as_kill_leaves_it(base / "clean", base / "killed")

    trio.run(fill_cache)
    return base / "clean", base / "killed"


async def look(lab: Lab, i: int) -> None:
    assert await lab.read(object_of(i)) == bytes_of(i)


def use(place: Path, verify: str, cap: int) -> None:
    """Everything that touches the index: read, evict, write, flush, close. Any wrong byte is an AssertionError."""

    async def main() -> None:
        with trio.fail_after(20):
            async with running(place, scripted(), ssd=cap, verify=verify) as lab:
                lab.counts = False  # what is damaged may be counted, and never found
                for i in range(COUNT):
                    await look(lab, i)
                extra = content("extra", 5 * BLOCK)  # has to make room where the cap is low
                assert await lab.read(lab.origin.put("extra", extra)) == extra
                for i in range(0, COUNT, 3):
                    lab.store.cached_bytes(object_of(i))
                await lab.store.flush()
                for i in reversed(range(COUNT)):
                    await look(lab, i)

    trio.run(main)


def trial(source: Path, work: Path, damage: Callable[[Path], None], verify: str, cap: int = 32 * MIB) -> str:
    shutil.rmtree(work, ignore_errors=True)
    os.makedirs(work)
    os.system(f"cp -a {source}/. {work}/")
    damage(work / "index")
    try:
        return in_child(lambda: use(work, verify, cap), work.with_name("report"))
    finally:
        remove_ram(work)


def flips(rng: random.Random, name: str, count: int) -> Callable[[Path], None]:
    def damage(index: Path) -> None:
        raw = bytearray((index / name).read_bytes())
        for _ in range(count):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        (index / name).write_bytes(raw)

    return damage


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def run_trials(trials: list[tuple[str, Callable[[], str]]]) -> None:
    bad = [f"{name}: {why}" for name, run in trials if (why := run())]
    assert not bad, f"{len(bad)} of {len(trials)}:\n" + "\n".join(bad[:3])


@pytest.mark.parametrize(
    ("stopped", "count"),
    [
        pytest.param("clean", 10, marks=pytest.mark.long),
        pytest.param("killed", 10, marks=pytest.mark.long),
        pytest.param("killed", 50, marks=pytest.mark.long),
    ],
)
def test_random_bit_flips_in_the_index(
    warm: tuple[Path, Path], tmp_path: Path, stopped: str, count: int
) -> None:
    """After a clean stop, any flip changes the file's hash: a few are enough."""
    source = warm[stopped == "killed"]
    rng = random.Random(stopped)
    trials = []
    for number in range(count):
        damage = flips(rng, "data.mdb", rng.choice([1, 1, 1, 4, 64]))
        verify = rng.choice(["none", "first"])
        cap = rng.choice([32 * MIB, 4 * MIB])
        trials.append(
            (f"flip {number}", lambda d=damage, v=verify, c=cap: trial(source, tmp_path / "work", d, v, c))
        )
    run_trials(trials)


@pytest.mark.long
@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.long)])
def test_random_bit_flips_in_live_pages_of_the_index(
    warm: tuple[Path, Path], tmp_path: Path, count: int
) -> None:
    """Most of the file is free space: here every flip hits bytes that are not zero."""
    rng = random.Random(3)

    def damage(index: Path) -> None:
        raw = bytearray((index / "data.mdb").read_bytes())
        live = [i for i, byte in enumerate(raw) if byte]
        raw[rng.choice(live)] ^= 1 << rng.randrange(8)
        (index / "data.mdb").write_bytes(raw)

    run_trials(
        [(f"flip {n}", lambda: trial(warm[1], tmp_path / "work", damage, "none")) for n in range(count)]
    )


@pytest.mark.long
@pytest.mark.parametrize("stopped", [pytest.param("clean", marks=pytest.mark.long), "killed"])
def test_an_index_cut_short_or_overwritten(warm: tuple[Path, Path], tmp_path: Path, stopped: str) -> None:
    source = warm[stopped == "killed"]
    size = (source / "index" / "data.mdb").stat().st_size
    trials = []
    for length in (0, 1, 100, 4096, 8192, 8193, size // 2 // 4096 * 4096, size // 2, size - 4096, size - 1):
        trials.append(
            (
                f"cut at {length}",
                lambda n=length: trial(
                    source, tmp_path / "work", lambda index: os.truncate(index / "data.mdb", n), "none"
                ),
            )
        )

    def zero_page(index: Path, page: int) -> None:
        with open(index / "data.mdb", "r+b") as file:
            file.seek(page * 4096)
            file.write(bytes(4096))

    for page in range(0, size // 4096, 18 if LEVEL == "short" else 3):
        trials.append(
            (
                f"page {page} zeroed",
                lambda p=page: trial(source, tmp_path / "work", lambda index: zero_page(index, p), "none"),
            )
        )
    run_trials(trials)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    ["version", "clean", "dirty", "lock.mdb", "lock.pid"],
)
def test_bit_flips_and_rubbish_in_the_small_files_beside_it(
    warm: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    trials = []
    for source in warm:
        if not (source / "index" / name).exists():
            continue
        for rubbish in (b"", b"\xff\xfe\x80", b"\0" * 100_000, b"x")[:: 2 if LEVEL == "short" else 1]:
            trials.append(
                (
                    f"{source.name} {rubbish[:3]!r}",
                    lambda s=source, r=rubbish: trial(
                        s, tmp_path / "work", lambda index: write(index / name, r), "none"
                    ),
                )
            )
    run_trials(trials)


@pytest.mark.parametrize("name", ["tag", "index/data.mdb", "index/version", "objects", "index"])
def test_a_directory_or_nothing_in_a_files_place(warm: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    def turn_round(index: Path) -> None:
        path = index.parent / name
        if path.is_dir():
            shutil.rmtree(path)
            path.write_bytes(b"not a directory")
        else:
            path.unlink()
            path.mkdir()

    def remove(index: Path) -> None:
        path = index.parent / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    run_trials(
        [
            ("removed", lambda: trial(warm[0], tmp_path / "work", remove, "none")),
            ("turned round", lambda: trial(warm[0], tmp_path / "work", turn_round, "none")),
        ]
    )


@pytest.mark.parametrize("part", ["key", "value"])
@pytest.mark.parametrize("table", ["order", "copies", "meta"])
def test_rows_of_a_wrong_length_are_misses(
    warm: tuple[Path, Path], tmp_path: Path, table: str, part: str
) -> None:
    """What a flip in a page's own bookkeeping makes of them, and a walk over all rows does not notice."""

    def shorten(index: Path) -> None:
        database = Database(
            index, ["copies", "order", "meta"], version=(index / "version").read_text(), fsync=True
        )
        for key, value in database.scan(table):
            database.write(
                [(table, key, None), (table, key[:-1], value)]
                if part == "key"
                else [(table, key, value[:-1])]
            )
        database.close()

    assert trial(warm[1], tmp_path / "work", shorten, "first", cap=2 * MIB) == ""


def test_the_trials_do_notice(warm: tuple[Path, Path], tmp_path: Path) -> None:
    """Undamaged, a trial is warm; and a child that dies is told apart from one that ends well."""
    assert trial(warm[0], tmp_path / "work", lambda index: None, "first") == ""
    assert "SIGSEGV" in in_child(lambda: os.kill(os.getpid(), signal.SIGSEGV), tmp_path / "report")
    assert "ZeroDivision" in in_child(lambda: sys.exit(1 // 0), tmp_path / "report")


@in_trio
async def test_an_index_that_is_cut_under_a_full_cache_costs_the_cache_and_fills_no_log(
    cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(cache_dir, ssd=2 * EXTENT) as lab:
        objects = [(lab.origin.put(str(n), content(n, EXTENT)), content(n, EXTENT)) for n in range(6)]
        for object_id, data in objects:
            assert await lab.read(object_id) == data
        await lab.quiet()
        os.truncate(cache_dir / "index/data.mdb", 8192)
        for _ in range(3):
            for object_id, data in objects:
                assert await lab.read(object_id) == data
        await lab.quiet()
        lab.counts = False
    told = [message for message in caplog.messages if "until the next start nothing is evicted" in message]
    assert len(told) == 1 and len(caplog.messages) == 2, "and that the index is not written"
