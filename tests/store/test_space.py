"""What becomes of blocks whose file cannot be opened, or be read at once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.fetch.scripted import content, in_trio
from tests.store.lab import BLOCK, MIB, running


@pytest.mark.parametrize(
    "number, immutable, stays, state, errors",
    [
        (errno.ENOENT, False, False, "normal", 1),  # it has vanished, and the disk works
        (errno.EROFS, True, False, "normal", 0),  # it could only be completed by writing
        (errno.EROFS, False, True, "unstable", 1),  # the file system was remounted read-only
        (errno.EIO, True, True, "unstable", 1),
        (errno.EIO, False, True, "unstable", 1),
        (errno.ENOSPC, False, True, "normal", 1),
        (errno.ETIMEDOUT, False, True, "normal", 0),  # a disk that hangs is watched elsewhere
    ],
)
@in_trio
async def test_a_file_that_cannot_be_opened_for_writing(
    cache_dir: Path, number: int, immutable: bool, stays: bool, state: str, errors: int
) -> None:
    async with running(cache_dir) as lab:
        [tier] = lab.store.tiers
        object_id = lab.origin.put("k", content(1, 2 * BLOCK))
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)
        if immutable:
            os.close(tier.make_immutable(object_id.digest, object_id.size))
        lab.store.space.not_opened(obj, tier, OSError(number, os.strerror(number)))
        assert lab.store.cached_bytes(object_id) == (object_id.size if stays else 0)
        assert (tier.state, lab.metrics.tier_errors) == (state, errors)
        lab.check_accounts()


SHORT = 0


@pytest.mark.parametrize(
    "ram, number, stays, reads_now",
    [
        (False, errno.EOPNOTSUPP, True, False),  # this file system knows no such reads: threads do them
        (False, errno.EINVAL, True, False),
        (False, errno.EAGAIN, True, True),  # it is not in the kernel's memory
        (False, SHORT, True, True),
        (False, errno.EIO, False, True),
        (True, errno.EINVAL, False, True),
        (True, errno.EIO, False, True),
        (True, SHORT, False, True),
    ],
)
@in_trio
async def test_a_block_that_cannot_be_read_at_once(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch, ram: bool, number: int, stays: bool, reads_now: bool
) -> None:
    async with running(cache_dir, ram=8 * MIB if ram else 0) as lab:
        tier = lab.store.tiers[0]
        data = content(1, 2 * BLOCK)
        object_id = lab.origin.put("k", data)
        await lab.read(object_id)
        await lab.quiet()
        obj = lab.store.object(object_id)

        def fail(*_: object) -> int | bytes:
            if number:
                raise OSError(number, os.strerror(number))
            return b"x" if ram else 1

        with obj.held():
            obj.file(tier)
            assert lab.store.read_now(obj, 0, BLOCK) == data[:BLOCK]
            with monkeypatch.context() as patch:
                patch.setattr(os, "pread" if ram else "preadv", fail)
                assert lab.store.read_now(obj, 0, BLOCK) is None
            assert lab.store.cached_bytes(object_id) == (object_id.size if stays else 0)
            assert tier.reads_now is reads_now
            assert (lab.store.read_now(obj, 0, BLOCK) is not None) == (stays and reads_now)
