"""The `cachefs` command, and the verbs mount, umount, config, version, completion.

A verb has a few lines; the room that it imports does the work. The options of `mount` come from the table in
`cachefs.config.config`. An error is one line on stderr that begins with ``cachefs:``. The exit code is 2 for wrong usage, 1
for other errors. Verbs import modules that are slow to import, so that `status` in a loop costs little.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from cachefs import __version__
from cachefs.base.errors import AlreadyMounted, CachefsError, ConfigError, MountError
from cachefs.cli import cache, files, live, show, status, writing
from cachefs.cli.places import PathText, Place
from cachefs.cli.show import as_json, note, say
from cachefs.config.config import GROUPS, ROWS, Config
from cachefs.config.options import Row, base_directory
from cachefs.daemon import asking, mounting

log = logging.getLogger(__name__)


ALIASES = {"unmount": "umount", "warmup": "warm", "load": "warm", "prefetch": "warm", "free": "evict"}
"""Name of a verb in other tools → its name here."""

VERBS = {
    "Mounting": ("mount", "umount", "upgrade", "config"),
    "Monitoring": ("status", "stats", "top", "ledger", "logs", "log-level", "doctor", "peers"),
    "Files": ("info", "why", "ls", "du", "locate", "refresh"),
    "Caching": ("warm", "evict", "pin", "unpin", "hint", "record", "simulate"),
    "Written files": ("flush", "recover"),
    "This command": ("version", "completion"),
}
"""The verbs of each group in the help text."""

MOUNT_CODES = {0: 0, 2: 1, 130: 8, 143: 8}
"""Exit code → code of mount(8) (wrong invocation, interrupted). All other failures are 32, "mount failure"."""


class OneLine(click.Group):
    """A group whose errors are one line and an exit code, also when `main` is called by another program."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.params.extend(show.COMMON_OPTIONS)
        super().add_command(cmd, name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = formatter.width - 6 - max(map(len, self.commands))
        for group, names in VERBS.items():
            with formatter.section(group):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        try:
            self._run(words, prog_name, complete_var, **extra)
        except SystemExit as exc:
            if words[:1] == ["mount.cachefs"]:
                exc.code = MOUNT_CODES.get(exc.code, 32)  # type: ignore[arg-type]
            raise

    def _run(
        self, words: list[str], prog_name: str | None, complete_var: str | None, **extra: Any
    ) -> NoReturn:
        try:
            result = super().main(words, prog_name, complete_var, standalone_mode=False, **extra)
            sys.stdout.flush()
        except click.exceptions.NoArgsIsHelpError as exc:
            exc.show()
            sys.exit(2)
        except click.ClickException as exc:
            more = ""
            if ctx := getattr(exc, "ctx", None):
                help = f"{ctx.command_path} --help" if ctx.help_option_names else "man mount.cachefs"
                more = f" (see {help})"
            _fail(exc.format_message(), 2, more)
        except CachefsError as exc:
            _fail(str(exc), 2 if isinstance(exc, ConfigError) else 1)
        except (click.Abort, KeyboardInterrupt):
            _fail("interrupted", 130)
        except BrokenPipeError:
            # The reader of our output has closed the pipe. The flush at exit must not fail because of it.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except Exception as exc:
            if isinstance(exc, OSError) and show.is_of_output(exc) and not exc.filename:
                _fail(f"the output cannot be written: {exc.strerror}", 1)
            if isinstance(exc, FileNotFoundError) and not _has_working_directory():
                _fail("the working directory does not exist any more: cd to another one first", 1)
            _fail(f"internal error: {type(exc).__name__}: {exc} (--log-level debug shows where)", 1)
        sys.exit(result if isinstance(result, int) else 0)


def _has_working_directory() -> bool:
    """False after the directory was removed, or its mount was taken away below it."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _fail(message: str, code: int, more: str = "") -> NoReturn:
    if code == 1 and log.isEnabledFor(logging.DEBUG):
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
        self.shown = ", ".join(sorted([flag, *row.flags], key=lambda f: f[:2] == "--"))
        negative = f"/--no-{flag[2:]}" if switch and not row.flag_only else ""
        super().__init__(
            [name, flag + negative, *row.flags],
            type=click.BOOL if switch else PathText() if row.metavar == "PATH" else click.STRING,
            is_flag=switch,
            default=None,
            metavar=row.metavar or None,
            help=row.help,
        )

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        default = f"  [{self.row.default}]" if self.row.default else ""
        return f"{self.shown} {self.row.metavar}".rstrip(), self.row.help + default


class MountCommand(click.Command):
    """`mount`: its help has the options in groups; `ctx.meta["arguments"]` has the arguments for the child process."""

    def __init__(self, *args: Any, **extra: Any) -> None:
        super().__init__(*args, **extra)
        self.params += [TableOption(name, row) for name, row in ROWS.items()]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in (*GROUPS.values(), "Other")}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record and not isinstance(param, click.Argument):
                groups[param.row.group if isinstance(param, TableOption) else "Other"].append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


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


cli.params.extend(show.COMMON_OPTIONS)


@cli.command(cls=MountCommand, short_help="Show an origin as files below a directory.")
@click.argument("places", nargs=-1, metavar="[SOURCE] MOUNTPOINT", type=PathText())
@click.option(
    "-o", "o", multiple=True, metavar="K=V,…", help="The options above as in fstab, with - or _ in names."
)
@click.pass_context
def mount(ctx: click.Context, /, places: tuple[str, ...], o: tuple[str, ...], **options: Any) -> int:
    """Show the objects in SOURCE as files below MOUNTPOINT.

    Returns once the mount answers, or prints why it does not. SOURCE is s3://bucket/prefix, az://container,
    gs://bucket, https://host/path, file:///directory or any fsspec URL; leave it out when --config lists
    sources. Credentials come from the same places as for the origin's own tools: AWS_… and AZURE_… variables,
    ~/.aws, roles.

    \b
    Public data:          cachefs mount --anonymous s3://bucket /mnt/data
    MinIO, Ceph, …:       cachefs mount --endpoint-url http://minio:9000 s3://bucket /mnt/data
    Half a terabyte:      cachefs mount --cache-dir /nvme/cache --cache-size 500G s3://bucket /mnt/data
    A frozen dataset:     cachefs mount --consistency immutable s3://bucket/v3 /mnt/data
    Several origins:      cachefs mount --config origins.toml /mnt/data
    What would happen:    cachefs mount --print-config s3://bucket /mnt/data

    Every option can also be given as -o cache_size=500G, as CACHEFS_CACHE_SIZE=500G, or as cache_size =
    "500G" in the --config file. The command line wins over -o, -o over the environment, the environment over
    the file.
    --no-SWITCH turns a switch off. Sizes: K, M, G, T and KiB, … are powers of 1024, KB, MB, … of 1000.
    Defaults are in [brackets].
    """
    from cachefs.daemon import background
    from cachefs.fuse import holder
    from cachefs.fuse.handover import Handover, why_not

    # Up to three processes run this function for one mount. The command, without -f, starts another one in the background
    # and waits for its line. With -f and without a handover, the process becomes a holder if the mount can outlive its
    # daemon. Otherwise, or as the child of a holder (with a handover), it becomes the daemon.
    handover = Handover.from_environment()
    ready = background.Ready()
    try:
        read = partial(_mount_config, places, o, options, ready.in_background, os.getcwd())
        config = read()
        logging.getLogger("cachefs").setLevel(config.log_level.upper())
        if config.print_config:
            from cachefs.config import layers

            click.echo(os.fsencode(layers.dump(config)), nl=False)  # a path may have other bytes than UTF-8
            return 0
        mounting.check_log(config)
        if config.foreground or ready.in_background:
            # A connection in a service manager's store is taken over in any case, because programs wait for it.
            if handover is None and (not why_not(config) or holder.stored()):
                command = background.held_by_holder(background.command_of(ctx.meta["arguments"]))
                # The process id stays the same: the caller waits for it and sends it signals.
                os.execv(command[0], command)
            return _serve(config, ready, read, handover)
        _mount_in_background(ctx.meta["arguments"], config)
    except BaseException as exc:
        ready.failed(exc)
        raise
    return 0


def _mount_config(
    places: Sequence[str], o: Sequence[str], options: dict[str, Any], in_background: bool, cwd: str
) -> Config:
    from cachefs.config import layers

    given = dict(options)
    if len(places) > 2:
        raise ConfigError(f"too many arguments from {places[2]!r} on: write cachefs mount SOURCE MOUNTPOINT")
    if len(places) == 2:
        given |= {"source": places[0], "mountpoint": places[1]}
    elif places:
        given["source" if "://" in places[0] else "mountpoint"] = places[0]
    if in_background:
        given["foreground"] = False  # the parent passes -f to its child, which logs to a file nevertheless
    token = base_directory.set(cwd)
    try:
        return mounting.located(layers.load(given, o))
    finally:
        base_directory.reset(token)


def _mount_in_background(arguments: list[str], config: Config) -> None:
    from cachefs.daemon import background

    if config.descriptor is not None:
        raise MountError(
            f"/dev/fd/{config.descriptor} is served in the foreground, by the process it was passed to: add -f"
        )
    mounting.check(config)
    dead = mounting.dead_mount(config)
    # A caller that ends this process (timeout, a service manager) must end the child, too: `sys.exit` unwinds `start`, which
    # does that.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    log_path = background.start(arguments, config, over_dead=dead is not None)
    if "log_file" in config.origins and log_path != config.log_file:
        say(f"cachefs: cannot write the log {config.log_file}: logging to {log_path}", err=True)
    if dead is not None:
        say(f"cachefs: {mounting.took_away(dead)}", err=True)


def _serve(config: Config, ready: Any, reread: Callable[[], Config], handover: Any) -> int:
    """Run the daemon in this process. Returns its exit code."""
    from cachefs.base import logs

    try:
        logs.setup(config.log_level, config.log_format, config.log_file)
    except OSError as exc:
        if not ready.in_background:
            raise MountError(
                f"cannot write the log {config.log_file}: {exc.strerror}: choose another --log-file"
            ) from exc
        logs.setup(config.log_level, config.log_format)  # to stderr, the log that the parent has opened
        config = replace(config, log_file=Path(os.readlink("/proc/self/fd/2")))
    if handover is not None:
        from cachefs.daemon import daemon

        daemon.load(config)
        handover.stand_by(__version__, config.identity)
        handover.wait()
        logs.follow_rotation()  # by the daemon before this one, which wrote to the same file until now
    if handover is None or not handover.taking_over:
        for line in mounting.check(config):
            log.warning("%s", line)
    from cachefs.daemon import daemon

    if ready.in_background:
        os.chdir("/")  # the filesystem of a working directory cannot be unmounted
    try:
        return daemon.run(config, ready.ready, reread, handover)
    except CachefsError as exc:
        if ready.in_background:
            log.error("%s", exc)  # noqa: TRY400 (an expected failure takes one line)
        raise


@cli.command("mount.cachefs", hidden=True, context_settings={"help_option_names": []})
@click.argument("source")
@click.argument("mountpoint")
@click.option("-o", "o", multiple=True)
@click.option("-r", "read_only", is_flag=True)
@click.option("-f", "fake", is_flag=True)
@click.option("-N", "namespace")
@click.option("-t", "fstype", expose_value=False)
@click.option("-s", "-n", "-w", "ignored", is_flag=True, expose_value=False)
@click.pass_context
def mount_cachefs(
    ctx: click.Context,
    source: str,
    mountpoint: str,
    o: tuple[str, ...],
    read_only: bool,
    fake: bool,
    namespace: str | None,
) -> Any:
    """The helper of mount(8) for `mount -t cachefs` and for lines of fstab. SOURCE may also be a TOML file.

    Exits with the codes of mount(8). A mountpoint that shows the same sources already is left as it is, with code 0."""
    from cachefs.config.layers import split_options

    options = [option for argument in o for option in split_options(argument)]
    if namespace is not None:
        raise ConfigError("no mounting into another namespace: use nsenter")
    if "remount" in options:
        raise ConfigError(f"options of a mount cannot be changed: unmount {mountpoint} first")
    if fake:
        return 0
    # mount(8) adds "rw" unless the user gave "ro", so the user may not have chosen it.
    words = [option.replace("\\", "\\\\").replace(",", "\\,") for option in options if option != "rw"]
    words += ["ro"] if read_only else []
    arguments = ["-o", ",".join(words)] if words else []
    is_file = source.startswith("/") and source.endswith(".toml")
    arguments += ["--config", source, mountpoint] if is_file else [source, mountpoint]
    with mount.make_context("mount", arguments, parent=ctx.parent) as inner:
        try:
            return mount.invoke(inner)
        except AlreadyMounted:
            # mount -a calls again for each line whose source is a path, because the mount table has a URL in its place.
            given = dict(inner.params)
            config = _mount_config(given.pop("places"), given.pop("o"), given, False, os.getcwd())
            if asking.shows_the_same(config):
                return 0
            raise


@cli.command(short_help="Unmount, and wait for the daemon to end.")
@click.argument("mountpoint", type=Place())
@click.option("--lazy", "-l", is_flag=True, help="Detach at once, even if processes use it.")
@click.option("--flush", is_flag=True, help="Unmount only if every written file is at the origin.")
def umount(mountpoint: Path, lazy: bool, flush: bool) -> None:
    """Unmount MOUNTPOINT and wait until its daemon has saved its cache and ended.

    Written files are uploaded first, for at most the mount's --flush-deadline (60s). Files that are not uploaded by then are
    named, and stay in the cache directory for the next mount. --flush waits without a deadline.

    A mount in use is not unmounted: the processes that use it are named. --lazy detaches it at once; its daemon ends with
    the last process that uses it. A mount whose daemon has died is unmounted, too.
    """
    from cachefs.daemon.unmounting import unmount

    note(unmount(mountpoint, lazy=lazy, flush=flush, show=writing.upload_progress()))


@cli.group("config", short_help="Check config files.")
def config() -> None:
    """Check config files. cachefs mount --print-config prints all values of a mount and where each comes from."""


@config.command("check", short_help="Check a config file.")
@click.argument("file", required=False, envvar="CACHEFS_CONFIG", type=PathText())
@as_json("file, sources and options; or error.")
def check(file: str | None, as_json: bool) -> int:
    """Read the TOML file FILE (or $CACHEFS_CONFIG) as cachefs mount would, and print the first mistake.

    Also reads the keys and certificates of peers that it names. Sends no request to the origins, and ignores other
    options in the environment. Exits with 2 if there is a mistake.
    """
    from cachefs.config import layers

    if not file:
        raise ConfigError("no FILE: name a config file, or set CACHEFS_CONFIG")
    try:
        found = layers.load_file(Path(file))
        mounting.check_peers(found)
    except ConfigError as exc:
        if not as_json:
            raise
        show.data({"file": file, "error": str(exc)})
        return 2
    options = sorted(set(found.origins) - {"config", "mountpoint"})
    if as_json:
        sources = [{"name": source.name, "url": source.url} for source in found.sources]
        show.data({"file": file, "sources": sources, "options": options})
    else:
        note(f"{file}: {len(found.sources)} sources, {len(options)} options, no mistakes")
    return 0


check.params.extend(show.COMMON_OPTIONS)
for room in (status, live, cache, writing, files):
    for command in room.COMMANDS:
        cli.add_command(command)


@cli.command(short_help="Print the version.")
@as_json()
def version(as_json: bool) -> None:
    """Print the version."""
    if as_json:
        show.data({"cachefs": __version__})
    else:
        say(f"cachefs {__version__}")


@cli.command(short_help="Complete cachefs commands in a shell.")
@click.argument("shell", required=False, type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str | None) -> None:
    """Print the shell code that completes cachefs commands. SHELL is by default the name in $SHELL.

    \b
    bash:  cachefs completion bash > ~/.local/share/bash-completion/completions/cachefs
    zsh:   cachefs completion zsh > ~/.zfunc/_cachefs      (with fpath+=~/.zfunc before compinit)
    fish:  cachefs completion fish > ~/.config/fish/completions/cachefs.fish
    """
    from click.shell_completion import get_completion_class

    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    kind = get_completion_class(name)
    if kind is None:
        raise ConfigError(f"no completion for {name or 'this shell'}: name bash, zsh or fish")
    root = ctx.find_root().command
    show.raw(kind(root, {}, "cachefs", "_CACHEFS_COMPLETE").source() + "\n")


def main() -> None:
    """The entry point of the command."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by the caller: what is opened next would get its number
            os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115
    cli.main(prog_name="cachefs")
