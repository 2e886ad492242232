"""Sparse drafting that a dense verification confirms, and keys and values that are computed again densely."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.engine.llm import LLM
from foretoken.methods.sparse.confirm import DenseRefresh, SparseDraft
from foretoken.options.sampling import SamplingParams
from helpers import small_llms

SPARSE = {
    "verification.attention": "per_head",
    "verification.dense_below": 0,
    "verification.block": 16,
    "verification.budget": 0.3,
    "verification.gate": False,
}
CONFIRMED = {**SPARSE, "verification.confirm": 5}
LONG = " ".join(f"{name} has {count} apples." for count, name in enumerate(["Maria", "Tom", "Ann", "Leo"] * 12, 3))
PROMPTS = [LONG + " Maria has", LONG[:300] + " Tom has", "The cat sat on the mat. The cat"]


def tokens(llm: LLM, params: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("method", ["none", "ngram", "suffix", "draft_model"])
def test_a_confirmed_text_is_the_plain_one(method: str) -> None:
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    extra = {"model": small_llms.ALTERED} if method == "draft_model" else {}
    llm = small_llms.with_config({"method": method, **extra, **CONFIRMED})
    assert isinstance(llm.recipe.drafter, SparseDraft)
    assert llm.recipe.promise == "same stream"
    outputs = llm.generate(PROMPTS, greedy)
    assert [output.token_ids for output in outputs] == tokens(small_llms.with_config(None), greedy)
    metrics = outputs[0].metrics
    assert metrics.num_steps < 24 / 2.5  # five tokens are drafted, and most of them stand
    assert metrics.num_draft_tokens <= 5 * metrics.num_steps


def test_a_confirmed_sample_is_the_plain_one() -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=seed, ignore_eos=True)
        for seed in range(3)
    ]
    outputs = small_llms.with_config({"method": "ngram", **CONFIRMED}).generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == tokens(small_llms.with_config(None), params)
    assert sum(output.metrics.num_steps for output in outputs) < 3 * 24 / 2.5  # the noise was the target's


def test_the_control_unconfirmed_texts_differ() -> None:
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    llm = small_llms.with_config({"method": "none", **SPARSE, "verification.budget": 0.01})
    assert llm.recipe.promise == "approximate"
    assert tokens(llm, greedy) != tokens(small_llms.with_config(None), greedy)


def test_after_a_short_prefix_the_inner_drafter_drafts_alone() -> None:
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    inner = small_llms.with_config({"method": "ngram", "num_speculative_tokens": 5})
    llm = small_llms.with_config(
        {"method": "ngram", "num_speculative_tokens": 5, **CONFIRMED, "verification.dense_below": 4000}
    )
    expected, found = inner.generate(PROMPTS, greedy), llm.generate(PROMPTS, greedy)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [each.metrics.num_steps for each in found] == [each.metrics.num_steps for each in expected]


def test_the_inner_drafter_learns_what_became_of_its_own_proposals() -> None:
    from foretoken.core.draft import Draft, PointMass
    from foretoken.core.protocols import Budget, Context, Drafter, Outcome
    from foretoken.core.tree import TokenTree

    class Inner(Drafter):
        """Proposes what plain decoding gives, then something else."""

        name = "inner"
        laws = (PointMass,)
        branches = False

        def __init__(self, script: list[int]) -> None:
            self.script = script
            self.outcomes: list[Outcome] = []

        def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
            drafts = []
            for context, budget in zip(contexts, budgets, strict=True):
                done = len(context.tokens) - context.num_prompt
                right = self.script[done : done + 2]
                drafts.append(Draft(TokenTree([*right, 5, 5][: budget.max_nodes])))
            return drafts

        def observe(self, outcomes: Sequence[Outcome]) -> None:
            self.outcomes += outcomes

        def release(self, request_id: int) -> None:
            pass

    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    script = tokens(small_llms.with_config(None), greedy)[0]
    inner = Inner(script)
    llm = small_llms.with_config({"method": inner, **CONFIRMED, "verification.budget": 1.0})
    assert llm.generate(PROMPTS[:1], greedy)[0].token_ids == script
    done = 1  # the first token came with the prompt
    for outcome in inner.outcomes:
        proposed = outcome.draft.tree.tokens
        assert len(outcome.verdict.path) == min(2, len(proposed))
        assert outcome.tokens == tuple(script[done : done + len(outcome.tokens)])
        done += 6  # five drafted, and one more
    assert len(inner.outcomes) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "kangaroo", "adapter": "random:1", **CONFIRMED}, "drafts inside of the target"),
        ({"method": "ngram", "verifier": "block", **CONFIRMED}, "block"),
        ({"method": "ngram", **CONFIRMED, "verification.refresh": 8}, "does nothing with verification.confirm"),
    ],
    ids=["self", "rule", "refresh"],
)
def test_what_does_not_go_together_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        small_llms.with_config(config)


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_after_a_refresh_the_cache_is_that_of_dense_decoding(method: str) -> None:
    every = 6
    # one slot: the second request comes where the first one was
    llm = small_llms.with_config({"method": method, **SPARSE, "verification.refresh": every}, max_num_seqs=1)
    refresh, cache = llm.recipe.plan._refresh, llm.engine.cache
    assert refresh is not None
    requests = [
        request
        for prompt in (PROMPTS[1], LONG[:250])
        for request in llm.new_requests(prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    ]
    for request in requests:
        llm.engine.add(request)
    ever_stale = checked = 0
    while llm.engine.busy:
        llm.engine.step()
        for request in requests:
            if request.finished or not request.num_output:
                continue
            length = cache.lengths[request.slot]
            same = _dense_rows(llm, request.tokens[:length], cache, request.slot)
            known, dense = refresh._dense.get(request.slot, (-1, 0))
            if known != request.request_id:  # its prompt has just been read
                continue
            assert same >= min(dense, length)
            ever_stale += same < length
            checked += dense > request.num_prompt
            assert length - dense <= every + llm.recipe.num_nodes + 1
    assert ever_stale > 5  # the control: between refreshes rows are not dense
    assert checked > 5


def _dense_rows(llm: LLM, tokens: Sequence[int], cache: Any, slot: int) -> int:
    """How many rows of the slot are those of a dense forward over the tokens, from the first on."""
    from foretoken.forward.batch import PackedBatch
    from foretoken.forward.dense import DensePlan

    other = llm.target.new_cache(1)
    batch = PackedBatch()
    batch.add_chunk(other.acquire(), 0, list(tokens), wanted=1)
    other.reserve(0, len(tokens))
    llm.target.forward(batch, DensePlan(other, batch))
    equal = torch.ones(len(tokens), dtype=torch.bool)
    for ours, dense in zip(cache.keys, other.keys, strict=True):
        difference = (ours[slot, :, : len(tokens)] - dense[0, :, : len(tokens)]).abs()
        equal &= difference.amax(dim=(0, 2)) < 1e-4
    return int(equal.long().cumprod(0).sum())


def test_a_slot_s_next_request_starts_with_dense_rows_of_its_own() -> None:
    """However many rows of the one before it were dense."""

    class Noting(DenseRefresh):
        def _again(self, cache: Any, context: Any, begin: int) -> None:
            again.append((context.request_id, begin, cache.lengths[context.slot]))

    again: list[tuple[int, int, int]] = []
    refresh, cache = Noting(None, 6), SimpleNamespace(lengths=[0, 0])  # type: ignore[arg-type]
    for request_id, prompt, end in ((1, 10, 30), (2, 4, 18), (3, 25, 32)):
        for cache.lengths[0] in range(prompt, end):
            refresh(cache, [SimpleNamespace(slot=0, request_id=request_id)])  # type: ignore[arg-type, list-item]
    assert again == [(1, 10, 16), (1, 16, 22), (1, 22, 28), (2, 4, 10), (2, 10, 16), (3, 25, 31)]
