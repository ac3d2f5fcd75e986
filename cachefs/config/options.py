"""The rows of the options table, and the kinds of values.

A parser takes text and returns the value, or raises `ValueError` whose text completes "'12X' is …". `show` returns text, a
number or a bool; the parser turns its text into the same value.

URLs with a secret are refused: `ps`, the shell's history, logs and `--print-config` would show it. The error message does
not repeat it.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from cachefs.base.names import OnOutage
from cachefs.base.units import (
    FOREVER,
    Size,
    format_bytes,
    format_duration,
    format_mode,
    parse_bool,
    parse_bytes,
    parse_capacity,
    parse_duration,
    parse_mode,
    parse_rate,
)

_SECRET_WORD = re.compile(
    r"(^|[-_])(sig|signature|secret|token|password|passwd|pwd|credential|key|accesskey\w*)($|[-_])|accesskey|x-amz-|secret",
    re.IGNORECASE,
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://.*", re.DOTALL)

base_directory: ContextVar[str] = ContextVar("base_directory", default="")
"""The directory of relative paths while a configuration is read; "": the working directory. A daemon that reads its
configuration again has another working directory."""


def absolute(path: str) -> str:
    """The absolute path, without a system call on it, which would not return below a mount that hangs."""
    return os.path.abspath(os.path.join(base_directory.get(), os.path.expanduser(path)))


SECRET_ADVICE = (
    "credentials do not belong here: give them in the environment (AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_ACCOUNT_KEY, GOOGLE_APPLICATION_CREDENTIALS) or in a --profile"
)


class SecretInside(ValueError):
    """The text has a credential, so no message may repeat it."""


def looks_secret(name: str) -> bool:
    """True if a name looks like that of an option or query parameter for a credential."""
    return _SECRET_WORD.search(name) is not None


def check_url(text: str) -> str:
    """The URL without a trailing slash; `ValueError` if it is malformed or has a credential."""
    if text.startswith(("/", "./", "../", "~/")):
        text = "file://" + absolute(text)
    if not _URL.fullmatch(text):
        raise ValueError(
            "not a URL: write it like s3://bucket/prefix, az://container, https://host/path or file:///path"
        )
    if any(ord(char) < 32 or ord(char) == 127 for char in text):
        raise ValueError("a URL with control characters: check the quoting")
    _refuse_secrets(text)
    scheme, _, rest = text.partition("://")
    if not rest.strip("/") and scheme.lower() != "file":
        raise ValueError(f"without a bucket or host: write it like {scheme}://bucket/prefix")
    # Removes one slash only: further ones are a part of the prefix.
    return f"{scheme.lower()}://{rest.removesuffix('/') or '/'}"


def _refuse_secrets(text: str) -> None:
    authority, _, query = text.partition("://")[2].partition("?")
    authority = authority.partition("/")[0]
    user, at, host = authority.rpartition("@")
    if at and ":" in user:
        raise SecretInside(f"a URL with a password: {SECRET_ADVICE}")
    # A secret key may contain a slash, which hides the @: so what follows a colon must be a port.
    if not at and re.search(r":(?!\d*$)[^\]]*$", host) and not host.endswith("]"):
        raise SecretInside(f"a URL with a password: {SECRET_ADVICE}")
    for parameter in re.split(r"[&;]", query):
        name, equals, _ = parameter.partition("=")
        if equals and looks_secret(name):
            raise SecretInside(f"a URL with a credential ({name}): {SECRET_ADVICE}")


def check_name(name: str) -> str:
    """A source's name: one printable path component."""
    if not name or name in (".", "..") or "/" in name or len(name.encode()) > 255 or not name.isprintable():
        raise ValueError("not a directory name: write one path component such as imagenet")
    return name


DERIVED: Any = object()
"""Placeholder of a value that `Config` derives from its other fields."""


@dataclass(frozen=True, slots=True)
class Row:
    """An option. `flags` are further names; `flag_only`: for the command line alone; `derive` computes the default."""

    help: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str | int | float | bool]
    group: str = ""
    metavar: str = "TEXT"
    default: str = ""
    flags: tuple[str, ...] = ()
    flag_only: bool = False
    derive: Callable[[Any], Any] | None = None


def _parse_text(text: str) -> str:
    if not text.strip():
        raise ValueError("empty: give it a value or leave it out")
    return text.strip()


def _parse_count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text.strip()):
        raise ValueError("not a number from 1 up")
    return int(text)


def _parse_weight(text: str) -> float:
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6})?", text.strip()) or not float(text):
        raise ValueError("not a number above 0 and below a million: write it like 1 or 0.5")
    return float(text)


def _parse_block_size(text: str) -> int:
    size = parse_bytes(text)
    if size & (size - 1) or not 64 << 10 <= size <= 16 << 20:
        raise ValueError("not a power of two from 64K to 16M: write it like 1M")
    return size


def _parse_timeout(text: str) -> float:
    seconds = parse_duration(text)
    if not seconds:
        raise ValueError("no time to wait: write it like 60s, or forever")
    return seconds


def _parse_endpoint(text: str) -> str:
    _refuse_secrets(text)
    try:
        server = urlsplit(text.strip())
        known = server.scheme in ("http", "https") and server.hostname and server.port != 0
    except ValueError:  # a port above 65535
        known = False
    if not known or re.search(r"\s", text.strip()):
        raise ValueError("not the address of a server: write it like http://minio:9000")
    return check_url(text.strip())


NO_ID = (1 << 32) - 1
"""(uid_t) -1, which is no uid or gid."""


def _parse_id(kind: str, find: Callable[[str], int], text: str) -> int:
    if re.fullmatch(r"[0-9]{1,10}", text.strip()) and int(text) < NO_ID:
        return int(text)
    try:
        return find(text.strip())
    except KeyError:
        raise ValueError(f"not a {kind} of this machine: write a number or a {kind} name") from None


def _parse_listen(text: str) -> str:
    host, _, port = text.strip().rpartition(":")
    if not re.fullmatch(r"\d{1,5}", port) or int(port) > 65535 or re.search(r"[^\w.:\[\]-]", host):
        raise ValueError("not HOST:PORT: write it like 127.0.0.1:9400, or 9400 for this machine alone")
    return f"{host or '127.0.0.1'}:{port}"


def _parse_outage(text: str) -> OnOutage:
    mode, _, wait = text.strip().lower().partition("=")
    if mode == "wait" and wait:
        wait_s = parse_duration(wait)
        if 0 < wait_s < FOREVER:
            return OnOutage("wait", wait_s)
    elif text.strip().lower() in ("serve-stale", "eio"):
        return OnOutage("eio" if mode == "eio" else "serve-stale")
    raise ValueError("not one of serve-stale, eio, wait=30s")


def _kind(
    metavar: str, parse: Callable[[str], Any], show: Callable[[Any], Any] = lambda value: value
) -> Callable[..., Any]:
    """A function that makes an option's field: `value` is the default, `default` the text that the help shows for it."""

    def make(help: str, *, value: Any = DERIVED, default: str = "", **more: Any) -> Any:
        if value is True:
            default = "yes"
        elif not default and metavar and value is not None and value is not DERIVED:
            default = str(show(value))
        row = Row(help, parse, show, default=default, **{"metavar": metavar, **more})
        return field(default=value, metadata={"row": row}, compare=not row.flag_only)

    return make


SIZE = _kind("SIZE", Size.parse, str)
BYTE_COUNT = _kind("SIZE", parse_capacity, format_bytes)
BLOCK_SIZE = _kind("SIZE", _parse_block_size, format_bytes)
RATE = _kind("RATE", parse_rate, format_bytes)
DURATION = _kind("TIME", parse_duration, format_duration)
TIMEOUT = _kind("TIME", _parse_timeout, format_duration)
MODE = _kind("OCTAL", parse_mode, format_mode)
COUNT = _kind("N", _parse_count)
WEIGHT = _kind("N", _parse_weight)
TEXT = _kind("TEXT", _parse_text)
ENDPOINT = _kind("URL", _parse_endpoint)
LISTEN = _kind("HOST:PORT", _parse_listen)
PATH = _kind("PATH", lambda text: Path(absolute(_parse_text(text))), str)
USER = _kind("USER", partial(_parse_id, "user", lambda name: pwd.getpwnam(name).pw_uid))
GROUP = _kind("GROUP", partial(_parse_id, "group", lambda name: grp.getgrnam(name).gr_gid))
SWITCH = _kind("", parse_bool)
OUTAGE = _kind("serve-stale|eio|wait=TIME", _parse_outage, str)


def choice(literal: Any) -> Callable[..., Any]:
    """The kind of an option that is one word of a `Literal`."""
    choices = get_args(literal)

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return word

    return _kind("|".join(choices), parse)
