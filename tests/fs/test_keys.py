"""Keys a path cannot name, rule by rule, and one property for all of them together."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable

import pytest
import trio
import trio.testing
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.base.errors import NameTooLong
from tests.conftest import examples
from tests.fs.bucket import Bucket
from tests.fs.mount import ROOT, mounted

LONG = "x" * 255
WIDE = "é" * 127  # 254 bytes

RULES: list[tuple[str, list[str], dict[bytes, int | None], int]] = [
    # what, keys, the tree that is shown, how many keys are hidden at the root
    ("empty component", ["a//b", "a/c"], {b"a": None, b"a/c": 10}, 0),
    ("leading slash", ["/a", "b"], {b"b": 10}, 1),
    ("dot", ["./a", ".", "b"], {b"b": 10}, 2),
    ("dot dot", ["../a", "..", "../../etc/passwd", "b"], {b"b": 10}, 2),
    ("dot dot inside", ["a/../b", "a/c"], {b"a": None, b"a/c": 10}, 0),
    ("NUL", ["a\0b", "c"], {b"c": 10}, 1),
    ("255 bytes", [LONG, LONG + "x"], {LONG.encode(): 10}, 1),
    (
        "255 bytes as a directory",
        [LONG + "/a", LONG + "y/a"],
        {LONG.encode(): None, f"{LONG}/a".encode(): 10},
        1,
    ),
    ("bytes, not characters", [WIDE, WIDE + "é"], {WIDE.encode(): 10}, 1),
    ("lone surrogate", ["a\udc80", "b"], {b"b": 10}, 1),
    (
        "control characters",
        ["a\nb", "\x01", "\x7f", "\t"],
        {b"a\nb": 10, b"\x01": 10, b"\x7f": 10, b"\t": 10},
        0,
    ),
    ("no normalisation", ["\u00e9", "e\u0301"], {"\u00e9".encode(): 10, "e\u0301".encode(): 10}, 0),
    ("backslash and friends", ["a\\b", "*", "~", "-rf"], {b"a\\b": 10, b"*": 10, b"~": 10, b"-rf": 10}, 0),
    ("file and prefix", ["a", "a-b", "a.c", "a/d"], {b"a-b": 10, b"a.c": 10, b"a": None, b"a/d": 10}, 1),
    ("directory marker", ["a/"], {b"a": None}, 0),
    ("marker with contents", ["a/", "a/b"], {b"a": None, b"a/b": 10}, 0),
    ("only an empty component", ["a//"], {b"a": None}, 0),
    ("dots that are names", ["...", ".a", "..a"], {b"...": 10, b".a": 10, b"..a": 10}, 0),
]


@pytest.mark.parametrize(("keys", "tree", "hidden"), [r[1:] for r in RULES], ids=[r[0] for r in RULES])
@pytest.mark.parametrize("page", [1, 2, 1000])
async def test_rule(keys: list[str], tree: dict[bytes, int | None], hidden: int, page: int) -> None:
    async with mounted(Bucket(keys, page=page)) as mount:
        assert await mount.walk() == tree
        assert int(await mount.fs.getxattr(ROOT, b"user.cachefs.hidden")) == hidden


async def test_an_object_with_bytes_and_a_slash_at_its_end_is_hidden_and_its_directory_is_there() -> None:
    bucket = Bucket(["a/b"])
    bucket.put("a/", size=7)
    async with mounted(bucket) as mount:
        assert await mount.walk() == {b"a": None, b"a/b": 10}
        assert await mount.fs.getxattr(await mount.ino("a"), b"user.cachefs.hidden") == b"1"
        assert mount.metrics.hidden_names == 1


async def test_hidden_keys_are_counted_once_and_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    bucket = Bucket(["/a", "..", "ok"])
    async with mounted(bucket) as mount:
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert await mount.names() == [b"ok"]
                await trio.sleep(61)
        assert mount.metrics.hidden_names == 2
        assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


@pytest.mark.parametrize("name", [b".", b"..", b"a/b", b"", b"a\0", b"\xff\xfe", b"\xed\xb2\x80"])
async def test_impossible_names_do_not_exist(name: bytes) -> None:
    bucket = Bucket(["a/b", "c"])
    async with mounted(bucket) as mount:
        for listed in (False, True):
            if listed:
                await mount.entries()
            assert (await mount.fs.lookup(ROOT, name))[0] is None
        assert bucket.counts[1] == 0


async def test_a_name_that_is_too_long_is_refused_before_anything_is_asked() -> None:
    bucket = Bucket(["c"])
    async with mounted(bucket) as mount:
        with pytest.raises(NameTooLong):
            await mount.fs.lookup(ROOT, b"x" * 256)
        with pytest.raises(NameTooLong):
            await mount.fs.refresh("x" * 256)
        assert bucket.counts == (0, 0)
        assert (await mount.fs.lookup(ROOT, b"x" * 255))[0] is None


async def test_a_directory_that_appears_on_a_later_page_wins() -> None:
    keys = ["a", *(f"a-{i}" for i in range(9)), "a/x"]
    for seen_first in ("a", "a-3", None):
        bucket = Bucket(keys, page=2)
        async with mounted(bucket) as mount:
            if seen_first:
                found = await mount.stat(seen_first)
                assert found is not None and found.is_dir == (seen_first == "a")
            names = await mount.names()
            assert sorted(names) == sorted({k.encode() for k in keys if k != "a/x"})
            assert (await mount.stat("a/x")) is not None
            assert mount.metrics.hidden_names == 1
            del bucket.objects["a/x"]
            await trio.sleep(61)
            assert sorted(await mount.names()) == sorted(names)
            found = await mount.stat("a")
            assert found is not None and not found.is_dir
            bucket.put("a/y")
            await trio.sleep(61)
            await mount.entries()
            assert (await mount.stat("a/y")) is not None


COMPONENT = st.text(alphabet=st.sampled_from("ab/.-0\x01\0é\U0001f600"), max_size=4)
KEY = st.one_of(
    COMPONENT,
    st.lists(COMPONENT, min_size=1, max_size=4).map("/".join),
    st.sampled_from(["a", "a/", "a/b", "a-", "a.", "a//", "a/../b", "b" * 256, "a/" + "b" * 256 + "/c"]),
).filter(bool)


def tree_of(keys: Iterable[str]) -> dict[bytes, int | None]:
    """The reference: what POSIX shows of these keys, from the rules alone."""

    def nameable(component: str) -> bool:
        return component not in ("", ".", "..") and "\0" not in component and len(component.encode()) <= 255

    tree: dict[bytes, int | None] = {}
    for key in keys:
        parts = key.split("/")
        directories, last = parts[:-1], parts[-1]
        path: list[str] = []
        for part in directories:
            if not nameable(part):
                break
            path.append(part)
            tree["/".join(path).encode()] = None
        else:
            if last and nameable(last):
                tree.setdefault("/".join([*path, last]).encode(), 10)
    return tree


@settings(
    max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    keys=st.sets(KEY, max_size=14),
    page=st.integers(1, 5),
    ordered=st.booleans(),
    seed=st.integers(0, 1000),
    later=st.sets(KEY, max_size=6),
)
def test_the_tree_is_what_the_keys_say(
    keys: set[str], page: int, ordered: bool, seed: int, later: set[str]
) -> None:
    rng = random.Random(seed)

    async def main() -> None:
        bucket = Bucket(keys, page=page)
        bucket.ordered = ordered
        async with mounted(bucket) as mount:
            inodes: dict[bytes, int] = {}
            before: dict[bytes, int | None] = {}
            for _ in range(2):
                tree = tree_of(bucket.objects)
                paths = [*tree, *(p + b"-" for p in tree), *(p + b"/a" for p in tree), b"a", b"a-", b"b"]
                rng.shuffle(paths)
                # A file that is asked for itself says nothing of a directory that has since come to its name: the next
                # listing does.
                turned = {p for p in tree if tree[p] is None and before.get(p) is not None}
                # What comes in the place of something else is another inode.
                inodes = {p: ino for p, ino in inodes.items() if p in tree and before.get(p) == tree[p]}
                for path in paths[: rng.randint(0, len(paths))]:
                    found = await mount.stat(path)
                    if any(path == p or path.startswith(p + b"/") for p in turned):
                        continue
                    assert (found is not None) == (path in tree), path
                    assert found is None or found.is_dir == (tree[path] is None), path
                    if found is not None:
                        assert inodes.setdefault(path, found.ino) == found.ino
                assert await mount.walk() == tree
                before = tree
                for key in rng.sample(sorted(keys), len(keys) // 2):
                    bucket.objects.pop(key, None)
                for key in later:
                    bucket.put(key)
                await trio.sleep(61)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
