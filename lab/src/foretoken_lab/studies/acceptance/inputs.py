"""What the formulas of this package are given: distributions of target and draft, refused in plain words if they are
none.

Letters: B positions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError

_SUM_TOLERANCE = 1e-4  # a float32 softmax over 150 000 tokens is within 1e-5


def check_laws(p_BV: Tensor, q_BV: Tensor) -> tuple[Tensor, Tensor]:
    """Both distributions as float64 [B, V] on the CPU, every row divided by its sum.

    Args:
        p_BV: the target's processed distributions, [B, V] or [V], any float dtype.
        q_BV: the draft's, same shape.
    Raises:
        ConfigError: not a float tensor, shapes differ, no vocabulary, or a row that is not a probability distribution
            (a value that is not finite or negative, no mass at all, or a sum off by more than 1e-4).
    """
    laws = []
    for name, law in (("p", p_BV), ("q", q_BV)):
        if not isinstance(law, Tensor) or not law.is_floating_point():
            kind = law.dtype if isinstance(law, Tensor) else type(law).__name__
            raise ConfigError(f"{name} is {kind}: give probabilities as a float tensor, [B, V] or [V]")
        if law.dim() not in (1, 2) or law.shape[-1] == 0:
            raise ConfigError(
                f"{name} has shape {list(law.shape)}: give one distribution a row, [B, V] or [V], V at least 1"
            )
        laws.append(law)
    if laws[0].shape != laws[1].shape:
        raise ConfigError(
            f"p has shape {list(laws[0].shape)} but q has {list(laws[1].shape)}: give both over the same positions and "
            "the same vocabulary (q = 0 where the draft has no such token)"
        )
    p_BV, q_BV = (_law(name, law.reshape(-1, law.shape[-1])) for name, law in zip("pq", laws, strict=True))
    return p_BV, q_BV


def check_num_drafts(num_drafts: int, vocab_size: int) -> None:
    """Refuse a number of drafts that no position can have.

    Raises:
        ConfigError: not an integer, below 1, or above the vocabulary.
    """
    if not isinstance(num_drafts, int) or isinstance(num_drafts, bool) or num_drafts < 1:
        raise ConfigError(f"num_drafts={num_drafts!r} must be an integer, at least 1")
    if num_drafts > vocab_size:
        raise ConfigError(
            f"num_drafts={num_drafts} is above the vocabulary of {vocab_size} tokens: ask for {vocab_size} at most"
        )


def _law(name: str, law_BV: Tensor) -> Tensor:
    law_BV = law_BV.detach().to("cpu", torch.float64)
    sum_B = law_BV.sum(-1)
    # one pass over [B, V]: a NaN or an infinity reaches the sum, except that infinities of both signs make a NaN
    finite_B = torch.isfinite(sum_B)
    if not bool(finite_B.all()):
        row = int((~finite_B).nonzero()[0])
        token = int((~torch.isfinite(law_BV[row])).nonzero()[0])
        raise ConfigError(
            f"{name}[{row}, {token}]={float(law_BV[row, token])} is not a probability: look for NaN or infinite logits "
            "before the softmax"
        )
    if law_BV.numel() and float(law_BV.min()) < 0.0:
        row, token = divmod(int(law_BV.argmin()), law_BV.shape[-1])
        raise ConfigError(f"{name}[{row}, {token}]={float(law_BV[row, token]):g} is negative: give probabilities")
    for row, total in enumerate(sum_B.tolist()):
        if total == 0.0:
            raise ConfigError(f"{name}[{row}] has no token of positive probability: a distribution needs support")
        if abs(total - 1.0) > _SUM_TOLERANCE:
            raise ConfigError(
                f"{name}[{row}] sums to {total:.6g}, not to 1: normalise it (a softmax in float32 or float64)"
            )
    return law_BV / sum_B[:, None]
