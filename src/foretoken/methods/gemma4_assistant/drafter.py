"""Gemma 4's assistants: q-only layers over the target's own keys and values draft a chain."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft, GreedyLaws, Law, Sampled
from foretoken.core.errors import ConfigError, MismatchError
from foretoken.core.needs import Declared, HiddenLayers, Needs, Offers
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome
from foretoken.drafting.draft_builder import DraftBuilder
from foretoken.drafting.feature_heads.description import Taps
from foretoken.drafting.feature_heads.pending_states import PendingStates, final_of, fused_states
from foretoken.drafting.learned_part import find
from foretoken.drafting.level_tree import extend_chain
from foretoken.drafting.published.probe import FEWEST, LEAST, PROBE, probe_tokens
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.methods.gemma4_assistant.assistant import Gemma4Assistant, TargetKeys
from foretoken.models.language_model import LanguageModel, Output
from foretoken.options.option import Checked, Option

_SLOTS = 1024  # requests at once, at most


class Gemma4AssistantDrafter(Drafter):
    """Drafts a chain with a published assistant.

    Paper:   none; Gemma 4's model cards, and transformers' Gemma4AssistantForCausalLM.
    Exact:   chains carry the q of their samples (a point mass at temperature 0); tokens outside of the clusters that an
             assistant with centroids scores have q = 0. Lossless under any lossless verifier that knows the kind.
    Differs: transformers drafts the most probable token even where it samples, writes a low score for tokens outside of
             the clusters, lets a draft see the key of a rejected token at the root's position, and one row more in
             sliding layers. The adaptive controller may end a draft, depending on q alone.
    """

    name = "gemma4_assistant"
    laws: tuple[type[Law], ...] = (Sampled,)
    offers = Offers(evidence=(GreedyLaws,))
    declared = Declared(learned_part="foretoken.methods.gemma4_assistant.assistant:Gemma4Assistant")

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of Gemma 4's assistants."""

        head: Annotated[
            str | Path | None,
            Option("A folder of an assistant; None: `gemma4_assistant` in the folder of the target's weights."),
        ] = None
        max_depth: Annotated[int, Option("Longest path of a draft.", least=1, most=64)] = 4
        probe: Annotated[bool, PROBE] = True

    def __init__(self, config: Config, target: LanguageModel) -> None:
        part = find(Gemma4Assistant, config.head, target)
        self._part = deepcopy(part).to(device=target.device, dtype=target.dtype)
        self.config, self._target, depth = config, target, target.num_layers
        self.needs = Needs(hidden_layers=HiddenLayers((depth,)))
        self._read_rows = KVCache(0, _SLOTS, target.max_length)  # lengths only: rows of which states were taken
        self._pending = PendingStates(target, self._read_rows, Taps(final=True))
        self._cache: KVCache | None = None
        with torch.inference_mode():
            self._layers, self.explanation = self._compared(config.probe)

    def attach(self, cache: Any) -> None:
        """Take the engine's cache of the target.

        Raises:
            ConfigError: it does not store the keys of committed tokens, or stores only codes of them.
        """
        if not cache.keeps_keys:
            raise ConfigError(
                f"method '{self.name}' reads the target's keys and values, and the cache of '{self._target.name}' "
                "keeps codes or states of them: leave kv_cache_dtype out, or choose another method"
            )
        self._cache = cache

    def on_forward(self, features: Sequence[Features]) -> None:
        """Keep the target's states."""
        self._pending.receive(features)

    @torch.inference_mode()
    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Grow a chain for each request that all rows before the root are known of."""
        drafts = [NO_DRAFT] * len(contexts)
        for place, (context, budget) in enumerate(zip(contexts, budgets, strict=True)):
            state, depth = self._pending.before_root(context), min(budget.max_depth, self.config.max_depth)
            draft = DraftBuilder(context, replace(budget, max_depth=depth))
            if state is None or budget.max_nodes < 1 or depth < 1 or not draft.pays(1.0, 1.0):
                continue
            if count := state.num_rows:
                state.last = state.take(count)[-1:].clone()
                self._read_rows.commit(state.slot, range(count))
            assert state.last is not None
            self._grow(draft, state.last)
            drafts[place] = draft.finish(Sampled)
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """The rows of the root and of accepted nodes are known."""
        self._pending.settle(outcomes)

    def release(self, request_id: int) -> None:
        self._pending.release(request_id)

    # ------------------------------------------------------------------ the network

    def _grow(self, draft: DraftBuilder, f_1W: Tensor) -> None:
        """Draw a chain; each request by itself, so that the bits of its rows do not depend on other requests."""
        assert self._cache is not None
        tokens, slot = draft.context.tokens, draft.context.slot
        keys = TargetKeys(self._cache, self._layers, [(slot, len(tokens) - 1)])
        while draft.frontier:
            logits_1V, f_1W = self._scored([tokens[-1], *draft.tokens][-1:], f_1W, keys)
            extend_chain(draft, Output.of(logits_1V, top=1), 0, self.name)

    def _scored(self, tokens: Sequence[int], f_RW: Tensor, keys: TargetKeys) -> tuple[Tensor, Tensor]:
        tokens_R, positions_R = torch.tensor([tokens, [length for _, length in keys.rows]], device=self._target.device)
        e_RW = self._target.model.get_input_embeddings()(tokens_R).to(self._target.dtype)
        return self._part.read(e_RW, f_RW.to(e_RW), positions_R, keys)

    def _compared(self, probe: bool) -> tuple[list[int], str]:
        """The target's layers that are read, and where first drafts agree with it on a short text.

        Raises:
            MismatchError: at hardly any place, or its keys are of another size.
        """
        target, depth = self._target, self._target.num_layers
        tokens = probe_tokens(target) if probe else []
        few = len(tokens) < FEWEST
        tokens, cache = [0, 0] if few else tokens, target.new_cache(1)
        self.attach(cache)
        batch = PackedBatch.of_text(tokens, cache)
        slot = batch.segments[0].slot
        output = target.forward(batch, DensePlan(cache, batch), span=Span(0, depth, taps=(depth,)))
        cache.commit(slot, range(len(tokens)))
        layers = self._part.layers_of(target, cache)
        if few:
            return layers, "only the assistant's shapes were compared with the target"
        final = final_of(Taps(final=True), target)
        f_RW = fused_states([output.hidden[depth][:-1]], [depth], final, target.dtype)
        keys = TargetKeys(cache, layers, [(slot, each) for each in range(1, len(tokens))])
        best_R = self._scored(tokens[1:], f_RW, keys)[0].argmax(dim=-1).tolist()
        share = sum(map(int.__eq__, best_R, output.best[1:])) / len(best_R)
        said = "first drafts agree with the target's greedy tokens at"
        if share < LEAST:
            raise MismatchError(
                f"the assistant's {said} {100 * share:.0f} % of a short text only, so it is not one of '{target.name}' "
                "or damaged: name this target's, or give probe=False to draft with it as it is"
            )
        return layers, f"the assistant's {said} {100 * share:.0f} % of a short text"
