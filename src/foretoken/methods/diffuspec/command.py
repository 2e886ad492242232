"""``foretoken train diffuspec``: its options, the run, and what it says; without torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from foretoken.options.option import Option
from foretoken.train.command import WIDEST, Command, Continued, Session
from foretoken.train.feature_heads.command import HeadOptions, train_and_serve
from foretoken.train.feature_heads.said import served


@dataclass(frozen=True, kw_only=True)
class Config(HeadOptions, Continued):
    """Options of ``foretoken train diffuspec``; None: the recipe's."""

    layers: Annotated[int, Option("Decoder layers of the network.", metavar="N", least=1)] = 2
    slots: Annotated[int, Option("Tokens that one pass drafts.", metavar="N", least=1)] = 8
    draft_vocab_size: Annotated[int | None, Option("Tokens that it scores; default: 4096.", metavar="N", least=1)] = (
        None
    )
    mlp_width: Annotated[
        int | None,
        Option("Channels of its MLPs; default: a quarter of the target's.", metavar="N", least=32, most=WIDEST),
    ] = None
    own_words: Annotated[float | None, Option("Share of the text that the target writes itself; default: 1.")] = None
    own_words_else = 1.0


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train a network and its trigram model, and let them draft for the held-out prompts, all slots each time."""
    from foretoken.methods.diffuspec import train as training
    from foretoken.train.feature_heads.run import run as train

    shape = training.Shape(
        layers=config.layers,
        slots=config.slots,
        draft_vocab_size=config.draft_vocab_size,
        mlp_width=config.mlp_width,
    )
    chain = {
        "method": "diffuspec",
        "head": str(config.out),
        "trigram": "none",
        "tree": False,
        "num_speculative_tokens": config.slots,
    }
    course = training.course(config.target, shape, config.share)
    return train_and_serve(
        config,
        session,
        title="training a block network",
        recipe=course.recipe,
        run=partial(train, config.target, course),
        chain=chain,
    )


def say(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, what stands of its drafts, and whether training foretold that."""
    return [
        *served(record, out, "block network"),
        f"try: foretoken generate PROMPT --model {record['target']} --method diffuspec --set head={out}",
    ]


COMMAND = Command(
    name="diffuspec",
    help="""\
    Train DiffuSpec's block network: a few layers that fill a block of masks from a target's hidden states.

    The target stays as it is, and by default writes the text. While the network trains, it is tried on the
    target's answers to held-out prompts, and the tokens per step that are printed are those of serving; at the end the
    engine drafts for these prompts. A trigram model of the same text is stored beside the network.
    """,
    example="foretoken train diffuspec --target zoo:base --corpus generated --minutes 30 --out my-head",
    config=Config,
    run=run,
    say=say,
)
