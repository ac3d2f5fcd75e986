"""What programs get on a mount is what they get on a local disk, but for the differences that are named here, as
docs/reference/differences.md names them. The program is `local_disk.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import BACKEND_CONTRACT, Bucket, Mounted
from tests.mount.local_disk import ROWS
from tests.mount.mounts import succeed

pytestmark = [BACKEND_CONTRACT, pytest.mark.root]

PROGRAM = Path(__file__).with_name("local_disk.py")

DIFFERENT: dict[str, dict[str, Any]] = {
    "kinds_of_files": {
        **dict.fromkeys(("symbolic link", "hard link", "pipe", "device", "socket"), "EPERM"),
        "file without a name": "ENOTSUP",
        "name that is not UTF-8": "EINVAL",
    },
    "extended_attributes": {
        "user.a": ["ENOTSUP", "ENODATA", "ENOTSUP"],
        **dict.fromkeys(("trusted.a", "security.a"), ["ENOTSUP"] * 3),
    },
    "fallocate": dict.fromkeys(("keep size", "punch", "collapse", "zero", "insert"), "ENOTSUP"),
    "renameat2": {"exchange": "EINVAL", "whiteout": "EINVAL"},
}
"""Row → what differs, and what it is on a mount."""

WITH_PYFUSE3: dict[str, dict[str, Any]] = {"fallocate": {"0": "ENOTSUP"}}
"""The same, for that backend alone."""


def seen(place: Path) -> dict[str, Any]:
    said = succeed([sys.executable, PROGRAM, place], timeout=120)
    return dict(json.loads(line) for line in said.splitlines())


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found = seen(tmp_path_factory.mktemp("local"))
    if found["largest_file"][0] != "EFBIG":  # a tmpfs takes any size, the mount what its origin takes
        del found["largest_file"]
    return found


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("s3", "durable"),
        pytest.param("file", "writeback", marks=pytest.mark.long),
        pytest.param("file", "durable", marks=pytest.mark.long),
        pytest.param("s3", "writeback", marks=pytest.mark.long),
    ],
)
def test_as_on_a_local_disk(
    kind: str,
    mode: str,
    bucket: Bucket,
    mounted: Mounted,
    local: dict[str, Any],
    backend: str,
    tmp_path: Path,
) -> None:
    (tmp_path / "data").mkdir()
    source = bucket if kind == "s3" else f"file://{tmp_path}/data"
    writeback = {"writeback": True, "upload_delay": "1h"} if mode == "writeback" else {}
    mount = mounted(source, read_only=None, allow_other=True, **writeback)
    (mount.path / "t").mkdir()
    here = seen(mount.path / "t")
    assert here.keys() == ROWS.keys()
    for row, expected in local.items():
        differs = {**DIFFERENT.get(row, {}), **(WITH_PYFUSE3.get(row, {}) if backend == "pyfuse3" else {})}
        expected = {**expected, **differs} if differs else expected
        assert here[row] == expected, row


def test_programs_are_run_unless_the_mount_forbids_it(mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/program").write_text("#!/bin/sh\necho it runs\n")
    mount = mounted(f"file://{tmp_path}/data", file_mode="755")
    assert subprocess.check_output([mount.path / "program"], text=True) == "it runs\n"
    mount.stop()
    mount.start(no_exec=True)
    with pytest.raises(PermissionError):
        subprocess.check_output([mount.path / "program"])
