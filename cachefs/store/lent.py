"""A file on its way to the kernel: ours to close until the kernel holds it."""

from __future__ import annotations

import os


class Lent:
    """`id` is the kernel's name for the file, 0 until it has one; `fd` is -1 from then on."""

    __slots__ = ("fd", "id")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.id = 0

    def registered(self, backing_id: int) -> None:
        """The kernel holds the file by itself now."""
        self.id = backing_id
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
