"""Models that think before they answer, after the server: two fields, two kinds of items, and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from foretoken.cli.run import chat as cli_chat
from foretoken.options.sampling import SamplingParams
from foretoken.serve.conversation import Conversation
from helpers.serving import NAME, Served, served
from helpers.templates import MAY_THINK, templated
from helpers.zoo_llms import with_config

CHAT = "/v1/chat/completions"
WRITTEN = r"<think>\nIs it one\? It is two\.\n</think>\n\nTwo\."
THOUGHT, ANSWER = "Is it one? It is two.", "Two."
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with (
        pytest.MonkeyPatch.context() as patch,
        served(with_config({"method": "suffix"}, target=templated(MAY_THINK))) as running,
    ):
        patch.setattr(Conversation, "completed", lambda self, params: params)  # the text is prescribed as a whole
        yield running


def asked(**more: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HI, "temperature": 0, "structured_outputs": {"regex": WRITTEN}, **more}


def test_reasoning_has_fields_of_its_own(server: Served) -> None:
    body = server.send(CHAT, asked())[1]
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (THOUGHT, THOUGHT, ANSWER)
    usage = body["usage"]
    assert 4 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_a_stream_says_it_in_pieces(server: Served) -> None:
    events = server.events(CHAT, asked(stream=True, stream_options={"include_usage": True}))
    deltas = [each["choices"][0]["delta"] for each in events[:-2]]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(each.get(name, "") for each in deltas) == THOUGHT
    assert "".join(each.get("content", "") for each in deltas) == ANSWER
    whole = server.send(CHAT, asked())[1]["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert events[-2]["usage"]["completion_tokens_details"]["reasoning_tokens"] == whole


def test_a_response_has_an_item_of_it(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    prescribed = SamplingParams(structured_outputs={"regex": WRITTEN}, max_tokens=100)
    monkeypatch.setattr(Conversation, "completed", lambda self, params: prescribed)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=60) as client:
        whole = client.responses.create(model=NAME, input="Hi")
        with client.responses.stream(model=NAME, input="Hi") as stream:
            events, final = list(stream), stream.get_final_response()
        for found in (whole, final):
            assert [each.type for each in found.output] == ["reasoning", "message"]
            assert found.output[0].content[0].text == THOUGHT
            assert found.output_text == ANSWER
        pieces = [each.delta for each in events if each.type == "response.reasoning_text.delta"]
        assert "".join(pieces) == THOUGHT
        again = client.responses.create(model=NAME, input=[*HI, *whole.output, *HI])  # all of it comes back
        assert again.output_text == ANSWER


def test_options_reach_the_template(server: Served) -> None:
    def prompt(**more: Any) -> int:
        return int(server.send(CHAT, asked(max_tokens=1, **more))[1]["usage"]["prompt_tokens"])

    assert prompt(chat_template_kwargs={"enable_thinking": False}) > prompt()
    assert prompt(chat_template_kwargs={"enable_thinking": True}) == prompt()
    assert prompt(chat_template_kwargs={"other": None}) == prompt()
    turns = [*HI, {"role": "assistant", "content": ANSWER}, *HI]
    known = [*HI, {"role": "assistant", "content": ANSWER, "reasoning_content": THOUGHT}, *HI]
    assert prompt(messages=known) > prompt(messages=turns)


def test_reasoning_stays_in_the_content_where_the_service_does_not_separate_it(server: Served) -> None:
    service = server.service
    try:
        service.reasoning = False
        message = server.send(CHAT, asked())[1]["choices"][0]["message"]
    finally:
        service.reasoning = True
    assert message["content"] == f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    assert "reasoning" not in message


def test_in_the_terminal(server: Served, capsys: pytest.CaptureFixture[str]) -> None:
    params = SamplingParams(structured_outputs={"regex": WRITTEN}, max_tokens=100)
    answer = cli_chat._answer(server.service.llm, HI, params, {})
    assert answer == ANSWER
    out, err = capsys.readouterr()
    assert out == ANSWER + "\n"
    assert err.startswith(THOUGHT + "\n")
