"""Values of sampling parameters up to their limits, and the messages beyond them."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest

from foretoken.core.errors import ConfigError
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("name", "good"),
    [
        ("temperature", (0, 0.0, 1, 50.5)),
        ("top_p", (1e-9, 1, 1.0)),
        ("min_p", (0, 0.0, 1.0)),
        ("repetition_penalty", (1e-9, 1.0, 7)),
        ("presence_penalty", (-2, 2.0)),
        ("frequency_penalty", (-2.0, 2)),
        ("top_k", (-1, 0, 1, 10**6)),
        ("max_tokens", (1, 10**6)),
        ("min_tokens", (0, 128)),
        ("n", (1, 7)),
        ("seed", (None, 0, 2**63 - 1)),
        ("logprobs", (None, 0, 1000)),
        ("logit_bias", (None, {}, {0: 1}, {3: -INF, 4: -2.5})),
        ("stop_token_ids", ((), [0], [5, 6])),
        ("stop", (None, "a", ["a", "bc"])),
    ],
)
def test_the_limits_themselves_are_allowed(name: str, good: tuple[Any, ...]) -> None:
    for value in good:
        found = getattr(SamplingParams(**{name: value}), name)
        if name.startswith("stop"):  # kept as a tuple, whatever was given
            value = () if value is None else (value,) if isinstance(value, str) else tuple(value)
        assert found == value


@pytest.mark.parametrize(
    ("name", "bad", "remedy"),
    [
        ("temperature", (-1e-9, 1e300, INF, NAN, "1", True, None), "use 0 for greedy decoding"),
        ("top_p", (0, 0.0, 1.0001, NAN, False), "use 1 to keep every token"),
        ("min_p", (-1e-9, 1.0001), "use 0 to keep every token"),
        ("repetition_penalty", (0.0, -1.0, INF, 1e-320), "use 1 for none"),
        ("presence_penalty", (-2.01, 2.01), "use 0 for none"),
        ("frequency_penalty", (-2.01, 2.01), "use 0 for none"),
        ("top_k", (-2, 1.0, True), "use 0 to keep every token"),
        ("max_tokens", (0, 2.0, None), "at least one token"),
        ("min_tokens", (-1, False), "use 0 for none"),
        ("n", (0, "2", 10**9), "at least one completion"),
        ("seed", (-1, 2**63, 0.5), "non-negative integer"),
        ("logprobs", (-1, 1001, True), "use None for none"),
        ("ignore_eos", (0, 1, "yes", None), "true or false"),
    ],
)
def test_values_out_of_range_are_refused_with_name_value_and_remedy(
    name: str, bad: tuple[Any, ...], remedy: str
) -> None:
    for value in bad:
        with pytest.raises(ConfigError, match=remedy) as caught:
            SamplingParams(**{name: value})
        assert str(caught.value).startswith(f"{name}={value!r} ")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is greater than max_tokens=4: lower one or raise the other"),
        ({"stop": ""}, "stop='' must be a non-empty string"),
        ({"stop": ["a", 3]}, "stop=3 must be a non-empty string"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids has -1: token ids are non-negative integers"),
        ({"stop_token_ids": [True]}, "stop_token_ids has True"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids has '1'"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias has the key -1: keys are token ids"),
        ({"logit_bias": {True: 1.0}}, "logit_bias has the key True"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias has the key 'a'"),
        ({"logit_bias": {1: 1.0, "1": 2.0}}, "logit_bias gives token 1 twice"),
        ({"logit_bias": {"01": 1.0}}, "logit_bias has the key '01'"),
        ({"logit_bias": {1: INF}}, r"logit_bias\[1\]=inf must be a number up to 1e30 \(-inf forbids the token\)"),
        ({"logit_bias": {1: NAN}}, r"logit_bias\[1\]=nan"),
        ({"logit_bias": {1: True}}, r"logit_bias\[1\]=True"),
        ({"logit_bias": {1: "2"}}, r"logit_bias\[1\]='2'"),
        ({"structured_outputs": {}}, "exactly one of json, json_object, regex, choice, grammar"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "exactly one of"),
        ({"structured_outputs": {"jsn": {}}}, "did you mean 'json'"),
        ({"structured_outputs": {"choice": []}}, "exactly one|a list of texts"),
        ({"structured_outputs": {"choice": "ab"}}, "must be a list of texts"),
        ({"structured_outputs": {"choice": ["a", ""]}}, "none of them empty"),
        ({"structured_outputs": {"regex": 5}}, "regex=5 must be a text"),
        ({"structured_outputs": "a*"}, "must be StructuredOutputs"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos with structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens with structured_outputs"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**given)


def test_ids_of_a_bias_may_be_texts_as_in_json() -> None:
    assert SamplingParams(logit_bias={"5": 1, 6: -INF}).logit_bias == {5: 1, 6: -INF}


def test_the_docstring_has_every_parameter() -> None:
    assert SamplingParams.__doc__ is not None
    for each in fields(SamplingParams):
        assert f"\n    {each.name}: " in SamplingParams.__doc__


def test_equal_lengths_are_allowed() -> None:
    assert SamplingParams(min_tokens=4, max_tokens=4).min_tokens == 4


def test_stop_is_a_tuple_whatever_was_given() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="ab").stop == SamplingParams(stop=["ab"]).stop_strings == ("ab",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()


def test_greedy_and_repeatable() -> None:
    assert SamplingParams().greedy
    assert not SamplingParams(temperature=0.1).greedy
    assert SamplingParams(temperature=0.1, seed=0).repeatable
    assert not SamplingParams(temperature=0.1).repeatable
    assert not SamplingParams(seed=0).repeatable


def test_from_a_mapping() -> None:
    assert SamplingParams.from_dict({"temperature": 0.5, "n": 2}) == SamplingParams(temperature=0.5, n=2)
    with pytest.raises(ConfigError, match="unknown sampling parameter 'temperature_': did you mean 'temperature'"):
        SamplingParams.from_dict({"temperature_": 1.0})
    with pytest.raises(
        ConfigError, match=r"unknown sampling parameter 'xyz': known: .*top_k, .*truncate_prompt_tokens, .*\.$"
    ):
        SamplingParams.from_dict({"xyz": 1.0})


def test_switched_off_parameters_are_not_passed():
    assert StructuredOutputs(json_object=True).kind == "json_object"
    assert StructuredOutputs(json_object=False, regex="a").kind == "regex"
    with pytest.raises(ConfigError, match="has nothing: give exactly one"):
        StructuredOutputs(json_object=False)
