"""What `cachefs status` tells of uploads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cachefs.upload.draft import Draft

SHOWN = 20
"""Drafts that are told one by one. Guessed: a screen."""


def of(pending: Sequence[Draft], now_ns: int) -> dict[str, Any]:
    """Plain values; `drafts` are those that were changed last longest ago."""
    pending = sorted(pending, key=lambda draft: draft.mtime_ns)
    failed = [draft for draft in pending if draft.failure is not None]
    return {
        "pending": len(pending),
        "pending_bytes": sum(draft.size for draft in pending),
        "uploading": sum(draft.attempt is not None for draft in pending),
        "failed": len(failed),
        "last_error": str(failed[-1].failure) if failed else "",
        "oldest_s": max(0.0, (now_ns - pending[0].mtime_ns) / 1e9) if pending else 0.0,
        "drafts": [
            {
                "source": draft.origin.source,
                "key": draft.key,
                "size": draft.size,
                "sent": draft.parts.sent_bytes,
                "open": draft.handles,
                "acknowledged": draft.acknowledged,
                "uploading": draft.attempt is not None,
                "error": str(draft.failure or ""),
            }
            for draft in pending[:SHOWN]
        ],
    }
