"""/tokenize and /detokenize agree with the prompts of requests, in the forms of vLLM and llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.serving import NAME, Served, served
from helpers.zoo_llms import target, with_config

TEXT = "Anna has 7 pears – naïve 東京 🍐.\n"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(with_config({"method": "suffix"}), api_key="secret") as running:
        yield running


def post(server: Served, path: str, body: Any) -> tuple[int, Any]:
    status, answer, _ = server.send(path, body, headers={"Authorization": "Bearer secret"})
    return status, answer


@pytest.mark.parametrize("root", ["", "/v1"])
def test_a_text_survives_the_round_trip(server: Served, root: str) -> None:
    status, found = post(server, f"{root}/tokenize", {"model": NAME, "prompt": TEXT, "return_token_strs": True})
    assert status == 200
    assert found["tokens"] == target().tokenizer(TEXT)["input_ids"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == target().max_length
    status, text = post(server, f"{root}/detokenize", {"tokens": found["tokens"]})
    assert (status, text["prompt"]) == (200, text["content"])
    assert text["prompt"].endswith(TEXT)


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}])
def test_messages_have_the_tokens_of_a_chat_request(server: Served, more: dict[str, Any]) -> None:
    status, found = post(server, "/tokenize", {"messages": MESSAGES, **more})
    chat = {"messages": MESSAGES, "max_tokens": 1, **more}
    assert (status, found["count"]) == (200, post(server, "/v1/chat/completions", chat)[1]["usage"]["prompt_tokens"])
    if not more:
        prompt = post(server, "/apply-template", {"messages": MESSAGES})[1]["prompt"]
        assert "How many?" in prompt
        assert post(server, "/detokenize", {"tokens": found["tokens"]})[1]["prompt"] == prompt


def test_llama_cpps_form_has_pieces(server: Served) -> None:
    plain = post(server, "/tokenize", {"content": TEXT})[1]["tokens"]
    pieces = post(server, "/tokenize", {"content": TEXT, "with_pieces": True})[1]["tokens"]
    assert [each["id"] for each in pieces] == plain
    raw = [bytes(each) if isinstance(each, list) else each.encode() for each in (piece["piece"] for piece in pieces)]
    assert b"".join(raw).decode() == TEXT
    end = target().tokenizer.eos_token
    assert len(post(server, "/tokenize", {"content": end})[1]["tokens"]) == 1
    assert len(post(server, "/tokenize", {"content": end, "parse_special": False})[1]["tokens"]) > 1


def test_the_tokenizer_describes_itself(server: Served) -> None:
    status, found, _ = server.send("/tokenizer_info", method="GET", headers={"Authorization": "Bearer secret"})
    assert (status, found["eos_token"]) == (200, target().tokenizer.eos_token)
    assert found["chat_template"] == target().tokenizer.chat_template


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/tokenize", {}, "one of prompt, messages and content"),
        ("/tokenize", {"prompt": "a", "content": "b"}, "one of prompt, messages and content"),
        ("/tokenize", {"promt": "a"}, "did you mean 'prompt'"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, "role 'assistant'"),
        ("/detokenize", {"tokens": [10**6]}, "the id 1000000"),
        ("/detokenize", {"tokens": [-1]}, "greater than or equal to 0"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "not served here"),
    ],
)
def test_a_mistake_is_named(server: Served, path: str, body: dict[str, Any], says: str) -> None:
    status, answer = post(server, path, body)
    assert status in (400, 404)
    assert says in answer["error"]["message"]


def test_the_paths_need_the_key(server: Served) -> None:
    for path in ("/tokenize", "/detokenize", "/apply-template"):
        assert server.send(path, {"prompt": "a"})[0] == 401
