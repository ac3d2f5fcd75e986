"""One epoch of PyTorch's DataLoader, in a process of its own: `python -m tests.mount.loading DIRECTORY METHOD COUNT BYTES`.

Two worker processes, started by METHOD (fork or spawn), read the files 0000, 0001, … of the directory in random order. Each
is compared with what `restarting.content` says that it has."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

from tests.mount.restarting import content, small


class Files(Dataset[int]):
    def __init__(self, directory: Path, count: int, size: int) -> None:
        self._directory, self._count, self._size = directory, count, size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> int:
        name = small(number)
        assert (self._directory / name).read_bytes() == content(name, self._size), name
        return number


def main(directory: str, method: str, count: str, size: str) -> None:
    files = Files(Path(directory), int(count), int(size))
    loader = DataLoader(files, batch_size=10, shuffle=True, num_workers=2, multiprocessing_context=method)
    seen = sorted(number for batch in loader for number in batch.tolist())
    assert seen == list(range(int(count))), "not each file once"


if __name__ == "__main__":
    main(*sys.argv[1:])
