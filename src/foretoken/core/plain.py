"""Arguments as people give them: numbers and arrays of other libraries, and keywords that are nearly right."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from foretoken.core.errors import ConfigError, nearest

Made = TypeVar("Made", bound=Callable[..., Any])


def plain(value: Any) -> Any:
    """A number or array of numpy, torch and their like as Python's own; anything else as it is."""
    as_python = getattr(value, "tolist", None)
    return as_python() if callable(as_python) and not isinstance(value, type) else value


def without_idle(given: Mapping[str, Any], idle: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """The given arguments, without those that change nothing.

    Args:
        idle: names of another library's, and the values of each that ask for nothing.
    """
    return {
        key: value
        for key, value in given.items()
        if not any(value is each or (type(value) is type(each) and value == each) for each in idle.get(key, ()))
    }


def check_call(function: Made) -> Made:
    """Refuse arguments that a function does not take, or lacks, in words, in place of a ``TypeError``.

    Raises:
        ConfigError: by the decorated function.
    """
    signature = inspect.signature(function)
    owner = _owner(function)
    needed = [name for name, each in signature.parameters.items() if each.default is each.empty and name != "self"]
    needed = [name for name in needed if signature.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        try:
            return function(*args, **keywords)
        except TypeError:  # the call's own, if the arguments do not fit: to compare them before every call is slow
            try:
                signature.bind(*args, **keywords)
            except TypeError as error:
                form = ", ".join([*needed, "NAME=VALUE", "…"])
                raise ConfigError(f"{owner}: {error}; write {owner}({form})") from None
            raise

    return checked  # type: ignore[return-value]


def _owner(function: Callable[..., Any]) -> str:
    return function.__qualname__.removesuffix(".__init__")


def reject_unknown_keywords(
    function: Made, elsewhere: Mapping[str, str] | None = None, idle: Mapping[str, Sequence[Any]] | None = None
) -> Made:
    """Refuse keywords that a function does not have with the nearest that it has, and all else as :func:`check_call`
    does.

    Args:
        function: all its arguments have names.
        elsewhere: keywords of other libraries, and what to say of them.
        idle: keywords of other libraries, and the values that are left out, see :func:`without_idle`.
    Raises:
        ConfigError: by the decorated function.
    """
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    owner = _owner(function)
    call = check_call(function)

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        keywords = without_idle(keywords, idle or {})
        for key in keywords:
            if key not in known:
                raise ConfigError(f"{owner} has no '{key}': {(elsewhere or {}).get(key) or nearest(key, known)}")
        return call(*args, **keywords)

    return checked  # type: ignore[return-value]
