"""The URLs of stores: which are accepted, and how secrets in them are refused.

A secret in a URL would be shown by `ps`, by the shell's history, by logs and by `--print-config`; so it is
refused at the door, and the refusal does not repeat it.
"""

from __future__ import annotations

import os
import re
from contextvars import ContextVar

_SECRET_WORD = re.compile(
    r"(^|[-_])(sig|signature|secret|token|password|passwd|pwd|credential|key|accesskey\w*)($|[-_])|accesskey|x-amz-|secret",
    re.IGNORECASE,
)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://.*", re.DOTALL)

directory: ContextVar[str] = ContextVar("directory", default="")
"""What relative paths are relative to, while a configuration is read; "": the current directory. A daemon that reads its
configuration again is in another one."""


def absolute(path: str) -> str:
    """Made absolute by its text alone: touching a path may hang in a dead mount."""
    return os.path.abspath(os.path.join(directory.get(), os.path.expanduser(path)))


SECRET_ADVICE = (
    "credentials do not belong here: give them in the environment (AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, AZURE_STORAGE_ACCOUNT_KEY, GOOGLE_APPLICATION_CREDENTIALS) or in a --profile"
)


class SecretInside(ValueError):
    """The text holds a credential: it must not be repeated in a message."""


def looks_secret(name: str) -> bool:
    """Whether an option or query parameter of this name would hold a credential."""
    return _SECRET_WORD.search(name) is not None


def check_url(text: str) -> str:
    """The URL, without a trailing slash; `ValueError` if it is none or holds a credential."""
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
    # One slash only: further ones belong to the name of a prefix.
    return f"{scheme.lower()}://{rest.removesuffix('/') or '/'}"


def _refuse_secrets(text: str) -> None:
    authority, _, query = text.partition("://")[2].partition("?")
    authority = authority.partition("/")[0]
    user, at, host = authority.rpartition("@")
    if at and ":" in user:
        raise SecretInside(f"a URL with a password: {SECRET_ADVICE}")
    # A secret key may hold a slash, which hides the @ behind it: what follows a colon must be a port.
    if not at and re.search(r":(?!\d*$)[^\]]*$", host) and not host.endswith("]"):
        raise SecretInside(f"a URL with a password: {SECRET_ADVICE}")
    for parameter in re.split(r"[&;]", query):
        name, equals, _ = parameter.partition("=")
        if equals and looks_secret(name):
            raise SecretInside(f"a URL with a credential ({name}): {SECRET_ADVICE}")


def check_name(name: str) -> str:
    """A source's name: one path component that every tool can spell."""
    if not name or name in (".", "..") or "/" in name or len(name.encode()) > 255 or not name.isprintable():
        raise ValueError("not a directory name: write one path component such as imagenet")
    return name
