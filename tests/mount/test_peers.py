"""Two and three daemons with real mounts on one machine, that share what they cache."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import free_ports
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import Mount, eventually
from tests.mount.restarting import next_daemon

KIB, MIB = 1 << 10, 1 << 20


def together(mounted: Mounted, bucket: Bucket, count: int, **options: object) -> list[Mount]:
    found = free_ports(count)
    peers = "static:" + ",".join(f"127.0.0.1:{port}" for port in found)
    mounts = [
        mounted(bucket, peers=peers, peer_listen=f"127.0.0.1:{port}", **{"prefetch": "off", **options})
        for port in found
    ]

    def met(mount: Mount) -> bool:
        members = mount.status()["peers"]["members"]
        return [row["state"] for row in members] == ["healthy"] * count

    eventually(lambda: all(map(met, mounts)), "the nodes know each other")
    return mounts


def put_files(bucket: Bucket, count: int = 24) -> dict[str, bytes]:
    return {f"d/f{n:02}": bucket.put(f"d/f{n:02}", 100 * KIB + n * 7777) for n in range(count)}


def read_all(mounts: Sequence[Mount], files: dict[str, bytes]) -> None:
    for turn, mount in enumerate(mounts):
        names = sorted(files)[turn:] + sorted(files)[:turn]
        for name in names:
            assert (mount.path / name).read_bytes() == files[name]


def test_what_one_node_has_fetched_the_other_does_not_ask_the_store_for(
    mounted: Mounted, bucket: Bucket
) -> None:
    files = put_files(bucket)
    big = bucket.put("big", 40 * MIB + 5)
    mounts = together(mounted, bucket, 2)
    read_all(mounts, files)
    for mount in mounts:
        assert (mount.path / "big").read_bytes() == big
    assert sum(mount.settled()["origin_bytes"] for mount in mounts) == sum(map(len, files.values())) + len(
        big
    )
    small = [
        r
        for r in bucket.store.requests()
        if r["bucket"] == bucket.name and r["kind"] == "get" and r["key"] != "big"
    ]
    assert len(small) == len(files)
    for mount in mounts:
        peers = mount.status()["peers"]
        assert [row["state"] for row in peers["members"]] == ["healthy", "healthy"]
        assert [row["here"] for row in peers["members"]].count(True) == 1
        assert sum(row["bytes_in"] for row in peers["members"]) == mount.metrics()["peer_bytes_in"] > 0


@pytest.mark.long
@pytest.mark.backends("native")
def test_a_node_is_the_same_one_after_its_daemon_was_killed(mounted: Mounted, bucket: Bucket) -> None:
    """Its id, and so its share of the cache: others get bytes from it again."""
    files = put_files(bucket)
    first, second = together(mounted, bucket, 2, restart=True)

    def ids(mount: Mount) -> list[tuple[str, bool, str]]:
        return [(row["id"], row["here"], row["state"]) for row in mount.ask("status")["peers"]["members"]]

    read_all([first], files)
    before = ids(first)
    first.allowed += ["the daemon has died", "was left by process"]
    second.allowed += ["peer"]
    first.killed = True
    os.kill(first.pid, signal.SIGKILL)
    next_daemon(first, 0, 30.0)
    eventually(lambda: ids(first) == before and "healthy" == ids(second)[0][2] == ids(second)[1][2], "both")
    read_all([first, second], files)
    assert first.settled()["peer_bytes_out"] > 0


@pytest.mark.long
@pytest.mark.backends("native")
def test_an_upgrade_ends_the_server_of_a_node_and_its_next_daemon_serves(
    mounted: Mounted, bucket: Bucket
) -> None:
    files = put_files(bucket)
    first, second = together(mounted, bucket, 2, restart=True)
    read_all([first], files)
    done = first.cli("upgrade", first.path)
    assert done.returncode == 0, done.stderr
    first.pids.append(first.ask("status")["pid"])
    assert "stopped without closing cleanly" not in first.log()
    read_all([second], files)
    assert first.settled()["peer_bytes_out"] > 0
    assert sum(mount.settled()["origin_bytes"] for mount in (first, second)) < sum(map(len, files.values()))


@pytest.mark.long
@ONE_BACKEND
def test_readers_outlive_the_nodes_they_share_with(mounted: Mounted, bucket: Bucket) -> None:
    files = put_files(bucket)
    first, second, third = together(mounted, bucket, 3)
    third.allowed += ["peer"]
    read_all([first], files)
    first.kill()
    read_all([second], files)
    second.stop()
    read_all([third], files)
    assert third.status()["metrics"]["peer_failures"] >= 0


@ONE_BACKEND
def test_a_port_in_use_is_told_before_anything_is_mounted(mounted: Mounted, bucket: Bucket) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        mount = mounted(bucket, start=False, peers=f"static:{place}", peer_listen=place)
        done = mount.try_start()
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "in use" in done.stderr and place in done.stderr
    mount.allowed.append("in use")


REFUSED = {
    "anybody could ask": ({"peers": "static:10.0.0.1:7070", "peer_listen": "0.0.0.0:7070"}, "for any client"),
    "anybody could answer": (
        {"peers": "static:10.0.0.1:7070", "no_sharing": True},
        "any machine could answer",
    ),
    "no place": ({"peers": "nowhere"}, "not a place to find peers"),
    "not this machine": ({"peers": "static:192.0.2.1:7070"}, "none of --peers"),
    "no peers": ({"peer_listen": "127.0.0.1:7070"}, "needs --peers"),
    "half a certificate": ({"peers": "dns:nodes:7070", "peer_cert": "/c"}, "belong together"),
    "etcd without a place": ({"peers": "etcd:http://127.0.0.1:2379"}, "--peer-listen"),
    "both": (
        {"peers": "dns:n:1", "no_sharing": True, "peer_listen": "127.0.0.1:1"},
        "leave --peer-listen out",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
@ONE_BACKEND
def test_what_does_not_fit_together_is_told_in_a_line(mounted: Mounted, bucket: Bucket, what: str) -> None:
    options, said = REFUSED[what]
    mount = mounted(bucket, start=False, **options)
    mount.allowed.append(".")
    done = mount.try_start()
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and said in done.stderr


@ONE_BACKEND
def test_a_key_that_everybody_can_read_is_none(mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a key that is long enough to be one")
    key.chmod(0o644)
    (port,) = free_ports(1)
    options = {"peers": f"static:127.0.0.1:{port}", "peer_key_file": key}
    mount = mounted(bucket, start=False, **options)
    mount.allowed.append("everybody")
    done = mount.try_start()
    assert done.returncode == 2 and "chmod 600" in done.stderr
    key.chmod(0o600)
    mount.start()
    assert mount.status()["peers"]["listen"] == f"127.0.0.1:{port}"


@ONE_BACKEND
def test_with_a_key_strangers_get_nothing(mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
    keys = [tmp_path / "key1", tmp_path / "key2"]
    for number, key in enumerate(keys):
        key.write_text(f"a key that is long enough to be one {number}")
        key.chmod(0o600)
    files = put_files(bucket, 12)
    found = free_ports(3)
    peers = "static:" + ",".join(f"127.0.0.1:{port}" for port in found)
    mounts = [
        mounted(bucket, peers=peers, peer_listen=f"127.0.0.1:{port}", peer_key_file=key, prefetch="off")
        for port, key in zip(found, [keys[0], keys[0], keys[1]], strict=True)
    ]
    for mount in mounts:
        mount.allowed.append("is not trusted")
    read_all(mounts, files)
    friends = mounts[0].settled()["peer_bytes_in"] + mounts[1].settled()["peer_bytes_in"]
    assert friends > 0
    assert mounts[2].settled()["peer_bytes_in"] == mounts[2].settled()["peer_bytes_out"] == 0


@ONE_BACKEND
def test_each_node_warms_its_share_and_one_may_have_all_do_so(mounted: Mounted, bucket: Bucket) -> None:
    files = put_files(bucket)
    total = sum(map(len, files.values()))
    first, second = mounts = together(mounted, bucket, 2)
    done = first.cli("warm", first.path)
    assert done.returncode == 0 and "for other nodes to fetch" in done.stderr
    share = first.settled()["origin_bytes"]
    assert 0 < share < total and second.settled()["origin_bytes"] == 0
    done = first.cli("warm", "--cluster", first.path)
    assert done.returncode == 0 and "were fetched by other nodes" in done.stderr
    assert (first.settled()["origin_bytes"], second.settled()["origin_bytes"]) == (share, total - share)
    read_all(mounts, files)
    assert sum(mount.settled()["origin_bytes"] for mount in mounts) == total


@ONE_BACKEND
def test_members_and_who_holds_what_are_shown(mounted: Mounted, bucket: Bucket) -> None:
    files = put_files(bucket)
    first, _, third = together(mounted, bucket, 3)
    read_all([first], files)
    (row,) = json.loads(first.cli("locate", "--json", first.path / "d").stdout)
    total = sum(map(len, files.values()))
    own = {m["name"]: m for m in first.status()["peers"]["members"]}
    (here,) = [name for name, member in own.items() if member["here"]]
    assert (row["files"], row["bytes"], row["unreachable"]) == (len(files), total, {})
    assert row["nodes"][here] == total  # its own, and what other nodes own
    assert sum(held for name, held in row["nodes"].items() if name != here) == sum(
        member["bytes_in"] for member in own.values()
    )
    shown = first.cli("peers", first.path).stdout.splitlines()
    assert len(shown) == 4 and shown[0].split()[0] == "MEMBER"
    assert sum("this node" in line for line in shown) == 1
    assert "2 others in group default" in first.cli("status", first.path).stdout
    third.kill()
    done = first.cli("locate", first.path / "d")
    assert done.returncode == 0 and "?" in done.stdout and done.stderr
    alone = mounted(bucket)
    assert "--peers" in first.cli("peers", alone.path).stderr
    assert first.cli("locate", alone.path / "d").stdout.count("this node") == 1
