"""LongSpec's network in service: one level of the drafts of all requests at a time, each over its own keys.

    token ── table: query, key, value      they follow from the token alone, and are turned by its position
    level    rows of all requests ── window attention ── far attention ── MLP, norm, the target's head
                                     each its ring        each its slot of the target's cache

Beside a fused target the matrices are packed for its products, and all behind the attentions is one native call.

Letters: R rows, H query heads, G key/value heads, d head width, W width, V vocabulary, O queries, keys and values
together, N positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.methods.longspec import far
from foretoken.methods.longspec.far import KeysValues
from foretoken.methods.longspec.network import LongSpec
from foretoken.models import anatomy, far_keys
from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.far_keys import turned
from foretoken.models.fused.decoder import FusedDecoder
from foretoken.models.fused.layout import Block, Layout, Projection
from foretoken.models.fused.packing import TiledLinear, tiled
from foretoken.models.fused.rotary import RotaryTables
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.native import NativePlan
from foretoken.models.span import Span

_TABLE_BYTES = 64 << 20  # of queries, keys and values of all tokens, at most
_PIECE = 1024  # tokens whose part of the table is computed at once
_PACKED = ("o_proj", "far_q_proj", "far_o_proj")
_IDLE = 16  # width of the head that the fused decoder's attention has where there is nothing to attend to
_MOST_ROWS = 1 << 14  # of a forward


@dataclass(slots=True)
class Level:
    """One request's part of a forward: the root, or the nodes of one level.

    Attributes:
        tokens: of its rows.
        root: whether they are the root.
        position: of all of them.
        near: given the rows' own keys and values, those that they see of ring and draft.
        seen: bool [R, columns that ``near`` gives]; None: every row sees all of them.
        far: the target's, all of them or those that were chosen.
        chosen: of a root, what the levels behind it read; made by :meth:`Runner.read`.
    """

    tokens: Sequence[int]
    root: bool
    position: int
    near: Callable[[Tensor, Tensor], KeysValues]
    seen: Tensor | None
    far: KeysValues
    chosen: KeysValues | None = None


class Runner:
    """One head for one target, in the target's dtype and on its device.

    Args:
        target: with a fused decoder, the head's matrices are packed, too.
        head: copied.
    """

    def __init__(self, target: LanguageModel, head: LongSpec) -> None:
        self._target = target
        self._shape = far_keys.find(target.model, target.name)
        self._net = deepcopy(head).to(device=target.device, dtype=target.dtype)
        self._rotary = RotaryTables(self._shape.angles)
        self._ending: _Ending | None = None
        with torch.inference_mode():
            table: Any = anatomy.find(target.model).embedding
            self._embedding_VW: Tensor = table.weight.detach()
            num_rows, inner = (
                len(self._embedding_VW),
                (self._shape.heads + 2 * self._shape.kv_heads) * self._shape.head_dim,
            )
            self._table_VO = None
            if num_rows * inner * self._embedding_VW.element_size() <= _TABLE_BYTES:
                pieces = [self._made(ids_R) for ids_R in torch.arange(num_rows, device=target.device).split(_PIECE)]
                self._table_VO = torch.cat(pieces)
            if target.fused is not None:
                for name in _PACKED:
                    linear: nn.Linear = getattr(self._net, name)
                    bias = None if linear.bias is None else linear.bias.detach()
                    packed = tiled(linear.weight.detach()).contiguous()
                    setattr(self._net, name, TiledLinear(packed, linear.out_features, bias, target.fused.library))
                if head.config.mlp_width % 32 == 0:
                    self._ending = _Ending(head, target.fused, target.dtype)

    def keys(self, tokens: Sequence[int], begin: int) -> KeysValues:
        """Keys and values of tokens, the first of them at a position."""
        ids_R = torch.tensor(tokens, device=self._target.device)
        angles = self._at(torch.arange(begin, begin + len(tokens), device=self._target.device))
        _, k_GRd, v_GRd = self._project(ids_R, angles)
        return k_GRd, v_GRd

    def read(self, levels: Sequence[Level], *, top: int, rows: HeadRows | None = None) -> Output:
        """One forward: what the target's head says of all rows.

        Args:
            top: tokens of each row to rank.
            rows: of the head, scored in place of all.
        """
        device = self._target.device
        ids_R = torch.tensor([token for level in levels for token in level.tokens], device=device)
        positions = [level.position for level in levels for _ in level.tokens]
        angles = self._at(torch.tensor(positions, device=device))
        q_HRd, k_GRd, v_GRd = self._project(ids_R, angles)
        places, first = [], 0
        for level in levels:
            places.append(slice(first, first + len(level.tokens)))
            first = places[-1].stop
        near = [
            _attend(q_HRd[:, each], level.near(k_GRd[:, each], v_GRd[:, each]), level.seen)
            for level, each in zip(levels, places, strict=True)
        ]
        e_RW = F.embedding(ids_R, self._embedding_VW)
        h_RW, far_q_HRd = self._net.look_back(e_RW, _stacked(near))
        far_q_HRd = turned(far_q_HRd, *angles).to(e_RW.dtype)
        seen = []
        for level, each in zip(levels, places, strict=True):
            found_RW, weights_GFP = far.attend(far_q_HRd[:, each], level.far)
            seen.append(found_RW)
            if level.root:
                level.chosen = far.chosen(weights_GFP, level.far)
        h_RW = self._net.look_far(h_RW, _stacked(seen))
        if self._ending is not None:
            return self._ending.read(h_RW, top, rows)
        return self._target.score(self._net.close(h_RW), top=top, final_norm=False, head=rows)

    def _project(self, ids_R: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [H, R, d], keys and values [G, R, d] of tokens at positions."""
        made_RO = self._made(ids_R) if self._table_VO is None else self._table_VO[ids_R]
        heads, groups = self._shape.heads, self._shape.kv_heads
        each_ORd = made_RO.unflatten(-1, (-1, self._shape.head_dim)).transpose(0, 1)
        q_k, v_GRd = each_ORd[: heads + groups], each_ORd[heads + groups :]
        q_k = turned(q_k, *angles).to(v_GRd.dtype)
        return q_k[:heads], q_k[heads:], v_GRd

    def _made(self, ids_R: Tensor) -> Tensor:
        """[R, O]: what the first projections make of tokens."""
        parts = self._net.project(F.embedding(ids_R, self._embedding_VW))
        return torch.cat([part.transpose(-2, -3).flatten(-2) for part in parts], dim=-1)

    def _at(self, positions_R: Tensor) -> tuple[Tensor, Tensor]:
        tables = self._rotary.up_to(int(positions_R.max()) + 1)
        return tables.cos_Nh[positions_R], tables.sin_Nh[positions_R]


class _Ending:
    """MLP, norm and head as one native call.

    The decoder has no layer without attention: this one's is a single narrow head that adds zero.

    Args:
        fused: the target's, whose head is shared.
    """

    def __init__(self, head: LongSpec, fused: FusedDecoder, dtype: torch.dtype) -> None:
        config = head.config
        nothing = Projection(torch.zeros(_IDLE, config.width))
        block = Block(
            q=nothing,
            k=nothing,
            v=nothing,
            out=Projection(torch.zeros(config.width, _IDLE)),
            attention_norm_D=None,
            gate=Projection(head.gate_proj.weight),
            up=Projection(head.up_proj.weight),
            down=Projection(head.down_proj.weight),
            mlp_norm_D=head.norm_mlp.weight,
        )
        layout = Layout(
            dtype=dtype,
            width=config.width,
            heads=1,
            kv_heads=1,
            head_dim=_IDLE,
            mlp_width=config.mlp_width,
            norm_eps=config.norm_eps,
            scaling=1.0,
            num_blocks=1,
            blocks=(block,),
            rotary=lambda positions_N: (torch.ones(len(positions_N), _IDLE // 2),) * 2,
            max_length=_MOST_ROWS,
            final_norm_D=head.norm_out.weight,
            head=fused.head,
        )
        self._decoder = FusedDecoder(layout, fused.library)
        self._cache = KVCache(1, 1, _MOST_ROWS)

    def read(self, h_RW: Tensor, top: int, rows: HeadRows | None) -> Output:
        """See :meth:`Runner.read`."""
        batch = PackedBatch()
        self._cache.reserve(0, len(h_RW))
        batch.add_chunk(0, 0, [0] * len(h_RW), wanted=len(h_RW))
        packed, columns = (None, None) if rows is None else (rows.packed, rows.columns)
        found = self._decoder.forward(batch, NativePlan(self._cache), Span(0, 1, h_RW), top=top, head=packed)
        return Output.ranked(found, columns)


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _attend(q_HRd: Tensor, over: KeysValues, seen: Tensor | None) -> Tensor:
    """[R, H d]. The query heads of a group stand as rows: its keys are read once."""
    heads, rows, width = q_HRd.shape
    k_GKd, v_GKd = over
    groups = len(k_GKd)
    folded = q_HRd.reshape(1, groups, -1, width)
    mask = None if seen is None else seen.repeat(heads // groups, 1)
    found = F.scaled_dot_product_attention(folded, k_GKd[None], v_GKd[None], attn_mask=mask)
    return found.view(heads, rows, width).transpose(0, 1).flatten(1)
