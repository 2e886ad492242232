"""``foretoken train dflash``: options and help text; imports torch only when it runs."""

from dataclasses import dataclass
from typing import Annotated

from foretoken.options.option import Option
from foretoken.train.feature_heads.command import NetworkOptions, network_command


@dataclass(frozen=True, kw_only=True)
class Config(NetworkOptions):
    """Train a DFlash or DSpark network: a few layers that fill a block of masks from a target's hidden states.

    The target stays unchanged, and generates the text by default. During training, the network drafts for the
    target's answers to held-out prompts; the printed tokens per step are those of serving. At the end, the
    engine drafts for these prompts. The folder has the layout of speculators.
    """

    layers: Annotated[int, Option("Decoder layers of the network.", metavar="N", least=1, most=32)] = 2
    slots: Annotated[int, Option("Tokens that one pass drafts.", metavar="N", least=1, most=63)] = 7
    taps: Annotated[
        int, Option("States of the target that it reads, spread over its layers.", metavar="N", least=1, most=16)
    ] = 5
    markov_rank: Annotated[
        int, Option("Rank of DSpark's Markov head, about 64 to 256; 0: DFlash, without one.", metavar="N", least=0)
    ] = 0
    own_head: Annotated[bool, Option("Train and store an LM head, which other engines need; else the target's.")] = (
        False
    )
    mask_token: Annotated[
        int | None, Option("Token of the rows to fill; default: the one for padding, else an end token.", least=0)
    ] = None
    own_words: Annotated[float | None, Option("Share of the text that the target generates itself; default: 1.")] = None
    own_words_else = 1.0


COMMAND = network_command(
    "dflash",
    config=Config,
    title="training a DFlash network",
    called=lambda record: f"{'DSpark' if record['markov_rank'] else 'DFlash'} network",
    chain=lambda options: {"num_speculative_tokens": options.slots},
    hint="try: foretoken generate PROMPT --model {target} --draft-model {out}",
)
