"""A million names cost pages of the database, not objects."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from cachefs.fs import freshness
from cachefs.fs.files import WALKED, OpenFiles
from cachefs.fs.freshness import REMEMBERED
from cachefs.fs.tree import CHANGES_REMEMBERED, KEPT_DIRECTORIES, Tree
from cachefs.origin.protocol import ListPage, ObjectInfo
from tests.fs.bucket import MTIME, Bucket, etag_of
from tests.fs.mount import ROOT, mounted

MILLION = 1_000_000
ETAG = etag_of("")


class Endless(Bucket):
    """`MILLION` names made as they are asked for, in one directory."""

    async def list_page(self, prefix: str, *, token: str | None = None, limit: int = 1000) -> ListPage:
        self.lists.append((prefix, None, limit))
        await trio.lowlevel.checkpoint()
        first = int(token or 0)
        last = min(first + limit, MILLION)
        infos = [ObjectInfo(f"img_{i:07d}.jpg", 100_000 + i, MTIME, ETAG) for i in range(first, last)]
        return ListPage(infos, [], str(last) if last < MILLION else None)


def resident_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def test_what_is_remembered_of_names_has_bounds() -> None:
    """The oldest go. Of what was only looked up, all go at once."""
    tree, files = object.__new__(Tree), object.__new__(OpenFiles)
    tree.changes, tree._changed, files.walked, files.removed_directories = 0, {}, {}, {}
    directory, shown, walked = cast(Any, SimpleNamespace(ino=1)), cast(Any, SimpleNamespace), cast(Any, ())
    answers: dict[int, float] = {}
    for number in range(CHANGES_REMEMBERED + 1):
        tree.note_change(directory, b"%d" % number)
    for number in range(KEPT_DIRECTORIES + 1):
        files.directory_removed(directory, shown(ino=number))
    for number in range(REMEMBERED + 1):
        freshness._put(answers, number, 0.0)
    for number in range(WALKED):
        files.keep_walked(number, walked)
    assert len(files.walked) == WALKED
    files.keep_walked(WALKED, walked)
    assert list(files.walked) == [WALKED]
    assert (len(tree._changed), min(tree._changed.values())) == (CHANGES_REMEMBERED, 2)
    assert (len(files.removed_directories), min(files.removed_directories)) == (KEPT_DIRECTORIES, 1)
    assert (len(answers), min(answers)) == (REMEMBERED, 1)
    for size, count in ((500, WALKED), (110, REMEMBERED), (500, KEPT_DIRECTORIES), (150, CHANGES_REMEMBERED)):
        assert size * count < 8 << 20


@pytest.mark.long
@pytest.mark.threads
def test_a_million_names_in_a_flat_memory(tmp_path: Path) -> None:
    bucket: Any = Endless()
    grown: dict[int, float] = {}

    async def main() -> None:
        async with mounted(bucket, path=tmp_path, metadata_ttl=3600.0) as mount:
            before = resident_mb()
            handle = mount.fs.opendir(ROOT)
            offset = seen = 0
            while page := await mount.fs.readdir(handle, offset, 128):
                offset = page[-1].next_offset
                seen += len(page)
                if seen % 1024 == 0:
                    assert mount.fs.attributes_now(page[0].attributes.ino)
                if seen in (10_240, 102_400):
                    grown[seen] = resident_mb() - before
            grown[seen] = resident_mb() - before
            assert seen == MILLION
            assert len(bucket.lists) == 1000
            await mount.database.written()
            assert mount.database.stored.count("names") == mount.database.stored.count("inodes") == MILLION
            mount.database.flush()
            per_name = (tmp_path / "data.mdb").stat().st_size / MILLION
            print(f"resident growth in MB by names: {grown}; {per_name:.0f} bytes of file a name")
            assert grown[seen] < 130  # the touched pages of the database, which the kernel can take back
            assert per_name < 160

    trio.run(main)
