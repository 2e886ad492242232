"""Adapters that nobody trained: with random weights, or with the target's own knowledge."""

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
from foretoken.methods.kangaroo.adapter import Adapter, AdapterConfig
from foretoken.methods.kangaroo.drafter import KangarooDrafter
from foretoken.models import anatomy
from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.dense import DensePlan
from foretoken.models.fingerprint import fingerprint_of
from foretoken.models.language_model import LanguageModel, Output
from foretoken.models.span import Span

Spoil = Callable[[int], bool]  # position of a row -> whether its guess is to be wrong


def random_adapter(target: LanguageModel, exit_layer: int, *, seed: int = 0) -> Adapter:
    """Random attention, weak enough to leave something of the target's own opinion at that depth."""
    adapter = Adapter(AdapterConfig.for_target(target.config, exit_layer, target.name, fingerprint_of(target.source)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in adapter.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            gain = 0.3 if name.startswith("o_proj") else 1.0
            weight.copy_(1 + 0.2 * noise if weight.dim() < 2 else noise * gain / weight.shape[-1] ** 0.5)
        final = getattr(anatomy.find(target.model).final_norm, "weight", None)
        if final is not None:
            adapter.norm_out.weight.mul_(final.float())
    return adapter.eval()


def save_adapter(target: LanguageModel, exit_layer: int, folder: Path, *, seed: int = 0) -> str:
    """A random adapter on disk; its folder."""
    random_adapter(target, exit_layer, seed=seed).save(folder)
    return str(folder)


@cache
def shelf() -> Path:
    """A folder that lives as long as the test run."""
    folder = Path(tempfile.mkdtemp(prefix="foretoken-adapters-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def shelved(target: LanguageModel, exit_layer: int) -> str:
    """The random adapter of one depth of a model, made once."""
    return save_adapter(target, exit_layer, shelf() / f"{id(target)}-{exit_layer}")


class OracleHead:
    """In the adapter's place: the target's own remaining layers, over a cache of the drafter's.

    It sees only what the adapter would see: hidden states, positions, and the rows that were fed to it before. If one
    of those is wrong, so is what it says.

    Args:
        target: its layers.
        depth: the exit layer.
        spoil: at which positions it names another token than the target's.
    """

    def __init__(self, target: LanguageModel, depth: int, spoil: Spoil | None = None) -> None:
        self._target = target
        self._depth = depth
        self._spoil = spoil

    def forward(self, batch: PackedBatch, cache: KVCache, hidden_TD: torch.Tensor, *, top: int) -> Output:
        """As AdapterHead.forward; layers that are run here do not count as the target's."""
        counted = self._target.layer_rows
        span = Span(self._depth, self._target.num_layers, hidden_TD)
        output = self._target.forward(batch, DensePlan(cache, batch), top=top, span=span)
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
