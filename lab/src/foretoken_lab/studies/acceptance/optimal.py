"""The best acceptance rate that any rule can have at a position with n drafts: the optimum of the transport problem.

A rule couples the draft tuple with the emitted token; the target's distribution p and the distribution of the tuple are
given. The dual of that linear program is a choice of tokens:

    alpha* = 1 + min over sets H of  P(H) - Q(H),    P(H) = sum of p over H,  Q(H) = Pr(every draft is in H),

and for draws from q, with or without replacement, some prefix of the order "p/q ascending" is a best H.

Paper:   Hu et al. 2025, arXiv:2502.18779 (the subset problem, the prefix theorem, greedy drafts); Sun et al. 2023,
         arXiv:2310.15141 (the transport problem).
Differs: Q without replacement is computed by quadrature (race.py), and only at prefixes that can still matter: along
         the order P and Q are both convex in q(H), so between two computed prefixes Q lies below its chord, and
         P - chord bounds P - Q from below. The value found is within 1e-8 of the minimum, by that bound.
Float64: everything. It matters where H holds nearly all of q, as it does when p is near q: P and Q are then both near
         1 and their difference is the result; 1 - q(H) is added up from outside for the same reason.

Letters: B positions, V vocabulary, K prefixes (sizes 0 to V).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, nearest
from foretoken_lab.studies.acceptance.inputs import check_laws, check_num_drafts
from foretoken_lab.studies.acceptance.race import MAX_DRAFTS, Race, num_heavy

Array = Any  # numpy's stubs are not read

_GAP = 1e-8  # the search ends when no prefix can be better by more
_FIRST_POINTS = 24
_POINTS = 24  # prefixes to compute in one round, about
_CHUNK = 128  # prefixes that are computed together, at most
_RADIX_FROM = 4096  # tokens above which a radix sort is faster than a comparison sort


def optimal_acceptance(p_BV: Tensor, q_BV: Tensor, num_drafts: int, scheme: str) -> Tensor:
    """The acceptance rate of the best rule for a drafting scheme, at every position.

    Args:
        p_BV: the target's processed distributions, [B, V] or [V], any float dtype; rows are computed in float64 on the
            CPU.
        q_BV: the draft's processed distributions, same shape.
        num_drafts: n, from 1 to V. Where fewer tokens have q > 0, a draft without repeats has only that many.
        scheme: "iid" (independent draws), "without_replacement" (successive draws), "greedy" (the n - 1 most probable
            tokens and one draw from the others), "topk" (the n most probable tokens), "hub" (SpecHub's pair, n = 2: its
            unordered pairs have the distribution of greedy's). Ties among the most probable go to the lower token id.
    Returns:
        float64 [B], or a scalar for [V], in [0, 1]; on the CPU.
    Raises:
        ConfigError: rows that are no probability distributions, shapes that differ, n out of range, an unknown scheme.
    """
    check_scheme(scheme, num_drafts)
    single = isinstance(p_BV, Tensor) and p_BV.dim() == 1
    p_BV, q_BV = check_laws(p_BV, q_BV)
    check_num_drafts(num_drafts, p_BV.shape[-1])
    found = [SCHEMES[scheme](p_V, q_V, num_drafts) for p_V, q_V in zip(p_BV.numpy(), q_BV.numpy(), strict=True)]
    alpha_B = torch.tensor(found, dtype=torch.float64).clamp_(0.0, 1.0)
    return alpha_B[0] if single else alpha_B


def check_scheme(scheme: str, num_drafts: int) -> None:
    """Refuse a scheme that is unknown, or cannot have so many drafts.

    Raises:
        ConfigError: with the nearest name, or the number that fits.
    """
    if scheme not in SCHEMES:
        raise ConfigError(f"unknown scheme '{scheme}': {nearest(str(scheme), SCHEMES)}")
    if scheme == "hub" and num_drafts != 2:
        raise ConfigError(f"scheme 'hub' with num_drafts={num_drafts}: a hub is a pair, use 2, or scheme 'greedy'")


def _iid(p_V: Array, q_V: Array, n: int) -> float:
    p_V, q_V = _ascending(p_V, q_V)
    s_V = np.cumsum(q_V)
    return 1.0 + min(0.0, float((np.cumsum(p_V) - s_V**n).min()))


def _without_replacement(p_V: Array, q_V: Array, n: int) -> float:
    p_V, q_V = _ascending(p_V, q_V)
    if n >= len(q_V):  # every token of the support is drafted
        return float(p_V.sum())
    p_K = np.concatenate(([0.0], np.cumsum(p_V)))
    if n == 1:
        return 1.0 + float((p_K[1:] - np.cumsum(q_V)).min(initial=0.0))
    if n == 2:
        return 1.0 + float((p_K - _pair_chance(q_V)).min())
    if n > MAX_DRAFTS and len(q_V) > num_heavy(n):
        raise ConfigError(
            f"num_drafts={n} without replacement from {len(q_V)} tokens is not supported: ask for {MAX_DRAFTS} at most"
        )
    race = Race(q_V, n)
    return 1.0 + _least(p_K, p_V / q_V, race.lam_K, race.chance)


def _pair_chance(q_V: Array) -> Array:
    """float64 [K]: Q of every prefix for two draws without replacement, sum over i of q_i (q(H) - q_i) / (1 - q_i).

    The heaviest token stands apart: its 1 - q may be far below rounding error, all others' is at least 1/2.
    """
    top = int(q_V.argmax())
    others_V = q_V.copy()
    others_V[top] = 0.0
    s_K = np.concatenate(([0.0], np.cumsum(others_V)))
    odds_V = others_V / (1.0 - others_V)
    first_K = np.concatenate(([0.0], np.cumsum(odds_V)))
    second_K = np.concatenate(([0.0], np.cumsum(others_V * odds_V)))
    has_K = np.arange(len(s_K)) > top
    pair_K = (s_K + np.where(has_K, q_V[top], 0.0)) * first_K - second_K
    pair_K += np.where(has_K, q_V[top] * s_K / s_K[-1], 0.0)
    return pair_K


def _greedy(p_V: Array, q_V: Array, n: int) -> float:
    top = most_probable(q_V, n - 1)
    rest_V = q_V.copy()
    rest_V[top] = 0.0
    mass = rest_V.sum()
    if mass > 0.0:
        rest_V /= mass
    return float(p_V[top].sum() + np.minimum(p_V, rest_V).sum())


def _topk(p_V: Array, q_V: Array, n: int) -> float:
    return float(p_V[most_probable(q_V, n)].sum())


SCHEMES: dict[str, Callable[[Array, Array, int], float]] = {
    "iid": _iid,
    "without_replacement": _without_replacement,
    "greedy": _greedy,
    "topk": _topk,
    "hub": _greedy,
}


def most_probable(q_V: Array, count: int) -> Array:
    """Ids of the ``count`` most probable tokens with q > 0, ties to the lower id; fewer if q has no more."""
    if count == 0:
        return np.zeros(0, dtype=np.int64)
    least = np.partition(q_V, len(q_V) - count)[len(q_V) - count]
    near = np.flatnonzero(q_V >= least)  # ascending ids, ties at the edge included
    found = near[np.argsort(-q_V[near], kind="stable")][:count]
    return found[q_V[found] > 0.0]


def _ascending(p_V: Array, q_V: Array) -> tuple[Array, Array]:
    """p and q in the order of p/q ascending; tokens with q = 0 are left out: they never help."""
    if float(q_V.min()) <= 0.0:
        support = q_V > 0.0
        p_V, q_V = p_V[support], q_V[support]
    with np.errstate(over="ignore"):
        ratio_V = p_V / q_V
    if len(ratio_V) < _RADIX_FROM:
        order = np.argsort(ratio_V, kind="stable")
    else:
        # positive floats are in the order of their bits, of which two passes sort 32. Ratios that are equal in float32
        # may come in any order: that moves P - Q by less than 6e-8 of the P of those tokens
        with np.errstate(over="ignore", under="ignore"):
            bits_V = ratio_V.astype(np.float32).view(np.uint32)
        order = np.argsort(bits_V.astype(np.uint16), kind="stable")  # the low half
        high_V = (bits_V >> np.uint32(16)).astype(np.uint16)
        order = order[np.argsort(high_V[order], kind="stable")]
    return p_V[order], q_V[order]


def _least(p_K: Array, ratio_V: Array, lam_K: Array, chance: Callable[[Array], Array]) -> float:
    """min over prefixes of P - Q, to _GAP, from as few values of Q as possible.

    Args:
        p_K: P of every prefix, convex in q(H).
        ratio_V: p/q of the tokens, ascending.
        lam_K: 1 - q(H), descending.
        chance: Q of the prefixes of given sizes, convex in q(H).
    """
    last = len(p_K) - 1
    # as many again where little is outside: there Q is steepest
    wanted = np.concatenate((np.linspace(0.0, 1.0, _FIRST_POINTS), np.geomspace(1e-4, 0.1, _FIRST_POINTS // 3)))
    sizes = np.unique(np.concatenate(([0, last], np.clip(np.searchsorted(-lam_K, -wanted), 0, last))))
    chances = chance(sizes)
    while True:
        best = float((p_K[sizes] - chances).min())
        fresh = _candidates(p_K, ratio_V, lam_K, sizes, chances, best - _GAP)
        if not len(fresh):
            return best
        values = np.concatenate([chance(fresh[i : i + _CHUNK]) for i in range(0, len(fresh), _CHUNK)])
        sizes, chances = np.concatenate((sizes, fresh)), np.concatenate((chances, values))
        order = np.argsort(sizes)
        sizes, chances = sizes[order], chances[order]


def _candidates(p_K: Array, ratio_V: Array, lam_K: Array, sizes: Array, chances: Array, limit: float) -> Array:
    """Prefixes to compute next: inside every interval with a lower bound still below the limit; empty if none is."""
    left = np.flatnonzero(np.diff(sizes) > 1)
    low, high = sizes[left], sizes[left + 1]
    width = lam_K[low] - lam_K[high]
    slope = (chances[left + 1] - chances[left]) / np.maximum(width, 1e-300)
    gap_low, gap_high = p_K[low] - chances[left], p_K[high] - chances[left + 1]
    # P lies above its tangents at both ends; the bound is where they meet, measured from the chord of Q
    fall, rise = slope - ratio_V[low], ratio_V[high - 1] - slope
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        meet = np.clip((rise * width + gap_low - gap_high) / (fall + rise), 0.0, width)
        bound = gap_low - fall * meet
    bound = np.where(fall <= 0.0, gap_low, np.where(rise <= 0.0, gap_high, bound))
    open_ = np.flatnonzero(~(bound >= limit))
    pieces = max(2, _POINTS // max(1, len(open_)))
    fresh = []
    for a, b, w, c, s in zip(low[open_], high[open_], width[open_], chances[left][open_], slope[open_], strict=True):
        # P itself, instead of its tangents, settles most of them, and names the prefix that looks best
        lower = p_K[a + 1 : b] - (c + s * (lam_K[a] - lam_K[a + 1 : b]))
        at = int(lower.argmin())
        if lower[at] < limit:
            even = np.searchsorted(-lam_K[a + 1 : b], -(lam_K[a] - w * np.arange(1, pieces) / pieces))
            fresh.append(np.append(np.minimum(even, b - a - 2), at) + a + 1)
    return np.unique(np.concatenate(fresh)) if fresh else np.zeros(0, dtype=np.int64)
