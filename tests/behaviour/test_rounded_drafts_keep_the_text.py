"""Drafts of rounded weights: another q, the same text."""

from __future__ import annotations

from pathlib import Path

import pytest

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.drafters.draft_model import ModelDrafter
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.methods.eagle.checkpoint import Eagle
from foretoken.methods.eagle.drafter import EagleDrafter
from foretoken.models.load import load
from foretoken.native.quantised import CodedTiles

PROMPTS = ["Tom has 12 marbles. He buys 30 more. How many has he now?", "def total(values):", "User: Hello!"]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
RECIPES = [
    {"method": "eagle", "num_speculative_tokens": 4},
    {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4},
    {"method": "easyspec", "model": "zoo:draft", "num_speculative_tokens": 4},
]


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM("zoo:base", device="cpu", dtype="bfloat16", threads=1, speculative_config=None)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["method"])
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_rounded_draft_changes_no_text_and_drafts_nearly_as_well(plain, recipe, dtype):
    if plain.target.native_decoder is None:
        pytest.skip("no native decoder on this machine")
    rounded = plain.with_method({**recipe, "dtype": dtype})
    as_it_is = plain.with_method(recipe)
    expected = [out.token_ids for out in plain.generate(PROMPTS, PARAMS)]
    made = rounded.generate(PROMPTS, PARAMS)
    assert [out.token_ids for out in made] == expected
    accepted, before = (
        sum(out.metrics.num_accepted_tokens for out in outs) for outs in (made, as_it_is.generate(PROMPTS, PARAMS))
    )
    assert accepted > 0.7 * before


def test_the_draft_model_is_loaded_in_the_requested_dtype(plain):
    made = ModelDrafter(ModelDrafter.Config(model="zoo:draft", dtype="int8"), plain.target)
    assert (made.model.precision, plain.target.precision) == ("int8", "bfloat16")


@pytest.mark.parametrize(("dtype", "bits"), [(None, set()), ("int8", {8}), ("int4", {4})])
def test_a_head_is_computed_in_the_requested_codes(plain, dtype, bits):
    if plain.target.native_decoder is None:
        pytest.skip("no native decoder on this machine")
    native = Runner(plain.target, Eagle.load(Path(plain.target.source, "eagle")), dtype)._native
    assert {each.bits for each in native.pairs._keep if isinstance(each, CodedTiles)} == bits


def test_an_unknown_dtype_is_refused_before_anything_is_loaded():
    for config, options in ((EagleDrafter.Config, {}), (ModelDrafter.Config, {"model": "zoo:draft"})):
        with pytest.raises(ConfigError, match=r"dtype='int7' .*int8"):
            config(**options, dtype="int7")


def test_a_head_that_torch_computes_is_not_rounded():
    target = load("zoo:base", device="cpu", dtype="float16")
    assert target.native_decoder is None
    with pytest.raises(ConfigError, match=r"dtype='int8': a rounded head is computed by the native decoder"):
        EagleDrafter(EagleDrafter.Config(dtype="int8"), target)
