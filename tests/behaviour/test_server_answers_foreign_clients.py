"""What strangers send: other methods, other bodies, old HTTP, fields that frameworks add, pages of other origins."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from urllib.parse import unquote

import openai
import pytest

from helpers.serving import NAME, Served, served
from helpers.templates import MAY_THINK, templated
from helpers.zoo_llms import with_config

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(with_config({"method": "suffix"}), api_key="secret", origins=(PAGE,)) as running:
        yield running


KEY = {"Authorization": "Bearer secret"}
UNIQUE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "uniqueItems": True}}}


def said(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 2, **more}


def post(server: Served, body: Any, path: str = CHAT, **headers: str) -> tuple[int, Any, Any]:
    return server.send(path, body, headers=KEY | headers)


def raw(server: Served, *requests: bytes) -> bytes:
    """The answer to bytes, until the server has nothing more to say."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as line:
        line.sendall(b"".join(requests))
        found = b""
        while piece := line.recv(65536):
            found += piece
    return found


def written(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST {CHAT} HTTP/{version}", "Host: a", "Content-Type: application/json", "Authorization: Bearer secret"]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model": "zoo:base", "messages"', "the body is not JSON: Expecting ':' delimiter at character 32"),
        (b"", "the body: field required"),
        (b"[]", "the body: input should be a valid dictionary"),
        (b'{"model": "a\xed\xa0\x80"}', "the body is not JSON: byte 12 is not UTF-8"),
        (b'{"n": ' + b"[" * 20_000, "more than 128 levels"),
        (b'{"metadata": ' + b"[" * 500 + b"]" * 500 + b"}", "more than 128 levels"),
        (b'{"n": ' + b"9" * 5000 + b"}", "too many digits"),
    ],
)
def test_a_broken_body_is_named(server: Served, body: bytes, says: str) -> None:
    status, answer, _ = post(server, body)
    assert status == 400
    assert says in answer["error"]["message"]
    assert answer["error"]["param"] is None


@pytest.mark.parametrize(
    ("field", "param", "says"),
    [
        (b'"metadata": {"a": [0, NaN]}', "metadata.a.1", "is nan: JSON has finite numbers only"),
        (b'"logit_bias": {"5": -Infinity}', "logit_bias.5", "is -inf: JSON has finite numbers only"),
        (b'"user": 1e400', "user", "is inf"),
        (b'"user": "\\ud800"', "user", "not valid Unicode"),
        (b'"metadata": {"\\udfff": 1}', "metadata", "not valid Unicode"),
        (b'"n": 1, "n": 2', "n", "'n' twice in one object"),
        (b'"logit_bias": {"5": 1, "05": 2}', "logit_bias", "the key '05': keys are token ids"),
        (b'"logit_bias": {"5": 1e308}', "logit_bias", "up to 1e30"),
        (b'"repetition_penalty": 1e-320', "repetition_penalty", "greater than or equal to 0"),
    ],
)
def test_what_json_does_not_have_is_named(server: Served, field: bytes, param: str, says: str) -> None:
    status, answer, _ = post(server, json.dumps(said()).encode()[:-1] + b", " + field + b"}")
    assert status == 400
    assert says in answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_what_nothing_can_be_is_the_requests_own_fault(server: Served) -> None:
    endless = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": ""}}}
    status, answer, _ = post(server, said(response_format=endless))
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert "no continuation of this text satisfies" in answer["error"]["message"]


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain"])
def test_json_without_its_content_type_is_refused_with_a_remedy(server: Served, kind: str) -> None:
    """It is not taken: a page of any origin may send these two to a server on this machine."""
    status, answer, _ = post(server, said(), **{"content-type": kind})
    assert status == 400
    assert "send 'Content-Type: application/json'" in answer["error"]["message"]


def test_a_compressed_body_is_refused(server: Served) -> None:
    status, answer, _ = post(server, gzip.compress(json.dumps(said()).encode()), **{"content-encoding": "gzip"})
    assert status == 400
    assert "'Content-Encoding: gzip'" in answer["error"]["message"]
    assert post(server, said(), **{"content-encoding": "identity"})[0] == 200


def test_an_unknown_path_is_refused_before_its_body(server: Served) -> None:
    """A POST without a body has no content type, and is not refused for that."""
    for path, status in (("/v1/models", 405), (f"/v1/models/{NAME}", 405), ("/v1/embeddings", 404), ("/health", 405)):
        found, answer, response = server.send(path, headers=KEY | {"content-type": "text/plain"})
        assert (found, path in answer["error"]["message"]) == (status, True)
        assert response.headers["allow"] == ("GET" if status == 405 else None)


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/metrics", "/version"])
def test_head_is_get_without_a_body(server: Served, path: str) -> None:
    with closing(server.connect()) as connection:
        connection.request("HEAD", path, headers=KEY)
        response = connection.getresponse()
        assert response.status == 200
        assert response.read() == b""
        assert int(response.headers["content-length"]) > 0


def test_requests_in_a_row_and_old_http(server: Served) -> None:
    body = json.dumps(said()).encode()
    many = raw(server, written(body), written(body), written(body, "Connection: close"))
    assert many.count(b"HTTP/1.1 200") == many.count(b'"object":"chat.completion"') == 3
    old = raw(server, written(body, version="1.0"))
    assert b"200 OK" in old
    assert json.loads(old.split(b"\r\n\r\n")[1])["object"] == "chat.completion"


def test_pages_of_an_origin_that_is_allowed(server: Served) -> None:
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    asks |= {"Access-Control-Request-Headers": "authorization,content-type"}
    status, _, response = server.send(CHAT, method="OPTIONS", headers=asks)
    assert (status, response.headers["access-control-allow-origin"]) == (200, PAGE)
    assert post(server, said(), Origin=PAGE)[2].headers["access-control-allow-origin"] == PAGE
    refused = server.send(CHAT, said(), headers={"Origin": PAGE})
    assert (refused[0], refused[2].headers["access-control-allow-origin"]) == (401, PAGE)  # it may read why
    other = server.send(CHAT, method="OPTIONS", headers=asks | {"Origin": "https://other.example"})
    assert (other[0], other[2].headers["access-control-allow-origin"]) == (400, None)


def test_a_request_has_a_name(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        response = client.chat.completions.with_raw_response.create(**said())
        assert response.request_id == response.parse().id


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": False, "top_logprobs": 0},
        {"functions": None, "function_call": None, "extra_headers": None, "audio": None},
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "parsed": None,
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": "a",
                            "type": "function",
                            "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "a", "content": "7"},
            ]
        },
    ],
)
def test_what_frameworks_add(server: Served, more: dict[str, Any]) -> None:
    status, answer, _ = post(server, said(**more))
    assert status == 200, answer


def test_what_agents_ask_of_responses(server: Served) -> None:
    asked = {"model": NAME, "input": "Hi", "temperature": 0, "max_output_tokens": 2}
    more = {"include": ["reasoning.encrypted_content"], "stream_options": {"include_obfuscation": False}}
    assert post(server, asked | more | {"reasoning": {"effort": None, "summary": "auto"}}, RESPONSES)[0] == 200
    for more, ignored in (
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"client_metadata": {"a": "b"}}, "client_metadata"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["web_search_call.action.sources"]}, "include%5Bweb_search_call.action.sources%5D"),
        ({"tools": [{"type": "web_search"}, {"type": "namespace", "name": "x", "tools": []}]}, "tools[].web_search"),
    ):
        status, answer, response = post(server, asked | more, RESPONSES)
        assert status == 200, answer
        assert response.headers["x-foretoken-ignored"].split(",")[0] == unquote(ignored)
    fields = {"seed": 3, "stop": ["x"], "top_k": 5, "ignore_eos": True, "logit_bias": {"5": 1}, "n": 1}
    status, answer, response = post(server, asked | fields, RESPONSES)
    assert (status, response.headers["x-foretoken-ignored"]) == (200, None)
    assert answer["usage"]["output_tokens"] == 2
    assert post(server, asked | {"seed": "3"}, RESPONSES)[0] == 400


TOLD = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "no"}, {"role": "user", "content": "Hi"}]
HELD = {"cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "Hi", **HELD}]}, *TOLD[1:]],
        [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}, *TOLD[1:]],
        [TOLD[0], {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, TOLD[2]],
        [TOLD[0], {**TOLD[1], "refusal": None, "provider_specific_fields": {"refusal": None}}, {**TOLD[2], **HELD}],
        [TOLD[0], {**TOLD[1], "tool_calls": [], "function_call": None, "annotations": []}, TOLD[2]],
    ],
)
def test_the_same_conversation_as_clients_write_it(server: Served, messages: list[dict[str, Any]]) -> None:
    wanted, found = (post(server, said(messages=each, max_tokens=6))[1] for each in (TOLD, messages))
    assert found["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    assert found["choices"][0]["message"] == wanted["choices"][0]["message"]


def test_the_same_items_as_agents_write_them(server: Served) -> None:
    refused = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "phase": "commentary"}
    refused["content"] = [{"type": "refusal", "refusal": "no"}]
    asked = {"model": NAME, "temperature": 0, "max_output_tokens": 4}
    wanted, found = (
        post(server, asked | {"input": each}, RESPONSES)[1] for each in (TOLD, [TOLD[0], refused, TOLD[2]])
    )
    assert found["usage"]["input_tokens"] == wanted["usage"]["input_tokens"]
    assert found["output"][0]["content"] == wanted["output"][0]["content"]


@pytest.mark.parametrize(
    ("path", "more", "param", "says"),
    [
        (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "of type message, function_call,"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id", "required"),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.name", "required"),
        (CHAT, {"tools": [], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "'function'"),
        (CHAT, {"guided_json": {}, "structured_outputs": {"json": {"type": "array"}}}, "guided_json", "keep one"),
        (CHAT, {"prompt_logprobs": 1}, "prompt_logprobs", "use echo and logprobs in /v1/completions"),
        (CHAT, {"return_token_ids": True}, "return_token_ids", "of the library have token_ids"),
        (CHAT, {"chat_template": "x"}, "chat_template", "the server uses the checkpoint's template"),
        (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget", "leave it out"),
        (CHAT, {"functions": []}, "functions", "write tools"),
        (CHAT, {"lora": [{"id": 0, "scale": 1.0}]}, "lora", "write the adapter's name as model"),
        (CHAT, {"response_format": UNIQUE}, "response_format", "response_format: the schema's 'uniqueItems'"),
        (CHAT, {"priority": False}, "priority", "valid integer (got False)"),
        (CHAT, {"use_beam_search": 0}, "use_beam_search", "valid boolean (got 0)"),
        (CHAT, {"use_beam_search": True}, "use_beam_search", "should be False (got True)"),
        (CHAT, {"spaces_between_special_tokens": 1}, "spaces_between_special_tokens", "valid boolean (got 1)"),
        (RESPONSES, {"top_logprobs": False}, "top_logprobs", "valid integer (got False)"),
        (RESPONSES, {"top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ],
)
def test_a_place_is_named_as_it_was_sent(
    server: Served, path: str, more: dict[str, Any], param: str, says: str
) -> None:
    sound = said() if path == CHAT else {"model": NAME, "input": "Hi"}
    status, answer, _ = post(server, sound | more, path)
    assert (status, answer["error"]["param"]) == (400, param)
    assert says in answer["error"]["message"]


def test_an_effort_that_the_template_knows() -> None:
    with served(with_config({"method": "suffix"}, target=templated(MAY_THINK))) as running:
        plain, none = (running.send(CHAT, said(**more))[1] for more in ({}, {"reasoning_effort": "none"}))
        assert none["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]
        for more in (
            {"enable_thinking": False},
            {"thinking": {"type": "disabled"}},
            {"reasoning": {"enabled": False}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ):
            assert running.send(CHAT, said(**more))[1]["usage"] == none["usage"]
        status, _, response = running.send(CHAT, said(reasoning_effort="high"))
        assert (status, response.headers["x-foretoken-ignored"]) == (200, "reasoning_effort")
        status, answer, _ = running.send(CHAT, said(enable_thinking=True, thinking={"type": "disabled"}))
        assert (status, answer["error"]["param"]) == (400, "thinking.type")


def test_parts_that_are_no_text_are_named(server: Served) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    status, answer, _ = post(server, said(messages=[{"role": "user", "content": [picture]}]))
    assert status == 400
    assert "messages.0.content.0.type: input should be 'text' (got 'image_url')" in answer["error"]["message"]


# ---------------------------------------------------------------------- fields that no path declares


def test_an_unknown_field_is_answered_and_named_once(server: Served) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi", "agent": "x"}], "agent": "x"}]
    tools = [{"type": "function", "function": {"name": "f", "eager": 1}, "defer_loading": True}] * 1
    more = {"models": ["a"], "top_a": 0, "context_management": {}, "eager_input_streaming": None, "user_meta": "\n"}
    status, answer, response = post(server, said(messages=messages, tools=tools, **more))
    assert status == 200, answer
    assert response.headers["x-foretoken-ignored"] == (
        "models,context_management,user_meta,messages[].agent,messages[].content[].agent,"
        "tools[].defer_loading,tools[].function.eager"
    )
    plain = post(
        server,
        said(messages=[{"role": "user", "content": "Hi"}], tools=[{"type": "function", "function": {"name": "f"}}]),
    )[1]
    assert answer["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_the_header_of_ignored_fields_is_bounded_and_safe(server: Served) -> None:
    status, _, response = post(
        server, said(**{f"unheard_{'x' * 100}_{each}": 1 for each in range(100)}, **{"a\r\nb: ü": 1})
    )
    assert status == 200
    assert len(response.headers["x-foretoken-ignored"]) <= 1010
    assert response.headers["x-foretoken-ignored"].endswith(",...")
    assert post(server, said(**{"x" * 5000: 1}))[2].headers["x-foretoken-ignored"] == "..."
    assert post(server, said(**{"a\r\nb: ü": 1}))[2].headers["x-foretoken-ignored"] == "a%0D%0Ab%3A%20%C3%BC"
    assert "foretoken:ignored_fields_total" in server.get("/metrics")[1]


def test_strict_parsing_refuses_every_unknown_field(server: Served) -> None:
    assert post(server, said(unheard=1), **{"x-foretoken-strict": "0"})[0] == 200
    status, answer, _ = post(server, said(unheard=1), **{"x-foretoken-strict": "1"})
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, "unheard", "unknown_field")


@pytest.mark.parametrize(
    "more",
    [
        {"max_new_tokens": 2},
        {"n_predict": 2, "max_tokens": 2},
        {"max_tokens": 2.0},
        {"stop": [""]},
        {"content": []},
        {"verbosity": "low"},
        {"messages": [{"role": "user", "content": "Hi", "id": "m1", "prefix": False, "thinking_blocks": []}]},
    ],
)
def test_values_that_restrict_nothing_are_accepted(server: Served, more: dict[str, Any]) -> None:
    wanted = post(server, said())[1]
    body = said(**more)
    if "max_tokens" not in more and "max_new_tokens" in more:
        del body["max_tokens"]
    status, answer, _ = post(server, body)
    assert status == 200, answer
    assert answer["choices"] == wanted["choices"]


def test_no_limit_is_minus_one(server: Served) -> None:
    assert post(server, said(max_tokens=-1, stop=["\n", "."]))[0] == 200
    assert post(server, said(max_tokens=-2))[0] == 400


def test_the_best_token_alone_is_top_p_zero(server: Served) -> None:
    greedy = post(server, said(max_tokens=8))[1]["choices"]
    assert post(server, said(max_tokens=8, temperature=1.0, top_p=0))[1]["choices"] == greedy


def test_an_answer_continues_the_assistants_turn(server: Served) -> None:
    user = {"role": "user", "content": "Tom has 3 marbles and buys 4. How many?"}
    whole = post(server, said(messages=[user], max_tokens=12))[1]["choices"][0]["message"]["content"]
    for begin in (whole[: len(whole) // 2],):
        begun = {"role": "assistant", "content": begin}
        first = post(server, said(messages=[user, begun], continue_final_message=True, max_tokens=12))[1]
        again = post(server, said(messages=[user, {**begun, "prefix": True}], max_tokens=12))[1]
        assert first["choices"] == again["choices"]
        other = post(server, said(messages=[user, begun], max_tokens=12))[1]
        assert other["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"]


def test_the_base_url_is_in_the_refusal(server: Served) -> None:
    for path in ("/chat/completions", "/v1/v1/chat/completions"):
        status, answer, _ = post(server, said(), path)
        assert (status, "use /v1/chat/completions" in answer["error"]["message"]) == (404, True)
    status, answer, _ = post(server, {"model": NAME, "prompt": "Hi"}, CHAT)
    assert (status, "/v1/completions takes 'prompt'" in answer["error"]["message"]) == (400, True)
    assert server.send("/v1/models/", method="GET", headers=KEY)[1]["data"][0]["id"] == NAME


FORCED = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"}


@pytest.mark.parametrize("limit", range(1, 31, 4))
def test_a_forced_call_that_is_cut_shows_no_markup(server: Served, limit: int) -> None:
    status, answer, _ = post(server, said(**FORCED, max_tokens=limit))
    assert status == 200
    assert not answer["choices"][0]["message"]["content"]
    tools = [{"type": "function", "name": "f"}]
    asked = {"model": NAME, "input": "Hi", "temperature": 0, "max_output_tokens": limit, "tools": tools}
    items = post(server, asked | {"tool_choice": "required"}, RESPONSES)[1]["output"]
    assert "".join(part["text"] for item in items for part in item.get("content", [])) == ""


@pytest.mark.parametrize(
    ("schema", "fits"),
    [
        ({"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}}, True),
        ({"type": "string", "format": "path", "maxLength": 3}, True),
        ({"type": "object", "properties": {"format": {"type": "string", "format": "cuid2", "maxLength": 2}}}, True),
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": False}, True),
        ({"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}, True),
        ({"type": "array", "uniqueItems": True}, False),
        ({"not": {"type": "string"}}, False),
        ({"type": "object", "propertyNames": {"minLength": 3}}, False),
    ],
)
def test_schemas_of_common_libraries(server: Served, schema: dict[str, Any], fits: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, answer, _ = post(server, said(response_format=form, max_tokens=8))
    assert status == (200 if fits else 400), answer
    if not fits:
        keyword = next(name for name in ("uniqueItems", "not", "propertyNames") if name in schema)
        assert f"the schema's '{keyword}'" in answer["error"]["message"]
        assert "inside:" not in answer["error"]["message"]


def test_a_model_has_aliases_and_its_name_may_be_missing() -> None:
    with served(with_config({"method": "suffix"}), names=["first", "gpt-4o", "claude-*"]) as running:
        asked = said()
        del asked["model"]
        assert running.send(CHAT, asked)[1]["model"] == "first"
        for name in ("gpt-4o", "claude-opus-9"):
            assert running.send(CHAT, asked | {"model": name})[1]["model"] == name
        status, answer, _ = running.send(CHAT, asked | {"model": "gpt-4"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert [each["id"] for each in running.send("/v1/models", method="GET")[1]["data"]] == ["first", "gpt-4o"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_speculative_metrics_are_those_of_the_counters(path: str) -> None:
    words = "one two three four five six seven eight nine ten. " * 4
    with served(with_config({"method": "suffix", "num_speculative_tokens": 4})) as running:
        if path == CHAT:
            asked = said(messages=[{"role": "user", "content": words}], max_tokens=40)
        else:
            asked = {"model": NAME, "input": words, "temperature": 0, "max_output_tokens": 40}
        assert "metrics" not in running.send(path, asked)[1]
        before = running.loop.totals.draft_tokens, running.loop.totals.accepted_tokens
        found = running.send(path, asked | {"speculation": {"metrics": "detailed"}})[1]["metrics"]
        spec = found["speculative_decoding"]
        totals = running.loop.totals
        assert (spec["num_draft_tokens"], spec["num_accepted_draft_tokens"]) == (
            totals.draft_tokens - before[0],
            totals.accepted_tokens - before[1],
        )
        assert spec["num_accepted_draft_tokens"] == sum(spec["per_step_accepted"]) > 0
        assert spec["num_draft_tokens"] == sum(spec["per_step_drafted"])
        assert spec["num_spec_steps"] == sum(spec["acceptance_histogram"]) == len(spec["per_step_drafted"])
        for stood, steps in enumerate(spec["acceptance_histogram"]):
            assert spec["per_step_accepted"].count(stood) == steps
        assert spec["mean_acceptance_length"] == 1 + spec["num_accepted_draft_tokens"] / spec["num_spec_steps"]
        off = {"speculation": {"enabled": False, "metrics": "summary"}}
        assert running.send(path, asked | off)[1]["metrics"] == {"speculative_decoding": None}
        if path == CHAT:
            streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
            events = running.events(path, streamed | {"speculation": {"metrics": "summary"}})
            summary = events[-2]["metrics"]["speculative_decoding"]
            assert set(spec) - set(summary) == {"per_step_accepted", "per_step_drafted"}
