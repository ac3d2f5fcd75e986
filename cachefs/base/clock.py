"""A clock that does not step, in seconds since the epoch, for the age of the origin's answers.

A wall clock that is set back by an hour would make every answer an hour younger. So the wall clock is read once after each
boot, and the kernel's time since boot is added to that: setting the clock does not change it, and it counts while the
machine sleeps. A daemon that is started again in the same boot uses the same base. Times that users see come from the wall
clock."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cachefs.base.linux import boot_id

_STATE = struct.Struct(">d")


class Machine(NamedTuple):
    """The clocks of a machine: seconds since the epoch, seconds since the boot, and the identifier of the boot."""

    wall: Callable[[], float] = time.time
    since_boot: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)
    boot_id: Callable[[], str] = boot_id


class SteadyClock:
    """Call it for seconds since the epoch. `earlier` is the `state` of an earlier run's clock, if there was one."""

    def __init__(self, earlier: bytes | None = None, machine: Machine | None = None) -> None:
        machine = machine or Machine()
        self._since_boot = machine.since_boot
        boot_id = machine.boot_id().encode()
        if earlier is not None and earlier[_STATE.size :] == boot_id:
            self._booted_at: float = _STATE.unpack_from(earlier)[0]
        else:
            self._booted_at = machine.wall() - machine.since_boot()
        self.state = _STATE.pack(self._booted_at) + boot_id

    def __call__(self) -> float:
        return self._booted_at + self._since_boot()
