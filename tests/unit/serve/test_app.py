"""The paths under /v1, over real sockets: answers, streams and refusals."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response as OpenAIResponse
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from foretoken.core.errors import RequestError
from foretoken.options.sampling import SamplingParams
from foretoken.serve.service import Limits
from foretoken_lab.testing import Oracle
from helpers.serving import NAME, Served, served
from helpers.zoo_llms import PROMPTS, base, with_config, with_drafter

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "g"}}
UNSUPPORTED = {"type": "function", "function": {"name": "f", "parameters": {"uniqueItems": True}}}
ENDLESS = {"ignore_eos": True, "max_tokens": 900}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(with_config({"method": "suffix"}), max_queue=4, limits=Limits(body=100_000)) as running:
        yield running


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def continued(prompt: Any, **more: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": prompt, "temperature": 0, **more}


def idle(server: Served) -> None:
    deadline = time.monotonic() + 30
    while server.loop.num_running or server.loop.num_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---------------------------------------------------------------------- answers


def test_a_conversation_is_answered_as_by_the_library(server: Served) -> None:
    params = SamplingParams(max_tokens=40, logprobs=2)
    (wanted,) = base().chat([{"role": "user", "content": PROMPTS[0]}], params)
    status, body, _ = server.send(CHAT, said(PROMPTS[0], max_tokens=40, logprobs=True, top_logprobs=2))
    assert status == 200
    (choice,) = body["choices"]
    assert choice["message"]["content"] == wanted.text
    assert choice["finish_reason"] == wanted.finish_reason
    assert body["usage"]["completion_tokens"] == len(wanted.token_ids) == len(choice["logprobs"]["content"])
    assert body["usage"]["prompt_tokens"] == len(wanted.prompt_token_ids)
    for entry, truth in zip(choice["logprobs"]["content"], wanted.logprobs or (), strict=True):
        assert entry["logprob"] == pytest.approx(truth.logprob, abs=1e-4)
        assert len(entry["top_logprobs"]) == 2
    shown = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"]).decode()
    assert shown.removesuffix("<|end|>") == wanted.text


@pytest.mark.parametrize("stream", [False, True])
def test_words_tokens_and_ends_are_as_the_library_has_them(server: Served, stream: bool) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 40,
        "bad_words": ["marbles"],
        "stop": ["30"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 40,
    }
    (wanted,) = base().chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(**fields))
    assert wanted.text.endswith("30")
    if stream:
        events = server.events(CHAT, said(PROMPTS[0], **fields, stream=True))
        pieces = [each["choices"][0]["delta"].get("content") or "" for each in events[:-1]]
        assert "".join(pieces) == wanted.text
    else:
        _, body, _ = server.send(CHAT, said(PROMPTS[0], **fields))
        assert body["choices"][0]["message"]["content"] == wanted.text
    params = SamplingParams(allowed_token_ids=[60, 61], max_tokens=5)
    _, few, _ = server.send(TEXT, continued("x", allowed_token_ids=[60, 61], max_tokens=5))
    assert few["choices"][0]["text"] == base().generate("x", params)[0].text


@pytest.mark.parametrize("text", PROMPTS)
def test_a_stream_is_the_same_text_in_pieces(server: Served, text: str) -> None:
    fields = {"max_tokens": 30, "logprobs": True, "n": 2, "seed": 5, "temperature": 0.8}
    _, whole, _ = server.send(CHAT, said(text, **fields))
    events = server.events(CHAT, said(text, **fields, stream=True, stream_options={"include_usage": True}))
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for index, choice in enumerate(whole["choices"]):
        mine = [each["choices"][0] for each in events[:-2] if each["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(each["delta"].get("content", "") for each in mine) == choice["message"]["content"]
        assert [each["finish_reason"] for each in mine if each["finish_reason"]] == [choice["finish_reason"]]
        entries = [entry for each in mine if each["logprobs"] for entry in each["logprobs"]["content"]]
        assert [each["token"] for each in entries] == [each["token"] for each in choice["logprobs"]["content"]]
    assert all(each["usage"] is None for each in events[:-2])


def test_the_description_names_every_kind_of_answer(server: Served) -> None:
    paths = server.get("/openapi.json")[1]["paths"]
    bodies = {CHAT: said("Hi", max_tokens=1), TEXT: continued("Hi", max_tokens=1), RESPONSES: {"model": NAME}}
    bodies[RESPONSES] |= {"input": "Hi", "max_output_tokens": 1}
    for path, body in bodies.items():
        (described,) = paths[path].values()
        for more, kind in (({}, "application/json"), ({"stream": True}, "text/event-stream")):
            assert server.send(path, body | more)[2].headers["content-type"].split(";")[0] == kind
            assert kind in described["responses"]["200"]["content"]
    kind = server.get("/metrics")[2].headers["content-type"].split(";")[0]
    assert kind in paths["/metrics"]["get"]["responses"]["200"]["content"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_in_the_middle_counts_the_tokens_sent(server: Served, path: str) -> None:
    """Not what the engine has written since: chunk and count belong together."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    more = {"max_tokens": 150, "ignore_eos": True, "n": 2, "stream": True, "stream_options": options}
    asked = said(PROMPTS[2], logprobs=True) if path == CHAT else continued(PROMPTS[2], logprobs=0)
    *events, last, _ = server.events(path, asked | more)
    told = 0
    for event in events:
        (choice,) = event["choices"]
        told += len((choice["logprobs"] or {}).get("content" if path == CHAT else "tokens", ()))
        assert event["usage"]["completion_tokens"] == told
        assert event["usage"]["total_tokens"] == told + last["usage"]["prompt_tokens"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], told)
    assert told == 300
    assert "speculation" in last["usage"]["completion_tokens_details"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_no_usage_in_the_middle_without_usage_at_the_end(server: Served, path: str) -> None:
    asked = said("Hi") if path == CHAT else continued("Hi")
    options = {"include_usage": False, "continuous_usage_stats": True}
    *events, _ = server.events(path, asked | {"max_tokens": 3, "stream": True, "stream_options": options})
    assert all(each["choices"] and "usage" not in each for each in events)


def test_texts_are_continued_many_at_once(server: Served) -> None:
    prompts = list(PROMPTS[:3])
    params = SamplingParams(max_tokens=10, temperature=0.9, seed=1, n=2)
    outputs = base().generate(prompts, params)
    status, body, _ = server.send(TEXT, continued(prompts, max_tokens=10, temperature=0.9, seed=1, n=2))
    assert status == 200
    assert [each["text"] for each in body["choices"]] == [done.text for each in outputs for done in each.outputs]
    assert [each["index"] for each in body["choices"]] == list(range(6))
    assert body["usage"]["prompt_tokens"] == sum(len(each.prompt_token_ids) for each in outputs)
    ids = [list(each.prompt_token_ids) for each in outputs]
    assert (
        server.send(TEXT, continued(ids, max_tokens=10, temperature=0.9, seed=1, n=2))[1]["choices"] == body["choices"]
    )
    one = server.send(TEXT, continued(ids[0], max_tokens=10))[1]["choices"]
    assert len(one) == 1


def test_an_echoed_prompt_has_log_probabilities_and_offsets(server: Served) -> None:
    _, body, _ = server.send(TEXT, continued(PROMPTS[1], echo=True, logprobs=1, min_tokens=5, max_tokens=5))
    (choice,) = body["choices"]
    shown = choice["logprobs"]
    assert choice["text"].startswith(PROMPTS[1])
    assert body["usage"]["completion_tokens"] == 5
    assert "".join(shown["tokens"]) == choice["text"]
    assert shown["token_logprobs"][0] is None
    assert all(value <= 0 for value in shown["token_logprobs"][1:])
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token
    _, scored, _ = server.send(TEXT, continued(PROMPTS[1], echo=True, logprobs=1, max_tokens=0))
    count = body["usage"]["prompt_tokens"]
    assert scored["choices"][0]["text"] == PROMPTS[1]
    assert scored["choices"][0]["logprobs"]["token_logprobs"] == shown["token_logprobs"][:count]
    assert scored["usage"]["completion_tokens"] == 0


SPOKEN = "Zürich 🙂\n\n" * 2
WITH_ENDS = {"ignore_eos": True, "max_tokens": 8, "logit_bias": {"5": 60, "60": 60, "61": 60}, "temperature": 1}


@pytest.mark.parametrize(
    "more",
    [
        {"structured_outputs": {"choice": [SPOKEN]}},
        {"structured_outputs": {"choice": [SPOKEN]}, "stop": ["\n\n!"]},
        {"structured_outputs": {"choice": [SPOKEN]}, "echo": True},
        WITH_ENDS,
        WITH_ENDS | {"skip_special_tokens": False},
    ],
)
def test_offsets_are_places_in_the_text(server: Served, more: dict[str, Any]) -> None:
    """Also after a token that is no text, within a character of several tokens, and while a stop string may come."""
    asked = continued("One 🙂 <|end|>", max_tokens=40, logprobs=0, seed=3) | more
    (whole,) = server.send(TEXT, asked)[1]["choices"]
    pieces = [each["choices"][0] for each in server.events(TEXT, asked | {"stream": True})[:-1]]
    shown = whole["logprobs"]
    for name in ("tokens", "text_offset"):
        assert [each for piece in pieces for each in piece["logprobs"][name]] == shown[name]
    assert "<|end|>" in shown["tokens"][:-1] or more.get("structured_outputs")
    for token, offset in zip(shown["tokens"], shown["text_offset"], strict=True):
        if "\ufffd" in token:
            assert whole["text"][offset] in "ü🙂"
        elif token != "<|end|>" or "skip_special_tokens" in more:
            assert whole["text"][offset : offset + len(token)] == token


def test_a_stop_string_inside_an_accepted_block_trims_all_alike() -> None:
    asked = continued(PROMPTS[2], max_tokens=24, logprobs=0, ignore_eos=True)
    (known,) = base().generate([PROMPTS[2]], SamplingParams(max_tokens=24, ignore_eos=True))
    oracle = Oracle({tuple(known.prompt_token_ids): known.token_ids})
    with served(with_drafter(oracle)) as running:
        free = running.send(TEXT, asked)[1]
        tokens = free["choices"][0]["logprobs"]["tokens"]
        assert free["usage"]["completion_tokens_details"]["speculation"]["steps"] < 6
        stop = "".join(tokens[9:11])  # in the middle of the second block of seven
        stopped = running.send(TEXT, asked | {"stop": stop})[1]
        plain = running.send(TEXT, asked | {"stop": stop, "speculation": {"enabled": False}})[1]
    (choice,), usage = stopped["choices"], stopped["usage"]
    assert choice["text"] == free["choices"][0]["text"].split(stop)[0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == usage["completion_tokens"] < 24
    assert usage["completion_tokens_details"]["speculation"]["draft_tokens"] > 0
    assert plain["choices"] == stopped["choices"]
    assert plain["usage"]["completion_tokens"] == usage["completion_tokens"]
    assert plain["usage"]["completion_tokens_details"]["speculation"]["draft_tokens"] == 0


def test_a_request_says_how_it_was_sped_up_and_may_switch_it_off(server: Served) -> None:
    again = "a b c d e f a b c d e f a b c d e f a b c"
    for extra, most in (({"num_speculative_tokens": 1}, 1), ({"enabled": False}, 0)):
        _, body, _ = server.send(TEXT, continued(again, max_tokens=20, speculation={"show": True, **extra}))
        report = body["usage"]["completion_tokens_details"]["speculation"]
        assert report["draft_tokens"] <= most * report["steps"]
        shown = body["choices"][0]["speculation"]
        assert sum(each["drafted"] for each in shown) == report["accepted_tokens"]
        assert b"".join(bytes(each["bytes"]) for each in shown).decode() == body["choices"][0]["text"]
        assert report["promise"] == "same text"


def test_a_request_names_one_of_the_loaded_drafters_or_none() -> None:
    again = continued("a b c d e f a b c d e f a b c d e f a b c", max_tokens=20)
    config = {"method": "suffix_first", "model": "zoo:draft", "num_speculative_tokens": 4}
    with served(with_config(config)) as server:

        def sources(name: str | None) -> set[str]:
            status, body, _ = server.send(TEXT, {**again, "speculation": {"method": name}})
            assert status == 200
            report = body["usage"]["completion_tokens_details"]["speculation"]
            assert bool(report["sources"]) == (report["draft_tokens"] > 0)
            return set(report["sources"])

        assert sources("draft_model") == {"draft_model"}
        assert sources("suffix") == {"suffix"}
        assert sources("none") == set()
        assert sources("suffix_first") == sources(None) != set()
        status, body, _ = server.send(TEXT, {**again, "speculation": {"method": "eagle"}})
    assert (status, body["error"]["param"]) == (400, "speculation.method")
    for part in ("'eagle'", "suffix_first, suffix, draft_model, none", "load the model with that method"):
        assert part in body["error"]["message"]


def test_a_response_and_its_events(server: Served) -> None:
    asked = {
        "model": NAME,
        "input": PROMPTS[0],
        "instructions": "Be brief.",
        "temperature": 0,
        "max_output_tokens": 200,
    }
    status, whole, response = server.send(RESPONSES, asked | {"store": False, "metadata": {"a": "b"}})
    assert status == 200
    assert (whole["status"], whole["store"], whole["metadata"]) == ("completed", False, {"a": "b"})
    assert response.headers["x-foretoken-ignored"] == "metadata,store"
    text = whole["output"][0]["content"][0]["text"]
    (wanted,) = base().chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPTS[0]}],
        SamplingParams(max_tokens=200),
    )
    assert text == wanted.text
    *events, end = server.events(RESPONSES, asked | {"stream": True})
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"] for each in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    assert end == "[DONE]"
    assert "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta") == text
    assert events[-1]["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    cut = server.send(RESPONSES, asked | {"max_output_tokens": 3})[1]
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


ASKED = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "top_p": 0.75, "temperature": 0.5, "max_tool_calls": 3}
TOLD_AGAIN = {"safety_identifier": "me", "prompt_cache_key": "mine", "user": "I", "instructions": "Be brief."}


def test_a_response_says_how_it_was_made(server: Served) -> None:
    """As the open specification of responses asks: nothing is left out, and what does not apply says so."""
    plain = server.send(RESPONSES, {"model": NAME, "input": "Hi", "temperature": 0, "max_output_tokens": 200})[1]
    nothing = dict.fromkeys((*TOLD_AGAIN, "max_tool_calls", "error", "incomplete_details", "previous_response_id"))
    zeros = {"presence_penalty": 0, "frequency_penalty": 0, "top_logprobs": 0}
    assert plain | nothing | zeros | {"service_tier": "default", "background": False} == plain
    assert plain["created_at"] <= plain["completed_at"] <= time.time()
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object", "maxProperties": 1}}
    asked = {"model": NAME, "input": "Hi", "max_output_tokens": 2, "top_logprobs": 0, "text": {"format": schema}}
    cut = server.send(RESPONSES, asked | ASKED | TOLD_AGAIN)[1]
    assert cut | ASKED | TOLD_AGAIN | {"completed_at": None, "status": "incomplete"} == cut
    assert cut["text"]["format"] == schema | {"description": None, "strict": True}


def test_log_probabilities_of_a_response(server: Served) -> None:
    """Those of a conversation; a piece has those of its own text, and the end of the answer is reported at its end."""
    chatted = said(PROMPTS[0], max_tokens=200, logprobs=True, top_logprobs=2)
    (choice,) = server.send(CHAT, chatted)[1]["choices"]
    wanted = [each["token"] for each in choice["logprobs"]["content"]]
    asked = {"model": NAME, "input": PROMPTS[0], "temperature": 0, "max_output_tokens": 200, "top_logprobs": 2}
    whole = server.send(RESPONSES, asked)[1]
    assert (whole["status"], whole["top_logprobs"]) == ("completed", 2)
    shown = whole["output"][0]["content"][0]["logprobs"]
    assert [each["token"] for each in shown] == wanted
    assert all(len(each["top_logprobs"]) == 2 for each in shown)
    events = server.events(RESPONSES, asked | {"stream": True})[:-1]
    pieces = [each for each in events if each["type"] == "response.output_text.delta"]
    assert len(pieces) > 1
    for event in pieces:
        said_here = b"".join(bytes(each["bytes"]) for each in event["logprobs"]).decode()
        assert said_here.removesuffix("<|end|>") == event["delta"]
    told = [each["token"] for piece in pieces for each in piece["logprobs"]]
    assert told in (wanted, wanted[:-1])
    (done,) = (each["logprobs"] for each in events if each["type"] == "response.output_text.done")
    assert [each["token"] for each in done] == wanted
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == done
    chosen = {"max_output_tokens": 1, "top_logprobs": 0, "include": ["message.output_text.logprobs"]}
    (only,) = server.send(RESPONSES, asked | chosen)[1]["output"][0]["content"][0]["logprobs"]
    assert only["top_logprobs"] == []
    status, refused, _ = server.send(RESPONSES, asked | {"tools": [TOOL["function"] | {"type": "function"}]})
    assert (status, refused["error"]["param"]) == (400, "top_logprobs")
    assert "cannot be combined with tools" in refused["error"]["message"]


def test_penalties_of_a_response(server: Served) -> None:
    asked = {"temperature": 0, "presence_penalty": 2, "frequency_penalty": 2}
    (wanted,) = base().chat([{"role": "user", "content": PROMPTS[0]}], SamplingParams(max_tokens=30, **asked))
    whole = server.send(RESPONSES, {"model": NAME, "input": PROMPTS[0], "max_output_tokens": 30, **asked})[1]
    assert whole["output"][0]["content"][0]["text"] == wanted.text


def test_answers_that_fit_a_schema(server: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 9}, "rooms": {"type": "integer", "maximum": 20}},
        "required": ["city", "rooms"],
        "additionalProperties": False,
    }
    named = {"name": "hotel", "schema": schema, "strict": True}
    formats = [{"type": "json_schema", "json_schema": named}]
    for form in formats:
        for temperature in (0, 1):
            body = server.send(CHAT, said("A hotel?", response_format=form, temperature=temperature, seed=1))[1]
            assert set(json.loads(body["choices"][0]["message"]["content"])) == {"city", "rooms"}
            assert body["choices"][0]["finish_reason"] == "stop"
    whole = server.send(
        RESPONSES,
        {"model": NAME, "input": "A hotel?", "temperature": 0, "text": {"format": {"type": "json_schema", **named}}},
    )[1]
    assert set(json.loads(whole["output"][0]["content"][0]["text"])) == {"city", "rooms"}
    assert whole["text"]["format"]["name"] == "hotel"
    chosen = server.send(TEXT, continued("Hi", structured_outputs={"choice": ["yes", "no"]}))[1]
    assert chosen["choices"][0]["text"] in ("yes", "no")
    any_object = server.send(CHAT, said("A hotel?", response_format={"type": "json_object"}, max_tokens=200))[1]
    (choice,) = any_object["choices"]
    assert choice["finish_reason"] == "length" or isinstance(json.loads(choice["message"]["content"]), dict)
    assert choice["message"]["content"].startswith("{")


def test_a_conversation_given_as_items(server: Served) -> None:
    turns = [("user", "Hi"), ("assistant", "Hello."), ("user", PROMPTS[0])]
    items = [{"role": role, "content": [{"type": "input_text", "text": text}]} for role, text in turns]
    whole = server.send(RESPONSES, {"model": NAME, "input": items, "temperature": 0, "max_output_tokens": 12})[1]
    (wanted,) = base().chat([{"role": r, "content": t} for r, t in turns], SamplingParams(max_tokens=12))
    assert whole["output"][0]["content"][0]["text"] == wanted.text


def test_parts_developers_and_names(server: Served) -> None:
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "name": "Ann", "content": parts}]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\nthere"}]
    bodies = [
        server.send(CHAT, {"model": NAME, "messages": each, "temperature": 0, "max_tokens": 8})[1]
        for each in (messages, plain)
    ]
    assert bodies[0]["choices"] == bodies[1]["choices"]


def test_the_read_part_of_a_prompt_is_not_read_again() -> None:
    with served(with_config({"method": "suffix"}, enable_prefix_caching=True)) as running:
        long = "Once upon a time there was a cat that sat on a mat and " * 3
        plain = running.send(TEXT, continued(long, cache_salt="mine"))[1]
        again = running.send(TEXT, continued(long, cache_salt="mine"))[1]
        other = running.send(TEXT, continued(long, cache_salt="theirs"))[1]
        cached = [each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (plain, again, other)]
        assert cached == [0, plain["usage"]["prompt_tokens"] - 1, 0]
        count = plain["usage"]["prompt_tokens"]
        written = [each["usage"]["prompt_tokens_details"]["cache_write_tokens"] for each in (plain, again, other)]
        assert written == [count, 1, count]
        assert plain["choices"] == again["choices"] == other["choices"]
        assert f'vllm:prefix_cache_hits_total{{model_name="{NAME}"}} {float(cached[1])}' in running.get("/metrics")[1]


def test_what_a_request_leaves_out_is_openais_default(server: Served) -> None:
    asked = {"model": NAME, "prompt": PROMPTS[3]}
    texts = {server.send(TEXT, asked)[1]["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1  # temperature 1
    assert server.send(TEXT, asked | {"ignore_eos": True})[1]["usage"]["completion_tokens"] == 16
    seeds = [server.send(TEXT, asked | {"seed": seed})[1]["choices"] for seed in (-5, -5, 2**63 - 1)]
    assert seeds[0] == seeds[1]


NEUTRAL = {
    "use_beam_search": False,
    "length_penalty": 1.0,
    "early_stopping": False,
    "spaces_between_special_tokens": True,
    "priority": 0,
}
OF_CHAT = {"echo": False, "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False}


def test_what_clients_of_vllm_write_without_meaning_anything_changes_nothing(server: Served) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": PROMPTS[0]}], "temperature": 0, "max_tokens": 8}
    text = {"model": NAME, "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8}
    for path, asked, neutral in ((CHAT, chat, OF_CHAT), (TEXT, text, {"add_special_tokens": True})):
        plain = server.send(path, asked)[1]["choices"]
        assert server.send(path, asked | NEUTRAL | neutral)[1]["choices"] == plain
    response = {"model": NAME, "input": PROMPTS[0], "max_output_tokens": 8}
    assert server.send(RESPONSES, response | {"max_tool_calls": 3})[0] == 200


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("path", "change", "param", "says"),
    [
        (CHAT, {"top_pp": 1}, "top_pp", "did you mean 'top_p'?"),
        (CHAT, {"maxTokens": 1}, "maxTokens", "did you mean 'max_tokens'?"),
        (CHAT, {"top-p": 1}, "top-p", "did you mean 'top_p'?"),
        (CHAT, {"mirostat": 2}, "mirostat", "set top_p or min_p"),
        (CHAT, {"max_tokens": 3, "n_predict": 4}, "n_predict", "they differ: keep one"),
        (CHAT, {"temperature": -1}, "temperature", "greater than or equal to 0"),
        (CHAT, {"use_beam_search": True}, "use_beam_search", "should be False"),
        (CHAT, {"length_penalty": 0.8}, "length_penalty", "equal to 1"),
        (CHAT, {"priority": 5}, "priority", "should be 0"),
        (CHAT, {"continue_final_message": True}, "messages", "a last message of role 'assistant'"),
        (CHAT, {"temperature": "1"}, "temperature", "got '1'"),
        (CHAT, {"n": 0}, "n", "greater than or equal to 1"),
        (CHAT, {"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
        (CHAT, {"stop_token_ids": [99999]}, "stop_token_ids", "8192 entries"),
        (CHAT, {"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        (CHAT, {"logit_bias": {"99999": 1}}, "logit_bias", "8192 entries"),
        (CHAT, {"min_tokens": 9, "max_tokens": 3}, "min_tokens", "greater than max_tokens"),
        (CHAT, {"messages": []}, "messages", "at least 1 item"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages", "has no content"),
        (CHAT, {"user": 5}, "user", "valid string"),
        (CHAT, {"metadata": {"a": 1}}, "metadata.a", "valid string"),
        (CHAT, {"store": "yes"}, "store", "valid boolean"),
        (CHAT, {"tools": [TOOL, TOOL]}, "tools", "two tools have the name"),
        (RESPONSES, {"tools": 2 * [TOOL["function"] | {"type": "function"}]}, "tools", "two tools have the name"),
        (CHAT, {"messages": [{"role": "user", "content": "a \ud800 b"}]}, "messages", "not valid Unicode"),
        (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, "messages", "the role 'robot'"),
        (CHAT, {"response_format": {"type": "xml"}}, "response_format", "'json_object', 'json_schema'"),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format",
            "no schema",
        ),
        (CHAT, {"structured_outputs": {"regex": "a("}}, "structured_outputs", "regex"),
        (CHAT, {"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "structured", "uniqueItems"),
        (
            RESPONSES,
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"uniqueItems": True}}}},
            "text.format",
            "uniqueItems",
        ),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        (TEXT, {"structured_outputs": {"regx": "a"}}, "structured_outputs.regx", "did you mean 'regex'?"),
        (CHAT, {"tool_choice": "required"}, "tools", "both or neither"),
        (CHAT, {"tools": [TOOL], "tool_choice": NAMED}, "tool_choice", "not among the tools: f"),
        (CHAT, {"tools": [TOOL], "tool_choice": "f"}, "tool_choice", "'required'"),
        (
            CHAT,
            {"tools": [UNSUPPORTED], "tool_choice": "required"},
            "tools",
            "the tool 'f': the schema's 'uniqueItems'",
        ),
        (
            CHAT,
            {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "struct",
            "keep one",
        ),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "no such variable"),
        (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "reserved for the server"),
        (
            RESPONSES,
            {"tools": [TOOL["function"] | {"type": "function"}], "tool_choice": {"type": "function", "name": "g"}},
            "tool_choice",
            "not among",
        ),
        (CHAT, {"speculation": {"num_speculative_tokens": -1}}, "speculation.num_speculative_tokens", "greater"),
        (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "are the same limit, and differ: keep one"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0.function.name", "at least 1"),
        (RESPONSES, {"tools": [{"type": "function", "name": ""}]}, "tools.0.name", "at least 1"),
        (TEXT, {"prompt": ""}, "prompt", "empty"),
        (TEXT, {"prompt": []}, "prompt", "at least 1 item"),
        (TEXT, {"prompt": [[1], []]}, "prompt", "empty"),
        (TEXT, {"prompt": [99999]}, "prompt", "8192 entries"),
        (TEXT, {"prompt": "word " * 5000}, "prompt", "this model's maximum context length is 4096 tokens"),
        (TEXT, {"best_of": 3}, "best_of", "not supported"),
        (TEXT, {"prompt": ["a"] * 65, "n": 2}, "prompt", "more completions than one request may ask for, 128"),
        (TEXT, {"suffix": "x"}, "suffix", "no tokens for infill"),
        (TEXT, {"max_tokens": 0}, "max_tokens", "echo=true"),
        (RESPONSES, {"metadata": {"a": 1}}, "metadata.a", "valid string"),
        (RESPONSES, {"user": 1}, "user", "valid string"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "reserved for the server"),
        (CHAT, {"chat_template_kwargs": {"e": 1}}, "chat_template_kwargs", "no such variable"),
        (CHAT, {"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens", "must be able to end"),
        (CHAT, {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "must be able to end"),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id", "earlier items in 'input'"),
    ],
)
def test_a_mistake_is_named(server: Served, path: str, change: dict[str, Any], param: str, says: str) -> None:
    sound = {CHAT: said("Hi"), TEXT: continued("Hi"), RESPONSES: {"model": NAME, "input": "Hi"}}[path]
    status, body, _ = server.send(path, sound | change)
    assert status == 400, body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "invalid_request_error"
    assert says in body["error"]["message"]
    assert str(body["error"]["param"]).startswith(param)
    idle(server)


@pytest.mark.parametrize(
    ("status", "path", "body", "method"),
    [
        (404, CHAT, said("Hi") | {"model": "gpt-4"}, "POST"),
        (404, "/v1/models/gpt-4", None, "GET"),
        (404, "/v1/embeddings", {}, "POST"),
        (405, CHAT, None, "GET"),
        (400, CHAT, "{not json", "POST"),
        (400, CHAT, b"\xff\xfe", "POST"),
        (400, CHAT, "[" * 5000, "POST"),
        (
            400,
            CHAT,
            '{"model": "zoo:base", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
            "POST",
        ),
        (413, CHAT, said("a" * 200_000), "POST"),
    ],
)
def test_errors_have_one_form(server: Served, status: int, path: str, body: Any, method: str) -> None:
    found, answer, _ = server.send(path, body, method=method)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}


def test_a_body_that_does_not_say_how_long_it_is_is_bounded_too(server: Served) -> None:
    pieces = iter([b" " * 50_000] * 3)
    with closing(server.connect()) as connection:
        connection.request("POST", CHAT, pieces, {"content-type": "application/json"}, encode_chunked=True)
        with connection.getresponse() as response:
            assert response.status == 413


def test_a_full_queue_is_429_with_a_time_to_come_back(server: Served) -> None:
    with ExitStack() as streams:
        for _ in range(3):
            begun = server.begun(CHAT, said(PROMPTS[0], stream=True, n=4, **ENDLESS))
            assert streams.enter_context(begun).status == 200
        status, body, response = server.send(TEXT, continued("Hi"))
        assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        assert 1 <= int(response.headers["retry-after"]) <= 60
    idle(server)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(server: Served, stream: bool) -> None:
    before = server.loop.totals.ended.get("cancelled", 0)
    body = continued(PROMPTS[0], stream=stream, max_tokens=3500, ignore_eos=True)
    with closing(server.connect()) as connection:
        connection.request("POST", TEXT, json.dumps(body), {"content-type": "application/json"})
        if stream:
            with connection.getresponse() as response:
                response.read(10)
        while not server.loop.num_running:
            time.sleep(0.001)
    idle(server)
    assert server.loop.totals.ended["cancelled"] == before + 1
    assert server.send(TEXT, continued("Hi", max_tokens=2))[0] == 200


def test_a_key_is_required_where_the_model_is_read() -> None:
    with served(with_config({"method": "none"}), api_key="secret") as running:
        for headers in (
            {},
            {"Authorization": "Bearer other"},
            {"Authorization": "secret"},
            {"Authorization": "Basic secret"},
        ):
            status, body, response = running.send(TEXT, continued("Hi"), headers=headers)
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
        assert running.get("/v1/models")[0] == 401
        for good in ("Bearer secret", "bearer  secret"):  # the kind is written as one likes, says HTTP
            asked = continued("Hi", max_tokens=2)
            assert running.send(TEXT, asked, headers={"Authorization": good})[0] == 200
        assert running.get("/health")[0] == 200
        assert running.get("/metrics")[0] == 200
        described = running.get("/openapi.json")[1]
        (scheme,) = described["components"]["securitySchemes"].values()
        assert (scheme["type"], scheme["scheme"]) == ("http", "bearer")
        asks = {path for path, methods in described["paths"].items() for each in methods.values() if "security" in each}
        assert asks == {*described["paths"]} - {"/health", "/metrics", "/version"}


@pytest.mark.parametrize("key", ["secret", "a", "sécret"])
def test_no_other_key_is_accepted(key: str) -> None:
    """Neither a part of the key, nor more than it, nor another spelling of the path."""
    near = {key[:-1], key[1:], key[:1], key + key, key + "x", "x" + key, key.swapcase(), f"{key} {key}", ""}
    with served(with_config({"method": "none"}), api_key=key) as running:

        def status(path: str, authorization: str | None, method: str = "GET") -> int:
            with closing(running.connect()) as connection:
                connection.putrequest(method, path)
                if authorization is not None:
                    connection.putheader("Authorization", authorization.encode())
                connection.endheaders()
                return connection.getresponse().status

        for wrong in near - {key}:
            assert status("/v1/models", f"Bearer {wrong}") == 401, wrong
        for form in (f"Bearer{key}", f"Token {key}", f'Bearer "{key}"', f"Bearer={key}", key, None):
            assert status("/v1/models", form) == 401, form
            for path in ("/v1", "/v1/", "/v1/nothing", f"/v1/models/{NAME}", "/%76%31/models", "/v1/models?x=/health"):
                assert status(path, form) == 401, path
            for path in ("//v1/models", "/./v1/models", "/x/../v1/models", "/V1/models"):
                assert status(path, form) in (401, 404), path
            for method in ("HEAD", "POST", "OPTIONS", "DELETE"):
                assert status("/v1/models", form, method) == 401, method
        assert status("/v1/models", f"Bearer {key}") == 200


def test_a_request_that_fails_in_the_engine(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.service.llm.engine._decider, "_fill_in", _fail)
    status, body, _ = server.send(TEXT, continued("Hi"))
    assert (status, body["error"]["type"], body["error"]["message"]) == (500, "server_error", "planted")
    events = server.events(TEXT, continued("Hi", stream=True))
    assert events[-1]["error"]["message"] == "planted"


def _fail(*_: Any) -> None:
    raise RequestError("planted")


def test_the_cause_of_an_end_is_not_parsed_from_its_message(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RequestError("a prompt longer than planted has died while shutting down")

    with monkeypatch.context() as planted:
        planted.setattr(server.service.llm.engine._decider, "_fill_in", fail)
        assert server.send(TEXT, continued("Hi"))[0] == 500
    with served(with_config({"method": "none"}), max_seconds=0.05) as running:
        status, body, _ = running.send(TEXT, continued("Hi", max_tokens=3500, ignore_eos=True))
        error = body["error"]
        assert (status, error["message"]) == (503, "the request took longer than 0.05 seconds")
        assert error["code"] == "unavailable"


# ---------------------------------------------------------------------- operation


def test_health_models_version_and_numbers(server: Served) -> None:
    assert server.get("/health")[:2] == (200, {"status": "ok"})
    models = server.get("/v1/models")[1]["data"]
    assert [each["id"] for each in models] == [NAME]
    assert server.get(f"/v1/models/{NAME}")[1] == models[0]
    assert set(server.get("/version")[1]) == {"version"}
    server.send(TEXT, continued("a b c d a b c d a b c", max_tokens=12))
    text = server.get("/metrics")[1]
    totals = server.loop.totals
    for line in (
        f'vllm:generation_tokens_total{{model_name="{NAME}"}} {float(totals.tokens)}',
        f'vllm:spec_decode_num_accepted_tokens_total{{model_name="{NAME}"}} {float(totals.accepted_tokens)}',
        f'vllm:num_requests_running{{model_name="{NAME}"}} 0.0',
        f'foretoken:tokens_per_step{{model_name="{NAME}"}} {totals.tokens / totals.steps}',
    ):
        assert line in text.split("\n")
    seconds = {
        match[1]: float(match[2])
        for match in re.finditer(r"^vllm:(\w+)_seconds_sum\{.*\} (\S+)$", text, flags=re.MULTILINE)
    }
    queued, prefill, decode = (seconds[f"request_{each}_time"] for each in ("queue", "prefill", "decode"))
    assert queued + prefill == pytest.approx(seconds["time_to_first_token"])
    assert prefill + decode == pytest.approx(seconds["request_inference_time"])
    assert queued + prefill + decode == pytest.approx(seconds["e2e_request_latency"])
    assert seconds["request_time_per_output_token"] == seconds["inter_token_latency"]


def test_draining_answers_503() -> None:
    asked = continued("Hi", stream=True, max_tokens=60, ignore_eos=True)
    with served(with_config({"method": "none"})) as running, running.begun(TEXT, asked) as response:
        running.loop.drain()
        status, body, late = running.send(TEXT, continued("Hi"))
        assert (status, body["error"]["code"]) == (503, "unavailable")
        assert late.headers["retry-after"]
        assert running.get("/health")[0] == 503
        assert b"[DONE]" in response.read()  # what ran has ended


def test_answers_have_the_forms_of_the_official_client(server: Served) -> None:
    """Its types, in which no required field may be missing: the client itself takes anything."""
    chatted = said(PROMPTS[0], max_tokens=5, logprobs=True, top_logprobs=1, n=2)
    ChatCompletion.model_validate(server.send(CHAT, chatted)[1])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, end = server.events(CHAT, chatted | options)
    assert end == "[DONE]"
    assert len(chunks) > 2
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    OpenAICompletion.model_validate(server.send(TEXT, continued(PROMPTS[0], max_tokens=5, logprobs=1))[1])
    function = {**TOOL["function"], "type": "function"}
    asked = {"model": NAME, "input": PROMPTS[0], "temperature": 0, "max_output_tokens": 40, "user": "me"}
    called = {"tools": [function], "tool_choice": {"type": "function", "name": "f"}}
    for more in ({}, called):
        OpenAIResponse.model_validate(server.send(RESPONSES, asked | more)[1])
        *events, end = server.events(RESPONSES, asked | more | {"stream": True})
        assert end == "[DONE]"
        assert [events[0]["type"], events[-1]["type"]] == ["response.created", "response.completed"]
        for event in events:
            TypeAdapter(ResponseStreamEvent).validate_python(event)
