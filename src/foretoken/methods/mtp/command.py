"""``foretoken train mtp``: options and help text; imports torch only when it runs."""

from dataclasses import dataclass
from typing import Annotated

from foretoken.options.option import Option
from foretoken.train.feature_heads.command import HeadOptions, network_command


@dataclass(frozen=True, kw_only=True)
class Config(HeadOptions):
    """Train a next-token-prediction layer, and write the target's checkpoint with it, in the published layout.

    The target stays unchanged; a target of a family without such layers (Llama, Qwen2, Qwen3) is converted to
    GLM-4-MoE, which computes the same. During training, the layer drafts for the target's answers to held-out
    prompts; the printed tokens per step are those of serving. At the end the engine drafts for these prompts with
    the new checkpoint.
    """

    steps: Annotated[int, Option("Steps that training unrolls.", metavar="N", least=1, most=64)] = 3


COMMAND = network_command(
    "mtp",
    config=Config,
    title="training a prediction layer",
    called=lambda record: "next-token-prediction layer",
    chain=lambda options: {"max_depth": options.steps, "num_speculative_tokens": options.steps},
    hint="try: foretoken generate PROMPT --model {out} --method mtp",
    out="base-mtp",
    whole=True,
)
