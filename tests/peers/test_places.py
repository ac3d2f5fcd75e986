"""What `--peers` may say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.peers.settings import (
    DnsPeers,
    Endpoint,
    EtcdPeers,
    Peers,
    StaticPeers,
    parse_address,
    parse_peers,
)
from cachefs.peers.wire import Address


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("static:b:7070,a:1", StaticPeers((Address("a", 1), Address("b", 7070)))),
        ("static:a:1, a:1,A:1", StaticPeers((Address("a", 1),))),
        ("static:[fd00::1]:7070", StaticPeers((Address("fd00::1", 7070),))),
        ("dns:cache.train.svc.cluster.local:80", DnsPeers("cache.train.svc.cluster.local", 80)),
        ("etcd:http://h:2379", EtcdPeers((Endpoint(Address("h", 2379), False),), "/cachefs")),
        ("etcd:https://h", EtcdPeers((Endpoint(Address("h", 2379), True),), "/cachefs")),
        (
            "etcd:http://h:1,https://[::1]:2/team/a/",
            EtcdPeers((Endpoint(Address("h", 1), False), Endpoint(Address("::1", 2), True)), "/team/a"),
        ),
        ("etcd:https://[::1]/x", EtcdPeers((Endpoint(Address("::1", 2379), True),), "/x")),
    ],
)
def test_places(text: str, meant: Peers) -> None:
    assert parse_peers(text) == meant
    assert parse_peers(str(meant)) == meant


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "write static:"),
        ("static:", "write static:"),
        ("zookeeper:h:1", "write static:"),
        ("static:h", "host:7070"),
        ("static:h:0", "1 to 65535"),
        ("static:h:65536", "1 to 65535"),
        ("static:h:7o", "1 to 65535"),
        ("static:h:１", "1 to 65535"),
        ("static:a:1,,b:2", "host:7070"),
        ("static:fd00::1:7070", "brackets"),
        ("static:http://h:1", "brackets"),
        ("dns:name", "host:7070"),
        ("dns:a:1,b:2", "brackets"),
        ("etcd:h:2379", "http://host:2379"),
        ("etcd:http://", "host:7070"),
        ("etcd:http://u:p@h:2379", "credentials"),
        ("etcd:http://h:2379/x,http://i:2379", "prefix"),
        ("etcd:http://h:2379?x", "http://host:2379"),
    ],
)
def test_refused_with_what_to_write(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_peers(text)


@given(st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = parse_address(text)
    except ValueError as exc:
        assert str(exc)
    else:
        assert parse_address(str(address)) == address
