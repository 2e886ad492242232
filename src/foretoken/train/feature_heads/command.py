"""The command that trains a draft network over hidden states, made from a method's options; and its run.

Without torch until it runs, as help imports it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.command import WIDEST, Command, Continued, Session
from foretoken.train.drafting_part import FeatureOptions, summary


@dataclass(frozen=True, kw_only=True)
class HeadOptions(FeatureOptions):
    """Options of every such command; a subclass adds the network's shape. None: the recipe's value."""

    @property
    def shape(self) -> dict[str, Any]:
        """The options that make it another network."""
        shared = {each.name for kind in (HeadOptions, Continued) for each in fields(kind)}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in shared}


@dataclass(frozen=True, kw_only=True)
class NetworkOptions(HeadOptions, Continued):
    """Options of a network of our decoder layers; a subclass may score another number of tokens by default."""

    draft_vocab_size: Annotated[
        int | None,
        Option("Tokens that it scores; default: as many as make up 98.5 % of the text.", metavar="N", least=1),
    ] = None
    num_scored = 0  # as many as BY_COVERAGE of batches.py says
    mlp_width: Annotated[
        int | None,
        Option("Channels of a layer's MLP; default: a quarter of the target's.", metavar="N", least=32, most=WIDEST),
    ] = None

    def check_together(self) -> None:
        super().check_together()
        if self.mlp_width is not None and self.mlp_width % 32:
            raise ConfigError(f"--mlp-width {self.mlp_width}: a multiple of 32")


@dataclass(frozen=True, kw_only=True)
class UnrolledOptions(NetworkOptions):
    """Options of a network that training unrolls as deep as it is to draft (unroll.py)."""

    steps: Annotated[int, Option("Steps that training unrolls.", metavar="N", least=1, most=64)] = 4


def network_command(
    name: str,
    *,
    config: type[HeadOptions],
    title: str,
    called: Callable[[Mapping[str, Any]], str],
    chain: Callable[[Any], Mapping[str, Any]],
    out: str = "my-head",
    hint: str = "try: foretoken generate PROMPT --model {target} --method {name} --set head={out}",
    whole: bool = False,
) -> Command:
    """The command of one method: it trains a network, and lets the engine draft chains with it for held-out prompts.

    The module ``train`` next to the options' has a function ``training``, (options) -> HeadTraining, which is imported
    when the command runs.

    Args:
        name, config: see :class:`Command`.
        title: of the progress, as in "training an EAGLE head".
        called: (record) -> the network, as in "CALLED of 1.2 M parameters".
        chain: (options) -> options of the method that draft as many tokens a step as training unrolled.
        out: the folder in the example.
        hint: lines for the user at the end, with {name}, {target} and {out}.
        whole: the folder that is made is a whole checkpoint, which drafts for itself.
    """

    def run(options: Any, session: Session) -> dict[str, Any]:
        from foretoken import catalog
        from foretoken.train import acceptance
        from foretoken.train.feature_heads.run import run as train
        from foretoken.train.feature_heads.training import BOUNDS, SOURCES, HeadTraining
        from foretoken.train.run_folder import add_to_record

        prompts = session.prompts(options.suite)
        text = options.sources(SOURCES) if options.features is None else []
        made: HeadTraining = catalog.imported(f"{config.__module__.rpartition('.')[0]}.train:training")(options)
        start = {"start": options.start} if isinstance(options, Continued) else {}
        with session.training(title) as report:
            loop = {**start, **options.loop(BOUNDS, report, session)}
            train(made, text, options.out, prompts=prompts, features=options.features, **loop)
        drafting, head = (str(options.out), {}) if whole else (options.target, {"head": str(options.out)})
        measured = acceptance.measure(drafting, {"method": name, **head, **chain(options)}, prompts)
        return add_to_record(options.out, {"acceptance": measured})

    def say(record: dict[str, Any], out: Path) -> list[str]:
        first = (
            f"{out}: {called(record)} of {record['parameters'] / 1e6:.2f} M parameters for {record['target']}, "
            f"{record['draft_vocab_size']} tokens scored"
        )
        return [*summary(record, first), *hint.format(name=name, target=record["target"], out=out).splitlines()]

    example = f"foretoken train {name} --target zoo:base --corpus generated --minutes 30 --out {out}"
    return Command(name=name, example=example, config=config, run=run, say=say)
