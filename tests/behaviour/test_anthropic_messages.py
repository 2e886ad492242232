"""/v1/messages: the same answers as /v1/chat/completions, in Anthropic's blocks, events and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from helpers.serving import NAME, Served, served
from helpers.templates import MAY_THINK, THINKS, templated
from helpers.zoo_llms import PROMPTS, with_config

MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain", "is_error": False}
ANSWERED = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": [CALL]},
    {"role": "user", "content": [RESULT]},
]

CALLED = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
ANSWER = {"role": "tool", "tool_call_id": "a", "content": "rain"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(with_config({"method": "suffix"})) as running:
        yield running


def said(content: Any = PROMPTS[0], **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": content}]
    return {"model": NAME, "messages": turns, "max_tokens": 40, "temperature": 0, **more}


def blocks_of(events: list[Any]) -> list[dict[str, Any]]:
    """Rebuild the content from the events of a stream, as clients do."""
    found: list[dict[str, Any]] = []
    raw = ""
    for each in events:
        if each["type"] == "content_block_start":
            assert each["index"] == len(found)
            found.append(dict(each["content_block"]))
            raw = ""
        elif each["type"] == "content_block_delta":
            delta = each["delta"]
            if delta["type"] == "input_json_delta":
                raw += delta["partial_json"]
            elif delta["type"] == "signature_delta":
                found[-1]["signature"] = delta["signature"]
            else:
                field = delta["type"].removesuffix("_delta")
                found[-1][field] += delta[field]
        elif each["type"] == "content_block_stop" and found[-1]["type"] == "tool_use":
            found[-1]["input"] = json.loads(raw or "{}")
    return found


def test_a_text_is_that_of_a_chat(server: Served) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 40, "temperature": 0}
    wanted = server.send(CHAT, chat)[1]
    status, answer, response = server.send(MESSAGES, said(system=[{"type": "text", "text": ""}]))
    assert status == 200, answer
    assert response.headers["request-id"] == answer["id"]
    assert answer["content"] == [{"type": "text", "text": wanted["choices"][0]["message"]["content"]}]
    usage = answer["usage"]
    assert usage["output_tokens"] == wanted["usage"]["completion_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == wanted["usage"]["prompt_tokens"]
    assert server.send(COUNT, {key: value for key, value in said().items() if key != "max_tokens"})[1] == {
        "input_tokens": wanted["usage"]["prompt_tokens"]
    }


def test_a_stream_has_the_blocks_of_the_whole_answer(server: Served) -> None:
    answer = server.send(MESSAGES, said())[1]
    events = server.events(MESSAGES, said(stream=True))
    assert [each["type"] for each in events[:2]] == ["message_start", "content_block_start"]
    assert [each["type"] for each in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert blocks_of(events) == answer["content"]
    assert events[-2]["delta"] == {"stop_reason": answer["stop_reason"], "stop_sequence": answer["stop_sequence"]}
    assert events[-2]["usage"]["output_tokens"] == answer["usage"]["output_tokens"]


def test_reasons_of_the_end(server: Served) -> None:
    assert server.send(MESSAGES, said(max_tokens=2))[1]["stop_reason"] == "max_tokens"
    text = server.send(MESSAGES, said())[1]["content"][0]["text"]
    stop = text[8:12]
    answer = server.send(MESSAGES, said(stop_sequences=[stop]))[1]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
    assert answer["content"][0]["text"] == text[: text.index(stop)]
    assert server.send(MESSAGES, said(max_tokens=400))[1]["stop_reason"] == "end_turn"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_is_a_block_in_both_forms(server: Served, choice: dict[str, Any]) -> None:
    asked = said("Weather in Oslo?", tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    answer = server.send(MESSAGES, asked)[1]
    call = answer["content"][0]
    assert (call["type"], call["name"], answer["stop_reason"]) == ("tool_use", "weather", "tool_use")
    assert set(call["input"]) == {"city"}
    streamed = blocks_of(server.events(MESSAGES, asked | {"stream": True}))
    assert [(each["name"], each["input"]) for each in streamed] == [
        (each["name"], each["input"]) for each in answer["content"]
    ]


def test_results_of_calls_are_those_of_a_chat(server: Served) -> None:
    call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    chat = [
        ANSWERED[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "rain"},
    ]
    function = {"name": TOOL["name"], "description": TOOL["description"], "parameters": SCHEMA}
    common = {"model": NAME, "max_tokens": 20, "temperature": 0}
    wanted = server.send(CHAT, {**common, "messages": chat, "tools": [{"type": "function", "function": function}]})[1]
    found = server.send(MESSAGES, {**common, "messages": ANSWERED, "tools": [TOOL]})[1]
    assert found["usage"]["input_tokens"] == wanted["usage"]["prompt_tokens"]
    text = "".join(each.get("text", "") for each in found["content"])
    assert text == (wanted["choices"][0]["message"]["content"] or "")


def test_a_billing_line_does_not_cost_the_prefix() -> None:
    with served(with_config({"method": "suffix"}, enable_prefix_caching=True)) as running:

        def counted(line: str) -> dict[str, int]:
            lines = (f"x-anthropic-billing-header: {line}", "Be kind. " * 40)
            system = [{"type": "text", "text": each} for each in lines]
            usage: dict[str, int] = running.send(MESSAGES, said(system=system, max_tokens=1))[1]["usage"]
            return usage

        first, second = counted("cch=1"), counted("cch=22222")
        assert second["cache_read_input_tokens"] > first["cache_read_input_tokens"] == 0
        assert second["input_tokens"] < 20


def test_the_last_turn_is_continued(server: Served) -> None:
    whole = server.send(MESSAGES, said(max_tokens=12))[1]["content"][0]["text"]
    turns = [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": whole[:9]}]
    begun = server.send(MESSAGES, {**said(max_tokens=12), "messages": turns})[1]
    chat = {"model": NAME, "messages": turns, "continue_final_message": True, "max_tokens": 12, "temperature": 0}
    assert begun["content"][0]["text"] == server.send(CHAT, chat)[1]["choices"][0]["message"]["content"]


@contextmanager
def thinking(template: str) -> Iterator[Served]:
    with served(with_config({"method": "suffix"}, target=templated(template))) as running:
        yield running


def test_reasoning_is_a_block_of_its_own() -> None:
    with thinking(THINKS) as running:
        answer = running.send(MESSAGES, said(max_tokens=24))[1]
        assert answer["content"][0]["type"] == "thinking"
        assert blocks_of(running.events(MESSAGES, said(max_tokens=24, stream=True))) == answer["content"]
        assert 20 <= answer["usage"]["output_tokens_details"]["thinking_tokens"] <= 24
        earlier = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer["content"]}]
        turns = [*earlier, {"role": "user", "content": "And?"}]
        assert running.send(MESSAGES, {**said(), "messages": turns})[0] == 200
    with thinking(MAY_THINK) as running:
        on, off = (
            running.send(MESSAGES, said(thinking={"type": kind, "budget_tokens": 1024}))[1]["usage"]["input_tokens"]
            for kind in ("enabled", "disabled")
        )
        assert on != off


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        ({"max_tokens": None}, "invalid_request_error", "max_tokens"),
        ({"messages": []}, "invalid_request_error", "at least 1 item"),
        ({"model": "claude-9"}, "not_found_error", "not served here"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "invalid_request_error",
            "block",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "invalid_request_error", "tools.0"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "invalid_request_error", "needs a name"),
        ({"max_token": 3, "max_tokens": None}, "invalid_request_error", "max_tokens"),
        ({"temperature": -1}, "invalid_request_error", "temperature"),
    ],
)
def test_errors_are_anthropics(server: Served, change: dict[str, Any], kind: str, says: str) -> None:
    body = {name: value for name, value in (said() | change).items() if value is not None}
    status, answer, response = server.send(MESSAGES, body)
    assert status in (400, 404)
    assert (answer["type"], answer["error"]["type"]) == ("error", kind)
    assert says in answer["error"]["message"]
    assert answer["request_id"] == response.headers["request-id"]


def test_either_header_carries_the_key() -> None:
    with served(with_config({"method": "suffix"}), api_key="secret") as running:
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            assert running.send(MESSAGES, said(max_tokens=1), headers=headers)[0] == 200
        for headers in ({"x-api-key": "secre"}, {"x-api-key": ""}, {}):
            status, answer, _ = running.send(MESSAGES, said(max_tokens=1), headers=headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")


def test_the_official_client(server: Served) -> None:
    import anthropic  # a second of imports that no other test needs

    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0, timeout=60) as client:
        greedy = {"extra_body": {"temperature": 0}}  # the client has no argument for it any more
        asked: dict[str, Any] = {key: value for key, value in said().items() if key != "temperature"} | greedy
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
        assert [block.text for block in whole.content if block.type == "text"] == [text]
        weather = {"messages": [{"role": "user", "content": "Weather in Oslo?"}]}
        forced: dict[str, Any] = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}
        with client.messages.stream(**asked | weather | forced) as stream:
            (call,) = stream.get_final_message().content
        assert call.type == "tool_use"
        assert call.input == server.send(MESSAGES, said("Weather in Oslo?", **forced))[1]["content"][0]["input"]
        count = client.messages.count_tokens(model=NAME, messages=asked["messages"])
        assert count.input_tokens == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            client.messages.create(**asked | {"model": "other"})


def test_a_prediction_is_counted(server: Served) -> None:
    plain = server.send(MESSAGES, said())[1]
    prediction = {"type": "content", "content": plain["content"][0]["text"]}
    found = server.send(MESSAGES, said(prediction=prediction))[1]
    assert found["content"] == plain["content"]
    assert "accepted_prediction_tokens" not in plain["usage"]["output_tokens_details"]
    details = found["usage"]["output_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20
    assert details["rejected_prediction_tokens"] == 0


@pytest.mark.parametrize("kind", ["image", "document"])
def test_a_block_that_no_model_here_reads_is_named(server: Served, kind: str) -> None:
    status, answer, _ = server.send(MESSAGES, said([{"type": kind, "source": {}}]))
    assert status == 400
    assert f"(got '{kind}')" in answer["error"]["message"]


def test_an_effort_reaches_a_template_that_knows_it() -> None:
    template = "{{ reasoning_effort }}{% for message in messages %}{{ message.content }}{% endfor %}"
    with served(with_config({"method": "suffix"}, target=templated(template))) as running:
        prompts = [
            running.send("/v1/messages/count_tokens", said("a", max_tokens=1, **more))[1]["input_tokens"]
            for more in ({}, {"output_config": {"effort": "e x t r e m e"}})
        ]
    assert prompts[1] > prompts[0]


def test_a_result_names_its_function() -> None:
    template = "{% for message in messages %}{{ message.name }}: {{ message.content }}{% endfor %}{{ tools }}"
    with served(with_config({"method": "suffix"}, target=templated(template))) as running:
        messages = [{"role": "assistant", "content": "", "tool_calls": [CALLED]}, ANSWER]
        prompt = running.send("/apply-template", {"model": NAME, "messages": messages})[1]["prompt"]
    assert "weather: rain" in prompt
