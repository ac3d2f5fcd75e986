"""From the text of `--peers` to members, with the machine's own resolver."""

from __future__ import annotations

import pytest
import trio

from cachefs.peers.etcd import Registry
from cachefs.peers.listed import Dns
from cachefs.peers.membership import Membership
from cachefs.peers.node import open_source
from cachefs.peers.settings import parse_peers
from cachefs.peers.wire import VERSION, Address, Handshake

ME = Handshake("me", VERSION, "g", "f", 1.0)


@pytest.mark.parametrize("text", ["static:localhost:7070,localhost:7071", "dns:localhost:7070"])
def test_a_node_finds_itself_and_the_others(text: str) -> None:
    asked: list[Address] = []

    async def identify(address: Address) -> Handshake:
        asked.append(address)
        return Handshake("other", VERSION, "g", "f", 2.0)

    async def main() -> None:
        source = open_source(parse_peers(text), ME, Address("0.0.0.0", 7070), identify)
        known = trio.Event()
        membership = Membership(source, ME)
        membership.on_change = lambda: known.set() if membership.own else None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(membership.run)
            with trio.fail_after(20):
                await known.wait()
            nursery.cancel_scope.cancel()
        assert all(address.port == 7070 for address in membership.own_addresses)
        if text.startswith("static"):
            assert asked == [Address("localhost", 7071)]
            assert membership.ring.members == {"me": 1.0, "other": 2.0}

    trio.run(main)


def test_etcd_is_a_registry() -> None:
    async def identify(address: Address) -> Handshake:
        raise AssertionError("who registers says who it is")

    source = open_source(parse_peers("etcd:http://h:2379,https://i/team"), ME, Address("h", 1), identify)
    assert isinstance(source, Registry)


@pytest.mark.parametrize(
    ("listen", "found", "kept"),
    [
        ("0.0.0.0", ["10.0.0.1", "fd00::1"], ["10.0.0.1"]),
        ("fd00::1", ["10.0.0.1", "fd00::1"], ["fd00::1"]),
        ("::", ["10.0.0.1", "fd00::1"], ["10.0.0.1", "fd00::1"]),
        ("node1", ["10.0.0.1", "fd00::1"], ["10.0.0.1", "fd00::1"]),
        (None, ["10.0.0.1", "fd00::1"], ["10.0.0.1", "fd00::1"]),
        ("0.0.0.0", ["fd00::1"], ["fd00::1"]),
    ],
)
def test_a_name_means_the_family_that_is_listened_on(
    listen: str | None, found: list[str], kept: list[str]
) -> None:
    async def resolve(name: str, port: int) -> list[str]:
        return found

    look = Dns("svc", 7070, resolve, Address(listen, 7070) if listen else None)
    assert [address.host for address in trio.run(look)] == kept
