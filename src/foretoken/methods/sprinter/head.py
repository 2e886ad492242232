"""SPRINTER's judge: a logistic head on a draft model's last hidden state, and on what its law says of the token.

    tokens ── embedding ── layers[0] ─ … ─ layers[L-1] ── final norm ── h ── the draft's head ── q ── draw y
                                                                        └── sigmoid(w.x + b) = v

Paper: arXiv:2502.04557. v estimates that a draft token y would be accepted. What the head reads, x:

    pre    h alone, which produced the law that y is drawn from: y is not known to the head (as published)
    drawn  that h, log q(y), the entropy of q, and the distance between its two largest probabilities
    post   h alone, after y was read

Differs: the published head is ``pre``. q(y) alone tells acceptance better than that head, which never sees it
(lab/results/sprinter_heads.md); so ``drawn`` is the default of training.

Letters: M rows, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foretoken.drafting.logistic import Logistic, LogisticConfig, LogisticHead
from foretoken.models.fingerprint import fingerprint, fingerprint_of
from foretoken.models.grown import Origin
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load_config, source_of

FEATURES = ("pre", "drawn", "post")
FACTS = ("log_q", "entropy", "margin")
_LEAST_LOG = -20.0  # of a token that q hardly has


def facts_of(q_MV: Tensor, token_M: Tensor) -> Tensor:
    """What a draft's law says of the token that was drawn from it, float32 [M, 3], in the order of :data:`FACTS`.

    Args:
        q_MV: laws, float32.
        token_M: int64, drawn from them.
    """
    log_q_M = q_MV.gather(1, token_M[:, None])[:, 0].log().clamp(min=_LEAST_LOG)
    largest_M2 = q_MV.topk(2).values
    entropy_M = torch.special.entr(q_MV).sum(dim=-1)
    return torch.stack([log_q_M, entropy_M, largest_M2[:, 0] - largest_M2[:, 1]], dim=-1).float()


@dataclass(frozen=True, kw_only=True)
class HeadConfig(LogisticConfig):
    """What a head is, and whose: it is of no use to another pair.

    Attributes:
        feature: one of :data:`FEATURES`, see above.
        width: of the draft's hidden states.
    """

    feature: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.feature not in FEATURES:
            raise ValueError(f"feature={self.feature!r}")
        for name in ("draft", "draft_fingerprint"):
            if getattr(self, name) is None:
                raise ValueError(f"{name}=None")

    @property
    def saw_token(self) -> bool:
        """Whether v depends on the very token, not on its past alone."""
        return self.feature != "pre"

    @property
    def num_inputs(self) -> int:
        return self.width + (len(FACTS) if self.feature == "drawn" else 0)


class SprinterHead(LogisticHead):
    """v of each row, from the draft's states."""

    algorithm = "sprinter"
    title = "SPRINTER head"
    Config = HeadConfig
    grows = True
    old_files = ("sprinter.json", "sprinter.safetensors")

    @classmethod
    def random(
        cls,
        target: LanguageModel,
        *,
        draft: str = "zoo:draft",
        feature: str = "pre",
        bias: float = 0.0,
        spread: float = 0.1,
        seed: int = 3,
    ) -> SprinterHead:
        """A head that nobody trained: the draft of its pair, what it reads, and how its numbers are drawn."""
        config = HeadConfig(
            feature=feature,
            width=load_config(draft).get_text_config(decoder=True).hidden_size,
            target=target.name,
            target_fingerprint=fingerprint_of(target.source),
            draft=draft,
            draft_fingerprint=fingerprint(Path(source_of(draft))),
        )
        return cls(config, Logistic.random(config.num_inputs, bias=bias, spread=spread, seed=seed))

    def grown(self, target: LanguageModel, origin: Origin) -> SprinterHead:
        """The same head: it reads the draft's states, and a model that was grown from its target has the same laws."""
        mark = fingerprint_of(target.source)
        return SprinterHead(replace(self.config, target=target.name, target_fingerprint=mark), self.unit)

    @classmethod
    def how(cls, target: str, draft: str, config: Any = None) -> str:
        """The command that trains a head."""
        return f"foretoken train sprinter --target {target} --draft-model {draft} --out DIR"
