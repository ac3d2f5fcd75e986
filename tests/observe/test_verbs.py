"""stats, top, stall, ledger, info, why, doctor, log-level, completion: what they make of what a daemon says."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from click.testing import CliRunner, Result
from trio.testing import MockClock

from cachefs.base.errors import ConfigError, IsADirectory, MountError, NotFound
from cachefs.base.linux import descendants
from cachefs.base.metrics import Metrics
from cachefs.base.names import ObjectId
from cachefs.cli import files as why
from cachefs.cli import live as look
from cachefs.cli import show
from cachefs.cli.live import Prices, process_waits
from cachefs.cli.main import cli
from cachefs.daemon import mounting
from cachefs.observe import doctor, explaining
from cachefs.observe.explaining import Explainer
from cachefs.observe.watch import shown
from tests.fetch.scripted import content, in_trio
from tests.observe.test_exposition import STATUS, member
from tests.store.lab import BLOCK, EXTENT, running


def run(*args: object) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli, [str(arg) for arg in args])


class Daemon:
    """Two looks at a mount, in turn, and what happened in between."""

    def __init__(self) -> None:
        self.now = 100.0
        self.started_again = 0
        self.metrics = Metrics()
        self.metrics.ledger.waits.clock = lambda: self.now
        self.metrics.ledger.waits.total.since = self.now
        self.metrics.ledger.waits._identify = lambda thread: _identity(thread)
        self.happens: list[Any] = []

    def answer(self) -> dict[str, Any]:
        if self.happens:
            self.happens.pop(0)()
        status = {**STATUS, "started": STATUS["started"] + self.started_again}
        return json.loads(json.dumps({**status, "metrics": self.metrics.as_dict(), **shown(self.metrics)}))

    def wait(self, thread: int, seconds: float, on: str = "origin", key: str = "train/1") -> None:
        wait = self.metrics.ledger.waits.begin(thread, ObjectId("s3://b", key, "e", 1 << 20), 0)
        wait.now_for(on)
        self.now += seconds
        wait.end(1000)


def _identity(thread: int) -> Any:
    from cachefs.base.ledger import Identity

    return Identity(thread, 5, 1, f"python{thread}")


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Daemon:
    from cachefs.daemon import asking

    found = Daemon()
    monkeypatch.setattr(asking, "ask", lambda mountpoint, verb, *_, **__: found.answer())
    monkeypatch.setattr(look.time, "sleep", lambda seconds: None)
    return found


def test_stats_is_what_grew(daemon: Daemon) -> None:
    metrics = daemon.metrics
    metrics.ram_hits = 1000  # before: not shown

    def second() -> None:
        metrics.ram_hits += 30
        metrics.misses += 10
        metrics.fuse_open += 4
        metrics.passthrough_opens += 3
        daemon.wait(7, 0.25)

    daemon.happens = [lambda: None, second, lambda: None]
    line = json.loads(run("stats", "-n", "1", "--json", "/").stdout)
    assert (line["ram_hits"], line["misses"], line["blocked_s"]) == (30, 10, 0.25)
    daemon.happens = [lambda: None, second, lambda: None]
    head, first, after = run("stats", "-n", "2", "/").stdout.splitlines()
    assert head.split()[:4] == ["HIT", "DAEMON", "READS", "OPENS"]
    assert first.split()[:2] == ["75", "%"] and " 75 %" in first[6:]
    assert after.split()[0] == "-"


@pytest.mark.parametrize("words", [["stats", "--json"], ["top", "--json"]], ids=" ".join)
def test_what_another_daemon_has_counted_is_not_compared(daemon: Daemon, words: list[str]) -> None:
    """One that was started again, or upgraded, counts from 0: all that grew would be negative."""
    daemon.metrics.fuse_read = 1000
    daemon.wait(7, 5)

    def die() -> None:
        fresh = Daemon()
        fresh.metrics.ledger.waits.clock = lambda: daemon.now
        fresh.metrics.ledger.waits.total.since = daemon.now
        daemon.metrics, daemon.started_again = fresh.metrics, 1
        daemon.wait(7, 1)

    daemon.happens = [lambda: None, die, lambda: daemon.wait(7, 0.5)]
    (line,) = run(*words, "-n", "1", "/").stdout.splitlines()
    assert json.loads(line)["blocked_s"] == 0.5


def test_top_names_who_waits(daemon: Daemon) -> None:
    daemon.wait(8, 5)  # before

    def work() -> None:
        daemon.wait(7, 1.5)
        account = daemon.metrics.ledger.account("", "train/1")
        account["origin_get"] += 40
        daemon.metrics.ledger.waits.begin(9, ObjectId("s3://b", "val/[bold]9", "e", 1 << 20), 0).now_for(
            "peer"
        )
        daemon.now += 0.5

    daemon.happens = [lambda: None, work]
    text = run("top", "-n", "1", "/").stdout
    assert re.search(r"python7\s+7\s", text) and re.search(
        r"python9\s+9\s.*peer: read val/\[bold\]9 \(0\.5 s\)", text
    )
    assert "python8" not in text
    assert re.search(r"^train ", text, re.MULTILINE)
    daemon.happens = [lambda: None, work]
    text = run("top", "-n", "1", "--by", "dataset", "/").stdout
    assert "train" in text and "python" not in text


def test_stall_says_what_share_of_the_time(daemon: Daemon) -> None:
    daemon.wait(7, 2)
    before = daemon.answer()
    daemon.wait(7, 3, "peer")
    daemon.wait(8, 1, "disk")
    daemon.now += 4
    found = process_waits(before, daemon.answer())
    assert (found["seconds"], found["blocked_s"], found["blocked_share"]) == (8, 4, 0.5)
    first, second = found["processes"]
    assert (first["pid"], first["blocked_share"], first["waited_s"]) == (
        7,
        0.375,
        {"origin": 0, "peer": 3, "disk": 0, "names": 0, "writes": 0},
    )
    assert (second["pid"], second["reads"], second["bytes"]) == (8, 1, 1000)
    since = process_waits(None, daemon.answer(), {7})
    assert [(row["pid"], row["blocked_s"], row["seconds"]) for row in since["processes"]] == [(7, 5, 10)]
    assert since["seconds"] == 10


def test_a_family_is_a_process_and_what_it_has_started() -> None:
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    ) as shell:
        assert shell.stdout is not None
        child = int(shell.stdout.readline())
        try:
            assert descendants(shell.pid) == {shell.pid, child}
            assert {os.getpid(), shell.pid, child} <= descendants(os.getpid())
        finally:
            os.kill(child, 15)


def test_the_ledger_adds_up_what_it_cost(daemon: Daemon, tmp_path: Path) -> None:
    metrics = daemon.metrics
    metrics.origin_get, metrics.origin_list, metrics.origin_bytes = 3000, 100, 5 * 10**9
    metrics.ledger.account("", "a/x").update({"origin_get": 2000, "origin_bytes": 5 * 10**9})
    metrics.ledger.account("", "b/x").update({"origin_get": 1000, "origin_list": 100})
    prices = tmp_path / "prices.toml"
    prices.write_text('currency = "EUR"\n[requests]\nget = 0.5\nlist = 10\n[bytes]\nin = 2\n')
    found = json.loads(run("ledger", "--json", "--prices", prices, "/").stdout)
    costs = {entry["name"]: entry["cost"] for entry in found["datasets"]}
    assert costs == {"a": pytest.approx(11.0), "b": pytest.approx(1.5)}
    assert found["total"]["cost"] == pytest.approx(sum(costs.values()))
    assert found["currency"] == "EUR"
    lines = run("ledger", "--prices", prices, "/").stdout.splitlines()
    assert lines[0].split() == ["DATASET", "GET", "LIST", "FROM", "ORIGIN", "TO", "ORIGIN", "EUR"]
    assert lines[1].split()[:3] == ["a", "2,000", "0"] and lines[-1].split()[-1] == "12.5000"
    assert "cost" not in json.loads(run("ledger", "--json", "/").stdout)["total"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("get = 1", "get: not in a price list"),
        ("[requests]\nfetch = 1", "fetch: not in a price list"),
        ("[bytes]\nin = 'much'", "in: a price is a number"),
        ("[bytes]\nin = nan", "in: a price is a number"),
        ("[bytes]\nin = -1", "in: a price is a number"),
        ("[requests]\nget = true", "get: a price is a number"),
        ("requests = 1", "requests and bytes are sections"),
        ("[bytes", "Expected"),
    ],
)
def test_what_is_no_price_list(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "p").write_text(text)
    with pytest.raises(ConfigError, match=words):
        Prices.read(tmp_path / "p")
    with pytest.raises(ConfigError, match="No such file"):
        Prices.read(tmp_path / "none")


# -- why -------------------------------------------------------------------------------------------


class OneFile:
    def __init__(self, version: ObjectId, can_write: bool = False) -> None:
        self.version = version
        self.origin = SimpleNamespace(can_write=can_write)

    async def resolve(self, path: str) -> Any:
        if path == "dir":
            raise IsADirectory("it is a directory")
        return (self.origin, self.version) if path == "file" else None


@in_trio
@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("can_write", [False, True])
async def test_why_says_what_the_kernel_reads_by_itself(
    writable: bool, can_write: bool, cache_dir: Path
) -> None:
    """Where a file can be written, its copy in memory cannot be its staging file, so it is not opened in passthrough."""
    async with running(cache_dir, ram=3 * EXTENT) as lab:
        version = lab.origin.put("data/file", content(1, BLOCK))
        file = OneFile(version, can_write=can_write)
        explainer = Explainer(file, lab.store, None, [], lab.metrics, writable=writable)
        await lab.read(version, 0, BLOCK)
        await lab.quiet()
        known = await explainer.explain("file")
        assert known["cached_bytes"] == known["size"] and known["extents"][0]["tiers"][0]["tier"] == "ram"
        assert known["passthrough_on"] == ("" if writable and can_write else "ram")


@in_trio
async def test_why_tells_where_extents_are_and_why_they_were_missed(cache_dir: Path) -> None:
    async with running(cache_dir, ssd=3 * EXTENT) as lab:
        version = lab.origin.put("data/file", content(1, 2 * EXTENT + 5))
        explainer = Explainer(OneFile(version), lab.store, None, [], lab.metrics)

        async def lines() -> list[str]:
            await lab.quiet()  # all of a small object comes at once
            known = json.loads(json.dumps(await explainer.explain("file")))
            assert len(known["extents"]) == 3 and known["blocks"] == 33
            return list(why.explain(known, known["extents"][0].get("at", 0)))

        text = "\n".join(await lines())
        assert re.search(r"extents 0-2 +not here$", text, re.MULTILINE)
        await lab.read(version, 0, EXTENT)
        text = "\n".join(await lines())
        assert re.search(r"extent 0 +ssd; missed .* ago: cold, asked origin", text)
        await lab.read(version, EXTENT)
        text = "\n".join(await lines())
        assert "whole and verified on ssd: the kernel reads it by itself" in text
        for number in range(3):
            await lab.read(lab.origin.put(f"data/filler{number}", content(number, EXTENT)))
        text = "\n".join(await lines())
        assert "not here" in text
        await lab.read(version, 0, BLOCK)
        text = "\n".join(await lines())
        assert re.search(r"extent 0 +ssd; missed .* ago: evicted, asked origin", text)
        assert "evicted: it was here and was evicted" in text
        with pytest.raises(NotFound):
            await explainer.explain("nothing")
        with pytest.raises(IsADirectory):
            await explainer.explain("dir")
        with pytest.raises(ConfigError, match="no such level"):
            await explainer.log_level("loud")


def test_ls_and_du_add_up_sizes_and_cached_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cachefs.daemon import asking

    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_bytes(b"x" * 40)
    (tmp_path / "b/c").write_bytes(b"x" * 20)
    (tmp_path / "gone").symlink_to("nowhere")  # as a file that is removed once its name was read
    monkeypatch.setattr(asking, "mount_of", lambda path: (tmp_path, ""))
    monkeypatch.setattr(os, "getxattr", lambda path, name: b"10")
    assert [line.split() for line in run("ls", tmp_path).stdout.splitlines()] == [
        ["10", "B", "40", "B", "25.0", "%", "a"],
        ["-", "-", "-", "b/"],
        ["0", "B", "0", "B", "100.0", "%", "gone"],
    ]
    files = [{"path": str(tmp_path / "a"), "size": 40, "cached": 10}]
    gone = {"path": str(tmp_path / "gone"), "size": 0, "cached": 0}
    assert json.loads(run("ls", "--json", tmp_path).stdout) == [*files, gone]
    assert json.loads(run("ls", "--json", tmp_path / "a").stdout) == files
    assert run("ls", tmp_path / "a").stdout.split()[-1] == str(tmp_path / "a")
    below = {"path": str(tmp_path / "b"), "files": 1, "size": 20, "cached": 10}
    total = {"path": str(tmp_path), "files": 3, "size": 60, "cached": 20}
    assert json.loads(run("du", "--json", tmp_path).stdout) == [below, total]
    assert json.loads(run("du", "--json", "-s", tmp_path).stdout) == [total]
    assert json.loads(run("du", "--json", "-d", "0", tmp_path / "a").stdout) == [{**files[0], "files": 1}]
    assert [line.split()[-1] for line in run("du", tmp_path).stdout.splitlines()] == [
        str(tmp_path / "b"),
        str(tmp_path),
    ]
    for missing in (["ls", tmp_path / "gone"], ["du", tmp_path / "none"]):
        done = run(*missing)
        assert done.exit_code == 1 and done.stderr == f"cachefs: {missing[1]}: No such file or directory\n"


def test_many_extents_are_cut() -> None:
    miss = {"at": 0.0, "reason": "changed", "asked": ["b:1: timeout", "origin"]}
    rows = [
        {"extent": n, "blocks": 16, "tiers": [], "on_its_way": n % 2, "owner": "b:1", "last_miss": miss}
        for n in range(200)
    ]
    known = {"key": "k", "cached_bytes": 0, "size": 1, "passthrough_on": "", "extents": rows, "left_out": 7}
    lines = list(why.explain(known, 120.0))
    assert len(lines) == 1 + why.EXTENTS_LISTED + 1 + 1
    assert lines[1].endswith(
        "not here; owned by b:1; missed 2 min ago: changed, asked b:1: timeout, then origin"
    )
    assert lines[-2] == f"… and {200 - why.EXTENTS_LISTED + 7:,} more: --json has them"


# -- doctor ----------------------------------------------------------------------------------------


def test_secrets_are_not_told() -> None:
    environ = {
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI",
        "AZURE_STORAGE_SAS_TOKEN": "sv=2024&sig=abcdefg",
        "AWS_PROFILE": "research",
        "CACHEFS_PEER_KEY_FILE": "/etc/cachefs/peers.key",
    }
    hide = doctor.hiding(environ)
    assert hide("403 for wJalrXUtnFEMI!") == "403 for …!"
    assert hide("sftp://me:pass@host/x: refused") == "sftp://…@host/x: refused"
    assert hide("s3://bucket@http://minio:9000/k") == "s3://bucket@http://minio:9000/k"
    assert hide("https://host/a?sig=1&b=2: gone") == "https://host/a?…: gone"
    assert hide("the token sv=2024&sig=abcdefg of research") == "the token … of research"
    assert hide("see /etc/cachefs/peers.key") == "see /etc/cachefs/peers.key"


def test_doctor_names_the_conditions_that_a_store_ignores(monkeypatch: pytest.MonkeyPatch) -> None:
    ignored = ["If-Match on CompleteMultipartUpload"]
    origins = {"s3://a": {"ignored_conditions": ignored}, "s3://b": {"ignored_conditions": []}}
    status = {"mountpoint": "/m", "sources": [{"url": url, "origin": o} for url, o in origins.items()]}
    monkeypatch.setattr(doctor.asking, "ask", lambda *_: [])
    [found] = doctor.origins(status)
    assert (found.level, found.subject) == ("note", "origin s3://a")
    assert found.found == "does not honour If-Match on CompleteMultipartUpload"
    assert "--on-conflict fail" in found.todo


@pytest.mark.parametrize(
    ("main", "whole", "waiting", "level", "said"),
    [
        (0.83, 0.95, 0, "note", "bound by its main thread: main thread 83% of a processor, all threads 95%"),
        (0.83, 0.95, 3, "note", "bound by its main thread"),
        (0.6, 1.04, 0, "note", "bound by its threads, of which one runs at a time"),
        (0.3, 0.5, 3, "note", "bound by s3://bucket: 64 requests under way"),
        (0.3, 0.5, 0, "ok", "not bound by its daemon"),
        (0.03, 0.06, 0, "ok", "not bound by its daemon"),
        (0.03, 0.04, 0, "ok", "has nothing to do"),
        (0.01, 0.02, 0, "ok", "has nothing to do"),
    ],
)
def test_doctor_says_what_a_mount_is_bound_by(
    main: float, whole: float, waiting: int, level: str, said: str
) -> None:
    origin = {"demand_waiting": waiting, "in_flight": 64}
    status = {"mountpoint": "/mnt", "sources": [{"url": "s3://bucket", "origin": origin}]}
    found = doctor.bound(status, doctor.Load(main, whole))
    assert (found.level, found.subject) == (level, "mount /mnt")
    assert said in found.found
    assert bool(found.todo) == (level == "note")


def test_doctor_measures_the_threads_of_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = {1: iter([(1.0, 2.0), (1.5, 3.0)]), 2: iter([(1.0, 2.0), None])}  # the second has ended meanwhile
    slept: list[float] = []
    monkeypatch.setattr(doctor.time, "sleep", slept.append)
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "_processor_s", lambda pid: next(looks[pid]) if pid else None)
        assert doctor.watch([1, 2, 0]) == {1: doctor.Load(0.5, 1.0)}
        assert slept == [doctor.LOOKED_S]
        assert doctor.watch([0]) == {}
        assert slept == [doctor.LOOKED_S], "there is nothing to wait for"
    known = os.times()
    found = doctor._processor_s(os.getpid())
    assert found is not None and 0 < found[0] <= found[1]
    assert abs(found[1] - known.user - known.system) < 0.1
    assert doctor._processor_s(1 << 30) is None


def test_nothing_that_doctor_says_has_a_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = "wJalrXUtnFEMI"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    status = {**STATUS, "fuse_reason": "", "warnings": [f"bad {secret}"], "metrics": {}}
    status["sources"] = [{"url": f"sftp://u:{secret}@h/", "origin": {}}]
    monkeypatch.setattr(doctor, "_statuses", lambda mountpoint: ([status], []))

    def refuse(*_: Any, **__: Any) -> None:
        raise MountError(f"no answer, {secret}")

    monkeypatch.setattr(doctor.asking, "ask", refuse)
    done = run("doctor", "--no-speed")
    assert done.exit_code == 1
    assert secret not in done.output
    assert "bad …" in done.output and "origin sftp://…@h/: no answer, …" in done.output
    [origin] = [
        f for f in json.loads(run("doctor", "--no-speed", "--json").output) if "origin" in f["subject"]
    ]
    assert origin["level"] == "problem" and "credentials" in origin["todo"]


def test_kernels_and_limits() -> None:
    assert doctor.kernel("6.18.4-aws", 0).level == "ok"
    assert "6.9" in doctor.kernel("5.15.0", 0).todo
    assert "root" in doctor.kernel("6.9.0", 1000).todo
    assert [finding.level for finding in doctor.limits(1024, 1 << 34)] == ["problem", "ok"]
    assert [finding.level for finding in doctor.limits(-1, 1 << 29)] == ["ok", "note"]
    assert [next(doctor.limits(files, 1 << 34)).level for files in (4095, 4096)] == ["problem", "ok"]


def test_an_origin_that_hangs_is_probed_until_a_deadline() -> None:
    origin = SimpleNamespace(source="s3://a", check=trio.sleep_forever)
    explainer = Explainer(*[cast(Any, None)] * 3, cast(Any, [origin]), Metrics())

    async def main() -> Any:
        with trio.fail_after(3600):
            return await explainer.probe()

    found = trio.run(main, clock=MockClock(autojump_threshold=0))
    assert found == [{"source": "s3://a", "error": "no answer within 15 s"}]


def test_the_request_that_opens_a_connection_is_not_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one more is enough."""
    times, now = [1.0, 0.25], [0.0]
    monkeypatch.setattr(explaining, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    async def check() -> None:
        now[0] += times.pop(0)

    origin = SimpleNamespace(source="s3://a", check=check)
    explainer = Explainer(*[cast(Any, None)] * 3, cast(Any, [origin]), Metrics())
    assert trio.run(explainer.probe) == [{"source": "s3://a", "seconds": 0.25}] and not times


@pytest.mark.parametrize(("seconds", "level"), [(0.08, "ok"), (0.15, "note")])
def test_an_origin_in_another_region_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, seconds: float, level: str
) -> None:
    monkeypatch.setattr(doctor.asking, "ask", lambda *_: [{"source": "s3://a", "seconds": seconds}])
    [found] = doctor.origins({"mountpoint": "/m", "sources": []})
    assert found.level == level and f"{1000 * seconds:.0f}" in found.found


@pytest.mark.parametrize(("mib_a_second", "level"), [(150, "note"), (250, "ok")])
def test_a_slow_disk_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mib_a_second: int, level: str
) -> None:
    times = iter((0.0, 64 / 1000, 1.0, 1.0 + 64 / mib_a_second))  # written fast; read
    monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    found = doctor.speed("the disk", tmp_path)
    assert found.level == level and f"{mib_a_second} MiB/s read" in found.found


def test_what_a_mount_says_is_wrong() -> None:
    tiers = [{"name": "ssd", "state": "read-only: I/O error"}]
    metrics = {"checksum_failures": 3, "origin_get": 1000, "origin_throttled": 50}
    status = {
        **{
            "mountpoint": "/mnt",
            "version": "1",
            "fuse": "pyfuse3",
            "fuse_reason": "not root",
            "tiers": tiers,
        },
        **{"metrics": metrics, "uploads": {"failed": 2, "last_error": "AccessDenied"}, "warnings": []},
    }
    said = {finding.found: finding.level for finding in doctor.mount(status)}
    assert said["read-only: I/O error"] == said["3 cached blocks were damaged"] == "problem"
    assert said["2 uploads failed: AccessDenied"] == "problem"
    assert said["pyfuse3 backend: not root"] == "note"


def test_each_warning_of_a_mount_is_followed_by_what_to_do() -> None:
    lines = [
        "s3://b has not answered for 10 s",  # the store is asked, and says it itself
        "metrics are shown at 0.0.0.0:1 to whoever reaches it: there is no password",
        "no ssd tier: it is full",
    ]
    found = list(doctor.warnings("mount /mnt", lines))
    assert [finding.level for finding in found] == ["note", "problem"]
    assert "--metrics" in found[0].todo and "dmesg" in found[1].todo


def test_a_dead_mount_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def died(*_: Any) -> None:
        raise MountError("the daemon of /mnt has died: cachefs umount /mnt, then mount it again")

    monkeypatch.setattr(doctor.asking, "ask", died)
    [finding] = doctor._statuses(tmp_path)[1]
    assert (finding.level, finding.found) == ("problem", "the daemon of /mnt has died")
    assert finding.todo.startswith("cachefs umount")


def test_what_peers_say_is_wrong() -> None:
    def level(*members: dict[str, Any], listen: str = "a:1", **more: Any) -> list[tuple[str, str]]:
        status = {"mountpoint": "/mnt", "peers": {"members": members, "listen": listen, "group": "g", **more}}
        return [(finding.level, finding.found) for finding in doctor.peers(status)]

    here, there = member("a:1", True), member("b:1")
    assert level(here, there) == [("ok", "1 others answer")]
    assert level(here, {**there, "state": "dead"}) == [("problem", "b:1 do not answer")]
    assert level(here)[0][0] == "note"
    assert level(there)[0][0] == "problem" and level(there, listen="")[0][0] == "ok"
    unknown = {"name": "c:1", "state": "unknown", "why": "has not answered yet", "wrong": False}
    other = {"name": "d:1", "state": "other sources", "why": "shows s3://b", "wrong": True}
    assert level(here, there, incompatible=[unknown]) == [("problem", "c:1 do not answer")]
    assert level(here, there, incompatible=[other])[0] == ("problem", "d:1 shows s3://b")
    assert level(here, there, incompatible=[{**other, "wrong": False}]) == [("ok", "1 others answer")]
    assert level(trouble="etcd does not answer")[0] == ("problem", "etcd does not answer")


def test_the_disk_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    found = list(doctor.cache_disk(tmp_path / "not" / "there" / "yet", measure=True))
    assert {finding.subject for finding in found} == {f"cache disk {tmp_path}"}
    assert "/s written" in found[-1].found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "todo"),
    [(errno.ENOSPC, "look at the disk"), (errno.EROFS, "look at the disk"), (errno.EACCES, "its owner")],
)
def test_a_disk_that_cannot_be_measured_is_followed_by_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int, todo: str
) -> None:
    def fails(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", fails)
    found = doctor.speed("cache disk", tmp_path)
    assert found.level == "note" and os.strerror(number) in found.found and todo in found.todo


def test_a_directory_that_cannot_be_examined_is_no_internal_error(tmp_path: Path) -> None:
    """stat(2) fails, as without permission for a directory above."""
    unseen = tmp_path / ("x" * 300) / "cache"
    assert mounting.existing_above(unseen) == tmp_path
    (tmp_path / "file").touch()
    [a_file] = doctor.cache_disk(tmp_path / "file", measure=True)
    assert (a_file.level, a_file.found) == ("problem", "is a file")
    [found] = doctor.cache_disk(unseen, measure=False)
    assert found.subject == f"cache disk {tmp_path}"
    for verb, code, words in (
        ("recover", 2, "cannot be read: File name too long"),
        ("logs", 1, "is not a cachefs mount"),
    ):
        done = run(verb, unseen)
        assert (done.exit_code, done.stderr.count("\n")) == (code, 1)
        assert words in done.stderr


# -- the rest --------------------------------------------------------------------------------------


def completions(line: str) -> list[str]:
    """What bash proposes for the last word of a line."""
    words = line.split(" ")
    asked = {"_CACHEFS_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-m", "cachefs"]
    done = subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_completion() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert "_CACHEFS_COMPLETE" in run("completion", shell).output
    levels = ["plain,debug", "plain,info", "plain,warning", "plain,error"]
    assert completions("cachefs log-level ") == levels
    assert completions("cachefs st") == ["plain,stats", "plain,status"]


@pytest.mark.parametrize(
    "words", ["mount s3://b", "mount --config", "mount --cache-dir", "warm -T", "record -o", "config check"]
)
def test_paths_are_completed(words: str) -> None:
    assert completions(f"cachefs {words} /m") == ["file,/m"]


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["stats", "/no/such/place"], 1, "is not a cachefs mount"),
        (["stats", "-i", "soon", "/"], 2, "--interval: 'soon'"),
        (["stats", "-i", "0", "/"], 2, "not between"),
        (["top", "/"], 1, "is not a cachefs mount"),
        (["top", "--json", "-i", "x", "/"], 2, "--interval: 'x'"),
        (["top", "--total", "/"], 2, "--total needs --json"),
        (["ledger", "/"], 1, "is not a cachefs mount"),
        (["why", "/"], 1, "is not below a cachefs mount"),
        (["info", "/"], 1, "is not below a cachefs mount"),
        (["log-level", "loud", "/"], 2, "'loud' is not one of"),
        (["log-level", "debug", "/"], 1, "is not a cachefs mount"),
        (["completion", "tcsh"], 2, "'tcsh' is not one of"),
    ],
)
def test_errors_are_one_line(args: list[str], code: int, words: str) -> None:
    done = run(*args)
    assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert words in done.stderr and done.stderr.startswith("cachefs: ")


def test_values_line_up_beside_labels_of_any_length(capsys: pytest.CaptureFixture[str]) -> None:
    show.pairs([("path", "value"), ("on node-7.example:7400", "value")])
    assert {line.index("value") for line in capsys.readouterr().out.splitlines()} == {24}
