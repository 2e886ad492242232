"""``foretoken train mtp``: its options, the run, and what it says; without torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from foretoken.options.option import Option
from foretoken.train.command import Command, Session
from foretoken.train.feature_heads.command import HeadOptions, train_and_serve
from foretoken.train.feature_heads.said import served


@dataclass(frozen=True, kw_only=True)
class Config(HeadOptions):
    """Options of ``foretoken train mtp``; None: the recipe's."""

    steps: Annotated[int, Option("Steps that training unrolls.", metavar="N", least=1, most=64)] = 3


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train a layer, and let the new checkpoint draft with it, as many tokens a step as training unrolled."""
    from foretoken.methods.mtp import train as training

    shape = training.Shape(steps=config.steps)
    return train_and_serve(
        config,
        session,
        title="training a prediction layer",
        recipe=training.recipe(config.target, config.share),
        run=partial(training.run, config.target, shape, own_words=config.share),
        chain={"method": "mtp", "max_depth": config.steps, "num_speculative_tokens": config.steps},
        served=str(config.out),
    )


def say(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, what stands of its drafts, and whether training foretold that."""
    return [
        *served(record, out, "next-token-prediction layer"),
        f"try: foretoken generate PROMPT --model {out} --method mtp",
    ]


COMMAND = Command(
    name="mtp",
    help="""\
    Train a next-token-prediction layer, and write the target's checkpoint with it, as such checkpoints are published.

    The target stays as it is; one of a family without such layers (Llama, Qwen2, Qwen3) is laid out as a GLM-4-MoE,
    which computes the same. While it trains, the layer is tried on the target's answers to held-out prompts, and the
    tokens per step that are printed are those of serving. At the end the engine drafts for these prompts with the new
    checkpoint.
    """,
    example="foretoken train mtp --target zoo:base --corpus generated --minutes 30 --out base-mtp",
    config=Config,
    run=run,
    say=say,
)
