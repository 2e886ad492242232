"""DFlash: a block of draft tokens from one pass over the target's states; DSpark and DFlash2 draw them in order."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, Law, Sampled
from foretoken.core.needs import Declared, HiddenLayers, Needs, Offers
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome
from foretoken.drafting.draft_builder import DraftBuilder
from foretoken.drafting.feature_heads.own_rows import OwnRows
from foretoken.drafting.feature_heads.pending_states import Pending, PendingStates
from foretoken.drafting.learned_part import find
from foretoken.drafting.published.probe import PROBE, compared
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.methods.dflash.checkpoint import DFlash
from foretoken.methods.dflash.network import Layer
from foretoken.models.language_model import LanguageModel, Output
from foretoken.options.option import Checked, Option

_SLOTS = 1024  # requests at once, at most; buffers grow with use


class DFlashDrafter(Drafter):
    """Drafts a chain with one pass of a block network.

    Paper:   DFlash, arXiv:2602.06036; with a Markov head DSpark, arXiv:2607.05147; DFlash2 has a selector.
    Exact:   each token is drawn from the distribution of its row, with such a head given the drafted tokens before it;
             the draft carries that distribution (a point mass at temperature 0). Lossless under any lossless verifier
             of these draft kinds.
    Differs: the adaptive controller may end a draft before its next token is drawn, depending on q alone; so does
             ``least_confidence``, depending on the tokens before.
    """

    name = "dflash"
    laws: tuple[type[Law], ...] = (Sampled,)
    branches = False
    offers = Offers()
    declared = Declared(learned_part="foretoken.methods.dflash.checkpoint:DFlash")

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of DFlash."""

        head: Annotated[
            str | Path | None,
            Option("A folder of DFlash, DSpark or DFlash2; None: `dflash` in the folder of the target's weights."),
        ] = None
        probe: Annotated[bool, PROBE] = True
        least_confidence: Annotated[
            float, Option("End a draft where its confidence head predicts less; 0: never.", least=0, most=1)
        ] = 0.0

    def __init__(self, config: Config, target: LanguageModel) -> None:
        network, self.explanation = compared(find(DFlash, config.head, target), target, config.probe)
        self.config, self._target, sizes = config, target, network.config
        self.needs = Needs(hidden_layers=HiddenLayers(tuple(sorted(set(sizes.depths)))))
        self._sizes, self._net = sizes, deepcopy(network).to(device=target.device, dtype=target.dtype)
        self._cache = KVCache(sizes.layers, _SLOTS, target.max_length + sizes.rows + 1)
        self._pending = PendingStates(target, self._cache, sizes.taps)
        with torch.inference_mode():
            self._embedding_VW = self._net.embedding_of(target.model).detach().to(target.device, target.dtype)
            weight_KW = self._net.lm_head_of(target.model).detach().to(target.device, target.dtype)
            ids_K = None if network.ids_K is None else network.ids_K.to(target.device)
            self._head = OwnRows(weight_KW, ids_K, target.vocab_size)
            places = torch.arange(target.max_length + sizes.rows + 1, device=target.device)
            self._rotary = network.rotary_at(places)

    def on_forward(self, features: Sequence[Features]) -> None:
        """Take the target's states."""
        self._pending.receive(features)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """One pass for all requests with known rows before the root."""
        drafts = [NO_DRAFT] * len(contexts)
        ready = []
        for place, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            state, draft = self._pending.before_root(context, self._sizes.rows), DraftBuilder(context, budget)
            if state is not None and budget.max_nodes > 0 and budget.max_depth > 0 and draft.pays(1.0, 1.0):
                ready.append((place, state, draft))
        if ready:
            self._read([state for _, state, _ in ready])
            blocks_RBW = self._blocks([(state.slot, draft.context.tokens[-1]) for _, state, draft in ready])
            for (place, _, draft), n_BW in zip(ready, blocks_RBW, strict=True):
                self._draw(draft, n_BW if self._sizes.anchor_predicts else n_BW[1:])
                drafts[place] = draft.finish(Sampled)
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The rows of the root and of accepted nodes become context."""
        self._pending.settle(outcomes)

    def release(self, request_id: int) -> None:
        self._pending.release(request_id)

    # ------------------------------------------------------------------ the network over packed rows

    def _read(self, states: Sequence[Pending]) -> None:
        """Write keys and values of the pending rows in every layer."""
        for state in states:
            count = state.num_rows
            if not count:
                continue
            begin = self._cache.lengths[state.slot]
            rows = slice(begin, begin + count)
            c_TW = self._net.context(state.take(count).to(self._target.device, self._target.dtype))
            self._cache.reserve(state.slot, count)
            for number in range(self._sizes.layers):
                k, v = self._net.context_heads(number, c_TW, *(table[rows] for table in self._rotary))
                keys_SGCd, values_SGCd = self._cache.buffers(number, k, v)
                keys_SGCd[state.slot, :, rows], values_SGCd[state.slot, :, rows] = k, v
            self._cache.commit(state.slot, range(count))

    def _blocks(self, blocks: Sequence[tuple[int, int]]) -> Tensor:
        """Normed states of the blocks' rows, [R, B, W].

        Args:
            blocks: slot and anchor of each request.
        """
        sizes, both_ways, forward = self._sizes, PackedBatch(), PackedBatch()
        for slot, anchor in blocks:
            tokens, prefix = [anchor, *[sizes.mask_token] * (sizes.rows - 1)], self._cache.lengths[slot]
            self._cache.reserve(slot, sizes.rows)
            both_ways.add_block(slot, prefix, tokens, first=0)
            forward.add_chunk(slot, prefix, tokens, wanted=0)
        plans = DensePlan(self._cache, both_ways), DensePlan(self._cache, forward)
        ids_T = torch.tensor(both_ways.tokens, device=self._target.device)
        x_TW = F.embedding(ids_T, self._embedding_VW) * sizes.embedding_scale
        cos, sin = (table[both_ways.positions] for table in self._rotary)
        for number in range(sizes.layers):
            layer = self._net.layer(number)

            def attend(q: Tensor, k: Tensor, v: Tensor, number: int = number, layer: Layer = layer) -> Tensor:
                plan = plans[sizes.causal[number]]
                return plan.attend(number, q, k, v, scaling=layer.scaling, window=layer.window).flatten(1)

            x_TW = layer.over_blocks(x_TW, sizes.rows, (cos, sin), attend)
        n_TW: Tensor = self._net.norm(x_TW)
        return n_TW.unflatten(0, (len(blocks), sizes.rows))

    def _draw(self, draft: DraftBuilder, n_SW: Tensor) -> None:
        """Draw a chain from the rows of its slots, one after the other."""
        sizes, token, state = self._sizes, draft.context.tokens[-1], None
        count = min(len(n_SW), draft.budget.max_nodes, draft.budget.max_depth)
        for n_W, logits_K in zip(n_SW, self._head.score(n_SW[:count]), strict=False):
            logits_K, read, state = self._net.following(logits_K, token, n_W, state)
            least = self.config.least_confidence
            if least and sizes.confidence and float(self._net.confidence_head["proj"](read).sigmoid()) < least:
                return
            output = Output.of(logits_K[None], top=1, columns=self._head.columns)
            node = draft.draw(output, 0, self.name, if_it_pays=True)
            if node is None or not draft.has_room(node):
                return
            draft.frontier, token = [node], draft.tokens[node]
