"""The wheels and sdists: they build without a network, and install into an empty environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from cachefs import __version__

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.9", "3.10", "3.11", "3.12", "3.13")

BUILD = """
import os, sys
_, place, out, *own = sys.argv
os.chdir(place)
sys.path[:0] = own
from importlib import import_module
backend = import_module("backend" if own else "setuptools.build_meta")
print(backend.build_sdist(out), backend.build_wheel(out))
"""

REQUIRED = """
import os, sys
_, place, hook, own = sys.argv
os.chdir(place)
sys.path.insert(0, own)
from importlib import import_module
getattr(import_module("backend"), hook)()
"""

IMPORTED = """
import sys, threading
from cachefs import hints
with_c = [name for name, module in sys.modules.items() if "site-packages" in str(getattr(module, "__file__", ""))]
assert not [name for name in with_c if not name.startswith("cachefs")], with_c
sampler = hints.HintedSampler([2, 0, 1], ["/nowhere/a", "/nowhere/b", "/nowhere/c"])
assert list(sampler) == [2, 0, 1] and hints.wait(60)
"""


def source_of(place: Path) -> Path:
    """What git has of this checkout (or would have), without what earlier builds left in it."""
    names = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "-z"], capture_output=True, check=True
    ).stdout.split(b"\0")
    for name in map(bytes.decode, names):
        if (
            re.match(r"(cachefs|packaging)/|(pyproject.toml|README.md|LICENSE)$", name)
            and (ROOT / name).exists()
        ):
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes((ROOT / name).read_bytes())
    return place


def build(place: Path, out: Path, *backend: Path) -> tuple[Path, Path]:
    """(sdist, wheel) of the project at `place`, with the setuptools of this environment."""
    out.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, place, out, *backend], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    sdist, wheel = done.stdout.split()[-2:]
    return out / sdist, out / wheel


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    source = source_of(tmp_path_factory.mktemp("source"))
    out = tmp_path_factory.mktemp("dist")
    hints = source / "packaging/hints"
    return {"daemon": build(source, out), "hints": build(hints, out, hints)}


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_sdist"])
def test_hints_build_from_a_fresh_checkout(tmp_path: Path, hook: str) -> None:
    """pip and build call this first, in a process of its own."""
    hints = source_of(tmp_path) / "packaging/hints"
    done = subprocess.run(
        [sys.executable, "-c", REQUIRED, hints, hook, hints], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


def oldest() -> str:
    """The oldest Python that can be found here."""
    for version in PYTHONS:
        for name in (f"python{version}", *Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
            try:
                done = subprocess.run([name, "-c", "import venv, ensurepip"], capture_output=True, timeout=60)
            except OSError:
                continue
            if done.returncode == 0:
                return str(name)
    return sys.executable


def environment(place: Path, python: str, *wheels: Path) -> Path:
    """The interpreter of an environment that has these wheels alone."""
    subprocess.run([python, "-m", "venv", "--without-pip", place], check=True, timeout=120)
    inside = place / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", inside, "install", "-q", "--disable-pip-version-check"]
    for wheel in wheels:
        subprocess.run([*pip, "--no-deps", "--no-index", "--no-compile", wheel], check=True, timeout=120)
    return inside


@pytest.mark.long
def test_hints_need_nothing_but_an_old_python(built: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    sdist, wheel = built["hints"]
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    modules = {
        f"cachefs/{name}" for name in ("hints.py", "base/client.py", "base/errors.py", "base/linux.py")
    }
    assert names == modules  # and no __init__.py: it would hide a cachefs-fuse behind it on sys.path
    with tarfile.open(sdist) as unpacked:
        assert sum(name.endswith("src/cachefs/hints.py") for name in unpacked.getnames()) == 1
    for number, python in enumerate({oldest(), sys.executable}):
        inside = environment(tmp_path / str(number), python, wheel)
        done = subprocess.run([inside, "-I", "-c", IMPORTED], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_the_daemon_is_whole(built: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    sdist, wheel = built["daemon"]
    assert wheel.name.startswith(f"cachefs_fuse-{__version__}-")
    with zipfile.ZipFile(wheel) as packed:
        names = set(packed.namelist())
    with tarfile.open(sdist) as unpacked:
        sources = {name.partition("/")[2] for name in unpacked.getnames()}
    for path in (ROOT / "cachefs").rglob("*"):
        name = str(path.relative_to(ROOT))
        if path.is_file() and "__pycache__" not in name:
            assert name in names and name in sources, name
    assert not [name for name in names if name.startswith(("tests/", "bench/", "packaging/"))]
    inside = environment(tmp_path / "env", sys.executable, wheel)
    done = subprocess.run([inside, "-I", "-c", IMPORTED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("order", [("daemon", "hints"), ("hints", "daemon")])
def test_both_may_be_installed(
    built: dict[str, tuple[Path, Path]], tmp_path: Path, order: tuple[str, str]
) -> None:
    inside = environment(tmp_path / "env", sys.executable, *(built[name][1] for name in order))
    said = "import cachefs, cachefs.hints, cachefs.base.ledger; print(cachefs.__version__)"
    done = subprocess.run([inside, "-I", "-c", said], capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{__version__}\n", done.stderr


def test_versions_are_one() -> None:
    for file in ("pyproject.toml", "packaging/hints/pyproject.toml"):
        assert tomllib.loads((ROOT / file).read_text())["project"]["version"] == __version__
