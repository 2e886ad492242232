"""Muon: momentum with all its directions scaled to the same length.

Jordan et al. (2024): the momentum of a matrix is replaced by the nearest semi-orthogonal one, approximately, by five
steps of a Newton-Schulz iteration with a quintic polynomial. The update is scaled to the root mean square of AdamW's
(Moonshot AI, 2025, section 2.2). The same as ``torch.optim.Muon``, which iterates in bfloat16 on every machine; here it
is the dtype in which the machine multiplies fastest, which halves the time of a step where that is float32.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.train.processor import product_dtype

_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_SMALLEST = 1e-7


class Muon(torch.optim.Optimizer):
    """For matrices inside the layers.

    Args:
        parameters: matrices.
        lr: in AdamW's units.
        weight_decay: decoupled.
        momentum: Nesterov's.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                momentum = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonalised(matrix.grad.lerp(momentum, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(direction, alpha=-group["lr"] * 0.2 * math.sqrt(max(matrix.shape)))


def orthogonalised(matrix_OI: Tensor) -> Tensor:
    """Nearly the semi-orthogonal matrix next to this one: singular values of about 0.7 to 1.2.

    Returns:
        [O, I], in the dtype in which it was computed.
    """
    a, b, c = _POLYNOMIAL
    tall = matrix_OI.shape[0] > matrix_OI.shape[1]
    X = matrix_OI.to(product_dtype(matrix_OI.device.type))
    X = X.T if tall else X
    X = X / X.norm().clamp(min=_SMALLEST)  # no singular value above one
    for _ in range(_STEPS):
        gram = X @ X.T
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.T if tall else X
