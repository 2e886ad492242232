"""The turns of the two models: a rolling mean of entropies, a threshold and a minimum dwell.

    position        t        t+1      t+2      t+3       one entropy each, of the model in turn
    small reads     H ok     H ok     H high ─┐
    writes          small    small    LARGE ◄─┘ LARGE    the large model writes the position that raised the alarm

The state depends on the tokens before a position, not on its own token: it advances before a token is sampled.

Letters: N draft nodes, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from foretoken.core.draft import Evidence
from foretoken.core.verdict import Verdict


def entropy(logits_V: Tensor) -> float:
    """-sum p log2 p of raw logits [V], in bits: 0 to log2 V; NaN where a logit is NaN. A logit of -inf has p = 0."""
    logp_V = torch.log_softmax(logits_V.float(), dim=-1)
    p_V = logp_V.exp()
    terms_V = torch.where(p_V == 0.0, torch.zeros_like(p_V), p_V * logp_V)
    return -float(terms_V.sum()) / math.log(2.0) + 0.0  # + 0.0: a one-hot row gives 0, not -0


@dataclass(frozen=True, slots=True)
class Turns(Evidence):
    """The evidence of a turn of the small model.

    Attributes:
        q_NV: float32 [N, V], the processed distribution of each token, for the meter; None at temperature 0, where the
            meter does not need it.
        yields: the large model writes the next token; if false, the small model continues, and its last token ends
            the step.
    """

    title = "how the small model wrote its tokens"

    q_NV: Tensor | None
    yields: bool


@dataclass(frozen=True, slots=True)
class LargeTurn(Verdict):
    """The verdict of a step that ends with a token of the large model's turn.

    Attributes:
        logits_V: the raw row of that token; its entropy determines the next turn.
    """

    logits_V: Tensor = field(kw_only=True, compare=False)


class Turn(Protocol):
    """The turn at one position, and its successors. Immutable."""

    @property
    def large(self) -> bool:
        """Whether the large model writes this position; the small model need not read it then."""
        ...

    def read_by_small(self, entropy: float) -> tuple[bool, Turn]:
        """Update after the small model has read this position: whether it writes it, and the next position's turn."""
        ...

    def read_by_large(self, entropy: float) -> Turn:
        """Update after the large model has read and written this position: the next position's turn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The rule that changes turns.

    Attributes:
        threshold: bits; the small model writes where the mean is below it.
        window: maximum number of entropies in the mean.
        dwell: minimum number of tokens that a model writes before the turn changes.
        redo: the large model writes the position that raised the alarm (the printed rule read literally), not the next.
    """

    threshold: float
    window: int
    dwell: int
    redo: bool


@dataclass(frozen=True, slots=True)
class EntropyTurn:
    """The rule of the paper at one position.

    Attributes:
        large: whether it is the large model's turn.
        count: tokens that this model has written since the turn changed.
        entropies: the last ones, at most ``rule.window``.
    """

    rule: Rule
    large: bool
    count: int
    entropies: tuple[float, ...]

    @classmethod
    def first(cls, rule: Rule) -> EntropyTurn:
        """Return the turn at the end of a prompt: the small model reads it, and the rule chooses the first writer."""
        return cls(rule, False, 0, ())

    def read_by_small(self, entropy: float) -> tuple[bool, EntropyTurn]:
        rule, seen, begins = self.rule, self._with(entropy), not self.entropies
        if (self.count < rule.dwell and not begins) or _mean(seen) < rule.threshold:
            return True, replace(self, count=self.count + 1, entropies=seen)
        if rule.redo or begins:
            return False, EntropyTurn(rule, True, 1, seen)
        return True, EntropyTurn(rule, True, 0, seen)

    def read_by_large(self, entropy: float) -> EntropyTurn:
        """The large model has computed this position, so it writes it; the small model may continue at the next."""
        rule, seen = self.rule, self._with(entropy)
        if self.count + 1 >= rule.dwell and _mean(seen) < rule.threshold:
            return EntropyTurn(rule, False, 0, seen)
        return replace(self, count=self.count + 1, entropies=seen)

    def _with(self, entropy: float) -> tuple[float, ...]:
        return (*self.entropies, entropy)[-self.rule.window :]


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)
