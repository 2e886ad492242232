"""AutoDrafter over tiny models and the bundled pair: models at hand, exactness, seeds, failures that cost nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.certify.recipe_law import text_law
from foretoken.core.draft import NO_DRAFT, Coupled, PointMass, Sampled
from foretoken.core.errors import ConfigError, MismatchError, ModelError, NoMemory
from foretoken.core.protocols import Budget
from foretoken.drafters.copies_first import COPIES
from foretoken.engine.llm import LLM
from foretoken.methods.auto import drafter as auto
from foretoken.methods.auto.drafter import AutoDrafter
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.adapters import shelf
from helpers.tiny_models import save_model
from helpers.zoo_llms import PROMPTS, greedy, ids, with_config

TOKENS = [20, 57, 33]
PROMPT = [5, 40, 20, 57, 33, 20, 57]
REPEATED = [11, 12, 13, 14, 15, 16, 17] * 4
EXACT, CAUGHT = 1e-12, 1e-4


@pytest.fixture(scope="module")
def pair():
    """A target and a draft of other weights."""
    made = [save_model("llama", shelf() / f"auto-{seed}", seed=seed, num_hidden_layers=3) for seed in (0, 1)]
    return [load(each, device="cpu") for each in made]


def recipe(pair, **options):
    settings = {"method": "auto", "model": str(pair[1].source), **options}
    return with_config(settings, target=pair[0])


def drafter_of(llm) -> AutoDrafter:
    found = llm.recipe.drafter
    assert isinstance(found, AutoDrafter)
    return found


def law_of(llm):
    return text_law(llm, PROMPT, TOKENS, length=4, num_nodes=4, stops=1)


# ---------------------------------------------------------------- the distribution


@pytest.mark.parametrize("options", [{}, {"verifier": "ratio"}, {"verifier": "block"}, {"verifier": "naive"}])
def test_texts_of_both_sources_follow_the_target_s_distribution(pair, options):
    llm = recipe(pair, **options)
    drafter, seen = drafter_of(llm), set()
    propose = drafter.propose

    def watched(contexts, budgets):
        short = [replace(each, second=replace(each, max_nodes=min(1, each.max_nodes))) for each in budgets]
        drafts = propose(contexts, short)
        seen.update((type(draft.law), draft.sources) for draft in drafts if len(draft))
        return drafts

    drafter.propose = watched
    found = law_of(llm)
    assert {sources[0] for _, sources in seen} == {COPIES, "draft_model"}
    assert any(
        law in (Sampled, Coupled) and sources[-1] == COPIES for law, sources in seen
    )  # copies after drawn tokens
    assert found.distance(law_of(with_config(None, target=pair[0]))) <= EXACT


def test_a_choice_by_the_drawn_token_is_caught(pair):
    """Planted: a drawn draft is preferred because its draw agrees with the copy."""
    llm = recipe(pair)
    drafter = drafter_of(llm)

    def choosy(contexts, budgets):
        copies = drafter._suffix.propose(contexts, budgets)
        drafts = drafter._inner.propose(contexts, budgets)
        drafter._copied = {context.request_id: None for context in contexts}
        return [
            draft if len(draft) and len(copy) and draft.tree.tokens[0] == copy.tree.tokens[0] else replace(copy)
            for draft, copy in zip(drafts, copies, strict=True)
        ]

    drafter.propose = choosy
    assert law_of(llm).distance(law_of(with_config(None, target=pair[0]))) > CAUGHT


def test_greedy_text_is_that_of_plain_decoding_and_both_are_counted():
    llm = with_config({"method": "auto"})
    outputs = [output for prompt in PROMPTS[:3] for output in llm.generate([prompt], SamplingParams(max_tokens=48))]
    assert [each[:48] for each in ids(outputs)] == [greedy(prompt, 48, ignore_eos=False) for prompt in PROMPTS[:3]]
    accepted = [output.metrics.accepted_by_source for output in outputs]
    assert {name for each in accepted for name in each} == {COPIES, "draft_model"}


def test_a_seed_gives_the_tokens_of_plain_decoding_unless_a_verifier_is_named(pair):
    params = SamplingParams(
        max_tokens=24, temperature=1.0, ignore_eos=True, seed=7, logit_bias=dict.fromkeys(TOKENS, 6.0)
    )
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:3]}]
    plain = ids(with_config(None, target=pair[0]).generate(prompts, params))
    for options in ({}, {"num_speculative_tokens": 4}, {"verifier": "match"}):
        outputs = recipe(pair, **options).generate(prompts, params)
        assert ids(outputs) == plain
        assert {output.promise for output in outputs} == {"same stream"}
    drawn = recipe(pair, verifier="block")
    assert drawn.generate(prompts, params)[0].promise == "same distribution"
    alone = drawn.generate(prompts[:1], params)
    assert ids(drawn.generate(prompts, params))[:1] == ids(alone)


def test_kinds_of_drafts_by_rule(pair):
    assert drafter_of(recipe(pair)).laws == (PointMass, Sampled)
    assert drafter_of(recipe(pair, verifier="match")).laws == (Coupled,)
    assert drafter_of(with_config({"method": "auto"}, target=pair[0])).laws == (PointMass,)


# ---------------------------------------------------------------- models at hand


def test_without_a_model_at_hand_copies_are_all(pair):
    llm = with_config({"method": "auto", "num_speculative_tokens": 4}, target=pair[0])
    assert drafter_of(llm).offers.portfolio == "no_drafter"
    assert "no_drafter" in drafter_of(llm).explanation
    (request,) = llm.new_requests({"prompt_token_ids": REPEATED})
    (draft,) = drafter_of(llm).propose([request], [Budget(4, 4)])
    assert draft.tree.tokens == tuple(REPEATED[:4])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("the file is cut"), "load_failed"),
        (OSError("no disk"), "load_failed"),
        (NoMemory("8 GB"), "memory"),
        (MemoryError(), "memory"),
        (ConfigError("begins inside the target"), "unsupported"),
    ],
)
def test_what_cannot_be_loaded_is_left_out_with_a_code(monkeypatch, error, code):
    class Broken:
        declared = AutoDrafter.declared

        def load(self):
            raise error

    find = auto.catalog.find
    monkeypatch.setattr(auto.catalog, "find", lambda n, k: Broken() if n == "draft_model" else find(n, k))
    monkeypatch.setattr(auto.learned_part, "lies_beside", lambda *_: False)
    llm = with_config({"method": "auto"})
    assert drafter_of(llm).offers.portfolio == code
    assert ids(llm.generate(PROMPTS[:2], SamplingParams(max_tokens=24, ignore_eos=True))) == [
        greedy(prompt, 24) for prompt in PROMPTS[:2]
    ]


def test_a_head_that_lies_next_to_the_weights_drafts(monkeypatch):
    """What begins inside the target cannot, and the next one is taken: kangaroo's adapter comes before it."""
    monkeypatch.setattr(auto.zoo, "drafts_for", lambda *_: False)
    assert "'eagle' drafts" in drafter_of(with_config({"method": "auto"})).explanation


def test_a_head_that_is_named_as_the_model_drafts():
    folder = str(auto.zoo.path("base") / "eagle")
    llm = LLM("zoo:base", speculative_config={"method": "auto", "model": folder})
    assert "'eagle' drafts" in drafter_of(llm).explanation
    other = str(auto.zoo.path("draft"))
    with pytest.raises(MismatchError, match="the EAGLE head's target_hidden_size is 384"):
        LLM(other, speculative_config={"method": "auto", "model": folder})


def test_a_model_that_is_named_is_refused_where_it_does_not_fit(pair):
    with pytest.raises(ModelError):
        recipe(pair, model=str(shelf() / "nowhere"))
    with pytest.raises(ConfigError, match="drafter='rasd'"):
        AutoDrafter.Config(drafter="rasd")


# ---------------------------------------------------------------- the choice


class Fixed:
    """A stop rule that lets all nodes through, and knows the rate."""

    def __init__(self, rate):
        self._rate = rate

    def worthwhile(self, reach, confidence, num_nodes):
        return True

    def outlook(self):
        return None

    def rate(self, num_nodes):
        return self._rate

    def after(self, first, confidence):
        return self


@pytest.mark.parametrize(("copying", "model", "first"), [(1.5, 1.2, COPIES), (1.2, 1.5, "draft_model")])
def test_the_higher_rate_goes_first(pair, copying, model, first):
    llm = recipe(pair)
    (request,) = llm.new_requests({"prompt_token_ids": REPEATED})
    second = Budget(4, 4, Fixed(model), rate=model)
    (draft,) = drafter_of(llm).propose([request], [Budget(4, 4, Fixed(copying), second=second)])
    assert draft.sources[0] == first


def test_a_model_that_is_not_called_leaves_the_request_to_copies(pair):
    drafter = drafter_of(recipe(pair))
    drafter._inner.propose = lambda *_: pytest.fail("the model was called")
    llm = recipe(pair)
    requests = [llm.new_requests({"prompt_token_ids": prompt})[0] for prompt in (REPEATED, [31, 8, 52])]
    budgets = [Budget(4, 4, Fixed(1.1), second=Budget(0, 0))] * 2
    copied, nothing = drafter.propose(requests, budgets)
    assert set(copied.sources) == {COPIES}
    assert nothing is NO_DRAFT or not len(nothing)
