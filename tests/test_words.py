"""One word per thing, and it is the field's: words that only cachefs knew do not come back."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MOST_GUESSED = 50
"""Constants of which the docstring says "Guessed". It only falls."""

PRIVATE = (
    "lent",
    "lend",
    "lends",
    "lending",
    "loan",
    "draft",
    "drafts",
    "heir",
    "heirs",
    "asker",
    "askers",
    "twin",
    "twins",
    "shelf",
    "beliefs",
    "believed",
    "foretold",
    "greets",
    "stamp",
    "stamps",
    "survey",
    "seal",
    "seals",
    "sealed",
    "unsealed",
    "greet",
    "greeted",
    "fronts",
    "books",
)
"""Each has a standard term: passthrough, dirty file, successor, client, plan store, freshness, predicted, token, MAC, …"""

IN_ROOMS = (
    (
        "cachefs/store/*.py",
        ("borrowed", "spent", "Seen", *(WRITING := ("Fill", "fill", "fills", "land", "landed", "arriving"))),
    ),
    ("cachefs/fetch/*.py", (*WRITING, "arrives", "arrival", "brought", "bring")),
    ("cachefs/cli/*.py", ("borrowed", "apart")),
    ("cachefs/origin/attempts.py", ("turn", "Line", "line", "_line")),
    ("cachefs/origin/origin.py", ("turn",)),
    ("cachefs/upload/sending.py", ("turn", "turns", "_turn", "_turns")),
    ("cachefs/upload/*.py", ("land", "lands", "landed", "make_room")),
    ("cachefs/fs/*.py", ("overlay", "_kept", "HeldNames")),
)
"""Words that are good English elsewhere, and in these files were private ones: remote-owned, evictable first, access filter,
cache write, written, committed, in progress, in flight, prefetched, incompatible, priority ticket, wait queue, spill, evict,
pending local changes, attribute overrides. Only code is looked at."""

OF_THE_ORIGIN = ("cachefs/fs/*.py", "cachefs/upload/*.py")
"""Rooms where *the store* can only mean the origin, or the cache store: their text says which."""

GREETING = ("hello",)
"""In the product it is a handshake; tests write it into files."""

ACTORS = ("whoever", "whomever", "somebody", "nobody", "everybody", "anybody", "the one who")
"""The product names the actor. In tests, `nobody` is a user."""

ALLOWED = {
    # On disk, at the origin, or another program's word.
    '"drafts"',
    '"draft "',
    '"stamp"',
    "cachefs-stamp",
    "pycurl.NOBODY",
    "whoever can name objects must not be able to make two names collide",
}


def pattern(words: Iterable[str]) -> re.Pattern[str]:
    return re.compile(rf"(?<![A-Za-z_])({'|'.join(words)})(?![A-Za-z])", re.IGNORECASE)


def files(*patterns: str) -> list[Path]:
    found = (path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())
    return sorted(path for path in found if path != Path(__file__))


PRODUCT = files("cachefs/**/*.py", "cachefs/**/*.html", "docs/**/*.md", "man/*", "systemd/*", "README.md")
BESIDE = files("tests/**/*.py", "bench/**/*.py")


def names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of the names in the code of a file; strings and comments are left out."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string


@pytest.mark.parametrize(("where", "words"), IN_ROOMS, ids=lambda part: part if isinstance(part, str) else "")
def test_no_name_in_a_room_is_a_private_word(where: str, words: tuple[str, ...]) -> None:
    paths = files(where)
    assert paths
    found = [f"{path.name}:{line}: {name}" for path in paths for line, name in names(path) if name in words]
    assert not found


def test_the_object_store_is_the_origin() -> None:
    for path in files(*OF_THE_ORIGIN):
        text = re.sub(r"\s+", " ", path.read_text())
        assert not re.findall(r".{30}\b[Tt]he store(?:'s)?\b(?! of ).{20}", text), path


@pytest.mark.parametrize("path", PRODUCT + BESIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_words_stay_away(path: Path) -> None:
    words = pattern(PRIVATE if path in BESIDE else PRIVATE + ACTORS + GREETING)
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for allowed in ALLOWED:
            line = line.replace(allowed, "")
        found += [f"{number}: {match[1]}" for match in words.finditer(line)]
    assert not found


def test_constants_are_not_guessed_more_often() -> None:
    """A new constant is measured, derived or borrowed, or another one gets a reason."""
    guessed = [
        place for place in files("cachefs/**/*.py") for _ in re.findall(r"\bGuessed\b", place.read_text())
    ]
    assert len(guessed) <= MOST_GUESSED
