"""Whether a signal ends the one who waits: the kernel tells of every signal, and gives up nothing but the dying.

A timer, a child that ended or a debugger must not turn a lookup under way into a failure: to a program that asks whether a
file exists, EINTR is "no". So what is pending is looked up. The exception is Ctrl-C: whoever has a handler for it wants
out, too.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path


def _bits(*numbers: int) -> int:
    return sum(1 << (number - 1) for number in numbers)


_KILL, _INTERRUPT = _bits(signal.SIGKILL), _bits(signal.SIGINT)
_HARMLESS = _bits(
    *(signal.SIGCHLD, signal.SIGCONT, signal.SIGURG, signal.SIGWINCH),
    *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
)
"""Signals that end nobody, whatever is done about them."""

_FIELD = re.compile(r"^(SigPnd|ShdPnd|SigBlk|SigIgn|SigCgt):\s*([0-9a-f]+)$", re.MULTILINE)


def ends(thread: int) -> bool:
    """Whether the thread is gone, or about to be. False when it cannot be seen (it lives in another PID namespace)."""
    if thread <= 0:
        return False
    try:
        status = Path(f"/proc/{thread}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return decides(status)


def decides(status: str) -> bool:
    """The same from the text of ``/proc/…/status``."""
    found = {name: int(mask, 16) for name, mask in _FIELD.findall(status)}
    pending = (found.get("SigPnd", 0) | found.get("ShdPnd", 0)) & ~found.get("SigBlk", 0)
    deadly = pending & ~(found.get("SigIgn", 0) | found.get("SigCgt", 0) | _HARMLESS)
    return bool(deadly | pending & _KILL | pending & _INTERRUPT & ~found.get("SigIgn", 0))
