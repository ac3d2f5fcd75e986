"""The command as people and scripts meet it: help, errors, and mounts that come and go."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cachefs import __version__
from cachefs.base import logs
from cachefs.base.client import ControlError, control_path
from cachefs.base.errors import CachefsError, ConfigError, MountError, NoRoom
from cachefs.base.linux import mount_at, parse
from cachefs.cli import status as statusview
from cachefs.cli.main import VERBS, cli
from cachefs.cli.places import paths_by_mount
from cachefs.cli.show import say
from cachefs.config.config import LOG_NAME, ROWS, Config, Source
from cachefs.daemon import asking, background, mounting

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("CACHEFS_")}
ENVIRON["CACHEFS_RESTART"] = "no"  # daemons are killed here


def run(*args: object) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(cli, [str(arg) for arg in args])


def cachefs(*args: object, timeout: float = 60, **environ: str) -> subprocess.CompletedProcess[str]:
    """A real process, as a shell would start it."""
    return subprocess.run(
        [sys.executable, "-m", "cachefs", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=ENVIRON | environ,
    )


def one_line(text: str) -> str:
    assert text.startswith("cachefs: "), text
    assert text.count("\n") == 1, text
    return text


# --- what is said --------------------------------------------------------------------------------


def test_help_teaches() -> None:
    overview = run("--help").output
    cached = ("warm", "evict", "pin", "unpin", "ls", "du", "hint", "record", "flush")
    for verb in ("mount", "umount", "status", "refresh", "version", *cached):
        assert re.search(rf"^  {verb} ", overview, re.MULTILINE)
    text = run("mount", "--help").output
    for name in ROWS:
        assert f"--{name.replace('_', '-')}" in text
    for heading in ("Cache:", "Writing:", "Freshness:", "Source:", "Permissions:", "Transfer:", "Running:"):
        assert f"\n{heading}\n" in text
    assert "cachefs mount --anonymous s3://bucket /mnt/data" in text
    assert "--no-sign-request" in text


def test_version() -> None:
    assert run("version").output == f"cachefs {__version__}\n"
    assert run("--version").output == f"cachefs {__version__}\n"


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["mount", "s3://b", "/mnt", "--cache-siz", "1G"], 2, "--cache-size"),
        (["mount", "s3://b", "/mnt", "--cache-size", "12X"], 2, "--cache-size: '12X' is not a size"),
        (["mount", "s3://b", "/mnt", "-o", "zero_open,consistency=immutable,rw"], 2, "--read-only"),
        (["mount", "s3://b", "/mnt", "extra"], 2, "too many arguments from 'extra' on"),
        (["mount", "s3://b"], 2, "no MOUNTPOINT"),
        (["mount", "/mnt"], 2, "no SOURCE"),
        (["mount", "s3://b", "/mnt", "--config", "/nowhere.toml"], 2, "/nowhere.toml: No such file"),
        (["mount", "s3://b", "/no/such/place"], 1, "mkdir -p /no/such/place"),
        (["dismount", "/mnt"], 2, "No such command 'dismount'"),
        (["mount.cachefs", "s3://b"], 1, "Missing argument 'MOUNTPOINT' (see man mount.cachefs)"),
        (["unmount", "/"], 1, "not a cachefs"),
        (["warm", "-f", "/etc/hosts"], 2, "No such option '-f'"),
        (["config", "check"], 2, "no FILE"),
        (["config", "check", "/nowhere.toml"], 2, "/nowhere.toml: No such file"),
        (["logs", "/"], 1, "lists those there are; cachefs logs CACHE_DIR prints"),
        (["umount", "/"], 1, "not a cachefs"),
        (["umount", "/no/such/place"], 1, "is not mounted"),
        (["status", "/no/such/place"], 1, "is not a cachefs mount"),
        (["refresh", "/"], 1, "is not below a cachefs mount"),
        (["warm"], 2, "no PATH"),
        (["warmup", "/"], 1, "is not below a cachefs mount"),
        (["warm", "-T", "/nowhere.txt"], 2, "/nowhere.txt: No such file"),
        (["warm", "-T", "/etc/hosts", "/a", "/b"], 2, "-T takes one PATH"),
        (["warm", "--profile", "/dev/null"], 2, "--profile takes one PATH"),
        (["warm", "-p", "0", "/"], 2, "-p"),
        (["warm", "--stop", "--check", "/"], 2, "--stop ends the jobs"),
        (["evict", ""], 2, "an empty path: is a variable not set?"),
        (["evict", "-T", "/dev/null"], 2, "/dev/null has no paths"),
        (["free", "/"], 1, "is not below a cachefs mount"),
        (["pin", "/"], 1, "is not below a cachefs mount"),
        (["ls", "/"], 1, "is not below a cachefs mount"),
        (["du", "/"], 1, "is not below a cachefs mount"),
        (["du", "-s", "-d", "1", "/"], 2, "it excludes --max-depth"),
        (["top", "--json", "--by", "process", "/"], 2, "leave out --by or --json"),
        (["top", "--json", "--total", "-n", "1", "/"], 2, "goes without --interval and --count"),
        (["simulate", "--trace", "x", "--cache-size", "1G", "--seed", "0"], 2, "--seed are of a --shape"),
        (["hint", "/", "--drop", "-T", "x"], 2, "--drop forgets a plan"),
        (["hint", "/", "-T", "/dev/null"], 1, "is not below a cachefs mount"),
        (["record", "/", "-o", "/dev/null"], 1, "is not below a cachefs mount"),
        (["flush", "/"], 1, "is not below a cachefs mount"),
        (["flush", "/", "--timeout", "soon"], 2, "--timeout: 'soon' is not a time"),
        (["umount", "--flush", "/"], 1, "not a cachefs"),
    ],
)
def test_errors_are_one_line(args: list[str], code: int, words: str) -> None:
    result = run(*args)
    assert result.exit_code == code
    assert words in one_line(result.stderr)
    assert result.stdout == ""


def test_every_verb_is_in_a_group_of_the_help() -> None:
    grouped = [verb for verbs in VERBS.values() for verb in verbs]
    assert sorted(grouped) == sorted(name for name, command in cli.commands.items() if not command.hidden)
    overview = run("--help").output
    places = [overview.index(f"\n{group}:\n") for group in VERBS]
    assert places == sorted(places)


def test_an_option_letter_means_one_thing() -> None:
    """-f stays in the foreground and shows the log; -n counts; -v and -q are everywhere."""
    meanings: dict[str, set[str]] = {}
    for name, command in cli.commands.items():
        if command.hidden:  # mount(8) has letters of its own
            continue
        letters = {flag for param in command.params for flag in param.opts if flag[:2] != "--"}
        assert {"-q", "-v"} <= letters, name
        for param in command.params:
            for flag in param.opts:
                if flag[:1] == "-" and flag[:2] != "--":
                    meanings.setdefault(flag, set()).add(str(param.name))
    assert meanings["-f"] == {"foreground", "follow"}
    assert meanings["-T"] == {"list_file"}
    assert all(len(names) == 1 for flag, names in meanings.items() if flag not in ("-f", "-n", "-o")), (
        meanings
    )


def test_what_prints_has_json() -> None:
    silent = {
        "mount",
        "umount",
        "refresh",
        "log-level",
        "hint",
        "config",
        "completion",
    }  # no results on stdout
    lines = {"record"}  # JSON lines by themselves
    for name, command in cli.commands.items():
        if not command.hidden and name not in silent | lines:
            assert any("--json" in param.opts for param in command.params), name
    assert json.loads(run("version", "--json").output) == {"cachefs": __version__}


def test_quiet_and_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "mount_of", lambda path: (path, ""))
    monkeypatch.setattr(asking, "ask", lambda *_, **__: None)
    assert run("refresh", "/x").stderr == "/x: looking again\n"
    assert run("refresh", "-q", "/x").output == run("-q", "refresh", "/x").output == ""
    monkeypatch.setattr(asking, "status_of", lambda _: STATUS)
    assert "\x1b[" in run("--color", "always", "status", "/x").stdout.replace("\\x1b", "")
    assert "\x1b[" not in run("status", "/x").stdout


def test_verbose_shows_where_it_failed(monkeypatch: pytest.MonkeyPatch, quiet_logs: None) -> None:
    monkeypatch.setattr(asking, "status_of", lambda _: 1 // 0)
    assert "Traceback" not in run("status", "/x").stderr
    said = run("status", "-v", "/x").stderr
    assert "ZeroDivisionError" in said and "Traceback" in said


def test_config_check(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('cache_size = "1G"\n[[source]]\nname = "a"\nurl = "s3://a"\n')
    assert run("config", "check", file).stderr == f"{file}: 1 sources, 1 options, no mistakes\n"
    found = json.loads(run("config", "check", "--json", file).stdout)
    assert found["sources"] == [{"name": "a", "url": "s3://a"}] and "cache_size" in found["options"]
    file.write_text('cache_size = "500"\n')
    done = run("config", "check", file)
    assert done.exit_code == 2 and "write 500G" in one_line(done.stderr)
    done = run("config", "check", "--json", file)
    assert done.exit_code == 2 and "write 500G" in json.loads(done.stdout)["error"]
    for line, words in (
        ('peers = "bogus"', "not a place to find peers"),
        ('peer_key_file = "/k"', "needs --peers"),
        ('peers = "static:127.0.0.1:7070"\npeer_key_file = "/no/key"', "/no/key: No such file"),
    ):
        file.write_text(f'source = "s3://a"\n{line}\n')
        done = run("config", "check", file)
        assert done.exit_code == 2 and words in one_line(done.stderr)


def test_logs_of_a_cache_directory(tmp_path: Path) -> None:
    (tmp_path / LOG_NAME).write_text("first\nsecond\x1b[31m\n")
    assert run("logs", tmp_path).stdout == "first\nsecond\\x1b[31m\n"
    assert run("logs", "-n", "1", tmp_path).stdout == "second\\x1b[31m\n"


def test_logs_as_json(tmp_path: Path) -> None:
    """A log has lines of both formats after a mount with another --log-format, and lines that are neither."""
    by_json = {
        "time": "2024-05-01T12:00:01.000Z",
        "level": "info",
        "logger": "cachefs.fs",
        "message": "b",
        "op": "read",
    }
    lines = [
        "2024-05-01T12:00:00.123Z WARNING fetch.fetcher: a: \\x1b",
        "  File one",
        json.dumps(by_json),
        '{"time": "2024',
        "7",
    ]
    (tmp_path / LOG_NAME).write_text("\n".join(lines))
    by_text = {
        "time": "2024-05-01T12:00:00.123Z",
        "level": "warning",
        "logger": "fetch.fetcher",
        "message": "a: \\x1b",
    }
    entries = [by_text, {"message": "  File one"}, by_json, {"message": '{"time": "2024'}, {"message": "7"}]
    assert [json.loads(line) for line in run("logs", "--json", tmp_path).stdout.splitlines()] == entries
    assert json.loads(run("logs", "--json", "-n", "1", tmp_path).stdout) == {"message": "7"}


@pytest.mark.long
@pytest.mark.parametrize("as_json", [False, True])
def test_logs_are_followed_over_a_rotation(tmp_path: Path, as_json: bool) -> None:
    log = tmp_path / LOG_NAME
    log.write_text("old\n")

    def shown(message: str) -> str:
        return (json.dumps({"message": message}) if as_json else message) + "\n"

    with subprocess.Popen(
        [sys.executable, "-m", "cachefs", "logs", "-f", *["--json"][:as_json], str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRON | {"PYTHONUNBUFFERED": "1"},
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == shown("old")
        with log.open("a") as file:
            file.write("new\n")
        assert command.stdout.readline() == shown("new")
        log.rename(tmp_path / f"{LOG_NAME}.1")
        log.write_text("fresh\n")
        assert command.stdout.readline() == shown("fresh")
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 0


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """As after an unmount below it."""
    command = shlex.join([sys.executable, "-m", "cachefs"])
    (tmp_path / "gone").mkdir()
    for words in ("mount s3://b m", "umount m", "info x"):
        script = f"mkdir -p {tmp_path}/gone; cd {tmp_path}/gone; rmdir {tmp_path}/gone; {command} {words}"
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True)
        assert done.returncode == 1
        assert "the working directory does not exist any more: cd to another one" in one_line(done.stderr)


def test_no_traceback_for_the_unexpected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first\nsecond")

    monkeypatch.setattr("cachefs.daemon.asking.all_statuses", fail)
    result = run("status")
    assert result.exit_code == 1
    assert "internal error: RuntimeError: first second" in one_line(result.stderr)
    monkeypatch.setattr(
        "cachefs.daemon.asking.all_statuses", lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    assert run("status").exit_code == 130


def test_a_terminal_obeys_no_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise MountError("s3://b/a\x1b]0;owned\x07: is not there")

    monkeypatch.setattr(asking, "status_of", broken)
    assert run("status", "/mnt/x").stderr == "cachefs: s3://b/a\\x1b]0;owned\\x07: is not there\n"
    say("a\x1bc\nb", "d")
    assert capsys.readouterr().out == "a\\x1bc\\nb\nd\n"  # a name may not look like two


def test_no_verb_prints_but_through_say() -> None:
    """Only show.py gives text to click.echo, and it escapes it; `layers.dump` is what the user wrote."""
    allowed = ("layers.dump",)
    package = Path(mounting.__file__).parents[1] / "cli"
    for path in sorted(set(package.glob("*.py")) - {package / "show.py"}):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            assert "click.echo(" not in line or any(word in line for word in allowed), f"{path}:{number}"


def test_another_mount_is_not_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """While what was written is uploaded, another mount may come to be at the same path."""
    line = "{} 1 0:{} / /mnt/x rw - fuse.cachefs {} rw,user_id=7,group_id=7\n"
    (meant,) = parse(line.format(40, 50, "s3://a"))
    assert (meant.number, meant.owner) == (40, 7)
    taken: list[object] = []
    monkeypatch.setattr(mounting.linux, "umount", lambda *_, **__: taken.append("umount2"))
    monkeypatch.setattr(mounting.connection, "fusermount", lambda *_, **__: taken.append("fusermount3"))
    for other in (
        line.format(41, 50, "s3://a"),
        line.format(40, 51, "s3://a"),
        line.format(40, 50, "s3://b"),
        "",
    ):
        now = parse(other)
        monkeypatch.setattr(mounting, "mount_at", lambda path, now=now: now[-1] if now else None)
        with pytest.raises(OSError, match="another mount has taken its place"):
            mounting.detach(meant, lazy=True)
    assert not taken


def test_the_mount_of_another_user_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """fusermount3 would say that it is not in /etc/mtab."""
    (mount,) = parse("40 1 0:50 / /mnt/x rw - fuse.cachefs s3://a rw,user_id=7,group_id=7\n")
    monkeypatch.setattr("cachefs.daemon.unmounting.mount_at", lambda _: mount)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    result = run("umount", "/mnt/x")
    assert result.exit_code == 1
    assert "is mounted by another user: run this as user 7, or as root" in one_line(result.stderr)


def test_a_closed_pipe_is_not_talked_about() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "cachefs", "mount", "--help"], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, b"")


def test_output_that_fails_is_no_failure_of_the_log(tmp_path: Path) -> None:
    """As in `cachefs logs | head`: what is read here is all right."""
    (tmp_path / "cachefs.log").write_text("first\n" * 100_000)
    command = [sys.executable, "-m", "cachefs", "logs", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        assert process.stdout.readline() == b"first\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert "the output cannot be written" in one_line(done.stderr)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_caller_without_standard_output(closed: str) -> None:
    """As some service managers and cron jobs start commands. A mount was made, and then it was an internal error."""
    command = f"{shlex.quote(sys.executable)} -m cachefs version {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")


def test_output_to_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cachefs", "version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert "the output cannot be written: No space left on device" in one_line(done.stderr)


def test_jobs_of_a_daemon_that_does_not_answer_are_not_called_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise ControlError("the daemon did not answer within 5 s")

    monkeypatch.setattr(asking, "mount_of", lambda path: (path, ""))
    monkeypatch.setattr(asking, "ask", silent)
    result = run("warm", "--stop", "/x")
    assert result.exit_code == 1
    assert "did not answer" in one_line(result.stderr)
    monkeypatch.setattr(asking, "ask", lambda *_, **__: 2)
    assert json.loads(run("warm", "--stop", "--json", "/x").stdout) == {"ended": 2}


def test_what_lies_below_another_path_is_not_counted_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        asking, "mount_of", lambda path: (Path("/m"), str(path).removeprefix("/m").lstrip("/"))
    )
    named = [Path("/m", name) for name in ("d/x", "d", "e/f", "d", "dd", "e/f/g/h")]
    assert paths_by_mount(named, None) == {Path("/m"): ["d", "e/f", "dd"]}
    (tmp_path / "list").write_text("d/x\nd\n./d/\ne\n")
    assert paths_by_mount([Path("/m")], str(tmp_path / "list")) == {Path("/m"): ["d", "e"]}
    (tmp_path / "list").write_text("d\n.\n")  # as `find` prints
    assert paths_by_mount([Path("/m")], str(tmp_path / "list")) == {Path("/m"): [""]}
    assert paths_by_mount([Path("/m/d"), Path("/m")], None) == {Path("/m"): [""]}


def test_print_config(tmp_path: Path) -> None:
    result = run(
        "mount", "--print-config", "s3://b/x", "/mnt/x", "-o", "allow_other,ram=1G", "--no-anonymous"
    )
    assert result.exit_code == 0
    table = tomllib.loads(result.output)
    assert table["source"][0]["url"] == "s3://b/x"
    assert (table["allow_other"], table["ram"], table["anonymous"]) == (True, "1G", False)
    (tmp_path / "c.toml").write_text(result.output)
    again = run("mount", "--print-config", "--config", tmp_path / "c.toml")
    assert tomllib.loads(again.output) == table


def test_print_config_prints_the_bytes_of_a_path() -> None:
    result = run("mount", "--print-config", "s3://b/x", os.fsdecode(b"/mnt/\xff"))
    assert result.exit_code == 0
    assert b'mountpoint = "/mnt/\xff"' in result.stdout_bytes


def test_cheap_verbs_stay_cheap() -> None:
    code = (
        "import sys; from cachefs.cli.main import cli; import cachefs.daemon.asking, cachefs.daemon.unmounting\n"
        "assert not {'trio', 'pyfuse3', 'pycurl', 'fsspec', 'lmdb'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


STATUS = {
    "version": "0.1.0",
    "pid": 7,
    "started": time.time() - 90061,
    "mountpoint": "/mnt/data",
    "sources": [
        {"name": "a", "url": "s3://a", "client": "curl", "origin": {"concurrency": 64, "last_error": ""}}
    ],
    "fuse": "pyfuse3",
    "fuse_reason": "as asked",
    "tiers": [
        {"name": "ram", "path": "/dev/shm/x", "used_bytes": 512 << 20, "cap_bytes": 1 << 30, "blocks": 1234}
    ],
    "metrics": {
        "ram_hits": 6,
        "ssd_hits": 3,
        "misses": 1,
        "origin_get": 1000,
        "origin_bytes": 5 << 30,
        "tier_errors": 2,
        "prefetch_files": 1200,
        "prefetch_used_files": 1000,
        "fuse_write": 7,
        "fuse_write_bytes": 3 << 30,
        "origin_bytes_sent": 2 << 30,
        "origin_put": 5,
        "origin_put_part": 256,
        "origin_copy": 3,
        "origin_delete": 4,
    },
    "read_only": False,
    "uploads": {
        "writeback": True,
        "pending": 1234,
        "pending_bytes": 1 << 30,
        "oldest_s": 61.0,
        "failed": 2,
        "last_error": "s3://a/x: denied",
    },
    "prefetch": {
        "in_flight": 3,
        "unused_bytes": 20 << 20,
        "paused": "no room",
        "plans": [
            {"name": "rank0", "files": 5000, "epoch": 2, "position": 1234, "ahead": 400},
            {"name": "rank1", "files": 10, "epoch": None, "position": 0, "ahead": 0},
        ],
    },
    "tuning": ["read_ahead_kb raised to 1024"],
    "warnings": ["the disk \x1b[31mis full"],
    "memory_bytes": 100 << 20,
    "inodes": 1_000_000,
}


def test_status_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "status_of", lambda _: STATUS)
    for color in ("never", "always"):
        text = run("status", "--color", color, "/mnt/data").stdout
        assert ("\x1b[1mmountpoint" in text) == (color == "always")
        for words in (
            "/mnt/data",
            "a: s3://a  (client curl, concurrency 64)",
            "pid 7, up 1d 1h, version 0.1.0, pyfuse3 backend, 100 MiB resident, 1,000,000 inodes",
            "512 MiB of 1.0 GiB (50 %), 1,234 blocks",
            "90.0 % of 10 blocks (6 RAM, 3 SSD, 1 waited for)",
            "1,000 GET, 0 HEAD, 0 LIST, 5.0 GiB received",
            "2 tier errors",
            "1,200 files prefetched, 1,000 used, 20.0 MiB waiting, pausing: no room",
            "rank0: epoch 2, file 1,234 of 5,000, 400 ahead",
            "rank1: no order yet of 10",
            "pyfuse3: as asked",
            "writable, here first (--writeback)",
            "3.0 GiB through the daemon, 2.0 GiB sent in 5 PUT, 256 parts; 3 COPY, 4 DELETE",
            "1,234 files, 1.0 GiB, for 1m 1s, 2 of them failed: s3://a/x: denied",
            "read_ahead_kb raised",
            "the disk \\x1b[31mis full",
        ):
            assert words in text
        assert "last_error" not in text
    assert ("eviction", "lru") in statusview.lines({"eviction": {"policy": "lru", "datasets": []}})
    known = {"name": "train", "mode": "epoch", "epoch": 1}, {"name": "", "mode": "lru", "epoch": 1}
    shown = ("eviction", "auto: train by epochs, / by last use")
    assert shown in statusview.lines({"eviction": {"policy": "auto", "datasets": known}})
    assert ("mode", "read-only") in statusview.lines({"read_only": True, "uploads": None})
    assert ("mode", "writable, to the origin at close and fsync") in statusview.lines({"read_only": False})
    for missing in STATUS:
        list(statusview.lines({key: value for key, value in STATUS.items() if key != missing}))
    assert list(statusview.lines({}))


# --- logs ----------------------------------------------------------------------------------------


@pytest.fixture
def quiet_logs() -> Iterator[None]:
    before = logging.getLogger("cachefs").level, logging.getLogger().level
    yield
    for handler in list(logging.getLogger().handlers):
        if handler.get_name() == logs.HANDLER:
            logging.getLogger().removeHandler(handler)
            handler.close()
    logging.getLogger("cachefs").setLevel(before[0])
    logging.getLogger().setLevel(before[1])


@pytest.mark.usefixtures("quiet_logs")
def test_logs(tmp_path: Path) -> None:
    log = logging.getLogger("cachefs.room")
    text, machine = tmp_path / "a" / "text.log", tmp_path / "machine.log"
    logs.setup("info", "text", text)
    log.debug("unseen")
    log.info("a name with\na break")
    logs.set_level("debug")
    log.debug("seen")
    logs.setup("warning", "json", machine)
    try:
        int("why")
    except ValueError:
        log.exception("it failed", extra={"op": "read"})
    lines = text.read_text().splitlines()
    assert [line.split("Z ", 1)[1] for line in lines] == [
        "INFO room: a name with\\na break",
        "DEBUG room: seen",
    ]
    (line,) = machine.read_text().splitlines()
    record = json.loads(line)
    assert (record["level"], record["logger"], record["message"], record["op"]) == (
        "error",
        "cachefs.room",
        "it failed",
        "read",
    )
    assert "ValueError: invalid literal" in record["exception"]


@pytest.mark.usefixtures("quiet_logs")
def test_logs_rotate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 1000)
    logs.setup("info", "text", tmp_path / "x.log")
    for number in range(200):
        logging.getLogger("cachefs").info("line %d", number)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["x.log", "x.log.1", "x.log.2", "x.log.3"]
    assert all(path.stat().st_size <= 1000 for path in tmp_path.iterdir())


@pytest.mark.usefixtures("quiet_logs")
def test_a_log_that_another_process_has_rotated(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    logs.setup("info", "text", log)
    logging.getLogger("cachefs").info("old")
    logs.follow_rotation()
    log.rename(tmp_path / "x.log.1")
    logs.follow_rotation()  # nothing is there: the old file is better than none
    log.touch()
    logs.follow_rotation()
    logging.getLogger("cachefs").info("new")
    assert "old" in (tmp_path / "x.log.1").read_text() and log.read_text().endswith("new\n")


# --- before mounting -----------------------------------------------------------------------------


def config_for(mountpoint: Path, **more: object) -> Config:
    sources = (Source("", "s3://bucket"),)
    return Config(
        **{"sources": sources, "mountpoint": mountpoint, "cache_dir": Path("/nowhere/cache")} | more
    )  # type: ignore[arg-type]


@pytest.fixture
def fuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device that can be opened, so that checks come to what is behind it."""
    device = tmp_path / "fuse"
    device.touch()
    monkeypatch.setattr(mounting, "FUSE_DEVICE", device)
    return device


def refusal(config: Config) -> str:
    with pytest.raises(MountError) as caught:
        mounting.check(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mountpoints(tmp_path: Path, fuse: Path) -> None:
    place = tmp_path / "m"
    assert f"create it: mkdir -p {place}" in refusal(config_for(place))
    place.touch()
    assert "is not a directory" in refusal(config_for(place))
    assert "is a file" in refusal(config_for(place / "below"))
    place.unlink()
    place.mkdir()
    (place / "x").touch()
    assert "--nonempty" in refusal(config_for(place))
    mounting.check(config_for(place, nonempty=True))
    (place / "x").unlink()
    mounting.check(config_for(place))
    assert "inside the mountpoint" in refusal(config_for(place, cache_dir=place / "cache"))
    assert "inside the cache directory" in refusal(config_for(place, cache_dir=tmp_path))
    (tmp_path / "file").touch()
    assert f"{tmp_path}/file is a file" in refusal(config_for(place, cache_dir=tmp_path / "file/cache"))
    assert f"{tmp_path}/file is a file" in refusal(config_for(place, cache_dir=tmp_path / "file"))
    for url in (f"file://{tmp_path}", f"file://{place}/x", f"file://{place}"):
        assert "read itself" in refusal(config_for(place, sources=(Source("", url),)))


def test_the_device(tmp_path: Path, fuse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    fuse.unlink()
    text = refusal(config_for(tmp_path / "m"))
    assert "modprobe fuse" in text
    assert "--device /dev/fuse" in text
    fuse.touch()

    def denied(*_: object) -> int:
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(os, "open", denied)
    assert "no permission to open" in refusal(config_for(tmp_path / "m"))


def test_as_an_ordinary_user(tmp_path: Path, fuse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(mounting, "FUSE_CONF", tmp_path / "fuse.conf")
    place = tmp_path / "m"
    place.mkdir()
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    mounting.check(config_for(place))
    assert "the line user_allow_other in" in refusal(config_for(place, allow_other=True))
    (tmp_path / "fuse.conf").write_text("#user_allow_other\n")
    assert "user_allow_other" in refusal(config_for(place, allow_other=True))
    (tmp_path / "fuse.conf").write_text("mount_max = 5\nuser_allow_other\n")
    mounting.check(config_for(place, allow_other=True))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert "apt-get install fuse3" in refusal(config_for(place))


def test_a_background_mount_that_never_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was started is ended, and the line says where to look."""
    script = tmp_path / "python"
    pidfile = tmp_path / "pid"
    script.write_text(f"#!/bin/sh\necho $$ > {pidfile}\nexec sleep 60\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    place = tmp_path / "m"
    place.mkdir()
    config = config_for(place, mount_timeout=0.5, cache_dir=tmp_path / "cache")
    with pytest.raises(MountError, match=r"did not answer within 0\.5 s: see .*cache/cachefs\.log"):
        background.start([], config)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pidfile.read_text()), 0)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo first >&2; echo the last words >&2; exit 3", "the last words"),
        ("exit 3", "ended before the mount was there: see"),
        ('eval "echo error: no such bucket >&$CACHEFS_READY_FD"; exit 1', "no such bucket"),
    ],
)
def test_a_background_mount_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!/bin/bash\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    place = tmp_path / "m"
    place.mkdir()
    with pytest.raises(MountError, match=words):
        background.start([], config_for(place, cache_dir=tmp_path / "cache"))


@pytest.mark.parametrize(
    ("error", "kind"), [(ConfigError("write 10G"), ConfigError), (NoRoom("full"), MountError)]
)
def test_a_background_mount_tells_bad_input_from_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: CachefsError, kind: type[CachefsError]
) -> None:
    """The exit code of both differs, and that of a mount in the foreground is the same."""
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv(background.READY_FD, str(write_fd))
    background.Ready().failed(error)
    said = os.read(read_fd, 1000).decode()
    os.close(read_fd)
    (tmp_path / "said").write_text(said)
    script = tmp_path / "python"
    script.write_text(f'#!/bin/bash\neval "cat {tmp_path}/said >&$CACHEFS_READY_FD"; exit 1\n')
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    place = tmp_path / "m"
    place.mkdir()
    with pytest.raises(CachefsError, match=f"^{error}$") as caught:
        background.start([], config_for(place, cache_dir=tmp_path / "cache"))
    assert type(caught.value) is kind


# --- real mounts ---------------------------------------------------------------------------------


class Place:
    """A source directory, a mountpoint and a cache, and the command in between."""

    def __init__(self, root: Path) -> None:
        self.source, self.mountpoint, self.cache = root / "source", root / "mnt", root / "cache"
        (self.source / "dir").mkdir(parents=True)
        (self.source / "a.txt").write_text("hello\n")
        (self.source / "dir" / "b.bin").write_bytes(os.urandom(3_000_000))
        self.mountpoint.mkdir()

    def mount(self, *args: object, **environ: str) -> subprocess.CompletedProcess[str]:
        options = ["--cache-dir", self.cache, "--ram", "64M", "--cache-size", "256M", "--keep-free", "0"]
        return cachefs("mount", *options, *args, f"file://{self.source}", self.mountpoint, **environ)

    def status(self) -> dict[str, object]:
        status: dict[str, object] = json.loads(cachefs("status", "--json", self.mountpoint).stdout)
        return status

    def kill(self) -> None:
        pid = int(str(self.status()["pid"]))
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        select.select([pidfd], [], [], 10)
        os.close(pidfd)

    def is_mounted(self) -> bool:
        return mount_at(self.mountpoint) is not None


def ended(pid: int) -> bool:
    """Gone, or only waiting to be noticed by its parent."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


needs_fuse = pytest.mark.skipif(not os.access("/dev/fuse", os.R_OK | os.W_OK), reason="no /dev/fuse here")


@pytest.fixture
def place(tmp_path: Path, cache_dir: Path) -> Iterator[Place]:
    found = Place(Path(os.path.realpath(tmp_path)))
    yield found
    if found.is_mounted():
        cachefs("umount", "--lazy", found.mountpoint)


@pytest.mark.mount
@needs_fuse
def test_mount_status_refresh_umount(place: Place) -> None:
    done = place.mount()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (place.mountpoint / "a.txt").read_text() == "hello\n"
    assert (place.mountpoint / "dir/b.bin").read_bytes() == (place.source / "dir/b.bin").read_bytes()

    status = place.status()
    assert status["mountpoint"] == str(place.mountpoint)
    assert status["metrics"]["origin_get"] >= 1  # type: ignore[index]
    assert str(place.mountpoint) in cachefs("status").stdout
    assert any(entry["pid"] == status["pid"] for entry in json.loads(cachefs("status", "--json").stdout))

    assert "already shows file://" in one_line(place.mount().stderr)
    (place.source / "new.txt").write_text("new\n")
    assert cachefs("refresh", place.mountpoint).returncode == 0
    assert (place.mountpoint / "new.txt").read_text() == "new\n"

    done = cachefs("umount", place.mountpoint)
    assert (done.returncode, done.stderr) == (0, f"{place.mountpoint}: unmounted\n")
    assert not place.is_mounted()
    assert not control_path(place.mountpoint).exists()
    assert ended(int(str(status["pid"])))
    assert "mounted file://" in (place.cache / "cachefs.log").read_text()


@pytest.mark.mount
@needs_fuse
def test_a_mount_that_fails_leaves_that_of_a_faster_command(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two commands at one mountpoint, the slower one finds the mount of the other only in its daemon."""
    faster = f"{sys.executable} -m cachefs mount --cache-dir {place.cache} --ram 64M --keep-free 0"
    faster += f" file://{place.source} {place.mountpoint}"
    script = tmp_path / "python"
    script.write_text(
        "#!/bin/bash\nfd=$CACHEFS_READY_FD; unset CACHEFS_READY_FD\n"
        f'{faster}\neval "echo error: already shows >&$fd"; exit 1\n'
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(MountError, match="already shows"):
        background.start([], config_for(place.mountpoint, cache_dir=tmp_path / "other"))
    assert (place.mountpoint / "a.txt").read_text() == "hello\n"


@pytest.mark.mount
@needs_fuse
def test_a_log_that_cannot_be_written(place: Place, tmp_path: Path) -> None:
    """A mount with its log elsewhere is better than none, and the caller learns where."""
    done = place.mount("--log-file", tmp_path)
    assert done.returncode == 0
    log = str(place.status()["log_file"])
    assert one_line(done.stderr) == f"cachefs: cannot write the log {tmp_path}: logging to {log}\n"
    assert "mounted file://" in cachefs("logs", place.mountpoint).stdout


@pytest.mark.mount
@needs_fuse
@pytest.mark.parametrize("has_reader", [True, False], ids=["read", "not read"])
def test_a_log_that_is_a_pipe(place: Place, tmp_path: Path, has_reader: bool) -> None:
    """A mount does not wait for a process that reads the pipe. If there is none, it logs elsewhere."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK) if has_reader else -1
    done = place.mount("--log-file", pipe)
    assert done.returncode == 0
    if not has_reader:
        log = Path(str(place.status()["log_file"]))
        assert one_line(done.stderr) == f"cachefs: cannot write the log {pipe}: logging to {log}\n"
        log.unlink()
        return
    assert done.stderr == "" and b"mounted file://" in os.read(reader, 65536)
    assert one_line(cachefs("logs", place.mountpoint).stderr) == (
        f"cachefs: the log {pipe} is a pipe or a device: what was written to it cannot be read again\n"
    )
    os.close(reader)


@pytest.mark.long
@pytest.mark.mount
@needs_fuse
def test_mount_a_again(place: Place, tmp_path: Path) -> None:
    """mount(8) does not know a path again in the URL of the mount table, and calls the helper for each such line."""
    file = tmp_path / "c.toml"
    file.write_text(
        f'[[source]]\nname = "one"\nurl = "{place.source}"\n[[source]]\nname = "two"\nurl = "/usr/share"\n'
    )
    other = tmp_path / "empty"
    other.mkdir()
    options = f"cache_dir={place.cache},ram=64M,keep_free=0"
    for source in (place.source, file):
        for _ in range(2):
            done = cachefs("mount.cachefs", source, place.mountpoint, "-o", options)
            assert (done.returncode, done.stderr) == (0, "")
        done = cachefs("mount.cachefs", other, place.mountpoint, "-o", options)
        assert done.returncode == 32 and "already shows" in one_line(done.stderr)
        assert cachefs("umount", place.mountpoint).returncode == 0
        assert not place.is_mounted()


@pytest.mark.mount
@pytest.mark.root
@needs_fuse
def test_a_bind_mount_of_it(place: Place, tmp_path: Path) -> None:
    """Verbs name the daemon's own mountpoint, and an unmount does not wait for a daemon that another mount keeps."""
    assert place.mount().returncode == 0
    other = Path(os.path.realpath(tmp_path)) / "other"
    other.mkdir()
    daemon = os.pidfd_open(int(str(place.status()["pid"])))
    subprocess.run(["mount", "--bind", place.mountpoint / "dir", other], check=True)
    try:
        for words in (("status", other), ("info", other / "b.bin")):
            done = cachefs(*words)
            assert done.returncode == 1
            assert f"{other} is a bind mount: name {place.mountpoint}," in one_line(done.stderr)
        done = cachefs("umount", place.mountpoint)
        assert done.returncode == 0
        assert f"unmounted; its daemon goes on, because {other} is a bind mount of it" in done.stderr
        assert (other / "b.bin").read_bytes() == (place.source / "dir/b.bin").read_bytes()
    finally:
        subprocess.run(["umount", other], check=True)
    assert select.select([daemon], [], [], 10)[0], "it has ended"
    os.close(daemon)


@pytest.mark.mount
@needs_fuse
def test_a_busy_mount_names_its_users(place: Place) -> None:
    assert place.mount().returncode == 0
    with subprocess.Popen(["sleep", "60"], cwd=place.mountpoint) as sleeper:
        try:
            done = cachefs("umount", place.mountpoint)
            assert done.returncode == 1
            assert f"in use by sleep (pid {sleeper.pid})" in one_line(done.stderr)
            assert (place.mountpoint / "a.txt").exists()
            assert cachefs("umount", "--lazy", place.mountpoint).returncode == 0
            assert not place.is_mounted()
        finally:
            sleeper.kill()


@pytest.mark.long
@pytest.mark.mount
@needs_fuse
def test_a_dead_mount_is_taken_away_and_never_stacked_on(place: Place) -> None:
    assert place.mount().returncode == 0
    place.kill()
    for verb in ("status", "ls", "du"):
        assert "has died: cachefs umount" in one_line(cachefs(verb, place.mountpoint).stderr)
    assert (
        f"its daemon has died: cachefs umount {place.mountpoint}, then mount it again"
        in cachefs("status").stdout
    )
    found = {one["mountpoint"]: one for one in json.loads(cachefs("status", "--json").stdout)}
    assert "has died" in found[str(place.mountpoint)]["warnings"][0]
    done = place.mount()
    assert done.returncode == 0
    assert "took away a dead mount" in one_line(done.stderr)
    assert "took away a dead mount" in (place.cache / "cachefs.log").read_text()
    assert (place.mountpoint / "a.txt").read_text() == "hello\n"
    place.kill()
    done = cachefs("umount", place.mountpoint)
    assert done.returncode == 0
    assert "its daemon had gone" in done.stderr
    assert not place.is_mounted()


@pytest.mark.mount
@needs_fuse
def test_a_source_that_is_not_there(place: Place) -> None:
    place.source.rename(place.source.with_name("moved"))
    done = place.mount()
    assert done.returncode == 1
    assert str(place.source) in one_line(done.stderr)
    assert not place.is_mounted()


@pytest.mark.mount
@needs_fuse
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground(place: Place, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "cachefs", "mount", "-f", "--cache-dir", place.cache, "--ram", "64M"]
    with subprocess.Popen(
        [*command, f"file://{place.source}", place.mountpoint], stderr=subprocess.PIPE, env=ENVIRON, text=True
    ) as daemon:
        assert daemon.stderr is not None
        assert any("mounted file://" in line for line in daemon.stderr)  # ends if the daemon does
        assert (place.mountpoint / "a.txt").read_text() == "hello\n"
        daemon.send_signal(number)
        _, said = daemon.communicate(timeout=20)
    assert daemon.returncode == 0
    assert "Traceback" not in said
    assert not place.is_mounted()


@pytest.mark.mount
@needs_fuse
def test_sighup_reads_the_configuration_again(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """What can change does, what cannot is named, and a mistake changes nothing."""
    monkeypatch.chdir(place.source.parent)  # the daemon leaves it, and finds its files all the same
    file = place.source.with_name("c.toml")
    file.write_text('metadata_ttl = "1h"\nlog_level = "info"\n')
    assert place.mount("--config", file.name).returncode == 0
    pid, log = int(str(place.status()["pid"])), place.cache / LOG_NAME

    def reload(text: str, words: str) -> None:
        file.write_text(text)
        os.kill(pid, signal.SIGHUP)
        until = time.monotonic() + 60
        while words not in log.read_text() and time.monotonic() < until:
            time.sleep(0.05)
        assert words in log.read_text()

    assert sorted(os.listdir(place.mountpoint)) == ["a.txt", "dir"]
    reload("metadata_ttl = 5x\n", "SIGHUP: nothing was changed: ")
    reload(
        'metadata_ttl = "0"\nnegative_ttl = "0"\npin_budget = "1M"\ndownload_limit = "50M"\nconcurrency = 3\n',
        "SIGHUP: changed pin_budget, metadata_ttl, negative_ttl, download_limit; needs a remount: concurrency",
    )
    (place.source / "new").write_text("x")
    assert (place.mountpoint / "new").read_text() == "x"  # within the hour that held before
    [source] = place.status()["sources"]  # type: ignore[misc, attr-defined]
    assert source["origin"]["download_limit"] == 50 << 20
    assert "cannot be pinned" in cachefs("pin", place.mountpoint / "dir").stderr
    assert str(log) == place.status()["log_file"]
    assert "SIGHUP: changed" in cachefs("logs", place.mountpoint).stdout
    reload('log_level = "error"\n', "needs a remount: nothing")
    assert cachefs("umount", place.mountpoint).returncode == 0


@pytest.mark.mount
@needs_fuse
def test_sources_with_options_of_their_own(place: Place) -> None:
    other = place.source.with_name("other")
    other.mkdir()
    file = place.source.with_name("stores.toml")
    file.write_text(
        f'[[source]]\nname = "fixed"\nurl = "file://{place.source}"\nread_only = true\nconsistency = "immutable"\n'
        f'[[source]]\nname = "live"\nurl = "file://{other}"\nconsistency = "strict"\n'
    )
    options = ["--cache-dir", place.cache, "--ram", "64M", "--config", file, place.mountpoint]
    assert cachefs("mount", *options).returncode == 0
    fixed, live = place.mountpoint / "fixed", place.mountpoint / "live"
    with pytest.raises(OSError, match="Read-only"):
        (fixed / "mine").write_text("x")
    (live / "mine").write_text("x")
    assert (other / "mine").read_text() == "x"
    assert sorted(os.listdir(fixed)) == ["a.txt", "dir"] and os.listdir(live) == ["mine"]
    (place.source / "later").write_text("x")
    (other / "later").write_text("x")
    assert (live / "later").exists() and not (fixed / "later").exists()
    assert cachefs("umount", place.mountpoint).returncode == 0


@pytest.mark.mount
@needs_fuse
def test_several_sources(place: Place) -> None:
    other = place.source.with_name("other")
    other.mkdir()
    (other / "c.txt").write_text("c\n")
    file = place.source.with_name("stores.toml")
    file.write_text(
        f'mountpoint = "{place.mountpoint}"\ncache_dir = "{place.cache}"\nram = "64M"\n'
        f'[[source]]\nname = "one"\nurl = "file://{place.source}"\n[[source]]\nname = "two"\nurl = "file://{other}"\n'
    )
    done = cachefs("mount", CACHEFS_CONFIG=str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(os.listdir(place.mountpoint)) == ["one", "two"]
    assert (place.mountpoint / "two/c.txt").read_text() == "c\n"
    assert cachefs("umount", place.mountpoint).returncode == 0


@pytest.mark.mount
@needs_fuse
def test_a_relative_mountpoint_behind_a_link(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    link = place.mountpoint.with_name("link")
    link.symlink_to(place.mountpoint)
    monkeypatch.chdir(link.parent)
    done = cachefs("mount", "--cache-dir", "cache", "--ram", "64M", "./source", "link")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(cachefs("status", "--json", "link").stdout)["mountpoint"] == str(place.mountpoint)
    assert cachefs("refresh", "link/dir/b.bin").returncode == 0
    assert cachefs("umount", "link").returncode == 0
    assert not place.is_mounted()


@pytest.mark.long
@pytest.mark.mount
@needs_fuse
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), pytest.param(0, 1, marks=pytest.mark.long)],
)
def test_giving_up_on_a_store_that_hangs(place: Place, number: int, code: int) -> None:
    """Interrupted, terminated or out of time: the daemon that was started ends too."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(20)
        endpoint = f"http://127.0.0.1:{store.getsockname()[1]}"
        options = ["--cache-dir", place.cache, "--ram", "64M", "--region", "r", "--endpoint-url", endpoint]
        options += ["--mount-timeout", "20s" if number else "5s"]
        environ = ENVIRON | {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_ALLOW_HTTP": "true"}
        with subprocess.Popen(
            [sys.executable, "-m", "cachefs", "mount", *options, "s3://bucket", place.mountpoint],
            stderr=subprocess.PIPE,
            env=environ,
            text=True,
        ) as command:
            connection, _ = store.accept()
            if number:
                command.send_signal(number)
            _, said = command.communicate(timeout=30)
        assert command.returncode == code
        if code == 1:
            assert "did not answer within 5 s: see" in one_line(said)
        with connection:
            connection.settimeout(10)
            while connection.recv(65536):  # its end comes with the daemon's
                pass
    assert not place.is_mounted()


# --- the demo ------------------------------------------------------------------------------------


@pytest.mark.mount
@needs_fuse
def test_the_demo(tmp_path: Path) -> None:
    sizes = [
        "--classes",
        "2",
        "--per-class",
        "10",
        "--shards",
        "1",
        "--shard-size",
        "2",
        "--dir",
        str(tmp_path),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "bench.demo", *sizes],
        capture_output=True,
        text=True,
        timeout=120,
        env=ENVIRON,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical to the source" in done.stdout
    assert re.search(r"epoch 2 \(warm\) .* 100\.0 % +no requests", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_the_demo_tells_what_differs(tmp_path: Path) -> None:
    from bench import demo

    (tmp_path / "a").write_bytes(b"a")
    files = demo.Files(tmp_path, ["a", "gone"])
    assert files[0][1] == 1
    assert files[1][1] == -1
    manifest = {"a": (1, files[0][2]), "unlisted": (1, "")}
    good = demo.Epoch("cold", 1.0, 1, 1, [], {}, 0)
    assert demo.verdict([good], ["a", "unlisted"], manifest) == 0
    assert demo.verdict([good], ["a"], manifest) == 1
    bad = demo.Epoch("cold", 1.0, 1, 1, ["a: differs"], {}, 0)
    assert demo.verdict([bad], ["a", "unlisted"], manifest) == 1
