"""Untrained adapters: shared by the whole run, or with the target's own knowledge."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.methods.kangaroo.drafter import KangarooDrafter
from foretoken.methods.kangaroo.network import Adapter
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output
from helpers.untrained import untrained

Spoil = Callable[[int], bool]  # position of a row -> whether its guess is to be wrong


@cache
def shelf() -> Path:
    """A folder that lives as long as the test run."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-adapters-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def shelved(target: LanguageModel, exit_layer: int) -> str:
    """The folder of a random adapter of one depth of a model, made once."""
    return untrained(Adapter, target, shelf() / f"{id(target)}-{exit_layer}", exit_layer=exit_layer)


class OracleHead:
    """In the adapter's place: the target's own remaining layers, over a cache of the drafter's.

    It sees only what the adapter would see: hidden states, positions, and the rows that were fed to it before. If one
    of those is wrong, its output is wrong, too.

    Args:
        target: its layers.
        depth: the exit layer.
        spoil: at which positions it names another token than the target's.
    """

    def __init__(self, target: LanguageModel, depth: int, spoil: Spoil | None = None) -> None:
        self._target = target
        self._depth = depth
        self._spoil = spoil

    def forward(
        self, batch: PackedBatch, cache: KVCache, hidden_TD: torch.Tensor, *, top: int, head: HeadRows | None = None
    ) -> Output:
        """As AdapterRunner.forward; layers that are run here do not count as the target's."""
        counted = self._target.layer_rows
        span = Span(self._depth, self._target.num_layers, hidden_TD)
        output = self._target.forward(batch, DensePlan(cache, batch), top=top, span=span, head=head)
        self._target.layer_rows = counted
        if self._spoil is None or not top:
            return output
        logits_MV = output.logits_MV.clone()
        for row, packed in enumerate(batch.wanted):
            if self._spoil(batch.positions[packed]):
                logits_MV[row] = logits_MV[row].roll(1)
        return Output.of(logits_MV, top=top)


def teach(llm: LLM, spoil: Spoil | None = None) -> KangarooDrafter:
    """Put an oracle in the place of an idle engine's adapter."""
    drafter: Any = llm.recipe.drafter
    target = llm.engine.target
    assert not drafter._states
    drafter._cache = KVCache(target.num_layers, drafter._cache.max_slots, target.max_length)
    drafter._head = OracleHead(target, drafter.exit_layer, spoil)
    return drafter
