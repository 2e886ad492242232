"""The optimal rule for greedy draft sampling: fixed favourites, and one draw that is verified as if it were alone."""

from collections.abc import Sequence

from torch import Tensor

from foretoken.core.draft import Law, TopThenSampled
from foretoken.core.randomness import Streams, categorical_rows
from foretoken.core.residual import ratio
from foretoken.verifiers.walk import NodeRule, Pick, Siblings, at_tokens


class GreedyDraftVerifier(NodeRule):
    """Reaches the optimal-transport bound of its drafting scheme.

    At each node accept the drawn child with chance min(1, p / q'), else draw y ~ (p - q')+ and look for it.

    With Top the elder children and q' = q without Top, normalised: the youngest child x was drawn from q'. Refused,
    y ~ (p - q')+ goes down to the child of Top that carries it, else it is the extra token. One child: the ratio
    rule. A node without children: extra ~ p, the bonus.

    Acceptance P(Top) + sum over other tokens of min(p, q'), which no rule can exceed: a token of Top is accepted
    with probability p at most, any other with min(p, Pr(it was drafted)) at most.

    Paper:   "Towards optimal multi-draft speculative decoding", arXiv:2502.18779, greedy draft sampling.
    Exact:   yes: it is speculative sampling of one draw from q'. Checked by tests/statistical/test_exactness.py.
    Differs: Top is what the draft says (the elder children), not computed again: ties cannot fall otherwise.
    """

    name = "greedy_draft"
    laws: tuple[type[Law], ...] = (TopThenSampled,)

    @staticmethod
    def decide(
        kind: type[Law], p_BV: Tensor, q_BV: Tensor | None, tokens: Sequence[Siblings], rngs: Sequence[Streams]
    ) -> list[Pick]:
        """From ``rngs``: one decision of purpose accept per node, then at most one draw of purpose residual."""
        assert q_BV is not None
        rest_BV = q_BV.clone()
        for row, its in enumerate(tokens):
            if len(its) > 1:
                rest_BV[row, list(its[:-1])] = 0.0
        mass_B1 = rest_BV.sum(-1, keepdim=True)
        rest_BV.div_(mass_B1.masked_fill_(mass_B1 <= 0.0, 1.0))
        last = [its[-1] for its in tokens]
        chances = [ratio(p, q) for p, q in zip(at_tokens(p_BV, last), at_tokens(rest_BV, last), strict=True)]
        stands = [rng.bernoulli("accept", (chance,))[0] for rng, chance in zip(rngs, chances, strict=True)]
        picks: list[Pick] = [(len(its) - 1, its[-1]) for its in tokens]
        refused = [row for row, stood in enumerate(stands) if not stood]
        if refused:
            left_BV = (p_BV[refused] - rest_BV[refused]).clamp_(min=0.0)
            left_BV = left_BV.where(left_BV.sum(-1, keepdim=True) > 0.0, p_BV[refused])
            drawn = categorical_rows([rngs[row] for row in refused], "residual", left_BV)
            for row, token in zip(refused, drawn, strict=True):
                elder = tokens[row][:-1]
                picks[row] = (elder.index(token) if token in elder else None, token)
        return picks
