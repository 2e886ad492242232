"""``foretoken train dovetail``: its options, the run, and what it says; without torch until it runs."""

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
    """Options of ``foretoken train dovetail``; None: the recipe's."""

    blocks: Annotated[int, Option("Decoder blocks.", metavar="N", least=1)] = 2
    fusion: Annotated[str, Option("How feature and token meet: gate, or concat for EAGLE-2's.")] = "gate"


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train a head, and let it draft chains for the held-out prompts, as many tokens a step as training unrolled."""
    from foretoken.methods.dovetail import train as training
    from foretoken.train.feature_heads.run import run as train

    shape = training.Shape(
        blocks=config.blocks,
        fusion=config.fusion,
        draft_vocab_size=config.draft_vocab_size,
        mlp_width=config.mlp_width,
        steps=config.steps,
    )
    depth = {"max_depth": config.steps, "num_speculative_tokens": config.steps}
    chain = {"method": "dovetail", "head": str(config.out), "tree": False, "budget": "fixed", **depth}
    course = training.course(config.target, shape, config.share)
    return train_and_serve(
        config,
        session,
        title="training a Dovetail head",
        recipe=course.recipe,
        run=partial(train, config.target, course),
        chain=chain,
    )


def say(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, what stands of its drafts, and whether training foretold that."""
    return [
        *served(record, out, f"Dovetail head of {record['blocks']} blocks ({record['fusion']})"),
        f"try: foretoken generate PROMPT --model {record['target']} --method dovetail --set head={out}",
    ]


COMMAND = Command(
    name="dovetail",
    help="""\
    Train Dovetail's head: decoder blocks behind a gate, over a target's last state.

    The target stays as it is. While it trains, the head is tried on the target's answers to held-out
    prompts, and the tokens per step that are printed are those of serving. At the end the engine drafts for these
    prompts, and measures them once more.
    """,
    example="foretoken train dovetail --target zoo:base --corpus generated --minutes 30 --out my-head",
    config=Config,
    run=run,
    say=say,
)
