"""A switch that takes its time and loses packets: python -m bench.lab.switch DELAY_S LOSS FD...

Each descriptor is a TAP device, which a host has as its `eth0`; frames go from one to another by the last byte of their
hardware address, the number of the host counted from 1. All are late by the same time, so one queue holds them in order.
What is lost is drawn from a fixed seed. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import signal
import struct
import sys
import time
from collections import deque

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_PR_SET_PDEATHSIG = 1
_LONGEST_FRAME = 10_000
_EVERYBODY = 0xFF


def tap(name: str) -> int:
    """A new TAP device in the thread's namespace: frames written to the descriptor arrive there."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    except OSError:
        os.close(fd)
        raise
    return fd


def switch(taps: list[int], delay_s: float, loss: float) -> None:
    """Forward frames until the process ends."""
    rng = random.Random(0)
    late: deque[tuple[float, list[int], bytes]] = deque()
    poller = select.poll()
    for fd in taps:
        poller.register(fd, select.POLLIN)
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) * 1e3 if late else None
        for fd, _ in poller.poll(wait):
            try:
                frame = os.read(fd, _LONGEST_FRAME)
            except BlockingIOError:
                continue
            if rng.random() >= loss:
                number = frame[5]
                to = [tap for tap in taps if tap != fd] if number == _EVERYBODY else taps[number - 1 : number]
                late.append((time.monotonic() + delay_s, to, frame))
        now = time.monotonic()
        while late and late[0][0] <= now:
            _, to, frame = late.popleft()
            for fd in to:
                try:
                    os.write(fd, frame)
                except OSError:
                    pass  # its queue is full, or it is down: lost, as on a wire


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    switch([int(fd) for fd in sys.argv[3:]], float(sys.argv[1]), float(sys.argv[2]))
