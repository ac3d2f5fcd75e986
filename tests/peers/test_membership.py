"""Who belongs to the ring, out of whom sources report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.base.metrics import Metrics
from cachefs.peers import settings as peer_settings
from cachefs.peers.membership import POLL_S, Member, Membership, Sighting, fingerprint
from cachefs.peers.node import PeerNode
from cachefs.peers.wire import VERSION, Address, Handshake
from tests.peers.test_settings import ALONE

ME = Handshake("me", VERSION, "g", "f", 1.0, "life", 1 << 20, "s3://a")
OTHER = replace(ME, node="other", life="another")
HERE, THERE = Address("10.0.0.1", 7070), Address("10.0.0.2", 7070)


class Scripted:
    """A source that reports what it is told, one report after the other."""

    trouble = ""

    def __init__(self, *reports: Iterable[Sighting] | None) -> None:
        self.reports = list(reports)
        self.left = False

    async def present(self) -> Iterable[Sighting] | None:
        return self.reports.pop(0) if self.reports else None

    def handshake_requested(self, host: str) -> None: ...

    async def leave(self) -> None:
        self.left = True


def after(*reports: Iterable[Sighting] | None, me: Handshake = ME) -> Membership:
    """A membership after as many polls; then it stops."""
    return polled(Membership(Scripted(*reports), me))


def polled(membership: Membership) -> Membership:
    source = membership.source
    assert isinstance(source, Scripted)

    async def main() -> None:
        with trio.move_on_after(POLL_S * len(source.reports)):
            await membership.run()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert source.left and not source.reports
    return membership


def test_members_and_the_ring_of_them() -> None:
    found = after([Sighting(HERE, ME), Sighting(THERE, replace(OTHER, weight=3.0))])
    assert found.members == {
        "me": Member("me", (HERE,), 1.0, "life"),
        "other": Member("other", (THERE,), 3.0, "another"),
    }
    assert (found.own, found.own_addresses, found.incompatible) == ({"me"}, {HERE}, {})
    assert found.ring.members == {"me": 1.0, "other": 3.0}
    assert found.members["other"].addresses == (THERE,)


@pytest.mark.parametrize(
    ("handshake", "state"),
    [
        (OTHER, ""),
        (replace(OTHER, weight=0.5), ""),
        (None, "unknown"),
        (replace(OTHER, weight=0), "gives nothing"),
        (replace(OTHER, group="h"), "another group"),
        (replace(OTHER, sources="e", shows="s3://b"), "other sources"),
        (replace(OTHER, sources="e", block_size=4 << 20), "another block size"),
        (replace(OTHER, version=VERSION + 1), "another version"),
        (replace(OTHER, version=1, life="", block_size=0, shows=""), "another version"),
        (replace(ME, life="another"), "our id"),
    ],
)
def test_who_belongs_and_why_the_others_do_not(handshake: Handshake | None, state: str) -> None:
    found = after([Sighting(HERE, ME), Sighting(THERE, handshake)])
    assert set(found.members) == ({"me"} if state else {"me", "other"})
    assert {address: why.state for address, why in found.incompatible.items()} == (
        {THERE: state} if state else {}
    )


@pytest.mark.parametrize(
    ("handshake", "values"),
    [
        (replace(OTHER, sources="e", block_size=4 << 20), ["4194304", "1048576"]),
        (replace(OTHER, sources="e", shows="s3://b"), ["s3://b", "s3://a"]),
        (replace(OTHER, version=1), ["version 1", f"version {VERSION}"]),
        (replace(OTHER, group="h"), []),  # somebody wanted that
        (None, []),
    ],
)
def test_who_should_share_and_cannot_is_told_of_once_with_both_values(
    caplog: pytest.LogCaptureFixture, handshake: Handshake | None, values: list[str]
) -> None:
    membership = Membership(Scripted(*[[Sighting(HERE, ME), Sighting(THERE, handshake)]] * 3), ME)
    polled(membership)
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(told) == bool(values)
    assert all(value in told[0] for value in [*values, str(THERE)] if values)


def test_who_answers_and_is_not_trusted_is_told_of_until_he_is(caplog: pytest.LogCaptureFixture) -> None:
    refused = [Sighting(HERE, ME), Sighting(THERE, None, "another key")]
    again = [Sighting(HERE, ME), Sighting(THERE, None, "the clock is 31 s off")]
    membership = after(refused, again)
    assert membership.incompatible[THERE].state == "refused" and "31 s" in membership.incompatible[THERE].why
    assert [r.levelname for r in caplog.records if r.levelname != "INFO"] == ["WARNING"]
    assert "other" in after(refused, [Sighting(HERE, ME), Sighting(THERE, OTHER)]).members


def test_an_address_where_nobody_answered_yet_moves_nobody_s_share() -> None:
    known, other = after([Sighting(HERE, ME)]), after([Sighting(HERE, ME), Sighting(THERE, None)])
    assert known.ring.members == other.ring.members == {"me": 1.0}
    found = after([Sighting(HERE, ME), Sighting(THERE, None)], [Sighting(HERE, ME), Sighting(THERE, OTHER)])
    assert found.ring.members == {"me": 1.0, "other": 1.0}


def test_a_node_under_another_address_has_the_share_it_had() -> None:
    before = after([Sighting(HERE, ME), Sighting(THERE, OTHER)])
    elsewhere = [Sighting(THERE, replace(ME, life="l2")), Sighting(HERE, replace(OTHER, life="l3"))]
    later = after(elsewhere, me=replace(ME, life="l2"))
    extents = [bytes([number] * 16) for number in range(64)]
    assert [before.ring.owners(e, 0, 2) for e in extents] == [later.ring.owners(e, 0, 2) for e in extents]
    assert {before.ring.owners(e, 0)[0] for e in extents} == {"me", "other"}


def test_several_addresses_of_one_life_are_one_member_and_of_an_earlier_one_none() -> None:
    six, old = Address("fd00::2", 7070), Address("10.0.0.9", 7070)
    back = replace(OTHER, life="newer")
    found = after([Sighting(old, OTHER), Sighting(HERE, ME), Sighting(six, back), Sighting(THERE, back)])
    assert found.members["other"].addresses == (THERE, six)
    assert len(found.members) == 2 and found.ring.members == {"me": 1.0, "other": 1.0}


def test_a_node_without_a_share_sees_others_and_owns_nothing() -> None:
    client = replace(ME, weight=0)
    found = after([Sighting(HERE, client), Sighting(THERE, OTHER)], me=client)
    assert set(found.members) == {"other"} and not found.own


def test_a_node_listed_twice_knows_both_addresses() -> None:
    found = after([Sighting(HERE, ME), Sighting(Address("node1", 7070), ME), Sighting(THERE, OTHER)])
    assert found.own == {"me"} and found.own_addresses == {HERE, Address("node1", 7070)}


def test_while_a_source_knows_nothing_yet_members_stay() -> None:
    found = after([Sighting(HERE, ME), Sighting(THERE, OTHER)], None)
    assert set(found.members) == {"me", "other"}


def test_changes_are_told_once() -> None:
    told: list[set[str]] = []
    source = Scripted(
        [Sighting(HERE, ME)],
        [Sighting(HERE, ME)],  # the same
        [Sighting(HERE, ME), Sighting(THERE, None)],
        [Sighting(THERE, OTHER), Sighting(HERE, ME)],
        [Sighting(HERE, ME), Sighting(THERE, OTHER)],  # the same
        [Sighting(HERE, ME), Sighting(THERE, replace(OTHER, weight=2))],
        [Sighting(HERE, ME)],
    )
    membership = Membership(source, ME)
    membership.on_change = lambda: told.append(set(membership.members))
    polled(membership)
    assert told == [{"me"}, {"me"}, {"me", "other"}, {"me", "other"}, {"me"}]


def test_another_self_is_recognised_from_the_next_report_on() -> None:
    membership = after([Sighting(HERE, ME), Sighting(THERE, replace(ME, life="copy"))])
    assert membership.own_addresses == {HERE} and membership.incompatible[THERE].state == "our id"
    fresh = replace(ME, node="fresh")
    membership.take_id(Scripted([Sighting(HERE, fresh), Sighting(THERE, replace(ME, life="copy"))]), fresh)
    polled(membership)
    assert membership.own == {"fresh"} and membership.own_addresses == {HERE}
    assert set(membership.members) == {"fresh", "me"} and not membership.incompatible


SIGHTINGS = st.lists(
    st.builds(
        Sighting,
        st.builds(Address, st.sampled_from(["a", "b", "fd00::1"]), st.integers(1, 3)),
        st.none()
        | st.builds(
            Handshake,
            st.sampled_from(["me", "x"]),
            st.sampled_from([VERSION, 9]),
            st.sampled_from(["g", "h"]),
            st.just("f"),
            st.sampled_from([0.0, 1.0, 2.0]),
            st.sampled_from(["life", "later"]),
            st.just(1 << 20),
        ),
    ),
    max_size=6,
    unique_by=lambda sighting: sighting.address,
)


@settings(deadline=None)
@given(st.lists(SIGHTINGS, max_size=5))
def test_the_last_report_is_what_holds(reports: list[list[Sighting]]) -> None:
    found, alone = after(*reports), after(reports[-1] if reports else [])
    assert (found.members, found.own, found.incompatible) == (alone.members, alone.own, alone.incompatible)
    assert found.own <= found.members.keys()
    assert found.ring.members == {name: member.weight for name, member in found.members.items()}
    places = [address for member in found.members.values() for address in member.addresses]
    assert len(set(places)) == len(places) and not found.incompatible.keys() & set(places)
    assert {*places, *found.incompatible} <= {
        sighting.address for sighting in (reports[-1] if reports else [])
    }


def test_a_fingerprint_is_of_the_set_of_sources_and_the_block_size() -> None:
    assert fingerprint(["s3://a", "s3://b"], 1 << 20) == fingerprint(["s3://b", "s3://a"], 1 << 20)
    different = {
        fingerprint(sources, block_size)
        for sources, block_size in [
            (["s3://a"], 1 << 20),
            (["s3://a"], 1 << 21),
            (["s3://a", "s3://b"], 1 << 20),
            (["s3://as3://b"], 1 << 20),
            ([], 1 << 20),
        ]
    }
    assert len(different) == 5


@pytest.mark.parametrize("handed_over", [True, False])
def test_a_node_whose_mount_is_handed_over_stays_registered(tmp_path: Path, handed_over: bool) -> None:
    """Its share would go to other nodes, and come back seconds later."""
    config = replace(ALONE, peers="static:127.0.0.1:7070", peer_listen="127.0.0.1:7070")
    chosen = peer_settings.settings(config)
    assert chosen is not None
    node = PeerNode(config, chosen, chosen.listen, ["s3://b"], Metrics(), tmp_path)
    node._membership.source = source = Scripted()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node._follow)
            await trio.testing.wait_all_tasks_blocked()
            await node.leave(handed_over=handed_over)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert source.left is not handed_over
