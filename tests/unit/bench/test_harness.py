"""The harness with scripted engines: order, seeds, failures, interruption; and the figures made of the samples."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

from foretoken.bench.harness import BASELINE, Method, Plan, Records, Sample, measure
from foretoken.bench.summary import share_of_time, summarise
from foretoken.core.metrics import Metrics
from foretoken.data.prompts import Prompt
from foretoken.options.sampling import SamplingParams


@dataclass
class Output:
    token_ids: list[int]
    metrics: Metrics = field(default_factory=Metrics)
    finish_reason: str = "length"
    error: str | None = None


class Scripted:
    """An engine that records its calls and answers with a fixed number of tokens."""

    def __init__(self, name, log, answer=lambda prompt: Output([1, 2, 3])):
        self.name, self.log, self.answer = name, log, answer

    def generate(self, prompts, params=None, **options):
        self.log.append((self.name, tuple(prompts), tuple(each.seed for each in params)))
        return [self.answer(prompt) for prompt in prompts]

    def chat(self, messages, params=None, **options):
        return self.generate([conversation[-1]["content"] for conversation in messages], params)


PROMPTS = [Prompt("0", "a0", "a"), Prompt("1", "b0", "b"), Prompt("2", "a1", "a")]


def run(engines, **options):
    return measure(engines, Plan(PROMPTS, SamplingParams(max_tokens=3, seed=10), **options))


def test_order_rotates_and_seeds_are_the_same_for_all_methods():
    log = []
    records = run({name: Scripted(name, log) for name in ("none", "x")}, repeats=2)
    log = log[2:]  # the warm-up of each
    assert [name for name, _, _ in log] == [
        "none",
        "x",
        "x",
        "none",
        "none",
        "x",
        "x",
        "none",
        "none",
        "x",
        "x",
        "none",
    ]
    for first, second in zip(log[::2], log[1::2], strict=True):
        assert first[1:] == second[1:]
    seeds = [seeds for name, _, seeds in log if name == "x"]
    assert sorted(seeds) == [(10,), (11,), (12,), (13,), (14,), (15,)]
    assert len(records.samples) == 12


def test_groups_do_not_mix_categories():
    plan = Plan(PROMPTS, SamplingParams(), batch_size=8)
    assert [[prompt.text for prompt in group] for group in plan.groups()] == [["a0", "a1"], ["b0"]]


def test_chat_and_generate_see_the_same_prompt():
    log = []
    run({"none": Scripted("none", log)}, repeats=1, chat=True)
    assert log[1][1] == ("a0",)


def test_failures_are_counted_and_never_timed():
    def crash(prompt):
        raise RuntimeError("boom")

    def sometimes(prompt):
        return Output([], error="NaN logits", finish_reason="error") if prompt == "a1" else Output([1, 2, 3])

    log = []
    records = run(
        {"none": Scripted("none", log), "bad": Scripted("bad", log, crash), "half": Scripted("half", log, sometimes)},
        repeats=2,
    )
    none, bad, half = summarise(records, [Method(name, {"method": name}) for name in ("none", "bad", "half")])
    assert bad["failures"] == 6
    assert bad["speedup"] is None
    assert bad["tokens_per_second"] is None
    assert bad["errors"] == [{"prompt": "0", "error": "RuntimeError: boom"}]
    assert half["failures"] == 2
    assert half["num_tokens"] == 6
    assert half["equal_outputs"] == 1.0
    assert none["failures"] == 0
    assert none["speedup"] == 1.0


def test_interruption_keeps_whole_rounds_and_whole_repeats():
    calls = 0

    def answer(prompt):
        nonlocal calls
        calls += 1
        if calls > 11:
            raise KeyboardInterrupt
        return Output([1])

    log = []
    records = run({name: Scripted(name, log, answer) for name in ("none", "x")}, repeats=3)
    assert records.interrupted
    assert len(records.samples) == 6  # 4 calls were the warm-up (2 prompts each); 7 good samples, one whole repeat

    calls = 6
    records = run({name: Scripted(name, log, answer) for name in ("none", "x")}, repeats=3)
    assert records.interrupted
    assert records.samples == []  # cut short before both had run once


def sample(label, prompt, repeat, seconds, tokens, **metrics):
    return Sample(label, prompt, repeat, seconds, tuple(tokens), Metrics(num_tokens=len(tokens), **metrics))


def test_figures():
    samples = []
    for repeat, (plain, fast) in enumerate([(1.0, 0.5), (1.2, 0.4), (1.0, 1.25)]):
        for prompt in PROMPTS:
            tokens = [1, 2, 3, 4]
            samples.append(sample(BASELINE, prompt, repeat, plain, tokens, num_steps=4, verify_seconds=plain))
            other = [1, 2, 3, 5] if prompt.category == "b" else tokens
            samples.append(sample("x", prompt, repeat, fast, other, num_steps=2, draft_seconds=0.1, verify_seconds=0.2))
    none, x = summarise(Records(samples, 3), [Method("none", {"method": "none"}), Method("x", {"method": "x", "k": 2})])
    assert none["speedup"] == 1.0
    assert x["speedup"] == pytest.approx(2.0)
    assert x["spread"]["speedup"] == pytest.approx([0.8, 3.0])
    assert x["tokens_per_second"] == pytest.approx(8.0)
    assert x["tokens_per_step"] == 2.0
    assert x["num_tokens"] == 12
    assert x["seconds"] == pytest.approx(1.5)
    assert x["equal_outputs"] == pytest.approx(2 / 3)
    assert x["settings"] == {"k": 2}
    assert x["by_category"]["b"]["equal_outputs"] == 0
    assert x["by_category"]["b"]["num_tokens"] == 4
    # wall time that the engine's three times leave out is "other"
    assert x["time"] == pytest.approx({"draft": 0.3, "verify": 0.6, "other": 0.6})
    assert sum(share_of_time(x).values()) == pytest.approx(1.0)


def test_the_clock_is_the_call_divided_among_its_prompts():
    def slow(prompt):
        time.sleep(0.01)
        return Output([1])

    log = []
    records = run({"none": Scripted("none", log, slow)}, repeats=1, batch_size=2)
    pair = [each.seconds for each in records.samples if each.prompt.category == "a"]
    assert len(pair) == 2
    assert pair[0] == pair[1] >= 0.01
