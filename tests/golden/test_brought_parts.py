"""Drafters with a part that the target brings: the greedy text and the seeded stream are plain decoding's.

Collected from the catalogue, as in test_greedy_equality.py and test_same_stream.py; the targets are small ones that the
method has given an untrained part.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from foretoken.core.errors import ConfigError
from foretoken.engine.llm import LLM
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from helpers.adapters import shelf
from helpers.golden import tokens_of
from helpers.pairwise import in_pairs
from helpers.tiny_models import save_model
from helpers.untrained import untrained_layer
from helpers.variants import Case, cases, lossless_rules
from helpers.zoo_llms import assert_idle, ids, with_config

CASES = {case.label: case for case in cases(brought=True)}
RECIPES = [
    (label, rule, count)
    for label, case in CASES.items()
    for rule in (None, *(() if case.variant.one_rule else lossless_rules()))
    if rule is None or case.fits(rule)
    for count in (4, "auto")
]
PROMPTS = [{"prompt_token_ids": tokens_of(seed, 3 + 8 * seed, 100)} for seed in range(4)]
LENGTHS = (20, 7, 13, 1)


@cache
def model() -> LanguageModel:
    folder = shelf() / "brought"
    plain = save_model("llama", folder / "plain")
    return load(untrained_layer(str(plain), folder), device="cpu")


def llm_of(case: Case, config: dict[str, Any] | None) -> LLM:
    return with_config(config, target=model(), max_num_seqs=3)


def config_of(case: Case, rule: str | None, count: int | str) -> dict[str, Any]:
    return case.config(model(), rule, count)


@cache
def plain(label: str, temperature: float) -> list[list[int]]:
    """Without speculation, one request at a time."""
    llm = llm_of(CASES[label], {"method": "none", "verifier": "match"})
    return [
        ids(llm.generate([prompt], params))[0] for prompt, params in zip(PROMPTS, params_for(temperature), strict=True)
    ]


def params_for(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=length, temperature=temperature, seed=number, ignore_eos=True)
        for number, length in enumerate(LENGTHS)
    ]


def test_there_are_some() -> None:
    assert CASES


@pytest.mark.parametrize("label", CASES)
def test_a_variant_proposes_its_declared_drafts(label: str) -> None:
    drafter = llm_of(CASES[label], config_of(CASES[label], None, 4)).recipe.drafter
    assert drafter.laws == CASES[label].laws
    assert drafter.branches == CASES[label].branches


@pytest.mark.parametrize("label", CASES)
def test_recipes_that_do_not_fit_are_refused(label: str) -> None:
    for rule in lossless_rules():
        if not CASES[label].fits(rule):
            with pytest.raises(ConfigError, match=r"verifies chains|not valid for drafts of kind"):
                llm_of(CASES[label], config_of(CASES[label], rule, 4))


@pytest.mark.parametrize(
    "recipe",
    in_pairs(RECIPES, lambda row: (CASES[row[0]].entry.name, CASES[row[0]].kind, *row[1:]), lambda row: (row[0],)),
    ids=lambda row: "-".join(map(str, row)),
)
def test_the_greedy_text_is_plain_decoding_s(recipe: tuple[str, str | None, int | str]) -> None:
    """Ragged lengths, fewer slots than requests."""
    label, rule, count = recipe
    llm = llm_of(CASES[label], config_of(CASES[label], rule, count))
    outputs = llm.generate(PROMPTS, params_for(0.0))
    assert ids(outputs) == plain(label, 0.0)
    assert count == "auto" or sum(each.metrics.num_draft_tokens for each in outputs) > 20
    assert_idle(llm)


@pytest.mark.parametrize("label", [label for label, case in CASES.items() if case.fits("match")])
def test_a_seeded_stream_is_plain_decoding_s(label: str) -> None:
    llm = llm_of(CASES[label], config_of(CASES[label], "match", 4))
    assert ids(llm.generate(PROMPTS, params_for(1.0))) == plain(label, 1.0)
    assert_idle(llm)
