"""Draws without replacement as a race: how likely is it that the first n arrivals all belong to a given set?

Give every token an independent exponential clock of rate q. The tokens in order of arrival are successive draws from q
without replacement, so the drafts are the first n arrivals, and all of them are in H exactly if H has had n arrivals
when the first token outside H arrives, at rate lam = 1 - q(H):

    Q(H) = int_0^inf lam e^(-lam t) F(t) dt,    F(t) = Pr(at least n of H have arrived by t).

With t = e^u the integrand decays at both ends like an exponential of an exponential and is analytic in a strip, where
the trapezoidal rule converges exponentially: a step of 0.35 is exact to about 1e-11.

F needs the distribution of a sum of independent coins. For the heaviest tokens it is built coin by coin. For the
others, of which there may be 150 000, it follows from power sums of their rates: with w = e^(qt) - 1,

    prod (e^(-qt) + z (1 - e^(-qt))) = e^(-t sum q) prod (1 + z w) = e^(-t sum q) sum_c z^c e_c(w),

and e_c comes from sum w^m, m <= c, by Newton's identities, where sum w^m = sum_r m! S2(r, m) / r! t^r sum q^r (S2:
Stirling numbers of the second kind) converges fast as long as t q <= 1/2. Later than that F may be set to 1: it would
differ from 1, with nothing outside H arrived, only if fewer than n of the 64 + 8n heaviest tokens had arrived, each of
which has arrived with probability 0.39 or more. The chance is below 1e-14 for every n >= 2.

Letters: V tokens in a given order, M prefixes, G nodes of the integral, H heavy tokens, R powers.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

Array = Any  # numpy's stubs are not read

MAX_DRAFTS = 64  # beyond, the sums of Newton's identities overflow, and no tree has so many siblings
_STEP = 0.35
_LIGHT = 0.5  # t q up to which the power series is used
_BLOCK = 256  # tokens of one power sum
_NEGLIGIBLE = 1e-13


def num_heavy(num_drafts: int) -> int:
    """How many of the heaviest tokens are counted coin by coin."""
    return 64 + 8 * num_drafts


class Race:
    """Q of the prefixes of one order of the tokens.

    Args:
        q_V: float64, every entry positive, sum 1, in the order that defines the prefixes.
        num_drafts: n, at least 1, at most V; at most MAX_DRAFTS if V exceeds :func:`num_heavy`.
    """

    def __init__(self, q_V: Array, num_drafts: int) -> None:
        size, n = len(q_V), num_drafts
        self.n = n
        # lam as the sum outside of H: 1 - q(H) would lose every digit where H holds nearly everything
        self.lam_K = np.zeros(size + 1)
        np.cumsum(q_V[::-1], out=self.lam_K[-2::-1])
        first = math.exp((math.log(_NEGLIGIBLE) + math.lgamma(n + 1)) / n)  # F(t) <= t^n / n!
        last = 45.0 / self.lam_K[size - 1]  # e^-45: no prefix but the whole has anything left to come
        num_nodes = max(2, math.ceil(math.log(last / first) / _STEP) + 1)
        self.t_G = first * np.exp(_STEP * np.arange(num_nodes))

        num = num_heavy(n)
        self.all_heavy = size <= num
        if self.all_heavy:
            heavy_H, self.num_early = np.arange(size), num_nodes
        else:
            heavy_H = np.sort(np.argpartition(q_V, size - num)[size - num :])
            self._prepare_light(q_V, heavy_H)
        self.heavy_H = heavy_H
        self._count_heavy(q_V[heavy_H])

    def chance(self, sizes_M: Array) -> Array:
        """float64 [M]: Q of the prefixes of these sizes (0 to V)."""
        early = self.num_early
        lam_M1 = self.lam_K[sizes_M][:, None]
        rate_MG = lam_M1 * self.t_G
        weight_MG = _STEP * rate_MG * np.exp(-rate_MG)
        found_M = weight_MG.sum(1) - (weight_MG[:, :early] * self._fewer(sizes_M)).sum(1)
        # the nodes start where F does: there is nothing to add before them
        found_M[sizes_M == len(self.lam_K) - 1] = 1.0
        return np.clip(found_M, 0.0, 1.0)

    def _fewer(self, sizes_M: Array) -> Array:
        """float64 [M, G']: the chance that fewer than n of a prefix have arrived, at the early nodes."""
        heavy_MNG = self.law_HNG[np.searchsorted(self.heavy_H, sizes_M)]
        if self.all_heavy:
            return heavy_MNG.sum(1)
        light = self._light_law(sizes_M)
        np.cumsum(light, axis=0, out=light)
        return np.einsum("mcg,cmg->mg", heavy_MNG, light[::-1])

    # ------------------------------------------------------------------ heavy tokens, coin by coin

    def _count_heavy(self, q_H: Array) -> None:
        """law_HNG[h, c]: the chance that exactly c < n of the first h heavy tokens have arrived."""
        t_G = self.t_G[: self.num_early]
        stay_HG = np.exp(-q_H[:, None] * t_G)
        come_HG = -np.expm1(-q_H[:, None] * t_G)
        self.law_HNG = np.zeros((len(q_H) + 1, self.n, len(t_G)))
        self.law_HNG[0, 0] = 1.0
        moved_NG = np.empty((self.n - 1, len(t_G)))
        for h in range(len(q_H)):
            before_NG, after_NG = self.law_HNG[h], self.law_HNG[h + 1]
            np.multiply(before_NG, stay_HG[h], out=after_NG)
            np.multiply(before_NG[:-1], come_HG[h], out=moved_NG)
            after_NG[1:] += moved_NG

    # ------------------------------------------------------------------ light tokens, by power sums

    def _prepare_light(self, q_V: Array, heavy_H: Array) -> None:
        """Power sums of the rates of whole blocks, in units of the greatest light rate so that no power overflows."""
        size = len(q_V)
        self.num_powers = self.n + 10
        x_V = np.zeros(-(-size // _BLOCK) * _BLOCK)
        x_V[:size] = q_V
        x_V[heavy_H] = 0.0
        scale = x_V.max()
        x_V /= scale
        self.num_early = int(np.searchsorted(self.t_G, _LIGHT / scale, side="right"))
        self.tau_G = self.t_G[: self.num_early] * scale
        self.x_KB = x_V.reshape(-1, _BLOCK)
        self.sums_RK = np.zeros((self.num_powers, len(self.x_KB) + 1))
        power_KB = self.x_KB.copy()
        for r in range(self.num_powers):
            np.cumsum(power_KB.sum(1), out=self.sums_RK[r, 1:])
            if r + 1 < self.num_powers:
                power_KB *= self.x_KB
        powers_RG = self.tau_G ** np.arange(1, self.num_powers + 1)[:, None]
        self.series_NRG = _series(self.n, self.num_powers)[:, :, None] * powers_RG

    def _power_sums(self, sizes_M: Array) -> Array:
        """float64 [M, R]: sum of x^r over the light tokens of each prefix, r = 1, 2, ..."""
        block_M, rest_M = np.divmod(sizes_M, _BLOCK)
        sums_MR = self.sums_RK[:, block_M].T.copy()
        part_MB = self.x_KB[np.minimum(block_M, len(self.x_KB) - 1)]
        part_MB = np.where(np.arange(_BLOCK) < rest_M[:, None], part_MB, 0.0)
        power_MB = part_MB.copy()
        for r in range(self.num_powers):
            sums_MR[:, r] += power_MB.sum(1)
            power_MB *= part_MB
        return sums_MR

    def _light_law(self, sizes_M: Array) -> Array:
        """float64 [N, M, G]: the chance that exactly c < n light tokens of each prefix have arrived."""
        sums_MR = self._power_sums(sizes_M)
        rate_MG = sums_MR[:, :1] * self.tau_G
        law = np.zeros((self.n, len(sizes_M), len(self.tau_G)))
        law[0] = 1.0
        moments = [sums_MR @ series_RG for series_RG in self.series_NRG]
        for c in range(1, self.n):
            for j in range(1, c + 1):
                term_MG = law[c - j] * moments[j - 1]
                if j % 2:
                    law[c] += term_MG
                else:
                    law[c] -= term_MG
            law[c] /= c
        law *= np.exp(-np.minimum(rate_MG, 700.0))
        law[:, rate_MG > 700.0] = 0.0
        return law


@lru_cache(maxsize=32)
def _series(num_drafts: int, num_powers: int) -> Array:
    """float64 [n - 1, R]: (e^x - 1)^m = sum_r series[m - 1, r - 1] x^r, by multiplying out."""
    base = [1.0 / math.factorial(r) for r in range(1, num_powers + 1)]
    rows = [base]
    while len(rows) < num_drafts - 1:
        last = rows[-1]
        # both series begin at x^1, so that index r stands for x^(r + 1)
        rows.append([math.fsum(last[a] * base[r - 1 - a] for a in range(r)) for r in range(num_powers)])
    return np.array(rows[: num_drafts - 1]).reshape(num_drafts - 1, num_powers)
