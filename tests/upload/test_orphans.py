"""Staging files that no journal accounts for are kept aside, said, and copied to where they belong."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import trio
from click.testing import CliRunner

from cachefs.base.database import MARK
from cachefs.base.errors import CacheUnusable
from cachefs.cli.writing import recover
from cachefs.daemon.uploading import left_behind
from cachefs.upload import orphans, staging
from cachefs.upload.journal import DIRTY_FILES, Journal
from tests.upload.scripted import SOURCE, Desk, ScriptedStore, desk, in_trio
from tests.upload.test_passthrough import CacheFile

DATA = b"1" * 300_000


def lose_journal(path: Path) -> None:
    shutil.rmtree(path / "state" / "journal")


def aside(path: Path) -> list[Path]:
    return [file for place in sorted(path.glob("staging.orphaned-*")) for file in sorted(place.iterdir())]


async def written(d: Desk) -> None:
    await d.save("dir/kept ö", DATA)
    await d.create("open", b"2" * 300_000)


@in_trio
async def test_without_a_journal_all_files_are_kept_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk(tmp_path, writeback=True) as d:
        await written(d)
        before = {name: (d.staging / name).read_bytes() for name in await d.files()}
    lose_journal(tmp_path)
    for _ in range(2):
        async with desk(tmp_path, writeback=True) as d:
            assert d.uploads.pending() == [] and await d.files() == []
    assert {file.name: file.read_bytes() for file in aside(tmp_path)} == before
    assert "are kept in" in caplog.text
    said = orphans.warning(tmp_path)
    assert said.startswith("2 files") and f"cachefs recover {tmp_path}" in said
    found = {orphan.key: orphan for orphan in orphans.found(tmp_path, waiting=True)}
    assert found.keys() == {"dir/kept ö", ""}, "what was acknowledged has its name"
    assert found["dir/kept ö"].source == SOURCE and found["dir/kept ö"].size == len(DATA)


@in_trio
async def test_a_start_that_dies_before_it_looked_loses_nothing(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        await written(d)
    lose_journal(tmp_path)
    async with desk(tmp_path, recover=False):
        pass
    async with desk(tmp_path):
        pass
    assert len(aside(tmp_path)) == 2


@in_trio
async def test_a_mount_that_cannot_be_written_makes_no_journal(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True) as d:
        await written(d)
    (tmp_path / "staging").rename(tmp_path / "state" / "staging")
    lose_journal(tmp_path)
    assert not left_behind(tmp_path / "state").sizes
    assert not (tmp_path / "state" / "journal").exists()


@in_trio
async def test_another_journal_does_not_account_for_what_was_acknowledged(tmp_path: Path) -> None:
    """The journal was moved away, and later moved back, or restored."""
    async with desk(tmp_path, writeback=True):
        pass
    shutil.copytree(tmp_path / "state" / "journal", tmp_path / "old")
    async with desk(tmp_path, writeback=True) as d:
        await written(d)
    lose_journal(tmp_path)
    (tmp_path / "old").rename(tmp_path / "state" / "journal")
    async with desk(tmp_path, writeback=True) as d:
        assert await d.files() == []
    (file,) = aside(tmp_path)
    assert file.read_bytes() == DATA, "and what was never acknowledged is removed"


@in_trio
async def test_what_is_none_of_ours_is_not_removed(tmp_path: Path) -> None:
    async with desk(tmp_path) as d:
        (d.staging / "notes.txt").write_bytes(b"mine")
        (d.staging / "directory").mkdir()
        (file := d.staging / ("0" * 32)).write_bytes(b"never acknowledged")
        staging.mark_new(file)
    async with desk(tmp_path) as d:
        assert await d.files() == []
    assert [file.name for file in aside(tmp_path)] == ["directory", "notes.txt"]


@pytest.mark.parametrize("writeback", [False, True])
@in_trio
async def test_a_crash_leaves_nothing_aside(tmp_path: Path, writeback: bool) -> None:
    """At any step: a file that the origin has says no more that it was acknowledged."""
    store = ScriptedStore()
    async with desk(tmp_path, store, writeback=writeback) as d:
        d.cache.adopts = False
        await d.save("k", DATA)
        again = await d.save("l", DATA)
        await d.uploads.flush()
        await d.quiet()
        d.uploads.on_settling = lambda dirty_file: False
        last = await d.save("m", DATA)
        await d.uploads.flush()
        await d.quiet()
        assert last.file.path.exists() and orphans.never_acknowledged(last.file.path)
        assert not again.file.path.exists()
        await d.create("open", DATA)
    async with desk(tmp_path, store, writeback=writeback) as d:
        assert await d.files() == [] and d.uploads.pending() == []
    assert aside(tmp_path) == []


@in_trio
async def test_a_renamed_file_has_its_new_name(tmp_path: Path) -> None:
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        dirty_file = await d.save("old", DATA)
        await d.rename(dirty_file, "new")
        assert not await trio.to_thread.run_sync(orphans.never_acknowledged, dirty_file.file.path)
    lose_journal(tmp_path)
    async with desk(tmp_path):
        pass
    assert [orphan.key for orphan in orphans.found(tmp_path, waiting=False)] == ["new"]


@pytest.fixture
def no_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache disk takes no extended attributes."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    for name in ("setxattr", "getxattr", "removexattr"):
        monkeypatch.setattr(os, name, refuse)


@pytest.mark.parametrize("another", [False, True])
@in_trio
async def test_no_extended_attributes_cost_names_and_no_bytes(
    tmp_path: Path, no_attributes: None, caplog: pytest.LogCaptureFixture, another: bool
) -> None:
    """Without a journal, and with another one, which has no row of what was acknowledged."""
    async with desk(tmp_path, writeback=True) as d:
        await written(d)
        before = {name: (d.staging / name).read_bytes() for name in await d.files()}
    lose_journal(tmp_path)
    if another:
        Journal(tmp_path / "state" / "journal").close()
    async with desk(tmp_path) as d:
        assert await d.files() == []
    assert {file.name: file.read_bytes() for file in aside(tmp_path)} == before and len(before) == 2
    assert [r.levelname for r in caplog.records if "are kept in" in r.getMessage()] == ["WARNING"]
    assert orphans.warning(tmp_path).startswith("2 files")


@in_trio
async def test_a_replaced_file_goes_also_without_extended_attributes(
    tmp_path: Path, no_attributes: None
) -> None:
    """A file that another one was renamed over never comes back, and a row of the journal says so."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        replaced, new = await d.save("k", b"1" * 300_000), await d.save("l", DATA)
        await d.uploads.rename(new, "k", over=replaced)
        replaced.content.name_goes()  # the crash comes before its row is removed
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        assert [dirty_file.key for dirty_file in d.uploads.pending()] == ["k"]
        assert len(await d.files()) == 1
    assert aside(tmp_path) == []


@pytest.mark.parametrize("size", [100, 300_000])
@in_trio
async def test_of_two_files_with_one_key_the_older_one_is_kept_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    """As when the disk of the journal fails amid the row of a rename, which has its new key all the same."""
    async with desk(tmp_path, writeback=True, upload_delay_s=1000) as d:
        older, newer = await d.save("old", b"1" * size), await d.save("k", b"2" * size)
        newer.mtime_ns = older.mtime_ns + 1
        for one in (newer, older):
            one.key = "k"
            await d.uploads.keep(one)
        shutil.copytree(tmp_path / "state", tmp_path / "killed" / "state")
        shutil.copytree(tmp_path / "staging", tmp_path / "killed" / "staging")
    for _ in range(2):
        async with desk(tmp_path / "killed", writeback=True, upload_delay_s=1000) as d:
            assert [(one.id, one.key) for one in d.uploads.pending()] == [(newer.id, "k")]
            assert d.uploads.journal.rows(DIRTY_FILES).keys() == {newer.id}
        (found,) = orphans.found(tmp_path / "killed", waiting=False)
        assert (found.source, found.key, found.path.read_bytes()) == (SOURCE, "k", b"1" * size)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
        f"two files were to be uploaded as {SOURCE}/k: the older one is kept aside"
    ]


@in_trio
async def test_a_file_without_its_attributes_is_kept_aside(tmp_path: Path) -> None:
    """For example in a copy of the cache directory: that a mark is absent shows nothing."""
    async with desk(tmp_path, writeback=True) as d:
        await written(d)
        before = {name: (d.staging / name).read_bytes() for name in await d.files()}
        for name in before:
            for attribute in os.listxattr(d.staging / name):
                os.removexattr(d.staging / name, attribute)
    lose_journal(tmp_path)
    Journal(tmp_path / "state" / "journal").close()
    async with desk(tmp_path):
        pass
    assert {file.name: file.read_bytes() for file in aside(tmp_path)} == before


@pytest.mark.parametrize("attribute", ["", staging.ACKNOWLEDGED, orphans.OBJECT])
@in_trio
async def test_a_file_that_was_being_made_at_a_kill_goes(tmp_path: Path, attribute: str) -> None:
    """Its mark follows its name. One that has an attribute was written by a daemon that came further."""
    async with desk(tmp_path, writeback=True) as d:
        await d.save("k", DATA)
        path = d.staging / ("1" * 32)
        path.touch()
        if attribute:
            os.setxattr(path, attribute, b"1")
    async with desk(tmp_path):
        assert not path.exists()
    assert [file.name for file in aside(tmp_path)] == [path.name] * bool(attribute)


@in_trio
async def test_a_mark_that_cannot_be_renewed_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else an acknowledged file would go on saying that it was not."""
    setxattr = os.setxattr

    def refuse(path: Path, name: str, value: bytes, **how: bool) -> None:
        if value == b"1":
            raise OSError(errno.ENOSPC, "No space left on device")
        setxattr(path, name, value, **how)

    monkeypatch.setattr(os, "setxattr", refuse)
    async with desk(tmp_path, writeback=True) as d:
        await written(d)
    lose_journal(tmp_path)
    Journal(tmp_path / "state" / "journal").close()
    async with desk(tmp_path):
        pass
    assert [file.read_bytes() for file in aside(tmp_path)] == [DATA]


@in_trio
async def test_a_cached_file_that_is_opened_for_writing_leaves_nothing_aside(tmp_path: Path) -> None:
    """The origin has its content until it is written."""
    async with desk(tmp_path, writeback=True) as d:
        d.uploads.passthrough.enable(lambda backing: None, lambda backing: None)
        info = d.store.show("k", DATA)
        dirty_file = d.uploads.take(d.store, info, CacheFile(tmp_path / "cached", DATA), 1, {})
        assert dirty_file is not None
        d.uploads.open(dirty_file)
        assert len(await d.files()) == 1
    async with desk(tmp_path) as d:
        assert await d.files() == []
    assert aside(tmp_path) == []


def test_a_journal_that_cannot_be_read_names_the_verb(tmp_path: Path) -> None:
    Journal(tmp_path / "journal").close()
    (tmp_path / "journal" / "data.mdb").write_bytes(b"\xff" * 32768)
    with pytest.raises(CacheUnusable, match=f"cachefs recover {tmp_path} lists"):
        Journal(tmp_path / "journal")


# -- cachefs recover -----------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache directory with two versions of a file kept aside, one without a name, and one in the staging directory."""
    home = tmp_path / "cache"
    for number, (place, key) in enumerate(
        [
            ("staging.orphaned-20260101T000000Z", "d/f"),
            ("staging.orphaned-20260102T000000Z", "d/f"),
            ("staging.orphaned-20260102T000000Z", ""),
            ("staging", "g"),
        ]
    ):
        path = home / place / f"{number:032x}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
        os.utime(path, ns=(number * 10**9, number * 10**9))
        if key:
            orphans.describe(path, {"source": "s3://b", "key": key, "mtime_ns": number * 10**9})
    return home


def test_files_are_listed(cache: Path) -> None:
    done = CliRunner().invoke(recover, [str(cache)], catch_exceptions=False)
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert len(lines) == 4
    assert "s3://b/g" in lines[0] and "waits for the next mount" in lines[0]
    assert sum("s3://b/d/f" in line for line in lines) == 2


def test_files_are_copied_and_nothing_is_replaced(cache: Path, tmp_path: Path) -> None:
    to = tmp_path / "to"
    to.mkdir()
    done = CliRunner().invoke(recover, [str(cache), "--to", str(to), "--remove"])
    assert done.exit_code != 0 and "exists" in done.output
    assert (to / "s3/b/d/f").read_bytes() == b"1", "the latest one"
    assert (to / "s3/b/d/f").stat().st_mtime_ns == 10**9
    assert (to / "s3/b/g").read_bytes() == b"3"
    assert (to / "without-a-name" / f"{2:032x}").read_bytes() == b"2"
    left = sorted(path.name for path in cache.rglob("*") if path.is_file())
    assert left == [f"{0:032x}", f"{3:032x}"], "what was not copied, and what the next mount is to send"
    assert not (cache / "staging.orphaned-20260102T000000Z").exists()


def test_a_name_that_leads_elsewhere_is_refused(cache: Path, tmp_path: Path) -> None:
    path = cache / "staging" / f"{3:032x}"
    orphans.describe(path, {"source": "s3://b", "key": "../../evil", "mtime_ns": 1})
    (to := tmp_path / "to").mkdir()
    done = CliRunner().invoke(recover, [str(cache), "--to", str(to)])
    assert "leads elsewhere" in done.output and not (tmp_path / "evil").exists()


def test_files_of_a_running_daemon_are_left_to_it(cache: Path) -> None:
    journal = Journal(cache / "journal")
    try:
        done = CliRunner().invoke(recover, [str(cache)], catch_exceptions=False)
    finally:
        journal.close()
    assert len(done.output.splitlines()) == 3 and "s3://b/g" not in done.output


@pytest.fixture
def killed_cache(tmp_path: Path) -> Path:
    """A cache directory after a kill. The journal alone has "a/small", "a/empty" and a file that was replaced. "a/changed"
    has a staging file with later bytes, and the journal does not have "a/large"."""

    @in_trio
    async def write() -> None:
        async with desk(tmp_path / "run", writeback=True, upload_delay_s=1000) as d:
            await d.save("a/empty", b"")
            replaced = await d.save("a/small", b"replaced")
            await d.rename(await d.save("tmp", b"small"), "a/small", over=replaced)
            changed = await d.save("a/changed", b"old")
            d.uploads.open(changed)
            await changed.write(0, b"new")
            await d.save("a/large", DATA)
            await d.files()
            shutil.copytree(d.state / "journal", tmp_path / "cache" / "journal")
            shutil.copytree(d.staging, tmp_path / "cache" / "staging")
            d.uploads.release(changed)

    write()
    return tmp_path / "cache"


def contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize("rebooted", [False, True])
def test_files_that_the_journal_alone_has_are_listed_and_copied(
    killed_cache: Path, tmp_path: Path, rebooted: bool
) -> None:
    """After a reboot the journal counts, and not a staging file that may be cut short. Nothing is changed."""
    mark = killed_cache / "journal" / MARK
    if rebooted:
        mark.write_text(re.sub(r"\bopen \S+", "open another", mark.read_text()))
    before = contents(killed_cache)
    done = CliRunner().invoke(recover, [str(killed_cache)], catch_exceptions=False)
    assert len(done.output.splitlines()) == 4
    assert {line.split()[4] for line in done.output.splitlines() if "in the journal" in line} == {
        f"{SOURCE}/a/{name}" for name in ("small", "empty", *(["changed"] if rebooted else []))
    }
    said = json.loads(CliRunner().invoke(recover, [str(killed_cache), "--json"]).output)
    assert {Path(one["name"]).name: one["size"] for one in said} == {
        "small": 5,
        "empty": 0,
        "changed": 3,
        "large": len(DATA),
    }
    assert all(one["waiting"] for one in said)
    (to := tmp_path / "to").mkdir()
    done = CliRunner().invoke(
        recover, [str(killed_cache), "--to", str(to), "--remove"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert contents(to / SOURCE.replace("://", "/") / "a") == {
        "small": b"small",
        "empty": b"",
        "changed": b"old" if rebooted else b"new",
        "large": DATA,
    }
    assert contents(killed_cache) == before


@pytest.mark.parametrize("how", ["all", "rows"])
def test_a_journal_that_cannot_be_read_leaves_the_staging_files_in_the_list(
    killed_cache: Path, how: str
) -> None:
    data = killed_cache / "journal" / "data.mdb"
    whole = data.read_bytes()
    data.write_bytes(b"\xff" * len(whole) if how == "all" else whole.replace(b'"acknowledged"', bytes(14)))
    done = CliRunner().invoke(recover, [str(killed_cache)], catch_exceptions=False)
    lines = done.output.splitlines()
    assert done.exit_code == 0 and len(lines) == 3
    assert "cannot be read: small files that it alone has are not listed" in done.output
    assert sum("waits for the next mount" in line for line in lines) == 2


def test_what_is_no_cache_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(recover, [str(tmp_path)])
    assert done.exit_code != 0 and "neither a cache directory" in str(done.exception)
