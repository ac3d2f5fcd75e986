"""Mounts that cannot be: one line that says why and what to do, an exit code, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lab.client import LabStore
from cachefs.store.ram import ram_directory, remove_ram
from tests.mount.conftest import ONE_BACKEND, Bucket, Mounted
from tests.mount.mounts import COMMAND, Completed, Mount, eventually, mounts_at, processes_with, run

pytestmark = ONE_BACKEND  # most of these mounts never are


def refused(mount: Mount, *, within: float = 20, words: list[str] | None = None, code: int = 1) -> str:
    """The one line a refused mount says."""
    began = time.monotonic()
    done = run([*COMMAND, *(words or mount.arguments())], env=mount.env, timeout=within + 10)
    took = time.monotonic() - began
    one_line(done, code)
    assert took < within, f"{took:.1f} s: {done.stderr}"
    assert not mounts_at(mount.path)
    assert not processes_with(str(mount.path))
    assert not mount.memory.exists() or not any(
        f.is_file() and f.name not in ("tag", "owner") for f in mount.memory.rglob("*")
    )
    # The reason is for the caller; the log says it as well.
    mount.allowed.append(".")
    assert "Traceback" not in mount.log()
    return done.stderr


def one_line(done: Completed, code: int = 1) -> None:
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stdout == ""
    assert done.stderr.startswith("cachefs: ")
    assert done.stderr.count("\n") == 1, done.stderr


class TestMountpoint:
    def test_absent(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, start=False)
        mount.path = mount.place / "absent"
        assert "does not exist: create it: mkdir -p" in refused(mount)

    def test_below_a_file(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, start=False)
        (mount.place / "file").touch()
        mount.path = mount.place / "file/mnt"
        assert "does not exist" in refused(mount)

    def test_a_file(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, start=False)
        mount.path = mount.place / "file"
        mount.path.touch()
        assert "is not a directory" in refused(mount)

    def test_not_empty(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("file", 10)
        mount = mounted(bucket, start=False)
        (mount.path / "mine").write_text("mine")
        assert "is not empty" in refused(mount)
        mount.start(nonempty=True)
        assert (mount.path / "file").read_bytes() == data
        assert os.listdir(mount.path) == ["file"]
        mount.stop()
        assert (mount.path / "mine").read_text() == "mine"

    def test_a_cache_inside_of_it(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, start=False)
        words = [word for word in mount.arguments(cache_dir=mount.path / "cache") if "log" not in word]
        assert "inside the mountpoint: choose another --cache-dir" in refused(mount, words=words)
        assert os.listdir(mount.path) == []

    def test_a_cache_inside_of_another_mount(self, mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
        """Also through a link. Its files would be uploaded, and its disk would be the other mount's daemon."""
        outer = mounted(bucket)
        (tmp_path / "link").symlink_to(outer.path)
        inner = mounted(bucket, start=False)
        for path in (outer.path, tmp_path / "link"):
            line = refused(inner, words=inner.arguments(cache_dir=path / "cache"))
            assert f"is inside the cachefs mount {outer.path}: choose another --cache-dir" in line
        assert os.listdir(outer.path) == []

    @pytest.mark.parametrize("flags", [[], ["-f"]], ids=" ".join)
    def test_a_log_inside_of_it(
        self, mounted: Mounted, bucket: Bucket, tmp_path: Path, flags: list[str]
    ) -> None:
        """Also through a link. The file is not made: the next mount would find a directory that is not empty."""
        mount = mounted(bucket, start=False)
        (tmp_path / "link").symlink_to(mount.path)
        words = [*mount.arguments(log_file=tmp_path / "link/log"), *flags]
        assert "inside the mountpoint: choose another --log-file" in refused(mount, words=words)
        assert os.listdir(mount.path) == []


class TestStore:
    def test_no_such_bucket(self, mounted: Mounted, lab: LabStore) -> None:
        mount = mounted("s3://no-such-bucket", start=False)
        assert "no-such-bucket" in refused(mount)

    def test_a_wrong_credential(self, mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
        lab.credentials(allowed=["someone-else"])
        mount = mounted(bucket, start=False)
        line = refused(mount)
        assert bucket.name in line
        assert any(word in line.lower() for word in ("credential", "denied", "permission", "access"))
        # Once it is right, nothing stands in the way.
        lab.credentials()
        mount.start()

    def test_no_credential(self, mounted: Mounted, bucket: Bucket, lab: LabStore) -> None:
        mount = mounted(bucket, start=False)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del mount.env[name]
        lab.credentials(allowed=["someone-else"])
        line = refused(mount, within=30)
        assert any(word in line.lower() for word in ("credential", "anonymous"))

    def test_nobody_listens(self, mounted: Mounted) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mount = mounted("s3://bucket", start=False, endpoint_url=f"http://127.0.0.1:{port}")
        assert f"127.0.0.1:{port}" in refused(mount)

    def test_nobody_answers(self, mounted: Mounted) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(64)
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            mount = mounted("s3://bucket", start=False, endpoint_url=url, timeout=3)
            refused(mount, within=12)

    @pytest.mark.long
    def test_nobody_answers_within_the_mount_timeout(self, mounted: Mounted) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(64)
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            mount = mounted("s3://bucket", start=False, endpoint_url=url, timeout=60, mount_timeout=2)
            assert "2 s" in refused(mount, within=10)

    def test_a_host_that_does_not_exist(self, mounted: Mounted) -> None:
        mount = mounted("s3://bucket", start=False, endpoint_url="http://nowhere.invalid:9000", timeout=3)
        assert "nowhere.invalid" in refused(mount, within=15)

    def test_a_local_directory_that_does_not_exist(self, mounted: Mounted, tmp_path: Path) -> None:
        mount = mounted(f"file://{tmp_path}/absent", start=False)
        assert "absent" in refused(mount)

    @pytest.mark.parametrize("number", [2, pytest.param(15, marks=pytest.mark.long)])
    def test_an_interrupted_start_leaves_nothing(self, mounted: Mounted, number: int) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(64)
            url = f"http://127.0.0.1:{silent.getsockname()[1]}"
            mount = mounted("s3://bucket", start=False, endpoint_url=url, timeout=60)
            starting = subprocess.Popen(
                [*COMMAND, *mount.arguments()], env=mount.env, stderr=subprocess.PIPE, text=True
            )
            time.sleep(1.2)
            starting.send_signal(number)
            _, err = starting.communicate(timeout=15)
            assert starting.returncode != 0
            assert "Traceback" not in err
            time.sleep(0.3)
            assert not processes_with(str(mount.path))
        mount.allowed.append(".")


class TestCacheDirectory:
    def test_below_a_file(self, mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        mount = mounted(bucket, start=False, cache_dir=tmp_path / "file/cache")
        assert f"{tmp_path}/file is a file: choose another --cache-dir" in refused(mount)

    def test_with_a_users_own_objects(self, mounted: Mounted, bucket: Bucket, tmp_path: Path) -> None:
        """A new cache empties its `objects`, so that of a dataset or a git repository must not be taken for one."""
        for name in ("objects/train", "trash-mine"):
            (tmp_path / "project" / name).mkdir(parents=True)
        mine = tmp_path / "project/objects/train/1"
        mine.write_text("mine")
        mount = mounted(bucket, start=False, cache_dir=tmp_path / "project")
        line = refused(mount)
        assert "project/objects has files that are not of a cache, such as 'train': choose another" in line
        assert mine.read_text() == "mine"
        (tmp_path / "project/objects").rename(tmp_path / "project/data")
        mount.start()
        mount.stop()
        assert (tmp_path / "project/trash-mine").exists()

    @pytest.mark.parametrize("hard", [16, 100])
    def test_too_few_open_files_leave_nothing_in_memory(
        self, mounted: Mounted, bucket: Bucket, hard: int
    ) -> None:
        mount = mounted(bucket, start=False)
        words = ["bash", "-c", f'ulimit -n {hard}; exec "$@"', "bash", *COMMAND, *mount.arguments()]
        done = run(words, env=mount.env, timeout=30)
        one_line(done)
        assert f"may open {hard} files at once" in done.stderr
        assert not mount.memory.exists()

    def test_one_that_is_removed_while_it_is_in_use(self, mounted: Mounted, bucket: Bucket) -> None:
        """Reads go on from the origin, with one warning; the mount ends as any other."""
        data = {key: bucket.put(key, 300_000) for key in ("a", "b", "c", "d")}
        mount = mounted(bucket, read_only=False)
        assert (mount.path / "a").read_bytes() == data["a"]
        shutil.rmtree(mount.cache)
        time.sleep(0.6)  # free space is looked at twice a second
        for key in ("b", "c", "d"):
            assert (mount.path / key).read_bytes() == data[key]
        mount.stop()
        mount.allowed += ["was removed while it is in use: reads go on from the origin", "could not close"]
        assert mount.log().count("was removed while it is in use") == 1
        assert not mount.memory.exists()

    def test_what_was_not_sent_yet_is_said_to_be_lost(self, mounted: Mounted, bucket: Bucket) -> None:
        mount = mounted(bucket, read_only=False, writeback=True, upload_delay="1h")
        (mount.path / "unsent").write_bytes(b"u" * 300_000)
        shutil.rmtree(mount.cache)
        eventually(lambda: "was removed while it is in use" in mount.log(), "the removal is noticed")
        assert "what was written here and not sent is lost now" in mount.log()
        assert {tier["state"] for tier in mount.ask("status")["tiers"]} == {"normal", "removed"}
        (mount.path / "new").write_bytes(b"n" * 300_000)
        requests = [r for r in bucket.store.requests() if r["bucket"] == bucket.name]
        assert [r["key"] for r in requests if r["kind"] == "put"] == ["new"], (
            "no journal could promise it: it is sent at once"
        )
        bucket.store.fault("403", kind="put")
        with pytest.raises(OSError):
            (mount.path / "refused").write_bytes(b"r" * 300_000)
        done = mount.umount()
        assert f"cachefs recover {mount.cache} copies it" in mount.log()
        assert (
            "unsent: " in done.stdout + done.stderr
            and "what was written to it is lost" in done.stdout + done.stderr
        )
        assert "sends it" not in done.stdout + done.stderr + mount.log()
        mount.allowed.append(".")

    def test_files_of_a_lost_journal_are_copied_to_a_mount_of_their_source(
        self, mounted: Mounted, bucket: Bucket
    ) -> None:
        """Also where the source is a directory of a bucket at an endpoint of its own."""
        data = os.urandom(300_000)
        mount = mounted(f"s3://{bucket.name}/below", read_only=False, writeback=True, upload_delay="1h")
        (mount.path / "unsent").write_bytes(data)
        mount.kill()
        shutil.rmtree(mount.cache / "journal")
        mount.start()
        mount.allowed += ["there is no journal in", "no journal accounts for"]
        assert not (mount.path / "unsent").exists()
        mount.cli("recover", mount.path, "--to", mount.path)
        assert (mount.path / "unsent").read_bytes() == data


@pytest.mark.root
class TestMemoryOfTheKilled:
    @pytest.mark.long
    def test_the_next_start_takes_away_what_no_start_will_use(self, mounted: Mounted, bucket: Bucket) -> None:
        data = bucket.put("a", 300_000)
        killed = mounted(bucket)
        assert (killed.path / "a").read_bytes() == data
        memory = killed.memory
        killed.kill()
        for verb in ("doctor", "status"):
            assert f"memory {memory}" in killed.cli(verb).stdout  # while its cache directory is there
        shutil.rmtree(killed.cache)
        other = mounted(bucket)
        assert not os.path.ismount(memory)
        eventually(lambda: not memory.exists(), "memory is given back")
        other.stop()


class TestUsage:
    @pytest.mark.parametrize(
        "words",
        [
            ["mount"],
            ["mount", "s3://bucket"],
            ["mount", "s3://bucket", "/tmp", "/tmp"],
            ["mount", "--cache-size", "12X", "s3://bucket", "/tmp"],
            ["mount", "--no-such-option", "s3://bucket", "/tmp"],
            ["mount", "-o", "no_such_option=1", "s3://bucket", "/tmp"],
            ["mount", "s3://key:secret@bucket", "/tmp"],
            ["mount", "nonsense", "/tmp"],
            ["mount", "--config", "/no/such/file.toml", "/tmp"],
            ["umount"],
            ["no-such-verb"],
        ],
        ids=" ".join,
    )
    def test_nonsense_is_refused_in_one_line(self, words: list[str]) -> None:
        done = run([*COMMAND, *words])
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1
        assert "secret" not in done.stderr.replace("AWS_SECRET", "")

    def test_the_unknown_scheme_is_named(self, mounted: Mounted) -> None:
        assert "nosuch" in refused(mounted("nosuch://bucket", start=False), code=2)

    def test_options_that_the_source_does_not_take(self, mounted: Mounted) -> None:
        mount = mounted("file:///usr/share", start=False, requester_pays=True)
        assert "--requester-pays is for s3://" in refused(mount, code=2)


# The interpreter may lie where only root can go: to look there is the one right this user keeps.
AS_NOBODY = (
    "setpriv --reuid=65534 --regid=65534 --clear-groups "
    "--inh-caps=-all,+dac_read_search --ambient-caps=+dac_read_search "
)


class Stage:
    """A mount namespace of its own, with its own /dev/fuse and /etc/fuse.conf, for one shell script."""

    def __init__(self, home: Path, env: dict[str, str]) -> None:
        self.home = home
        self.env = env

    def play(self, script: str, *, before: str = "", user: bool = False, timeout: float = 60) -> Completed:
        """`before` runs as root; `script` as nobody when `user`. ``$M`` is the mountpoint, ``cachefs`` the command."""
        place = self.home
        words = [f"--cache-dir={place}/cache --cache-size=100M --ram=16M --keep-free=16M --timeout=5"]
        preface = f"""
M={place}/mnt
cachefs() {{ {" ".join(COMMAND)} "$@"; }}
mount_it() {{ cachefs mount {" ".join(words)} "$@" "$M"; }}
"""
        (place / "script").write_text(preface + script)
        enter = AS_NOBODY if user else ""
        outer = f"set -e\n{before}\ncd /\n{enter}sh -e {place}/script"
        return run(
            ["unshare", "-m", "--propagation", "private", "sh", "-c", outer], env=self.env, timeout=timeout
        )


@pytest.fixture
def stage(lab: LabStore, mounted: Mounted) -> Iterator[Stage]:
    """Directories belong to nobody and can be reached by nobody: pytest's own cannot."""
    home = Path(tempfile.mkdtemp(prefix="cf-stage-"))
    (home / "mnt").mkdir()
    (home / "home").mkdir()
    (home / "run").mkdir()
    for path in (home, home / "mnt", home / "home", home / "run"):
        os.chown(path, 65534, 65534)
        path.chmod(0o755)
    env = mounted("s3://unused", start=False).env
    env |= {
        "HOME": str(home / "home"),
        "XDG_RUNTIME_DIR": f"{home}/run",
        "XDG_CACHE_HOME": str(home / "cache"),
    }
    yield Stage(home, env)
    left = processes_with(str(home))
    shutil.rmtree(home, ignore_errors=True)
    for place in (home / "cache", home / "other"):
        remove_ram(place)
        tag = ram_directory(place).name.rpartition("-")[2]
        for uid in (os.getuid(), 65534):
            shutil.rmtree(f"/dev/shm/cachefs-{uid}-{tag}", ignore_errors=True)
    assert not left


def device(mode: str) -> str:
    return f"[ -e $PWD/fuse ] || mknod $PWD/fuse c 10 229; chmod {mode} $PWD/fuse; mount --bind $PWD/fuse /dev/fuse"


NO_SUID = not os.stat(shutil.which("fusermount3") or "/dev/null").st_mode & 0o4000
as_nobody = pytest.mark.skipif(NO_SUID, reason="fusermount3 is not setuid")


@pytest.mark.root
class TestMachine:
    def test_no_device(self, stage: Stage, bucket: Bucket) -> None:
        done = stage.play(f"mount_it {bucket.url}", before="mount -t tmpfs none /dev")
        one_line(done)
        assert "/dev/fuse is missing: modprobe fuse" in done.stderr

    @as_nobody
    def test_a_user_mounts_reads_and_unmounts(self, stage: Stage, bucket: Bucket) -> None:
        data = bucket.put("file", 3 << 20)
        done = stage.play(
            f"mount_it {bucket.url}; md5sum < $M/file; stat -c %u $M/file; cachefs status $M >/dev/null; "
            "cachefs umount $M; ls -A $M",
            before=f"cd {stage.home}; {device('666')}",
            user=True,
        )
        assert done.returncode == 0, done.stderr
        import hashlib

        assert done.stdout == f"{hashlib.md5(data).hexdigest()}  -\n65534\n"

    @pytest.mark.long
    @as_nobody
    def test_a_user_is_told_which_backend_serves_and_why(self, stage: Stage, bucket: Bucket) -> None:
        bucket.put("file", 10)
        log = stage.home / "run/log"
        done = stage.play(
            f"mount_it --log-file={log} {bucket.url}; cat $M/file >/dev/null; cachefs status $M; cachefs umount $M",
            before=f"cd {stage.home}; {device('666')}",
            user=True,
        )
        assert done.returncode == 0, done.stderr
        why = "the kernel reads nothing by itself: only root may register backing files"
        assert f"fuse        native: {why}\n" in done.stdout
        assert f"backend: native ({why})" in log.read_text()

    @pytest.mark.long
    @as_nobody
    @pytest.mark.parametrize("backend", ["native", pytest.param("pyfuse3", marks=pytest.mark.long)])
    @pytest.mark.parametrize(
        "end",
        [
            pytest.param("cachefs umount $M", id="cachefs umount", marks=pytest.mark.long),
            pytest.param("fusermount3 -u $M", id="fusermount3"),
            pytest.param("kill -TERM $D", id="SIGTERM", marks=pytest.mark.long),
            # What is killed leaves a dead mount, which the next start clears away.
            pytest.param(
                'kill -KILL $D; gone; test -z "$(ls $M 2>/dev/null)"; writes; D=$(pid); cachefs umount $M',
                id="SIGKILL",
                marks=pytest.mark.long,
            ),
        ],
    )
    def test_a_user_writes_and_each_end_leaves_no_mount(
        self, stage: Stage, bucket: Bucket, backend: str, end: str
    ) -> None:
        done = stage.play(
            f"""
pid() {{ cachefs status --json $M | python3 -c 'import json, sys; print(json.load(sys.stdin)["pid"])'; }}
gone() {{ while kill -0 $D 2>/dev/null; do sleep 0.02; done; }}
writes() {{ mount_it --fuse={backend} {bucket.url}; echo new > $M/new; mv $M/new $M/name; cat $M/name; }}
writes; D=$(pid)
{end}
gone
! grep -q "$M " /proc/self/mountinfo
""",
            before=f"cd {stage.home}; {device('666')}",
            user=True,
        )
        assert done.returncode == 0, done.stderr
        assert set(done.stdout.split()) == {"new"}

    @pytest.mark.long
    @as_nobody
    def test_a_user_can_have_no_files_opened_with_a_request(self, stage: Stage, bucket: Bucket) -> None:
        bucket.put("file", 10)
        done = stage.play(
            f"mount_it --zero-open --consistency=immutable {bucket.url}; cat $M/file | wc -c; cachefs status $M; "
            "cachefs umount $M",
            before=f"cd {stage.home}; {device('666')}",
            user=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("10\n")
        assert "fuse        native: no file is opened" in done.stdout
        assert "warning" not in done.stdout

    @as_nobody
    def test_what_fusermount3_refuses_is_said(self, stage: Stage, bucket: Bucket) -> None:
        refuse = "printf '#!/bin/sh\\necho refused >&2\\nexit 1\\n' > no; chmod 755 no"
        done = stage.play(
            f"mount_it --fuse=native {bucket.url}",
            before=f"cd {stage.home}; {device('666')}; {refuse}; mount --bind no $(command -v fusermount3)",
            user=True,
        )
        one_line(done)
        assert "--fuse native cannot serve here: no connection through fusermount3: refused" in done.stderr

    @as_nobody
    def test_a_device_a_user_may_not_open(self, stage: Stage, bucket: Bucket) -> None:
        done = stage.play(f"mount_it {bucket.url}", before=f"cd {stage.home}; {device('600')}", user=True)
        one_line(done)
        assert "no permission to open /dev/fuse" in done.stderr

    @as_nobody
    def test_allow_other_for_a_user_needs_a_line_in_fuse_conf(self, stage: Stage, bucket: Bucket) -> None:
        bucket.put("file", 10)
        (stage.home / "conf").write_text("# user_allow_other\n")
        before = f"cd {stage.home}; {device('666')}; mount --bind conf /etc/fuse.conf"
        done = stage.play(f"mount_it --allow-other {bucket.url}", before=before, user=True)
        one_line(done)
        assert "user_allow_other in /etc/fuse.conf" in done.stderr
        (stage.home / "conf").write_text("user_allow_other\n")
        done = stage.play(
            f"mount_it --allow-other {bucket.url}; ls $M; cachefs umount $M", before=before, user=True
        )
        assert (done.returncode, done.stdout) == (0, "file\n"), done.stderr

    @as_nobody
    def test_a_user_forbids_programs(self, stage: Stage, bucket: Bucket) -> None:
        done = stage.play(
            f"mount_it -o noexec {bucket.url}; grep $M /proc/self/mountinfo; cachefs umount $M",
            before=f"cd {stage.home}; {device('666')}",
            user=True,
        )
        assert "noexec" in done.stdout, done.stderr

    @as_nobody
    def test_a_mountpoint_of_somebody_else(self, stage: Stage, bucket: Bucket) -> None:
        done = stage.play(
            f"mount_it {bucket.url}",
            before=f"cd {stage.home}; {device('666')}; chown root {stage.home}/mnt",
            user=True,
        )
        one_line(done)
        assert "not writable by this user" in done.stderr

    @pytest.mark.long
    @as_nobody
    def test_other_users_see_nothing_without_allow_other(self, stage: Stage, bucket: Bucket) -> None:
        bucket.put("file", 10)
        nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups"
        done = stage.play(
            f"mount_it {bucket.url}; {nobody} ls $M || echo refused; cachefs umount $M; "
            f"mount_it --allow-other {bucket.url}; {nobody} ls $M; cachefs umount $M"
        )
        assert done.stdout == "refused\nfile\n", done.stderr

    @pytest.mark.parametrize("backend", ["auto", "native", "pyfuse3"])
    def test_a_root_without_the_right_to_mount(self, stage: Stage, bucket: Bucket, backend: str) -> None:
        script = f"setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin sh {stage.home}/inner"
        words = f"mount --fuse={backend} --cache-dir={stage.home}/other {bucket.url} {stage.home}/mnt"
        (stage.home / "inner").write_text(f"exec {' '.join(COMMAND)} {words}\n")
        done = stage.play(script)
        one_line(done)
        assert "may not mount" in done.stderr
