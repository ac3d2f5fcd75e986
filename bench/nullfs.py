"""A filesystem that does nothing: what pyfuse3 itself costs, without a cache and a store.

    python -m bench.nullfs TREE MOUNTPOINT

It shows the names and sizes of TREE, answers every question from dictionaries and every read with a slice of one buffer,
under the options cachefs uses: pages kept across opens, FLUSH answered ENOSYS once, names and attributes cached for
long, the kernel's limits raised. No mount through pyfuse3 can be faster than this.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from pathlib import Path
from typing import Any

import pyfuse3
import trio

from cachefs.fuse.connection import tune

LONG_S = 3600.0
_CONTENT = memoryview(b"null" * (1 << 18))  # the largest request there is: 1 MiB


class NullFs(pyfuse3.Operations):
    """Read the tree once, when this is made."""

    enable_writeback_cache = False

    def __init__(self, tree: Path, mountpoint: Path) -> None:
        super().__init__()
        self._mountpoint = mountpoint
        self._entries: dict[int, pyfuse3.EntryAttributes] = {}
        self._children: dict[int, dict[bytes, int]] = {}
        self._add(tree)

    def _add(self, path: Path) -> int:
        inode = pyfuse3.ROOT_INODE + len(self._entries)
        about = path.stat()
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = about.st_mode
        entry.st_size = about.st_size
        entry.st_nlink = 1
        entry.st_blksize = 1 << 20
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = about.st_mtime_ns
        entry.entry_timeout = entry.attr_timeout = LONG_S
        self._entries[inode] = entry
        if stat.S_ISDIR(about.st_mode):
            children = self._children[inode] = {}
            for child in sorted(path.iterdir()):
                children[os.fsencode(child.name)] = self._add(child)
        return inode

    def init(self) -> None:
        trio.lowlevel.spawn_system_task(trio.to_thread.run_sync, tune, self._mountpoint)

    async def lookup(self, parent_inode: int, name: bytes, ctx: Any) -> pyfuse3.EntryAttributes:
        inode = self._children.get(parent_inode, {}).get(name)
        if inode is None:
            raise pyfuse3.FUSEError(errno.ENOENT)
        return self._entries[inode]

    async def getattr(self, inode: int, ctx: Any) -> pyfuse3.EntryAttributes:
        return self._entries[inode]

    async def forget(self, inode_list: Any) -> None:
        return

    async def opendir(self, inode: int, ctx: Any) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: Any) -> None:
        for number, (name, inode) in enumerate(self._children[fh].items(), 1):
            if number > start_id and not pyfuse3.readdir_reply(token, name, self._entries[inode], number):
                return

    async def open(self, inode: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=inode, keep_cache=True)

    async def read(self, fh: int, off: int, size: int) -> Any:
        return _CONTENT[: min(size, max(0, self._entries[fh].st_size - off))]

    async def flush(self, fh: int) -> None:
        raise pyfuse3.FUSEError(errno.ENOSYS)

    async def release(self, fh: int) -> None:
        return

    async def access(self, inode: int, mode: int, ctx: Any) -> bool:
        return True


async def _serve() -> None:
    async with trio.open_nursery() as nursery:

        async def stop_on_signal() -> None:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for _ in signals:
                    pyfuse3.terminate()

        nursery.start_soon(stop_on_signal)
        await pyfuse3.main(min_tasks=1, max_tasks=256)
        nursery.cancel_scope.cancel()


def main() -> None:
    tree, mountpoint = Path(sys.argv[1]), Path(sys.argv[2])
    options = {*pyfuse3.default_options, "fsname=null", "subtype=null", "default_permissions"}
    pyfuse3.init(NullFs(tree, mountpoint), str(mountpoint), options)
    try:
        trio.run(_serve)
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main()
