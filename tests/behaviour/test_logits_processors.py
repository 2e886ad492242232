"""A user's function of output and logits holds at every row of a draft, and stays with its request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

from foretoken.core.columns import Columns
from foretoken.core.errors import ConfigError
from foretoken.core.laws import LawMaker
from foretoken.core.tree import TokenTree
from foretoken.options.sampling import SamplingParams
from helpers.zoo_llms import with_config

V = 6
PROMPT = "Tom has 12 marbles. He buys 30 more. How many marbles does he have now?"
METHODS = {
    "suffix": {"method": "suffix"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft_model": {"method": "draft_model", "model": "zoo:draft", "num_speculative_tokens": 4},
    "eagle": {"method": "eagle", "num_speculative_tokens": 4},
}


def no_repetition(output: list[int], logits: Tensor) -> Tensor:
    """Forbid every token of the last five, in place."""
    logits[torch.tensor(output[-5:], dtype=torch.int64)] = -torch.inf
    return logits


def of_prompt(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
    """Write the prompt's token at every third place."""
    place = len(output) % len(prompt)
    return (
        logits
        if len(output) % 3
        else logits + 60.0 * torch.nn.functional.one_hot(torch.tensor(prompt[place]), len(logits))
    )


def test_every_row_has_the_tokens_before_it() -> None:
    seen: list[list[int]] = []

    def note(output: list[int], logits: Tensor) -> Tensor:
        seen.append(list(output))
        return logits + len(output)

    maker = LawMaker(SamplingParams(logits_processors=[note, no_repetition]), [9], V)
    maker.append([1, 2])
    twin = maker.copy()
    twin.append([5])
    tree = TokenTree([3, 4, 0], [-1, 0, -1])
    raw_MV = torch.arange(4.0 * V).view(4, V)
    found = maker.process(raw_MV, tree, (-1, 0, 1, 2))
    assert seen.pop(0) == [1, 2]  # the first call is made twice
    assert seen == [[1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 0]]
    assert found.isinf().nonzero().tolist() == [[row, t] for row, out in enumerate(seen) for t in sorted(out)]
    assert torch.equal(found[0, [0, 3]], raw_MV[0, [0, 3]] + 2)
    some = maker.process(raw_MV[:, [4, 1, 3]], tree, (-1, 0, 1, 2), Columns(torch.tensor([4, 1, 3]), V))
    assert torch.equal(some, found[:, [4, 1, 3]])
    assert torch.equal(raw_MV, torch.arange(4.0 * V).view(4, V))


@pytest.mark.parametrize("processor", [no_repetition, of_prompt])
@pytest.mark.parametrize("method", METHODS)
def test_the_same_text_with_drafts(method: str, processor: Any) -> None:
    params = SamplingParams(max_tokens=32, ignore_eos=True, logits_processors=[processor])
    plain, drafted = (
        with_config(config).generate(PROMPT, params, use_tqdm=False)[0].outputs[0] for config in (None, METHODS[method])
    )
    assert drafted.token_ids == plain.token_ids
    without = with_config(None).generate(PROMPT, SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
    assert without[0].outputs[0].token_ids != plain.token_ids


def fails(output: list[int], logits: Tensor) -> Tensor:
    if len(output) > 3:
        raise ValueError("no more of that")
    return logits


def narrow(output: list[int], logits: Tensor) -> Tensor:
    return logits[:-1]


def without_number(output: list[int], logits: Tensor) -> Tensor:
    return logits * torch.nan


@pytest.mark.parametrize(
    ("processor", "message"),
    [(fails, "no more of that"), (narrow, "a logits processor returned"), (without_number, "none NaN")],
)
@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_a_failure_ends_its_request_alone(method: str, processor: Any, message: str) -> None:
    llm = with_config(METHODS[method])
    good = SamplingParams(max_tokens=12, ignore_eos=True)
    bad = SamplingParams(max_tokens=12, ignore_eos=True, logits_processors=[processor])
    alone, _ = (llm.generate(PROMPT, good, use_tqdm=False)[0] for _ in range(2))
    failed, other = llm.generate([PROMPT, PROMPT], [bad, good], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert message in failed.outputs[0].error
    assert other.outputs[0].token_ids == alone.outputs[0].token_ids


def test_one_that_counts_is_caught() -> None:
    calls: list[int] = []

    def counts(output: list[int], logits: Tensor) -> Tensor:
        calls.append(len(output))
        return logits + len(calls) * torch.arange(len(logits))

    (out,) = with_config(None).generate(PROMPT, SamplingParams(max_tokens=100, logits_processors=[counts]))
    assert out.outputs[0].finish_reason == "error"
    assert "arguments alone" in out.outputs[0].error


def test_a_processor_of_transformers() -> None:
    theirs = [NoRepeatNGramLogitsProcessor(2), RepetitionPenaltyLogitsProcessor(1.3)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logits_processors=theirs)
    network = with_config(None).target
    ids = network.tokenizer(PROMPT, return_tensors="pt").input_ids
    plain, drafted = (
        with_config(config).generate(PROMPT, params, use_tqdm=False)[0].outputs[0]
        for config in (None, METHODS["suffix"])
    )
    assert drafted.token_ids == plain.token_ids
    written = [*ids[0].tolist(), *plain.token_ids]
    assert len({*zip(written[len(ids[0]) - 1 :], written[len(ids[0]) :], strict=False)}) == 24  # no pair comes twice


@pytest.mark.parametrize("value", [3, [print, 3], [lambda logits: logits], "f"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="logits_processors"):
        SamplingParams(logits_processors=value)
