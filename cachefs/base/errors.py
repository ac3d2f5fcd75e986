"""What can go wrong, in our words.

Foreign errors are translated once, at the rim of the room that met them, with ``raise ... from exc``. The errno each
of these becomes is a table in `cachefs.fuse.errno_table`; nothing here knows FUSE.
"""

from __future__ import annotations


class CachefsError(Exception):
    """Base of all expected failures. `str(exc)` is one line a user can act on."""


class NotFound(CachefsError):
    """No such object, directory or attribute."""


class NotADirectory(CachefsError):
    """A path component is a file."""


class NameTooLong(CachefsError):
    """A path component of more bytes than a name may have."""


class IsADirectory(CachefsError):
    """A file operation met a directory."""


class ReadOnly(CachefsError):
    """A write reached a read-only mount."""


class AlreadyExists(CachefsError):
    """The name to make exists."""


class NotEmpty(CachefsError):
    """The directory to remove or to replace is not empty."""


class Invalid(CachefsError):
    """A request without meaning: a name that no key can have, a directory moved into itself, an unknown flag."""


class NotPermitted(CachefsError):
    """Something that an object store does not have: links, special files, another source."""


class CrossDevice(CachefsError):
    """A rename from one source to another."""


class TooLarge(CachefsError):
    """The object would be larger than the origin takes."""


class BadHandle(CachefsError):
    """A handle that was not opened for this."""


class Unsupported(CachefsError):
    """The origin or this backend cannot do that at all."""


class ObjectChanged(CachefsError):
    """The object's version is no longer the one that was asked for (etag mismatch, 412, or gone while open)."""


class Conflict(CachefsError):
    """A conditional write met another version at the origin than it was to replace, or one where none was to be."""


class NoSuchUpload(CachefsError):
    """The origin does not know this multipart upload (any more): completed, aborted or expired."""


class PermissionDenied(CachefsError):
    """Credentials are missing, wrong, expired, or lack the right. Not retried; recovers when they are renewed."""


class Transient(CachefsError):
    """The origin failed in a way that another attempt may not meet (reset, truncated body, 5xx, timeout)."""


class Throttled(Transient):
    """The origin asked for fewer requests (503 SlowDown, 429)."""


class OriginFailed(CachefsError):
    """The origin could not serve the request within its retries and deadline."""


class OriginFull(OriginFailed):
    """The origin has no room for more: its disk is full, or a quota is used up."""


class Unreachable(OriginFailed):
    """The origin does not answer at all, so the request was not sent, or was given up."""


class NoRoom(CachefsError):
    """No tier can take the bytes now (full of blocks in use, disk full, disk failing). Readers never see this, writers do
    when there is no place for what they wrote."""


class CacheUnusable(CachefsError):
    """A cache directory or index cannot be used at all; the text says why and what to change."""


class CacheInUse(CacheUnusable):
    """Another daemon holds this cache directory."""


class ConfigError(CachefsError):
    """Bad input; the text is one line that says what to change."""


class MountError(CachefsError):
    """Mounting failed; the text says why and what to do."""
