"""Who a node is and how it is found: its id stays with its cache, whatever its address; names with several addresses; and
nodes that are listed and cannot share, or do not trust each other."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import trustme

from bench.lab.netns import Host, StoreOn, static_peers
from tests.cluster.nodes import PORT, Cluster, Clustered, Dataset, Node, eventually

pytestmark = pytest.mark.long

MIB = 1 << 20


def ids(cluster: Cluster) -> list[set[str]]:
    """The members each node knows."""
    return [{m["id"] for m in node.ask("status")["peers"]["members"]} for node in cluster.nodes]


def all_known(cluster: Cluster) -> bool:
    seen = ids(cluster)
    return all(len(one) == len(cluster.nodes) and one == seen[0] for one in seen)


def move(node: Node, host: Host) -> None:
    """Where its next daemon lives."""
    node.host = host
    node.options["peer_listen"] = f"{host.address}:{PORT}"


def test_caches_under_other_addresses_are_worth_what_they_were(
    data: Dataset, lab: StoreOn, hosts: list[Host], cluster_of: Clustered
) -> None:
    data.many(60, 150_000)
    data.put("large.bin", 40 * MIB + 17)
    cluster = cluster_of(data, hosts[:3]).start()
    eventually(lambda: all_known(cluster), "they know each other")
    before = ids(cluster)
    cluster.read_all()
    assert data.sent() <= 1.02 * data.size
    for node in cluster.nodes:
        node.stop()
    for node, host in zip(cluster.nodes, (hosts[1], hosts[2], hosts[0]), strict=True):
        move(node, host)
    lab.reset()
    cluster.start()
    eventually(lambda: all_known(cluster), "they know each other again")
    assert ids(cluster) == before
    cluster.read_all()
    assert data.sent() == 0
    shown = cluster.nodes[0].cli("peers", cluster.nodes[0].path).stdout.splitlines()
    for line, member in zip(shown[1:], cluster.nodes[0].ask("status")["peers"]["members"], strict=True):
        assert line.split()[:2] == [member["name"], member["id"][:8]]


def test_a_copied_cache_directory_makes_no_second_node_of_one_id(
    data: Dataset, hosts: list[Host], cluster_of: Clustered
) -> None:
    data.many(20, 100_000)
    cluster = cluster_of(data, hosts[:3])
    one, two, three = cluster.nodes
    for node in cluster.nodes:
        node.allowed.append("this node's id")
    one.start()
    one.stop()
    for copy in (two, three):
        copy.cache.mkdir()
        shutil.copy(one.cache / "node", copy.cache / "node")
    cluster.start()
    eventually(lambda: all_known(cluster), "each has an id of its own")
    names = {(node.cache / "node").read_text().strip() for node in cluster.nodes}
    assert names == ids(cluster)[0] and len(names) == 3
    assert sum("this node takes another" in node.log() for node in cluster.nodes) == 2
    cluster.read_all()
    assert data.sent() <= 1.02 * data.size


RESOLVER = """
import os, socket
from pathlib import Path

asked = socket.getaddrinfo
def getaddrinfo(host, port, *args, **more):
    if host == "nodes.test":
        found = Path(os.environ["HOSTS_OF_NODES"]).read_text().split()
        return [(0, 0, 0, "", (address, port)) for address in found]
    return asked(host, port, *args, **more)
socket.getaddrinfo = getaddrinfo
"""
"""A hosts file for one name, in the daemons' Python."""


def test_a_name_with_dead_addresses_and_nodes_that_move(
    data: Dataset, lab: StoreOn, hosts: list[Host], cluster_of: Clustered, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RESOLVER)
    known = tmp_path / "hosts"
    # Of each node one address where nobody listens: as an AAAA record beside an A record.
    known.write_text("".join(f"{host.address} fd00::{n + 1}\n" for n, host in enumerate(hosts[:3])))
    data.many(60, 150_000)
    cluster = cluster_of(data, hosts[:3], peers=f"dns:nodes.test:{PORT}", peer_listen=None)
    for node in cluster.nodes:
        node.env |= {"PYTHONPATH": str(tmp_path), "HOSTS_OF_NODES": str(known)}
    cluster.start()
    eventually(lambda: all_known(cluster), "they know each other")
    assert all(
        member["share"] == pytest.approx(1 / 3)
        for member in cluster.nodes[0].ask("status")["peers"]["members"]
    )
    cluster.read_all()
    assert data.sent() <= 1.02 * data.size
    assert cluster.failures() == {}
    # A rolling update: one after the other is at another address.
    moved = cluster.nodes[2]
    moved.stop()
    move(moved, hosts[3])
    moved.options["peer_listen"] = None
    known.write_text("".join(f"{host.address}\n" for host in (*hosts[:2], hosts[3])))
    lab.reset()
    moved.start()
    place = f"{hosts[3].address}:{PORT}"
    eventually(
        lambda: all(
            place in {m["name"] for m in node.ask("status")["peers"]["members"]} for node in cluster.nodes
        ),
        "its new address is known",
    )
    assert all_known(cluster)
    cluster.read_all()
    assert data.sent() == 0


def test_who_listens_on_everything_is_reached_on_both_families(
    data: Dataset, hosts: list[Host], cluster_of: Clustered
) -> None:
    (host,) = hosts[:1]
    cluster = cluster_of(
        data, [host], peers=f"static:{host.address}:{PORT},[::1]:{PORT}", peer_listen=f"[::]:{PORT}"
    ).start()
    eventually(lambda: ids(cluster) != [set()], "it knows itself")
    (member,) = cluster.nodes[0].ask("status")["peers"]["members"]
    assert member["here"] and len(member["addresses"]) == 2
    with host.inside():
        for address in (host.address, "::1"):
            socket.create_connection((address, PORT), 2).close()


def test_nodes_that_are_not_mounted_alike_say_so_and_go_on(
    data: Dataset, lab: StoreOn, hosts: list[Host], cluster_of: Clustered
) -> None:
    data.many(20, 100_000)
    other = Dataset(lab, f"{data.name}-b")
    peers = static_peers(hosts[:3], PORT)
    cluster = cluster_of(data, hosts[:1], peers=peers)
    larger = cluster_of(data, hosts[1:2], peers=peers, block_size="4M")
    elsewhere = cluster_of(other, hosts[2:3], peers=peers)
    nodes = [one.nodes[0] for one in (cluster, larger, elsewhere)]
    for node in nodes:
        node.allowed.append("nothing is shared with it")
        node.start()
    first = nodes[0]
    eventually(
        lambda: (
            sorted(a["state"] for a in first.ask("status")["peers"]["incompatible"])
            == ["another block size", "other sources"]
        ),
        "it is seen",
    )
    shown = first.cli("peers", first.path)
    assert "another block size" in shown.stdout and "other sources" in shown.stdout
    assert "4194304" in shown.stderr and "1048576" in shown.stderr and other.name in shown.stderr
    assert first.log().count("nothing is shared with it") == 2
    cluster.read_all()
    assert data.sent() <= 1.02 * data.size
    assert "another block size" in first.cli("status", first.path).stdout


def certificates(place: Path, authority: trustme.CA, name: str) -> dict[str, Path]:
    """Options for one node."""
    own = authority.issue_cert(f"{name}.cluster")
    found = {kind: place / f"{name}-{kind}.pem" for kind in ("peer_cert", "peer_cert_key", "peer_ca")}
    own.private_key_pem.write_to_path(found["peer_cert_key"])
    own.cert_chain_pems[0].write_to_path(found["peer_cert"])
    authority.cert_pem.write_to_path(found["peer_ca"])
    return found


def test_with_certificates_a_node_of_another_authority_shares_with_nobody(
    data: Dataset, hosts: list[Host], cluster_of: Clustered, tmp_path: Path
) -> None:
    data.many(40, 150_000)
    data.put("large.bin", 20 * MIB + 17)
    ours, theirs = trustme.CA(), trustme.CA()
    cluster = cluster_of(data, hosts[:3], peer_key_file=None)
    for node, authority in zip(cluster.nodes, (ours, ours, theirs), strict=True):
        node.options |= certificates(tmp_path, authority, node.host.name)
    for node in cluster.nodes:
        node.allowed.append("is not trusted")
    cluster.start()
    one, two, stranger = cluster.nodes
    eventually(lambda: Cluster(data, [one, two]).peers_listed() == [2, 2], "they know each other")
    cluster.read_all()
    # Once for both of ours, once for the stranger. Handshakes cost a busy machine some deadlines; alone it would be thrice.
    assert data.sent() < 2.5 * data.size
    assert one.metrics()["peer_bytes_in"] > 0 and two.metrics()["peer_bytes_in"] > 0
    assert stranger.metrics()["peer_bytes_in"] == stranger.metrics()["peer_bytes_out"] == 0
    for node, strange in ((one, stranger), (stranger, one)):

        def refuses(node: Any = node, strange: Any = strange) -> bool:
            lines = node.cli("peers", node.path).stdout.splitlines()
            return any(line.startswith(strange.name) and "refused" in line for line in lines)

        eventually(refuses, "the next poll has asked it")


def test_half_a_weight_is_half_a_share(data: Dataset, hosts: list[Host], cluster_of: Clustered) -> None:
    data.many(400, 20_000)
    cluster = cluster_of(data, hosts[:3])
    cluster.nodes[0].options["group_weight"] = 0.5
    cluster.start()
    eventually(lambda: all_known(cluster), "they know each other")
    for node in cluster.nodes:
        assert {m["name"]: round(m["share"], 2) for m in node.ask("status")["peers"]["members"]} == {
            cluster.nodes[0].name: 0.2,
            cluster.nodes[1].name: 0.4,
            cluster.nodes[2].name: 0.4,
        }
    cluster.read_all()
    assert data.sent() <= 1.02 * data.size
    half, *whole = (metrics["origin_bytes"] / data.size for metrics in cluster.metrics())
    # 400 files: four standard deviations are a tenth.
    assert half == pytest.approx(0.2, abs=0.1) and whole == pytest.approx([0.4, 0.4], abs=0.1)


def test_an_etcd_that_does_not_answer_is_told_of(
    data: Dataset, hosts: list[Host], cluster_of: Clustered
) -> None:
    data.many(5, 50_000)
    cluster = cluster_of(data, hosts[:1], peers=f"etcd:http://{hosts[1].address}:2379")
    (node,) = cluster.nodes
    node.allowed += ["etcd", "not among its peers"]
    node.start()
    eventually(lambda: node.ask("status")["peers"]["trouble"], "it has noticed")
    assert any("etcd does not answer" in line for line in node.ask("status")["warnings"])
    shown = node.cli("peers", node.path)
    assert shown.returncode == 0 and "etcd does not answer" in shown.stderr
    cluster.read_all()
    assert data.sent() == data.size
