"""`reflective` on the real pair: probe rows, the cache, alpha 0, trees, seeds, batches, faults, refusals."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.core.verdict import Verdict
from foretoken.data.reflection import BACK
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.methods.reflective.verifier import ReflectiveVerifier
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.zoo_llms import PROMPTS as ALL_PROMPTS
from helpers.zoo_llms import assert_idle, ids, prompt_ids, target, with_config

LENGTH = 20
PROMPTS = ALL_PROMPTS[:3]
DRAFTS = {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4}
SHORT = {"prompt": " [BACK]", "prefix": 2}
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=LENGTH, temperature=1.0, seed=3, ignore_eos=True)


def reflective(alpha=0.5, *, settings=None, **options):
    return with_config({**DRAFTS, "verifier": "reflective", "alpha": alpha, **SHORT, **options}, **(settings or {}))


def noted(llm, monkeypatch):
    """Every draft that is verified with a probe: tokens before, draft, distributions."""
    rule, found = llm.recipe.verifier, []
    probe, verify = rule.probe, rule.verify_within
    asked = {}

    def probing(draft, context):
        asked[id(draft)] = (list(context.tokens), probe(draft, context))
        return asked[id(draft)][1]

    def verifying(draft, laws, rng, spent):
        if laws.probe_logits_PV is not None:
            found.append((*asked[id(draft)], draft, laws))
        return verify(draft, laws, rng, spent)

    monkeypatch.setattr(rule, "probe", probing)
    monkeypatch.setattr(rule, "verify_within", verifying)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("rule", "forced"), [("recursive", False), ("recursive", True), ("match", True), ("typical", True)]
)
def test_alpha_0_is_the_plain_rule_bit_for_bit_also_with_the_probe_forced_in(params, rule, forced, monkeypatch):
    plain = with_config({**DRAFTS, "verifier": rule}).generate(PROMPTS, params)
    llm = reflective(0.0, rule=rule)
    if forced:
        monkeypatch.setattr(type(llm.recipe.verifier), "probe", _probe_whatever_alpha)
        seen = noted(llm, monkeypatch)
    ours = llm.generate(PROMPTS, params)
    assert ids(ours) == ids(plain)
    assert [each.metrics.num_steps for each in ours] == [each.metrics.num_steps for each in plain]
    assert [each.metrics.num_draft_tokens for each in ours] == [each.metrics.num_draft_tokens for each in plain]
    assert not forced or len(seen) > 5


def _probe_whatever_alpha(self, draft, context):
    other = ReflectiveVerifier(ReflectiveVerifier.Config(prompt=self.config.prompt, prefix=self.config.prefix))
    return _PROBE(other, draft, context)


_PROBE = ReflectiveVerifier.probe


def read(tokens, wanted):
    """Raw logits of the last rows of a text, read from scratch."""
    model = target()
    cache, batch = model.new_cache(1), PackedBatch()
    slot = cache.acquire()
    cache.reserve(slot, len(tokens))
    batch.add_chunk(slot, 0, tokens, wanted=wanted)
    return model.forward(batch, DensePlan(cache, batch)).logits_MV


def test_both_readings_are_a_plain_forward_over_the_same_tokens(monkeypatch):
    """Z0 as without a suffix and Zr as over the concatenated text: to the bit, on the native decoder."""
    llm = reflective(0.5)
    found = noted(llm, monkeypatch)
    llm.generate(PROMPTS[0], GREEDY)
    assert len(found) > 3
    for tokens, probed, draft, laws in found[:6]:
        k = len(draft)
        whole = read([*tokens, *probed.tokens], 1 + len(probed))
        alone = read([*tokens, *draft.tree.tokens], 1 + k)
        same = torch.equal if target().native_decoder is not None else lambda a, b: torch.allclose(a, b, atol=1e-3)
        assert same(laws.raw_MV, alone)
        assert same(laws.raw_MV, whole[: 1 + k])
        assert same(laws.probe_logits_PV, whole[1 + k :])


def test_an_off_by_one_would_agree_with_everything(monkeypatch):
    """The row of the copied d_i has read d_i twice. On drafts that are not the target's own, agreement with the row
    before the copy stays far below one, and below what copying alone would give at the next row."""
    llm = reflective(0.5)
    found = noted(llm, monkeypatch)
    llm.generate(PROMPTS, SAMPLED)
    before = [
        int(laws.probe_logits_PV[len(probed) - len(draft) - len(draft) + node].argmax()) == token
        for _, probed, draft, laws in found
        for node, token in enumerate(draft.tree.tokens)
    ]
    assert 0.05 < sum(before) / len(before) < 0.95


@pytest.mark.parametrize("options", [{}, {"tree": "topk", "num_drafts": 2}, {"mix_bonus": True}], ids=str)
def test_the_cache_after_every_step_is_one_that_was_never_probed(options, monkeypatch):
    """The committed rows equal a fresh read of the request's tokens, and no probe token is in them."""
    llm = reflective(0.5, **options)
    engine, checked = llm.engine, []
    commit = engine.commit

    def checking(current):
        touched = commit(current)
        for job in current.jobs:
            if job.request.slot >= 0:
                assert engine.cache.lengths[job.request.slot] == len(job.request.tokens) - 1
                checked.append(list(job.request.tokens))
        return touched

    monkeypatch.setattr(engine, "commit", checking)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert len(checked) > 10
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        # greedy continuation of the emitted tokens, through this engine's own cache, equals a fresh one
        assert output.error is None
        assert len(output.token_ids) == LENGTH
        begin = prompt_ids(prompt)
        final = read([*begin, *output.token_ids], LENGTH + 1)
        if options:
            continue
        off = [
            token for token, logits_V in zip(output.token_ids, final, strict=False) if token != int(logits_V.argmax())
        ]
        assert len(off) == round(output.metrics.distortion * LENGTH)
    assert_idle(llm)


class Fickle(ReflectiveVerifier):
    """Lets any number of nodes stand, goes on with any token, and fails now and then."""

    def verify_within(self, draft, target, rng, spent):
        if len(draft) and target.probe_logits_PV is not None and self.random.random() < 0.04:
            raise ValueError("a planted fault")
        path, node = [], -1
        while node in draft.tree.children and self.random.random() < 0.7:
            node = self.random.choice(draft.tree.children[node])
            path.append(node)
        return Verdict(tuple(path), self.random.randrange(20, 8000))


@pytest.mark.covering(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tree", ["chain", "topk"])
def test_committed_keys_and_values_are_those_of_a_fresh_read_whatever_stands_fails_or_is_cancelled(seed, tree):
    """To the bit on the native decoder, after every step, in slots that failed or cancelled requests had before."""
    rule = Fickle(ReflectiveVerifier.Config(alpha=0.5, prompt=(60, 61), prefix=3))
    rule.random = random.Random(seed)
    options = {"tree": "topk", "num_drafts": 2} if tree == "topk" else {}
    llm = with_config({**DRAFTS, **options, "verifier": rule}, max_num_seqs=2)
    engine, commit, steps = llm.engine, llm.engine.commit, 0

    def checking(current):
        nonlocal steps
        touched = commit(current)
        for request in [job.request for job in current.jobs if job.request.slot >= 0]:
            steps += any(len(job.draft) for job in current.jobs)
            length = engine.cache.lengths[request.slot]
            fresh = fresh_cache(list(request.tokens)[:length])
            for kept, read_again in ((engine.cache.keys, fresh.keys), (engine.cache.values, fresh.values)):
                for ours, theirs in zip(kept, read_again, strict=True):
                    same = torch.equal if target().native_decoder is not None else partial(torch.allclose, atol=1e-4)
                    assert same(ours[request.slot, :, :length], theirs[0, :, :length])
            if rule.random.random() < 0.05:
                engine.cancel(request)
        return touched

    engine.commit = checking
    llm.generate([*PROMPTS, *PROMPTS], GREEDY)
    assert steps > 10
    assert_idle(llm)


def fresh_cache(tokens):
    """The target's cache after reading these tokens once."""
    cache, batch = target().new_cache(1), PackedBatch()
    slot = cache.acquire()
    cache.reserve(slot, len(tokens))
    batch.add_chunk(slot, 0, tokens, wanted=1)
    target().forward(batch, DensePlan(cache, batch))
    return cache


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_company_changes_nothing(params):
    expected = [ids(reflective().generate(prompt, params))[0] for prompt in PROMPTS]
    assert ids(reflective().generate(PROMPTS, params)) == expected
    if params is SAMPLED:  # a seed holds next to prompts that take every row
        long = (prompt_ids(PROMPTS[1]) * 40)[:300]
        crowd = reflective().generate([*PROMPTS, long], [*[params] * len(PROMPTS), GREEDY])
        assert ids(crowd)[: len(PROMPTS)] == expected


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_budget_of_nothing_is_the_exact_rule(params):
    plain = with_config({**DRAFTS, "verifier": "recursive"}).generate(PROMPTS, params)
    assert ids(reflective(0.6, max_distortion=0.0).generate(PROMPTS, params)) == ids(plain)
    bounded = reflective(0.6, max_distortion=0.05).generate(PROMPTS, params)
    assert all(each.metrics.distortion <= 0.05 + 1e-9 for each in bounded)


def test_penalties_and_min_tokens_hold_under_mixing():
    params = SamplingParams(max_tokens=LENGTH, min_tokens=LENGTH, repetition_penalty=1.3, logit_bias={11: -math.inf})
    for output in reflective(0.8).generate(PROMPTS, params):
        assert len(output.token_ids) == LENGTH
        assert 11 not in output.token_ids


def test_near_the_end_of_the_context_the_plain_rule_decides(tmp_path):
    """128 positions; the draft is the target itself, so that without a probe its own greedy text comes out."""
    model = load(str(save_model("llama", tmp_path)), dtype="float32", device="cpu")
    begin, params = [*range(4, 101), *range(4, 25)], SamplingParams(max_tokens=20, ignore_eos=True)
    config = {**DRAFTS, "model": str(tmp_path), "verifier": "reflective", "alpha": 1.0, "prompt": "back"}
    (output,) = with_config(config, target=model).generate([begin], params)
    assert [output.token_ids] == ids(with_config(None, target=model).generate([begin], params))
    assert len(output.token_ids) == 10
    assert output.metrics.distortion == 0.0
    (free,) = with_config(config, target=model).generate([begin[:60]], params)
    assert free.metrics.distortion > 0.0


@pytest.mark.parametrize(("nodes", "read"), [(1, True), (2, False)])
def test_a_copy_that_a_sliding_window_hides_the_draft_from_is_not_read(nodes, read, tmp_path, monkeypatch):
    """Five positions: root, draft, prompt, prefix and copy take 2 k + 2. With two nodes the plain rule decides."""
    model = load(str(save_model("mistral", tmp_path)), dtype="float32", device="cpu")
    assert model.window == 5
    params, begin = SamplingParams(max_tokens=12, ignore_eos=True), [*range(4, 20)]
    config = {**DRAFTS, "method": "ngram", "verifier": "reflective", "alpha": 1.0, "prompt": (9,), "prefix": 1}
    del config["model"]
    llm = with_config({**config, "num_speculative_tokens": nodes}, target=model)
    seen = noted(llm, monkeypatch)
    outputs = llm.generate([begin * 2], params)
    assert bool(seen) == read
    if not read:
        assert ids(outputs) == ids(with_config(None, target=model).generate([begin * 2], params))
    with pytest.raises(ConfigError, match="window of 5"):
        with_config({**config, "prompt": (9, 10, 11)}, target=model)


def test_where_a_probe_has_no_numbers_the_draft_is_decided_without_it(monkeypatch):
    llm = reflective(0.5)
    engine, forward = llm.engine, llm.engine.forward
    marked = prompt_ids(PROMPTS[2])

    def broken(current):
        forward(current)
        row = 0
        for job in current.jobs:
            if job.wanted > 1 + len(job.draft) and job.request.tokens[: len(marked)] == marked:
                current.output.peaks[row + job.wanted - 1] = math.nan
            row += job.wanted

    monkeypatch.setattr(engine, "forward", broken)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [each.error for each in outputs] == [None] * 3
    assert [each.token_ids for each in outputs] == [
        ids(reflective(alpha).generate(prompt, GREEDY))[0]
        for prompt, alpha in zip(PROMPTS, (0.5, 0.5, 0.0), strict=True)
    ]
    assert_idle(llm)


def test_what_cannot_be_reflected_on_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match="holds the special tokens"):
        reflective(prompt="<|user|> check")
    with pytest.raises(ConfigError, match="the target reads more than the draft"):
        reflective(**{"verification.ffn": 0.05})
    with pytest.raises(ConfigError, match=r"alpha=1\.5"):
        reflective(1.5)
    for inside in ({"method": "kangaroo", "adapter": "random:2"}, {"method": "del"}):
        with pytest.raises(ConfigError, match="own first layers have read already"):
            with_config({**inside, "verifier": "reflective"})
        with_config({**inside, "verifier": "reflective", "alpha": 0.0})  # which probes nothing
    with pytest.raises(ConfigError, match="not valid Unicode"):
        reflective(prompt="again \udcff")
    for prompt in ([9, 100_000], (-1,)):
        with pytest.raises(ConfigError, match="must be below 8192"):
            reflective(prompt=prompt)
    assert reflective(prompt=[9, 10]).recipe.verifier.config.prompt == (9, 10)


def test_the_prompt_is_the_targets_tokens():
    llm = with_config({**DRAFTS, "verifier": "reflective"})
    found = llm.recipe.verifier.config.prompt
    assert target().tokenizer.decode(found) == BACK


@pytest.mark.covering(1)
@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}], ids=lambda each: next(iter(each)))
@pytest.mark.parametrize("rule", ["recursive", "match", "typical"])
def test_no_token_that_the_request_s_filters_exclude_is_emitted(filters, rule, monkeypatch):
    """The filters apply to the target's own distribution, not to the mixed one alone."""
    llm = reflective(0.9, rule=rule)
    seen = []
    verify = llm.recipe.verifier.verify_within

    def noting(draft, laws, rng, spent):
        verdict = verify(draft, laws, rng, spent)
        tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.extra]
        for node, token in zip((-1, *verdict.path), tokens, strict=True):
            seen.append((laws.probe_logits_PV is not None, float(laws.logits_at(node + 1)[token]) > -math.inf))
        return verdict

    monkeypatch.setattr(llm.recipe.verifier, "verify_within", noting)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, ignore_eos=True, **filters)
    ids(llm.generate(PROMPTS, params))
    assert sum(probed for probed, _ in seen) > 60
    assert all(possible for _, possible in seen)
