"""K-SEQ and SpecHub in the simplest form, for one node; independent references for the real rules."""

from abc import abstractmethod

from torch import Tensor

from foretoken.certify.plain_rule import PlainRule, positive
from foretoken.core.draft import Draft, HubPair, Law, Sampled, Tabulated
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict


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


def _least_rho(p_V: Tensor, q_V: Tensor, count: int) -> float:
    """Return the least rho in [1, count] with 1 - (1 - beta)^count <= rho beta."""
    low, high = 1.0, float(count)
    for _ in range(45):
        middle = (low + high) / 2
        beta = float(q_V.minimum(p_V / middle).sum())
        low, high = (middle, high) if 1.0 - (1.0 - beta) ** count > middle * beta else (low, middle)
    return high


class PlainKSeq(_OneLevel):
    """K-SEQ on the root's children with rho by bisection; see verifiers/kseq.py for the real one."""

    name = "plain kseq"
    laws: tuple[type[Law], ...] = (Sampled,)

    def decide(self, draft: Draft, p_V: Tensor, q_V: Tensor, target: Laws, rng: Streams) -> Verdict:
        """Accept the first child that passes with probability min(1, p / (rho q))."""
        count = len(draft)
        rho = _least_rho(p_V, q_V, count)
        for node, token in enumerate(draft.tree.tokens):
            if rng.bernoulli("accept", (float(p_V[token] / (rho * q_V[token])),))[0]:
                return Verdict((node,), rng.categorical("bonus", target.p_MV[node + 1]))
        passed_V = q_V.minimum(p_V / rho)
        beta = float(passed_V.sum())
        share = (1.0 - (1.0 - beta) ** count) / beta if beta > 0.0 else 0.0
        return Verdict((), rng.categorical("residual", positive(p_V - passed_V * share, p_V)))


class PlainHub(_OneLevel):
    """SpecHub on one pair; see verifiers/spechub.py for the real one."""

    name = "plain hub"
    laws: tuple[type[Law], ...] = (HubPair,)

    def decide(self, draft: Draft, p_V: Tensor, q_V: Tensor, target: Laws, rng: Streams) -> Verdict:
        """Test the token other than the hub, then the hub with the remaining mass."""
        tokens = draft.tree.tokens
        if len(tokens) == 1:
            return PlainRule().verify(draft, target, rng)
        hub = int(q_V.argmax())
        first_V = q_V.clone()  # Pr(i, hub)
        first_V[hub] = 0.0
        second_V = first_V * (q_V[hub] / first_V.sum())  # Pr(hub, i)
        left_V = (p_V - first_V).clamp(min=0.0)
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
        return Verdict((), rng.categorical("residual", positive(rest_V, p_V)))
