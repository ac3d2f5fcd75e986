"""System calls of a running daemon fail at their n-th call: n = 1, 2, 3 … until a run passes untouched (`scripts/inject`).

strace fails the call in each thread of the daemon at that thread's n-th, while a small workload writes to a real mount.
Afterwards the daemon lives; what was acknowledged (close and fsync returned 0) reads back right, in the same run and after
the mount was stopped and started; and the same workload, undisturbed, is right.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.lab.client import LabStore
from bench.lab.dataset import content
from tests.mount.mounts import Mount, alive, eventually

CALLS = {
    "pwrite64": "pwrite64",
    "openat": "openat",
    "rename": "rename,renameat,renameat2",
    "fsync": "fsync",
    "fdatasync": "fdatasync",
    "ftruncate": "ftruncate",
    "unlink": "unlink,unlinkat",
    "writev": "writev,pwritev",
    "pread64": "pread64",
    "mkdir": "mkdir,mkdirat",
    "link": "link,linkat",
    "chmod": "chmod,fchmod,fchmodat",
    "openat2": "openat2",
    "clone": "clone,clone3",
    "socket": "socket",
}
"""What strace is told for each call that can be chosen."""

ON_DATABASES = ("writev",)
"""Calls that fail on databases alone: the daemon answers the kernel with them, too."""

NOT_MADE = (("durable", "fsync"), ("durable", "fdatasync"))
"""Modes and calls that the workload does not make in them: without a row in the journal no directory is synced, and of
databases only the index, a moment after a run."""

ERRORS = ("EIO", "ENOSPC", "EMFILE")
OWN_ERRORS = {"clone": ("EAGAIN",), "socket": ("EMFILE",)}
"""For calls that fail in no other way: no thread can be started, too many files are open."""

ALWAYS = 0
"""As n: every call fails."""

MODES = {"durable": {"ram": "0"}, "writeback": {"writeback": True, "upload_delay": "50ms"}}
"""Without a RAM tier, small files that were written lie on the disk, whose calls fail, too."""
SMALL, LARGE = 100_000, 6 << 20
ON_DISK = 3 * SMALL
"""A file that does not lie in memory while it is written, so it is cut on the disk."""

LEFT = 5
"""Files that an undisturbed workload leaves."""

Known = dict[Path, bytes]


class Damage(AssertionError):
    """A promise was broken."""


def fault(calls: str, error: str, number: int) -> list[str]:
    """What tells strace that `calls` fail at the n-th of each thread (`ALWAYS`: at each)."""
    return ["-e", f"inject={calls}:error={error}:when={number or '1+'}"]


@contextmanager
def traced(pid: int, calls: str, output: Path, *fault: str, files: Sequence[Path] = ()) -> Iterator[None]:
    """Until this ends, `output` gets these calls of the process (on `files` alone, if there are some), and the `fault`
    happens."""
    paths = [word for file in files for word in ("-P", str(file))]
    process = subprocess.Popen(
        ["strace", "-f", "-o", output, "-e", f"trace={calls}", *fault, *paths, "-p", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        threads = len(os.listdir(f"/proc/{pid}/task"))
        first = process.stderr.readline()
        assert "attached" in first, first
        eventually(lambda: _traced(pid) >= threads, "strace is attached to all threads")
        yield
    finally:
        process.send_signal(signal.SIGINT)  # it detaches
        process.stderr.close()
        process.wait(30)


def _traced(pid: int) -> int:
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            count += "TracerPid:\t0\n" not in (task / "status").read_text()
        except OSError:
            pass
    return count


def databases(mount: Mount) -> list[Path]:
    """What LMDB writes."""
    return sorted((mount.place / "cache").glob("*/data.mdb"))


def made(output: Path, calls: str) -> int:
    """How often one of these was called."""
    lines = output.read_text(errors="replace").splitlines()
    return sum(
        line.split(maxsplit=1)[-1].startswith(tuple(f"{call}(" for call in calls.split(",")))
        for line in lines
    )


def hits(output: Path) -> int:
    return output.read_text(errors="replace").count("(INJECTED)")


def workload(root: Path) -> Known:
    """Several small files, a large one, renames, overwriting, reading back, removing; what was acknowledged. A name whose
    last operation failed may show anything that was written under it, or nothing."""
    known: Known = {}

    def tried(*paths: Path) -> None:
        for path in paths:
            known.pop(path, None)

    def write(name: str, size: int, version: int, *, sync: bool = False, cut: int | None = None) -> None:
        path, data = root / name, content(f"{root}/{name}/{version}", size)
        tried(path)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                at = 0
                while at < size:
                    at += os.write(fd, data[at : at + (1 << 20)])
                if cut is not None:
                    os.ftruncate(fd, cut)
                    data = data[:cut]
                if sync:
                    os.fsync(fd)
            finally:
                os.close(fd)
            known[path] = data
        except OSError:
            pass

    def rename(old: str, new: str) -> None:
        moved = known.get(root / old)
        tried(root / old, root / new)
        try:
            os.rename(root / old, root / new)
        except OSError:
            return
        if moved is not None:
            known[root / new] = moved

    def unlink(name: str) -> None:
        tried(root / name)
        try:
            os.unlink(root / name)
        except OSError:
            pass

    try:
        root.mkdir()
    except OSError:
        return known
    for number in range(4):
        write(f"small{number}", SMALL + number, 1, sync=number % 2 == 0)
    write("tiny", 1000, 1)
    write("large", LARGE, 1, sync=True)
    rename("small0", "moved")
    write("small1", SMALL // 2, 2)
    rename("small2", "small3")
    write("small3", SMALL, 3, cut=SMALL // 3)
    write("cut", ON_DISK, 1, cut=ON_DISK - SMALL)
    write("temporary", SMALL, 1, sync=True)
    rename("temporary", "large")
    unlink("tiny")
    for path in list(known):
        try:
            shown = path.read_bytes()
        except OSError:
            continue  # while calls fail, reading may fail
        if shown != known[path]:
            raise Damage(f"{path} reads as other bytes than were acknowledged, while calls fail")
    return known


def check(known: Known, when: str) -> None:
    for path, data in known.items():
        try:
            shown = path.read_bytes()
        except OSError as exc:
            raise Damage(f"{path}, which was acknowledged, {when}: {exc.strerror}") from exc
        if shown != data:
            raise Damage(f"{path} {when}: {len(shown)} bytes, and not those of {len(data)} acknowledged")


class Injection:
    """One mount, one of `CALLS`, injected into again and again. `known` is all that was acknowledged since it was last
    started."""

    def __init__(self, mount: Mount, call: str, error: str) -> None:
        self.mount, self.call, self.error = mount, call, error
        self.known: Known = {}

    def once(self, number: int) -> int:
        """Fail the n-th calls; returns how many were hit. Raises `Damage`."""
        mount, name = self.mount, f"{self.call}-{self.error}-{number}"
        pid, output, calls = mount.pid, mount.place / "strace", CALLS[self.call]
        files = databases(mount) if self.call in ON_DATABASES else []
        with traced(pid, calls, output, *fault(calls, self.error, number), files=files):
            known = workload(mount.path / name)
        if not alive(pid):
            raise Damage("the daemon has ended")
        check(known, "afterwards")
        after = workload(mount.path / f"{name}-after")
        if len(after) != LEFT:
            raise Damage(f"undisturbed, only these could be written: {sorted(path.name for path in after)}")
        check(after, "undisturbed")
        self.known |= known | after
        return hits(output)

    def restart(self) -> None:
        """Stop, start, and read all that was acknowledged."""
        self.mount.stop()
        self.mount.start()
        check(self.known, "after a restart")
        for root in {path.parent for path in self.known}:
            shutil.rmtree(root, ignore_errors=True)
        self.known = {}


def series(
    mount: Mount, call: str, error: str, *, step: float, every: int, most: int
) -> tuple[int, int, str]:
    """n = 1, 2, 3 …, each `step` times the one before, until nothing is hit. Returns the runs, the calls that were failed,
    and what went wrong, "" if nothing."""
    injection = Injection(mount, call, error)
    number, runs, failed = 1, 0, 0
    try:
        while number <= most:
            count = injection.once(number)
            runs, failed = runs + 1, failed + count
            if not count:
                break
            if runs % every == 0:
                injection.restart()
            number = max(number + 1, int(number * step))
        injection.restart()
    except (Damage, AssertionError) as exc:
        return runs, failed, f"n={number}: {exc}"
    # Calls with errors of their own depend on the threads and connections that there are.
    made_it = failed or call in OWN_ERRORS
    return runs, failed, "" if made_it else f"the workload never makes the call {call}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/inject", description=__doc__)
    parser.add_argument("--calls", nargs="+", choices=sorted(CALLS), default=list(CALLS))
    parser.add_argument("--errors", nargs="+", default=list(ERRORS))
    parser.add_argument("--mode", nargs="+", choices=sorted(MODES), default=list(MODES), dest="modes")
    parser.add_argument("--step", type=float, default=1.0, help="each n is so many times the one before")
    parser.add_argument("--most", type=int, default=1000, help="the largest n")
    parser.add_argument(
        "--restart-every", type=int, default=10, help="runs between two restarts of the mount"
    )
    chosen = parser.parse_args(arguments)
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="inject-") as place:
        os.environ["XDG_RUNTIME_DIR"] = os.environ["XDG_CACHE_HOME"] = place
        with LabStore(Path(place) / "store") as store:
            for mode in chosen.modes:
                for call in (call for call in chosen.calls if (mode, call) not in NOT_MADE):
                    for error in OWN_ERRORS.get(call, chosen.errors):
                        home = Path(place) / f"{mode}-{call}-{error}"
                        home.mkdir()
                        bucket = f"{mode}-{call}-{error}".lower()
                        store.bucket(bucket)
                        mount = Mount(
                            home,
                            f"s3://{bucket}",
                            store.env,
                            {"read_only": None, "ram": "16M", **MODES[mode]},
                        )
                        mount.start()
                        began = time.monotonic()
                        runs, failed, said = series(
                            mount,
                            call,
                            error,
                            step=chosen.step,
                            every=chosen.restart_every,
                            most=chosen.most,
                        )
                        left = mount.finish() if not said else []
                        wrong += bool(said)
                        took = time.monotonic() - began
                        print(
                            f"{mode} {call} {error}: {runs} runs, {failed} calls failed, {took:.0f} s {said}",
                            flush=True,
                        )
                        for line in left:
                            if "in the log" not in line:
                                print(f"  {line}", flush=True)
                        if said:
                            print("  " + "\n  ".join(mount.log().splitlines()[-40:]), flush=True)
                            mount.umount("--lazy")
                            mount.kill_all()
                        shutil.rmtree(home, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
