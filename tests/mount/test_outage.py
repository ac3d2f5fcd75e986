"""The store is stopped under a mount (it accepts connections and says nothing) and goes on later, without a remount."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, eventually, mounts_at, processes_with, state_of
from tests.mount.test_faults import OUTAGE, md5, read

pytestmark = ONE_BACKEND

TIMEOUT_S = 4
SLACK_S = 2
MIB = 1 << 20


@contextmanager
def stopped(lab: LabStore) -> Iterator[None]:
    os.kill(lab.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(lab.pid, signal.SIGCONT)


def said(mount: Mount) -> list[str]:
    """The lines about outages."""
    return [line for line in mount.log().splitlines() if any(words in line for words in OUTAGE)]


def warned(mount: Mount) -> bool:
    return any("has not answered for" in line for line in mount.ask("status")["warnings"])


def start(mounted: Mounted, bucket: Bucket, how: str) -> Mount:
    mount = mounted(bucket, timeout=TIMEOUT_S, on_outage=how, metadata_ttl="1s")
    mount.allowed += [*OUTAGE, r"WARNING \S+ (read|open|lookup|readdir|getattr): "]
    return mount


def timed(call: Callable[[], object]) -> tuple[int, float]:
    """The errno (0: it succeeded) and the seconds it took."""
    began, number = time.monotonic(), 0
    try:
        call()
    except OSError as exc:
        number = exc.errno or -1
    return number, time.monotonic() - began


@pytest.mark.parametrize("how", ["serve-stale", pytest.param("eio", marks=pytest.mark.long)])
def test_a_store_that_is_stopped_for_a_while(
    mounted: Mounted, bucket: Bucket, lab: LabStore, how: str
) -> None:
    cached = {f"d/cached{n}": bucket.put(f"d/cached{n}", MIB) for n in range(8)}
    cold = bucket.put("d/cold", 6 * MIB)
    mount = start(mounted, bucket, how)
    for name, data in cached.items():
        assert (mount.path / name).read_bytes() == data
    listed = sorted(os.listdir(mount.path / "d"))
    held = (mount.path / "d/cached0").open("rb")
    with held, stopped(lab):
        first = read(mount.path / "d/cold")  # the outage is not found yet
        assert first.errno == errno.EIO and first.longest < TIMEOUT_S + SLACK_S
        eventually(lambda: warned(mount), "the outage is found")
        time.sleep(1.2)  # the TTL
        mount.drop_kernel_pages() if how == "serve-stale" else None
        for _ in range(5):
            asked = mount.metrics()["origin_refused"]
            number, took = timed(lambda: (mount.path / "d/cold").read_bytes())
            assert number == errno.EIO and took < SLACK_S
            assert mount.metrics()["origin_refused"] > asked
        assert held.read() == cached["d/cached0"]  # what is open stays open, in each mode
        if how == "serve-stale":
            for name, data in cached.items():
                assert (mount.path / name).read_bytes() == data
                assert (mount.path / name).stat().st_size == MIB
            assert sorted(os.listdir(mount.path / "d")) == listed
            assert not (mount.path / "d/missing").exists()
        else:
            for ask in (lambda: (mount.path / "d/cached1").stat(), lambda: os.listdir(mount.path / "d")):
                number, took = timed(ask)
                assert number == errno.EIO and took < SLACK_S
        assert not [pid for pid in processes_with(str(mount.path)) if state_of(pid) == "D"]
        assert len(said(mount)) == 1
    eventually(lambda: not warned(mount), "the store is back")
    outcome = read(mount.path / "d/cold")
    assert (outcome.errno, outcome.md5) == (0, md5(cold))
    assert sorted(os.listdir(mount.path / "d")) == listed
    assert len(said(mount)) == 2 and mount.metrics()["origin_outages"] == 1


@pytest.mark.long
def test_a_reader_may_wait_for_the_store(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    cold = bucket.put("cold", 6 * MIB)
    mount = start(mounted, bucket, "wait=30s")
    assert (mount.path / "cold").stat().st_size == len(cold)
    os.kill(lab.pid, signal.SIGSTOP)
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if Path(mount.path / "cold").read_bytes() == cold else 1)
        except OSError as exc:
            os._exit(exc.errno or 2)
    try:
        eventually(lambda: warned(mount), "the outage is found", 15)
        time.sleep(TIMEOUT_S + 1)  # longer than a request may take by itself
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    finally:
        os.kill(lab.pid, signal.SIGCONT)
        status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
    assert len(said(mount)) == 2


@pytest.mark.long
@pytest.mark.parametrize("ended", [pytest.param("stopped", marks=pytest.mark.long), "killed"])
def test_a_mount_starts_without_its_store_and_shows_what_it_knows(
    mounted: Mounted, bucket: Bucket, lab: LabStore, ended: str
) -> None:
    cached = {f"d/cached{n}": bucket.put(f"d/cached{n}", MIB) for n in range(4)}
    cold = bucket.put("e/cold", 2 * MIB)
    mount = start(mounted, bucket, "serve-stale")
    mount.allowed.append("what is known of it from earlier is shown")
    for name, data in cached.items():
        assert (mount.path / name).read_bytes() == data
    listed = sorted(os.listdir(mount.path / "d"))
    assert (mount.path / "e/cold").stat().st_size == len(cold)
    mount.settled()
    if ended == "stopped":
        mount.stop()
    else:
        time.sleep(1.5)  # the index is written once a second
        mount.kill()
    with stopped(lab):
        mount.start()
        for name, data in cached.items():
            assert (mount.path / name).read_bytes() == data
        assert sorted(os.listdir(mount.path / "d")) == listed
        number, took = timed(lambda: (mount.path / "e/cold").read_bytes())
        assert number == errno.EIO and took < TIMEOUT_S + SLACK_S
        assert "what is known of it from earlier is shown" in mount.log()
    eventually(lambda: not warned(mount), "the store is back")
    outcome = read(mount.path / "e/cold")
    assert (outcome.errno, outcome.md5) == (0, md5(cold))


@pytest.mark.long
@pytest.mark.parametrize("how", ["serve-stale", "eio"])
def test_what_knows_nothing_or_believes_nothing_is_not_mounted_without_its_store(
    mounted: Mounted, bucket: Bucket, lab: LabStore, how: str
) -> None:
    bucket.put("file", 1)
    mount = mounted(bucket, start=False, timeout=TIMEOUT_S, on_outage=how)
    mount.allowed += [*OUTAGE, "ERROR"]
    if how == "eio":
        mount.start()
        assert (mount.path / "file").read_bytes()
        mount.stop()
    with stopped(lab):
        done = mount.try_start()
    assert done.returncode == 1 and "has not answered for" in done.stderr
    assert not mounts_at(mount.path)
    mount.start()
    assert (mount.path / "file").read_bytes()
