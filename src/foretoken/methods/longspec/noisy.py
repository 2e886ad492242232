"""Flash noisy training (section 3.2): the draft network over whole sequences, with the target's last keys hidden.

    token t    attends to its own window, and to K*, V* of tokens <= t - gap: ``LongSpec.forward`` with known_T = t -
    gap + 1

The cross-attention drops the first ``gap`` queries and the last ``gap`` keys and is causal in between, so the fast
kernel needs no mask. The window attention runs in pieces of 512 queries, so its cost is linear in T.

Letters: B sequences, T tokens, W width, H query heads, G key/value heads, d head width, h half of d or less.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.forward.target_kv import apply_rotary
from foretoken.methods.longspec.network import LongSpec

_QUERIES = 512  # queries of one piece of the window attention


def noisy_forward(
    net: LongSpec,
    e_BTW: Tensor,
    angles: Sequence[tuple[Tensor, Tensor]],
    keys_BGTd: Tensor,
    values_BGTd: Tensor,
    gaps: Sequence[int],
) -> Tensor:
    """Return the inputs of the target's head for every token of whole sequences, [B, T, W].

    Args:
        e_BTW: embedded tokens.
        angles: cos and sin of each sequence's positions, [T, h].
        keys_BGTd, values_BGTd: K* and V* of the same tokens.
        gaps: of each sequence: token t attends to the target's keys of tokens <= t - gap; the first ``gap`` tokens to
            none.
    """
    cos_B1Th, sin_B1Th = (torch.stack(each)[:, None] for each in zip(*angles, strict=True))
    q, k, v = net.self_projections(e_BTW)
    q, k = apply_rotary(q, cos_B1Th, sin_B1Th).to(v.dtype), apply_rotary(k, cos_B1Th, sin_B1Th).to(v.dtype)
    h = net.self_attention_out(e_BTW, _side_by_side(_window_attention(q, k, v, net.config.seen)))
    cross_q = apply_rotary(net.cross_queries(h), cos_B1Th, sin_B1Th).to(v.dtype)
    attended = [
        _noisy_attention(cross_q[row], keys_BGTd[row].to(v.dtype), values_BGTd[row].to(v.dtype), gap)
        for row, gap in enumerate(gaps)
    ]
    return net.output(net.cross_attention_out(h, _side_by_side(torch.stack(attended))))


def _window_attention(q: Tensor, k: Tensor, v: Tensor, seen: int) -> Tensor:
    """Attention to the last ``seen`` tokens, the token itself included: [B, H, T, d]."""
    length, pieces = q.shape[2], []
    for first in range(0, length, _QUERIES):
        last, begin = min(first + _QUERIES, length), max(0, first - seen + 1)
        queries_R1 = torch.arange(first, last, device=q.device)[:, None]
        keys_K = torch.arange(begin, last, device=q.device)
        mask_RK = (keys_K <= queries_R1) & (queries_R1 - keys_K < seen)
        pieces.append(_attend(q[:, :, first:last], k[:, :, begin:last], v[:, :, begin:last], mask=mask_RK))
    return torch.cat(pieces, dim=2)


def _noisy_attention(q_HTd: Tensor, k_GTd: Tensor, v_GTd: Tensor, gap: int) -> Tensor:
    """Causal attention with the first ``gap`` queries and the last ``gap`` keys left out: [H, T, d]."""
    length = q_HTd.shape[1]
    if length <= gap:
        return torch.zeros_like(q_HTd)
    parts = (q_HTd[:, gap:], k_GTd[:, : length - gap], v_GTd[:, : length - gap])
    attended = _attend(*(part[None] for part in parts), causal=True)[0]
    return F.pad(attended, (0, 0, gap, 0))


def _attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _side_by_side(attended: Tensor) -> Tensor:
    """[..., H, T, d] -> [..., T, H d]."""
    return attended.transpose(-2, -3).flatten(-2)
