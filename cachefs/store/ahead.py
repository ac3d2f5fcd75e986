"""What was fetched before anybody asked for it, and how long it waits for its first reader."""

from __future__ import annotations

from typing import NamedTuple

AHEAD_S = 900.0
"""How long what was fetched ahead waits for its first reader before it is evicted like anything else. Guessed."""

AHEAD_COPIES = 65_536
"""Copies that may wait so, about 400 bytes each: a terabyte of large files. Beyond it the oldest wait no longer. Guessed."""


class Waiting(NamedTuple):
    """A copy for its first reader."""

    until: float
    clock: int
    dataset: int
