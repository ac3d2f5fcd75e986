"""Exception → errno and log level: one total table.

Missing names are logged as DEBUG, errors that a user can cause as INFO, and those that an operator should see as WARNING. An
exception that is not in the table is a bug of cachefs: the request fails with EIO, the log gets the traceback, and the
daemon goes on.
"""

from __future__ import annotations

import errno
import logging

import trio

from cachefs.base import errors
from cachefs.base.logs import Repeats
from cachefs.base.metrics import Metrics
from cachefs.fs import NoAttribute

log = logging.getLogger(__name__)

XATTR_PREFIX = b"user.cachefs."
"""Prefix of the names of this filesystem's extended attributes."""

TABLE: dict[type[BaseException], tuple[int, int]] = {
    errors.NotFound: (errno.ENOENT, logging.DEBUG),
    NoAttribute: (errno.ENODATA, logging.DEBUG),
    errors.NotADirectory: (errno.ENOTDIR, logging.DEBUG),
    errors.NameTooLong: (errno.ENAMETOOLONG, logging.DEBUG),
    errors.IsADirectory: (errno.EISDIR, logging.DEBUG),
    errors.ReadOnly: (errno.EROFS, logging.DEBUG),
    errors.AlreadyExists: (errno.EEXIST, logging.DEBUG),
    errors.NotEmpty: (errno.ENOTEMPTY, logging.DEBUG),
    errors.Invalid: (errno.EINVAL, logging.DEBUG),
    errors.NotPermitted: (errno.EPERM, logging.DEBUG),
    errors.CrossDevice: (errno.EXDEV, logging.DEBUG),
    errors.TooLarge: (errno.EFBIG, logging.DEBUG),
    errors.BadHandle: (errno.EBADF, logging.DEBUG),
    errors.Unsupported: (errno.EOPNOTSUPP, logging.DEBUG),
    errors.ObjectChanged: (errno.ESTALE, logging.INFO),
    errors.Conflict: (errno.ESTALE, logging.INFO),
    errors.NoSuchUpload: (errno.EIO, logging.WARNING),
    errors.PermissionDenied: (errno.EACCES, logging.WARNING),
    errors.Throttled: (errno.EIO, logging.WARNING),
    errors.Transient: (errno.EIO, logging.WARNING),
    errors.OriginFailed: (errno.EIO, logging.WARNING),
    errors.OriginFull: (errno.ENOSPC, logging.WARNING),
    errors.Unreachable: (errno.EIO, logging.DEBUG),  # the outage itself is logged once
    errors.NoRoom: (errno.ENOSPC, logging.WARNING),
    errors.CacheInUse: (errno.EIO, logging.ERROR),
    errors.CacheUnusable: (errno.EIO, logging.ERROR),
    errors.ConfigError: (errno.EINVAL, logging.ERROR),
    errors.MountError: (errno.EIO, logging.ERROR),
    errors.AlreadyMounted: (errno.EIO, logging.ERROR),
    errors.CachefsError: (errno.EIO, logging.ERROR),
    trio.TooSlowError: (errno.EIO, logging.WARNING),
    MemoryError: (errno.ENOMEM, logging.ERROR),
}


def errno_of(exc: BaseException) -> tuple[int, int]:
    """(errno, log level) of an exception, by its nearest class in the table."""
    known = (TABLE[kind] for kind in type(exc).__mro__ if kind in TABLE)
    return next(known, (errno.EIO, logging.ERROR))


def report_failure(
    operation: str, exc: Exception, metrics: Metrics, deadline_s: float, repeats: Repeats
) -> int:
    """Count and log a failed operation, each kind of failure once a minute. Returns the errno that answers it."""
    number, level = errno_of(exc)
    left_out: int | None = 0
    if level > logging.DEBUG:
        metrics.fuse_errors += 1
        if not log.isEnabledFor(logging.DEBUG):
            left_out = repeats.admit((operation, type(exc)))
    if left_out is None:
        return number
    text = str(exc) or type(exc).__name__
    if isinstance(exc, trio.TooSlowError):
        text = f"no answer within {deadline_s:.0f} s"
    if left_out:
        text += f" (and {left_out} more failures of this kind before it)"
    log.log(level, "%s: %s", operation, text, exc_info=None if is_expected(exc) else exc)
    return number


def is_expected(exc: BaseException) -> bool:
    """True if the exception is in the table. Others are logged with a traceback."""
    return any(kind in TABLE for kind in type(exc).__mro__)


def errno_of_foreign_xattr(name: bytes) -> int:
    """The errno for an extended attribute of another program. ls reads two attributes of each file, but none after it got
    EOPNOTSUPP."""
    return errno.ENODATA if name.startswith(b"user.") else errno.EOPNOTSUPP
