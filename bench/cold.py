"""Reads of data that is not cached: their speed beside a plain download, and their requests to the store."""

from __future__ import annotations

import os
from collections.abc import Callable
from statistics import median

from bench import readers
from bench.harness import Result, interleave, scenario
from bench.mounts import OTHERS, OWN, Cachefs, Foreground, Null
from bench.raw import IN_FLIGHT, RawClient
from bench.workspace import SpareMemory, Workspace

FIRST_RANGE = 128 << 10
"""Bytes of a plain GET for a first byte: the least readahead of the kernel."""


@scenario("cold-seq", rounds=2)
def cold_seq(work: Workspace, rounds: int) -> Result:
    """One large object that is not cached, from its beginning to its end."""
    result = Result()
    size = work.scale.cold
    tree = work.big("cold", size)
    raw = RawClient(work.lab, "cold")
    requests: list[float] = []
    asked: list[float] = []

    def cachefs() -> float:
        with Cachefs(work.disk, work.lab, "cold") as mount, spare.free():
            with work.traffic() as seen, mount.counting() as counted:
                reading = readers.sequential(mount.path / "0.bin")
            asked.append(seen.bytes / size)
            requests.append(counted["fuse_read_bytes"] / max(1, counted["fuse_read"]) / 2**20)
            return reading.mb_per_s

    def null() -> float:
        with Null(work.disk, work.lab, "cold", tree) as mount, spare.free():
            return readers.sequential(mount.path / "0.bin").mb_per_s

    def other(kind: type[Foreground]) -> Callable[[], float]:
        def measure() -> float:
            with kind(work.disk, work.lab, "cold") as mount:
                return readers.sequential(mount.path / "0.bin", work.scale.limit_s).mb_per_s

        return measure

    def download() -> float:
        return raw.sequential("0.bin", size).mb_per_s

    def download_and_keep() -> float:
        with spare.free():
            return raw.sequential("0.bin", size, keep=True).mb_per_s

    pair = {"raw client": download, "cachefs": cachefs}
    more = {"raw client into memory": download_and_keep, Null.name: null}
    # What is read is kept twice: in the kernel's page cache and in the RAM tier.
    with SpareMemory(2 * size + (64 << 20)) as spare:
        with work.shaped():
            shaped = interleave(rounds, pair, result, what="cold sequential, 20 ms and 200 MB/s", unit="MB/s")
        unshaped = interleave(
            rounds + 1, {**pair, **more}, result, what="cold sequential, store unshaped", unit="MB/s"
        )
    result.ceiling(unshaped, "raw client", OWN)
    if work.scale.others:
        with work.shaped():
            peers = interleave(1, {kind.name: other(kind) for kind in OTHERS}, Result(), what="", unit="")
        shaped.values.update(peers.values)
    result.demand("cold sequential: bytes from the store / size", max(asked), "=", 1.0)
    if os.getuid() == 0:
        result.demand("cold sequential: mean FUSE READ in MiB", median(requests), "≥", 0.9)
    result.demand(
        "cold sequential, shaped: rate / raw client", shaped.ratio("cachefs", "raw client"), "≥", 0.9
    )
    result.demand(
        "cold sequential, unshaped: rate / raw client", unshaped.ratio("cachefs", "raw client"), "≥", 0.5
    )
    return result


@scenario("ttfb", rounds=2)
def ttfb(work: Workspace, rounds: int) -> Result:
    """The first byte of an object whose name is cached and whose data is not."""
    result = Result()
    scale = work.scale
    size = 16 << 20
    work.big("first", size, scale.first_bytes)
    names = [f"{number}.bin" for number in range(scale.first_bytes)]
    raw = RawClient(work.lab, "first")

    def first_bytes(mount: Cachefs | Foreground) -> list[float]:
        list(mount.path.iterdir())
        times = []
        for name in names:
            times.append(1e3 * readers.first_byte(mount.path / name))
            work.quiet()
        return times

    values: dict[str, list[float]] = {"raw GET": [], "cachefs": []}
    with work.shaped():
        raw.first_byte(names[0], FIRST_RANGE)  # connects
        for _ in range(rounds):
            with Cachefs(work.disk, work.lab, "first") as mount:
                list(mount.path.iterdir())
                for name in names:
                    values["raw GET"].append(1e3 * raw.first_byte(name, FIRST_RANGE))
                    values["cachefs"].append(1e3 * readers.first_byte(mount.path / name))
                    work.quiet()
        kinds = {kind.name: kind for kind in (OTHERS if scale.others else ())}
        series = interleave(0, {}, result, what="first byte, cold, 20 ms and 200 MB/s", unit="ms")
        series.values.update(values)
        for name, kind in kinds.items():
            with kind(work.disk, work.lab, "first") as other:
                series.values[name] = first_bytes(other)
    result.demand("first byte, cold: time / one raw ranged GET", series.ratio("cachefs", "raw GET"), "≤", 1.5)
    return result


@scenario("cold-small", rounds=3)
def cold_small(work: Workspace, rounds: int) -> Result:
    """Small files that are not cached, in random order, by 8 readers; their names are not cached either."""
    result = Result()
    scale = work.scale
    _, keys = work.small("cold-small")
    raw = RawClient(work.lab, "cold-small")
    gets: list[float] = []
    asked: list[float] = []

    def cachefs() -> float:
        with Cachefs(work.disk, work.lab, "cold-small") as mount, work.traffic() as seen:
            paths = [f"{mount.path}/{key}" for key in keys]
            rate = readers.share(paths, IN_FLIGHT, readers.read_one).files_per_s
        gets.append(seen.get / len(keys))
        asked.append(seen.bytes / (len(keys) * scale.small_size))
        return rate

    def other(kind: type[Foreground]) -> Callable[[], float]:
        def measure() -> float:
            with kind(work.disk, work.lab, "cold-small") as mount:
                paths = [f"{mount.path}/{key}" for key in keys]
                return readers.share(paths, IN_FLIGHT, readers.read_one, scale.limit_s).files_per_s

        return measure

    with work.shaped():
        series = interleave(
            rounds,
            {"raw client": lambda: raw.small(keys).files_per_s, "cachefs": cachefs},
            result,
            what="cold small files, 8 readers, 20 ms and 200 MB/s",
            unit="files/s",
        )
        if scale.others:
            peers = interleave(1, {kind.name: other(kind) for kind in OTHERS}, result, what="", unit="")
            result.series.remove(peers)
            series.values.update(peers.values)
    result.demand(
        "cold small files, shaped: rate / raw client", series.ratio("cachefs", "raw client"), "≥", 0.8
    )
    result.demand("cold small files: GETs a file", max(gets), "=", 1.0)
    result.demand("cold small files: bytes from the store / size", max(asked), "=", 1.0)
    return result


@scenario("ten-readers")
def ten_readers(work: Workspace, rounds: int) -> Result:
    """Ten processes read one object that is not cached at the same time."""
    result = Result()
    size = work.scale.shared
    work.big("shared", size)
    gets: dict[int, list[float]] = {1: [], 10: []}
    for _ in range(rounds):
        for count in gets:
            with work.shaped(), Cachefs(work.disk, work.lab, "shared") as mount:
                with work.traffic() as seen:
                    got = readers.processes(mount.path / "0.bin", count)
                if got != [size] * count:
                    result.note(f"not every reader got everything: {got}")
                gets[count].append(seen.get)
                if count == 10:
                    ratio = seen.bytes / size
    result.note(f"one reader: {median(gets[1]):.0f} GETs, ten: {median(gets[10]):.0f}")
    result.demand(
        "ten processes on one cold object: GETs / one reader's", max(gets[10]) / min(gets[1]), "≤", 1.1
    )
    result.demand("ten processes on one cold object: bytes from the store / size", ratio, "=", 1.0)
    return result
