"""Data that can be recognised.

Every byte follows from a seed, so a reader is checked without keeping a second copy, and every 4 KiB page begins with
a digest of (seed, page number), so a block served from the wrong file or the wrong place never compares equal. The
rest of a page is a window into one fixed pool of random bytes: unique where it matters, and as fast as copying.
"""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from functools import cache
from pathlib import Path

import xxhash

_PAGE = 4096
_DIGEST = 32
_POOL = 1 << 20

Manifest = dict[str, tuple[int, str]]
"""Path relative to the dataset's directory → (size, xxh3-64 hex)."""


@cache
def _pool() -> bytes:
    return random.Random("cachefs lab").randbytes(_POOL + _PAGE)


def content(seed: int | str, size: int, start: int = 0) -> bytes:
    """Bytes [start, start + size) of the endless stream that belongs to `seed`."""
    pool = _pool()
    first, skip = divmod(start, _PAGE)
    base = hashlib.blake2b(str(seed).encode("utf-8", "surrogatepass"), digest_size=_DIGEST)
    pieces = []
    for page in range(first, -(-(start + size) // _PAGE)):
        digest = base.copy()
        digest.update(page.to_bytes(8, "big"))
        head = digest.digest()
        window = int.from_bytes(head[:4], "big") % _POOL
        pieces.append(head)
        pieces.append(pool[window : window + _PAGE - _DIGEST])
    data = b"".join(pieces)
    return data if len(data) == size else data[skip : skip + size]


def make_image_folder(root: Path, classes: int = 10, per_class: int = 100, seed: int = 0) -> Manifest:
    """`class_000/img_00000.jpg` and so on, 50 to 200 KB each (random bytes, not pictures)."""
    sizes = random.Random(seed)
    manifest: Manifest = {}
    for label in range(classes):
        folder = root / f"class_{label:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(per_class):
            path = folder / f"img_{index:05d}.jpg"
            name = path.relative_to(root).as_posix()
            data = content(f"{seed}/{name}", sizes.randint(50_000, 200_000))
            path.write_bytes(data)
            manifest[name] = (len(data), xxhash.xxh3_64_hexdigest(data))
    return manifest


class _HashingFile(io.RawIOBase):
    """Writes to a file and hashes on the way, so that a shard is not read again."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._hash = xxhash.xxh3_64()
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self._hash.update(data)
        self.size += len(data)
        return self._file.write(data)

    def close(self) -> None:
        self._file.close()
        super().close()

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def make_shards(root: Path, count: int = 4, size: int = 256_000_000, seed: int = 0) -> Manifest:
    """`shard-000000.tar` and so on: WebDataset shards of about `size` bytes, one `.jpg` and one `.cls` per sample."""
    root.mkdir(parents=True, exist_ok=True)
    sizes = random.Random(seed)
    manifest: Manifest = {}
    sample = 0
    for shard in range(count):
        path = root / f"shard-{shard:06d}.tar"
        with _HashingFile(path) as out:
            with tarfile.open(fileobj=out, mode="w|", format=tarfile.USTAR_FORMAT, bufsize=1 << 20) as tar:
                while tar.offset < size:
                    picture = content(f"{seed}/{sample}", sizes.randint(50_000, 200_000))
                    _add(tar, f"{sample:09d}.jpg", picture)
                    _add(tar, f"{sample:09d}.cls", str(sample % 1000).encode())
                    sample += 1
            manifest[path.name] = (out.size, out.hexdigest())
    return manifest


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))
