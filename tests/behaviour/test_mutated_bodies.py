"""Bodies with mistakes of every kind, on every path that takes one: each gets an answer or a reason, never a 500."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from foretoken_lab.reference import BODIES
from helpers.serving import NAME, Served, served
from helpers.zoo_llms import assert_idle, greedy, with_config

BODIES_OF_A_SEED, SEEDS = 50, 40  # 2,000 with --all-variants
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FUNCTION = {"name": "add", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
TALK = [
    {"role": "user", "content": "How old?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": {"name": "add", "arguments": "{}"}}]},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "7"}]},
]
OLLAMA_CALL = {"function": {"name": "add", "arguments": {"age": 3}}}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "7"},
]
TURNS = [
    {"role": "user", "content": "How old?"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "add", "input": {"age": 3}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "7"}]},
]
CLIENT_TOOLS = [{"name": "add", "input_schema": SCHEMA}]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["."], "n": 1, "stream": False}
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": TALK, "max_tokens": 2, "tools": TOOLS, "logprobs": True, **SAMPLING}),
    (
        "/v1/chat/completions",
        {
            "messages": TALK[:1],
            "max_completion_tokens": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
            "speculation": {"num_speculative_tokens": 2, "show": True, "metrics": "summary"},
            "prediction": {"type": "content", "content": "Three."},
        },
    ),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "logprobs": 1, **SAMPLING}),
    ("/v1/completions", {"prompt": [[5, 6, 7]], "max_tokens": 2, "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/responses", {"input": ITEMS, "max_output_tokens": 2, "instructions": "Be brief.", "stream": True}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 2, "tools": [{"type": "function", **FUNCTION}]}),
    (
        "/v1/messages",
        {"messages": TURNS, "max_tokens": 2, "system": "Be brief.", "tools": CLIENT_TOOLS, "stream": True},
    ),
    ("/v1/messages/count_tokens", {"messages": TURNS, "tools": CLIENT_TOOLS}),
    ("/api/chat", {"messages": TALK[:1], "options": {"num_predict": 2, "top_k": 3}, "format": "json", "think": False}),
    ("/api/chat", {"messages": [{"role": "assistant", "tool_calls": [OLLAMA_CALL]}, TALK[0]], "tools": TOOLS}),
    ("/api/generate", {"prompt": "a", "options": {"num_predict": 2}, "raw": True, "keep_alive": "5m", "stream": False}),
    ("/infill", {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "c", "text": "d"}]}),
    ("/api/show", {}),
    ("/models/load", {}),
    ("/tokenize", {"messages": TALK[:1], "tools": TOOLS, "add_generation_prompt": True}),
    ("/v1/tokenize", {"content": "a", "with_pieces": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/apply-template", {"messages": TALK[:1]}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
    ("/v1/unload_lora_adapter", {"lora_name": "a"}),
]
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 2**31, -(2**63), 10**30, 0.5, -0.0, 1e-320, 1e308),
    *("", "a", " ", "\x00", "é🙂", "﷽" * 40, "a" * 3000, "auto", "none", "required", "-5m", "<tool_call>{", "../.."),
    *([], [None], [[]], [1, "a"], ["a"] * 300, {}, {"": ""}, {"type": "text"}, {"type": "object", "$ref": "#"}),
    *({"type": "json_schema"}, {"a": {"b": [{"c": None}]}}, {"regex": "("}, {"grammar": "start: a"}, {"5": 1}),
)
NAMES = sorted({name for _, body in BODIES.values() for name in body.names()})


def places(body: Any) -> list[tuple[Any, Any]]:
    """All pairs of a container and a key or an index in it."""
    inner = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    return [place for key, value in inner for place in ((body, key), *places(value))]


def mutate(body: dict[str, Any], draw: random.Random) -> None:
    """Change one thing."""
    if not body:
        body["model"] = NAME
    container, key = draw.choice(places(body))
    kind = draw.randrange(6)
    if kind == 0:
        container[key] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 1:
        body[draw.choice(NAMES)] = copy.deepcopy(draw.choice(VALUES))
    elif kind == 2:
        del container[key]
    elif kind == 3 and isinstance(container, dict):
        container[f"{key}{draw.choice('s_X')}"] = container.pop(key)
    elif kind == 4:
        container[key] = [container[key]]
    elif isinstance(container, dict):
        container[draw.choice(NAMES)] = container[key]


def damaged(raw: bytes, draw: random.Random) -> bytes:
    """Change the text of some bodies."""
    place = draw.randrange(len(raw))
    kind = draw.randrange(40)
    if kind == 0:
        return raw[:place]
    if kind == 1:
        return raw[:place] + bytes([draw.randrange(256)]) + raw[place + 1 :]
    if kind == 2:
        return raw[:-1] + b', "a": ' + draw.choice([b"NaN", b'"\\ud800"', b"1e999", b"[" * 200 + b"]" * 200]) + b"}"
    return raw


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    llm = with_config({"method": "suffix"})
    with served(llm, max_seconds=2, adapters_change=True) as running:
        yield running
        assert_idle(llm)


@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.full_product) for each in range(1, SEEDS))])
def test_every_body_gets_an_answer_or_a_reason(server: Served, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(BODIES_OF_A_SEED):
        path, whole = WHOLE[(number + seed) % len(WHOLE)]
        body = {"model": NAME, **copy.deepcopy(whole)}
        for _ in range(draw.randint(1, 3)):
            mutate(body, draw)
        raw = damaged(json.dumps(body).encode(), draw)
        status, answer, response = server.send(path, raw)
        said = (path, raw[:2000], answer)
        assert status in (200, 400, 404, 503), said
        if status == 200:
            assert "internal: " not in str(answer), said  # in a stream
            continue
        error = answer["error"] if path.startswith("/api/") else answer["error"]["message"]
        assert error, said
        assert status != 503 or "longer than" in error, said
        assert response.headers["content-type"] == "application/json"
    # the server is as before
    prompt = "Once upon a time"
    asked = {"model": NAME, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    status, answer, _ = server.send("/v1/completions", asked)
    assert status == 200
    tokens = greedy(prompt, 8)
    assert server.send("/detokenize", {"tokens": tokens})[1]["prompt"] == answer["choices"][0]["text"]
