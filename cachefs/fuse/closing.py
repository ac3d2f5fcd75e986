"""Which close of a file is the last one: the one that has to bring what was written to the store.

The kernel says FLUSH whenever a descriptor goes: at close(2), but also when a shell has duplicated one, and when a child
that was forked meanwhile ends or becomes another program. A checkpoint must not become visible half written because the
training process started a subprocess. What the kernel does not say is whether other descriptors are left, so the one who
opened the file is looked at: as long as it has one to write to the file, this was not its last close.

A descriptor is told by its inode number and by its file system: numbers are hashes of paths, so the same path on two mounts
has the same one.

Wrong guesses are made in one direction: who cannot be seen (ended, or of another PID namespace) has no descriptor left, and
a file that is open for writing more than once is brought to the store at every close. The same holds for a process with more
descriptors than are looked at: its close is taken for the last one, so what it wrote is always in the store.

The look happens in a thread: a descriptor costs 20 µs, and a process may have tens of thousands.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import trio

_NOT_FILES = ("socket:", "pipe:", "anon_inode:", "/dev/", "/proc/", "/memfd:")
_FIELD = re.compile(rb"^(flags|ino|mnt_id):\s*(\d+)$", re.MULTILINE)
_TGID = re.compile(rb"^Tgid:\s*(\d+)$", re.MULTILINE)


DESCRIPTORS, LOOKING_S = 4096, 0.1
"""How many descriptors of a process are looked at, the latest first, and for how long. Derived: 4,096 take 0.08 s."""

LOOKING_AT_ONCE = 2
"""Threads that look. Guessed: each of them takes the interpreter from the loop now and then."""


class Writers:
    """The handles that are open for writing, and who opened them. `device` is the "major:minor" of the mount; "" where that
    is not known, and then any file system will do."""

    def __init__(self, device: Callable[[], str] = lambda: "") -> None:
        self._device = device
        self._threads = trio.CapacityLimiter(LOOKING_AT_ONCE)
        self._opened: dict[int, tuple[int, int]] = {}  # handle → (inode, process)
        self._count: dict[int, int] = {}  # inode → handles

    def __contains__(self, fh: int) -> bool:
        return fh in self._opened

    def opened(self, fh: int, inode: int, thread: int) -> None:
        self._opened[fh] = inode, _process_of(thread)
        self._count[inode] = self._count.get(inode, 0) + 1

    def released(self, fh: int) -> None:
        found = self._opened.pop(fh, None)
        if found is not None:
            inode, _ = found
            self._count[inode] -= 1
            if not self._count[inode]:
                del self._count[inode]

    def process(self, fh: int) -> int:
        """Who opened it; 0 when that cannot be seen."""
        return self._opened.get(fh, (0, 0))[1]

    async def last(self, fh: int) -> bool:
        """Whether a descriptor of this handle that goes was its last one. The look at the process may be given up."""
        if self._certain(fh):
            return True
        inode, process = self._opened[fh]
        has = await trio.to_thread.run_sync(
            _has_open, process, inode, self._device(), abandon_on_cancel=True, limiter=self._threads
        )
        return self._certain(fh) or not has

    def _certain(self, fh: int) -> bool:
        """Whether it counts as the last one, whatever its process has."""
        return fh not in self._opened or self._count[self._opened[fh][0]] > 1


def _process_of(thread: int) -> int:
    """The process that a thread belongs to, which may outlive it; 0 when it cannot be seen."""
    try:
        found = _TGID.search(_read(f"/proc/{thread}/status"))
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _has_open(process: int, inode: int, device: str) -> bool:
    """Whether a process has a descriptor to write to an inode, among those that are looked at. Asks nothing of the mount
    itself. Blocking."""
    if not process:
        return False
    place = f"/proc/{process}"
    try:
        numbers = os.listdir(f"{place}/fd")
    except OSError:
        return False
    until = time.monotonic() + LOOKING_S
    for number in numbers[: -DESCRIPTORS - 1 : -1]:  # the latest are the likeliest
        if time.monotonic() > until:
            break
        try:
            if os.readlink(f"{place}/fd/{number}").startswith(_NOT_FILES):
                continue
            found = dict(_FIELD.findall(_read(f"{place}/fdinfo/{number}")))
        except OSError:
            continue
        if (
            int(found.get(b"ino", 0)) == inode
            and int(found.get(b"flags", b"0"), 8) & os.O_ACCMODE != os.O_RDONLY
            and (not device or _device_of(process, found.get(b"mnt_id", b"")) == device)
        ):
            return True
    return False


def _device_of(process: int, mount: bytes) -> str:
    """The "major:minor" of a mount that a process has a descriptor in; "" when it cannot be seen. A mount's number is the
    same for everybody, so what a process cannot see of its own descriptor (behind chroot) is looked for here."""
    for who in (process, "self"):
        try:
            with open(f"/proc/{who}/mountinfo", "rb") as table:
                for line in table:
                    number, _, device, *_ = line.split(b" ", 3)
                    if number == mount:
                        return device.decode()
        except OSError:
            continue
    return ""


def _read(path: str) -> bytes:
    """A small file of /proc. Measured: 8 µs; through a file object, 20. It is done for each other file that is open."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)
