"""Programs of all kinds use a mount while its daemon is killed and upgraded (`scripts/restarts`).

Each program is a process of its own and compares every byte that it reads with what it wrote, or with what the dataset is
made of. No call may fail. Afterwards the origin has what was written, and the daemon's log is clean."""

from __future__ import annotations

import argparse
import importlib.util
import io
import itertools
import mmap
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.lab.client import LabStore
from cachefs.fuse import holder
from tests.mount.mounts import Mount, eventually

if TYPE_CHECKING:
    from tests.operations.unit_mount import UnitMount

KIB, MIB = 1 << 10, 1 << 20

FILES, FILE_BYTES = 300, 60_000
LARGE_BYTES = 24 * MIB
"""Larger than a tier, so that it is never read in passthrough only."""

SHARDS, PER_SHARD = 2, 40

CHECKPOINT_BYTES = 6 * MIB + 12_345

MODES = {"durable": {}, "writeback": {"writeback": True, "upload_delay": "100ms"}}

ALLOWED = [
    "the daemon has died",
    "was left by process",
    "not at the origin",
    "fails its checksum",  # the index does not know of the last second's evictions
]

READERS = (
    "loader, forked",
    "loader, spawned",
    "DataLoader, forked",
    "DataLoader, spawned",
    "webdataset",
    "mapping",
    "tar",
    "find",
)
NEEDS = {"torch": ("DataLoader, forked", "DataLoader, spawned"), "webdataset": ("webdataset",)}

HERE = Path(__file__).parents[2]

ANSWERS_S = 60.0
"""How long the next daemon may take on a machine that does other things. Guessed."""


def content(name: str, size: int) -> bytes:
    return random.Random(name).randbytes(size)


def small(number: int) -> str:
    return f"{number:04d}"


# -- programs: each makes one round ------------------------------------------------------------------


def load(root: Path, state: dict[str, Any]) -> None:
    """As a loader's worker: files in random order."""
    name = small(state["random"].randrange(FILES))
    assert (root / "data" / name).read_bytes() == content(name, FILE_BYTES), name


def train(method: str, root: Path, state: dict[str, Any]) -> None:
    """An epoch of PyTorch's DataLoader with two workers."""
    command = [sys.executable, "-m", "tests.mount.loading", root / "data", method, FILES, FILE_BYTES]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=HERE)
    assert done.returncode == 0, done.stderr[-2000:]


def samples(root: Path, state: dict[str, Any]) -> None:
    """Shards, read by webdataset."""
    import webdataset

    urls = [f"file:{root}/shards/{number}.tar" for number in range(SHARDS)]
    found = {
        one["__key__"]: one["bin"]
        for one in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
    }
    names = [small(number) for number in range(SHARDS * PER_SHARD)]
    assert sorted(found) == names
    for name in names:
        assert found[name] == content(name, FILE_BYTES), name


def mapped(root: Path, state: dict[str, Any]) -> None:
    if "pages" not in state:
        with open(root / "large", "rb") as file:
            state["pages"] = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        state["content"] = content("large", LARGE_BYTES)
    pages, at = state["pages"], state["random"].randrange(LARGE_BYTES - MIB)
    pages.madvise(mmap.MADV_DONTNEED)
    assert pages[at : at + MIB] == state["content"][at : at + MIB], at


def tar(root: Path, state: dict[str, Any]) -> None:
    with subprocess.Popen(["tar", "-C", root, "-cf", "-", "data"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = 0
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                if member.isfile():
                    file = archive.extractfile(member)
                    assert file is not None
                    assert file.read() == content(os.path.basename(member.name), FILE_BYTES), member.name
                    found += 1
    assert (process.returncode, found) == (0, FILES)


def untar(root: Path, state: dict[str, Any]) -> None:
    """Unpack files, compare them, remove them."""
    place = root / f"unpacked{state['round']}"
    place.mkdir()
    names = [small(number) for number in range(40)]
    done = subprocess.run(["tar", "-C", place, "-xf", state["archive"]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert (place / name).read_bytes() == content(name, FILE_BYTES), name
    assert sorted(os.listdir(place)) == names
    shutil.rmtree(place)


def find(root: Path, state: dict[str, Any]) -> None:
    command = ["find", root / "data", "-type", "f", "-size", f"{FILE_BYTES}c"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == FILES, len(done.stdout.splitlines())


def checkpoint(root: Path, state: dict[str, Any]) -> None:
    """A temporary file in pieces, synced and renamed over the last one; read back by its name."""
    data = random.Random(state["round"]).randbytes(CHECKPOINT_BYTES)
    temporary, final = root / "checkpoint.tmp", root / "checkpoint"
    with open(temporary, "wb", buffering=0) as file:
        for at in range(0, len(data), 100_000):
            assert file.write(data[at : at + 100_000]) == min(100_000, len(data) - at)
        os.fsync(file.fileno())
    os.rename(temporary, final)
    assert final.read_bytes() == data


def append(root: Path, state: dict[str, Any]) -> None:
    """A log that stays open."""
    if "log" not in state:
        state["log"] = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    line = b"%011d\n" % state["round"]
    assert os.write(state["log"], line) == len(line)
    assert os.fstat(state["log"]).st_size == len(line) * (state["round"] + 1)
    time.sleep(0.002)


def patch(root: Path, state: dict[str, Any]) -> None:
    """A file that stays open, is patched, cut and lengthened."""
    if "table" not in state:
        state["table"], state["content"] = os.open(root / "table", os.O_RDWR | os.O_CREAT), bytearray()
    table, expected, chance = state["table"], state["content"], state["random"]
    data, at = chance.randbytes(chance.choice([10, 5000, 300_000])), chance.randrange(MIB)
    os.pwrite(table, data, at)
    expected.extend(bytes(max(0, at + len(data) - len(expected))))
    expected[at : at + len(data)] = data
    if chance.random() < 0.05:
        size = chance.randrange(2 * MIB)
        os.ftruncate(table, size)
        del expected[size:]
        expected.extend(bytes(size - len(expected)))
    assert os.pread(table, 4 * MIB, 0) == expected


def fio(root: Path, state: dict[str, Any]) -> None:
    place = root / "fio"
    place.mkdir(exist_ok=True)
    command = ["fio", "--name=verified", f"--directory={place}", "--rw=randwrite", "--bs=16k", "--size=4m"]
    command += ["--ioengine=psync", "--verify=crc32c", "--do_verify=1", "--fsync=32", "--thread"]
    command += [f"--randseed={state['round'] + 1}", "--allow_file_create=1", "--unlink=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=state["place"])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


PROGRAMS: dict[str, tuple[str, Callable[[Path, dict[str, Any]], None]]] = {
    "loader, forked": ("fork", load),
    "loader, spawned": ("spawn", load),
    "DataLoader, forked": ("fork", partial(train, "fork")),
    "DataLoader, spawned": ("fork", partial(train, "spawn")),
    "webdataset": ("fork", samples),
    "mapping": ("fork", mapped),
    "tar": ("fork", tar),
    "untar": ("fork", untar),
    "find": ("fork", find),
    "checkpoint": ("fork", checkpoint),
    "log": ("fork", append),
    "table": ("fork", patch),
    "fio": ("fork", fio),
}


def live(
    name: str,
    work: Callable[[Path, dict[str, Any]], None],
    root: Path,
    place: Path,
    seed: int,
    stop: Event,
    said: Queue[tuple[str, int, str, bytes]],
) -> None:
    """Rounds of a program until told to stop, or until one fails: then (name, rounds, what failed, what it has open)."""
    state: dict[str, Any] = {"random": random.Random(f"{seed}/{name}"), "round": 0, "place": place}
    state["archive"] = place / "archive.tar"
    try:
        while not stop.is_set():
            work(root, state)
            state["round"] += 1
        for fd in (state.get("log"), state.get("table")):
            if fd is not None:
                os.close(fd)
        said.put((name, state["round"], "", bytes(state["content"]) if name == "table" else b""))
    except BaseException as exc:
        said.put((name, state["round"], f"{type(exc).__name__}: {exc}"[:2000], b""))


# -- a series ------------------------------------------------------------------------------------------


def fill(store: LabStore, place: Path) -> None:
    store.put("restarts", "large", content("large", LARGE_BYTES))
    for shard in range(SHARDS):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
                member = tarfile.TarInfo(f"{small(number)}.bin")
                member.size = FILE_BYTES
                archive.addfile(member, io.BytesIO(content(small(number), FILE_BYTES)))
        store.put("restarts", f"shards/{shard}.tar", packed.getvalue())
    with tarfile.open(place / "archive.tar", "w") as archive:
        for number in range(FILES):
            name = small(number)
            data = content(name, FILE_BYTES)
            store.put("restarts", f"data/{name}", data)
            if number < 40:
                path = place / name
                path.write_bytes(data)
                archive.add(path, name)
                path.unlink()


def next_daemon(mount: Mount | UnitMount, before: int, seconds: float) -> float:
    """Wait until a daemon answers that was started after `before` restarts; how long programs waited, in seconds."""
    pause: list[float] = []

    def back() -> bool:
        try:
            status = mount.ask("status")
        except Exception:
            return False
        mount.pids.append(status["pid"])
        pause.append(status["holder"]["pause_s"])
        return bool(status["holder"]["restarts"] == before + 1)

    eventually(back, "the next daemon", seconds)
    return pause[-1]


class Versions:
    """What is installed for a mount, one of `trees` at a time: directories that have a `cachefs`. The first is the version
    that the mount is made with."""

    def __init__(self, place: Path, trees: Sequence[Path]) -> None:
        self._trees = list(trees)
        self.place = place / "installed"
        self.place.mkdir()
        self._install()

    def _install(self) -> None:
        fresh = self.place / "fresh"
        fresh.symlink_to(self._trees[0] / "cachefs")
        os.replace(fresh, self.place / "cachefs")

    def change(self) -> bool:
        """Install the other version. Returns whether it can go on with what the present one leaves: with the same FORMAT."""
        self._trees.reverse()
        self._install()
        return len({format_of(tree) for tree in self._trees}) == 1

    def start(self, mount: Mount) -> subprocess.Popen[bytes]:
        """The mount's holder, which is not this process's code, either."""
        mount.env["PYTHONPATH"] = str(self.place)
        command = [sys.executable, "-P", "-m", "cachefs", *mount.arguments(foreground=True)]
        process = subprocess.Popen(command, env=mount.env, cwd="/", stderr=subprocess.DEVNULL)
        mount.pids.append(process.pid)

        def answers() -> bool:
            try:
                mount.pids.append(mount.ask("status")["pid"])
            except Exception:
                assert process.poll() is None, mount.log()
                return False
            return True

        eventually(answers, "the mount", ANSWERS_S)
        return process


def format_of(tree: Path) -> str:
    """The number of the state that this version leaves to the next daemon (`cachefs.fuse.handover.FORMAT`)."""
    room = tree / "cachefs/fuse"
    path = next(
        path for name in ("handover.py", "held.py") if (path := room / name).exists()
    )  # the earlier name
    found = re.search(r"^FORMAT = (\d+)$", path.read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


DAEMON, HOLDER, UPGRADE = "daemon", "holder", "upgrade"


def end(mount: Mount | UnitMount, what: str, versions: Versions | None = None) -> float:
    """Kill the daemon or its holder, or upgrade it; how long programs waited, in seconds. With `versions`, an upgrade is to
    the other one; if that cannot go on, it says so in one line, and programs did not wait."""
    before = mount.ask("status")["holder"]["restarts"]
    if what == UPGRADE:
        can = versions is None or versions.change()
        done = mount.cli("upgrade", mount.path)
        if not can:
            assert versions is not None
            assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
            assert "cannot go on with this mount's state" in done.stderr, done.stderr
            assert mount.ask("status")["pid"] == mount.pid, "the daemon before goes on"
            versions.change()
            return 0.0
        assert done.returncode == 0, done.stderr
    elif what == HOLDER:
        assert not isinstance(mount, Mount), "only a service manager starts another holder"
        mount.kill_holder()
    else:
        mount.killed = True
        mount.kill_daemon()
    return next_daemon(mount, before, ANSWERS_S)


@contextmanager
def made(place: Path, store: LabStore, options: dict[str, Any], systemd: bool) -> Iterator[Mount | UnitMount]:
    """A mount that is not started yet."""
    options = {"ram": "16M", "cache_size": "64M", "keep_free": "16M", "timeout": 20, **options}
    if not systemd:
        yield Mount(place, "s3://restarts", dict(store.env), {"read_only": None, "restart": True, **options})
        return
    from tests.operations.unit_mount import unit_mount  # which builds a Debian

    with unit_mount(place / "machine", store, "s3://restarts", options) as mount:
        yield mount


def series(
    mode: str,
    kills: int,
    upgrades: int,
    seed: int,
    place: Path,
    programs: Sequence[str] = tuple(PROGRAMS),
    *,
    holders: int = 0,
    systemd: bool = False,
    trees: Sequence[Path] = (),
    read_only: bool = False,
) -> tuple[dict[str, int], list[float], list[str]]:
    """(rounds of each program, pauses in seconds, what is wrong). `kills` daemons are killed and `holders` holders. With
    `trees`, two versions (`Versions`) take turns."""
    place.mkdir()
    chance = random.Random(seed)
    ends = [DAEMON] * kills + [UPGRADE] * upgrades + [HOLDER] * holders
    chance.shuffle(ends)
    rounds: dict[str, int] = {}
    pauses: list[float] = []
    wrong: list[str] = []
    stop = multiprocessing.get_context("spawn").Event()
    said: Queue[Any] = multiprocessing.get_context("spawn").Queue()
    with ExitStack() as stack:
        store = stack.enter_context(LabStore(place / "objects"))
        store.bucket("restarts")
        fill(store, place)
        mode_options: dict[str, Any] = {"read_only": True} if read_only else MODES[mode]
        mount = stack.enter_context(made(place, store, mode_options, systemd))
        mount.allowed += ALLOWED
        versions, foreground = None, None
        if trees:
            mount.allowed.append("cannot go on with a mount of state")
            assert isinstance(mount, Mount)
            versions = Versions(place, trees)
            foreground = versions.start(mount)
        else:
            mount.start()
        processes = [
            multiprocessing.get_context(PROGRAMS[name][0]).Process(
                target=live, args=(name, PROGRAMS[name][1], mount.path, place, seed, stop, said), daemon=True
            )
            for name in programs
        ]
        try:
            for process in processes:
                process.start()
            time.sleep(2)
            short = 0  # lives, one after the other
            for what in ends:
                time.sleep(chance.uniform(0.1, 2.0))
                if short == holder.CRASH_LOOP - 1 and what != UPGRADE:
                    time.sleep(holder.SHORT_LIFE_S)  # else this is a crash loop, and ends the mount
                    short = 0
                pauses.append(end(mount, what, versions))
                short = 0 if what == UPGRADE else short + 1
            time.sleep(1)
            stop.set()
            table = b""
            for _ in processes:
                name, rounds[name], failure, held = said.get(timeout=120)
                wrong += [f"{name}: {failure}"] if failure else []
                table = held or table
            wrong += [f"{name}: it made no round" for name, count in rounds.items() if not count]
            flushed = mount.cli("flush", mount.path, timeout=120)
            wrong += [f"flush: {flushed.stderr}"] if flushed.returncode else []
            wrong += differences(store, rounds, table)
        except Exception as exc:
            wrong.append(f"{type(exc).__name__}: {exc}")
        finally:
            stop.set()
            for process in processes:
                process.join(10)
                if process.is_alive():
                    process.kill()
            wrong += mount.finish()
            if wrong:
                shutil.copy(mount.log_file, f"{tempfile.gettempdir()}/restarts-{mode}.log")
            if isinstance(mount, Mount):  # a unit's processes end with its machine
                mount.kill_all()
            if foreground is not None:
                foreground.wait(30)
    return rounds, pauses, wrong


def differences(store: LabStore, rounds: dict[str, int], table: bytes) -> list[str]:
    """What the origin has otherwise than it was written."""
    expected: dict[str, bytes] = {}
    if rounds.get("checkpoint"):
        expected["checkpoint"] = random.Random(rounds["checkpoint"] - 1).randbytes(CHECKPOINT_BYTES)
    if "log" in rounds:
        expected["log"] = b"".join(b"%011d\n" % number for number in range(rounds["log"]))
    if "table" in rounds:
        expected["table"] = table
    wrong = []
    for key, data in expected.items():
        with urllib.request.urlopen(f"{store.endpoint}/restarts/{key}") as reply:
            found = reply.read()
        if found != data:
            wrong.append(f"{key} differs at the origin: {len(found)} bytes instead of {len(data)}")
    return wrong


def extract(revision: str, to: Path) -> None:
    """The code of an earlier revision, from git."""
    to.mkdir()
    archive = subprocess.run(
        ["git", "archive", revision, "cachefs"], cwd=HERE, capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", to], input=archive.stdout, check=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/restarts", description=__doc__)
    parser.add_argument("--mode", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--upgrades", type=int, default=3)
    parser.add_argument(
        "--systemd", action="store_true", help="a unit of a machine with a systemd of its own"
    )
    parser.add_argument("--holders", type=int, default=0, help="holders that are killed; only with --systemd")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--read-only", action="store_true", help="only programs that read")
    parser.add_argument(
        "--from",
        dest="revision",
        help="each upgrade is one from this git revision to the present code, or back; with another FORMAT, each is refused",
    )
    chosen = parser.parse_args(arguments)
    if chosen.systemd and chosen.revision:
        parser.error("--from is for a mount without --systemd")
    programs = list(PROGRAMS)
    if not shutil.which("fio"):
        programs.remove("fio")
    for module, names in NEEDS.items():
        if importlib.util.find_spec(module) is None:
            programs = [name for name in programs if name not in names]
    if left_out := sorted(set(PROGRAMS) - set(programs)):
        print(f"not installed, so left out: {', '.join(left_out)}", flush=True)
    if chosen.read_only:
        programs = [name for name in programs if name in READERS]
    failed = False
    if chosen.systemd:
        from tests.operations.debian import PLACE, Rootfs

        PLACE.mkdir(parents=True, exist_ok=True)
        Rootfs(PLACE).build()
    with tempfile.TemporaryDirectory(prefix="restarts-") as place:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_CACHE_HOME"] = place
        orders: list[list[Path]] = [[]]
        if chosen.revision:
            earlier = Path(place) / "earlier"
            extract(chosen.revision, earlier)
            orders = [[earlier, HERE]]
            if (formats := (format_of(earlier), format_of(HERE)))[0] != formats[1]:
                orders.append([HERE, earlier])
            print(f"{chosen.revision} has FORMAT {formats[0]}, the present code {formats[1]}", flush=True)
        for number, (mode, trees) in enumerate(itertools.product(chosen.mode, orders)):
            rounds, pauses, wrong = series(
                mode,
                chosen.kills,
                chosen.upgrades,
                chosen.seed,
                Path(place) / f"{mode}{number}",
                programs,
                holders=chosen.holders,
                systemd=chosen.systemd,
                trees=trees,
                read_only=chosen.read_only,
            )
            failed |= bool(wrong)
            ordered = sorted(pauses) or [0.0]
            made_with = (
                f", made with {'the present code' if trees[0] == HERE else chosen.revision}" if trees else ""
            )
            print(
                f"{mode}{made_with}: {chosen.kills} kills, {chosen.holders} of the holder, {chosen.upgrades} upgrades, "
                f"{len(wrong)} wrong; pauses: median "
                f"{ordered[len(ordered) // 2]:.2f} s, worst {ordered[-1]:.2f} s",
                flush=True,
            )
            print("  rounds: " + ", ".join(f"{name} {count}" for name, count in rounds.items()), flush=True)
            for line in wrong[:20]:
                print(f"  {line}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
