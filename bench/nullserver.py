"""The same as `bench.nullfs` without libfuse, trio and tasks: one Python thread that reads /dev/fuse and answers at once.

    python -m bench.nullserver TREE MOUNTPOINT [--passthrough]

Every reply is packed before its request comes; only the request's number is put in. So the difference to the native backend
is the cost of cachefs. With `--passthrough` the tree's own files are registered as backing files, one backing id each.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import struct
import sys
from pathlib import Path

from cachefs.fuse import protocol
from cachefs.fuse.native_backend import Device
from cachefs.fuse.protocol import Op, OpenFlags

LONG_S = 3600
_CONTENT = memoryview(b"null" * (1 << 18))  # the largest request there is: 1 MiB


class NullServer:
    """Read the tree once, when this is made. A handle is the inode's number."""

    def __init__(self, tree: Path, device: Device, *, passthrough: bool) -> None:
        self._device = device
        self._passthrough = passthrough
        self._attributes: dict[int, tuple[int, ...]] = {}
        self._children: dict[int, list[tuple[bytes, int]]] = {}
        self._lookup: dict[tuple[int, bytes], bytes] = {}
        self._opened: dict[int, bytes] = {}
        self._add(tree)

    def _add(self, path: Path) -> int:
        inode = 1 + len(self._attributes)
        about = path.stat()
        mtime = divmod(about.st_mtime_ns, 10**9)
        self._attributes[inode] = (
            inode,
            about.st_size,
            about.st_blocks,
            mtime[0],
            mtime[0],
            mtime[0],
            mtime[1],
            mtime[1],
            mtime[1],
            about.st_mode,
            1,
            about.st_uid,
            about.st_gid,
            0,
            4096,
            0,
        )
        if stat.S_ISDIR(about.st_mode):
            children = self._children[inode] = []
            for child in sorted(path.iterdir()):
                name, number = os.fsencode(child.name), self._add(child)
                children.append((name, number))
                self._lookup[inode, name] = struct.pack("=" + protocol.ENTRY, *self._entry(number))
            return inode
        flags, backing = int(OpenFlags.KEEP_CACHE | OpenFlags.NOFLUSH), 0
        if self._passthrough:
            fd = os.open(path, os.O_RDONLY)
            flags, backing = int(OpenFlags.PASSTHROUGH | OpenFlags.NOFLUSH), self._device.register(fd)
            os.close(fd)
        self._opened[inode] = struct.pack("=QIi", inode, flags, backing)
        return inode

    def _entry(self, inode: int) -> tuple[int, ...]:
        return (inode, 0, LONG_S, LONG_S, 0, 0, *self._attributes[inode])

    def serve(self) -> None:
        """Answer requests until the mount ends."""
        os.set_blocking(self._device.fd, True)
        read, write, fd, opened = self._device.read, os.write, self._device.fd, self._opened
        header, pack = protocol.IN_HEADER.unpack_from, protocol.OUT_HEADER.pack
        while request := read():
            _, op, unique, inode, *_ = header(request)
            if op == Op.OPEN:
                write(fd, pack(32, 0, unique) + opened[inode])
            elif op == Op.RELEASE:
                write(fd, pack(16, 0, unique))
            elif op not in (Op.FORGET, Op.BATCH_FORGET, Op.INTERRUPT):
                number, body = self._other(op, inode, request[protocol.IN_HEADER.size :])
                os.writev(fd, [pack(16 + len(body), -number, unique), body])

    def _other(self, op: int, inode: int, body: memoryview) -> tuple[int, bytes | memoryview]:
        """(errno, body) of a request that is not measured."""
        if op == Op.LOOKUP:
            found = self._lookup.get((inode, protocol.name_of(body)))
            return (0, found) if found else (errno.ENOENT, b"")
        if op == Op.GETATTR:
            return 0, struct.pack("=QII" + protocol.ATTR, LONG_S, 0, 0, *self._attributes[inode])
        if op == Op.READ:
            _, offset, size, *_ = protocol.READ_IN.unpack_from(body)
            return 0, _CONTENT[: min(size, max(0, self._attributes[inode][1] - offset))]
        if op == Op.OPENDIR:
            return 0, struct.pack("=QIi", inode, int(OpenFlags.KEEP_CACHE | OpenFlags.CACHE_DIR), 0)
        if op in (Op.READDIR, Op.READDIRPLUS):
            _, offset, size, *_ = protocol.READ_IN.unpack_from(body)
            return 0, self._listed(inode, offset, size, plus=op == Op.READDIRPLUS)
        if op in (Op.RELEASEDIR, Op.ACCESS, Op.DESTROY):
            return 0, b""
        return (errno.ENOTTY if op == Op.IOCTL else errno.ENOSYS), b""

    def _listed(self, inode: int, offset: int, size: int, *, plus: bool) -> bytes:
        parts: list[bytes] = []
        for number, (name, child) in enumerate(self._children[inode][offset:], offset + 1):
            head = struct.pack("=" + protocol.ENTRY, *self._entry(child)) if plus else b""
            entry = head + protocol.DIRENT.pack(child, number, len(name), self._attributes[child][9] >> 12)
            entry += name.ljust(-(-len(name) // 8) * 8, b"\0")
            size -= len(entry)
            if size < 0:
                break
            parts.append(entry)
        return b"".join(parts)


def main() -> None:
    tree, mountpoint = Path(sys.argv[1]), Path(sys.argv[2])
    device, _ = Device.connect("null", (), stack_depth=1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        server = NullServer(tree, device, passthrough="--passthrough" in sys.argv)
        device.attach(mountpoint)
        server.serve()
    finally:
        device.close()


if __name__ == "__main__":
    main()
