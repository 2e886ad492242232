"""Options of a ``speculative_config`` in addition to those of its method and verifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from foretoken.options.option import Checked, Option, documented

AUTO: Mapping[str, Any] = MappingProxyType({"method": "auto"})
"""The ``speculative_config`` where none is given."""

EXECUTORS = ("serial", "pearl", "auto")
LANES = ("thread", "process")
_MOST_NODES = 256


def _name_or_instance(name: str, value: Any) -> Any:
    """Names are looked up, and instances checked, when the recipe is composed."""
    del name
    return value


@documented
@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Checked):
    """Options of a speculative decoding recipe.

    Raises:
        ConfigError: a value is out of range.
    """

    method: Annotated[
        Any,
        Option(
            "The drafter: a name from the catalogue, or your own instance.",
            convert=_name_or_instance,
            more="By default, a draft model if `model` is set; else plain decoding. Without any config: auto.",
        ),
    ] = None
    num_speculative_tokens: Annotated[
        int | str | None,
        Option(
            "Draft tokens per step; auto chooses by measured acceptance and cost.",
            least=0,
            most=_MOST_NODES,
            choices=("auto",),
        ),
    ] = "auto"
    verifier: Annotated[
        Any,
        Option(
            "The rule that accepts draft tokens; auto selects the strongest lossless one for the draft.",
            convert=_name_or_instance,
            more="A name from the catalogue, or your own instance; if unset, a drafter's own rule applies.",
        ),
    ] = None
    extend: Annotated[
        str | None,
        Option(
            "suffix: append to each draft what followed its end earlier in the text, while that pays.",
            choices=("suffix",),
        ),
    ] = None
    executor: Annotated[
        str,
        Option(
            "serial: draft, then verify; pearl: both concurrently; auto: the faster one, by number of requests.",
            choices=EXECUTORS,
        ),
    ] = "serial"
    lane: Annotated[str, Option("Where pearl drafts: in a thread, or in a process.", choices=LANES)] = "thread"
    plan: Annotated[
        str | None,
        Option("The target's verification plan: dense, or one of the catalogue; or a file of `foretoken plan`."),
    ] = None
