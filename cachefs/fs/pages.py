"""Writes to the tree: a page of a listing, an answer about one name, a rename, the removal of names.

Each function makes one write, while its caller holds `Tree.writing`, so no other task writes in between. Functions that
write many rows run in a worker thread. They return what the trio thread must then act on, such as inodes that lost their
names."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachefs.base.database import Put
from cachefs.fs.inodes import NUMBER_BYTES, Numbers, inode_key
from cachefs.fs.keys import mark_of_directory, name_in
from cachefs.fs.rows import PINNED, Row, decode, encode, generation_of
from cachefs.fs.tree import Directory, Tree, end_of, named

if TYPE_CHECKING:
    from cachefs.base.behind import WriteBehind
    from cachefs.origin.protocol import ObjectInfo

CHUNK = 1000
"""Rows of one transaction, during which other writers wait. Measured: 5 µs a row."""


Lost = tuple[int, bytes]
"""(inode, mark) of a file or directory that has no name any more. The caller must erase what is below a directory."""


@dataclass(slots=True)
class Written:
    """The result of a write. `inos` are the inodes of the entries, in their order. `lost` are inodes that these names led to
    before. `conflicts` counts files that a directory of the same name hides."""

    inos: list[int] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    conflicts: int = 0


def write_names(
    tree: Tree,
    directory: Directory,
    entries: list[tuple[bytes, ObjectInfo | None]],
    generation: int,
    extra: Sequence[Put] = (),
) -> Written:
    """Write the `entries` (mark, object) that listing `generation` showed; the object is None for directories. A file in
    another version than before gets another inode."""
    written = Written()
    puts: list[Put] = list(extra)
    database, numbers = tree.database, tree.numbers
    names = [name_in(mark) for mark, _ in entries]
    before = database.get_many("names", [directory.key + mark for mark, _ in entries])
    others = database.get_many(
        "names",
        [
            directory.key + (name if info is None else name + b"/")
            for name, (_, info) in zip(names, entries, strict=True)
        ],
    )
    files_here: set[bytes] = set()
    for (mark, info), name, old_data, other_data in zip(entries, names, before, others, strict=True):
        old = decode(old_data) if old_data else None
        if info is None:
            row = Row(generation, old.mtime_ns if old else 0, 0, "", old.ino if old else numbers.next())
            if other_data and old is None:
                written.lost.append((decode(other_data).ino, name))  # it was a file until now
            hides = name in files_here
        else:
            files_here.add(name)
            row = _row_of(info, generation, old, numbers)
            hides = False
        if hides or (other_data and generation_of(other_data) == generation):
            written.conflicts += 1
        if old is not None and old.ino != row.ino:
            puts.append(("inodes", inode_key(old.ino), None))
            written.lost.append((old.ino, mark))
        written.inos.append(row.ino)
        if old is not None and old.ino == row.ino:
            puts.append(("names", directory.key + mark, encode(row)))
        else:
            puts += named(directory, mark, row)
    database.write(puts)
    return written


def _row_of(info: ObjectInfo, generation: int, old: Row | None, numbers: Numbers) -> Row:
    """The new row of a file. It keeps the inode of `old` if the version is the same, or was not known. A listing without
    sizes (size -1) keeps the old version, and makes it not `known`."""
    if info.size >= 0:
        same = old is not None and (
            not (old.known or old.etag) or (old.size, old.etag) == (info.size, info.etag)
        )
        ino = old.ino if old is not None and same else numbers.next()
        return Row(generation, info.mtime_ns, info.size, info.etag, ino)
    if old is not None:
        return Row(generation, info.mtime_ns, old.size, old.etag, old.ino, False)
    return Row(generation, info.mtime_ns, 0, "", numbers.next(), False)


def write_answer(
    tree: Tree,
    directory: Directory,
    name: bytes,
    answer: ObjectInfo | bool,
    generation: int,
    also: Sequence[Put] = (),
) -> Written:
    """Write an answer about one name: an object, True for a directory, False for neither. `also` is written with it."""
    extra: list[Put] = [directory.state(), *also]
    as_dir, as_file = tree.find(directory, name)
    marks = {mark_of_directory(name): as_dir, name: as_file}
    if answer is False:
        removed = forget(tree, directory, marks, extra)
        directory.changed()
        return Written(lost=removed)
    lost: list[Lost] = []
    if answer is True:
        mark, info = mark_of_directory(name), None
    else:
        mark, info = name, answer
        lost = forget(tree, directory, {mark_of_directory(name): as_dir}, extra)
    if (shown := marks[mark]) is not None and shown.generation != PINNED:
        generation = max(generation, shown.generation)
    written = write_names(tree, directory, [(mark, info)], generation, extra)
    written.lost += lost
    directory.changed()
    return written


def forget(
    tree: Tree, directory: Directory, marks: dict[bytes, Row | None], also: Sequence[Put] = ()
) -> list[Lost]:
    """Remove the rows `marks` (None: there is no such row), and write `also`. Returns what lost its name."""
    puts = list(also)
    lost: list[Lost] = []
    for mark, row in marks.items():
        if row is not None:
            puts += [("names", directory.key + mark, None), ("inodes", inode_key(row.ino), None)]
            lost.append((row.ino, mark))
    tree.database.write(puts)
    return lost


def _displace(tree: Tree, directory: Directory, name: bytes, ino: int) -> tuple[list[Lost], bool]:
    """Remove the rows that a name has, except those of the inode `ino`. Returns what lost its name, and whether the name had
    no row."""
    as_dir, as_file = tree.find(directory, name)
    rows = {mark_of_directory(name): as_dir, name: as_file}
    lost = forget(tree, directory, {mark: old for mark, old in rows.items() if old and old.ino != ino})
    return lost, as_dir is None and as_file is None


def move(
    tree: Tree,
    place: tuple[Directory, bytes],
    to: tuple[Directory, bytes],
    row: Row,
    also: Sequence[Put] = (),
) -> list[Lost]:
    """Move an inode from one place (directory, mark) to another, with the row `row`. Returns what the new place had. A row
    of another inode in the old place stays."""
    (directory, mark), (above, new) = place, to
    lost, is_new = _displace(tree, above, name_in(new), row.ino)
    puts = [*named(above, new, row), above.state(), directory.state(), *also]
    if (before := tree.row(directory, mark)) is not None and before.ino == row.ino:
        puts.append(("names", directory.key + mark, None))
    tree.database.write(puts)
    above.changed()
    directory.changed()
    if is_new:
        above.names.add(name_in(new))
    return lost


def pin(
    tree: Tree, directory: Directory, name: bytes, mtime_ns: int, etag: str, ino: int, *, is_new: bool = False
) -> tuple[Row, list[Lost]]:
    """Write the row of a name under which a file is being written, with inode `ino`. No listing changes or sweeps it until
    it is written again. `is_new`: the name has no row. Returns the row, and what lost its name."""
    row, lost = Row(PINNED, mtime_ns, 0, etag, ino, False), list[Lost]()
    if not is_new:
        lost, is_new = _displace(tree, directory, name, ino)
    write_pinned(tree.database, directory, name, row)
    if is_new:
        directory.names.add(name)
    return row, lost


def write_pinned(database: WriteBehind, directory: Directory, name: bytes, row: Row) -> None:
    """Write the rows of a name under which a file is being written."""
    database.write([directory.state(), *named(directory, name, row), ("local", directory.key + name, b"")])
    directory.changed()


def sweep(
    tree: Tree, directory: Directory, generation: int, after: bytes, kept: Container[bytes] = ()
) -> tuple[bytes | None, list[Lost]]:
    """Remove those of the next `CHUNK` names behind `after` that listing `generation` did not show, except the directories
    in `kept`.

    Returns the mark to go on from (None at the end), and what was removed."""
    start = directory.key + after + b"\0" if after else directory.key
    rows = tree.database.scan("names", start, end_of(directory.key), CHUNK)
    puts: list[Put] = []
    removed: list[Lost] = []
    for key, data in rows:
        if generation_of(data) >= generation:
            continue
        mark, row = key[NUMBER_BYTES:], decode(data)
        if mark.endswith(b"/") and name_in(mark) in kept:
            puts.append(("names", key, encode(row._replace(generation=generation))))
            continue
        puts += [("names", key, None), ("inodes", inode_key(row.ino), None)]
        removed.append((row.ino, mark))
    if puts:
        tree.database.write(puts)
    return (rows[-1][0][NUMBER_BYTES:] if len(rows) == CHUNK else None), removed


def erase(tree: Tree, ino: int) -> list[int] | None:
    """Remove up to `CHUNK` names of a directory that does not exist any more.

    Returns the inodes of the directories among them; None if no name was left, and the directory's own row is removed."""
    key = inode_key(ino)
    rows = tree.database.scan("names", key, end_of(key), CHUNK)
    if not rows:
        tree.database.write([("directories", key, None)])
        return None
    below: list[int] = []
    puts: list[Put] = []
    for row_key, data in rows:
        row = decode(data)
        number = inode_key(row.ino)
        puts += [("names", row_key, None), ("inodes", number, None), ("kept", number, None)]
        if row_key.endswith(b"/"):
            below.append(row.ino)
    tree.database.write(puts)
    return below
