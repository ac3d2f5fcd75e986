"""The lines that verbs print. Names in them may hold anything: a terminal gets no control characters."""

from __future__ import annotations

import click

from cachefs.units import printable


def say(text: str, *, err: bool = False) -> None:
    """Print lines, with what a terminal would obey escaped."""
    click.echo("\n".join(printable(line) for line in text.split("\n")), err=err)
