"""Flags of the command line, made from the declarations of options (options/option.py).

A command takes a whole set of options as one argument::

    @with_flags
    def generate(prompt: ..., *, params: Annotated[SamplingParams, Flags("Sampling")], ...)

The command line has one flag per option in its place; the command receives the whole set.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from foretoken.core.errors import ConfigError
from foretoken.options.option import Declared, declared


@dataclass(frozen=True)
class Flags:
    """The options of a set that are flags of a command, and their help.

    Attributes:
        panel: the panel of the help.
        only: names to include; empty: all options that the command line allows.
        but: names to exclude.
        defaults: this command's defaults, where they differ from the set's.
        helps: this command's help texts, likewise.
    """

    panel: str | None = None
    only: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    helps: Mapping[str, str] = field(default_factory=dict)


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a command's sets of options by flags; typer builds the command from the resulting signature."""
    hints = get_type_hints(command, include_extras=True)
    sets: dict[str, tuple[Any, list[Declared]]] = {}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind, *more = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        flags = next((extra for extra in more if isinstance(extra, Flags)), None)
        if flags is None:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        own = [each for each in declared(kind) if each.option.on_command_line]
        own = [
            option for option in own if option.name in (flags.only or (option.name,)) and option.name not in flags.but
        ]
        sets[name] = kind, own
        parameters += [parameter_of(each, flags) for each in own]

    @functools.wraps(command)
    def call(**given: Any) -> Any:
        made = {}
        for name, (kind, own) in sets.items():
            typed = {each.name: _value(each, given.pop(each.name)) for each in own}
            made[name] = kind(**{key: value for key, value in typed.items() if value is not _LEFT_OUT})
        return command(**given, **made)

    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    return call


def parameter_of(each: Declared, flags: Flags | None = None) -> inspect.Parameter:
    """Return the parameter from which typer creates a flag. The declaration checks the value and writes the error."""
    flags, option, repeated = flags or Flags(), each.option, _repeated(each)
    flag = option.flag(each.name)

    def checked(value: Any) -> Any:
        return value if repeated else each.check(value, f"{flag} {value}")

    shown = typer.Option(
        *(flag, option.short) if option.short else (flag,),
        help=f"{flags.helps.get(each.name, option.help)}{' Repeatable.' if repeated else ''}",
        metavar=option.metavar or None,
        show_default=option.says_default,
        rich_help_panel=flags.panel,
        callback=None if each.default is MISSING else checked,
    )
    default = None if repeated else flags.defaults.get(each.name, each.default)
    return inspect.Parameter(
        each.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else default,
        annotation=Annotated[repeated or each.type, shown],
    )


def _repeated(each: Declared) -> Any:
    """Return the list type of a repeatable flag, in place of a sequence or a mapping; None: not repeatable."""
    for kind in each.kinds:
        if get_origin(kind) is Mapping:
            return list[str] | None
        if get_origin(kind) is Sequence:
            return list[get_args(kind)[0]] | None  # type: ignore[misc]
    return None


def _value(each: Declared, typed: Any) -> Any:
    """Convert the parser's value to the option's type."""
    if _repeated(each) is None:
        return typed
    if not typed:
        return _LEFT_OUT
    return _mapping(each, typed) if any(get_origin(kind) is Mapping for kind in each.kinds) else typed


def _mapping(each: Declared, typed: Sequence[str]) -> dict[str, float]:
    """Several ``KEY=VALUE``."""
    flag, found = each.option.flag(each.name), {}
    for text in typed:
        key, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise ConfigError(f"{flag} '{text}': write {each.option.metavar}, for example 42=-5") from None
        if key in found:
            raise ConfigError(f"{flag} gives {key} twice: keep one")
        found[key] = number
    return found


_LEFT_OUT = object()
