"""A load of writes of which it is known afterwards what was acknowledged. Run as a program; tests read what it leaves.

A worker changes a directory of its own, one operation after the other. Before each it logs what it is about to do, and
behind it that the last call of it returned 0. So when the daemon is killed, of each worker at most one operation is *in
doubt*, and everything before it must be found. The log is a file outside of the mount, a line of JSON for each entry.

A file's content is a *recipe*: a list of [offset, seed, length] to be written one after the other, where a seed of null
cuts the file at the offset (or fills it up). So nobody has to keep the bytes.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from bench.lab.dataset import content

KIB, MIB = 1 << 10, 1 << 20

Recipe = list[list[Any]]
State = dict[str, Recipe | None]
"""Files by their path below the worker's directory, and directories (None)."""

GONE = (5, 103, 107)
"""EIO, ECONNABORTED, ENOTCONN: what calls end with whose daemon has died."""


def build(recipe: Recipe) -> bytes:
    """The content that a recipe makes."""
    data = bytearray()
    for offset, seed, length in recipe:
        if seed is None:
            del data[offset:]
            data.extend(bytes(offset - len(data)))
        else:
            data.extend(bytes(max(0, offset - len(data))))
            data[offset : offset + length] = content(seed, length)
    return bytes(data)


def size_of(recipe: Recipe) -> int:
    size = 0
    for offset, seed, length in recipe:
        size = offset if seed is None else max(size, offset + length)
    return size


def apply(state: State, change: dict[str, Any]) -> State:
    """What there is after an operation."""
    after = dict(state)
    path = change["path"]
    match change["op"]:
        case "write" | "mkdir":
            after[path] = change.get("recipe")
        case "remove":
            del after[path]
        case "rename":
            for name in list(after):
                if name == path or name.startswith(path + "/"):
                    after[change["to"] + name.removeprefix(path)] = after.pop(name)
    return after


class Worker:
    def __init__(self, root: Path, log: Path, state: State, seed: str, big: int) -> None:
        """`big` is the size of the largest files, of which there are few."""
        self._root = root
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._dice = random.Random(seed)
        self._seed, self._number = seed, 0
        self._big = big
        self.state = state

    def run(self) -> None:
        """Until the daemon dies."""
        steps = [self._write, self._write, self._again, self._again, self._append, self._change, self._cut]
        steps += [self._replace, self._replace, self._rename, self._remove, self._directories]
        while True:
            self._dice.choice(steps)()
            if self._dice.random() < 0.1:
                time.sleep(self._dice.uniform(0, 0.05))

    def _say(self, entry: dict[str, Any]) -> None:
        os.write(self._log, json.dumps(entry).encode() + b"\n")

    def _do(self, change: dict[str, Any], *calls: Any) -> None:
        self._say({"want": change})
        for call in calls:
            try:
                call()
            except OSError as exc:
                self._say({"failed": exc.errno, "said": str(exc)})
                raise SystemExit(0 if exc.errno in GONE else 3) from exc
        self._say({"done": time.time()})
        self.state = apply(self.state, change)

    def _path(self, name: str) -> Path:
        return self._root / name

    def _files(self) -> list[str]:
        return sorted(name for name, recipe in self.state.items() if recipe is not None)

    def _folders(self) -> list[str]:
        return ["", *sorted(name + "/" for name, recipe in self.state.items() if recipe is None)]

    def _new_name(self) -> str:
        while (name := self._dice.choice(self._folders()) + f"f{self._dice.randrange(12)}") in self.state:
            if len(self.state) > 24:
                self._remove()
        return name

    def _fresh(self, length: int, at: int = 0) -> list[Any]:
        self._number += 1
        return [at, f"{self._seed}/{self._number}", length]

    def _length(self, largest: int) -> int:
        return round(largest ** self._dice.random())

    # -- operations --------------------------------------------------------------------------------

    def _write(self, name: str | None = None) -> None:
        """A new file, or all of an old one anew."""
        name = name or (
            self._new_name() if self._dice.random() < 0.7 else self._dice.choice([*self._files(), "f0"])
        )
        if self.state.get(name, []) is None:
            return
        large = name == "f0" and "/" not in name
        recipe = [self._fresh(self._dice.randrange(self._big) if large else self._length(2 * MIB))]
        if self._dice.random() < 0.2:
            recipe.append(self._fresh(self._length(100 * KIB), recipe[0][2]))
        synced = self._dice.random() < 0.3
        with_fsync = len(recipe) > 1 and synced

        def work() -> None:
            fd = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            try:
                self._put(fd, recipe[:1])
                if with_fsync:
                    os.fsync(fd)
                    self._say({"so far": recipe[:1]})
                self._put(fd, recipe[1:])
                if synced and not with_fsync:
                    os.fsync(fd)
            finally:
                os.close(fd)

        middle = {"middle": recipe[:1]} if with_fsync else {}
        self._do({"op": "write", "path": name, "recipe": recipe, **middle}, work)

    def _put(self, fd: int, recipe: Recipe) -> None:
        for offset, seed, length in recipe:
            data = memoryview(content(seed, length))
            while data:
                count = os.pwrite(fd, data[: self._dice.choice((4 * KIB, 64 * KIB, MIB, 4 * MIB))], offset)
                data, offset = data[count:], offset + count

    def _again(self) -> None:
        if files := self._files():
            self._write(self._dice.choice(files))

    def _changed(self, extra: Recipe, flags: int, name: str) -> None:
        recipe = [*(self.state[name] or []), *extra]

        def work() -> None:
            fd = os.open(self._path(name), flags)
            try:
                for offset, seed, length in extra:
                    if seed is None:
                        os.ftruncate(fd, offset)
                    else:
                        self._put(fd, [[offset, seed, length]])
            finally:
                os.close(fd)

        self._do({"op": "write", "path": name, "recipe": recipe}, work)

    def _append(self) -> None:
        if files := self._files():
            name = self._dice.choice(files)
            size = size_of(self.state[name] or [])
            self._changed([self._fresh(self._length(200 * KIB), size)], os.O_WRONLY | os.O_APPEND, name)

    def _change(self) -> None:
        """Some places in the middle."""
        if files := self._files():
            name = self._dice.choice(files)
            size = size_of(self.state[name] or [])
            extra = [
                self._fresh(self._length(50 * KIB), self._dice.randrange(size + 1))
                for _ in range(self._dice.randrange(1, 4))
            ]
            self._changed(extra, os.O_RDWR, name)

    def _cut(self) -> None:
        if files := self._files():
            name = self._dice.choice(files)
            to = self._dice.randrange(size_of(self.state[name] or []) + 1)
            change = {"op": "write", "path": name, "recipe": [*(self.state[name] or []), [to, None, 0]]}
            self._do(change, lambda: os.truncate(self._path(name), to))

    def _replace(self) -> None:
        """As programs save: beside, then renamed over."""
        files = self._files()
        if files:
            name = self._dice.choice(files)
            self._write(name + ".tmp")
            self._move(name + ".tmp", name)

    def _rename(self) -> None:
        if files := self._files():
            self._move(self._dice.choice(files), self._new_name())

    def _move(self, name: str, to: str) -> None:
        if name in self.state:
            change = {"op": "rename", "path": name, "to": to}
            self._do(change, lambda: os.rename(self._path(name), self._path(to)))

    def _remove(self) -> None:
        if files := self._files():
            name = self._dice.choice(files)
            self._do({"op": "remove", "path": name}, lambda: os.unlink(self._path(name)))

    def _directories(self) -> None:
        name = f"d{self._dice.randrange(3)}"
        if name not in self.state:
            self._do({"op": "mkdir", "path": name}, lambda: os.mkdir(self._path(name)))
        elif not any(path.startswith(name + "/") for path in self.state):
            self._do({"op": "remove", "path": name}, lambda: os.rmdir(self._path(name)))
        else:
            while (to := f"e{self._dice.randrange(100)}") in self.state:
                pass
            self._move(name, to)
            self._move(to, name)


def main(root: str, place: str, seed: str, big: str, workers: str) -> int:
    """Worker n begins with `n.state` in `place`, and logs to `n.log` there."""
    content(0, 1)  # makes the pool that all share
    children = []
    for number in range(int(workers)):
        if (pid := os.fork()) == 0:
            there = Path(place)
            state: State = json.loads((there / f"{number}.state").read_text())
            below = Path(root) / f"w{number}"
            Worker(below, there / f"{number}.log", state, f"{seed}.{number}", int(big)).run()
        children.append(pid)
    print("ready", flush=True)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
