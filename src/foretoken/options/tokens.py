"""Texts and token ids as people give them, checked and kept in one form: the ``convert`` of options."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from foretoken.core.errors import ConfigError
from foretoken.core.plain import plain

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,17}")


def texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several, always as a tuple."""
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, Iterable) or isinstance(found, (bytes, Mapping)):
        raise ConfigError(f"{name}={value!r:.60} must be a text or a list of texts")
    found = tuple(found)
    for text in found:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"{name}={text!r:.60} must be a non-empty string")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise ConfigError(f"{name}={text!r:.60} is not valid Unicode: it has a lone surrogate")
    return found


def processors(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    """Functions of the output so far and a row of logits, always as a tuple."""
    found = tuple(value) if isinstance(value, Iterable) else () if value is None else (value,)
    for each in found:
        if _num_arguments(each) not in (2, 3):
            raise ConfigError(
                f"{name}={each!r:.60} must be a function of (output_ids, logits), or of (prompt_ids, output_ids, "
                "logits), which returns logits"
            )
    return found


def _num_arguments(value: Any) -> int:
    """Arguments of a function; 0 for any other value, and for functions without a signature."""
    try:
        return len(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return 0


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids, always as a tuple."""
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise ConfigError(f"{name}={value!r:.60} must be a list of token ids")
    ids = tuple(plain(each) for each in value)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"{name} has {token!r:.60}: token ids are non-negative integers")
    return ids


def text_or_ids(name: str, value: Any) -> str | tuple[int, ...] | None:
    """A text or its token ids; an empty one is None."""
    if isinstance(value, str):
        return texts(name, value)[0] if value else None
    return token_ids(name, value) or None


def allowed_ids(name: str, value: Any) -> tuple[int, ...] | None:
    """Token ids, of which there must be one; None: every token."""
    ids = None if value is None else token_ids(name, value)
    if ids is not None and not ids:
        raise ConfigError(f"{name} is empty and forbids every token; use None to allow every token")
    return ids


def token_values(name: str, value: Any) -> dict[int, float] | None:
    """Numbers by token id, which is a text in JSON."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r:.60} must be a mapping of token ids to numbers")
    found: dict[int, float] = {}
    for key, each in value.items():
        token, number = plain(key), plain(each)
        if isinstance(token, str) and _TOKEN_ID.fullmatch(token):
            token = int(token)
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"{name} has the key {token!r:.60}: keys are token ids")
        if token in found:
            raise ConfigError(f"{name} gives token {token} twice: keep one")
        if not isinstance(number, (int, float)) or isinstance(number, bool) or not -math.inf <= number <= 1e30:
            raise ConfigError(f"{name}[{token}]={number!r:.60} must be a number up to 1e30 (-inf forbids the token)")
        found[token] = number
    return found
