"""Kangaroo's adapter and the target's head in service: packed rows of many requests over the adapter's own cache.

If the target has a native decoder, both run natively, as a decoder of one layer without an MLP. Otherwise torch
computes them. Tests compare both with ``Adapter.forward``.

Letters: T packed rows, D width.
"""

from copy import deepcopy

import torch
from torch import Tensor

from foretoken.core.protocols import Plan
from foretoken.drafting.feature_heads.block import rotate
from foretoken.drafting.feature_heads.native_layers import described
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.methods.kangaroo.network import Adapter
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Block, Layout, Projection


class AdapterRunner:
    """Turns hidden states of the exit layer into logits, in the target's dtype and on its device.

    Args:
        target: provides the LM head; if it has a native decoder, the adapter runs natively, too.
        adapter: is copied.
    """

    def __init__(self, target: LanguageModel, adapter: Adapter) -> None:
        self._target = target
        self._native: NativeDecoder | None = None
        if target.native_decoder is not None:
            self._native = NativeDecoder(_layout(adapter, target), target.native_decoder.library)
        self._adapter = deepcopy(adapter).to(device=target.device, dtype=target.dtype)

    @torch.inference_mode()
    def forward(
        self, batch: PackedBatch, cache: KVCache, hidden_TD: Tensor, *, top: int, head: HeadRows | None = None
    ) -> Output:
        """Return the logits of the wanted rows; keys and values go into the cache.

        Args:
            batch: packed rows; only positions and segments matter, not their tokens.
            hidden_TD: the target's states of these rows after the exit layer.
            top: number of tokens of each row to rank.
            head: rows of the target's head to score; None: all.
        """
        if self._native is not None:
            packed, columns = (None, None) if head is None else (head.packed, head.columns)
            ranked = self._native.forward(batch, NativePlan(cache), Span(0, 1, hidden_TD), top=top, head=packed)
            return Output.ranked(ranked, columns)
        positions = batch.positions_1T(self._target.device)[0]
        out_TD = packed_forward(self._adapter, hidden_TD, positions, DensePlan(cache, batch))
        if not batch.wanted:
            return Output.of(out_TD[:0])
        return self._target.score(out_TD[batch.wanted], top=top, final_norm=False, head=head)


def packed_forward(adapter: Adapter, f_TD: Tensor, positions_T: Tensor, plan: Plan) -> Tensor:
    """``Adapter.forward`` for packed rows over the plan's cache; returns the inputs of the target's head, [T, D].

    Args:
        positions_T: int64, of the rows.
        plan: writes keys and values into its cache and attends to the visible columns of each row.
    """
    heads = (-1, adapter.config.head_dim)
    cos_Th, sin_Th = adapter.rotary_at(positions_T)
    u_TD = adapter.norm_in(f_TD)
    projections = (adapter.q_proj, adapter.k_proj, adapter.v_proj)
    q, k, v = (each(u_TD).unflatten(-1, heads).transpose(0, 1) for each in projections)
    q, k = rotate(q, cos_Th, sin_Th).to(v.dtype), rotate(k, cos_Th, sin_Th).to(v.dtype)
    attended = plan.attend(0, q, k, v, scaling=adapter.config.head_dim**-0.5)
    return adapter.norm_out(f_TD + adapter.o_proj(attended.flatten(1)))


def _layout(adapter: Adapter, target: LanguageModel) -> Layout:
    """Describe adapter and head as a native decoder of one layer without an MLP; its inputs are hidden states."""
    assert target.native_decoder is not None
    config = adapter.config
    block = Block(
        q=Projection(adapter.q_proj.weight),
        k=Projection(adapter.k_proj.weight),
        v=Projection(adapter.v_proj.weight),
        out=Projection(adapter.o_proj.weight),
        attention_norm_D=adapter.norm_in.weight,
    )
    return described(
        config,
        target,
        [block],
        mlp_width=0,
        rotary=adapter.rotary_at,
        max_length=target.max_length,
        final_norm_D=adapter.norm_out.weight,
        head=target.native_decoder.head,
    )
