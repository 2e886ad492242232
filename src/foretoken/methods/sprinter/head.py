"""SPRINTER's judge: a logistic head on a draft model's last hidden state.

    tokens ── embedding ── layers[0] ─ … ─ layers[L-1] ── final norm ── h ── the draft's head ── q
                                                                        └── sigmoid(w.h + b) = v

Paper: arXiv:2502.04557. v estimates that a draft token would be accepted; d + 1 numbers are trained. Which token:

    pre   the one that is drawn from the q that h produced: the token is not known to the head (as published)
    post  the one that was read last: h is the state after it

Letters: M rows, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.drafting.logistic import Logistic, LogisticConfig, LogisticHead
from foretoken.models.fingerprint import fingerprint, fingerprint_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load_config, source_of

FEATURES = ("pre", "post")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(LogisticConfig):
    """What a head is, and whose: it is of no use to another pair.

    Attributes:
        feature: "pre" or "post", see above.
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


class SprinterHead(LogisticHead):
    """v of each row, from the draft's states."""

    algorithm = "sprinter"
    title = "SPRINTER head"
    Config = HeadConfig
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
        return cls(config, Logistic.random(config.width, bias=bias, spread=spread, seed=seed))

    @classmethod
    def how(cls, target: str, draft: str, config: Any = None) -> str:
        """The command that trains a head."""
        return f"foretoken train sprinter --target {target} --draft {draft} --out DIR"
