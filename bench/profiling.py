"""Where a daemon spends its time: a line-sampled profile of each thread, by py-spy, while a scenario runs.

py-spy reads the daemon's memory from outside, so the daemon runs the code that users run. It does not stop the daemon for a
sample: with sixty threads a stop takes 10 ms, and the daemon is ten times as slow then. The price is that about a third of
the samples are torn and left out, and that system calls are met more often than the lines between them. So shares tell where
to look; the processor time beside each kind of thread is the kernel's, and exact.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

RATE = 500
"""Samples a second."""

LINES, FUNCTIONS = 15, 25
"""Rows of each kind of thread."""

LEAST_S = 0.05
"""Seconds of processor time below which a kind of thread is left out."""

EVERYWHERE = 0.85
"""A function with a larger share of the samples is left out."""

END_S = 60.0

Threads = dict[int, tuple[str, float]]
"""Thread id → (its name, its processor time in seconds)."""

_REPOSITORY = f"{Path(__file__).resolve().parents[1]}/"
_NUMBERS = re.compile(r"[-_: ]*\d+")


class Profile:
    """The samples of all daemons that were `watch`ed."""

    def __init__(self) -> None:
        program = Path(sys.prefix, "bin", "py-spy")
        if not program.exists():
            raise SystemExit("py-spy is not installed: scripts/setup bench")
        self._program = program
        self._running: dict[int, tuple[subprocess.Popen[bytes], Path, Threads]] = {}
        self._lines: dict[str, Counter[str]] = defaultdict(Counter)
        self._functions: dict[str, Counter[str]] = defaultdict(Counter)
        self._cpu_s: Counter[str] = Counter()

    def watch(self, pid: int) -> None:
        """Sample this process until `end`, or until it ends."""
        out = Path(tempfile.mkstemp(prefix="cachefs-profile-")[1])
        record = ["record", "--pid", str(pid), "--format", "raw", "--threads", "--full-filenames"]
        how = ["--nonblocking", "--rate", str(RATE), "--output", str(out)]
        spy = subprocess.Popen(
            [self._program, *record, *how], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._running[pid] = spy, out, threads_of(pid)

    def end(self, pid: int) -> None:
        """Add the samples of a process that still runs."""
        if pid not in self._running:
            return
        spy, out, before = self._running.pop(pid)
        try:
            now = threads_of(pid)
            spy.send_signal(signal.SIGINT)
            said, _ = spy.communicate(timeout=END_S)
            if not out.stat().st_size:
                raise SystemExit(f"py-spy took no samples: {said.decode(errors='replace').strip()}")
            self._add(pid, out.read_text(), before, now)
        finally:
            spy.kill()
            out.unlink()

    def _add(self, pid: int, samples: str, before: Threads, now: Threads) -> None:
        for thread, (name, seconds) in now.items():
            self._cpu_s[_kind(pid, thread, name)] += seconds - before.get(thread, (name, 0.0))[1]
        for row in samples.splitlines():
            stack, _, count = row.rpartition(" ")
            head, *frames = stack.split(";")
            found = re.match(r"thread \((\d+)\)", head)
            if found is None or not frames or not count.isdigit():
                continue  # a torn sample
            thread = int(found[1])
            kind = _kind(pid, thread, now.get(thread, ("thread that ended", 0.0))[0])
            frames = [_short(frame) for frame in frames]
            self._lines[kind][frames[-1]] += int(count)
            for function in {re.sub(r":\d+\)$", ")", frame) for frame in frames}:
                self._functions[kind][function] += int(count)

    def __str__(self) -> str:
        parts = []
        for kind, seconds in self._cpu_s.most_common():
            if seconds < LEAST_S:
                continue
            samples = self._lines[kind].total()
            parts.append(f"{kind}: {seconds:.2f} s of processor time, {samples} samples")
            # What nearly all samples are below of is how the daemon was started.
            functions = Counter({f: n for f, n in self._functions[kind].items() if n < EVERYWHERE * samples})
            for title, rows, most in (
                ("lines", self._lines[kind], LINES),
                ("functions, with what they call", functions, FUNCTIONS),
            ):
                parts.append(f"  {title}")
                parts += [f"    {count / samples:6.1%}  {where}" for where, count in rows.most_common(most)]
        return "\n".join(parts)


def _kind(pid: int, thread: int, name: str) -> str:
    """The kind of a thread: names of a pool's threads differ by a number."""
    return "main thread" if thread == pid else _NUMBERS.sub("", name) or name


def _short(frame: str) -> str:
    frame = frame.replace(_REPOSITORY, "")
    return re.sub(r"\(/\S*/(?:site-packages|python3\.\d+)/", "(", frame)


def threads_of(pid: int) -> Threads:
    found: Threads = {}
    for task in os.listdir(f"/proc/{pid}/task"):
        place = Path(f"/proc/{pid}/task/{task}")
        try:
            nanoseconds = int((place / "schedstat").read_text().split()[0])
            found[int(task)] = (place / "comm").read_text().strip(), nanoseconds / 1e9
        except OSError:
            pass  # it has just ended
    return found
