"""EAGLE's head over packed rows and a cache of its own: in one native call where the target has one, else by torch.

The token's half of what the block reads does not depend on where the token stands, so that it is a table:

    EAGLE-3    W [norm(e); norm(g)] = W_e norm(e) + W_g norm(g)      table [V, Q], added beside the residual stream
    EAGLE-2    fc [e; g]            = W_e e       + W_g g            table [V, W], added to what enters the layer

With it an EAGLE-3 block is an ordinary layer that is entered with the feature. A large vocabulary is multiplied row
by row instead.

Letters: T packed rows, F width of the fused depths, W width, Q queries, keys and values together, K draft vocabulary, V
vocabulary.
"""

from __future__ import annotations

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.drafting.draft_head import DraftHead
from foretoken.methods.eagle.network import Eagle
from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.dense import DensePlan
from foretoken.models.fused.decoder import FusedDecoder
from foretoken.models.fused.layout import Block, Head, Layout, Projection
from foretoken.models.fused.packing import TiledLinear, tiled
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.native import NativePlan
from foretoken.models.span import Span

_TABLE_BYTES = 64 << 20  # of the token's half at most


class OwnHead(DraftHead):
    """The rows that score an EAGLE head's tokens: its own, or the target's; nothing is done to the logits.

    Args:
        weight_KW: the rows.
        ids_K: the tokens that they stand for, increasing; None: all.
        vocab_size: V.
    """

    def __init__(self, weight_KW: Tensor, ids_K: Tensor | None, vocab_size: int) -> None:
        self.weight_KW, self.ids_K, self.vocab_size = weight_KW, ids_K, vocab_size

    def score(self, hidden_MD: Tensor) -> Tensor:
        return F.linear(hidden_MD.to(self.weight_KW.dtype), self.weight_KW).float()


class Runner:
    """One head for one target, in the target's dtype and on its device.

    Args:
        target: with a fused decoder, the head is fused too.
        head: copied.
    """

    def __init__(self, target: LanguageModel, head: Eagle) -> None:
        self._target = target
        self._net = deepcopy(head).to(device=target.device, dtype=target.dtype)
        with torch.inference_mode():
            embedding_VW = self._net.embedding_of(target.model).to(target.device, target.dtype)
            weight_KW = self._net.head_of(target.model).detach().to(target.device, target.dtype)
            ids_K = None if head.ids_K is None else head.ids_K.to(target.device)
            self.head: DraftHead = OwnHead(weight_KW, ids_K, target.vocab_size)
            self._native = None
            if target.fused is not None and _fits(head):
                shared = head.lm_head is None and head.ids_K is None
                scores = target.fused.head if shared else Projection(weight_KW)
                self._native = _Native(head, embedding_VW.float(), scores, target)
            else:
                self._embedding_VW = embedding_VW

    @property
    def native(self) -> bool:
        """Whether it runs in native code."""
        return self._native is not None

    @torch.inference_mode()
    def features(self, states_TF: Tensor) -> Tensor:
        """[T, W] of the target's states, the depths side by side; a row's bits depend on that row only."""
        if self._native is not None:
            return self._native.fuse(states_TF)
        return self._net.fuse(states_TF.to(self._target.dtype))

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, cache: KVCache, g_TW: Tensor, *, top: int) -> tuple[Output, Tensor]:
        """Run pairs; keys and values go into the cache.

        Args:
            batch: a row for each pair, with its token.
            g_TW: their features.
            top: how many tokens of each wanted row to rank.
        Returns:
            logits of the wanted rows over the target's vocabulary with the ranked tokens, and the features that
            follow these rows, [M, W].
        """
        if self._native is not None:
            return self._native.forward(batch, cache, g_TW, self.head, top)
        net, plan = self._net, DensePlan(cache, batch)
        ids_T = batch.ids_1T(self._target.device)[0]
        cos_Td, sin_Td = net.rotary_at(batch.positions_1T(self._target.device)[0])
        read, residual_TW = net.open(g_TW, F.embedding(ids_T, self._embedding_VW))
        q, k, v = net.project(read, cos_Td, sin_Td)
        attended = plan.attend(0, q, k, v, scaling=net.config.head_dim**-0.5)
        h_MW = net.close(residual_TW, attended.flatten(1))[batch.wanted]
        if not batch.wanted:
            return Output.of(h_MW), h_MW
        logits_MK = self.head.score(net.read_out(h_MW))
        return on_target(Output.of(logits_MK, top=top), self.head), net.following(h_MW)


class _Native:
    """The block, and what surrounds it, as native products: a row's bits depend on its own past only."""

    def __init__(self, head: Eagle, embedding_VW: Tensor, scores: Projection | Head, target: LanguageModel) -> None:
        config, block = head.config, head.block
        self._net, self._dtype = deepcopy(head).float(), target.dtype
        parts, width = block.self_attn, config.width
        linears = (parts.q_proj, parts.k_proj, parts.v_proj)
        self._fc = self._linear(head.fc.weight if head.three else head.fc.weight[:, width:])
        token_OW = torch.cat([each.weight[:, :width] for each in linears]) if head.three else head.fc.weight[:, :width]
        self._embedding_VW, self._table_VO = embedding_VW, None
        self._token = self._linear(token_OW)
        if len(embedding_VW) * len(token_OW) * 4 <= _TABLE_BYTES:
            pieces = [self._token_half(piece) for piece in embedding_VW.split(1024)]
            self._table_VO = torch.cat(pieces)
        self._normed = head.three and not config.norm_before_residual
        q, k, v = (Projection(each.weight[:, width:] if head.three else each.weight, each.bias) for each in linears)
        mlp = block.mlp
        layer = Block(
            q=q,
            k=k,
            v=v,
            out=Projection(parts.o_proj.weight, parts.o_proj.bias),
            attention_norm_D=block.hidden_norm.weight if self._normed else None,
            q_norm_d=None if parts.q_norm is None else parts.q_norm.weight,
            k_norm_d=None if parts.k_norm is None else parts.k_norm.weight,
            gate=Projection(mlp.gate_proj.weight),
            up=Projection(mlp.up_proj.weight),
            down=Projection(mlp.down_proj.weight),
            mlp_norm_D=block.post_attention_layernorm.weight,
        )
        self._decoder = FusedDecoder(
            Layout(
                dtype=target.dtype,
                width=width,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                mlp_width=config.mlp_width,
                norm_eps=config.norm_eps,
                scaling=config.head_dim**-0.5,
                num_blocks=1,
                blocks=(layer,),
                rotary=head.rotary_at,
                max_length=target.max_length,
                final_norm_D=head.norm.weight if head.three else torch.ones(width),
                head=scores,
            )
        )

    def fuse(self, states_TF: Tensor) -> Tensor:
        """[T, W] float32."""
        net = self._net
        if not net.three:
            return states_TF.float()
        if net.config.norm_before_fc:
            states_TF = net.input_norm(states_TF)
        if net.config.fc_norm:
            pieces = states_TF.split(net.config.target_width, dim=-1)
            states_TF = torch.cat([norm(each) for norm, each in zip(net.fc_norm, pieces, strict=True)], dim=-1)
        found: Tensor = self._fc(states_TF.to(self._dtype)).float()
        return found

    def forward(
        self, batch: PackedBatch, cache: KVCache, g_TW: Tensor, head: DraftHead, top: int
    ) -> tuple[Output, Tensor]:
        """See :meth:`Runner.forward`."""
        net = self._net
        beside_TO = self._beside(batch.tokens)
        if not net.three:
            entering = self._fc(g_TW.to(self._dtype)).float() + beside_TO
            if net.fc.bias is not None:
                entering = entering + net.fc.bias
        else:
            entering = g_TW if self._normed else net.block.hidden_norm(g_TW)
        span = Span(0, 1, entering, taps=(1,), tap_rows=batch.wanted, final_norm=net.three)
        beside = beside_TO if net.three else None
        found = self._decoder.forward(batch, NativePlan(cache), span, top=top, beside_TQ=beside)
        return on_target(Output.ranked(found), head), net.following(found.hidden[1])

    def _beside(self, tokens: list[int]) -> Tensor:
        ids_T = torch.tensor(tokens)
        if self._table_VO is not None:
            return self._table_VO[ids_T]
        return self._token_half(self._embedding_VW[ids_T])

    def _token_half(self, e_TW: Tensor) -> Tensor:
        read = self._net.block.input_layernorm(e_TW) if self._net.three else e_TW
        found: Tensor = self._token(read.to(self._dtype)).float()
        return found

    def _linear(self, weight_OK: Tensor) -> nn.Module:
        packed = tiled(weight_OK.detach().to(self._dtype)).contiguous()
        return TiledLinear(packed, len(weight_OK), None)


def on_target(output: Output, head: DraftHead) -> Output:
    """What was found among a head's own tokens, as the target's tokens; the logits are -inf at all others."""
    if head.ids_K is None or not len(output.logits_MV):
        return output
    best = head.tokens_of(torch.tensor(output.best, device=head.ids_K.device)).tolist()
    top_ids = head.tokens_of(torch.tensor(output.top_ids, dtype=torch.int64, device=head.ids_K.device)).tolist()
    logits_MV = head.on_vocabulary(output.logits_MV.float())
    return Output(logits_MV, best, output.peaks, top_ids, output.top_shares, output.hidden)


def _fits(head: Eagle) -> bool:
    """Whether the native decoder takes a head's sizes."""
    config = head.config
    sizes = config.head_dim % 16 == 0 and config.head_dim <= 512 and config.width % 32 == 0
    return sizes and config.mlp_width % 32 == 0
