"""A seed gives the same sampled tokens in any batch, process and number of threads, where drafts are drawn, too."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.ratio import RatioVerifier
from helpers import small_llms, warm, zoo_llms
from helpers.small_llms import ALTERED, PROMPTS, assert_idle, ids, prompt_ids

DRAFTS = {"method": "draft_model", "model": "zoo:draft"}
RECIPES = {
    "draft_model": DRAFTS,
    "sampled tree": {**DRAFTS, "tree": "sampled", "num_drafts": 2},
    "fixed length": {**DRAFTS, "num_speculative_tokens": 6},
    "del": {"method": "del"},
    "ngram": {"method": "ngram", "verifier": "block"},
    "suffix": {"method": "suffix", "verifier": "recursive"},
}
LENGTH = 16


def with_config(config: dict[str, Any], **options: Any) -> LLM:
    """A recipe over the smaller model; over the larger one where an adaptive draft of a model must pay."""
    if config["method"] in ("ngram", "suffix"):
        return small_llms.with_config(config, **options)
    if config.get("num_speculative_tokens") == 6:
        return small_llms.with_config({**config, "model": ALTERED}, **options)
    return zoo_llms.with_config(config, **options)


def seeded(seed: int = 11, **params: object) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=seed, max_tokens=LENGTH, ignore_eos=True, **params)  # type: ignore[arg-type]


def other(**params: object) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH + 9, ignore_eos=True, **params)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_seed_gives_the_same_tokens_in_any_company(recipe):
    """Alone in a fresh engine; next to greedy, seeded and unseeded ones; in one that others have taught; next to a
    prompt that takes all rows that it can get."""
    config = RECIPES[recipe]
    alone = [ids(with_config(config).generate(prompt, seeded()))[0] for prompt in PROMPTS[:3]]
    llm = with_config(config)
    together = ids(
        llm.generate(
            [*PROMPTS[:3], *PROMPTS],
            [seeded()] * 3 + [other(), other(temperature=1.0), seeded(5), other(temperature=0.5), seeded(7)],
        )
    )
    assert together[:3] == alone
    assert [ids(llm.generate(prompt, seeded()))[0] for prompt in PROMPTS[:3]] == alone
    long = (prompt_ids(PROMPTS[1]) * 40)[:700]
    crowded = llm.generate([*PROMPTS[:3], long, long], [*[seeded()] * 3, other(), other()])
    assert ids(crowded)[:3] == alone
    assert_idle(llm)


def test_a_prompt_that_was_cut_but_for_a_token_begins_as_any_other():
    """The one before it leaves all rows but one that it needs; whether its first token is drafted may not follow."""
    prompt, rows = prompt_ids(PROMPTS[0]), 64
    before = (prompt_ids(PROMPTS[1]) * 9)[: rows - len(prompt) + 1]
    texts = []
    for prompts in ([prompt], [before, prompt]):
        llm = with_config(RECIPES["sampled tree"], max_num_seqs=2, max_rows_per_step=rows)
        given = [{"prompt_token_ids": each} for each in prompts]
        texts.append(ids(llm.generate(given, [*[other()] * (len(given) - 1), seeded()]))[-1])
    assert texts[0] == texts[1]


IN_A_PROCESS = """
import json, sys
from foretoken import LLM, SamplingParams
configs, prompt, params = json.loads(sys.argv[1])
params = [SamplingParams(**each) for each in params]
for config in configs:
    llm = LLM('zoo:base', dtype='float32', device='cpu', speculative_config=config, threads=2)
    llm.generate(['Once', 'Twice'], SamplingParams(max_tokens=20, temperature=1.0))
    print('|', *llm.generate([prompt, 'Once'], params)[0].token_ids)
"""


def test_neither_threads_nor_the_process_change_what_a_seed_gives():
    recipes = [RECIPES["draft_model"], RECIPES["del"]]
    params = {"temperature": 0.8, "seed": 11, "max_tokens": LENGTH, "ignore_eos": True}
    beside = {"temperature": 1.0, "max_tokens": LENGTH}
    expected = [ids(with_config(recipe).generate(PROMPTS[0], seeded()))[0] for recipe in recipes]
    before = torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            assert [ids(with_config(recipe).generate(PROMPTS[0], seeded()))[0] for recipe in recipes] == expected
        finally:
            torch.set_num_threads(before)
    asked = json.dumps([recipes, PROMPTS[0], [params, beside]])
    command = [sys.executable, "-c", IN_A_PROCESS, asked]
    done = warm.run(command)
    assert done.returncode == 0, done.stderr
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("|")]
    assert found == [list(map(str, tokens)) for tokens in expected]


def test_what_others_cannot_change_is_still_drafted():
    """Repeatable is not the same as plain: seeded requests draft, and tokens stand."""
    for recipe in ("draft_model", "del"):
        (output,) = with_config(RECIPES[recipe]).generate(PROMPTS[0], seeded())
        assert 0 < output.metrics.num_accepted_tokens < output.metrics.num_draft_tokens


def test_requests_that_do_not_depend_on_the_draft_keep_the_measured_length():
    sampled, plain = seeded(), SamplingParams(temperature=1.0)
    adaptive = with_config(DRAFTS).recipe
    assert adaptive.history_only(sampled)
    assert not adaptive.history_only(plain)
    assert not adaptive.history_only(SamplingParams(seed=3))  # temperature 0
    assert not with_config({**DRAFTS, "verifier": "match"}).recipe.history_only(sampled)
    assert not with_config({"method": "ngram"}).recipe.history_only(sampled)


def test_rows_for_drafts_are_reserved_while_a_long_prompt_is_fed():
    llm = with_config({**DRAFTS, "num_speculative_tokens": 6}, max_num_seqs=4, max_rows_per_step=16)
    (alone,) = ids(llm.generate(PROMPTS[0], seeded()))
    long = (prompt_ids(PROMPTS[1]) * 40)[:300]
    outputs = llm.generate([PROMPTS[0], long, long, PROMPTS[2]], [seeded(), other(), other(), seeded(3)])
    assert ids(outputs)[0] == alone
    assert [len(output.token_ids) for output in outputs] == [LENGTH, LENGTH + 9, LENGTH + 9, LENGTH]
    # 16 rows for 4 requests: a root and three drafted tokens for each
    assert len(outputs[0].metrics.drafted_at) == 3


def test_a_seed_and_a_limit_of_one_row_a_request_is_plain_decoding():
    llm = with_config(DRAFTS, max_rows_per_step=4)
    (output,) = llm.generate(PROMPTS[0], seeded())
    assert output.metrics.num_draft_tokens == 0
    assert len(output.token_ids) == LENGTH


# ---------------------------------------------------------------- the rule


def teach(rule: OwnPastRule, confidence: float, stands: bool, steps: int = 50) -> None:
    draft = Draft(TokenTree([5]), confidence=(confidence,))
    for _ in range(steps):
        rule.learn(draft, Verdict((0,) if stands else (), 6))


def test_the_rule_follows_the_accepted_tokens_of_this_request():
    rule = OwnPastRule(0.1)
    assert rule.worthwhile(1.0, 0.55, 0)
    teach(rule, 0.55, stands=False)
    assert not rule.worthwhile(1.0, 0.55, 0)
    assert OwnPastRule(0.1).worthwhile(1.0, 0.55, 0)  # no other request has learnt from it
    teach(rule, 0.55, stands=True)
    assert rule.worthwhile(1.0, 0.55, 0)


def test_a_path_is_weighed_by_its_accepted_nodes_and_every_draft_begins_anew():
    rule = OwnPastRule(0.3)
    teach(rule, 0.35, stands=True)  # 2 tokens for 1.3: a node has to stand with 0.46
    assert not rule.worthwhile(0.35, 0.35, 1)  # under a parent without a call
    assert rule.worthwhile(1.0, 0.35, 0)
    assert rule.worthwhile(0.35, 0.35, 1)
    teach(rule, 0.35, stands=True, steps=1)
    assert not rule.worthwhile(0.35, 0.35, 1)


def test_a_more_expensive_node_must_promise_more():
    assert OwnPastRule(0.1).worthwhile(1.0, 0.35, 0)
    assert not OwnPastRule(0.5).worthwhile(1.0, 0.35, 0)
    assert not OwnPastRule(0.1).worthwhile(0.2, 0.35, 3)  # far down a chain


def test_the_rate_is_that_of_tokens_over_costs():
    """Tokens that always stand raise what a step is worth, so an unlikely node must promise more than at first."""
    rule = OwnPastRule(0.3)
    assert rule.worthwhile(1.0, 0.45, 0)
    teach(rule, 0.95, stands=True)
    # 2 tokens for 1.3: a node has to stand with 0.3 * 2 / 1.3 = 0.46
    assert not rule.worthwhile(1.0, 0.45, 0)
    assert rule.worthwhile(1.0, 0.55, 0)


def test_a_rate_of_long_ago_is_forgotten():
    rule, draft = OwnPastRule(0.1), Draft(TokenTree([5] * 6))
    for _ in range(200):
        rule.learn(draft, Verdict((0, 1, 2, 3, 4, 5), 6))
    assert not rule.worthwhile(1.0, 0.25, 2)  # 7 tokens for 1.6: a node has to stand with 0.44
    for _ in range(100):
        rule.learn(NO_DRAFT, Verdict((), 6))
    assert rule.worthwhile(1.0, 0.25, 2)  # one for 1: with 0.1


def test_after_many_steps_without_a_draft_one_is_made_anyway():
    rule = OwnPastRule(2.0)
    for _ in range(31):
        rule.learn(NO_DRAFT, Verdict((), 6))
        assert not rule.worthwhile(1.0, 0.05, 0)
    rule.learn(NO_DRAFT, Verdict((), 6))
    assert rule.worthwhile(1.0, 0.05, 0)
    assert rule.worthwhile(1.0, 0.05, 1)
    assert not rule.worthwhile(1.0, 0.05, 2)
    teach(rule, 0.05, stands=False, steps=1)
    assert not rule.worthwhile(1.0, 0.05, 0)


@pytest.mark.parametrize("empty", [0, 31, 32])
def test_the_outlook_predicts_the_decision(empty):
    rule = OwnPastRule(0.25)
    teach(rule, 0.35, stands=True)
    teach(rule, 0.75, stands=False)
    for _ in range(empty):
        rule.learn(NO_DRAFT, Verdict((), 6))
    outlook, decided = rule.outlook(), set()
    for nodes, reach in ((0, 1.0), (1, 0.777), (2, 0.777), (2, 0.222)):
        least = outlook.later if nodes else outlook.first
        for tenth, stands in enumerate(outlook.stands):
            foreseen = nodes < outlook.free or reach * stands > least
            assert rule.worthwhile(reach, (tenth + 0.5) / 10, nodes) is foreseen
            decided.add((nodes, foreseen))
    assert len(outlook.stands) == 10
    assert decided == {(0, True), (1, True), (2, True), (2, False)} | (
        {(0, False), (1, False)} if empty < 32 else set()
    )


# ---------------------------------------------------------------- next to a request that fails


def failing(llm: LLM, member: str, after: int) -> None:
    """The drafter's or rule's ``member`` fails for the last prompt, after its work for all requests."""
    culprit = prompt_ids(PROMPTS[-1])
    part = llm.recipe.drafter
    works, calls = getattr(part, member), 0

    def fails(news, *more):
        nonlocal calls
        done = works(news, *more)
        named = [getattr(each, "context", each) for each in news]
        if any(list(each.tokens[: each.num_prompt]) == culprit for each in named):
            calls += 1
            if calls > after:
                raise RuntimeError("this one fails")
        return done

    setattr(part, member, fails)


@pytest.mark.parametrize(
    ("recipe", "member"), [*((recipe, "propose") for recipe in RECIPES), ("kangaroo", "propose"), ("del", "on_forward")]
)
def test_a_neighbour_that_fails_changes_nothing_of_what_a_seed_gives(recipe, member):
    """Draws and updates of the failed step are repeated, and do not count twice."""
    config = {**RECIPES, "kangaroo": {"method": "kangaroo", "adapter": "random:2"}}[recipe]
    alone = [ids(with_config(config).generate(prompt, seeded()))[0] for prompt in PROMPTS[:2]]
    llm = with_config(config)
    failing(llm, member, after=2)
    outputs = llm.generate([*PROMPTS[:2], PROMPTS[-1]], seeded())
    assert ids(outputs[:2]) == alone
    assert outputs[2].error == "this one fails"
    assert_idle(llm)


def test_a_rule_that_fails_for_a_batch_draws_the_same_for_everyone_alone():
    class Failing(RatioVerifier):
        def verify_batch(self, drafts, targets, rngs):
            super().verify_batch(drafts, targets, rngs)
            raise RuntimeError("no batches today")

    expected = ids(with_config({**DRAFTS, "verifier": "ratio"}).generate(PROMPTS[:3], seeded()))
    assert Failing.offers.batches
    assert ids(with_config({**DRAFTS, "verifier": Failing()}).generate(PROMPTS[:3], seeded())) == expected
