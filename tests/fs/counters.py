"""What must be true of a filesystem's changes at any rest: each node that is kept is open, held, or not settled; and what is
counted by directory is what is pending. Checked at the end of every mount of these tests (`mount.mounted`)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from cachefs.fs import FileSystem


def check_unused(fs: FileSystem) -> None:
    writing: Any = fs._writing
    if writing is None:
        return
    local_changes = writing._local_changes
    for (number, name), node in local_changes.pending.items():
        assert node.pending and (node.directory.ino, node.name) == (number, name)
        assert local_changes._places.get((number, name)) is node, (
            f"{name!r} is held, and its place is another's"
        )
    for (number, name), node in local_changes._places.items():
        assert (node.directory.ino, node.name) == (number, name)
        assert not node.removed, f"{name!r} is removed, and has a place"
        assert node.pending or not node.settled or node.ino in local_changes.nodes, (
            f"{name!r} is kept for nothing"
        )
        assert node.pending == ((number, name) in local_changes.pending)
    pending = Counter(node.directory for node in local_changes.pending.values())
    assert local_changes.pending.in_directory == pending, "directories are counted that hold nothing"
    for node in local_changes._by_dirty_file.values():
        assert not node.settled or node.pending or node.ino in local_changes.nodes, (
            f"{node.name!r}: a dirty file is left"
        )
        assert not node.moving and not node.lock.locked()
        if node.ino not in local_changes.nodes:
            assert not node.writers, f"{node.name!r}: {node.writers} writers, and it is not open"
