"""Verification rules written as slowly and plainly as they can be, for drafts of one level or chains.

Second opinions on the real rules, and what the teeth tamper with: each step that a known mistake changes is a method.
None of them handles temperature 0, and only the first takes chains; the others take the children of the root.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.core.draft import Draft, HubPair, Law, Sampled, Tabulated, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict


def _positive(left_V: Tensor, otherwise_V: Tensor) -> Tensor:
    """The positive part as weights, [V]; the other distribution if it has no mass."""
    left_V = left_V.clamp(min=0.0)
    return left_V if float(left_V.sum()) > 0.0 else otherwise_V


class PlainRatio(Verifier):
    """Token-wise speculative sampling of a chain; see verifiers/ratio.py for the real one."""

    name = "plain ratio"
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (Sampled,)
    trees = False

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Accept with chance min(1, p/q) token by token; on the first miss draw from (p - q)+."""
        for node, token in enumerate(draft.tree.tokens):
            assert isinstance(draft.law, Tabulated)
            p_V, q_V = self.target_law(target.p_MV[self.row(node)]), self.draft_law(draft.law.q_at(node))
            if not rng.bernoulli("accept", (self.chance(p_V, q_V, token),))[0]:
                return Verdict(tuple(range(node)), rng.categorical("residual", self.residual(p_V, q_V)))
        num = len(draft)
        bonus_V = self.bonus(self.target_law(target.p_MV[self.bonus_row(num)]))
        return Verdict(tuple(range(num)), rng.categorical("bonus", bonus_V))

    def target_law(self, p_V: Tensor) -> Tensor:
        """p as the rule sees it."""
        return p_V

    def draft_law(self, q_V: Tensor) -> Tensor:
        """q as the rule sees it."""
        return q_V

    def row(self, node: int) -> int:
        """The target's row that judges a node."""
        return node

    def chance(self, p_V: Tensor, q_V: Tensor, token: int) -> float:
        """Of accepting a token; clipped to [0, 1] by whoever decides."""
        return float(p_V[token] / q_V[token])

    def residual(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """What the extra token is drawn from after a miss, as weights."""
        return _positive(p_V - q_V, p_V)

    def bonus_row(self, num: int) -> int:
        """The target's row of the bonus after ``num`` accepted tokens, all of the draft."""
        return num

    def bonus(self, p_V: Tensor) -> Tensor:
        """What the bonus is drawn from."""
        return p_V


class PlainRecursive(Verifier):
    """Recursive rejection of the root's children; see verifiers/recursive.py for the real one."""

    name = "plain recursive"
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (Sampled, WithoutReplacement)
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Accept child after child with chance min(1, p/q); p becomes (p - q)+ after each refusal."""
        p_V, tokens = target.p_MV[0], draft.tree.tokens
        if not tokens:
            return Verdict((), rng.categorical("bonus", p_V))
        assert isinstance(draft.law, Tabulated)
        q_V = draft.law.q_at(0)
        for node in self.order(tokens, q_V):
            token = tokens[node]
            if float(q_V[token]) <= 0.0:  # rounding left nothing of q
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
        """The order in which the children are tried."""
        return list(range(len(tokens)))

    def normalised(self, left_V: Tensor) -> Tensor:
        """What the next child is tested against."""
        return left_V / left_V.sum()


class PlainKSeq(Verifier):
    """K-SEQ on the root's children with rho by bisection; see verifiers/kseq.py for the real one."""

    name = "plain kseq"
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (Sampled,)
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Accept the first child that passes with chance min(1, p / (rho q))."""
        p_V, tokens = target.p_MV[0], draft.tree.tokens
        if not tokens:
            return Verdict((), rng.categorical("bonus", p_V))
        assert isinstance(draft.law, Tabulated)
        q_V, count = draft.law.q_at(0), len(tokens)
        rho = self.rho(p_V, q_V, count)
        for node, token in enumerate(tokens):
            if rng.bernoulli("accept", (float(p_V[token] / (rho * q_V[token])),))[0]:
                return Verdict((node,), rng.categorical("bonus", target.p_MV[node + 1]))
        passed_V = q_V.minimum(p_V / rho)
        beta = float(passed_V.sum())
        share = (1.0 - (1.0 - beta) ** count) / beta if beta > 0.0 else 0.0
        return Verdict((), rng.categorical("residual", _positive(p_V - passed_V * share, p_V)))

    def rho(self, p_V: Tensor, q_V: Tensor, count: int) -> float:
        """The least rho in [1, count] with 1 - (1 - beta)^count <= rho beta."""
        low, high = 1.0, float(count)
        for _ in range(45):
            middle = (low + high) / 2
            beta = float(q_V.minimum(p_V / middle).sum())
            low, high = (middle, high) if 1.0 - (1.0 - beta) ** count > middle * beta else (low, middle)
        return high


class PlainHub(Verifier):
    """SpecHub on one pair; see verifiers/spechub.py for the real one."""

    name = "plain hub"
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (HubPair,)
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Test the token that is not the hub, then the hub with what such tests left over."""
        p_V, tokens = target.p_MV[0], draft.tree.tokens
        if not tokens:
            return Verdict((), rng.categorical("bonus", p_V))
        assert isinstance(draft.law, Tabulated)
        q_V = draft.law.q_at(0)
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
        """What the pairs that begin with another token than the hub leave of p."""
        return (p_V - first_V).clamp(min=0.0)
