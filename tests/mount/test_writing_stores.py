"""Writing through a mount to stores that are not the lab's, and by another client: what another mount then reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.lab.dataset import content
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, in_python
from tests.mount.written import keys
from tests.origin.servers import Azurite, Moto, Server

MIB = 1 << 20
LARGE = content("large", 20 * MIB + 7)

pytestmark = ONE_BACKEND


@pytest.fixture(params=[pytest.param(Moto, marks=pytest.mark.long), Azurite])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    made: Server = request.param()
    yield made
    made.stop()


def files(path: Path) -> dict[str, bytes]:
    found = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in found}


def works(make: Callable[..., Mount]) -> None:
    """`make` gives a mount of an empty store, which another one of its making then reads."""
    path = make(read_only=False).path
    (path / "d/deep").mkdir(parents=True)
    (path / "small").write_bytes(b"small")
    (path / "d/large").write_bytes(LARGE)
    (path / "d/deep/f").write_bytes(b"f")
    with (path / "small").open("r+b") as file:
        file.seek(2)
        file.write(b"ar")
    with (path / "saved.tmp").open("wb") as file:
        file.write(LARGE)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path / "saved.tmp", path / "small")
    (path / "gone").write_bytes(b"x")
    (path / "gone").unlink()
    (path / "d").rename(path / "moved")
    wanted = {"small": LARGE, "moved/large": LARGE, "moved/deep/f": b"f"}
    assert files(path) == wanted
    other = make(read_only=True).path
    assert files(other) == wanted and sorted(os.listdir(other)) == ["moved", "small"]


def test_another_store(mounted: Mounted, server: Server) -> None:
    def make(**options: Any) -> Mount:
        mount = mounted(server.url, start=False, **server.options, **options)
        mount.env = {**mount.env, **server.env}
        return mount.start()

    works(make)


@pytest.mark.long
def test_another_client(mounted: Mounted, bucket: Bucket) -> None:
    works(lambda **options: mounted(bucket, client="fsspec", timeout=30, **options))
    assert [key for key in keys(bucket) if not key.endswith("/")] == ["moved/deep/f", "moved/large", "small"]


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"writeback": True}], ids=["durable", "writeback"])
def test_a_distributed_checkpoint(mounted: Mounted, bucket: Bucket, options: dict[str, Any]) -> None:
    """Saved through one mount by two processes, over an earlier one; loaded through another."""
    pytest.importorskip("torch")
    saves = """
import sys, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
path, rank = sys.argv[1], int(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for step in range(2):
    dcp.save({f"w{rank}": torch.full((600, 600), float(10 * step + rank)), "step": step}, checkpoint_id=path)
dist.destroy_process_group()
"""
    loads = """
import sys, torch, torch.distributed.checkpoint as dcp
state = {"w0": torch.zeros(600, 600), "w1": torch.zeros(600, 600), "step": 0}
dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
print(state["step"], state["w0"].unique().item(), state["w1"].unique().item())
"""
    mount = mounted(bucket, read_only=False, **options)
    meeting = mount.place / "meeting"
    starts = f"""
import subprocess, sys
code = {saves!r}
ranks = [subprocess.Popen([sys.executable, "-c", code, *sys.argv[1:], str(rank)]) for rank in range(2)]
assert [rank.wait() for rank in ranks] == [0, 0]
"""
    in_python(starts, mount.path / "ckpt", meeting, timeout=80)
    assert mount.cli("flush", mount.path).returncode == 0
    assert [key for key in keys(bucket) if "tmp" in key] == []
    other = mounted(bucket)
    assert in_python(loads, other.path / "ckpt", timeout=60).split() == ["1", "10.0", "11.0"]
