"""The time and the source of each token: a step's tokens are recorded when they are committed."""

from __future__ import annotations

import pytest

from foretoken.options.sampling import SamplingParams
from helpers.zoo_llms import PROMPTS, with_config


@pytest.mark.parametrize("executor", ["serial", "pearl"])
def test_every_token_is_noted_once_and_the_drafts_are_those_that_were_accepted(executor):
    config = {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 3, "executor": executor}
    for output in with_config(config).generate(PROMPTS[:2], SamplingParams(max_tokens=24, ignore_eos=True)):
        steps, metrics = output.metrics.emitted, output.metrics
        assert sum(step.tokens for step in steps) == len(output.token_ids)
        assert len(steps) == metrics.num_steps
        assert sum(step.drafted for step in steps) == metrics.num_accepted_tokens > 0
        assert all(0 <= step.drafted <= step.tokens for step in steps)
        times = [step.seconds for step in steps]
        assert times == sorted(times)
        assert 0 < times[0] < times[-1] <= metrics.seconds


def test_plain_decoding_emits_one_token_a_step_and_drafts_none():
    (output,) = with_config({"method": "none"}).generate(PROMPTS[:1], SamplingParams(max_tokens=6, ignore_eos=True))
    assert [(step.tokens, step.drafted) for step in output.metrics.emitted] == [(1, 0)] * 6
