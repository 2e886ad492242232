"""The paper's verification above temperature 0: test a searched path as if it had been sampled from the lattice.

Letters: V vocabulary.
"""

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
    """The slots' distributions for the tokens of a searched path; the draft is a point mass.

    Attributes:
        law: for each node, its slot's distribution without the trigram, processed like the target's. The token was
            *not* sampled from it.
    """

    title = "the distributions of the lattice that a path was searched in"

    law: Sampled


class DiffuSpecVerifier(BudgetedVerifier):
    """Test each token x of a searched path by min(1, p(x)/q(x)), q the lattice's distribution of its slot.

    Paper:   DiffuSpec, arXiv:2510.02358, section 4 (same letters: p target, q draft).
    Exact:   no. The paper claims it, but the path was found by a search and not sampled from q. Given the path, the
             distribution at x is

                 e = a 1[x] + (1 - a) norm((p - q)+)        a = min(1, p(x)/q(x))

             and exact rejection of a point mass would have a = p(x). The excess probability of x is p(x) (1/q(x) - 1)
             where p(x) <= q(x), and 1 - p(x) where q(x) is smaller; the bias is smaller where the lattice is surer.
             `ratio` does the same arithmetic on sampled tokens, where the mean over samples is p. Checked by
             enumeration in tests/unit/methods/diffuspec/test_verifier.py.
    Differs: e is metered. Beyond a budget, a token is tested exactly, as a point mass. At temperature 0 the rule is
             exact: it accepts the tokens that equal the argmax, as in the paper.
    """

    name = "diffuspec"
    laws: tuple[type[Law], ...] = (PointMass,)
    trees = False
    needs = Needs(evidence=SlotLaws)
    declared = Declared(knob=Knob(option="balance", values=(1.0, 0.5, 0.2), drafter="diffuspec"))

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Decide one draft within the remaining budget of the request.

        Args:
            draft: chain of N point masses with :class:`SlotLaws` (at temperature 0: any chain).
            target: N + 1 rows. Rows after a rejection are not processed.
            rng: one decision of purpose accept per tested token, then one sample of purpose residual or bonus.
            spent: tokens emitted and budget spent by the request so far.
        Returns:
            Verdict with the distortion and divergence of every emitted token.
        Raises:
            ValueError: the draft branches, has another kind, or carries no distributions of its slots.
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
    """Return the distribution e of one token of a searched path accepted with this probability, [V]."""
    stands_V, left_V = torch.zeros_like(p_V), residual(p_V, q_V)
    stands_V[token] = chance
    return emitted(stands_V, left_V / left_V.sum())
