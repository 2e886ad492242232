"""Losses straight from hidden states, some rows at a time: the logits of a block are never all there.

For a small model with a large vocabulary the logits are by far the largest tensor of a step, and reading and writing
them takes longer than the arithmetic on them. Here as many rows are computed at once as fit a cache, down to the
gradients of hidden states and head; nothing of the size of the logits is kept for the backward pass.

Letters: N rows, D width, V vocabulary, K scored tokens, M rows of distributions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.forward import anatomy

ROWS = 512
WIDER_ROWS = 1024  # where no more than FLOATS of them are in float32 at a time, which lie in a cache
FLOATS = 64
ROUND = 64
PLAIN_HEADS = ("llama", "mistral", "qwen2", "qwen3")  # logits are the head's product with the normed state, no more


class _HeadLoss(torch.autograd.Function):
    """The logits become their gradient, p - 1 at the target, where they lie; of those in float32 few are ever there."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor, weights_N: Tensor, dtype: torch.dtype
    ) -> Tensor:
        wanted = any(ctx.needs_input_grad)
        head, hidden, weights_N1 = head_VD.to(dtype), hidden_ND.to(dtype), weights_N[:, None]
        weighted_ND = (hidden_ND * weights_N1).to(dtype)
        d_hidden = torch.empty_like(hidden_ND) if wanted else None
        d_head = torch.zeros_like(head_VD) if wanted else None
        losses_N1 = torch.empty_like(weights_N1)
        at_once = FLOATS if hidden.device.type == "cpu" else WIDER_ROWS  # launches cost more than memory elsewhere
        for start in range(0, len(hidden), WIDER_ROWS):
            rows = slice(start, start + WIDER_ROWS)
            logits = hidden[rows] @ head.T
            parts = (each.split(at_once) for each in (logits, targets_N[rows, None], losses_N1[rows]))
            for part, targets, losses in zip(*parts, strict=True):
                exact = part.float()
                p = torch.softmax(exact, dim=-1)
                # logsumexp = largest logit - log of the largest p, which is never too small for a logarithm
                losses.copy_(exact.amax(-1, True) - p.amax(-1, True).log_() - exact.gather(1, targets))
                part.copy_(p.scatter_add_(1, targets, p.new_full(targets.shape, -1.0)))
            if d_hidden is not None and d_head is not None:
                d_hidden[rows] = (logits @ head).float().mul_(weights_N1[rows])
                d_head += logits.T @ weighted_ND[rows]
        if wanted:
            ctx.save_for_backward(d_hidden, d_head)
        return (losses_N1 * weights_N1).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grads[0], d_head * grads[0], None, None, None


class _LawLoss(torch.autograd.Function):
    """With m = sum of p and E = p W:  -sum p log q = m logsumexp(W h) - h . E, so no row of a distribution is read
    twice.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_KD: Tensor, p_MK: Tensor, of_N: Tensor, weights_N: Tensor, dtype: torch.dtype
    ) -> Tensor:
        head, hidden = head_KD.to(dtype), hidden_ND.to(dtype)
        p = F.pad(p_MK, (0, 0, 0, -len(p_MK) % ROUND)).to(dtype)  # products of few different shapes
        mass_N = p_MK.sum(-1)[of_N] * weights_N
        wanted_ND = (p @ head).float()[of_N].mul_(weights_N[:, None])
        d_head = torch.zeros_like(head_KD) if ctx.needs_input_grad[1] else None
        if d_head is not None:
            taught_MD = hidden_ND.new_zeros(len(p), hidden_ND.shape[1], dtype=torch.float32)
            taught_MD.index_add_(0, of_N, hidden_ND.float() * weights_N[:, None])
            d_head -= p.T @ taught_MD.to(dtype)
        d_hidden = torch.empty_like(wanted_ND)
        total = -torch.linalg.vecdot(hidden_ND.float(), wanted_ND).sum()
        for start in range(0, len(hidden), ROWS):
            rows = slice(start, start + ROWS)
            logits_RK = (hidden[rows] @ head.T).float()
            found = F.log_softmax(logits_RK, dim=-1)
            total += ((logits_RK[:, 0] - found[:, 0]) * mass_N[rows]).sum()
            q = found.exp_().to(dtype)
            d_hidden[rows] = (q @ head).float().mul_(mass_N[rows, None])
            if d_head is not None:
                d_head += q.T @ (hidden_ND[rows] * mass_N[rows, None]).to(dtype)
        ctx.save_for_backward(d_hidden.sub_(wanted_ND).to(hidden_ND.dtype), d_head)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grads[0], None if d_head is None else d_head * grads[0], None, None, None, None


def _product_dtype(rows: Tensor) -> torch.dtype:
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else rows.dtype


def law_loss(hidden_ND: Tensor, head_KD: Tensor, p_MK: Tensor, of_N: Tensor, weights_N: Tensor) -> Tensor:
    """The sum over rows of ``-weight sum over tokens of p log q``, q the distribution that a head gives; in nats.

    Args:
        hidden_ND: what the head reads.
        head_KD: float32; its gradient is computed if it wants one.
        p_MK: float32, distributions, of any mass; no gradient.
        of_N: int64, the row of ``p_MK`` that a row is to learn.
        weights_N: float32.
    Returns:
        a float32 scalar with a gradient.
    """
    dtype = _product_dtype(hidden_ND)
    with torch.autocast(hidden_ND.device.type, enabled=False):  # all but products is computed in float32
        loss: Tensor = _LawLoss.apply(hidden_ND, head_KD, p_MK, of_N, weights_N, dtype)
    return loss


def applies(model: nn.Module) -> bool:
    """Whether the model's logits are computed as here."""
    config = getattr(model, "config", None)
    return getattr(config, "model_type", None) in PLAIN_HEADS


def next_token_loss(model: nn.Module, tokens_BT: Tensor, weights_BT: Tensor | None = None, **inputs: Any) -> Tensor:
    """The mean cross-entropy of the next token, in nats.

    Args:
        model: a causal model to which this ``applies``.
        tokens_BT: int64.
        weights_BT: float32, what each token counts as one to be predicted, of a sum of 1 without the first column;
            None: all the same. What counts nothing costs no product with the head.
        inputs: others of the model, such as positions.
    Returns:
        a float32 scalar with a gradient.
    """
    parts = anatomy.find(model)
    hidden_BTD = parts.body(input_ids=tokens_BT, use_cache=False, **inputs).last_hidden_state
    hidden_ND, targets_N = hidden_BTD[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()
    if weights_BT is None:
        weights_N = hidden_ND.new_full(targets_N.shape, 1 / len(targets_N), dtype=torch.float32)
    else:
        weights_N = weights_BT[:, 1:].flatten()
        counted = weights_N.nonzero().squeeze(1)
        hidden_ND, targets_N, weights_N = hidden_ND[counted], targets_N[counted], weights_N[counted]
    dtype = _product_dtype(hidden_ND)
    with torch.autocast(hidden_ND.device.type, enabled=False):  # all but products is computed in float32
        loss: Tensor = _HeadLoss.apply(hidden_ND, parts.head.weight, targets_N, weights_N, dtype)
    return loss
