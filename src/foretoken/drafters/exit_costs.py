"""What drafting with an exit costs, and what a step costs: in layers loaded, as published, or in measured milliseconds.

Layers loaded are what time is made of where a model is large and every pass waits for its weights. On a small one the
first layers may stay in the processor's cache, rows cost something, and so does every call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from foretoken.models.batch import PackedBatch
from foretoken.models.language_model import LanguageModel
from foretoken.models.span import Span
from foretoken.plans.dense import DensePlan

_ROWS = (1, 4, 16)
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one target in any one unit; what lies between two measured points is interpolated.

    Attributes:
        layers: L.
        draft: of one drafted token: constant, and per layer below the exit.
        rows, whole: numbers of rows, and the cost of a forward of all layers over so many.
    """

    layers: int
    draft: tuple[float, float]
    rows: Sequence[int]
    whole: Sequence[float]

    @classmethod
    def in_layers(cls, target: LanguageModel, head: float | None = None) -> Costs:
        """The published unit: a pass of L layers costs L, whatever its rows.

        Args:
            head: of norm and head, in layers; None: by their parameters. The paper has 0.
        """
        head = head_in_layers(target) if head is None else head
        return cls(target.num_layers, (head, 1.0), (1,), (target.num_layers + head,))

    @classmethod
    def measured(cls, target: LanguageModel) -> Costs:
        """Milliseconds on this machine, measured in a moment."""
        layers = target.num_layers
        shallow, deep = 1, max(2, layers // 2)
        low, high = (_milliseconds(target, 1, Span(0, depth, taps=(depth,))) for depth in (shallow, deep))
        slope = max((high - low) / (deep - shallow), 0.0)
        whole = [_milliseconds(target, count, Span(0, layers)) for count in _ROWS]
        return cls(layers, (max(low - slope * shallow, 0.0), slope), _ROWS, whole)

    def token(self, exit_layer: int) -> float:
        """Of one drafted token."""
        return self.draft[0] + self.draft[1] * exit_layer

    def forward(self, num_rows: int) -> float:
        """Of all layers and the head over so many rows."""
        place = min(max(bisect_left(self.rows, num_rows), 1), len(self.rows) - 1) if len(self.rows) > 1 else 0
        if not place:
            return self.whole[0]
        left, right = self.rows[place - 1], self.rows[place]
        slope = (self.whole[place] - self.whole[place - 1]) / (right - left)
        return self.whole[place - 1] + slope * (num_rows - left)

    def step(self, exit_layer: int, length: int) -> float:
        """Of a step of so many drafted tokens: they, the layers below the exit for the last one, the others for all."""
        if not length:
            return self.whole[0]
        share = exit_layer / self.layers  # of the layers, that verification need not run
        return length * self.token(exit_layer) + share * self.whole[0] + (1.0 - share) * self.forward(length + 1)


def head_in_layers(target: LanguageModel) -> float:
    """The head in units of one layer, by parameters: what is read from memory for a token."""
    text = target.config.get_text_config(decoder=True)
    head = target.vocab_size * text.hidden_size
    outside = head if getattr(text, "tie_word_embeddings", False) else 2 * head
    return head / ((target.num_parameters - outside) / target.num_layers)


def _milliseconds(target: LanguageModel, num_rows: int, span: Span) -> float:
    cache = target.new_cache(1)
    slot = cache.acquire()
    cache.reserve(slot, num_rows)

    def work() -> None:
        batch = PackedBatch()
        batch.add_chunk(slot, 0, [0] * num_rows, wanted=num_rows)
        target.forward(batch, DensePlan(cache, batch), top=1, span=span)

    return _median(work)


def _median(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return median(times) * 1e3
