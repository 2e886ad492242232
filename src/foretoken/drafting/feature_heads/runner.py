"""A head over packed rows and a cache of its own: in one native call where the target has one, else by torch.

The token's half of what the first layer reads does not depend on where the token stands, so that it is a table:

    paired    W [norm(e); norm(g)] = W_e norm(e) + W_g norm(g)      table [V, Q], added beside the residual stream
    else      fc [e; g]            = W_e e       + W_g g            table [V, O], part of what enters the layer

With it the first layer of a paired head is an ordinary one that is entered with the feature. A large vocabulary is
multiplied row by row instead.

Letters: T packed rows, F width of the fused depths, W width, Q queries, keys and values together, K draft vocabulary, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.columns import Columns
from foretoken.core.errors import ConfigError
from foretoken.core.threads import threads_for
from foretoken.drafting.draft_head import DraftHead
from foretoken.drafting.feature_heads.block import Block as HeadBlock
from foretoken.drafting.feature_heads.drafter import HeadPass
from foretoken.drafting.feature_heads.head import Entry, FeatureHead, Product
from foretoken.drafting.feature_heads.native.chains import Ahead
from foretoken.drafting.feature_heads.native.pairs import Extent, GrownTree, PairDecoder
from foretoken.drafting.feature_heads.state_head import StateHead
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.native_plan import NativePlan
from foretoken.forward.span import Span
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.quantised.rounding import rounded_as
from foretoken.native.decoder import FusedDecoder
from foretoken.native.layout import Block, Head, Layout, Projection
from foretoken.native.packing import TiledLinear, tiled

_TABLE_BYTES = 64 << 20  # of the token's half at most


class OwnHead(DraftHead):
    """The rows that score a head's tokens, its own or some of the target's; nothing is done to the logits.

    Args:
        weight_KW: the rows.
        ids_K: the tokens that they stand for, increasing; None: all.
        vocab_size: V.
    """

    def __init__(self, weight_KW: Tensor, ids_K: Tensor | None, vocab_size: int) -> None:
        self.weight_KW, self.vocab_size = weight_KW, vocab_size
        self.columns = None if ids_K is None else Columns(ids_K, vocab_size)

    def score(self, hidden_MD: Tensor) -> Tensor:
        return F.linear(hidden_MD.to(self.weight_KW.dtype), self.weight_KW).float()


class Runner:
    """One head for one target, in the target's dtype and on its device.

    Args:
        target: with a fused decoder, the head is fused too.
        head: copied.
        rounding: of ``SCHEMES``, for the layers and the rows that are not the target's head; None: the target's dtype.
    Raises:
        ConfigError: rounding is asked for, but the head does not run in native code, or has rows of no whole groups.
    """

    def __init__(self, target: LanguageModel, head: FeatureHead, rounding: str | None = None) -> None:
        self._target = target
        self._net = deepcopy(head).to(device=target.device, dtype=target.dtype)
        with torch.inference_mode():
            embedding_VW = self._net.embedding_of(target.model).to(target.device, target.dtype)
            weight_KW = self._net.head_of(target.model).detach().to(target.device, target.dtype)
            ids_K = None if head.ids_K is None else head.ids_K.to(target.device)
            self.head: DraftHead = OwnHead(weight_KW, ids_K, target.vocab_size)
            self._native = None
            if target.fused is not None and fits(head):
                scores = target.fused.head if self.odd_rows is None else _rounded(Projection(weight_KW), rounding)
                self._native = _Native(head, embedding_VW, scores, target, rounding)
            elif rounding is not None:
                raise ConfigError(
                    f"dtype={rounding!r}: a rounded head is computed by the native decoder, which this target or its "
                    "head does not run in; leave dtype out"
                )
            else:
                self._embedding_VW = embedding_VW

    @property
    def num_layers(self) -> int:
        """Layers of its cache."""
        return self._net.num_layers

    @property
    def scored(self) -> int:
        """K."""
        return self._target.vocab_size if self.head.columns is None else len(self.head.columns)

    @property
    def odd_rows(self) -> str | None:
        """See :class:`foretoken.drafting.feature_heads.drafter.HeadRunner`."""
        if self.head.columns is not None:
            return f"a vocabulary of its own, of {len(self.head.columns)} tokens"
        return None if self._net.lm_head is None else "a head of its own (lm_head)"

    @property
    def native(self) -> bool:
        """Whether it runs in native code."""
        return self._native is not None

    @property
    def ahead(self) -> Runner | None:
        """See :class:`foretoken.drafting.feature_heads.drafter.HeadRunner`."""
        return self if self._native is not None and self._native.reads_ahead else None

    @torch.inference_mode()
    def features(self, states_TF: Tensor) -> Tensor:
        """See :meth:`foretoken.drafting.feature_heads.drafter.HeadRunner.features`."""
        if self._native is not None:
            return self._native.fuse(states_TF)
        return self._net.fuse(states_TF.to(self._target.device, self._target.dtype))

    @torch.inference_mode()
    def forward(
        self, batch: PackedBatch, cache: KVCache, g_TW: Tensor, *, top: int, rows: HeadRows | None = None
    ) -> tuple[Output, Tensor]:
        """See :meth:`foretoken.drafting.feature_heads.drafter.HeadRunner.forward`."""
        if self._native is not None:
            (made,) = self._native.passes(batch, cache, g_TW, self.head.columns, top, rows)
            return made.output, made.following_MW
        net, plan = self._net, DensePlan(cache, batch)
        ids_T = batch.ids_1T(self._target.device)[0]
        cos_Td, sin_Td = net.rotary_at(batch.positions_1T(self._target.device)[0])
        read, residual_TW = net.open(g_TW, F.embedding(ids_T, self._embedding_VW))
        h_TW = residual_TW
        for number in range(net.num_layers):
            if number:
                read, residual_TW = net.go_on(number, h_TW)
            q, k, v = net.project(read, cos_Td, sin_Td, number)
            attended = plan.attend(number, q, k, v, scaling=net.config.head_dim**-0.5)
            h_TW = net.close(residual_TW, attended.flatten(1), number)
        h_MW = h_TW[batch.wanted]
        if not batch.wanted:
            return Output.of(h_MW), h_MW
        if rows is not None or self.odd_rows is None:  # the target's head, and what the target does to its logits
            return self._target.score(net.read_out(h_MW), top=top, final_norm=False, head=rows), net.following(h_MW)
        logits_MK = self.head.score(net.read_out(h_MW))
        return Output.of(logits_MK, top=top, columns=self.head.columns), net.following(h_MW)

    @torch.inference_mode()
    def passes(
        self,
        batch: PackedBatch,
        cache: KVCache,
        g_TW: Tensor,
        *,
        top: int,
        rows: HeadRows | None = None,
        ahead: Sequence[Ahead],
    ) -> list[HeadPass]:
        """See :meth:`foretoken.drafting.feature_heads.drafter.AheadRunner`."""
        assert self._native is not None
        return self._native.passes(batch, cache, g_TW, self.head.columns, top, rows, ahead)

    @torch.inference_mode()
    def trees(
        self,
        batch: PackedBatch,
        cache: KVCache,
        g_TW: Tensor,
        *,
        extents: Sequence[Extent],
        width: int,
        top: int,
        rows: HeadRows | None = None,
    ) -> list[GrownTree]:
        """See :class:`foretoken.drafting.feature_heads.drafter.AheadRunner`."""
        assert self._native is not None
        return self._native.trees(batch, cache, g_TW, self.head.columns, extents, width, top, rows)


class _Native:
    """The layers, and what surrounds them, as native products: a row's bits depend on its own past only."""

    def __init__(
        self,
        head: FeatureHead,
        embedding_VW: Tensor,
        scores: Projection | Head,
        target: LanguageModel,
        rounding: str | None,
    ) -> None:
        config, width = head.config, head.config.width
        assert target.fused is not None
        self._net, self._dtype, self._library = deepcopy(head).float(), target.dtype, target.fused.library
        if head.paired:
            self._fc = self._product(head.fc.weight)
        norms = [head.first_norm(), *(head.layer(number).input_layernorm for number in range(1, head.num_layers))]
        blocks = tuple(
            in_codes(described(head.layer(number), norm, width if head.paired and not number else 0), rounding)
            for number, norm in enumerate(norms)
        )
        layout = Layout(
            dtype=target.dtype,
            width=width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            mlp_width=config.mlp_width,
            norm_eps=config.norm_eps,
            scaling=config.head_dim**-0.5,
            num_blocks=head.num_layers,
            blocks=blocks,
            rotary=head.rotary_at,
            max_length=target.max_length,
            final_norm_D=torch.ones(width) if head.norm is None else head.norm.weight,
            head=scores,
        )
        entry = head.entry(self._product)
        self._pairs: PairDecoder | None = None
        self._entered: _Entered | None = None
        if entry is None:
            self._pairs = PairDecoder(layout, head.pairing(embedding_VW, _TABLE_BYTES), self._library)
        else:
            self._entered = _Entered(entry, embedding_VW.float(), FusedDecoder(layout, self._library), head.num_layers)

    @property
    def reads_ahead(self) -> bool:
        """Whether several passes are one call."""
        return self._pairs is not None

    def fuse(self, states_TF: Tensor) -> Tensor:
        """[T, W] float32."""
        return self._fc(self._net.prepare(states_TF)) if self._net.paired else self._net.fuse(states_TF.float())

    def passes(
        self,
        batch: PackedBatch,
        cache: KVCache,
        g_TW: Tensor,
        columns: Columns | None,
        top: int,
        rows: HeadRows | None,
        ahead: Sequence[Ahead] = (),
    ) -> list[HeadPass]:
        """See :class:`Runner`."""
        net = self._net
        packed, columns = (None, columns) if rows is None else (rows.packed, rows.columns)
        if self._entered is not None:
            span = replace(self._entered.span(batch, g_TW), final_norm=net.norm is not None)
            found = self._entered.decoder.forward(batch, NativePlan(cache), span, top=top, head=packed)
            return [HeadPass(Output.ranked(found, columns), net.following(found.hidden[net.num_layers]))]
        assert self._pairs is not None
        ids_C = None if columns is None or not ahead else columns.ids_C.int()
        made = self._pairs.passes(batch, cache, g_TW, top=top, head=packed, ids_C=ids_C, ahead=ahead)
        return [HeadPass(Output.ranked(each.ranked, columns), *each[1:]) for each in made]

    def trees(
        self,
        batch: PackedBatch,
        cache: KVCache,
        g_TW: Tensor,
        columns: Columns | None,
        extents: Sequence[Extent],
        width: int,
        top: int,
        rows: HeadRows | None,
    ) -> list[GrownTree]:
        """See :class:`Runner`."""
        assert self._pairs is not None
        packed, columns = (None, columns) if rows is None else (rows.packed, rows.columns)
        ids_C = None if columns is None else columns.ids_C.int()
        return self._pairs.trees(batch, cache, g_TW, extents=extents, width=width, top=top, head=packed, ids_C=ids_C)

    def _product(self, weight_OK: Tensor) -> Product:
        packed = tiled(weight_OK.detach().to(self._dtype)).contiguous()
        linear = TiledLinear(packed, len(weight_OK), None, self._library)

        def product(x_TK: Tensor) -> Tensor:
            with threads_for(x_TK.numel()):
                x_TK = x_TK.to(packed.dtype)
            y_TO: Tensor = linear(x_TK)  # on threads of its own
            with threads_for(y_TO.numel()):
                return y_TO.float()

        return product


class _Entered:
    """Pairs that enter in a way of their own, and the decoder behind it.

    Args:
        embedding_VW: float32.
        depth: of the decoder.
    """

    def __init__(self, entry: Entry, embedding_VW: Tensor, decoder: FusedDecoder, depth: int) -> None:
        self.decoder, self._depth = decoder, depth
        self._entry, self._embedding_VW = entry, embedding_VW
        self._table_VO: Tensor | None = None
        if len(embedding_VW) * entry.width * 4 <= _TABLE_BYTES:
            self._table_VO = torch.cat([entry.of_tokens(piece) for piece in embedding_VW.split(1024)])

    def span(self, batch: PackedBatch, g_TW: Tensor) -> Span:
        """All layers, over what enters of these pairs."""
        ids_T, depth = torch.tensor(batch.tokens), self._depth
        part_TO = self._entry.of_tokens(self._embedding_VW[ids_T]) if self._table_VO is None else self._table_VO[ids_T]
        return Span(0, depth, self._entry.enter(g_TW, part_TO), taps=(depth,), tap_rows=batch.wanted)


def described(layer: HeadBlock, norm: nn.Module | None, skipped: int = 0) -> Block:
    """A layer as the decoder takes it.

    Args:
        norm: before attention.
        skipped: columns of the projections that a table stands for.
    """
    parts, mlp = layer.self_attn, layer.mlp
    q, k, v = (Projection(each.weight[:, skipped:], each.bias) for each in (parts.q_proj, parts.k_proj, parts.v_proj))
    gain = getattr(norm, "weight", None)
    return Block(
        q=q,
        k=k,
        v=v,
        out=Projection(parts.o_proj.weight, parts.o_proj.bias),
        attention_norm_D=gain,
        q_norm_d=None if parts.q_norm is None else parts.q_norm.weight,
        k_norm_d=None if parts.k_norm is None else parts.k_norm.weight,
        gate=Projection(mlp.gate_proj.weight),
        up=Projection(mlp.up_proj.weight),
        down=Projection(mlp.down_proj.weight),
        mlp_norm_D=layer.post_attention_layernorm.weight,
    )


def in_codes(block: Block, rounding: str | None) -> Block:
    """The layer with all its projections rounded, or as it is."""
    names = ("q", "k", "v", "out", "gate", "up", "down")
    parts: dict[str, Any] = {name: _rounded(getattr(block, name), rounding, name) for name in names}
    return replace(block, **parts)


def _rounded(part: Projection, rounding: str | None, name: str = "lm_head") -> Projection:
    if rounding is None:
        return part
    assert isinstance(part.weight_OK, Tensor)
    return part._replace(weight_OK=rounded_as(part.weight_OK, rounding, name, "head"))


def fits(head: StateHead) -> bool:
    """Whether the native decoder takes a head's sizes."""
    config = head.config
    sizes = config.head_dim % 16 == 0 and config.head_dim <= 512 and config.width % 32 == 0
    return sizes and config.mlp_width % 32 == 0
