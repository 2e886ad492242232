"""``foretoken train eagle``: its options, the run, and what it says; without torch until it runs."""

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
    """Options of ``foretoken train eagle``; None: the recipe's."""

    algorithm: Annotated[str, Option("eagle3, or eagle for the network of EAGLE-2.")] = "eagle3"
    draft_vocab_size: Annotated[
        int | None, Option("Tokens that EAGLE-3 scores; default: 2048.", metavar="N", least=1)
    ] = None
    own_head: Annotated[bool, Option("Train and store a head, which other engines need; else the target's.")] = False
    plain_residual: Annotated[
        bool, Option("Let the residual begin with the feature as it is, as the paper has it; else with the normed one.")
    ] = False


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train a head, and let it draft for the held-out prompts, as many tokens a step as training unrolled."""
    from foretoken.methods.eagle import train as training
    from foretoken.train.feature_heads.run import run as train

    shape = training.Shape(
        algorithm=config.algorithm,
        draft_vocab_size=config.draft_vocab_size,
        mlp_width=config.mlp_width,
        own_head=config.own_head,
        plain_residual=config.plain_residual,
        steps=config.steps,
    )
    chain = {"method": "eagle", "head": str(config.out), "num_speculative_tokens": config.steps}
    course = training.course(config.target, shape, config.share)
    return train_and_serve(
        config,
        session,
        title="training an EAGLE head",
        recipe=course.recipe,
        run=partial(train, config.target, course),
        chain=chain,
    )


def say(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, what stands of its drafts, and whether training foretold that."""
    return [
        *served(record, out, f"{record['algorithm']} head"),
        f"try: foretoken generate PROMPT --model {record['target']} --method eagle --set head={out}",
    ]


COMMAND = Command(
    name="eagle",
    help="""\
    Train EAGLE's head: one decoder layer that drafts from a target's hidden states.

    The target stays as it is. While it trains, the head is tried on the target's answers to held-out
    prompts, and the tokens per step that are printed are those of serving. At the end the engine drafts for these
    prompts, and measures them once more.
    """,
    example="foretoken train eagle --target zoo:base --corpus generated --minutes 30 --out my-head",
    config=Config,
    run=run,
    say=say,
)
