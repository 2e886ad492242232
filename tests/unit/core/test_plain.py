"""Numbers and arrays of other libraries, and keywords that are nearly right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.core.plain import plain, reject_unknown_keywords
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs


@pytest.mark.parametrize(
    ("given", "expected"),
    [(np.int64(3), 3), (np.float32(0.5), 0.5), (np.array([1, 2]), [1, 2]), (torch.tensor([4]), [4]), ("x", "x")],
)
def test_what_other_libraries_hold(given, expected):
    assert plain(given) == expected
    assert type(plain(given)) is type(expected)


@pytest.mark.parametrize("kind", [np.float64, np.ndarray, torch.Tensor])
def test_a_class_is_no_number(kind):
    """It has a `tolist`, too, which must not be called."""
    assert plain(kind) is kind


def test_params_take_what_numpy_holds():
    params = SamplingParams(
        temperature=np.float64(0.5),
        max_tokens=np.int32(7),
        seed=np.uint64(3),
        stop_token_ids=np.array([1, 2]),
        allowed_token_ids=torch.tensor([5, 6]),
        logit_bias={np.int64(4): np.float32(-1.0)},
    )
    assert params == SamplingParams(
        temperature=0.5, max_tokens=7, seed=3, stop_token_ids=[1, 2], allowed_token_ids=[5, 6], logit_bias={4: -1.0}
    )
    assert all(type(each) is int for each in (*params.stop_token_ids, *(params.allowed_token_ids or ())))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperatures": 1.0}, "SamplingParams has no 'temperatures': did you mean 'temperature'"),
        ({"guided_decoding": {}}, "SamplingParams has no 'guided_decoding': use structured_outputs"),
        ({"max_new_tokens": 5}, "use max_tokens"),
        ({"self_": 5}, "SamplingParams has no 'self_': known: "),
        ({"n": 10**9}, "^n=1000000000 must be"),
        ({"stop": 5}, "stop=5 must be a text or a list of texts"),
        ({"stop": ["a", ""]}, "stop='' must be a non-empty string"),
        ({"bad_words": {"a": 1}}, "bad_words="),
        ({"stop_token_ids": "12"}, "stop_token_ids='12' must be a list of token ids"),
        ({"stop_token_ids": 3}, "stop_token_ids=3"),
        ({"allowed_token_ids": []}, "allowed_token_ids is empty"),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids has 1.5"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ({"truncate_prompt_tokens": -2}, "^truncate_prompt_tokens=-2 must be"),
        ({"skip_special_tokens": "no"}, "^skip_special_tokens=.no. must be"),
        ({"temperature": 10**400}, "must be a number"),
        ({"logit_bias": [1]}, "logit_bias=.* must be a mapping"),
        ({"logit_bias": {1: math.inf}}, "must be a number"),
        ({"seed": 1.5}, "seed=1.5"),
    ],
)
def test_a_wrong_call_is_explained(wrong, message):
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**wrong)


def test_structured_outputs_say_the_nearest_keyword():
    with pytest.raises(ConfigError, match="did you mean 'regex'"):
        StructuredOutputs(regx="a")  # type: ignore[call-arg]


def test_a_field_that_is_set_afterwards_is_checked_and_undone():
    params = SamplingParams(max_tokens=20)
    params.max_tokens = 5
    assert params == SamplingParams(max_tokens=5)
    with pytest.raises(ConfigError, match="min_tokens=6 is greater"):
        params.min_tokens = 6
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        params.max_token = 6  # type: ignore[attr-defined]
    assert params == SamplingParams(max_tokens=5)


def test_a_function_keeps_its_name_and_its_parameters():
    @reject_unknown_keywords
    def add(first: int, *, second: int = 1) -> int:
        return first + second

    assert add.__name__ == "add"
    assert add(1, second=2) == 3
    with pytest.raises(ConfigError, match="did you mean 'second'"):
        add(1, secondd=2)  # type: ignore[call-arg]


def test_a_type_error_inside_a_function_is_its_own():
    @reject_unknown_keywords
    def add(first: int, second: int = 1) -> int:
        return first + second

    with pytest.raises(TypeError, match="concatenate"):
        add("1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="add: missing a required argument: 'first'"):
        add()  # type: ignore[call-arg]
