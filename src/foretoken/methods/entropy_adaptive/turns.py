"""Whose turn it is: a rolling mean of entropies, a threshold and a minimum dwell.

    position        t        t+1      t+2      t+3       one entropy each, of the model whose turn it is
    small reads     H ok     H ok     H high ─┐
    writes          small    small    LARGE ◄─┘ LARGE    the large model writes the very position that raised the alarm

The state is a function of the tokens before it, and of no token's own value: it is advanced before a token is drawn.

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
    """The small model's turn as it hands it over.

    Attributes:
        q_NV: float32 [N, V], the processed distribution of each token, for the meter; None at temperature 0: it needs
            none.
        yields: the large model writes what follows; if not, the small one goes on, and its last token ends the step.
    """

    title = "how the small model wrote its tokens"

    q_NV: Tensor | None
    yields: bool


@dataclass(frozen=True, slots=True)
class LargeTurn(Verdict):
    """The verdict of a step whose last token is written in the large model's turn.

    Attributes:
        logits_V: its row, raw: whose turn is next follows from its entropy.
    """

    logits_V: Tensor = field(kw_only=True, compare=False)


class Turn(Protocol):
    """Whose turn it is at one position, and what comes of it. Immutable."""

    @property
    def large(self) -> bool:
        """Whether the large model writes this position; the small one need not read it then."""
        ...

    def read_by_small(self, entropy: float) -> tuple[bool, Turn]:
        """The small model has read up to this position: whether it writes it, and the next position's turn."""
        ...

    def read_by_large(self, entropy: float) -> Turn:
        """The large model has read up to this position and writes it: the next position's turn."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When turns change.

    Attributes:
        threshold: bits; the small model writes where the mean is below it.
        window: entropies that the mean is of; of fewer where there are no more.
        dwell: tokens that a model writes at least before the turn changes.
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
        large: whose turn it is.
        count: tokens that this model has written since the turn changed.
        entropies: the last ones, at most ``rule.window``.
    """

    rule: Rule
    large: bool
    count: int
    entropies: tuple[float, ...]

    @classmethod
    def first(cls, rule: Rule) -> EntropyTurn:
        """At the end of a prompt: the small model reads it, and the rule chooses who writes first."""
        return cls(rule, False, 0, ())

    def read_by_small(self, entropy: float) -> tuple[bool, EntropyTurn]:
        rule, seen, begins = self.rule, self._with(entropy), not self.entropies
        if (self.count < rule.dwell and not begins) or _mean(seen) < rule.threshold:
            return True, replace(self, count=self.count + 1, entropies=seen)
        if rule.redo or begins:
            return False, EntropyTurn(rule, True, 1, seen)
        return True, EntropyTurn(rule, True, 0, seen)

    def read_by_large(self, entropy: float) -> EntropyTurn:
        """It has computed this position, so it writes it; the small model may take over at the next."""
        rule, seen = self.rule, self._with(entropy)
        if self.count + 1 >= rule.dwell and _mean(seen) < rule.threshold:
            return EntropyTurn(rule, False, 0, seen)
        return replace(self, count=self.count + 1, entropies=seen)

    def _with(self, entropy: float) -> tuple[float, ...]:
        return (*self.entropies, entropy)[-self.rule.window :]


def _mean(values: tuple[float, ...]) -> float:
    return math.fsum(values) / len(values)
