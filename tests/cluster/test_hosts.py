"""The hosts themselves: who reaches whom, what a cut does, and that nothing of them is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.lab.dataset import content
from bench.lab.netns import Host, Network, StoreOn

SAYS = "import socket; print(socket.create_connection(('{}', {}), 2).recv(9).decode())"


def reaches(one: Host, other: Host, wait_s: float = 0.3) -> bool:
    """Whether a connection comes about."""
    with other.inside():
        listener = socket.create_server((other.address, 0))
    with listener, one.inside():
        try:
            socket.create_connection(listener.getsockname(), wait_s).close()
        except TimeoutError:
            return False
        return True


def interfaces() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


def test_hosts_reach_each_other_and_nobody_else() -> None:
    before = interfaces()
    with Network(3) as network:
        one, two, three = network.hosts
        assert reaches(one, two) and reaches(two, three) and reaches(three, one)
        assert interfaces() == before
        with one.inside():
            assert interfaces() == {"lo", "eth0"}
        with pytest.raises(OSError), socket.create_server((one.address, 0)):
            pass  # not an address of this machine
    assert interfaces() == before


def test_a_process_is_on_the_host_where_it_was_started() -> None:
    with Network(2) as network:
        one, two = network.hosts
        with two.inside():
            listener = socket.create_server((two.address, 0))
        code = SAYS.format(two.address, listener.getsockname()[1])
        with one.inside():
            asking = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with listener:
            accepted, (host, _) = listener.accept()
            with accepted:
                accepted.sendall(b"something")
        assert host == one.address and asking.communicate(timeout=10)[0].strip() == "something"


def test_a_pair_is_divided_and_healed() -> None:
    with Network(3) as network:
        one, two, three = network.hosts
        assert reaches(one, two)
        network.divide(one, two)
        assert not reaches(one, two) and not reaches(two, one)
        assert reaches(one, three) and reaches(three, two)
        network.heal()
        assert reaches(one, two) and reaches(two, one)


def test_a_host_is_cut_off_and_healed() -> None:
    with Network(3) as network:
        one, two, three = network.hosts
        network.cut(one)
        assert not reaches(one, two) and not reaches(three, one)
        assert reaches(two, three)
        network.heal()
        assert reaches(one, two) and reaches(three, one)


def test_bytes_pass_a_slow_and_lossy_switch(tmp_path: Path) -> None:
    with Network(2, delay_ms=20, loss=0.02) as network, StoreOn(network.hosts[1], tmp_path) as store:
        store.bucket("bucket")
        data = content("slow", 1 << 20)
        store.put("bucket", "key", data)
        asking = network.hosts[0]
        begun = time.monotonic()
        with asking.inside():
            connection = socket.create_connection((store.host, store.port), 30)
        assert time.monotonic() - begun >= 2 * 0.020
        with connection, connection.makefile("rb") as replies:
            connection.sendall(b"GET /bucket/key HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert replies.read().partition(b"\r\n\r\n")[2] == data
        assert store.counters()["bytes_sent"] == {"get": len(data)}


def test_nothing_is_left_of_a_network() -> None:
    before = set(os.listdir("/proc/self/fd"))
    for options in ({}, {"delay_ms": 1.0}):
        network = Network(2, **options)
        network.close()
    assert set(os.listdir("/proc/self/fd")) == before
