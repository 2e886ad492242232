"""``verification.*``: read in both spellings, refused with the remedy, and honest about what a recipe then promises."""

from __future__ import annotations

import json
import math

import pytest
import torch

from foretoken.bench.fields import metrics_fields
from foretoken.cli.prove.methods import parse_methods
from foretoken.cli.run.answers import statistics
from foretoken.cli.shared.settings import parse_settings
from foretoken.core.errors import ConfigError
from foretoken.engine.compose import settings_of
from foretoken.engine.llm import LLM
from foretoken.forward.dense import DensePlans
from foretoken.methods.sparse import config as verification
from foretoken.methods.sparse.config import VerificationConfig
from foretoken.options.sampling import SamplingParams
from helpers.tiny_models import save_model
from helpers.zoo_llms import PROMPTS, greedy, ids, prompt_ids, with_config

FFN = {"verification.ffn": 0.1}


def take(settings):
    return verification.configured(settings_of("verification", dict(settings)))


@pytest.mark.parametrize(
    "settings",
    [
        {"verification": {"attention": "global", "budget": 0.2, "ffn": 0.05}},
        {"verification.attention": "global", "verification.budget": 0.2, "verification.ffn": 0.05},
        {"verification": {"attention": "global", "ffn": 0.05}, "verification.budget": 0.2},
        parse_settings(["verification.attention=global", "verification.budget=0.2", "verification.ffn=0.05"]),
        {
            k: v
            for k, v in parse_methods(
                "ngram+verification.attention=global+verification.budget=0.2",
                ["ngram.verification.ffn=0.05"],
                target="zoo:base",
            )[1].config.items()
            if k != "method"
        },
    ],
    ids=["nested", "dotted", "both", "command line", "bench"],
)
def test_every_spelling_says_the_same(settings):
    left = dict(settings)
    found = verification.configured(settings_of("verification", left))
    assert found == VerificationConfig(attention="global", budget=0.2, ffn=0.05)
    assert left == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verification": "per_head"}, r"must be a mapping.*--set verification\.NAME=VALUE"),
        ({"verification.attn": "global"}, r"unknown setting 'verification\.attn': did you mean 'attention'"),
        ({"verification": {"moee": 1}}, "did you mean 'moe'"),
        ({"verification": {"ffn": 0.1}, "verification.ffn": 0.2}, "given twice"),
        ({"verification.attention": "perhead"}, "did you mean 'per_head'"),
        ({"verification.attention": True}, "attention=True"),
        ({"verification.attention": "global", "verification.budget": 0}, r"budget=0 must be"),
        ({"verification.attention": "global", "verification.budget": 1.5}, "budget=1.5 must be"),
        ({"verification.attention": "global", "verification.budget": math.nan}, "budget=nan must be"),
        ({"verification.attention": "global", "verification.budget": True}, "budget=True must be"),
        ({"verification.attention": "global", "verification.block": 48}, "block=48 must be"),
        ({"verification.attention": "global", "verification.block": 8}, "block=8 must be"),
        ({"verification.attention": "global", "verification.sinks": -1}, "sinks=-1 must be"),
        ({"verification.attention": "global", "verification.locals": 1.5}, "locals=1.5 must be an integer"),
        ({"verification.attention": "global", "verification.reuse": "on"}, "use|known|calibrated"),
        (
            {"verification.attention": "per_layer", "verification.theta": 0.5},
            r"theta' does nothing while.*reuse is off",
        ),
        (
            {"verification.attention": "global", "verification.reuse": "calibrated", "verification.theta": 1.5},
            r"theta=1\.5 must be",
        ),
        ({"verification.ffn": -0.1}, "ffn=-0.1 must be"),
        ({"verification.ffn": "high"}, "ffn='high' must be"),
        ({"verification.moe": 1.0}, r"moe=1\.0 must be an integer"),
        ({"verification.moe": 1, "verification.moe_rule": "nestd"}, "did you mean 'nested'"),
        ({"verification.moe": 1, "verification.calibration": 3}, "calibration=3 must be"),
        ({"verification.budget": 0.2}, r"does nothing while verification\.attention is off: add"),
        ({"verification.moe_rule": "largest"}, r"add verification\.moe=1"),
        ({"verification.confirm": 8}, r"add verification\.attention=per_head"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        take(settings)


def test_a_part_may_be_off_in_so_many_words():
    found = take({"verification.attention": "off", "verification.budget": 0.2, "verification.moe": 0})
    assert not found.sparse


def test_confirmed_sparse_mlps_are_lossless():
    """Drafts of a target that shuts most of its channels, verified by the whole one."""
    llm = with_config({"method": "ngram", "verification.ffn": 4.0, "verification.confirm": 4})
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, ignore_eos=True))
    assert output.promise == "same text"
    assert output.token_ids == greedy(PROMPTS[0], 24)
    assert output.metrics.num_draft_tokens > output.metrics.num_accepted_tokens > 0


def test_unknown_options_of_a_method_still_are():
    with pytest.raises(ConfigError, match=r"unknown option 'verificaton\.ffn' for method 'ngram'"):
        with_config({"method": "ngram", "verificaton.ffn": 0.1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verification.attention": "per_head"}, "dense_below=4096 leaves nothing to be sparse.*holds 4096"),
        (
            {"verification.attention": "global", "verification.dense_below": 256, "verification.block": 2048},
            "block=2048: the context of 'zoo:base' holds 4096.*no block to leave out",
        ),
        ({"verification.moe": 1}, "'zoo:base' has no routed experts"),
        (
            {"verification.attention": "global", "verification.dense_below": 256, "verification.reuse": "calibrated"},
            "needs a calibration of 'zoo:base', and none lies next to.*foretoken calibrate sparse --model zoo:base",
        ),
        ({**FFN, "verifier": "typical", "max_distortion": 0.1}, "max_distortion=0.1 cannot be kept with sparse"),
    ],
)
def test_what_the_target_cannot_do_is_refused_with_the_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        with_config({"method": "ngram", **settings})


def test_a_model_without_gates_has_no_sparse_ffn(tmp_path):
    with pytest.raises(ConfigError, match="has no gated MLP"):
        LLM(save_model("gpt2", tmp_path), speculative_config=FFN)


# ---------------------------------------------------------------------- guarantees


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_sparse_recipe_promises_nothing_and_says_that_its_distance_is_not_known(method):
    llm = with_config({"method": method, **FFN})
    params = SamplingParams(max_tokens=8)
    (output,) = llm.generate(PROMPTS[2], params)
    assert output.error is None
    assert output.promise == "approximate" == llm.recipe.promise_for(SamplingParams(temperature=1.0))
    fields = metrics_fields(output.metrics)
    assert fields["distortion"] is None is fields["kl"]
    assert json.dumps(fields)
    total = type(output.metrics)()
    total.add(output.metrics)
    assert math.isnan(total.distortion)
    assert total.experts_per_step is None
    with pytest.raises(ConfigError, match=r"logprobs=2 with sparse verification \(verification\.ffn=0\.1\)"):
        llm.generate(PROMPTS[2], SamplingParams(logprobs=2))


def test_the_read_share_of_the_prefix_is_reported():
    """Three blocks of 16 are kept whatever the budget is, and the rows after the last whole block."""
    attention = {"attention": "per_head", "block": 16, "budget": 0.01, "dense_below": 0, "gate": False}
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    (output,) = with_config({"method": "none", "verification": attention}).generate(PROMPTS[2] * 5, params)
    first = len(output.prompt_token_ids)
    assert first > 64
    prefixes = range(first, first + 5)  # the prompt's own step is dense
    expected = sum(48 + prefix % 16 for prefix in prefixes) / sum(prefixes)
    assert metrics_fields(output.metrics)["prefix_read"] == pytest.approx(expected)
    assert "% of the prefix read" in statistics([output], 1.0)
    short = {"method": "none", "verification": {**attention, "dense_below": 500}}
    assert with_config(short).generate(PROMPTS[2], params)[0].metrics.prefix_read == 1.0
    assert with_config({"method": "none"}).generate(PROMPTS[2], params)[0].metrics.prefix_read is None


def test_all_off_is_the_dense_plan_and_keeps_its_promise():
    llm = with_config({"method": "ngram", "verification": {"attention": "off", "ffn": 0.0, "moe": 0}})
    assert type(llm.recipe.plan) is DensePlans
    assert llm.recipe.promise_for(SamplingParams()) == "same text"
    (output,) = llm.generate(PROMPTS[2], SamplingParams(max_tokens=24, ignore_eos=True))
    assert output.token_ids == greedy(PROMPTS[2], 24)
    assert metrics_fields(output.metrics)["distortion"] == 0.0


def test_certify_refuses_it():
    from foretoken.certify.certify import certify

    with pytest.raises(ConfigError, match=r"sparse verification \(verification\.ffn=0\.05\) is approximate by design"):
        certify("ngram", {"verification.ffn": 0.05}, quick=True)


# ---------------------------------------------------------------------- computation


@pytest.mark.parametrize(
    "config", [{"method": "none"}, {"method": "ngram"}, {"method": "kangaroo", "adapter": "random:2"}]
)
def test_a_threshold_that_shuts_nothing_changes_nothing(config):
    """At a threshold of almost zero the whole sparse way is walked, and gives the text of plain decoding."""
    llm = with_config({**config, "verification.ffn": 1e-30})
    prompts = [{"prompt_token_ids": prompt_ids(prompt)} for prompt in PROMPTS[:3]]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
    assert ids(outputs) == [greedy(prompt, 24) for prompt in PROMPTS[:3]]


def test_a_high_threshold_changes_the_text_and_not_the_target():
    llm = with_config({"method": "ngram", "verification.ffn": 4.0})
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    (output,) = llm.generate(PROMPTS[0], params)
    assert output.token_ids != greedy(PROMPTS[0], 24)
    plain = with_config({"method": "ngram"})
    assert ids(plain.generate(PROMPTS[0], params)) == [greedy(PROMPTS[0], 24)]
    for module in llm.target.model.modules():
        assert "forward" not in vars(module)


def test_prompts_are_dense():
    """The first token comes from the prompt's own chunk; with everything shut only the later text changes."""
    llm = with_config({"method": "none", "verification.ffn": 1e9})
    outputs = llm.generate(list(PROMPTS), SamplingParams(max_tokens=6, ignore_eos=True))
    wanted = [greedy(prompt, 6) for prompt in PROMPTS]
    assert [each[0] for each in ids(outputs)] == [each[0] for each in wanted]
    assert all(ours[1:] != theirs[1:] for ours, theirs in zip(ids(outputs), wanted, strict=True))


def test_sampling_with_a_seed_is_reproducible():
    llm = with_config({"method": "ngram", **FFN})
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    torch.manual_seed(1)
    first = ids(llm.generate(PROMPTS[2], params))
    torch.manual_seed(2)
    assert ids(llm.generate(PROMPTS[2], params)) == first
