"""K-SEQ (SpecTr): every one of n independent draws gets the same test, weakened by the least factor that is exact."""

from collections.abc import Sequence

import torch
from torch import Tensor

from foretoken.core.draft import Law, Sampled
from foretoken.core.randomness import Streams, categorical_rows
from foretoken.core.residual import ratio
from foretoken.verifiers.walk import NodeRule, Pick, Siblings

_ROUNDS = 60  # of the search for rho, at most; it ends after about six


class KSeqVerifier(NodeRule):
    """Sequential selection among independent draws, within 1 - 1/e of the optimum.

    At each node accept the first of its n children that passes with chance min(1, p / (rho q)).

        beta(rho) = sum min(q, p / rho),  rho* in [1, n] solves 1 - (1 - beta)^n = rho beta
        all refused: extra ~ p - min(q, p / rho) (1 - (1 - beta)^n) / beta.  A node without children: extra ~ p.

    A token leaves the tests with probability min(q, p/rho) (1 - (1 - beta)^n) / beta, which is at most p as long
    as rho >= rho*; the residual supplies the rest.

    Paper:   Sun et al. 2023, arXiv:2310.15141, Algorithm 2 and Theorem 2.
    Exact:   yes, for independent draws of q, repeats included. Checked by tests/statistical/test_exactness.py.
    Differs: rho* by Newton steps inside a bracket instead of bisection, rounded up by a hair (rho >= rho* is what
        exactness needs). With one child it is the ratio rule (rho* = 1).
    """

    name = "kseq"
    laws: tuple[type[Law], ...] = (Sampled,)

    @classmethod
    def decide(
        cls, kind: type[Law], p_BV: Tensor, q_BV: Tensor | None, tokens: Sequence[Siblings], rngs: Sequence[Streams]
    ) -> list[Pick]:
        """From ``rngs``: one decision of purpose accept per child, and one draw of purpose residual if none stands."""
        assert q_BV is not None
        counts = [len(its) for its in tokens]
        rho_B, beta_B = cls.rho(p_BV, q_BV, torch.tensor(counts, device=p_BV.device))
        rhos = rho_B.tolist()
        picks: list[Pick] = []
        for row, (its, rho, rng) in enumerate(zip(tokens, rhos, rngs, strict=True)):
            chances = [ratio(float(p_BV[row, token]), rho * float(q_BV[row, token])) for token in its]
            stands = rng.bernoulli("accept", chances)
            number = stands.index(True) if any(stands) else None
            picks.append((number, -1 if number is None else its[number]))
        refused = [row for row, (number, _) in enumerate(picks) if number is None]
        if refused:
            left_BV = _residual(
                p_BV[refused], q_BV[refused], rho_B[refused], beta_B[refused], [counts[r] for r in refused]
            )
            extras = categorical_rows([rngs[row] for row in refused], "residual", left_BV)
            for row, extra in zip(refused, extras, strict=True):
                picks[row] = (None, extra)
        return picks

    @staticmethod
    def rho(p_BV: Tensor, q_BV: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
        """The factor that weakens the tests, and beta there; see :func:`optimal_rho`."""
        return optimal_rho(p_BV, q_BV, count_B)


def _residual(p_BV: Tensor, q_BV: Tensor, rho_B: Tensor, beta_B: Tensor, counts: Sequence[int]) -> Tensor:
    """What the tests left of p, as weights; p itself where rounding leaves nothing."""
    count_B = torch.tensor(counts, dtype=torch.float64, device=p_BV.device)
    factor_B = torch.where(beta_B > 0.0, pass_rate(beta_B, count_B) / beta_B.clamp_min(1e-300), count_B)
    passed_BV = torch.minimum(q_BV, p_BV / rho_B[:, None].to(p_BV.dtype))
    left_BV = (p_BV - passed_BV * factor_B[:, None].to(p_BV.dtype)).clamp_(min=0.0)
    return torch.where(left_BV.sum(-1, keepdim=True) > 0.0, left_BV, p_BV)


def pass_rate(beta_B: Tensor, count_B: Tensor) -> Tensor:
    """1 - (1 - beta)^n, float64 [B]: the chance that one of n draws passes, the rule's acceptance rate."""
    return -torch.expm1(count_B * torch.log1p(-beta_B.clamp(0.0, 1.0)))


def optimal_rho(p_BV: Tensor, q_BV: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor]:
    """The least exact rho, and beta there.

    g(rho) = 1 - (1 - beta)^n - rho beta falls on [1, n]: rho beta = sum min(rho q, p) rises, beta falls. Sums over the
    vocabulary are taken in float64: g is a difference of numbers near 1.

    Args:
        p_BV, q_BV: distributions, rows sum to 1.
        count_B: n of each row, at least 1.
    Returns:
        float64 [B], float64 [B]: g(rho) <= 0, and rho - rho* is about 1e-9 (1e-6 for float32 distributions).
    """
    count_B = count_B.double()
    # p / rho is rounded to the dtype of p, and g with it
    near, margin = (1e-13, 1e-9) if p_BV.dtype == torch.float64 else (1e-7, 1e-6)
    low_B, high_B = torch.ones_like(count_B), count_B.clone()
    rho_B = low_B  # rho* is 1 where q covers p, and for one child
    for _ in range(_ROUNDS):
        _, slope_B, g_B = _g(p_BV, q_BV, rho_B, count_B)
        low_B, high_B = torch.where(g_B > 0.0, rho_B, low_B), torch.where(g_B > 0.0, high_B, rho_B)
        step_B = rho_B - g_B / slope_B
        inside = (step_B > low_B) & (step_B < high_B)
        next_B = torch.where(inside, step_B, (low_B + high_B) / 2)
        if bool(((g_B.abs() < near) | (high_B - low_B < margin)).all()):
            break
        rho_B = torch.where(g_B.abs() < near, rho_B, next_B)
    rho_B = torch.minimum(rho_B + margin, count_B)
    beta_B, _, g_B = _g(p_BV, q_BV, rho_B, count_B)
    if bool((g_B > 1e-12).any()):  # the steps ended short of it: the bracket's upper end is always exact
        rho_B = torch.where(g_B > 1e-12, high_B, rho_B)
        beta_B, _, _ = _g(p_BV, q_BV, rho_B, count_B)
    return rho_B, beta_B


def _g(p_BV: Tensor, q_BV: Tensor, rho_B: Tensor, count_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """beta, the derivative of g and g, float64 [B] each."""
    scaled_BV = p_BV / rho_B[:, None].to(p_BV.dtype)
    beta_B = torch.minimum(scaled_BV, q_BV).sum(-1, dtype=torch.float64)
    falling_B = torch.where(scaled_BV < q_BV, scaled_BV, 0.0).sum(-1, dtype=torch.float64) / rho_B  # -d beta / d rho
    pass_B = pass_rate(beta_B, count_B)
    slope_B = -count_B * (1.0 - beta_B).clamp_min(0.0) ** (count_B - 1.0) * falling_B - beta_B + rho_B * falling_B
    return beta_B, slope_B.clamp_max(-1e-12), pass_B - rho_B * beta_B
