"""Lattices from the block network (network.py): one pass over the target's states fills all slots.

    cache    row i: keys and values of the states of token i, of committed tokens only; the root x_n has none yet
    pass     k slots behind it, all of which see each other; never committed

So the cache holds what the target's states make of it and nothing else: what is drafted, and refused, leaves no trace.

Letters: T rows, F width of the fused depths, L layers, G key/value heads, d head width, k slots, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.core.columns import Columns
from foretoken.core.needs import HiddenLayers, Needs
from foretoken.core.protocols import Context, Features, Outcome
from foretoken.drafting.feature_heads.block import rotate
from foretoken.drafting.feature_heads.runner import OwnHead, described, fits
from foretoken.drafting.feature_heads.unread import Unread, UnreadStates
from foretoken.methods.diffuspec.lattice import Lattice, LatticeNetwork
from foretoken.methods.diffuspec.network import BlockNetwork
from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.dense import DensePlan
from foretoken.models.fused.decoder import FusedDecoder
from foretoken.models.fused.layout import Layout, Projection
from foretoken.models.fused.packing import TiledLinear, tiled
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.native import NativePlan
from foretoken.models.span import Span

_SLOTS = 1024  # requests at once, at most; buffers grow with use


class BlockLattices(LatticeNetwork):
    """One block network for one target, in the target's dtype and on its device.

    Args:
        network: copied.
        target: whose states are read; with a fused decoder, the network is fused too.
        top: tokens of each slot to rank.
    """

    def __init__(self, network: BlockNetwork, target: LanguageModel, *, top: int) -> None:
        config = network.config
        self.name, self.slots = "the block network", config.slots
        self.needs = Needs(hidden_layers=HiddenLayers(config.depths))
        self._target = target
        self._net = deepcopy(network).to(device=target.device, dtype=target.dtype)
        self._cache = KVCache(network.num_layers, _SLOTS, target.max_length + self.slots)
        self._unread = UnreadStates(target, self._cache, config.depths, final=False)
        self._top = min(top, config.draft_vocab_size)
        with torch.inference_mode():
            self._embedding_VW = self._net.embedding_of(target.model).to(target.device, target.dtype)
            positions = torch.arange(target.max_length + self.slots + 1, device=target.device)
            self._rotary = network.rotary_at(positions)
            self._masks_kW = network.masks.detach().to(target.device)
            self._gains_L1d = network.key_gains().detach().to(target.device) if config.norm_heads else None
            weight_KW = self._net.head_of(target.model).detach().to(target.device, target.dtype)
            ids_K = None if network.ids_K is None else network.ids_K.to(target.device)
            self._columns = None if ids_K is None else Columns(ids_K, target.vocab_size)
            self._head = OwnHead(weight_KW, ids_K, target.vocab_size)
            self._context: nn.Module = self._net.context
            self._enter: nn.Module = self._net.enter
            self._decoder: FusedDecoder | None = None
            if target.fused is not None and fits(network) and network.context.in_features % 32 == 0:
                self._context, self._enter = self._packed(network.context), self._packed(network.enter)
                self._decoder = self._native(network.float(), weight_KW)

    @property
    def native(self) -> bool:
        """Whether it runs in native code."""
        return self._decoder is not None

    @property
    def cache(self) -> KVCache:
        """Of its context rows."""
        return self._cache

    def on_forward(self, features: Sequence[Features]) -> None:
        self._unread.show(features)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._unread.settle(outcomes)

    def release(self, request_id: int) -> None:
        self._unread.release(request_id)

    @torch.inference_mode()
    def lattices(self, contexts: Sequence[Context], asked: Sequence[int] | None = None) -> list[Lattice | None]:
        """One pass for all requests whose rows before the root are known; the head reads the slots that are asked for."""
        found: list[Lattice | None] = [None] * len(contexts)
        ready = [(place, state) for place, context in enumerate(contexts) if (state := self._ready(context))]
        if not ready:
            return found
        self._read([state for _, state in ready])
        batch, lasts = PackedBatch(), []
        for place, state in ready:
            root, rows = contexts[place].tokens[-1], len(contexts[place].tokens) - 1
            self._cache.reserve(state.slot, self.slots)
            batch.add_block(state.slot, rows, [root] * self.slots, first=1)
            assert state.last is not None
            lasts.append(state.last)
        counts = [self.slots if asked is None else min(asked[place], self.slots) for place, _ in ready]
        batch.wanted = [
            segment.start + slot for segment, count in zip(batch.segments, counts, strict=True) for slot in range(count)
        ]
        roots = torch.tensor([contexts[place].tokens[-1] for place, _ in ready], device=self._target.device)
        entered_AW = self._enter(
            torch.cat([self._embedding_VW[roots], torch.cat(lasts)], dim=-1).to(self._target.dtype)
        )
        output = self._pass(batch, (entered_AW.float()[:, None] + self._masks_kW.float()).flatten(0, 1))
        first = 0
        for (place, _), count in zip(ready, counts, strict=True):
            found[place] = Lattice(output, first, count)
            first += count
        return found

    def _ready(self, context: Context) -> Unread | None:
        """A request all of whose rows before the root are known; a draft that was never judged is forgotten."""
        state = self._unread.get(context.request_id)
        if state is None:
            return None
        state.shown = None
        rows, read = len(context.tokens) - 1, self._cache.lengths[state.slot] + state.num_waiting
        return state if rows == read > 0 and rows + self.slots < self._cache.max_length else None

    def _read(self, states: Sequence[Unread]) -> None:
        """Keys and values of the rows that wait, in every layer."""
        fresh = [(state, state.num_waiting) for state in states if state.num_waiting]
        if not fresh:
            return
        s_TF = self._net.fused(torch.cat([state.take(count) for state, count in fresh]))
        cache, lengths = self._cache, self._cache.lengths
        at = [
            position for state, count in fresh for position in range(lengths[state.slot], lengths[state.slot] + count)
        ]
        keys, values = self._heads(s_TF, at)  # [L, G, T, d]
        start = 0
        for state, count in fresh:
            slot, begin, rows = state.slot, lengths[state.slot], slice(start, start + count)
            cache.reserve(slot, count)
            for layer in range(cache.num_layers):
                k_SGCd, v_SGCd = cache.buffers(layer, keys[layer], values[layer])
                k_SGCd[slot, :, begin : begin + count] = keys[layer, :, rows]
                v_SGCd[slot, :, begin : begin + count] = values[layer, :, rows]
            cache.commit(slot, range(count))
            start += count
            state.last = s_TF[start - 1 : start].clone()

    def _heads(self, s_TF: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Keys and values of rows in every layer, [L, G, T, d] both, rotated."""
        config, dtype = self._net.config, self._target.dtype
        product_TO = self._context(s_TF.to(dtype)).float()
        both = product_TO.view(len(positions), 2, config.layers, config.kv_heads, config.head_dim)
        keys, values = both.permute(1, 2, 3, 0, 4)
        if self._gains_L1d is not None:
            gains = self._gains_L1d[:, :, None].float()
            keys = F.rms_norm(keys, keys.shape[-1:], eps=config.norm_eps) * gains
        cos_Td, sin_Td = (table[positions] for table in self._rotary)
        return rotate(keys, cos_Td, sin_Td).to(dtype), values.to(dtype)

    def _pass(self, batch: PackedBatch, entering_TW: Tensor) -> Output:
        """The layers over all slots, the head over those that are wanted, which are ranked."""
        net, depth = self._net, self._net.num_layers
        if self._decoder is not None:
            ranked = self._decoder.forward(batch, NativePlan(self._cache), Span(0, depth, entering_TW), top=self._top)
            return Output.ranked(ranked, self._columns)
        plan = DensePlan(self._cache, batch)
        cos_Td, sin_Td = (table[batch.positions] for table in self._rotary)
        h_TW = entering_TW.to(self._target.dtype)
        for number in range(depth):
            read, residual_TW = net.go_on(number, h_TW)
            q, k, v = net.project(read, cos_Td, sin_Td, number)
            attended = plan.attend(number, q, k, v, scaling=net.config.head_dim**-0.5)
            h_TW = net.close(residual_TW, attended.flatten(1), number)
        return Output.of(self._head.score(net.read_out(h_TW[batch.wanted])), top=self._top, columns=self._columns)

    def _packed(self, linear: nn.Linear) -> nn.Module:
        fused = self._target.fused
        assert fused is not None
        packed = tiled(linear.weight.detach().to(self._target.dtype)).contiguous()
        return TiledLinear(packed, len(linear.weight), None, fused.library)

    def _native(self, network: BlockNetwork, weight_KW: Tensor) -> FusedDecoder:
        """The layers in the fused decoder: a row's bits depend on its own block and past only."""
        config, target = network.config, self._target
        assert target.fused is not None
        whole = network.ids_K is None
        return FusedDecoder(
            Layout(
                dtype=target.dtype,
                width=config.width,
                heads=config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                mlp_width=config.mlp_width,
                norm_eps=config.norm_eps,
                scaling=config.head_dim**-0.5,
                num_blocks=network.num_layers,
                blocks=tuple(
                    described(network.layer(number), network.layer(number).input_layernorm)
                    for number in range(network.num_layers)
                ),
                rotary=network.rotary_at,
                max_length=target.max_length + self.slots + 1,
                final_norm_D=network.norm.weight,
                head=target.fused.head if whole else Projection(weight_KW),
            ),
            target.fused.library,
        )
