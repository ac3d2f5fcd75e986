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
"""A hardware address that no host has."""

_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why hosts cannot be made here; "" if they can."""
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
    """Return the thread to its own namespace at the end, whichever it is in by then."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        yield
    finally:
        _checked(_libc.setns(home, _CLONE_NEWNET))
        os.close(home)


class Namespace:
    """A network namespace with only a loopback interface."""

    def __init__(self) -> None:
        with _elsewhere():
            _checked(_libc.unshare(_CLONE_NEWNET))
            self._fd = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.ip("link set lo up")

    @property
    def path(self) -> str:
        """The namespace's name for `ip`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Move this thread to the namespace. Sockets stay in the namespace where they were made, processes and threads
        where they were started."""
        with _elsewhere():
            _checked(_libc.setns(self._fd, _CLONE_NEWNET))
            yield

    def ip(self, *lines: str, program: str = "ip") -> None:
        """Run lines of `ip` in the namespace. Raises `CalledProcessError`."""
        with self.inside():
            subprocess.run([program, "-batch", "-"], input="\n".join(lines), text=True, check=True)

    def wait_for(self, interface: str) -> None:
        """Wait until the interface carries packets: the kernel drops them for a moment after it is up. Raises
        `TimeoutError`."""
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
    """A host: `eth0`, with an address that all others can reach."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.name = f"host{number}"
        self.address = f"10.77.0.{number}"
        self.hardware = f"02:00:00:00:00:{number:02x}"

    def lift(self, others: Sequence[Host], mtu: int = 1500) -> None:
        """Bring up `eth0`, which exists by now. It has the others' hardware addresses, so that no packet waits for ARP
        after a cut."""
        self.ip(
            f"link set eth0 address {self.hardware} mtu {mtu} up",
            f"addr add {self.address}/24 dev eth0",
        )
        self.ip(*(other.known_as(other.hardware) for other in others if other is not self))
        self.wait_for("eth0")

    def known_as(self, hardware: str) -> str:
        """The line of `ip` by which another host gets that hardware address for this one."""
        return f"neigh replace {self.address} lladdr {hardware} dev eth0 nud permanent"


class Network:
    """`count` hosts, numbered from 1. With a delay (one way) or loss, packets pass through `bench.lab.switch`; without,
    hosts can be disconnected from each other."""

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
        """Release the namespaces: each ends with the last process in it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for namespace in (*self.hosts, *([self._switch] if self._switch else [])):
            namespace.close()
        self.hosts, self._switch, self._process = [], None, None

    # Pulling cables. Not with a switch of ours.

    def cut(self, host: Host) -> None:
        """Disconnect this host from all others."""
        self._cut.append(host)
        self._ports(host.name, 0)

    def divide(self, one: Host, other: Host) -> None:
        """Disconnect two hosts from each other: each gets a wrong hardware address of the other."""
        self._divided += [(one, other), (other, one)]
        for at, of in ((one, other), (other, one)):
            at.ip(of.known_as(_NOBODY))

    def heal(self) -> None:
        """Connect all hosts again. TCP repeats lost packets after its own timeouts."""
        for at, of in self._divided:
            at.ip(of.known_as(of.hardware))
        for host in self._cut:
            self._ports(host.name, 3)
        self._divided, self._cut = [], []

    def _ports(self, name: str, state: int) -> None:
        assert self._switch is not None, "packets pass through a process here"
        self._switch.ip(f"link set dev {name} state {state}", program="bridge")


class StoreOn(LabStore):
    """A lab store on a host. Its client may be anywhere."""

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
    """The value of `--peers` for daemons on these hosts."""
    return "static:" + ",".join(f"{host.address}:{port}" for host in hosts)
