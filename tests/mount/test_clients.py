"""Programs that know nothing of us, on a mount; every byte compared with what the store was given."""

from __future__ import annotations

import hashlib
import io
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab.dataset import content, make_image_folder, make_shards
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, in_python, run, succeed

MIB = 1 << 20


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is in the store, as ordinary files: pictures, shards, a table, an archive, …"""
    root = tmp_path_factory.mktemp("tree")
    make_image_folder(root / "images", classes=3, per_class=8)
    make_shards(root / "shards", count=2, size=3_000_000)
    (root / "blob").write_bytes(content("blob", 10 * MIB + 77))
    with zipfile.ZipFile(root / "archive.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((root / "images").rglob("*.jpg")):
            archive.write(path, path.relative_to(root).as_posix())
    with sqlite3.connect(root / "table.sqlite") as database:
        database.execute("create table t (id integer primary key, word text)")
        database.executemany("insert into t values (?, ?)", [(n, f"word {n}") for n in range(20_000)])
        database.execute("create index words on t (word)")
    database.close()
    return root


@pytest.fixture(scope="module")
def mount(tree: Path, module_bucket: Bucket, module_mounted: Mounted) -> Iterator[Mount]:
    module_bucket.store.serve(module_bucket.name, tree)
    yield module_mounted(module_bucket)


@pytest.fixture(autouse=True)
def cold_kernel(mount: Mount) -> None:
    """Each client is answered by the daemon, not by pages that another client left behind."""
    mount.drop_kernel_pages()


def sums(root: Path) -> dict[str, str]:
    found = {}
    for path in sorted(root.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(root).as_posix()] = hashlib.file_digest(file, "md5").hexdigest()
    return found


def same(one: Path, other: Path) -> None:
    assert sums(one) == sums(other)


class TestTools:
    def test_sha256sum(self, tree: Path, mount: Mount) -> None:
        command = ["sh", "-c", "find . -type f -print0 | sort -z | xargs -0 sha256sum"]
        assert succeed(command, cwd=mount.path) == succeed(command, cwd=tree)

    def test_cmp_and_diff(self, tree: Path, mount: Mount) -> None:
        assert run(["diff", "-rq", tree, mount.path]).stdout == ""

    @pytest.mark.parametrize("block", ["4k", "1M", "7777"])
    def test_dd(self, tree: Path, mount: Mount, tmp_path: Path, block: str) -> None:
        count = {"4k": ["count=600"], "7777": ["count=300", "skip=11"]}.get(block, [])
        for source, target in ((mount.path / "blob", "a"), (tree / "blob", "b")):
            succeed(["dd", f"if={source}", f"of={tmp_path / target}", f"bs={block}", "status=none", *count])
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes() != b""

    def test_dd_with_direct_io(self, tree: Path, mount: Mount, tmp_path: Path) -> None:
        succeed(["dd", f"if={mount.path}/blob", f"of={tmp_path}/a", "bs=1M", "iflag=direct", "status=none"])
        assert (tmp_path / "a").read_bytes() == (tree / "blob").read_bytes()

    def test_cat_and_head_and_tail(self, tree: Path, mount: Mount) -> None:
        data = (tree / "blob").read_bytes()
        assert succeed(["cat", mount.path / "blob"], text=False) == data
        assert succeed(["head", "-c", 5000, mount.path / "blob"], text=False) == data[:5000]
        assert succeed(["tail", "-c", 5000, mount.path / "blob"], text=False) == data[-5000:]

    def test_cp_keeps_bytes_and_times(self, tree: Path, mount: Mount, tmp_path: Path) -> None:
        succeed(["cp", "-a", f"{mount.path}/.", tmp_path / "copy"])
        same(tree, tmp_path / "copy")
        for path in (tmp_path / "copy").rglob("*"):
            if path.is_file():
                relative = path.relative_to(tmp_path / "copy")
                assert int(path.stat().st_mtime) == int((mount.path / relative).stat().st_mtime)

    def test_a_copy_can_be_written_and_removed(self, mount: Mount, tmp_path: Path) -> None:
        succeed(["cp", "-r", mount.path / "images", tmp_path / "copy"])
        succeed(["sh", "-c", 'echo x >> "$0"', tmp_path / "copy/class_000/img_00000.jpg"])
        succeed(["rm", "-r", tmp_path / "copy"])

    @pytest.mark.skipif(shutil.which("rsync") is None, reason="rsync is not installed")
    def test_rsync_copies_and_then_finds_no_difference(
        self, tree: Path, mount: Mount, tmp_path: Path
    ) -> None:
        succeed(["rsync", "-a", f"{mount.path}/", tmp_path / "copy"])
        same(tree, tmp_path / "copy")
        command = ["rsync", "-ain", "--checksum", f"{mount.path}/", tmp_path / "copy"]
        assert succeed(command) == ""
        # By size and time alone too: what makes the next rsync cheap.
        assert succeed([word for word in command if word != "--checksum"]) == ""

    def test_tar_writes_and_lists(self, tree: Path, mount: Mount, tmp_path: Path) -> None:
        succeed(["tar", "cf", tmp_path / "all.tar", "-C", mount.path, "."])
        succeed(["tar", "xf", tmp_path / "all.tar", "-C", tmp_path, "--one-top-level=out"])
        same(tree, tmp_path / "out")

    def test_tar_reads_an_archive_on_the_mount(self, tree: Path, mount: Mount, tmp_path: Path) -> None:
        names = succeed(["tar", "tf", mount.path / "shards/shard-000001.tar"])
        assert names == succeed(["tar", "tf", tree / "shards/shard-000001.tar"])
        succeed(["tar", "xf", mount.path / "shards/shard-000001.tar", "-C", tmp_path])
        with tarfile.open(tree / "shards/shard-000001.tar") as archive:
            for member in archive:
                assert (tmp_path / member.name).read_bytes() == archive.extractfile(member).read()  # type: ignore[union-attr]

    def test_zipfile_and_unzip(self, tree: Path, mount: Mount) -> None:
        with zipfile.ZipFile(mount.path / "archive.zip") as archive:
            assert archive.testzip() is None
            for name in reversed(archive.namelist()):
                assert archive.read(name) == (tree / name).read_bytes()

    def test_find_by_size_and_time(self, tree: Path, mount: Mount) -> None:
        for test in (["-size", "+100k"], ["-newermt", "2001-01-01"], ["-name", "*.tar"], ["-empty"]):
            command = ["find", ".", "-type", "f", *test]
            assert sorted(succeed(command, cwd=mount.path).split()) == sorted(
                succeed(command, cwd=tree).split()
            )

    def test_grep_through_everything(self, tree: Path, mount: Mount) -> None:
        command = ["grep", "-rlaF", "word 19999", "."]
        assert succeed(command, cwd=mount.path) == succeed(command, cwd=tree) == "./table.sqlite\n"

    @pytest.mark.parametrize("how", ["mode=ro&immutable=1", "mode=ro"])
    def test_sqlite(self, mount: Mount, how: str) -> None:
        database = sqlite3.connect(f"file:{mount.path}/table.sqlite?{how}", uri=True)
        try:
            assert database.execute("select count(*), max(id) from t").fetchone() == (20_000, 19_999)
            assert database.execute("select id from t where word = 'word 777'").fetchone() == (777,)
            assert database.execute("pragma integrity_check").fetchone() == ("ok",)
            with pytest.raises(sqlite3.OperationalError, match="readonly"):
                database.execute("insert into t values (-1, 'x')")
        finally:
            database.close()

    @pytest.mark.skipif(shutil.which("sqlite3") is None, reason="sqlite3 is not installed")
    def test_the_sqlite_shell(self, mount: Mount) -> None:
        said = succeed(["sqlite3", "-readonly", mount.path / "table.sqlite", "select sum(id) from t"])
        assert said.strip() == "199990000"


class TestArrays:
    def test_numpy_memmap(self, mounted: Mounted, bucket: Bucket) -> None:
        numpy = pytest.importorskip("numpy")
        array = numpy.random.default_rng(1).integers(0, 1 << 31, (700, 1000), dtype=numpy.int32)
        raw = io.BytesIO()
        numpy.save(raw, array)
        bucket.put("array.npy", raw.getvalue())
        path = mounted(bucket).path / "array.npy"
        mapped = numpy.load(path, mmap_mode="r")
        for row in (699, 0, 350, 351, 17):
            assert (mapped[row] == array[row]).all()
        assert (mapped[:, 5] == array[:, 5]).all()
        assert (numpy.load(path) == array).all()
        flat = numpy.memmap(path, dtype=numpy.uint8, mode="r")
        assert flat.tobytes() == raw.getvalue()
        with pytest.raises(OSError):
            numpy.memmap(path, dtype=numpy.uint8, mode="r+")
        del mapped, flat

    def test_safetensors(self, mounted: Mounted, bucket: Bucket) -> None:
        numpy = pytest.importorskip("numpy")
        safetensors = pytest.importorskip("safetensors")
        safe_numpy = pytest.importorskip("safetensors.numpy")
        tensors = {
            f"layer.{n}": numpy.random.default_rng(n).random((64, 1024), dtype=numpy.float32)
            for n in range(20)
        }
        bucket.put("model.safetensors", safe_numpy.save(tensors))
        path = mounted(bucket).path / "model.safetensors"
        with safetensors.safe_open(path, framework="numpy") as opened:
            for name in sorted(tensors, reverse=True):
                assert (opened.get_tensor(name) == tensors[name]).all()
            part = opened.get_slice("layer.7")[10:20, 100:200]
            assert (part == tensors["layer.7"][10:20, 100:200]).all()
        loaded = safe_numpy.load_file(path)
        assert all((loaded[name] == tensors[name]).all() for name in tensors)

    def test_parquet_through_pyarrow_and_pandas(self, mounted: Mounted, bucket: Bucket) -> None:
        pandas = pytest.importorskip("pandas")
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table(
            {"id": range(200_000), "text": [f"row {n * 7919 % 200_003}" for n in range(200_000)]}
        )
        raw = io.BytesIO()
        parquet.write_table(table, raw, row_group_size=10_000)
        bucket.put("t/part-0.parquet", raw.getvalue())
        bucket.put("t/part-1.parquet", raw.getvalue())
        place = mounted(bucket).path
        assert parquet.read_table(place / "t/part-0.parquet") == table
        assert parquet.read_table(place / "t/part-0.parquet", memory_map=True) == table
        groups = parquet.ParquetFile(place / "t/part-1.parquet")
        assert groups.read_row_group(13, columns=["id"]) == table.select(["id"]).slice(130_000, 10_000)
        frame = pandas.read_parquet(place / "t")
        assert len(frame) == 400_000
        assert frame["id"][:200_000].tolist() == list(range(200_000))


@ONE_BACKEND
class TestTraining:
    @pytest.mark.long
    def test_webdataset_reads_shards(self, tree: Path, mount: Mount) -> None:
        webdataset = pytest.importorskip("webdataset")
        urls = [f"file:{mount.path}/shards/shard-{n:06}.tar" for n in range(2)]
        samples = {
            sample["__key__"]: sample
            for sample in webdataset.WebDataset(urls, shardshuffle=False, empty_check=False)
        }
        expected = 0
        for shard in sorted((tree / "shards").iterdir()):
            with tarfile.open(shard) as archive:
                for member in archive:
                    key, _, kind = member.name.partition(".")
                    assert samples[key][kind] == archive.extractfile(member).read()  # type: ignore[union-attr]
                    expected += 1
        assert len(samples) == expected // 2

    @pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
    def test_a_dataloader_with_workers_reads_plain_paths(
        self, tree: Path, mount: Mount, method: str, tmp_path: Path
    ) -> None:
        pytest.importorskip("torch")
        program = tmp_path / "train.py"
        program.write_text(LOADER)
        said = succeed([sys.executable, program, mount.path / "images", method], timeout=80)
        expected = sorted(
            f"{path.relative_to(tree / 'images')} {hashlib.md5(path.read_bytes()).hexdigest()}"
            for path in (tree / "images").rglob("*.jpg")
        )
        assert sorted(said.splitlines()) == sorted(expected * 2)

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_processes_of_a_pool_read_plain_paths(
        self, tree: Path, mount: Mount, method: str, tmp_path: Path
    ) -> None:
        program = tmp_path / "pool.py"
        program.write_text(POOL)
        said = succeed([sys.executable, program, mount.path / "images", method], timeout=80)
        assert dict(line.split() for line in said.splitlines()) == sums(tree / "images")

    def test_a_forked_child_shares_its_parents_descriptor(self, tree: Path, mount: Mount) -> None:
        code = """
import hashlib, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
size = os.fstat(fd).st_size
for half in (0, 1):
    if not os.fork():
        data = b"".join(os.pread(fd, 50000, at) for at in range(half * 50000, size, 100000))
        os.write(1, f"{half} {hashlib.md5(data).hexdigest()}\\n".encode())
        os._exit(0)
for _ in range(2):
    assert os.wait()[1] == 0
"""
        said = in_python(code, mount.path / "blob")
        assert sorted(said.splitlines()) == sorted(in_python(code, tree / "blob").splitlines())

    def test_readers_that_are_killed_disturb_nobody(self, tree: Path, mount: Mount) -> None:
        readers = [
            subprocess.Popen(["sh", "-c", 'while :; do cat "$0" >/dev/null; done', mount.path / "blob"])
            for _ in range(4)
        ]
        for reader in readers:
            mount.drop_kernel_pages()
            reader.kill()
            reader.wait(timeout=10)
        assert (mount.path / "blob").read_bytes() == (tree / "blob").read_bytes()
        assert (mount.settled(), mount.status()["open_files"])[1] == 0


POOL = """
import hashlib, multiprocessing, pathlib, sys

def read(path):
    return f"{path.relative_to(sys.argv[1])} {hashlib.md5(path.read_bytes()).hexdigest()}"

if __name__ == "__main__":
    root = pathlib.Path(sys.argv[1])
    with multiprocessing.get_context(sys.argv[2]).Pool(4) as pool:
        for line in pool.imap_unordered(read, sorted(root.rglob("*.jpg"))):
            print(line)
"""

LOADER = """
import hashlib, pathlib, sys
import torch

class Images(torch.utils.data.Dataset):
    def __init__(self, root):
        self.root = pathlib.Path(root)
        self.paths = sorted(self.root.rglob("*.jpg"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        path = self.paths[index]
        data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        return f"{path.relative_to(self.root)} {hashlib.md5(data.numpy().tobytes()).hexdigest()}"

if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(
        Images(sys.argv[1]), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context=sys.argv[2]
    )
    for epoch in range(2):
        for batch in loader:
            print(*batch, sep="\\n")
"""
