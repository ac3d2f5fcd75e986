"""What must be true of a filesystem's changes at any rest: each node that is kept is open, held, or not settled; and what is
counted by directory is what is held. Held at the end of every mount of these tests (`mount.mounted`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cachefs.fs import FileSystem


def check_unused(fs: FileSystem) -> None:
    writing: Any = fs._writing
    if writing is None:
        return
    overlay = writing._overlay
    for (number, name), node in overlay.held.items():
        assert node.held and (node.directory.number, node.name) == (number, name)
        assert overlay._places.get((number, name)) is node, f"{name!r} is held, and its place is another's"
    for (number, name), node in overlay._places.items():
        assert (node.directory.number, node.name) == (number, name)
        assert not node.removed, f"{name!r} is removed, and has a place"
        assert node.held or not node.settled or node.ino in overlay.nodes, f"{name!r} is kept for nothing"
        assert node.held == ((number, name) in overlay.held)
    held = Counter(node.directory for node in overlay.held.values())
    assert overlay._held_in == held, "directories are counted that hold nothing"
    for node in overlay._by_draft.values():
        assert not node.settled or node.held or node.ino in overlay.nodes, f"{node.name!r}: a draft is kept"
        assert not node.moving and not node.lock.locked()
        if node.ino not in overlay.nodes:
            assert not node.writers, f"{node.name!r}: {node.writers} writers, and it is not open"
