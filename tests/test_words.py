"""One word per thing, and it is the field's: words that only cachefs knew do not come back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

GONE = (
    *(
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
    ),
    *("shelf", "beliefs", "believed", "foretold", "greets", "stamp", "stamps", "survey"),
    *("whoever", "whomever", "somebody", "nobody"),
)
"""Each has a standard term: passthrough, dirty file, successor, client, plan store, freshness, predicted, token, …"""

ALLOWED = {
    # On disk, at the origin, or another program's word.
    '"drafts"',
    '"draft "',
    '"stamp"',
    "cachefs-stamp",
    "whoever can name objects must not be able to make two names collide",
}

WORDS = re.compile(rf"(?<![A-Za-z_])({'|'.join(GONE)})(?![A-Za-z])", re.IGNORECASE)

FILES = sorted(
    path
    for pattern in ("cachefs/**/*.py", "cachefs/**/*.html", "docs/**/*.md", "man/*", "systemd/*", "README.md")
    for path in ROOT.glob(pattern)
    if path.is_file()
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_private_words_stay_away(path: Path) -> None:
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for allowed in ALLOWED:
            line = line.replace(allowed, "")
        found += [f"{number}: {match[1]}" for match in WORDS.finditer(line)]
    assert not found
