"""The ladder: a block is read from the cache store, from a fetch in flight, from the node that owns its extent, or from the
origin, in this order. Readers of a block join the `InFlightFetch` that brings it."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import trio

from cachefs.base.errors import CachefsError, NoRoom, ObjectChanged, OriginFailed, PermissionDenied, Transient
from cachefs.base.ledger import DISK, ORIGIN, PEER, Wait, current_call
from cachefs.base.metrics import Metrics
from cachefs.base.names import BLOCKS_PER_EXTENT, ObjectId, block_count, blocks_covering
from cachefs.base.tasks import contained
from cachefs.fetch.readahead import Budget, Readahead
from cachefs.fetch.upstream import WHOLE_BYTES, Comparing, Upstream
from cachefs.origin import ByteRange, Origin, Ticket, each
from cachefs.origin.attempts import FailedAttempt
from cachefs.peers.wire import Busy
from cachefs.store import (
    Backing,
    CachedObject,
    CacheWrite,
    Run,
    Store,
    Tier,
    TierWrite,
    WholeVersion,
    WriteClosed,
)
from cachefs.store.space import HEAP_IN_FLIGHT_BYTES

log = logging.getLogger(__name__)

_NEVER = 1 << 62
_NONE: Mapping[int, InFlightFetch] = {}


# -- transfers under way ---------------------------------------------------------------------------

OnEnd = Callable[[int, CachefsError | None], None]
"""(bytes fetched, error or None): called when the background fetch of a file is over. Never raises."""


class Transfers:
    """All fetches in flight that readers may join, by version and block: a block belongs to at most one."""

    def __init__(self) -> None:
        self.versions: dict[bytes, dict[int, InFlightFetch]] = {}  # by digest

    def of(self, obj: CachedObject) -> Mapping[int, InFlightFetch]:
        """The fetches of one version, by block."""
        return self.versions.get(obj.id.digest, _NONE)

    def add(self, fetch: InFlightFetch) -> None:
        blocks = self.versions.setdefault(fetch.object.id.digest, {})
        blocks.update(dict.fromkeys(fetch.blocks, fetch))

    def discard(self, fetch: InFlightFetch) -> None:
        blocks = self.versions.get(fetch.object.id.digest, {})
        for block in fetch.blocks:
            if blocks.get(block) is fetch:
                del blocks[block]
        if not blocks:
            self.versions.pop(fetch.object.id.digest, None)

    def miss_reasons(self, metrics: Metrics, obj: CachedObject, missing: Iterable[int]) -> Counter[str]:
        """Count why each of these blocks is not cached, by the ledger's reasons. The ledger notes them as missed."""
        in_flight = self.of(obj)
        found: Counter[str] = Counter()
        for block in missing:
            fetch = in_flight.get(block)
            reason = metrics.ledger.misses.missed(
                obj.id,
                block // BLOCKS_PER_EXTENT,
                joins=fetch is not None,
                prefetch_in_flight=fetch is not None and fetch.prefetched,
            )
            found[reason] += 1
        return found


def count_misses(metrics: Metrics, reasons: Counter[str]) -> None:
    """Count blocks that a reader had to wait for, by reason."""
    metrics.misses += reasons.total()
    for reason, blocks in reasons.items():
        name = f"misses_{reason}"
        setattr(metrics, name, getattr(metrics, name) + blocks)


class InFlightFetch:
    """Fetches the blocks of one cache write, and holds their object until it is over. `prefetched`: it began before any
    reader waited. `asking_peers`: peers are asked first, and the origin was not asked yet. `error` is set if it failed.
    `policy` learns when all is written, and `on_end` is called when it is over. `alone`: no other reader joins it, and there
    may be another fetch of its blocks. A fetch that was given up ends without its blocks and without an error."""

    def __init__(
        self,
        store: Store,
        transfers: Transfers,
        origin: Origin,
        obj: CachedObject,
        cache_write: CacheWrite,
        token: trio.lowlevel.TrioToken,
        *,
        prefetched: bool,
        asking_peers: bool,
        policy: Readahead | None,
        alone: bool,
        on_end: OnEnd | None,
    ) -> None:
        self.origin = origin
        self.object = obj
        self.cache_write = cache_write
        self.blocks = range(cache_write.start_block, cache_write.stop_block)
        self.prefetched = prefetched
        self.asking_peers = asking_peers
        self.policy = policy
        self.on_end = on_end
        self.done = False
        self.error: Exception | None = None
        self.waits: list[Wait] = []  # of reads that wait for it
        self._began = time.monotonic()
        self._ticket = Ticket(background=prefetched)
        self._end_early: Callable[[], None] | None = None  # cancels the current transfer
        self._given_up = False
        self._failed: FailedAttempt | None = None  # the first attempt, which had no task
        self._joined: set[int] = set()  # blocks for which a reader has joined it, while `prefetched`
        self._store = store
        self._waiters: list[tuple[int, trio.Event]] = []  # (offset up to which bytes must be written, event)
        cache_write.on_written = lambda: token.run_sync_soon(self.wake, idempotent=True)
        self._transfers = transfers
        if not alone:
            transfers.add(self)
        obj.hold()

    def join(self, blocks: Iterable[int]) -> int:
        """Note that a reader waits for these blocks. From now on the fetch counts as demand, and overtakes prefetch. Returns
        how many of the blocks were being prefetched and had no reader that waited before."""
        self._ticket.promote()
        if not self.prefetched:
            return 0
        first_joined = {block for block in blocks if block in self.blocks} - self._joined
        self._joined |= first_joined
        return len(first_joined)

    def may_serve(self, *, background: bool) -> bool:
        """True if another node may wait for its blocks: they will be in a tier, and unless that node only caches them
        (`background`), they come from the origin. A requesting peer must not wait for a node that waits for a third."""
        return not self.cache_write.in_heap and (background or not self.asking_peers)

    def left_s(self) -> float:
        """Estimate the seconds until it is over, from its rate so far. Before its first byte: as long as it has lasted."""
        elapsed_s, cache_write = time.monotonic() - self._began, self.cache_write
        received = cache_write.written - cache_write.start
        return elapsed_s * (cache_write.stop - cache_write.written) / received if received else elapsed_s

    def add_wait(self, wait: Wait, thread: int) -> None:
        """Note that a read of `thread` waits for it. Its requests to the origin count for the first such thread."""
        self.waits.append(wait)
        wait.now_for(PEER if self.asking_peers else ORIGIN)
        self._ticket.thread = self._ticket.thread or thread

    def failure(self) -> CachefsError | None:
        """`error` as its readers get it."""
        if self.error is None or isinstance(self.error, CachefsError):
            return self.error
        return OriginFailed(f"{self.object.id.key}: unexpected {type(self.error).__name__}")

    def give_up(self) -> None:
        """Cancel it, unless a reader waits for it."""
        if self._ticket.background and not self._waiters:
            self._cancel()

    def _cancel(self) -> None:
        self._given_up = True
        if self._end_early is not None:
            self._end_early()

    def fail(self, error: CachefsError) -> None:
        """Fail it with `error` at once: its readers read the blocks in another way. A write to the disk may go on."""
        self.error = error
        self._unpublish()
        self._wake_all()
        self._cancel()

    def _unpublish(self) -> None:
        """Make it unavailable to further readers."""
        self.done = True
        self._transfers.discard(self)

    def _wake_all(self) -> None:
        for _, event in self._waiters:
            event.set()
        self._waiters.clear()

    async def written(self, offset: int) -> None:
        """Return when all bytes below `offset` (clipped to this fetch) are written, or it is over."""
        target = min(offset, self.cache_write.stop)
        if not self.done and self.cache_write.written < target:
            await self._wait(target)

    async def ended(self) -> None:
        """Return when it is over, and the blocks that it wrote are in the store."""
        if not self.done:
            await self._wait(_NEVER)

    async def _wait(self, target: int) -> None:
        event = trio.Event()
        waiter = (target, event)
        self._waiters.append(waiter)
        self.cache_write.wake_at = min(self.cache_write.wake_at, target)
        if self.cache_write.written >= target:
            self.wake()  # the writing thread may have passed it before `wake_at` was set
        try:
            await event.wait()
        except trio.Cancelled:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            raise

    def read(self, offset: int, size: int) -> bytes | None:
        """Bytes that this fetch has written; None if they are not written yet, outside its blocks, or it is over."""
        cache_write = self.cache_write
        gone = self.done and not cache_write.in_heap
        if gone or offset < cache_write.start or offset + size > cache_write.written:
            return None
        try:
            data = cache_write.read(offset, size)
        except OSError:
            return None
        return data if len(data) == size else None

    def wake(self) -> None:
        """Settle the written blocks in the store, and wake the readers that wait for them. On the trio thread."""
        if self.done:
            return
        self._store.settle(self.object, self.cache_write)
        written = self.cache_write.written
        waiting = []
        lowest = _NEVER
        for target, event in self._waiters:
            if target <= written:
                event.set()
            else:
                waiting.append((target, event))
                lowest = min(lowest, target)
        self._waiters = waiting
        self.cache_write.wake_at = lowest
        if lowest <= self.cache_write.written:
            self.cache_write.on_written()  # type: ignore[misc]

    def begin(self, on_attempt_end: Callable[[bool], None]) -> bool:
        """Begin the transfer at once and without a task, if it needs no wait. Returns whether it has begun. When this
        attempt has ended, `on_attempt_end` is called, with True if `run` must repeat it."""
        cache_write, object_id = self.cache_write, self.object.id
        if self.asking_peers or cache_write.in_heap:
            return False

        def ended(error: Exception | None) -> None:
            self._end_early = None
            if not self._given_up and isinstance(error, Transient | PermissionDenied):
                self._failed = FailedAttempt(error, self._began)
                on_attempt_end(True)
                return
            self.error = self.error or (None if self._given_up else error)
            try:
                self._end()
            finally:
                on_attempt_end(False)

        start, stop = cache_write.start, cache_write.stop
        whole = start == 0 and stop == object_id.size
        wanted = ByteRange(object_id.key, object_id.etag, start, stop, whole)
        self._end_early = self.origin.begin(wanted, cache_write, ended, ticket=self._ticket)
        return self._end_early is not None

    async def run(
        self,
        ask_peers: Callable[[CacheWrite, Ticket], Awaitable[None]] | None,
        slots: trio.CapacityLimiter | None,
    ) -> None:
        """Transfer the blocks: what peers do not deliver to `ask_peers`, the origin does. Holds one of the `slots`, if
        given. Raises nothing but cancellation; a failure is in `error`."""
        cache_write, object_id = self.cache_write, self.object.id
        try:
            with trio.CancelScope() as scope:
                self._end_early = scope.cancel
                if self._given_up:
                    scope.cancel()
                async with slots or nullcontext():
                    if ask_peers is not None:
                        await ask_peers(cache_write, self._ticket)
                        self.asking_peers = False
                        for wait in self.waits:
                            if wait.on == PEER:
                                wait.now_for(ORIGIN)
                    if cache_write.written < cache_write.stop:
                        await self.origin.read(
                            object_id.key,
                            object_id.etag,
                            cache_write.written,
                            cache_write.stop,
                            cache_write,
                            whole=cache_write.written == 0 and cache_write.stop == object_id.size,
                            ticket=self._ticket,
                            failed_attempt=self._failed,
                        )
        except Exception as exc:
            self.error = self.error or exc
        finally:
            self._end()

    def _end(self) -> None:
        self._unpublish()
        # Both refer back to this object, and a cycle is freed late.
        self._end_early = self.cache_write.on_written = None
        try:
            self._store.end_write(self.object, self.cache_write)
        finally:
            if self._waiters:
                self._wake_all()
            self.object.release()


# -- opens that wait for the last blocks of a file -------------------------------------------------
#
# The open decides how a file is read: in passthrough, if it is wholly cached, or through the daemon, with a message and two
# more copies for each part. A prefetched file is often opened while its last blocks are in flight: then its reader is faster
# if the open waits for them. If the file is not whole in time, it is opened through the daemon.

OPEN_WAITS_S = 0.2
"""How long an open waits at most. A reader of the whole file loses nothing, because it waits for its end in any case. A
reader of its first bytes loses no more than a slow answer of an origin takes. Measured: of 64 files of 16 MiB from another
node, opened by four readers as they come, 42 to 53 were opened in passthrough, and 33 to 46 with waits of 0.05 or 0.1 s."""


def soon_whole(store: Store, in_flight: Mapping[int, InFlightFetch], obj: CachedObject) -> bool:
    """True if all blocks that are not cached, one at least, are in flight and should be in a tier within `OPEN_WAITS_S`."""
    return (
        bool(in_flight)
        and all(f.left_s() <= OPEN_WAITS_S and not f.cache_write.in_heap for f in set(in_flight.values()))
        and all(
            b in in_flight or store.has(obj, b) for b in range(block_count(obj.id.size, store.block_size))
        )
    )


# -- the ladder ------------------------------------------------------------------------------------

COUNTED_BYTES = 4 << 30
"""When a handle that sent no READ is closed, the blocks of its version count as read from the page cache, unless the version
is larger than this. Derived: 4 GiB are 256 rows of the index."""

PARTS_AT_ONCE = 8
"""Most parts of one object that `prefetch` has in flight. Derived: 64 MiB hide a round trip of 60 ms at 1 GB/s."""

PARTS_OF_ALL_CALLS = 64
"""Most parts in flight of all calls of `prefetch`. Derived from the default concurrency: more would reserve and wait."""

ATTEMPTS = 8
"""How often one read may find its blocks missing again (evicted, bad checksum, a failing tier) before it fails. In the
second half of the attempts, missing blocks bypass the tiers, because a full cache can evict a block before its reader runs.
The last attempt fetches all blocks for this reader alone. Guessed."""

Buffer = bytes | bytearray | memoryview

ReadHook = Callable[[ObjectId, int, int], None]
"""(object, offset, size): a part of a large file was read through the daemon. Never raises."""

REPETITION_S = 0.1
"""When a read-ahead fails, the kernel repeats it at once as a read. One read of the same handle within this time gets the
same failure; otherwise the application would wait for two deadlines. Derived: the repetition comes within 1 ms, and a loaded
daemon may be a hundred times slower."""


@dataclass(slots=True, eq=False, repr=False)
class OpenedObject:
    """A version that a reader has opened. `cached` is set from the first read on."""

    origin: Origin
    id: ObjectId
    cached: CachedObject | None = None
    readahead: Readahead | None = None
    _failed: tuple[float, CachefsError] | None = None  # (when it expires, the error)

    def failed(self, error: CachefsError) -> None:
        """Note that a read of it fails with `error`."""
        self._failed = (trio.current_time() + REPETITION_S, error)

    def raise_repeated(self) -> None:
        """Raise the last failure once more, if it is newer than `REPETITION_S`."""
        if self._failed is not None:
            (until, error), self._failed = self._failed, None
            if trio.current_time() < until:
                raise type(error)(*error.args) from error


def whole_extent(block: int) -> int:
    """The `longest` of `runs` that allows a whole extent."""
    return BLOCKS_PER_EXTENT


def runs(blocks: Iterable[int], longest: Callable[[int], int] = whole_extent) -> Iterator[tuple[int, int]]:
    """Yield runs [start, stop) of consecutive blocks within one extent, of at most `longest(start)` blocks each. `blocks` is
    read lazily, one block further than the runs so far."""
    start = stop = most = -1
    for block in blocks:
        if block == stop and block < most and block % BLOCKS_PER_EXTENT:
            stop += 1
            continue
        if stop > start:
            yield start, stop
        start, stop, most = block, block + 1, block + longest(block)
    if stop > start:
        yield start, stop


class Fetcher:
    """Reads through the cache. `nursery` runs the transfers; `max_readahead` is in bytes per stream."""

    def __init__(
        self,
        store: Store,
        nursery: trio.Nursery,
        metrics: Metrics,
        *,
        max_readahead: int,
        part_bytes: int = 8 << 20,
        upstream: Upstream | None = None,
    ) -> None:
        self._store = store
        self.epoch_progress, self.preload = store.epoch_progress, store.preload
        self.transfers = Transfers()
        self._readahead: dict[bytes, Readahead] = {}  # by version, while it has readers
        self._upstream = upstream = upstream or Upstream(metrics, store.block_size)
        self.kept_here, self.probe = upstream.kept_here, upstream.probe
        self.prefetch_everywhere = upstream.prefetch
        if upstream.cluster is not None:
            upstream.comparing = Comparing(store, self.transfers.of, upstream.cluster, nursery, metrics)
        self._clustered = upstream.cluster is not None
        self._nursery = nursery
        self._metrics = metrics
        self._block_size = store.block_size
        self._max_readahead = max_readahead
        self._part_blocks = max(1, min(part_bytes // store.block_size, BLOCKS_PER_EXTENT))
        self._token = trio.lowlevel.current_trio_token()
        self._budget = Budget(0)
        self._prefetch_bytes = 0
        self._prefetching = trio.CapacityLimiter(PARTS_AT_ONCE)
        self._eighth_bytes = -1
        self._raise_bounds()
        # Most blocks that are fetched into memory at a time, for readers whose blocks no tier takes; the others wait.
        self._heap_slots = trio.CapacityLimiter(max(4, HEAP_IN_FLIGHT_BYTES // store.block_size))
        self._in_flight: set[InFlightFetch] = set()
        self._taskless: set[InFlightFetch] = set()
        self._no_taskless = trio.Event()
        for tier in store.tiers:
            tier.disk.on_down.append(partial(self._disk_down, tier))
        self.passthrough = self.written = False  # see `Reader`; the filesystem sets them
        self.open = OpenedObject  # without I/O: an open whose pages the kernel still has needs no store
        self.release_backing = store.release_backing
        self.reopen_backing, self.cached_bytes = store.reopen_backing, store.cached_bytes
        self._on_read: ReadHook | None = None
        self._withheld: Container[bytes] = frozenset()

    def _raise_bounds(self) -> None:
        """Derive the bounds of prefetch and readahead from what the tiers hold: more when a full disk has space again."""
        eighth = sum(tier.limit_bytes() for tier in self._store.tiers) // 8
        if eighth <= self._eighth_bytes:
            return
        self._eighth_bytes = eighth
        # A window as large as the cache would evict the blocks that were just fetched for it.
        self._window_blocks = min(self._max_readahead, eighth) // self._block_size
        # A peer sends an extent in one reply, because each request costs both nodes processor time. Measured: large files
        # were read 1.3 times as fast as with parts.
        self._peer_part_blocks = max(self._part_blocks, min(eighth // self._block_size, BLOCKS_PER_EXTENT))
        # The bound of all streams together: blocks in flight cannot be evicted, and demand needs space, too.
        self._prefetch_limit = 2 * eighth
        self._budget.blocks = self._prefetch_limit // self._block_size
        parts = min(PARTS_OF_ALL_CALLS, self._prefetch_limit // (self._part_blocks * self._block_size))
        self._prefetching.total_tokens = max(PARTS_AT_ONCE, parts)

    def watch_reads(self, hook: ReadHook, withheld: Container[bytes]) -> None:
        """Call `hook` for reads of files larger than `WHOLE_BYTES` from now on. Files whose digest is in `withheld` are not
        opened in passthrough, so that the daemon sees all their reads."""
        self._on_read, self._withheld = hook, withheld

    # -- the filesystem's `Reader` -----------------------------------------------------------------

    def close(self, opened: OpenedObject, unread_blocks: int | None = 0) -> None:
        obj = opened.cached
        if obj is None:
            if unread_blocks is None:
                unread_blocks = self._whole_blocks(opened.id)
            self._metrics.page_cache_blocks += unread_blocks
        else:
            opened.cached = None
            self._leave_readahead(opened, obj)
            if self.passthrough:
                self._store.prepare_later(obj)  # it may be whole now, so the next open may be in passthrough
            obj.release()

    def _whole_blocks(self, object_id: ObjectId) -> int:
        """How many blocks the version has, if all are cached, else 0."""
        if object_id.size > COUNTED_BYTES or self._store.cached_bytes(object_id) != object_id.size:
            return 0
        return block_count(object_id.size, self._block_size)

    def open_backing(self, opened: OpenedObject) -> Backing | None:
        if not self._passthrough_ready(opened.id):
            return None
        on_disk = self.written and opened.origin.can_write
        return self._store.open_backing(self._store.object(opened.id), on_disk=on_disk)

    def reusable(self, opened: OpenedObject) -> WholeVersion | None:
        on_disk = self.written and opened.origin.can_write
        return self._store.reusable(opened.id, passthrough=self.passthrough, on_disk=on_disk)

    def _passthrough_ready(self, object_id: ObjectId) -> bool:
        return object_id.size <= WHOLE_BYTES or object_id.digest not in self._withheld

    def soon_cached(self, object_id: ObjectId) -> bool:
        if not self.passthrough or not self._passthrough_ready(object_id):
            return False
        obj = self._store.peek(object_id)
        if obj.backing is not None:
            return False
        in_flight = self.transfers.versions.get(object_id.digest)
        if in_flight and self._store.passthrough and soon_whole(self._store, in_flight, obj):
            return True
        return self._store.to_make_immutable(obj) is not None

    async def wait_until_cached(self, object_id: ObjectId, pid: int) -> None:
        obj = self._store.object(object_id)
        if self.transfers.of(obj):
            await self._wait_for_transfers(obj, pid)
        await self._store.make_immutable(obj)

    async def _wait_for_transfers(self, obj: CachedObject, pid: int) -> None:
        """Return when the fetches of `obj` have ended, or after `OPEN_WAITS_S`. The ledger counts this as a read."""
        in_flight = list(dict.fromkeys(self.transfers.of(obj).values()))
        blocks = range(block_count(obj.id.size, self._block_size))
        absent = [block for block in blocks if not self._store.has(obj, block)]
        reasons = self.transfers.miss_reasons(self._metrics, obj, absent)
        if (call := current_call.get()) is not None:
            call.end()
        wait, cached = self._metrics.ledger.waits.begin(pid, obj.id, 0), 0
        try:
            with obj.held(), trio.move_on_after(OPEN_WAITS_S):
                for fetch in in_flight:
                    self._metrics.prefetched_late += fetch.join(absent)
                    fetch.add_wait(wait, pid)
                for fetch in in_flight:
                    await fetch.ended()
                if all(self._store.has(obj, block) for block in absent):
                    cached = obj.id.size
                    count_misses(self._metrics, reasons)  # otherwise its reads count them
        finally:
            wait.end(cached)

    def restore_backing(self, opened: OpenedObject, backing_id: int) -> Backing:
        return self._store.restore_backing(self._store.object(opened.id), backing_id)

    def read_now(self, opened: OpenedObject, offset: int, size: int, pid: int) -> Buffer | None:
        """The bytes [offset, offset+size), which lie within the object; None if that needs a wait."""
        obj = self._cached_object(opened)
        data = self._store.read_now(obj, offset, size)
        if data is not None and opened.id.size > WHOLE_BYTES:
            self._read_ahead(opened, obj, offset, size, pid)
        return data

    async def read(self, opened: OpenedObject, offset: int, size: int, pid: int) -> Buffer:
        """The bytes [offset, offset+size). Raises `ObjectChanged`, `PermissionDenied`, `OriginFailed`, ..."""
        wait = self._metrics.ledger.waits.begin(pid, opened.id, offset)
        count = 0
        try:
            data = await self._read(opened, offset, size, pid, wait)
            count = len(data)
            return data
        finally:
            wait.end(count)

    async def _read(self, opened: OpenedObject, offset: int, size: int, pid: int, wait: Wait) -> Buffer:
        obj = self._cached_object(opened)
        blocks = blocks_covering(offset, size, self._block_size)
        counted = observed = False
        for attempt in range(ATTEMPTS):
            # What others fetch, or the cache has, may be evicted again before this reader runs.
            alone = attempt == ATTEMPTS - 1
            missing = [b for b in blocks if alone or not self._store.has(obj, b)]
            if not missing:
                wait.now_for(DISK)
                data = await self._store.read(obj, offset, size, count=not counted)
                if not observed and opened.id.size > WHOLE_BYTES:
                    self._read_ahead(opened, obj, offset, size, pid)
                    observed = True
                if data is not None:
                    return data
                continue
            opened.raise_repeated()
            if not counted:
                absent = set(missing)
                self._store.hit(obj, (block for block in blocks if block not in absent))
                count_misses(self._metrics, self.transfers.miss_reasons(self._metrics, obj, missing))
                counted = True
            if alone:
                in_flight = self._fetch_alone(opened, obj, missing)
            else:
                in_flight = self._join_or_fetch(opened, obj, missing, bypass=attempt >= ATTEMPTS // 2)
            if not observed and opened.id.size > WHOLE_BYTES:
                self._read_ahead(opened, obj, offset, size, pid)
                observed = True
            for fetch in in_flight:
                fetch.add_wait(wait, pid)
                await fetch.written(offset + size)
            data = await self._collect(obj, in_flight, offset, size)
            if data is not None:
                return data
            self._raise_failure(opened, in_flight)
        raise OriginFailed(
            f"{opened.id.key}: its blocks vanish as fast as they come (is the cache too small or failing?)"
        )

    async def prefetch(
        self,
        origin: Origin,
        object_id: ObjectId,
        start: int = 0,
        stop: int | None = None,
        *,
        prefetched: bool = True,
        as_own: bool = False,
    ) -> int:
        """Fetch all blocks of [start, stop) in the background, before a reader asks for them (`stop` None: the object's
        end). Returns how many bytes this call fetched: what is cached or in flight costs nothing.

        With `prefetched` the store evicts only the lowest priority classes for it; without, as for a reader. `as_own`:
        extents that other nodes own are cached as if this node owned them. Raises `NoRoom` when the store takes no more, and
        what a read raises.
        Cancelled, it ends the fetches that it began and no reader waits for; what is written stays."""
        self._raise_bounds()
        obj = self._store.object(object_id)
        stop = object_id.size if stop is None else min(stop, object_id.size)
        blocks = blocks_covering(start, max(0, stop - start), self._block_size)
        # Lazy: blocks may be cached meanwhile.
        missing = (b for b in blocks if not self._store.has(obj, b))
        parts = runs(missing, partial(self._part, object_id, self._part_blocks))
        fetched = 0

        async def fetch_part(part: tuple[int, int]) -> None:
            nonlocal fetched
            async with self._prefetching:
                count = await self._prefetch_run(origin, obj, *part, prefetched=prefetched, as_own=as_own)
            fetched += count

        with obj.held():
            at_once = min(PARTS_AT_ONCE, -(-len(blocks) // self._part_blocks))
            await each(fetch_part, parts, at_once, abort=False)
            if self.passthrough:
                self._store.prepare_later(obj)
            return fetched

    def prefetch_small(self, origin: Origin, files: Sequence[tuple[ObjectId, OnEnd]]) -> list[ObjectId]:
        """Begin to fetch small files as `prefetch` does, without a task for each. The second of each pair is called when its
        fetch is over, or at once with `NoRoom`. Returns the other files: too large, or partly cached or in flight."""
        group: list[tuple[Run, OnEnd]] = []
        others: list[ObjectId] = []
        for object_id, done in files:
            obj = self._store.object(object_id)
            blocks = block_count(object_id.size, self._block_size)
            small = 0 < blocks <= self._part_blocks and object_id.size <= WHOLE_BYTES
            if small and self._absent(obj, blocks):
                group.append(((obj, 0, blocks), done))
            else:
                others.append(object_id)
        cache_writes = self._reserve_all([run for run, _ in group], prefetched=True)
        for ((obj, *_), done), cache_write in zip(group, cache_writes, strict=True):
            if self._start_fetch(origin, obj, cache_write, prefetched=True, on_end=done) is None:
                done(0, NoRoom(f"no tier takes {obj.id.key} now"))
        return others

    def _absent(self, obj: CachedObject, blocks: int) -> bool:
        """True if none of its first `blocks` blocks is cached or in flight."""
        if obj.id.digest in self.transfers.versions:
            return False
        for block in range(blocks):  # noqa: SIM110 - a plain loop: each prefetched file comes here
            if self._store.has(obj, block):
                return False
        return True

    def whole(self, object_id: ObjectId) -> bool:
        """True if all its blocks are cached."""
        obj = self._store.peek(object_id)
        if 0 < object_id.size <= self._block_size:
            return self._store.has(obj, 0)
        blocks = range(block_count(object_id.size, self._block_size))
        if self._store.whole(obj):
            return True
        # Blocks in memory count, too. Of a large file, memory never has all that the tiers lack.
        return len(blocks) <= BLOCKS_PER_EXTENT and all(self._store.has(obj, b) for b in blocks)

    # -- other nodes -------------------------------------------------------------------------------

    def fetch_for_peer(
        self, origin: Origin, obj: CachedObject, blocks: range, *, requester: str, background: bool
    ) -> None:
        """Begin to fetch those of the blocks (of one extent) that are missing. Raises `Busy` if no tier takes them.

        A read for a peer is fetched from the origin, and raises `Busy` while the block is in flight from another node (see
        `InFlightFetch.may_serve`). A block that is only to be cached (`background`) may come from a node that had it first.
        No reader reads through two nodes, so nodes never wait in a circle."""
        missing = [b for b in blocks if not self._store.has(obj, b)]
        in_flight = self.transfers.of(obj)
        for block in missing:
            fetch = in_flight.get(block)
            if fetch is not None and not fetch.may_serve(background=background):
                raise Busy("another node is being asked for it, or no tier takes it")
        # For a peer that reads, it is fetched in parts, as for a local reader.
        longest = whole_extent if background else lambda _: self._part_blocks
        for start, stop in runs([b for b in missing if b not in in_flight], longest):
            cache_write = self._reserve(obj, start, stop, as_own=background)
            if cache_write is None:
                raise Busy("no tier takes it now")
            cache_write.requester = requester
            self._start_fetch(origin, obj, cache_write, prefetched=background, origin_only=not background)

    # -- beginning and ending fetches --------------------------------------------------------------

    def _reserve(
        self, obj: CachedObject, start: int, stop: int, *, prefetched: bool = False, as_own: bool = False
    ) -> CacheWrite | None:
        """Reserve space for blocks of one extent, in their priority class on this node. None if no tier takes them."""
        return self._reserve_all([(obj, start, stop)], prefetched=prefetched, as_own=as_own)[0]

    def _reserve_all(
        self, wanted: Sequence[Run], *, prefetched: bool = False, as_own: bool = False
    ) -> list[CacheWrite | None]:
        """`_reserve` for runs of several versions, with one search for space unless other nodes may own some of them."""
        if as_own or not self._clustered:
            return self._store.begin_writes(wanted, prefetched=prefetched)
        cache_writes = []
        for run in wanted:
            obj, start, _ = run
            remote_owned = not self._upstream.keeps(obj.id, start)
            cache_writes += self._store.begin_writes([run], prefetched=prefetched, remote_owned=remote_owned)
        return cache_writes

    def _cached_object(self, opened: OpenedObject) -> CachedObject:
        obj = opened.cached
        if obj is None:
            obj = opened.cached = self._store.object(opened.id)
            obj.hold()
        return obj

    def _join_or_fetch(
        self, opened: OpenedObject, obj: CachedObject, missing: list[int], *, bypass: bool
    ) -> list[InFlightFetch]:
        """Join the fetches of the blocks `missing`, beginning those that are not in flight. Returns them. `bypass`: no tier
        is asked for space."""
        if not bypass:
            wanted = missing
            # Of a small object all blocks are fetched, in one GET.
            if opened.id.size <= WHOLE_BYTES:
                blocks = range(block_count(opened.id.size, self._block_size))
                wanted = [b for b in blocks if not self._store.has(obj, b)]
            for start, stop in runs([b for b in wanted if b not in self.transfers.of(obj)]):
                self._start_fetch(opened.origin, obj, self._reserve(obj, start, stop), prefetched=False)
        # Blocks that no tier takes go to the heap.
        for block in missing:
            if block not in self.transfers.of(obj) and not self._store.has(obj, block):
                self._start_fetch(opened.origin, obj, self._store.begin_bypass(obj, block), prefetched=False)
        found = self.transfers.of(obj)
        in_flight = list(dict.fromkeys(found[block] for block in missing if block in found))
        for fetch in in_flight:
            self._metrics.prefetched_late += fetch.join(missing)
        return in_flight

    def _fetch_alone(
        self, opened: OpenedObject, obj: CachedObject, blocks: Iterable[int]
    ) -> list[InFlightFetch]:
        """Begin fetches of these blocks that bypass the tiers, and that no other reader joins."""
        cache_writes = [self._store.begin_bypass(obj, block) for block in blocks]
        begun = [self._start_fetch(opened.origin, obj, w, prefetched=False, alone=True) for w in cache_writes]
        return [fetch for fetch in begun if fetch is not None]

    def _read_ahead(self, opened: OpenedObject, obj: CachedObject, offset: int, size: int, pid: int) -> None:
        """Report a read to prefetch and to readahead, and fetch what readahead predicts."""
        policy = opened.readahead
        if policy is None:
            policy = self._readahead.get(obj.id.digest)
            if policy is None:
                self._raise_bounds()
                policy = self._readahead[obj.id.digest] = Readahead(
                    obj.id.size, self._block_size, self._window_blocks, self._part_blocks, self._budget
                )
            policy.users += 1
            opened.readahead = policy
        if self._on_read is not None:
            self._on_read(opened.id, offset, size)
        wanted = policy.observe(pid, offset, size)
        if wanted:
            self._fetch_predicted(opened.origin, obj, policy, wanted)

    def _leave_readahead(self, opened: OpenedObject, obj: CachedObject) -> None:
        policy, opened.readahead = opened.readahead, None
        if policy is not None:
            policy.users -= 1
            if not policy.users:
                policy.close()
                del self._readahead[obj.id.digest]  # a later reader starts with new streams
                self._store.left_behind(obj)

    def _fetch_predicted(self, origin: Origin, obj: CachedObject, policy: Readahead, wanted: range) -> None:
        """Begin to fetch the blocks that readahead has returned. Never waits; what no tier takes, it tells the policy."""
        in_flight = self.transfers.of(obj)
        blocks = [b for b in wanted if b not in in_flight and not self._store.has(obj, b)]
        # A growing window is fetched from the origin over at least two connections. Full windows come in whole parts.
        longest = self._part_blocks
        if len(wanted) % self._part_blocks:
            longest = max(1, min(self._part_blocks, len(wanted) // 2))
        for start, stop in runs(blocks, partial(self._part, obj.id, longest)):
            cache_write = None
            if self._prefetch_bytes < self._prefetch_limit:
                cache_write = self._reserve(obj, start, stop, prefetched=True)
            if self._start_fetch(origin, obj, cache_write, prefetched=True, policy=policy) is None:
                policy.declined(start)
                break

    async def _prefetch_run(
        self, origin: Origin, obj: CachedObject, start: int, stop: int, *, prefetched: bool, as_own: bool
    ) -> int:
        """Fetch blocks [start, stop) of one extent, joining what is in flight. Returns the bytes that this call fetched.
        Each round waits for one fetch, of the first block that is missing."""
        fetched = 0
        wanted = range(start, stop)
        refused: NoRoom | None = None
        for _ in range(ATTEMPTS * len(wanted)):
            missing = [b for b in wanted if not self._store.has(obj, b)]
            if not missing:
                return fetched
            in_flight = self.transfers.of(obj)
            joined = in_flight.get(missing[0])
            if joined is not None:
                await joined.ended()
                continue  # if it failed, the next round begins a fetch
            first, end = next(runs([b for b in missing if b not in in_flight]))
            cache_write = self._reserve(obj, first, end, prefetched=prefetched, as_own=as_own)
            fetch = self._start_fetch(origin, obj, cache_write, prefetched=True)
            if fetch is None:
                raise refused or NoRoom(f"no tier takes {obj.id.key} now")
            try:
                await fetch.ended()
            except trio.Cancelled:
                fetch.give_up()
                raise
            fetched += fetch.cache_write.written - fetch.cache_write.start
            if isinstance(fetch.error, NoRoom) and refused is None:
                # Once more: the cache file was dropped, and is made again; or another tier takes the blocks.
                refused = fetch.error
                continue
            if (failure := fetch.failure()) is not None:
                raise failure
            wanted = range(fetch.cache_write.stop_block, stop)
        raise OriginFailed(f"{obj.id.key}: its blocks vanish as fast as they come")

    def _part(self, object_id: ObjectId, of_origin: int, block: int) -> int:
        """How many blocks, from this one on, to fetch in one part: `of_origin` at most if this node owns it."""
        remote_owned = self._upstream.is_remote_owned(object_id, block)
        return self._peer_part_blocks if remote_owned else of_origin

    def _start_fetch(
        self,
        origin: Origin,
        obj: CachedObject,
        cache_write: CacheWrite | None,
        *,
        prefetched: bool,
        policy: Readahead | None = None,
        origin_only: bool = False,
        alone: bool = False,
        on_end: OnEnd | None = None,
    ) -> InFlightFetch | None:
        """Begin a fetch for a cache write, if there is one. `origin_only`: peers are not asked. See `InFlightFetch`."""
        if cache_write is None:
            return None
        first = cache_write.start_block
        asking_peers = self._clustered and not origin_only and self._upstream.is_remote_owned(obj.id, first)
        fetch = InFlightFetch(
            self._store,
            self.transfers,
            origin,
            obj,
            cache_write,
            self._token,
            prefetched=prefetched,
            asking_peers=asking_peers,
            policy=policy,
            alone=alone,
            on_end=on_end,
        )
        misses = self._metrics.ledger.misses
        misses.fetched(obj.id)
        if not asking_peers:
            misses.asked(obj.id.digest, first // BLOCKS_PER_EXTENT, "origin")
        if prefetched:
            self._metrics.prefetched += len(fetch.blocks)
            self._prefetch_bytes += cache_write.stop - cache_write.start
        if policy is not None:
            policy.under_way += len(fetch.blocks)
        self._in_flight.add(fetch)
        # Without a task, a reader's request is sent before those of its readahead, which begin later.
        if fetch.begin(partial(self._taskless_ended, fetch)):
            if not self._taskless:
                self._no_taskless = trio.Event()
                contained(
                    self._nursery, "transfers without a task", self._keep_nursery_open, self._no_taskless
                )
            self._taskless.add(fetch)
        else:
            contained(self._nursery, f"a transfer of {obj.id.key}", self._transfer, fetch)
        return fetch

    def _taskless_ended(self, fetch: InFlightFetch, repeat: bool) -> None:
        """End a transfer without a task, or repeat it in a task."""
        if repeat:
            contained(self._nursery, f"a transfer of {fetch.object.id.key}", self._transfer, fetch)
        else:
            self._finish(fetch)  # it may begin others, so this one is discarded only afterwards
        self._taskless.discard(fetch)
        if not self._taskless:
            self._no_taskless.set()

    async def _keep_nursery_open(self, none_left: trio.Event) -> None:
        """Keep the nursery open while transfers without tasks go on, and end them when it is cancelled."""
        try:
            await none_left.wait()
        except trio.Cancelled:
            for fetch in list(self._taskless):
                fetch.fail(OriginFailed("the mount ends"))
            with trio.CancelScope(shield=True):
                await none_left.wait()
            raise

    @property
    def in_flight_fetches(self) -> int:
        return len(self._in_flight)

    def _disk_down(self, tier: Tier) -> None:
        """Fail the fetches into a tier whose disk does not answer, so that their readers try another way."""
        for fetch in list(self._in_flight):
            if isinstance(fetch.cache_write, TierWrite) and fetch.cache_write.tier is tier:
                fetch.fail(NoRoom(f"the disk of the {tier.name} tier does not answer"))

    async def _transfer(self, fetch: InFlightFetch) -> None:
        """The task of a transfer."""
        peers = partial(self._upstream.read, fetch.object.id, fetch.origin) if fetch.asking_peers else None
        try:
            await fetch.run(peers, self._heap_slots if fetch.cache_write.in_heap else None)
        except Exception as exc:  # it could not be ended as it should: prefetch counts on `on_end`
            fetch.error = fetch.error or exc
        except BaseException:
            self._stop_counting(fetch)
            raise
        self._finish(fetch)

    def _stop_counting(self, fetch: InFlightFetch) -> None:
        """Stop counting a fetch as in flight."""
        cache_write = fetch.cache_write
        self._in_flight.discard(fetch)
        if fetch.prefetched:
            self._prefetch_bytes -= cache_write.stop - cache_write.start
        if fetch.policy is not None:
            fetch.policy.under_way -= len(fetch.blocks)

    def _finish(self, fetch: InFlightFetch) -> None:
        """Finish a fetch that is over, with an error or not."""
        self._stop_counting(fetch)
        obj, cache_write, error, policy = fetch.object, fetch.cache_write, fetch.error, fetch.policy
        if error is not None and not isinstance(error, CachefsError | WriteClosed):
            log.error("transfer of %s failed unexpectedly", obj.id.key, exc_info=error)
        if error is None and policy is not None and (wanted := policy.committed()):
            self._fetch_predicted(fetch.origin, obj, policy, wanted)
        if fetch.on_end is not None:
            fetch.on_end(cache_write.written - cache_write.start, fetch.failure() if error else None)

    async def _collect(
        self, obj: CachedObject, in_flight: list[InFlightFetch], offset: int, size: int
    ) -> Buffer | None:
        """The bytes, from fetches that have written them and from cached blocks; None if some are in neither."""
        if len(in_flight) == 1 and (whole := in_flight[0].read(offset, size)) is not None:
            return whole
        parts: list[Buffer] = []
        at, end = offset, offset + size
        while at < end:
            length = min(end, (at // self._block_size + 1) * self._block_size) - at
            data: Buffer | None = self._store.read_now(obj, at, length, count=False)
            for fetch in in_flight:
                data = data if data is not None else fetch.read(at, length)
            if data is None:
                data = await self._store.read(obj, at, length, count=False)
            if data is None:
                return None
            parts.append(data)
            at += length
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _raise_failure(self, opened: OpenedObject, in_flight: list[InFlightFetch]) -> None:
        for fetch in in_flight:
            failure = fetch.failure()
            if failure is None or isinstance(failure, NoRoom):
                continue  # the next attempt takes another tier, or the heap
            if isinstance(failure, ObjectChanged):
                raise failure
            if fetch.prefetched:
                continue  # it began without a reader, and the reader's own fetch decides
            opened.failed(failure)
            raise failure
