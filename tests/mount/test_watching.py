"""What a mount shows of itself, beside what really happened: the store's own records, the processes that read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.lab.client import LabStore
from tests.mount.conftest import BOTH_BACKENDS, ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, eventually, mounts_at
from tests.mount.test_peers import together

MIB = 1 << 20
READ = "import sys; open(sys.argv[1], 'rb').read()"


def page(mount: Mount, path: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{mount.ask('status')['endpoint']}{path}")
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code, exc.read().decode()


def exposed(mount: Mount) -> dict[tuple[str, ...], float]:
    """(name, value of a label…) → value."""
    families = text_string_to_metric_families(page(mount, "/metrics")[1])
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def read(path: Path) -> None:
    subprocess.run([sys.executable, "-c", READ, path], check=True, timeout=60)


def why(mount: Mount, name: str) -> list[dict[str, Any]]:
    done = mount.cli("why", "--json", mount.path / name)
    assert done.returncode == 0, done.stderr
    extents: list[dict[str, Any]] = json.loads(done.stdout)["extents"]
    return extents


@ONE_BACKEND
def test_metrics_are_what_the_store_has_seen(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    for name in ("train/a", "train/b", "val/c"):
        bucket.put(name, 3 * MIB)
    mount = mounted(bucket, metrics="0", prefetch="off")
    assert page(mount, "/healthz") == (200, "ok\n")
    assert page(mount, "/readyz") == (200, "ready\n")
    lab.reset()
    before = exposed(mount)
    for name in ("train/a", "train/b", "val/c", "train/a"):
        read(mount.path / name)
    mount.settled()
    after = exposed(mount)
    seen = [request for request in lab.requests() if request["bucket"] == bucket.name]

    def grown(*name: str) -> float:
        return after[name] - before.get(name, 0)

    for kind in ("get", "list", "head"):
        asked = sum(request["kind"] == kind for request in seen)
        assert grown("cachefs_origin_requests_total", kind) == asked
        assert grown("cachefs_origin_seconds_count", kind) == asked
        datasets = [n for n in after if n[0] == "cachefs_dataset_requests_total" and n[2] == kind]
        assert sum(grown(*name) for name in datasets) == asked
    assert grown("cachefs_origin_bytes_total", "in") == 9 * MIB
    assert grown("cachefs_dataset_bytes_total", "train", "in") == 6 * MIB
    assert grown("cachefs_cache_bytes_total", "admitted") == 9 * MIB
    misses = sum(grown(*name) for name in after if name[0] == "cachefs_cache_misses_total")
    assert misses == grown("cachefs_cache_misses_total", "cold") >= 3
    hits = sum(grown("cachefs_cache_hits_total", tier) for tier in ("ram", "ssd", "heap"))
    assert hits + misses == grown("cachefs_fuse_requests_total", "read") == 9  # of a block each
    assert grown("cachefs_fuse_requests_total", "open") == grown("cachefs_fuse_requests_total", "release")
    assert after["cachefs_open_files",] == 0
    # What is warm is answered without a note of who and which.
    warm = mount.ask("watch")
    for name in ("train/a", "train/b", "val/c"):
        read(mount.path / name)
    again = mount.ask("watch")
    assert again["metrics"]["fuse_open"] == warm["metrics"]["fuse_open"] + 3
    assert (again["reads"]["reads"], again["datasets"]) == (warm["reads"]["reads"], warm["datasets"])
    state = json.loads(page(mount, "/status.json")[1])
    assert state["mountpoint"] == str(mount.path) and state["slowest"] is not None
    assert "cachefs" in page(mount, "/")[1]


@ONE_BACKEND
def test_a_port_in_use_leaves_nothing_mounted(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", 1)
    first = mounted(bucket, metrics="0")
    port = first.ask("status")["endpoint"]
    second = mounted(bucket, start=False, metrics=port)
    done = second.try_start()
    assert done.returncode == 1
    assert f"cannot listen at {port}: Address already in use: choose another --metrics" in done.stderr
    assert not mounts_at(second.path)
    second.allowed.append("cannot listen at")
    first.stop()
    second.start()


@BOTH_BACKENDS
def test_a_reader_that_hangs_is_named(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    bucket.put("file", 1 * MIB)
    mount = mounted(bucket, timeout=60)
    lab.fault("hang", key="file")
    reader = subprocess.Popen([sys.executable, "-c", READ, mount.path / "file"])
    try:
        eventually(lambda: mount.ask("watch")["waiting"], "a read that waits")
        done = mount.cli("top", "--json", "--total", "--pid", os.getpid(), mount.path)
        found = json.loads(done.stdout)
        [row] = [row for row in found["processes"] if row["pid"] == reader.pid]
        assert (row["parent"], row["waiting"] > 0) == (os.getpid(), True)
        assert {(wait["key"], wait["on"], wait["pid"]) for wait in found["waiting"]} == {
            ("file", "origin", reader.pid)
        }
        done = mount.cli("top", "-n", "1", "-i", "500ms", mount.path)
        [line] = [line for line in done.stdout.splitlines() if str(reader.pid) in line]
        share = re.search(r"(\d+) %", line)
        # All of the time; but what it is divided by is measured out here, where a busy machine keeps the clock waiting.
        assert "origin: read file (" in line and share and int(share[1]) > 50, line
    finally:
        lab.clear_faults()
        reader.wait(60)
    after = json.loads(mount.cli("top", "--json", "--total", mount.path).stdout)
    assert after["waiting"] == [] and after["waited_s"]["origin"] > 0
    assert after["blocked_s"] <= after["seconds"]


@BOTH_BACKENDS
def test_who_waits_for_a_name_or_a_close_is_named_and_billed(
    mounted: Mounted, bucket: Bucket, lab: LabStore
) -> None:
    bucket.put("d/file", 10)
    mount = mounted(bucket, read_only=False, prefetch="off", timeout=60)
    lab.shape(latency_ms=20)  # for what has ended already to be less than what has not
    work = {
        ("names", "d"): "import os, sys; os.listdir(sys.argv[1] + '/d')",
        ("writes", "new"): "import sys; open(sys.argv[1] + '/new', 'wb').write(b'x')",
    }
    for (on, key), program in work.items():
        lab.fault("hang", kind="list" if on == "names" else "put", key="*")
        process = subprocess.Popen([sys.executable, "-c", program, mount.path])
        try:
            eventually(lambda on=on: [w for w in mount.ask("watch")["waiting"] if w["on"] == on], "it waits")
            found = json.loads(mount.cli("top", "--json", "--total", "--pid", os.getpid(), mount.path).stdout)
            assert (key, process.pid) in {(wait["key"].rstrip("/"), wait["pid"]) for wait in found["waiting"]}
            [row] = [row for row in found["processes"] if row["pid"] == process.pid]
            assert row["blocked_s"] > sum(row["waited_s"].values())  # that one has not ended
        finally:
            lab.clear_faults()
            process.wait(60)
        after = json.loads(mount.cli("top", "--json", "--total", mount.path).stdout)
        [row] = [row for row in after["processes"] if row["pid"] == process.pid]
        assert after["waiting"] == [] and row["waiting"] == 0
        assert row["calls"] > 0 and row["waited_s"][on] > 0 and row["waited_s"]["origin"] == 0
        billed = json.loads(mount.cli("ledger", "--json", mount.path).stdout)["processes"]
        [row] = [row for row in billed if row["pid"] == process.pid]
        assert row["requests"].get("list" if on == "names" else "put"), row
    assert row["bytes_out"] == 1


@ONE_BACKEND
def test_why(mounted: Mounted, bucket: Bucket) -> None:
    bucket.put("file", 3 * MIB)
    bucket.put("large", 20 * MIB)
    mount = mounted(bucket, prefetch="off")
    assert [row["tiers"] for row in why(mount, "large")] == [[], []]
    read(mount.path / "large")
    read(mount.path / "file")
    mount.settled()
    rows = why(mount, "large")
    assert [sum(copy["blocks"] for copy in row["tiers"]) for row in rows] == [16, 4]
    rows = why(mount, "file")
    assert rows[0]["last_miss"]["reason"] == "cold" and rows[0]["last_miss"]["asked"] == ["origin"]

    assert mount.cli("evict", mount.path / "file").returncode == 0
    mount.drop_kernel_pages()
    read(mount.path / "file")
    assert why(mount, "file")[0]["last_miss"]["reason"] == "evicted"

    bucket.put("file", 3 * MIB, version=2)
    mount.refresh()
    read(mount.path / "file")
    assert why(mount, "file")[0]["last_miss"]["reason"] == "changed"
    told = mount.cli("why", mount.path / "file").stdout
    assert "changed: another version of the file was here" in told
    assert "object" in mount.cli("info", mount.path / "file").stdout
    assert "23.0 MiB of 23.0 MiB" in mount.cli("info", mount.path).stdout


@ONE_BACKEND
def test_the_log_level_is_changed_while_it_runs(mounted: Mounted, bucket: Bucket) -> None:
    mount = mounted(bucket, log_format="json")
    mount.allowed.append("logging at")
    assert mount.cli("log-level", "debug", mount.path).returncode == 0
    assert mount.cli("log-level", "error", mount.path).returncode == 0
    lines = [json.loads(line) for line in mount.log().splitlines()]
    assert [line["message"] for line in lines if "logging at" in line["message"]] == [
        "logging at debug from now on, as asked"
    ]


@pytest.mark.long
@ONE_BACKEND
def test_doctor_finds_the_store_and_tells_no_secret(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    mount = mounted(bucket, metrics="0.0.0.0:0")
    mount.allowed.append("there is no password")
    done = mount.cli("doctor", mount.path)
    assert f"mount {mount.path}: answers" in done.stdout
    assert "ms for a small request" in done.stdout
    assert done.returncode == 0 and "there is no password" in done.stdout
    for name, value in lab.env.items():
        if "SECRET" in name or "KEY" in name:
            assert value not in done.stdout
    lab.fault("403", kind="*")
    done = mount.cli("doctor", "--no-speed", mount.path)
    lab.clear_faults()
    mount.allowed += ["403", "denied", "credentials"]
    assert "PROBLEM  origin" in done.stdout


@ONE_BACKEND
def test_two_nodes_account_for_every_byte_and_wait(mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
    for number in range(12):
        bucket.put(f"d/{number}", 2 * MIB + number)
    nodes = together(mounted, bucket, 2, metrics="0", ram="0")
    lab.shape(latency_ms=5)
    for node in nodes:
        for name in bucket.objects:
            assert (node.path / name).read_bytes() == bucket.objects[name]
    got = 0
    for node in nodes:
        counted = node.settled()
        got += counted["origin_bytes"]
        brought = sum(counted[f"{what}_bytes"] for what in ("admitted", "bypassed", "discarded"))
        assert (
            brought
            == counted["origin_bytes"] + counted["peer_bytes_in"]
            == sum(map(len, bucket.objects.values()))
        )
        hits = sum(counted[f"{tier}_hits"] for tier in ("ram", "ssd", "heap"))
        assert hits + counted["misses"] == counted["fuse_read"]
        found = exposed(node)
        assert found["cachefs_peer_members", "healthy"] == 1
        [there] = [name for name in found if name[0] == "cachefs_peer_bytes_total" and name[1] == "in"]
        assert found[there] == counted["peer_bytes_in"] > 0
        waited = node.ask("watch")["reads"]["waited_s"]
        # What the second one keeps is there by then: it was fetched for the first.
        assert waited["peer"] > 0 and (waited["origin"] > 0 or node is not nodes[0])
    assert got == sum(map(len, bucket.objects.values()))
    missed = [row["last_miss"] for name in bucket.objects for row in why(nodes[1], name) if row["last_miss"]]
    asked = {way for miss in missed for way in miss["asked"]}
    peer = next(m["name"] for m in nodes[1].status()["peers"]["members"] if not m["here"])
    assert asked <= {"origin", peer} and peer in asked


MOUNT_OF = """
import sys
from cachefs.daemon.asking import mount_of
from cachefs.cli.places import Place
print(mount_of(Place().convert(sys.argv[1], None, None))[1])
"""


@pytest.mark.long
@ONE_BACKEND
def test_a_daemon_that_hangs_is_named_and_what_is_below_it_is_not_looked_at(
    mounted: Mounted, bucket: Bucket
) -> None:
    bucket.put("d/file", 10)
    mount = mounted(bucket)
    daemon = mount.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        done = subprocess.run(
            [sys.executable, "-c", MOUNT_OF, mount.path / "d/new"], capture_output=True, text=True, timeout=20
        )
        assert done.stdout == "d/new\n", done.stderr
        told = mount.cli("status").stdout
        assert str(mount.path) in told and "did not answer" in told
        told = mount.cli("doctor", "--no-speed", mount.path).stdout
        assert "did not answer" in told and f"cachefs umount --lazy {mount.path}" in told
    finally:
        os.kill(daemon, signal.SIGCONT)
