"""Faults by script: which requests fail, and how.

A rule names requests (kind, key glob, the first-th to (first + count - 1)-th that match) and an action. Every rule
counts all its matches; of the rules whose turn it is, the oldest acts. `Action` lists what can happen; the exchange
that serves the request carries it out.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase


class Action(StrEnum):
    SLOW_DOWN = "503"  # SlowDown, with Retry-After when `seconds` is given
    TOO_MANY = "429"  # likewise
    INTERNAL = "500"
    DENIED = "403"
    HANG = "hang"  # answers only after `seconds`
    GARBAGE = "garbage"  # answers something that is not HTTP
    LOSE = "lost-reply"  # does what was asked, and closes instead of answering
    RESET = "reset"  # RST: before the headers, or after `after` bytes of the body
    TRUNCATE = "truncate"  # closes after `after` bytes of the body
    HANG_BODY = "hang-body"  # sends headers and `after` bytes, goes on only after `seconds`
    SLOW = "slow"  # this response at `rate` bytes per second
    CHANGE = "etag"  # the object gets another version once `after` bytes of this response were sent
    LIE = "wrong-etag"  # ignores If-Match, serves other bytes under another etag


FOREVER = 3600.0


@dataclass
class Rule:
    """A rule. Actions within a body happen before its last byte, so that the client always notices them."""

    action: Action
    kind: str = "get"
    key: str = "*"
    first: int = 1
    count: int | None = None
    seconds: float | None = None
    after: int | None = None
    rate: float = 0
    matched: int = 0
    fired: int = 0
    cleared: threading.Event = field(default_factory=threading.Event, repr=False)

    def __post_init__(self) -> None:
        self.action = Action(self.action)

    def due(self, kind: str, key: str) -> bool:
        """Whether the rule applies to this request, which is counted if it matches."""
        if not (fnmatchcase(kind, self.kind) and fnmatchcase(key, self.key)):
            return False
        self.matched += 1
        return self.matched >= self.first and (self.count is None or self.matched < self.first + self.count)

    @property
    def wait(self) -> float:
        return FOREVER if self.seconds is None else self.seconds


class Script:
    """The rules in force."""

    def __init__(self) -> None:
        self._rules: dict[int, Rule] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, rule: Rule) -> int:
        with self._lock:
            number = next(self._numbers)
            self._rules[number] = rule
            return number

    def clear(self) -> None:
        """Drop all rules, and release the requests that hang by them."""
        with self._lock:
            for rule in self._rules.values():
                rule.cleared.set()
            self._rules.clear()

    def pick(self, kind: str, key: str) -> Rule | None:
        """The rule that applies to this request, or None."""
        with self._lock:
            due = [rule for rule in self._rules.values() if rule.due(kind, key)]
            if not due:
                return None
            due[0].fired += 1
            return due[0]

    def fired(self) -> dict[int, int]:
        """How often each rule has acted."""
        with self._lock:
            return {number: rule.fired for number, rule in self._rules.items()}
