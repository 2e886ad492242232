"""Recursive rejection over a tree: try the children of a node in turn, each against what its elders left over."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.draft import Law, PointMass, Sampled, WithoutReplacement
from foretoken.core.randomness import Streams, categorical_rows
from foretoken.core.residual import ratio, residual_without
from foretoken.verifiers.walk import NodeRule, Pick, Siblings, at_tokens


class RecursiveVerifier(NodeRule):
    """Multi-round speculative sampling, from the root down.

    At each node try its children in order with chance min(1, p/q); p becomes (p - q)+ after each refusal.

    From p_1 = p at the node, for its children x_1..x_n in drafting order:

        accept x_j with chance min(1, p_j(x_j) / q_j(x_j)) and go down to it;
        else p_{j+1} = normalised (p_j - q_j)+, and
            independent draws:    q_{j+1} = q            (a repeat is tried again: skipping it is a bias)
            without replacement:  q_{j+1} = normalised q_j without x_j
            point masses:         q_j = 1 at x_j, so p_{j+1} = normalised p_j without x_j
        all refused: extra ~ p_{n+1}.  A node without children: extra ~ p, the bonus.

    Paper:   Miao et al. 2023, arXiv:2305.09781, multi-step speculative sampling (independent draws); Jeon et al.
        2024, arXiv:2402.14160, Algorithm 1 (without replacement).
    Exact:   yes, whenever the children were drawn by the distribution that the draft declares. Checked by
        tests/statistical/test_exactness.py.
    Differs: on a chain it is the ratio rule. At temperature 0 it is the walk along the argmax. Where rounding
        leaves no mass in q or in the residual, the remaining children are not tried and the extra token comes
        from the last residual that had mass.
    """

    name = "recursive"
    laws: tuple[type[Law], ...] = (PointMass, Sampled, WithoutReplacement)

    @staticmethod
    def decide(
        kind: type[Law], p_BV: Tensor, q_BV: Tensor | None, tokens: Sequence[Siblings], rngs: Sequence[Streams]
    ) -> list[Pick]:
        """From ``rngs``: one decision of purpose accept per tried child, and at the end at most one of residual."""
        if q_BV is None:
            return [_try_points(p_V, its, rng) for p_V, its, rng in zip(p_BV, tokens, rngs, strict=True)]
        return _try_draws(p_BV, q_BV, tokens, rngs, distinct=kind is WithoutReplacement)


def _try_points(p_V: Tensor, tokens: Siblings, rng: Streams) -> Pick:
    """One pass over the vocabulary if all are refused, none before."""
    refused: list[int] = []
    mass = 1.0
    for number, token in enumerate(tokens):
        chance = 0.0 if token in refused else float(p_V[token])
        # mass <= 0 only by rounding: then the elder siblings held everything, and this one has the rest for certain
        if rng.bernoulli("accept", (chance / mass if mass > 0.0 else float(chance > 0.0),))[0]:
            return number, token
        refused.append(token)
        mass -= chance
    return None, rng.categorical("residual", residual_without(p_V, refused))


def _try_draws(
    p_BV: Tensor, q_BV: Tensor, tokens: Sequence[Siblings], rngs: Sequence[Streams], *, distinct: bool
) -> list[Pick]:
    """One round per sibling; the rows of requests that are still open shrink from round to round."""
    picks: list[Pick] = [(None, -1)] * len(tokens)
    rows = list(range(len(tokens)))  # the request of each row
    ends = [len(its) for its in tokens]  # siblings that are tried of each request, at most
    for turn in range(max(ends) + 1):
        ended = [row for row, number in enumerate(rows) if turn >= ends[number]]
        if ended:
            extras = categorical_rows([rngs[rows[row]] for row in ended], "residual", _take(p_BV, ended))
            for row, extra in zip(ended, extras, strict=True):
                picks[rows[row]] = (None, extra)
            tried = [row for row, number in enumerate(rows) if turn < ends[number]]
            p_BV, q_BV, rows = _take(p_BV, tried), _take(q_BV, tried), [rows[row] for row in tried]
        if not rows:
            break
        ids = [tokens[number][turn] for number in rows]
        p_B, q_B = at_tokens(p_BV, ids), at_tokens(q_BV, ids)
        stands = [rngs[n].bernoulli("accept", (ratio(p, q),))[0] for n, p, q in zip(rows, p_B, q_B, strict=True)]
        for number, token, stood in zip(rows, ids, stands, strict=True):
            if stood:
                picks[number] = (turn, token)
        refused = [row for row, stood in enumerate(stands) if not stood]
        if not refused:
            break
        p_BV, q_BV, rows = _take(p_BV, refused), _take(q_BV, refused), [rows[row] for row in refused]
        p_BV, left = _normalised((p_BV - q_BV).clamp_(min=0.0), p_BV)
        if distinct:
            ids_B1 = torch.tensor([[ids[row]] for row in refused], device=q_BV.device)
            q_BV, undrawn = _normalised(q_BV.scatter(1, ids_B1, 0.0), q_BV)
            left = [a and b for a, b in zip(left, undrawn, strict=True)]
        for number, good in zip(rows, left, strict=True):
            if not good:
                ends[number] = turn + 1
    return picks


def _take(rows_BV: Tensor, wanted: Sequence[int]) -> Tensor:
    """Some rows in order; all of them are not copied."""
    return rows_BV if len(wanted) == rows_BV.shape[0] else rows_BV[list(wanted)]


def _normalised(weights_BV: Tensor, otherwise_BV: Tensor) -> tuple[Tensor, list[bool]]:
    """Rows divided by their sums, and whether each had any mass; a row without takes its other value."""
    mass_B1 = weights_BV.sum(-1, keepdim=True)
    good = [mass > 0.0 for mass in mass_B1[:, 0].tolist()]
    weights_BV.div_(mass_B1)  # NaN without mass
    return weights_BV if all(good) else torch.where(mass_B1 > 0.0, weights_BV, otherwise_BV), good
