"""Entropy-adaptive decoding, the large model's side: accept and meter the small model's tokens; perhaps write one.

    small continues     n0 n1 n2            path n0 n1, extra n2: no token of the target
    small yields        n0 n1 n2 │ L        path n0 n1 n2, extra from row 3
    large's turn        │ L                 extra from row 0

Letters: V vocabulary.
"""

from foretoken.core.distortion import Account, Spent, divergence, total_variation
from foretoken.core.draft import Coupled, Draft, Law
from foretoken.core.laws import Laws
from foretoken.core.needs import Declared, Knob, Needs, Offers
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Choices, Verdict
from foretoken.methods.entropy_adaptive.turns import LargeTurn, Turns
from foretoken.verifiers.lossy import BudgetedVerifier, check_fit
from foretoken.verifiers.match import Samples


class EntropyAdaptiveVerifier(BudgetedVerifier):
    """Accept the small model's turn unchanged; sample with the noise of (seed, position) in the target's turn.

    Paper:   Simonds 2025, "Entropy Adaptive Decoding", arXiv:2502.06833.
    Exact:   no. A token of the small model has its distribution q, at TV(q, p) and KL(q, p) from p, both computed from
             the two rows; a token of the target has p. The turn depends on entropies of earlier rows and this one,
             never on the token sampled here, so these are the distributions given the prefix. At temperature 0 a token
             costs 1 where it is not the target's argmax. Checked by enumeration in
             tests/unit/methods/entropy_adaptive/test_verifier.py.
    Differs: there is a meter and a budget. The target replaces a token that exceeds the budget: if both agree, the turn
             continues, else the step ends there. Unlike other rules it has no guard: a token with p = 0 (dropped by
             the target's filters) is accepted, at an infinite divergence, because ``threshold``=inf must equal the
             small model.
    """

    name = "entropy_adaptive"
    laws: tuple[type[Law], ...] = (Coupled,)
    trees = False
    needs = Needs(evidence=Turns)
    offers = Offers(takes_turns=True)
    declared = Declared(knob=Knob(option="threshold", values=(0.1, 0.5, 3.0), drafter="entropy_adaptive"))

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Verify one turn within the remaining budget of the request.

        Args:
            draft: chain of N nodes with :class:`Turns`; empty in the target's turn.
            target: N + 1 rows. The meter reads all of them.
            rng: only its seed is read.
            spent: tokens emitted and budget spent by the request so far.
        Returns:
            Verdict with the distortion and divergence of every emitted token; a :class:`LargeTurn` if the last token
            belongs to the target's turn.
        Raises:
            ValueError: the draft branches, has another kind, or does not contain the next turn.
        """
        own: Choices = target.best if target.greedy else Samples(target, rng.seed)
        if not len(draft):
            return LargeTurn((), own[0], (0.0,), (0.0,), logits_V=target.raw_MV[0])
        if not isinstance(draft.evidence, Turns):
            raise ValueError(
                f"verifier '{self.name}' was given a draft without turns: use method='{self.name}', or another verifier"
            )
        check_fit(self, draft, target)
        account = Account(spent, self.config.max_distortion)
        for node, token in enumerate(draft.tree.tokens):
            cost = self._cost(draft.evidence, target, node, token)
            if account.allows(cost[0]):
                account.add(*cost)
                continue
            account.add(0.0, 0.0)
            if own[node] != token:
                return _verdict(node, own[node], account)
        if not draft.evidence.yields:
            return _verdict(len(draft) - 1, draft.tree.tokens[-1], account)
        account.add(0.0, 0.0)
        found = _verdict(len(draft), own[len(draft)], account)
        return LargeTurn(
            found.path, found.extra, found.distortions, found.divergences, logits_V=target.raw_MV[len(draft)]
        )

    def _cost(self, turns: Turns, target: Laws, row: int, token: int) -> tuple[float, float]:
        """Return distortion and divergence of a token of the small model."""
        if target.greedy:
            return (0.0, 0.0) if token == target.best[row] else (1.0, float("inf"))
        assert turns.q_NV is not None
        q_V, p_V = turns.q_NV[row], target.p_at(row)
        return total_variation(q_V, p_V), divergence(q_V, p_V)


def _verdict(num_nodes: int, extra: int, account: Account) -> Verdict:
    return Verdict(tuple(range(num_nodes)), extra, tuple(account.distortions), tuple(account.divergences))
