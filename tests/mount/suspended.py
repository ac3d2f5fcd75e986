"""A disk that can be suspended: neither reads nor writes of it return until it is thawed, as after `dmsetup suspend`, or
when an iSCSI target is gone. It needs no device mapper, which many kernels of virtual machines lack: an ext4 on a loop
device, whose file is served by a FUSE process of this module. To suspend is to stop that process (SIGSTOP).

    python -m tests.mount.suspended DIRECTORY FILE      serves FILE as DIRECTORY/image until it is unmounted
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pyfuse3
import trio

from tests.mount.frozen import MIB
from tests.mount.mounts import eventually, mounts_at, succeed
from tests.mount.power_cuts import system_command

_FILE = pyfuse3.InodeT(pyfuse3.ROOT_INODE + 1)


class _Image(pyfuse3.Operations):  # type: ignore[misc]
    """One directory with one file, which the kernel caches nothing of."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd

    async def getattr(self, inode: int, ctx: object = None) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = stat.S_IFDIR | 0o700 if inode == pyfuse3.ROOT_INODE else stat.S_IFREG | 0o600
        entry.st_size = os.fstat(self._fd).st_size
        entry.entry_timeout = entry.attr_timeout = 1e6
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: object = None) -> pyfuse3.EntryAttributes:
        if name != b"image":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(_FILE)

    async def setattr(
        self, inode: int, attr: object, fields: object, fh: object, ctx: object
    ) -> pyfuse3.EntryAttributes:
        return await self.getattr(inode)

    async def open(self, inode: int, flags: int, ctx: object) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=1, direct_io=True)

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        return os.pread(self._fd, size, offset)

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        return os.pwrite(self._fd, data, offset)

    async def fsync(self, fh: int, only_data: bool) -> None:
        pass


class SuspendedDisk:
    """An ext4 of its own at `path`, used as `Disk` is."""

    def __init__(self, place: Path) -> None:
        self.path, self._served = place / "disk", place / "served"
        self.path.mkdir()
        self._served.mkdir()
        image = place / "image"
        with image.open("wb") as file:
            file.truncate(256 * MIB)
        # All inodes now: the kernel would go on to initialise them, and ask a suspended disk for that.
        succeed(
            [system_command("mkfs.ext4"), "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", image]
        )
        self._server = subprocess.Popen(
            [sys.executable, "-m", __name__, self._served, image], stdout=subprocess.DEVNULL
        )
        eventually(lambda: mounts_at(self._served), "the image is served")
        self.device = succeed(["losetup", "--show", "-f", self._served / "image"]).strip()
        succeed(["mount", self.device, self.path])

    def freeze(self) -> None:
        os.kill(self._server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._server.pid, signal.SIGCONT)

    def forget(self) -> None:
        """What it holds is read from it again: pages that no process has mapped, names and inodes."""
        succeed(["mount", "-o", "remount,ro", self.path])
        subprocess.run(["umount", self.path], check=True)
        succeed(["mount", self.device, self.path])

    def close(self) -> None:
        self.thaw()
        subprocess.run(["umount", "-l", self.path], check=False)
        subprocess.run(["losetup", "-d", self.device], check=False)

        def gone() -> bool:
            return subprocess.run(["umount", self._served], stderr=subprocess.DEVNULL).returncode == 0

        eventually(gone, "the image is served no more")
        self._server.kill()  # a copy of the mount may live on in another namespace
        self._server.wait()


def _serve(directory: str, image: str) -> None:
    pyfuse3.init(_Image(os.open(image, os.O_RDWR)), directory, {"fsname=suspended", "default_permissions"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
