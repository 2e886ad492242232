"""``foretoken train dovetail``: its options, the run, and what it says; without torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.errors import ConfigError
from foretoken.train.command import Command, Judged, Loop, Option, Session
from foretoken.train.feature_heads.said import served


@dataclass(frozen=True, kw_only=True)
class Config(Loop, Judged):
    """Options of ``foretoken train dovetail``; None: the recipe's."""

    target: Annotated[str, Option("The model to draft for: zoo:NAME, folder or hub id.", "-t")]
    blocks: Annotated[int, Option("Decoder blocks.", metavar="M", least=1)] = 2
    fusion: Annotated[str, Option("How feature and token meet: gate, or concat for EAGLE-2's.")] = "gate"
    draft_vocab_size: Annotated[int | None, Option("Tokens that it scores; default: 2048.", metavar="K", least=1)] = (
        None
    )
    mlp_width: Annotated[
        int | None, Option("Channels of a block's MLP; default: a quarter of the target's.", metavar="N", least=32)
    ] = None
    steps: Annotated[int, Option("Steps that training unrolls.", metavar="S", least=1)] = 4
    features: Annotated[
        Path | None, Option("Train from what foretoken train features stored instead.", metavar="DIR")
    ] = None
    own_words: Annotated[float | None, Option("Share of the text that the target writes itself; default: 0.5.")] = None

    def __post_init__(self) -> None:
        if self.features is not None and (self.data is not None or self.corpus or self.own_words is not None):
            raise ConfigError("--features holds its text already: leave out --data, --corpus and --own-words")


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train a head, and let it draft chains for the held-out prompts, as many tokens a step as training unrolled."""
    from foretoken.methods.dovetail import train as training
    from foretoken.train import acceptance
    from foretoken.train.feature_heads.run import OWN_WORDS
    from foretoken.train.recipe import add_to_record

    shape = training.Shape(
        blocks=config.blocks,
        fusion=config.fusion,
        draft_vocab_size=config.draft_vocab_size,
        mlp_width=config.mlp_width,
        steps=config.steps,
    )
    share = OWN_WORDS if config.own_words is None else config.own_words
    recipe = training.recipe(config.target, shape, share)
    prompts = session.prompts(config.prompts)
    text = config.sources(recipe.sources) if config.features is None else []
    with session.training("training a Dovetail head") as report:
        training.run(
            config.target,
            shape,
            text,
            config.out,
            prompts=prompts,
            own_words=share,
            features=config.features,
            **config.loop(recipe.bounds, report, session),
        )
    depth = {"max_depth": config.steps, "num_speculative_tokens": config.steps}
    chain = {"method": "dovetail", "head": str(config.out), "tree": False, "budget": "fixed", **depth}
    return add_to_record(config.out, {"acceptance": acceptance.measure(config.target, chain, prompts)})


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

    The target stays as it is. While it trains, the head walks over what the target answers to held-out prompts, which
    tells the tokens per step of chains that serving will reach. Then the real engine drafts for these prompts, and
    tells the same number as it was.
    """,
    example="foretoken train dovetail --target zoo:base --data DATA --out my-head",
    config=Config,
    run=run,
    say=say,
)
