"""``foretoken train longspec``: its options, the run, and what it says; without torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import WIDEST, Command, Judged, Loop, Session


@dataclass(frozen=True, kw_only=True)
class Config(Loop, Judged):
    """Options of ``foretoken train longspec``; None: the recipe's."""

    target: Annotated[str, Option("The model to draft for: zoo:NAME, folder or hub id.", "-t", metavar="MODEL")]
    levels: Annotated[int, Option("Tokens of a draft; training hides as many keys.", metavar="N", least=1, most=64)] = 5
    mlp_width: Annotated[
        int | None, Option("Channels of its MLP; default: the target's.", metavar="N", least=32, most=WIDEST)
    ] = None
    start: Annotated[
        Path | None, Option("A head to go on from, in its shape; default: layers of the target.", metavar="DIR")
    ] = None
    own_words: Annotated[float | None, Option("Share of the text that the target writes itself; default: 0.5.")] = None

    def check_together(self) -> None:
        if self.mlp_width is not None and self.mlp_width % 32:
            raise ConfigError(f"--mlp-width {self.mlp_width}: a multiple of 32")


def run(config: Config, session: Session) -> dict[str, Any]:
    """Train a head, and let it draft for the held-out prompts, as many tokens a step as it has levels."""
    from foretoken.methods.longspec import train as training
    from foretoken.train import acceptance
    from foretoken.train.recipe import add_to_record

    share = training.OWN_WORDS if config.own_words is None else config.own_words
    recipe = training.recipe(config.target, share)
    prompts = session.prompts(config.suite)
    text = config.sources(recipe.sources)
    with session.training("training a LongSpec head") as report:
        training.run(
            config.target,
            text,
            config.out,
            mlp_width=config.mlp_width,
            levels=config.levels,
            start=config.start,
            own_words=share,
            **config.loop(recipe.bounds, report, session),
        )
    chain = {"method": "longspec", "head": str(config.out), "num_speculative_tokens": config.levels}
    return add_to_record(config.out, {"acceptance": acceptance.measure(config.target, chain, prompts)})


def say(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, what stands of its drafts, and how close it is to the target, gap by gap."""
    lines = [
        f"{out}: LongSpec head of {record['parameters'] / 1e6:.2f} M parameters for {record['target']}, "
        f"{record['tokens'] / 1e6:.2f} M tokens in {record['minutes']} minutes"
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
            by_gap = ", ".join(f"{each[measure]:.3f}" for each in after)
            lines.append(f"{called}, by gap: {by_gap} (before: {before[0][measure]:.3f})")
    return [*lines, f"try: foretoken generate PROMPT --model {record['target']} --method longspec --set head={out}"]


COMMAND = Command(
    name="longspec",
    help="""\
    Train LongSpec's head: one block that drafts from a window of its own and the target's keys of everything before.

    The target stays as it is. The run reads short blocks of text at far positions first, then long ones at their own.
    Measured on held-out text, before and after the training, for every number of keys that a draft has to do without:
    the share of draft tokens that would be accepted at temperature 1, and how often the target's most probable token is
    the head's. At the end the engine drafts for held-out prompts.
    """,
    example="foretoken train longspec --target zoo:long --corpus generated --minutes 60 --out my-head",
    config=Config,
    run=run,
    say=say,
)
