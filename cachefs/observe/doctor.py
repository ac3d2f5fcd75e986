"""Findings about this machine and its mounts: what may be wrong or slow, and what to do about it.

The checks run in the command and not in the daemon, so they work when the daemon does not answer. They change nothing, but
write a file of 64 MiB to the cache's disk, read it back and remove it. The output can be shown to others: user names and
passwords in addresses, and the values of environment variables whose names suggest a secret, are replaced by "…".
"""

from __future__ import annotations

import errno
import os
import platform
import re
import resource
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cachefs import __version__
from cachefs.base import client
from cachefs.base.errors import MountError
from cachefs.base.linux import memory_limit, mounts, release
from cachefs.base.units import about_bytes
from cachefs.config.config import default_cache_dir
from cachefs.daemon import asking, mounting
from cachefs.store import remove_orphans

Level = Literal["ok", "note", "problem"]

PASSTHROUGH_SINCE = (6, 9)
"""The first kernel with FUSE passthrough."""

FEW_FILES = 4096
"""A lower limit of open files is a problem: a mount has a descriptor for each open file and each connection to an origin.
Borrowed: the kernel's default hard limit (INR_OPEN_MAX), so a lower one was set on purpose."""

MEASURED_BYTES = 64 << 20
"""Size of the file that the disk's speed is measured with. Documented in `cachefs doctor --help`."""

SLOW_DISK = 200 << 20
"""A slower disk, in bytes a second, is a finding. Guessed: about one stream from an object store."""

FAR_S = 0.1
"""A longer round trip to an origin, in seconds, is a finding. Guessed: the origin is in another region."""

LOOKED_S = 1.0
"""How long processor time is measured. Derived: /proc counts hundredths of a second, so a share is known to a percent."""

BUSY = 0.8
"""A thread that takes this share of a processor is its mount's bottleneck. Guessed: one that takes less has often slept."""

IDLE = 0.05
"""A daemon that takes less than this share of one processor is reported as idle. Guessed."""

NO_DISKS = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "fuse.sshfs", "overlay", "tmpfs", "ramfs"}
"""Types of filesystems that are not on a local disk: network filesystems, a container's layers, memory."""

PACKAGES = ("trio", "pyfuse3", "lmdb", "pycurl", "fsspec")

SECRET = re.compile(r"KEY|SECRET|TOKEN|PASSW|CREDENTIAL|SAS|CONNECTION_STRING|SIGNATURE", re.IGNORECASE)


class Finding(NamedTuple):
    """The result of one check. `todo` is "" if there is nothing to do."""

    level: Level
    subject: str
    found: str
    todo: str = ""


def examine(mountpoint: Path | None, cache_dir: Path | None, *, measure: bool) -> Iterator[Finding]:
    """All findings, without secrets. `mountpoint` None: all mounts of this user."""
    hide = hiding(os.environ)
    for level, *texts in _examine(mountpoint, cache_dir, measure):
        yield Finding(level, *map(hide, texts))


def hiding(environ: Mapping[str, str]) -> Callable[[str], str]:
    """A function that replaces secrets in text by "…"."""
    values = {value for name, value in environ.items() if SECRET.search(name) and len(value) >= 6}
    # The longest first, because one may be a part of another.
    secrets = sorted((value for value in values if not value.startswith("/")), key=len, reverse=True)

    def hide(text: str) -> str:
        text = re.sub(r"(\w://)[^/@\s]*@(?!https?://)", r"\1…@", text)  # s3://bucket@http://endpoint has none
        text = re.sub(r"(\w://[^\s?]*)\?[^\s:,]*", r"\1?…", text)
        for secret in secrets:
            text = text.replace(secret, "…")
        return text

    return hide


def _examine(mountpoint: Path | None, cache_dir: Path | None, measure: bool) -> Iterator[Finding]:
    yield from machine()
    yield rights()
    yield from limits(resource.getrlimit(resource.RLIMIT_NOFILE)[1], memory_limit())
    yield from memory_left()
    statuses, silent = _statuses(mountpoint)
    yield from silent
    disks = {Path(tier["path"]) for s in statuses for tier in s.get("tiers", ()) if tier["name"] == "ssd"}
    if cache_dir is not None:
        disks = {cache_dir}
    elif not disks and not statuses:
        disks = {default_cache_dir(()).parent}
    for disk in sorted(disks):
        yield from cache_disk(disk, measure=measure)
    loads = watch([int(status.get("pid") or 0) for status in statuses])
    for status in statuses:
        yield from mount(status)
        if (load := loads.get(int(status.get("pid") or 0))) is not None:
            yield bound(status, load)
        yield from origins(status)
        yield from peers(status)
    if not statuses and not silent:
        todo = "name the mountpoint, or run this as the user who mounted it"
        yield Finding("note", "mounts", "none of this user", todo)


def _statuses(mountpoint: Path | None) -> tuple[list[dict[str, Any]], list[Finding]]:
    """(statuses of daemons, findings about daemons that do not answer)."""
    found, silent = [], []
    places = [Path(mount.path) for mount in mounts() if mount.is_cachefs]
    for place in places if mountpoint is None else [mounting.canonical(mountpoint)]:
        try:
            found.append(asking.ask(place, "status"))
        except (client.ControlError, MountError) as exc:
            level: Level = "note" if mountpoint is None and "this user" in str(exc) else "problem"
            reason, _, todo = str(exc).partition(": ")  # all errors of cachefs have this form
            hangs = f"it hangs: see its log, end its process, then cachefs umount --lazy {place}, and mount it again"
            silent.append(Finding(level, f"mount {place}", reason, todo or hangs))
    return found, silent


# -- the machine -----------------------------------------------------------------------------------


def machine() -> Iterator[Finding]:
    """Versions, and whether the kernel can read files in passthrough."""
    found = [f"cachefs {__version__}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} missing")
    yield Finding("ok", "versions", f"{', '.join(found)}, Python {platform.python_version()}")
    yield kernel(platform.release(), os.getuid())


def kernel(text: str, uid: int) -> Finding:
    if release(text) < PASSTHROUGH_SINCE:
        todo = "from Linux 6.9 on, and as root, the kernel reads whole cached files by itself"
    elif uid != 0:
        text, todo = f"{text}, not root", "mounted by root, the kernel reads whole cached files by itself"
    else:
        return Finding("ok", "kernel", f"{text}: reads whole cached files by itself")
    return Finding("note", "kernel", f"{text}: every read of a cached file goes through the daemon", todo)


def rights() -> Finding:
    """Whether this user may mount."""
    try:
        mounting.check_rights()
    except MountError as exc:
        reason, _, todo = str(exc).partition(": ")
        return Finding("problem", "rights", reason, todo)
    return Finding("ok", "rights", f"user {os.getuid()} may mount")


def memory_left() -> Iterator[Finding]:
    """RAM tiers of killed daemons that a later mount can use. Removes those that none can use."""
    for left in remove_orphans():
        stats, held = os.statvfs(left.path), "some"
        if left.path.is_mount():
            held = about_bytes((stats.f_blocks - stats.f_bfree) * stats.f_frsize)
        found = f"{held} held for process {left.pid}, which is gone"
        todo = f"mount with --cache-dir {left.cache_dir} again, which uses it; or remove that directory, then cachefs doctor"
        yield Finding("note", f"memory {left.path}", found, todo)


def limits(files: int, memory: int) -> Iterator[Finding]:
    if 0 <= files < FEW_FILES:
        todo = f"ulimit -Hn {1 << 16}, or LimitNOFILE=infinity in the service"
        yield Finding("problem", "open files", f"at most {files:,}", todo)
    else:
        yield Finding("ok", "open files", "no limit" if files < 0 else f"{files:,}")
    if memory < 1 << 30:
        todo = "give it more, or mount with --ram 0"
        yield Finding("note", "memory", f"{about_bytes(memory)} for this process and its RAM tier", todo)
    else:
        yield Finding("ok", "memory", about_bytes(memory))


# -- the cache's disk ------------------------------------------------------------------------------


def cache_disk(place: Path, *, measure: bool) -> Iterator[Finding]:
    """The disk's filesystem, free space and speed."""
    place = mounting.existing_above(place)
    subject = f"cache disk {place}"
    try:
        stats = os.statvfs(place)
    except OSError as exc:
        yield Finding("problem", subject, exc.strerror or str(exc), "choose another --cache-dir")
        return
    if not os.path.isdir(place):
        yield Finding("problem", subject, "is a file", "choose another --cache-dir")
        return
    free, whole = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
    kind = _file_system(place)
    if kind in NO_DISKS:
        todo = "choose a --cache-dir on a disk of this machine: NVMe, if there is one"
        yield Finding("note", subject, f"{kind} is not a local disk", todo)
    if free < whole // 20:
        todo = "free some, or lower --keep-free; the cache shrinks to what is left"
        yield Finding("problem", subject, f"{about_bytes(free)} of {about_bytes(whole)} free", todo)
    else:
        yield Finding("ok", subject, f"{kind}, {about_bytes(free)} of {about_bytes(whole)} free")
    if measure:
        yield speed(subject, place)


def _file_system(place: Path) -> str:
    real = Path(os.path.realpath(place))
    by_depth = sorted(mounts(), key=lambda found: len(found.path))
    return next((found.fstype for found in reversed(by_depth) if real.is_relative_to(found.path)), "?")


def speed(subject: str, place: Path) -> Finding:
    """Measure the speed of writing to the disk and of reading back."""
    block = os.urandom(1 << 20)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            since = time.perf_counter()
            for _ in range(MEASURED_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written_s = time.perf_counter() - since
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            since = time.perf_counter()
            while file.read(len(block)):
                pass
            read_s = time.perf_counter() - since
    except OSError as exc:
        denied = exc.errno in (errno.EACCES, errno.EPERM)
        todo = "ask as its owner" if denied else "look at the disk (df, dmesg)"
        return Finding("note", subject, f"its speed was not measured: {exc.strerror or exc}", todo)
    rates = [MEASURED_BYTES / max(seconds, 1e-9) for seconds in (written_s, read_s)]
    found = f"{about_bytes(rates[0])}/s written, {about_bytes(rates[1])}/s read"
    if min(rates) < SLOW_DISK:
        todo = "slower than an origin may be: see whether others use it, or choose NVMe"
        return Finding("note", subject, found, todo)
    return Finding("ok", subject, found)


# -- mounts ----------------------------------------------------------------------------------------


def mount(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Findings in the status of a mount."""
    subject = f"mount {status['mountpoint']}"
    yield Finding("ok", subject, f"answers, version {status['version']}, {status['fuse']} backend")
    if status["fuse"] != "native":
        todo = "nothing, if that is as it was meant; docs/how-to/tune.md says what it costs"
        yield Finding("note", subject, f"{status['fuse']} backend: {status['fuse_reason']}", todo)
    yield from warnings(subject, map(str, status.get("warnings") or ()))
    for tier in status.get("tiers") or ():
        if tier["state"] != "normal":
            todo = "look at the log and at the disk (dmesg): until then it is not filled"
            if tier["state"] == "removed":
                todo = "mount again: what is cached there now is lost when the mount ends"
            yield Finding("problem", f"{subject}, {tier['name']} tier", tier["state"], todo)
    metrics = status.get("metrics") or {}
    if metrics.get("checksum_failures"):
        found = f"{metrics['checksum_failures']:,} cached blocks were damaged"
        todo = "they were fetched again; if there are more and more, replace the disk (or the memory)"
        yield Finding("problem", subject, found, todo)
    uploads = status.get("uploads") or {}
    if uploads.get("failed"):
        todo = "they are tried again; cachefs flush says of each why"
        found = f"{uploads['failed']:,} uploads failed: {uploads.get('last_error', '')}"
        yield Finding("problem", subject, found, todo)


class Load(NamedTuple):
    """Shares of one processor: of the daemon's main thread, and of all its threads."""

    main: float
    whole: float


def watch(pids: Iterable[int]) -> dict[int, Load]:
    """Measure these daemons for `LOOKED_S`. Leaves out those that end meanwhile."""
    before = {pid: found for pid in pids if (found := _processor_s(pid)) is not None}
    if before:
        time.sleep(LOOKED_S)
    loads = {}
    for pid, (main, whole) in before.items():
        if (after := _processor_s(pid)) is not None:
            loads[pid] = Load((after[0] - main) / LOOKED_S, (after[1] - whole) / LOOKED_S)
    return loads


def _processor_s(pid: int) -> tuple[float, float] | None:
    """Seconds of processor time of a process' main thread, and of all its threads; None if it has ended."""
    seconds = []
    for place in (f"/proc/{pid}/task/{pid}/stat", f"/proc/{pid}/stat"):
        try:
            fields = Path(place).read_text().rpartition(")")[2].split()
        except OSError:
            return None
        seconds.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return seconds[0], seconds[1]


def bound(status: Mapping[str, Any], load: Load) -> Finding:
    """The bottleneck of a mount by this measurement: its daemon, an origin, or neither."""
    subject = f"mount {status['mountpoint']}"
    shares = f"main thread {load.main:.0%} of a processor, all threads {load.whole:.0%}"
    if load.main >= BUSY or load.whole >= 1.0:
        which = "its main thread" if load.main >= BUSY else "its threads, of which one runs at a time"
        todo = (
            "see docs/how-to/tune.md, Several processes and one daemon: fewer messages a file, or more mounts"
        )
        return Finding("note", subject, f"bound by {which}: {shares}", todo)
    for source in status.get("sources", ()):
        origin = source["origin"]
        if origin.get("demand_waiting"):
            todo = "--concurrency, if the origin can do more; or cachefs warm, so that readers need not wait for it"
            found = f"bound by {source['url']}: {origin['in_flight']} requests under way, no more are sent"
            return Finding("note", subject, f"{found}; {shares}", todo)
    if load.whole < IDLE:
        return Finding("ok", subject, f"has nothing to do: {shares}")
    return Finding("ok", subject, f"not bound by its daemon: {shares}")


def warnings(subject: str, lines: Iterable[str]) -> Iterator[Finding]:
    """The warnings of `cachefs status`, without those about silent origins, which `origins` reports."""
    for line in lines:
        if "there is no password" in line:
            todo = "--metrics PORT alone is for this machine only; or restrict access to the port"
            yield Finding("note", subject, line, todo)
        elif "has not answered for" not in line:
            todo = "the log says when and why; of a tier, names or the index: look at its disk (df, dmesg)"
            yield Finding("problem", subject, line, todo)


def origins(status: Mapping[str, Any]) -> Iterator[Finding]:
    """Round trips to the origins, measured by the daemon with its credentials."""
    metrics = status.get("metrics") or {}
    try:
        answers = asking.ask(Path(status["mountpoint"]), "probe", 60.0)
    except (client.ControlError, MountError) as exc:
        answers = [{"source": str(source["url"]), "error": str(exc)} for source in status["sources"]]
    for answer in answers:
        subject = f"origin {answer['source']}"
        if "error" in answer:
            todo = "is the endpoint right (curl -v), and are the credentials? The mount goes on by itself once it answers"
            yield Finding("problem", subject, answer["error"], todo)
        elif answer["seconds"] > FAR_S:
            todo = "run where the bucket is: each first read of a small file takes this long"
            yield Finding("note", subject, f"{1000 * answer['seconds']:.0f} ms for a small request", todo)
        else:
            yield Finding("ok", subject, f"{1000 * answer['seconds']:.1f} ms for a small request")
    for source in status.get("sources", ()):
        if ignored := source["origin"].get("ignored_conditions"):
            todo = (
                "copies are compared instead; with --on-conflict fail, what another client writes in the moment between"
                " a look and the write that follows it is overwritten"
            )
            yield Finding("note", f"origin {source['url']}", f"does not honour {', '.join(ignored)}", todo)
    requests = sum(metrics.get(f"origin_{kind}", 0) for kind in ("get", "head", "list", "put", "put_part"))
    for name, outcome, todo in (
        ("throttled", "were answered with 503 or 429", "lower --concurrency, or spread keys over prefixes"),
        ("retries", "were repeated", "the log at debug says why: cachefs log-level debug"),
        ("errors", "failed for good", "cachefs status has the last error of each origin"),
    ):
        count = metrics.get(f"origin_{name}", 0)
        if requests and count > requests // 100:
            found = f"{count:,} of {requests:,} requests {outcome}"
            yield Finding("note", f"origins of {status['mountpoint']}", found, todo)


def peers(status: Mapping[str, Any]) -> Iterator[Finding]:
    """The other nodes that the mount shares its cache with."""
    known = status.get("peers")
    if not known:
        return
    subject = f"peers of {status['mountpoint']}"
    others = [member for member in known["members"] if not member["here"]]
    silent = [member["name"] for member in others if member["state"] != "healthy"]
    incompatible = known.get("incompatible", ())
    silent += [other["name"] for other in incompatible if other["state"] == "unknown"]
    for other in incompatible:
        if other["wrong"]:
            todo = "nothing is shared with it until both are mounted alike"
            yield Finding("problem", subject, f"{other['name']} {other['why']}", todo)
    if known.get("trouble"):
        todo = "members stay as they are meanwhile, and new ones are not seen"
        yield Finding("problem", subject, known["trouble"], todo)
    if silent:
        todo = "what they keep comes from the origin meanwhile; see their logs, and what lies between"
        yield Finding("problem", subject, f"{', '.join(silent)} do not answer", todo)
    if not any(member["here"] for member in known["members"]) and known.get("listen"):
        found = f"this node, listening on {known['listen']}, is not among them"
        todo = (
            "--peers must name this machine's address: no node asks this one, and it keeps nothing for others"
        )
        yield Finding("problem", subject, found, todo)
    if others and not silent:
        yield Finding("ok", subject, f"{len(others)} others answer")
    elif not others:
        todo = "the same --cache-group on all nodes?"
        yield Finding("note", subject, f"no other node in group {known['group']}", todo)
