"""Compares whole objects with their etags, where these are MD5s.

The etag of an object that S3 or Google was given in one request is the MD5 of its bytes, unless it is encrypted with a key.
TLS protects bytes on the wire only; the MD5 also finds what a proxy, a broken memory or the store itself has changed.
Hashing costs processor time, so beyond a share of one processor only some objects are compared. No reader gets bytes of such
an object before.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import time
from collections.abc import Iterable

from cachefs.base.errors import Transient

log = logging.getLogger(__name__)

LARGEST, LARGEST_OF_ALL = 1 << 20, 4 << 20
"""Bytes of the largest object that is compared, usually and with `--verify full`: its first reader waits until all of it has
come. Derived: 1 MiB is 10 ms at 100 MB/s, about a round trip; 4 MiB is the most that comes in one request."""

BYTES_PER_S = 24 << 20
"""How much is hashed. Derived: 4 % of one processor, which hashes 650 MB/s; small files that all come cold are read less
than 3 % slower."""

BURST_BYTES = 16 << 20
"""What may be hashed at once after a pause: 25 ms of one processor. Guessed."""

UNLIKE = 3
"""So many objects that come twice alike and unlike their etags, and none that is like its etag: this origin's etags are no
MD5s. Guessed: each costs a request."""

MD5 = re.compile(r'"?([0-9a-f]{32})"?')

ENCRYPTED = frozenset(
    (
        "x-amz-server-side-encryption-aws-kms-key-id",
        "x-amz-server-side-encryption-customer-algorithm",
        "x-goog-encryption-kms-key-name",
        "x-goog-encryption-algorithm",
    )
)
"""Headers of replies whose etag is no MD5 although it looks like one."""


class Md5Etags:
    """Decides which objects of one origin are compared, and compares them. `choose` is called on the trio thread, `compare`
    on any, for one object at a time."""

    def __init__(self) -> None:
        self.compared = self.unlike = 0
        self._largest = LARGEST
        self._bytes_per_s: float = BYTES_PER_S
        self._left: float = BURST_BYTES
        self._since = time.monotonic()
        self._alike = False
        self._no_md5s = 0
        self._refused: dict[str, str] = {}  # key → MD5 of what came, which was unlike its etag

    def verify(self, how: str) -> None:
        """As the option says: `full` compares every object, `none` no object."""
        self._largest = LARGEST_OF_ALL if how == "full" else LARGEST
        self._bytes_per_s = {"full": math.inf, "first": BYTES_PER_S, "none": 0}[how]
        self._left = min(self._left, self._bytes_per_s)

    def choose(self, key: str, etag: str, size: int) -> str:
        """The MD5 that the bytes of this object are to have; "" if it is not compared."""
        found = MD5.fullmatch(etag)
        if found is None or size > self._largest or (self._no_md5s >= UNLIKE and not self._alike):
            return ""
        now = time.monotonic()
        self._left = min(BURST_BYTES, self._left + (now - self._since) * self._bytes_per_s)
        self._since = now
        if self._left <= 0 and key not in self._refused:
            return ""
        self._left -= size
        return found[1]

    def compare(self, key: str, name: str, md5: str, data: bytes) -> None:
        """Raises `Transient` if the object is to be fetched again: its bytes are unlike its etag, and came so for the first
        time. What comes twice alike is what the origin has."""
        came = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self.compared += 1
        before = self._refused.pop(key, "")
        if came == md5:
            self._alike = True
            return
        self.unlike += 1
        if came != before:
            self._refused[key] = came
            raise Transient(f"{name}: the bytes that came are not those of its etag, an MD5")
        if self._alike:
            log.warning(
                "%s: the origin gave the same bytes twice, and not those of its etag: the object is damaged, or its etag is "
                "no MD5",
                name,
            )
            return
        self._no_md5s += 1
        if self._no_md5s == UNLIKE:
            log.info("%s: etags of this origin are no MD5s, and say nothing of the bytes", name)


def encrypted(headers: Iterable[str]) -> bool:
    """True if a reply with these headers has an etag that is no MD5."""
    return not ENCRYPTED.isdisjoint(headers)
