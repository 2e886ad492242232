"""What generate and bench write when requests fail, are cut short, or finish out of order: with a scripted engine."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

import foretoken
from foretoken.cli.main import main
from foretoken.core.errors import InputError
from foretoken.core.metrics import Metrics
from foretoken.engine.output import Chunk, Completion, RequestOutput

FIELDS = {
    "prompt", "text", "token_ids", "finish_reason", "seconds", "num_tokens", "tokens_per_second", "num_steps",
    "tokens_per_step", "num_draft_tokens", "num_accepted_tokens", "acceptance_by_position", "time", "promise",
    "distortion", "kl",
}  # fmt: skip


def completion(text, reason="stop", error=None):
    metrics = Metrics(num_tokens=len(text), num_steps=1, seconds=0.1, verify_seconds=0.1)
    return Completion(text, list(range(len(text))), reason, error, metrics, None, "same text")


class Characters:
    """A tokenizer with characters as tokens."""

    def __call__(self, text):
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids, **options):
        return "".join(map(chr, ids))


class ScriptedLLM:
    """Tokens are characters; the answer to a prompt is the prompt in capitals. What goes wrong is in the prompt."""

    why_undrafted = ""
    is_chat_model = False
    target = SimpleNamespace(max_length=100, dtype="torch.float32", precision="float32", device="cpu")
    tokenizer = Characters()
    engine = SimpleNamespace(cache=SimpleNamespace(num_bytes=0))
    quiet = SimpleNamespace(explanation="", settings_key="")
    recipe = SimpleNamespace(
        method="none", drafter=quiet, plan=quiet, explanations=[], promise_for=lambda params: "same text"
    )

    def __init__(self, *args, **options):
        self.closed = False

    def with_method(self, config):
        return ScriptedLLM()

    def close(self):
        self.closed = True

    def answer(self, prompt, n):
        text = prompt if isinstance(prompt, str) else "".join(map(chr, prompt["prompt_token_ids"]))
        ids = [ord(character) for character in text]
        if "fail" in text:
            return RequestOutput(text, ids, [completion("", "error", "NaN logits")])
        return RequestOutput(text, ids, [completion(text.upper())] * n)

    def generate(self, prompts, params=None, *, lora_request=None, progress=None):
        n = params[0].n if isinstance(params, list) else params.n
        outputs = [replace(self.answer(prompt, n), place=place) for place, prompt in enumerate(prompts)]
        if progress is not None:
            for output in reversed(outputs):
                if "interrupt" in output.prompt:
                    progress(replace(output, outputs=[completion("INT", "cancelled")]))
                    raise KeyboardInterrupt
                progress(output)
        return outputs

    def stream(self, prompt, params=None, *, lora_request=None, on_prefill=None):
        output = self.answer(prompt, 1)
        for end in range(1, len(output.text) + 1):
            done = end == len(output.text) and "interrupt" not in output.prompt
            so_far = RequestOutput(
                output.prompt, output.prompt_token_ids, [completion(output.text[:end], "stop" if done else None)]
            )
            yield Chunk(output.text[end - 1], [0], so_far)
        if "interrupt" in output.prompt:
            raise KeyboardInterrupt
        if output.error:
            yield Chunk("", [], output)


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    monkeypatch.setattr(foretoken, "LLM", ScriptedLLM)


@pytest.fixture
def run(capsys):
    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture
def suite(tmp_path):
    def write(*prompts):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
        return path

    return write


def test_one_prompt_streams_text_and_one_line_of_statistics(run):
    code, out, err = run("generate", "abc")
    assert (code, out) == (0, "ABC\n")
    passing = ("loading", "checking", "packing")  # on a busy machine
    assert len([line for line in err.splitlines() if not line.startswith(passing)]) == 1
    assert "tokens per step" in err


def test_one_prompt_as_json(run):
    code, out, err = run("generate", "abc", "--json")
    (line,) = out.splitlines()
    answer = json.loads(line)
    assert code == 0
    assert set(answer) >= FIELDS
    assert set(answer["time"]) == {"draft", "verify", "other"}
    assert (answer["prompt"], answer["text"], answer["finish_reason"]) == ("abc", "ABC", "stop")
    assert err == ""


def test_interrupted_text_is_flushed_with_its_line_end(run):
    code, out, err = run("generate", "interrupt")
    assert (code, out) == (130, "INTERRUPT\n")
    assert err.splitlines()[-1] == "interrupted"


def test_an_interrupted_object_is_flushed(run):
    code, out, _ = run("generate", "interrupt", "--json")
    assert code == 130
    assert json.loads(out)["finish_reason"] == "cancelled"


def test_many_prompts_keep_their_order_though_the_last_finishes_first(run, suite):
    code, out, _ = run("generate", "--prompts", suite("a", "b", "a", "c"), "--json")
    assert code == 0
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["A", "B", "A", "C"]
    assert [json.loads(line)["id"] for line in out.splitlines()] == ["0", "1", "2", "3"]
    code, out, err = run("generate", "--prompts", suite("a", "b"))
    assert out == "=== 1/2 a\nA\n\n=== 2/2 b\nB\n\n"
    assert len(err.splitlines()) == 1


def test_many_prompts_interrupted(run, suite):
    code, out, _ = run("generate", "--prompts", suite("never", "interrupt", "b"), "--json")
    assert code == 130
    reasons = {json.loads(line)["prompt"]: json.loads(line)["finish_reason"] for line in out.splitlines()}
    assert reasons == {"interrupt": "cancelled", "b": "stop"}


def test_a_failed_request_is_reported_after_the_others(run, suite):
    code, out, err = run("generate", "--prompts", suite("a", "fail", "c"), "--json")
    assert code == 1
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["finish_reason"] for answer in answers] == ["stop", "error", "stop"]
    assert answers[1]["error"] == "NaN logits"
    assert "prompt 1: NaN logits" in err


def test_a_failed_only_prompt(run):
    code, _, err = run("generate", "fail")
    assert code == 1
    assert "error: NaN logits" in err


def test_several_completions(run):
    code, out, _ = run("generate", "ab", "--n", 2, "--json")
    assert code == 0
    assert [each["text"] for each in json.loads(out)["outputs"]] == ["AB", "AB"]
    code, out, _ = run("generate", "ab", "--n", 2)
    assert out == "--- 1 of 2\nAB\n--- 2 of 2\nAB\n\n"


def test_a_prompt_longer_than_the_context_is_refused_by_place(run, suite):
    code, out, err = run("generate", "--prompts", suite("a", "b" * 200), "--json")
    assert (code, out) == (2, "")
    assert "prompts.jsonl:2" in err
    assert "200 tokens" in err


def test_a_system_message_needs_a_chat_model(run):
    code, _, err = run("generate", "a", "--system", "s")
    assert code == 2
    assert "chat" in err


def test_bench_counts_failures_and_says_so(run, suite, tmp_path):
    out_file = tmp_path / "out.json"
    code, out, _ = run("bench", "--suite", suite("a", "fail"), "--methods", "ngram", "--repeats", 1, "--out", out_file)
    assert code == 1
    assert "failed: NaN logits" in out
    none, ngram = json.loads(out_file.read_text())["results"]
    assert none["failures"] == ngram["failures"] == 1


def test_an_internal_error_is_one_line_unless_verbose(run, monkeypatch):
    def broken(*args, **options):
        raise KeyError("surprise")

    monkeypatch.setattr(foretoken, "LLM", broken)
    code, out, err = run("generate", "a")
    assert (code, out) == (1, "")
    assert "internal: KeyError" in err
    assert "--verbose" in err


def test_a_conversation_that_does_not_fit_is_refused_under_the_name_of_its_place(tmp_path, monkeypatch, capsys):
    class Chatting(ScriptedLLM):
        is_chat_model = True

        def chat_prompt(self, messages):
            raise InputError(f"message 0 has the role '{messages[0]['role']}'")

    monkeypatch.setattr(foretoken, "LLM", Chatting)
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "usr", "content": "Hi"}]}\n')
    assert main(["generate", "--prompts", str(tmp_path / "p.jsonl")]) == 2
    assert "p.jsonl:1: message 0 has the role 'usr'" in capsys.readouterr().err
