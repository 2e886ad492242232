"""Log-probabilities of the prompt: those of the library's own forward, however the prompt is read."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken import zoo
from foretoken.core.errors import ConfigError
from foretoken.options.sampling import SamplingParams
from helpers import zoo_llms

PROMPT = zoo_llms.PROMPTS[1]
ASKED = SamplingParams(max_tokens=3, prompt_logprobs=2)


@cache
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(zoo.path("base"), dtype=torch.float32).eval()


def expected(ids: list[int]) -> torch.Tensor:
    """Log-probabilities [tokens - 1, V] by transformers alone."""
    with torch.inference_mode():
        logits = reference()(torch.tensor([ids]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits, dim=-1)


@pytest.mark.parametrize("rows", [512, 7, 1])
@pytest.mark.parametrize("method", ["none", "suffix"])
def test_they_are_the_models_own(method: str, rows: int) -> None:
    llm = zoo_llms.with_config({"method": method}, max_num_seqs=1, max_rows_per_step=rows)
    (output,) = llm.generate([PROMPT], ASKED)
    wanted = expected(output.prompt_token_ids)
    found = output.prompt_logprobs
    assert found is not None
    assert [each.token_id for each in found] == output.prompt_token_ids[1:]
    for each, row in zip(found, wanted, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        assert [token for token, _ in each.top] == row.topk(2).indices.tolist()
        assert [value for _, value in each.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_they_change_nothing_and_come_once_for_several_completions() -> None:
    llm = zoo_llms.with_config({"method": "suffix"})
    plain = llm.generate([PROMPT, zoo_llms.PROMPTS[0]], SamplingParams(max_tokens=12))
    mixed = llm.generate([PROMPT, zoo_llms.PROMPTS[0]], [SamplingParams(max_tokens=12, prompt_logprobs=0, n=2)] * 2)
    assert zoo_llms.ids(plain) == zoo_llms.ids(mixed)
    assert plain[0].prompt_logprobs is None
    for output in mixed:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids) - 1
        assert all(each.top == () for each in output.prompt_logprobs)


def test_a_rule_that_is_not_exact_is_refused() -> None:
    llm = zoo_llms.with_config({"method": "suffix", "verifier": "typical"})
    with pytest.raises(ConfigError, match="prompt_logprobs=2 with verifier='typical'"):
        llm.generate([PROMPT], ASKED)


def test_out_of_range() -> None:
    with pytest.raises(ConfigError, match="prompt_logprobs=-1"):
        SamplingParams(prompt_logprobs=-1)
