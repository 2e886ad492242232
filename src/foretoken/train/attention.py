"""Causal attention for training on a CPU: whole products of blocks of queries, with a backward pass of its own.

The library's kernel for CPUs computes attention tile by tile to save memory, and computes the probabilities again in
the backward pass, which takes most of its time. Blocks of a few hundred tokens have no need to save memory: here the
probabilities are kept, and all six products go to the machine's matrix library at full speed. A block of queries reads
the keys up to its own last one only, so that nearly half of the square of scores is never computed.

    forward   S = s Q K'   P = softmax(S)   O = P V
    backward  dV = P' dO   dP = dO V'   dS = P (dP - rowsum(P dP))   dQ = s dS K   dK = s dS' Q

Letters: B rows, H query heads, G key/value heads, R = H/G query heads that share one, T positions, D width of a head.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "foretoken_training"
BLOCK = 128  # queries of a block: wide products, and little computed in vain above the diagonal
TINIEST = 1e-20  # probabilities below this count for nothing, and processors are slow with the least of them
LONGEST = 1024  # positions; the probabilities of longer rows would fill the memory


class CausalAttention(torch.autograd.Function):
    """``softmax(s Q K') V``, every position reading itself and those before it.

    Where products are computed in bfloat16, all three arrive in it: rotation by positions gives queries and keys in
    float32, and a product in place takes one dtype only.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
    def forward(ctx: Any, query_NLD: Tensor, key_NTD: Tensor, value_NTD: Tensor, scaling: float) -> Tensor:
        """Attend; N = B G, and L = T R: the queries that share keys stand next to each other, by position.

        Returns:
            [N, L, D].
        """
        shared, length = query_NLD.shape[1] // key_NTD.shape[1], key_NTD.shape[1]
        scaled_NLD = query_NLD * scaling
        out_NLD = torch.empty_like(query_NLD)
        later_LT = _later(length, shared, scaled_NLD.dtype, scaled_NLD.device)
        kept = []
        for first in range(0, length, BLOCK):
            last = min(first + BLOCK, length)
            rows = slice(first * shared, last * shared)
            scores = torch.baddbmm(later_LT[rows, :last], scaled_NLD[:, rows], key_NTD[:, :last].transpose(1, 2))
            p = torch.threshold_(torch.softmax(scores, dim=-1), TINIEST, 0.0)
            out_NLD[:, rows] = p @ value_NTD[:, :last]
            kept.append(p)
        ctx.save_for_backward(scaled_NLD, key_NTD, value_NTD, *kept)
        ctx.scaling = scaling
        return out_NLD

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_NLD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of query, key and value."""
        scaled_NLD, key_NTD, value_NTD, *kept = ctx.saved_tensors
        shared = scaled_NLD.shape[1] // key_NTD.shape[1]
        d_query, d_key, d_value = torch.empty_like(scaled_NLD), torch.zeros_like(key_NTD), torch.zeros_like(value_NTD)
        for number, p in enumerate(kept):
            first, last = number * BLOCK, p.shape[2]
            rows = slice(first * shared, last * shared)
            grad = grad_NLD[:, rows]
            d_value[:, :last].baddbmm_(p.transpose(1, 2), grad)
            d_p = grad @ value_NTD[:, :last].transpose(1, 2)
            d_scores = torch._softmax_backward_data(d_p, p, -1, p.dtype)
            d_query[:, rows] = d_scores @ key_NTD[:, :last]
            d_key[:, :last].baddbmm_(d_scores.transpose(1, 2), scaled_NLD[:, rows])
        return d_query.mul_(ctx.scaling), d_key, d_value, None


def _later(count: int, shared: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Minus infinity where a key is later than the query, zero elsewhere, [count * shared, count]."""
    later = torch.full((count, count), float("-inf"), dtype=dtype, device=device).triu_(1)
    return later.repeat_interleave(shared, dim=0)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with the library's signature; all but plain causal attention goes to the library's own kernel.

    Args:
        query, key, value: [B, H, T, D], [B, G, T, D], [B, G, T, D].
        attention_mask: None where every position reads exactly itself and those before it.
    Returns:
        [B, T, H, D] and None.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    plain = attention_mask is None and causal and not dropout and key.shape == value.shape
    if not plain or query.shape[2] != key.shape[2] or not 1 < query.shape[2] <= LONGEST:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **others)
    B, H, T, D = query.shape
    G = key.shape[1]
    query_NLD = query.view(B, G, H // G, T, D).transpose(2, 3).reshape(B * G, -1, D)
    key_NTD, value_NTD = key.reshape(B * G, T, D), value.reshape(B * G, T, D)
    out_NLD = CausalAttention.apply(query_NLD, key_NTD, value_NTD, D**-0.5 if scaling is None else scaling)
    return out_NLD.view(B, G, T, H // G, D).transpose(1, 2).reshape(B, T, H, D), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


def use(model: Any) -> None:
    """Have the model's attention computed here, where it would be the library's usual kernel."""
    if getattr(model.config, "_attn_implementation", None) == "sdpa":
        model.set_attn_implementation(NAME)
