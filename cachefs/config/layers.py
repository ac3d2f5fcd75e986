"""Reading a `Config` from argv, `-o`, the environment and a TOML file, and writing it as TOML.

The layers are merged as text: argv wins over `-o`, `-o` over the environment, the environment over the file, and the file
over the defaults. Then each text is parsed once. A bad value is refused in one line, with where it was given and what to
write instead; an unknown name is refused with the nearest known one."""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from cachefs.base.errors import ConfigError
from cachefs.config.config import INHERITED, ROWS, Config, Source
from cachefs.config.options import SECRET_ADVICE, Row, SecretInside, check_name, check_url, looks_secret

ENV_PREFIX = "CACHEFS_"

GENERIC_OPTIONS = frozenset(
    """
    defaults auto noauto nofail _netdev user nouser users owner group dev nodev suid nosuid
    atime noatime diratime nodiratime relatime norelatime strictatime nostrictatime lazytime
    nolazytime sync async dirsync iversion noiversion mand nomand silent loud default_permissions
    """.split()  # noqa: SIM905 (forty words read better than forty strings)
)
"""Options that mount(8) and fstab pass to every filesystem. They are ignored: none of them changes what cachefs does."""

PER_SOURCE = tuple(item.name for item in fields(Source) if item.name not in ("name", "url"))


class Given(NamedTuple):
    """The text of an option, and where it was given (for error messages and `--print-config`)."""

    text: str
    given_by: str


SourceTable = tuple[dict[str, Given], str]
"""The options in a ``[[source]]`` table, and its place in the file."""

_ALIASES = {
    flag[2:].replace("-", "_"): name for name, row in ROWS.items() for flag in row.flags if flag[:2] == "--"
}
_NEGATIONS = {"rw": "read_only", "noexec": "exec"}
"""An option of mount(8) → the option here that it turns off."""

_IN_EVERY_LAYER = [name for name, row in ROWS.items() if not row.flag_only]
_POSITIONAL = ["source", "mountpoint"]


def load(argv: Mapping[str, Any], o: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """The Config of all layers. `argv` maps names to text, bool or None (not given). Raises `ConfigError`."""
    environ = os.environ if environ is None else environ
    from_argv = {name: Given(_text(value), _flag(name)) for name, value in argv.items() if value is not None}
    from_env = _environment(environ)
    path = from_argv.get("config") or from_env.pop("config", None)
    from_file, source_tables = _file(Path(_parse("config", path))) if path else ({}, [])
    given = from_file | from_env | _mount_options(o) | from_argv

    if "mountpoint" not in given:
        raise ConfigError(
            "no MOUNTPOINT: write cachefs mount SOURCE MOUNTPOINT, or mountpoint = … in the config file"
        )
    values = {name: _parse(name, text) for name, text in given.items() if name in ROWS}
    values["config"] = _parse("config", path) if path else None
    values["mountpoint"] = _parse("mountpoint", given["mountpoint"])
    shared = {name: values[name] for name in PER_SOURCE if name in values and name not in INHERITED}
    values["sources"] = _sources(given.get("source"), source_tables, shared)
    if values.get("zero_open"):
        _check_zero_open(values)
    return Config(**values, origins={name: option.given_by for name, option in given.items()})


def load_file(path: Path) -> Config:
    """The Config of a file alone, which need not name the mountpoint. Raises `ConfigError`."""
    given, _ = _file(path)
    return load({"config": str(path), **({} if "mountpoint" in given else {"mountpoint": "/"})}, (), {})


def _flag(name: str) -> str:
    return name.upper() if name in _POSITIONAL else "--" + name.replace("_", "-")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _row_of(name: str) -> Row:
    if name in ("source", "name"):
        return Row("", check_url if name == "source" else check_name, str)
    return ROWS["cache_dir" if name == "mountpoint" else name]


def _check_zero_open(values: Mapping[str, Any]) -> None:
    sources = values["sources"]
    if any((source.consistency or values.get("consistency")) != "immutable" for source in sources):
        raise ConfigError(
            "--zero-open opens files without looking whether they changed: add --consistency immutable if they never do"
        )
    if values.get("read_only") is False or any(source.read_only is False for source in sources):
        raise ConfigError("--zero-open is for what never changes: mount it with --read-only")
    if values.get("writeback"):
        raise ConfigError("--zero-open is for what never changes: mount it without --writeback")
    if values.get("fuse") == "pyfuse3":
        raise ConfigError("--zero-open needs --fuse native or auto: pyfuse3 cannot do it")


def _parse(name: str, given: Given) -> Any:
    text, given_by = given
    try:
        return _row_of(name).parse(text)
    except SecretInside as exc:
        raise ConfigError(f"{given_by}: this is {exc}") from None
    except ValueError as exc:
        shown = "this" if "@" in text else repr(text)
        raise ConfigError(f"{given_by}: {shown} is {exc}") from None


def _known(name: str, given_by: str, allowed: Iterable[str], kind: str = "option") -> str:
    """The canonical name of an option, which may be given with dashes or underscores. Raises `ConfigError`."""
    plain = name.strip().replace("-", "_")
    plain = _ALIASES.get(plain, plain)
    allowed = list(allowed)
    if plain in allowed:
        return plain
    if looks_secret(plain):
        raise ConfigError(f"{given_by}: unknown {kind}; {SECRET_ADVICE}")
    if plain in ROWS and ROWS[plain].flag_only:
        raise ConfigError(f"{given_by}: {name} is for the command line alone: --{plain.replace('_', '-')}")
    near = difflib.get_close_matches(plain, allowed, 1, 0.5)
    raise ConfigError(f"{given_by}: unknown {kind} {name!r}" + (f": did you mean {near[0]}?" if near else ""))


def _mount_options(arguments: Iterable[str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for option in (part for argument in arguments for part in split_options(argument)):
        name, equals, value = option.partition("=")
        if name.lower().startswith("x-") or name.replace("-", "_") in GENERIC_OPTIONS or name == "comment":
            continue
        if name in _NEGATIONS and not equals:
            given[_NEGATIONS[name]] = Given("false", f"-o {name}")
            continue
        known = _known(name, "-o", _IN_EVERY_LAYER)
        if not equals and _row_of(known).metavar:
            raise ConfigError(f"-o {name}: needs a value: write -o {name}={_row_of(known).metavar}")
        given[known] = Given(value if equals else "true", f"-o {name}")
    return given


def split_options(text: str) -> list[str]:
    r"""Split at commas. ``\,`` is a comma in a value."""
    parts = re.findall(r"(?:\\.|[^,\\]|\\$)+", text, re.DOTALL)
    return [re.sub(r"\\([,\\])", r"\1", part).strip() for part in parts if part.strip()]


def _environment(environ: Mapping[str, str]) -> dict[str, Given]:
    given: dict[str, Given] = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or not value:
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        name = _ALIASES.get(name, name)
        allowed = [*_IN_EVERY_LAYER, *_POSITIONAL, "config"]
        if name in allowed:
            _add(given, name, Given(value, variable))
        elif near := difflib.get_close_matches(name, allowed, 1, 0.8):
            # Only a likely typo is refused: for a service named cachefs, Kubernetes sets CACHEFS_PORT and others.
            raise ConfigError(f"{variable}: unknown option: did you mean {ENV_PREFIX}{near[0].upper()}?")
    return given


def _file(path: Path) -> tuple[dict[str, Given], list[SourceTable]]:
    """(top-level options, ``[[source]]`` tables)."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin a file with a BOM
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}: name a TOML file that can be read") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"{path}: not UTF-8 at byte {exc.start}: save it as UTF-8") from exc
    # ValueError: TOMLDecodeError, and a number of thousands of digits.
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: not TOML: {exc}") from exc
    given: dict[str, Given] = {}
    sources: list[SourceTable] = []
    for key, value in table.items():
        if key in ("source", "sources") and isinstance(value, list):
            sources += [_source_table(entry, f"{path}: source {n}") for n, entry in enumerate(value, 1)]
        elif isinstance(value, dict):
            raise ConfigError(f"{path}: {_no_sections(key, value)}")
        else:
            name = _known(key, str(path), [*_IN_EVERY_LAYER, *_POSITIONAL])
            _add(given, name, _from_toml(name, value, f"{path}: {key}"))
    return given, sources


def _no_sections(table: str, entries: Mapping[str, object]) -> str:
    """The message for a table other than ``[[source]]``: what to write instead."""
    if table in ("source", "sources"):
        return "[source] is one of a list: write [[source]]"
    for entry in entries:
        for name in (f"{table}_{entry}", entry):
            plain = name.replace("-", "_")
            if _ALIASES.get(plain, plain) in _IN_EVERY_LAYER:
                return f"options have no sections: for [{table}] {entry} write {plain} = … above the first [[source]]"
    return f"no section [{table}] is known: [[source]] is the only one, options stand above it"


def _source_table(entry: object, given_by: str) -> SourceTable:
    if not isinstance(entry, dict):
        raise ConfigError(f'{given_by}: not a table: write [[source]] with name = "…" and url = "…" below it')
    options: dict[str, Given] = {}
    for key, value in entry.items():
        name = _known(key, given_by, ["name", "url", *PER_SOURCE], "key")
        _add(options, name, _from_toml(name, value, f"{given_by}: {key}"))
    return options, given_by


def _add(given: dict[str, Given], name: str, option: Given) -> None:
    """Raises `ConfigError` if the option is there in another spelling: one would win silently."""
    if name in given:
        raise ConfigError(
            f"{option.given_by}: the same option as {given[name].given_by}: leave one of them out"
        )
    given[name] = option


def _from_toml(name: str, value: object, given_by: str) -> Given:
    if isinstance(value, str):
        return Given(value, given_by)
    if isinstance(value, bool | int | float):
        if name in ROWS and ROWS[name].metavar == "OCTAL":
            raise ConfigError(
                f'{given_by}: a mode is octal, and this number is not: write it in quotes, "0644"'
            )
        return Given(_text(value), given_by)
    raise ConfigError(f"{given_by}: write a single value, not a {type(value).__name__}")


def _sources(
    single: Given | None, tables: list[SourceTable], shared: Mapping[str, Any]
) -> tuple[Source, ...]:
    """The sources: `single`, if one is given outside of the tables, else one for each table."""
    if single is not None:
        return (Source(name="", url=_parse("source", single), **shared),)
    if not tables:
        raise ConfigError(
            "no SOURCE: write cachefs mount s3://bucket/prefix MOUNTPOINT, or [[source]] in the config file"
        )
    sources: list[Source] = []
    for table, given_by in tables:
        if "url" not in table:
            raise ConfigError(f'{given_by}: no url: write url = "s3://bucket/prefix"')
        own = {name: _parse(name, table[name]) for name in PER_SOURCE if name in table}
        name = ""
        if "name" in table or len(tables) > 1:
            name = _parse("name", table.get("name", Given("", f"{given_by}: name")))
        if name in (other.name for other in sources):
            raise ConfigError(f"{given_by}: name: {name!r} is taken by another source: give each its own")
        sources.append(Source(name=name, url=_parse("source", table["url"]), **{**shared, **own}))
    return tuple(sources)


def dump(config: Config) -> str:
    """The configuration as TOML, each value with where it was given. `load` reads it back as `--config`."""
    lines = ["# The effective configuration. What is marked as a default may be left out."]
    lines += [_assignment("mountpoint", str(config.mountpoint), config.origins.get("mountpoint", "given"))]
    group = ""
    for name, row in ROWS.items():
        if row.flag_only:
            continue
        if row.group != group:
            group = row.group
            lines += ["", f"# {group}"]
        if (value := getattr(config, name)) is None:
            lines += [f"# {name} is not set"]
        else:
            lines += [_assignment(name, row.show(value), config.origins.get(name, "default"))]
    for source in config.sources:
        lines += ["", "[[source]]"]
        if source.name:
            lines += [_assignment("name", source.name)]
        lines += [_assignment("url", source.url, config.origins.get("source", ""))]
        for name in PER_SOURCE:
            if (value := getattr(source, name)) is not None:
                lines += [_assignment(name, ROWS[name].show(value))]
    return "\n".join(lines) + "\n"


def _assignment(name: str, value: str | int | float | bool, given_by: str = "") -> str:
    # A JSON string is a TOML basic string, except that JSON does not escape DEL.
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return f"{name} = {text}" + (f"  # {given_by}" if given_by else "")
