"""``foretoken train scylla``: its options, the run, and what it says; without torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from foretoken.options.option import Option
from foretoken.train.command import Command, Session
from foretoken.train.feature_heads.command import UnrolledOptions, train_and_serve
from foretoken.train.feature_heads.said import served


@dataclass(frozen=True, kw_only=True)
class Config(UnrolledOptions):
    """Options of ``foretoken train scylla``; None: the recipe's."""

    layers: Annotated[int, Option("Decoder layers.", metavar="N", least=1)] = 2
    pretrain: Annotated[float, Option("Share of the run that is pre-training; the rest is the SFT stage.")] = 0.75
    own_words: Annotated[
        float | None, Option("Share of the SFT stage's text that the target writes itself; default: 0.5.")
    ] = None


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train a head, and let it draft chains for the held-out prompts, as many tokens a step as training unrolled."""
    from foretoken.methods.scylla import train as training
    from foretoken.train.feature_heads.run import run as train

    shape = training.Shape(
        layers=config.layers,
        draft_vocab_size=config.draft_vocab_size,
        mlp_width=config.mlp_width,
        steps=config.steps,
        pretrain=config.pretrain,
    )
    depth = {"max_depth": config.steps, "num_speculative_tokens": config.steps}
    chain = {"method": "scylla", "head": str(config.out), "tree": False, **depth}
    course = training.course(config.target, shape, config.share)
    return train_and_serve(
        config,
        session,
        title="training a Scylla head",
        recipe=course.recipe,
        run=partial(train, config.target, course),
        chain=chain,
    )


def say(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, what stands of its drafts, and whether training foretold that."""
    return [
        *served(record, out, f"Scylla head of {record['layers']} layers"),
        f"measure the tree's size: foretoken calibrate scylla --model {record['target']} --head {out}",
        f"try: foretoken generate PROMPT --model {record['target']} --method scylla --set head={out}",
    ]


COMMAND = Command(
    name="scylla",
    help="""\
    Train Scylla's head: decoder layers that draft from a target's last hidden state, in two stages.

    The first stage reads text of all kinds, the second replies, half of them the target's own words. While it trains,
    the head is tried on the target's answers to held-out prompts, and the tokens per step of chains that are printed
    are those of serving. At the end the engine drafts for these prompts, and measures them once more.
    """,
    example="foretoken train scylla --target zoo:base --corpus generated --minutes 30 --out my-head",
    config=Config,
    run=run,
    say=say,
)
