"""SPRINTER's verification: the drafter's head accepts tokens, and the target tests only the last one.

Letters: V vocabulary.
"""

import torch
from torch import Tensor

from foretoken.core.distortion import Account, Spent, divergence, emitted, price_of, total_variation
from foretoken.core.draft import Approvals, Draft, Law, Sampled
from foretoken.core.laws import Laws
from foretoken.core.needs import Declared, Knob, Needs
from foretoken.core.randomness import Streams
from foretoken.core.residual import residual
from foretoken.core.verdict import Verdict
from foretoken.verifiers.lossy import BudgetedVerifier, check_fit, descend, exactly, permitted
from foretoken.verifiers.walk import Pick, Siblings


class SprinterVerifier(BudgetedVerifier):
    """Accept every token of a chain but the last, and test that one exactly.

    Paper:   Zhong, Teku and Tandon 2025, arXiv:2502.04557 (same letters: p target, q draft).
    Exact:   no. A tested token has the distribution p, an untested one q, at TV(p, q) from p:

                 untested y, p(y) > 0:   accepted
                 untested y, p(y) = 0:   tested and so rejected; the next token is sampled from norm((p - q)+)
                 the last y:             accepted with probability min(1, p/q), else norm((p - q)+)
                 all accepted:           one more token from p, the bonus

             If the head reads the token, A is the set of tokens that it approves, and a position that other tokens
             may follow has TV(e, p) = sum over A of (q - p)+. Checked by enumeration in
             tests/unit/methods/sprinter/test_verifier.py.
    Differs: the zero-probability guard: the released code accepts tokens that the target cannot emit (filtered,
             forbidden). So an untested token has the distribution e: q where p > 0, and q's other mass on (p - q)+.
             There is a budget. At temperature 0 an untested token is accepted unless it is forbidden, the last one if
             it is the argmax.
    """

    name = "sprinter"
    laws: tuple[type[Law], ...] = (Sampled,)
    trees = False
    needs = Needs(evidence=Approvals)
    declared = Declared(
        knob=Knob(option="threshold", values=(0.8, 0.65, 0.5), drafter="sprinter", baselines=({"stop": "confidence"},))
    )

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Decide one draft within the request's remaining budget; tokens beyond the budget are tested exactly.

        The charge of a position, see core/distortion.py, is TV(e, p) and KL(e, p) if it can be computed: for every
        untested token, if the head does not read the token; and, if the approvals contain the head's decision about
        every token, for every position that might have been left untested, for any sample there. A ``post`` head
        reads the state of the token
        itself, so its charge is an estimate: (1 - p(y)/q(y))+, with the mean TV(e, p) over samples, and (log
        q(y)/p(y))+, with a mean of at least KL(e, p).

        Args:
            draft: chain of N independent samples (at temperature 0: any chain) with :class:`Approvals`.
            target: N + 1 rows; the meter reads all rows, because untested tokens are metered.
            rng: one decision of purpose accept per tested token, then one sample of purpose residual or bonus.
            spent: tokens and distortion of the request so far.
        Returns:
            Verdict with the distortion and divergence of every emitted token.
        Raises:
            ValueError: the draft branches, has another kind, or carries no approvals.
        """
        found = draft.evidence if isinstance(draft.evidence, Approvals) else None
        if len(draft) and found is None:
            raise ValueError(
                f"verifier '{self.name}' was given a draft that its drafter has not judged: "
                "use method='sprinter', or another verifier"
            )
        check_fit(self, draft, target)
        approvals = found or Approvals(())
        account = Account(spent, self.config.max_distortion)

        def step(node: int, children: Siblings, tokens: Siblings) -> Pick:
            (child,), (token,) = children, tokens
            trusted = approvals.approved[child] is True and child + 1 < len(draft)
            if target.greedy:
                return self._step_greedy(target, node + 1, token, trusted, account)
            p_V, q_V = target.p_at(node + 1), draft.law.q_at(child)  # type: ignore[union-attr]
            if approvals.others_NV is not None:
                return self._weigh(p_V, q_V, token, trusted, approvals.others_NV[child], rng, account)
            decide = self._spare if trusted else self._test
            return decide(p_V, q_V, token, approvals, rng, account)

        return descend(draft, target, rng, account, step)

    def _spare(
        self, p_V: Tensor, q_V: Tensor, token: int, approvals: Approvals, rng: Streams, account: Account
    ) -> Pick:
        """Accept a token untested, unless the target cannot emit it or the budget does not allow it."""
        possible = float(p_V[token]) > 0.0
        if approvals.saw_token:
            cost = price_of(float(p_V[token]), float(q_V[token])) if possible else (0.0, 0.0)
        else:
            e_V = spared(p_V, q_V)
            cost = total_variation(e_V, p_V), divergence(e_V, p_V)
        if not account.allows(cost[0]):
            return self._test(p_V, q_V, token, approvals, rng, account)
        account.add(*cost)
        return (0, token) if possible else exactly(p_V, q_V, (token,), rng)

    def _weigh(
        self, p_V: Tensor, q_V: Tensor, token: int, trusted: bool, others_V: Tensor, rng: Streams, account: Account
    ) -> Pick:
        """Charge a token that the head has read by its decisions on all tokens; the charge is known before the sample.

        Args:
            others_V: bool, the tokens that would be accepted here without a test.
        """
        e_V = spared(p_V, q_V, others_V)
        cost = total_variation(e_V, p_V)
        allowed = account.allows(cost)
        account.add(*((cost, divergence(e_V, p_V)) if allowed else (0.0, 0.0)))
        if allowed and trusted and float(p_V[token]) > 0.0:
            return 0, token
        return exactly(p_V, q_V, (token,), rng)

    def _test(self, p_V: Tensor, q_V: Tensor, token: int, approvals: Approvals, rng: Streams, account: Account) -> Pick:
        account.add(0.0, 0.0)
        return exactly(p_V, q_V, (token,), rng)

    def _step_greedy(self, target: Laws, row: int, token: int, trusted: bool, account: Account) -> Pick:
        best = target.best[row]
        if token != best and trusted and account.allows(1.0) and permitted(target, row, token):
            account.add(1.0, float("inf"))
            return 0, token
        account.add(0.0, 0.0)
        return (0, token) if token == best else (None, best)


def spared(p_V: Tensor, q_V: Tensor, untested_V: Tensor | None = None) -> Tensor:
    """Return the distribution e of a token that is not tested if p > 0, [V].

    Args:
        untested_V: bool, the only tokens that are not tested; None: all. The others are accepted with probability
            min(1, p/q), and the rest of q's mass is on (p - q)+.
    """
    left_V = residual(p_V, q_V)
    stands_V = torch.where(p_V > 0.0, q_V, torch.zeros_like(q_V))
    if untested_V is not None:
        stands_V = torch.where(untested_V, stands_V, torch.minimum(p_V, q_V))
    return emitted(stands_V, left_V / left_V.sum())
