"""``foretoken train kangaroo``: its options, the run, and what it says; without torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import Command, Continued, Judged, Loop, Session


@dataclass(frozen=True, kw_only=True)
class Config(Loop, Judged, Continued):
    """Options of ``foretoken train kangaroo``; ``own_words`` None: the recipe's share."""

    target: Annotated[str, Option("The model to adapt: zoo:NAME, folder or hub id.", "-t", metavar="MODEL")]
    exit_layer: Annotated[int, Option("Layers of the target below the adapter, 1 to L - 1.", metavar="E")]
    features: Annotated[
        Path | None, Option("Train from what foretoken train features stored instead.", metavar="DIR")
    ] = None
    own_words: Annotated[float | None, Option("Share of the text that the target writes itself; default: 0.5.")] = None

    def check_together(self) -> None:
        if self.features is not None and (self.data is not None or self.corpus or self.own_words is not None):
            raise ConfigError("--features holds its text already: leave out --data, --corpus and --own-words")


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train an adapter, and let it draft for the held-out prompts, six tokens a step."""
    from foretoken.methods.kangaroo import train as training
    from foretoken.train import acceptance
    from foretoken.train.recipe import add_to_record

    share = training.OWN_WORDS if config.own_words is None else config.own_words
    recipe = training.recipe(config.target, config.exit_layer, share)
    prompts = session.prompts(config.suite)
    text = config.sources(recipe.sources) if config.features is None else []
    with session.training("training an adapter") as report:
        training.run(
            config.target,
            config.exit_layer,
            text,
            config.out,
            own_words=share,
            features=config.features,
            start=config.start,
            **config.loop(recipe.bounds, report, session),
        )
    chain = {"method": "kangaroo", "adapter": str(config.out), "threshold": 0.0}
    return add_to_record(config.out, {"acceptance": acceptance.measure(config.target, chain, prompts)})


def say(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, what stands of its drafts, and how close it is to the target."""
    target = record["target"]
    lines = [
        f"{out}: adapter of {record['parameters'] / 1e6:.2f} M parameters after {record['exit_layer']} layers of "
        f"{target}, {record['tokens'] / 1e6:.2f} M tokens in {record['minutes']} minutes"
    ]
    if not record["replies_only"]:
        lines.append("the tokenizer has none of the zoo's chat markers: prompts were learnt from like replies")
    for mode, each in record["acceptance"].items():
        positions = ", ".join(f"{share:.2f}" for share in each["acceptance_by_position"])
        lines.append(f"{mode}: {each['tokens_per_step']:.2f} tokens per step; accepted by position: {positions}")
    before, after = record["held_out"]["before"], record["held_out"]["after"]
    if after is None:
        lines.append("acceptance unknown: nothing was held out of a corpus this small")
    else:
        for measure, called in (
            ("acceptance", "expected acceptance at T=1"),
            ("top_1", "the target's favourite first"),
        ):
            lines.append(
                f"{called}: {after[measure]:.3f} (before: {before[measure]:.3f}), {after['positions']} positions"
            )
    return [*lines, f"try: foretoken generate PROMPT --model {target} --method kangaroo --set adapter={out}"]


COMMAND = Command(
    name="kangaroo",
    help="""\
    Train Kangaroo's adapter: one attention layer that turns an early layer of a target into a draft of it.

    The target stays as it is. Measured on held-out text, before and after the training: the share of draft tokens that
    would be accepted at temperature 1, and how often the target's most probable token is among the adapter's first
    three. At the end the engine drafts for held-out prompts, six tokens a step, and measures how many are accepted.
    """,
    example="foretoken train kangaroo --target zoo:base --exit-layer 2 --corpus generated --minutes 30 "
    "--out my-adapter",
    config=Config,
    run=run,
    say=say,
)
