"""Several hosts on one machine: network namespaces around one switch.

Nothing here has a name outside. A namespace is a descriptor of this process, its interfaces live inside it, and both are
gone with the last process in it, however that ended: there is nothing to clean up, and runs side by side never meet. A
namespace belongs to a thread, so whatever a thread opens or starts `inside` a host is on that host, and only that: mounts,
files and Unix sockets are everybody's. Needs root.

Cables can be pulled. What is cut here is silent: nothing is refused, packets vanish, as when a switch dies or a rule drops
them. (Who kills a process has the other case: the kernel answers for it with a reset.)

Where a network is to be slow or lossy, the switch is a process of ours (`bench.lab.switch`) instead of the kernel's bridge.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.lab.client import LabStore
from bench.lab.switch import tap

_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_RUNNING = 0x40
_CARRIER_S = 5.0
_REPOSITORY = Path(__file__).resolve().parents[2]
_NOBODY = "02:00:00:00:00:fe"
"""A hardware address of no host."""

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why there can be no hosts here; "" when there can."""
    if os.getuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None or shutil.which("bridge") is None:
        return "ip is missing: apt-get install iproute2"
    try:
        Network(1).close()
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"no network namespaces here: {exc}"
    return ""


def _checked(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Whatever namespace the thread is moved to meanwhile, it returns to its own."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        _checked(_libc.setns(home, _CLONE_NEWNET))
        os.close(home)


class Namespace:
    """An empty network of its own, but for loopback."""

    def __init__(self) -> None:
        with _elsewhere():
            _checked(_libc.unshare(_CLONE_NEWNET))
            self._fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.ip("link set lo up")

    @property
    def path(self) -> str:
        """What `ip` takes for the name of a namespace."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """This thread is there. Sockets stay where they were made, and processes and threads where they were started."""
        with _elsewhere():
            _checked(_libc.setns(self._fd, _CLONE_NEWNET))
            yield

    def ip(self, *lines: str, program: str = "ip") -> None:
        """Run lines of `ip` here. Raises `CalledProcessError`."""
        with self.inside():
            subprocess.run([program, "-batch", "-"], input="\n".join(lines), text=True, check=True)

    def wait_for(self, interface: str) -> None:
        """Until it carries packets: a moment after it is up, before which the kernel drops them. Raises `TimeoutError`."""
        request = struct.pack("16sH22x", interface.encode(), 0)
        until = time.monotonic() + _CARRIER_S
        with self.inside(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            while not struct.unpack("16xH22x", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))[0] & _RUNNING:
                if time.monotonic() > until:
                    raise TimeoutError(f"{interface} has no carrier")
                time.sleep(0.002)

    def close(self) -> None:
        os.close(self._fd)


class Host(Namespace):
    """One host: `eth0`, with an address that all others reach."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.name = f"host{number}"
        self.address = f"10.77.0.{number}"
        self.hardware = f"02:00:00:00:00:{number:02x}"

    def lift(self, others: Sequence[Host], mtu: int = 1500) -> None:
        """Bring up its `eth0`, which is there by now. It knows the others: nobody waits for ARP after a cut."""
        self.ip(
            f"link set eth0 address {self.hardware} mtu {mtu} up",
            f"addr add {self.address}/24 dev eth0",
        )
        self.ip(*(other.known_as(other.hardware) for other in others if other is not self))
        self.wait_for("eth0")

    def known_as(self, hardware: str) -> str:
        """The line of `ip` with which another host takes that for this one's hardware address."""
        return f"neigh replace {self.address} lladdr {hardware} dev eth0 nud permanent"


class Network:
    """`count` hosts, numbered from 1. With a delay (one way) or loss, packets pass through a switch of ours; otherwise
    hosts can be cut off from each other."""

    def __init__(self, count: int, *, delay_ms: float = 0, loss: float = 0) -> None:
        self.hosts: list[Host] = []
        self._switch: Namespace | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._divided: list[tuple[Host, Host]] = []
        self._cut: list[Host] = []
        try:
            for number in range(1, count + 1):
                self.hosts.append(Host(number))
            if delay_ms or loss:
                self._start_switch(delay_ms, loss)
            else:
                self._make_bridge()
        except BaseException:
            self.close()
            raise

    def _make_bridge(self) -> None:
        self._switch = Namespace()
        self._switch.ip(
            "link add bridge type bridge",
            "link set bridge up",
            *(f"link add {h.name} type veth peer name eth0 netns {h.path}" for h in self.hosts),
            *(f"link set {host.name} master bridge up" for host in self.hosts),
        )
        for host in self.hosts:
            host.lift(self.hosts)
            self._switch.wait_for(host.name)

    def _start_switch(self, delay_ms: float, loss: float) -> None:
        taps = []
        try:
            for host in self.hosts:
                with host.inside():
                    taps.append(tap("eth0"))
                host.lift(self.hosts, mtu=9000)  # a frame costs a Python loop, whatever its size
            command = [sys.executable, "-m", "bench.lab.switch", *map(str, (delay_ms / 1e3, loss, *taps))]
            self._process = subprocess.Popen(command, pass_fds=taps, cwd=_REPOSITORY)
        finally:
            for fd in taps:
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of them: each is gone when nothing runs in it any more."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for namespace in (*self.hosts, *([self._switch] if self._switch else [])):
            namespace.close()
        self.hosts, self._switch, self._process = [], None, None

    # Pulling cables. Not with a switch of ours.

    def cut(self, host: Host) -> None:
        """Nobody reaches this host, and it reaches nobody."""
        self._cut.append(host)
        self._ports(host.name, 0)

    def divide(self, one: Host, other: Host) -> None:
        """These two do not reach each other: each has the wrong hardware address of the other."""
        self._divided += [(one, other), (other, one)]
        for at, of in ((one, other), (other, one)):
            at.ip(of.known_as(_NOBODY))

    def heal(self) -> None:
        """All cables are back. What was sent into nothing meanwhile is sent again when TCP thinks so."""
        for at, of in self._divided:
            at.ip(of.known_as(of.hardware))
        for host in self._cut:
            self._ports(host.name, 3)
        self._divided, self._cut = [], []

    def _ports(self, name: str, state: int) -> None:
        assert self._switch is not None, "packets pass through a process here"
        self._switch.ip(f"link set dev {name} state {state}", program="bridge")


class StoreOn(LabStore):
    """A lab store on a host. It is asked and told from anywhere."""

    def __init__(self, host: Host, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(root, host=host.address, **options)
        self._on = host

    def __enter__(self) -> Self:
        with self._on.inside():
            super().__enter__()
        return self

    def _call(self, method: str, path: str, body: bytes | None = None) -> Any:
        with self._on.inside():
            return super()._call(method, path, body)


def static_peers(hosts: Sequence[Host], port: int) -> str:
    """What `--peers` says for daemons on these."""
    return "static:" + ",".join(f"{host.address}:{port}" for host in hosts)
