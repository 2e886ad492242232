"""Copies after the drafts of any drafter: the distribution, the count of each source, and the refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.certify.recipe_law import text_law
from foretoken.core.draft import PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget
from foretoken.drafters.copies_first import COPIES
from foretoken.drafters.extended import ExtendedDrafter
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.adapters import shelf
from helpers.tiny_models import save_model
from helpers.zoo_llms import PROMPTS, greedy, ids, with_config

TOKENS = [20, 57, 33]
PROMPT = [5, 40, 20, 57, 33, 20, 57]


@pytest.fixture(scope="module")
def pair():
    """A target and a draft of other weights."""
    made = [save_model("llama", shelf() / f"extended-{seed}", seed=seed, num_hidden_layers=3) for seed in (0, 1)]
    return [load(each, device="cpu") for each in made]


def recipe(pair, **options):
    settings = {"method": "draft_model", "model": str(pair[1].source), "extend": "suffix", **options}
    return with_config(settings, target=pair[0])


@pytest.mark.parametrize("options", [{}, {"verifier": "ratio"}])
def test_texts_with_appended_copies_follow_the_target_s_distribution(pair, options):
    llm = recipe(pair, **options)
    drafter, seen = llm.recipe.drafter, set()
    assert isinstance(drafter, ExtendedDrafter)
    propose = drafter.propose

    def watched(contexts, budgets):
        short = [replace(each, second=replace(each, max_nodes=min(1, each.max_nodes))) for each in budgets]
        drafts = propose(contexts, short)
        seen.update((type(draft.law), draft.sources) for draft in drafts if len(draft))
        return drafts

    drafter.propose = watched
    found = text_law(llm, PROMPT, TOKENS, length=4, num_nodes=4, stops=1)
    assert (Sampled, ("draft_model", COPIES)) in {(kind, sources[:2]) for kind, sources in seen}
    plain = text_law(with_config(None, target=pair[0]), PROMPT, TOKENS, length=4, num_nodes=4, stops=1)
    assert found.distance(plain) <= 1e-12


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_greedy_text_stays_and_each_source_is_counted(method):
    llm = with_config({"method": method, "extend": "suffix"})
    assert llm.recipe.method == method
    outputs = [output for prompt in PROMPTS[:3] for output in llm.generate([prompt], SamplingParams(max_tokens=48))]
    assert [each[:48] for each in ids(outputs)] == [greedy(prompt, 48, ignore_eos=False) for prompt in PROMPTS[:3]]
    assert {name for each in outputs for name in each.metrics.accepted_by_source} <= {COPIES, method}
    assert any(method in each.metrics.accepted_by_source for each in outputs)


class Fixed:
    """A stop rule that lets nodes through or not."""

    def __init__(self, pays):
        self._pays = pays

    def worthwhile(self, reach, confidence, num_nodes):
        return self._pays

    def outlook(self):
        return None

    def rate(self, num_nodes):
        return 1.0

    def after(self, first, confidence):
        return self


@pytest.mark.parametrize("pays", [True, False])
def test_copies_are_appended_while_their_rule_lets_them_through(pair, pays):
    llm = recipe(pair)
    (request,) = llm.new_requests({"prompt_token_ids": TOKENS * 9})
    first = llm.recipe.drafter._inner.propose([request], [Budget(1, 1)])[0]
    again = TOKENS[(TOKENS.index(first.tree.tokens[0]) + 1) % 3] if first.tree.tokens[0] in TOKENS else None
    llm.recipe.drafter.release(request.request_id)
    second = Budget(1, 1, Fixed(True), rate=1.0)
    (draft,) = llm.recipe.drafter.propose([request], [Budget(4, 4, Fixed(pays), second=second)])
    assert draft.sources[0] == "draft_model"
    assert (COPIES in draft.sources) == (pays and again is not None)
    if COPIES in draft.sources:
        assert draft.tree.tokens[1] == again


def test_it_declares_the_kinds_of_both(pair):
    assert recipe(pair).recipe.drafter.laws == (PointMass, Sampled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_speculative_tokens": 4}, "leave num_speculative_tokens out"),
        ({"tree": True, "method": "eagle", "model": None}, "it proposes trees"),
        ({"method": "auto"}, "it copies already"),
        ({"method": "ngram", "model": None}, "it copies already"),
        ({"extend": "prefix"}, "extend"),
    ],
)
def test_what_cannot_be_extended_is_refused(pair, options, message):
    settings = {"method": "draft_model", "model": "zoo:draft", "extend": "suffix", **options}
    with pytest.raises(ConfigError, match=message):
        with_config({name: value for name, value in settings.items() if value is not None})
