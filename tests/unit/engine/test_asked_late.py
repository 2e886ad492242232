"""A drafter that is asked in the middle of a request catches up, and proposes what it would have proposed anyway."""

from __future__ import annotations

import pytest

from foretoken.core.sampling import SamplingParams
from foretoken.drafting import draft_runner
from foretoken.engine.llm import LLM
from foretoken.methods.kangaroo import drafter as kangaroo
from helpers.zoo_llms import PROMPTS, assert_idle, greedy, prompt_ids, with_config

LENGTH = 24
RECIPES = {
    "draft_model": {"method": "draft_model", "model": "zoo:draft"},
    "tree": {"method": "draft_model", "model": "zoo:draft", "tree": "topk"},
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "kangaroo": {"method": "kangaroo", "adapter": "random:2"},
    "del": {"method": "del", "exit_layer": 4, "cost": "layers"},
}


class Always:
    """Drafts four nodes, whatever they promise."""

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        return num_nodes < 4


def asked_when(llm: LLM, asks) -> list[int]:
    """Have the engine ask for a request where ``asks`` says so, by the tokens that it has emitted; counts the steps."""
    steps: list[int] = []

    def choose(requests, num_requests):
        steps.append(num_requests)
        return [Always() if asks(each.num_output) else None for each in requests]

    llm.engine.controller.choose = choose
    return steps


def params(**more: object) -> SamplingParams:
    return SamplingParams(max_tokens=LENGTH, ignore_eos=True, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gaps", ["late", "now and then"])
def test_the_text_stays_and_drafts_are_made(recipe, gaps):
    llm = with_config(RECIPES[recipe])
    asked_when(llm, (lambda done: done >= 8) if gaps == "late" else (lambda done: done % 5 < 2))
    outputs = llm.generate(PROMPTS[:4], params())
    assert [output.token_ids for output in outputs] == [greedy(prompt, LENGTH) for prompt in PROMPTS[:4]]
    assert sum(output.metrics.num_draft_tokens for output in outputs) > 0
    assert_idle(llm)


@pytest.mark.parametrize("recipe", ["draft_model", "ngram", "suffix", "kangaroo"])
def test_it_proposes_what_it_would_have_proposed(recipe, monkeypatch):
    """Behind a text of more than one chunk, and after tokens that it has not seen; so the drafts are the same."""
    monkeypatch.setattr(draft_runner, "CHUNK_ROWS", 32)
    monkeypatch.setattr(kangaroo, "_CHUNK_ROWS", 32)
    long = (prompt_ids(PROMPTS[0]) * 60)[:100]
    proposed = []
    for asks in (lambda done: True, lambda done: done == 0 or done >= 12):
        llm = with_config(RECIPES[recipe])
        asked_when(llm, asks)
        drafter, drafts = llm.recipe.drafter, {}
        propose = drafter.propose

        def watched(contexts, budgets, propose=propose, drafts=drafts):
            found = propose(contexts, budgets)
            drafts.update({len(each.tokens): draft.tree.tokens for each, draft in zip(contexts, found, strict=True)})
            return found

        drafter.propose = watched
        (output,) = llm.generate({"prompt_token_ids": long}, params())
        assert output.error is None
        proposed.append(drafts)
    both = [at for at in proposed[0] if at >= len(long) + 12 and at in proposed[1]]
    assert both
    assert any(proposed[0][at] for at in both)
    assert all(proposed[0][at] == proposed[1][at] for at in both)


def test_a_draft_model_that_is_not_asked_reads_nothing():
    llm = with_config(RECIPES["draft_model"])
    drafter = llm.recipe.drafter
    asked_when(llm, lambda done: False)
    before = drafter.flops
    outputs = llm.generate(PROMPTS, params())
    assert [output.token_ids for output in outputs] == [greedy(prompt, LENGTH) for prompt in PROMPTS]
    assert drafter.flops == before
    assert_idle(llm)


def test_an_adapter_that_is_not_asked_reads_nothing():
    llm = with_config(RECIPES["kangaroo"])
    drafter = llm.recipe.drafter
    asked_when(llm, lambda done: False)
    drafter._head.forward = None  # would be a TypeError
    (output,) = llm.generate(PROMPTS[0], params())
    assert output.error is None
    assert_idle(llm)


def test_the_rows_for_drafts_go_to_those_who_are_asked():
    """Eight rows for four requests: one of them may draft four tokens where the others draft none."""
    llm = with_config(RECIPES["ngram"], max_num_seqs=4, max_rows_per_step=8)
    first = prompt_ids(PROMPTS[2])

    def choose(requests, num_requests):
        return [Always() if each.tokens[: each.num_prompt] == first else None for each in requests]

    llm.engine.controller.choose = choose
    outputs = llm.generate([PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]], params())
    assert len(outputs[1].metrics.drafted_at) == 4
    assert [sum(output.metrics.drafted_at) > 0 for output in outputs] == [False, True, False, False]


def test_seeded_requests_whose_tokens_depend_on_the_draft_are_asked_whatever_was_measured():
    llm = with_config(RECIPES["draft_model"])
    steps = asked_when(llm, lambda done: False)
    seeded = [params(temperature=0.8, seed=3), params()]
    drafted = [output.metrics.num_draft_tokens for output in llm.generate(PROMPTS[:2], seeded)]
    assert drafted[0] > 0
    assert drafted[1] == 0
    assert steps


@pytest.mark.parametrize(
    ("config", "weighed"),
    [
        ({"method": "ngram"}, True),
        ({"method": "ngram", "num_speculative_tokens": 4}, False),
        ({"method": "kangaroo", "adapter": "random:2"}, True),
        ({"method": "kangaroo", "adapter": "random:2", "num_speculative_tokens": 4}, False),
        ({"method": "del"}, True),
        ({"method": "sprinter", "model": "zoo:draft", "head": "random:pre"}, False),
        ({"method": "sprinter", "model": "zoo:draft", "head": "random:pre", "verifier": "block"}, True),
        ({"method": "none"}, False),
    ],
)
def test_what_is_weighed_against_plain_decoding(config, weighed):
    """What was asked for in numbers is done, and a lossy rule's text must not depend on times."""
    assert with_config(config).recipe.weighed is weighed
