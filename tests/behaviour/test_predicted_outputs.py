"""A prediction changes the number of steps and nothing else, under every kind of drafter."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from foretoken.core.errors import ConfigError
from foretoken.engine.output import RequestOutput
from foretoken.options.sampling import SamplingParams
from helpers.serving import NAME, served
from helpers.small_llms import ALTERED, PROMPTS, base, target, with_config
from helpers.variants import untrained

LENGTH = 400
RECIPES: tuple[dict[str, Any], ...] = (
    {"method": "none"},
    {"method": "suffix"},
    {"method": "draft_model", "model": ALTERED},
    {"method": "draft_model", "model": ALTERED, "verifier": "block"},
    {"method": "eagle"},  # reads the target's states of all tokens
    {"method": "suffix_first", "model": ALTERED},
)


@cache
def answer() -> tuple[int, ...]:
    (plain,) = base().generate([PROMPTS[0]], SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    return tuple(plain.token_ids)


def edited(tokens: tuple[int, ...]) -> list[int]:
    """Ten edits: tokens replaced, left out and inserted."""
    found = list(tokens)
    for place in range(380, 0, -40):
        change = place // 40 % 3
        if change == 0:
            found[place] = (found[place] + 17) % 8000
        elif change == 1:
            del found[place]
        else:
            found[place:place] = [5, 6, 7]
    return found


def generated(config: dict[str, Any], prediction: Any, **params: Any) -> RequestOutput:
    params = {"max_tokens": LENGTH, "ignore_eos": True, **params}
    if config["method"] == "eagle":
        config = {**config, "head": untrained("foretoken.methods.eagle.checkpoint:Eagle", target())}
    (found,) = with_config(config).generate([PROMPTS[0]], SamplingParams(prediction=prediction, **params))
    assert found.error is None, found.error
    return found


@pytest.mark.parametrize("config", RECIPES, ids=lambda each: " ".join(map(str, each.values())))
def test_an_edit_of_400_tokens_takes_a_third_of_the_steps(config: dict[str, Any]) -> None:
    output = generated(config, edited(answer()))
    assert tuple(output.token_ids) == answer()
    assert output.metrics.num_steps <= LENGTH / 3
    assert output.metrics.accepted_by_source["prediction"] >= 0.8 * LENGTH


def test_an_exact_prediction_is_copied_in_whole_drafts() -> None:
    assert generated({"method": "none"}, answer()).metrics.num_steps <= LENGTH / 17 + 3


def test_a_wrong_prediction_is_soon_given_up() -> None:
    wrong = [(token * 7 + 3) % 8000 for token in answer()]
    output = generated({"method": "none"}, wrong)
    assert tuple(output.token_ids) == answer()
    assert output.metrics.num_draft_tokens <= 0.1 * LENGTH


@pytest.mark.parametrize("config", RECIPES[:2], ids=str)
def test_a_seed_gives_the_same_tokens_with_a_prediction(config: dict[str, Any]) -> None:
    drawn = {"temperature": 1.0, "seed": 7, "max_tokens": 120}
    plain = generated(config, None, **drawn)
    predicted = generated(config, plain.token_ids[:60] + plain.token_ids[70:], **drawn)
    assert predicted.token_ids == plain.token_ids
    assert predicted.metrics.accepted_by_source["prediction"] > 40


def test_a_draft_limit_holds_for_copies() -> None:
    output = generated({"method": "suffix", "num_speculative_tokens": 3}, answer(), max_tokens=60)
    assert max(length for length, _ in output.metrics.drafts) == 3


def test_the_end_of_an_answer_may_lie_in_a_copy() -> None:
    text = base().tokenizer.decode(list(answer()))
    stop = text[60:68]
    plain = generated({"method": "none"}, None, stop=stop)
    assert generated({"method": "none"}, text, stop=stop).text == plain.text
    assert len(plain.token_ids) < LENGTH


@pytest.mark.parametrize(
    "config",
    [
        {"method": "kangaroo", "adapter": "random:1", "num_speculative_tokens": 2},
        {"method": "draft_model", "model": ALTERED, "executor": "pearl"},
        {"method": "draft_model", "model": ALTERED, "verifier": "typical"},
    ],
    ids=["resumes", "drafts ahead", "lossy"],
)
def test_recipes_that_cannot_copy_leave_it_out(config: dict[str, Any]) -> None:
    output = generated(config, answer(), max_tokens=20)
    assert "prediction" not in output.metrics.drafted_by_source


def test_a_prediction_is_a_text_or_token_ids() -> None:
    assert SamplingParams(prediction="").prediction is None
    assert SamplingParams(prediction=[1, 2]).prediction == (1, 2)
    with pytest.raises(ConfigError, match="prediction has 'a': token ids are non-negative integers"):
        SamplingParams(prediction=["a"])
    with pytest.raises(ConfigError, match="prediction has 90000: the vocabulary has 8192 entries"):
        generated({"method": "none"}, [90000])


def test_usage_counts_copied_tokens() -> None:
    with served(with_config({"method": "none"})) as server:
        body = {"model": NAME, "prompt": PROMPTS[0], "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        plain = server.send("/v1/completions", body)[1]
        assert "accepted_prediction_tokens" not in plain["usage"]["completion_tokens_details"]
        text = plain["choices"][0]["text"]
        for content in (text, [{"type": "text", "text": text[:80]}, {"type": "text", "text": text[90:]}]):
            prediction = {"type": "content", "content": content}
            _, found, response = server.send("/v1/completions", body | {"prediction": prediction, "n": 2})
            assert [choice["text"] for choice in found["choices"]] == [text] * 2
            details = found["usage"]["completion_tokens_details"]
            drafted = details["speculation"]["draft_tokens"]
            assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == drafted > 40
            assert found["usage"]["completion_tokens"] == 120
            assert response.getheader("x-foretoken-ignored") is None
        plainly = body | {"prediction": prediction, "speculation": {"enabled": False}}
        assert server.send("/v1/completions", plainly)[2].getheader("x-foretoken-ignored") == "prediction"
        status, error, _ = server.send("/v1/completions", body | {"prediction": {"type": "content", "content": 5}})
        assert (status, error["error"]["param"]) == (400, "prediction.content")
