"""A limit of the reasoning over HTTP, by the names that clients have for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from foretoken.engine.text import reasoning
from helpers.serving import NAME, Served, served
from helpers.templates import MAY_THINK, THINKS, TOOLS, templated
from helpers.zoo_llms import with_config

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def limited() -> Iterator[Served]:
    with served(with_config({"method": "suffix"}, target=templated(MAY_THINK))) as running:
        yield running


@pytest.mark.parametrize(
    "field",
    [
        {"thinking_token_budget": 3},
        {"thinking_budget": 3},
        {"reasoning": {"max_tokens": 3}},
        {"thinking": {"type": "enabled", "budget_tokens": 3}},
    ],
    ids=["vllm", "short", "openrouter", "anthropic"],
)
def test_a_limit_of_the_reasoning_by_every_name(limited: Served, field: dict[str, Any]) -> None:
    talk = [*HI, {"role": "assistant", "content": "<think>\n"}]
    body = {"model": NAME, "messages": talk, "continue_final_message": True, "add_generation_prompt": False}
    settings = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
    answer = limited.send(CHAT, {**body, **settings, **field})[1]
    assert 3 <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 3 + 3 + 5  # and its end
    assert answer["choices"][0]["message"]["content"]


def test_limits_that_differ(limited: Served) -> None:
    body = {"model": NAME, "messages": HI, "thinking_token_budget": 3, "reasoning": {"max_tokens": 4}}
    status, answer, _ = limited.send(CHAT, body)
    assert status == 400
    assert answer["error"]["param"] == "reasoning.max_tokens"


def test_a_model_that_does_not_reason() -> None:
    with served(with_config({"method": "suffix"}, target=templated(TOOLS))) as running:
        body = {"model": NAME, "messages": HI, "max_tokens": 4}
        status, answer, _ = running.send(CHAT, {**body, "thinking_token_budget": 3})
        assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
        thinking = {"type": "enabled", "budget_tokens": 1024}  # of clients that send it to every model
        status, _, response = running.send("/v1/messages", {**body, "thinking": thinking})
        assert status == 200
        assert "thinking.budget_tokens" in response.getheader("x-foretoken-ignored", "")


def test_marks_that_are_special_tokens_are_read_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Mistral's: a text leaves them out, and other special tokens stay out."""
    begin, end = "<|pad|>", "<|user|>"
    monkeypatch.setattr(reasoning, "MARKS", ((begin, end),))
    template = THINKS.replace("<think>", begin).replace("</think>", end)
    target = templated(template)
    assert {begin, end} <= set(target.tokenizer.all_special_tokens)
    with served(with_config({"method": "suffix"}, target=target)) as running:
        body = {"model": NAME, "messages": HI, "max_tokens": 30, "temperature": 0, "thinking_token_budget": 4}
        body |= {"thinking_budget_message": " Enough.", "ignore_eos": True, "stop_token_ids": []}
        answer = running.send(CHAT, body)[1]
        events = running.events(CHAT, body | {"stream": True})
    message = answer["choices"][0]["message"]
    assert message["reasoning"].endswith("Enough.")
    assert message["content"]
    assert "<|" not in message["content"] + message["reasoning"]
    assert 5 <= answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < 20
    deltas = [each["choices"][0]["delta"] for each in events[:-1] if each["choices"]]
    assert "".join(each.get("content") or "" for each in deltas) == message["content"]
