"""``foretoken train longspec``: options, run and summary; imports torch only when it runs."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import WIDEST, Command, Session
from foretoken.train.drafting_part import PartOptions, summary, train_and_draft


@dataclass(frozen=True, kw_only=True)
class Config(PartOptions):
    """Train LongSpec's head: one block with a short window of its own and cross-attention to the target's KV cache.

    The target is frozen. The run reads short blocks of text at large positions first, then long blocks at their own.
    Measured on held-out text, before and after the training, for every number of hidden target keys (the gap): the
    expected share of accepted draft tokens at temperature 1, and how often head and target have the same most probable
    token. At the end the engine drafts for held-out prompts.
    """

    levels: Annotated[int, Option("Tokens of a draft; training hides as many keys.", metavar="N", least=1, most=64)] = 5
    mlp_width: Annotated[
        int | None, Option("Channels of the MLP; default: the target's.", metavar="N", least=32, most=WIDEST)
    ] = None
    start: Annotated[
        Path | None, Option("A head of the same shape to start from; default: layers of the target.", metavar="DIR")
    ] = None

    def check_together(self) -> None:
        if self.mlp_width is not None and self.mlp_width % 32:
            raise ConfigError(f"--mlp-width {self.mlp_width}: a multiple of 32")


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train a head, and draft for the held-out prompts, as many tokens a step as it has levels."""
    from foretoken.methods.longspec import train as training

    recipe = training.recipe(config.target, config.share)
    train = partial(
        training.run,
        config.target,
        config.sources(recipe.sources),
        config.out,
        mlp_width=config.mlp_width,
        levels=config.levels,
        start=config.start,
        own_words=config.share,
    )
    chain = {"method": "longspec", "head": str(config.out), "num_speculative_tokens": config.levels}
    return train_and_draft(config, session, title="training a LongSpec head", recipe=recipe, run=train, chain=chain)


def say(record: dict[str, Any], out: Path) -> list[str]:
    """Describe the head, its drafts, and its agreement with the target by gap."""
    before, after = (record["held_out"][when] for when in ("before", "after"))
    first = f"{out}: LongSpec head of {record['parameters'] / 1e6:.2f} M parameters for {record['target']}"

    def agreement(measure: str) -> str:
        by_gap = ", ".join(f"{each[measure]:.3f}" for each in after)
        return f", by gap: {by_gap} (before: {before[0][measure]:.3f})"

    return [
        *summary(record, first, agreement),
        f"try: foretoken generate PROMPT --model {record['target']} --method longspec --set head={out}",
    ]


COMMAND = Command(
    name="longspec",
    example="foretoken train longspec --target zoo:long --corpus generated --minutes 60 --out my-head",
    config=Config,
    run=run,
    say=say,
)
