"""Which of several adapters to draft with: measured on the target itself, on this machine, in about a second.

For every depth E: how often adapter and target agree on the next token of texts that the target wrote (alpha), what a
draft token and a verification cost in milliseconds, and what follows for the speed of chains of the best length:

    tokens per second(E) = max over n of  (1 + alpha + ... + alpha^n) / (n * draft + verify)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from torch import Tensor

from foretoken.drafters.adapter_head import AdapterHead
from foretoken.models.adapter import Adapter
from foretoken.models.batch import PackedBatch
from foretoken.models.cache import KVCache
from foretoken.models.language_model import LanguageModel
from foretoken.models.span import Span
from foretoken.plans.dense import DensePlan

_OPENINGS = (  # of several kinds, so that the choice is not made for one of them
    "The weather in the mountains changed quickly, and",
    "Question: A box holds 12 pencils. How many pencils are in 5 boxes?\nAnswer:",
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "A: Hello, I would like to book a table for two.\nB:",
)
_WRITTEN = 48  # tokens the target writes after each opening
_LONGEST = 8  # draft tokens a step that are considered
_REPEATS = 7


@dataclass(frozen=True, slots=True)
class _Measured:
    agreement: float
    draft_ms: float
    verify_ms: float

    def speed(self, length: int) -> float:
        """Tokens per millisecond of chains of so many tokens."""
        expected = sum(self.agreement**power for power in range(length + 1))
        return expected / (length * self.draft_ms + self.verify_ms)


def choose_exit(target: LanguageModel, adapters: Mapping[int, Adapter]) -> tuple[Adapter, str]:
    """The adapter that promises the most tokens per second, and the measurement in one line.

    Args:
        adapters: by exit layer.
    """
    texts = [_written(target, opening) for opening in _OPENINGS]
    plain = _milliseconds(lambda: _rows(target, 1, Span(0, target.num_layers)))
    found = {depth: _measure(target, adapter, texts) for depth, adapter in sorted(adapters.items())}
    best = {depth: max(map(each.speed, range(1, _LONGEST + 1))) for depth, each in found.items()}
    chosen = max(best, key=best.__getitem__)
    lines = [
        f"{depth}: agrees {each.agreement:.0%}, {each.draft_ms:.2f} ms a draft token, "
        f"expected {best[depth] * plain:.2f}x"
        for depth, each in found.items()
    ]
    return adapters[chosen], f"exit_layer={chosen} measured best ({'; '.join(lines)})"


def _written(target: LanguageModel, opening: str) -> tuple[list[int], int]:
    """An opening continued greedily, and the length of the opening."""
    tokens: list[int] = list(target.tokenizer(opening, add_special_tokens=False)["input_ids"])
    begin = len(tokens)
    cache = target.new_cache(1)
    slot = cache.acquire()
    read = 0
    while len(tokens) < min(begin + _WRITTEN, target.max_length):
        cache.reserve(slot, len(tokens) - read)
        batch = PackedBatch()
        batch.add_chunk(slot, read, tokens[read:], wanted=1)
        output = target.forward(batch, DensePlan(cache, batch))
        cache.commit(slot, range(len(tokens) - read))
        read = len(tokens)
        tokens.append(output.best[0])
    return tokens, begin


def _measure(target: LanguageModel, adapter: Adapter, texts: list[tuple[list[int], int]]) -> _Measured:
    depth = adapter.config.exit_layer
    head = AdapterHead(target, adapter)
    agreed = asked = 0
    for tokens, begin in texts:
        cache, own = target.new_cache(1), KVCache(1, 1, target.max_length)
        batch = PackedBatch()
        for each in (cache, own):
            each.reserve(each.acquire(), len(tokens))
        batch.add_chunk(0, 0, tokens, wanted=len(tokens))
        span = Span(0, target.num_layers, taps=(depth,))
        output = target.forward(batch, DensePlan(cache, batch), span=span)
        guess = head.forward(batch, own, output.hidden[depth], top=0)
        rows = range(begin - 1, len(tokens) - 1)
        agreed += sum(output.best[row] == guess.best[row] for row in rows)
        asked += len(rows)
    low = _milliseconds(lambda: _rows(target, 1, Span(0, depth, taps=(depth,)), scored=False))
    own = KVCache(1, 1, target.max_length)
    own.reserve(own.acquire(), 1)
    one = PackedBatch()
    one.add_chunk(0, 0, [0], wanted=1)
    hidden_1D = _rows(target, 1, Span(0, depth, taps=(depth,)), scored=False)[depth]
    adapt = _milliseconds(lambda: head.forward(one, own, hidden_1D, top=1))
    hidden_TD = hidden_1D.expand(1 + _LONGEST // 2, -1).contiguous()
    verify = _milliseconds(lambda: _rows(target, len(hidden_TD), Span(depth, target.num_layers, hidden_TD)))
    return _Measured(agreed / asked, low + adapt, low + verify)


def _rows(target: LanguageModel, count: int, span: Span, *, scored: bool = True) -> Mapping[int, Tensor]:
    cache = target.new_cache(1)
    cache.reserve(cache.acquire(), count)
    batch = PackedBatch()
    batch.add_chunk(0, 0, [0] * count, wanted=count if scored else 0)
    return target.forward(batch, DensePlan(cache, batch), span=span).hidden


def _milliseconds(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        began = perf_counter()
        work()
        times.append(perf_counter() - began)
    return median(times) * 1e3
