"""Seconds since the epoch by a clock that does not step.

How old an answer of the origin is decides whether it may still be used. The wall clock cannot say: set back by an hour, it
makes every answer an hour younger. So the wall clock is read once after each boot, and from then on the kernel's time since
boot is added, which no clock setting changes and which goes on while the machine sleeps. A daemon that starts again before
the next boot takes over the same sum. Times that people see are not taken from here."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

_STATE = struct.Struct(">d")


_boottime = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Machine(NamedTuple):
    """The clocks of a machine: seconds since the epoch, seconds since it was booted, and the name of this boot."""

    wall: Callable[[], float] = time.time
    since_boot: Callable[[], float] = _boottime
    boot_id: Callable[[], str] = _boot_id


class SteadyClock:
    """Calling it gives seconds since the epoch. `earlier` is the `state` of a clock of an earlier run, if there is one."""

    def __init__(self, earlier: bytes | None = None, machine: Machine | None = None) -> None:
        machine = machine or Machine()
        self._since_boot = machine.since_boot
        boot_id = machine.boot_id().encode()
        if earlier is not None and earlier[_STATE.size :] == boot_id:
            (self._booted_at,) = _STATE.unpack_from(earlier)
        else:
            self._booted_at = machine.wall() - machine.since_boot()
        self.state = _STATE.pack(self._booted_at) + boot_id

    def __call__(self) -> float:
        now: float = self._booted_at + self._since_boot()
        return now
