"""The store misbehaves; the application gets right bytes or an errno, in time."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.lab.client import LabStore
from tests.mount.conftest import BOTH_BACKENDS, ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import eventually

pytestmark = (
    ONE_BACKEND  # what a failing store leads to is decided below the backends; how errors are told, in both
)

MIB = 1 << 20
SIZE = 6 * MIB
QUICK_S, PATIENT_S = 2, 5
"""--timeout where nothing but an error can come, and where patience is rewarded."""

SLACK_S = 1.5

OUTAGE = ("has not answered for", "answers again")
"""What is said of a store that does not answer anything."""

READ = """
import hashlib, json, os, sys, time
longest = 0
def timed(call, *arguments):
    global longest
    began = time.monotonic()
    try:
        return call(*arguments)
    finally:
        longest = max(longest, time.monotonic() - began)
got = hashlib.md5()
size, number = 0, 0
try:
    file = timed(os.open, sys.argv[1], os.O_RDONLY)
    while chunk := timed(os.read, file, 1 << 18):
        got.update(chunk)
        size += len(chunk)
except OSError as exc:
    number = exc.errno
print(json.dumps([number, size, got.hexdigest(), longest]))
"""


@dataclass
class Outcome:
    errno: int
    size: int
    md5: str
    longest: float


def read(path: Path, within: float = 2 * PATIENT_S + SLACK_S) -> Outcome:
    """What a process gets from reading a file to its end; `within` bounds each of its calls, in seconds."""
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    outcome = Outcome(*json.loads(done.stdout))
    assert outcome.longest < within, outcome
    return outcome


def md5(data: bytes) -> str:
    import hashlib

    return hashlib.md5(data).hexdigest()


@dataclass
class Fault:
    """A rule of the lab store and what the reader may see: errnos, 0 for the right bytes."""

    action: str
    expected: set[int]
    rule: dict[str, Any] = field(default_factory=dict)
    timeout: int = 0

    def __post_init__(self) -> None:
        self.timeout = self.timeout or (PATIENT_S if 0 in self.expected else QUICK_S)


FAULTS = {
    "503 for a while": Fault("503", {0}, {"count": 3}),
    "429 for a while": Fault("429", {0}, {"count": 2, "seconds": 1}),
    "500 for a while": Fault("500", {0}, {"count": 2}),
    "503 for ever": Fault("503", {errno.EIO}),
    "500 for ever": Fault("500", {errno.EIO}),
    "hang once": Fault("hang", {0, errno.EIO}, {"count": 1}, timeout=2),
    "hang for ever": Fault("hang", {errno.EIO}),
    "hang in the body for ever": Fault("hang-body", {errno.EIO}, {"after": 100_000}),
    "hang in one body": Fault("hang-body", {0, errno.EIO}, {"after": 100_000, "count": 1}, timeout=2),
    "truncated bodies": Fault("truncate", {0, errno.EIO}, {"after": 700_000, "count": 6}),
    "truncated to nothing": Fault("truncate", {errno.EIO}, {"after": 0}),
    "one truncated body": Fault("truncate", {0}, {"after": 100_000, "count": 1}),
    "reset before the headers": Fault("reset", {0}, {"count": 2}),
    "reset in the body": Fault("reset", {0}, {"after": 300_000, "count": 3}),
    "reset for ever": Fault("reset", {errno.EIO}),
    "garbage once": Fault("garbage", {0}, {"count": 1}),
    "garbage for ever": Fault("garbage", {errno.EIO}),
    "403": Fault("403", {errno.EACCES}),
    "lies about the version": Fault("wrong-etag", {errno.ESTALE, errno.EIO}),
    "lies once": Fault("wrong-etag", {0, errno.ESTALE, errno.EIO}, {"count": 1}),
    "slow": Fault("slow", {0}, {"rate": 3 * MIB}),
}


LONG = {
    "503 once",
    "500 for ever",
    "truncated bodies",
    "reset before the headers",
    "garbage once",
    "lies once",
    "429 for a while",
    "500 for a while",
    "garbage for ever",
    "hang in one body",
    "truncated to nothing",
    "503 for ever",
    "hang once",
    "hang in the body for ever",
    "reset for ever",
}
"""Left to `scripts/test --all`: others are like them."""


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=name, marks=[pytest.mark.long] if name in LONG else [])
        for name, fault in FAULTS.items()
    ],
)
def test_a_reader_gets_right_bytes_or_an_errno_in_time(
    mounted: Mounted, bucket: Bucket, lab: LabStore, fault: Fault
) -> None:
    data = bucket.put("file", SIZE)
    mount = mounted(bucket, timeout=fault.timeout)
    mount.allowed.append(r"WARNING \S+ (read|open): ")
    assert (mount.path / "file").stat().st_size == SIZE
    lab.fault(fault.action, key="file", **fault.rule)
    # The kernel reads ahead, and asks once more for what failed when the reader itself wants it: two deadlines.
    outcome = read(mount.path / "file", within=2 * fault.timeout + SLACK_S)
    assert outcome.errno in fault.expected, (outcome, mount.log())
    assert outcome.md5 == md5(data[: outcome.size])
    if outcome.errno == 0:
        assert outcome.size == SIZE
    lab.clear_faults()
    after = read(mount.path / "file")
    if after.errno == errno.ESTALE:  # what a lie has taught is unlearnt by asking once more
        after = read(mount.path / "file")
    assert (after.errno, after.md5) == (0, md5(data)), after


@pytest.mark.long
@BOTH_BACKENDS
def test_a_read_takes_one_timeout_at_most(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    bucket.put("file", SIZE)
    mount = mounted(bucket, timeout=2)
    mount.allowed.append(r"WARNING \S+ read: ")
    (mount.path / "file").stat()
    lab.fault("hang", key="file")
    assert read(mount.path / "file").longest < 2 + SLACK_S


PAGES = """
import mmap, os, sys
file = os.open(sys.argv[1], os.O_RDONLY)
mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
mapped.madvise(mmap.MADV_RANDOM)
children = []
for page in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        os._exit(mapped[page * mmap.PAGESIZE] != int(sys.argv[3]))
    children.append(child)
print(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""
"""Each process touches a page of its own, without read-ahead: as many requests as there are processes."""


@BOTH_BACKENDS
def test_reads_that_wait_hold_up_nothing_else(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    bucket.put("file", b"x" * (4 * MIB))
    mount = mounted(bucket, timeout=40)
    (mount.path / "file").stat()
    lab.fault("hang", key="file")
    with subprocess.Popen(
        [sys.executable, "-c", PAGES, mount.path / "file", "300", str(ord("x"))], stdout=subprocess.PIPE
    ) as readers:
        try:
            eventually(lambda: mount.metrics()["fuse_read"] >= 300, "all of them are read", 35)
            assert os.statvfs(mount.path).f_bsize == 4096
            assert readers.poll() is None
        finally:
            lab.clear_faults()
        assert readers.communicate(timeout=60)[0].strip() == b"0"


@pytest.mark.parametrize(
    "action",
    [
        "truncate",
        *(pytest.param(a, marks=pytest.mark.long) for a in ("503", "hang", "reset", "403", "garbage")),
    ],
)
def test_a_failing_listing_is_an_errno_and_no_absence(
    mounted: Mounted, bucket: Bucket, lab: LabStore, action: str
) -> None:
    """Neither an empty directory nor ENOENT: a job would believe it."""
    bucket.put("d/file", 1000)
    mount = mounted(bucket, timeout=QUICK_S)
    mount.allowed += [r"WARNING \S+ (lookup|opendir|readdir|getattr|open): ", *OUTAGE]
    for kind in ("list", "head"):
        lab.fault(action, kind=kind, **({"after": 0} if action == "truncate" else {}))
    expected = (errno.EACCES,) if action == "403" else (errno.EIO,)
    began = time.monotonic()
    for look in (lambda: list((mount.path / "d").iterdir()), lambda: (mount.path / "d/file").stat()):
        with pytest.raises(OSError) as caught:
            look()
        assert caught.value.errno in expected, caught.value
    assert time.monotonic() - began < 2 * (QUICK_S + SLACK_S)
    lab.clear_faults()
    eventually(lambda: not mount.ask("status")["warnings"], "the store answers")
    assert [path.name for path in (mount.path / "d").iterdir()] == ["file"]
    assert (mount.path / "d/file").read_bytes() == bucket.objects["d/file"]


@BOTH_BACKENDS
def test_an_object_that_changes_while_it_is_read(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    """The store takes a second to send it, so not all of the old version can be here before the change."""
    data = bucket.put("file", 20 * MIB)
    mount = mounted(bucket, max_readahead="2M")
    lab.shape(bandwidth=20 * MIB)
    lab.fault("etag", key="file", count=1, after=MIB // 2)
    outcome = read(mount.path / "file")
    assert outcome.errno == errno.ESTALE and outcome.size < len(data)
    assert outcome.md5 == md5(data[: outcome.size])
    lab.shape(bandwidth=0)
    after = read(mount.path / "file")
    assert (after.errno, after.md5) == (0, md5(bytes(255 - b for b in data)))


class TestCredentials:
    @BOTH_BACKENDS
    def test_expired_ones_are_eacces_and_renewed_ones_work_at_once(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        first, second = bucket.put("first", 3 * MIB), bucket.put("second", 3 * MIB)
        mount = mounted(bucket)
        assert (mount.path / "first").read_bytes() == first
        lab.credentials(expired=["lab"])
        outcome = read(mount.path / "second")
        assert outcome.errno == errno.EACCES
        mount.allowed.append("WARNING .*(open|read|lookup): ")
        complaints = [line for line in mount.log().splitlines() if "WARNING" in line]
        assert complaints and all("xpired" in line or "redential" in line for line in complaints)
        assert read(mount.path / "first").md5 == md5(first)  # what is cached needs no credential
        lab.credentials()
        outcome = read(mount.path / "second")
        assert (outcome.errno, outcome.md5) == (0, md5(second))

    def test_new_keys_in_the_credentials_file_are_taken_without_a_restart(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore, tmp_path: Path
    ) -> None:
        data = bucket.put("file", 1000)
        file = tmp_path / "credentials"
        file.write_text("[default]\naws_access_key_id = old\naws_secret_access_key = old\n")
        mount = mounted(bucket, start=False)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del mount.env[name]
        mount.env["AWS_SHARED_CREDENTIALS_FILE"] = str(file)
        lab.credentials(allowed=["old", "new"])
        mount.start()
        assert (mount.path / "file").stat().st_size == 1000
        lab.credentials(allowed=["new"], expired=["old"])
        file.write_text("[default]\naws_access_key_id = new\naws_secret_access_key = new\n")
        mount.allowed.append(r"WARNING \S+ read: .*ExpiredToken")
        assert (mount.path / "file").read_bytes() == data

    def test_a_denied_prefix_is_eacces_and_the_rest_is_not(
        self, mounted: Mounted, bucket: Bucket, lab: LabStore
    ) -> None:
        bucket.put("closed/file", 1000)
        data = bucket.put("open/file", 1000)
        mount = mounted(bucket)
        list(mount.path.rglob("*"))
        lab.credentials(denied=["closed/"])
        mount.allowed.append("WARNING .*(open|read|lookup|readdir): ")
        assert read(mount.path / "closed/file").errno == errno.EACCES
        assert (mount.path / "open/file").read_bytes() == data


@pytest.mark.long
def test_a_failure_is_logged_once_with_its_path_and_operation(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    bucket.put("d/file", 100_000)
    mount = mounted(bucket, timeout=QUICK_S)
    (mount.path / "d/file").stat()
    lab.fault("500", key="d/file")
    assert read(mount.path / "d/file").errno == errno.EIO
    lines = [line for line in mount.log().splitlines() if "WARNING" in line]
    mount.allowed.append("WARNING")
    assert 1 <= len(lines) <= 2, lines
    assert all("d/file" in line and "read" in line for line in lines)


@BOTH_BACKENDS
def test_an_outage_does_not_disturb_cached_data(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    data = bucket.put("d/file", 3 * MIB)
    mount = mounted(bucket)
    assert (mount.path / "d/file").read_bytes() == data
    mount.drop_kernel_pages()
    lab.fault("hang", kind="*")
    outcome = read(mount.path / "d/file", within=3)
    assert (outcome.errno, outcome.md5) == (0, md5(data))


@BOTH_BACKENDS
def test_a_store_that_hangs_does_not_hold_up_other_files(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    bucket.put("stuck", 8 * MIB)
    data = bucket.put("fine", 8 * MIB)
    mount = mounted(bucket, timeout=10)
    list(mount.path.iterdir())
    lab.fault("hang", key="stuck")
    readers = [threading.Thread(target=_ignore_errors, args=(mount.path / "stuck",)) for _ in range(20)]
    for reader in readers:
        reader.start()
    time.sleep(0.3)
    outcome = read(mount.path / "fine", within=4)
    assert (outcome.errno, outcome.md5) == (0, md5(data))
    assert mount.status()["pid"] == mount.pid
    lab.clear_faults()
    for reader in readers:
        reader.join(20)
    mount.allowed.append("read:")


def _ignore_errors(path: Path) -> None:
    try:
        path.read_bytes()
    except OSError:
        pass


def test_a_store_that_goes_away_and_comes_back(mounted: Mounted, tmp_path: Path) -> None:
    """Connections refused for a while: errors in time, then everything as before."""
    with LabStore(tmp_path / "other") as store:
        store.put("b", "d/file", b"x" * 100_000)
        mount = mounted("s3://b", endpoint_url=store.endpoint, timeout=QUICK_S, metadata_ttl=1)
        (mount.path / "d/file").stat()
    mount.allowed.append("WARNING")
    outcome = read(mount.path / "d/file")
    assert outcome.errno == errno.EIO


def test_throttling_is_shown_and_recovers(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    for number in range(12):
        bucket.put(f"d/{number}", 50_000)
    mount = mounted(bucket)
    lab.fault("503", kind="get", count=4)
    for key, data in bucket.objects.items():
        assert (mount.path / key).read_bytes() == data
    metrics = mount.metrics()
    assert metrics["origin_throttled"] == 4
    assert metrics["origin_errors"] == 0
    eventually(lambda: mount.status()["sources"][0]["origin"]["in_flight"] == 0, "nothing in flight")
