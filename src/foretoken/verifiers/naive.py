"""The naive multi-draft rule: draw from the target, and see whether a child carries the drawn token."""

from collections.abc import Sequence

from torch import Tensor

from foretoken.core.draft import Coupled, HubPair, Law, PointMass, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.randomness import Streams, categorical_rows
from foretoken.verifiers.walk import NodeRule, Pick, Siblings


class NaiveVerifier(NodeRule):
    """Valid for every draft, and the optimum for deterministic ones; drawn ones deserve a rule that knows their
    distribution.

    At each node draw y ~ p; go down to the first child that carries y, else y is the extra token.

    Paper:   Miao et al. 2023, arXiv:2305.09781, the "naive sampling" that their section 4.3 compares with.
    Exact:   yes, whatever the draft and its distribution: y never depends on the draft. Checked by
        tests/statistical/test_exactness.py.
    Differs: nothing. Its acceptance is the target's mass on the drafted tokens.
    """

    name = "naive"
    laws: tuple[type[Law], ...] = (PointMass, Coupled, Sampled, WithoutReplacement, TopThenSampled, HubPair)

    @staticmethod
    def decide(
        kind: type[Law], p_BV: Tensor, q_BV: Tensor | None, tokens: Sequence[Siblings], rngs: Sequence[Streams]
    ) -> list[Pick]:
        """From ``rngs``: one draw of purpose residual per node."""
        drawn = categorical_rows(rngs, "residual", p_BV)
        return [(its.index(token) if token in its else None, token) for token, its in zip(drawn, tokens, strict=True)]
