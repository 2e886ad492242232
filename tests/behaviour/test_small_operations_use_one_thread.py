"""Small work of torch in a step stays on one thread: its others would spin where the next forward runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken import LLM, SamplingParams
from foretoken.native import build

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")

GRAIN = 32768  # numbers from which on torch shares an operation
SMALL = 1 << 18  # of core/threads.py
FREE = (
    "view",
    "slice",
    "select",
    "empty",
    "expand",
    "split",
    "transpose",
    "detach",
    "alias",
    "lift_fresh",
    "index",
    "reshape",
)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Shared(TorchDispatchMode):
    """Counts operations over more numbers than one thread gets, and not over many, that run on several."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        numbers = max(_sizes([args, result]), default=0)
        if (
            torch.get_num_threads() > 1
            and GRAIN <= numbers <= SMALL
            and not any(each in str(operation) for each in FREE)
        ):
            self.found[str(operation)] += 1
        return result


def _sizes(values: Any) -> Iterator[int]:
    if isinstance(values, Tensor):
        yield values.numel()
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _sizes(each)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("method", "temperature"), [("draft_model", 0.8), ("eagle", 0.0), ("diffuspec", 0.8), ("sprinter", 0.8)]
)
def test_no_small_operation_of_a_step_is_shared(method: str, temperature: float) -> None:
    """Five rows of a vocabulary of 8,192 and the states of 30 tokens are more than torch gives one thread."""
    llm = LLM("zoo:base", dtype="bfloat16", speculative_config={"method": method, "num_speculative_tokens": 6})
    question = [{"role": "user", "content": "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?"}]
    with Shared() as shared:
        (output,) = llm.chat(question, SamplingParams(temperature=temperature, max_tokens=24, seed=1))
    assert output.metrics.num_draft_tokens > 0
    assert not shared.found
