"""``foretoken train base``: models of the zoo from their recipes; without torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from foretoken import zoo
from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import Command, Compiling, Session, shown_loss
from foretoken_lab.recipes import NAMES


@dataclass(frozen=True, kw_only=True)
class BaseConfig(Compiling):
    """Make one model of the zoo: tokenizer, data, training, and an ordinary Hugging Face folder.

    A recipe is a file of lab/src/foretoken_lab/recipes, which defines model and training. The text comes from the
    folder of public corpora (--data), or from files of yours (--corpus): JSON Lines with messages, prompt +
    response, or text; or plain text. After a stop the same command goes on from the last checkpoint.
    """

    recipe: Annotated[str, Option("The model, by its recipe: " + ", ".join(NAMES) + ".", "-r")]
    out: Annotated[
        Path | None,
        Option("Folder to make; default: where zoo:NAME is found, if it is not bundled.", "-o", metavar="PATH"),
    ] = None  # type: ignore[assignment]  # the one command that knows a place of its own
    start: Annotated[
        str | None, Option("zoo:NAME or folder with the weights to start from; default: the recipe's.", name="from")
    ] = None
    seed: Annotated[int, Option("Of weights, order and masks.", metavar="N", least=0)] = 0

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
    """Print the result, and a command to try."""
    lines = [
        f"{out}: {record['parameters'] / 1e6:.1f} M parameters, {record['tokens'] / 1e6:.2f} M tokens in "
        f"{record['minutes']} minutes, held-out loss {shown_loss(record)}"
    ]
    if record["objective"] != "masked_diffusion":  # which fills masks, and cannot go on from a prompt
        question = '"Tom has 12 marbles. He buys 30 more. How many has he now?"'
        lines.append(f"try: foretoken generate {question} --model {out}")
    return lines


BASE = Command(
    name="base",
    example="foretoken train base --recipe base --corpus generated --out my-base --minutes 10",
    config=BaseConfig,
    run=train_base,
    say=say_base,
)
