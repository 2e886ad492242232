"""Ollama's API: its own client, and bodies as its clients send them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken.options.sampling import SamplingParams
from helpers.serving import NAME, Served, served
from helpers.zoo_llms import PROMPTS, base, with_config

QUESTION = {"role": "user", "content": PROMPTS[0]}
OPTIONS = {"temperature": 0, "num_predict": 24}
SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(with_config({"method": "suffix"})) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[Any]:
    with pytest.importorskip("ollama").Client(server.url) as client:
        yield client


def expected(limit: int = 24) -> str:
    return base().chat([QUESTION], SamplingParams(max_tokens=limit))[0].text


def lines(server: Served, path: str, body: Any) -> list[dict[str, Any]]:
    with server.begun(path, body) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.read().splitlines()]


def test_a_chat_is_the_librarys_text(server: Served) -> None:
    body = {"model": f"{NAME}:latest", "messages": [QUESTION], "options": OPTIONS}
    *pieces, last = lines(server, "/api/chat", body)
    assert "".join(each["message"]["content"] for each in pieces) == expected()
    assert all(each["done"] is False for each in pieces)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 24)
    status, whole, _ = server.send("/api/chat", body | {"stream": False})
    assert status == 200
    assert whole["message"] == {"role": "assistant", "content": expected()}
    assert (whole["done"], whole["prompt_eval_count"]) == (True, last["prompt_eval_count"])
    assert whole["total_duration"] >= whole["eval_duration"] > 0


def test_a_prompt_is_a_conversation_or_raw_text(server: Served) -> None:
    body = {"model": NAME, "prompt": PROMPTS[0], "options": OPTIONS, "stream": False}
    assert server.send("/api/generate", body)[1]["response"] == expected()
    raw = server.send("/api/generate", body | {"raw": True})[1]
    assert raw["response"] == base().generate(PROMPTS[0], SamplingParams(max_tokens=24))[0].text
    pieces = lines(server, "/api/generate", body | {"raw": True, "stream": True})
    assert "".join(each["response"] for each in pieces) == raw["response"]
    assert server.send("/api/generate", body | {"system": "Be brief."})[1]["response"] != ""


def test_formats_and_tools(server: Served) -> None:
    body = {"model": NAME, "messages": [QUESTION], "options": OPTIONS | {"num_predict": 60}, "stream": False}
    assert set(json.loads(server.send("/api/chat", body | {"format": SCHEMA})[1]["message"]["content"])) == {"age"}
    prompted = {"model": NAME, "prompt": PROMPTS[0], "raw": True, "options": body["options"], "stream": False}
    assert set(json.loads(server.send("/api/generate", prompted | {"format": SCHEMA})[1]["response"])) == {"age"}
    call = {"function": {"name": "add", "arguments": {"age": 3}}}
    turns = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_name": "add", "content": "7"})
    status, answer, _ = server.send("/api/chat", body | {"messages": turns, "tools": [TOOL]})
    assert (status, answer["done"]) == (200, True)


def test_a_call_is_a_mapping(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model calls no tool by itself, so a forced call stands for its answer."""
    from foretoken.serve import ollama

    plain = ollama._of_conversation
    monkeypatch.setattr(ollama, "_of_conversation", lambda body: plain(body) | {"tool_choice": "required"})
    body = {"model": NAME, "messages": [QUESTION], "tools": [TOOL], "options": OPTIONS | {"num_predict": 60}}
    for answer in (lines(server, "/api/chat", body)[-2], server.send("/api/chat", body | {"stream": False})[1]):
        (call, *_) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert isinstance(call["function"]["arguments"], dict)


@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        ({"options": {**OPTIONS, "num_ctx": 4096, "num_gpu": 1}}, "options.num_ctx,options.num_gpu"),
        ({"options": {**OPTIONS, "n": 2, "best_of": 3}}, "options.n,options.best_of"),
        ({"think": "high"}, "think"),
        ({"think": False}, None),
        ({"template": "x"}, "template"),
        ({"keep_alive": "1h30m", "truncate": True}, "truncate"),
        ({"options": {"num_predict": -1, "stop": ["."], "seed": 1, "top_k": 5, "repeat_penalty": 1.1}}, None),
        ({"options": {"num_predict": 4, "draft_num_predict": 2, "mirostat": 0}, "logprobs": True}, None),
    ],
)
def test_fields_without_an_effect_are_named(server: Served, more: dict[str, Any], ignored: str | None) -> None:
    body = {"model": NAME, "messages": [QUESTION], "options": OPTIONS, "stream": False, **more}
    status, answer, response = server.send("/api/chat", body)
    assert status == 200, answer
    assert response.headers["x-foretoken-ignored"] == ignored


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/api/chat", {"model": "nothing"}, 404, "the model 'nothing' is not served here"),
        ("/api/chat", {"messages": [QUESTION], "options": {"temperature": -1}}, 400, "temperature"),
        ("/api/chat", {"messages": [QUESTION], "options": {"temprature": 1}}, 400, "did you mean 'temperature'?"),
        ("/api/chat", {"messages": [QUESTION], "options": {"mirostat": 2}}, 400, "mirostat"),
        ("/api/chat", {"messages": [{**QUESTION, "images": ["aGk="]}]}, 400, "images"),
        ("/api/chat", {"messages": [QUESTION], "keep_alive": "soon"}, 400, "keep_alive"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "no tokens for infill"),
        ("/api/generate", {"prompt": "a", "format": {"not": {}}}, 400, "format"),
        ("/api/pull", {"model": "a"}, 501, "--models"),
        ("/api/nothing", {}, 404, "there is no /api/nothing"),
    ],
)
def test_errors_are_texts(server: Served, path: str, body: Any, status: int, says: str) -> None:
    found, answer, _ = server.send(path, {"model": NAME, **body})
    assert (found, set(answer)) == (status, {"error"})
    assert says in answer["error"]


def test_models_their_properties_and_their_time_in_memory(server: Served) -> None:
    assert [each["name"] for each in server.get("/api/tags")[1]["models"]] == [NAME]
    shown = server.send("/api/show", {"model": NAME})[1]
    assert shown["capabilities"] == ["completion", "tools"]
    assert server.get("/api/version")[1] == server.get("/version")[1]
    assert server.send("/api/generate", {"model": NAME})[1]["done_reason"] == "load"
    assert len(server.get("/api/ps")[1]["models"]) == 1


def test_keep_alive_takes_a_model_out_of_memory() -> None:
    with served(with_config({"method": "suffix"})) as running:
        body = {"model": NAME, "prompt": "a", "options": {"num_predict": 1}, "keep_alive": 0, "stream": False}
        assert running.send("/api/generate", body)[0] == 200
        end = time.monotonic() + 30
        while running.get("/api/ps")[1]["models"] and time.monotonic() < end:
            time.sleep(0.01)
        assert running.get("/api/ps")[1]["models"] == []
        assert running.send("/api/generate", {"model": NAME, "keep_alive": 0})[1]["done_reason"] == "unload"


def test_its_client(client: Any, server: Served) -> None:
    answer = client.chat(NAME, [QUESTION], options=OPTIONS)
    assert answer.message.content == expected()
    pieces = list(client.chat(NAME, [QUESTION], options=OPTIONS, stream=True))
    assert "".join(each.message.content for each in pieces) == expected()
    assert pieces[-1].done_reason == "length"
    assert client.generate(NAME, PROMPTS[0], options=OPTIONS).response == expected()
    formed = client.chat(NAME, [QUESTION], format=SCHEMA, options=OPTIONS | {"num_predict": 60}, think=False)
    assert set(json.loads(formed.message.content)) == {"age"}

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    assert client.chat(NAME, [QUESTION], tools=[add], options=OPTIONS, keep_alive="5m").done
    assert [each.model for each in client.list().models] == [NAME]
    assert client.show(NAME).capabilities == ["completion", "tools"]
    assert [each.name for each in client.ps().models] == [NAME]
    with pytest.raises(Exception, match="not served here"):
        client.chat("gpt-4", [QUESTION])
