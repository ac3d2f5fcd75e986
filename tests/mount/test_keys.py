"""Keys that an object store allows and a path does not: each shown or hidden by the written rule."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import Bucket, Mounted
from tests.mount.mounts import Mount, run, succeed

SHOWN = [
    "plain.txt",
    "with space",
    " leading space",
    "trailing space ",
    "trailing.",
    "...",
    ".hidden",
    "..hidden",
    "-rf",
    "--help",
    "~root",
    "tab\tname",
    "new\nline",
    "carriage\rreturn",
    "bell\x07 escape\x1b[31m",
    "delete\x7f",
    "c1\x85control",
    "back\\slash",
    "100%",
    "%2F",
    "a%2Fb",
    "%00",
    "plus+plus",
    "?query=1&x=2#fragment",
    "<xml>&amp;",
    "quote'\"`$(id)",
    "*[glob]?{a,b}",
    "semi;colon:pipe|",
    "caf\u00e9",
    "cafe\u0301",
    "数据集",
    "\U0001f980",
    "\u202eright-to-left",
    "\ufeffbom",
    "x" * 255,
    "é" * 127,
    "both/inner",
    "d/e/f/g",
    "a/seen",
    "b/seen",
    "UPPER",
    "upper",
    "thé/数/🦀",
]
CONTROL = [key for key in SHOWN if any(ord(char) < 32 or 127 <= ord(char) < 160 for char in key)]
HIDDEN = [
    ".",
    "..",
    "./x",
    "../escape",
    "../../etc/passwd",
    "/leading",
    "//",
    "a//b",
    "a/../b",
    "a/..",
    "a/./b",
    "b/",  # not empty
    "y" * 256,
    "é" * 128,
    "z" * 300 + "/inner",
    "both",  # also a prefix
]
MARKERS = ["empty/", "nested/empty/"]


@pytest.fixture(scope="module")
def keys(module_bucket: Bucket) -> Bucket:
    for key in SHOWN + HIDDEN:
        module_bucket.put(key, 1000 + len(key))
    for key in MARKERS:
        module_bucket.put(key, 0)
    return module_bucket


@pytest.fixture(scope="module", params=["auto", "fsspec"])
def mount(request: pytest.FixtureRequest, keys: Bucket, module_mounted: Mounted) -> Iterator[Mount]:
    mount = module_mounted(keys, client=request.param)
    mount.allowed.append("that no path can name are hidden")
    yield mount


def tree(root: Path) -> tuple[set[str], set[str]]:
    """(files, directories) below, as any program sees them."""
    files, directories = set(), set()
    for place, inner, names in os.walk(root, onerror=_raise):
        relative = os.path.relpath(place, root)
        files |= {os.path.normpath(os.path.join(relative, name)) for name in names}
        directories |= {os.path.normpath(os.path.join(relative, name)) for name in inner}
    return files, directories


def _raise(error: OSError) -> None:
    raise error


def parents(key: str) -> set[str]:
    parts = key.split("/")
    return {"/".join(parts[:n]) for n in range(1, len(parts))}


def test_the_listing_is_exactly_what_the_rules_say(mount: Mount) -> None:
    files, directories = tree(mount.path)
    assert files == set(SHOWN)
    expected = {place for key in SHOWN for place in parents(key)}
    expected |= {"empty", "nested", "nested/empty", "a", "b"}
    assert directories == expected


def test_every_shown_file_can_be_read(mount: Mount, keys: Bucket) -> None:
    for key in set(SHOWN) - set(CONTROL):
        assert (mount.path / key).read_bytes() == keys.objects[key], key
        assert (mount.path / key).stat().st_size == 1000 + len(key)


@pytest.mark.parametrize("client", ["auto", "fsspec"])
def test_names_with_control_characters_can_be_read(mounted: Mounted, keys: Bucket, client: str) -> None:
    mount = mounted(keys, client=client)
    mount.allowed.append("that no path can name are hidden")
    for key in CONTROL:
        assert (mount.path / key).read_bytes() == keys.objects[key], key


def test_every_shown_file_can_be_opened_without_a_listing(mounted: Mounted, keys: Bucket) -> None:
    fresh = mounted(keys)
    fresh.allowed.append("that no path can name are hidden")
    for key in reversed([key for key in SHOWN if key not in CONTROL]):
        assert (fresh.path / key).read_bytes() == keys.objects[key], key


def test_no_path_leads_to_a_hidden_key(mount: Mount, keys: Bucket) -> None:
    for key in HIDDEN:
        path = os.path.join(mount.path, key.lstrip("/"))
        if key in ("both", "b/"):
            assert os.path.isdir(path)
            continue
        try:
            data = Path(path).read_bytes()
        except OSError:
            continue
        assert data != keys.objects[key], key
    assert not (mount.path / "escape").exists()
    assert os.path.samefile(mount.path / "..", mount.place)


def test_hidden_keys_are_counted_and_told(mount: Mount) -> None:
    os.listdir(mount.path)
    os.listdir(mount.path / "a")
    assert int(os.getxattr(mount.path, "user.cachefs.hidden")) >= 3
    assert int(os.getxattr(mount.path / "a", "user.cachefs.hidden")) >= 2
    assert mount.metrics()["hidden_names"] >= 5
    assert "that no path can name are hidden" in mount.log()


def test_markers_are_empty_directories(mount: Mount) -> None:
    assert os.listdir(mount.path / "empty") == []
    assert os.listdir(mount.path / "nested/empty") == []
    assert (mount.path / "empty").is_dir()


def test_unicode_is_neither_folded_nor_normalised(mount: Mount, keys: Bucket) -> None:
    assert (mount.path / "caf\u00e9").read_bytes() != (mount.path / "cafe\u0301").read_bytes()
    assert (mount.path / "UPPER").read_bytes() != (mount.path / "upper").read_bytes()
    assert not (mount.path / "Upper").exists()


def test_a_name_that_is_no_utf8_does_not_exist(mount: Mount) -> None:
    with pytest.raises(FileNotFoundError):
        os.stat(os.fsencode(mount.path) + b"/\xff\xfe")


def test_tools_walk_it_without_an_error(mount: Mount, tmp_path: Path) -> None:
    for command in (["ls", "-lRb", mount.path], ["find", mount.path], ["du", "-a", mount.path]):
        done = run(command, text=False)
        assert (done.returncode, done.stderr) == (0, b""), command
    names = [name for name in os.listdir(mount.path) if name not in CONTROL]
    (tmp_path / "copy").mkdir()
    succeed(["cp", "-r", *(mount.path / name for name in names), tmp_path / "copy"], text=False)
    files, directories = tree(mount.path)
    assert tree(tmp_path / "copy") == (files - set(CONTROL), directories)


def test_the_log_holds_one_line_a_record_whatever_keys_hold(mount: Mount) -> None:
    assert all(line[:2] == "20" for line in mount.log().splitlines())
    assert "\x1b" not in mount.log()


def test_a_bucket_of_nothing_but_hidden_keys_is_an_empty_directory(mounted: Mounted, bucket: Bucket) -> None:
    for key in ("../a", "/b", "//c", "x" * 256):
        bucket.put(key, 10)
    mount = mounted(bucket)
    mount.allowed.append("that no path can name are hidden")
    assert os.listdir(mount.path) == []
    assert not (mount.path / "a").exists()


def test_an_empty_bucket_is_an_empty_directory(mounted: Mounted, bucket: Bucket) -> None:
    mount = mounted(bucket)
    assert os.listdir(mount.path) == []


def test_hidden_keys_spread_over_many_pages_lose_nobody_else(mounted: Mounted, bucket: Bucket) -> None:
    """More than a page of hidden keys before, between and behind the shown ones."""
    bucket.put("d/a-shown", 10)
    bucket.store.synthesize(bucket.name, "d//", 1500, 1)
    bucket.store.synthesize(bucket.name, "d/" + "m" * 250, 1200, 1)
    bucket.put("d/z-shown", 10)
    mount = mounted(bucket)
    mount.allowed.append("that no path can name are hidden")
    assert sorted(os.listdir(mount.path / "d")) == ["a-shown", "z-shown"]
    for name in ("a-shown", "z-shown"):
        assert (mount.path / "d" / name).read_bytes() == bucket.objects[f"d/{name}"]
