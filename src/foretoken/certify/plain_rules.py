"""Verification rules in the simplest form, for drafts of one level or chains; speed does not matter.

They are independent references for the real rules, and the base of the biased rules in teeth.py: each step that a known
mistake changes is a method. None of them handles temperature 0, and only the first supports chains; the others support
the children of the root.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from foretoken.core.draft import Draft, HubPair, Law, Sampled, Tabulated, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict


def _positive(left_V: Tensor, otherwise_V: Tensor) -> Tensor:
    """Return the positive part as weights, [V]; the other distribution if it has no mass."""
    left_V = left_V.clamp(min=0.0)
    return left_V if float(left_V.sum()) > 0.0 else otherwise_V


class PlainRatio(Verifier):
    """Token-wise speculative sampling of a chain; see verifiers/ratio.py for the real one."""

    name = "plain ratio"
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (Sampled,)
    trees = False

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Accept with probability min(1, p/q) token by token; at the first rejection draw from (p - q)+."""
        for node, token in enumerate(draft.tree.tokens):
            assert isinstance(draft.law, Tabulated)
            p_V, q_V = target.p_MV[self.row(node)], self.draft_law(draft.law.q_at(node))
            if not rng.bernoulli("accept", (self.chance(p_V, q_V, token),))[0]:
                return Verdict(tuple(range(node)), rng.categorical("residual", self.residual(p_V, q_V)))
        num = len(draft)
        bonus_V = self.bonus(target.p_MV[self.bonus_row(num)])
        return Verdict(tuple(range(num)), rng.categorical("bonus", bonus_V))

    def draft_law(self, q_V: Tensor) -> Tensor:
        """Return q for the rule."""
        return q_V

    def row(self, node: int) -> int:
        """Return the target's row for a node."""
        return node

    def chance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        """Return the acceptance probability of a token; the caller clips it to [0, 1]."""
        return float(p_V[token] / q_V[token])

    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """Return the distribution of the extra token after a rejection, as weights."""
        return _positive(p_V - q_V, p_V)

    def bonus_row(self, num: int) -> int:
        """Return the target's row of the bonus token after ``num`` accepted tokens, the whole draft."""
        return num

    def bonus(self, p_V: Tensor) -> Tensor:
        """Return the distribution of the bonus token."""
        return p_V


class _OneLevel(Verifier):
    """A rule for the root's children."""

    promise = "same distribution"
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Return the rule's verdict; without children, draw from p."""
        if not len(draft):
            return Verdict((), rng.categorical("bonus", target.p_MV[0]))
        assert isinstance(draft.law, Tabulated)
        return self.decide(draft, target.p_MV[0], draft.law.q_at(0), target, rng)

    @abstractmethod
    def decide(self, draft: Draft, p_V: Tensor, q_V: Tensor, target: Laws, rng: Streams) -> Verdict:
        """Decide one child at least; p and q are those of the root."""


class PlainRecursive(_OneLevel):
    """Recursive rejection of the root's children; see verifiers/recursive.py for the real one."""

    name = "plain recursive"
    laws: tuple[type[Law], ...] = (Sampled, WithoutReplacement)

    def decide(self, draft: Draft, p_V: Tensor, q_V: Tensor, target: Laws, rng: Streams) -> Verdict:
        """Accept child after child with probability min(1, p/q); p becomes (p - q)+ after each rejection."""
        tokens = draft.tree.tokens
        for node in self.order(tokens, q_V):
            token = tokens[node]
            if float(q_V[token]) <= 0.0:  # rounding reduced q to zero
                break
            if rng.bernoulli("accept", (float(p_V[token] / q_V[token]),))[0]:
                return Verdict((node,), rng.categorical("bonus", target.p_MV[node + 1]))
            p_V = self.normalised(_positive(p_V - q_V, p_V))
            if isinstance(draft.law, WithoutReplacement):
                q_V = q_V.clone()
                q_V[token] = 0.0
                q_V /= q_V.sum().clamp(min=1e-300)
        return Verdict((), rng.categorical("residual", p_V))

    def order(self, tokens: Sequence[int], q_V: Tensor) -> list[int]:
        """Return the order of the children."""
        return list(range(len(tokens)))

    def normalised(self, left_V: Tensor) -> Tensor:
        """Return the distribution for the test of the next child."""
        return left_V / left_V.sum()


class PlainKSeq(_OneLevel):
    """K-SEQ on the root's children with rho by bisection; see verifiers/kseq.py for the real one."""

    name = "plain kseq"
    laws: tuple[type[Law], ...] = (Sampled,)

    def decide(self, draft: Draft, p_V: Tensor, q_V: Tensor, target: Laws, rng: Streams) -> Verdict:
        """Accept the first child that passes with probability min(1, p / (rho q))."""
        count = len(draft)
        rho = self.rho(p_V, q_V, count)
        for node, token in enumerate(draft.tree.tokens):
            if rng.bernoulli("accept", (float(p_V[token] / (rho * q_V[token])),))[0]:
                return Verdict((node,), rng.categorical("bonus", target.p_MV[node + 1]))
        passed_V = q_V.minimum(p_V / rho)
        beta = float(passed_V.sum())
        share = (1.0 - (1.0 - beta) ** count) / beta if beta > 0.0 else 0.0
        return Verdict((), rng.categorical("residual", _positive(p_V - passed_V * share, p_V)))

    def rho(self, p_V: Tensor, q_V: Tensor, count: int) -> float:
        """Return the least rho in [1, count] with 1 - (1 - beta)^count <= rho beta."""
        low, high = 1.0, float(count)
        for _ in range(45):
            middle = (low + high) / 2
            beta = float(q_V.minimum(p_V / middle).sum())
            low, high = (middle, high) if 1.0 - (1.0 - beta) ** count > middle * beta else (low, middle)
        return high


class PlainHub(_OneLevel):
    """SpecHub on one pair; see verifiers/spechub.py for the real one."""

    name = "plain hub"
    laws: tuple[type[Law], ...] = (HubPair,)

    def decide(self, draft: Draft, p_V: Tensor, q_V: Tensor, target: Laws, rng: Streams) -> Verdict:
        """Test the token other than the hub, then the hub with the remaining mass."""
        tokens = draft.tree.tokens
        if len(tokens) == 1:
            return PlainRatio().verify(draft, target, rng)
        hub = int(q_V.argmax())
        first_V = q_V.clone()  # Pr(i, hub)
        first_V[hub] = 0.0
        second_V = first_V * (q_V[hub] / first_V.sum())  # Pr(hub, i)
        left_V = self.left_for_second(p_V, first_V)
        hub_first = tokens[0] == hub
        node = 1 if hub_first else 0
        has, was = (left_V, second_V) if hub_first else (p_V, first_V)
        if rng.bernoulli("accept", (float(has[tokens[node]] / was[tokens[node]]),))[0]:
            return Verdict((node,), rng.categorical("bonus", target.p_MV[node + 1]))
        others_V = left_V.clone()
        others_V[hub] = 0.0
        open_second = float((second_V - others_V).clamp(min=0.0).sum())
        open_first = float((first_V - p_V).clamp(min=0.0).sum())
        at_hub = float(p_V[hub])
        after = max(at_hub - open_second, 0.0)
        wanted, opened = (at_hub, open_second) if hub_first else (after, open_first)
        node = 1 - node
        if opened > 0.0 and rng.bernoulli("accept", (wanted / opened,))[0]:
            return Verdict((node,), rng.categorical("bonus", target.p_MV[node + 1]))
        rest_V = (others_V - second_V).clamp(min=0.0)
        rest_V[hub] = max(after - open_first, 0.0)
        return Verdict((), rng.categorical("residual", _positive(rest_V, p_V)))

    def left_for_second(self, p_V: Tensor, first_V: Tensor) -> Tensor:
        """Return the part of p that remains after the pairs that begin with another token than the hub."""
        return (p_V - first_V).clamp(min=0.0)
