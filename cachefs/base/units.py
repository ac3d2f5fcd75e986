"""Parsers and formatters of sizes, durations and modes.

A parser returns the value, or raises `ValueError` with a text that completes "'12X' is …" and says what to write instead.
The parser of a `format_…` function reads its text back exactly. The `about_…` functions make rounded text for users.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

FOREVER = 365 * 86400.0
"""The longest time to live in seconds: a year. Finite, because the kernel takes seconds and not infinity."""

LEAST_WITHOUT_UNIT = 1 << 20
"""A capacity below this needs a unit. Scripts that count in bytes give larger numbers."""

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40, "P": 1 << 50}
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGTP]?)(iB|B)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(ms|[smhd]?)")


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, or a share of a total that is known later. Exactly one of the two is set."""

    bytes: int | None = None
    percent: float | None = None

    def resolve(self, total_bytes: int) -> int:
        """The size in bytes, where 100 % is `total_bytes`."""
        if self.bytes is not None:
            return self.bytes
        return int(total_bytes * (self.percent or 0.0) / 100)

    @classmethod
    def parse(cls, text: str) -> Size:
        """``100G``, ``512MiB``, ``1.5TB`` or ``10%``."""
        text = text.strip()
        if text.endswith("%"):
            try:
                percent = float(text[:-1])
            except ValueError:
                percent = math.nan
            if not 0 <= percent <= 100:
                raise ValueError("not a percentage: write 0% to 100%")
            return cls(percent=percent)
        if _SIZE.fullmatch(text) is None:
            raise ValueError("not a size: write it like 100G, 512MiB or 10%")
        return cls(bytes=parse_capacity(text))

    def __str__(self) -> str:
        return f"{_plain(self.percent or 0.0)}%" if self.bytes is None else format_bytes(self.bytes)


def parse_bytes(text: str) -> int:
    """``100G``, ``512MiB`` (K, M, G, T, P and KiB, … are powers of 1024; KB, MB, … are powers of 1000)."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("not a number of bytes: write it like 200M, 512MiB or 100G")
    number, prefix, suffix = match[1], match[2].upper(), (match[3] or "").lower()
    unit = (_DECIMAL if suffix == "b" else _BINARY)[prefix]
    return int(float(number) * unit) if "." in number else int(number) * unit


def parse_capacity(text: str) -> int:
    """As `parse_bytes`, but refuses a small number without a unit: ``--ram 8`` means 8 GiB and not 8 bytes."""
    count = parse_bytes(text)
    if 0 < count < LEAST_WITHOUT_UNIT and text.strip()[-1].isdigit():
        number = text.strip()
        raise ValueError(f"a number without a unit: write {number}G or {number}M, or {number}B for bytes")
    return count


def format_bytes(count: int) -> str:
    """The exact number, in the largest unit of 1024 that divides it."""
    for prefix in ("P", "T", "G", "M", "K"):
        if count and count % _BINARY[prefix] == 0:
            return f"{count // _BINARY[prefix]}{prefix}"
    return f"{count}B" if 0 < count < LEAST_WITHOUT_UNIT else str(count)


def about_bytes(count: float) -> str:
    """Three digits and a unit of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"


def about_files(count: int) -> str:
    """ "1 file", "1,234 files"."""
    return f"{count:,} file{'' if count == 1 else 's'}"


def about_share(part: int, whole: int) -> str:
    """A percentage; 100 % of nothing."""
    return f"{100 * part / whole:.1f} %" if whole else "100.0 %"


def printable(text: str) -> str:
    r"""Escape characters that are not printable (`\x1b`): names may contain any, and terminals interpret some of them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def parse_duration(text: str) -> float:
    """Seconds: ``60``, ``60s``, ``500ms``, ``5m``, ``1h``, ``2d`` or ``forever``."""
    text = text.strip()
    if text in ("forever", "inf"):
        return FOREVER
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError("not a time: write it like 60, 60s, 5m, 1h or forever")
    number, unit = float(match[1]), match[2]
    # Divided, not multiplied by 0.001: 43 ms is exactly the float 0.043.
    return min(number / 1000 if unit == "ms" else number * _SECONDS[unit], FOREVER)


def format_duration(seconds: float) -> str:
    return "forever" if seconds >= FOREVER else f"{_plain(seconds)}s"


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:.12f}".rstrip("0")


def parse_rate(text: str) -> int:
    """Bytes a second: ``200M`` or ``200MB/s``; 0 is no limit."""
    return parse_capacity(text.strip().removesuffix("/s"))


def parse_mode(text: str) -> int:
    """Octal permission bits: ``0644``, ``755``, ``0o022``."""
    if not re.fullmatch(r"(0o?)?[0-7]{1,4}", text.strip()):
        raise ValueError("not an octal mode: write it like 0644 or 022")
    mode = int(text.strip().removeprefix("0o"), 8)
    if mode > 0o777:
        raise ValueError("more than permission bits: write it like 0644 or 022")
    return mode


def format_mode(mode: int) -> str:
    return f"0{mode:03o}"


def parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("0", "false", "no", "off"):
        return False
    raise ValueError("neither yes nor no: write true or false")
