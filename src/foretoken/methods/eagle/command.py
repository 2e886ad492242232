"""``foretoken train eagle``: options and help text; imports torch only when it runs."""

from dataclasses import dataclass
from typing import Annotated

from foretoken.core.errors import ConfigError
from foretoken.options.option import Option
from foretoken.train.feature_heads.command import UnrolledOptions, network_command


@dataclass(frozen=True, kw_only=True)
class Config(UnrolledOptions):
    """Train EAGLE's head: one decoder layer that drafts from a target's hidden states.

    The target stays unchanged. During training, the head drafts for the target's answers to held-out
    prompts; the printed tokens per step are those of serving. At the end the engine drafts for these
    prompts, and measures them once more.
    """

    algorithm: Annotated[str, Option("eagle3, or eagle for the network of EAGLE-2.", choices=("eagle3", "eagle"))] = (
        "eagle3"
    )
    own_head: Annotated[bool, Option("Train and store an LM head, which other engines need; else the target's.")] = (
        False
    )
    plain_residual: Annotated[
        bool, Option("Start the residual from the feature itself, as in the paper, instead of the normed feature.")
    ] = False

    taps: Annotated[
        int | None,
        Option("States of the target that it reads, spread over its layers; default: the paper's 3.", least=1, most=16),
    ] = None

    def check_together(self) -> None:
        super().check_together()
        if self.algorithm == "eagle" and self.taps is not None:
            raise ConfigError("--algorithm eagle reads the last state: leave out --taps")
        if self.algorithm == "eagle" and (self.draft_vocab_size is not None or self.own_head):
            raise ConfigError("--algorithm eagle uses the target's head: leave out --draft-vocab-size and --own-head")
        if self.algorithm == "eagle" and self.plain_residual:
            raise ConfigError("--algorithm eagle begins with a mix of feature and token: leave out --plain-residual")


COMMAND = network_command(
    "eagle",
    config=Config,
    title="training an EAGLE head",
    called=lambda record: f"{record['algorithm']} head",
    chain=lambda options: {"num_speculative_tokens": options.steps},
)
