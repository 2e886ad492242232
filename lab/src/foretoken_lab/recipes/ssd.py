"""The state-space dual scan of Mamba-2 in plain torch, for training on processors without its CUDA kernels.

Numerically the library's own reference scan, several times faster and smaller on a CPU: the groups of B and C are never
repeated over the heads, all heads of a group share one matrix product, and decays come from one cumulative sum.
Paper: Dao and Gu, "Transformers are SSMs" (2024), section 6 (block decomposition) and listing 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 64


def chunk_scan(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    chunk_size: int = CHUNK,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **unused: Any,
) -> Any:
    """Run the recurrence h = exp(dt A) h + dt B x, y = C h + D x over a whole sequence, in chunks.

    The keywords are those of ``mamba2_chunk_scan`` in transformers, which it replaces.

    Args:
        x_BTHP: inputs, P channels of each of H heads.
        dt_BTH: step sizes before bias and softplus.
        A_H: negative.
        B_BTGN: input weights of G groups, N states.
        C_BTGN: output weights.
        initial_states: [B, H, P, N]; default zero.
    Returns:
        y [B, T, H, P] in float32 or wider; with the last state [B, H, P, N] on request.
    """
    rows, length, heads, width = x_BTHP.shape
    groups, per_group, states = B_BTGN.shape[2], heads // B_BTGN.shape[2], B_BTGN.shape[3]
    wide = torch.promote_types(x_BTHP.dtype, torch.float32)
    dt = dt_BTH.to(wide)
    if dt_bias is not None:
        dt = dt + dt_bias.to(wide)
    if dt_softplus:
        dt = F.softplus(dt)
    if dt_limit != (0.0, float("inf")):
        dt = dt.clamp(*dt_limit)
    missing = -length % chunk_size
    x, B, C = x_BTHP, B_BTGN, C_BTGN
    if missing:
        x, B, C = (F.pad(part, (0, 0, 0, 0, 0, missing)) for part in (x, B, C))
        dt = F.pad(dt, (0, 0, 0, missing))  # no step: the state stays, nothing comes in
    chunks = (length + missing) // chunk_size

    with torch.autocast(x.device.type, enabled=False):
        x = x.to(wide).view(rows, chunks, chunk_size, heads, width)
        B = B.to(wide).view(rows, chunks, chunk_size, groups, states).transpose(2, 3)
        C = C.to(wide).view(rows, chunks, chunk_size, groups, states).transpose(2, 3)
        dt = dt.view(rows, chunks, chunk_size, heads)
        decay = (dt * A_H.to(wide)).cumsum(2)  # logarithm of the share of a state that is left since the chunk began
        stepped = x * dt[..., None]

        # inside a chunk: y_i = sum over j <= i of exp(decay_i - decay_j) (C_i . B_j) dt_j x_j
        by_head = decay.transpose(2, 3)
        later = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).triu(1)
        lasting = (by_head[..., :, None] - by_head[..., None, :]).masked_fill(later, float("-inf")).exp()
        weights = (C @ B.transpose(-1, -2))[:, :, :, None]
        mixing = lasting.view(rows, chunks, groups, per_group, chunk_size, chunk_size) * weights
        mixing = mixing.view(rows, chunks, heads, chunk_size, chunk_size)
        y = (mixing @ stepped.transpose(2, 3)).transpose(2, 3)

        # what each chunk adds to the state, then the state at the start of each chunk
        end = decay[:, :, -1:]
        late = (stepped * (end - decay).exp()[..., None]).view(rows, chunks, chunk_size, groups, per_group * width)
        added = B.transpose(-1, -2) @ late.transpose(2, 3)
        kept = end.exp().view(rows, chunks, groups, 1, per_group, 1)
        if initial_states is None:
            state = torch.zeros(rows, groups, states, per_group, width, dtype=wide, device=x.device)
        else:
            state = initial_states.to(wide).view(rows, groups, per_group, width, states).permute(0, 1, 4, 2, 3)
        starts = []
        for chunk in range(chunks):
            starts.append(state)
            state = state * kept[:, chunk] + added[:, chunk].view(rows, groups, states, per_group, width)
        carried = torch.stack(starts, 1).view(rows, chunks, groups, states, per_group * width)
        before = (C @ carried).transpose(2, 3).reshape(rows, chunks, chunk_size, heads, width)
        y = torch.addcmul(y, before, decay.exp()[..., None])
        if D is not None:
            y = torch.addcmul(y, x, D.to(wide)[..., None])
        y = y.reshape(rows, chunks * chunk_size, heads, width)[:, :length]
    if not return_final_states:
        return y
    return y, state.permute(0, 1, 3, 4, 2).reshape(rows, heads, width, states)


def faster_scan(model: nn.Module) -> Callable[[], None]:
    """Let a Mamba-2 or Bamba model of transformers train with this scan; call the result to undo it."""
    module: Any = sys.modules[type(model).__module__]
    original = module.mamba2_chunk_scan
    module.mamba2_chunk_scan = lambda *args, **keywords: partial(chunk_scan, *args)(**{**keywords, "chunk_size": CHUNK})

    def undo() -> None:
        module.mamba2_chunk_scan = original

    return undo


@torch.no_grad()
def initialise(
    model: nn.Module, dt: tuple[float, float] = (1e-3, 1e-1), decay: tuple[float, float] = (1.0, 16.0)
) -> None:
    """Draw the parameters of every mixer as Mamba-2's authors do; the library starts Bamba with far longer steps.

    Args:
        dt: range of the step sizes, drawn evenly on a logarithmic scale.
        decay: range of -A.
    """
    for mixer in model.modules():
        if not (hasattr(mixer, "A_log") and hasattr(mixer, "dt_bias")):
            continue
        heads: Any = mixer
        low, high = torch.tensor(dt).log()
        step = torch.exp(low + (high - low) * torch.rand_like(heads.dt_bias))
        heads.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is the step
        heads.A_log.copy_(torch.empty_like(heads.A_log).uniform_(*decay).log())
        heads.D.fill_(1.0)
        bound = heads.conv1d.kernel_size[0] ** -0.5
        heads.conv1d.weight.uniform_(-bound, bound)
        heads.conv1d.bias.zero_()
