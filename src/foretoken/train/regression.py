"""Logistic regression on standardised numbers: what heads are fitted with that a few thousand examples teach.

    sum_n weight_n loss_n + sum_d penalty_d w_d^2 / 2          by L-BFGS, the bias free

Letters: N examples, D numbers of an example.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.drafting.logistic import Logistic

_ITERATIONS = 200


@dataclass(frozen=True)
class Standard:
    """Mean 0 and variance 1 for every number of the examples that were trained on."""

    mean_D: Tensor
    scale_D: Tensor

    @classmethod
    def of(cls, x_ND: Tensor) -> "Standard":
        """As these are; a number that never changes is left as it is."""
        scale_D = x_ND.std(dim=0, correction=0)
        return cls(x_ND.mean(dim=0), torch.where(scale_D > 0, scale_D, torch.ones_like(scale_D)))

    def __call__(self, x_ND: Tensor) -> Tensor:
        return (x_ND - self.mean_D) / self.scale_D

    def fold(self, weight_D: Tensor, bias: float) -> Logistic:
        """The unit that says of an example what these numbers say of the standardised one."""
        folded_D = weight_D / self.scale_D
        # from the rounded weights, so that their rounding cancels at the mean, where the examples are
        return Logistic(folded_D, bias - float(folded_D.double() @ self.mean_D.double()))


def regress(x_ND: Tensor, y_N: Tensor, weight_N: Tensor, penalty_D: Tensor, start: Tensor) -> Tensor:
    """w and b, [D + 1], that minimise the objective above; the loss is binary cross-entropy.

    Args:
        x_ND: standardised.
        y_N: labels in [0, 1].
        weight_N: of the examples.
        penalty_D: of the weights; 0: none.
        start: [D + 1], where to begin.
    """
    numbers = start.clone().requires_grad_(True)
    optimiser = torch.optim.LBFGS(
        [numbers], max_iter=_ITERATIONS, tolerance_grad=1e-6, tolerance_change=1e-9, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        weight_D, bias = numbers[:-1], numbers[-1]
        losses_N = F.binary_cross_entropy_with_logits(x_ND @ weight_D + bias, y_N, reduction="none")
        value = (weight_N * losses_N).sum() + (penalty_D * weight_D * weight_D).sum() / 2
        value.backward()
        return value

    optimiser.step(loss)
    return numbers.detach()
