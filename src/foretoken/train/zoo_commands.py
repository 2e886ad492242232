"""``foretoken train base`` and ``foretoken train draft``: models from their recipes; without torch until they run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from foretoken import zoo
from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import Command, Judged, Loop, Session
from foretoken_lab.recipes import NAMES


class When(str, Enum):
    """When to compile: ``auto`` is where there is a GPU, since that is where it pays."""

    auto = "auto"
    on = "on"
    off = "off"

    def holds(self, device: str) -> bool:
        """Whether to compile for a device."""
        return device != "cpu" if self is When.auto else self is When.on


@dataclass(frozen=True, kw_only=True)
class Compiling(Loop):
    """The option of commands that train whole models."""

    compiled: Annotated[
        When,
        Option("Compile the layers first, half a minute; auto: only where there is a GPU.", name="compile"),
    ] = When.auto


@dataclass(frozen=True, kw_only=True)
class BaseConfig(Compiling):
    """Options of ``foretoken train base``; ``out`` None: where the zoo looks for models that are not bundled."""

    recipe: Annotated[str, Option("The model, by its recipe: " + ", ".join(NAMES) + ".", "-r")]
    out: Annotated[
        Path | None,
        Option("Folder to make; default: where zoo:NAME is found, if it is not bundled.", "-o", metavar="PATH"),
    ] = None  # type: ignore[assignment]  # the one command that knows a place of its own
    start: Annotated[
        str | None, Option("zoo:NAME or folder whose weights to start from; default: the recipe's.", name="from")
    ] = None
    seed: Annotated[int, Option("Of weights, order and masks.", metavar="N", least=0, most=2**63 - 1)] = 0

    @property
    def place(self) -> Path:
        """The folder that is made.

        Raises:
            ConfigError: the model is bundled, and no folder is named.
        """
        if self.out is not None:
            return self.out
        if self.recipe not in zoo.MODELS:  # a stage of one
            raise ConfigError(f"the recipe '{self.recipe}' makes no model of the zoo: name a folder with --out DIR")
        if zoo.find(self.recipe).bundled:
            raise ConfigError(f"zoo:{self.recipe} is bundled: name a folder for your own with --out DIR")
        return zoo.home() / self.recipe


@dataclass(frozen=True, kw_only=True)
class DraftConfig(Compiling, Judged):
    """Options of ``foretoken train draft``."""

    target: Annotated[str, Option("The model to draft for: zoo:NAME, folder or hub id.", "-t", metavar="MODEL")]
    start: Annotated[str | None, Option("A draft to go on from; default: a new one of 2 thin layers.", name="from")] = (
        None
    )
    loss: Annotated[
        str, Option("Distance to the target's law that is made small: kl, reverse_kl, tv or neg_log_acceptance.")
    ] = "kl"
    own_words: Annotated[float, Option("Share of the text that the target writes itself.")] = 0.75
    on_policy: Annotated[float, Option("Share of the text that the draft in training writes.")] = 0.0
    num_drafts: Annotated[int, Option("Chain length to judge by.", name="num-speculative-tokens", above=0)] = 6


def train_base(config: BaseConfig, session: Session) -> dict[str, Any]:
    """Follow a recipe of the zoo."""
    from foretoken.train.recipe import copy_all, run
    from foretoken_lab.recipes import find

    chosen = find(config.recipe)
    if config.start is not None:
        chosen = replace(chosen, start=config.start, tokenizer=config.start, adopt=chosen.adopt or copy_all)
    out, sources = config.place, config.sources(chosen.sources)
    with session.training(f"training {chosen.name}") as report:
        return run(
            chosen,
            sources,
            out,
            compiled=config.compiled.holds(config.device),
            **config.loop(chosen.bounds, report, session),
        )


def say_base(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, and something to try."""
    lines = [
        f"{out}: {record['parameters'] / 1e6:.1f} M parameters, {record['tokens'] / 1e6:.2f} M tokens in "
        f"{record['minutes']} minutes, held-out loss {_loss(record)}"
    ]
    if record["objective"] != "masked_diffusion":  # which fills masks, and cannot go on from a prompt
        question = '"Tom has 12 marbles. He buys 30 more. How many has he now?"'
        lines.append(f"try: foretoken generate {question} --model {out}")
    return lines


def train_draft(config: DraftConfig, session: Session) -> dict[str, Any]:
    """Distil a draft, and measure what the engine accepts of it."""
    from foretoken.train import acceptance
    from foretoken.train.recipe import add_to_record, run
    from foretoken_lab.recipes import draft as recipes

    prompts = session.prompts(config.suite)
    recipe = recipes.distil(config.target, config.start, config.loss, config.own_words, config.on_policy)
    sources = config.sources(recipe.sources)
    chain = {"method": "draft_model", "num_speculative_tokens": config.num_drafts}
    before = None
    if config.start:
        before = acceptance.measure(config.target, {**chain, "model": config.start}, prompts)
    with session.training("training a draft") as report:
        run(
            recipe,
            sources,
            config.out,
            compiled=config.compiled.holds(config.device),
            **config.loop(recipe.bounds, report, session),
        )
    after = acceptance.measure(config.target, {**chain, "model": str(config.out)}, prompts)
    return add_to_record(config.out, {"acceptance": {"before": before, "after": after}})


def say_draft(record: dict[str, Any], out: Path) -> list[str]:
    """What it became, and what stands of its drafts."""
    before, after = record["acceptance"]["before"], record["acceptance"]["after"]
    lines = [
        f"{out}: {record['tokens'] / 1e6:.2f} M tokens in {record['minutes']} minutes, held-out "
        f"{record['objective']} {_loss(record)}"
    ]
    for mode, found in after.items():
        was = f" (before: {before[mode]['tokens_per_step']:.2f})" if before else ""
        positions = ", ".join(f"{share:.2f}" for share in found["acceptance_by_position"])
        lines.append(f"{mode}: {found['tokens_per_step']:.2f} tokens per step{was}; accepted by position: {positions}")
    return [
        *lines,
        f"try: foretoken generate PROMPT --model {record['teacher']} --method draft_model --set model={out}",
    ]


def _loss(record: dict[str, Any]) -> str:
    loss = record["held_out_loss"]
    return "unknown (no document was held out of a corpus this small)" if loss is None else f"{loss} a token"


BASE = Command(
    name="base",
    help="""\
    Make one model of the zoo: tokenizer, data, training, and an ordinary Hugging Face folder.

    A recipe is a file of src/foretoken/train/recipes, which says what is trained and how. The text comes from the
    folder of public corpora (--data), or from files of yours (--corpus): JSON Lines with messages, prompt +
    response, or text; or plain text. After a stop the same command goes on from the last checkpoint.
    """,
    example="foretoken train base --recipe base --corpus generated --out my-base --minutes 10",
    config=BaseConfig,
    run=train_base,
    say=say_base,
)
DRAFT = Command(
    name="draft",
    help="""\
    Distil a small draft model from a target, on text that the target writes.

    At the end the engine measures tokens per step and acceptance by position on held-out prompts, greedy and at
    temperature 1; with --from also before the training.
    """,
    example="foretoken train draft --target zoo:base --from zoo:draft --corpus generated --minutes 30 --out my-draft",
    config=DraftConfig,
    run=train_draft,
    say=say_draft,
)
