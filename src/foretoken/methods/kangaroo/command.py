"""``foretoken train kangaroo``: options, run and summary; imports torch only when it runs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from foretoken.options.option import Option
from foretoken.train.command import Command, Continued, Session
from foretoken.train.drafting_part import FeatureOptions, summary, train_and_draft


@dataclass(frozen=True, kw_only=True)
class Config(FeatureOptions, Continued):
    """Train Kangaroo's adapter: one attention layer that drafts from an early layer of a target.

    The target is frozen. Measured on held-out text, before and after the training: the expected share of accepted
    draft tokens at temperature 1, and how often the target's most probable token is among the adapter's three most
    probable ones. At the end the engine drafts for held-out prompts, six tokens a step, and measures acceptance.
    """

    exit_layer: Annotated[int, Option("Layers of the target below the adapter, 1 to L - 1.", metavar="E")]


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train an adapter, and draft for the held-out prompts, six tokens a step."""
    from foretoken.methods.kangaroo import train as training

    recipe = training.recipe(config.target, config.exit_layer, config.share)
    text = config.sources(recipe.sources) if config.features is None else []
    train = partial(
        training.run,
        config.target,
        config.exit_layer,
        text,
        config.out,
        own_words=config.share,
        features=config.features,
        start=config.start,
    )
    chain = {"method": "kangaroo", "adapter": str(config.out), "threshold": 0.0}
    return train_and_draft(config, session, title="training an adapter", recipe=recipe, run=train, chain=chain)


def say(record: dict[str, Any], out: Path) -> list[str]:
    """Describe the adapter, its drafts, and its agreement with the target."""
    target, (before, after) = record["target"], (record["held_out"][when] for when in ("before", "after"))
    first = (
        f"{out}: adapter of {record['parameters'] / 1e6:.2f} M parameters after {record['exit_layer']} layers of "
        f"{target}"
    )

    def agreement(measure: str) -> str:
        return f": {after[measure]:.3f} (before: {before[measure]:.3f}), {after['positions']} positions"

    return [
        *summary(record, first, agreement),
        f"try: foretoken generate PROMPT --model {target} --method kangaroo --set adapter={out}",
    ]


COMMAND = Command(
    name="kangaroo",
    example="foretoken train kangaroo --target zoo:base --exit-layer 2 --corpus generated --minutes 30 "
    "--out my-adapter",
    config=Config,
    run=run,
    say=say,
)
