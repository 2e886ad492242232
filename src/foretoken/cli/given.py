"""What was typed, before it becomes values: an option twice, of which the parser would drop one, or an empty value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from foretoken.cli.options import HELP_NAMES
from foretoken.core.errors import ConfigError

_MAY_BE_EMPTY = ("--system",)  # no words are a system message, too: templates with words of their own leave them out


def check_given(command: Any, arguments: Sequence[str]) -> None:
    """Refuse a command line of which a part would be ignored.

    Args:
        command: of typer; its own options come first, then a command in it with the rest.
        arguments: behind the command's name. What cannot be parsed is passed over: the parser says so itself.
    Raises:
        ConfigError: an option of one value is there twice, or its value is empty.
    """
    context = typer.Context(command, help_option_names=HELP_NAMES)
    parser = command.make_parser(context)
    try:
        values, rest, order = parser.parse_args(args=list(arguments))
    except Exception:  # a usage error; its class is of click or of typer, by typer's version
        return
    for param in order:
        name = param.opts[0]
        if not name.startswith("-") or param.is_flag or param.multiple:
            continue
        if order.count(param) > 1:
            raise ConfigError(f"{name} is given twice: keep one")
        if not values[param.name].strip() and name not in _MAY_BE_EMPTY:
            raise ConfigError(f"{name} is empty: give it a value, or leave it out")
    if rest and hasattr(command, "get_command"):
        inner = command.get_command(context, rest[0])
        if inner is not None:
            check_given(inner, rest[1:])
