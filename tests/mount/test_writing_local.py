"""Writing to a directory of this machine: trees are the same through the mount and in the directory, empty ones, too."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.conftest import ONE_BACKEND, Mounted
from tests.mount.mounts import Mount, succeed

pytestmark = ONE_BACKEND


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    root.mkdir()
    return root


@pytest.fixture
def mount(mounted: Mounted, source: Path) -> Mount:
    return mounted(f"file://{source}", read_only=False)


def tree(root: Path) -> dict[str, bytes | None]:
    """What is below: bytes of files, None for directories."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
    }


TREE: dict[str, bytes | None] = {"sub": None, "sub/deep": None, "empty": None, "f": b"bytes"}


def make(at: Path) -> None:
    (at / "sub/deep").mkdir(parents=True)
    (at / "empty").mkdir()
    (at / "f").write_bytes(b"bytes")


def below(name: str) -> dict[str, bytes | None]:
    return {name: None, **{f"{name}/{path}": data for path, data in TREE.items()}}


@pytest.mark.parametrize("maker", ["mount", "source"])
def test_a_tree_moves_whole(mount: Mount, source: Path, maker: str) -> None:
    make((mount.path if maker == "mount" else source) / "t")
    succeed(["mv", mount.path / "t", mount.path / "t2"])
    assert tree(source) == tree(mount.path) == below("t2")


@pytest.mark.parametrize("maker", ["mount", "source"])
def test_a_tree_is_removed_whole(mount: Mount, source: Path, maker: str) -> None:
    make((mount.path if maker == "mount" else source) / "t")
    succeed(["rm", "-r", mount.path / "t"])
    assert tree(source) == tree(mount.path) == {}


def test_an_empty_directory_is_one(mount: Mount, source: Path) -> None:
    (source / "e1").mkdir()
    (source / "e2").mkdir()
    os.utime(source / "e1", (1e9, 1e9))
    assert os.listdir(mount.path / "e1") == []
    assert os.stat(mount.path / "e1").st_mtime == 1e9
    succeed(["mv", "-T", mount.path / "e1", mount.path / "e9"])
    (mount.path / "e2" / "x").touch()
    assert tree(source) == tree(mount.path) == {"e9": None, "e2": None, "e2/x": b""}


def test_what_a_directory_holds_beside_names_of_ours_is_not_lost(mount: Mount, source: Path) -> None:
    """A link that leads out of the source is no name here: the directory of it stays, and what is behind it."""
    (source.parent / "outside").write_bytes(b"kept")
    (source / "d").mkdir()
    (source / "d" / "f").write_bytes(b"moved")
    (source / "d" / "out").symlink_to(source.parent / "outside")
    succeed(["mv", mount.path / "d", mount.path / "d2"])
    assert tree(source) == {"d": None, "d/out": b"kept", "d2": None, "d2/f": b"moved"}


def test_uploads_leave_nothing_of_their_own_behind(mount: Mount, source: Path) -> None:
    data = os.urandom(20 << 20)
    with mount.counting() as counts:
        (mount.path / "large").write_bytes(data)
    assert counts["origin_put_part"] == 3
    assert tree(source) == {"large": data}


def test_a_file_that_is_written_and_renamed_is_not_fetched(mount: Mount) -> None:
    """Linking and renaming set the ctime, which is part of a version: the mount knows the one after them."""
    data = os.urandom(3 << 20)
    (mount.path / "0").write_bytes(data)
    with mount.counting() as counts:
        for number in range(3):
            mount.refresh()
            mount.drop_kernel_pages()
            assert (mount.path / f"{number}").read_bytes() == data
            (mount.path / f"{number}").rename(mount.path / f"{number + 1}")
    assert "origin_get" not in counts


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "make": lambda a, b: a.mkdir(),
    "write": lambda a, b: a.write_bytes(str(b.name).encode()),
    "unlink": lambda a, b: a.unlink(),
    "rmdir": lambda a, b: a.rmdir(),
    "rename": lambda a, b: a.rename(b),
    "remove": lambda a, b: shutil.rmtree(a),
}


def test_whatever_is_done_to_a_tree_is_what_a_local_disk_would_do(
    mount: Mount, source: Path, tmp_path: Path
) -> None:
    """The same changes at random on the mount and on a directory beside it: the same errors, and the same trees."""
    dice, model = random.Random(7), tmp_path / "model"
    model.mkdir()
    done = 0
    for _ in range(250):
        name = dice.choice(["make", "make", "write", *CHANGES])
        paths = ["/".join(dice.choices("abc", k=dice.choice((1, 2, 2, 3)))) for _ in range(2)]
        said: list[int | None] = []
        for root in (model, mount.path):
            try:
                CHANGES[name](root / paths[0], root / paths[1])
                said.append(None)
            except OSError as exc:
                said.append(exc.errno)
        assert said[0] == said[1], (name, paths)
        done += said[0] is None
        assert tree(source) == tree(model), (name, paths)
    assert tree(mount.path) == tree(model)
    assert done > 50
