"""Judge Decoding: accept a token if the exact test accepts it, or if a trained head judges it correct.

    row      0: x_t     1: d_1     2: d_2     3: d_3
    p          p_0        p_1        p_2        p_3      of the next token: d_i is tested against row i - 1
    state      e_0        e_1        e_2        e_3      of the token itself, after reading it: d_i is judged by row i

Letters: M rows, D width of the target, V vocabulary.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Protocol

from torch import Tensor

from foretoken.core.distortion import Account, Spent, price_of
from foretoken.core.draft import Draft, Law, PointMass, Sampled
from foretoken.core.laws import Laws
from foretoken.core.needs import Declared, Knob, LastState, Needs
from foretoken.core.randomness import Streams
from foretoken.core.residual import ratio
from foretoken.core.verdict import Verdict
from foretoken.options.option import Option
from foretoken.verifiers import guessed
from foretoken.verifiers.lossy import BudgetedVerifier, LossyConfig, check_fit, descend, exactly, permitted
from foretoken.verifiers.recursive import RecursiveVerifier
from foretoken.verifiers.walk import Pick, Siblings


class Head(Protocol):
    """A judge, as in methods/judge/network.py; its ``config`` has a ``threshold`` and ``normed``."""

    config: Any

    def judge(self, hidden_MD: Tensor) -> Tensor:
        """P(token is fine), float [M]."""
        ...


class JudgeVerifier(BudgetedVerifier):
    """Accept while the exact test or the judge accepts; after the first rejection emit by the exact rule.

    Paper:   Bachmann et al. 2025, "Judge Decoding", arXiv:2501.19309, section 4: accept if the standard test or
        sigmoid(w.e + b) > delta, e the target's last hidden state of the token itself.
    Exact:   no. With J(x) = 1 where the judge would accept x, S = sum (p - q)+, and p after the filters:

                 e(x) = min(p, q) + J(x) (q - p)+ + (1 - J) share of (p - q)+,     share = sum (1 - J) (q - p)+ / S
                 J is known only for the drafted token, since the target has read no other. So a drafted y with J(y) =
                 1 is
             charged (1 - p(y)/q(y))+, whether or not the exact test accepted it: the mean over the sample is TV(e, p),
             an unbiased estimate, and (log q/p)+ for the divergence, with a mean of at least KL(e, p). For point masses
             (q = 1) both are exact given the draft; at temperature 0 a token that is not the argmax costs 1. Checked by
             enumeration in tests/unit/methods/judge/test_verifier.py.
    Differs: guards. The judge alone cannot accept a token that ends the request, a special token (``guarded``), a token
             with p = 0 (filtered, forbidden), or more than ``max_run`` tokens in a row; there is a budget. Where
             p >= q the exact test certainly accepts, and the judge is not evaluated. Chains only. With
             ``threshold=1`` the judge is off, and the rule is `recursive` on a chain, bit for bit.

    Args:
        config: options.
        head: the judge.
        guarded: tokens that the judge alone cannot accept, in addition to those that end the request.
    """

    name = "judge"
    declared = Declared(
        learned_part="foretoken.methods.judge.network:JudgeHead", knob=Knob(option="threshold", values=(0.95, 0.8, 0.5))
    )
    laws: tuple[type[Law], ...] = (PointMass, Sampled)
    trees = False

    @dataclass(frozen=True, kw_only=True)
    class Config(LossyConfig):
        """Options of the judge."""

        head: Annotated[
            str | Path | None,
            Option("A folder of `foretoken train judge`; None: `judge` in the folder of the target's weights."),
        ] = None
        threshold: Annotated[
            float | None,
            Option(
                "The judge accepts tokens above this probability; None: the calibrated threshold. 1 switches it off.",
                least=0,
                most=1,
                remedy="lower accepts more, 1 switches it off, leave it out for the head's",
            ),
        ] = None
        max_run: Annotated[
            int | None,
            Option(
                "Most tokens in a row that only the judge accepts; None: any number.",
                least=1,
                remedy="leave it out for no limit, use threshold=1 to switch the judge off",
            ),
        ] = None

    def __init__(self, config: Config, head: Head, guarded: Collection[int]) -> None:
        self.config = config
        self.head = head
        self.guarded = frozenset(guarded)
        self.threshold: float = head.config.threshold if config.threshold is None else config.threshold
        self.needs = Needs(last_state=LastState(head.config.normed) if self.threshold < 1.0 else None)

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Decide one draft within the request's remaining budget; tokens beyond the budget are tested exactly.

        Args:
            draft: chain of N nodes, point masses or independent draws.
            target: N + 1 rows with ``hidden_MD``. The judge evaluates all nodes at once, before the first possible
                rejection by the exact test.
            rng: one decision of purpose accept per tested token, then one sample of purpose residual or bonus, as in
                the exact rule.
            spent: tokens and distortion of the request so far.
        Returns:
            Verdict with the distortion and divergence of every emitted token.
        Raises:
            ValueError: the draft branches, is of another kind, or ``target`` has no hidden states.
        """
        check_fit(self, draft, target)
        account = Account(spent, self.config.max_distortion)
        approved = cache(lambda: self.approved(draft, target))
        run = 0  # number of consecutive tokens, the last one included, that the judge alone accepted

        def step(node: int, children: Siblings, tokens: Siblings) -> Pick:
            nonlocal run
            (child,), (token,) = children, tokens
            allowed = self.config.max_run is None or run < self.config.max_run
            if target.greedy:
                best = target.best[node + 1]
                off = token != best
                stands = not off or (
                    allowed and account.allows(1.0) and approved()[child] and permitted(target, node + 1, token)
                )
                run = run + 1 if off else 0
                account.add(*((1.0, float("inf")) if off and stands else (0.0, 0.0)))
                return (0, token) if stands else (None, best)
            p_V = target.p_at(node + 1)
            q_V = None if isinstance(draft.law, PointMass) else draft.law.q_at(child)
            p, q = float(p_V[token]), 1.0 if q_V is None else float(q_V[token])
            if allowed and 0.0 < p < q and account.allows((price := price_of(p, q))[0]) and approved()[child]:
                account.add(*price)
                run = 0 if rng.bernoulli("accept", (ratio(p, q),))[0] else run + 1
                return 0, token
            run = 0
            account.add(0.0, 0.0)
            return exactly(p_V, q_V, tokens, rng)

        return descend(draft, target, rng, account, step)

    def finish(self, verdict: Verdict, guess: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """The exact test: the target has not read the guess, so there is no state of it to judge."""
        return guessed.finish(RecursiveVerifier.decide, verdict, guess, target, rng)

    def approved(self, draft: Draft, target: Laws) -> list[bool]:
        """Return for every node whether the judge accepts its token."""
        if self.needs.last_state is None:
            return [False] * len(draft)
        never = self.guarded | target.stop_ids
        fine: list[float] = self.head.judge(target.hidden_MD[1:]).tolist()
        return [
            each > self.threshold and token not in never for each, token in zip(fine, draft.tree.tokens, strict=True)
        ]
