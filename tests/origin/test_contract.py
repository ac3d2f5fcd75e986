"""What every client owes the rooms above, on every server it can talk to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bench.lab.dataset import content as bytes_of
from cachefs.base.errors import NotFound, ObjectChanged
from cachefs.origin import Origin
from tests.origin.reading import Collect, content, one_a_vendor, pages, run
from tests.origin.servers import Moto, Server

PAIRS = [
    ("curl", "moto"),
    ("fsspec", "moto"),
    ("curl", "lab"),
    ("fsspec", "lab"),
    ("curl", "rgw"),
    ("curl", "lab-google"),
    ("curl", "azurite"),
    ("fsspec", "azurite"),
    ("auto", "directory"),
    ("fsspec", "directory"),
    ("auto", "memory"),
    ("auto", "web"),
]

LARGE = bytes_of("large", 1_500_001)
TREE = {
    "d/a": b"one",
    "d/a.b": b"two",
    "d/a/deep": b"three",
    "d/zero": b"",
    "d/large": LARGE,
    "d/sp ace+plus": b"four",
    "d/100% #?&=;": b"five",
    "d/%2F": b"six",
    "d/é": b"seven",
    "d/日本": b"eight",
    "d/quo'te\"d": b"nine",
    "d/sub/x": b"ten",
    "top": b"eleven",
}
PATHS = {key: data for key, data in TREE.items() if key != "d/a"}
"""Where keys are paths, `d/a` cannot be file and directory at once."""


@pytest.fixture(params=[one_a_vendor(pair) for pair in PAIRS], ids="-".join)
def place(
    request: pytest.FixtureRequest, start: Callable[[str], Server]
) -> tuple[Server, Callable[..., Origin], dict[str, bytes]]:
    client, name = request.param
    server = start(name)
    tree = TREE if server.any_key else PATHS
    if not hasattr(server, "filled"):
        for key, data in tree.items():
            server.put(key, data)
        server.filled = True  # type: ignore[attr-defined]
    return server, lambda **options: server.origin(client, **options), tree


def below(tree: dict[str, bytes], prefix: str) -> tuple[set[str], set[str]]:
    """(keys, common prefixes) that a listing of `prefix` shows."""
    keys, prefixes = set(), set()
    for key in tree:
        if key.startswith(prefix):
            name, slash, _ = key[len(prefix) :].partition("/")
            (prefixes if slash else keys).add(prefix + name + slash)
    return keys, prefixes


def test_listing(place) -> None:
    server, origin, tree = place

    async def use(origin: Origin) -> None:
        await origin.check()
        for prefix in ("", "d/", "d/sub/"):
            for limit in (1000, 2):
                found = await pages(origin, prefix, limit)
                objects = [o for page in found for o in page.objects if o.key.startswith(("d/", "top"))]
                objects = [o for o in objects if o.key != prefix]  # a marker, where directories are real
                prefixes = [p for page in found for p in page.prefixes if p.startswith("d/")]
                keys, folders = below(tree, prefix)
                assert sorted(o.key for o in objects) == sorted(keys)
                assert sorted(prefixes) == sorted(folders)
                if server.lists_sizes:
                    assert {o.key: o.size for o in objects} == {key: len(tree[key]) for key in keys}
                if limit == 2 and prefix == "d/" and len(found) > 1:
                    assert all(len(p.objects) + len(p.prefixes) <= 2 for p in found)
                    if found[0].ordered:
                        order = [
                            k.encode()
                            for p in found
                            for k in sorted([*p.prefixes, *(o.key for o in p.objects)], key=str.encode)
                        ]
                        assert order == sorted(order)

    run(origin(), use)


def test_listing_what_is_not_there(place) -> None:
    server, origin, _ = place

    async def use(origin: Origin) -> None:
        if server.empty_is_missing:
            with pytest.raises(NotFound):
                await origin.list_page("nothing/here/")
        else:
            page = await origin.list_page("nothing/here/")
            assert (page.objects, page.prefixes, page.next_token) == ([], [], None)

    run(origin(), use)


def test_head_says_what_the_listing_said(place) -> None:
    server, origin, tree = place

    async def use(origin: Origin) -> None:
        page = await origin.list_page("d/")
        for info in page.objects:
            found = await origin.head(info.key)
            assert found.size == len(tree.get(info.key, b""))  # "d/" itself, where directories are real
            assert found.etag and found.mtime_ns > 0
            if server.lists_sizes:
                assert found == info
        with pytest.raises(NotFound):
            await origin.head("d/missing")

    run(origin(), use)


def test_reading(place) -> None:
    _, origin, tree = place

    async def use(origin: Origin) -> None:
        for key in (
            "d/a.b",
            "d/zero",
            "d/large",
            "d/sp ace+plus",
            "d/100% #?&=;",
            "d/%2F",
            "d/é",
            "d/日本",
            "d/quo'te\"d",
        ):
            assert await content(origin, await origin.head(key)) == tree[key], key
        large = await origin.head("d/large")
        for start, stop in (
            (0, 1),
            (0, 600_000),
            (5, 300_000),
            (1_500_000, 1_500_001),
            (700_000, 1_500_001),
            (9, 9),
        ):
            assert await content(origin, large, start, stop) == LARGE[start:stop]
        assert (
            origin._attempts.metrics.origin_bytes
            == sum(
                len(tree[k])
                for k in tree
                if k.startswith("d/")
                and k
                in (
                    "d/a.b",
                    "d/zero",
                    "d/large",
                    "d/sp ace+plus",
                    "d/100% #?&=;",
                    "d/%2F",
                    "d/é",
                    "d/日本",
                    "d/quo'te\"d",
                )
            )
            + 1
            + 600_000
            + 299_995
            + 1
            + 800_001
        )

    run(origin(), use)


def test_reading_another_version(place) -> None:
    server, origin, _ = place
    server.put("v", b"old" * 1000)

    async def use(origin: Origin) -> None:
        old = await origin.head("v")
        server.put("v", b"new!" * 1000)
        sink = Collect()
        with pytest.raises(ObjectChanged):
            await origin.read("v", old.etag, 0, 3000, sink, whole=True)
        with pytest.raises(ObjectChanged):
            await origin.read("v", old.etag, 10, 20, sink)
        assert sink.data == b""
        new = await origin.head("v")
        assert new.etag != old.etag
        assert await content(origin, new, 4, 12) == b"new!new!"
        server.remove("v")
        with pytest.raises((NotFound, ObjectChanged)):
            await origin.read("v", new.etag, 0, 10, sink)
        assert sink.data == b""
        assert origin._attempts.metrics.origin_retries == 0

    run(origin(), use)


def test_keys_no_path_can_name(place) -> None:
    server, origin, _ = place
    if not server.any_key:
        return  # keys are paths there: nothing of this can be stored
    hostile = [
        "h//b",
        "h/../x",
        "h/./y",
        "h/\x01c",
        "h/new\nline",
        "h/marker/",
        "h/marker/z",
        "h/",
        "h/back\\slash",
        "/lead",
    ]
    if isinstance(server, Moto):
        hostile.remove("h/new\nline")  # moto cannot store it
    for key in hostile:
        server.put(key, b"?")

    async def use(origin: Origin) -> None:
        tree = dict.fromkeys(hostile, b"?")
        for prefix in ("h/", "h//", "h/../", "h/marker/", "/"):
            page = await origin.list_page(prefix)
            keys, prefixes = below(tree, prefix)
            keys |= {prefix} & tree.keys()
            assert {o.key for o in page.objects} == keys - {p for p in prefixes if p == prefix}
            assert set(page.prefixes) == prefixes
        assert "/" in (await origin.list_page("")).prefixes

    run(origin(), use)
    for key in hostile:
        server.remove(key)


UNNAMED = [
    "c/\x01",
    "c/bell\x07 escape\x1b[31m",
    "c/tab\tname%?#&=+",
    "c/carriage\rreturn",
    "c/new\nline",
    "c/delete\x7f",
    "c/é\x02日",
    "c//empty",
    "/c",
]
"""Keys that paths cannot hold."""


def test_reading_keys_that_no_path_can_hold(place) -> None:
    server, origin, _ = place
    if not server.any_key:
        return
    keys = [key for key in UNNAMED if "\n" not in key or not isinstance(server, Moto)]
    for key in keys:
        server.put(key, key.encode() + LARGE)

    async def use(origin: Origin) -> None:
        listed = {o.key: o for p in ("c/", "c//", "/") for o in (await origin.list_page(p)).objects}
        for key in keys:
            data = key.encode() + LARGE
            info = await origin.head(key)
            assert info == listed[key] and info.size == len(data)
            assert await content(origin, info) == data, key
            for start, stop in ((0, 1), (5, 600_000), (len(data) - 1, len(data))):
                assert await content(origin, info, start, stop) == data[start:stop], key
        with pytest.raises(NotFound):
            await origin.head("c/missing\x01")
        old, sink = listed["c/\x01"], Collect()
        server.put("c/\x01", b"new" * 1000)
        for stop in (old.size, 100):
            with pytest.raises(ObjectChanged):
                await origin.read(old.key, old.etag, 0, stop, sink, whole=stop == old.size)
        assert sink.data == b"" and origin._attempts.metrics.origin_retries == 0

    run(origin(), use)
    for key in keys:
        server.remove(key)
