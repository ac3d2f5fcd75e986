"""What `cachefs status` tells of uploads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cachefs.upload.dirty_file import DirtyFile

SHOWN = 20
"""Dirty files that are shown one by one. Guessed: a screen."""


def of(pending: Sequence[DirtyFile], now_ns: int) -> dict[str, Any]:
    """Plain values; `dirty_files` are those that were changed last longest ago."""
    pending = sorted(pending, key=lambda dirty_file: dirty_file.mtime_ns)
    failed = [dirty_file for dirty_file in pending if dirty_file.failure is not None]
    return {
        "pending": len(pending),
        "pending_bytes": sum(dirty_file.size for dirty_file in pending),
        "uploading": sum(dirty_file.attempt is not None for dirty_file in pending),
        "failed": len(failed),
        "last_error": str(failed[-1].failure) if failed else "",
        "oldest_s": max(0.0, (now_ns - pending[0].mtime_ns) / 1e9) if pending else 0.0,
        "dirty_files": [
            {
                "source": dirty_file.origin.source,
                "key": dirty_file.key,
                "size": dirty_file.size,
                "sent": dirty_file.parts.sent_bytes,
                "open": dirty_file.handles,
                "acknowledged": dirty_file.acknowledged,
                "uploading": dirty_file.attempt is not None,
                "error": str(dirty_file.failure or ""),
            }
            for dirty_file in pending[:SHOWN]
        ],
    }
