"""Warm, check, evict, pin, hint and record on a real mount: requests are counted at the store."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cachefs.hints import HintedSampler
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import COMMAND, Mount, eventually

pytestmark = ONE_BACKEND

MIB = 1 << 20
FILES = 24


@pytest.fixture
def data(bucket: Bucket) -> Bucket:
    """Small files in two directories, and a large one."""
    for n in range(FILES):
        bucket.put(f"train/{n % 2}/{n:03}.bin", 100_000 + n)
    bucket.put("large.bin", 20 * MIB)
    return bucket


def read_all(mount: Mount, bucket: Bucket) -> None:
    for key, expected in bucket.objects.items():
        assert (mount.path / key).read_bytes() == expected


def gets(bucket: Bucket) -> dict[str, int]:
    """GETs by key."""
    counted: dict[str, int] = {}
    for request in bucket.store.requests():
        if request["bucket"] == bucket.name and request["kind"] == "get":
            counted[request["key"]] = counted.get(request["key"], 0) + 1
    return counted


def said(mount: Mount, *words: object, code: int = 0) -> str:
    done = mount.cli(*words)
    assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def cached(mount: Mount) -> dict[str, int]:
    rows = json.loads(said(mount, "du", "--json", mount.path))
    return {os.path.relpath(row["path"], mount.path): row["cached"] for row in rows}


def test_what_is_warm_asks_the_store_for_nothing(mounted: Mounted, data: Bucket, lab: Any) -> None:
    mount = mounted(data, prefetch="off")
    total = sum(map(len, data.objects.values()))
    assert "0 of 25 files" in said(mount, "warm", "--check", mount.path, code=1)
    assert data.gets() == 0
    assert "12 files" in said(mount, "load", mount.path / "train/0")
    assert data.gets() == FILES // 2
    assert f"{FILES // 2} of 25 files are cached whole" in said(mount, "warm", "--check", mount.path, code=1)
    told = json.loads(mount.cli("warm", "--json", mount.path).stdout)
    assert (told["state"], told["files"], told["failed"]) == ("done", 25, 0)
    assert told["fetched_bytes"] == total - sum(len(data.objects[k]) for k in data.objects if "/0/" in k)
    counted = gets(data)
    assert counted.pop("large.bin") <= 3
    assert counted == {key: 1 for key in data.objects if key != "large.bin"}
    lab.reset()
    read_all(mount, data)
    assert "25 of 25 files" in said(mount, "warm", "--check", mount.path)
    assert "0 B fetched" in said(mount, "warm", mount.path)
    assert data.gets() == 0
    assert cached(mount)["."] == total


def test_what_is_evicted_is_fetched_again(mounted: Mounted, data: Bucket, lab: Any) -> None:
    mount = mounted(data, prefetch="off")
    said(mount, "warm", mount.path)
    freed = json.loads(mount.cli("evict", "--json", mount.path / "train/1").stdout)["freed_bytes"]
    assert freed >= sum(len(data.objects[k]) for k in data.objects if "/1/" in k)
    assert cached(mount)["train/1"] == 0
    lab.reset()
    read_all(mount, data)
    assert gets(data) == {key: 1 for key in data.objects if "/1/" in key}


def test_lists(mounted: Mounted, data: Bucket, tmp_path: Path) -> None:
    mount = mounted(data, prefetch="off")
    wanted = [key for key in data.objects if key.endswith(("3.bin", "4.bin"))]
    listed = tmp_path / "list"
    listed.write_text("\n".join(wanted) + "\n")
    assert "line 1: a relative path" in said(mount, "warm", "-T", listed, code=2)
    said(mount, "warm", "-T", listed, mount.path, "-p", "2")
    assert gets(data) == dict.fromkeys(wanted, 1)
    below = subprocess.run(
        [*COMMAND, "evict", "-T", "-", mount.path / "train"],
        input="0/004.bin\n" + f"{mount.path}/train/1/003.bin\n",
        text=True,
        env=mount.env,
        capture_output=True,
        timeout=60,
    )
    assert below.returncode == 0, below.stderr
    left = {k for k in wanted if int(os.getxattr(mount.path / k, "user.cachefs.cached")) > 0}
    assert left == set(wanted) - {"train/0/004.bin", "train/1/003.bin"}


def test_failures_are_named_and_the_rest_comes(mounted: Mounted, data: Bucket, tmp_path: Path) -> None:
    mount = mounted(data, prefetch="off")
    listed = tmp_path / "list"
    listed.write_text("train/0/000.bin\nnowhere/x\ntrain/1/001.bin\n")
    mount.allowed += [r"1 failed: nowhere/x: no such path", r"1 failed: nothing: no such path"]
    told = said(mount, "warm", "-T", listed, mount.path, code=1)
    assert told.count("\n") == 1
    assert "1 paths failed: nowhere/x: no such path" in told
    assert gets(data) == {"train/0/000.bin": 1, "train/1/001.bin": 1}
    assert "no such path" in said(mount, "evict", mount.path / "nothing", code=1)
    assert "not below a cachefs mount" in said(mount, "warm", tmp_path, code=1)


def test_more_than_the_cache_holds_is_refused_and_displaces_nothing(mounted: Mounted, bucket: Bucket) -> None:
    for n in range(60):
        bucket.put(f"{n:03}.bin", 2 * MIB)
    mount = mounted(bucket, prefetch="off", cache_size="64M", ram="0")
    mount.allowed.append(r"do not fit: the cache holds")
    told = said(mount, "warm", mount.path, code=1)
    assert "do not fit: the cache holds 64.0 MiB" in told
    assert mount.metrics()["evicted_blocks"] == 0


def test_what_a_job_finds_is_not_displaced_by_what_it_brings(mounted: Mounted, bucket: Bucket) -> None:
    for n in range(40):
        bucket.put(f"{'xyyz'[n // 10]}/{n:03}.bin", 2 * MIB)
    mount = mounted(bucket, prefetch="off", cache_size="64M", ram="0")
    said(mount, "warm", mount.path / "x")
    said(mount, "warm", mount.path / "y")
    said(mount, "warm", mount.path / "x", mount.path / "z")
    assert mount.metrics()["evicted_blocks"] >= 16
    assert "20 of 20 files" in said(mount, "warm", "--check", mount.path / "x", mount.path / "z")


def running(mount: Mount) -> list[dict[str, Any]]:
    return [job for job in mount.ask("status")["jobs"] if job["state"] == "running"]


def test_a_job_in_the_background(mounted: Mounted, data: Bucket, lab: Any, tmp_path: Path) -> None:
    mount = mounted(data, prefetch="off", timeout=60)
    lab.shape(latency_ms=2_000)
    assert "job 1 on" in said(mount, "warm", "--background", "-p", "1", mount.path)
    (job,) = mount.ask("status")["jobs"]
    assert (job["id"], job["action"], job["state"]) == (1, "warm", "running")
    assert "job 1" in said(mount, "status", mount.path)
    assert "1 jobs ended" in said(mount, "warm", "--stop", mount.path)
    lab.shape(latency_ms=0)
    eventually(lambda: not running(mount), "the job has ended")
    assert mount.ask("warm_status", job=1)["state"] == "stopped"
    assert re.search(r"job 1 +warm: stopped \d+s ago", said(mount, "status", mount.path))
    mount.allowed.append(r"job 2 \(warm\): done, 0 of 0 files, 1 failed: gone: no such path")
    listed = tmp_path / "list"
    listed.write_text("gone\n")
    assert "job 2 on" in said(mount, "warm", "--background", "-T", listed, mount.path)
    eventually(lambda: not running(mount), "the job has ended")
    assert re.search(r"job 2 .* 1 failed: gone: no such path", said(mount, "status", mount.path))
    said(mount, "warm", mount.path)
    read_all(mount, data)


def test_an_interrupted_job_ends(mounted: Mounted, data: Bucket, lab: Any) -> None:
    mount = mounted(data, prefetch="off", timeout=60)
    lab.shape(latency_ms=1_000)
    with subprocess.Popen(
        [*COMMAND, "warm", "-p", "1", str(mount.path)], env=mount.env, stderr=subprocess.PIPE, text=True
    ) as client:
        eventually(lambda: mount.ask("status")["jobs"], "the job has begun")
        client.send_signal(signal.SIGINT)
        assert client.communicate(timeout=20)[1].strip() == "cachefs: interrupted"
    lab.shape(latency_ms=0)
    eventually(lambda: not running(mount), "the job has ended")


@pytest.mark.long
def test_pins_survive_pressure_and_a_restart(mounted: Mounted, bucket: Bucket, lab: Any) -> None:
    for n in range(60):
        bucket.put(f"{n:03}.bin", 2 * MIB)
    pinned = [f"{n:03}.bin" for n in range(5)]
    mount = mounted(bucket, prefetch="off", cache_size="64M", ram="0")
    assert "pinned 5 files, 10.0 MiB" in said(mount, "pin", *(mount.path / key for key in pinned))

    def others() -> None:
        for key in bucket.objects:
            if key not in pinned:
                assert (mount.path / key).read_bytes() == bucket.objects[key]

    others()
    assert "5 files stay" in said(mount, "evict", *(mount.path / key for key in pinned))
    mount.stop()
    mount.start()
    others()
    assert mount.ask("status")["metrics"]["evicted_blocks"] > 0
    lab.reset()
    for key in pinned:
        assert (mount.path / key).read_bytes() == bucket.objects[key]
    assert data_gets(bucket, pinned) == 0
    said(mount, "unpin", *(mount.path / key for key in pinned))
    said(mount, "evict", *(mount.path / key for key in pinned))
    assert all(int(os.getxattr(mount.path / key, "user.cachefs.cached")) == 0 for key in pinned)


def data_gets(bucket: Bucket, keys: list[str]) -> int:
    return sum(count for key, count in gets(bucket).items() if key in keys)


def test_pins_of_versions_that_are_gone_can_be_ended(mounted: Mounted, bucket: Bucket) -> None:
    """No path leads to them: only `unpin` of the mountpoint does."""
    for key in ("d/stays", "d/replaced", "d/removed"):
        bucket.put(key, 2 * MIB)
    mount = mounted(bucket, ram=0, prefetch="off")
    assert "pinned 3 files" in said(mount, "pin", mount.path)
    bucket.put("d/replaced", 2 * MIB, version=2)
    bucket.delete("d/removed")
    mount.refresh()
    assert "no pin is left on 2 files" in said(mount, "unpin", mount.path / "d")
    assert mount.ask("status")["pinned_bytes"] == 4 * MIB
    mount.stop()
    mount.start()
    assert "no pin is left on 2 files" in said(mount, "unpin", mount.path)
    assert mount.ask("status")["pinned_bytes"] == 0


def test_pins_have_a_budget(mounted: Mounted, bucket: Bucket) -> None:
    for n in range(20):
        bucket.put(f"{n:03}.bin", 2 * MIB)
    mount = mounted(bucket, prefetch="off", cache_size="64M", ram="0")
    mount.allowed.append(r"cannot be pinned")
    told = said(mount, "pin", "-p", "1", mount.path, code=1)
    assert "cannot be pinned: all pins together may take 32.0 MiB" in told
    pinned = int(found[1]) if (found := re.search(r"(\d+) files of them are pinned", told)) else 0
    assert mount.ask("status")["pinned_bytes"] == 2 * MIB * pinned
    assert bucket.gets() <= 16  # what is refused is not fetched


def test_hinted_files_are_there_before_they_are_opened(
    mounted: Mounted, data: Bucket, lab: Any, tmp_path: Path
) -> None:
    mount = mounted(data)
    order = sorted(data.objects, reverse=True)
    listed = tmp_path / "list"
    listed.write_text("\n".join(order))
    assert "epoch 3: 25 files" in said(mount, "hint", mount.path, "-T", listed, "--epoch", "3")
    total = sum(map(len, data.objects.values()))
    eventually(lambda: cached(mount)["."] == total, "all is fetched")
    lab.reset()
    for key in order:
        assert (mount.path / key).read_bytes() == data.objects[key]
    assert data.gets() == 0
    assert "plan hint is forgotten" in said(mount, "hint", mount.path, "--drop")
    assert "no plan hint on" in said(mount, "hint", mount.path, "--drop", code=1)
    other = mounted(data, prefetch="off")
    assert "--prefetch off" in said(other, "hint", other.path, "-T", listed, code=1)


def test_a_sampler_has_its_epoch_fetched(mounted: Mounted, data: Bucket) -> None:
    mount = mounted(data)
    keys = sorted(data.objects)
    reading = iter(HintedSampler(range(len(keys) - 1, -1, -1), [mount.path / key for key in keys]))
    assert next(reading) == len(keys) - 1
    total = sum(map(len, data.objects.values()))
    eventually(lambda: cached(mount)["."] == total, "all is fetched")
    (plan,) = mount.ask("status")["prefetch"]["plans"]
    assert (plan["files"], plan["epoch"]) == (len(keys), 0)


def test_a_recording_is_replayed_on_an_empty_cache(
    mounted: Mounted, data: Bucket, lab: Any, tmp_path: Path
) -> None:
    mount = mounted(data, prefetch="off", max_readahead=0)
    profile = tmp_path / "run.jsonl"
    touched = [f"train/1/{n:03}.bin" for n in (5, 1, 9)]
    with subprocess.Popen(
        [*COMMAND, "record", str(mount.path), "-o", str(profile)],
        env=mount.env,
        stderr=subprocess.PIPE,
        text=True,
    ) as recorder:
        eventually(profile.exists, "it records")
        eventually(lambda: refused(mount), "it records")
        earlier = tmp_path / "earlier.jsonl"
        earlier.write_text("an earlier recording\n")
        assert "recorded already" in said(mount, "record", mount.path, "-o", earlier, code=1)
        assert earlier.read_text() == "an earlier recording\n"
        for key in touched:
            (mount.path / key).read_bytes()
        with (mount.path / "large.bin").open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            os.pread(file.fileno(), 4096, 9 * MIB)
            os.pread(file.fileno(), 4096, 2 * MIB)
        recorder.send_signal(signal.SIGINT)
        told = recorder.communicate(timeout=20)[1]
        assert recorder.returncode == 0, told
    nowhere = tmp_path / "nowhere" / "run.jsonl"
    assert "No such file" in said(mount, "record", mount.path, "-o", nowhere, code=2)
    assert not refused(mount)  # it did not stay behind
    assert "0 lines" in said(mount, "record", mount.path, "-o", "-", "--for", "0")
    lines = [json.loads(line) for line in profile.read_text().splitlines()]
    assert f"{len(lines)} lines" in told
    parts = [(line["path"], line["offset"], line["length"]) for line in lines]
    assert parts[:4] == [*((key, 0, len(data.objects[key])) for key in touched), ("large.bin", 0, 0)]
    assert sorted(part[1] // MIB for part in parts[4:]) == [2, 9]
    assert {line["pid"] for line in lines} == {os.getpid()}

    data.delete("train/1/005.bin")
    other = mounted(data, prefetch="off", max_readahead=0)
    lab.reset()
    assert "1 are not there any more" in said(other, "warm", "--profile", profile, other.path)
    below = said(other, "warm", "--profile", profile, other.path / "train/0", code=1)
    assert f"nothing that {profile} names (5 files or parts) is below" in below
    assert "give one of them" in said(other, "warm", "--profile", profile, "-T", profile, other.path, code=2)
    counted = gets(data)
    assert counted.pop("large.bin") == 2
    assert counted == dict.fromkeys(touched[1:], 1)
    assert int(os.getxattr(other.path / "large.bin", "user.cachefs.cached")) == 2 * MIB


def refused(mount: Mount) -> bool:
    """Whether somebody records already."""
    try:
        number = mount.ask("record_start")
    except Exception as exc:
        return "recorded already" in str(exc)
    mount.ask("record_stop", recording=number)
    return False


def test_ls_and_du(mounted: Mounted, data: Bucket) -> None:
    mount = mounted(data, prefetch="off")
    said(mount, "warm", mount.path / "train/0", mount.path / "large.bin")
    listed = said(mount, "ls", mount.path).splitlines()
    assert [line.split()[-1] for line in listed] == ["large.bin", "train/"]
    assert "20.0 MiB   20.0 MiB 100.0 %  large.bin" in listed[0]
    rows = json.loads(said(mount, "ls", "--json", mount.path / "train/1"))
    assert [(row["size"], row["cached"]) for row in rows] == [(100_000 + n, 0) for n in range(1, FILES, 2)]
    totals = [line.split()[-1] for line in said(mount, "du", mount.path).splitlines()]
    assert [os.path.relpath(path, mount.path) for path in totals] == ["train/0", "train/1", "train", "."]
    assert len(said(mount, "du", "-s", mount.path).splitlines()) == 1
    assert len(said(mount, "du", "-d", "1", mount.path).splitlines()) == 2
    assert "No such file" in said(mount, "ls", mount.path / "nothing", code=1)
