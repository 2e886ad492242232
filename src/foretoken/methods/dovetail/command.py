"""``foretoken train dovetail``: options and help text; imports torch only when it runs."""

from dataclasses import dataclass
from typing import Annotated

from foretoken.options.option import Option
from foretoken.train.feature_heads.command import UnrolledOptions, network_command


@dataclass(frozen=True, kw_only=True)
class Config(UnrolledOptions):
    """Train Dovetail's head: decoder blocks after a gate, over a target's last state.

    The target stays unchanged. During training, the head drafts for the target's answers to held-out
    prompts; the printed tokens per step are those of serving. At the end the engine drafts for these
    prompts, and measures them once more.
    """

    blocks: Annotated[int, Option("Decoder blocks.", metavar="N", least=1, most=32)] = 2
    fusion: Annotated[
        str,
        Option("How feature and token are fused: gate, or concat for EAGLE-2's fusion.", choices=("gate", "concat")),
    ] = "gate"


COMMAND = network_command(
    "dovetail",
    config=Config,
    title="training a Dovetail head",
    called=lambda record: f"Dovetail head of {record['blocks']} blocks ({record['fusion']})",
    chain=lambda options: {
        "tree": False,
        "budget": "fixed",
        "max_depth": options.steps,
        "num_speculative_tokens": options.steps,
    },
)
