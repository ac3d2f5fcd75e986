"""What the service manager is told, and when: a socket instead of systemd, a clock that jumps."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from cachefs.daemon.notify import Notifier


class Listener:
    """The service manager's end."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        """The messages since the last look."""
        found = []
        while True:
            try:
                found.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return found


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    address = str(tmp_path / "not@first") if request.param == "path" else f"@cachefs-test-{os.getpid()}"
    listener = Listener(address)
    yield listener
    listener.socket.close()


class Mount:
    """A mount that answers, or not."""

    def __init__(self) -> None:
        self.fails = False
        self.asked = 0
        self.hangs: trio.Event | None = None

    async def illness(self) -> str:
        self.asked += 1
        if self.hangs is not None:
            await self.hangs.wait()
        return "Transport endpoint is not connected" if self.fails else ""


@pytest.fixture
def mount() -> Mount:
    return Mount()


def asked_by(listener: Listener, watchdog_s: float = 0) -> dict[str, str]:
    environ = {"NOTIFY_SOCKET": listener.address, "HOME": "/root"}
    if watchdog_s:
        environ |= {"WATCHDOG_USEC": str(int(watchdog_s * 1e6)), "WATCHDOG_PID": str(os.getpid())}
    return environ


def attended(notifier: Notifier, mount: Mount, seconds: float) -> None:
    async def main() -> None:
        with trio.move_on_after(seconds):
            await notifier.attend(mount.illness, "shows s3://bucket")

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_ready_is_said_at_once(manager: Listener, mount: Mount) -> None:
    attended(Notifier(asked_by(manager)), mount, 1)
    assert manager.heard() == ["READY=1\nSTATUS=shows s3://bucket"]
    assert mount.asked == 0


def test_the_watchdog_hears_from_a_living_mount_twice_in_its_interval(
    manager: Listener, mount: Mount
) -> None:
    attended(Notifier(asked_by(manager, 20)), mount, 99)
    assert manager.heard()[1:] == ["WATCHDOG=1"] * 10  # at 0, 10, … 90 s


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_the_watchdog_hears_nothing_while_the_mount_does_not_answer(
    manager: Listener, mount: Mount, how: str
) -> None:
    notifier = Notifier(asked_by(manager, 20))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notifier.attend, mount.illness, "shows s3://bucket")
            await trio.sleep(5)
            assert manager.heard()[1:] == ["WATCHDOG=1"]
            setattr(mount, how, trio.Event() if how == "hangs" else True)
            await trio.sleep(60)
            assert manager.heard() == []
            setattr(mount, how, None)
            await trio.sleep(20)
            assert "WATCHDOG=1" in manager.heard()
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_watchdog_that_is_meant_for_another_process_is_not_answered(
    manager: Listener, mount: Mount
) -> None:
    notifier = Notifier({**asked_by(manager, 20), "WATCHDOG_PID": "1"})
    attended(notifier, mount, 99)
    assert len(manager.heard()) == 1


def test_children_do_not_believe_that_they_were_asked(manager: Listener) -> None:
    environ = asked_by(manager, 20)
    Notifier(environ)
    assert environ == {"HOME": "/root"}


def test_stopping(manager: Listener) -> None:
    Notifier(asked_by(manager)).stopping("saving memory to disk")
    assert manager.heard() == ["STOPPING=1\nSTATUS=saving memory to disk"]


@pytest.mark.parametrize("address", ["", "unix:/run/x", "/nowhere/at/all", "@nobody-listens-here"])
def test_nobody_listening_is_no_error(address: str, mount: Mount) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address} if address else {})
    attended(notifier, mount, 60)
    notifier.stopping("nothing")
