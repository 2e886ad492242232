"""``foretoken train diffuspec``: options and help text; imports torch only when it runs."""

from dataclasses import dataclass
from typing import Annotated

from foretoken.options.option import Option
from foretoken.train.command import WIDEST
from foretoken.train.feature_heads.command import NetworkOptions, network_command


@dataclass(frozen=True, kw_only=True)
class Config(NetworkOptions):
    """Train DiffuSpec's block network: a few layers that fill a block of masks from a target's hidden states.

    The target stays unchanged, and generates the text by default. During training, the network drafts for the
    target's answers to held-out prompts; the printed tokens per step are those of serving. At the end, the
    engine drafts for these prompts. A trigram model of the same text is stored with the network.
    """

    layers: Annotated[int, Option("Decoder layers of the network.", metavar="N", least=1, most=32)] = 2
    slots: Annotated[int, Option("Tokens that one pass drafts.", metavar="N", least=1, most=64)] = 8
    draft_vocab_size: Annotated[
        int | None, Option("Tokens that the network scores; default: 4096.", metavar="N", least=1)
    ] = None
    num_scored = 4096
    mlp_width: Annotated[
        int | None,
        Option("Channels of the MLPs; default: a quarter of the target's.", metavar="N", least=32, most=WIDEST),
    ] = None
    own_words: Annotated[float | None, Option("Share of the text that the target generates itself; default: 1.")] = None
    own_words_else = 1.0


COMMAND = network_command(
    "diffuspec",
    config=Config,
    title="training a block network",
    called=lambda record: "block network",
    chain=lambda options: {"trigram": "none", "tree": False, "num_speculative_tokens": options.slots},
)
