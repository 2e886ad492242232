"""SuffixFirstDrafter over tiny models and the bundled pair: drafter in use, exactness, stream, heads, bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.bench.fields import metrics_fields
from foretoken.certify.recipe_law import text_law
from foretoken.core.draft import NO_DRAFT, Coupled, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget
from foretoken.engine.llm import LLM
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.suffix_first.drafter import SuffixFirstDrafter
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.adapters import shelf
from helpers.tiny_models import save_model
from helpers.untrained import untrained
from helpers.zoo_llms import PROMPTS, greedy, ids, with_config

TOKENS = [20, 57, 33]
PROMPT = [5, 40, 20, 57, 33, 20, 57]
REPEATED = [11, 12, 13, 14, 15, 16, 17] * 4
FRESH = [31, 8, 52, 27, 44]


@pytest.fixture(scope="module")
def pair():
    """A target and a draft of other weights."""
    made = [save_model("llama", shelf() / f"suffix-first-{seed}", seed=seed, num_hidden_layers=3) for seed in (0, 1)]
    return [load(each, device="cpu") for each in made]


def recipe(pair, **options):
    settings = {"method": "suffix_first", "model": str(pair[1].source), "num_speculative_tokens": 5, **options}
    return with_config(settings, target=pair[0])


def drafter_of(llm) -> SuffixFirstDrafter:
    found = llm.recipe.drafter
    assert isinstance(found, SuffixFirstDrafter)
    return found


# ---------------------------------------------------------------- the drafter in use


def test_repeated_text_is_copied_and_the_draft_model_reads_the_rest_alone(pair):
    llm = recipe(pair)
    drafter, asked = drafter_of(llm), []
    propose = drafter._inner.propose

    def watched(contexts, budgets):
        asked.append([budget.max_nodes for budget in budgets])
        return propose(contexts, budgets)

    drafter._inner.propose = watched
    requests = [llm.new_requests({"prompt_token_ids": prompt})[0] for prompt in (REPEATED, FRESH)]
    copied, drafted = drafter.propose(requests, [Budget(4, 4), Budget(4, 4)])
    assert asked == [[0, 4]]
    assert copied.tree.tokens[0] == REPEATED[0]
    assert set(copied.sources) == {"suffix"}
    assert set(drafted.sources) == {"draft_model"}
    drafter.propose(requests[:1], [Budget(4, 4)])
    assert len(asked) == 1  # no request is left to draft for


def test_a_high_threshold_leaves_copies_to_requests_without_other_drafts(pair):
    llm = recipe(pair, threshold=100)
    drafter = drafter_of(llm)
    (request,) = llm.new_requests({"prompt_token_ids": REPEATED})
    (draft,) = drafter.propose([request], [Budget(4, 4)])
    assert set(draft.sources) == {"draft_model"}
    drafter._inner.propose = lambda contexts, budgets: [NO_DRAFT] * len(contexts)
    (draft,) = drafter.propose([request], [Budget(4, 4)])
    assert set(draft.sources) == {"suffix"}


def test_both_speak_in_one_text_and_are_counted_apart():
    llm = with_config({"method": "suffix_first", "model": "zoo:draft", "num_speculative_tokens": 4})
    outputs = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=48, ignore_eos=True))
    assert ids(outputs) == [greedy(prompt, 48) for prompt in PROMPTS[:3]]
    accepted: dict[str, int] = {}
    for output in outputs:
        fields = metrics_fields(output.metrics)
        assert sum(fields["accepted_by_source"].values()) == fields["num_accepted_tokens"]
        for name, count in fields["accepted_by_source"].items():
            accepted[name] = accepted.get(name, 0) + count
    assert accepted["suffix"] > 5
    assert accepted["draft_model"] > 5


# ---------------------------------------------------------------- the distribution


def law_of(llm):
    return text_law(llm, PROMPT, TOKENS, length=4, num_nodes=4)


@pytest.mark.parametrize(
    "options", [{}, {"coupled": True}, {"verifier": "ratio"}, {"drafter": "ngram", "model": None, "verifier": "naive"}]
)
def test_texts_follow_the_target_s_distribution(pair, options):
    plain = law_of(with_config(None, target=pair[0]))
    found = law_of(recipe(pair, **options))
    assert found.num_drafted > 20
    assert max(found.lengths) > 1
    assert found.distance(plain) <= 1e-12


def test_a_copy_declared_as_drawn_is_detected(pair):
    """Planted: a copy with a distribution that it was not drawn from stands too often."""
    llm = recipe(pair)
    drafter, size = drafter_of(llm), pair[0].vocab_size
    propose = drafter.propose

    def pretending(contexts, budgets):
        return [
            replace(draft, law=Sampled(torch.full((len(draft), size), 1 / size), tuple(range(len(draft)))))
            if set(draft.sources) == {"suffix"}
            else draft
            for draft in propose(contexts, budgets)
        ]

    drafter.propose = pretending
    assert law_of(llm).distance(law_of(with_config(None, target=pair[0]))) > 1e-3


def test_kinds_of_drafts_by_rule(pair):
    assert drafter_of(recipe(pair)).laws == (PointMass, Sampled)
    (output,) = recipe(pair).generate({"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=4, temperature=1.0))
    assert output.promise == "same distribution"
    assert drafter_of(recipe(pair, verifier="match")).laws == (Coupled,)
    assert drafter_of(recipe(pair, verifier="match", coupled=False)).laws == (PointMass, Sampled)
    with pytest.raises(ConfigError, match="not valid for drafts of kind Coupled"):
        recipe(pair, coupled=True, verifier="ratio")


def test_a_seed_has_one_stream_whoever_drafts(pair):
    params = SamplingParams(
        max_tokens=24, temperature=1.0, ignore_eos=True, seed=7, logit_bias=dict.fromkeys(TOKENS, 6.0)
    )
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:3]}]
    plain = ids(with_config(None, target=pair[0]).generate(prompts, params))
    llm = recipe(pair, coupled=True)
    assert ids(llm.generate(prompts, params)) == plain
    assert ids(llm.generate(prompts[:1], params)) == plain[:1]


# ---------------------------------------------------------------- heads, failures


def test_an_eagle_head_continues_after_copied_tokens(tmp_path):
    """Its rows are those of a head that has read the same text plainly: no copy is missing among them."""
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    model = load(str(save_model("llama", tmp_path / "model", **sizes)), device="cpu")
    settings = {"model": untrained(Eagle, model, tmp_path / "head", draft_vocab_size=60)}
    llm = with_config({"method": "suffix_first", "num_speculative_tokens": 4, **settings}, target=model)
    inner, drafted = drafter_of(llm)._inner, []
    propose = inner.propose

    def watched(contexts, budgets):
        drafts = propose(contexts, budgets)
        asked = zip(contexts, drafts, budgets, strict=True)
        drafted.extend(
            (tuple(context.tokens), draft.tree.tokens) for context, draft, budget in asked if budget.max_nodes
        )
        return drafts

    inner.propose = watched
    prompts = [{"prompt_token_ids": REPEATED[:16]}, {"prompt_token_ids": FRESH}]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert ids(outputs) == ids(with_config(None, target=model).generate(prompts, params))
    assert any("suffix" in output.metrics.accepted_by_source for output in outputs)
    plain = with_config({"method": "eagle", **settings, "num_speculative_tokens": 4}, target=model)
    alone = plain.recipe.drafter
    said = {}
    propose_alone = alone.propose

    def alone_watched(contexts, budgets):
        drafts = propose_alone(contexts, budgets)
        said.update({tuple(c.tokens): d.tree.tokens for c, d in zip(contexts, drafts, strict=True)})
        return drafts

    alone.propose = alone_watched
    plain.generate(prompts, params)
    both = [(tokens, draft) for tokens, draft in drafted if tokens in said]
    assert len(both) > 3
    for tokens, draft in both:
        assert draft[: len(said[tokens])] == said[tokens][: len(draft)]


def test_an_inner_drafter_that_raises_ends_its_own_request_only(pair):
    llm = recipe(pair)
    drafter = drafter_of(llm)
    propose = drafter._inner.propose

    def broken(contexts, budgets):
        if any(context.tokens[0] == 77 and budget.max_nodes for context, budget in zip(contexts, budgets, strict=True)):
            raise OSError("the disk is gone")
        return propose(contexts, budgets)

    drafter._inner.propose = broken
    prompts = [{"prompt_token_ids": [77, 3]}, {"prompt_token_ids": PROMPT}]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    failed, good = llm.generate(prompts, params)
    assert "the disk is gone" in failed.error
    assert good.token_ids == ids(with_config(None, target=pair[0]).generate(prompts[1:], params))[0]
    assert not drafter._copied


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"threshold": -1}, "threshold=-1"),
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"threshold": True}, "threshold=True"),
        ({"drafter": "entropy_adaptive"}, "drafter='entropy_adaptive'"),
        ({"coupled": 3}, "coupled=3"),
        ({"drafter": "suffix"}, "drafter='suffix'"),
        ({"drafter": "rasd"}, "drafter='rasd'"),
        ({"drafter": 5}, "drafter=5"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        SuffixFirstDrafter.Config(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drafter": "draft_modl"}, "did you mean 'draft_model'"),
        ({"drafter": "kangaroo"}, "begins inside the target|draws from a distribution of its own"),
        ({"drafter": "ngram", "head": "x"}, "drafter 'ngram' has no such option"),
    ],
)
def test_drafters_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        with_config({"method": "suffix_first", "model": "zoo:draft", **options})


def test_a_head_of_the_target_drafts_where_a_draft_model_lies_at_hand() -> None:
    """The draft model that the zoo has for the target is no head for it."""
    llm = LLM("zoo:base", dtype="float32", speculative_config={"method": "suffix_first", "drafter": "eagle"})
    assert llm.generate(["Once upon a time"], SamplingParams(max_tokens=12))[0].metrics.num_draft_tokens > 0
