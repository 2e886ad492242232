"""GPT-2's layers as linear layers: its ``Conv1D`` is one with a transposed weight."""

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D


def use_linear_layers(model: Any) -> None:
    """Put an ``nn.Linear`` in the place of each ``Conv1D``: then they are packed, rounded and corrected as others."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is Conv1D:
                linear = nn.Linear(child.nx, child.nf, device="meta")
                linear.weight = nn.Parameter(child.weight.detach().T.contiguous(), requires_grad=False)
                linear.bias = nn.Parameter(child.bias.detach(), requires_grad=False)
                setattr(parent, name, linear.eval())
