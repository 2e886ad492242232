"""The bundled pair in float32, loaded once for the whole test run, and recipes over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Any
from unittest import mock

import torch

from foretoken.core.protocols import Drafter, Verifier
from foretoken.drafting import draft_runner as draft_runner
from foretoken.engine.llm import LLM
from foretoken.engine.output import RequestOutput
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load, load_tokenizer
from foretoken.options.sampling import SamplingParams
from helpers.adapters import shelved
from helpers.heads import shelved_head

# Models this small gain little from a second thread, and lose a great deal where cores are shared.
torch.set_num_threads(1)

PROMPTS = (
    "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "The cat sat on the mat. The cat sat on the mat. The cat",
    "Once",
    "Zürich, naïve café — 東京 🙂",
)
RANDOM = "random:"  # before a number of layers or a feature: an untrained adapter or head
_load_once = cache(load)
_tokenizer = cache(load_tokenizer)
_compared_once = lru_cache(maxsize=8)(draft_runner.different_vocabulary)  # ten milliseconds for every recipe


class Recipes:
    """Plain decoding of a bundled model in float32, loaded once for the whole test run, and recipes over it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._said: dict[tuple[tuple[int, ...], int, bool], tuple[int, ...]] = {}

    @cache  # noqa: B019  (a model of the test run)
    def base(self) -> LLM:
        """The target, plain decoding."""
        return LLM(self.name, dtype="float32", device="cpu", seed=0, speculative_config=None)

    def target(self) -> LanguageModel:
        """The target model."""
        return self.base().target

    def with_config(self, config: Mapping[str, Any] | None, **options: Any) -> LLM:
        """A recipe with caches of its own; draft models share weights, adapters and heads may be random."""
        settings = {"max_num_seqs": 8, "max_rows_per_step": 512, "seed": 0, **options}
        over = settings.pop("target", None) or self.target()
        if config and str(config.get("adapter", "")).startswith(RANDOM):
            depth = int(config["adapter"].removeprefix(RANDOM))
            config = {**config, "adapter": shelved(over, depth)}
        if config and str(config.get("head", "")).startswith(RANDOM):
            config = {**config, "head": shelved_head(config["head"].removeprefix(RANDOM))}
        with (
            mock.patch.object(draft_runner, "load", _load_once),
            mock.patch.object(draft_runner, "different_vocabulary", _compared_once),
        ):
            return LLM.from_target(over, speculative_config=config, **settings)

    def with_drafter(
        self,
        drafter: Drafter,
        *,
        num_nodes: int = 6,
        adaptive: bool = False,
        verifier: Verifier | None = None,
        **options: Any,
    ) -> LLM:
        """A recipe of an instance over the target."""
        count = "auto" if adaptive else num_nodes
        return self.with_config({"method": drafter, "verifier": verifier, "num_speculative_tokens": count}, **options)

    def greedy(self, prompt: str | Sequence[int], max_tokens: int = 48, *, ignore_eos: bool = True) -> list[int]:
        """What plain greedy decoding says, one request alone."""
        tokens = tuple(prompt_ids(prompt) if isinstance(prompt, str) else prompt)
        asked = tokens, max_tokens, ignore_eos
        if asked not in self._said:
            params = SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)
            (output,) = self.base().generate([{"prompt_token_ids": list(tokens)}], params)
            self._said[asked] = tuple(output.token_ids)
        return list(self._said[asked])

    def truth(self, prompts: Sequence[str] = PROMPTS, max_tokens: int = 48) -> dict[tuple[int, ...], list[int]]:
        """What an oracle knows."""
        return {tuple(prompt_ids(prompt)): self.greedy(prompt, max_tokens) for prompt in prompts}


OVER_BASE = Recipes("zoo:base")
base, target, greedy, truth = OVER_BASE.base, OVER_BASE.target, OVER_BASE.greedy, OVER_BASE.truth
with_config, with_drafter = OVER_BASE.with_config, OVER_BASE.with_drafter


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    """Token ids of every first completion; fails where a request did."""
    for output in outputs:
        assert output.error is None, output.error
    return [output.token_ids for output in outputs]


def prompt_ids(text: str) -> list[int]:
    """Token ids of a text, as the engine sees them: the bundled models have one vocabulary."""
    return list(_tokenizer("zoo:base")(text)["input_ids"])


def assert_idle(llm: LLM) -> None:
    """No request is left in the engine, its cache, or the drafter's cache."""
    engine = llm.engine
    assert not engine.busy
    assert engine.cache.free_slots == engine.cache.max_slots
    assert set(engine.cache.lengths) == {0}
    for name in ("_states", "_indexes", "_automata", "_looked"):
        assert not getattr(llm.recipe.drafter, name, None)
    for name in ("cache", "_cache"):
        cache_of_drafter = getattr(llm.recipe.drafter, name, None)
        if cache_of_drafter is not None:
            assert cache_of_drafter.free_slots == cache_of_drafter.max_slots
