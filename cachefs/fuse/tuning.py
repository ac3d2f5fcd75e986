"""What only root can set, from outside of FUSE: larger read-ahead and more requests in flight.

libfuse cannot raise either. Measured: 1 MiB reads instead of 128 KiB make sequential reading two to three times faster.
Each lever is tried by itself; what does not work is one line that says why and what it costs.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from cachefs.fuse.device import CONGESTION, MAX_BACKGROUND
from cachefs.mountinfo import mount_at

READ_AHEAD_KB = 1024
"""Derived: FUSE's largest request is 256 pages."""

_FUSECTL = Path("/sys/fs/fuse/connections")
_libc = ctypes.CDLL(None, use_errno=True)


def tune(mountpoint: Path, max_background: int = 0) -> list[str]:
    """Raise what can be raised; one line per lever, for the log and `status`. `max_background` is what the front has
    agreed upon already (0: nothing)."""
    mount = mount_at(mountpoint)
    if mount is None:
        lines = ["kernel tuning: where it is mounted is not seen from here; read_ahead_kb was not raised"]
        return [*lines, f"max_background raised to {max_background}"] if max_background else lines
    minor = mount.device.partition(":")[2]
    lines = []
    bdi = Path(f"/sys/class/bdi/{mount.device}/read_ahead_kb")
    reason = _write(bdi, READ_AHEAD_KB)
    lines.append(
        f"read_ahead_kb raised to {READ_AHEAD_KB}"
        if reason is None
        else f"read_ahead_kb not raised ({reason}): sequential reads come in 128 KiB requests, 2-3 times slower"
    )
    if max_background:
        return [*lines, f"max_background raised to {max_background}"]
    if os.geteuid() == 0 and not any(_FUSECTL.glob("*")) and not os.path.ismount(_FUSECTL):
        _libc.mount(b"fusectl", str(_FUSECTL).encode(), b"fusectl", 0, None)
    reason = _write(_FUSECTL / minor / "max_background", MAX_BACKGROUND) or _write(
        _FUSECTL / minor / "congestion_threshold", CONGESTION
    )
    lines.append(
        f"max_background raised to {MAX_BACKGROUND}"
        if reason is None
        else f"max_background not raised ({reason}): at most 12 read-aheads are in flight"
    )
    return lines


def _write(path: Path, value: int) -> str | None:
    try:
        path.write_text(f"{value}\n")
    except OSError as exc:
        return f"{path}: {exc.strerror}"
    return None
