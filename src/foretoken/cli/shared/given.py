"""Checks of the raw command line: options that the parser would ignore silently, and files that would be lost."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from foretoken.cli.shared.options import HELP_NAMES
from foretoken.core.errors import ConfigError
from foretoken.core.files import check_name

_MAY_BE_EMPTY = (
    "--system",  # an empty system message is meaningful: it turns off a template's default one
    "--depths",  # empty: logits only
)
_MADE = ("--out", "--csv", "--markdown", "--report", "--picture", "--save-outputs")


def check_given(command: Any, arguments: Sequence[str]) -> None:
    """Refuse a command line with an ignored part, or with an output that overwrites an input.

    Args:
        command: typer's command; its own options precede a subcommand with the rest.
        arguments: the arguments after the command's name. Invalid ones are skipped: the parser reports them.
    Raises:
        ConfigError: an option with one value is repeated, a value is empty or repeated in a list, an output file is
            also an input, or its name has invalid characters.
    """
    context = typer.Context(command, help_option_names=HELP_NAMES)
    parser = command.make_parser(context)
    try:
        values, rest, order = parser.parse_args(args=list(arguments))
    except Exception:  # a usage error; its class belongs to click or to typer, depending on typer's version
        return
    given: dict[str, list[str]] = {}
    for param in order:
        value = values[param.name]
        name = param.opts[0] if param.opts[0].startswith("-") else param.opts[0].upper()
        if isinstance(value, str) and name in given:
            raise ConfigError(f"{name} is given twice: keep one")
        if isinstance(value, (str, list, tuple)):
            given[name] = [value] if isinstance(value, str) else list(value)
    for name, several in given.items():
        for each in several:
            if name.startswith("-") and name not in _MAY_BE_EMPTY and not each.strip():
                raise ConfigError(f"{name} is empty: give it a value, or leave it out")
            if several.count(each) > 1:
                raise ConfigError(f"{name} has {each} twice: keep one")
    _check_kept(given)
    if rest and hasattr(command, "get_command"):
        inner = command.get_command(context, rest[0])
        if inner is not None:
            check_given(inner, rest[1:])


def typed(context: typer.Context) -> set[str]:
    """Return the parameters on the command line, by their names in Python."""
    return {
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE"
    }


def check_alone(context: typer.Context, listing: str, *, but: Iterable[str]) -> None:
    """Refuse other options together with an option that only lists names.

    Args:
        listing: the listing option.
        but: permitted parameters, by their names in Python; ``verbose`` is always permitted.
    Raises:
        ConfigError: there is another option.
    """
    for name in sorted(typed(context) - {*but, "verbose"}):
        option = next(param.opts[0] for param in context.command.params if param.name == name)
        raise ConfigError(f"{listing} only lists names: leave {option} out")


def _check_kept(given: Mapping[str, Iterable[str]]) -> None:
    read = {
        Path(each).resolve(): name
        for name in given
        if name not in _MADE
        for each in given[name]
        if os.path.isfile(each)
    }
    for name in _MADE:
        for each in given.get(name, ()):
            check_name(each, f"{name} ")
            other = read.get(Path(each).resolve())
            if other is not None:
                raise ConfigError(f"{name} {each}: {other} is this file, and would be lost; name another")
