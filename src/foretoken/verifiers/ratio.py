"""The original rule: accept a chain token by token with probability min(1, p/q)."""

from __future__ import annotations

import torch

from foretoken.core.draft import Draft, Law, PointMass, Sampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.residual import ratio, residual, residual_without
from foretoken.core.verdict import Verdict, follow


class RatioVerifier:
    """Token-wise speculative sampling."""

    name = "ratio"
    promise = "same law"
    laws: tuple[type[Law], ...] = (PointMass, Sampled, WithoutReplacement)
    trees = False

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Accept with probability min(1, p/q); on the first miss draw from the positive part of p - q.

        Paper:   Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1 (same letters: p target, q draft).
        Exact:   yes, whenever the tokens were sampled from q. Checked by tests/statistical/test_exactness.py.
        Differs: a point mass has q(x) = 1 at the proposed token, so the chance is p(x) and the residual is p without
            x. On a chain, draws without replacement have the law of plain draws. At temperature 0 p is one-hot and
            the rule is the walk along the argmax, which needs no arithmetic. Where rounding leaves no residual the
            extra token comes from p.

        Args:
            draft: chain of N tokens; q_KV float32 (already processed) or point mass.
            target: N + 1 rows; row i scores draft token i, row N the bonus.
            rng: N decisions of purpose accept, then one draw of purpose residual or bonus.
        Returns:
            Verdict with 0..N accepted nodes and exactly one extra token.
        Raises:
            ValueError: the tree branches.
        """
        tree, law = draft.tree, draft.law
        if target.greedy:
            return follow(tree, target.best)
        if not tree.is_chain:
            raise ValueError("the ratio rule verifies chains: use 'recursive' or 'match' for a branching tree")
        num = len(tree)
        if num == 0:
            return Verdict((), rng.categorical("bonus", target.p_at(0)))
        p_MV = target.p_MV
        tokens_N1 = tree.tokens_N.to(p_MV.device)[:, None]
        chances: list[float] = p_MV[:num].gather(1, tokens_N1)[:, 0].tolist()
        if not isinstance(law, PointMass):
            rows_N = torch.tensor(law.row_of, device=law.q_KV.device)
            q_N = law.q_KV[rows_N, tokens_N1[:, 0].to(law.q_KV.device)].tolist()
            chances = [ratio(p, q) for p, q in zip(chances, q_N, strict=True)]
        stands = rng.bernoulli("accept", chances)
        if all(stands):
            return Verdict(tuple(range(num)), rng.categorical("bonus", p_MV[num]))
        miss = stands.index(False)
        if isinstance(law, PointMass):
            weights_V = residual_without(p_MV[miss], tree.tokens[miss : miss + 1])
        else:
            weights_V = residual(p_MV[miss], law.q_at(miss))
        return Verdict(tuple(range(miss)), rng.categorical("residual", weights_V))
