"""RasdDrafter over tiny models and the bundled pair: exact distribution and stream, the draft's cache, sources, bad
input.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foretoken.bench.fields import metrics_fields
from foretoken.certify.recipe_law import text_law
from foretoken.core.draft import NO_DRAFT, Coupled, PointMass
from foretoken.core.errors import ConfigError, InputError, MismatchError
from foretoken.core.protocols import Budget, Verifier
from foretoken.core.tree import ROOT, TokenTree
from foretoken.core.verdict import Verdict
from foretoken.drafting.datastore.build import build
from foretoken.drafting.datastore.layout import Manifest
from foretoken.engine.llm import LLM
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.rasd.drafter import RasdDrafter
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.adapters import shelf
from helpers.stores import stored
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.untrained import untrained
from helpers.zoo_llms import PROMPTS, greedy, ids, with_config

TOKENS = [20, 57, 33]
PROMPT = [5, 40, 20, 57, 33, 20, 57]


@pytest.fixture(scope="module")
def pair():
    """A target and a draft of other weights."""
    made = [save_model("llama", shelf() / f"rasd-{seed}", seed=seed, num_hidden_layers=3) for seed in (0, 1)]
    return [load(each, device="cpu") for each in made]


@pytest.fixture(scope="module")
def store(pair, tmp_path_factory):
    """Random documents of the three tokens, so that every place goes on in several ways."""
    rng = random.Random(0)
    out = tmp_path_factory.mktemp("rasd") / "store"
    documents = [[rng.choice(TOKENS) for _ in range(40)] for _ in range(4)]
    tokenizer = pair[0].tokenizer
    build(documents, out, Manifest(max(tokenizer.get_vocab().values()) + 1, vocabulary_fingerprint(tokenizer), "tiny"))
    return out


def recipe(pair, store, **options):
    settings = {
        "method": "rasd",
        "model": str(pair[1].source),
        "datastore": store,
        "num_speculative_tokens": 5,
        **options,
    }
    return with_config(settings, target=pair[0])


def drafter_of(llm) -> RasdDrafter:
    found = llm.recipe.drafter
    assert isinstance(found, RasdDrafter)
    return found


# ---------------------------------------------------------------- the distribution


def law_of(llm, length=4):
    return text_law(llm, PROMPT, TOKENS, length=length, num_nodes=4)


@pytest.mark.parametrize(
    "options", [{}, {"coupled": False}, {"pruning": "top"}, {"drafter": "none", "verifier": "naive"}]
)
def test_texts_follow_the_target_s_distribution(pair, store, options):
    plain = law_of(with_config(None, target=pair[0]))
    found = law_of(recipe(pair, store, **options))
    assert found.num_drafted > 20
    assert max(found.lengths) > 1
    assert found.distance(plain) <= 1e-12


class DrawsForEveryPath(Verifier):
    """Planted, as REST's released code has it: one draw for each path, and the longest that agrees is kept."""

    name = "a draw for every path"
    promise = "same distribution"
    laws = (PointMass, Coupled)
    trees = True

    def verify(self, draft, target, rng):
        tree, best, extra = draft.tree, (), None
        leaves = [node for node in range(len(tree)) if node not in tree.children] or [ROOT]
        for leaf in leaves:
            kept, at = [], ROOT
            for node in [*tree.path_to(leaf), None]:
                token = rng.categorical("residual", target.p_at(at + 1))
                if node is None or token != tree.tokens[node]:
                    break
                kept.append(at := node)
            if extra is None or len(kept) > len(best):
                best, extra = tuple(kept), token
        return Verdict(best, extra)


def test_draws_for_every_path_are_seen(pair, store):
    plain = law_of(with_config(None, target=pair[0]), length=3)
    assert law_of(recipe(pair, store, verifier=DrawsForEveryPath()), length=3).distance(plain) > 1e-3


@pytest.mark.parametrize("coupled", [True, False])
def test_a_seed_has_one_stream_whatever_was_retrieved(pair, store, coupled):
    params = SamplingParams(
        max_tokens=24, temperature=1.0, ignore_eos=True, seed=7, logit_bias=dict.fromkeys(TOKENS, 6.0)
    )
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:3]}]
    plain = ids(with_config(None, target=pair[0]).generate(prompts, params))
    llm = recipe(pair, store, coupled=coupled)
    assert ids(llm.generate(prompts, params)) == plain
    assert ids(llm.generate(prompts[:1], params)) == plain[:1]


# ---------------------------------------------------------------- the draft's cache


def test_retrieved_tokens_with_an_empty_draft_keep_the_stream(pair, store):
    """A draft model may have nothing to say; a draft of nothing has no distribution of its own."""
    llm = recipe(pair, store)
    inner = drafter_of(llm)._inner
    inner.propose = lambda contexts, budgets: [NO_DRAFT] * len(contexts)
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    assert output.error is None
    assert output.metrics.num_draft_tokens > 0
    (plain,) = LLM.from_target(pair[0]).generate({"prompt_token_ids": PROMPT}, params)
    assert output.token_ids == plain.token_ids


def test_after_drafted_and_retrieved_tokens_the_draft_s_cache_is_a_fresh_read(pair, store):
    llm = recipe(pair, store, num_speculative_tokens=8)
    drafter = drafter_of(llm)
    runner = drafter._scorer
    kept, mixed = {}, []
    propose, observe = runner.propose, drafter.observe

    def watched(contexts, budgets):
        drafts = propose(contexts, budgets)
        for context in contexts:
            state = runner._states.get(context.request_id)
            if state is not None:
                kept[tuple(context.tokens)] = [
                    buffer[state.slot, :, : runner.cache.lengths[state.slot]].clone()
                    for buffer in (*runner.cache.keys, *runner.cache.values)
                ]
        return drafts

    def observed(outcomes):
        for outcome in outcomes:
            sources = [outcome.draft.sources[node] for node in outcome.verdict.path]
            mixed.append(any("draft" in each for each in sources) and any("draft" not in each for each in sources))
        observe(outcomes)

    runner.propose, drafter.observe = watched, observed
    bias = SamplingParams(
        max_tokens=60, temperature=1.0, ignore_eos=True, seed=1, logit_bias=dict.fromkeys(TOKENS, 6.0)
    )
    llm.generate([{"prompt_token_ids": PROMPT}], bias)
    assert any(mixed)
    tokens, expected = max(kept.items(), key=lambda each: len(each[0]))
    fresh = drafter_of(recipe(pair, store))._scorer
    context = llm.new_requests({"prompt_token_ids": list(tokens)}, bias)[0]
    fresh.propose([context], [_budget(1)])
    for found, buffer in zip(expected, (*fresh.cache.keys, *fresh.cache.values), strict=True):
        torch.testing.assert_close(buffer[0, :, : found.shape[1]], found, atol=1e-5, rtol=1e-5)


def _budget(nodes):
    return Budget(nodes, nodes)


def test_scores_are_the_draft_s_distribution_after_each_path(pair, store):
    """Against a forward of every path alone."""
    llm = recipe(pair, store, num_speculative_tokens=6)
    runner = drafter_of(llm)._scorer
    request = llm.new_requests({"prompt_token_ids": PROMPT})[0]
    [draft] = runner.propose([request], [_budget(2)])
    first = draft.tree.tokens
    tree = TokenTree([*first, 20, 57, 33, 57], [-1, 0, 0, -1, 2, 4])
    [scores] = runner.score([request], [_budget(2)], [tree])
    for node in range(len(tree)):
        path = [tree.tokens[each] for each in tree.path_to(node)]
        model = pair[1]
        cache, batch = model.new_cache(1), PackedBatch()
        slot, read = cache.acquire(), [*PROMPT, *path[:-1]]
        cache.reserve(slot, len(read))
        batch.add_chunk(slot, 0, read, wanted=1)
        q_V = model.forward(batch, DensePlan(cache, batch)).logits_MV[0].softmax(-1)
        assert scores[node] == pytest.approx(float(q_V[path[-1]]), abs=1e-5)


@pytest.mark.parametrize("top", [1, 12])
def test_unlikely_nodes_are_outside_the_best_tokens_after_a_node_that_was_drafted(pair, store, top):
    runner = drafter_of(recipe(pair, store, pruning="top"))._pruner
    request = with_config(None, target=pair[0]).new_requests({"prompt_token_ids": PROMPT})[0]
    [draft] = runner.propose([request], [_budget(2)])
    before = runner.model.flops
    tree = TokenTree([*draft.tree.tokens, *range(2, 42, 4), *range(3, 43, 4), 5], [-1, 0, *[-1] * 10, *[0] * 10, 2])
    drafted = {(-1, tree.tokens[0]), (0, tree.tokens[1])}
    if drafted & {(parent, token) for token, parent in zip(tree.tokens[2:], tree.parents[2:], strict=True)}:
        pytest.fail("a drafted token is retrieved again: choose others")
    found = runner.unlikely(request.request_id, tree, top)
    assert runner.model.flops == before  # no forward
    for parent, path in ((-1, PROMPT), (0, [*PROMPT, tree.tokens[0]])):
        cache, batch = pair[1].new_cache(1), PackedBatch()
        slot = cache.acquire()
        cache.reserve(slot, len(path))
        batch.add_chunk(slot, 0, path, wanted=1)
        best = pair[1].forward(batch, DensePlan(cache, batch)).logits_MV[0].topk(top).indices.tolist()
        for node in tree.children[parent]:
            assert (node in found) == (tree.tokens[node] not in best)
    assert len(tree) - 1 not in found  # the draft has not read its parent


def test_what_the_draft_finds_unlikely_is_not_proposed(pair, store):
    params = SamplingParams(max_tokens=24, ignore_eos=True, logit_bias=dict.fromkeys(TOKENS, 6.0))
    llm = recipe(pair, store, pruning="top", num_speculative_tokens=8)
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    assert {"datastore", "prompt"} & {name for each in output.metrics.drafted_by_source for name in each.split("+")}
    drafter_of(llm)._pruner.unlikely = lambda request, tree, top: frozenset(range(len(tree)))
    (output,) = llm.generate({"prompt_token_ids": PROMPT}, params)
    assert all(each.startswith("draft") for each in output.metrics.drafted_by_source)


# ---------------------------------------------------------------- sources, threads, drafters


def test_accepted_tokens_are_counted_by_source():
    llm = with_config(
        {"method": "rasd", "model": "zoo:draft", "datastore": stored("zoo:base"), "num_speculative_tokens": 8}
    )
    outputs = llm.generate(PROMPTS[:3], SamplingParams(max_tokens=32, ignore_eos=True))
    assert ids(outputs) == [greedy(prompt, 32) for prompt in PROMPTS[:3]]
    for output in outputs:
        fields = metrics_fields(output.metrics)
        assert sum(fields["accepted_by_source"].values()) == fields["num_accepted_tokens"]
        assert sum(fields["drafted_by_source"].values()) == fields["num_draft_tokens"]
    found = {name for output in outputs for name in output.metrics.accepted_by_source}
    assert any("draft" in name for name in found)
    assert any("prompt" in name for name in found)


def test_retrieval_runs_in_parallel_and_late_results_change_nothing(pair, store):
    llm = recipe(pair, store)
    drafter = drafter_of(llm)
    rng, threads = random.Random(0), set()
    for source in drafter._sources.values():
        propose = source.propose

        def slow(contexts, budgets, propose=propose):
            threads.add(threading.current_thread().name)
            time.sleep(rng.choice([0.0, 0.004]))
            return propose(contexts, budgets)

        source.propose = slow
    plain = with_config(None, target=pair[0])
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[:4]}]
    assert ids(llm.generate(prompts, params)) == ids(plain.generate(prompts, params))
    assert len(threads) == 1
    assert threading.main_thread().name not in threads


def test_a_source_that_raises_ends_its_own_request_only(pair, store):
    llm = recipe(pair, store)
    drafter = drafter_of(llm)
    source = drafter._sources["datastore"]
    propose, last = source.propose, PROMPT[0]

    def broken(contexts, budgets):
        if any(context.tokens[0] == 77 for context in contexts):
            raise OSError("the disk is gone")
        return propose(contexts, budgets)

    source.propose = broken
    prompts = [{"prompt_token_ids": [77, last]}, {"prompt_token_ids": PROMPT}]
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    failed, good = llm.generate(prompts, params)
    assert failed.finish_reason == "error"
    assert "the disk is gone" in failed.error
    assert good.token_ids == ids(with_config(None, target=pair[0]).generate(prompts[1:], params))[0]
    assert not drafter._requests


def test_an_eagle_head_is_fused_and_continues_after_retrieved_tokens(store, tmp_path):
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    model = load(str(save_model("llama", tmp_path / "model", **sizes)), device="cpu")
    head = untrained(Eagle, model, Path(tmp_path, "head"), draft_vocab_size=60)
    documents = [PROMPT * 3]
    out = tmp_path / "store"
    build(
        documents,
        out,
        Manifest(max(model.tokenizer.get_vocab().values()) + 1, vocabulary_fingerprint(model.tokenizer), "t"),
    )
    settings = {"method": "rasd", "drafter": "eagle", "head": head, "datastore": out, "num_speculative_tokens": 6}
    llm = with_config(settings, target=model)
    drafted = []
    inner = drafter_of(llm)._inner
    propose = inner.propose

    def watched(contexts, budgets):
        drafts = propose(contexts, budgets)
        drafted.extend(len(each) for each, budget in zip(drafts, budgets, strict=True) if budget.max_nodes)
        return drafts

    inner.propose = watched
    prompts = [{"prompt_token_ids": PROMPT}, {"prompt_token_ids": PROMPT[2:]}]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert ids(outputs) == ids(with_config(None, target=model).generate(prompts, params))
    assert all(drafted)  # the head never lost its place
    assert any(output.metrics.num_accepted_tokens for output in outputs)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompt": False}, "nothing to retrieve from"),
        ({"prompt": 1}, "prompt=1"),
        ({"pruning": "all"}, "pruning='all'"),
        ({"coupled": 3}, "coupled=3"),
        ({"drafter": "rest"}, "drafter='rest'"),
        ({"drafter": 5}, "drafter=5"),
        ({"retrieved": 0}, "retrieved=0"),
        ({"min_score": 1.0}, "min_score=1.0"),
    ],
)
def test_bad_options_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        RasdDrafter.Config(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"drafter": "suffx"}, "did you mean 'suffix'"),
        ({"drafter": "sprinter"}, "draws from a distribution of its own"),
        ({"drafter": "kangaroo"}, "begins inside the target|draws from a distribution of its own"),
        ({"drafter": "ngram", "head": "x"}, "drafter 'ngram' has no such option"),
    ],
)
def test_drafters_that_do_not_fit_are_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        with_config({"method": "rasd", "model": "zoo:draft", **options})


def test_a_datastore_of_another_tokenizer_or_a_torn_one_is_refused(pair, store, tmp_path):
    with pytest.raises(MismatchError, match="holds tokens of 'tiny'"):
        with_config({"method": "rasd", "model": "zoo:draft", "datastore": store})
    torn = tmp_path / "torn"
    torn.mkdir()
    for path in Path(store).iterdir():
        (torn / path.name).write_bytes(path.read_bytes())
    tokens = next(torn.glob("*.tokens"))
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(InputError, match="damaged"):
        recipe(pair, torn)
    with pytest.raises(InputError, match="not a datastore"):
        recipe(pair, tmp_path)


def test_settling_follows_the_rule():
    config = RasdDrafter.Config(model="zoo:draft")
    assert RasdDrafter.settle(config, None).coupled is True

    class NoCoupling:
        laws = (PointMass,)

    assert RasdDrafter.settle(config, NoCoupling()).coupled is False
    assert RasdDrafter.settle(replace(config, coupled=True), NoCoupling()).coupled is True
