"""The pages of documentation that are generated from tables: options, commands, metrics, exit codes, and the man pages.

``scripts/docs`` writes them; a test compares them with the tables."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from cachefs import __version__
from cachefs.base.metrics import SERIES, Metrics
from cachefs.cli.main import cli
from cachefs.config.config import GROUPS, ROWS
from cachefs.config.options import Row

NOTE = "<!-- Written by scripts/docs from the tables in the code: change those. -->"

LAYERS = """\
Each option can be given in four ways. The first of these that has it decides:

1. on the command line: `--cache-size 500G`
2. in `-o`, as in fstab, with dashes or underscores: `-o cache_size=500G`
3. in the environment: `CACHEFS_CACHE_SIZE=500G`
4. in the TOML file that `--config` or `CACHEFS_CONFIG` names: `cache_size = "500G"`

`cachefs mount --print-config …` shows the resulting values and where each came from. `--no-SWITCH` turns a
switch off again. Sizes: K, M, G, T and KiB, … are powers of 1024; KB, MB, … are powers of 1000. Times: 500ms, 60s, 5m,
1h, 2d, forever. No secret is an option: credentials come from the variables, files and roles that the origins' tools use.
"""

SOURCES = """\
## Sources in the file

A TOML file can show several origins under one mount, each as a directory of its name:

```toml
# cachefs mount --config data.toml /mnt/data
cache_dir = "/nvme/cachefs"
cache_size = "80%"

[[source]]
name = "imagenet"
url = "s3://public-datasets/imagenet"
anonymous = true

[[source]]
name = "ours"
url = "az://training/shards"
```

A single `[[source]]` without a `name` is shown at the mountpoint itself. `mountpoint = "/mnt/data"` in the file takes the
place of the argument.
"""

METRICS = """\
`cachefs mount --metrics 9400 …` shows these at `http://127.0.0.1:9400/metrics`. `cachefs status --json` has the counters
under the names in the second column. [grafana.json](../grafana.json) is a dashboard for
them, and [Find what is slow](../how-to/find-what-is-slow.md#what-to-alert-on) says what to watch.
"""

IDENTITIES = """\
## What adds up
When nothing is in progress, these hold, in the names of `status --json`. Tests check them:

- The hit ratio of what the daemon reads is `hits / (hits + misses)`, with `hits` the sum of the three `…_hits`.
- The hit ratio of the mount also counts what the daemon does not see: reads in passthrough, and those that the kernel's page
  cache answers. An open in passthrough counts with the size of its file, and so does one without a READ of a file that is
  cached whole, up to 4 GiB. With `unseen = passthrough_blocks + page_cache_blocks` it is
  `(hits + unseen) / (hits + unseen + misses)`. With `--zero-open` there are no opens to count.
- `ram_hits + ssd_hits + heap_hits + misses` are the blocks that reads asked of the daemon.
- `misses` is the sum of the six `misses_…`.
- `origin_bytes + peer_bytes_in` is `admitted_bytes + bypassed_bytes + discarded_bytes`, except for what uploads read.
- Each `origin_…` counter of requests or bytes is the sum over all datasets.
- `read_wait_seconds_count` is the number of reads that could not be answered at once; its sum is that of `waited_seconds`
  for `origin`, `peer` and `disk`.
"""

EXIT_CODES = (
    ("0", "Success."),
    (
        "1",
        "The command failed, with one line on standard error that begins with “cachefs:”. `warm --check`: not everything is "
        "cached. `doctor`: at least one finding is a PROBLEM.",
    ),
    (
        "2",
        "Wrong usage: an unknown option, a bad value, a configuration file that cannot be read. Trying again does not "
        "help; the systemd unit does not restart the daemon.",
    ),
    (
        "70",
        "The daemon could not finish its stop, because the cache's disk or an origin did not answer within 20 s. The mount "
        "is gone; the next start treats the cache as after a crash.",
    ),
    ("130", "Interrupted by Ctrl-C (SIGINT)."),
    ("143", "`mount` was ended by SIGTERM before the mount answered. Nothing stays mounted."),
)
"""Exit status of the command → meaning."""

EXIT_MOUNT = """\
`mount.cachefs` exits with the codes of mount(8): 0 (also if the mountpoint shows the same sources already), 1 for wrong
usage (also for `-N` and the option `remount`), 8 when it was interrupted, and 32 for any other failure.
"""


# -- Markdown --------------------------------------------------------------------------------------


def options() -> str:
    """docs/reference/options.md"""
    return "\n".join(_options())


def _options() -> Iterator[str]:
    yield f"# Options\n\n{NOTE}\n\n{LAYERS}"
    for group in GROUPS.values():
        yield f"## {group}\n\n| option | value | default | |\n|---|---|---|---|"
        for name, row in _rows(group):
            value = "" if not row.metavar else _code(row.metavar)
            where = " (command line only)" if row.flag_only else ""
            flags = ", ".join(f"`{flag}`" for flag in _flags(name, row))
            yield f"| {flags} | {value} | {_cell(_default(row))} | {_cell(row.help)}{where} |"
        yield ""
    yield SOURCES


def metrics() -> str:
    """docs/reference/metrics.md"""
    lines = [f"# Metrics\n\n{NOTE}\n\n{METRICS}", "## Counters", ""]
    lines += ["| metric | in `status --json` | unit | |", "|---|---|---|---|"]
    for row in Metrics.table():
        labels = ",".join(f'{label}="{value}"' for label, value in row.labels.items())
        name = f"`cachefs_{row.family}_total{{{labels}}}`".replace("{}", "") if row.family else "(their sum)"
        lines.append(f"| {name} | `{row.name}` | {row.unit} | {_cell(row.meaning)} |")
    lines += [
        "",
        "## Read at scrape time",
        "",
        "| metric | kind | unit | labels | |",
        "|---|---|---|---|---|",
    ]
    for series in SERIES:
        name = f"cachefs_{series.name}" + ("_total" if series.kind == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in series.labels)
        lines.append(f"| `{name}` | {series.kind} | {series.unit} | {labels} | {_cell(series.meaning)} |")
    return "\n".join([*lines, "", IDENTITIES])


def commands() -> str:
    """docs/reference/cli.md"""
    return "\n".join(_commands())


def _commands() -> Iterator[str]:
    yield f"# Command line\n\n{NOTE}\n"
    yield "`cachefs VERB --help` prints the same. [Exit codes](exit-codes.md) are the same for all verbs.\n"
    yield "| verb | |\n|---|---|"
    for name, command in _verbs():
        yield f"| [{name}](#cachefs-{name.replace('.', '').replace(' ', '-')}) | {_cell(command.get_short_help_str(100))} |"
    yield ""
    for name, command in _verbs():
        yield f"## cachefs {name}\n\n```\n{_usage(name, command)}\n```\n"
        for text, verbatim in _paragraphs(command):
            yield f"```\n{text}\n```\n" if verbatim else f"{_prose(text)}\n"
        if name == "mount":
            yield "Its options are on a page of their own: [Options](options.md).\n"
        records = _records(command)
        if records:
            yield "| option | |\n|---|---|"
            yield from (f"| {_code(flags)} | {_cell(meaning)} |" for flags, meaning in records)
            yield ""


def exit_codes() -> str:
    """docs/reference/exit-codes.md"""
    lines = [f"# Exit codes\n\n{NOTE}\n", "| code | meaning |", "|---:|---|"]
    lines += [f"| {code} | {_cell(meaning)} |" for code, meaning in EXIT_CODES]
    return "\n".join([*lines, "", "## mount.cachefs", "", EXIT_MOUNT])


# -- man pages -------------------------------------------------------------------------------------


def man_command() -> str:
    """man/cachefs.1"""
    return _page(_man_command())


def _man_command() -> Iterator[str]:
    yield f'.TH CACHEFS 1 "" "cachefs {__version__}" "User Commands"'
    yield ".SH NAME\ncachefs \\- object storage as plain file paths, through a RAM and SSD cache"
    yield ".SH SYNOPSIS"
    yield ".B cachefs\n.I VERB\n.RI [ OPTIONS ]\n.RI [ ARGUMENTS ]"
    yield ".SH DESCRIPTION"
    yield from _man_text(cli)
    yield ".SH VERBS"
    for name, command in _verbs():
        yield f".SS {_roff(name)}\n.nf\n{_roff(_usage(name, command))}\n.fi"
        yield from _man_text(command)
        for flags, meaning in _records(command):
            yield f".TP\n.B {_roff(flags)}\n{_roff(meaning)}"
    yield ".SH MOUNT OPTIONS"
    yield _roff(
        "Each can also be given as -o cache_size=500G, as CACHEFS_CACHE_SIZE=500G, or as cache_size = "
        '"500G" in the file that --config names. The first of these that has it decides.'
    )
    for group in GROUPS.values():
        yield f".SS {group}"
        for name, row in _rows(group):
            yield f".TP\n.B {_roff(' '.join(filter(None, (', '.join(_flags(name, row)), row.metavar))))}"
            yield _roff(_with_default(row))
    yield ".SH EXIT STATUS"
    yield from (f".TP\n.B {code}\n{_roff(meaning)}" for code, meaning in EXIT_CODES)
    yield ".SH FILES"
    yield ".TP\n.I /var/cache/cachefs/SOURCE\nCache directory of root; other users: ~/.cache/cachefs/SOURCE."
    yield ".TP\n.I /etc/cachefs/*.toml\nSources of the systemd units cachefs@.service."
    yield ".SH SEE ALSO\n.BR mount.cachefs (8),\n.BR fusermount3 (1),\n.BR mount (8)"


def man_helper() -> str:
    """man/mount.cachefs.8"""
    return _page(_man_helper())


def _man_helper() -> Iterator[str]:
    yield f'.TH MOUNT.CACHEFS 8 "" "cachefs {__version__}" "System Administration"'
    yield ".SH NAME\nmount.cachefs \\- mount object storage from fstab"
    yield ".SH SYNOPSIS"
    yield ".B mount \\-t cachefs\n.RB [ \\-o\n.IR OPTIONS ]\n.I SOURCE MOUNTPOINT"
    yield ".SH DESCRIPTION"
    yield _roff(
        "mount(8) calls mount.cachefs for lines of fstab whose type is cachefs. SOURCE is a URL, or an absolute path of a "
        "TOML file that names the sources. Options meant for other programs (_netdev, nofail, noatime, x-...) are ignored; "
        "dashes and underscores in names are the same. A mount that root makes on Linux 6.9 or later goes on when its "
        "daemon dies (restart). In other cases a mount from fstab ends with its daemon, and the systemd unit "
        "cachefs@.service mounts again."
    )
    yield ".SH OPTIONS"
    for group in GROUPS.values():
        yield f".SS {group}"
        for name, row in _rows(group):
            if not row.flag_only:
                yield f".TP\n.B {_roff(name + (f'={row.metavar}' if row.metavar else ''))}"
                yield _roff(_with_default(row))
    yield ".SH EXAMPLE\n.nf"
    yield _roff(
        "s3://my-bucket/imagenet  /mnt/data  cachefs  _netdev,nofail,ro,allow_other,cache_size=500G  0 0\n"
        "/etc/cachefs/two.toml    /mnt/two   cachefs  _netdev,nofail  0 0"
    )
    yield ".fi\n.SH EXIT STATUS"
    yield _roff(EXIT_MOUNT.strip())
    yield ".SH SEE ALSO\n.BR cachefs (1),\n.BR fstab (5),\n.BR mount (8)"


def _man_text(command: click.Command) -> Iterator[str]:
    for text, verbatim in _paragraphs(command):
        yield ".PP"
        yield f".nf\n{_roff(text)}\n.fi" if verbatim else _roff(text)


def _roff(text: str) -> str:
    for mark, roff in (
        ("\\", "\\e"),
        ("-", "\\-"),
        ("`", ""),
        ("…", "..."),
        ("“", '"'),
        ("”", '"'),
        ("≤", "<="),
    ):
        text = text.replace(mark, roff)
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in text.split("\n"))


def _page(lines: Iterator[str]) -> str:
    return (
        '.\\" Written by scripts/docs from the tables in the code: change those.\n' + "\n".join(lines) + "\n"
    )


# -- what pages have in common ---------------------------------------------------------------------


def _rows(group: str) -> Iterator[tuple[str, Row]]:
    return ((name, row) for name, row in ROWS.items() if row.group == group)


def _flags(name: str, row: Row) -> tuple[str, ...]:
    return ("--" + name.replace("_", "-"), *row.flags)


def _default(row: Row) -> str:
    return row.default or ("no" if not row.metavar else "")


def _with_default(row: Row) -> str:
    return f"{row.help} Default: {_default(row)}." if _default(row) else row.help


def _verbs() -> list[tuple[str, click.Command]]:
    """Each verb; behind a group, such as `config`, the commands in it."""
    found: list[tuple[str, click.Command]] = []
    for name, command in sorted(cli.commands.items()):
        found.append((name, command))
        if isinstance(command, click.Group):
            found += [(f"{name} {inner}", command.commands[inner]) for inner in sorted(command.commands)]
    return found


def _context(command: click.Command, name: str) -> click.Context:
    return click.Context(command, info_name=name, parent=click.Context(cli, info_name="cachefs"))


def _usage(name: str, command: click.Command) -> str:
    return " ".join(["cachefs", name, *command.collect_usage_pieces(_context(command, name))])


def _paragraphs(command: click.Command) -> Iterator[tuple[str, bool]]:
    """Each paragraph of a help text, and whether its lines stay as they are."""
    for part in inspect.cleandoc(command.help or "").split("\n\n"):
        lines = part.split("\n")
        verbatim = lines[0] == "\b"
        yield ("\n".join(lines[1:]) if verbatim else " ".join(lines)), verbatim


def _records(command: click.Command) -> list[tuple[str, str]]:
    """Options that are not in the table of mount's, as (flags, meaning)."""
    context = _context(command, command.name or "")
    found = []
    for param in command.params:
        if isinstance(param, click.Option) and not hasattr(param, "row"):
            record = param.get_help_record(context)
            if record:
                found.append((record[0], " ".join(record[1].split())))
    return found


def _prose(text: str) -> str:
    for mark in "\\`*_[]":
        text = text.replace(mark, f"\\{mark}")
    return text.replace("<", "&lt;")


def _code(text: str) -> str:
    """In a table, where renderers disagree about how a bar is escaped."""
    return f"`{text}`" if "|" not in text else f"<code>{_cell(text)}</code>"


def _cell(text: str) -> str:
    return text.replace("<", "&lt;").replace("|", "&#124;")


PAGES = {
    "docs/reference/options.md": options,
    "docs/reference/cli.md": commands,
    "docs/reference/metrics.md": metrics,
    "docs/reference/exit-codes.md": exit_codes,
    "man/cachefs.1": man_command,
    "man/mount.cachefs.8": man_helper,
}


def main(repository: Path) -> None:
    """Write all pages below `repository`."""
    for name, page in PAGES.items():
        path = repository / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
