# ruff: noqa: RUF009 (a field made by a function of ours is still a field)
"""The frozen, typed `Config` of a mount, and the table of all options.

Each option is a field of the dataclass, whose metadata has its parser, its help and its group. The options of the command
line, the names in `-o`, the environment and the file, and the output of `--print-config` come from these rows, so they
cannot differ. `layers` reads them.

Some defaults are derived from other options: the cache directory from the sources, times to live from the consistency
preset. `Config` sets them when it is created.

A Config holds no secret: credentials come from the environment variables and files of the origins' own tools.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from cachefs.base.client import slug
from cachefs.base.linux import memory_limit
from cachefs.base.names import OnOutage
from cachefs.base.units import FOREVER, Size
from cachefs.config.options import (
    BLOCK_SIZE,
    BYTE_COUNT,
    COUNT,
    DERIVED,
    DURATION,
    ENDPOINT,
    GROUP,
    LISTEN,
    MODE,
    OUTAGE,
    PATH,
    RATE,
    SIZE,
    SWITCH,
    TEXT,
    TIMEOUT,
    USER,
    WEIGHT,
    Row,
    choice,
)

Consistency = Literal["strict", "default", "immutable"]
Verify = Literal["full", "first", "none"]
Eviction = Literal["auto", "epoch", "lru"]
FuseChoice = Literal["auto", "native", "pyfuse3"]
Client = Literal["auto", "curl", "fsspec"]
OnConflict = Literal["overwrite", "fail"]
Prefetch = Literal["on", "off"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

GROUPS = {
    "cache_dir": "Cache",
    "read_only": "Writing",
    "consistency": "Freshness",
    "client": "Source",
    "uid": "Permissions",
    "concurrency": "Transfer",
    "peers": "Peers",
    "foreground": "Running",
}
"""The first option of each group → the group's heading in the help text."""

METADATA_TTL = {"strict": 0.0, "default": 60.0, "immutable": FOREVER}
NEGATIVE_TTL = {"strict": 0.0, "default": 5.0, "immutable": 3600.0}
_TTLS = {"metadata_ttl": METADATA_TTL, "negative_ttl": NEGATIVE_TTL}

LOG_NAME = "cachefs.log"


@dataclass(frozen=True, slots=True)
class Source:
    """One origin of the mount. `name` is its top-level directory, or "" for a single source at the root."""

    name: str
    url: str
    client: Client = "auto"
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    anonymous: bool = False
    requester_pays: bool = False
    sse_kms_key: str | None = None
    read_only: bool | None = None
    consistency: Consistency | None = None
    metadata_ttl: float | None = None
    negative_ttl: float | None = None
    prefetch: Prefetch | None = None
    concurrency: int | None = None


INHERITED = ("read_only", "consistency", "metadata_ttl", "negative_ttl", "prefetch", "concurrency")
"""Options of a source that default to the mount's value (`Config.of`)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All options of a mount. Paths are absolute. A size in percent is resolved where the total is known.

    Options that say how an origin is reached (`client`, `endpoint_url`, …) are read from its `Source`, where
    `layers.load` has filled in those of the mount; options in `INHERITED` are read with `of`. `dataclasses.replace`
    does not derive values again.
    """

    sources: tuple[Source, ...]
    mountpoint: Path
    descriptor: int | None = field(default=None, compare=False)
    """The descriptor of /dev/fuse, if another process has mounted it at `mountpoint` (/dev/fd/N if that is not visible)."""

    cache_dir: Path = PATH(
        "Directory of the SSD cache. By default, the same source has the same cache at every mountpoint.",
        default="/var/cache/cachefs/SOURCE for root, else ~/.cache/cachefs/SOURCE",
        derive=lambda config: default_cache_dir(config.sources),
    )
    cache_size: Size = SIZE(
        "How much of the SSD to use: 500G, or a share of the space that is free or already holds this cache.",
        value=Size(percent=80.0),
    )
    ram: Size = SIZE(
        "How much memory holds blocks: 8G, or a share of this process's memory limit (cgroups included). "
        "0: no blocks in memory.",
        default="25%, at most 4G",
        derive=lambda _: Size(bytes=min(memory_limit() // 4, 4 << 30)),
    )
    keep_free: Size = SIZE(
        "Disk space that the cache always leaves free: 50G, or a share of the filesystem.",
        value=Size(percent=10.0),
    )
    block_size: int = BLOCK_SIZE("Size of a cached block; a power of two, 64K to 16M.", value=1 << 20)
    verify: Verify = choice(Verify)(
        "When cached blocks are checked against their checksum: at every read from disk, at the first one "
        "after a start, or never. With `full`, the daemon reads every file, so that the kernel never reads a damaged one by "
        "itself. Small objects whose etag is an MD5 are compared with it when they are fetched: all, some, or none.",
        value="first",
    )

    eviction: Eviction = choice(Eviction)(
        "What is evicted first when the cache is full. lru: the least recently used; epoch: what the present epoch of "
        "training has read already; auto: like epoch for datasets that are read in epochs, else like lru.",
        value="auto",
    )
    pin_budget: Size = SIZE(
        "How much may be pinned: 100G, or a share of the cache.", value=Size(percent=50.0)
    )

    read_only: bool = SWITCH(
        "Refuse every change. Small files that are read repeatedly are then read faster.",
        default="no; yes with --zero-open, and where the origin cannot be written",
        flags=("--ro",),
        derive=lambda config: config.zero_open,
    )
    writeback: bool = SWITCH(
        "close and fsync return when the file is safe on this node's disk, and it is uploaded after that. Without this "
        "option, they return when it is at the origin.",
        value=False,
    )
    upload_delay: float = DURATION(
        "With --writeback, how long a closed file waits for its upload: one that is replaced or removed before costs none.",
        value=1.0,
    )
    upload_limit: int = RATE("Most bytes a second to the origin: 200M. 0 is no limit.", value=0)
    on_conflict: OnConflict = choice(OnConflict)(
        "What happens to a file that another client has changed at the origin since it was opened here: the last close "
        "wins, or it fails.",
        value="overwrite",
    )
    flush_deadline: float = DURATION(
        "How long unmounting waits for uploads. With --writeback, the next mount of this cache uploads the files that are "
        "left.",
        value=60.0,
    )

    consistency: Consistency = choice(Consistency)(
        "strict asks the origin at every open; default uses cached attributes for a minute; immutable "
        "never asks again.",
        value="default",
    )
    metadata_ttl: float = DURATION(
        "How long cached attributes and listings are used: 60s, 5m, 1h, forever.",
        default="by --consistency: 0, 60s or forever",
        derive=lambda config: METADATA_TTL[config.consistency],
    )
    negative_ttl: float = DURATION(
        "How long a name that was missing is taken for missing, without asking the origin.",
        default="by --consistency: 0, 5s or 1h",
        derive=lambda config: NEGATIVE_TTL[config.consistency],
    )
    on_outage: OnOutage = OUTAGE(
        "While an origin does not answer: serve-stale uses cached names and attributes of any age; eio fails at once; wait "
        "waits for TIME. Cached blocks are read in each case.",
        default="serve-stale; eio with --consistency strict",
        derive=lambda config: OnOutage("eio" if config.consistency == "strict" else "serve-stale"),
    )

    client: Client = choice(Client)(
        "Library that talks to the origin. auto takes libcurl where it knows the scheme, else fsspec.",
        value="auto",
    )
    endpoint_url: str | None = ENDPOINT(
        "Address of an S3-, Azure- or Google-compatible store, such as http://minio:9000.", value=None
    )
    region: str | None = TEXT("Region of the bucket.", value=None)
    profile: str | None = TEXT("Named profile in ~/.aws/config to take credentials from.", value=None)
    anonymous: bool = SWITCH(
        "Send requests unsigned, for public data.", value=False, flags=("--no-sign-request",)
    )

    requester_pays: bool = SWITCH(
        "Pay for the requests to a requester-pays bucket (s3:// only).", value=False
    )
    sse_kms_key: str | None = TEXT(
        "KMS key that encrypts what is written (SSE-KMS; s3:// only).", value=None, metavar="KEY"
    )

    uid: int = USER(
        "Owner of files and directories.", default="the user who mounts", derive=lambda _: os.getuid()
    )
    gid: int = GROUP(
        "Group of files and directories.",
        default="the group of the user who mounts",
        derive=lambda _: os.getgid(),
    )
    umask: int = MODE("Bits removed from 0666 (files) and 0777 (directories).", value=0o022, default="022")
    file_mode: int = MODE(
        "Mode of files. This node remembers a mode that is set on a file.",
        default="0666 less umask: 0644",
        derive=lambda config: 0o666 & ~config.umask,
    )
    dir_mode: int = MODE(
        "Mode of directories.", default="0777 less umask: 0755", derive=lambda config: 0o777 & ~config.umask
    )
    allow_other: bool = SWITCH("Let other users access the mount, as far as the modes allow.", value=False)
    exec: bool = SWITCH("Let programs be run from the mount. --no-exec is noexec in fstab.", value=True)

    concurrency: int = COUNT("Most requests in flight to the origin; fewer while it throttles.", value=64)
    download_limit: int = RATE("Most bytes a second from the origin: 200M. 0 is no limit.", value=0)
    timeout: float = TIMEOUT(
        "How long a request may go without progress, retries included, before it fails.", value=60.0
    )
    max_readahead: int = BYTE_COUNT("Most bytes that are read ahead of a sequential reader.", value=64 << 20)
    prefetch: Prefetch = choice(Prefetch)(
        "Fetch files before they are opened: the rest of a directory of small files, the next shards, the files of hints.",
        value="on",
    )

    peers: str | None = TEXT(
        "Share the cache with other nodes, found by static:host:port,host:port, dns:name:port or "
        "etcd:http://host:2379/prefix.",
        value=None,
        metavar="PLACE",
    )
    peer_listen: str | None = TEXT(
        "The address at which this node serves other nodes.",
        value=None,
        metavar="HOST:PORT",
        default="this machine's address in static:, every address and the port of dns:",
    )
    cache_group: str = TEXT("Nodes share only with nodes of the same group.", value="default", metavar="NAME")
    group_weight: float = WEIGHT(
        "This node's share of the group's data, relative to others.", value=1.0, default="1"
    )
    replicas: int = COUNT("How many nodes keep the same data, once they have read it.", value=1)
    sharing: bool = SWITCH("Serve other nodes. --no-sharing only requests data from them.", value=True)
    peer_key_file: Path | None = PATH(
        "File with the key that all nodes share; only its owner may read it.", value=None
    )
    peer_cert: Path | None = PATH("This node's certificate, shown to the others.", value=None)
    peer_cert_key: Path | None = PATH("The key of --peer-cert.", value=None)
    peer_ca: Path | None = PATH("The authority that signs the certificates of peers.", value=None)
    etcd_ca: Path | None = PATH("The authority that signs the certificate of an https etcd.", value=None)

    foreground: bool = SWITCH("Stay in the foreground and log to stderr.", value=False, flags=("-f",))
    fuse: FuseChoice = choice(FuseChoice)(
        "The FUSE backend. With native, as root, the kernel reads whole cached files by itself (Linux 6.9); auto takes it "
        "where possible.",
        value="auto",
    )
    zero_open: bool = SWITCH(
        "Open files without asking the daemon, for many small files that never change and stay in the page cache. Data that "
        "the page cache does not hold is read through the daemon. Needs --fuse native or auto, and --consistency immutable.",
        value=False,
    )
    restart: bool = SWITCH(
        "Start the daemon again when it dies, so that programs only wait, also those that write. With --no-restart, and "
        "where this is impossible (pyfuse3, before Linux 6.9), the mount ends with its daemon.",
        value=True,
    )
    nonempty: bool = SWITCH("Mount over a directory that is not empty.", value=False)
    mount_timeout: float = TIMEOUT("How long to wait for the mount to answer before giving up.", value=30.0)
    log_level: LogLevel = choice(LogLevel)("Lowest level that is logged.", value="info")
    log_format: LogFormat = choice(LogFormat)("Format of the log.", value="text")
    log_file: Path | None = PATH(
        "Log to this file (rotated at 10 MiB, three kept).",
        default="cachefs.log in the cache directory; stderr with -f",
        derive=lambda config: None if config.foreground else config.cache_dir / LOG_NAME,
    )

    metrics: str | None = LISTEN(
        "Serve metrics for Prometheus at /metrics, /healthz, /readyz, and a page for people at /, all without a password. A "
        "PORT alone listens for this machine only.",
        value=None,
    )
    print_config: bool = SWITCH(
        "Print the value of each option and where it came from, as a config file; then exit.",
        value=False,
        flag_only=True,
    )
    config: Path | None = PATH(
        "TOML file with any of these options, and with several sources: [[source]] name=… url=…",
        value=None,
        default="$CACHEFS_CONFIG",
        flag_only=True,
    )
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Option name → where its value was given, as `--print-config` shows it. Options with default values are not in it."""

    def __post_init__(self) -> None:
        for name, row in ROWS.items():
            if getattr(self, name) is DERIVED and row.derive is not None:
                object.__setattr__(self, name, row.derive(self))

    @property
    def identity(self) -> str:
        """The options on which records of open and dirty files depend: the next daemon of the mount must have the same."""
        sources = [(source.name, source.url) for source in self.sources]
        return repr((sources, str(self.cache_dir), self.block_size))

    def of(self, source: Source, name: str) -> Any:
        """The value of an option in `INHERITED` for a source: its own, else by its own consistency, else the mount's."""
        own = getattr(source, name)
        if own is None and source.consistency is not None and name in _TTLS:
            return _TTLS[name][source.consistency]
        return getattr(self, name) if own is None else own


def _rows() -> Iterator[tuple[str, Row]]:
    group = ""
    for item in fields(Config):
        if "row" in item.metadata:
            group = GROUPS.get(item.name, group)
            yield item.name, replace(item.metadata["row"], group=group)


ROWS = dict(_rows())
"""The options by the name that each has in every layer, with underscores; in the order of the help text."""


def default_cache_dir(sources: tuple[Source, ...]) -> Path:
    """The default directory. It depends on the sources alone, so a source has the same cache at every mountpoint."""
    of_user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    base = Path("/var/cache") if os.getuid() == 0 else Path(of_user).expanduser()
    unique = "\0".join(f"{source.name}\1{source.url}\1{source.endpoint_url or ''}" for source in sources)
    readable = "+".join(source.url.replace("://", "-") for source in sources)
    return base / "cachefs" / slug(readable, unique)
