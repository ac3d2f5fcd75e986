"""This node's id: a random word in the cache directory.

The ring is made of ids, and what a node keeps is found by its place in the ring. So the id belongs to the cached files: it
is made once, outlives restarts and every change of address, and goes when the cache is removed. A cache directory that was
copied brings a second node of that id; who of the two takes another one is for `node` to decide.
"""

from __future__ import annotations

import logging
import uuid
from pathlib import Path

from cachefs import durable

log = logging.getLogger(__name__)

FILE = "node"


def node_id(directory: Path) -> str:
    """The id kept there; a new one where there is none that can be read."""
    try:
        return uuid.UUID((directory / FILE).read_text().strip()).hex
    except (OSError, ValueError):
        return fresh_id(directory)


def fresh_id(directory: Path) -> str:
    """Another id, written there before it is used. Where nothing can be written it is for this daemon's life alone."""
    made = uuid.uuid4().hex
    try:
        durable.write(directory / FILE, f"{made}\n")
    except OSError as exc:
        log.warning(
            "this node's id cannot be kept in %s, so a restart finds another share: %s",
            directory,
            exc.strerror,
        )
    return made
