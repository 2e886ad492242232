"""What lies in the head's cache, whatever was drafted, rejected, asked for twice or cancelled; and batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.sampling import SamplingParams
from foretoken.drafting.feature_heads import drafter as module
from foretoken.engine.llm import LLM
from foretoken.methods.dovetail import far
from foretoken.methods.dovetail.drafter import DovetailDrafter
from foretoken.methods.dovetail.network import Dovetail
from foretoken.methods.eagle.drafter import EagleDrafter
from foretoken.methods.eagle.network import Eagle
from foretoken.methods.scylla.drafter import ScyllaDrafter
from foretoken.methods.scylla.network import Scylla
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.adapters import shelf
from helpers.golden import tokens_of
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.zoo_llms import assert_idle, with_config

SHAPES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "chain": (EagleDrafter, Eagle, {"draft_vocab_size": 60}, {}),
    "tree": (EagleDrafter, Eagle, {"draft_vocab_size": 60}, {"tree": True, "width": 3, "max_depth": 3}),
    "eagle2": (EagleDrafter, Eagle, {"algorithm": "eagle"}, {}),
    "layers": (ScyllaDrafter, Scylla, {"layers": 3}, {"width": 3, "max_depth": 3}),
    "gate": (DovetailDrafter, Dovetail, {"layers": 2}, {"width": 3, "max_depth": 3, "budget": "fixed"}),
    "lane": (
        DovetailDrafter,
        Dovetail,
        {"layers": 1, "fusion": "concat"},
        {"width": 3, "max_depth": 3, "budget": "fixed", "place": "thread"},
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    return load(str(save_model("llama", tmp_path_factory.mktemp("tiny"), **sizes)), device="cpu")


def drafter_of(model: LanguageModel, shape: str) -> Any:
    kind, part, fields, options = SHAPES[shape]
    place = Path(shelf(), f"head-{id(model)}-{shape}")
    return kind(kind.Config(head=part.untrained(model, place, **fields), **options), model)


class Kept:
    """A drafter's cache as it was when each request ended: prompt and output -> keys and values of its pairs."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.found = drafter, dict[int, tuple[list[int], Tensor, Tensor]]()
        self._inner = drafter.lane.far if isinstance(drafter, DovetailDrafter) else drafter
        self._propose = drafter.propose
        drafter.propose = self.propose

    def propose(self, contexts: Sequence[Any], budgets: Sequence[Any]) -> Any:
        drafts = self._propose(contexts, budgets)
        cache = self._inner._cache
        for context in contexts:
            state = self._inner._unread.get(context.request_id)
            if state is not None and cache.keys[0] is not None and cache.values[0] is not None:
                count = cache.lengths[state.slot]
                keys, values = (
                    torch.cat([buffer[state.slot, :, :count] for buffer in buffers])
                    for buffers in (cache.keys, cache.values)
                )
                self.found[context.request_id] = (list(context.tokens[: count + 1]), keys, values)
        return drafts


def run(llm: LLM, prompts: Sequence[Sequence[int]], count: int, temperature: float = 0.0) -> list[Any]:
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=3, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params)


def read_anew(model: LanguageModel, shape: str, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """The same pairs, read from a prompt."""
    kept = Kept(drafter_of(model, shape))
    llm = with_config({"method": kept.drafter, "num_speculative_tokens": 3}, target=model)
    run(llm, [tokens[:-1]], 3)
    first = min(kept.found.values(), key=lambda each: len(each[0]))
    length = len(tokens) - 1
    return first[1][:, : length - 1], first[2][:, : length - 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_cache_is_what_reading_the_text_anew_makes_of_it(
    shape: str, temperature: float, model: LanguageModel
) -> None:
    """Behind every draft, accepted in part or rejected, in a batch: bit for bit."""
    kept = Kept(drafter_of(model, shape))
    llm = with_config({"method": kept.drafter, "num_speculative_tokens": 5}, target=model, max_num_seqs=3)
    outputs = run(llm, [tokens_of(seed, 5 + 9 * seed, 100) for seed in range(5)], 24, temperature)
    assert all(output.error is None and len(output.token_ids) == 24 for output in outputs)
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 100
    assert_idle(llm)
    assert not len(kept.drafter._unread)
    for tokens, keys, values in list(kept.found.values())[::2]:
        again = read_anew(model, shape, tokens)
        count = again[0].shape[1]
        assert count > 20
        for found, expected in zip((keys[:, :count], values[:, :count]), again, strict=True):
            if model.fused is not None:
                assert torch.equal(found, expected)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_long_prompts_are_read_while_they_come(shape: str, model: LanguageModel, monkeypatch: Any) -> None:
    """The same drafts whether a prompt's states wait for the first draft or are read piece by piece."""
    found = []
    for rows in (10_000, 16):
        monkeypatch.setattr(module, "_UNREAD_ROWS", rows)
        monkeypatch.setattr(far, "_WAITING_ROWS", rows)
        monkeypatch.setattr(far, "EAGER_ROWS", rows)
        drafter = drafter_of(model, shape)
        llm = with_config(
            {"method": drafter, "num_speculative_tokens": 4}, target=model, max_num_seqs=2, max_rows_per_step=24
        )
        outputs = run(llm, [tokens_of(1, 90, 100), tokens_of(2, 41, 100)], 12)
        found.append([(each.token_ids, each.metrics.num_steps, each.metrics.num_draft_tokens) for each in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_request_drafts_alike_alone_and_in_company(shape: str, model: LanguageModel) -> None:
    """Seeded, at temperature 1: tokens depend on what is drafted, and company must not change that."""
    if model.fused is None:
        pytest.skip("the library's products round by their number of rows")
    prompts = [tokens_of(seed, 8 + seed, 100) for seed in range(4)]
    config = {"num_speculative_tokens": 4}
    together = run(with_config({"method": drafter_of(model, shape), **config}, target=model), prompts, 16, 1.0)
    alone = with_config({"method": drafter_of(model, shape), **config}, target=model)
    for prompt, output in zip(prompts, together, strict=True):
        assert run(alone, [prompt], 16, 1.0)[0].token_ids == output.token_ids


def test_asked_twice_about_one_root_it_answers_alike(model: LanguageModel) -> None:
    """A neighbour's fault makes the engine ask again: the last pair is taken back and read once more."""
    drafter = drafter_of(model, "chain")
    propose, answers = drafter.propose, []

    def twice(contexts: Sequence[Any], budgets: Sequence[Any]) -> Any:
        first, second = propose(contexts, budgets), propose(contexts, budgets)
        answers.append(([each.tree.tokens for each in first], [each.tree.tokens for each in second]))
        return second

    drafter.propose = twice
    llm = with_config({"method": drafter, "num_speculative_tokens": 4}, target=model)
    (output,) = run(llm, [tokens_of(1, 9, 100)], 20)
    assert output.error is None
    assert all(first == second for first, second in answers)
    assert any(first[0] for first, _ in answers)
    plain = drafter_of(model, "chain")
    (other,) = run(
        with_config({"method": plain, "num_speculative_tokens": 4}, target=model), [tokens_of(1, 9, 100)], 20
    )
    assert (other.token_ids, other.metrics.num_steps) == (output.token_ids, output.metrics.num_steps)
