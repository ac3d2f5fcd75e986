"""The composition root, without a mount."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from cachefs.base import logs
from cachefs.base.errors import MountError
from cachefs.base.metrics import Metrics
from cachefs.base.tasks import RETRY_S
from cachefs.base.units import Size
from cachefs.config.config import Config, Source
from cachefs.daemon import cachedir
from cachefs.daemon.daemon import Daemon, End, retried, ttls_of
from cachefs.daemon.stopping import Stopping
from tests import threads

SLACK_S = 30.0


def config(place: Path, **options: Any) -> Config:
    return Config(
        sources=(Source("", "s3://a"),),
        mountpoint=place,
        cache_dir=place / "cache",
        ram=Size(bytes=0),
        **options,
    )


def daemon(place: Path, reread: Callable[[], Config]) -> Daemon:
    """A daemon that has not started yet."""
    opened = cast("Any", SimpleNamespace(store=SimpleNamespace(pins=SimpleNamespace()), state_dir=place))
    return Daemon(config(place), opened, cast("Any", None), Metrics(), lambda: None, Stopping(), reread)


def mounted(place: Path, reread: Callable[[], Config]) -> Daemon:
    """A daemon that a reload does not wait for."""
    made = daemon(place, reread)
    made._mounted.set()
    return made


def test_housekeeping_that_fails_is_logged_and_run_again_later(caplog: pytest.LogCaptureFixture) -> None:
    began: list[float] = []

    async def work() -> None:
        began.append(trio.current_time())
        if len(began) < 3:
            raise ValueError("a bug")

    trio.run(retried, work, "sweeping", clock=MockClock(autojump_threshold=0))
    assert [moment - began[0] for moment in began] == [0, RETRY_S, 2 * RETRY_S]
    assert caplog.text.count(f"sweeping failed; trying again in {RETRY_S} s") == 2


@pytest.mark.parametrize("fails_for_s, most", [(600.0, 2 * 10 + 1), (1.0, 2)])
def test_a_failure_costs_two_log_entries_a_minute_and_is_over_within_half_a_minute(
    fails_for_s: float, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> float:
        began = trio.current_time()

        async def work() -> None:
            if trio.current_time() - began < fails_for_s:
                raise ValueError("the disk is full")

        await retried(work, "sweeping")
        return trio.current_time() - began

    took_s = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert took_s <= fails_for_s + 30
    assert len(caplog.records) <= most


@pytest.mark.parametrize(
    ("cache_size", "free", "lines"),
    [
        ("80%", 1 << 20, ["no ssd tier: --cache-size 80% is 819 KiB here, less than one block"]),
        ("80%", 2 << 20, []),
        ("1B", 2 << 20, ["no ssd tier: --cache-size 1B is 1 B here, less than one block"]),
        ("0", 2 << 20, []),
    ],
)
def test_a_tier_that_is_left_out_for_its_size_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_size: str, free: int, lines: list[str]
) -> None:
    """A share of a full disk is nothing. A size of 0 is a wish, and no reason for a warning."""
    monkeypatch.setattr(cachedir, "_disk_of", lambda _: (free, free))
    monkeypatch.setattr(cachedir, "open_store", lambda *_, **__: SimpleNamespace(warnings=[]))
    found = cachedir.open_cache(config(tmp_path, cache_size=Size.parse(cache_size)), Metrics())
    assert found.warnings == lines


@pytest.mark.parametrize(
    ("ram", "lines"),
    [
        ("3G", ["--ram 3G is more than the 2.0 GiB of memory that this process may use: lower it"]),
        ("2G", []),
        ("100%", []),
    ],
)
def test_more_ram_than_there_is_has_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ram: str, lines: list[str]
) -> None:
    monkeypatch.setattr(cachedir, "memory_limit", lambda: 2 << 30)
    monkeypatch.setattr(cachedir, "open_store", lambda *_, **__: SimpleNamespace(warnings=[]))
    assert cachedir.open_cache(replace(config(tmp_path), ram=Size.parse(ram)), Metrics()).warnings == lines


def test_a_cache_directory_below_what_fails_costs_the_ssd_tier_alone(tmp_path: Path) -> None:
    """Each access fails, as on a disk with errors or below a dead mount."""
    unseen = tmp_path / ("x" * 300)
    opened = cachedir.open_cache(config(unseen, cache_size=Size(bytes=1 << 30)), Metrics())
    try:
        assert opened.state_dir in opened.temporary
        assert [line.partition(":")[0] for line in opened.warnings][1] == "no ssd tier"
    finally:
        opened.close()
    assert not opened.state_dir.exists()


def test_the_status_needs_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container at its limit of processes."""
    orphaned = tmp_path / "staging.orphaned-1"
    orphaned.mkdir()
    (orphaned / "1").touch()
    asked = daemon(tmp_path, lambda: config(tmp_path))

    async def main() -> tuple[str, str]:
        found = await asked._orphans()
        threads.none_starts(monkeypatch)
        return found, await asked._orphans()

    found, then = trio.run(main)
    assert then == found and found.startswith("1 file that no journal")
    assert not asked._orphan_lookup.borrowed_tokens


def test_a_configuration_on_a_disk_that_hangs_holds_up_no_stop(tmp_path: Path) -> None:
    reading, may = threading.Event(), threading.Event()

    def reread() -> Config:
        reading.set()
        may.wait(SLACK_S)
        return config(tmp_path)

    async def main() -> None:
        stopped = trio.Event()
        send, signals = trio.open_memory_channel[int](2)
        with trio.fail_after(SLACK_S / 2):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(mounted(tmp_path, reread)._stop_on_signal, signals, stopped.set)
                send.send_nowait(signal.SIGHUP)
                await trio.to_thread.run_sync(reading.wait, SLACK_S)
                send.send_nowait(signal.SIGTERM)
                await stopped.wait()
                nursery.cancel_scope.cancel()
        may.set()

    trio.run(main)


def test_an_upgrade_does_not_wait_for_such_a_disk_after_its_deadline(tmp_path: Path) -> None:
    reading, may, read = threading.Event(), threading.Event(), threading.Event()

    def reread() -> Config:
        reading.set()
        may.wait(SLACK_S)
        read.set()
        return config(tmp_path)

    async def main() -> None:
        upgraded = daemon(tmp_path, reread)
        upgraded._handover = cast("Any", SimpleNamespace(outlives_daemon=True))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(upgraded._upgrade)
            await trio.to_thread.run_sync(reading.wait, SLACK_S)
            nursery.cancel_scope.cancel()
        assert not read.is_set()
        may.set()

    trio.run(main)


def test_a_configuration_that_fails_unexpectedly_ends_no_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def reread() -> Config:
        raise RecursionError

    async def main() -> None:
        stopped = trio.Event()
        send, signals = trio.open_memory_channel[int](2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mounted(tmp_path, reread)._stop_on_signal, signals, stopped.set)
            send.send_nowait(signal.SIGHUP)
            while not caplog.records:
                await trio.testing.wait_all_tasks_blocked(0.01)
            send.send_nowait(signal.SIGTERM)
            with trio.fail_after(SLACK_S):
                await stopped.wait()
            nursery.cancel_scope.cancel()

    trio.run(main)
    assert "SIGHUP failed unexpectedly" in caplog.text


def test_an_upgrade_does_not_go_on_when_the_daemon_is_ending(tmp_path: Path) -> None:
    """The mount may be gone already: the files that were written would not be uploaded."""
    upgraded = daemon(tmp_path, lambda: config(tmp_path))

    async def renewed(within_s: float) -> str:
        upgraded._end = End.STOPPED  # a signal, or an umount
        return "1.0"

    upgraded._handover = cast("Any", SimpleNamespace(outlives_daemon=True, renewed=renewed))
    with pytest.raises(MountError, match="ending already"):
        trio.run(upgraded._upgrade)
    assert upgraded._end is End.STOPPED


def test_a_mount_is_ready_although_no_thread_can_be_started_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cachefs.daemon.daemon.tune", lambda *_: ["tuned"])
    ready = daemon(tmp_path, lambda: config(tmp_path))
    ready._config = config(tmp_path, descriptor=3)
    ready._backend = cast("Any", SimpleNamespace(backend=SimpleNamespace(max_background=0)))

    async def main() -> list[bool]:
        refused = threads.first_fails(monkeypatch)
        await ready._ready()
        return refused

    assert trio.run(main) == [True]
    assert ready._tuning == ["tuned"] and ready._mounted.is_set()


def test_the_last_of_several_reloads_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if an earlier one is slow."""
    monkeypatch.setattr(logs, "set_level", lambda level: None)
    may, read = threading.Event(), iter([True, False])

    def reread() -> Config:
        first = next(read)
        assert not first or may.wait(SLACK_S)
        return config(tmp_path, metadata_ttl=1.0 if first else 2.0)

    async def main() -> float:
        reloaded = mounted(tmp_path, reread)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(reloaded._reload, reread)
                await trio.testing.wait_all_tasks_blocked(0.01)
            may.set()
        return reloaded._config.metadata_ttl

    assert trio.run(main) == 2.0


def test_a_reload_during_the_start_is_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the mount is there: what the start makes later would have the values from before."""
    monkeypatch.setattr(logs, "set_level", lambda level: None)

    def reread() -> Config:
        return config(tmp_path, metadata_ttl=1.0)

    async def main() -> None:
        starting = daemon(tmp_path, reread)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(starting._reload, reread)
            await trio.testing.wait_all_tasks_blocked(0.01)
            made = ttls_of(starting._config, starting._config.sources[0])
            starting._ttls = [made]
            starting._mounted.set()
        assert made.ttl == 1.0

    trio.run(main)
