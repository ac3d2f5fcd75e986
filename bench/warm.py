"""Reads of cached data, in the kernel's page cache or in the tiers alone, through pyfuse3. `bench.passthrough` measures the
other backend."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench import readers
from bench.harness import Result, interleave, number, scenario
from bench.mounts import OTHERS, PYFUSE3, Cachefs, Mount, Null, Unavailable, backend
from bench.workspace import Workspace, can_drop_caches, drop_caches


def _cachefs(work: Workspace, bucket: str, *options: str) -> Cachefs:
    return Cachefs(work.disk, work.lab, bucket, *backend("pyfuse3"), *options, name=PYFUSE3)


def _mounts(stack: ExitStack, work: Workspace, bucket: str, tree: Path, result: Result) -> dict[str, Mount]:
    """The null filesystem and the other mounts, as far as they run here."""
    found: dict[str, Mount] = {}
    for mount in [Null(work.disk, work.lab, bucket, tree)] + [
        kind(work.disk, work.lab, bucket) for kind in (OTHERS if work.scale.others else ())
    ]:
        try:
            found[mount.name] = stack.enter_context(mount)
        except Unavailable as exc:
            result.note(str(exc))
    return found


AGAIN = 3
"""Reads in one turn: a page cache is too fast for one to be measured well."""


def _again(root: Path, limit_s: float) -> Callable[[], float]:
    """Reading what has just been read for the first time. Every turn takes another file: where its pages happen to lie
    in memory matters, and stays as it is as long as they do."""
    files = iter(sorted(root.iterdir()))

    def measure() -> float:
        path = next(files)
        readers.sequential(path, limit_s)
        readings = [readers.sequential(path, limit_s / AGAIN) for _ in range(AGAIN)]
        return sum(r.bytes for r in readings) / sum(r.seconds for r in readings) / 1e6

    return measure


def _fewest_reads(mount: Cachefs, read: Callable[[], object]) -> dict[str, int]:
    """Requests of the kernel when all files are read again: of several tries the one with the fewest READs, because a
    machine that reclaims idle pages causes READs that no daemon could avoid."""
    tries = []
    for _ in range(5):
        read()
        with mount.counting() as counted:
            read()
        tries.append(counted)
    return min(tries, key=lambda counted: counted["fuse_read"])


@scenario("warm-seq", rounds=5)
def warm_seq(work: Workspace, rounds: int) -> Result:
    """A large file that was read before, read again."""
    result = Result()
    tree = work.big("warm", work.scale.warm // 2, rounds)
    with ExitStack() as stack:
        mount = stack.enter_context(_cachefs(work, "warm"))
        others = _mounts(stack, work, "warm", tree, result)
        roots = {"ext4": work.on_disk(tree), mount.name: mount.path}
        roots |= {name: other.path for name, other in others.items()}
        contenders = {name: _again(root, work.scale.limit_s) for name, root in roots.items()}
        series = interleave(rounds, contenders, result, what="warm sequential", unit="MB/s")
        with work.traffic() as seen:
            counted = _fewest_reads(mount, lambda: readers.sequential(mount.path / "0.bin"))
    result.ceiling(series, "ext4")
    result.demand("pyfuse3, warm re-read: READ messages", counted["fuse_read"], "=", 0)
    result.demand("pyfuse3, warm re-read: rate / ext4", series.ratio(PYFUSE3, "ext4"), "≥", 0.75)
    result.demand("pyfuse3, warm re-read: GETs", seen.get, "=", 0)
    return result


@scenario("ssd-seq", rounds=5)
def ssd_seq(work: Workspace, rounds: int) -> Result:
    """A large file in the SSD tier only, without pages in memory, for all contenders."""
    result = Result()
    if not can_drop_caches():
        result.note("needs root: the kernel's page cache cannot be dropped")
        return result
    tree = work.big("ssd", work.scale.warm)
    with ExitStack() as stack:
        mount = stack.enter_context(_cachefs(work, "ssd", "--ram", "0"))
        others = _mounts(stack, work, "ssd", tree, result)
        roots = {"ext4": work.on_disk(tree), mount.name: mount.path}
        roots |= {name: other.path for name, other in others.items()}

        def cold(root: Path) -> Callable[[], float]:
            def measure() -> float:
                drop_caches()
                return readers.sequential(root / "0.bin", work.scale.limit_s).mb_per_s

            return measure

        for root in roots.values():
            readers.sequential(root / "0.bin")
        with mount.counting() as counted:
            series = interleave(
                rounds,
                {name: cold(root) for name, root in roots.items()},
                result,
                what="sequential, kernel cache dropped",
                unit="MB/s",
            )
    result.ceiling(series, "ext4")
    result.demand(
        "pyfuse3, SSD tier, kernel cache dropped: rate / ext4", series.ratio(PYFUSE3, "ext4"), "≥", 0.3
    )
    if "rclone mount" in series.values:
        ratio = series.ratio(PYFUSE3, "rclone mount")
        result.demand("pyfuse3, SSD tier, kernel cache dropped: rate / rclone mount", ratio, "≥", 2.0)
    result.demand("pyfuse3, SSD tier: bytes from the store", counted["origin_bytes"], "=", 0)
    return result


@scenario("warm-small", rounds=5)
def warm_small(work: Workspace, rounds: int) -> Result:
    """Small files that were read before: open, read, close, one after another."""
    result = Result()
    scale = work.scale
    tree, keys = work.small("warm-small")
    with ExitStack() as stack:
        mount = stack.enter_context(_cachefs(work, "warm-small"))
        others = _mounts(stack, work, "warm-small", tree, result)
        roots = {"ext4": work.on_disk(tree), mount.name: mount.path}
        roots |= {name: other.path for name, other in others.items()}
        paths = {name: [f"{root}/{key}" for key in keys] for name, root in roots.items()}
        for mine in paths.values():
            readers.small(mine)
        counted = _fewest_reads(mount, lambda: readers.small(paths[mount.name]))

        def again(mine: list[str]) -> Callable[[], float]:
            return lambda: readers.small(mine, scale.limit_s / 2).files_per_s

        def again_by_open(mine: list[str]) -> Callable[[], float]:
            return lambda: readers.small_files(mine, scale.limit_s / 2).files_per_s

        series = interleave(
            rounds,
            {name: again(mine) for name, mine in paths.items()},
            result,
            what="warm small files, open+read+close",
            unit="files/s",
        )
        opened = interleave(
            rounds,
            {name: again_by_open(mine) for name, mine in paths.items()},
            result,
            what="warm small files, Python's open()",
            unit="files/s",
        )
    result.note(f"{PYFUSE3}, Python's open(): rate / ext4 {number(opened.ratio(PYFUSE3, 'ext4'))}")
    result.ceiling(series, "ext4")
    result.demand("pyfuse3, warm small files: rate / ext4", series.ratio(PYFUSE3, "ext4"), "≥", 0.18)
    if "rclone mount" in series.values:
        ratio = series.ratio(PYFUSE3, "rclone mount")
        result.demand("pyfuse3, warm small files: rate / rclone mount", ratio, "≥", 2.5)
    result.demand("pyfuse3, warm small files: OPENs a file", counted["fuse_open"] / len(keys), "=", 1)
    result.demand("pyfuse3, warm small files: RELEASEs a file", counted["fuse_release"] / len(keys), "=", 1)
    messages = ("fuse_lookup", "fuse_getattr", "fuse_read", "fuse_opendir", "fuse_readdir", "fuse_other")
    result.demand(
        "pyfuse3, warm small files: other messages", sum(counted[name] for name in messages), "≤", 1
    )
    return result
