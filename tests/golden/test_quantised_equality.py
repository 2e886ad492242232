"""A quantised model is a model of its own: every drafter's greedy text on it is that of its own plain decoding.

So is one with keys and values in codes.

Collected from the catalogue, as in test_greedy_equality.py; all but a few take long.
"""

from __future__ import annotations

from functools import cache

import pytest

from foretoken.core.errors import ConfigError
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from helpers.variants import Case, cases
from helpers.zoo_llms import PROMPTS, ids, with_config

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: sums are not ordered")

FEW = ("ngram", "draft_model", "eagle")
KEYS = "keys in int8"
READS_KEYS = ("longspec",)
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


@cache
def target(dtype: str) -> LanguageModel:
    if dtype == KEYS:
        found = load("zoo:base", dtype="bfloat16", device="cpu", kv_cache_dtype="int8")
    else:
        found = load("zoo:base", dtype=dtype, device="cpu")
    assert found.native_decoder is not None
    return found


@cache
def plain(dtype: str) -> list[list[int]]:
    return ids(with_config(None, target=target(dtype)).generate(list(PROMPTS), PARAMS))


def chosen() -> list[object]:
    """One variant of each drafter by default for one dtype in turn; the others are slow."""
    found: list[object] = []
    seen: set[str] = set()
    for case in cases():
        for dtype in ("int8", "int4", KEYS):
            name = case.entry.name
            if dtype == KEYS and name in READS_KEYS:
                continue
            first = {"eagle": "int4", "draft_model": KEYS}.get(name, "int8")
            quick = name in FEW and name not in seen and dtype == first
            if quick:
                seen.add(name)
            marks = () if quick else (pytest.mark.slow,)
            found.append(pytest.param(case, dtype, id=f"{case.label}-{dtype}", marks=marks))
    return found


@pytest.mark.parametrize(("case", "dtype"), chosen())
def test_greedy_text_is_that_of_plain_decoding(case: Case, dtype: str) -> None:
    llm = with_config(case.config(target(dtype), None, 5), target=target(dtype))
    assert ids(llm.generate(list(PROMPTS), PARAMS)) == plain(dtype)


@pytest.mark.parametrize("dtype", ["int8", "int4", KEYS])
def test_a_request_alone_and_in_company(dtype: str) -> None:
    llm = with_config(None, target=target(dtype))
    alone = [ids(llm.generate([prompt], PARAMS))[0] for prompt in PROMPTS[:3]]
    assert alone == plain(dtype)[:3]


def test_who_reads_keys_is_refused_where_there_are_codes() -> None:
    case = next(case for case in cases() if case.entry.name in READS_KEYS)
    with pytest.raises(ConfigError, match="keeps codes of them"):
        with_config(case.config(target(KEYS), None, 5), target=target(KEYS))


def test_the_dtypes_are_models_of_their_own() -> None:
    assert plain("int4") != plain("int8")
