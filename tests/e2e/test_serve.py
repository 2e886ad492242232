"""``foretoken serve`` and ``foretoken chat`` as processes, and the official client against the server."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from urllib.request import urlopen

import openai
import pytest

from foretoken import LLM, SamplingParams
from foretoken.cli.main import main
from helpers import warm

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "NO_COLOR": "1"}
FORETOKEN = [sys.executable, "-m", "foretoken"]
QUESTION = "Anna has 7 pears and gives 3 to Ben. How many pears does she have?"


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    """A server process and its address, once it listens."""
    command = [*FORETOKEN, "serve", "zoo:base", "--port", "0", "--threads", "1", "--dtype", "float32", *options]
    process = warm.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stderr is not None
    line = next((each for each in process.stderr if "serving" in each), "")  # "loading" precedes it on a busy machine
    assert line, f"it ended with {process.wait()}"
    address = line.split(" at ")[1].split(" ")[0]
    for _ in range(300):
        try:
            urlopen(f"{address}/health").close()
            return process, address
        except OSError:
            time.sleep(0.05)
    raise AssertionError("it never answered")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    process, address = start("--method", "suffix", "--api-key", "secret")
    yield address
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="secret", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected() -> str:
    llm = LLM("zoo:base", dtype="float32", threads=1, speculative_config=None)
    return llm.chat([{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=60))[0].text


def test_the_official_client_chats(client: openai.OpenAI, expected: str) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(
        model="zoo:base", messages=messages, temperature=0, max_tokens=60, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].message.content == expected
    assert answer.usage is not None
    assert answer.choices[0].logprobs is not None
    assert len(answer.choices[0].logprobs.content or ()) == answer.usage.completion_tokens
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="zoo:base",
        messages=messages,
        temperature=0,
        max_tokens=60,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": {"enabled": False}},
    ):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == expected
    assert usage is not None
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_the_official_client_completes_and_responds(client: openai.OpenAI, expected: str) -> None:
    done = client.completions.create(model="zoo:base", prompt=["One", "Two"], n=2, seed=1, max_tokens=5, logprobs=1)
    assert [each.index for each in done.choices] == [0, 1, 2, 3]
    whole = client.responses.create(model="zoo:base", input=QUESTION, temperature=0, max_output_tokens=60)
    assert whole.output_text == expected
    with client.responses.stream(model="zoo:base", input=QUESTION, temperature=0, max_output_tokens=60) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == expected
    assert [model.id for model in client.models.list()] == ["zoo:base"]
    assert client.models.retrieve("zoo:base").id == "zoo:base"


def test_the_official_client_understands_the_errors(client: openai.OpenAI, address: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        client.chat.completions.create(model="gpt-4", messages=messages)
    with pytest.raises(openai.BadRequestError, match="mirostat") as refused:
        client.chat.completions.create(model="zoo:base", messages=messages, extra_body={"mirostat": 2})
    assert refused.value.param == "mirostat"
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="other", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError, match="API key"),
    ):
        stranger.models.list()


def test_many_clients_of_which_some_leave(client: openai.OpenAI, expected: str) -> None:
    """A small soak: 60 requests from 8 threads, one in five cancelled; every answer is the right one."""
    wrong: list[str] = []

    def work(begin: int) -> None:
        for number in range(begin, 60, 8):
            messages = [{"role": "user", "content": QUESTION}]
            stream = client.chat.completions.create(
                model="zoo:base", messages=messages, temperature=0, max_tokens=60, stream=True
            )
            text = ""
            for place, chunk in enumerate(stream):
                text += chunk.choices[0].delta.content or ""
                if number % 5 == 0 and place == 3:
                    stream.close()
                    break
            if not (expected.startswith(text) if number % 5 == 0 else text == expected):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(begin,)) for begin in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not wrong
    base = str(client.base_url).removesuffix("/v1/")
    for _ in range(100):
        numbers = urlopen(f"{base}/metrics").read().decode()
        if 'vllm:num_requests_running{model_name="zoo:base"} 0.0' in numbers:
            return
        time.sleep(0.05)
    raise AssertionError("requests are left running")


def test_sigterm_lets_running_requests_end_and_refuses_new_ones() -> None:
    process, address = start("--method", "none", "--served-model-name", "tiny", "--drain-seconds", "60")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0, timeout=60) as client:
        stream = client.completions.create(
            model="tiny", prompt="Once", max_tokens=600, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        refused = False
        while not refused:
            assert time.monotonic() < deadline
            try:
                client.completions.create(model="tiny", prompt="Once", max_tokens=1)
            except openai.InternalServerError as error:
                refused = error.status_code == 503
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
    assert process.wait(timeout=30) == 0
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.parametrize(("drain", "signals"), [("0.2", 1), ("60", 2)])
def test_requests_ended_by_force_get_an_error(drain: str, signals: int) -> None:
    """By time or by a second signal: as an error in the usual form, not as a connection that breaks."""
    process, address = start("--method", "none", "--drain-seconds", drain)
    endless = {"model": "zoo:base", "prompt": "Once", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
    refused: list[openai.APIStatusError] = []
    with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0, timeout=60) as client:

        def whole() -> None:
            with pytest.raises(openai.InternalServerError) as found:
                client.completions.create(**endless)
            refused.append(found.value)

        beside = threading.Thread(target=whole)
        beside.start()
        stream = iter(client.completions.create(**endless, stream=True))
        next(stream)
        while 'running{model_name="zoo:base"} 2.0' not in urlopen(f"{address}/metrics").read().decode():
            time.sleep(0.01)
        for _ in range(signals):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        beside.join(timeout=30)
    assert [each.status_code for each in refused] == [503]
    assert "shutting down" in refused[0].message
    assert process.wait(timeout=30) == 0
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["zoo:nothing"], "nothing"),
        (["--method", "suffixx"], "did you mean 'suffix'?"),
        (["--host", "203.0.113.1", "--port", "0"], "--host 203.0.113.1"),
        (["--api-key", " "], "--api-key is empty"),
        (["--max-queue", "-1"], "--max-queue"),
        (["--port", "70000"], "--port"),
        (["zoo:draft", "--models", "models.toml"], "MODEL does not go with --models"),
        (["--lora", "a=b", "--models", "models.toml"], "--lora does not go with --models"),
        (["--models", "models.toml"], "--models models.toml: [Errno 2]"),
    ],
)
def test_mistakes_are_reported_in_a_line(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *options]) == 2
    assert says in capsys.readouterr().err


def test_a_taken_port_is_reported_before_the_model_is_loaded(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    port = address.rsplit(":", 1)[1]
    assert main(["serve", "--port", port]) == 2
    assert f"--port {port}: Address already in use" in capsys.readouterr().err


def test_a_conversation_in_the_terminal(
    expected: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["chat", "--dtype", "float32", "--threads", "1", "--max-tokens", "60"]
    said = [QUESTION, "/new", "", "/what", "word " * 5000, QUESTION, "/quit", QUESTION]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(said) + "\n"))
    code = main(options)
    out, err = capsys.readouterr()
    assert code == 1, err  # one message was too long
    assert out == f"{expected}\n" * 2
    assert err.count("tokens per step") == 2
    assert "/new starts a new conversation" in err
    assert "maximum context length" in err


def test_the_description_of_the_api_is_sound(address: str) -> None:
    described = json.loads(urlopen(f"{address}/openapi.json").read())
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/models"} <= set(described["paths"])
    for methods in described["paths"].values():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert "400" in operation["responses"]
