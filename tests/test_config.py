"""Config: the layers, what each value may be, what a refusal says, and the way there and back."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.base import units
from cachefs.base.client import control_path
from cachefs.base.errors import ConfigError
from cachefs.base.linux import memory_limit
from cachefs.base.linux import parse as parse_mountinfo
from cachefs.base.units import FOREVER, Size
from cachefs.config import layers
from cachefs.config.config import INHERITED, ROWS, Config, Source, default_cache_dir
from cachefs.config.options import SECRET_ADVICE

PLACES = {"source": "s3://bucket/prefix", "mountpoint": "/mnt/data"}


def load(*o: str, environ: dict[str, str] | None = None, **argv: object) -> Config:
    return layers.load(PLACES | argv, o, environ or {})


def refusal(*o: str, environ: dict[str, str] | None = None, **argv: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*o, environ=environ, **argv)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1K", 1024),
        ("1KiB", 1024),
        ("1KB", 1000),
        ("1kb", 1000),
        ("100G", 100 << 30),
        ("512MiB", 512 << 20),
        ("1.5TB", 1_500_000_000_000),
        ("0.5g", 1 << 29),
        ("7 MiB", 7 << 20),
        ("12B", 12),
    ],
)
def test_bytes(text: str, count: int) -> None:
    assert units.parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "-1", "1X", "1e9", "1,5G", "10%", "١G G", "nan", "1 GG"])
def test_no_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="write it like"):
        units.parse_bytes(text)


@pytest.mark.parametrize("text", ["8", "500", "1048575", " 8 "])
@pytest.mark.parametrize(
    "option", ["ram", "cache_size", "keep_free", "pin_budget", "max_readahead", "download_limit"]
)
def test_a_small_bare_number_is_no_capacity(option: str, text: str) -> None:
    """`--ram 8` asks for gigabytes, and got bytes."""
    line = refusal(**{option: text})
    number = text.strip()
    assert f"is a number without a unit: write {number}G or {number}M, or {number}B for bytes" in line


def test_a_bare_number_may_be_large_or_nothing_or_say_that_it_is_bytes() -> None:
    assert load(cache_size="1048576").cache_size == Size(bytes=1 << 20)
    assert load(ram="0").ram == Size(bytes=0)
    assert load(ram="8B").ram == Size(bytes=8)
    assert load(download_limit="200MB/s").download_limit == 200_000_000


@given(st.integers(0, 1 << 60))
def test_bytes_round_trip(count: int) -> None:
    assert units.parse_bytes(units.format_bytes(count)) == count
    assert Size.parse(str(Size(bytes=count))) == Size(bytes=count)


@given(st.integers(0, 100_000))
def test_percent_round_trip(thousandths: int) -> None:
    size = Size(percent=thousandths / 1000)
    assert Size.parse(str(size)) == size


def test_size_resolves_against_the_whole() -> None:
    assert Size.parse("10%").resolve(1000) == 100
    assert Size.parse("2K").resolve(1000) == 2048
    for text in ("101%", "-1%", "%", "nan%"):
        with pytest.raises(ValueError, match="percentage"):
            Size.parse(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 60),
        ("60s", 60),
        ("500ms", 0.5),
        ("5m", 300),
        ("1h", 3600),
        ("2d", 172800),
        ("forever", FOREVER),
        ("0", 0),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds
    assert units.parse_duration(units.format_duration(seconds)) == seconds


@given(st.integers(0, 0o777))
def test_mode_round_trip(mode: int) -> None:
    assert units.parse_mode(units.format_mode(mode)) == mode


# --- layers --------------------------------------------------------------------------------------


def test_precedence(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('concurrency = 1\nregion = "file"\nprofile = "file"\nlog_level = "error"\n')
    environ = {"CACHEFS_CONCURRENCY": "2", "CACHEFS_REGION": "env", "CACHEFS_PROFILE": "env"}
    config = load("concurrency=3,region=o", config=str(file), concurrency="4", environ=environ)
    assert (config.concurrency, config.region, config.profile, config.log_level) == (4, "o", "env", "error")
    assert config.block_size == 1 << 20
    assert config.origins["concurrency"] == "--concurrency"
    assert config.origins["region"] == "-o region"
    assert config.origins["profile"] == "CACHEFS_PROFILE"
    assert config.origins["log_level"] == f"{file}: log_level"


def test_every_option_in_every_layer(tmp_path: Path) -> None:
    """One row is enough: argv, -o, environment and file all accept what --print-config shows."""
    given = {"endpoint_url": "http://minio:9000", "region": "r", "profile": "p", "peers": "dns:nodes:7070"}
    given |= {"peer_listen": "[::1]:7070", "peer_key_file": "/k", "etcd_ca": "/e"}
    given |= {"metrics": "127.0.0.1:9400", "sse_kms_key": "alias/data"}
    given |= {"peer_cert": "/c", "peer_cert_key": "/p", "peer_ca": "/a"}
    shown = tomllib.loads(layers.dump(load(**given)))
    file = tmp_path / "c.toml"
    for name, row in ROWS.items():
        if row.flag_only:
            continue
        value = shown[name]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        file.write_text(f"{name} = {text if isinstance(value, bool | int) else repr(text)}\n")
        expected = getattr(load(**{name: text}), name)
        assert getattr(load(f"{name.replace('_', '-')}={text}"), name) == expected
        assert getattr(load(environ={f"CACHEFS_{name.upper()}": text}), name) == expected
        assert getattr(load(config=str(file)), name) == expected


def test_switches() -> None:
    assert load("allow_other").allow_other
    assert not load("allow_other=no").allow_other
    assert load("no-sign-request").sources[0].anonymous
    assert not load("allow_other", allow_other=False).allow_other
    assert load(environ={"CACHEFS_ANONYMOUS": "1"}).sources[0].anonymous
    assert not load(environ={"CACHEFS_ANONYMOUS": ""}).sources[0].anonymous


def test_where_metrics_are_shown() -> None:
    assert load(metrics="9400").metrics == load(metrics=":9400").metrics == "127.0.0.1:9400"
    assert load(metrics="[::]:9400").metrics == "[::]:9400"
    for wrong in ("localhost", "a b:1", "host:65536", "http://host:1"):
        assert "HOST:PORT" in refusal(metrics=wrong)


def test_fstab_options() -> None:
    config = load(r"ro,allow_other,cache-size=500G,_netdev,nofail,x-systemd.automount,noatime,region=a\,b,,")
    assert config.allow_other
    assert config.cache_size == Size(bytes=500 << 30)
    assert config.region == "a,b"
    assert layers.split_options("a\\\\,b\\") == ["a\\", "b\\"]


def test_noexec_of_fstab_is_an_option() -> None:
    assert load("nosuid,nodev").exec
    assert not load("noexec,nosuid").exec
    assert load("noexec,exec").exec  # the last one counts, as for mount(8)
    assert load("noexec", exec=True).exec
    assert "unknown option 'noexec'" in refusal("noexec=yes")


def test_derived_values() -> None:
    assert (load().metadata_ttl, load().negative_ttl) == (60, 5)
    assert (load("consistency=strict").metadata_ttl, load("consistency=strict").negative_ttl) == (0, 0)
    assert load("consistency=immutable").metadata_ttl == FOREVER
    assert load("consistency=immutable,metadata_ttl=5m").metadata_ttl == 300
    assert (load().file_mode, load().dir_mode) == (0o644, 0o755)
    assert (load("umask=027").file_mode, load("umask=027").dir_mode) == (0o640, 0o750)
    assert load("umask=027,file_mode=0444").file_mode == 0o444
    assert (load().uid, load().gid) == (os.getuid(), os.getgid())
    assert load(uid="root").uid == 0
    assert load(uid="1847600513").uid == 1847600513  # directory services number their users so
    assert load().ram.resolve(0) == min(memory_limit() // 4, 4 << 30)
    assert load(foreground=True).log_file is None
    assert load().log_file == load().cache_dir / "cachefs.log"
    assert load("download_limit=200MB/s").download_limit == 200_000_000


def test_made_directly() -> None:
    config = Config(sources=(Source("", "file:///x"),), mountpoint=Path("/mnt"), consistency="strict")
    assert config.metadata_ttl == 0
    assert config.cache_dir == default_cache_dir(config.sources)


def test_the_cache_directory_follows_the_source() -> None:
    assert load(mountpoint="/other").cache_dir == load().cache_dir
    assert load("endpoint_url=http://minio:9000").cache_dir != load().cache_dir
    assert load(source="s3://bucket/other").cache_dir != load().cache_dir
    assert load(source="s3://bucket/prefix/").cache_dir == load().cache_dir
    assert "bucket-prefix" in load().cache_dir.name


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    config = load(mountpoint="data", cache_dir="~/cache")
    assert config.mountpoint == tmp_path / "data"
    assert config.cache_dir == Path("/home/somebody/cache")
    assert load(source="./here").sources[0].url == f"file://{tmp_path}/here"


# --- several sources -----------------------------------------------------------------------------


def test_several_sources(tmp_path: Path) -> None:
    file = tmp_path / "stores.toml"
    file.write_text(
        """
        mountpoint = "/mnt/data"
        region = "eu-west-1"
        client = "fsspec"
        [[source]]
        name = "imagenet"
        url = "s3://images/v1"
        endpoint-url = "http://minio:9000"
        client = "curl"
        [[source]]
        name = "text"
        url = "az://corpus"
        anonymous = true
        """
    )
    config = layers.load({"config": str(file)}, (), {})
    assert config.sources == (
        Source("imagenet", "s3://images/v1", "curl", "http://minio:9000", "eu-west-1"),
        Source("text", "az://corpus", "fsspec", None, "eu-west-1", None, True),
    )
    alone = layers.load({"config": str(file), "source": "gs://else"}, (), {})
    assert [(source.name, source.url) for source in alone.sources] == [("", "gs://else")]


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ('[[source]]\nname = "a"', "source 1: no url"),
        (
            '[[source]]\nname = "a"\nurl = "s3://a"\n[[source]]\nurl = "s3://b"',
            "source 2: name: '' is not a directory name",
        ),
        ('[[source]]\nname = "a"\nurl = "s3://a"\n[[source]]\nname = "a"\nurl = "s3://b"', "'a' is taken"),
        ('[[source]]\nname = "a/b"\nurl = "s3://a"', "not a directory name"),
        ('[[source]]\nname = ".."\nurl = "s3://a"', "not a directory name"),
        ('[[source]]\nname = "a\\nb"\nurl = "s3://a"', "not a directory name"),
        ('[[source]]\nnmae = "a"\nurl = "s3://a"', "did you mean name?"),
        ('[[source]]\nname = "a"\nurl = "s3://a"\nsecret_key = "SESAME"', SECRET_ADVICE),
        ('source = ["s3://a"]', "source 1: not a table"),
        (
            'read-only = true\nread_only = false\n[[source]]\nurl = "s3://a"',
            "read_only: the same option as ",
        ),
        (
            '[[source]]\nurl = "s3://a"\nro = true\nread_only = false',
            "source 1: read_only: the same option as",
        ),
    ],
)
def test_refused_sources(tmp_path: Path, tables: str, words: str) -> None:
    file = tmp_path / "stores.toml"
    file.write_text(tables)
    with pytest.raises(ConfigError) as caught:
        layers.load({"config": str(file), "mountpoint": "/mnt"}, (), {})
    assert words in str(caught.value)
    assert str(file) in str(caught.value)
    assert "SESAME" not in str(caught.value)


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("cache_size=12X", "-o cache_size: '12X' is not a size: write it like 100G, 512MiB or 10%"),
        ("block_size=3M", "-o block_size: '3M' is not a power of two from 64K to 16M"),
        ("block_size=32M", "power of two"),
        ("consistency=strickt", "'strickt' is not one of strict, default, immutable"),
        ("metadata_ttl=soon", "'soon' is not a time: write it like 60"),
        ("umask=9", "'9' is not an octal mode"),
        ("umask=7777", "'7777' is more than permission bits"),
        ("concurrency=0", "'0' is not a number from 1 up"),
        ("uid=no-such-user", "not a user of this machine"),
        ("allow_other=maybe", "'maybe' is neither yes nor no"),
        ("rw=1", "unknown option 'rw'"),
        ("zero_open,consistency=immutable,rw", "mount it with --read-only"),
        ("zero_open,consistency=immutable,writeback", "mount it without --writeback"),
        ("cache_sise=1G", "unknown option 'cache_sise': did you mean cache_size?"),
        ("cache_size", "needs a value: write -o cache_size=SIZE"),
        ("endpoint_url=minio:9000", "not the address of a server: write it like http://minio:9000"),
        ("endpoint_url=http://minio:99999", "not the address of a server: write it like http://minio:9000"),
        ("endpoint_url=http://no such host", "not the address of a server"),
        ("endpoint_url=s3://minio", "write it like http://minio:9000"),
        ("timeout=0", "'0' is no time to wait: write it like 60s"),
        ("mount_timeout=0s", "no time to wait"),
        ("frobnicate", "unknown option 'frobnicate'"),
        ("print_config", "-o: print_config is for the command line alone: --print-config"),
        ("config=/etc/c.toml", "-o: config is for the command line alone: --config"),
        ("uid=4294967295", "not a user of this machine"),
        ("secret_access_key=SESAME", SECRET_ADVICE),
    ],
)
def test_refused_options(option: str, words: str) -> None:
    text = refusal(option)
    assert words in text
    assert "SESAME" not in text


def test_a_refusal_names_the_layer(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('ram = "lots"\n')
    assert refusal(config=str(file)).startswith(f"{file}: ram: 'lots' is not a size")
    assert refusal(ram="lots").startswith("--ram: ")
    assert refusal(environ={"CACHEFS_RAM": "lots"}).startswith("CACHEFS_RAM: ")
    assert "did you mean CACHEFS_CACHE_SIZE?" in refusal(environ={"CACHEFS_CACHE_SZIE": "1G"})
    twice = refusal(environ={"CACHEFS_RO": "yes", "CACHEFS_READ_ONLY": "no"})
    assert twice == "CACHEFS_READ_ONLY: the same option as CACHEFS_RO: leave one of them out"
    assert load(environ={"CACHEFS_PORT": "tcp://10.0.0.1:80", "CACHEFS_SERVICE_HOST": "10.0.0.1"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('a = "\n', "line 1"),
        ("ram = [1]\n", "ram: write a single value"),
        ("umask = 22\n", 'write it in quotes, "0644"'),
        ("cache_sizes = 1\n", "did you mean cache_size?"),
        ("config = 'x'\n", "config is for the command line alone: --config"),
    ],
)
def test_refused_files(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(content)
    text = refusal(config=str(file))
    assert words in text
    assert str(file) in text


def test_unreadable_files(tmp_path: Path) -> None:
    assert "No such file" in refusal(config=str(tmp_path / "none.toml"))
    assert "directory" in refusal(environ={"CACHEFS_CONFIG": str(tmp_path)})
    (tmp_path / "latin.toml").write_bytes(b'region = "\xff"')
    assert "not UTF-8" in refusal(config=str(tmp_path / "latin.toml"))
    for text in ("ram = " + "9" * 5000, "ram = " + "[" * 5000):
        (tmp_path / "deep.toml").write_text(text)
        assert "not TOML" in refusal(config=str(tmp_path / "deep.toml"))


def test_a_file_from_a_windows_editor_begins_with_a_bom(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_bytes(b'\xef\xbb\xbfregion = "x"\r\n')
    assert load(config=str(tmp_path / "c.toml")).region == "x"


def test_places_are_needed() -> None:
    with pytest.raises(ConfigError, match="no SOURCE: write cachefs mount s3://"):
        layers.load({"mountpoint": "/mnt"}, (), {})
    with pytest.raises(ConfigError, match="no MOUNTPOINT"):
        layers.load({"source": "s3://b"}, (), {})


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:SESAME@bucket/x",
        "s3://AKIA:SES/AME@bucket/x",
        "https://user:SESAME@host/",
        "az://c/p?sv=2020&sig=SESAME",
        "https://h/p?X-Amz-Signature=SESAME",
        "https://h/p?AWSAccessKeyId=SESAME",
        "https://h/p?token=SESAME",
    ],
)
def test_secrets_are_refused_and_not_repeated(url: str) -> None:
    for text in (refusal(source=url), refusal(f"endpoint_url={url}")):
        assert SECRET_ADVICE in text
        assert "SES" not in text


@pytest.mark.parametrize(
    "url",
    [
        "abfss://container@account.dfs.core.windows.net/path",
        "https://host:8080/data",
        "http://[::1]:9000/bucket",
        "http://[::1]/bucket",
        "https://host/list?prefix=a&keyboard=1",
        "simplecache::s3://bucket/x",
        "s3://bucket/time=12:30/a?b",
        "s3://bucket/double//x",
    ],
)
def test_urls_that_are_fine(url: str) -> None:
    assert load(source=url).sources[0].url == url


@pytest.mark.parametrize("url", ["bucket/prefix", "s3:bucket", "s3://", "s3:///", "s3://b\nx"])
def test_urls_that_are_none(url: str) -> None:
    assert refusal(source=url).startswith("SOURCE: ")


# --- there and back ------------------------------------------------------------------------------


def test_print_config_can_be_fed_back(tmp_path: Path) -> None:
    stores = tmp_path / "stores.toml"
    stores.write_text(
        '[[source]]\nname = "a b"\nurl = "s3://a"\nendpoint_url = "http://h:1"\n[[source]]\nname = "ü\\"\\\\"\nurl = "/b"\n'
    )
    for config in (
        load(),
        load(
            "cache_size=33.3%,ram=0,metadata_ttl=1.5,negative_ttl=forever,umask=0,uid=7,allow_other,log_file=/l o/g"
        ),
        load(foreground=True, download_limit="1.5MB", timeout="90s", environ={"CACHEFS_KEEP_FREE": "1G"}),
        layers.load({"config": str(stores), "mountpoint": '/mnt/"\\ü\x7f'}, (), {}),
    ):
        file = tmp_path / "effective.toml"
        file.write_text(layers.dump(config))
        again = layers.load({"config": str(file)}, (), {})
        assert again == config


def test_a_source_has_options_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(
        'concurrency = 8\nmetadata_ttl = "7s"\nprofile = "all"\n'
        '[[source]]\nname = "frozen"\nurl = "s3://a"\nread_only = true\nconsistency = "immutable"\n'
        "concurrency = 4\nrequester_pays = true\n"
        '[[source]]\nname = "live"\nurl = "s3://b"\nnegative_ttl = "1s"\nprefetch = "off"\n'
        'sse_kms_key = "alias/x"\nprofile = "own"\n'
    )
    config = layers.load({"config": str(file), "mountpoint": "/m"}, (), {})
    frozen, live = config.sources

    def of(source: Source) -> dict[str, object]:
        return {name: config.of(source, name) for name in INHERITED}

    assert of(frozen) == {
        "read_only": True,
        "consistency": "immutable",
        "metadata_ttl": FOREVER,  # by its own consistency, not by the mount's TTL
        "negative_ttl": 3600.0,
        "prefetch": "on",
        "concurrency": 4,
    }
    assert of(live) == {
        "read_only": False,
        "consistency": "default",
        "metadata_ttl": 7.0,
        "negative_ttl": 1.0,
        "prefetch": "off",
        "concurrency": 8,
    }
    assert (frozen.requester_pays, frozen.sse_kms_key, frozen.profile) == (True, None, "all")
    assert (live.requester_pays, live.sse_kms_key, live.profile) == (False, "alias/x", "own")
    again = tmp_path / "again.toml"
    again.write_text(layers.dump(config))
    assert layers.load({"config": str(again)}, (), {}) == config


def test_zero_open_holds_for_every_source(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    head = 'mountpoint = "/m"\nzero_open = true\n'
    file.write_text(head + '[[source]]\nname = "a"\nurl = "s3://a"\nconsistency = "immutable"\n')
    assert layers.load({"config": str(file)}, (), {}).zero_open
    for own in ('consistency = "default"', 'consistency = "immutable"\nread_only = false'):
        file.write_text(head + f'[[source]]\nname = "a"\nurl = "s3://a"\n{own}\n')
        with pytest.raises(ConfigError, match="--zero-open"):
            layers.load({"config": str(file)}, (), {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[cache]\nsize = "1G"\n', "for [cache] size write cache_size = … above the first [[source]]"),
        ('[cache]\nram = "1G"\n', "for [cache] ram write ram = …"),
        ('[freshness]\nmetadata-ttl = "1s"\n', "for [freshness] metadata-ttl write metadata_ttl = …"),
        ("[nothing]\nx = 1\n", "no section [nothing] is known"),
        ('[source]\nurl = "s3://b"\n', "write [[source]]"),
    ],
)
def test_sections_are_answered_with_the_flat_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    assert words in refusal(config=str(file))


def test_print_config_says_where_from() -> None:
    text = layers.dump(load("ram=1G", cache_size="5G", environ={"CACHEFS_REGION": "eu"}))
    assert 'cache_size = "5G"  # --cache-size' in text
    assert 'ram = "1G"  # -o ram' in text
    assert 'region = "eu"  # CACHEFS_REGION' in text
    assert 'keep_free = "10%"  # default' in text
    assert "# endpoint_url is not set" in text


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "cache_size": st.integers(1 << 20, 1 << 50).map(str),
            "keep_free": st.integers(0, 100).map(lambda n: f"{n}%"),
            "block_size": st.sampled_from(["64K", "1M", "16M"]),
            "metadata_ttl": st.integers(0, 10**9).map(lambda n: f"{n}ms"),
            "region": st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip),
            "umask": st.integers(0, 0o777).map(units.format_mode),
            "consistency": st.sampled_from(["strict", "default", "immutable"]),
        },
    )
)
def test_any_config_can_be_fed_back(argv: dict[str, str]) -> None:
    config = load(**argv)
    table = tomllib.loads(layers.dump(config))
    places = {"mountpoint": table.pop("mountpoint"), "source": table.pop("source")[0]["url"]}
    assert layers.load(table | places, (), {}) == config


# --- places --------------------------------------------------------------------------------------


def test_control_paths_fit_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Path("/mnt/" + "é" * 300)
    paths = {control_path(p) for p in (long, long / "x", Path("/mnt/a-b"), Path("/mnt/a/b"), Path("/"))}
    assert len(paths) == 5
    assert all(len(os.fsencode(path)) <= 107 for path in paths)
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert control_path(Path("/mnt")).parent == Path("/run/user/1000/cachefs")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * 90)
    assert len(os.fsencode(control_path(long))) <= 107


def test_mountinfo_escapes() -> None:
    line = (
        r"36 35 98:0 /mnt1 /mnt/with\040space\134 rw,noatime shared:1 - fuse.cachefs s3://b\011x rw,user_id=0"
    )
    (mount,) = parse_mountinfo(line + "\nrubbish\n")
    assert mount.path == "/mnt/with space\\"
    assert mount.source == "s3://b\tx"
    assert mount.is_cachefs
    assert "user_id=0" in mount.options


def machine(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> int:
    files = {
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": mountinfo,
        "proc/meminfo": "MemTotal: 8192 kB\n",
    } | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return memory_limit(root)


V2 = "30 1 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
V1 = "35 31 0:32 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def test_memory_limit_v2_asks_parents(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/memory.max": "4000000\n"}
    assert machine(tmp_path, "0::/a/b\n", V2, files) == 4_000_000


def test_memory_limit_v2_in_a_container(tmp_path: Path) -> None:
    assert machine(tmp_path, "0::/\n", V2, {"sys/fs/cgroup/memory.max": "3000000\n"}) == 3_000_000
    assert machine(tmp_path, "0::/\n", V2, {"sys/fs/cgroup/memory.high": "2000000\n"}) == 2_000_000


def test_memory_limit_v1(tmp_path: Path) -> None:
    cgroup = "4:memory:/docker/abc\n0::/\n"
    files = {
        "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "5000000\n",
    }
    assert machine(tmp_path, cgroup, V1.format(root="/"), files) == 5_000_000


def test_memory_limit_v1_in_a_container(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "6000000\n"}
    assert machine(tmp_path, "4:memory:/docker/abc\n", V1.format(root="/docker/abc"), files) == 6_000_000
    assert machine(tmp_path / "host", "4:memory:/docker/abc\n", V1.format(root="/other"), files) == 6_000_000


def test_memory_limit_without_groups(tmp_path: Path) -> None:
    assert machine(tmp_path, "", "", {}) == 8 << 20
    assert memory_limit(tmp_path / "nothing") > 0


# --- writing -------------------------------------------------------------------------------------


def test_read_only_and_back(tmp_path: Path) -> None:
    assert not load().read_only
    file = tmp_path / "c.toml"
    file.write_text("read_only = false\nwriteback = true\nupload_limit = '50M'\n")
    assert load("ro").read_only
    assert load("read_only").read_only
    assert not load("rw").read_only
    assert not load(read_only=False).read_only
    assert not load(environ={"CACHEFS_READ_ONLY": "no"}).read_only
    config = load(config=str(file))
    assert (config.read_only, config.writeback, config.upload_limit) == (False, True, 50 << 20)
    assert load("ro", config=str(file)).read_only
    assert not load("ro", read_only=False).read_only  # the command line wins
    assert not load("ro,rw").read_only  # as mount(8) has it: the last one
    assert load("rw,ro").read_only


def test_what_never_changes_is_not_written() -> None:
    assert load("zero_open,consistency=immutable").read_only
    assert load("zero_open,consistency=immutable,ro").read_only
