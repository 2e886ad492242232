"""Replays along a recorded text take the very steps of real runs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from foretoken.options.sampling import SamplingParams
from foretoken.planner.expected import Start, chained, expect, survival
from foretoken.planner.replay import CannotReplay, Replay, States
from foretoken.planner.trace import Trace, record
from helpers import zoo_llms

_PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
_DRAFT = {"method": "draft_model", "model": "zoo:draft"}
_EAGLE = {"method": "eagle"}
CONFIGS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "chain": _DRAFT,
    "tree": {**_DRAFT, "tree": "topk"},
    "eagle": _EAGLE,
}


@cache
def trace() -> Trace:
    prompts = [(place, zoo_llms.prompt_ids(text)) for place, text in enumerate(zoo_llms.PROMPTS[1:3])]
    return record(zoo_llms.target(), prompts, _PARAMS, 60.0)


@cache
def states() -> States:
    return States(zoo_llms.target())


@cache
def replay(name: str, length: int = 0) -> Replay:
    del length  # a drafter that learns from earlier answers is made anew for each length, as in real runs
    return Replay(zoo_llms.with_config(CONFIGS[name]).recipe, zoo_llms.target(), trace(), states())


def test_a_trace_has_the_text_of_plain_decoding() -> None:
    for answer, prompt in zip(trace().answers, zoo_llms.PROMPTS[1:3], strict=True):
        assert list(answer.tokens) == zoo_llms.greedy(prompt, 24)
        assert answer.log_p == (0.0,) * 24


@pytest.mark.parametrize("length", [1, 4, 8])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_replay_takes_the_steps_of_the_real_run(name: str, length: int) -> None:
    llm = zoo_llms.with_config({**CONFIGS[name], "num_speculative_tokens": length}, max_num_seqs=1)
    for answer in trace().answers:
        (output,) = llm.generate([{"prompt_token_ids": list(answer.prompt_ids)}], _PARAMS)
        assert tuple(output.token_ids) == answer.tokens
        real, replayed = output.metrics, replay(name, length).run_fixed(answer, length)
        assert replayed.metrics.num_steps == real.num_steps
        assert replayed.metrics.drafts == real.drafts
        assert (replayed.metrics.drafted_at, replayed.metrics.accepted_at) == (real.drafted_at, real.accepted_at)
        assert replayed.expected.num_steps == real.num_steps - 1  # the first step reads the prompt


@pytest.mark.parametrize("name", ["ngram", "chain", "eagle"])
def test_one_replay_gives_the_steps_of_every_length(name: str) -> None:
    for answer in trace().answers:
        starts = replay(name).draft_everywhere(answer)
        for length in (1, 2, 4, 6, 8, 16):
            found = expect(starts, answer.log_p, length, "greedy", len(answer.prompt_ids))
            assert found.steps == replay(name).run_fixed(answer, length).expected.steps


def _same(found: list[Start], whole: list[Start], rule: str, log_p: tuple[float, ...]) -> bool:
    """Whether drafts have the same lengths and chances of acceptance, up to rounding."""
    chances = [
        [survival(rule, each.log_q, log_p[place + 1 :]) for place, each in enumerate(its)] for its in (found, whole)
    ]
    close = all(one == pytest.approx(other, abs=1e-5) for one, other in zip(*chances, strict=True))
    return close and [each.nodes for each in found] == [each.nodes for each in whole]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drafts_of_one_token_give_the_chains_of_a_draft_model(temperature: float) -> None:
    """Above temperature 0 the draft draws the recorded tokens, so that its distributions are those along the text."""
    params = replace(_PARAMS, temperature=temperature, seed=3, max_tokens=12)
    sampled = record(zoo_llms.target(), [(0, zoo_llms.prompt_ids("Tom has"))], params, 60.0)
    (answer,) = sampled.answers
    run = Replay(zoo_llms.with_config(_DRAFT).recipe, zoo_llms.target(), sampled, states())
    ones, whole = run.draft_everywhere(answer, 1), run.draft_everywhere(answer, 6)
    assert run.rule == ("block" if temperature else "greedy")
    assert _same(chained(ones, 6, 12), whole, run.rule, answer.log_p)
    assert temperature == 0.0 or len({each.log_q for each in ones}) > 6  # probabilities, not agreement


@pytest.mark.parametrize("config", [{"method": "suffix"}, {**_DRAFT, "tree": "coupled"}], ids=["suffix", "coupled"])
def test_deterministic_drafts_are_replayed_step_by_step_above_temperature_0(config: dict[str, Any]) -> None:
    """The seed gives the text of plain decoding, and the noise that a coupled draft is drawn by."""
    params = replace(_PARAMS, temperature=0.8, seed=5)
    sampled = record(zoo_llms.target(), [(0, zoo_llms.prompt_ids(zoo_llms.PROMPTS[2]))], params, 60.0)
    (answer,) = sampled.answers
    llm = zoo_llms.with_config({**config, "num_speculative_tokens": 4}, max_num_seqs=1)
    (output,) = llm.generate([{"prompt_token_ids": list(answer.prompt_ids)}], params)
    run = Replay(zoo_llms.with_config(config).recipe, zoo_llms.target(), sampled, states())
    assert tuple(output.token_ids) == answer.tokens
    assert run.run_fixed(answer, 4).metrics.drafts == output.metrics.drafts
    assert any(accepted for _, accepted in output.metrics.drafts)


def test_a_drafter_that_runs_the_target_is_refused_with_the_reason() -> None:
    with pytest.raises(CannotReplay, match="own layers"):
        Replay(zoo_llms.with_config({"method": "del"}).recipe, zoo_llms.target(), trace(), states())
