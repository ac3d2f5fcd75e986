"""Power cuts: a cache directory on an image, a mount that is written to, and copies of the image that a daemon starts on.

What a power cut leaves of a disk is what its file system has sent to it. A mounted image is such a disk: a copy of it holds
what was synced, and what the kernel has written back by itself, and nothing else. A cut stops the daemon (SIGSTOP), copies
the image and the bucket, says which contents each name may have, and lets the daemon go on. Each copy is then mounted, its
marks are given the boot id of another boot, and cachefs starts on it: the mount must come up, and every name have a content
that it may have.

    scripts/powercut [--cuts N] [--fs ext4|xfs|both] [--mode default|writeback|both] [--seed N]

prints how many cuts were tried and survived, and exits with 1 if one was not. As root.
"""

from __future__ import annotations

import argparse
import errno
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from bench.lab.client import LabStore
from cachefs.base.database import MARK
from tests.mount.mounts import Mount, alive, eventually, run, succeed

SYSTEMS = {"ext4": (64 << 20, ["-F"], "loop"), "xfs": (320 << 20, ["-f"], "loop,nouuid")}
"""Size of the image (xfs takes no smaller one), options of mkfs and of mount."""

MODES = ("default", "writeback")
BUCKET = "cuts"
NAMES = 16
"""Names that the load works on: so few that most are written again, renamed and removed."""

DURING, AFTERWARDS = 17, (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0)
"""Cuts of one life of a mount: while it is written to, and seconds after a clean stop."""

Allowed = frozenset[bytes | None]
"""What a name may hold; None: it may be missing."""


def system_command(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


class Load(threading.Thread):
    """Writes, renames and removes until it is stopped, or has done `most` operations. An operation is acknowledged when
    close or fsync, rename or unlink has returned."""

    def __init__(self, place: Path, seed: str, most: int | None = None) -> None:
        super().__init__(daemon=True)
        self._place = place
        self._dice = random.Random(seed)
        self._most = most
        self._lock = threading.Lock()
        self._may = {f"f{n:02d}": Allowed({None}) for n in range(NAMES)}
        self.ended = threading.Event()
        self.done = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.ended.is_set() and self.done != self._most:
                self._one()
                self.done += 1
        except BaseException as exc:
            self.error = exc

    def stop(self) -> None:
        self.ended.set()
        self.join(60)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error

    def may(self) -> dict[str, Allowed]:
        """What each name may hold at this moment."""
        with self._lock:
            return dict(self._may)

    def _tell(self, **names: Allowed) -> None:
        with self._lock:
            self._may.update(names)

    def _one(self) -> None:
        name, other = self._dice.sample(sorted(self._may), 2)
        now, kind = self._may[name], self._dice.random()
        path = self._place / name
        if kind < 0.12 and None not in now:
            self._tell(**{name: now | {None}})
            path.unlink()
            self._tell(**{name: Allowed({None})})
        elif kind < 0.3 and None not in now:
            self._tell(**{name: now | {None}, other: self._may[other] | now})
            path.rename(self._place / other)
            self._tell(**{name: Allowed({None}), other: now})
        else:
            data = self._dice.randbytes(self._dice.choice((0, 100, 5_000, 70_000, 300_000)))
            new = Allowed({data})
            # Opened with O_TRUNC: what was there before may be replaced by nothing where this is not acknowledged.
            self._tell(**{name: now | new})
            with path.open("wb", buffering=0) as file:
                file.write(data)
                if kind > 0.7:
                    os.fsync(file.fileno())
                    self._tell(**{name: new})
            self._tell(**{name: new})


@dataclass
class Cut:
    """A copy of the image and of the bucket, and what each name may hold."""

    when: str
    image: Path
    objects: dict[str, bytes]
    may: dict[str, Allowed]


class Machine:
    """A file system on an image, and a mount that has its cache there."""

    def __init__(self, place: Path, system: str, mode: str, store: LabStore, stack: ExitStack) -> None:
        self.system, self.store = system, store
        size, make, _ = SYSTEMS[system]
        self.image, self.disk = place / "image", place / "disk"
        self.left: dict[str, bytes] | None = None  # in the bucket, once the mount has stopped
        with self.image.open("wb") as file:
            file.truncate(size)
        command = system_command(f"mkfs.{system}")
        assert command is not None, f"mkfs.{system} is missing"
        succeed([command, "-q", *make, self.image])
        self.device = stack.enter_context(mounted_image(self.image, self.disk, system))
        self.mount = Mount(place / "m", f"s3://{BUCKET}", store.env, options(mode, self.disk / "cache"))

    def cut(self, when: str, load: Load, image: Path) -> Cut:
        running = bool(self.mount.pids) and alive(self.mount.pid)
        if running:
            os.kill(self.mount.pid, signal.SIGSTOP)
        try:
            while True:  # until nothing was written while it was copied
                before = self._written()
                copy_sparse(self.image, image)
                if self._written() == before:
                    break
            objects = contents(self.store) if self.left is None else self.left
            return Cut(when, image, objects, load.may())
        finally:
            if running:
                os.kill(self.mount.pid, signal.SIGCONT)

    def _written(self) -> tuple[str, str]:
        """Writes that the disk has taken, and requests under way."""
        fields = Path(f"/sys/block/{self.device}/stat").read_text().split()
        return fields[4], fields[8]


def options(mode: str, cache: Path) -> dict[str, object]:
    return {
        "cache_dir": cache,
        "cache_size": "16M",
        "keep_free": "1M",
        "ram": 0,
        "read_only": False,
        "writeback": mode == "writeback",
        "upload_delay": "2s" if mode == "writeback" else None,
    }


def copy_sparse(source: Path, sink: Path) -> None:
    """In this process: the load has files open on a mount that is stopped, and a child that closed them would hang."""
    with source.open("rb", buffering=0) as old, sink.open("wb", buffering=0) as new:
        size, at = os.fstat(old.fileno()).st_size, 0
        new.truncate(size)
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:
                return  # only a hole is left
            hole = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            while at < hole:
                at += os.copy_file_range(old.fileno(), new.fileno(), hole - at, at, at)


@contextmanager
def mounted_image(image: Path, place: Path, system: str) -> Iterator[str]:
    """Mount it; the name of its loop device."""
    place.mkdir(exist_ok=True)
    succeed(["mount", "-t", system, "-o", SYSTEMS[system][2], image, place])
    try:
        yield Path(succeed(["findmnt", "-no", "SOURCE", "--mountpoint", place]).strip()).name
    finally:
        eventually(lambda: run(["umount", place]).returncode == 0, f"{place} is unmounted")


def contents(store: LabStore) -> dict[str, bytes]:
    """All objects of the bucket. The load's have plain names, and less than a page of them."""
    with urllib.request.urlopen(store.url_of("?list-type=2")) as reply:
        keys = re.findall(r"<Key>([^<]*)</Key>", reply.read().decode())
    found = {}
    for key in keys:
        with urllib.request.urlopen(store.url_of("/" + quote(key))) as reply:
            found[key] = reply.read()
    return found


class Store(LabStore):
    def url_of(self, rest: str) -> str:
        return f"{self.endpoint}/{BUCKET}{rest}"


def survived(cut: Cut, place: Path, system: str, mode: str, store: LabStore) -> str:
    """Start on the copy and compare. "" when all is right, else what is wrong."""
    place.mkdir()
    for key in contents(store):
        store.delete(BUCKET, key)
    for key, data in cut.objects.items():
        store.put(BUCKET, key, data)
    with mounted_image(cut.image, place / "disk", system):
        cache = place / "disk" / "cache"
        for mark in cache.glob(f"*/{MARK}"):
            mark.write_text(re.sub(r"\bopen \S+", "open another-boot", mark.read_text(errors="replace")))
        mount = Mount(place / "m", f"s3://{BUCKET}", store.env, options(mode, cache))
        try:
            done = mount.try_start()
            if done.returncode != 0:
                return f"refused: {done.stderr.strip()}"
            wrong = [line for name, may in cut.may.items() if (line := compared(mount.path / name, may))]
            strange = {path.name for path in mount.path.iterdir()} - cut.may.keys()
            wrong += [f"{name} was never written" for name in sorted(strange)]
            wrong += [
                line
                for line in mount.log().splitlines()
                if "Traceback" in line or "index was damaged" in line
            ]
            return "; ".join(wrong)
        finally:
            if mount.pids:
                mount.kill()
                subprocess.run(["umount", "-l", mount.path], check=True)
            mount.killed = True
            mount.finish()


def compared(path: Path, may: Allowed) -> str:
    try:
        found: bytes | None = path.read_bytes()
    except FileNotFoundError:
        found = None
    except OSError as exc:
        return f"{path.name}: {errno.errorcode.get(exc.errno or 0)}"
    if found in may:
        return ""
    sizes = sorted(-1 if data is None else len(data) for data in may)
    return f"{path.name} has {'nothing' if found is None else len(found)}, and may have {sizes}"


def one_life(
    place: Path,
    system: str,
    mode: str,
    seed: str,
    during: int = DURING,
    afterwards: Sequence[float] = AFTERWARDS,
    most: int | None = None,
) -> list[tuple[str, str]]:
    """(when, what was wrong or "") of each cut. `most`: the load ends after so many operations, and the cuts lie
    between them, so that few cuts take little time."""
    place.mkdir(parents=True, exist_ok=True)
    cuts: list[Cut] = []
    dice = random.Random(seed)
    with ExitStack() as stack:
        (place / "store").mkdir()
        store = stack.enter_context(Store(place / "store"))
        store.bucket(BUCKET)
        machine = Machine(place, system, mode, store, stack)
        machine.mount.start()
        stack.callback(machine.mount.finish)
        load = Load(machine.mount.path, seed, most)
        load.start()
        try:
            for number in range(during):
                if most is None:
                    time.sleep(dice.choice((0.01, 0.1, 0.5, 1.0)) * dice.random())
                else:
                    at = most * (number + 1) // (during + 1)
                    eventually(
                        lambda at=at: load.done >= at or not load.is_alive(), "the load is at work", 60
                    )  # type: ignore[misc]
                cuts.append(machine.cut(f"during {load.done}", load, place / f"{number}.image"))
        finally:
            load.stop()
        machine.mount.stop()
        stopped = time.monotonic()
        machine.left = contents(store)  # from here on the bucket is that of one cut after the other
        results: list[tuple[str, str]] = []
        waiting = sorted(afterwards)
        while waiting or cuts:
            if waiting and (not cuts or time.monotonic() >= stopped + waiting[0]):
                after = waiting.pop(0)
                time.sleep(max(0.0, stopped + after - time.monotonic()))
                cuts.insert(
                    0, machine.cut(f"{after:g} s after the stop", load, place / f"after-{after:g}.image")
                )
            else:
                cut = cuts.pop(0)
                results.append((cut.when, survived(cut, place / f"cut{len(results)}", system, mode, store)))
                cut.image.unlink()
        return results


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/powercut", description="Cut the power of a cache, and start on what is left."
    )
    parser.add_argument("--cuts", type=int, default=200, help="at least so many in all (200)")
    parser.add_argument("--fs", choices=[*SYSTEMS, "both"], default="both")
    parser.add_argument("--mode", choices=[*MODES, "both"], default="both")
    parser.add_argument("--seed", default="1")
    said = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that mounts and images are taken away
    kinds = [
        (system, mode)
        for system in (SYSTEMS if said.fs == "both" else [said.fs])
        for mode in (MODES if said.mode == "both" else [said.mode])
    ]
    tried = lost = life = 0
    while tried < said.cuts:
        system, mode = kinds[life % len(kinds)]
        with tempfile.TemporaryDirectory(prefix="powercut-") as place:
            results = one_life(Path(place, "life"), system, mode, f"{said.seed}.{life}")
        life += 1
        wrong = [(when, what) for when, what in results if what]
        tried, lost = tried + len(results), lost + len(wrong)
        print(f"{system} {mode}: {len(results)} cuts, {len(results) - len(wrong)} survived", flush=True)
        for when, what in wrong:
            print(f"  {when}: {what}", flush=True)
    print(f"powercut: {tried} tried, {tried - lost} survived")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
