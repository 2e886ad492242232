"""Options of vLLM's ``LLM``: values that always hold here are accepted, unsupported ones are refused with a remedy.

Nothing is taken in silence: an option that changes nothing is named in one line of the log, and a value that would
change something is refused. vllm_options.json has the names, by vLLM's spelling.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError, nearest
from foretoken.core.plain import Made, plain, reject_unknown_keywords
from foretoken.options.sampling import SamplingParams

log = logging.getLogger(__name__)

_TABLES: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_NOTHING_TO_SET = frozenset(chain(*_TABLES["nothing_to_set"].values()))
_ONLY: Mapping[str, Sequence[Any]] = _TABLES["only"]  # None and empty values have no effect, whatever the name
_INSTEAD: Mapping[str, str] = _TABLES["instead"]  # of what _ONLY refuses
_ELSEWHERE = {"method": "it goes into speculative_config={'method': ...}"}
METHODS = {"eagle3": "eagle"}
"""vLLM's further names of methods, where the same options mean the same."""

_METHODS: Mapping[str, str] = _TABLES["methods"]
_ARGUMENTS = {
    **{each.name: f"write sampling_params=SamplingParams({each.name}=...)" for each in fields(SamplingParams)},
    **_TABLES["arguments"],
}
_UNASKED: Mapping[str, Sequence[Any]] = _TABLES["unasked"]  # what vLLM's own defaults say
UNASKED_SPECULATION: Mapping[str, Sequence[Any]] = _TABLES["unasked_speculation"]
SPECULATION: Mapping[str, str] = _TABLES["speculation"]  # keys of vLLM's speculative_config, and what to say of them


class AbsentMethod(ConfigError, AttributeError):
    """A method of vLLM's that is not here; ``hasattr`` says so, too."""


def absent(name: str, methods: Mapping[str, str] = _METHODS, *, owner: str = "LLM") -> AttributeError:
    """The message for an attribute that ``LLM``, or another class with methods of vLLM's, does not have."""
    if name in methods:
        return AbsentMethod(f"{owner} has no '{name}': {methods[name]}")
    return AttributeError(f"'{owner}' object has no attribute '{name}'")


def arguments(function: Made) -> Made:
    """Refuse a call's arguments that are not here, with what takes their place; see
    :func:`core.plain.reject_unknown_keywords`.

    Those that are as vLLM has them by default ask for nothing, and are left out.
    """
    return reject_unknown_keywords(function, _ARGUMENTS, _UNASKED)


def check_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse unknown options and unsupported values.

    Args:
        options: by name.
        known: the names of options that there are.
    Raises:
        ConfigError: with the nearest name, or what takes its place.
    """
    idle = []
    for name, value in options.items():
        if name in _ONLY:
            if not _asks_for_nothing(plain(value)) and plain(value) not in _ONLY[name]:
                raise ConfigError(f"{name}={value!r:.60} is not supported: {_INSTEAD.get(name, 'leave it out')}")
            idle.append(name)
        elif name in _NOTHING_TO_SET:
            idle.append(name)
        else:
            raise ConfigError(f"LLM has no '{name}': {_ELSEWHERE.get(name) or nearest(name, known)}")
    if idle:
        log.warning("options that change nothing here: %s", ", ".join(sorted(idle)))


def _asks_for_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, Sized) and not value)
