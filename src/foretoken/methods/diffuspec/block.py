"""Lattices from the block network (network.py): one pass over the target's states fills all slots.

    cache    row i: keys and values from the target's states of token i, for committed tokens; the root x_n has none yet
    pass     k slots after the context; each slot attends to all slots; never committed

The cache depends on the target's states only, so rejected drafts leave no trace in it.

Letters: T rows, F width of the fused depths, L layers, G key/value heads, d head width, k slots, W width.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.needs import HiddenLayers, Needs
from foretoken.core.protocols import Context, Features, Outcome
from foretoken.core.threads import threads_for
from foretoken.drafting.feature_heads.block import rotate
from foretoken.drafting.feature_heads.native_layers import described, fits, native_block
from foretoken.drafting.feature_heads.own_rows import OwnRows
from foretoken.drafting.feature_heads.pending_states import Pending, PendingStates
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.methods.diffuspec.lattice import Lattice, LatticeNetwork
from foretoken.methods.diffuspec.native.lattice import Block, Filling, LatticeDecoder
from foretoken.methods.diffuspec.network import BlockNetwork
from foretoken.models.language_model import LanguageModel, Output
from foretoken.native.layout import Projection

_SLOTS = 1024  # most requests at once; buffers grow with use


class BlockLattices(LatticeNetwork):
    """One block network for one target, in the target's dtype and on its device.

    Args:
        network: is copied.
        target: provides the states; if it has a native decoder, the network runs natively, too.
        top: number of tokens to rank at each slot.

    Attributes:
        cache: keys and values of the context rows.
    """

    def __init__(self, network: BlockNetwork, target: LanguageModel, *, top: int) -> None:
        config = network.config
        self.name, self.slots = "the block network", config.slots
        self.needs = Needs(hidden_layers=HiddenLayers(config.depths))
        self._target = target
        self._net = deepcopy(network).to(device=target.device, dtype=target.dtype)
        self.cache = KVCache(network.num_layers, _SLOTS, target.max_length + self.slots)
        self._pending = PendingStates(target, self.cache, config.taps)
        self._top = min(top, config.draft_vocab_size)
        with torch.inference_mode():
            self._embedding_VW = self._net.embedding_of(target.model).to(target.device, target.dtype)
            positions = torch.arange(target.max_length + self.slots + 1, device=target.device)
            self._rotary = network.rotary_at(positions)
            weight_KW = self._net.lm_head_of(target.model).detach().to(target.device, target.dtype)
            ids_K = None if network.ids_K is None else network.ids_K.to(target.device)
            self._columns = None if ids_K is None else Columns(ids_K, target.vocab_size)
            self._head = OwnRows(weight_KW, ids_K, target.vocab_size)
            self._decoder: LatticeDecoder | None = None
            if target.native_decoder is not None and fits(config) and config.target_width % 32 == 0:
                self._decoder = self._native(network.float(), weight_KW)

    @property
    def native(self) -> bool:
        """Whether the network runs in native code."""
        return self._decoder is not None

    def on_forward(self, features: Sequence[Features]) -> None:
        self._pending.receive(features)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._pending.settle(outcomes)

    def release(self, request_id: int) -> None:
        self._pending.release(request_id)

    @torch.inference_mode()
    def lattices(self, contexts: Sequence[Context], counts: Sequence[int] | None = None) -> list[Lattice | None]:
        """Run one pass for all requests with known rows before the root; score only the requested slots."""
        found: list[Lattice | None] = [None] * len(contexts)
        known = (self._pending.before_root(each, self.slots) for each in contexts)
        ready = [(place, state) for place, state in enumerate(known) if state is not None]
        if not ready:
            return found
        wanted = [self.slots if counts is None else min(counts[place], self.slots) for place, _ in ready]
        roots = [contexts[place].tokens[-1] for place, _ in ready]
        states = [state for _, state in ready]
        output = self._filled(states, roots, wanted) if self._decoder is None else self._at_once(states, roots, wanted)
        first = 0
        for (place, _), count in zip(ready, wanted, strict=True):
            found[place] = Lattice(output, first, count)
            first += count
        return found

    def _at_once(self, states: Sequence[Pending], roots: Sequence[int], counts: Sequence[int]) -> Output:
        """Read the pending rows and fill the slots in one native call."""
        assert self._decoder is not None
        blocks = [
            Block(state.slot, root, state.num_rows, None if state.num_rows else state.last, count)
            for state, root, count in zip(states, roots, counts, strict=True)
        ]
        waiting = [state.take(state.num_rows) for state in states if state.num_rows]
        with threads_for(sum(map(Tensor.numel, waiting))):
            states_TF = torch.cat(waiting).float() if waiting else torch.empty(0, self._net.context.in_features)
        ranked, lasts = self._decoder.fill(self.cache, states_TF, blocks, top=self._top)
        for state, last_1F in zip(states, lasts, strict=True):
            state.last = last_1F
        return Output.ranked(ranked, self._columns)

    def _filled(self, states: Sequence[Pending], roots: Sequence[int], counts: Sequence[int]) -> Output:
        """Read the pending rows and fill the slots with torch."""
        self._read(states)
        batch, lasts = PackedBatch(), []
        for state, root in zip(states, roots, strict=True):
            self.cache.reserve(state.slot, self.slots)
            batch.add_block(state.slot, self.cache.lengths[state.slot], [root] * self.slots, first=1)
            assert state.last is not None
            lasts.append(state.last)
        batch.wanted = [
            segment.start + slot for segment, count in zip(batch.segments, counts, strict=True) for slot in range(count)
        ]
        e_AW = self._embedding_VW[torch.tensor(roots, device=self._target.device)]
        return self._pass(batch, self._net.entering(e_AW, torch.cat(lasts).to(self._target.dtype)).flatten(0, 1))

    def _read(self, states: Sequence[Pending]) -> None:
        """Write keys and values of the pending rows, in every layer."""
        fresh = [(state, state.num_rows) for state in states if state.num_rows]
        if not fresh:
            return
        s_TF = self._net.fused(torch.cat([state.take(count) for state, count in fresh]))
        cache, lengths = self.cache, self.cache.lengths
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
        """Return keys and values of rows in every layer, [L, G, T, d] both, rotated."""
        dtype = self._target.dtype
        both = self._net.split_context(self._net.context(s_TF.to(dtype)).float())
        keys, values = (each.permute(1, 2, 0, 3) for each in both)
        cos_Td, sin_Td = (table[positions] for table in self._rotary)
        return rotate(keys, cos_Td, sin_Td).to(dtype), values.to(dtype)

    def _pass(self, batch: PackedBatch, h_TW: Tensor) -> Output:
        """Run the layers over all slots, and the LM head over the requested ones."""
        net, depth = self._net, self._net.num_layers
        plan = DensePlan(self.cache, batch)
        cos_Td, sin_Td = (table[batch.positions] for table in self._rotary)
        for number in range(depth):
            layer = net.layer(number)
            q, k, v = layer.project(layer.input_layernorm(h_TW), cos_Td, sin_Td)
            attended = plan.attend(number, q, k, v, scaling=layer.scaling)
            h_TW = layer.close(h_TW, attended.flatten(1))
        return Output.of(self._head.score(net.norm(h_TW[batch.wanted])), top=self._top, columns=self._columns)

    def _native(self, network: BlockNetwork, weight_KW: Tensor) -> LatticeDecoder:
        """Describe the network for native code, where a row's result depends only on its own block and past."""
        config, target = network.config, self._target
        assert target.native_decoder is not None
        whole = network.ids_K is None
        return LatticeDecoder(
            described(
                config,
                target,
                [
                    native_block(each, each.input_layernorm.weight)
                    for each in map(network.layer, range(network.num_layers))
                ],
                mlp_width=config.mlp_width,
                rotary=network.rotary_at,
                max_length=target.max_length + self.slots + 1,
                final_norm_D=network.norm.weight,
                head=target.native_decoder.head if whole else Projection(weight_KW),
            ),
            Filling(
                embedding_VW=self._embedding_VW,
                context=Projection(network.context.weight),
                enter=Projection(network.enter.weight),
                masks_kW=network.masks,
                key_gains_Ld=network.key_gains()[:, 0] if config.norm_heads else None,
                depths=len(config.depths),
            ),
            target.native_decoder.library,
        )
