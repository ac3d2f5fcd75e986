"""The `cachefs` command: argv to a Config and a verb.

Idea: a verb is a few lines here; what it does lives in the room it names. The options of `mount` are read off
the table in `cachefs.config`. Every failure is one line on stderr that begins with ``cachefs:``; usage errors
exit with 2, others with 1. Nothing heavy is imported before a verb needs it, so that `status` in a loop costs
little.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from cachefs import (
    __version__,
    cli_cache,
    cli_look,
    cli_peers,
    cli_reading,
    cli_simulate,
    cli_usage,
    cli_why,
    cli_writing,
)
from cachefs.cli_look import Place
from cachefs.cli_say import say
from cachefs.config import GROUPS, Config, option_name, rows
from cachefs.errors import CachefsError, ConfigError, MountError
from cachefs.options import Row

log = logging.getLogger(__name__)


class OneLine(click.Group):
    """A group whose failures are one line and an exit code, whoever calls it."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cli_cache.ALIASES.get(cmd_name, cmd_name))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        try:
            result = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as exc:
            exc.show()
            sys.exit(2)
        except click.ClickException as exc:
            command = getattr(exc, "ctx", None)
            _fail(exc.format_message(), 2, f" (see {command.command_path} --help)" if command else "")
        except ConfigError as exc:
            _fail(str(exc), 2)
        except CachefsError as exc:
            _fail(str(exc), 1)
        except (click.Abort, KeyboardInterrupt):
            _fail("interrupted", 130)
        except BrokenPipeError:
            # Whoever read us has enough: nothing to say, and the flush at exit shall not say it either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except Exception as exc:
            if _debugging():
                traceback.print_exc()
            _fail(f"internal error: {type(exc).__name__}: {exc} (--log-level debug shows where)", 1)
        sys.exit(result if isinstance(result, int) else 0)


def _debugging() -> bool:
    return logging.getLogger("cachefs").isEnabledFor(logging.DEBUG)


def _fail(message: str, code: int, more: str = "") -> NoReturn:
    if _debugging() and sys.exc_info()[0] is not None and code == 1:
        traceback.print_exc()
    line = " ".join(message.split("\n")).rstrip(". ")
    say(f"cachefs: {line}{more}", err=True)
    sys.exit(code)


class TableOption(click.Option):
    """An option of `mount`, made from its row."""

    def __init__(self, name: str, row: Row) -> None:
        flag = "--" + name.replace("_", "-")
        switch = not row.metavar
        self.row = row
        self.shown = ", ".join(
            [*(f for f in row.flags if f[:2] != "--"), flag, *(f for f in row.flags if f[:2] == "--")]
        )
        negative = f"/--no-{flag[2:]}" if switch and not row.flag_only else ""
        super().__init__(
            [name, flag + negative, *row.flags],
            type=click.BOOL if switch else click.STRING,
            is_flag=switch,
            default=None,
            metavar=row.metavar or None,
            help=row.help,
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        default = f"  [{self.row.default}]" if self.row.default else ""
        return f"{self.shown} {self.row.metavar}".rstrip(), self.row.help + default


class MountCommand(click.Command):
    """`mount`: options in groups, and the arguments kept as they were written for the child."""

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.params += [TableOption(option_name(item, row), row) for item, row in rows()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group in GROUPS:
            records = [
                p.get_help_record(ctx)
                for p in self.params
                if isinstance(p, TableOption) and p.row.group == group
            ]
            with formatter.section(group):
                formatter.write_dl(records)
        rest = [
            p.get_help_record(ctx)
            for p in self.get_params(ctx)
            if not isinstance(p, TableOption | click.Argument)
        ]
        with formatter.section("Other"):
            formatter.write_dl([record for record in rest if record])


@click.group(cls=OneLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message="cachefs %(version)s")
def cli() -> None:
    """Object storage as plain file paths, through a RAM and SSD cache on this node.

    \b
    cachefs mount s3://bucket/dataset /mnt/data
    ls /mnt/data
    cachefs status /mnt/data
    cachefs umount /mnt/data
    """


@cli.command(cls=MountCommand, short_help="Show a store as files below a directory.")
@click.argument("places", nargs=-1, metavar="[SOURCE] MOUNTPOINT")
@click.option(
    "-o", "o", multiple=True, metavar="K=V,…", help="The options above as in fstab, dashes or underscores."
)
@click.pass_context
def mount(ctx: click.Context, /, places: tuple[str, ...], o: tuple[str, ...], **options: Any) -> int:
    """Show what is in SOURCE as files below MOUNTPOINT.

    Returns once the mount answers, or says why it does not. SOURCE is s3://bucket/prefix, az://container,
    gs://bucket, https://host/path, file:///directory or any fsspec URL; leave it out when --config lists
    sources. Credentials come from where the store's own tools take them: AWS_… and AZURE_… variables, ~/.aws,
    roles.

    \b
    Public data:          cachefs mount --anonymous s3://bucket /mnt/data
    MinIO, Ceph, …:       cachefs mount --endpoint-url http://minio:9000 s3://bucket /mnt/data
    Half a terabyte:      cachefs mount --cache-dir /nvme/cache --cache-size 500G s3://bucket /mnt/data
    A frozen dataset:     cachefs mount --consistency immutable s3://bucket/v3 /mnt/data
    Several stores:       cachefs mount --config stores.toml /mnt/data
    What would happen:    cachefs mount --print-config s3://bucket /mnt/data

    Every option can also be given as -o cache_size=500G, as CACHEFS_CACHE_SIZE=500G, or as cache_size =
    "500G" in the --config file. The command line wins over -o, -o over the environment, the environment over
    the file.
    --no-SWITCH turns a switch off again. Sizes: K, M, G, T and KiB, … are powers of 1024, KB, MB, … of 1000.
    Defaults are in [brackets].
    """
    from cachefs import background

    ready = background.Ready()
    try:
        config = _mount_config(places, o, options, ready.in_background)
        if config.print_config:
            from cachefs import layers

            click.echo(layers.dump(config), nl=False)
            return 0
        if config.foreground or ready.in_background:
            return _serve(config, ready)
        _mount_in_background(ctx.meta["arguments"], config)
    except BaseException as exc:
        ready.failed(str(exc) if isinstance(exc, CachefsError) else f"{type(exc).__name__}: {exc}")
        raise
    return 0


def _mount_config(
    places: Sequence[str], o: Sequence[str], options: dict[str, Any], in_background: bool
) -> Config:
    from cachefs import layers, mounting

    given = dict(options)
    if len(places) > 2:
        raise ConfigError(f"too many arguments from {places[2]!r} on: write cachefs mount SOURCE MOUNTPOINT")
    if len(places) == 2:
        given |= {"source": places[0], "mountpoint": places[1]}
    elif places:
        given["source" if "://" in places[0] else "mountpoint"] = places[0]
    if in_background:
        given["foreground"] = False  # -f is how the parent calls its child: its log is still a file
    config = layers.load(given, o)
    logging.getLogger("cachefs").setLevel(config.log_level.upper())
    return mounting.located(config)


def _mount_in_background(arguments: list[str], config: Config) -> None:
    from cachefs import background, mounting

    if config.descriptor is not None:
        raise MountError(
            f"/dev/fd/{config.descriptor} is served in the foreground, by the process it was passed to: add -f"
        )
    notes = mounting.check(config)
    for note in notes:
        say(f"cachefs: {note}", err=True)
    # Whoever gives up on us (timeout, a service manager) gives up on the child too: unwind, and end it on the way.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    background.start(arguments, config, notes)


def _serve(config: Config, ready: Any) -> int:
    """Become the daemon."""
    from cachefs import logs, mounting

    try:
        logs.setup(config.log_level, config.log_format, config.log_file)
    except OSError as exc:
        if not ready.in_background:
            raise MountError(
                f"cannot write the log {config.log_file}: {exc.strerror}: choose another --log-file"
            ) from exc
        logs.setup(config.log_level, config.log_format)  # the parent has found another place for stderr
    for note in mounting.check(config, leave_dead=True):
        log.warning("%s", note)
    from cachefs import daemon

    if ready.in_background:
        os.chdir("/")  # a daemon keeps no directory busy
    try:
        return daemon.run(config, ready.ready)
    except CachefsError as exc:
        if ready.in_background:
            log.error("%s", exc)  # noqa: TRY400 (an expected failure, told in one line)
        raise


@cli.command(short_help="Take a mount away and wait for its daemon.")
@click.argument("mountpoint", type=Place())
@click.option("--lazy", "-l", is_flag=True, help="Detach now, whoever still uses it.")
@click.option("--flush", is_flag=True, help="Only if everything that was written is in the store.")
def umount(mountpoint: Path, lazy: bool, flush: bool) -> None:
    """Unmount MOUNTPOINT and wait until its daemon has saved its cache and ended.

    What was written is uploaded first, for at most --flush-deadline of the mount (60s); what is not in the store by then is
    said, and stays in the cache directory for the next mount. --flush waits as long as it takes.

    A mount that is in use is not taken away: the processes that hold it are named. --lazy detaches it from
    the tree at once; its daemon ends with its last user. A mount whose daemon has died is cleaned up.
    """
    from cachefs.unmounting import unmount

    say(unmount(mountpoint, lazy=lazy, flush=flush, show=cli_writing.show_left), err=True)


@cli.command(short_help="What mounts are doing.")
@click.argument("mountpoint", required=False, type=Place())
@click.option(
    "--json", "as_json", is_flag=True, help="Everything the daemon counts; a list without MOUNTPOINT."
)
def status(mountpoint: Path | None, as_json: bool) -> None:
    """Show what the mount at MOUNTPOINT, or every mount of this user, caches and asks of its store."""
    from cachefs import asking

    found = asking.all_statuses() if mountpoint is None else [asking.status_of(mountpoint)]
    if as_json:
        click.echo(json.dumps(found if mountpoint is None else found[0], indent=2))
    elif found:
        from cachefs import statusview

        statusview.show(found)
    else:
        say("no cachefs mounts")
    if mountpoint is None and not as_json:
        from cachefs import doctor

        for left in doctor.memory_left():
            say(f"{left.subject}: {left.found}: {left.todo}")


@cli.command(short_help="Look again at the store.")
@click.argument("path", type=Place())
def refresh(path: Path) -> None:
    """Forget what is believed about PATH and below, so that its next use asks the store again.

    Cached bytes that are still right stay cached.
    """
    from cachefs import asking

    say(asking.refresh(path), err=True)


for room in (cli_cache, cli_writing, cli_usage, cli_peers, cli_reading, cli_look, cli_why):
    for command in room.COMMANDS:
        cli.add_command(command)


@cli.command(short_help="Print the version.")
def version() -> None:
    """Print the version."""
    say(f"cachefs {__version__}")


cli.add_command(cli_simulate.simulate)


def main() -> None:
    """The entry point of the command."""
    cli.main(prog_name="cachefs")
