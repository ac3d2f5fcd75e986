"""Programs that know nothing of us write to a mount; every byte compared with what is at the store afterwards."""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shutil
import sqlite3
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab.dataset import content, make_image_folder
from tests.conftest import needs
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, in_python, run, succeed
from tests.mount.test_clients import same
from tests.mount.test_writing import Place
from tests.mount.written import stored

MIB = 1 << 20


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tree")
    make_image_folder(root / "images", classes=3, per_class=5)
    (root / "blob").write_bytes(content("blob", 10 * MIB + 77))
    (root / "empty").touch()
    (root / "with space").write_bytes(b"x")
    return root


@pytest.fixture(scope="module")
def shared(module_mounted: Mounted, module_bucket: Bucket) -> Iterator[Mount]:
    yield module_mounted(module_bucket, read_only=False)


@pytest.fixture
def place(shared: Mount, module_bucket: Bucket) -> Place:
    return Place(shared, module_bucket)


def stored_as(place: Place, below: str, tree: Path) -> None:
    """Assert that the store has exactly the files of a local tree below a directory of the place."""
    expected = {path.relative_to(tree).as_posix(): path for path in tree.rglob("*") if path.is_file()}
    prefix = f"{below}/" if below else ""
    found = {
        name.removeprefix(prefix)
        for name in place.names()
        if name.startswith(prefix) and not name.endswith("/")
    }
    assert found == expected.keys()
    for name, path in expected.items():
        assert place.stored(prefix + name) == path.read_bytes(), name


class TestTools:
    def test_cp(self, place: Place, tree: Path) -> None:
        succeed(["cp", "-a", tree, place.path / "copy"])
        same(tree, place.path / "copy")
        stored_as(place, "copy", tree)
        for path in tree.rglob("*"):
            if path.is_file():
                copy = place.path / "copy" / path.relative_to(tree)
                assert copy.stat().st_mtime_ns == path.stat().st_mtime_ns
                assert copy.stat().st_mode == path.stat().st_mode

    def test_mv_into_within_and_out(self, place: Place, tree: Path, tmp_path: Path) -> None:
        shutil.copytree(tree, tmp_path / "in")
        succeed(["mv", tmp_path / "in", place.path / "a"])
        succeed(["mv", place.path / "a", place.path / "b"])
        stored_as(place, "b", tree)
        succeed(["mv", place.path / "b", tmp_path / "out"])
        same(tree, tmp_path / "out")
        assert place.names() == []

    def test_tar(self, place: Place, tree: Path, tmp_path: Path) -> None:
        succeed(["tar", "cf", tmp_path / "all.tar", "-C", tree, "."])
        (place.path / "out").mkdir()
        succeed(["tar", "xf", tmp_path / "all.tar", "-C", place.path / "out"])
        stored_as(place, "out", tree)
        succeed(["tar", "cf", place.path / "again.tar", "-C", place.path / "out", "."])
        with tarfile.open(fileobj=io.BytesIO(place.stored("again.tar"))) as archive:
            blob = archive.extractfile("./blob")
            assert blob is not None and blob.read() == (tree / "blob").read_bytes()

    def test_zip(self, place: Place, tree: Path) -> None:
        with zipfile.ZipFile(place.path / "z.zip", "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sorted(tree.rglob("*.jpg")):
                archive.write(path, path.relative_to(tree).as_posix())
        with zipfile.ZipFile(place.path / "z.zip", "a") as archive:
            archive.writestr("more", b"later")
        with zipfile.ZipFile(io.BytesIO(place.stored("z.zip"))) as archive:
            assert archive.testzip() is None
            assert archive.read("more") == b"later"

    @needs("rsync")
    def test_rsync(self, place: Place, tree: Path, tmp_path: Path) -> None:
        shutil.copytree(tree, tmp_path / "in")
        command = ["rsync", "-a", "--delete", f"{tmp_path}/in/", f"{place.path}/copy/"]
        succeed(command)
        stored_as(place, "copy", tmp_path / "in")
        (tmp_path / "in/with space").unlink()
        (tmp_path / "in/new").write_bytes(b"new")
        with place.mount.counting() as counts:
            succeed(command)
        stored_as(place, "copy", tmp_path / "in")
        assert counts["origin_put"] <= 2  # the new file, and a marker perhaps: nothing is copied again
        succeed(["rsync", "-a", "--inplace", f"{tmp_path}/in/", f"{place.path}/copy/"])
        stored_as(place, "copy", tmp_path / "in")

    @pytest.mark.parametrize("options", [["conv=fsync"], ["oflag=direct"], ["oflag=append", "conv=notrunc"]])
    def test_dd(self, place: Place, tree: Path, options: list[str]) -> None:
        command = ["dd", f"if={tree}/blob", f"of={place.path}/f", "bs=1M", "count=6", "status=none", *options]
        succeed(command)
        data = (tree / "blob").read_bytes()[: 6 * MIB]
        assert place.stored("f") == data
        succeed(command)
        assert place.stored("f") == (data * 2 if "oflag=append" in options else data)

    def test_editing_in_place(self, place: Place) -> None:
        (place.path / "f").write_text("one\ntwo\n")
        succeed(["sed", "-i", "s/two/three/", place.path / "f"])
        assert place.stored("f") == b"one\nthree\n"
        succeed(["sh", "-c", "sort -r f -o f && install -m 755 f g && truncate -s 3 f"], cwd=place.path)
        assert (place.stored("f"), place.stored("g")) == (b"thr", b"three\none\n")
        assert sorted(place.names()) == ["f", "g"]

    @needs("git")
    def test_git(self, place: Place, tree: Path, tmp_path: Path) -> None:
        git = ["git", "-c", "user.name=n", "-c", "user.email=e@e", "-c", "init.defaultBranch=main"]
        shutil.copytree(tree / "images", tmp_path / "repo")
        for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
            succeed([*git, *command], cwd=tmp_path / "repo")
        succeed([*git, "clone", "-q", f"file://{tmp_path}/repo", place.path / "clone"], timeout=80)
        clone = place.path / "clone"
        succeed([*git, "fsck", "--strict"], cwd=clone)
        assert succeed([*git, "status", "--porcelain"], cwd=clone) == ""
        (clone / "new").write_bytes(b"new")
        for command in (["add", "new"], ["commit", "-qm", "two"], ["fsck", "--strict"]):
            succeed([*git, *command], cwd=clone)
        succeed([*git, "clone", "-q", clone, tmp_path / "back"])
        assert (tmp_path / "back/new").read_bytes() == b"new"

    @ONE_BACKEND
    @needs("fio")
    def test_fio_verifies_what_it_wrote(self, place: Place) -> None:
        for options in (["--rw=randwrite", "--bs=4k"], ["--rw=write", "--bs=512k", "--end_fsync=1"]):
            succeed(
                [
                    "fio",
                    "--name=job",
                    f"--directory={place.path}",
                    "--size=8M",
                    "--verify=crc32c",
                    "--verify_fatal=1",
                    "--verify_state_save=0",
                    "--ioengine=psync",
                    "--numjobs=2",
                    *options,
                ],
                timeout=80,
            )


class TestLibraries:
    def test_sqlite(self, place: Place) -> None:
        path = place.path / "table.sqlite"
        database = sqlite3.connect(path)
        database.execute("create table t (id integer primary key, word text)")
        with database:
            database.executemany("insert into t values (?, ?)", [(n, f"word {n}") for n in range(2000)])
        with pytest.raises(RuntimeError), database:
            database.execute("delete from t")
            raise RuntimeError("rolled back")
        with database:
            database.execute("update t set word = 'changed' where id = 7")
        database.close()
        assert place.names() == ["table.sqlite"]
        there = sqlite3.connect(":memory:")
        there.deserialize(place.stored("table.sqlite"))
        assert there.execute("select count(*) from t").fetchone() == (2000,)
        assert there.execute("select word from t where id = 7").fetchone() == ("changed",)
        assert there.execute("pragma integrity_check").fetchone() == ("ok",)

    def test_numpy(self, place: Place) -> None:
        numpy = pytest.importorskip("numpy")
        array = numpy.arange(500_000, dtype="f4")
        numpy.save(place.path / "a.npy", array)
        numpy.savez(place.path / "a.npz", array=array)
        mapped = numpy.lib.format.open_memmap(place.path / "m.npy", "w+", "f4", (500_000,))
        mapped[:] = array
        mapped.flush()
        del mapped
        assert (numpy.load(io.BytesIO(place.stored("a.npy"))) == array).all()
        assert (numpy.load(io.BytesIO(place.stored("a.npz")))["array"] == array).all()
        assert (numpy.load(place.path / "m.npy") == array).all()

    def test_safetensors(self, place: Place) -> None:
        numpy = pytest.importorskip("numpy")
        safe_numpy = pytest.importorskip("safetensors.numpy")
        tensors = {f"layer.{n}": numpy.full((300, 300), n, "f4") for n in range(10)}
        safe_numpy.save_file(tensors, place.path / "model.safetensors")
        loaded = safe_numpy.load(place.stored("model.safetensors"))
        assert all((loaded[name] == tensors[name]).all() for name in tensors)

    def test_parquet(self, place: Place) -> None:
        pandas = pytest.importorskip("pandas")
        pytest.importorskip("pyarrow")
        frame = pandas.DataFrame({"id": range(50_000), "text": [f"row {n}" for n in range(50_000)]})
        frame.to_parquet(place.path / "t.parquet")
        frame.to_csv(place.path / "t.csv", index=False)
        assert pandas.read_parquet(io.BytesIO(place.stored("t.parquet"))).equals(frame)
        assert pandas.read_csv(io.BytesIO(place.stored("t.csv"))).equals(frame)
        assert pandas.read_parquet(place.path / "t.parquet").equals(frame)

    @pytest.mark.long
    def test_a_checkpoint_saved_beside_and_renamed_over(self, place: Place) -> None:
        pytest.importorskip("torch")
        code = """
import os, sys, torch
for step in range(3):
    state = {"step": step, "w": torch.full((700, 700), float(step))}
    torch.save(state, "ckpt.tmp")
    os.replace("ckpt.tmp", "ckpt.pt")
    assert torch.load("ckpt.pt")["step"] == step
    assert torch.load("ckpt.pt", mmap=True)["w"][5, 5] == step
"""
        in_python(code, cwd=place.path, timeout=80)
        assert place.names() == ["ckpt.pt"]
        assert place.stored("ckpt.pt") == (place.path / "ckpt.pt").read_bytes()

    @pytest.mark.long
    @ONE_BACKEND
    def test_pip(self, place: Place, tmp_path: Path) -> None:
        wheel = _wheel(tmp_path)
        options = ["--no-index", "--no-deps", "--quiet", "--disable-pip-version-check"]
        succeed([sys.executable, "-m", "pip", "install", *options, "--target", place.path / "lib", wheel])
        code = "import sys; sys.path.insert(0, sys.argv[1]); import tiny; print(tiny.answer())"
        assert in_python(code, place.path / "lib") == "42\n"
        assert stored(place.bucket, f"{place.name}/lib/tiny/__init__.py") == TINY.encode()


TINY = "def answer():\n    return 42\n"


def _wheel(directory: Path) -> Path:
    """A package as pip takes it, made without a build tool."""
    files = {
        "tiny/__init__.py": TINY,
        "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text)}\n"
    path = directory / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr("tiny-1.0.dist-info/RECORD", record + "tiny-1.0.dist-info/RECORD,,\n")
    return path


ATTRIBUTES = """
import os, sys
for path in sys.argv[1:]:
    for name in ("user.cachefs.etag", "user.cachefs.key", "user.cachefs.cached"):
        os.setxattr(path, name, b"from an earlier mount")
"""


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """A local tree with the attributes that an earlier `cp -a` took along out of a mount."""
    (tmp_path / "marked/d").mkdir(parents=True)
    for name in ("f", "d/g"):
        (tmp_path / "marked" / name).write_bytes(name.encode())
        in_python(ATTRIBUTES, tmp_path / "marked" / name)
    return tmp_path / "marked"


@pytest.mark.parametrize(
    "copy",
    [
        pytest.param(["rsync", "-aX"], marks=needs("rsync")),
        ["cp", "-a"],
        ["cp", "-r", "--preserve=xattr"],
    ],
    ids=lambda command: command[0] + command[-1],
)
def test_attributes_of_ours_are_no_trouble_to_who_copies(
    place: Place, marked: Path, tmp_path: Path, copy: list[str]
) -> None:
    """Into the mount where they are, and out of it where they must not be."""
    succeed([*copy, f"{marked}/", place.path / "in"])
    succeed([*copy, f"{place.path}/in", tmp_path / "out"])
    found = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert len(found) == 2
    for path in found:
        assert os.listxattr(path) == []
    (inside,) = (place.path / "in").rglob("f")
    assert os.getxattr(inside, "user.cachefs.key").endswith(b"/f")
    os.removexattr(inside, "user.cachefs.key")
    assert os.getxattr(inside, "user.cachefs.key").endswith(b"/f")


@needs("tar")
def test_tar_keeps_no_attributes_of_ours(place: Place, marked: Path, tmp_path: Path) -> None:
    for source, to in ((marked, place.path), (place.path, tmp_path)):
        done = run(["tar", "--xattrs", "-C", source, "-cf", to / "all.tar", "f", "d"])
        assert (done.returncode, done.stderr) == (0, "")
        done = run(["tar", "--xattrs", "--xattrs-include=*", "-C", to, "-xf", to / "all.tar"])
        assert (done.returncode, done.stderr) == (0, "")
    assert os.listxattr(tmp_path / "f") == []


def test_df_shows_room_for_names(place: Place) -> None:
    assert succeed(["df", "--output=ipcent", place.path]).split()[-1] in ("0%", "1%")
