"""Members that register in etcd.

A node's key is `prefix/group/host:port` and holds its hello, so a member is known with its first sighting. Where two keys
tell of one node (it is back under another address, and its old lease still runs), the one written last holds. The key hangs
on a lease of 10 s: a node that dies is gone ten seconds later, one that stops revokes it. All nodes read the prefix once
and then watch it from that revision on, so nothing between is missed.

What can fail, and what then: without etcd, members stay as they are, and peers' health decides. A lease that was lost
(etcd or this node away for too long) is noticed at its renewal, and the node registers anew; so is a key that somebody
deleted. A watch is opened again every minute from the last revision seen, because a stream may be dead without
a sign; when that revision is compacted, or is of another cluster's life, everything is read again.
"""

from __future__ import annotations

import logging
import random
import socket
from base64 import b64decode, b64encode

import trio

from cachefs.errors import CachefsError
from cachefs.peers.etcd_gateway import BROKEN, NOT_FOUND, EtcdRefused, EtcdUnavailable, Gateway, Message
from cachefs.peers.membership import Report, Sighting
from cachefs.peers.places import parse_address
from cachefs.peers.wire import Address, Hello

log = logging.getLogger(__name__)

LEASE_S = 10
"""How long a dead node stays a member. etcd's own shortest is about twice its election timeout, 2 s; peers notice sooner."""

WATCH_S = 60.0
"""The longest that a watch which died silently goes unnoticed. Guessed."""

AGAIN_S = (0.5, 3.0)
"""Between attempts that failed: doubling from the first to the second, which is a third of a lease: so that most leases are
renewed in time when etcd comes back. Derived."""

WATCH, REGISTER = "watch members in etcd", "register in etcd"
"""What may fail, the worse first."""

READ_PAGE = 1000
"""Keys in one reading of the prefix, so that no reply is large."""


def advertised(listen: Address, toward: Address) -> Address:
    """Where others reach a node that listens there: for a wildcard, the address from which packets to `toward` leave
    (nothing is sent). Blocks for the resolver; raises OSError when there is no way."""
    if listen.host not in ("", "0.0.0.0", "::"):
        return listen
    for family, *_, sockaddr in socket.getaddrinfo(*toward, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(sockaddr)
            return Address(str(probe.getsockname()[0]), listen.port)
    raise OSError(f"{toward.host} has no address")


class Registry:
    """A source (`membership.Source`), and this node's entry in it. `listen` is where this node listens; None, or a hello
    without weight, for one that serves nobody and is not registered."""

    def __init__(
        self, gateway: Gateway, prefix: str, hello: Hello, listen: Address | None, rng: random.Random
    ) -> None:
        self._gateway = gateway
        self._directory = f"{prefix}/{hello.group}/"
        self._hello = hello
        self._listen = listen if hello.weight > 0 else None
        self._rng = rng
        self._entries: dict[Address, Hello] = {}
        """In the order in which they were written."""
        self._troubles: dict[str, str] = {}
        self._revision = 0
        """The last one seen; 0: all has to be read."""
        self._disputed = False

    @property
    def trouble(self) -> str:
        return next(iter(self._troubles.values()), "")

    async def run(self, report: Report) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._follow, report)
            if self._listen is not None:
                nursery.start_soon(self._stay_registered, self._listen)

    def heard(self, host: str) -> None:
        pass  # etcd tells

    # -- being seen --------------------------------------------------------------------------------

    async def _stay_registered(self, listen: Address) -> None:
        address: Address | None = None
        lease, placed, failures = "", False, 0
        try:
            while True:
                try:
                    if address is None:
                        address = await trio.to_thread.run_sync(
                            advertised, listen, self._gateway.preferred.address, abandon_on_cancel=True
                        )
                    if lease and not await self._renew(lease):
                        log.info("the lease in etcd is lost: registering %s again", address)
                        lease = ""
                    if not lease:
                        lease, placed = await self._grant(), False
                    if not placed or not self._sees_itself(address):
                        await self._place(address, lease)
                        placed = True
                    failures = 0
                    self._troubles.pop(REGISTER, None)
                    await trio.sleep(LEASE_S / 3)
                except (EtcdUnavailable, EtcdRefused, OSError) as exc:
                    if isinstance(exc, EtcdRefused) and exc.code == NOT_FOUND:
                        lease = ""  # it ran out before the key was placed
                    failures += 1
                    self._complain(exc, failures, REGISTER)
                    await trio.sleep(self._pause(failures))
        finally:
            if lease:
                await self._revoke(lease)

    async def _grant(self) -> str:
        granted = await self._gateway.call("/v3/lease/grant", {"TTL": LEASE_S})
        return str(granted.get("ID", ""))

    async def _renew(self, lease: str) -> bool:
        said = await self._gateway.call("/v3/lease/keepalive", {"ID": lease})
        return _number(_part(said, "result"), "TTL") > 0

    async def _place(self, address: Address, lease: str) -> None:
        key, value = f"{self._directory}{address}".encode(), self._hello.pack()
        await self._gateway.call("/v3/kv/put", {"key": _coded(key), "value": _coded(value), "lease": lease})

    def _sees_itself(self, address: Address) -> bool:
        """Whether the entry is there as far as the watch knows; a doubt costs one more put."""
        entry = self._entries.get(address)
        disputed = entry is not None and entry.node != self._hello.node
        if disputed and not self._disputed:
            log.warning("another node registers as %s: let each listen on an address of its own", address)
        self._disputed = disputed
        return entry == self._hello

    async def _revoke(self, lease: str) -> None:
        with trio.move_on_after(1.0, shield=True):
            try:
                await self._gateway.call("/v3/lease/revoke", {"ID": lease})
            except CachefsError as exc:
                log.debug("the lease in etcd is left to run out: %s", exc)

    # -- seeing ------------------------------------------------------------------------------------

    async def _follow(self, report: Report) -> None:
        failures = 0
        while True:
            try:
                if not self._revision:
                    self._entries, self._revision = await self._read()
                    self._say(report)
                with trio.move_on_after(WATCH_S):
                    await self._watch(report)
                failures = 0
            except (EtcdUnavailable, EtcdRefused, *BROKEN) as exc:
                failures += 1
                self._complain(exc, failures, WATCH)
                await trio.sleep(self._pause(failures))

    async def _read(self) -> tuple[dict[Address, Hello], int]:
        """All entries, and the revision at which they were so."""
        found: list[Message] = []
        revision = 0
        start, stop = self._directory.encode(), self._end()
        while True:
            asked = {
                "key": _coded(start),
                "range_end": _coded(stop),
                "limit": READ_PAGE,
                "revision": revision,
            }
            page = await self._gateway.call("/v3/kv/range", asked)
            # The pages after the first are of its revision.
            revision = revision or _number(_part(page, "header"), "revision")
            pairs = _parts(page, "kvs")
            found += pairs
            if not page.get("more") or not pairs:
                entries: dict[Address, Hello] = {}
                for pair in sorted(found, key=lambda pair: _number(pair, "mod_revision")):
                    self._enter(entries, pair)
                return entries, revision
            start, last = _decoded(pairs[-1], "key") + b"\0", start
            if start <= last:
                raise EtcdUnavailable("keys out of order")

    async def _watch(self, report: Report) -> None:
        """Until the stream breaks, which is raised, as everything that a pause may help. When it cannot be resumed,
        `_revision` is 0."""
        create = {
            "key": _coded(self._directory.encode()),
            "range_end": _coded(self._end()),
            "start_revision": self._revision + 1,
        }
        async with self._gateway.stream("/v3/watch", {"create_request": create}) as (first, messages):
            message: Message | None = first
            while message is not None:
                result = _part(message, "result")
                if result.get("canceled"):
                    if _number(result, "compact_revision"):
                        self._revision = 0
                        raise EtcdUnavailable("what changed since the last revision seen is compacted")
                    self._gateway.forget_token()
                    raise EtcdUnavailable(str(result.get("cancel_reason", "the watch was cancelled")))
                if result.get("created") and _number(_part(result, "header"), "revision") < self._revision:
                    # It lags behind the one we read from, or lost its data and began anew.
                    self._revision = 0
                    raise EtcdUnavailable("this member of etcd knows less than we do")
                self._troubles.pop(WATCH, None)
                self._take(_parts(result, "events"), report)
                message = await messages.next()
        raise EtcdUnavailable("the watch ended")

    def _take(self, events: list[Message], report: Report) -> None:
        for event in events:
            pair = _part(event, "kv")
            if event.get("type") == "DELETE":
                self._entries.pop(self._address_of(pair), None)  # type: ignore[arg-type]
            else:  # a PUT, whose type is zero and so left out
                self._enter(self._entries, pair)
            # Of the event, not of the message: its header may be ahead of what it brings.
            self._revision = max(self._revision, _number(pair, "mod_revision"))
        if events:
            self._say(report)

    def _enter(self, entries: dict[Address, Hello], pair: Message) -> None:
        address = self._address_of(pair)
        if address is None:
            return
        entries.pop(address, None)
        try:
            entries[address] = Hello.parse(_decoded(pair, "value"))
        except CachefsError as exc:
            log.debug("what etcd has for %s is no entry of a node: %s", address, exc)

    def _address_of(self, pair: Message) -> Address | None:
        try:
            return parse_address(_decoded(pair, "key").decode().removeprefix(self._directory))
        except ValueError:
            return None

    def _say(self, report: Report) -> None:
        report([Sighting(address, hello) for address, hello in self._entries.items()])

    def _end(self) -> bytes:
        """The first key after all of the directory: the slash, plus one."""
        return self._directory[:-1].encode() + b"0"

    def _complain(self, exc: BaseException, failures: int, what: str) -> None:
        """Once for each trouble, however long it lasts. One attempt that fails after it went well is none."""
        log.log(logging.WARNING if failures == 2 else logging.DEBUG, "cannot %s: %s", what, exc)
        if failures >= 2 or not self._revision:
            self._troubles[what] = f"cannot {what}: {exc}"

    def _pause(self, failures: int) -> float:
        first, longest = AGAIN_S
        return min(longest, first * 2.0 ** min(failures - 1, 16)) * self._rng.uniform(0.5, 1.0)


def _coded(raw: bytes) -> str:
    return b64encode(raw).decode()


def _decoded(pair: Message, name: str) -> bytes:
    """Empty for what is no base64."""
    try:
        return b64decode(str(pair.get(name, "")))
    except ValueError:
        return b""


def _part(message: Message, name: str) -> Message:
    part = message.get(name)
    return part if isinstance(part, dict) else {}


def _parts(message: Message, name: str) -> list[Message]:
    parts = message.get(name)
    return [part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []


def _number(message: Message, name: str) -> int:
    """64-bit numbers are strings; zero is left out."""
    try:
        return int(message.get(name, 0))
    except (TypeError, ValueError):
        return 0
