from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from foretoken.engine.executors.overlapped import OverlappedExecutor
from foretoken.engine.executors.serial import SerialExecutor
from foretoken.engine.llm import LLM
from foretoken.models.load import load
from foretoken.options.sampling import SamplingParams
from foretoken_lab import testing as stubs
from foretoken_lab.timeline import watch
from helpers.tiny_models import VOCAB_SIZE, save_model


@pytest.mark.parametrize("make", [SerialExecutor, OverlappedExecutor])
def test_a_timeline_holds_every_part_of_every_step(
    make: type[SerialExecutor] | type[OverlappedExecutor], tmp_path: Path
) -> None:
    prompt, params = [5, 9, 11], SamplingParams(max_tokens=9, ignore_eos=True)
    config = {"method": stubs.Random(VOCAB_SIZE, tree=False), "num_speculative_tokens": 3}
    llm = LLM.from_target(load(save_model("llama", tmp_path), device="cpu"), speculative_config=config)
    llm.engine.executor = make()
    timeline = watch(llm)
    assert timeline is not None
    (out,) = llm.generate([{"prompt_token_ids": prompt}], params)
    llm.close()
    recorded = {who: [each for each in timeline.intervals if each.actor == who] for who in ("target", "engine")}
    assert len(recorded["target"]) == len(recorded["engine"]) == out.metrics.num_steps
    assert sum(each.tokens for each in timeline.intervals) == len(out.token_ids) - 1  # the first comes with the prompt
    asked = [each for each in timeline.intervals if each.actor in ("propose", "drafter")]
    assert {each.actor for each in asked} == {"propose" if make is SerialExecutor else "drafter"}
    engine = sorted((each for each in timeline.intervals if each.actor != "drafter"), key=lambda each: each.begin)
    assert all(one.begin <= one.end <= other.begin for one, other in pairwise(engine))
