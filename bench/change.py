"""Changed objects, and daemons that end and start again: what is still cached."""

from __future__ import annotations

import hashlib
import time

from bench import readers
from bench.harness import Result, Series, scenario
from bench.mounts import Cachefs
from bench.workspace import Workspace

CHANGED = 0.02
_BATCH = 50_000


@scenario("overwrite")
def overwrite(work: Workspace, rounds: int) -> Result:
    """2 % of the objects are overwritten, then everything is read again."""
    result = Result()
    scale = work.scale
    ways = {"--consistency strict": ("--consistency", "strict"), "after a refresh": ()}
    for way, options in ways.items():
        _, keys = work.small("overwrite")
        changed = keys[:: round(1 / CHANGED)]
        with Cachefs(work.disk, work.lab, "overwrite", *options) as mount:
            paths = [f"{mount.path}/{key}" for key in keys]
            readers.small(paths)
            for key in changed:
                work.lab.replace("overwrite", key)
            if not options:
                mount.refresh()
            with work.traffic() as seen:
                readers.small(paths)
            stale = sum(_content(f"{mount.path}/{key}") != work.changed(key) for key in changed)
        asked = seen.bytes / (len(changed) * scale.small_size)
        result.note(
            f"{way}: GET {seen.get}, HEAD {seen.head}, LIST {seen.list} for {len(changed)} of {len(keys)}"
        )
        result.demand(f"2 % overwritten, {way}: bytes fetched / 2 %", asked, "≤", 1.1)
        result.demand(f"2 % overwritten, {way}: files that still show old bytes", stale, "=", 0)
    return result


def _content(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@scenario("restart")
def restart(work: Workspace, rounds: int) -> Result:
    """The daemon is stopped (or killed) and started again with its cache."""
    result = Result()
    _, keys = work.small("restart")
    work.big("restart-big", work.scale.shared)
    for bucket, names in {"restart": keys, "restart-big": ["0.bin"]}.items():
        with Cachefs(work.disk, work.lab, bucket) as mount:
            paths = [mount.path / name for name in names]
            total = sum(readers.sequential(path).bytes for path in paths)
            for way in ("stopped",) if bucket == "restart" else ("stopped", "killed"):
                if way == "stopped":
                    mount.stop()
                else:
                    time.sleep(2)  # the index is written every second
                    mount.crash()
                mount.start()
                with work.traffic() as seen:
                    again = sum(readers.sequential(path).bytes for path in paths)
                if again != total:
                    result.note(f"{again:,} bytes were read instead of {total:,}")
                what = "small files" if bucket == "restart" else "one large file"
                if way == "stopped":
                    result.demand(f"daemon restarted, {what}: bytes from the store", seen.bytes, "=", 0)
                else:
                    result.note(f"after kill -9, {what}: {seen.bytes:,} of {total:,} bytes fetched again")
    return result


@scenario("restart-million", rounds=3)
def restart_million(work: Workspace, rounds: int) -> Result:
    """A start with an index of a million blocks: from the command to the first byte."""
    result = Result()
    _, keys = work.small("restart-million")
    mounting: list[float] = []
    reading: list[float] = []
    with Cachefs(work.disk, work.lab, "restart-million", "--cache-size", "100G", "--keep-free", "0") as mount:

        def start(paths: list[float]) -> None:
            begun = time.perf_counter()
            mount.start()
            mounting.append(time.perf_counter() - begun)
            first = readers.first_byte(mount.path / keys[0])
            reading.append(first)
            paths.append(time.perf_counter() - begun)

        readers.read_one(f"{mount.path}/{keys[0]}")
        mount.stop()
        few: list[float] = []
        start(few)
        mount.stop()
        begun = time.perf_counter()
        crowd(mount, work.scale.blocks)
        result.note(f"the index was filled in {time.perf_counter() - begun:.1f} s")
        many: list[float] = []
        mounting.clear()
        reading.clear()
        for _ in range(rounds):
            with work.traffic() as seen:
                start(many)
            blocks = sum(tier["blocks"] for tier in mount.status()["tiers"])
            mount.stop()
        size = (mount.cache / "index" / "data.mdb").stat().st_size
    result.series.append(
        Series("from the mount command to the first byte", "s", {"few blocks": few, "many": many})
    )
    result.series.append(Series("of which", "s", {"mount command": mounting, "open and first byte": reading}))
    result.note(f"{blocks:,} blocks in an index of {size / 1e6:.0f} MB")
    figure = sorted(many)[len(many) // 2]
    result.demand(f"restart with {work.scale.blocks:,} blocks: s to the first byte", figure, "≤", 1.0)
    result.demand(f"restart with {work.scale.blocks:,} blocks: bytes from the store", seen.bytes, "=", 0)
    return result


def crowd(mount: Cachefs, count: int) -> None:
    """Put rows of so many one-block versions into the index of a stopped daemon: the largest number of rows for that many
    blocks."""
    from cachefs.store.catalog import Copy, Index, Saved, pack_copy
    from cachefs.store.tier import SSD, allocated

    index = Index(mount.cache / "index", 1 << 20)
    try:
        used, blocks, pinned = index.totals(SSD)
        clock = int.from_bytes(index.note(b"clock") or b"", "big")
        saved: list[Saved] = []
        for number in range(count):
            digest = hashlib.blake2b(str(number).encode(), digest_size=16).digest()
            copy = Copy(SSD, digest, 0, 4096, bitmap=1, clock=clock + 1 + number)
            saved.append((copy.key, pack_copy(copy), copy.dataset, copy.clock, None))
            if len(saved) == _BATCH or number == count - 1:
                done = number + 1
                totals = {SSD: (used + done * allocated(4096), blocks + done, pinned)}
                index.write(saved, [], totals, {b"clock": (clock + done).to_bytes(8, "big")})
                saved = []
    finally:
        index.close()
