"""A quantised model is a model of its own: every drafter's greedy text on it is that of its own plain decoding.

So is one with keys and values in codes.

Collected from the catalogue, as in test_greedy_equality.py: every method, every kind of draft with every dtype, and
with ``--all-variants`` every variant with every dtype.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from foretoken.core.errors import ConfigError
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.options.sampling import SamplingParams
from helpers.pairwise import in_pairs
from helpers.variants import Case, cases
from helpers.zoo_llms import PROMPTS, ids, with_config

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: sums are not ordered")

KEYS = "keys in int8"
DTYPES = ("int8", "int4", KEYS)
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
TEXTS = list(PROMPTS[:3])


def reads_keys(case: Case) -> bool:
    """Whether it attends to the target's keys, which codes are not."""
    return case.entry.name == "longspec"


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
    return ids(with_config(None, target=target(dtype)).generate(TEXTS, PARAMS))


@pytest.mark.parametrize(
    "combination",
    in_pairs(
        [(case, dtype) for case, dtype in product(cases(), DTYPES) if dtype != KEYS or not reads_keys(case)],
        lambda row: (row[0].kind, row[1]),
        lambda row: (row[0].entry.name,),
    ),
    ids=lambda row: f"{row[0].label}-{row[1]}",
)
def test_greedy_text_is_that_of_plain_decoding(combination: tuple[Case, str]) -> None:
    case, dtype = combination
    llm = with_config(case.config(target(dtype), None, 5), target=target(dtype))
    assert ids(llm.generate(TEXTS, PARAMS)) == plain(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_alone_and_in_company(dtype: str) -> None:
    llm = with_config(None, target=target(dtype))
    alone = [ids(llm.generate([prompt], PARAMS))[0] for prompt in TEXTS]
    assert alone == plain(dtype)


def test_a_drafter_that_reads_keys_is_refused_where_there_are_codes() -> None:
    case = next(case for case in cases() if reads_keys(case))
    with pytest.raises(ConfigError, match="keeps codes of them"):
        with_config(case.config(target(KEYS), None, 5), target=target(KEYS))


def test_the_dtypes_are_models_of_their_own() -> None:
    assert plain("int4") != plain("int8")
