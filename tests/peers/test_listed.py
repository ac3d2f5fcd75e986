"""Members from lists and DNS names: who is recognised, who stays, who goes. The clock is trio's, the resolver a table."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import replace

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from cachefs.errors import Transient
from cachefs.peers import listed
from cachefs.peers.listed import (
    ASK_AGAIN_S,
    ASKED_AT_ONCE,
    FIRST_S,
    FRESH_S,
    IDENTIFY_S,
    INTRODUCED_FOR_S,
    LOOK_DEADLINE_S,
    LOOK_EVERY_S,
    MISSES,
    RESOLVERS,
    STRANGERS_S,
    TOGETHER_S,
    Dns,
    Listed,
    Lookups,
    Resolver,
    Static,
    is_local,
    is_own,
)
from cachefs.peers.membership import Membership, Sighting
from cachefs.peers.protocol import PeerFailed
from cachefs.peers.wire import VERSION, Address, Hello

ME = Hello("me", VERSION, "g", "f", 1.0)
LISTEN = Address("0.0.0.0", 7070)
A, B, C = (Address(f"203.0.113.{number}", 7070) for number in (1, 2, 3))
"""TEST-NET-3: addresses that are nobody's."""


class Network:
    """Who answers where, and how often it was asked."""

    def __init__(self, hellos: Mapping[Address, Hello]) -> None:
        self.hellos = dict(hellos)
        self.asked: list[Address] = []
        self.at_once = self.most_at_once = 0
        self.takes_s = 0.0

    async def identify(self, host: str, port: int) -> Hello:
        self.asked.append(Address(host, port))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await trio.sleep(self.takes_s)
            return self.hellos[Address(host, port)]
        except KeyError:
            raise ConnectionRefusedError from None
        finally:
            self.at_once -= 1


def named(addresses: Iterable[Address], node: str = "n") -> dict[Address, Hello]:
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


def source(
    look: Collection[Address] | listed.Look, network: Network, listen: Address | None = LISTEN
) -> Listed:
    looked = look if callable(look) else Static(look)
    return Listed(looked, ME, listen, network.identify, literal, random.Random(1))


@in_virtual_time
async def test_who_is_listed_is_a_member_once_he_has_answered() -> None:
    network = Network({A: replace(ME, node="a", weight=2.0), B: replace(ME, node="b", group="other")})
    network.takes_s = 0.1
    told: list[dict[str, float]] = []
    membership = Membership(
        source([A, B, C], network), ME, lambda: told.append(dict(membership.ring.members))
    )
    with trio.move_on_after(LOOK_EVERY_S[0]):
        await membership.run()
    assert told == [{"a": 2.0}]
    assert {address: why.state for address, why in membership.apart.items()} == {
        B: "another group",
        C: "unknown",
    }


@in_virtual_time
async def test_one_who_hangs_holds_up_the_first_report_for_a_second() -> None:
    network = Network(named([A, B]))
    slow = network.identify

    async def identify(host: str, port: int) -> Hello:
        await trio.sleep(3600 if host == B.host else 0.1)
        return await slow(host, port)

    network.identify = identify  # type: ignore[method-assign]
    reports: list[float] = []
    with trio.move_on_after(LOOK_EVERY_S[0]):
        await source([A, B], network).run(lambda sightings: reports.append(trio.current_time()))
    assert reports == [FIRST_S]


@in_virtual_time
async def test_known_nodes_are_asked_again_now_and_then_and_silent_ones_sooner() -> None:
    network = Network(named([A]))
    with trio.move_on_after(10 * INTRODUCED_FOR_S):
        await source([A, B], network).run(lambda sightings: None)
    # Each wait is between 0.8 of its length, and all of it and a look more; five short ones come before the silent one's.
    for address, every, first in ((A, INTRODUCED_FOR_S, 0), (B, ASK_AGAIN_S[1], 6)):
        fewest, most = 600 / (every + LOOK_EVERY_S[1]), 600 / (0.8 * every) + 1 + first
        assert fewest <= network.asked.count(address) <= most


@in_virtual_time
async def test_nodes_that_start_one_after_the_other_know_each_other_when_the_last_of_them_listens() -> None:
    hosts = [Address(f"203.0.113.{number}", 7070) for number in range(1, 9)]
    listening: dict[str, Membership] = {}

    def view(own: Address) -> Membership:
        me = replace(ME, node=f"n{own}", life=f"{own}")

        async def identify(host: str, port: int) -> Hello:
            await trio.sleep(0.001)
            if host == own.host:
                return me
            if host not in listening:
                raise ConnectionRefusedError
            listening[host].source.heard(own.host)
            return replace(me, node=f"n{Address(host, port)}", life=f"{Address(host, port)}")

        return Membership(Listed(Static(hosts), me, LISTEN, identify, literal, random.Random(own.host)), me)

    async with trio.open_nursery() as nursery:
        for own in hosts:
            membership = listening[own.host] = view(own)
            nursery.start_soon(membership.run)
            await trio.sleep(0.3)
        assert {host: set(m.members) for host, m in listening.items()} == {
            own.host: {f"n{other}" for other in hosts} for own in hosts
        }
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_who_asks_us_is_asked_unless_that_was_just_now() -> None:
    network = Network(named([A, B]))
    listed = source([A, B], network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listed.run, lambda sightings: None)
        await trio.sleep(FRESH_S / 2)
        listed.heard(A.host)
        await trio.sleep(0.1)
        assert network.asked.count(A) == 1, "it has just been asked"
        await trio.sleep(FRESH_S)
        listed.heard(A.host)
        await trio.sleep(0.1)
        assert (network.asked.count(A), network.asked.count(B)) == (2, 1)
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_two_of_one_id_are_asked_until_they_have_two() -> None:
    network = Network({A: replace(ME, node="one", life="a"), B: replace(ME, node="one", life="b")})
    membership = Membership(source([A, B], network), ME)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        await trio.sleep(1)
        assert len(membership.members) == 1
        network.hellos[B] = replace(ME, node="two", life="b")
        await trio.sleep(2 * FRESH_S)
        assert set(membership.members) == {"one", "two"}
        asked = len(network.asked)
        await trio.sleep(INTRODUCED_FOR_S / 2)
        assert len(network.asked) <= asked + 1
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_who_asks_from_an_address_that_is_not_listed_has_the_unknown_ones_asked_now_and_then() -> None:
    network = Network({})
    named_a, named_b = Address("1node", 7070), Address("2node", 7070)
    listed = source([named_a, named_b], network)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(listed.run, lambda sightings: None)
        await trio.sleep(600)  # asked every ten seconds by now
        before = len(network.asked)
        for _ in range(100):
            listed.heard("203.0.113.77")
            await trio.sleep(STRANGERS_S / 100)
        assert 2 <= len(network.asked) - before <= 6
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_daemon_that_returns_with_another_weight_is_learnt_and_one_that_is_silent_is_kept() -> None:
    network = Network(named([A, B]))
    membership = Membership(source([A, B], network), ME)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        await trio.sleep(1)
        network.hellos = {A: replace(ME, node="a", weight=4.0)}
        await trio.sleep(INTRODUCED_FOR_S + LOOK_EVERY_S[1])
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
        network.hellos = {C: replace(a, life="2"), B: b}
        names.addresses = [B.host, C.host]
        await trio.sleep(LOOK_EVERY_S[1] + 1)
        # The name's old address is believed for some looks more, and is nobody's.
        assert {m.name: m.addresses for m in membership.members.values()} == {"a": (C,), "b": (B,)}
        assert membership.ring.members == before == {"a": 1.0, "b": 1.0}
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_silent_addresses_hold_up_nobody_for_long() -> None:
    addresses = [Address(f"198.18.{number // 200}.{number % 200}", 7070) for number in range(300)]
    network = Network(named(addresses))
    network.takes_s = 3600.0
    reports: list[float] = []
    with trio.move_on_after(300 / ASKED_AT_ONCE * IDENTIFY_S + IDENTIFY_S):
        await source(set(addresses), network).run(lambda sightings: reports.append(trio.current_time()))
    assert network.most_at_once == ASKED_AT_ONCE
    assert reports == [FIRST_S]


@in_virtual_time
async def test_a_thousand_answers_are_a_few_reports() -> None:
    addresses = [Address(f"198.18.{number // 200}.{number % 200}", 7070) for number in range(1000)]
    network = Network(named(addresses))
    network.takes_s = 0.1
    membership = Membership(source(set(addresses), network), ME)
    reports: list[float] = []
    membership.on_change = lambda: reports.append(trio.current_time())
    with trio.move_on_after(LOOK_EVERY_S[0] - 1):
        await membership.run()
    assert len(membership.members) == 1000
    assert len(reports) <= 1 + 1000 / ASKED_AT_ONCE * 0.1 / TOGETHER_S


@in_virtual_time
async def test_a_refusal_is_reported_until_there_is_a_hello() -> None:
    trusted = False

    async def identify(host: str, port: int) -> Hello:
        if not trusted:
            raise PeerFailed("refused", "another key")
        return ME

    reports: list[list[Sighting]] = []
    async with trio.open_nursery() as nursery:
        listed = Listed(Static([A]), ME, None, identify, literal, random.Random(1))
        nursery.start_soon(listed.run, lambda sightings: reports.append(list(sightings)))
        await trio.sleep(1)
        assert reports[-1] == [Sighting(A, None, "another key")]
        trusted = True
        await trio.sleep(2 * ASK_AGAIN_S[1])
        assert reports[-1] == [Sighting(A, ME)]
        nursery.cancel_scope.cancel()


@in_virtual_time
async def test_a_failure_of_ours_while_asking_is_silence() -> None:
    async def identify(host: str, port: int) -> Hello:
        raise Transient("half a hello")

    reports: list[list[Sighting]] = []
    with trio.move_on_after(1):
        await Listed(Static([A]), ME, None, identify, literal, random.Random(1)).run(
            lambda sightings: reports.append(list(sightings))
        )
    assert reports[-1] == [Sighting(A, None)]


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
    lookups = Lookups()
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
        await trio.sleep(LOOK_EVERY_S[1])
        assert set(membership.members) == {node(A), node(B), node(C)}, "a miss is not a leave"
        await trio.sleep(MISSES * LOOK_EVERY_S[1])
        assert set(membership.members) == {node(B), node(C)}
        calls, names.fail = names.calls, True
        await trio.sleep(300)
        assert 30 <= names.calls - calls <= 60, "every five to ten seconds"
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
