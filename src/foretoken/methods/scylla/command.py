"""``foretoken train scylla``: its options and its help; without torch until it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.feature_heads.command import UnrolledOptions, network_command


@dataclass(frozen=True, kw_only=True)
class Config(UnrolledOptions):
    """Options of ``foretoken train scylla``; None: the recipe's."""

    layers: Annotated[int, Option("Decoder layers.", metavar="N", least=1)] = 2
    pretrain: Annotated[float, Option("Share of the run that is pre-training; the rest is the SFT stage.")] = 0.75
    own_words: Annotated[
        float | None, Option("Share of the SFT stage's text that the target writes itself; default: 0.5.")
    ] = None

    def check_together(self) -> None:
        super().check_together()
        if not 1 <= self.layers <= 32:
            raise ConfigError(f"--layers {self.layers}: from 1 to 32")
        if not 0 <= self.pretrain <= 1:
            raise ConfigError(f"--pretrain {self.pretrain}: a share must be from 0 to 1")


def chain(options: Config) -> dict[str, Any]:
    """Drafts chains of as many tokens a step as training unrolled."""
    depth = {"max_depth": options.steps, "num_speculative_tokens": options.steps}
    return {"method": "scylla", "head": str(options.out), "tree": False, **depth}


COMMAND = network_command(
    "scylla",
    help="""\
    Train Scylla's head: decoder layers that draft from a target's last hidden state, in two stages.

    The first stage reads text of all kinds, the second replies, half of them the target's own words. While it trains,
    the head is tried on the target's answers to held-out prompts, and the tokens per step of chains that are printed
    are those of serving. At the end the engine drafts for these prompts, and measures them once more.
    """,
    example="foretoken train scylla --target zoo:base --corpus generated --minutes 30 --out my-head",
    config=Config,
    training="foretoken.methods.scylla.train:training",
    title="training a Scylla head",
    called=lambda record: f"Scylla head of {record['layers']} layers",
    chain=chain,
    hint="""\
measure the tree's size: foretoken calibrate scylla --model {target} --head {out}
try: foretoken generate PROMPT --model {target} --method scylla --set head={out}""",
)
