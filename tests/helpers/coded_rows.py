"""What keys and values in codes of 8 bits are, written out: native/int8_kv.h must agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.models.adoption.native_trial import PlainAttention

_LEAST = 2.0**-100  # a row with a largest magnitude below counts as zeros


def rounded(x_GTD: Tensor) -> Tensor:
    """float32, each head's row on a grid of its own: whole multiples of its largest magnitude / 127."""
    x_GTD = x_GTD.float()
    most_GT1 = x_GTD.abs().amax(dim=-1, keepdim=True)
    counts = most_GT1 >= _LEAST
    codes_GTD = (x_GTD * torch.where(counts, 127.0 / most_GT1, 0.0)).round()
    return codes_GTD * torch.where(counts, most_GT1 / 127.0, 0.0)


class RoundedAttention(PlainAttention):
    """Attention written out over keys and values that were rounded when they were written."""

    def attend(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, **options: Any) -> Tensor:
        return super().attend(layer, q_HTD, rounded(k_GTD), rounded(v_GTD), **options).to(q_HTD.dtype)
