"""LongSpec's network in service: one level of the drafts of all requests at a time, each over separate keys.

    level    rows of all requests ── self-attention ────── cross-attention ──────────────── MLP, norm, the target's head
                                     each over its ring    each over its slot of the target's cache, read in place

If the target has a native decoder, a level is one native call, and so are all levels of a batch of chains
(native/target_layer.py). Otherwise torch computes the pieces of network.py, with a table of the first projections,
which depend on the token alone. Tests compare both with ``LongSpec.forward``.

Letters: R rows, H query heads, G key/value heads, P keys of the target, d head width, W width, V vocabulary, O queries,
keys and values together.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.drafting.feature_heads.native.chains import Prefetch
from foretoken.drafting.feature_heads.native_layers import described
from foretoken.drafting.prefetch import DraftPass
from foretoken.drafting.ring import Ring
from foretoken.forward import anatomy, target_kv
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.target_kv import apply_rotary
from foretoken.methods.longspec.native.target_layer import CrossAttentionDecoder, TargetPrefix
from foretoken.methods.longspec.network import LongSpec
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output
from foretoken.native.decoder import NativeDecoder
from foretoken.native.layout import Block, Projection
from foretoken.native.rotary import RotaryTables

KeysValues = tuple[Tensor, Tensor]  # [G, ., d] each

_TABLE_BYTES = 64 << 20  # maximum size of the table of all tokens' queries, keys and values
_PIECE = 1024  # tokens of the table to compute at once


@dataclass(slots=True)
class Level:
    """One request's part of a forward: the root, or the nodes of one level.

    Attributes:
        slot: slot of the ring.
        target_slot: slot of the target's cache.
        root: position of the root; every level reads this many keys of the target.
        depth: distance of the rows from the root.
        tokens: of the rows.
        tail: rows of the draft that already follow the ring's tokens.
        ancestors: for each row, its visible rows of the tail; None: all of them, as in a chain.
    """

    slot: int
    target_slot: int
    root: int
    depth: int
    tokens: Sequence[int]
    tail: int = 0
    ancestors: Sequence[Sequence[int]] | None = None


class Runner:
    """One head for one target, in the target's dtype and on its device.

    Args:
        target: if it has a native decoder, the network runs natively, too.
        head: is copied.
        ring: stores the rows' own keys and values.
    """

    def __init__(self, target: LanguageModel, head: LongSpec, ring: Ring) -> None:
        config = self._config = head.config
        self._target, self._ring = target, ring
        self._net = deepcopy(head).to(device=target.device, dtype=target.dtype)
        self._own_head = None if head.own_head is None else head.own_head.to(target.device, target.dtype)
        self._rotary = RotaryTables(target_kv.find(target.model, target.name).angles)
        with torch.inference_mode():
            table: Any = anatomy.find(target.model).embedding
            self._embedding_VW: Tensor = table.weight.detach()[:, : config.width].contiguous()
            num_rows, inner = len(self._embedding_VW), (config.heads + 2 * config.kv_heads) * config.head_dim
            self._table_VO = None
            if num_rows * inner * self._embedding_VW.element_size() <= _TABLE_BYTES:
                pieces = [self._made(ids_R) for ids_R in torch.arange(num_rows, device=target.device).split(_PIECE)]
                self._table_VO = torch.cat(pieces)
        self._native: CrossAttentionDecoder | None = None
        if target.native_decoder is not None and config.mlp_width % 32 == 0 and config.width % 32 == 0:
            self._native = self._described(head, target.native_decoder)

    @property
    def prefetches(self) -> bool:
        """Whether one call computes several levels of a chain."""
        return self._native is not None

    def keys(self, tokens: Sequence[int], begin: int) -> KeysValues:
        """Return keys and values of consecutive tokens, the first of them at position ``begin``."""
        ids_R = torch.tensor(tokens, device=self._target.device)
        angles = self._at(torch.arange(begin, begin + len(tokens), device=self._target.device))
        _, k_GRd, v_GRd = self._project(ids_R, angles)
        return k_GRd, v_GRd

    def read(
        self,
        levels: Sequence[Level],
        cache: KVCache,
        *,
        top: int,
        rows: HeadRows | None = None,
        prefetch: Sequence[Prefetch] = (),
    ) -> list[DraftPass]:
        """Run one forward and score all its rows with the target's head.

        Args:
            cache: the target's.
            top: number of tokens of each row to rank.
            rows: rows of the LM head to score; None: all.
            prefetch: for chains at their root, number of further levels in the native call.
        Returns:
            one item per level: the first, and natively with ``prefetch`` the further ones.
        """
        if self._native is None:
            return [DraftPass(self._written_out(levels, cache, top, rows))]
        batch, prefixes, positions = PackedBatch(), [], []
        for level in levels:
            place, count = self._ring.place(level.slot), len(level.tokens)
            if level.ancestors is None:
                batch.add_chunk(level.slot, place, level.tokens, wanted=count, tail=level.tail)
            else:
                batch.add_level(
                    level.slot, place, level.tokens, depths=[level.depth] * count, tail=level.tail,
                    tail_depths=[0] * level.tail, ancestors=level.ancestors,
                )  # fmt: skip
            positions += [level.root + level.depth] * count
            prefixes.append(TargetPrefix(level.target_slot, level.root))
        batch.positions = positions
        packed, columns = (None, None) if rows is None else (rows.packed, rows.columns)
        ids_C = None if columns is None or not prefetch else columns.ids_C.int()
        made = self._native.passes(
            batch, self._ring.cache, prefixes, cache, top=top, head=packed, ids_C=ids_C, prefetch=prefetch
        )
        return [DraftPass.of(each, columns) for each in made]

    # ------------------------------------------------------------------ native

    def _described(self, head: LongSpec, decoder: NativeDecoder) -> CrossAttentionDecoder:
        """Describe the block as two native layers: self-attention without an MLP, then cross-attention with the MLP."""
        config = head.config
        self_attention = Block(
            q=Projection(head.q_proj.weight, head.q_proj.bias),
            k=Projection(head.k_proj.weight, head.k_proj.bias),
            v=Projection(head.v_proj.weight, head.v_proj.bias),
            out=Projection(head.o_proj.weight),
            attention_norm_D=head.norm_self.weight,
            window=config.seen,
        )
        cross_attention = Block(
            q=Projection(head.cross_q_proj.weight, head.cross_q_proj.bias),
            k=None,
            v=None,
            out=Projection(head.cross_o_proj.weight),
            attention_norm_D=head.norm_cross.weight,
            gate=Projection(head.gate_proj.weight),
            up=Projection(head.up_proj.weight),
            down=Projection(head.down_proj.weight),
            mlp_norm_D=head.norm_mlp.weight,
        )
        layout = described(
            config,
            self._target,
            (self_attention, cross_attention),
            mlp_width=config.mlp_width,
            rotary=target_kv.find(self._target.model, self._target.name).angles,
            max_length=config.max_length,
            final_norm_D=head.norm_out.weight,
            head=decoder.head if head.own_head is None else Projection(head.own_head),
            embedding_VD=self._embedding_VW,
        )
        return CrossAttentionDecoder(layout, decoder, config.layer)

    # ------------------------------------------------------------------ with torch

    def _written_out(self, levels: Sequence[Level], cache: KVCache, top: int, rows: HeadRows | None) -> Output:
        device, groups = self._target.device, self._config.kv_heads
        ids_R = torch.tensor([token for level in levels for token in level.tokens], device=device)
        positions = [level.root + level.depth for level in levels for _ in level.tokens]
        angles = self._at(torch.tensor(positions, device=device))
        q_HRd, k_GRd, v_GRd = self._project(ids_R, angles)
        places, first = [], 0
        for level in levels:
            places.append(slice(first, first + len(level.tokens)))
            first = places[-1].stop
        own = [
            self._self_attention(q_HRd[:, each], k_GRd[:, each], v_GRd[:, each], level)
            for level, each in zip(levels, places, strict=True)
        ]
        e_RW = F.embedding(ids_R, self._embedding_VW)
        h_RW = self._net.self_attention_out(e_RW, torch.cat(own))
        q_HRd = apply_rotary(self._net.cross_queries(h_RW), *angles).to(e_RW.dtype)
        target = []
        for level, each in zip(levels, places, strict=True):
            if not level.root:  # the cache may not exist yet
                target.append(e_RW.new_zeros(len(level.tokens), self._config.heads * self._config.head_dim))
                continue
            keys_GPd, values_GPd = cache.committed(self._config.layer, level.target_slot)
            prefix = keys_GPd[:groups, : level.root], values_GPd[:groups, : level.root]
            target.append(_attend(q_HRd[:, each], *(rows_GPd.to(q_HRd.dtype) for rows_GPd in prefix)))
        out_RW = self._net.output(self._net.cross_attention_out(h_RW, torch.cat(target)))
        if self._own_head is not None:
            return Output.of(F.linear(out_RW, self._own_head).float(), top=top)
        return self._target.score(out_RW, top=top, final_norm=False, head=rows)

    def _self_attention(self, q_HRd: Tensor, k_GRd: Tensor, v_GRd: Tensor, level: Level) -> Tensor:
        """Return [R, H d]: append the rows to the draft; each attends to the ring and its ancestors, within the
        window.
        """
        self._ring.draft(level.slot, level.tail, k_GRd, v_GRd)
        count, reach = len(level.tokens), self._config.seen - 1
        rows = level.tail + count
        keys_GLd, values_GLd = self._ring.read(level.slot, max(0, reach - level.depth), rows)
        seen_RL = None
        if level.ancestors is not None or level.depth > reach:
            before = keys_GLd.shape[1] - rows
            seen_RL = torch.zeros(count, before + rows, dtype=torch.bool)
            seen_RL[:, :before] = True
            for row in range(count):
                above = sorted(range(level.tail) if level.ancestors is None else level.ancestors[row])
                nearest = above[max(0, len(above) - reach) :]
                seen_RL[row, [before + each for each in (*nearest, level.tail + row)]] = True
            seen_RL = seen_RL.to(self._target.device)
        return _attend(q_HRd, keys_GLd, values_GLd, seen_RL)

    def _project(self, ids_R: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [H, R, d], keys and values [G, R, d] of tokens at positions."""
        made_RO = self._made(ids_R) if self._table_VO is None else self._table_VO[ids_R]
        heads, groups = self._config.heads, self._config.kv_heads
        each_ORd = made_RO.unflatten(-1, (-1, self._config.head_dim)).transpose(0, 1)
        q_k, v_GRd = each_ORd[: heads + groups], each_ORd[heads + groups :]
        q_k = apply_rotary(q_k, *angles).to(v_GRd.dtype)
        return q_k[:heads], q_k[heads:], v_GRd

    def _made(self, ids_R: Tensor) -> Tensor:
        """Return the first projections of tokens, [R, O]."""
        parts = self._net.self_projections(F.embedding(ids_R, self._embedding_VW))
        return torch.cat([part.transpose(-2, -3).flatten(-2) for part in parts], dim=-1)

    def _at(self, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        tables = self._rotary.up_to(int(positions_R.max()) + 1)
        return tables.cos_Nh[positions_R], tables.sin_Nh[positions_R]


def _attend(q_HRd: Tensor, k_GLd: Tensor, v_GLd: Tensor, seen_RL: Tensor | None = None) -> Tensor:
    """Return [R, H d]. The query heads of a group are folded into rows, so each key is read once."""
    heads, rows, width = q_HRd.shape
    groups = len(k_GLd)
    folded = q_HRd.reshape(1, groups, -1, width)
    mask = None if seen_RL is None else seen_RL.repeat(heads // groups, 1)
    found = F.scaled_dot_product_attention(folded, k_GLd[None], v_GLd[None], attn_mask=mask)
    return found.view(heads, rows, width).transpose(0, 1).flatten(1)
