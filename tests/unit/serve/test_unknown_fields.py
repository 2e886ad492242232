"""Misspellings, translations and neutral values of fields that a body does not declare."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from foretoken.serve import unknown_fields
from foretoken.serve.responses_schema import ResponsesRequest
from foretoken.serve.schema import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),  # a character is missing
        ("tempreature", "temperature"),  # two neighbours are swapped
        ("maxTokens", "max_tokens"),
        ("top-p", "top_p"),
        ("Stop", "stop"),
        ("strem", "stream"),
        ("frequncy_penalti", "frequency_penalty"),  # two edits of a long name
        ("client_metadata", None),
        ("session_id", None),
        ("k", None),  # one edit away from n
        ("strm", None),  # two edits of a short name
        ("max_length", None),
    ],
)
def test_a_near_name_is_a_misspelling(name: str, meant: str | None) -> None:
    known = ("n", "temperature", "max_tokens", "top_p", "stop", "stream", "frequency_penalty", "metadata")
    assert unknown_fields.near(name, frozenset(known)) == (() if meant is None else (meant,))


def test_a_field_that_is_there_has_not_been_misspelt() -> None:
    known = frozenset({"model"})
    assert unknown_fields.check({"model": "a", "models": ["b"]}, known) == {"model": "a", "models": ["b"]}
    with pytest.raises(PydanticCustomError):
        unknown_fields.check({"models": ["b"]}, known)


def test_many_unknown_names_are_not_all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of 2 MB held the event loop for minutes."""
    compared = []
    monkeypatch.setattr(unknown_fields, "near", lambda name, known: compared.append(name) or ())
    body = {f"unheard_{number}": 1 for number in range(5000)}
    assert unknown_fields.check(body, ChatRequest.names()) == body
    assert len(compared) <= 100


@pytest.mark.parametrize(
    ("body", "field", "value"),
    [
        ({"max_new_tokens": 5}, "max_tokens", 5),
        ({"num_predict": 5, "max_tokens": 5}, "max_tokens", 5),
        ({"repeat_penalty": 1.2}, "repetition_penalty", 1.2),
        ({"stop_sequences": ["a"]}, "stop", ["a"]),
        ({"stop": ["", "a"]}, "stop", ["a"]),
        ({"guided_regex": "a+"}, "structured_outputs", {"regex": "a+"}),
        ({"typical_p": 1.0}, "typical_p", None),
        ({"mirostat": 0}, "mirostat", None),
        ({"prompt_logprobs": False}, "prompt_logprobs", None),
    ],
)
def test_other_programs_names_are_translated(body: dict[str, Any], field: str, value: Any) -> None:
    assert unknown_fields.translate(body, ChatRequest.names()).get(field) == value


def test_the_limit_has_one_name_a_path() -> None:
    for kind, field in ((CompletionRequest, "max_tokens"), (ResponsesRequest, "max_output_tokens")):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
            assert unknown_fields.translate({name: 7}, kind.names()) == {field: 7}


@pytest.mark.parametrize(
    "body",
    [
        {"mirostat": 2},
        {"mirostat": True},
        {"typical_p": 0.5},
        {"functions": []},
        {"max_tokens": 3, "max_new_tokens": 4},
        {"guided_json": {}, "structured_outputs": {"json": {"type": "array"}}},
    ],
)
def test_what_would_change_the_answer_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(PydanticCustomError):
        unknown_fields.translate(body, ChatRequest.names())
