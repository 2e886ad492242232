"""Recursive rejection in its simplest form, the base of the biased rules in teeth.py; speed does not matter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from foretoken.core.draft import Draft, Law, Sampled, Tabulated, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.tree import ROOT
from foretoken.core.verdict import Verdict


def ratio(p_V: Tensor, q_V: Tensor, token: int) -> float:
    """Return the acceptance probability of a token, not clipped to [0, 1]."""
    return float(p_V[token] / q_V[token])


def positive(left_V: Tensor, otherwise_V: Tensor) -> Tensor:
    """Return the positive part as weights, [V]; the other distribution if it has no mass."""
    left_V = left_V.clamp(min=0.0)
    return left_V if float(left_V.sum()) > 0.0 else otherwise_V


@dataclass(frozen=True, kw_only=True)
class PlainRule(Verifier):
    """Try the children of a node in turn, down from the root; on a chain it is token-wise speculative sampling.

    An independent reference for verifiers/recursive.py and ratio.py, except at temperature 0. Each step that a known
    mistake changes is an attribute.

    Attributes:
        draft_law: q for the rule.
        row: the target's row for the children of a node, from the number of their own row.
        order: places of the siblings in the order of their tests.
        chance: the acceptance probability of a token; clipped to [0, 1] when it is used.
        residual: the distribution after a rejection, as weights; negative ones count as 0.
        normalised: the distribution for the test of the next sibling.
        bonus_row, bonus: the target's row of the bonus token, from the number of accepted tokens, and its distribution.
    """

    name = "plain"
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (Sampled, WithoutReplacement)
    trees = True

    draft_law: Callable[[Tensor], Tensor] = lambda q_V: q_V
    row: Callable[[int], int] = lambda own: own
    order: Callable[[Sequence[int], Tensor], list[int]] = lambda tokens, q_V: list(range(len(tokens)))
    chance: Callable[[Tensor, Tensor, int], float] = ratio
    residual: Callable[[Tensor, Tensor], Tensor] = lambda p_V, q_V: p_V - q_V
    normalised: Callable[[Tensor], Tensor] = lambda left_V: left_V / left_V.sum()
    bonus_row: Callable[[int], int] = lambda num: num
    bonus: Callable[[Tensor], Tensor] = lambda p_V: p_V

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Return the accepted path, and a draw from the rest of p."""
        path: tuple[int, ...] = ()
        at = ROOT
        while children := draft.tree.children.get(at):
            stands, left_V = self._try(draft, children, target.p_MV[self.row(at + 1)], rng)
            if stands is None:
                return Verdict(path, rng.categorical("residual", left_V))
            path, at = (*path, stands), stands
        bonus_V = self.bonus(target.p_MV[self.bonus_row(at + 1)])
        return Verdict(path, rng.categorical("bonus", bonus_V))

    def _try(self, draft: Draft, children: Sequence[int], p_V: Tensor, rng: Streams) -> tuple[int | None, Tensor]:
        assert isinstance(draft.law, Tabulated)
        tokens = [draft.tree.tokens[child] for child in children]
        q_V = self.draft_law(draft.law.q_at(children[0]))
        for place in self.order(tokens, q_V):
            token = tokens[place]
            if float(q_V[token]) <= 0.0:  # rounding reduced q to zero
                break
            if rng.bernoulli("accept", (self.chance(p_V, q_V, token),))[0]:
                return children[place], p_V
            p_V = self.normalised(positive(self.residual(p_V, q_V), p_V))
            if isinstance(draft.law, WithoutReplacement):
                q_V = q_V.clone()
                q_V[token] = 0.0
                q_V /= q_V.sum().clamp(min=1e-300)
        return None, p_V
