"""A disk that can be frozen: an ext4 in a file. A frozen one makes writers wait in the kernel until it is thawed, and lets
readers go on; a process that waits so cannot be killed, so a test thaws it before it waits for a process."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.mount.mounts import succeed
from tests.mount.power_cuts import system_command

MIB = 1 << 20


class Disk:
    """An ext4 of its own at `path`."""

    def __init__(self, place: Path) -> None:
        self.path = place / "disk"
        self.path.mkdir()
        image = place / "image"
        with image.open("wb") as file:
            file.truncate(256 * MIB)
        succeed([system_command("mkfs.ext4"), "-q", "-F", image])
        self.device = succeed(["losetup", "--show", "-f", image]).strip()
        succeed(["mount", self.device, self.path])
        self.frozen = False

    def freeze(self) -> None:
        succeed(["fsfreeze", "-f", self.path])
        self.frozen = True

    def thaw(self) -> None:
        if self.frozen:
            succeed(["fsfreeze", "-u", self.path])
            self.frozen = False

    def fail(self) -> None:
        """The file system finds an error in itself, and refuses all writes from here on."""
        succeed(["mount", "-o", "remount,errors=remount-ro", self.path])
        Path(f"/sys/fs/ext4/{Path(self.device).name}/trigger_fs_error").write_text("a test")

    def close(self) -> None:
        self.thaw()
        subprocess.run(["umount", "-l", self.path], check=False)
        subprocess.run(["losetup", "-d", self.device], check=False)
