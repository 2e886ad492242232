"""The judge's fit: logistic regression on standardised states, with the regularisation that holds up best.

    mean_w loss + |w|^2 / (2 C N)      C from 1e-7 to 1e2, by L-BFGS, each from the one before

Paper: arXiv:2501.19309 has a weighted cross-entropy and says no more; grid, split and choice are those of AutoJudge
(arXiv:2504.20039), as are L-BFGS and the area under the ROC curve to choose by.
Differs: the bad tokens together weigh as much as the fine ones, but one of them ``HEAVIEST`` at most. Mean and scale
are folded into the weights.

Letters: N tokens, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.drafting.logistic import Logistic
from foretoken.methods.judge.labels import Labels
from foretoken.train.roc import auc

GRID = tuple(10.0**power for power in range(-7, 3))
HEAVIEST = 20.0  # weight of a bad token against a fine one
_ITERATIONS = 200  # of L-BFGS for one C


@dataclass(frozen=True)
class Standard:
    """Mean 0 and variance 1 for every dimension of the states that were trained on."""

    mean_D: Tensor
    scale_D: Tensor

    @classmethod
    def of(cls, x_ND: Tensor) -> Standard:
        """As these are; a dimension that never changes is left as it is."""
        scale_D = x_ND.std(dim=0, correction=0)
        return cls(x_ND.mean(dim=0), torch.where(scale_D > 0, scale_D, torch.ones_like(scale_D)))

    def __call__(self, x_ND: Tensor) -> Tensor:
        return (x_ND - self.mean_D) / self.scale_D

    def fold(self, weight_D: Tensor, bias: float) -> Logistic:
        """The unit that says of a state what these numbers say of the standardised one."""
        folded_D = weight_D / self.scale_D
        # from the rounded weights, so that their rounding cancels at the mean, where the states are
        return Logistic(folded_D, bias - float(folded_D.double() @ self.mean_D.double()))


@dataclass(frozen=True)
class Fitted:
    """The best of the grid.

    Attributes:
        unit: for states as the target gives them.
        strength: its C.
        bad_weight: of a bad token against a fine one.
        areas: C -> area under the ROC curve on the tokens to choose by; None where they lack a class.
    """

    unit: Logistic
    strength: float
    bad_weight: float
    areas: dict[float, float | None]


def fit(labels: Labels, train_N: Tensor, choose_N: Tensor) -> Fitted:
    """Fit on some of the tokens, choose by others.

    Args:
        labels: of both; fine and bad ones among those to fit on.
        train_N, choose_N: bool; of different questions.
    """
    y_N = labels.fine_N[train_N].float()
    bad_weight = min(HEAVIEST, float(y_N.sum()) / float((1 - y_N).sum()))
    weight_N = torch.where(y_N > 0, 1.0, bad_weight)
    standard = Standard.of(labels.hidden_ND[train_N])
    x_ND = standard(labels.hidden_ND[train_N])
    x_held, fine_held = labels.hidden_ND[choose_N], labels.fine_N[choose_N]
    numbers = torch.zeros(x_ND.shape[1] + 1)
    best: tuple[float, float, Logistic] | None = None
    areas: dict[float, float | None] = {}
    for strength in GRID:
        numbers = _regress(x_ND, y_N, weight_N / weight_N.sum(), strength * float(weight_N.sum()), numbers)
        unit = standard.fold(numbers[:-1], float(numbers[-1]))
        area = auc(unit.probabilities(x_held), fine_held)
        areas[strength] = area
        if best is None or (area is not None and area > best[0]):
            best = (-1.0 if area is None else area), strength, unit
    assert best is not None
    return Fitted(best[2], best[1], bad_weight, areas)


def _regress(x_ND: Tensor, y_N: Tensor, weight_N: Tensor, strength: float, start: Tensor) -> Tensor:
    """w and b, [D + 1], that minimise the weighted mean loss + |w|^2 / (2 strength); b is free."""
    numbers = start.clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        [numbers], max_iter=_ITERATIONS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        weight_D, bias = numbers[:-1], numbers[-1]
        losses_N = F.binary_cross_entropy_with_logits(x_ND @ weight_D + bias, y_N, reduction="none")
        value = (weight_N * losses_N).sum() + weight_D @ weight_D / (2 * strength)
        value.backward()
        return value

    optimiser.step(loss)
    return numbers.detach()
