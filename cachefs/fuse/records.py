"""Records of a mount's open files, and how the next daemon restores them (`cachefs.fuse.handover`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from cachefs.base.names import ObjectId
from cachefs.fs import FileSystem, Former
from cachefs.fuse.callers import Writers
from cachefs.fuse.handover import READS, READS_WRITTEN, WRITES, Handover, describe_handle
from cachefs.fuse.protocol import RESENT
from cachefs.origin import Origin

log = logging.getLogger(__name__)


class Records:
    """The records of a mount whose connection a holder keeps. `origins` are those of the mount's volumes, in order."""

    def __init__(self, fs: FileSystem, handover: Handover, origins: Sequence[Origin]) -> None:
        self._fs = fs
        self.handover = handover
        self._table = handover.table
        self._origins = list(origins)
        self._volumes = {origin: number for number, origin in enumerate(origins)}
        self._handles = fs.handles
        self.reopened, self._drop = handover.table.add_again, handover.table.drop
        self.registered, self.unregistered = handover.table.registered, handover.table.unregistered
        # Unique of an OPEN → handle that the previous daemon made for it.
        self._unanswered: dict[int, int] = {}
        self._unrestored: dict[int, int] = {}  # handle that could not be restored → slot of its record

    def take_over(self, writers: Writers) -> set[int]:
        """Restore the previous daemon's handles. Returns its backing ids that no handle uses."""
        self._fs.follow(self.handover.restarts)
        used_backing_ids = set()
        count = 0
        for slot, record in self.handover.open:
            try:
                origin, writes = self._origins[record.volume], record.use == WRITES
                version = ObjectId(origin.source, record.key, record.etag, record.size)
                former = Former(
                    record.fh,
                    record.ino,
                    origin,
                    version,
                    record.mtime_ns,
                    record.backing_id,
                    writes,
                    unsaved=record.use != READS,
                )
                restored = self._fs.restore(former)
                if restored and writes:
                    writers.resumed(record.fh, record.ino, record.process)
                elif writes:
                    log.warning("%s was open for writing: what was not synced of it is lost", record.key)
            except Exception:
                log.exception("the open file %s is given up", record.key)
                self._table.drop(slot)
                continue
            if (handle := self._handles.get(record.fh)) is not None:
                handle.record = slot
            else:
                self._unrestored[record.fh] = slot
            self._unanswered[record.unique & ~RESENT] = record.fh
            used_backing_ids.add(record.backing_id)
            count += 1
        log.info("took the mount over from another daemon: %d files are open", count)
        return self._table.backing_ids() - used_backing_ids

    # -- handles -----------------------------------------------------------------------------------

    def opened(self, fh: int, unique: int, backing_id: int, process: int = 0) -> None:
        """Write the record of a handle. To be called before the reply to its OPEN."""
        handle = self._handles[fh]
        if not handle.description or handle.node is not None:
            obj = handle.object
            handle.description = describe_handle(
                handle.ino,
                obj.size,
                handle.mtime_ns,
                backing_id,
                process,
                READS if handle.node is None else WRITES if handle.writes else READS_WRITTEN,
                self._volumes[handle.origin],
                obj.key,
                obj.etag,
            )
        handle.record = self._table.add(fh, unique, handle.description)

    def release_unanswered(self, unique: int) -> int:
        """Release the handle that the previous daemon made for an OPEN that the kernel repeats, because its reply was lost.
        Returns the handle, 0 if there was none. For an OPEN for writing, the new handle must exist before this call: closing
        the last handle would upload the file."""
        fh = self._unanswered.pop(unique & ~RESENT, None)
        if fh is not None:
            self.released(fh)
            self._fs.release(fh)
        return fh or 0

    def released(self, fh: int) -> None:
        """Clear a handle's record. To be called before the reply to RELEASE, or when the kernel has not taken the handle."""
        handle = self._handles.get(fh)
        self._drop(self._unrestored.pop(fh, 0) if handle is None else handle.record)
