"""Prefix tree attention against a float64 reference: random trees and prefixes, and every kind of scoring."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.tree import TokenTree
from foretoken.engine.compose import plan_of
from foretoken.forward import prefix_tree_attention
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan, DensePlans
from foretoken.forward.prefix_tree_attention import PrefixTreePlan, PrefixTreePlans
from foretoken.methods.sparse.attention import SparseAttentionPlan, SparsePrefixTreePlan
from helpers.prefix_tree import reference, some_tree, step

LIMIT = 1e-5
SCORINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 7},
    "window of one": {"window": 1},
    "window beyond everything": {"window": 900},
    "soft cap": {"softcap": 2.0},
    "sinks": {"sinks_H": torch.linspace(-1, 2, 6)},
    "window, soft cap and sinks": {"window": 5, "softcap": 3.0, "sinks_H": torch.linspace(-1, 2, 6)},
}
PREFIXES = (0, 1, 7, 63, 64, 65, 300)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("name", SCORINGS)
def test_trees_after_prefixes_equal_the_definition(name: str, prefix: int) -> None:
    for seed, groups in ((prefix, 2), (prefix + 1, 6), (prefix + 2, 1)):
        batch, cache, (q, k, v), scoring = step(prefix, some_tree(seed), groups=groups, seed=seed, **SCORINGS[name])
        found = PrefixTreePlan(cache, batch).attend(0, q, k, v, **scoring)
        expected = reference(batch.segments[0], cache, q, **scoring)
        assert float((found - expected).abs().max()) < LIMIT


@pytest.mark.parametrize("draft", [TokenTree(()), TokenTree((1,)), TokenTree((1, 2, 3, 4, 5))], ids=len)
@pytest.mark.parametrize("prefix", [0, 40])
def test_a_root_alone_and_chains_equal_the_definition(prefix: int, draft: TokenTree) -> None:
    batch, cache, (q, k, v), scoring = step(prefix, draft, groups=2, value=24)
    found = PrefixTreePlan(cache, batch).attend(0, q, k, v, **scoring)
    assert float((found - reference(batch.segments[0], cache, q, **scoring)).abs().max()) < LIMIT


@pytest.mark.parametrize("bug", ["parts count alike", "the tree mask is ignored", "the edge of the window is open"])
def test_a_planted_bug_is_far_outside_of_the_limit(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = TokenTree((1, 2, 3, 4), (-1, -1, 0, 2))
    batch, cache, (q, k, v), scoring = step(40, draft, groups=2, window=7 if "window" in bug else None)
    part, edge = prefix_tree_attention.attention_part, PrefixTreePlan._edge

    def wrong(*arguments: Any) -> prefix_tree_attention.Part:
        *rows, mask, scoring = arguments
        found = part(*rows, None if "mask" in bug else mask, scoring)
        return found._replace(log_sum_GF=torch.zeros_like(found.log_sum_GF)) if "alike" in bug else found

    def open_edge(self: PrefixTreePlan, *arguments: Any) -> tuple[int, Tensor | None]:
        shared, mask_FE = edge(self, *arguments)
        return shared, None if mask_FE is None else torch.zeros_like(mask_FE)

    if "edge" in bug:
        monkeypatch.setattr(PrefixTreePlan, "_edge", open_edge)
    monkeypatch.setattr(prefix_tree_attention, "attention_part", wrong)
    found = PrefixTreePlan(cache, batch).attend(0, q, k, v, **scoring)
    assert float((found - reference(batch.segments[0], cache, q, **scoring)).abs().max()) > 1000 * LIMIT


def test_nothing_over_the_prefix_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, cache, (q, k, v), scoring = step(300, some_tree(1), groups=2)
    masked = []
    part = prefix_tree_attention.attention_part

    def watched(*arguments: Any) -> prefix_tree_attention.Part:
        masked.append((arguments[1].shape[1], arguments[3] is not None))
        return part(*arguments)

    monkeypatch.setattr(prefix_tree_attention, "attention_part", watched)
    PrefixTreePlan(cache, batch).attend(0, q, k, v, **scoring)
    assert masked == [(len(batch), True), (300, False)]


def test_a_prompt_is_computed_as_the_dense_plan_does() -> None:
    batch, cache, (q, k, v), scoring = step(30, TokenTree((1, 2, 3)), groups=2)
    prompt = PackedBatch()
    prompt.add_chunk(0, 30, batch.tokens, wanted=1)
    found, dense = (plan(cache, prompt).attend(0, q, k, v, **scoring) for plan in (PrefixTreePlan, DensePlan))
    assert torch.equal(found, dense)


def test_bfloat16_is_as_near_as_the_dense_plan_is() -> None:
    batch, cache, rows, scoring = step(300, some_tree(5), groups=2, width=64, value=64)
    rows = [each.bfloat16() for each in rows]
    cache.keys, cache.values = ([side[0].bfloat16()] for side in (cache.keys, cache.values))
    exact = None
    errors = []
    for plan in (DensePlan, PrefixTreePlan):
        found = plan(cache, batch).attend(0, *rows, **scoring)
        exact = reference(batch.segments[0], cache, rows[0], **scoring) if exact is None else exact
        errors.append(float((found - exact).abs().mean()))
    assert errors[1] <= 1.5 * errors[0]  # each part is rounded by the library


def test_it_is_chosen_by_name_and_goes_under_sparse_verification() -> None:
    llm = LLM("zoo:draft", speculative_config={"method": "ngram", "plan": "prefix_tree"})
    assert isinstance(llm.recipe.plan, PrefixTreePlans)
    assert llm.recipe.promise == "same stream"
    assert type(plan_of({"plan": "dense"}, llm.target)) is DensePlans
    settings = {"verification.attention": "per_head", "verification.dense_below": 0, "verification.block": 16}
    batch, cache, (q, k, v), scoring = step(300, some_tree(2), groups=2)
    whole = {**settings, "verification.budget": 1.0}
    found = {}
    for plan in ("dense", "prefix_tree"):
        maker = plan_of({**settings, "plan": plan, "verification.budget": 0.2}, llm.target)
        made = maker(cache, batch)
        assert type(made) is (SparsePrefixTreePlan if plan == "prefix_tree" else SparseAttentionPlan)
        found[plan] = made.attend(0, q, k, v, **scoring)
        everything = plan_of({**whole, "plan": plan}, llm.target)(cache, batch).attend(0, q, k, v, **scoring)
        expected = reference(batch.segments[0], cache, q, **scoring)
        assert float((everything - expected).abs().max()) < LIMIT
    assert float((found["prefix_tree"] - found["dense"]).abs().max()) < LIMIT
    assert float((found["prefix_tree"] - expected).abs().max()) > 100 * LIMIT  # something was left out


def test_the_fused_decoder_gives_both_plans_the_same_bits() -> None:
    prompt = "The quick brown fox. The quick brown fox."
    texts = []
    for plan in ("dense", "prefix_tree"):
        llm = LLM("zoo:draft", speculative_config={"method": "suffix", "plan": plan})
        texts.append(llm.generate([prompt], SamplingParams(max_tokens=24))[0].token_ids)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plan": "prefixtree"}, "unknown plan 'prefixtree': did you mean 'prefix_tree'"),
        ({"plan": 3}, "plan=3 must be"),
        ({"plan": "sparse_verification"}, "switched on by its settings, verification"),
        ({"method": "ngram", "prefix_tree.size": 3}, "unknown option 'prefix_tree.size'"),
    ],
    ids=str,
)
def test_invalid_plans_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("zoo:draft", speculative_config=settings)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton (extra 'dev', Linux)")
def test_the_kernel_equals_the_definition_under_the_interpreter() -> None:
    tests = Path(__file__).parents[2]
    paths = os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "FORETOKEN_NATIVE": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "helpers.prefix_tree"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["launches"] for each in found] == [1] * len(found)
    assert max(each["error"] for each in found if not each["planted"]) < LIMIT
    assert min(each["error"] for each in found if each["planted"]) > 1000 * LIMIT
