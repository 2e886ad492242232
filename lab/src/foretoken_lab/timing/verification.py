"""The verification forward alone, plan against plan: the same rows after the same prefix, interleaved.

    prefix: text (read by the model, densely) or random keys and values   │ root, draft: a chain of text
    ─────────────────────────────────────────────────────────────────────┼─────────────────────────────
    round 1:  dense  sparse  other      round 2:  sparse  other  dense     … the order rotates

The clock runs over what the engine counts as verifying: making the plan, and the forward. Nothing is committed, so that
every round computes the same. The block means of the prefix are known (a decoding request brings a new block up to date
once in 64 tokens).

``attention_seconds`` is taken in the same forwards: the native decoder reads the clock of its calling thread before and
after each layer's attention, elsewhere each call of the plan is timed (on a GPU the device is waited for around it,
which slows the whole forward). It holds what attention is made of here: rotating and storing keys, selecting,
attending.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from foretoken.bench.summary import SLOWDOWN
from foretoken.bench.table import DASH, Cell, Sheet, number
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Plan
from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.native_plan import NativePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import CHUNK_ROWS, prefill

PlanMaker = Callable[[KVCache, PackedBatch], Plan]

_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """One plan at one context and number of rows.

    Attributes:
        seconds: wall time of each forward.
        attention_seconds: of that, in attention.
    """

    plan: str
    context: int
    rows: int
    seconds: tuple[float, ...]
    attention_seconds: tuple[float, ...]

    def facts(self) -> dict[str, Any]:
        """Medians, and the quartiles around the first."""
        lower, middle, upper = quartiles(self.seconds)
        return {
            "plan": self.plan,
            "context": self.context,
            "rows": self.rows,
            "seconds": middle,
            "seconds_lower": lower,
            "seconds_upper": upper,
            "seconds_min": min(self.seconds),
            "attention_seconds": statistics.median(self.attention_seconds),
            "attention_seconds_min": min(self.attention_seconds),
            "repeats": len(self.seconds),
        }


def sheets(results: Sequence[Mapping[str, Any]]) -> list[Sheet]:
    """What ``foretoken bench verify`` has found, as tables; a setting's first plan is what others are compared to.

    Args:
        results: :meth:`Timing.facts` with ``flops``, ``bytes`` and ``read``.
    """
    times, work = [], []
    first: Mapping[str, Any] = {}
    for each in results:
        begins = (each["context"], each["rows"]) != (first.get("context"), first.get("rows"))
        if begins:
            first = each
        labels = [Cell(str(each[name])) if begins else Cell("") for name in ("context", "rows")]
        labels.append(Cell(each["plan"].replace("+verification.", " +")))
        low, high = 1e3 * each["seconds_lower"], 1e3 * each["seconds_upper"]
        faster = first["seconds"] / each["seconds"]
        times.append(
            (
                *labels,
                number(1e3 * each["seconds"]),
                Cell(f"{low:.2f}–{high:.2f}" if each["repeats"] > 1 else DASH),
                Cell(f"{faster:.2f}x", bad=faster < SLOWDOWN),
                number(1e3 * each["attention_seconds"]),
                number(first["attention_seconds"] / each["attention_seconds"], "{:.2f}x"),
            )
        )
        work.append(
            (
                *labels,
                number(each["read"], "{:.0%}"),
                number(each["flops"] / 1e9),
                number(each["bytes"] / 1e6, "{:.1f}"),
            )
        )
    names = ("context", "rows", "plan")
    return [
        Sheet(
            "one verification forward",
            "Medians in milliseconds. Attention is the part of a forward that stores keys, selects and attends.",
            (*names, "ms", "middle half", "speed-up", "attention ms", "attention speed-up"),
            times,
            labels=3,
        ),
        Sheet(
            "its work",
            "Read is the share of the context that heads read; the others are arithmetic on shapes, not measured.",
            (*names, "read", "GFLOP", "MB"),
            work,
            labels=3,
        ),
    ]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, middle, upper


class Prefix:
    """A slot of a cache that holds a growing prefix.

    Args:
        model: the owner of the cache.
        tokens: of the text; as long as the longest prefix and its rows together.
        random: fill the cache with random keys and values instead of reading the text, which takes long for large
            models; times are the same, selections mean nothing.
    """

    def __init__(self, model: LanguageModel, tokens: Sequence[int], *, random: bool = False) -> None:
        self.model = model
        self.tokens = tokens
        self.random = random
        self.cache = model.new_cache(1)
        self.slot = self.cache.acquire()

    def grow(self, length: int) -> None:
        """Make the prefix ``length`` rows long; it never gets shorter."""
        cache, slot = self.cache, self.slot
        read = min(length, CHUNK_ROWS) if self.random else length  # the first chunk is always read: it makes buffers
        prefill(self.model, cache, slot, self.tokens[cache.lengths[slot] : read])
        while (begin := cache.lengths[slot]) < length:
            count = min(CHUNK_ROWS, length - begin)
            cache.reserve(slot, count)
            self._fill(begin, begin + count)
            cache.commit(slot, range(count))

    def batch(self, rows: int) -> PackedBatch:
        """A root and a chain after the prefix, from the text."""
        begin = self.cache.lengths[self.slot]
        self.cache.reserve(self.slot, rows)
        batch = PackedBatch()
        batch.add_tree(self.slot, begin, self.tokens[begin], TokenTree(self.tokens[begin + 1 : begin + rows]))
        return batch

    @torch.inference_mode()
    def _fill(self, begin: int, end: int) -> None:
        generator = torch.Generator().manual_seed(begin)
        if self.cache.coded:  # of codes, repeat rows that were read: their scales are numbers
            for buffer in (*self.cache.keys, *self.cache.values):
                if buffer is not None:
                    buffer[self.slot, :, begin:end] = buffer[self.slot, :, : end - begin]
            return
        for buffer in (*self.cache.keys, *self.cache.values):
            if buffer is not None:
                rows_GRD = buffer[self.slot, :, begin:end]
                rows_GRD.copy_(torch.randn(rows_GRD.shape, generator=generator))


def measure(
    prefix: Prefix,
    plans: Mapping[str, PlanMaker],
    *,
    contexts: Sequence[int],
    rows: Sequence[int],
    repeats: int,
    progress: Callable[[], None] | None = None,
) -> list[Timing]:
    """Time every plan at every context and number of rows.

    Args:
        plans: label -> what makes the plan of a step.
        contexts, rows: lengths of the prefix, and rows of the forward, the root included.
        repeats: timed forwards of each.
        progress: called after every round.
    Raises:
        ConfigError: context and rows together are more than the model holds.
    """
    model = prefix.model
    if max(contexts) + max(rows) > model.max_length:
        raise ConfigError(
            f"a context of {max(contexts)} and {max(rows)} rows are more than the {model.max_length} positions of "
            f"model '{model.name}'"
        )
    labels = list(plans)
    found = []
    for context in sorted(contexts):
        prefix.grow(context)
        for count in rows:
            batch = prefix.batch(count)
            seconds: dict[str, list[tuple[float, float]]] = {label: [] for label in labels}
            for label in labels:
                for _ in range(_WARM_UP):
                    _timed(model, prefix.cache, batch, plans[label])
            for repeat in range(repeats):
                turn = repeat % len(labels)
                for label in labels[turn:] + labels[:turn]:
                    seconds[label].append(_timed(model, prefix.cache, batch, plans[label]))
                if progress is not None:
                    progress()
            for label, each in seconds.items():
                whole, attention = zip(*each, strict=True)
                found.append(Timing(label, context, count, whole, attention))
    return found


def _timed(model: LanguageModel, cache: KVCache, batch: PackedBatch, make: PlanMaker) -> tuple[float, float]:
    """Seconds of one forward, and of its attention."""
    _wait(model.device)
    began = perf_counter()
    plan = _Clocked(make(cache, batch), model.device)
    model.forward(batch, plan)
    _wait(model.device)
    return perf_counter() - began, plan.attention_seconds


class _Clocked(Plan):
    """A plan that times attention, natively or layer by layer."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        self.attention_seconds = 0.0
        self.swaps = plan.swaps
        self.native: NativePlan | None = None if plan.native is None else replace(plan.native, clock=self)
        self._plan = plan
        self._device = device

    def attend(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, **options: Any) -> Tensor:
        _wait(self._device)
        began = perf_counter()
        output = self._plan.attend(layer, q_HTD, k_GTD, v_GTD, **options)
        _wait(self._device)
        self.attention_seconds += perf_counter() - began
        return output


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
