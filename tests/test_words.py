"""One word per thing, and it is the field's: words that only cachefs knew do not come back."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

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
)
"""Each has a standard term: passthrough, dirty file, successor, client, plan store, freshness, predicted, token, …"""

ACTORS = ("whoever", "whomever", "somebody", "nobody")
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


@pytest.mark.parametrize("path", PRODUCT + BESIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_words_stay_away(path: Path) -> None:
    words = pattern(PRIVATE if path in BESIDE else PRIVATE + ACTORS)
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for allowed in ALLOWED:
            line = line.replace(allowed, "")
        found += [f"{number}: {match[1]}" for match in words.finditer(line)]
    assert not found
