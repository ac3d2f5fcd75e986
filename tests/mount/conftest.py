"""Fixtures of the tests on a real mount: a lab store, buckets in it, and mounts that clean up and are checked.

A test runs on both backends, as `mounted` and `module_mounted` use what the fixture `backend` says, unless it is marked:
what another room decides, and what takes long, runs on the one that is chosen here (`ONE_BACKEND`)."""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.lab.client import LabStore
from bench.lab.dataset import content
from cachefs.fuse import backends
from tests.conftest import ON_CI
from tests.mount.frozen import Disk
from tests.mount.mounts import Mount, Watchdog, bucket_numbers
from tests.mount.suspended import SuspendedDisk

Mounted = Callable[..., Mount]

ONE_BACKEND = pytest.mark.backends("auto")
BOTH_BACKENDS = pytest.mark.backends("native", "pyfuse3")
BACKEND_CONTRACT = pytest.mark.backends("native", "pyfuse3", contract=True)
"""Both, in every run; elsewhere the one that is not chosen here is left to `scripts/test --all`."""

HERE = Path(__file__).parent


def _why_not() -> str:
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse is missing: modprobe fuse"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse cannot be opened by this user"
    if os.getuid() != 0 and shutil.which("fusermount3") is None:
        return "fusermount3 is missing: apt-get install fuse3"
    return ""


@cache
def why_no_native_backend() -> str:
    """Why the kernel takes no files here; "" when it does."""
    if reason := _why_not():
        return reason
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "tag").touch()  # as every tier has one
        try:
            device, _, refused = backends.connect("probe", (), [Path(place)])
        except backends.NotHere as exc:
            return str(exc)
        device.close()
    return "".join(refused.values())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        mark = metafunc.definition.get_closest_marker("backends")
        names = (mark or BOTH_BACKENDS.mark).args
        if names != ONE_BACKEND.mark.args:
            other = "native" if why_no_native_backend() else "pyfuse3"
            long = set() if len(names) == 1 or (mark and mark.kwargs) else {other}
            params = [pytest.param(name, marks=[pytest.mark.long] if name in long else []) for name in names]
            metafunc.parametrize("backend", params, indirect=True, scope="module")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.mount)
            if reason and not ON_CI:
                item.add_marker(pytest.mark.skip(reason=reason))
            if item.get_closest_marker("root") and os.getuid() != 0:
                item.add_marker(pytest.mark.skip(reason="needs root"))


@pytest.fixture(scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    """What the mounts of a test are given as ``--fuse``."""
    name: str = getattr(request, "param", "auto")
    if name == "native" and (reason := why_no_native_backend()):
        pytest.skip(reason)
    return name


@pytest.fixture(scope="session", autouse=True)
def runtime_directory() -> Iterator[Path]:
    """Sockets of our own. A socket's path is short, so this is not below pytest's directories."""
    with tempfile.TemporaryDirectory(prefix="cf-") as place, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", place)
        patch.setenv("XDG_CACHE_HOME", f"{place}/cache")
        yield Path(place)


@pytest.fixture(scope="session")
def the_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabStore]:
    with LabStore(tmp_path_factory.mktemp("lab")) as store:
        yield store


@pytest.fixture
def lab(the_lab: LabStore) -> Iterator[LabStore]:
    """The lab store, well behaved, with counters at nothing."""
    the_lab.reset()
    yield the_lab
    the_lab.clear_faults()
    the_lab.credentials()
    the_lab.shape(latency_ms=0, bandwidth=0)


class Bucket:
    """A bucket of one's own. `put` makes objects whose bytes are known by their key and version."""

    def __init__(self, store: LabStore) -> None:
        self.store = store
        self.name = f"bucket-{next(bucket_numbers)}"
        self.objects: dict[str, bytes] = {}
        store.bucket(self.name)

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def put(self, key: str, size: int | bytes, version: int = 1) -> bytes:
        data = size if isinstance(size, bytes) else content(f"{self.name}/{key}/{version}", size)
        self.store.put(self.name, key, data)
        self.objects[key] = data
        return data

    def delete(self, key: str) -> None:
        self.store.delete(self.name, key)
        del self.objects[key]

    def gets(self) -> int:
        """GETs this bucket saw since the last reset."""
        return sum(1 for r in self.store.requests() if r["bucket"] == self.name and r["kind"] == "get")


@pytest.fixture
def bucket(lab: LabStore) -> Bucket:
    return Bucket(lab)


@pytest.fixture(scope="module")
def module_bucket(the_lab: LabStore) -> Bucket:
    return Bucket(the_lab)


def _factory(place: Path, env: dict[str, str], backend: str, made: list[Mount]) -> Mounted:
    numbers = itertools.count(1)

    def make(source: Bucket | str | None = None, *, start: bool = True, **options: Any) -> Mount:
        url = source.url if isinstance(source, Bucket) else source
        home = place / f"m{next(numbers)}"
        home.mkdir()
        mount = Mount(home, url, env, {"fuse": backend, **options})
        made.append(mount)
        return mount.start() if start else mount

    return make


def _check(made: list[Mount]) -> None:
    wrong = [f"{mount.path}: {line}" for mount in made for line in mount.finish()]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def mounted(tmp_path: Path, lab: LabStore, backend: str) -> Iterator[Mounted]:
    """A function: bucket or URL, and options → a `Mount`. At the end nothing of it may be left."""
    made: list[Mount] = []
    with Watchdog(made) as watchdog:
        yield _factory(tmp_path, lab.env, backend, made)
        lab.clear_faults()  # releases what hangs
    _check(made)
    assert not watchdog.bitten, "the test hung: its daemons were killed"


@pytest.fixture(scope="module")
def module_mounted(
    tmp_path_factory: pytest.TempPathFactory, the_lab: LabStore, backend: str
) -> Iterator[Mounted]:
    """As `mounted`, for tests of a module that share a mount and only read."""
    made: list[Mount] = []
    yield _factory(tmp_path_factory.mktemp("mounts"), the_lab.env, backend, made)
    _check(made)


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Disk | SuspendedDisk]:
    """A disk that can be frozen for its writers (or for all, where a test says so); it is thawed at the end."""
    disk = getattr(request, "param", Disk)(tmp_path)
    try:
        yield disk
    finally:
        disk.close()
