"""Directories and files that are ours: who may read them, and whose are refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from cachefs.base import durable, logs, ownership
from cachefs.base.metrics import Metrics
from cachefs.base.ownership import ForeignDirectory, claim
from cachefs.config.config import Config, Source
from cachefs.daemon import background, cachedir

UNSEEN = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True)
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def config(place: Path) -> Config:
    (place / "mnt").mkdir(exist_ok=True)
    return Config(sources=(Source("", "s3://bucket"),), mountpoint=place / "mnt", cache_dir=place / "cache")


def test_what_is_made_is_ours_alone(tmp_path: Path) -> None:
    claim(tmp_path / "made/below")
    assert mode(tmp_path / "made") == mode(tmp_path / "made/below") == 0o700
    durable.write(tmp_path / "file", b"x")
    assert mode(tmp_path / "file") == 0o600 and ownership.read(tmp_path / "file") == b"x"


def test_what_was_there_is_narrowed(tmp_path: Path) -> None:
    for name in ("objects", "staging"):
        (tmp_path / name).mkdir()
    for name in ("held", "cachefs.log.1"):
        (tmp_path / name).touch()
    tmp_path.chmod(0o755)
    claim(tmp_path)
    assert {mode(path) for path in (tmp_path, tmp_path / "objects", tmp_path / "staging")} == {0o700}
    assert mode(tmp_path / "held") == mode(tmp_path / "cachefs.log.1") == 0o600


def test_a_directory_that_holds_other_things_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "dataset").mkdir(0o755)
    (tmp_path / "objects").mkdir(0o755)
    (tmp_path / "names of all").mkdir(0o755)
    claim(tmp_path)
    assert mode(tmp_path) == mode(tmp_path / "dataset") == mode(tmp_path / "names of all") == 0o755
    assert mode(tmp_path / "objects") == 0o700


@pytest.mark.parametrize("call", ["listdir", "stat"])
def test_an_entry_that_is_removed_during_the_look_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A daemon that starts deletes what an earlier one left, in the background."""
    trash, look = tmp_path / "trash-1", getattr(os, call)
    trash.mkdir(0o755)
    (tmp_path / "tag").touch(0o644)

    def then_removed(path: object, **options: object) -> object:
        found = look(path, **options)
        if call == "listdir" or path == trash.name:
            trash.rmdir()
        return found

    monkeypatch.setattr(os, call, then_removed)
    claim(tmp_path)
    monkeypatch.undo()
    assert not trash.exists() and mode(tmp_path / "tag") == 0o600


def test_a_place_for_everybody_is_refused(tmp_path: Path) -> None:
    (tmp_path / "of another").touch()
    tmp_path.chmod(0o1777)
    with pytest.raises(ForeignDirectory, match="choose a directory below it"):
        claim(tmp_path)
    assert mode(tmp_path) == 0o1777


@pytest.mark.parametrize("name", ["cachefs.log", "held", "objects"])
def test_a_link_that_was_planted_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    (tmp_path / "cache" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ForeignDirectory, match="remove it"):
        claim(tmp_path / "cache")
    with pytest.raises(ForeignDirectory):
        background.open_log(config(tmp_path))
    assert not (tmp_path / "elsewhere").exists()


def test_no_file_of_ours_is_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "link").symlink_to(victim)
    for use in (
        lambda: ownership.read(tmp_path / "link"),
        lambda: logs.open_file(tmp_path / "link", ours=True),
    ):
        with pytest.raises(OSError):
            use()
    durable.write(tmp_path / "link", b"x")  # takes the link's place
    assert not (tmp_path / "link").is_symlink() and (tmp_path / "link").read_bytes() == b"x"
    assert victim.read_text() == "mine"


@AS_ROOT
@pytest.mark.parametrize("link", [False, True])
def test_the_directory_of_another_user_is_refused(tmp_path: Path, link: bool) -> None:
    cache, target = tmp_path / "cache", tmp_path / "elsewhere"
    cache.mkdir()
    (cache / "cachefs.log").symlink_to(target)
    (cache / "held").symlink_to(target)
    os.chown(cache, UNSEEN, UNSEEN)
    if link:  # root's own link does not make it root's directory
        cache.rename(tmp_path / "behind")
        cache.symlink_to(tmp_path / "behind")
    with pytest.raises(ForeignDirectory, match="belongs to user nobody, and this is user root"):
        background.open_log(config(tmp_path))
    with pytest.raises(ForeignDirectory):
        cachedir.open_cache(config(tmp_path), Metrics())
    assert not target.exists() and len(os.listdir(cache)) == 2


@AS_ROOT
def test_the_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "mine")
    claim(tmp_path / "cache")
    os.lchown(tmp_path / "cache", UNSEEN, UNSEEN)
    with pytest.raises(ForeignDirectory, match="is a link of user nobody"):
        claim(tmp_path / "cache")


@AS_ROOT
@pytest.mark.parametrize("kind", ["file", "directory", "link"])
@pytest.mark.parametrize("name", ["cachefs.log", "held", "objects", "index"])
def test_what_another_user_left_before_others_were_kept_out_is_refused(
    tmp_path: Path, kind: str, name: str
) -> None:
    cache, target = tmp_path / "cache", tmp_path / "elsewhere"
    claim(cache)
    planted = cache / name
    if kind == "link":
        planted.symlink_to(target)
    else:
        planted.touch() if kind == "file" else planted.mkdir()
    os.lchown(planted, UNSEEN, UNSEEN)
    with pytest.raises(
        ForeignDirectory, match=f"{planted} belongs to user nobody.*chown or remove it"
    ) as caught:
        claim(cache)
    assert "\n" not in str(caught.value)
    with pytest.raises(ForeignDirectory):
        background.open_log(config(tmp_path))
    with pytest.raises(ForeignDirectory):
        cachedir.open_cache(config(tmp_path), Metrics())
    assert os.listdir(cache) == [name] and not target.exists()
    planted.unlink() if kind != "directory" else planted.rmdir()
    claim(cache)


@AS_ROOT
def test_what_is_no_third_users_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system has root's lost+found, and root may have put a link for this user; other things are not looked at."""
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "objects").symlink_to("/elsewhere")
    (tmp_path / "dataset").mkdir()
    os.chown(tmp_path / "dataset", 1, 1)
    os.chown(tmp_path, UNSEEN, UNSEEN)
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: UNSEEN)
    claim(tmp_path)
    assert (tmp_path / "objects").is_symlink()


def test_the_last_line_of_a_log_is_not_read_from_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert background._last_line(tmp_path / "pipe", 0) == ""


def test_the_log_is_for_its_owner(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache/cachefs.log").touch()
    path, fd = background.open_log(config(tmp_path))
    os.close(fd)
    assert path == tmp_path / "cache/cachefs.log" and mode(path) == 0o600
    path.unlink()
    handler = logs._Rotating(path)
    handler.doRollover()
    handler.close()
    assert mode(path) == mode(tmp_path / "cache/cachefs.log.1") == 0o600
