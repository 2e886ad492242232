"""What a ``speculative_config`` may hold next to the options of its method and verifier."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from foretoken.options.option import Checked, Option, documented

EXECUTORS = ("serial", "pearl", "auto")
LANES = ("thread", "process", "gloo")
_MOST_NODES = 256


def _name_or_instance(name: str, value: Any) -> Any:
    """Names are looked up, and instances inspected, when the recipe is composed."""
    del name
    return value


@documented
@dataclass(frozen=True, kw_only=True)
class RecipeOptions(Checked):
    """How a model is sped up.

    Raises:
        ConfigError: a value is out of range.
    """

    method: Annotated[
        Any,
        Option(
            "The drafter: a name of the catalogue, or an instance of your own.",
            convert=_name_or_instance,
            more="Without one, a `model` drafts if it is given; else decoding is plain.",
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
            "The rule that accepts draft tokens; auto takes the strongest lossless one that fits the draft.",
            convert=_name_or_instance,
            more="A name of the catalogue, or an instance of your own; without one, a drafter's own rule counts.",
        ),
    ] = None
    executor: Annotated[
        str,
        Option(
            "serial: draft, then verify; pearl: both at once; auto: the faster one, by number of requests.",
            choices=EXECUTORS,
        ),
    ] = "serial"
    lane: Annotated[
        str,
        Option("Where pearl drafts ahead: in a thread, in a process, or over gloo.", choices=LANES),
    ] = "thread"
    plan: Annotated[str | None, Option("How the target computes the draft: dense, or a plan of the catalogue.")] = None
