"""Optimal transport: the best coupling of draft and output that there is, by linear programming for small supports."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.core.draft import HubPair, Law, Sampled, TopThenSampled, WithoutReplacement
from foretoken.core.errors import ConfigError
from foretoken.core.randomness import Streams
from foretoken.verifiers.greedy_draft import GreedyDraftVerifier
from foretoken.verifiers.kseq import KSeqVerifier
from foretoken.verifiers.recursive import RecursiveVerifier
from foretoken.verifiers.spechub import SpecHubVerifier
from foretoken.verifiers.walk import Decide, NodeRule, Pick, Siblings

MAX_VARIABLES = 3000  # of one linear program

Array = np.ndarray[Any, np.dtype[Any]]

# What decides where there is no program: for the first two kinds because it would be too large, for the others because
# these rules are the optimum of their kind in closed form.
_OTHERWISE: dict[type[Law], Decide] = {
    Sampled: KSeqVerifier.decide,
    WithoutReplacement: RecursiveVerifier.decide,
    TopThenSampled: GreedyDraftVerifier.decide,
    HubPair: SpecHubVerifier.decide,
}


class TransportVerifier(NodeRule):
    """The upper bound itself, where the draft's distribution has few tokens (top-k, top-p, min-p).

    At each node accept child i of the drafted set D with chance S(i, D) / Pr(D), else draw from the rest.

        S maximises  sum of S(i, D)  over sets D and their members i, with
        sum_i S(i, D) <= Pr(the draft's set is D),  sum_D S(i, D) <= p(i),  S >= 0
        all refused: extra ~ p(i) - sum_D S(i, D).  A node without children: extra ~ p, the bonus.

    Paper:   the optimal-transport problem of Sun et al. 2023, arXiv:2310.15141, in the relaxed form of
        arXiv:2502.18779: only which tokens were drafted matters, not their order, and only the accepted mass is
        solved for.
    Exact:   yes, whatever the solver's accuracy: S is scaled into its bounds, and the residual is computed from S.
        Checked by tests/statistical/test_exactness.py.
    Differs: where the program would have more than MAX_VARIABLES unknowns, the node is decided by `kseq`
        (independent draws) or `recursive` (without replacement); that is exact too, since it depends on q's
        support and the number of children alone. Greedy drafts and hub pairs need no program: `greedy_draft` and
        `spechub` are their optimum.
    """

    name = "transport"
    laws: tuple[type[Law], ...] = (Sampled, WithoutReplacement, TopThenSampled, HubPair)

    def __init__(self) -> None:
        try:
            import scipy.optimize  # noqa: F401
        except ImportError:
            raise ConfigError(
                "verifier='transport' solves linear programs with scipy: pip install 'foretoken[optimal]'"
            ) from None

    @staticmethod
    def decide(
        kind: type[Law], p_BV: Tensor, q_BV: Tensor | None, tokens: Sequence[Siblings], rngs: Sequence[Streams]
    ) -> list[Pick]:
        """From ``rngs``: one draw of purpose accept per node, then at most one of purpose residual.

        Programs are solved one by one.
        """
        assert q_BV is not None
        picks: list[Pick] = [(None, -1)] * len(tokens)
        others = []
        for row, (its, rng) in enumerate(zip(tokens, rngs, strict=True)):
            size = int(torch.count_nonzero(q_BV[row]))
            if kind not in (Sampled, WithoutReplacement) or num_variables(kind, size, len(its)) > MAX_VARIABLES:
                others.append(row)
                continue
            support = q_BV[row].nonzero()[:, 0]
            p_V = p_BV[row].double()
            p_K, q_K = p_V[support].cpu().numpy(), q_BV[row, support].double().cpu().numpy()
            coupling = solve(p_K.tobytes(), q_K.tobytes(), len(its), kind is WithoutReplacement)
            places = {token: place for place, token in enumerate(support.tolist())}
            drafted = tuple(sorted({places[token] for token in its}))
            accepted = coupling.accepted[drafted]
            refused = max(coupling.mass[drafted] - sum(accepted), 0.0)
            choice = rng.categorical("accept", torch.tensor([*accepted, refused], dtype=torch.float64))
            if choice < len(drafted):
                token = int(support[drafted[choice]])
                picks[row] = (its.index(token), token)
                continue
            left_V = p_V.index_copy(0, support, torch.from_numpy(coupling.left_K).to(support.device))
            picks[row] = (None, rng.categorical("residual", left_V if float(left_V.sum()) > 0.0 else p_V))
        if others:
            found = _OTHERWISE[kind](
                kind, p_BV[others], q_BV[others], [tokens[row] for row in others], [rngs[row] for row in others]
            )
            for row, pick in zip(others, found, strict=True):
                picks[row] = pick
        return picks


@dataclass(frozen=True, slots=True)
class Coupling:
    """A solved program over the K tokens of q's support; sets are sorted tuples of their places.

    Attributes:
        mass: Pr(D) of every set.
        accepted: S(i, D) for the members i of every set, in order.
        left_K: float64, p(i) - sum_D S(i, D).
    """

    mass: dict[tuple[int, ...], float]
    accepted: dict[tuple[int, ...], tuple[float, ...]]
    left_K: Array

    @property
    def acceptance(self) -> float:
        """The acceptance rate, the largest there is."""
        return sum(map(sum, self.accepted.values()))


def num_variables(kind: type[Law], support: int, count: int) -> int:
    """Unknowns of the program: one per set that can be drafted and member of it."""
    if kind is WithoutReplacement:
        return count * math.comb(support, count)
    return sum(size * math.comb(support, size) for size in range(1, min(count, support) + 1))


@lru_cache(maxsize=64)
def solve(p_bytes: bytes, q_bytes: bytes, count: int, distinct: bool) -> Coupling:
    """The best coupling.

    Args:
        p_bytes, q_bytes: float64 [K] on q's support (bytes, so that they can be remembered).
        count: number of children.
        distinct: drawn without replacement.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    p_K, q_K = np.frombuffer(p_bytes), np.frombuffer(q_bytes)
    mass = set_law(q_K / q_K.sum(), count, distinct=distinct)
    sets = list(mass)
    member = np.concatenate([np.asarray(each) for each in sets])
    owner: Array = np.repeat(np.arange(len(sets)), [len(each) for each in sets])
    size = len(member)
    bounds = np.concatenate([np.fromiter(mass.values(), float), p_K])
    rows = np.concatenate([owner, len(sets) + member])
    matrix = csr_matrix((np.ones(2 * size), (rows, np.tile(np.arange(size), 2))), shape=(len(bounds), size))
    result = linprog(-np.ones(size), A_ub=matrix, b_ub=bounds, bounds=(0, None), method="highs")
    if result.x is None:
        raise RuntimeError(f"the linear program of {size} unknowns was not solved: {result.message}")
    s = np.maximum(result.x, 0.0)
    for of, limit in ((owner, bounds[: len(sets)]), (member, p_K)):  # the solver may overstep a bound by its tolerance
        used = np.bincount(of, s, minlength=len(limit))
        s *= np.where(used > limit, limit / np.where(used > 0.0, used, 1.0), 1.0)[of]
    left_K = np.maximum(p_K - np.bincount(member, s, minlength=len(p_K)), 0.0)
    accepted = {
        each: tuple(part.tolist())
        for each, part in zip(sets, np.split(s, np.flatnonzero(np.diff(owner)) + 1), strict=True)
    }
    return Coupling(mass, accepted, left_K)


def set_law(q_K: Array, count: int, *, distinct: bool) -> dict[tuple[int, ...], float]:
    """Pr(the drafted tokens are exactly this set), for ``count`` draws from q with or without replacement.

    Both are built up member by member from positive terms only: where one token has nearly everything, a difference
    from 1 would have no digits left.
    """
    found: dict[tuple[int, ...], float] = {}
    for size in [count] if distinct else range(1, min(count, len(q_K)) + 1):
        sets = np.array(list(itertools.combinations(range(len(q_K)), size)))
        law = _drawn_once(q_K, sets) if distinct else _drawn_often(q_K[sets], count)
        found.update(zip(map(tuple, sets.tolist()), law.tolist(), strict=True))
    return found


def _drawn_once(q_K: Array, sets: Array) -> Array:
    """Chance of each set when its members are drawn without replacement, whatever the order."""
    parts, size = q_K[sets], sets.shape[1]
    if size == 1:
        return parts[:, 0]
    rest = np.repeat(q_K[None], len(sets), 0)
    np.put_along_axis(rest, sets, 0.0, 1)
    outside = rest.sum(1)
    # drawn[mask]: the chance that the members in the mask come first; left: q of the tokens outside of the mask
    drawn = [np.ones(len(sets))]
    left = [outside + parts[:, [i for i in range(size) if not mask >> i & 1]].sum(1) for mask in range(2**size - 1)]
    for mask in range(1, 2**size):
        last = [i for i in range(size) if mask >> i & 1]
        drawn.append(sum((drawn[mask ^ 1 << i] * parts[:, i] / left[mask ^ 1 << i] for i in last), np.zeros(len(sets))))
    return drawn[-1]


def _drawn_often(parts: Array, count: int) -> Array:
    """Chance of each set when every member comes at least once in ``count`` draws with replacement."""
    # covered[n]: the chance that n draws are of the members so far, each at least once
    covered = [np.ones(len(parts)), *[np.zeros(len(parts))] * count]
    for q in parts.T:
        covered = [
            sum((math.comb(n, k) * q**k * covered[n - k] for k in range(1, n + 1)), np.zeros(len(parts)))
            for n in range(count + 1)
        ]
    return covered[count]
