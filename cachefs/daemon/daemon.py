"""The composition root: builds the rooms bottom-up, runs them, and closes them in reverse order.

Start: store, names, origins (one request each, so that a wrong bucket or key is reported before anything is mounted), the
files that an earlier daemon has not uploaded yet, the filesystem, the mount. Stop (by a signal, an umount, a failure):
unmount first, so that no new request comes; cancel transfers; upload written files; save RAM to SSD; close the databases
cleanly. A failure that no task contains ends the connection to the kernel and leaves a dead mount: only a signal or an
umount unmounts.
"""

from __future__ import annotations

import enum
import errno
import gc
import logging
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import trio

import cachefs
from cachefs.base import logs
from cachefs.base.behind import WriteBehind
from cachefs.base.client import control_path
from cachefs.base.errors import CachefsError, CacheUnusable, ConfigError, MountError, OriginFailed
from cachefs.base.linux import mount_at, resident_bytes
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.base.shared_memory import SharedMemory
from cachefs.base.tasks import RETRY_S, contained, in_thread, in_thread_at_last
from cachefs.config.config import ROWS, Config, Source
from cachefs.daemon import cachedir, control, mounting
from cachefs.daemon.asking import UPGRADED_S
from cachefs.daemon.locating import Locator
from cachefs.daemon.notify import Notifier
from cachefs.daemon.recording import Recordings
from cachefs.daemon.stopping import Stopping
from cachefs.daemon.uploading import Unsent, Uploading, left_behind, staging_of
from cachefs.daemon.warming import Jobs
from cachefs.fetch import Fetcher
from cachefs.fetch.serving import Serving
from cachefs.fetch.upstream import Upstream
from cachefs.fs import FileSystem, Options, Ttls, Volume
from cachefs.fuse import backends
from cachefs.fuse.connection import tune
from cachefs.fuse.handover import TOO_OLD, Handover, why_not
from cachefs.fuse.holder import HANDED_OVER
from cachefs.fuse.notices import Notices
from cachefs.observe.endpoint import Endpoint, open_endpoint
from cachefs.observe.explaining import Explainer
from cachefs.observe.watch import Pauses, Watch
from cachefs.origin import Origin, load_origin, open_origin
from cachefs.peers.node import PeerNode
from cachefs.prefetch import Paths, Prefetcher
from cachefs.store import Backing, OpenStore, scrub
from cachefs.upload import Uploads, orphans

log = logging.getLogger(__name__)

SPILL_DEADLINE_S = 10.0
"""How long a stop may take to save RAM to SSD: at 1 GB/s, more than twice the default RAM tier. Derived."""

NAMES_MAPPED_BYTES = 48 << 20
"""Bytes of the names database that may stay mapped, 400,000 names: half of what a daemon with a million names takes
(`scripts/bench memory-million`). Unmapping costs minor faults."""

TRIM_EVERY_S = 2.0
"""Seconds between two comparisons of `NAMES_MAPPED_BYTES` with the mapped bytes, each of which reads a line of /proc.
Derived: a listing of 100,000 names a second maps half of that limit meanwhile."""

ORPHANS_DEADLINE_S = 1.0
"""How long `status` waits for the disk to list orphaned staging files: a disk that hangs must not hold it up."""

FOR_NOW = (errno.ENOMEM, errno.ENFILE, errno.EMFILE, errno.ENOSPC, errno.ENOTCONN, errno.EBADF)
"""Errors of registering a backing file that concern this file alone, for now; any other error refuses the whole tier."""

GARBAGE_THRESHOLDS = (50_000, 20, 50)
"""Of `gc.set_threshold`. Requests make few cycles, and each collection stops the loop. Measured, while 8,000 small files are
read four times: with Python's own thresholds collections take a quarter of the processor time, with these one part in 70."""

LIVE = ("log_level", "download_limit", "upload_limit", "metadata_ttl", "negative_ttl", "pin_budget")
"""Options that SIGHUP changes while the mount is in use."""


def load(config: Config) -> None:
    """Import ahead of `run` the modules that it needs and that take long to import."""
    for source in config.sources:
        load_origin(source.url)


def run(
    config: Config,
    on_ready: Callable[[], None],
    reread: Callable[[], Config] | None = None,
    handover: Handover | None = None,
) -> int:
    """Mount and serve until a signal or an umount. Returns the exit code. Raises `CachefsError` when mounting is impossible.
    `reread` reads the configuration again, for SIGHUP. `handover` is given where a holder has started this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 1 << 20), hard)
    )
    metrics = Metrics()
    stopping = Stopping()
    with ExitStack() as cleanup:  # also after a failure: no files stay in shared memory
        cleanup.callback(stopping.done)
        stopping.start()
        opened = cachedir.open_cache(config, metrics, killed=handover is not None and handover.killed)
        cleanup.callback(opened.close)
        # It keeps written rows and times for the next daemon, if one can take over this mount.
        memory = None if handover is None or config.zero_open else handover.memory
        names = cachedir.open_names(opened, None if memory is None else memory.rows)
        cleanup.callback(names.close)
        cleanup.callback(stopping.stage, "closing the names database")
        for line in opened.warnings:
            log.warning("%s", line)
        try:
            with logs.in_background():
                daemon = Daemon(config, opened, names, metrics, on_ready, stopping, reread, handover, memory)
                return trio.run(daemon.main)
        except BaseExceptionGroup as group:
            raise _first(group) from group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to report when several tasks failed: an expected one rather than an unexpected one."""
    exc: BaseException = group.subgroup(CachefsError) or group
    while isinstance(exc, BaseExceptionGroup):
        exc = exc.exceptions[-1]
    return exc


class End(enum.Enum):
    """How a daemon ends."""

    FAILED = enum.auto()  # by a failure of its own
    STOPPED = enum.auto()  # by a signal, or by an umount
    HANDED_OVER = enum.auto()  # by an upgrade: another daemon takes over the mount


class Daemon:
    """One mount."""

    def __init__(
        self,
        config: Config,
        opened: OpenStore,
        names: WriteBehind,
        metrics: Metrics,
        on_ready: Callable[[], None],
        stopping: Stopping,
        reread: Callable[[], Config] | None = None,
        handover: Handover | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        self._handover = handover
        self._memory = memory
        # On a terminal, SIGHUP means that the terminal was closed: it stops the daemon.
        self._reread = None if os.isatty(0) else reread
        self._ttls: list[Ttls] = []
        self._stopping = stopping
        self._config = config
        self._opened = opened
        self._store = opened.store
        self._names = names
        self._metrics = metrics
        self._on_ready = on_ready
        self._notifier = Notifier()
        self._started = time.time()
        self._origins: list[Origin] = []
        self._absent: dict[Origin, OriginFailed] = {}
        self._tuning: list[str] = []
        self._stopped_by = "umount"
        self._end = End.FAILED
        self._replaces_dead = False
        self._served = False  # programs may have used the mount
        self._prefetcher: Prefetcher | None = None
        self._peers: PeerNode | None = None
        self._uploading: Uploading | None = None
        self._unsent = Unsent()
        self._orphan_warning = ""  # from the last listing of orphaned staging files
        self._orphan_lookup = trio.CapacityLimiter(1)
        self._reloading = trio.CapacityLimiter(1)
        self._mounted = trio.Event()
        self._watch = Watch(metrics, self._status, config.mountpoint)
        self._endpoint: Endpoint | None = None
        self._pauses = Pauses()

    async def main(self) -> int:
        # The receiver is open until the end: a second signal must not end the process while RAM is being saved.
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # see `Holder._load`
            try:
                async with trio.open_nursery() as lasting:  # uploads go on when the mount has gone
                    try:
                        async with trio.open_nursery() as nursery:
                            lasting.start_soon(self._stop_on_signal, signals, nursery.cancel_scope.cancel)
                            await self._open_origins(nursery)
                            sources = [origin.source for origin in self._origins]
                            self._peers = await PeerNode.open(
                                self._config, sources, self._metrics, self._opened.state_dir
                            )
                            if self._config.metrics is not None:
                                self._endpoint = await open_endpoint(self._config.metrics)
                            await self._serve(nursery, lasting)
                            nursery.cancel_scope.cancel()
                    finally:
                        if self._is_continued:
                            lasting.cancel_scope.cancel()  # the next daemon uploads
                        elif self._uploading is not None:
                            self._stopping.stage("uploading what was written", self._config.flush_deadline)
                            self._notifier.stopping("uploading what was written")
                            if not await self._uploading.finish():
                                # The temporary cache directory stays: it has files that are not uploaded.
                                with suppress(ValueError):
                                    self._opened.temporary.remove(self._opened.state_dir)
                    lasting.cancel_scope.cancel()
            finally:
                self._stopping.stage("saving memory to disk", SPILL_DEADLINE_S)
                # Only if no daemon follows: after STOPPING=1 the service manager would end that one, too.
                if not self._is_continued:
                    self._notifier.stopping("saving memory to disk")
                with trio.CancelScope(shield=True):
                    if self._is_continued and self._uploading is not None:
                        await self._uploading.uploads.hand_over()
                    if self._end is End.HANDED_OVER:
                        await self._store.hand_over()
                    else:
                        await self._store.aclose(SPILL_DEADLINE_S)
                    cachedir.note_used_bytes(self._config.cache_dir, self._store)
                    for origin in self._origins:
                        await origin.aclose()
                    if self._peers is not None:
                        await self._peers.aclose()
        log.info("stopped (%s)", self._stopped_by)
        return HANDED_OVER if self._end is End.HANDED_OVER else 0

    async def _open_origins(self, background: trio.Nursery) -> None:
        """Open all origins and check that they answer. If programs already wait, the checks run in `background`."""
        config = self._config
        self._origins = [
            open_origin(
                source.url,
                client=source.client,
                endpoint_url=source.endpoint_url,
                region=source.region,
                profile=source.profile,
                anonymous=source.anonymous,
                requester_pays=source.requester_pays,
                sse_kms_key=source.sse_kms_key,
                verify=config.verify,
                concurrency=config.of(source, "concurrency"),
                download_limit=config.download_limit,
                upload_limit=config.upload_limit,
                deadline_s=config.timeout,
                on_outage=config.on_outage,
                metrics=self._metrics,
            )
            for source in config.sources
        ]
        for source, origin in zip(config.sources, self._origins, strict=True):
            origin.read_only = config.of(source, "read_only")
        self._store.pins.budget = config.pin_budget
        self._store.datasets.mounted((o.source, o.prefix) for o in self._origins)
        async with trio.open_nursery() as nursery:
            for origin in self._origins:
                (background if self._takes_over else nursery).start_soon(self._check, origin)

    async def _check(self, origin: Origin) -> None:
        try:
            await origin.check()
        except CachefsError as exc:
            if self._takes_over:
                log.warning("%s", exc)  # programs go on reading what is cached
            elif isinstance(exc, OriginFailed) and self._config.on_outage.stale:  # it does not answer
                self._absent[origin] = exc
            else:
                raise

    @property
    def _takes_over(self) -> bool:
        """True if this daemon continues the mount of another one, so that programs already wait for it."""
        return self._handover is not None and self._handover.taking_over

    @property
    def _is_continued(self) -> bool:
        """True if another daemon takes over the mount when this one ends."""
        if self._handover is None or not self._handover.outlives_daemon or not self._handover.holder:
            return False
        return self._end is End.HANDED_OVER or (
            self._end is End.FAILED and (self._served or self._takes_over)
        )

    def _start_without_absent(self) -> None:
        """Accept origins that do not answer, if names of them are cached. Raises `OriginFailed` for one without."""
        for origin, exc in self._absent.items():
            if not self._fs.tree_queries.knows(origin):
                raise exc
            log.warning("%s; what is known of it from earlier is shown", exc)

    def _writable(self) -> bool:
        """True if any source can be written. Logs each that cannot, although no option made it read-only."""
        config = self._config
        if config.read_only:
            return False
        for origin in self._origins:
            if not origin.can_write and not origin.read_only:
                report = self._warn if "read_only" in config.origins else log.info
                report(f"{origin.source} can only be read")
        return any(origin.can_write for origin in self._origins)

    def _warn(self, line: str) -> None:
        self._opened.warnings.append(line)
        log.warning("%s", line)

    async def _open_uploads(self, fetcher: Fetcher, lasting: trio.Nursery) -> Uploading:
        config, state_dir = self._config, self._opened.state_dir
        if config.writeback and state_dir != config.cache_dir:
            raise CacheUnusable(
                f"--writeback needs a cache directory that can be written, and {config.cache_dir} cannot: choose another "
                "--cache-dir"
            )
        staging_dir = staging_of(state_dir)
        open_uploads = partial(
            Uploads,
            state_dir,
            staging_dir,
            self._origins,
            self._store,
            self._metrics,
            nursery=lasting,
            reader=fetcher,
            writeback=config.writeback,
            upload_delay_s=config.upload_delay,
            on_conflict=config.on_conflict,
            keep_free_bytes=cachedir.keep_free_bytes(config),
            memory=self._memory,
            killed=self._opened.killed,
        )
        # In a thread, because it rewrites the journal of a daemon that was killed.
        uploads = await trio.to_thread.run_sync(open_uploads)
        self._uploading = uploading = Uploading(config, self._origins, staging_dir, uploads)
        open_files = self._handover.open if self._handover is not None else ()
        await uploading.recover({record.ino for _, record in open_files})
        return uploading

    async def _serve(self, nursery: trio.Nursery, lasting: trio.Nursery) -> None:
        config = self._config
        peers = self._peers
        cluster = peers.cluster if peers is not None else None
        upstream = Upstream(self._metrics, config.block_size, cluster)
        fetcher = Fetcher(
            self._store, nursery, self._metrics, max_readahead=config.max_readahead, upstream=upstream
        )
        uploading = await self._open_uploads(fetcher, lasting) if self._writable() else None
        if uploading is not None:
            self._unsent = uploading.unsent
        else:
            self._unsent = await trio.to_thread.run_sync(left_behind, self._opened.state_dir)
            if config.writeback:
                self._warn("--writeback has no effect: nothing can be written")
        if self._unsent.sizes:
            self._warn(str(self._unsent))
        if orphaned := await self._orphans():
            log.warning("%s", orphaned)
        volumes = await self._open_fs(fetcher, uploading)
        # Uploads start only here: files that an earlier run left must have their names first.
        if uploading is not None:
            lasting.start_soon(retried, uploading.uploads.run, "uploading")
        notices = Notices(lambda *notice: self._backend.backend.invalidate(*notice))
        self._fs.on_invalidate = notices.tell
        self._fs.notified = notices.all_sent
        backend = self._mount()
        self._prefetcher = self._open_prefetcher(volumes, fetcher)
        try:
            if peers is not None:
                await peers.start(Serving(self._store, fetcher, peers.cluster, self._origins), nursery)
            self._start_housekeeping(nursery, notices)
            paths = Paths(volumes)
            if upstream.comparing is not None:
                upstream.comparing.on_lie = lambda origin, obj: self._fs.refresh(paths.of(origin, obj))
            self._open_verbs(nursery, fetcher, paths)
            await nursery.start(control.serve, control_path(config.mountpoint), self._verbs())
            self._start_endpoint(nursery)
            gc.collect()
            gc.set_threshold(*GARBAGE_THRESHOLDS)
            gc.freeze()  # objects that exist now stay, so collections need not visit them
            self._served = True
            await backend.serve(lambda: nursery.start_soon(self._ready))
            if self._end is End.FAILED:  # no signal and no upgrade has ended it
                self._end = End.STOPPED
        finally:
            await self._take_mount_away(backend, notices)

    async def _open_fs(self, fetcher: Fetcher, uploading: Uploading | None) -> list[Volume]:
        """Build the filesystem and recover what an earlier run left in it. Returns its volumes, in the order of sources."""
        config = self._config
        volumes = [
            Volume(s.name, o, ttls_of(config, s)) for s, o in zip(config.sources, self._origins, strict=True)
        ]
        self._ttls = [volume.ttls for volume in volumes]
        self._fs = FileSystem(
            volumes,
            self._names,
            fetcher,
            Options(config.uid, config.gid, config.file_mode, config.dir_mode),
            self._metrics,
            writer=None if uploading is None else uploading.uploads,
            times=None if self._memory is None else self._memory.times,
        )
        self._start_without_absent()
        await self._fs.recover()
        self._fs.renew_names()
        self._fs.list_tops(self._absent)
        return volumes

    def _start_housekeeping(self, nursery: trio.Nursery, notices: Notices) -> None:
        nursery.start_soon(retried, self._store.run, "writing the cache index")
        if not self._store.was_clean:
            nursery.start_soon(retried, partial(scrub, self._store), "checking the cache")
        nursery.start_soon(retried, self._pauses.run, "measuring pauses of the loop")
        nursery.start_soon(retried, notices.run, "telling the kernel of changes")
        nursery.start_soon(retried, self._trim_loop, "giving memory back")
        if self._prefetcher is not None:
            nursery.start_soon(retried, self._prefetcher.run, "prefetch")

    def _open_verbs(self, nursery: trio.Nursery, fetcher: Fetcher, paths: Paths) -> None:
        """Build what answers the verbs of the control socket."""
        queries, config = self._fs.tree_queries, self._config
        cluster = self._peers.cluster if self._peers is not None else None
        # A client that goes on after a restart must not find another job or recording under the number of its own.
        first = 1 + 1_000_000 * (self._handover.restarts if self._handover is not None else 0)
        self._jobs = Jobs(queries, fetcher, self._store, nursery, config.concurrency, first)
        self._recordings = Recordings(self._fs, paths.of, nursery, first)
        self._locator = Locator(queries, fetcher, cluster, config.block_size)
        writable = self._uploading is not None
        self._explainer = Explainer(queries, self._store, cluster, self._origins, self._metrics, writable)

    def _start_endpoint(self, nursery: trio.Nursery) -> None:
        """Serve metrics, if `--metrics` is given."""
        if self._endpoint is None:
            return
        log.info("metrics at http://%s/metrics", self._endpoint.address)
        if self._endpoint.warning:
            log.warning("%s", self._endpoint.warning)
        nursery.start_soon(retried, partial(self._endpoint.serve, self._watch.pages()), "metrics")
        nursery.start_soon(retried, self._watch.run, "samples of the metrics")

    async def _take_mount_away(self, backend: backends.Backend, notices: Notices) -> None:
        """Leave the peers and close the connection to the kernel, however this daemon ends. The mount stays if the next
        daemon has it, or if it is to be seen that it is dead."""
        self._stopping.stage("taking the mount away")
        handed_over = self._end is End.HANDED_OVER
        crashed = (self._watch.ready or self._takes_over) and self._end is End.FAILED
        # A failed start over a dead mount leaves a dead mount, not a bare directory.
        start_failed = self._replaces_dead and not self._watch.ready
        self._watch.ready = False
        if self._peers is not None:
            with trio.move_on_after(3, shield=True):
                await self._peers.leave(handed_over=handed_over)
        with trio.move_on_after(1, shield=True):
            await notices.quiet()  # the session must not be closed while a thread uses it
        # A crash leaves the mount: programs would write into the bare directory, which the next mount would hide.
        backend.close(unmount=not (crashed or start_failed or handed_over))
        if crashed:
            waits = self._handover is not None and self._handover.outlives_daemon
            log.critical(
                "a failure ends this daemon: the mount stays at %s, %s, until the next one",
                self._config.mountpoint,
                "and its programs wait" if waits else "dead",
            )
        with trio.move_on_after(5, shield=True):
            unmounted = self._end is End.STOPPED and self._stopped_by == "umount"
            await self._fs.aclose(unmounted=unmounted, handed_over=self._is_continued)

    def _open_prefetcher(self, volumes: list[Volume], fetcher: Fetcher) -> Prefetcher | None:
        config = self._config
        is_on = [config.of(source, "prefetch") == "on" for source in config.sources]
        prefetched = {volume.origin for volume, on in zip(volumes, is_on, strict=True) if on}
        if not prefetched:
            return None
        prefetcher = Prefetcher(
            self._fs,
            fetcher,
            volumes,
            self._metrics,
            slots=config.concurrency - config.concurrency // 8,  # what the gate leaves to prefetch
            capacity=lambda: sum(tier.limit_bytes() for tier in self._store.tiers),
            directory=self._opened.state_dir / "plans",
        )

        def opened(ino: int, pid: int, origin: Origin, obj: ObjectId, passthrough: bool) -> None:
            if origin in prefetched:
                prefetcher.opened(ino, pid, origin, obj, passthrough)

        hook = prefetcher.opened if len(prefetched) == len(volumes) else opened
        self._fs.watch_opens(hook, prefetcher.awaited)
        return prefetcher

    def _mount(self) -> backends.Backend:
        config = self._config
        try:
            self._backend = backends.choose(
                config,
                self._title(),
                [tier.path for tier in self._store.tiers if self._store.passthrough],
                self._fs,
                self._metrics,
                writable=self._uploading is not None,
                handover=self._handover if not config.zero_open else None,
                clear=self._clear,
            )
        except MountError as exc:
            if config.descriptor is not None:
                raise
            # `mounting.check` has excluded all other reasons.
            is_root = os.getuid() == 0
            hint = (
                "seccomp or AppArmor of a container may forbid it" if is_root else "the line before says why"
            )
            if self._replaces_dead and mount_at(config.mountpoint) is None:
                hint += f"; {config.mountpoint} is no dead mount any more, but a directory"
            raise MountError(f"mounting failed ({exc}): {hint}") from exc
        backend = self._backend.backend
        if config.descriptor is None:
            self._stopping.mounted(config.mountpoint)
        log.info("backend: %s (%s)", backend.name, self._backend.why)
        if self._backend.passthrough:
            for tier in self._store.tiers:
                if tier.path in self._backend.refused:
                    self._store.refuse(tier, self._backend.refused[tier.path])
            self._fs.enable_passthrough(self._register_backing)
            self._store.backing_files.on_retired = backend.retire
            if self._uploading is not None:
                uploads = self._uploading.uploads
                uploads.passthrough.enable(backend.register, backend.retire)
                for tier in self._store.tiers if not uploads.passthrough.possible else ():
                    self._store.refuse(tier, "files of the cache directory do not tell who writes them")
        if config.zero_open and backend.name != "native":
            self._warn(f"--zero-open has no effect: {self._backend.why}")
        if why := self._not_held():
            if config.restart and "restart" in config.origins:
                self._warn(f"--restart has no effect: {why}")
            else:
                log.info("the mount ends with its daemon: %s", why)
        return backend

    def _clear(self) -> None:
        """Unmount dead mounts at the mountpoint. Called last, just before mounting."""
        if self._takes_over:
            return
        try:
            notes = mounting.clear(self._config)
        except MountError as exc:
            # Of another class, because `_mount` takes each `MountError` for a failure of mount(2).
            raise CachefsError(str(exc)) from exc
        self._replaces_dead = bool(notes)
        for line in notes:
            log.warning("%s", line)

    def _not_held(self) -> str:
        """Why the mount would end with its daemon; "" if it would not."""
        if self._handover is not None and self._handover.outlives_daemon:
            return ""
        if why := why_not(self._config):
            return why
        if self._backend.backend.name != "native":
            return f"the FUSE backend is {self._backend.backend.name} ({self._backend.why})"
        return TOO_OLD

    def _register_backing(self, backing: Backing) -> bool:
        try:
            self._backend.backend.register(backing)
        except OSError as exc:
            if exc.errno in FOR_NOW:
                log.debug("the kernel does not take a file now: %s", exc)
            else:
                self._store.refuse(backing.tier, exc.strerror or str(exc))
            return False
        return True

    def _title(self) -> str:
        return self._config.sources[0].url if len(self._config.sources) == 1 else "cachefs"

    async def _ready(self) -> None:
        """The kernel has answered INIT: tune it, and report that the mount is ready once it answers."""
        granted = self._backend.backend.max_background
        self._tuning = await in_thread_at_last(partial(tune, self._config.mountpoint, granted))
        for line in self._tuning:
            log.info("%s", line)
        # A mount that another process has made may be for another user alone.
        if self._config.descriptor is None:
            await self._watch.answers()
        log.info("mounted %s on %s", self._title(), self._config.mountpoint)
        self._watch.ready = True
        self._mounted.set()
        self._on_ready()
        await self._notifier.attend(
            self._watch.illness, f"shows {self._title()} at {self._config.mountpoint}"
        )

    async def _stop_on_signal(self, signals: AsyncIterator[int], stop: Callable[[], None]) -> None:
        """At a signal, end the mount and cancel requests in flight: their readers get an errno even if the origin hangs."""
        async with trio.open_nursery() as reloads:
            async for number in signals:
                if number == signal.SIGHUP and self._reread is not None:
                    contained(reloads, "SIGHUP", self._reload, self._reread)
                    continue
                if self._uploading is not None and self._stopped_by != "umount":
                    self._uploading.hurry()  # this is the second signal
                self._stopped_by = signal.Signals(number).name
                self._stopping.stage("ending requests under way")
                self._end = End.STOPPED
                stop()

    async def _reload(self, reread: Callable[[], Config]) -> None:
        """Apply the `LIVE` options of the present configuration, and log which changed options need a remount."""
        # The parts of a daemon that starts are built from the configuration that it has read.
        await self._mounted.wait()
        try:
            # One at a time, so that the last one counts. The file may be on a disk that hangs.
            fresh = await in_thread(reread, limiter=self._reloading, abandon_on_cancel=True)
        except (CachefsError, OSError) as exc:
            log.error("SIGHUP: nothing was changed: %s", exc)  # noqa: TRY400 (an expected failure takes one line)
            return
        config = self._config
        given = {*config.origins, *fresh.origins}  # defaults are not compared: the machine decides some
        names = [name for name, row in ROWS.items() if not row.flag_only]
        changed = [name for name in names if getattr(fresh, name) != getattr(config, name)]
        live = {name: getattr(fresh, name) for name in LIVE}
        later = [name for name in changed if name not in LIVE and name in given]
        if _without_ttls(fresh.sources) == _without_ttls(config.sources):
            live["sources"] = fresh.sources
        else:
            later.append("[[source]]")
        self._config = config = replace(config, **live)
        self._store.pins.budget = config.pin_budget
        for origin in self._origins:
            origin.set_rate_limits(download=config.download_limit, upload=config.upload_limit)
        for ttls, source in zip(self._ttls, config.sources, strict=bool(self._ttls)):
            found = ttls_of(config, source)
            ttls.ttl, ttls.negative_ttl = found.ttl, found.negative_ttl
        now = ", ".join(name for name in changed if name in LIVE) or "nothing"
        logs.set_level("info")  # this line is logged at any level
        log.info("SIGHUP: changed %s; needs a remount: %s", now, ", ".join(later) or "nothing")
        logs.set_level(config.log_level)

    async def _trim_loop(self) -> None:
        while True:
            await trio.sleep(TRIM_EVERY_S)
            await trio.to_thread.run_sync(self._names.stored.release_memory, NAMES_MAPPED_BYTES)

    # -- control verbs -----------------------------------------------------------------------------

    def _verbs(self) -> dict[str, Any]:
        return {
            "status": self._status,
            "refresh": self._fs.refresh,
            **(self._prefetcher.hints.verbs() if self._prefetcher is not None else NO_HINTS),
            "warm_start": self._jobs.start,
            "warm_add": self._jobs.add,
            "warm_status": self._jobs.status_of,
            "warm_stop": self._jobs.stop,
            "record_start": self._recordings.start,
            "record_drain": self._recordings.drain,
            "record_stop": self._recordings.stop,
            "locate": self._locator.locate,
            "explain": self._explainer.explain,
            "watch": self._watch.everything,
            "probe": self._explainer.probe,
            "log_level": self._explainer.log_level,
            "flush": (self._uploading or self._unsent).flush,
            "upgrade": self._upgrade,
        }

    async def _upgrade(self) -> str:
        """Hand this mount over to the installed version, and return that. Raises `MountError`, with nothing changed."""
        why = self._not_held()
        if why or self._handover is None:
            raise MountError(f"this mount ends with its daemon ({why}): umount, and mount again")
        if self._reread is not None:
            fresh = await in_thread(self._reread, abandon_on_cancel=True)
            if _without_ttls(fresh.sources) != _without_ttls(self._config.sources):
                raise MountError(
                    "the configuration has other sources than this mount: umount, and mount again"
                )
            if fresh.identity != self._config.identity:
                raise MountError(
                    "the configuration has another cache directory or block size than this mount: umount, and mount again"
                )
        version = await self._handover.renewed(UPGRADED_S / 2)
        if self._end is not End.FAILED:  # an umount, a signal or another upgrade has come meanwhile
            raise MountError("this daemon is ending already")
        if self._opened.state_dir in self._opened.temporary and self._backend.backend.operations.writers:
            raise MountError(
                "the cache directory cannot be used, and the next daemon would not find files that are open for writing: "
                "try again when they are closed"
            )
        log.info("handing the mount over to version %s", version)
        self._end, self._stopped_by = End.HANDED_OVER, "upgrade"
        self._backend.backend.pause()
        return version

    async def _status(self) -> dict[str, Any]:
        await self._orphans()
        return {  # no await inside: the values are of one moment
            "version": cachefs.__version__,
            "pid": os.getpid(),
            "holder": None
            if self._handover is None or not self._handover.outlives_daemon
            else self._handover.status(),
            "started": self._started,
            "mountpoint": str(self._config.mountpoint),
            "log_file": str(self._config.log_file or ""),
            "state_dir": str(self._opened.state_dir),
            "sources": [
                {"name": s.name, "url": s.url, "client": s.client, "origin": o.status()}
                for s, o in zip(self._config.sources, self._origins, strict=True)
            ],
            "fuse": self._backend.backend.name,
            "fuse_reason": self._backend.why,
            "read_only": self._uploading is None,
            "tiers": [
                {
                    "name": t.name,
                    "path": str(t.path),
                    "used_bytes": t.used_bytes,
                    "cap_bytes": t.limit_bytes(),
                    "blocks": t.blocks,
                    "passthrough_files": t.registered,
                    "state": t.state,
                }
                for t in self._store.tiers
            ],
            "eviction": self._store.eviction_status(),
            "pinned_bytes": self._store.pinned_bytes,
            "metrics": self._metrics.as_dict(),
            "prefetch": None if self._prefetcher is None else self._prefetcher.status(),
            "jobs": self._jobs.status(),
            "peers": None if self._peers is None else self._peers.status(),
            "uploads": None if self._uploading is None else self._uploading.status(),
            "unsent": len(self._unsent.sizes),
            "tuning": self._tuning,
            "warnings": list(self._warnings()),
            "memory_bytes": resident_bytes(),
            "loop_pause_s": self._pauses.status(),
            "tasks": trio.lowlevel.current_statistics().tasks_living,
            "endpoint": self._endpoint.address if self._endpoint else "",
            **self._fs.status(),
        }

    def _warnings(self) -> Iterator[str]:
        yield from self._opened.warnings
        if self._store.catalog.index_error:
            yield self._store.catalog.index_error
        yield from dict.fromkeys(origin.complaint for origin in self._origins if origin.complaint)
        if self._endpoint is not None and self._endpoint.warning:
            yield self._endpoint.warning
        if self._peers is not None:
            yield from self._peers.warnings
        if self._orphan_warning:
            yield self._orphan_warning

    async def _orphans(self) -> str:
        """The warning about orphaned staging files, or "". While the disk does not answer, the last one."""
        if not self._orphan_lookup.borrowed_tokens:
            with trio.move_on_after(ORPHANS_DEADLINE_S), suppress(OSError):
                look = partial(orphans.warning, self._opened.state_dir)
                self._orphan_warning = await in_thread(
                    look, limiter=self._orphan_lookup, abandon_on_cancel=True
                )
        return self._orphan_warning


async def retried(work: Callable[[], Awaitable[None]], name: str) -> None:
    """Run housekeeping to its end. A failure is logged, and it is run again `RETRY_S` later; it does not end the mount."""
    while True:
        try:
            return await work()
        except Exception:
            log.exception("%s failed; trying again in %d s", name, RETRY_S)
            await trio.sleep(RETRY_S)


def _without_ttls(sources: Sequence[Source]) -> list[Source]:
    return [replace(source, metadata_ttl=None, negative_ttl=None) for source in sources]


def ttls_of(config: Config, source: Source) -> Ttls:
    """How long names and attributes of a source may be used without a request to the origin."""
    consistency = config.of(source, "consistency")
    ttl = float("inf") if consistency == "immutable" else config.of(source, "metadata_ttl")
    return Ttls(ttl, config.of(source, "negative_ttl"), revalidate=consistency == "strict")


async def _no_hints(**_: Any) -> None:
    raise ConfigError("this mount takes no hints: it was made with --prefetch off")


NO_HINTS = dict.fromkeys(("hint_files", "hint_order", "hint_drop"), _no_hints)
