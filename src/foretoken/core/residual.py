"""The arithmetic that the rejection rules share: p/q, and the rest of the target's distribution after a rejection.

Nothing here normalises: a draw needs weights only. Rounding can leave no mass at all where the draft's distribution
equals the target's; a rejection then had a chance near zero, and the target's own distribution is the answer that does
no harm.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from foretoken.core.draft import Tabulated


def ratio(p: float, q: float) -> float:
    """p/q: 0 where p = 0, even if q = 0 (a token that the target cannot emit never stands); else inf where q = 0."""
    if p == 0.0:
        return 0.0
    return p / q if q > 0.0 else math.inf


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """(p - q)+ as weights, [V]; p itself if rounding leaves nothing. A token with p = 0 never gets weight."""
    return _or_else((p_V - q_V).clamp_(min=0.0), p_V)


def residual_at(p_V: Tensor, law: Tabulated, node: int) -> Tensor:
    """:func:`residual` of the row of q that a node was drawn from; only its columns are subtracted."""
    return _or_else(excess(p_V, law, node), p_V)


def excess(weights_V: Tensor, law: Tabulated, node: int) -> Tensor:
    """(weights - q)+, [V], with the row of q that a node was drawn from; outside of its columns q is 0.

    Args:
        weights_V: not negative; not written to.
    """
    q_C = law.q_KV[law.row_of[node]]
    if law.columns is None:
        return (weights_V - q_C).clamp_(min=0.0)
    ids_C = law.columns.ids_C
    left_V = weights_V.clone()
    left_V[ids_C] = (weights_V[ids_C] - q_C).clamp_(min=0.0)
    return left_V


def residual_without(p_V: Tensor, tokens: Sequence[int]) -> Tensor:
    """p with the refused tokens zeroed (the residual of point masses), [V]; p itself if rounding leaves nothing."""
    left_V = p_V.clone()
    for token in tokens:
        left_V[token] = 0.0
    return _or_else(left_V, p_V)


def _or_else(left_V: Tensor, p_V: Tensor) -> Tensor:
    return left_V if float(left_V.sum()) > 0.0 else p_V
