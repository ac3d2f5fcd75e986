"""Who belongs to the ring, out of whom sources report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from cachefs.peers.membership import Member, Membership, Report, Sighting, fingerprint
from cachefs.peers.wire import VERSION, Address, Hello

ME = Hello("me", VERSION, "g", "f", 1.0)
OTHER = replace(ME, node="other")
HERE, THERE = Address("10.0.0.1", 7070), Address("10.0.0.2", 7070)


class Scripted:
    """A source that reports what it is told, one report after the other."""

    def __init__(self, *reports: Iterable[Sighting]) -> None:
        self.reports = reports

    async def run(self, report: Report) -> None:
        for sightings in self.reports:
            report(sightings)
            await trio.lowlevel.checkpoint()


def after(*reports: Iterable[Sighting], me: Hello = ME) -> Membership:
    membership = Membership(Scripted(*reports), me)
    trio.run(membership.run)
    return membership


def test_members_and_the_ring_of_them() -> None:
    found = after([Sighting(HERE, ME), Sighting(THERE, replace(OTHER, weight=3.0))])
    assert found.members == {
        "10.0.0.1:7070": Member("10.0.0.1:7070", "10.0.0.1", 7070, 1.0, "g"),
        "10.0.0.2:7070": Member("10.0.0.2:7070", "10.0.0.2", 7070, 3.0, "g"),
    }
    assert found.own == {"10.0.0.1:7070"}
    assert found.ring.members == {"10.0.0.1:7070": 1.0, "10.0.0.2:7070": 3.0}
    assert found.members["10.0.0.2:7070"].address == THERE


@pytest.mark.parametrize(
    ("hello", "belongs"),
    [
        (None, True),  # unknown yet: listed hosts are mostly right
        (OTHER, True),
        (replace(OTHER, weight=0.5), True),
        (replace(OTHER, weight=0), False),
        (replace(OTHER, group="h"), False),
        (replace(OTHER, sources="e"), False),
        (replace(OTHER, version=VERSION + 1), False),
    ],
)
def test_who_belongs(hello: Hello | None, belongs: bool) -> None:
    assert (str(THERE) in after([Sighting(HERE, ME), Sighting(THERE, hello)]).members) is belongs


def test_a_node_without_a_share_sees_others_and_owns_nothing() -> None:
    client = replace(ME, weight=0)
    found = after([Sighting(HERE, client), Sighting(THERE, OTHER)], me=client)
    assert set(found.members) == {str(THERE)} and not found.own


def test_a_node_listed_twice_knows_both_names() -> None:
    found = after([Sighting(HERE, ME), Sighting(Address("node1", 7070), ME), Sighting(THERE, OTHER)])
    assert found.own == {str(HERE), "node1:7070"}


def test_changes_are_counted_and_told_once() -> None:
    told: list[set[str]] = []
    source = Scripted(
        [Sighting(HERE, ME)],
        [Sighting(HERE, ME)],  # the same
        [Sighting(HERE, ME), Sighting(THERE, None)],
        [Sighting(THERE, OTHER), Sighting(HERE, ME)],  # now it is known who, and nothing depends on it
        [Sighting(HERE, ME), Sighting(THERE, replace(OTHER, weight=2))],
        [Sighting(HERE, ME)],
    )
    membership = Membership(source, ME, lambda: told.append(set(membership.members)))
    trio.run(membership.run)
    both = {str(HERE), str(THERE)}
    assert told == [{str(HERE)}, both, both, {str(HERE)}]
    assert membership.version == 4


SIGHTINGS = st.lists(
    st.builds(
        Sighting,
        st.builds(Address, st.sampled_from(["a", "b", "fd00::1"]), st.integers(1, 3)),
        st.none()
        | st.builds(
            Hello,
            st.sampled_from(["me", "x"]),
            st.sampled_from([VERSION, 9]),
            st.sampled_from(["g", "h"]),
            st.just("f"),
            st.sampled_from([0.0, 1.0, 2.0]),
        ),
    ),
    max_size=6,
    unique_by=lambda sighting: sighting.address,
)


@settings(deadline=None)
@given(st.lists(SIGHTINGS, max_size=5))
def test_the_last_report_is_what_holds(reports: list[list[Sighting]]) -> None:
    found, alone = after(*reports), after(reports[-1] if reports else [])
    assert (found.members, found.own) == (alone.members, alone.own)
    assert found.own <= found.members.keys()
    assert set(found.ring.members) == set(found.members)


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
