"""The expected failures.

The room that calls a foreign library translates its errors, with ``raise ... from exc``. `cachefs.fuse.errno_table` maps
each of these classes to an errno; nothing here knows FUSE.
"""

from __future__ import annotations


class CachefsError(Exception):
    """Base of all expected failures. `str(exc)` is one line a user can act on."""


class NotFound(CachefsError):
    """No such object, directory or attribute."""


class NotADirectory(CachefsError):
    """A path component is a file."""


class NameTooLong(CachefsError):
    """A path component is longer than a name may be."""


class IsADirectory(CachefsError):
    """A file operation met a directory."""


class ReadOnly(CachefsError):
    """A write reached a read-only mount."""


class AlreadyExists(CachefsError):
    """The name to create exists."""


class NotEmpty(CachefsError):
    """The directory to remove or to replace is not empty."""


class Invalid(CachefsError):
    """A request that makes no sense: a name that no key can have, a directory moved into itself, an unknown flag."""


class NotPermitted(CachefsError):
    """An operation that object stores do not have: links, special files, another source."""


class CrossDevice(CachefsError):
    """A rename from one source to another."""


class TooLarge(CachefsError):
    """The object would be larger than the origin takes."""


class BadHandle(CachefsError):
    """The handle was not opened for this operation."""


class Unsupported(CachefsError):
    """The origin or the FUSE backend does not have this operation."""


class ObjectChanged(CachefsError):
    """The object is no longer the requested version (etag mismatch, 412, or removed while open)."""


class Conflict(CachefsError):
    """A conditional write found another version at the origin than it should replace, or one where none should be."""


class NoSuchUpload(CachefsError):
    """The origin does not know this multipart upload: it was completed or aborted, or it expired."""


class PermissionDenied(CachefsError):
    """Credentials are missing, wrong, expired, or lack the permission. Not retried; new credentials end it."""


class Transient(CachefsError):
    """The origin failed in a way that a retry may fix (reset, truncated body, 5xx, timeout)."""


class Throttled(Transient):
    """The origin asked for fewer requests (503 SlowDown, 429)."""


class OriginFailed(CachefsError):
    """The origin did not serve the request within its retries and deadline."""


class OriginFull(OriginFailed):
    """The origin is full: its disk, or a quota."""


class Unreachable(OriginFailed):
    """The origin does not answer at all, so the request was not sent, or was cancelled."""


class NoRoom(CachefsError):
    """No tier can take the bytes now (full of blocks in use, disk full, disk failing). Readers never get this error; writers
    get it if the bytes they write fit nowhere."""


class CacheUnusable(CachefsError):
    """A cache directory or index cannot be used; the text says why and what to change."""


class CacheInUse(CacheUnusable):
    """Another daemon uses this cache directory."""


class ConfigError(CachefsError):
    """Bad input; the text is one line that says what to change."""


class MountError(CachefsError):
    """Mounting failed; the text says why and what to do."""


class AlreadyMounted(MountError):
    """A living cachefs is mounted there."""
