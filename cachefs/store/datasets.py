"""Which dataset an object belongs to: the first component of its name below the prefix that is mounted.

A source whose first components are not datasets but their parts (`train/` mounted, with a directory for each of a thousand
classes) is one dataset.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable

from cachefs.names import ObjectId
from cachefs.store.epochs import Epochs, unit_hash

MOST = 64
"""First components that one source may have as datasets of their own. Guessed: more are classes, days or users."""


class Datasets:
    """ObjectId → number of its dataset (32 bits), and back to a name for people."""

    def __init__(self) -> None:
        self._prefixes: dict[str, list[str]] = {}
        self._seen: dict[str, set[str]] = {}
        self._whole: set[str] = set()
        self._names: dict[int, str] = {}
        self._numbers: dict[tuple[str, str], int] = {}  # by place and first component

    def mounted(self, places: Iterable[tuple[str, str]]) -> None:
        """What is mounted: (source, prefix of its keys) each."""
        for source, prefix in places:
            self._prefixes.setdefault(source, []).append(prefix)
        for prefixes in self._prefixes.values():
            prefixes.sort(key=len, reverse=True)

    def __call__(self, object_id: ObjectId) -> int:
        source, key = object_id.source, object_id.key
        prefix = next((p for p in self._prefixes.get(source, ()) if key.startswith(p)), "")
        first, slash, _ = key[len(prefix) :].lstrip("/").partition("/")
        if not slash:
            first = ""
        place = f"{source}\0{prefix}"
        if place in self._whole:
            first = ""
        number = self._numbers.get((place, first))
        return number if number is not None else self._number(place, prefix, first)

    def _number(self, place: str, prefix: str, first: str) -> int:
        """Of a component that is new, or one too many."""
        if place not in self._whole:
            seen = self._seen.setdefault(place, set())
            seen.add(first)
            if len(seen) > MOST:
                del self._seen[place]
                self._whole.add(place)
                first = ""
        number = zlib.crc32(f"{place}\0{first}".encode("utf-8", "surrogatepass"))
        if number not in self._names:
            self._names[number] = prefix + first
        self._numbers[place, first] = number
        return number

    def name(self, number: int) -> str:
        """The prefix and first component of its names."""
        return self._names.get(number, f"{number:08x}")

    def dump(self) -> bytes:
        """What `restore` takes."""
        return json.dumps([sorted(self._whole), self._names]).encode()

    def restore(self, row: bytes | None) -> None:
        """Go on where `dump` was called; nothing of what is damaged."""
        try:
            whole, names = json.loads(row or b"[[], {}]")
            self._whole = {str(place) for place in whole}
            self._names = {int(number): str(name) for number, name in names.items()}
        except (ValueError, TypeError, AttributeError):
            pass


class Course:
    """How far a version's dataset has come in its epoch, for who fetches ahead."""

    def __init__(self, epochs: Epochs, datasets: Datasets) -> None:
        self._epochs = epochs
        self._datasets = datasets

    def epoch(self, object_id: ObjectId) -> int:
        """Which epoch of its dataset this is: the number grows when one begins; 0 when nothing is known."""
        return self._epochs.number(self._datasets(object_id))

    def had(self, object_id: ObjectId) -> bool:
        """Whether (the beginning of) the version was used in this epoch, be it here still or not."""
        return self._epochs.had(self._datasets(object_id), unit_hash(object_id.digest, 0))

    def comes(self, object_id: ObjectId) -> None:
        """A reader has come for the version: as good as used."""
        self._epochs.comes(self._datasets(object_id), unit_hash(object_id.digest, 0))
