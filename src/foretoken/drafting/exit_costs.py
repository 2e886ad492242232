"""What a step with drafts from an exit costs on this machine, in plain steps."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from time import perf_counter
from typing import Protocol

from torch import Tensor

from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.language_model import LanguageModel, Output

_REPEATS = 5


class ExitHead(Protocol):
    """A module that a method may put between an exit and the target's head, with a cache of its own."""

    def forward(self, batch: PackedBatch, cache: KVCache, hidden_TD: Tensor, *, top: int) -> Output:
        """Logits of the wanted rows from the hidden states of all rows at the exit, ``hidden_TD`` [T, D]."""
        ...


def on_line(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear between neighbouring points, and beyond the outer ones."""
    right = next((place for place, point in enumerate(points) if point >= at and place), len(points) - 1)
    left = right - 1
    return values[left] + (values[right] - values[left]) * (at - points[left]) / (points[right] - points[left])


def measured_step(target: LanguageModel, exit_layer: int, length: int, adapter: ExitHead) -> float:
    """How many plain steps a step with a draft takes on this machine, measured in a moment.

    A plain step stands before every other: so nothing stays warm that would not, and whatever else the machine does at
    that time slows both.

    Args:
        length: drafted tokens.
        adapter: the module that scores them at the exit.
    """
    plain, step = _step(target, target.num_layers, 0, adapter), _step(target, exit_layer, length, adapter)
    plain()
    step()
    ratios = []
    for _ in range(_REPEATS):
        began = perf_counter()
        plain()
        between = perf_counter()
        step()
        ratios.append((perf_counter() - between) / (between - began))
    return median(ratios)


def _step(target: LanguageModel, exit_layer: int, length: int, adapter: ExitHead) -> Callable[[], None]:
    """One step on an empty cache: drafts from an exit, the last one's layers below it, verification above it."""
    layers, low, rows = target.num_layers, Span(0, exit_layer, taps=(exit_layer,)), 1 + length
    cache, own = target.new_cache(1), KVCache(1, 1, target.max_length)  # own: the adapter's
    for each in (cache, own):
        each.reserve(each.acquire(), rows)

    def forward(first: int, count: int, span: Span, wanted: int) -> Mapping[int, Tensor]:
        batch = _chunk(first, count, wanted)
        return target.forward(batch, DensePlan(cache, batch), top=1, span=span).hidden

    def drafted() -> None:
        for row in range(length):
            hidden_1D = forward(row, 1, low, 0)[exit_layer]
            adapter.forward(_chunk(row, 1, 1), own, hidden_1D, top=1)
        hidden_1D = forward(length, 1, low, 0)[exit_layer]
        forward(0, rows, Span(exit_layer, layers, hidden_1D.expand(rows, -1)), rows)

    def plain() -> None:
        forward(0, 1, Span(0, layers), 1)

    return drafted if length else plain


def _chunk(first: int, count: int, wanted: int) -> PackedBatch:
    batch = PackedBatch()
    batch.add_chunk(0, first, [0] * count, wanted=wanted)
    return batch
