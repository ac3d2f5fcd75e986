"""Members from lists and DNS names: who is recognised, who stays, who goes. The clock is trio's, the resolver a table."""

from __future__ import annotations

import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base.errors import Transient
from cachefs.peers.client import RESOLVERS, Resolver
from cachefs.peers.listed import (
    ASKED_AT_ONCE,
    HANDSHAKE_TTL_S,
    IDENTIFY_S,
    LOOK_DEADLINE_S,
    MISSES,
    Dns,
    Identify,
    Listed,
    Look,
    is_local,
    is_own,
)
from cachefs.peers.membership import POLL_S, Membership, Sighting
from cachefs.peers.wire import VERSION, Address, Handshake, PeerFailed
from tests import threads
from tests.peers.exchange import in_trio

ME = Handshake("me", VERSION, "g", "f", 1.0)
LISTEN = Address("0.0.0.0", 7070)
A, B, C = (Address(f"203.0.113.{number}", 7070) for number in (1, 2, 3))
"""TEST-NET-3: addresses that are nobody's."""


class Network:
    """Who answers where, and how often it was asked."""

    def __init__(self, handshakes: Mapping[Address, Handshake]) -> None:
        self.handshakes = dict(handshakes)
        self.asked: list[Address] = []
        self.at_once = self.most_at_once = 0
        self.takes_s = 0.0

    async def identify(self, address: Address) -> Handshake:
        self.asked.append(address)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await trio.sleep(self.takes_s)
            return self.handshakes[address]
        except KeyError:
            raise ConnectionRefusedError from None
        finally:
            self.at_once -= 1


def named(addresses: Iterable[Address], node: str = "n") -> dict[Address, Handshake]:
    return {address: replace(ME, node=f"{node}{address}", life=f"{address}") for address in addresses}


def node(address: Address) -> str:
    return f"n{address}"


async def literal(name: str, port: int) -> list[str]:
    """A resolver of addresses alone."""
    if not name[0].isdigit():
        raise OSError("no such name")
    return [name]


def in_virtual_time(function: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        trio.run(function, clock=trio.testing.MockClock(autojump_threshold=0))

    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    return run


SEEN_S = 3.0
"""A join is seen by all within this time of the daemon's start."""


def source(look: Collection[Address] | Look, network: Network, listen: Address | None = LISTEN) -> Listed:
    return Listed(look if callable(look) else fixed(look), ME, listen, network.identify, literal)


def fixed(addresses: Collection[Address]) -> Look:
    async def look() -> Collection[Address]:
        return addresses

    return look


@in_virtual_time
async def test_who_is_listed_is_a_member_once_he_has_answered() -> None:
    network = Network({A: replace(ME, node="a", weight=2.0), B: replace(ME, node="b", group="other")})
    network.takes_s = 0.1
    told: list[dict[str, float]] = []
    membership = Membership(source([A, B, C], network), ME)
    membership.on_change = lambda: told.append(dict(membership.ring.members))
    with trio.move_on_after(SEEN_S):
        await membership.run()
    assert told == [{"a": 2.0}]
    assert {address: why.state for address, why in membership.incompatible.items()} == {
        B: "another group",
        C: "unknown",
    }


@in_virtual_time
async def test_one_that_hangs_holds_up_a_poll_for_a_second() -> None:
    network = Network(named([A, B]))
    slow = network.identify

    async def identify(address: Address) -> Handshake:
        await trio.sleep(3600 if address == B else 0.1)
        return await slow(address)

    network.identify = identify  # type: ignore[method-assign]
    found = await source([A, B], network).present()
    assert trio.current_time() == IDENTIFY_S
    assert {sighting.address: sighting.handshake is not None for sighting in found} == {A: True, B: False}


@in_virtual_time
async def test_known_nodes_are_asked_once_a_minute_and_silent_ones_at_every_poll() -> None:
    network = Network(named([A]))
    with trio.move_on_after(600):
        await Membership(source([A, B], network), ME).run()
    for address, every in ((A, HANDSHAKE_TTL_S), (B, POLL_S)):
        assert 600 / (every + POLL_S) <= network.asked.count(address) <= 600 / (0.8 * every) + 1


@in_virtual_time
async def test_nodes_that_start_one_after_the_other_know_each_other_at_once() -> None:
    hosts = [Address(f"203.0.113.{number}", 7070) for number in range(1, 9)]
    listening: dict[str, Membership] = {}

    def view(own: Address) -> Membership:
        me = replace(ME, node=f"n{own}", life=f"{own}")

        async def identify(address: Address) -> Handshake:
            await trio.sleep(0.001)
            if address == own:
                return me
            if address.host not in listening:
                raise ConnectionRefusedError
            listening[address.host].handshake_requested(own.host)
            return replace(me, node=f"n{address}", life=f"{address}")

        return Membership(Listed(fixed(hosts), me, LISTEN, identify, literal), me)

    async with trio.open_nursery() as nursery:
        for count, own in enumerate(hosts, 1):
            membership = listening[own.host] = view(own)
            nursery.start_soon(membership.run)
            await trio.sleep(0.3)
            assert {host: set(m.members) for host, m in listening.items()} == {
                seer: {f"n{other}" for other in hosts[:count]} for seer in listening
            }
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("unknown", "host", "early"),
    [(B, B.host, True), (B, A.host, False), (Address(A.host, 7071), A.host, True), (B, "203.0.113.99", True)],
)
def test_a_handshake_from_a_node_that_may_be_new_is_worth_an_early_poll(
    unknown: Address, host: str, early: bool
) -> None:
    async def main() -> None:
        listed = source([A, unknown], Network(named([A])))
        await listed.present()
        assert listed.handshake_requested(host) is early

    trio.run(main)


@in_virtual_time
async def test_a_join_is_seen_within_three_seconds() -> None:
    # Whenever the other begins to listen, and although a third hangs.
    for begun_s in (
        0.1,
        0.7,
        1.3,
        1.9,
        5.0,
    ):
        network = Network(named([A]))
        answering = network.identify

        async def identify(address: Address, answering: Identify = answering) -> Handshake:
            if address == C:
                await trio.sleep_forever()
            return await answering(address)

        network.identify = identify  # type: ignore[method-assign]
        membership = Membership(source([A, B, C], network), ME)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(membership.run)
            await trio.sleep(begun_s)
            network.handshakes |= named([B])
            await trio.sleep(SEEN_S)
            assert set(membership.members) == {node(A), node(B)}
            nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_node_that_asks_us_is_asked_at_the_next_poll_unless_that_was_just_now() -> None:
    network = Network(named([A, B]))
    membership = Membership(source([A, B], network), ME)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        await trio.sleep(POLL_S / 2)
        membership.handshake_requested(A.host)
        await trio.sleep(2 * POLL_S)
        assert network.asked.count(A) == 1, "it has just been asked"
        network.handshakes[A] = replace(network.handshakes[A], weight=3.0)
        membership.handshake_requested(A.host)
        await trio.sleep(SEEN_S)
        assert (network.asked.count(A), network.asked.count(B)) == (2, 1)
        assert membership.members[node(A)].weight == 3.0
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_two_nodes_that_ask_each_other_stop() -> None:
    both: dict[str, Membership] = {}
    asked = {A.host: 0, B.host: 0}

    def view(own: Address, other: Address) -> Membership:
        me = replace(ME, node=f"n{own}")

        async def identify(address: Address) -> Handshake:
            asked[own.host] += 1
            both[other.host].handshake_requested(own.host)
            return replace(ME, node=f"n{other}")

        return Membership(Listed(fixed([other]), me, None, identify, literal), me)

    both |= {A.host: view(A, B), B.host: view(B, A)}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(both[A.host].run)
        await trio.sleep(1)
        nursery.start_soon(both[B.host].run)
        await trio.sleep(HANDSHAKE_TTL_S / 2)
        assert max(asked.values()) <= 2
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_two_of_one_id_are_asked_until_they_have_two() -> None:
    network = Network({A: replace(ME, node="one", life="a"), B: replace(ME, node="one", life="b")})
    membership = Membership(source([A, B], network), ME)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        await trio.sleep(1)
        assert len(membership.members) == 1
        network.handshakes[B] = replace(ME, node="two", life="b")
        await trio.sleep(SEEN_S)
        assert set(membership.members) == {"one", "two"}
        asked = len(network.asked)
        await trio.sleep(HANDSHAKE_TTL_S / 2)
        assert len(network.asked) <= asked + 1
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_daemon_that_returns_with_another_weight_is_learnt_and_one_that_is_silent_is_kept() -> None:
    network = Network(named([A, B]))
    membership = Membership(source([A, B], network), ME)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        await trio.sleep(1)
        network.handshakes = {A: replace(ME, node="a", weight=4.0)}
        await trio.sleep(HANDSHAKE_TTL_S + SEEN_S)
        assert membership.ring.members == {"a": 4.0, f"n{B}": 1.0}
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_node_that_comes_back_under_another_address_is_one_member_at_its_new_one() -> None:
    names = Names(A.host, B.host)
    a, b = replace(ME, node="a", life="1"), replace(ME, node="b", life="1")
    network = Network({A: a, B: b})
    membership = Membership(source(Dns("svc", 7070, names), network), replace(ME, weight=0))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        await trio.sleep(1)
        before = dict(membership.ring.members)
        network.handshakes = {C: replace(a, life="2"), B: b}
        names.addresses = [B.host, C.host]
        await trio.sleep(SEEN_S)
        # The name's old address is kept for some looks more, and is nobody's.
        assert {m.name: m.addresses for m in membership.members.values()} == {"a": (C,), "b": (B,)}
        assert membership.ring.members == before == {"a": 1.0, "b": 1.0}
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_silent_addresses_are_asked_a_bounded_number_at_once() -> None:
    addresses = [Address(f"198.18.{number // 200}.{number % 200}", 7070) for number in range(300)]
    network = Network({})
    network.takes_s = 3600.0
    found = await source(set(addresses), network).present()
    assert network.most_at_once == ASKED_AT_ONCE and len(found) == 300
    assert trio.current_time() <= (300 // ASKED_AT_ONCE + 1) * IDENTIFY_S


@in_virtual_time
async def test_a_thousand_answers_are_one_change() -> None:
    addresses = [Address(f"198.18.{number // 200}.{number % 200}", 7070) for number in range(1000)]
    network = Network(named(addresses))
    network.takes_s = 0.1
    changes: list[None] = []
    membership = Membership(source(set(addresses), network), ME)
    membership.on_change = lambda: changes.append(None)
    with trio.move_on_after(SEEN_S):
        await membership.run()
    assert (len(membership.members), len(changes)) == (1000, 1)


@in_virtual_time
async def test_a_refusal_is_reported_until_there_is_a_handshake() -> None:
    trusted = False

    async def identify(address: Address) -> Handshake:
        if not trusted:
            raise PeerFailed("refused", "another key")
        return ME

    listed = Listed(fixed([A]), ME, None, identify, literal)
    assert await listed.present() == [Sighting(A, None, "another key")]
    trusted = True
    assert await listed.present() == [Sighting(A, ME)]


@in_virtual_time
async def test_a_failure_of_ours_while_asking_is_silence() -> None:
    async def identify(address: Address) -> Handshake:
        raise Transient("half a handshake")

    assert await Listed(fixed([A]), ME, None, identify, literal).present() == [Sighting(A, None)]


@in_virtual_time
async def test_oneself_is_recognised_without_asking() -> None:
    network = Network({})
    own, namesake = Address("127.0.0.1", 7070), Address("127.0.0.1", 7071)
    membership = Membership(source([own, namesake, A], network), ME)
    with trio.move_on_after(1):
        await membership.run()
    assert membership.own_addresses == {own}
    assert set(network.asked) == {namesake, A}


@in_virtual_time
async def test_oneself_is_recognised_by_its_answer_behind_a_foreign_address() -> None:
    membership = Membership(source([A, B], Network({A: ME, **named([B])})), ME)
    with trio.move_on_after(1):
        await membership.run()
    assert membership.own_addresses == {A}


@in_virtual_time
async def test_a_node_that_serves_nobody_looks_for_nobody_like_itself() -> None:
    own = Address("127.0.0.1", 7070)
    network = Network(named([own]))
    membership = Membership(source([own], network, listen=None), replace(ME, weight=0))
    with trio.move_on_after(1):
        await membership.run()
    assert set(membership.members) == {f"n{own}"} and not membership.own


# -- names ---------------------------------------------------------------------------------------------


@given(st.lists(st.sets(st.sampled_from("abcd")), max_size=20))
def test_an_address_stays_until_it_was_missing_from_several_answers_in_a_row(answers: list[set[str]]) -> None:
    lookups = Dns("name", 7070, Names())
    real: list[set[str]] = []
    for answer in answers:
        known = lookups.answered(answer)
        real += [answer] if answer else []
        assert set(known) == set().union(*real[-MISSES:])


class Names:
    """One name, whose meaning changes; failing and hanging is what resolvers do, too."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: Collection[str] = addresses
        self.fail = self.hang = False
        self.calls = 0

    async def __call__(self, name: str, port: int) -> Collection[str]:
        self.calls += 1
        if self.hang:
            await trio.sleep_forever()
        if self.fail:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return self.addresses


@in_virtual_time
async def test_pods_come_and_go_with_their_name() -> None:
    names = Names("203.0.113.1", "203.0.113.2")
    membership = Membership(source(Dns("svc", 7070, names), Network(named([A, B, C]))), ME)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        await trio.sleep(1)
        assert set(membership.members) == {node(A), node(B)}
        names.addresses = ["203.0.113.2", "203.0.113.3"]
        await trio.sleep(SEEN_S)
        assert set(membership.members) == {node(A), node(B), node(C)}, "a miss is not a leave"
        await trio.sleep(MISSES * POLL_S)
        assert set(membership.members) == {node(B), node(C)}
        calls, names.fail = names.calls, True
        await trio.sleep(300)
        assert 300 / POLL_S <= names.calls - calls <= 300 / (0.8 * POLL_S) + 1, "at every poll"
        names.fail, names.addresses = False, ()
        await trio.sleep(300)
        assert set(membership.members) == {node(B), node(C)}, "the last good answer is kept"
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_resolver_that_hangs_delays_a_look_and_takes_nobody_away() -> None:
    names = Names("203.0.113.1")
    look = Dns("svc", 7070, names)
    assert list(await look()) == [A]
    names.hang = True
    with trio.fail_after(LOOK_DEADLINE_S + 1):
        assert list(await look()) == [A]


@in_trio
async def test_a_look_for_which_no_thread_can_be_started_takes_nobody_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (A.host, A.port))]
    look = Dns("svc", A.port, Resolver(lambda *_, **__: found))
    assert list(await look()) == [A] and not look.trouble
    with monkeypatch.context() as patch:
        threads.none_starts(patch)
        assert list(await look()) == [A] and "no thread" in look.trouble
    assert list(await look()) == [A] and not look.trouble


def test_threads_left_behind_in_a_resolver_are_bounded() -> None:
    entered, leave = threading.Semaphore(0), threading.Event()

    def hang(name: str, port: int, **_: object) -> list[object]:
        entered.release()
        leave.wait(30)
        return []

    async def main() -> None:
        resolver = Resolver(hang)
        for _ in range(RESOLVERS):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(resolver, "svc", 7070)
                assert await trio.to_thread.run_sync(entered.acquire, True, 10)
                nursery.cancel_scope.cancel()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(resolver, "svc", 7070)
            await trio.testing.wait_all_tasks_blocked()
            assert resolver.threads.statistics().tasks_waiting == 1
            leave.set()

    try:
        trio.run(main)
    finally:
        leave.set()


def test_the_system_s_resolver_knows_this_machine() -> None:
    async def main() -> None:
        resolver = Resolver()
        assert set(await resolver("localhost", 7070)) & {"127.0.0.1", "::1"}
        assert await is_own(Address("localhost", 7070), LISTEN, resolver)
        assert not await is_own(Address("localhost", 7071), LISTEN, resolver)
        for nobody in ("no-such-host.invalid", "a" * 70, "..", "\0"):
            with pytest.raises(OSError):
                await resolver(nobody, 7070)

    trio.run(main)


@pytest.mark.parametrize(
    ("address", "listen", "own"),
    [
        ("127.0.0.1", "0.0.0.0", True),
        ("127.0.0.1", "::", True),
        ("127.0.0.2", "127.0.0.1", False),  # another daemon may listen there
        ("203.0.113.1", "0.0.0.0", False),
        ("203.0.113.1", "203.0.113.1", True),
        ("node1", "node1", True),
        ("203.0.113.1", "node1", False),
    ],
)
def test_what_is_own_depends_on_where_one_listens(address: str, listen: str, own: bool) -> None:
    assert trio.run(is_own, Address(address, 7070), Address(listen, 7070), literal) is own


def test_local_addresses() -> None:
    assert is_local("127.0.0.1") and is_local("127.0.0.2") and is_local("::1")
    assert not is_local("203.0.113.1") and not is_local("no address") and not is_local("2001:db8::1")
