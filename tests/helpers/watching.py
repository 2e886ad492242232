"""An engine under watch: after every step its caches are what a fresh forward of the committed tokens leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.language_model import LanguageModel


class Watch:
    """Looks at an engine after every step, and counts what its target computes.

    Attributes:
        steps: how many there were.
        rows: of all forwards that verify.
        depths: at which drafts resume, one for each draft.
        sizes: nodes of each draft.
    """

    def __init__(self, llm: LLM, *, exact: bool = True, caches: bool = True) -> None:
        self.llm = llm
        self.exact = exact
        self.steps = self.rows = 0
        self.depths: list[int] = []
        self.sizes: list[int] = []
        self._checked = caches
        self._fresh: dict[int, _Fresh] = {}
        engine: Any = llm.engine
        self._target = engine.target
        self._step, self._forward = engine.step, engine.forward
        self._layers_before, self._layers_apart = self._target.layer_rows, 0
        engine.step, engine.forward = self._watched_step, self._watched_forward

    def leave(self) -> None:
        """Let the engine alone."""
        engine: Any = self.llm.engine
        engine.step, engine.forward = self._step, self._forward

    @property
    def layer_rows(self) -> int:
        """Rows times layers that the target has computed, without those of this watch."""
        return self._target.layer_rows - self._layers_before - self._layers_apart

    def _watched_forward(self, current: Any) -> None:
        self.rows += len(current.batch)
        for draft in (job.draft for job in current.jobs):
            if draft.resume is not None:
                assert len(draft.resume.hidden_TD) == 1 + len(draft)
                self.depths.append(draft.resume.depth)
                self.sizes.append(len(draft))
        self._forward(current)

    def _watched_step(self) -> Any:
        touched = self._step()
        self.steps += 1
        if self._checked:
            before = self._target.layer_rows
            for request in self.llm.engine.scheduler.running:
                self._look(request)
            self._layers_apart += self._target.layer_rows - before
        return touched

    def _look(self, request: Any) -> None:
        cache = self.llm.engine.cache
        length = cache.lengths[request.slot]
        assert length <= len(request.tokens) - 1 or length == request.num_prompt
        if not length:
            return
        drafter: Any = self.llm.recipe.drafter
        depth = getattr(drafter, "exit_layer", None)
        fresh = self._fresh.get(request.request_id)
        if fresh is None or fresh.depth != depth or fresh.tokens != request.tokens[:length][: len(fresh.tokens)]:
            fresh = self._fresh[request.request_id] = _Fresh(self._target, depth)
        fresh.read(request.tokens[:length])
        compare(committed(cache, request.slot), committed(fresh.cache, 0), exact=self.exact)
        state = getattr(drafter, "_states", {}).get(request.request_id)
        if depth is not None and state is not None:
            self._look_at_adapter(drafter, state, fresh)

    def _look_at_adapter(self, drafter: Any, state: Any, fresh: _Fresh) -> None:
        """Its read rows and the pending ones are together the committed rows, in order."""
        own = drafter._cache
        read = own.lengths[state.slot]
        assert read + state.num_rows == len(fresh.tokens)
        waiting = torch.cat(state.states) if state.states else fresh.hidden_TD[:0]
        compare([waiting], [fresh.hidden_TD[read:]], exact=self.exact)
        if not read:
            return
        adapted = fresh.adapt(drafter, read)
        first = drafter.exit_layer if own.num_layers > 1 else 0  # an oracle has no layers below the exit
        compare(committed(own, state.slot, first), committed(adapted, 0, first), exact=self.exact)


class _Fresh:
    """A request's committed tokens, read without the engine: every row once, when it is first committed.

    Attributes:
        depth: at which hidden states are kept; None: that of the last layer.
        tokens: the ones that were read.
        cache: their rows, in slot 0.
        hidden_TD: their hidden states.
    """

    def __init__(self, target: LanguageModel, depth: int | None) -> None:
        self.depth = depth
        self.tokens: list[int] = []
        self.cache = target.new_cache(1)
        self.cache.acquire()
        self.hidden_TD = torch.empty(0)
        self._target = target
        self._adapted: KVCache | None = None

    def read(self, tokens: Sequence[int]) -> None:
        """Read the ones after those that were read."""
        more = tokens[len(self.tokens) :]
        if more:
            hidden_TD = _read(self._target, self.cache, more, (self.depth or self._target.num_layers,))
            (rows_TD,) = hidden_TD.values()
            self.hidden_TD = torch.cat([self.hidden_TD, rows_TD]) if self.tokens else rows_TD
            self.tokens += more

    def adapt(self, drafter: Any, count: int) -> KVCache:
        """A cache of the adapter's with the first ``count`` rows, in slot 0."""
        own, cache = drafter._cache, self._adapted
        if cache is None or cache.lengths[0] > count:
            cache = self._adapted = KVCache(own.num_layers, 1, own.max_length)
            cache.acquire()
        known = cache.lengths[0]
        if known < count:
            batch = PackedBatch()
            batch.add_chunk(0, known, [0] * (count - known), wanted=0)
            cache.reserve(0, count - known)
            drafter._head.forward(batch, cache, self.hidden_TD[known:count], top=0)
            cache.commit(0, range(count - known))
        return cache


def _read(target: LanguageModel, cache: KVCache, tokens: Sequence[int], depths: tuple[int, ...]) -> dict[int, Tensor]:
    """Commit these tokens to slot 0, and return their hidden states at these depths."""
    cache.reserve(0, len(tokens))
    batch = PackedBatch()
    batch.add_chunk(0, cache.lengths[0], tokens, wanted=0)
    hidden = target.forward(batch, DensePlan(cache, batch), span=Span(0, target.num_layers, taps=depths)).hidden
    cache.commit(0, range(len(tokens)))
    return hidden


def fresh_states(target: LanguageModel, tokens: Sequence[int], depths: Sequence[int]) -> dict[int, Tensor]:
    """Hidden states at these depths, of one forward of these tokens."""
    cache = target.new_cache(1)
    cache.acquire()
    return _read(target, cache, tokens, tuple(depths))


def fresh_rows(target: LanguageModel, tokens: Sequence[int], depth: int | None = None) -> tuple[list[Tensor], Tensor]:
    """Keys and values of every layer after one forward of these tokens, and the hidden states at a depth."""
    cache = target.new_cache(1)
    cache.acquire()
    depth = depth or target.num_layers
    hidden = _read(target, cache, tokens, (depth,))
    return committed(cache, 0), hidden[depth]


def committed(cache: KVCache, slot: int, first: int = 0) -> list[Tensor]:
    """Committed keys and values of a slot, layer by layer."""
    rows = range(cache.lengths[slot])
    return [
        buffer[slot, :, rows.start : rows.stop].clone()
        for buffer in (*cache.keys[first:], *cache.values[first:])
        if buffer is not None
    ]


def compare(found: Sequence[Tensor], expected: Sequence[Tensor], *, exact: bool) -> None:
    """Equal bit for bit, or to rounding."""
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        if exact:
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
