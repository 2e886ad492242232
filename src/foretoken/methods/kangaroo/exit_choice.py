"""Choose one of several adapters by a measurement on the target, on this machine, in about a second.

For every depth E: the agreement alpha of adapter and target on the next token of texts that the target generated, the
cost of a step with n draft tokens in plain steps, and the resulting speed of chains of the best length:

    speed-up(E) = max over n of  (1 + alpha + ... + alpha^n) / cost(n)
"""

from collections.abc import Mapping
from dataclasses import dataclass

from foretoken.drafting.exit_costs import measured_step, on_line
from foretoken.forward.batch import PackedBatch
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.methods.kangaroo.network import Adapter
from foretoken.methods.kangaroo.runner import AdapterRunner
from foretoken.models.language_model import LanguageModel

_OPENINGS = (  # of several kinds, so that the choice is not specific to one kind
    "The weather in the mountains changed quickly, and",
    "Question: A box holds 12 pencils. How many pencils are in 5 boxes?\nAnswer:",
    "def mean(values):\n    total = 0\n    for value in values:\n",
    "A: Hello, I would like to book a table for two.\nB:",
)
_WRITTEN = 48  # tokens that the target generates after each opening
_LENGTHS = (1, 8)  # draft lengths of the measured steps: the shortest and the longest candidates


@dataclass(frozen=True, slots=True)
class _Measured:
    agreement: float
    costs: tuple[float, ...]  # cost of a step of each of _LENGTHS, in plain steps

    @property
    def speedup(self) -> float:
        """The speed-up over plain decoding, with chains of the best length."""
        return max(map(self._with_length, range(_LENGTHS[0], _LENGTHS[-1] + 1)))

    def _with_length(self, length: int) -> float:
        expected = sum(self.agreement**power for power in range(length + 1))
        return expected / on_line(_LENGTHS, self.costs, length)


def choose_exit(target: LanguageModel, adapters: Mapping[int, Adapter]) -> tuple[Adapter, str]:
    """Return the adapter with the highest estimated speed, and the measurement in one line.

    Args:
        adapters: by exit layer.
    """
    texts = [_written(target, opening) for opening in _OPENINGS]
    found = {depth: _measure(target, adapter, texts) for depth, adapter in sorted(adapters.items())}
    chosen = max(found, key=lambda depth: found[depth].speedup)
    lines = [
        f"{depth}: agrees {each.agreement:.0%}, a step of {_LENGTHS[-1]} drafts costs {each.costs[-1]:.2f} plain ones, "
        f"expected {each.speedup:.2f}x"
        for depth, each in found.items()
    ]
    return adapters[chosen], f"exit_layer={chosen} measured best ({'; '.join(lines)})"


def _written(target: LanguageModel, opening: str) -> tuple[list[int], int]:
    """Return a greedy continuation of an opening, and the length of the opening."""
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
    head = AdapterRunner(target, adapter)
    agreed = asked = 0
    for tokens, begin in texts:
        cache, own = target.new_cache(1), KVCache(1, 1, target.max_length)
        batch = PackedBatch.of_text(tokens, cache)
        own.reserve(own.acquire(), len(tokens))
        span = Span(0, target.num_layers, taps=(depth,))
        output = target.forward(batch, DensePlan(cache, batch), span=span)
        guess = head.forward(batch, own, output.hidden[depth], top=0)
        rows = range(begin - 1, len(tokens) - 1)
        agreed += sum(output.best[row] == guess.best[row] for row in rows)
        asked += len(rows)
    costs = tuple(measured_step(target, depth, length, head) for length in _LENGTHS)
    return _Measured(agreed / asked, costs)
