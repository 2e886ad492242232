"""Evaluation on the bundled draft model: lossless methods answer like plain decoding, and the figures add up."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import zoo
from foretoken.core.errors import InputError
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken_lab.tasks.catalog import Setting, find
from foretoken_lab.tasks.evaluate import evaluate, negative_log_likelihood
from foretoken_lab.tasks.example import Example

LOSSLESS = ["ngram", "suffix"]


@cache
def llm():
    return LLM("zoo:draft", dtype="float32", device="cpu", seed=0, speculative_config=None)


@cache
def report(method, task_name="arithmetic"):
    task = find(task_name)
    engine = llm().with_method(None if method == "none" else {"method": method, "num_speculative_tokens": 8})
    return evaluate(engine, task, task.examples(6, Setting()), SamplingParams(max_tokens=48))


@pytest.fixture(scope="module", autouse=True)
def _free():
    yield
    report.cache_clear()
    llm.cache_clear()


@pytest.mark.parametrize("method", LOSSLESS)
def test_lossless_methods_give_equal_outputs_and_equal_figures(method):
    plain, other = report("none"), report(method)
    assert [answer.token_ids for answer in other.answers] == [answer.token_ids for answer in plain.answers]
    assert (other.accuracy, other.interval, other.nll) == (plain.accuracy, plain.interval, pytest.approx(plain.nll))
    assert (other.distortion, other.promise) == (0.0, "same text")
    assert plain.tokens_per_step == 1.0 < other.tokens_per_step


def test_figures_are_those_of_the_answers():
    found = report("none")
    assert found.num_examples == len(found.answers) == 6
    assert found.accuracy == sum(answer.correct for answer in found.answers) / 6
    assert found.interval[0] <= found.accuracy <= found.interval[1]
    assert sum(each["num_examples"] for each in found.categories.values()) == 6
    ends = {2, 5}  # an answer may end with its last token
    cut = [answer for answer in found.answers if len(answer.token_ids) == 48 and answer.token_ids[-1] not in ends]
    assert found.truncated == len(cut) > 0
    assert found.mean_tokens == sum(len(answer.token_ids) for answer in found.answers) / 6
    assert found.refused == found.failed == 0
    assert found.seconds > 0
    assert found.tokens_per_second > 0


def test_nll_is_that_of_the_engine_s_own_log_probabilities():
    example = find("profiles").examples(1, Setting())[0]
    prompt = llm().chat_prompt([{"role": "user", "content": example.prompt}])
    output = llm().generate([prompt], SamplingParams(max_tokens=20, logprobs=0))[0]
    expected = -sum(entry.logprob for entry in output.logprobs)
    assert negative_log_likelihood(llm().target, output.prompt_token_ids, output.token_ids) == pytest.approx(
        expected, rel=1e-4
    )


def test_nll_is_that_of_one_forward_of_the_library(monkeypatch):
    """In chunks of a few rows, across the border of prompt and output, as in one piece."""
    prompt, output = list(range(10, 47)), list(range(100, 119))
    library = AutoModelForCausalLM.from_pretrained(zoo.path("zoo:draft"), dtype=torch.float32)
    with torch.inference_mode():
        logits = library(torch.tensor([prompt + output]), use_cache=False).logits[0]
    rows = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    expected = -float(rows.gather(1, torch.tensor(output)[:, None]).sum())
    for size in (1, 5, 36, 37, 38, 128):
        monkeypatch.setattr("foretoken_lab.tasks.evaluate._ROWS", size)
        assert negative_log_likelihood(llm().target, prompt, output) == pytest.approx(expected, rel=1e-4)
    assert negative_log_likelihood(llm().target, prompt, []) == 0.0


def test_nll_distinguishes_the_target_s_own_output():
    """Negative control: a text that the target did not write is less probable."""
    found = report("none")
    answer = found.answers[0]
    prompt = llm().chat_prompt([{"role": "user", "content": answer.example.prompt}])["prompt_token_ids"]
    own = negative_log_likelihood(llm().target, prompt, answer.token_ids)
    assert own == pytest.approx(answer.nll)
    assert negative_log_likelihood(llm().target, prompt, answer.token_ids[::-1]) > own + 10


def test_sampling_depends_on_the_seed_and_the_example_only():
    task = find("json")
    examples = task.examples(3, Setting())

    def outputs(examples, seed):
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed)
        return [answer.token_ids for answer in evaluate(llm(), task, examples, params).answers]

    assert outputs(examples, 1) == outputs(examples, 1)
    assert outputs(examples, 1)[:2] == outputs(examples[:2], 1)
    assert outputs(examples, 1) != outputs(examples, 9)


def example(words):
    return Example(id=f"{words} words", prompt="word " * words, answer="1", response="1", category="all")


def test_prompts_that_do_not_fit_are_left_out_and_counted():
    small = LLM("zoo:draft", dtype="float32", device="cpu", seed=0, max_model_len=64, speculative_config=None)
    finished = []
    found = evaluate(
        small,
        find("arithmetic"),
        [example(10), example(100), example(12)],
        SamplingParams(max_tokens=20),
        progress=lambda: finished.append(1),
    )
    assert (found.num_examples, found.refused) == (2, 1)
    assert [answer.example.id for answer in found.answers] == ["10 words", "12 words"]
    assert len(finished) == 3
    with pytest.raises(InputError, match=r"no example fits. The shortest prompt has \d+ tokens"):
        evaluate(small, find("arithmetic"), [example(100)], SamplingParams(max_tokens=20))


def rewrite(engine, monkeypatch, change):
    """Let an engine give other completions than its own: ``change`` takes the number of a prompt and its completion."""
    real = engine.generate

    def generate(prompts, params, **options):
        outputs = real(prompts, params, **options)
        for index, output in enumerate(outputs):
            output.outputs[0] = change(index, output.outputs[0])
        return outputs

    monkeypatch.setattr(engine, "generate", generate)


@pytest.mark.parametrize("name", ["arithmetic", "profiles", "keys", "json", "code", "squad", "factbook"])
def test_right_answers_count_and_wrong_ones_do_not(name, monkeypatch):
    task, engine = find(name), llm().with_method(None)
    examples = task.examples(4, Setting())
    says = [examples[0].response, examples[1].response, "nothing", "nothing"]
    rewrite(engine, monkeypatch, lambda index, done: replace(done, text=f" {says[index]}\n"))
    found = evaluate(engine, task, examples, SamplingParams(max_tokens=2))
    assert [answer.correct for answer in found.answers] == [True, True, False, False]
    assert found.accuracy == 0.5
    assert found.interval == pytest.approx((0.150, 0.850), abs=1e-3)  # Wilson, 2 of 4


def test_a_failed_request_is_a_failure_and_no_data_point(monkeypatch):
    engine = llm().with_method(None)
    rewrite(engine, monkeypatch, lambda index, done: replace(done, text="", error="NaN logits") if index == 0 else done)
    found = evaluate(engine, find("arithmetic"), [example(5), example(6)], SamplingParams(max_tokens=4))
    assert (found.failed, found.num_examples) == (1, 1)
    assert found.answers[0].error == "NaN logits"
