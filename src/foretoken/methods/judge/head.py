"""Judge Decoding's head: a logistic unit on the target's last hidden state, which says whether a token is fine.

    … d_i ── layers[0] ─ … ─ layers[L-1] ── final norm ── e_i ── the target's head ── p of the token after d_i
                                                           └── sigmoid(w.e_i + b) = P(d_i is fine)

Paper: arXiv:2501.19309, section 4. D + 1 numbers are trained, the target stays as it is. ``e_i`` is the state *of* the
token, after the target has read it: not the state that predicted it, which SPRINTER's head reads.
Differs: the paper does not say whether the state is normed; ``normed`` says which one a head reads.

Letters: M rows, D width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F

from foretoken.drafting.logistic import Logistic, LogisticConfig, LogisticHead
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.grown import Origin
from foretoken.models.language_model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(LogisticConfig):
    """What a judge is, and whose.

    Attributes:
        width: of the target's hidden states.
        threshold: from which probability on, exclusive, its word is good; chosen when it was trained. 1: never.
        normed: it reads the state behind the final norm, as the target's own head does; False: before it.
    """

    threshold: float
    normed: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.threshold) not in (int, float) or not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold={self.threshold!r} is no probability")
        if type(self.normed) is not bool:
            raise ValueError(f"normed={self.normed!r}")


class JudgeHead(LogisticHead):
    """P(token is fine), from the target's state of the token."""

    algorithm = "judge"
    title = "judge"
    Config = JudgeConfig
    grows = True

    @classmethod
    def random(
        cls,
        target: LanguageModel,
        *,
        threshold: float = 0.5,
        bias: float = 0.0,
        spread: float = 0.3,
        seed: int = 5,
    ) -> JudgeHead:
        """A judge that nobody trained: its threshold, and how its numbers are drawn."""
        config = JudgeConfig(
            width=target.config.get_text_config(decoder=True).hidden_size,
            threshold=threshold,
            target=target.name,
            target_fingerprint=fingerprint_of(target.source),
        )
        return cls(config, Logistic.random(config.width, bias=bias, spread=spread, seed=seed))

    def grown(self, target: LanguageModel, origin: Origin) -> JudgeHead:
        """The same judgements of a model that was grown from its target: of the first copy in the stream."""
        mark, wide = fingerprint_of(target.source), origin.width * origin.copies
        config = replace(self.config, target=target.name, target_fingerprint=mark, width=wide)
        share = origin.first_share if config.normed else 1.0
        weight_D = F.pad(self.unit.weight_D / share, (0, wide - origin.width))
        return JudgeHead(config, Logistic(weight_D, self.unit.bias))

    @classmethod
    def how(cls, target: str, draft: str, config: Any = None) -> str:
        """The command that trains a judge."""
        return f"foretoken train judge --target {target} --draft-model {draft} --out DIR"
