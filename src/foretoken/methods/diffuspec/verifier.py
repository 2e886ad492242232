"""The paper's verification above temperature 0: a searched path, tested as though the lattice had drawn it.

Letters: V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.distortion import Account, Spent, divergence, emitted, total_variation
from foretoken.core.draft import Draft, Evidence, Law, PointMass, Sampled
from foretoken.core.laws import Laws
from foretoken.core.needs import Declared, Knob, Needs
from foretoken.core.randomness import Streams
from foretoken.core.residual import ratio, residual
from foretoken.core.verdict import Verdict
from foretoken.verifiers.lossy import BudgetedVerifier, check_fit, descend, exactly
from foretoken.verifiers.walk import Pick, Siblings


@dataclass(frozen=True, slots=True)
class SlotLaws(Evidence):
    """The distributions of the slots that a searched path's tokens come from; the draft is a point mass.

    Attributes:
        law: of each node, its slot's distribution without the trigram, processed as the target's: what the token was
            *not* drawn from.
    """

    title = "the distributions of the lattice that a path was searched in"

    law: Sampled


class DiffuSpecVerifier(BudgetedVerifier):
    """Test each token x of a searched path by min(1, p(x)/q(x)), q the lattice's distribution of its slot.

    Paper:   DiffuSpec, arXiv:2510.02358, section 4 (same letters: p target, q draft).
    Exact:   no. The paper says yes, but the path was found by a search and not drawn from q. Given the path, the
             distribution at x is

                 e = a 1[x] + (1 - a) norm((p - q)+)        a = min(1, p(x)/q(x))

             and exact rejection of a point mass would have p(x) for a. So x has p(x) (1/q(x) - 1) too much where
             p(x) <= q(x), and 1 - p(x) where q(x) is smaller: the surer the lattice, the less. `ratio` does the same
             arithmetic on drawn tokens, where the mean over the draw is p. Checked by enumeration in
             tests/unit/methods/diffuspec/test_verifier.py.
    Differs: e is metered, and there is a budget, beyond which a token is tested exactly, as a point mass. At
             temperature 0 the rule is the walk along the argmax, and exact, as the paper's.
    """

    name = "diffuspec"
    laws: tuple[type[Law], ...] = (PointMass,)
    trees = False
    needs = Needs(evidence=SlotLaws)
    declared = Declared(knob=Knob(option="balance", values=(1.0, 0.5, 0.2), drafter="diffuspec"))

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Decide one draft within what is left of the request's budget.

        Args:
            draft: chain of N point masses with :class:`SlotLaws` (at temperature 0: any chain).
            target: N + 1 rows. Rows after a refusal are not processed.
            rng: one decision of purpose accept per tried token, then one draw of purpose residual or bonus.
            spent: what the request has emitted and spent.
        Returns:
            Verdict with the distortion and divergence of every emitted token.
        Raises:
            ValueError: the draft branches, is of another kind, or carries no distributions of its slots.
        """
        found = draft.evidence if isinstance(draft.evidence, SlotLaws) else None
        if len(draft) and found is None and not target.greedy:
            raise ValueError(
                f"verifier '{self.name}' was given a draft without the distributions of its slots: "
                f"use method='{self.name}', or "
                "another verifier"
            )
        check_fit(self, draft, target)
        account = Account(spent, self.config.max_distortion)

        def step(node: int, children: Siblings, tokens: Siblings) -> Pick:
            (child,), (token,) = children, tokens
            if found is None:
                account.add(0.0, 0.0)
                best = target.best[node + 1]
                return (0, token) if token == best else (None, best)
            return self._test(target.p_at(node + 1), found.law.q_at(child), token, rng, account)

        return descend(draft, target, rng, account, step)

    def _test(self, p_V: Tensor, q_V: Tensor, token: int, rng: Streams, account: Account) -> Pick:
        q_V = q_V.to(p_V.dtype)
        chance = min(1.0, ratio(float(p_V[token]), float(q_V[token])))
        e_V = searched(p_V, q_V, token, chance)
        cost = total_variation(e_V, p_V)
        if not account.allows(cost):
            account.add(0.0, 0.0)
            return exactly(p_V, None, (token,), rng)
        account.add(cost, divergence(e_V, p_V))
        if rng.bernoulli("accept", (chance,))[0]:
            return 0, token
        return None, rng.categorical("residual", residual(p_V, q_V))


def searched(p_V: Tensor, q_V: Tensor, token: int, chance: float) -> Tensor:
    """The distribution e of one token of a searched path that stands with this chance, [V]."""
    stands_V, left_V = torch.zeros_like(p_V), residual(p_V, q_V)
    stands_V[token] = chance
    return emitted(stands_V, left_V / left_V.sum())
