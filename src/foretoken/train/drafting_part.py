"""What commands that train a drafting part share: options, the run with drafts for held-out prompts, the summary.

Without torch until it runs, as help imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import Judged, Loop, Session

if TYPE_CHECKING:
    from foretoken.train.recipe import Recipe

NOTHING_HELD_OUT = "acceptance unknown: nothing was held out of a corpus this small"


@dataclass(frozen=True, kw_only=True)
class PartOptions(Loop, Judged):
    """Options of every such command; a subclass adds the part's shape, and may change ``own_words``."""

    target: Annotated[str, Option("The model to draft for: zoo:NAME, folder or hub id.", "-t", metavar="MODEL")]
    own_words: Annotated[float | None, Option("Share of the text that the target generates; default: 0.5.")] = None
    own_words_else = 0.5

    @property
    def share(self) -> float:
        """Share of the text, or of its last stage, that the target generates."""
        return self.own_words_else if self.own_words is None else self.own_words


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(PartOptions):
    """Options of a part that stored features may train, too."""

    features: Annotated[
        Path | None, Option("Train from what foretoken train features stored instead.", metavar="DIR")
    ] = None

    @property
    def share(self) -> float:
        """As of other parts; stored features are of given text."""
        return super().share if self.features is None else 0.0

    def check_together(self) -> None:
        if self.features is not None and (self.data is not None or self.corpus or self.own_words is not None):
            raise ConfigError("--features holds its text already: leave out --data, --corpus and --own-words")


def train_and_draft(
    config: PartOptions,
    session: Session,
    *,
    title: str,
    recipe: Recipe,
    run: Callable[..., Any],
    chain: Mapping[str, Any],
) -> dict[str, Any]:
    """Train a part, and let the engine draft chains with it for the held-out prompts.

    Args:
        title: of the progress, as in "training an adapter".
        recipe: gives the bounds of the run.
        run: trains, given the options of the training loop, and writes the record into ``config.out``.
        chain: a ``speculative_config`` that drafts with the part.
    Returns:
        the record, with ``acceptance`` added.
    """
    from foretoken.train import acceptance
    from foretoken.train.run_folder import add_to_record

    prompts = session.prompts(config.suite)
    with session.training(title) as report:
        run(**config.loop(recipe.bounds, report, session))
    return add_to_record(config.out, {"acceptance": acceptance.measure(config.target, chain, prompts)})


def summary(record: Mapping[str, Any], first: str, agreement: Callable[[str], str] | None = None) -> list[str]:
    """Describe a run for a person: the part, its drafts for held-out prompts, its agreement with the target.

    Args:
        record: with ``acceptance``, and where training expected it of drafts, ``walked``.
        first: the line about the part.
        agreement: formats one measure of ``held_out``, "acceptance" or "top_1"; None: there is none.
    """
    lines = [f"{first}, {record['tokens'] / 1e6:.2f} M tokens in {record['minutes']} minutes"]
    if not record["replies_only"]:
        lines.append("the tokenizer has no chat template: prompts were learnt from like replies")
    for mode, each in record["acceptance"].items():
        walked = record.get("walked", {}).get(mode)
        expected = walked and f" (training expected {walked['after']:.2f}; before it {walked['before']:.2f})"
        positions = ", ".join(f"{share:.2f}" for share in each["acceptance_by_position"])
        lines.append(
            f"{mode}: {each['tokens_per_step']:.2f} tokens per step{expected or ''}; accepted by position: {positions}"
        )
    if agreement is None:
        return lines
    if record["held_out"]["after"] is None:
        return [*lines, NOTHING_HELD_OUT]
    lines.append(f"expected acceptance at T=1{agreement('acceptance')}")
    lines.append(f"agreement with the target's most probable token{agreement('top_1')}")
    return lines
