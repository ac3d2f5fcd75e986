"""A daemon dies at any step of an upload in the background, and of what makes its file one of the cache's.

Each case ends with a close, or a change of a name, from which on the steps are counted (`tests.fuse.deaths`). The next
daemon has to show the same names, bytes and inodes, and the origin gets them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cachefs.fuse.protocol import Op, Setattr
from tests.fuse.kernel import release_in
from tests.fuse.test_repeated import LARGE, World, rename_in, worlds
from tests.fuse.test_writing import flush_in, setattr_in, write_in

pytestmark = pytest.mark.threads

ENDS_WITHIN_S = 0.4
"""By then an upload that was planned has ended, with all that follows. If not, fewer steps are tried."""

Last = tuple[Op, int, bytes]
"""The request from which on the steps are counted: its opcode, inode and arguments."""


def closes(w: World, fh: int) -> Last:
    ino = w.open.pop(fh)
    w.done(Op.FLUSH, ino, flush_in(fh))
    return Op.RELEASE, ino, release_in(fh)


def new(w: World) -> Last:
    return closes(w, w.create("file", b"content")[1])


def new_and_large(w: World) -> Last:
    return closes(w, w.create("file", 2 * LARGE)[1])


def written_again(w: World) -> Last:
    fh = w.open_file(w.save("file", b"before"), os.O_RDWR)
    w.done(Op.WRITE, w.open[fh], write_in(fh, 6, b"more"))
    return closes(w, fh)


def emptied(w: World) -> Last:
    fh = w.open_file(w.save("file", LARGE), os.O_WRONLY | os.O_TRUNC)
    return closes(w, fh)


def another_one_replaced(w: World) -> Last:
    w.save("file", b"before")
    w.save("new", b"after")
    return Op.RENAME, w.dir, rename_in(w.dir, "new", "file")


def one_that_is_open_replaced(w: World) -> Last:
    _, fh = w.create("file", b"before")
    w.save("new", b"after")
    w.done(Op.RENAME, w.dir, rename_in(w.dir, "new", "file"))
    return closes(w, fh)


def renamed_twice(w: World) -> Last:
    w.save("a", b"content")
    w.save("b", b"is replaced")
    w.done(Op.RENAME, w.dir, rename_in(w.dir, "a", "b"))
    return Op.RENAME, w.dir, rename_in(w.dir, "b", "c")


def removed(w: World) -> Last:
    w.save("file")
    w.save("other")
    return Op.UNLINK, w.dir, b"file\0"


def made_in_its_place(w: World) -> Last:
    w.save("file", b"before")
    w.done(Op.UNLINK, w.dir, b"file\0")
    return closes(w, w.create("file", b"after")[1])


def private(w: World) -> Last:
    ino, fh = w.create("file", b"content")
    w.done(Op.SETATTR, ino, setattr_in(Setattr.MODE, mode=0o100600))
    return closes(w, fh)


def set_behind_the_close(w: World) -> Last:
    ino = w.save("file")
    return Op.SETATTR, ino, setattr_in(Setattr.MODE, mode=0o100600)


CASES: list[Callable[[World], Last]] = [
    new,
    new_and_large,
    written_again,
    emptied,
    another_one_replaced,
    one_that_is_open_replaced,
    renamed_twice,
    removed,
    made_in_its_place,
    private,
    set_behind_the_close,
]


def shown(w: World) -> dict[str, tuple[int, int, int]]:
    """Each name's inode, size and mode."""
    found = {name: w.lookup(name) for name in w.listed()}
    return {name: (one.ino, one.size, one.mode) for name, one in found.items() if one is not None}


QUICK = {another_one_replaced, private}
"""The cases that are not left to `scripts/test --all`, with --writeback and without."""

AT_ANY_STEP = [
    pytest.param(
        case,
        writeback,
        marks=[] if case in QUICK else pytest.mark.long,
        id=f"{case.__name__}-{'writeback' if writeback else 'durable'}",
    )
    for case in CASES
    for writeback in (True, False)
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "writeback"), AT_ANY_STEP)
def test_what_was_closed_is_there_whenever_the_daemon_dies(
    tmp_path: Path, case: Callable[[World], Last], writeback: bool
) -> None:
    with worlds(tmp_path, writeback=writeback) as world:
        world.begin("never")
        world.done(*case(world))
        tree, before = world.tree(), {name: one[1:] for name, one in shown(world).items()}
        world.end()
        for step in itertools.count(1):
            world.begin(f"{case.__name__}-{step}")
            op, ino, body = case(world)
            there = {name: one[0] for name, one in shown(world).items()}
            died = world.deaths.die_behind(step, op, ino, body, ENDS_WITHIN_S)
            try:
                assert world.tree() == tree
                assert {name: one[1:] for name, one in shown(world).items()} == before
                if op is not Op.RENAME:
                    assert {name: one[0] for name, one in shown(world).items()}.items() <= there.items()
                world.end()
            except AssertionError as exc:
                exc.add_note(f"the daemon died {died or 'at the end'}, step {step}")
                raise
            if not died:
                break
