"""Tools as clients use them: required tools, arguments that fit, streams, and results of calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from foretoken.core.errors import InputError
from foretoken.options.sampling import SamplingParams
from foretoken.serve.conversation import _introduced
from helpers.serving import NAME, Served, served
from helpers.templates import IN_TURNS, TOOLS, USER_AND_ASSISTANT, templated
from helpers.zoo_llms import base, with_config

QUESTION = [{"role": "user", "content": "How warm is it in Oslo?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 30}},
        },
    },
}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
METHODS = [
    pytest.param({"method": "suffix"}, marks=pytest.mark.full_product),
    {"method": "draft_model", "model": "zoo:draft", "tree": "topk"},
]


@pytest.fixture(scope="module", params=METHODS, ids=lambda each: each["method"])
def server(request: pytest.FixtureRequest) -> Iterator[Served]:
    with served(with_config(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60) as client:
        yield client


def asked(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 90, **more}


def assert_fits(name: str, arguments: str) -> None:
    found = json.loads(arguments)
    if name == "clock":
        assert found == {}
    else:
        assert set(found) == {"city", "days"}
        assert found["city"] in ("Oslo", "Rome")
        assert 1 <= found["days"] <= 30


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_function_that_must_be_called_is(client: openai.OpenAI, temperature: float) -> None:
    chosen = {"type": "function", "function": {"name": "weather"}}
    fields = asked(tools=[CLOCK, WEATHER], tool_choice=chosen, temperature=temperature, seed=3, n=2)
    for choice in client.chat.completions.create(**fields).choices:
        (call,) = choice.message.tool_calls or ()
        assert call.function.name == "weather"
        assert_fits("weather", call.function.arguments)
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)


def test_some_call_is_made_where_one_is_required(client: openai.OpenAI) -> None:
    for parallel in (True, False):
        fields = asked(tools=[WEATHER, CLOCK], tool_choice="required", parallel_tool_calls=parallel, temperature=0.9)
        for seed in range(3):
            (choice,) = client.chat.completions.create(**fields, seed=seed).choices
            calls = choice.message.tool_calls or []
            assert len(calls) >= 1 if parallel else len(calls) == 1
            assert len({call.id for call in calls}) == len(calls)
            for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
                assert_fits(call.function.name, call.function.arguments)


def test_a_stream_of_calls_is_the_same_in_pieces(client: openai.OpenAI, server: Served) -> None:
    fields = asked(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    (whole,) = client.chat.completions.create(**fields).choices
    (wanted,) = whole.message.tool_calls or ()
    with client.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert kinds.count("tool_calls.function.arguments.delta") > 1
    assert "tool_calls.function.arguments.done" in kinds
    assert (call.function.name, call.function.arguments) == ("weather", wanted.function.arguments)
    pieces = [
        piece
        for each in server.events("/v1/chat/completions", fields | {"stream": True})[:-1]
        for piece in each["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert set(pieces[0]) == {"index", "id", "type", "function"}
    assert all(set(each) == {"index", "function"} and set(each["function"]) == {"arguments"} for each in pieces[1:])
    assert "".join(each["function"]["arguments"] for each in pieces) == wanted.function.arguments


def test_a_limit_cuts_a_call(client: openai.OpenAI) -> None:
    fields = asked(tools=[WEATHER], tool_choice="required") | {"max_tokens": 26}
    (choice,) = client.chat.completions.create(**fields).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls or ()
    assert call.function.name == "weather"
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)


def test_auto_and_none_answer_with_text(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**asked()).choices[0].message.content
    none = client.chat.completions.create(**asked(tools=[WEATHER], tool_choice="none")).choices[0].message
    assert (none.content, none.tool_calls) == (plain, None)
    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    for tool in (WEATHER, strict):
        answer = client.chat.completions.create(**asked(tools=[tool])).choices[0].message
        # the prompt describes the tool; a grammar that waits for a call leaves text as it is
        said = base().chat(_introduced(list(QUESTION), [tool], system=True), SamplingParams(max_tokens=90))[0].text
        assert answer.tool_calls is None
        assert answer.content == said != plain


def test_a_format_holds_for_answers_and_a_schema_for_calls(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        warm: bool

    strict = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    for tools in ([], [strict]):
        done = client.chat.completions.parse(**asked(tools=tools), response_format=Answer)
        message = done.choices[0].message
        assert isinstance(message.parsed, Answer) if message.parsed else message.tool_calls


def test_an_agent_calls_hears_and_answers(client: openai.OpenAI) -> None:
    messages: list[Any] = list(QUESTION)
    first = client.chat.completions.create(**asked(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False))
    messages.append(first.choices[0].message)  # as the client gave it
    (call,) = first.choices[0].message.tool_calls or ()
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees"})
    fields = asked(tools=[WEATHER], tool_choice="none") | {"messages": messages}
    last = client.chat.completions.create(**fields).choices[0]
    assert last.finish_reason in ("stop", "length")
    assert last.message.content
    written = [each if isinstance(each, dict) else each.model_dump() for each in messages]  # with all its nulls
    again = client.chat.completions.create(**fields | {"messages": written}).choices[0]
    assert again.message.content == last.message.content


def test_responses_call_hear_and_answer(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.serve.loop._PAUSE", 0.0)  # or a fast machine has written all before the next update
    tool = {"type": "function", **WEATHER["function"]}
    fields: dict[str, Any] = {"model": NAME, "temperature": 0, "tools": [tool], "max_output_tokens": 90}
    chosen = {"type": "function", "name": "weather"}
    items: list[Any] = list(QUESTION)
    whole = client.responses.create(input=items, tool_choice=chosen, **fields)
    (call,) = whole.output
    assert call.type == "function_call"
    assert_fits(call.name, call.arguments)
    with client.responses.stream(input=items, tool_choice=chosen, **fields) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [each.type for each in final.output] == ["function_call"]
    assert final.output[0].arguments == call.arguments
    deltas = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1
    assert "".join(deltas) == call.arguments
    kinds = [each.type for each in events]
    assert kinds[2] == "response.output_item.added"
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    items += whole.output
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"})
    assert client.responses.create(input=items, tool_choice="none", **fields).output_text


def test_a_template_that_knows_tools_is_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = with_config({"method": "suffix"}, target=templated(TOOLS))
    messages = [
        *QUESTION,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "Noon."},
    ]
    prompts, make = list[dict[str, list[int]]](), llm.chat_prompt

    def noted(*given: Any, **more: Any) -> dict[str, list[int]]:
        prompts.append(make(*given, **more))
        return prompts[-1]

    monkeypatch.setattr(llm, "chat_prompt", noted)
    with served(llm) as running:
        fields = asked(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False) | {"messages": messages}
        (choice,) = running.send("/v1/chat/completions", fields)[1]["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    text = llm.tokenizer.decode(prompts[0]["prompt_token_ids"])
    assert '"name": "clock"' in text
    assert '<tool_call>{"a": 1}</tool_call>' in text  # a mapping, not a text in quotes
    assert "<|tool|>\nNoon." in text
    assert "You may call functions" not in text


@pytest.mark.parametrize("template", [IN_TURNS, USER_AND_ASSISTANT], ids=["refuses", "leaves-out"])
def test_tools_without_a_system_role_are_described_in_the_first_users_message(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = with_config({"method": "suffix"}, target=templated(template))
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "Noon."},
        {"role": "user", "content": "Are you sure?"},
    ]
    prompts, make = list[str](), llm.chat_prompt

    def noted(*given: Any, **more: Any) -> dict[str, list[int]]:
        found = make(*given, **more)
        prompts.append(llm.tokenizer.decode(found["prompt_token_ids"]))
        return found

    monkeypatch.setattr(llm, "chat_prompt", noted)
    with served(llm) as running:
        for sent in (QUESTION, messages):
            fields = asked(tools=[CLOCK], tool_choice="required", parallel_tool_calls=False) | {"messages": sent}
            status, answer, _ = running.send("/v1/chat/completions", fields)
            assert status == 200, answer
            assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "clock"
        status, answer, _ = running.send("/v1/chat/completions", asked() | {"messages": QUESTION})
        assert status == 200, answer
        ask = {"model": NAME, "input": QUESTION[0]["content"], "max_output_tokens": 4}
        tool = {"type": "function", **CLOCK["function"]}
        assert running.send("/v1/responses", {**ask, "tools": [tool]})[0] == 200
    for prompt in (*prompts[:2], prompts[3]):
        first = prompt.index("<|user|>")
        described = prompt.index('"name": "clock"')
        assert first < described < prompt.index(QUESTION[0]["content"]) < prompt.index("<|assistant|>")
        assert "<|system|>" not in prompt
    assert "Noon.\n</tool_response>\n\nAre you sure?" in prompts[1]
    assert "clock" not in prompts[2]


def test_the_library_refuses_tools_that_a_template_does_not_know() -> None:
    with pytest.raises(InputError, match="knows no tools"):
        base().chat_prompt(QUESTION, tools=[CLOCK])


def test_parameters_that_contradict_themselves_are_named_with_their_tool(server: Served) -> None:
    parameters = {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^a": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "odd", "parameters": {"type": "object", **parameters}}}
    status, answer, _ = server.send("/v1/chat/completions", asked(tools=[CLOCK, tool], tool_choice="required"))
    assert (status, answer["error"]["param"]) == (400, "tools")
    assert "parameters of the tool 'odd': the property 'a' contradicts" in answer["error"]["message"]
