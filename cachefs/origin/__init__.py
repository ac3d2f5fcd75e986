"""The origin: an object store seen from trio.

A *client* (HTTP, fsspec, a directory) makes one attempt per call and knows one vendor. `Origin` adds what is the same for
all (`attempts`). Other rooms see only `Origin`.

A write (`Origin.put`, `begin_upload`, `copy`, `delete`) is whole or not at all: a key shows the old version until the new
one is complete. A read is conditional on the etag, so it never mixes bytes of two versions. Every call ends within its
deadline. Exceptions of libraries do not leave this room."""

from cachefs.origin.attempts import Ticket
from cachefs.origin.origin import Origin, Upload, each, new_token
from cachefs.origin.protocol import (
    ByteRange,
    FileRange,
    InMemory,
    Limits,
    ListPage,
    ObjectInfo,
    Part,
    Preconditions,
    Source,
)
from cachefs.origin.registry import load_origin, open_origin

__all__ = [
    "ByteRange",
    "FileRange",
    "InMemory",
    "Limits",
    "ListPage",
    "ObjectInfo",
    "Origin",
    "Part",
    "Preconditions",
    "Source",
    "Ticket",
    "Upload",
    "each",
    "load_origin",
    "new_token",
    "open_origin",
]
