"""Which backend is chosen, why it says so, and that nothing is left of those that were not."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cachefs.base import linux
from cachefs.base.errors import MountError
from cachefs.base.metrics import Metrics
from cachefs.config import layers
from cachefs.config.config import Config
from cachefs.fuse import backends, connection, pyfuse3_backend
from cachefs.fuse.backends import LISTINGS_KEPT_SINCE, choose, connect
from cachefs.fuse.native_backend import WANTED, Device, Negotiated
from cachefs.fuse.protocol import Init

WITH = Negotiated(45, WANTED)
WITHOUT = Negotiated(39, WANTED & ~Init.PASSTHROUGH)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def failure(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class Machine:
    """What this kernel would say. `takes` answers (depth, place): the errno of a file from there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.uid = 0
        self.says = WITH
        self.connects: Callable[[int], Exception | None] = lambda depth: None
        self.takes: Callable[[int, Path], int] = lambda depth, place: 0
        self.attaches: Exception | None = None
        self.depths: list[int] = []
        self.open: list[Any] = []
        self.passthrough = 0
        self.mounted: list[Any] = []
        machine = self

        class Fake(Device):
            depth = 0

            def register(self, fd: int) -> int:
                place = Path(os.readlink(f"/proc/self/fd/{fd}")).parent
                if number := machine.takes(self.depth, place):
                    raise failure(number)
                machine.passthrough += 1
                return 1

            def unregister(self, number: int) -> None:
                machine.passthrough -= 1

            def attach(self, mountpoint: Path) -> None:
                if machine.attaches is not None:
                    raise machine.attaches
                machine.mounted.append(self)

            def close(self, *, unmount: bool = True) -> None:
                super().close(unmount=unmount)
                if self in machine.open:
                    machine.open.remove(self)

        def connect(
            name: str, flags: Sequence[str], *, stack_depth: int, writable: bool = False
        ) -> tuple[Device, Negotiated]:
            assert not writable
            machine.depths.append(stack_depth)
            no = machine.connects(stack_depth)
            if no is not None:
                raise no
            device = Fake(os.open("/dev/null", os.O_RDWR))
            device.depth = stack_depth
            machine.open.append(device)
            return device, machine.says

        class Pyfuse3:
            name = "pyfuse3"

            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def mount(self, *_: Any, **__: Any) -> None:
                machine.mounted.append(self)

        monkeypatch.setattr(Device, "connect", connect)
        monkeypatch.setattr(pyfuse3_backend, "Pyfuse3Backend", Pyfuse3)
        monkeypatch.setattr(os, "geteuid", lambda: machine.uid)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    gc.collect()  # descriptors of earlier tests
    before = descriptors()
    machine = Machine(monkeypatch)
    yield machine
    assert machine.passthrough == 0, "a backing file registered for the trial is released"
    for device in list(machine.open):
        device.close()
    assert descriptors() == before


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "ram", tmp_path / "ssd"]
    for place in found:
        place.mkdir()
        (place / "tag").write_bytes(b"")  # as every tier has one
    return found


def config(**options: str) -> Config:
    return layers.load({"source": "s3://b/p", "mountpoint": "/mnt/x", **options}, [], {})


def chosen(places: list[Path], **options: str) -> backends.Chosen:
    nothing: Any = None
    return choose(config(**options), "s3://b/p", places, nothing, Metrics())


def one_line(text: str) -> bool:
    return bool(text) and text.isprintable() and len(text) < 150 and "Errno" not in text


def says_why_not(machine: Machine, places: list[Path], why: str) -> None:
    """auto falls back and says why; kernel says it and ends; nothing is left of either."""
    found = chosen(places)
    assert (found.backend.name, found.passthrough, found.refused) == ("pyfuse3", False, {})
    assert why in found.why
    assert one_line(found.why)
    assert machine.open == []
    with pytest.raises(MountError, match="--fuse native") as caught:
        chosen(places, fuse="native")
    assert why in str(caught.value)
    assert one_line(str(caught.value))
    assert machine.open == []
    assert all(list(place.iterdir()) == [place / "tag"] for place in places)


def test_the_kernel_takes_all(machine: Machine, places: list[Path]) -> None:
    for backend in ("auto", "native"):
        found = chosen(places, fuse=backend)
        assert (found.backend.name, found.passthrough, found.refused) == ("native", True, {})
        assert one_line(found.why)
    assert machine.depths == [1, 1]
    assert len(machine.open) == 2
    assert [list(place.iterdir()) for place in places] == [[place / "tag"] for place in places]


def test_pyfuse3_as_asked(machine: Machine, places: list[Path]) -> None:
    found = chosen(places, fuse="pyfuse3")
    assert (found.backend.name, found.why, found.passthrough) == ("pyfuse3", "as asked", False)
    assert machine.depths == []


def test_not_root(machine: Machine, places: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """fusermount3 mounts; what it refuses is a reason for the other backend."""
    machine.uid = 1000
    asked: list[str] = []

    def refuses(*arguments: str, passing: Any = None) -> None:
        asked.extend(arguments)
        raise MountError("no")

    monkeypatch.setattr(connection, "fusermount", refuses)
    says_why_not(machine, places, "no connection through fusermount3: no")
    assert "fsname=s3://b/p,subtype=cachefs,default_permissions,ro" in asked
    assert machine.depths == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.ENOENT, errno.ENODEV, errno.EINVAL])
def test_no_connection(machine: Machine, places: list[Path], number: int) -> None:
    machine.connects = lambda depth: failure(number)
    says_why_not(machine, places, os.strerror(number))


def test_the_mountpoint_is_cleared_when_only_mounting_is_left(machine: Machine, places: list[Path]) -> None:
    """What is refused before leaves a dead mount where it is."""
    nothing: Any = None
    cleared: list[bool] = []

    def choose_cleared(name: str) -> str:
        options = config(fuse=name)
        return choose(
            options, "s3://b/p", places, nothing, Metrics(), clear=lambda: cleared.append(True)
        ).backend.name

    assert [choose_cleared(name) for name in ("native", "auto", "pyfuse3")] == ["native", "native", "pyfuse3"]
    assert len(cleared) == 3
    machine.connects = lambda depth: failure(errno.EPERM)
    with pytest.raises(MountError):
        choose_cleared("native")
    assert len(cleared) == 3
    assert choose_cleared("auto") == "pyfuse3" and len(cleared) == 4


def test_no_handshake(machine: Machine, places: list[Path]) -> None:
    machine.connects = lambda depth: MountError("the kernel speaks FUSE 7.23")
    says_why_not(machine, places, "FUSE 7.23")


def test_no_passthrough(machine: Machine, places: list[Path]) -> None:
    machine.says = WITHOUT
    for number, backend in enumerate(("auto", "native"), 1):  # it is good for something without
        found = chosen(places, fuse=backend)
        assert (found.backend.name, found.passthrough) == ("native", False)
        assert "7.39" in found.why
        assert one_line(found.why)
        assert set(found.refused) == set(places)
        assert all(one_line(no) for no in found.refused.values())
        assert len(machine.open) == number


def test_a_cache_on_stacked_filesystems(machine: Machine, places: list[Path]) -> None:
    machine.takes = lambda depth, place: errno.ELOOP if depth == 1 and place.name == "ssd" else 0
    found = chosen(places)
    assert (found.backend.name, found.passthrough, found.refused) == ("native", True, {})
    assert machine.depths == [1, 2]
    assert [device.depth for device in machine.open] == [2]


def test_too_many_stacked_filesystems(machine: Machine, places: list[Path]) -> None:
    machine.takes = lambda depth, place: errno.ELOOP
    found = chosen(places)
    assert (found.backend.name, found.passthrough, set(found.refused)) == ("native", False, set(places))
    assert "stacked" in found.why
    assert one_line(found.why)
    assert machine.depths == [1, 2]


def test_the_second_connection_fails(machine: Machine, places: list[Path]) -> None:
    machine.takes = lambda depth, place: errno.ELOOP
    machine.connects = lambda depth: failure(errno.ENOMEM) if depth == 2 else None
    says_why_not(machine, places, os.strerror(errno.ENOMEM))


def test_all_are_refused(machine: Machine, places: list[Path]) -> None:
    machine.takes = lambda depth, place: errno.EOPNOTSUPP
    for backend in ("auto", "native"):
        found = chosen(places, fuse=backend)
        assert os.strerror(errno.EOPNOTSUPP) in found.why
        assert one_line(found.why)
        assert (found.backend.name, found.passthrough, set(found.refused)) == ("native", False, set(places))
    assert machine.depths == [1, 1]


@pytest.mark.parametrize("number", [errno.ELOOP, errno.EOPNOTSUPP])
def test_one_is_refused(machine: Machine, places: list[Path], number: int) -> None:
    machine.takes = lambda depth, place: number if place.name == "ssd" else 0
    found = chosen(places)
    assert (found.backend.name, found.passthrough) == ("native", True)
    assert list(found.refused) == [places[1]]
    assert one_line(found.refused[places[1]])
    assert len(machine.open) == 1


def test_no_places(machine: Machine) -> None:
    """No tier, or each read has to be checked: there are no backing files, and requests are still answered faster."""
    for number, backend in enumerate(("auto", "native"), 1):
        found = chosen([], fuse=backend)
        assert (found.backend.name, found.passthrough, found.refused) == ("native", False, {})
        assert one_line(found.why)
        assert len(machine.open) == number


def test_a_place_that_is_not_there(machine: Machine, places: list[Path]) -> None:
    found = chosen([places[0], places[1] / "gone"])
    assert (found.passthrough, list(found.refused)) == (True, [places[1] / "gone"])
    assert found.refused[places[1] / "gone"] == os.strerror(errno.ENOENT)


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_mountpoint_that_cannot_be(machine: Machine, places: list[Path], backend: str) -> None:
    machine.attaches = failure(errno.EBUSY)
    with pytest.raises(MountError, match="cannot mount on /mnt/x: ") as caught:
        chosen(places, fuse=backend)
    assert one_line(str(caught.value))
    assert machine.open == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES])
def test_a_mount_that_may_be_made_but_not_attached(machine: Machine, places: list[Path], number: int) -> None:
    """A security module refuses what pyfuse3's helper may do."""
    machine.attaches = failure(number)
    found = chosen(places)
    assert (found.backend.name, found.passthrough, machine.open) == ("pyfuse3", False, [])
    assert os.strerror(number) in found.why
    assert one_line(found.why)
    with pytest.raises(MountError, match="cannot mount on /mnt/x: "):
        chosen(places, fuse="native")
    assert machine.open == []


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.parametrize("says", [WITH, WITHOUT], ids=["passthrough", "without"])
def test_zero_open_uses_passthrough_nothing(
    machine: Machine, places: list[Path], backend: str, says: Negotiated
) -> None:
    """So it needs a kernel that reads messages only."""
    machine.says = says
    machine.takes = lambda depth, place: errno.EOPNOTSUPP
    found = chosen(places, fuse=backend, consistency="immutable", zero_open="true")
    assert (found.backend.name, found.passthrough, found.refused) == ("native", False, {})
    assert one_line(found.why)
    assert len(machine.open) == 1


def test_connecting_leaves_one_device(machine: Machine, places: list[Path]) -> None:
    """Whatever each of the two depths says of each of the two places."""
    answers = [0, errno.ELOOP, errno.EPERM]
    for first in [(a, b) for a in answers for b in answers]:
        for second in [(a, b) for a in answers for b in answers]:
            said = {1: dict(zip(places, first, strict=True)), 2: dict(zip(places, second, strict=True))}
            machine.takes = lambda depth, place, said=said: said[depth][place]  # type: ignore[misc]
            machine.depths.clear()
            device, _, refused = connect("x", (), places)
            assert machine.open == [device]
            assert refused.keys() == {place for place, no in said[machine.depths[-1]].items() if no}
            assert machine.depths == ([1, 2] if errno.ELOOP in first else [1])
            device.close()


@pytest.mark.parametrize(
    ("release", "kept"),
    [
        ("6.18.44-fc-v669", True),
        ("6.13", True),
        ("6.13.0-rc1", True),
        ("7.0.1", True),
        ("10.1.0", True),
        ("6.12.99", False),
        ("6.9.0-1-amd64", False),
        ("5.15.0-100-generic", False),
        ("6", False),
        ("", False),
        ("custom", False),
    ],
)
def test_kernels_that_keep_listings(release: str, kept: bool) -> None:
    assert (linux.release(release) >= LISTINGS_KEPT_SINCE) is kept


def test_titles_fit_the_mount_table() -> None:
    assert backends._plain("s3://b/with space,comma\\back\n\u00e9") == "s3://b/with_space_comma_back__"


# -- the real thing, as far as it goes without mounting ------------------------------------------------


@pytest.mark.parametrize("fails", ["_make", "_negotiate"])
def test_a_connection_that_fails_closes_its_device(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, *how: opened("/dev/null", os.O_RDWR))

    def fail(self: Device, *_: Any) -> None:
        raise failure(errno.EPERM)

    monkeypatch.setattr(Device, "_make", lambda self, name, flags: None)
    monkeypatch.setattr(Device, fails, fail)
    before = descriptors()
    with pytest.raises(PermissionError):
        Device.connect("x", (), stack_depth=1)
    assert descriptors() == before
