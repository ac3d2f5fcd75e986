"""What several processes saw of one file system, and whether a local disk could have shown it.

A history is what each step was asked and what it answered, and when, as positions in one series of beginnings and ends.
`linearized` looks for an order of all steps in which no step is before one that had ended when it began, and in which a
plain file system in memory answers each step as it was answered. A system call is several steps: one for each name that is
looked up, and one for what is done with what was found. That is how much of it a local disk does at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ROOT = 0
OK = "ok"
UNKNOWN = None
FAILED = "EIO"


@dataclass
class Step:
    """`what` with `arguments`, as `State.answer` takes them. `ended` is set with the `result`. `torn` says that contents
    changed meanwhile: local disks, too, show half of a change to a read beside it."""

    number: int
    actor: int
    what: str
    arguments: tuple[Any, ...]
    began: int
    ended: int = -1
    result: Any = None
    torn: bool = False

    def __str__(self) -> str:
        arguments = ", ".join(map(repr, self.arguments))
        return f"{self.began:4}–{self.ended:4}  {self.actor}: {self.number}={self.what}({arguments}) → {self.result!r}"


@dataclass
class State:
    """A file system in memory. `names` leads from (number of a directory, name) to a number; a directory is in `directories`
    with the number of names in it, a file in `files`, as (content or `UNKNOWN`, mode; 0: any). `found` is what looked up
    names and open files stand for, by number of the step that found them."""

    names: dict[tuple[int, str], int] = field(default_factory=dict)
    directories: dict[int, int] = field(default_factory=lambda: {ROOT: 0})
    files: dict[int, tuple[Any, int]] = field(default_factory=dict)
    found: dict[int, int] = field(default_factory=lambda: {-1: ROOT})

    def copy(self) -> State:
        return State(dict(self.names), dict(self.directories), dict(self.files), dict(self.found))

    def key(self) -> Any:
        return (
            frozenset(self.names.items()),
            frozenset(self.directories),
            frozenset(self.files.items()),
            frozenset(self.found.items()),
        )

    def tidy(self) -> None:
        """Forget files that no name and no process has."""
        used = {*self.names.values(), *self.found.values()}
        self.files = {number: file for number, file in self.files.items() if number in used}

    def answer(self, step: Step) -> Any:
        """Do it, and what it returns."""
        return getattr(self, "do_" + step.what)(step.number, *step.arguments)

    # -- names -------------------------------------------------------------------------------------

    def do_walk(self, number: int, above: int, name: str) -> str:
        """Look up a name in what `above` found."""
        directory = self.found[above]
        if directory not in self.directories:
            return "ENOTDIR" if directory in self.files else "ENOENT"
        there = self.names.get((directory, name))
        if there is None:
            return "ENOENT"
        self.found[number] = there
        return "directory" if there in self.directories else "file"

    def do_exists(self, number: int, above: int, name: str) -> bool:
        return (self.found[above], name) in self.names

    def do_drop(self, number: int, found: int) -> str:
        del self.found[found]
        return OK

    def do_create(self, number: int, above: int, name: str, flags: str, mode: int) -> str:
        directory = self.found[above]
        if directory not in self.directories:
            return "ENOENT"
        there = self.names.get((directory, name))
        if there is None:
            self.names[directory, name] = self.found[number] = number
            self.directories[directory] += 1
            self.files[number] = b"", mode
            return OK
        if "x" in flags:
            return "EEXIST"
        if there in self.directories:
            return "EISDIR"
        self.found[number] = there
        if "t" in flags:
            self.files[there] = b"", self.files[there][1]
        return OK

    def do_unlink(self, number: int, above: int, name: str) -> str:
        place = self.found[above], name
        there = self.names.get(place)
        if there is None:
            return "ENOENT"
        if there in self.directories:
            return "EISDIR"
        self._remove(place)
        return OK

    def do_mkdir(self, number: int, above: int, name: str) -> str:
        place = self.found[above], name
        if place[0] not in self.directories:
            return "ENOENT"
        if place in self.names:
            return "EEXIST"
        self.names[place] = number
        self.directories[place[0]] += 1
        self.directories[number] = 0
        return OK

    def do_rmdir(self, number: int, above: int, name: str) -> str:
        place = self.found[above], name
        there = self.names.get(place)
        if there is None:
            return "ENOENT"
        if there not in self.directories:
            return "ENOTDIR"
        if self.directories[there]:
            return "ENOTEMPTY"
        self._remove(place)
        del self.directories[there]
        return OK

    def do_rename(self, number: int, above: int, name: str, to: int, new: str) -> str:
        place, other = (self.found[above], name), (self.found[to], new)
        moved = self.names.get(place)
        if moved is None or other[0] not in self.directories:
            return "ENOENT"
        there = self.names.get(other)
        if there == moved:
            return OK
        is_directory = moved in self.directories
        if is_directory and other[0] == moved:
            return "EINVAL"
        if there is not None:
            if is_directory and there not in self.directories:
                return "ENOTDIR"
            if not is_directory and there in self.directories:
                return "EISDIR"
            if self.directories.get(there, 0):
                return "ENOTEMPTY"
            self._remove(other)
            self.directories.pop(there, None)
        self._remove(place)
        self.names[other] = moved
        self.directories[other[0]] += 1
        return OK

    def _remove(self, place: tuple[int, str]) -> None:
        del self.names[place]
        self.directories[place[0]] -= 1

    # -- what was found ----------------------------------------------------------------------------

    def do_open(self, number: int, found: int, flags: str) -> str:
        there = self.found[found]
        if there in self.directories or there not in self.files:
            return "EISDIR"
        self.found[number] = there
        if "t" in flags:
            self.files[there] = b"", self.files[there][1]
        return OK

    def do_close(self, number: int, found: int) -> str:
        del self.found[found]
        return OK

    def do_fsync(self, number: int, found: int) -> str:
        return OK

    def do_write(self, number: int, found: int, offset: int, data: bytes) -> str:
        there = self.found[found]
        content, mode = self.files[there]
        if content is UNKNOWN:
            return OK
        content = content.ljust(offset, b"\0")
        self.files[there] = content[:offset] + data + content[offset + len(data) :], mode
        return OK

    def do_truncate(self, number: int, found: int, size: int) -> str:
        there = self.found[found]
        if there not in self.files:
            return "EISDIR"
        content, mode = self.files[there]
        if content is UNKNOWN:
            return OK
        self.files[there] = content[:size].ljust(size, b"\0"), mode
        return OK

    def do_chmod(self, number: int, found: int, mode: int) -> str:
        there = self.found[found]
        if there in self.files:
            self.files[there] = self.files[there][0], mode
        return OK

    def do_read(self, number: int, found: int) -> Any:
        return self.files[self.found[found]][0]

    def do_stat(self, number: int, found: int) -> Any:
        """(size, mode, links) of a file."""
        there = self.found[found]
        if there not in self.files:
            return "directory"
        content, mode = self.files[there]
        if content is UNKNOWN:
            return UNKNOWN
        return len(content), mode, int(there in self.names.values())


CONTENT = {"write", "truncate", "open", "create"}

CHANGE_NOTHING = {"exists", "read", "stat", "fsync"}
"""What can be put at the first moment at which its answer is right: nothing else depends on when it was."""

BOTH = {"close", "truncate", "create", "open"}
"""What may have been done, though it was answered with an error: the promise failed, not the change."""


def after(state: State, step: Step) -> list[State]:
    """What the file system may be after a step that was answered so; nothing, if it cannot have been."""
    if step.what == "reappears":
        return [state, _copied(state, step)]
    done = state.copy()
    answer = done.answer(step)
    if step.result == FAILED:
        if step.what == "close":
            return [done]
        allowed = [state]
        if step.what in BOTH and answer == OK:
            done.found.pop(step.number, None)
            allowed.append(done)
        elif step.what in ("rename", "unlink") and answer == OK:
            allowed.append(done)
        return allowed
    if answer is UNKNOWN:
        return [state]
    if step.what == "stat" and not answer[1]:
        answer = answer[0], step.result[1], answer[2]
    if answer != step.result:
        return [state] if step.what == "read" and step.torn else []
    if step.what in ("unlink", "rename", "close", "drop"):
        done.tidy()
    return [done]


def _copied(state: State, step: Step) -> State:
    """A deletion at the origin that failed leaves the old name, too, and says so: it shows what the origin has."""
    place = state.found.get(step.arguments[0]), step.arguments[1]
    if place[0] not in state.directories or place in state.names:
        return state
    both = state.copy()
    both.names[place] = step.number
    both.directories[place[0]] += 1
    both.files[step.number] = UNKNOWN, 0  # perhaps of an older version
    return both


def linearized(history: list[Step], state: State) -> tuple[int, State]:
    """How many of the steps no order was found for, at least, and the file system behind the others."""
    steps = sorted(history, key=lambda step: step.began)
    for step in history:
        if step.what in ("rename", "unlink") and step.result == FAILED:
            again = Step(-step.number, step.actor, "reappears", step.arguments, step.began, step.ended, OK)
            steps.insert(steps.index(step), again)
    changes = [step for step in steps if step.what in CONTENT]
    for step in steps:
        if step.what == "read":
            step.torn = any(other.began < step.ended and step.began < other.ended for other in changes)
    seen: set[Any] = set()
    best = (-1, state)
    every = (1 << len(steps)) - 1
    todo: list[tuple[int, int, State]] = [(0, 0, state)]
    while todo:
        done, first, state = todo.pop()
        # What changes nothing goes first.
        again = True
        while again:
            again = False
            while first < len(steps) and done >> first & 1:
                first += 1
            ready = _ready(steps, done, first)
            for index in ready:
                step = steps[index]
                quiet = step.what in CHANGE_NOTHING or step.result not in (OK, FAILED, "file", "directory")
                if quiet and after(state, step):
                    done |= 1 << index
                    again = True
        count = done.bit_count()
        if count > best[0]:
            best = count, state
        if done == every:
            return 0, state
        key = done, state.key()
        if key in seen:
            continue
        seen.add(key)
        for index in reversed(ready):
            for new in after(state, steps[index]):
                todo.append((done | 1 << index, first, new))
    return len(steps) - best[0], best[1]


def _ready(steps: list[Step], done: int, first: int) -> list[int]:
    """Those that may be next: none that is left had ended when they began."""
    ready = []
    until = float("inf")
    for index in range(first, len(steps)):
        if steps[index].began > until:
            break
        if not done >> index & 1:
            ready.append(index)
            until = min(until, steps[index].ended)
    return [index for index in ready if steps[index].began <= until]
