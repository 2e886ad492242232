"""One declaration of an option, from which all its interfaces are generated.

    name: Annotated[type, Option("help", bounds, ...)] = default          in a dataclass
      ├── the check and its message                     Declared.check, Checked
      ├── the flag of the command line with its help    cli/shared/flags.py
      ├── the field of an HTTP request with its type    serve/fields.py
      ├── --set KEY=VALUE, and the nearest name         engine/compose.py
      └── the row of a table                            options/tables.py

The module imports only the standard library, so that the command line prints its help quickly.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.plain import plain

Made = TypeVar("Made")

_TEXT = "a text that is not empty"
NO_NUMBER = 1e300
"""Limit of magnitude: larger numbers are refused, including infinity and integers beyond the range of float."""


@dataclass(frozen=True, slots=True)
class Option:
    """Properties of an option in addition to its name, type and default.

    Attributes:
        help: one line, for the command line and the tables of the documentation.
        more: further sentences, for the documentation only.
        short: a second, short flag with its dash.
        name: the flag without dashes, if it differs from the field's name.
        metavar: placeholder of the value in the help of the command line; empty: derived from the type.
        least, most: smallest and largest number.
        above, below: exclusive bounds.
        choices: the allowed texts.
        remedy: end of the message about a wrong value; empty: none.
        convert: replaces the check of the type; returns the value to store.
        says_default: whether the command line shows the default, or in which words; else ``help`` contains it.
        on_command_line, over_http: whether that interface includes it, if it includes the option's set.
    """

    help: str
    short: str = ""
    name: str = ""
    metavar: str = ""
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    remedy: str = ""
    convert: Callable[[str, Any], Any] | None = None
    says_default: bool | str = True
    on_command_line: bool = True
    over_http: bool = True
    more: str = ""

    def flag(self, field: str) -> str:
        """Return the long flag with its dashes."""
        return "--" + (self.name or field.replace("_", "-"))


@dataclass(frozen=True, slots=True)
class Declared:
    """A field of a dataclass that carries an :class:`Option`.

    Attributes:
        name: the field's name.
        type: type of the values, without ``Annotated``.
        default: MISSING if the field is required.
        option: its other properties.
    """

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types of the value; a union has several."""
        return get_args(self.type) if get_origin(self.type) in (Union, types.UnionType) else (self.type,)

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is MISSING

    def check(self, value: Any, prefix: str = "") -> Any:
        """Check a value and convert it: numpy and torch numbers to Python's, an integer to a float for a float field.

        Args:
            prefix: beginning of the message, if the source is not ``name=value``.
        Raises:
            ConfigError: the message has the field, the value, and the allowed values.
        """
        if self.option.convert is not None:
            return self.option.convert(self.name, plain(value))
        value = plain(value)
        for kind in self.kinds:
            if _is_of(kind, value) and self._within(value):
                return float(value) if kind is float else tuple(value) if get_origin(kind) is Sequence else value
        raise self.refusal(value, prefix)

    def refusal(self, value: Any, prefix: str = "") -> ConfigError:
        """Return the error for a value that is not allowed."""
        choices = self.option.choices
        remedy = self.option.remedy or (nearest(value, choices) if choices and isinstance(value, str) else "")
        if remedy.startswith("known:"):  # the message already lists them
            remedy = ""
        return ConfigError(f"{prefix or f'{self.name}={value!r:.60}'} must be {self.allowed}{remedy and ': '}{remedy}")

    @property
    def allowed(self) -> str:
        """Describe the allowed values: "an integer, at least 1"."""
        if self.option.choices:
            names = ", ".join(map(repr, self.option.choices))
            words = [names if len(self.option.choices) == 1 else f"one of {names}"]
            words += [each for kind in self.kinds if kind is not str and (each := self._in_words(kind))]
        else:
            words = [each for kind in self.kinds if (each := self._in_words(kind))]
            if Path in self.kinds:  # a device or dtype may also be given as a text
                words = [each for each in words if each != _TEXT]
        return " or ".join(dict.fromkeys(words))

    def _within(self, value: Any) -> bool:
        option = self.option
        if isinstance(value, str):
            return not option.choices or value in option.choices
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            return True
        return (
            (option.least is None or value >= option.least)
            and (option.most is None or value <= option.most)
            and (option.above is None or value > option.above)
            and (option.below is None or value < option.below)
        )

    def _in_words(self, kind: Any) -> str:
        if kind is bool:
            return "true or false"
        if kind is int:
            return "an integer" + self._range_of_integers()
        if kind is float:
            return "a number" + self._interval()
        if kind is type(None):
            return ""
        if kind is str:
            return _TEXT
        if kind is Path:
            return "a path that is not empty"
        if get_origin(kind) is Sequence:
            return {int: "a list of integers", str: "a list of texts"}.get(get_args(kind)[0], "a list")
        return "a mapping" if get_origin(kind) is Mapping else str(kind)

    def _range_of_integers(self) -> str:
        least, most = self.option.least, self.option.most
        if least is not None and most is not None:
            return f" between {_whole(least)} and {_whole(most)}"
        bounds = [f", at least {_whole(least)}"] if least is not None else []
        bounds += [f", at most {_whole(most)}"] if most is not None else []
        bounds += [f", more than {_whole(self.option.above)}"] if self.option.above is not None else []
        return "".join(bounds)

    def _interval(self) -> str:
        option = self.option
        low, high = option.above if option.least is None else option.least, option.below
        high = high if option.most is None else option.most
        if low is None and high is None:
            return ""
        begin = "(-inf" if low is None else f"{'[' if option.least is not None else '('}{low:g}"
        end = f"{NO_NUMBER:g})" if high is None else f"{high:g}{']' if option.most is not None else ')'}"
        return f" in {begin}, {end}"


def _whole(bound: float) -> str:
    return "2**63 - 1" if bound == 2**63 - 1 else str(int(bound))


def _is_of(kind: Any, value: Any) -> bool:
    """Return whether a value is of a type in JSON's sense: True is not a number, and NaN is refused."""
    if kind is type(None):
        return value is None
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) < NO_NUMBER  # NaN fails the comparison
    if kind is int:
        return isinstance(value, int)
    if kind is str:
        return isinstance(value, str) and bool(value)
    if get_origin(kind) is Sequence:
        (inner,) = get_args(kind)
        return isinstance(value, (list, tuple)) and all(_is_of(inner, each) for each in value)
    return isinstance(value, get_origin(kind) or kind)


_found: dict[type[Any], tuple[Declared, ...]] = {}


def declared(cls: type[Any]) -> tuple[Declared, ...]:
    """Return the fields of a dataclass that carry an Option, in order."""
    if cls not in _found:
        hints = get_type_hints(cls, include_extras=True)
        _found[cls] = tuple(_of_field(each, hints[each.name]) for each in fields(cls) if _option(hints[each.name]))
    return _found[cls]


def _option(hint: Any) -> Option | None:
    found = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((each for each in found if isinstance(each, Option)), None)


def _of_field(field: Any, hint: Any) -> Declared:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    option = _option(hint)
    assert option is not None
    return Declared(field.name, get_args(hint)[0], default, option)


def named(cls: type[Any], name: str) -> Declared:
    """Return one declared field of a dataclass."""
    return next(each for each in declared(cls) if each.name == name)


def documented(cls: type[Made]) -> type[Made]:
    """Add the declarations of a class's fields to its docstring as ``Attributes``, for ``help`` and notebooks."""
    lines = [f"    {each.name}: {each.option.help} {each.option.more}".rstrip() for each in declared(cls)]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Attributes:", *lines])
    return cls


class Checked:
    """Base of frozen dataclasses of options: each new instance checks and converts its fields.

    Attributes:
        name_prefix: prefix of the fields' names in messages.
    """

    name_prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for each in declared(type(self)):
            value = getattr(self, each.name)
            prefix = f"{self.name_prefix}{each.name}={value!r:.60}" if self.name_prefix else ""
            object.__setattr__(self, each.name, each.check(value, prefix))
        self.check_together()

    def check_together(self) -> None:
        """Refuse values that contradict each other.

        Raises:
            ConfigError: the message names the fields.
        """


def check_known(names: Iterable[object], cls: type, kind: str, elsewhere: Mapping[str, str] | None = None) -> None:
    """Refuse names that are not fields of a dataclass.

    Args:
        kind: the word for such a name in the message.
        elsewhere: names from other programs, and their replacements.
    Raises:
        ConfigError: the message has the replacement of the first name, or the nearest name.
    """
    known = [each.name for each in fields(cls)]
    for name in names:
        if name not in known:
            remedy = (elsewhere or {}).get(str(name)) or nearest(str(name), known)
            raise ConfigError(f"unknown {kind} '{name}': {remedy}")
