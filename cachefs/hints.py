"""Sends the daemon the order in which a training loop will read its files, from inside that loop.

A sampler knows the order of a whole epoch before its first batch is read. With that order the daemon can fetch every file
before it is opened. This module draws the order, sends it, and passes it on unchanged:

    loader = hinted(DataLoader(dataset, shuffle=True, ...), dataset.paths)

It needs the standard library only. It does not disturb the training: a separate thread sends, and all failures (no mount, no
daemon, a path outside of the mount) cause one warning at most. Paths are sent once; after that an epoch takes four bytes a
sample.

A *plan* is a list of files and the orders that were sent for it. Each rank, each list and each sampler of a process has its
own. Its name consists of host, rank and the list's digest, and of a number if another job uses that name now. So jobs that
share a node have different plans, and a job that is started again finds its own. An order is sent with the digest of its
list, and the daemon refuses it for any other list.
"""

from __future__ import annotations

import atexit
import base64
import copy
import errno
import hashlib
import logging
import os
import random
import socket
import sys
import threading
import warnings
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, islice
from operator import index as as_index
from pathlib import Path
from typing import Any

from cachefs.base import client
from cachefs.base.errors import CachefsError, MountError
from cachefs.base.linux import Finder

__all__ = ["HintedSampler", "announce", "hinted", "wait"]

log = logging.getLogger(__name__)

INDICES_AT_ONCE = 48 << 10
"""Numbers of an order in one request: 192 KiB, and 256 KiB as base64. Derived: half of `client.MAX_REQUEST_BYTES`."""

ASK_DEADLINE_S = 30.0
"""Deadline of a request. The last part of a list of a million files takes seconds. Only the sending thread waits."""

EXIT_DEADLINE_S = 5.0
"""How long a process waits at its end until its hints are sent, which takes milliseconds unless the daemon hangs."""

MOST_WAITING = 256
"""Announcements and orders that may wait to be sent; the oldest is dropped. Derived: a daemon keeps so many plans."""

RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "LOCAL_RANK")
"""Variables in which launchers (torchrun, srun, Open MPI, MPICH, Intel MPI) tell a process its rank."""

NOT_ON_A_MOUNT = 0xFFFFFFFF
"""Position of a path that does not lie below the mount."""


def announce(
    paths: Iterable[str | os.PathLike[str]], *, plan: str | None = None, epoch: int = 0, wait_s: float = 0.0
) -> None:
    """Tell the daemons that these files will be read next, in this order.

    Returns at once, or, with `wait_s`, when everything is sent or that many seconds have passed. The default `plan` belongs
    to this process, and its next announcement replaces it. Errors of the daemon or the paths do not raise."""
    listed = [os.fsdecode(path) for path in paths]
    order = array("I", range(len(listed)))
    if _in_worker():
        return
    files = _Files(plan, listed, _rank, replaces=True)
    _sender.put(lambda: files.send(epoch, order))
    if wait_s:
        wait(wait_s)


def wait(timeout_s: float = 60.0) -> bool:
    """Wait until everything that was announced has been sent, or has failed. Returns False after `timeout_s`."""
    return _sender.wait(timeout_s)


class HintedSampler:
    """A sampler (or batch sampler) that sends the order it is about to yield, and yields it unchanged.

    `paths` is the file of each sample, by index. It wraps anything that has `__iter__` and `__len__`, like the samplers of
    PyTorch. If that sampler, or one inside of it, has `set_epoch`, the order of the next epoch is sent ahead, too. Every
    other attribute is the wrapped sampler's.

    The whole order is drawn when the first sample is requested. If the sampler can be saved (it has `state_dict`), the order
    is drawn from a copy of it."""

    def __init__(
        self, sampler: Any, paths: Iterable[str | os.PathLike[str]], *, plan: str | None = None
    ) -> None:
        self.sampler = sampler
        self._files = _Files(plan, [os.fsdecode(path) for path in paths], partial(_rank, sampler))
        self._iterations = 0
        self._given_epoch: int | None = None

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(iter(self.sampler))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the wrapped sampler, whose own `set_epoch` may be called, too."""
        self._given_epoch = epoch
        setter = _epoch_setter(self.sampler)
        if setter is not None:
            setter.set_epoch(epoch)

    def _epoch(self) -> int:
        inner = getattr(_epoch_setter(self.sampler), "epoch", None)
        if isinstance(inner, int):
            return inner
        return self._iterations if self._given_epoch is None else self._given_epoch

    def _iterate(self, drawing: Iterator[Any]) -> Iterator[Any]:
        # This runs when the first sample is requested: a loader may call `__iter__` twice before that.
        epoch = self._epoch()
        self._iterations += 1
        try:
            length = len(self.sampler)
        except (TypeError, NotImplementedError):
            _warn_once("the order of a sampler without a length is not known ahead")
            yield from drawing
            return
        if _in_worker():
            yield from drawing
            return
        order: list[Any] = []
        if any(hasattr(one, "state_dict") for one in _wrapped_samplers(self.sampler)):
            self._draw(epoch, length)
        else:
            order = list(islice(drawing, length))
            self._send(epoch, order)
        for count, item in enumerate(chain(order, drawing), 1):
            yield item
            # Half way: drawing at the beginning would delay the first batches, and the next epoch is still far. Without a
            # setter, the next order is not decided yet.
            if count == (length + 1) // 2 and _epoch_setter(self.sampler) is not None:
                self._draw(epoch + 1, length, ahead=True)

    def _draw(self, epoch: int, length: int, *, ahead: bool = False) -> None:
        """Send an order that a copy of the sampler draws, `ahead` for a later epoch. Restores every random generator."""
        try:
            with _generators_restored(self.sampler):
                clone = _clone(self.sampler)
                if ahead:
                    _epoch_setter(clone).set_epoch(epoch)
                self._send(epoch, list(islice(clone, length)), ahead=ahead)
        except Exception as exc:
            _warn_once(f"the order of epoch {epoch} could not be drawn ahead: {exc!r}")

    def _send(self, epoch: int, items: list[Any], *, ahead: bool = False) -> None:
        try:
            order = _indices(items)
        except (TypeError, ValueError, OverflowError) as exc:
            _warn_once(f"these samples are not indices of files ({exc})")
            return
        files = self._files
        _sender.put(lambda: files.send(epoch, order, ahead=ahead))


def hinted(loader: Any, paths: Iterable[str | os.PathLike[str]], *, plan: str | None = None) -> Any:
    """Have a PyTorch `DataLoader` tell the daemon what it will read, and return it; a sampler is returned wrapped.

    `paths` is the file of each sample of its dataset, by index. Call it before the first iteration."""
    if not hasattr(loader, "collate_fn"):
        return HintedSampler(loader, paths, plan=plan)
    # Replace the attribute that the loader iterates. An assignment would be refused, because the loader's other attributes
    # must agree with this one. They still do, so it is set through `vars`.
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    vars(loader)[name] = HintedSampler(getattr(loader, name), paths, plan=plan)
    return loader


# -- samplers --------------------------------------------------------------------------------------


def _wrapped_samplers(sampler: Any) -> Iterator[Any]:
    """The sampler and those that it wraps, the outermost first."""
    for _ in range(8):
        if sampler is None:
            return
        yield sampler
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)


def _epoch_setter(sampler: Any) -> Any:
    """The sampler that has `set_epoch`, or None."""
    return next(
        (one for one in _wrapped_samplers(sampler) if callable(getattr(one, "set_epoch", None))), None
    )


def _inner_samplers(sampler: Any) -> list[tuple[str, Any]]:
    """(name, value) of the attributes that a sampler may draw from."""
    return [
        (name, one)
        for name, one in (vars(sampler) if hasattr(sampler, "__dict__") else {}).items()
        if hasattr(one, "__dict__") and hasattr(type(one), "__iter__")
    ]


def _all_samplers(sampler: Any) -> list[Any]:
    """The sampler and all that it draws from, each once."""
    reached: dict[int, Any] = {}
    waiting = list(_wrapped_samplers(sampler))
    while waiting:
        one = waiting.pop()
        if id(one) not in reached:
            reached[id(one)] = one
            waiting += [inner for _, inner in _inner_samplers(one)]
    return list(reached.values())


def _clone(sampler: Any, depth: int = 8) -> Any:
    """A copy of a sampler and of those that it wraps: changes to one, and draws from it, do not affect the other."""
    clone = copy.copy(sampler)
    for name, inner in _inner_samplers(clone) if depth else ():
        named = name in ("sampler", "batch_sampler")
        if named or hasattr(inner, "set_epoch") or hasattr(inner, "state_dict"):
            setattr(clone, name, _clone(inner, depth - 1))
    return clone


def _indices(items: list[Any]) -> array[int]:
    """The indices of samples, or of batches of samples, as one array."""
    try:
        return array("I", items)
    except TypeError:
        pass
    flat = array("I")
    for item in items:
        try:
            flat.append(as_index(item))
        except TypeError:
            flat.extend(as_index(one) for one in item)
    return flat


@contextmanager
def _generators_restored(sampler: Any) -> Iterator[None]:
    """Restore all random generators at the end, so that draws inside do not change later random numbers."""
    states: list[tuple[Callable[[Any], object], Any]] = [(random.setstate, random.getstate())]
    if (numpy := sys.modules.get("numpy")) is not None:
        states.append((numpy.random.set_state, numpy.random.get_state()))
    if (torch := sys.modules.get("torch")) is not None:
        states.append((torch.set_rng_state, torch.get_rng_state()))
    for one in _all_samplers(sampler):
        for own in vars(one).values() if hasattr(one, "__dict__") else ():
            if isinstance(own, random.Random):
                states.append((own.setstate, own.getstate()))
            elif hasattr(own, "get_state") and hasattr(own, "set_state"):  # torch.Generator, RandomState
                states.append((own.set_state, own.get_state()))
            elif hasattr(own, "bit_generator"):
                states.append((partial(setattr, own.bit_generator, "state"), own.bit_generator.state))
    try:
        yield
    finally:
        for restore, state in states:
            restore(state)


def _rank(sampler: Any = None) -> str:
    """The rank of this process: its sampler's, torch's, or the launcher's."""
    for one in _wrapped_samplers(sampler):
        rank = getattr(one, "rank", None)
        if isinstance(rank, int) and not isinstance(rank, bool):
            return str(rank)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return str(distributed.get_rank())
    return next((rank for name in RANKS if (rank := os.environ.get(name))), "0")


def _in_worker() -> bool:
    """True in a worker process of a loader, whose parent sends the hints."""
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


# -- what is sent ----------------------------------------------------------------------------------


class _Files:
    """The files of a plan, by mount. Only the sending thread calls its methods. `rank` is called when it is first needed.
    With `replaces`, the plan replaces the last one of this process that had no name, either."""

    def __init__(
        self, plan: str | None, paths: list[str], rank: Callable[[], str], *, replaces: bool = False
    ) -> None:
        self._plan = plan
        self._paths = paths
        self._rank = rank
        self._replaces = replaces
        self._mount_plans: list[_MountPlan] = []
        # (epoch, order) that was sent before its epoch began
        self._ahead: tuple[int, array[int]] | None = None

    def send(self, epoch: int, order: array[int], *, ahead: bool = False) -> None:
        """Send an order, unless it was just sent `ahead`, and before the first one the files. Raises `CachefsError`."""
        sent, self._ahead = self._ahead, None
        if sent == (epoch, order):
            return
        if not self._mount_plans:
            mount_plans, rank = list(_by_mount(self._paths)), self._rank()
            if not mount_plans:
                raise MountError("none of these paths lies below a cachefs mount")
            for mount_plan in mount_plans:
                mount_plan.name(self._plan, rank, replaces=self._replaces)
            self._mount_plans, self._paths = mount_plans, []
        failure = None
        for mount_plan in self._mount_plans:
            try:
                mount_plan.send(epoch, order)
            except CachefsError as exc:
                failure = exc
        if failure is not None:
            raise failure
        if ahead:
            self._ahead = epoch, order


class _MountPlan:
    """The files of a plan below one mount. `positions`: the index in `paths`, or `NOT_ON_A_MOUNT`, of each file."""

    def __init__(self, mountpoint: str) -> None:
        self.mountpoint = Path(mountpoint)
        self.plan = self.digest = self._replaced = ""
        self.paths: list[str] = []
        self.positions = array("I")
        self._sent = False

    def name(self, plan: str | None, rank: str, *, replaces: bool) -> None:
        """Choose the name of the plan. Called when `paths` is complete."""
        self.digest = digest(self.paths)
        if plan is not None:
            self.plan = plan
            return
        self.plan = f"{socket.gethostname()}-{rank}-{self.digest[:8]}"
        if replaces:
            self._replaced = _last_plans.get(self.mountpoint, "")
            _last_plans[self.mountpoint] = self.plan
            return
        first, job = self.plan, 1
        while not _claim(self.mountpoint, self.plan):
            job += 1
            self.plan = f"{first}.{job}"
        _samplers[self.mountpoint, self.plan] += 1
        if (number := _samplers[self.mountpoint, self.plan]) > 1:
            self.plan += f"-{number}"

    def send(self, epoch: int, order: array[int]) -> None:
        if len(self.positions) != len(self.paths) or (order and max(order) >= len(self.positions)):
            positions, count = self.positions, len(self.positions)
            order = array("I", (positions[i] for i in order if i < count and positions[i] != NOT_ON_A_MOUNT))
        if not self._sent:
            if self._replaced not in ("", self.plan):
                drop(self.mountpoint, self._replaced)
            send_files(self.mountpoint, self.plan, self.paths)
            self._sent = True
        try:
            send_order(self.mountpoint, self.plan, epoch, order, self.digest)
        except CachefsError:
            # A daemon that was started again may have lost the list, or have another one under this name.
            send_files(self.mountpoint, self.plan, self.paths)
            send_order(self.mountpoint, self.plan, epoch, order, self.digest)


_last_plans: dict[Path, str] = {}
"""Mount → name of the last plan that `announce` named by itself."""

_samplers: Counter[tuple[Path, str]] = Counter()
"""(mount, name of the plan) → number of samplers of this process that have the same list."""


_claims: dict[tuple[Path, str], socket.socket] = {}
"""(mount, name of the plan) → the socket that keeps other processes from the name."""


def _claim(mountpoint: Path, plan: str) -> bool:
    """Take the name of a plan until this process ends. False if another process has it: a job with the same files."""
    if (mountpoint, plan) in _claims:
        return True
    name = hashlib.blake2b(os.fsencode(f"{mountpoint}\0{plan}"), digest_size=16).hexdigest()
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0cachefs-plan-{os.getuid()}-{name}")
    except OSError as exc:
        claim.close()
        return exc.errno != errno.EADDRINUSE
    _claims[mountpoint, plan] = claim
    return True


def _by_mount(paths: list[str]) -> Iterable[_MountPlan]:
    finder = Finder()
    mount_plans: dict[str, _MountPlan] = {}
    for number, path in enumerate(paths):
        mountpoint, relative_path = finder.find(path) or ("", "")
        if not relative_path:
            continue
        mount_plan = mount_plans.get(mountpoint)
        if mount_plan is None:
            mount_plan = mount_plans[mountpoint] = _MountPlan(mountpoint)
        mount_plan.positions.extend([NOT_ON_A_MOUNT] * (number - len(mount_plan.positions)))
        mount_plan.positions.append(len(mount_plan.paths))
        mount_plan.paths.append(relative_path)
    return mount_plans.values()


def digest(paths: Iterable[str]) -> str:
    """The digest of a list of paths relative to a mount, as the daemon computes it (`cachefs.prefetch.plans`)."""
    summed = hashlib.blake2b(digest_size=16)
    for path in paths:
        summed.update(os.fsencode(path).lstrip(b"/") + b"\0")
    return summed.hexdigest()


def send_files(mountpoint: Path, plan: str, paths: list[str]) -> None:
    """Send the daemon of `mountpoint` the files of a plan, relative to the mount. Raises `CachefsError`."""
    at = 0
    for batch in client.batches(paths):
        client.ask(mountpoint, "hint_files", ASK_DEADLINE_S, plan=plan, paths=batch, at=at, total=len(paths))
        at += len(batch)


def send_order(mountpoint: Path, plan: str, epoch: int, order: array[int], files: str = "") -> None:
    """Send an order of places in the list with the digest `files`. Raises `CachefsError`, also if the daemon has another."""
    if sys.byteorder == "big":
        order = order[:]
        order.byteswap()
    for at in range(0, len(order), INDICES_AT_ONCE):
        text = base64.b64encode(order[at : at + INDICES_AT_ONCE].tobytes()).decode()
        part = {"indices_b64": text, "at": at, "total": len(order)}
        client.ask(mountpoint, "hint_order", ASK_DEADLINE_S, plan=plan, epoch=epoch, files=files, **part)


def drop(mountpoint: Path, plan: str) -> bool:
    """Have the daemon forget a plan. Returns True if there was one. Raises `CachefsError`."""
    return bool(client.ask(mountpoint, "hint_drop", ASK_DEADLINE_S, plan=plan))


class _Sender:
    """One thread that sends everything, in the order of the announcements."""

    def __init__(self) -> None:
        self._tasks: deque[Callable[[], None]] = deque(maxlen=MOST_WAITING)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, task: Callable[[], None]) -> None:
        with self._changed:
            self._tasks.append(task)
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="cachefs-hints", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as exc:  # no thread can be started, or the interpreter is ending
                self._thread = None
                self._tasks.clear()
                _warn_once(str(exc))

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._tasks:
                    self._thread = None
                    self._changed.notify_all()
                    return
                task = self._tasks.popleft()
            try:
                task()
            except Exception as exc:
                _warn_once(str(exc) if isinstance(exc, CachefsError) else repr(exc))


_warned = False


def _warn_once(reason: str) -> None:
    """Warn at the first failure of this process. The training goes on without hints."""
    global _warned
    log.debug("not hinted: %s", reason)
    if not _warned:
        _warned = True
        with suppress(Warning):  # the program may turn warnings into exceptions
            warnings.warn(f"cachefs hints: {reason}; reading goes on without them", stacklevel=2)


_sender = _Sender()


def _after_fork() -> None:
    """Begin without tasks in a forked child, which has the lock and the tasks of its parent, but not the thread. The child's
    first announcement replaces none of the parent's, and the parent keeps the names of plans."""
    global _sender
    _sender = _Sender()
    _last_plans.clear()
    while _claims:
        _claims.popitem()[1].close()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: wait(EXIT_DEADLINE_S))
