"""Linear layers with weights packed once for oneDNN (CPU).

A plain ``linear`` of a few rows hands oneDNN the weight in row-major order each time; packed in the order its kernels
read, the same product runs about twice as fast for 1 to 8 rows (measured: docs/benchmarks.md).
"""

import torch
from torch import Tensor, nn

from foretoken.forward.plain import why_not_plain

_PACK_FOR_ROWS = 8  # the layout is chosen for a verification of a few rows; other row counts stay correct


class PackedLinear(nn.Module):
    """Drop-in twin of ``nn.Linear`` for inference on CPU; keeps no plain copy of its weight.

    Args:
        linear: bfloat16 or float32 layer to take weight and bias from.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _PACK_FOR_ROWS)

    @property
    def weight(self) -> Tensor:
        """[out, in], unpacked anew at each look: a few families read the weight of a router or its dtype."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def can_prepack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch can pack weights of that dtype."""
    if device.type != "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def prepack(model: nn.Module) -> int:
    """Replace every plain ``nn.Linear`` below ``model`` by its packed twin; returns how many.

    A layer that is more than its weight (forward/plain.py) stays.
    """
    count = 0
    with torch.no_grad():
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and why_not_plain(child) is None:
                    setattr(parent, name, PackedLinear(child))
                    count += 1
    return count
