"""Several processes change the same few names of a real mount at once (`scripts/races`).

Each actor creates, rewrites, appends, truncates, replaces by rename, renames, removes, reads, stats, chmods and lists. No
operation may fail with an errno that a local disk would not give; a file that is only ever replaced is never seen torn.
Afterwards the daemon lives and its log is clean; every name can be used; the origin holds what the mount shows, and so does
the mount after a restart.
"""

from __future__ import annotations

import argparse
import collections
import errno
import json
import multiprocessing
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.lab.client import LabStore
from cachefs.fuse import holder
from tests.mount.mounts import Mount, alive, eventually
from tests.mount.restarting import ALLOWED, DAEMON, end

MODES = {"durable": {}, "writeback": {"writeback": True, "upload_delay": "50ms"}}

EXPECTED = {
    "create": {errno.ENOENT, errno.ENOTDIR},
    "append": {errno.ENOENT, errno.ENOTDIR},
    "truncate": {errno.ENOENT},
    "replace": {errno.ENOENT, errno.ENOTDIR},
    "rename": {errno.ENOENT},
    "unlink": {errno.ENOENT},
    "read": {errno.ENOENT},
    "stat": {errno.ENOENT},
    "chmod": {errno.ENOENT},
    "list": {errno.ENOENT},
    "held": {errno.ENOENT},
    "mkdir": {errno.EEXIST, errno.ENOENT},
    "rmdir": {errno.ENOENT, errno.ENOTEMPTY},
    "rename-directory": {errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST},
    "die": set(),
    "refresh": {errno.ENOENT},
}
"""Operation → the errnos that a local disk gives when others change the same names."""

ORDER = (
    "create",
    "append",
    "truncate",
    "replace",
    "rename",
    "unlink",
    "read",
    "stat",
    "chmod",
    "list",
    "held",
)
WITH_DIRECTORIES = ("mkdir", "rmdir", "rename-directory")
HARSH = ("die", "refresh")

FORGOTTEN = {"read", "held", "append"}
"""With a daemon that is killed also ESTALE: what it had cached of a file that was removed while it was open may be
forgotten. An append reads the file first, at its first write."""

Result = dict[str, dict[str, int]]
"""Operation → errno's name, "ok" or what was torn → how often."""


class Torn(Exception):
    """Bytes that no writer has written so."""


def whole(data: bytes) -> bool:
    """`replace` writes one line of 32 bytes again and again."""
    return len(data) % 32 == 0 and data == data[:32] * (len(data) // 32)


class Actor:
    """One process. `names` are those that all actors share; `stable` is a file that is only ever replaced by rename."""

    def __init__(
        self, root: Path, number: int, seed: int, names: int, directories: bool, harsh: bool = False
    ) -> None:
        self.root, self.number = root, number
        self.random = random.Random(f"{seed}/{number}")
        self.names = names
        self.directories = directories
        self.kinds = ORDER + WITH_DIRECTORIES * directories + HARSH * harsh
        self.done = 0

    def path(self) -> Path:
        name = f"n{self.random.randrange(self.names)}"
        if self.directories and self.random.random() < 0.4:
            return self.root / f"d{self.random.randrange(2)}" / name
        return self.root / name

    def data(self) -> bytes:
        self.done += 1
        line = f"{self.number:08d}-{self.done:012d}----------".encode()[:31] + b"\n"
        return line * self.random.choice((1, 100, 4096))

    def create(self) -> None:
        with open(self.path(), "wb") as file:
            file.write(self.data())

    def append(self) -> None:
        with open(self.path(), "ab") as file:
            file.write(self.data())

    def truncate(self) -> None:
        os.truncate(self.path(), self.random.randrange(1000))

    def replace(self) -> None:
        temporary, final = self.root / f"t{self.number}", self.root / "stable"
        with open(temporary, "wb") as file:
            file.write(self.data())
        os.rename(temporary, final)

    def rename(self) -> None:
        os.rename(self.path(), self.path())

    def unlink(self) -> None:
        os.unlink(self.path())

    def read(self) -> None:
        if self.random.random() < 0.5:
            with open(self.root / "stable", "rb") as file:
                data = file.read()
                if not whole(data) or not data:
                    size, again = os.fstat(file.fileno()).st_size, os.pread(file.fileno(), 1 << 20, 0)
                    raise Torn(f"stable-torn: {len(data)} bytes of {size}, then {len(again)}")
        else:
            self.path().read_bytes()

    def stat(self) -> None:
        os.stat(self.path())

    def chmod(self) -> None:
        os.chmod(self.path(), self.random.choice((0o600, 0o644, 0o755)))

    def list(self) -> None:
        os.listdir(self.root)

    def held(self) -> None:
        """A descriptor stays good for fstat and read whatever becomes of the name."""
        with open(self.path(), "rb") as file:
            for _ in range(3):
                os.fstat(file.fileno())
                file.seek(0)
                file.read()

    def mkdir(self) -> None:
        os.mkdir(self.root / f"d{self.random.randrange(2)}")

    def rmdir(self) -> None:
        os.rmdir(self.root / f"d{self.random.randrange(2)}")

    def rename_directory(self) -> None:
        a = self.random.randrange(2)
        os.rename(self.root / f"d{a}", self.root / f"d{1 - a}")

    def die(self) -> None:
        """A process is killed amid its calls."""
        pid = os.fork()
        if not pid:
            self.random.seed(os.getpid())
            while True:
                with suppress(OSError, Torn):
                    getattr(self, self.random.choice(ORDER))()
        time.sleep(self.random.random() / 50)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def refresh(self) -> None:
        os.getxattr(self.random.choice((self.root, self.path())), "user.cachefs.refresh")

    def run(self, seconds: float) -> Result:
        seen: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            kind = self.random.choice(self.kinds)
            operation: Callable[[], None] = getattr(self, kind.replace("-", "_"))
            try:
                operation()
                seen[kind]["ok"] += 1
            except Torn as exc:
                seen[kind][str(exc)] += 1
            except OSError as exc:
                seen[kind][errno.errorcode.get(exc.errno or 0, str(exc.errno))] += 1
                if exc.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                    break
        return {kind: dict(counts) for kind, counts in seen.items()}


def _act(actor: Actor, seconds: float, sent: multiprocessing.Queue[Result]) -> None:
    sent.put(actor.run(seconds))


def race(
    root: Path, seconds: float, processes: int, names: int, seed: int, directories: bool, harsh: bool = False
) -> Result:
    """All actors at once; what they have seen, together."""
    (root / "stable").write_bytes(b"-" * 31 + b"\n")
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[Result] = context.Queue()
    actors = [Actor(root, number, seed, names, directories, harsh) for number in range(processes)]
    running = [context.Process(target=_act, args=(actor, seconds, results)) for actor in actors]
    for process in running:
        process.start()
    total: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for _ in running:
        for kind, counts in results.get(timeout=seconds + 120).items():
            total[kind].update(counts)
    for process in running:
        process.join(30)
    return {kind: dict(counts) for kind, counts in sorted(total.items())}


def kill(mount: Mount, kills: int, seconds: float, wrong: list[str]) -> None:
    """Kill the daemon so often while the actors are at it; each time another one goes on."""
    chance = random.Random(kills)
    try:
        for number in range(kills):
            time.sleep(chance.uniform(0.5, 1.5) * seconds / (kills + 1))
            if number and not number % (holder.CRASH_LOOP - 1):
                time.sleep(holder.SHORT_LIFE_S)  # else this is a crash loop, and ends the mount
            end(mount, DAEMON)
    except Exception as exc:
        wrong.append(f"the next daemon: {type(exc).__name__}: {exc}")


def unexpected(result: Result, killed: bool = False) -> list[str]:
    return [
        f"{kind}: {what} x {count}"
        for kind, counts in result.items()
        for what, count in counts.items()
        if what not in {"ok", *(errno.errorcode[number] for number in EXPECTED[kind])}
        and not (killed and kind in FORGOTTEN and what == "ESTALE")
    ]


def tree(root: Path) -> dict[str, bytes | str]:
    """Relative path → bytes, or the error with which it could not be read; directories end in "/"."""
    shown: dict[str, bytes | str] = {}
    for where, directories, files in os.walk(
        root, onerror=lambda exc: shown.update({str(exc.filename): str(exc)})
    ):
        for name in directories:
            shown[str((Path(where) / name).relative_to(root)) + "/"] = b""
        for name in files:
            path = Path(where) / name
            try:
                shown[str(path.relative_to(root))] = path.read_bytes()
            except OSError as exc:
                shown[str(path.relative_to(root))] = exc.strerror or str(exc)
    return shown


def unusable(root: Path, names: int) -> list[str]:
    """What goes wrong when each name is looked at, rewritten, read back and removed by one process."""
    wrong = []
    for name in [f"n{number}" for number in range(names)] + ["stable"]:
        path = root / name
        try:
            if path.exists():
                path.read_bytes()
            path.write_bytes(b"after")
            if path.read_bytes() != b"after":
                wrong.append(f"{name} does not read as it was written")
            os.unlink(path)
            if path.exists():
                wrong.append(f"{name} is still there")
        except OSError as exc:
            wrong.append(f"{name}: {exc.strerror}")
    try:
        left = [name for name in os.listdir(root) if name.startswith(("n", "stable"))]
        wrong += [f"{name} is listed" for name in left]
    except OSError as exc:
        wrong.append(f"listing: {exc.strerror}")
    return wrong


def differences(one: dict[str, bytes | str], other: dict[str, bytes | str], what: str) -> list[str]:
    def text(found: bytes | str | None) -> str:
        return "missing" if found is None else found if isinstance(found, str) else f"{len(found)} bytes"

    return [
        f"{what}: {path}: {text(one.get(path))} / {text(other.get(path))}"
        for path in sorted(one.keys() | other.keys())
        if one.get(path) != other.get(path) and not path.endswith("/")
    ]


@contextmanager
def origin(
    kind: str, place: Path
) -> Iterator[tuple[str, dict[str, str], Callable[[], dict[str, bytes | str]]]]:
    """(URL, environment, what it holds)."""
    if kind == "file":
        (place / "data").mkdir()

        def shown() -> dict[str, bytes | str]:
            """A daemon that was killed leaves what it was writing under a hidden name."""
            return {path: data for path, data in tree(place / "data").items() if "/.cachefs-" not in path}

        yield f"file://{place}/data", {}, shown
        return
    with LabStore(place / "store") as store:
        store.bucket("races")

        def held() -> dict[str, bytes | str]:
            """As another node sees it."""
            (place / "other").mkdir()
            other = Mount(place / "other", "s3://races", store.env, {"fuse": "pyfuse3", "ram": "16M"})
            other.start()
            try:
                return tree(other.path)
            finally:
                other.stop()

        yield "s3://races", dict(store.env), held


def series(
    chosen: argparse.Namespace, source: str, mode: str, fuse: str, place: Path
) -> tuple[Result, list[str]]:
    """One race on a mount of its own; (what was seen, what is wrong)."""
    place.mkdir()
    wrong: list[str] = []
    result: Result = {}
    with origin(source, place) as (url, env, held):
        mount = Mount(
            place,
            url,
            env,
            {
                "read_only": None,
                "ram": "16M",
                "fuse": fuse,
                "timeout": 20,
                "restart": chosen.kills > 0,
                **MODES[mode],
            },
        )
        mount.start()
        root = mount.path / "race"
        try:
            root.mkdir()
            killer = threading.Thread(target=kill, args=(mount, chosen.kills, chosen.seconds, wrong))
            killer.start()
            result = race(
                root,
                chosen.seconds,
                chosen.processes,
                chosen.names,
                chosen.seed,
                chosen.directories,
                chosen.harsh,
            )
            killer.join()
            wrong += unexpected(result, chosen.kills > 0)
            assert alive(mount.pid), "the daemon has ended"
            if mode == "writeback" or chosen.harsh:  # the upload of a process that was killed goes on
                mount.cli("flush", mount.path, timeout=120)
            here = tree(mount.path)
            wrong += differences(here, held(), "mount / origin")
            mount.stop()
            mount.start()
            wrong += differences(here, tree(mount.path), "before / after a restart")
            wrong += unusable(root, chosen.names)
            wrong += complaints(mount.log(), ALLOWED if chosen.kills else ())[:5]
            mount.stop()
        except (OSError, AssertionError, subprocess.SubprocessError) as exc:
            wrong.append(f"{type(exc).__name__}: {exc}")
        finally:
            if chosen.log:
                shutil.copy(mount.log_file, f"{chosen.log}-{source}-{mode}-{fuse}")
            mount.umount("--lazy")
            mount.kill_all()
            eventually(lambda: not any(map(mount.runs_as, mount.pids)), "the daemon ends")
    return result, wrong


def complaints(log: str, allowed: Sequence[str]) -> list[str]:
    """The entries of a log that are errors or have a traceback, whole."""
    entries = re.split(r"^(?=\d{4}-\d\d-\d\dT)", log, flags=re.MULTILINE)
    return [
        entry
        for entry in entries
        if "Traceback" in entry or (" ERROR " in entry and not any(said in entry for said in allowed))
    ]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/races", description=__doc__)
    parser.add_argument("--source", nargs="+", choices=("file", "s3"), default=["file", "s3"])
    parser.add_argument("--mode", nargs="+", choices=sorted(MODES), default=list(MODES))
    parser.add_argument("--fuse", nargs="+", choices=("native", "pyfuse3"), default=["native", "pyfuse3"])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--names", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--directories", action="store_true", help="directories come, go and are renamed, too"
    )
    parser.add_argument("--harsh", action="store_true", help="processes are killed, names are refreshed, too")
    parser.add_argument(
        "--kills", type=int, default=0, help="mounts with --restart, whose daemon is killed so often (native)"
    )
    parser.add_argument("--log", help="keep each daemon's log under this name")
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args(arguments)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="races-") as place:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_CACHE_HOME"] = place
        for source in chosen.source:
            for mode in chosen.mode:
                for fuse in ["native"] if chosen.kills else chosen.fuse:
                    result, wrong = series(
                        chosen, source, mode, fuse, Path(place) / f"{source}-{mode}-{fuse}"
                    )
                    done = sum(counts.get("ok", 0) for counts in result.values())
                    failed += bool(wrong)
                    said = f"{done} operations, {len(wrong)} wrong (seed {chosen.seed})"
                    print(f"{source} {mode} {fuse}: {said}", flush=True)
                    for line in wrong[:40]:
                        print(f"  {line}", flush=True)
                    if chosen.json:
                        print(json.dumps(result), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
