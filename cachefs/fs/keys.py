"""From keys to names: which keys of an object store a path can name, and how a listing is put in order. Pure.

An object store has one flat set of keys. A directory is a common prefix of keys, up to a "/". Most keys are paths already.
The rules for those that are not:

- an empty component (``a//b``, a leading ``/``), ``.`` and ``..``, a NUL, a component of more than 255 UTF-8 bytes, and
  text that UTF-8 cannot encode: hidden, because no path reaches them;
- a non-empty object whose key ends in ``/``: hidden, because its name is that of a directory;
- an empty object whose key ends in ``/``: the marker of a directory, which exists even when nothing else is in it;
- an object ``a`` beside keys ``a/...``: the directory wins and the object is hidden (`cachefs.fs.tree` decides that,
  because the two may come on different pages);
- everything else, control characters and newlines included, is shown byte for byte, without normalisation.

Hidden keys are counted, never silently lost.

A *mark* is a name as the tables and the pages order it: the mark of a file is its name, that of a directory its name and a
"/". Marks have the order in which the origin lists keys. So each page of a listing adds rows at the end, and its last mark
tells which names are decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachefs.origin.protocol import ListPage, ObjectInfo

MAX_NAME = 255
"""Most bytes of one path component: NAME_MAX of Linux. FUSE lets longer names through, so the daemon must check."""


def nameable(name: bytes) -> bool:
    """True if a directory may have an entry of this name."""
    return 0 < len(name) <= MAX_NAME and name not in (b".", b"..") and b"\0" not in name and b"/" not in name


def text_of(name: bytes) -> str | None:
    """The component of a key for a name; None if it is not UTF-8, so no key has it."""
    try:
        return name.decode("utf-8")
    except UnicodeDecodeError:
        return None


def name_of(component: str) -> bytes | None:
    """The name under which a component of a key is shown; None if it must be hidden."""
    try:
        name = component.encode("utf-8")
    except UnicodeEncodeError:
        return None
    return name if nameable(name) else None


def mark_of_directory(name: bytes) -> bytes:
    return name + b"/"


def name_in(mark: bytes) -> bytes:
    """The name of a mark, without the "/" of directories."""
    return mark[:-1] if mark.endswith(b"/") else mark


@dataclass(slots=True)
class Page:
    """One page of a listing, in marks.

    `entries` are (mark, object) in ascending order; the object is None for directories. `hidden` are keys that no path can
    name. `marker` is the directory's own marker object. `first` and `last` are the least and the greatest key of the page,
    relative to the directory and with hidden keys; None for an empty page."""

    entries: list[tuple[bytes, ObjectInfo | None]] = field(default_factory=list)
    hidden: list[str] = field(default_factory=list)
    marker: ObjectInfo | None = None
    first: bytes | None = None
    last: bytes | None = None


def read_page(listed: ListPage, prefix: str) -> Page:
    """Sort the keys below `prefix` ("" or ending in "/") into names and hidden keys."""
    page = Page()
    found: dict[bytes, ObjectInfo | None] = {}
    seen: list[bytes] = []
    skip = len(prefix)
    for info in listed.objects:
        if not info.key.startswith(prefix):
            continue  # the origin returned a key that was not asked for
        rest = info.key[skip:]
        seen.append(rest.encode("utf-8", "surrogatepass"))
        if not rest:
            if info.size > 0:
                page.hidden.append(info.key)
            else:
                page.marker = info
        elif "/" in rest:
            # Some origins list the marker of a sub-directory as an object. It shows the directory, whatever its size.
            _add_directory(page, found, rest.partition("/")[0], info.key)
        elif (name := name_of(rest)) is None:
            page.hidden.append(info.key)
        else:
            found[name] = info
    for key in listed.prefixes:
        if not key.startswith(prefix):
            continue
        rest = key[skip:]
        seen.append(rest.encode("utf-8", "surrogatepass"))
        _add_directory(page, found, rest[:-1] if rest.endswith("/") else rest, key)
    page.entries = sorted(found.items(), key=lambda entry: entry[0])
    if seen:
        page.first, page.last = min(seen), max(seen)
    return page


def _add_directory(page: Page, found: dict[bytes, ObjectInfo | None], component: str, key: str) -> None:
    name = name_of(component)
    if name is None:
        page.hidden.append(key)
    else:
        found[mark_of_directory(name)] = None
