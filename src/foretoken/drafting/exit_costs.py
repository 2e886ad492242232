"""The cost of a step with drafts from an exit: in layers loaded, as published, or in plain steps, as measured.

On a large model, where every pass waits for its weights, time is proportional to the layers loaded. On a small one the
first layers may stay in the processor's cache from token to token, rows cost something, and so does every call; so
whole steps are measured as they are run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Protocol

from torch import Tensor

from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.models.head_rows import HeadRows
from foretoken.models.language_model import LanguageModel, Output

_LENGTHS = (1, 4, 12)
_REPEATS = 5


class ExitHead(Protocol):
    """A module that a method may put between an exit and the target's head, with a cache of its own."""

    def forward(self, batch: PackedBatch, cache: KVCache, hidden_TD: Tensor, *, top: int) -> Output:
        """Logits of the wanted rows from the hidden states of all rows at the exit, ``hidden_TD`` [T, D]."""
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one target's steps, in any one unit: known at a few points, on straight lines between and beyond them.

    Attributes:
        plain: of a step without a draft.
        exits: increasing, at least two.
        lengths: draft lengths, increasing, at least two.
        table: of a step from each of the exits with each of the lengths.
    """

    plain: float
    exits: Sequence[int]
    lengths: Sequence[int]
    table: Sequence[Sequence[float]]

    @classmethod
    def in_layers(cls, layers: int, head: float, *, drafting: float = 1.0) -> Costs:
        """The published unit: a pass of L layers costs L, whatever its rows; n drafts from exit E cost n (E + head).

        Args:
            layers: L.
            head: of norm and head, in layers; the paper has 0.
            drafting: the share of the head that drafts are scored by.
        """
        exits, lengths = (1, layers), (0, 1)
        table = [
            [length * (exit_layer + drafting * head) + layers + head for length in lengths] for exit_layer in exits
        ]
        return cls(layers + head, exits, lengths, table)

    @classmethod
    def measured(cls, target: LanguageModel, head: HeadRows | None = None) -> Costs:
        """In plain steps, on this machine, measured in a moment.

        Args:
            head: the rows that drafts are scored by; None: all.
        """
        layers = target.num_layers
        exits = sorted({1, max(2, layers // 2), max(2, layers - 1)})
        table = [[measured_step(target, exit_layer, length, head=head) for length in _LENGTHS] for exit_layer in exits]
        return cls(1.0, exits, _LENGTHS, table)

    def step(self, exit_layer: int, length: float) -> float:
        """Of one step.

        Args:
            length: drafted tokens; the mean of several steps need not be whole.
        """
        if not length:
            return self.plain
        return on_line(self.exits, [on_line(self.lengths, costs, length) for costs in self.table], exit_layer)


def head_in_layers(target: LanguageModel) -> float:
    """The head in units of one layer, by the parameters read from memory for a token."""
    text = target.config.get_text_config(decoder=True)
    head = target.vocab_size * text.hidden_size
    outside = head if getattr(text, "tie_word_embeddings", False) else 2 * head
    return head / ((target.num_parameters - outside) / target.num_layers)


def on_line(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """Linear between neighbouring points, and beyond the outer ones."""
    right = next((place for place, point in enumerate(points) if point >= at and place), len(points) - 1)
    left = right - 1
    return values[left] + (values[right] - values[left]) * (at - points[left]) / (points[right] - points[left])


def measured_step(
    target: LanguageModel, exit_layer: int, length: int, adapter: ExitHead | None = None, head: HeadRows | None = None
) -> float:
    """How many plain steps a step with a draft takes on this machine, measured in a moment.

    A plain step stands before every other: so nothing stays warm that would not, and whatever else the machine does at
    that time slows both.

    Args:
        length: drafted tokens.
        adapter: the module that scores them at the exit; None: the target's own head.
        head: without an adapter, the rows of it that score them; None: all.
    """
    plain, step = _step(target, target.num_layers, 0), _step(target, exit_layer, length, adapter, head)
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


def _step(
    target: LanguageModel, exit_layer: int, length: int, adapter: ExitHead | None = None, head: HeadRows | None = None
) -> Callable[[], None]:
    """One step on an empty cache: drafts from an exit, the last one's layers below it, verification above it."""
    layers, low, rows = target.num_layers, Span(0, exit_layer, taps=(exit_layer,)), 1 + length
    cache, own = target.new_cache(1), KVCache(1, 1, target.max_length)  # own: the adapter's
    for each in (cache, own):
        each.reserve(each.acquire(), rows)

    def forward(first: int, count: int, span: Span, wanted: int, head: HeadRows | None = None) -> Mapping[int, Tensor]:
        batch = _chunk(first, count, wanted)
        return target.forward(batch, DensePlan(cache, batch), top=1, span=span, head=head).hidden

    def drafted() -> None:
        for row in range(length):
            if adapter is None:
                forward(row, 1, low, 1, head)
            else:
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
