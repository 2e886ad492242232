"""How far the emitted text strays from the target: the meter of every lossy rule, defined once.

Every step visits the nodes of a path, and every visited node emits one token. Let p be the target's distribution there
(after the sampling filters; one-hot at temperature 0) and e the distribution by which the rule emits: for a draft token
with distribution q, chance a(x) of standing and distribution r of the token drawn after a rejection,

    e(x) = q(x) a(x) + (1 - sum q a) r(x)

    distortion = TV(e, p) = sum (e - p)+          divergence = KL(e, p) = sum e log(e / p), in nats

A verdict carries both per emitted token, a request their sums. At temperature 0 the distortion of a token is 1 if it is
not the target's argmax, else 0, and its divergence infinite or 0.

Exact:     both numbers at every token, computed from the p and q in hand; no sample enters them. Plain steps and bonus
           tokens add 0.
Charged:   three rules cannot know e. `judge`, and `sprinter` with a head that reads the state after a token, do not
           know what their heads would say of tokens that were not drafted (:func:`price_of`); `reflective` knows e
           given the draft only. Their charges are estimates with a mean over drafts of TV(e, p), or more. A budget
           limits the charges, and TV(e, p) only in this mean.
Estimated: the distance of whole texts. The path along which they are summed is one draw from the emitted
           distribution E, and E[sum KL] = KL(E, P), E[sum TV] >= TV(E, P) for the distributions of whole texts; a mean
           over prompts estimates these.
Checked:   tests/unit/verifiers/test_lossy.py by enumeration; tests/statistical/test_meter.py on the real pair.
Condition: e is the distribution given the prefix *and* facts outside of the prefix: where the last step ended, and
           for point masses the draft, so that q is one-hot, and a token certain to be accepted has e = 1 there. Where
           the prefix leaves that open, the distribution given the prefix alone is a mixture, and nearer to p (both
           numbers are convex): in the mean the meter never flatters, and "=" above becomes ">=".
Filters:   the reference is the distribution that the request specifies. Above temperature 0 a token with p = 0
           (filtered, forbidden) is never emitted, so the divergence is finite. `entropy_adaptive` is the exception: it
           tests no token of the small model. `reflective` emits no such token, but its divergence can be infinite: it
           is compared with exact verification given the draft, which may be certain of another token.

Letters: V vocabulary.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

_TOLERANCE = 1e-12  # of a budget: sums of floats


class Spent(Protocol):
    """What a request has emitted, and what that cost so far; :class:`foretoken.core.metrics.Metrics` is one."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def distortion_sum(self) -> float: ...


class Account:
    """The distortion of one verdict while it grows, and whether the request's budget allows the next token.

    A budget is a bound on the mean distortion per token, of every prefix of the output: after n tokens the sum is at
    most n times the budget. Every charge is known before anything is drawn, so keeping to a budget biases nothing.

    Args:
        spent: the request before this verdict; None: nothing was emitted.
        budget: mean distortion per token at most; None: no bound.
    """

    def __init__(self, spent: Spent | None, budget: float | None) -> None:
        self._sum = 0.0 if spent is None else spent.distortion_sum
        self._num_tokens = 0 if spent is None else spent.num_tokens
        self._budget = budget
        self.distortions: list[float] = []
        self.divergences: list[float] = []

    def allows(self, distortion: float) -> bool:
        """Whether the next token may have this distortion; never once there is nothing left at all."""
        if self._budget is None:
            return True
        left = self._budget * (self._num_tokens + 1) - self._sum
        return left > 0.0 and distortion <= left + _TOLERANCE

    def add(self, distortion: float, divergence: float) -> None:
        """One token was emitted."""
        self._sum += distortion
        self._num_tokens += 1
        self.distortions.append(distortion)
        self.divergences.append(divergence)


def total_variation(e_V: Tensor, p_V: Tensor) -> float:
    """Half of the summed differences of two distributions, in [0, 1]."""
    return 0.5 * float((e_V - p_V).abs().sum())


def divergence(e_V: Tensor, p_V: Tensor) -> float:
    """KL(e, p) in nats; infinite where e has mass and p has none."""
    terms_V = torch.where(e_V > 0.0, e_V * (e_V.log() - p_V.log()), torch.zeros_like(e_V))
    return max(float(terms_V.sum()), 0.0)  # below 0 by rounding only


def price_of(p: float, q: float) -> tuple[float, float]:
    """What a token costs that stands for certain, drawn with chance q (1: a point mass), though it has p > 0 only.

    ((1 - p/q)+, (log q/p)+): of a rule that lets some tokens stand and tests the others the mean over the draw is
    sum (q - p)+ over the former, which is TV(e, p); the mean of the second is at least KL(e, p). So a rule that cannot
    know its decision about tokens that were not drawn is metered without bias.
    """
    excess = q / p
    return max(0.0, 1.0 - 1.0 / excess), max(0.0, math.log(excess))


def emitted(stands_V: Tensor, rest_V: Tensor) -> Tensor:
    """The distribution of one emitted token, [V].

    Args:
        stands_V: mass of each token that leaves through a draft token that stands; sums to 1 at most.
        rest_V: the distribution (sums to 1) of the token drawn otherwise.
    """
    return stands_V + (1.0 - stands_V.sum()).clamp(min=0.0) * rest_V
