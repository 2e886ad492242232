"""The original rule: accept a chain token by token with probability min(1, p/q)."""

from collections.abc import Sequence

from foretoken.core.distortion import Spent
from foretoken.core.draft import Draft, HubPair, Law, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.needs import Offers
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.residual import ratio, residual_at, residual_without
from foretoken.core.verdict import Verdict, follow
from foretoken.verifiers import guessed
from foretoken.verifiers.recursive import RecursiveVerifier
from foretoken.verifiers.walk import walk


class RatioVerifier(Verifier):
    """Token-wise speculative sampling."""

    name = "ratio"
    offers = Offers(batches=True)
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (PointMass, Sampled, WithoutReplacement, TopThenSampled, HubPair)
    trees = False

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Accept with probability min(1, p/q); on the first miss draw from the positive part of p - q.

        Paper:   Leviathan et al. 2023, arXiv:2211.17192, Algorithm 1 (same letters: p target, q draft).
        Exact:   yes, whenever the tokens were sampled from q. Checked by tests/statistical/test_exactness.py.
        Differs: a point mass has q(x) = 1 at the proposed token, so the chance is p(x) and the residual is p without
            x. On a chain, draws without replacement have the distribution of plain draws. At temperature 0 p is one-hot
            and the rule is the walk along the argmax, which needs no arithmetic. Where rounding leaves no residual the
            extra token comes from p.

        Args:
            draft: chain of N tokens; q_KV float32 (already processed) or point mass.
            target: N + 1 rows; row i scores draft token i, row N the bonus. Rows after a miss are not processed.
            rng: one decision of purpose accept per tried token, then one draw of purpose residual or bonus.
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
        for node, token in enumerate(tree.tokens):
            p_V = target.p_at(node)
            chance = float(p_V[token])
            if not isinstance(law, PointMass):
                chance = ratio(chance, law.chance(node, token))
            if not rng.bernoulli("accept", (chance,))[0]:
                left_V = residual_without(p_V, (token,)) if isinstance(law, PointMass) else residual_at(p_V, law, node)
                return Verdict(tuple(range(node)), rng.categorical("residual", left_V))
        return Verdict(tuple(range(len(tree))), rng.categorical("bonus", target.p_at(len(tree))))

    def verify_batch(self, drafts: Sequence[Draft], targets: Sequence[Laws], rngs: Sequence[Streams]) -> list[Verdict]:
        """:meth:`verify` for many requests abreast: on chains recursive rejection is this rule."""
        if not all(draft.tree.is_chain or target.greedy for draft, target in zip(drafts, targets, strict=True)):
            raise ValueError("the ratio rule verifies chains: use 'recursive' or 'match' for a branching tree")
        return walk(self.name, self.laws, RecursiveVerifier.decide, drafts, targets, rngs)

    def finish(self, verdict: Verdict, guess: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """One more test of the ratio rule; see verifiers/guessed.py."""
        return guessed.finish(RecursiveVerifier.decide, verdict, guess, target, rng)
