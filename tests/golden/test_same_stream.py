"""A seeded request under the `match` rule yields one fixed stream: with or without drafts, in any company."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from foretoken.core import laws
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from helpers import zoo_llms
from helpers.pairwise import in_pairs
from helpers.small_llms import PROMPTS, assert_idle, config_of, ids, over, with_config
from helpers.variants import cases

CASES = {case.label: case for case in cases() if case.fits("match") and not case.variant.one_rule}
COUNTS = (5, "auto")
LAWS = {
    "0.7": {"temperature": 0.7},
    "1.0": {"temperature": 1.0},
    "1.3": {"temperature": 1.3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "min_p": {"temperature": 1.3, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "all": {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "min_p": 0.01, "frequency_penalty": 0.3, "min_tokens": 6},
}
LENGTH = 9


@cache
def llm_of(name: str, count: int | str = 5) -> LLM:
    case = CASES[name]
    return over(case).with_config(config_of(case, "match", count))


def params_for(law: str, index: int) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, ignore_eos=law != "all", seed=100 + index, **LAWS[law])


def plain(law: str, name: str = "none") -> list[list[int]]:
    """Without speculation, one request at a time; of the target that a recipe has."""
    return _plain(law, over(CASES[name]))


@cache
def _plain(law: str, llms: zoo_llms.Recipes) -> list[list[int]]:
    llm = llms.with_config({"method": "none", "verifier": "match"})
    return [ids(llm.generate(prompt, params_for(law, index)))[0] for index, prompt in enumerate(PROMPTS)]


def all_params(law: str) -> list[SamplingParams]:
    return [params_for(law, index) for index in range(len(PROMPTS))]


@pytest.mark.parametrize("law", LAWS)
def test_plain_sampling_does_not_depend_on_the_batch(law):
    assert ids(llm_of("none").generate(PROMPTS, all_params(law))) == plain(law)
    assert len({tuple(tokens) for tokens in plain(law)}) == len(PROMPTS)


@pytest.mark.parametrize(
    "recipe",
    in_pairs(
        list(product(CASES, COUNTS, LAWS)),
        lambda row: (CASES[row[0]].kind, row[1]),  # the rule sees kinds of drafts, not methods
        # an adaptive length drafts little in texts as short as these; the sampling parameters change p alone, before
        # the rule sees it
        lambda row: (row[0] if row[1] == COUNTS[0] else "", row[2]),
    ),
    ids=lambda row: "-".join(map(str, row)),
)
def test_drafts_do_not_change_the_stream(recipe):
    name, count, law = recipe
    llm = llm_of(name, count)
    assert ids(llm.generate(PROMPTS, all_params(law))) == plain(law, name)
    assert_idle(llm)


def test_the_tokens_that_are_selected_from_a_large_vocabulary_are_those_of_the_processed_row(monkeypatch):
    """At each node of a draft, penalties of the path included."""
    monkeypatch.setattr(laws, "_SELECT_FROM", 1)
    support, rows = laws.Laws.support_at, []

    def compared(self: laws.Laws, row: int):
        found = support(self, row)
        whole_V = self._process(self.raw_MV[row : row + 1], range(row, row + 1))[0]
        ids_K = (whole_V > -torch.inf).nonzero()[:, 0]
        assert torch.equal(found[0], ids_K)
        assert torch.equal(found[1], whole_V[ids_K])
        rows.append(row)
        return found

    monkeypatch.setattr(laws.Laws, "support_at", compared)
    repeats = {"temperature": 1.2, "top_p": 0.9, "frequency_penalty": -1.0}
    params = [SamplingParams(max_tokens=24, seed=seed, **repeats) for seed in range(len(PROMPTS))]
    ids(llm_of("draft_model-topk").generate(PROMPTS, params))
    assert sum(row > 0 for row in rows) > 10


@pytest.mark.parametrize("name", ["ngram", "draft_model-topk", "draft_model-chain", "del"])
def test_alone_and_among_eight(name):
    llm = llm_of(name)
    expected = plain("1.0", name)
    for index in (0, 1):
        assert ids(llm.generate(PROMPTS[index], params_for("1.0", index))) == [expected[index]]
    many = [PROMPTS[i % len(PROMPTS)] for i in range(8)]
    params = [params_for("1.0", i % len(PROMPTS)) for i in range(8)]
    assert ids(llm.generate(many, params)) == [expected[i % len(PROMPTS)] for i in range(8)]


@pytest.mark.parametrize("name", ["none", "suffix", "draft_model-topk", "kangaroo-0.2-1"])
def test_joining_late_changes_nothing(name):
    llm = llm_of(name)
    first = llm.stream(PROMPTS[2], params_for("0.7", 2))
    got = list(next(first).token_ids)
    got += next(first).token_ids
    late = ids(llm.generate([PROMPTS[0], PROMPTS[1]], [params_for("0.7", 0), params_for("0.7", 1)]))
    for chunk in first:
        got += chunk.token_ids
    assert late == plain("0.7", name)[:2]
    assert got == plain("0.7", name)[2]


def test_deterministic_drafts_give_the_stream_under_the_default_rule():
    llm = with_config({"method": "suffix"})
    assert llm.recipe.promise == "same stream"
    assert ids(llm.generate(PROMPTS, all_params("1.0"))) == plain("1.0")


def test_the_seed_decides():
    llm = llm_of("none")
    every = [SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=seed, ignore_eos=True) for seed in (1, 1, 2)]
    runs = [ids(llm.generate(PROMPTS[0], params))[0] for params in every]
    assert runs[0] == runs[1] != runs[2]


def test_drawing_with_the_same_noise_is_accepted_far_more_often_than_independent_draws():
    def accepted(name: str) -> float:
        outputs = llm_of(name).generate(PROMPTS, all_params("1.0"))
        return sum(o.metrics.num_accepted_tokens for o in outputs) / sum(o.metrics.num_draft_tokens for o in outputs)

    assert accepted("draft_model-coupled") > 2 * accepted("draft_model-chain")
