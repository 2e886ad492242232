"""A limit of reasoning, against a rule that looks at the whole text, for every path and every way to commit it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.core.laws import LawMaker
from foretoken.core.words import Both, Words
from foretoken.engine.text.thinking_budget import ThinkingBudget
from foretoken.options.sampling import SamplingParams
from helpers.small_llms import ALTERED, with_config
from helpers.templates import MAY_THINK, THINKS, TOOLS, templated

# a vocabulary of its own: marks in pieces, and a character in two tokens
PIECES = [b"a", b"<think>", b"</th", b"ink>", b"\xc3", b"\xa9"]
END = (2, 3)
TALK = [{"role": "user", "content": "How many legs have two spiders?"}]


def decode(tokens: Sequence[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def expected(text: Sequence[int], limit: int, *, begun: bool) -> list[int] | None:
    """Tokens that may follow a text, by the words of the rule; None: the text cannot be."""
    every = list(range(len(PIECES)))
    begin = 0
    if not begun:
        begin = next((n for n in range(len(text) + 1) if "<think>" in decode(text[:n])), -1)
        if begin < 0 or not decode(text).startswith("<think>"):
            return every
    inside = text[begin:]
    for count in range(len(inside) + 1):
        if "</think>" in decode(inside[:count]):
            return every
        if count >= limit and (not decode(inside[:count]).endswith("\N{REPLACEMENT CHARACTER}")):
            written = tuple(inside[count:])
            if len(written) >= len(END):
                return every if written[: len(END)] == END else None
            return [END[len(written)]] if written == END[: len(written)] else None
    return every


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("limit", [0, 1, 2])
def test_every_path_allows_what_the_whole_text_does(limit: int, begun: bool) -> None:
    whole = [0, 1, 2, 3, 4, 5]
    for length in range(5):
        for text in itertools.product(whole, repeat=length):
            if (4, 4) in itertools.pairwise(text) or any(b == 5 and a != 4 for a, b in itertools.pairwise((0, *text))):
                continue  # no text at all
            for cut in {0, length // 2, length}:
                if expected(text[:cut], limit, begun=begun) is None:
                    continue
                made = ThinkingBudget(limit, END, decode, begun=begun, vocab_size=len(PIECES))
                budget = made.copy()
                budget.append(text[:cut])
                wanted = expected(text, limit, begun=begun)
                mask = budget.allowed(text[cut:])
                assert budget.possible(text[cut:]) == (wanted is not None), (text, cut)
                assert (None if mask is None else mask.nonzero()[:, 0].tolist()) == wanted, (text, cut)
                if cut == length and wanted == [END[0]]:
                    assert budget.forced(5) == list(END)
                    assert budget.forced(1) == [END[0]]


def test_a_character_without_an_end_does_not_hold_it_up() -> None:
    budget = ThinkingBudget(1, END, decode, begun=True, vocab_size=len(PIECES))
    budget.append([4, 4, 4, 4])
    assert budget.forced(2) == list(END)


def answers(limit: int | None, config: Any, **more: Any) -> tuple[list[int], str]:
    llm = with_config(config, target=templated(THINKS))
    (out,) = llm.chat(
        [TALK], SamplingParams(max_tokens=40, thinking_token_budget=limit, ignore_eos=True, **more), use_tqdm=False
    )
    return out.outputs[0].token_ids, out.outputs[0].text


@pytest.mark.parametrize("limit", [0, 1, 7])
@pytest.mark.parametrize(
    "config",
    [
        {"method": "suffix"},
        {"method": "ngram", "num_speculative_tokens": 4},
        {"method": "draft_model", "model": ALTERED, "num_speculative_tokens": 8},
    ],
    ids=["suffix", "ngram", "draft_model"],
)
def test_the_end_falls_into_an_accepted_block(limit: int, config: dict[str, Any]) -> None:
    plain, text = answers(limit, None)
    assert text.count("</think>") >= 1
    llm = with_config(None, target=templated(THINKS))
    end = llm.tokenizer("</think>", add_special_tokens=False)["input_ids"]
    begin = next(i for i in range(len(plain)) if plain[i : i + len(end)] == end)
    assert limit <= begin <= limit + 3
    assert answers(limit, config)[0] == plain


def test_a_message_before_the_end() -> None:
    text = answers(3, None, thinking_budget_message=" Enough.\n")[1]
    assert " Enough.\n</think>" in text


def test_no_limit_and_no_reasoning() -> None:
    assert answers(None, None) == answers(-1, None)
    with pytest.raises(ConfigError, match="thinking_token_budget=5"):
        with_config(None, target=templated(TOOLS)).chat([TALK], SamplingParams(thinking_token_budget=5))
    off = with_config(None, target=templated(MAY_THINK))
    settings = {"enable_thinking": False}
    plain, limited = (
        off.chat([TALK], SamplingParams(thinking_token_budget=limit), chat_template_kwargs=settings)[0]
        for limit in (None, 0)
    )
    assert plain.outputs[0].token_ids == limited.outputs[0].token_ids


@pytest.mark.parametrize("config", [None, {"method": "draft_model", "model": ALTERED, "num_speculative_tokens": 4}])
def test_a_structure_begins_after_the_limit(config: dict[str, Any] | None) -> None:
    form = {"regex": "(42|43)", "reasoning": "open"}  # white space may stand before it
    llm = with_config(config, target=templated(THINKS))
    (out,) = llm.chat(
        [TALK], SamplingParams(max_tokens=40, thinking_token_budget=3, structured_outputs=form), use_tqdm=False
    )
    assert out.outputs[0].error is None
    assert out.outputs[0].text.partition("</think>")[2].strip() in ("42", "43")


@pytest.mark.parametrize("other", [None, Words(torch.ones(len(PIECES), dtype=torch.bool), [[0, 0]])])
def test_the_limit_costs_a_greedy_answer_nothing_after_the_reasoning(other: Words | None) -> None:
    limit = ThinkingBudget(1, END, decode, begun=True, vocab_size=len(PIECES))
    constraint = limit if other is None else Both(limit, other)
    maker = LawMaker(SamplingParams(), (), len(PIECES), constraint=constraint)
    for token in (0, *END):
        assert not maker.trivial
        maker.append([token])
    assert maker.trivial == (other is None)
