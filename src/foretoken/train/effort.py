"""The time and memory that a run of training takes, reported before it begins, and how well it used the machine."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foretoken.core.phases import PHASES
from foretoken.models.memory import peak_resident_bytes
from foretoken.train.processor import product_dtype

_USUAL_SHARE = 0.5  # of the product rate, with all else that a step does
_OPTIMISER = 16  # bytes of a trained weight: itself, its gradient and two moments in float32
_LOGITS_AT_ONCE = 4  # float32 tensors of the size of a micro-batch's logits
_SIZE, _SECONDS = 1024, 0.1


@dataclass(frozen=True)
class Effort:
    """What a step costs.

    Attributes:
        token_flops: floating-point operations of a token's matrix products.
        logits: numbers of the largest logits that are there at once.
        kept_bytes: of a file that the run may write, at most.
        trained_flops: of a token that is read again, where the target's products are kept; 0: as many as of a new one.
    """

    token_flops: float
    logits: int = 0
    kept_bytes: int = 0
    trained_flops: float = 0.0

    def tell(self, network: nn.Module, rate: float, tokens: int | None, minutes: float | None) -> None:
        """Say how long the run will take and how much memory, roughly."""
        speed = _USUAL_SHARE * rate / self.token_flops
        trained = sum(each.numel() for each in network.parameters() if each.requires_grad)
        memory = (peak_resident_bytes() or 0) + _OPTIMISER * trained + 4 * _LOGITS_AT_ONCE * self.logits
        ends = [] if minutes is None else [minutes]
        ends += [] if tokens is None else [tokens / speed / 60]
        kept = f", up to {self.kept_bytes / 1e9:.1f} GB of disk until it ends" if self.kept_bytes else ""
        PHASES.warning(
            "about %.0f minutes, %.0f tokens/s, %.1f GB of memory%s; all rough", min(ends), speed, memory / 1e9, kept
        )
        PHASES.info("the first step")

    def share(self, rate: float, tokens: int, seconds: float) -> dict[str, Any]:
        """For the record: the machine's product rate and the share of it that was used."""
        flops = self.trained_flops or self.token_flops  # those of the target are left out where they are kept
        used = tokens * flops / max(seconds, 1e-9)
        return {
            "token_gflops": round(flops / 1e9, 3),
            "machine_gflops": round(rate / 1e9),
            "share": round(used / rate, 3),
        }


def product_rate(device: str) -> float:
    """Floating-point operations a second of matrix products here, in the dtype and with the threads of training."""
    ones = torch.ones(_SIZE, _SIZE, device=device, dtype=product_dtype(torch.device(device).type))
    best, begun = float("inf"), time.monotonic()
    while time.monotonic() - begun < _SECONDS:
        started = time.monotonic()
        float((ones @ ones)[0, 0])
        best = min(best, time.monotonic() - started)
    return 2 * _SIZE**3 / best
