"""The naive multi-draft rule: draw from the target, and see whether a child carries the drawn token."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foretoken.core.draft import Coupled, Draft, HubPair, Law, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.needs import Offers
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams, categorical_rows
from foretoken.core.verdict import Verdict
from foretoken.verifiers.walk import Pick, Siblings, walk


class NaiveVerifier(Verifier):
    """Valid for every draft, and the optimum for deterministic ones; drawn ones deserve a rule that knows their
    distribution.
    """

    name = "naive"
    offers = Offers(batches=True)
    promise = "same distribution"
    laws: tuple[type[Law], ...] = (PointMass, Coupled, Sampled, WithoutReplacement, TopThenSampled, HubPair)
    trees = True

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """At each node draw y ~ p; go down to the first child that carries y, else y is the extra token.

        Paper:   Miao et al. 2023, arXiv:2305.09781, the "naive sampling" that their section 4.3 compares with.
        Exact:   yes, whatever the draft and its distribution: y never depends on the draft. Checked by
            tests/statistical/test_exactness.py.
        Differs: nothing. Its acceptance is the target's mass on the drafted tokens.

        Args:
            draft: tree of N nodes; its distribution is not looked at.
            target: N + 1 rows; only rows on the walked path are processed.
            rng: one draw of purpose residual per inner node on the path, one of purpose bonus at a leaf.
        Returns:
            Verdict with 0..N accepted nodes and exactly one extra token.
        """
        return self.verify_batch([draft], [target], [rng])[0]

    def verify_batch(self, drafts: Sequence[Draft], targets: Sequence[Laws], rngs: Sequence[Streams]) -> list[Verdict]:
        """:meth:`verify` for many requests abreast."""
        return walk(self.name, self.laws, decide, drafts, targets, rngs)


def decide(
    kind: type[Law], p_BV: Tensor, q_BV: Tensor | None, tokens: Sequence[Siblings], rngs: Sequence[Streams]
) -> list[Pick]:
    """One pick per request, see ``walk``."""
    drawn = categorical_rows(rngs, "residual", p_BV)
    return [(its.index(token) if token in its else None, token) for token, its in zip(drawn, tokens, strict=True)]
