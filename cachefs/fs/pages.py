"""Writing down what an origin said: a page of a listing, one answer, the end of names that are gone.

Each function writes once, while its caller holds `Tree.writing`, so that no other task writes in between. Those that write
many rows run in a worker thread; what it finds out besides is returned, for the trio thread to act on.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cachefs.base.behind import WriteBehind
from cachefs.base.database import Put
from cachefs.fs.inodes import join, low_of, next_low, next_number, number_of
from cachefs.fs.keys import mark_of_directory, name_in
from cachefs.fs.rows import PINNED, Row, decode, encode, generation_of
from cachefs.fs.tree import Directory, end_of, inode_key, inode_of

if TYPE_CHECKING:
    from cachefs.origin.protocol import ObjectInfo

CHUNK = 1000
"""Rows of one transaction: a few milliseconds during which other writers wait. Measured: 5 µs a row."""


@dataclass(slots=True)
class Written:
    """What a page did. `inos` are the names it showed, in its order. `changed` are (inode, name) of what is not what it
    was before. `conflicts` counts files hidden by a directory of the same name."""

    inos: list[int] = field(default_factory=list)
    changed: list[tuple[int, bytes]] = field(default_factory=list)
    conflicts: int = 0


def write_names(
    database: WriteBehind,
    directory: Directory,
    entries: list[tuple[bytes, ObjectInfo | None]],
    generation: int,
    extra: list[Put],
    reserved: Container[int] = (),
) -> Written:
    """Write (mark, object) `entries` as seen by listing `generation`; the object is None for directories. No new name gets
    a number that is `reserved`."""
    written = Written()
    puts: list[Put] = list(extra)
    names = [name_in(mark) for mark, _ in entries]
    before = database.get_many("names", [directory.key + mark for mark, _ in entries])
    as_directories = database.get_many(
        "names",
        [
            directory.key + (name if info is None else name + b"/")
            for name, (_, info) in zip(names, entries, strict=True)
        ],
    )
    unknown = [
        name
        for name, old, dir_row in zip(names, before, as_directories, strict=True)
        if not old and not dir_row
    ]
    lows = _allocate(database, directory, unknown, reserved)
    files_here: set[bytes] = set()
    for (mark, info), name, old_data, directory_data in zip(
        entries, names, before, as_directories, strict=True
    ):
        old = decode(old_data) if old_data else None
        dir_row = decode(directory_data) if directory_data else None
        hint = old or dir_row
        low = hint.low if hint else lows[name]
        if info is None:
            row = Row(generation, old.mtime_ns if old else 0, 0, "", low)
            if name in files_here or (dir_row and dir_row.generation == generation):
                written.conflicts += 1
        else:
            files_here.add(name)
            if info.size >= 0:
                row = Row(generation, info.mtime_ns, info.size, info.etag, low)
            elif old:
                row = Row(generation, info.mtime_ns, old.size, old.etag, low, False)
            else:
                row = Row(generation, info.mtime_ns, 0, "", low, False)
            if dir_row and dir_row.generation == generation:
                written.conflicts += 1
        ino = inode_of(directory, name, row)
        written.inos.append(ino)
        if old is None and (info is None or dir_row is None):
            puts.append(("inodes", inode_key(ino), mark))
            if dir_row is not None:
                written.changed.append((ino, name))
        if old is not None and (old.known or old.etag) and (old.size, old.etag) != (row.size, row.etag):
            written.changed.append((ino, name))
        puts.append(("names", directory.key + mark, encode(row)))
    database.write(puts)
    return written


def _allocate(
    database: WriteBehind, directory: Directory, names: list[bytes], reserved: Container[int]
) -> dict[bytes, int | None]:
    """A lower inode part for each new name; None where it is the hash itself, which is nearly always."""
    wanted = {name: low_of(name) for name in dict.fromkeys(names)}
    keys = [inode_key(join(directory.number, low)) for low in wanted.values()]
    result: dict[bytes, int | None] = {}
    taken: set[int] = set()
    for (name, first), holder in zip(wanted.items(), database.get_many("inodes", keys), strict=True):
        low = first
        while (
            low in taken
            or (holder is not None and name_in(holder) != name)
            or join(directory.number, low) in reserved
        ):
            low = next_low(low)
            holder = database.get("inodes", inode_key(join(directory.number, low)))
        taken.add(low)
        result[name] = None if low == first else low
    return result


def write_answer(
    database: WriteBehind,
    directory: Directory,
    name: bytes,
    answer: ObjectInfo | bool,
    generation: int,
    reserved: Container[int] = (),
    also: Sequence[Put] = (),
) -> Written:
    """Write what was said of one name: an object, True for a directory, False for neither."""
    extra: list[Put] = [directory.state(), *also]
    as_dir, as_file = database.get_many(
        "names", (directory.key + mark_of_directory(name), directory.key + name)
    )
    if answer is True:
        entries: list[tuple[bytes, ObjectInfo | None]] = [(mark_of_directory(name), None)]
        generation = _newer(generation, as_dir)
        written = write_names(database, directory, entries, generation, extra, reserved)
        directory.changed()
        return written
    if answer is not False:
        generation = _newer(generation, as_file)
        if as_dir:
            # It was a directory and is a file now: the row goes, the number stays with the name.
            old = decode(as_dir)
            ino = inode_of(directory, name, old)
            row = Row(generation, answer.mtime_ns, answer.size, answer.etag, old.low)
            extra += [
                ("names", directory.key + mark_of_directory(name), None),
                ("names", directory.key + name, encode(row)),
                ("inodes", inode_key(ino), name),
            ]
            database.write(extra)
            written = Written([ino], [(ino, name)])
        else:
            written = write_names(database, directory, [(name, answer)], generation, extra, reserved)
        directory.changed()
        return written
    written = Written()
    for mark, data in ((mark_of_directory(name), as_dir), (name, as_file)):
        if data:
            ino = inode_of(directory, name, decode(data))
            extra += [("names", directory.key + mark, None), ("inodes", inode_key(ino), None)]
            written.changed.append((ino, name))
    database.write(extra)
    directory.changed()
    return written


def _newer(generation: int, data: bytes | None) -> int:
    """The newer one of two listings: `generation`, and that which showed the row, if there is one."""
    shown = generation if data is None else generation_of(data)
    return generation if shown == PINNED else max(generation, shown)


def pin(
    database: WriteBehind,
    directory: Directory,
    name: bytes,
    mtime_ns: int,
    etag: str,
    reserved: Container[int],
) -> tuple[int, Row]:
    """A file is being written under this name: its number, and its row, which no listing changes or sweeps until it is
    written again."""
    as_dir, as_file = database.get_many(
        "names", (directory.key + mark_of_directory(name), directory.key + name)
    )
    hint = as_dir or as_file
    low = decode(hint).low if hint else _allocate(database, directory, [name], reserved)[name]
    row = Row(PINNED, mtime_ns, 0, etag, low, False)
    write_pinned(database, directory, name, row)
    return inode_of(directory, name, row), row


def write_pinned(database: WriteBehind, directory: Directory, name: bytes, row: Row) -> None:
    """The rows of a name under which a file is being written."""
    database.write(
        [
            directory.state(),
            ("names", directory.key + mark_of_directory(name), None),
            ("names", directory.key + name, encode(row)),
            ("inodes", inode_key(inode_of(directory, name, row)), name),
            ("local", directory.key + name, b""),
        ]
    )
    directory.changed()


def sweep(
    database: WriteBehind, directory: Directory, generation: int, after: bytes, kept: Container[bytes] = ()
) -> tuple[bytes | None, list[tuple[int, bytes]]]:
    """Remove from the next `CHUNK` names behind `after` those that listing `generation` did not show, but for directories
    that are `kept`.

    Returns where to go on (None at the end) and the (inode, mark) removed."""
    start = directory.key + after + b"\0" if after else directory.key
    rows = database.scan("names", start, end_of(directory.key), CHUNK)
    puts: list[Put] = []
    gone: list[tuple[int, bytes]] = []
    for key, data in rows:
        if generation_of(data) >= generation:
            continue
        mark = key[4:]
        name = name_in(mark)
        if name in kept and mark.endswith(b"/"):
            puts.append(("names", key, encode(decode(data)._replace(generation=generation))))
            continue
        ino = inode_of(directory, name, decode(data))
        other = name if mark.endswith(b"/") else mark_of_directory(name)
        dir_row = database.get("names", directory.key + other)
        puts.append(("names", key, None))
        if dir_row is None or (other == name and generation_of(dir_row) < generation):
            puts.append(("inodes", inode_key(ino), None))
            gone.append((ino, mark))
        elif other == name:  # the directory is gone and a file of its name takes its place
            puts.append(("inodes", inode_key(ino), name))
            gone.append((ino, mark))
    if puts:
        database.write(puts)
    return (rows[-1][0][4:] if len(rows) == CHUNK else None), gone


def erase(database: WriteBehind, number: int) -> list[int] | None:
    """Remove up to `CHUNK` names of a directory that is gone.

    Returns the numbers of the directories among them; None when nothing was left and the directory itself is removed."""
    key = number.to_bytes(4, "big")
    rows = database.scan("names", key, end_of(key), CHUNK)
    if not rows:
        start, stop = inode_key(join(number, 0)), inode_key(join(number + 1, 0))
        database.write([("directories", key, None)], [("inodes", start, stop)])
        return None
    below: list[int] = []
    puts: list[Put] = []
    for row_key, data in rows:
        mark = row_key[4:]
        low = decode(data).low
        ino = join(number, low_of(name_in(mark)) if low is None else low)
        puts += [("names", row_key, None), ("inodes", inode_key(ino), None)]
        if mark.endswith(b"/"):
            below.append(ino)
    database.write(puts)
    return [n for ino in below if (n := number_written(database, ino)) is not None]


def number_written(database: WriteBehind, ino: int) -> int | None:
    """The number of a directory that something was ever written about."""
    number = number_of(ino)
    while (state := database.get("directories", number.to_bytes(4, "big"))) is not None:
        if int.from_bytes(state[:8], "big") == ino:
            return number
        number = next_number(number)
    return None
