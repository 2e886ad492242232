"""Reasoning and answer in a text, whole and in pieces, and how many tokens the reasoning has."""

from __future__ import annotations

import re
from typing import Any

import pytest

from foretoken.core.errors import ConfigError
from foretoken.engine.text.reasoning import MARKS, Thinking, marks_of
from foretoken.options.sampling import SamplingParams
from foretoken.options.structured import StructuredOutputs
from helpers.templates import MAY_THINK, THINKS, TOOLS, templated
from helpers.zoo_llms import base, with_config

TOKENIZER = base().tokenizer
OPEN = "<|assistant|>\n<think>\n"


def split(text: str, prompt: str, size: int) -> tuple[str, str, int]:
    """Reasoning, answer and tokens of a reasoning, of a text that comes so many tokens at a time."""
    thinking = Thinking(TOKENIZER, TOKENIZER(prompt)["input_ids"])
    tokens = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    reasoning = answer = known = ""
    for begin in range(0, len(tokens), size):
        now = TOKENIZER.decode(tokens[: begin + size])
        piece = thinking.read(now[len(known) :], tokens[begin : begin + size], final=begin + size >= len(tokens))
        reasoning, answer, known = reasoning + piece[0], answer + piece[1], now
    return reasoning, answer, thinking.num_tokens


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    ("prompt", "text", "reasoning", "answer"),
    [
        ("Hi", "<think>\nOne and two.\n</think>\n\nSeven.", "One and two.", "Seven."),
        ("Hi", " \n<think>a</think>b", "a", "b"),
        ("Hi", "<think>\n\n</think>\n\nSeven.", "", "Seven."),
        (OPEN, "One,\n\n two </thin and\n</think>\n\nSeven.\n", "One,\n\n two </thin and", "Seven.\n"),
        (OPEN, "that has no en", "that has no en", ""),
        ("Hi", "<think>that has no end", "that has no end", ""),
        ("Hi", "  Seven <think>eight</think>", "", "  Seven <think>eight</think>"),
        ("Hi", " <thin", "", " <thin"),
        (OPEN + "\n</think>\n\n", "Seven.", "", "Seven."),
    ],
)
def test_reasoning_is_separated_from_the_answer(prompt: str, text: str, reasoning: str, answer: str, size: int) -> None:
    found = split(text, prompt, size)
    assert found[:2] == (reasoning, answer)
    end = text.find("</think>") + len("</think>")
    if not reasoning and not text.startswith("<think>"):
        assert found[2] == 0
    elif end < len("</think>"):
        assert found[2] == len(TOKENIZER(text, add_special_tokens=False)["input_ids"])
    else:  # up to the token that ends it
        counted = TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"][: found[2]])
        before = TOKENIZER.decode(TOKENIZER(text, add_special_tokens=False)["input_ids"][: found[2] - 1])
        assert "</think>" in counted
        assert "</think>" not in before


def test_what_the_template_says_of_it() -> None:
    for template, known in ((THINKS, True), (MAY_THINK, True), (TOOLS, False)):
        assert (marks_of(templated(template).tokenizer) is not None) is known
    talk = [{"role": "user", "content": "Hi"}]
    for template, settings, form in (
        (THINKS, {}, "open"),
        (MAY_THINK, {}, "optional"),
        (MAY_THINK, {"enable_thinking": False}, None),
    ):
        llm = with_config(None, target=templated(template))
        prompt = llm.chat_prompt(talk, chat_template_kwargs=settings)["prompt_token_ids"]
        assert Thinking(llm.tokenizer, prompt).form == form


@pytest.mark.parametrize(
    ("form", "text"),
    [("open", "Well, [0] is it.\n</think>\n\n77"), ("optional", "<think>\nWell.\n</think>\n\n77"), ("optional", "77")],
)
@pytest.mark.parametrize("wanted", [{"regex": "7+"}, {"grammar": "start: /7+/"}, {"json": {"const": 77}}])
def test_a_structure_follows_reasoning(wanted: dict[str, Any], form: str, text: str) -> None:
    llm = base()
    (request,) = llm.new_requests("Hi", SamplingParams(structured_outputs={**wanted, "reasoning": form}))
    constraint = request.laws.constraint
    assert constraint is not None
    tokens = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert constraint.possible(tokens)
    for wrong in ({"open": "7</think>8", "optional": "8"}[form], "x</think>78", "<think>x</think>8"):
        assert not constraint.possible(llm.tokenizer(wrong, add_special_tokens=False)["input_ids"])
    constraint.append(tokens)
    (end, *_) = request.stop_ids
    mask_V = constraint.allowed([])
    assert mask_V is not None
    assert bool(mask_V[end])


def test_a_form_that_is_none() -> None:
    with pytest.raises(ConfigError, match="must be 'open', 'optional' or None"):
        StructuredOutputs(regex="a", reasoning="yes")


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks[0])
@pytest.mark.parametrize("begun", [False, True])
def test_other_marks_separate_the_answer_too(marks: tuple[str, str], begun: bool) -> None:
    tokenizer = templated(THINKS.replace("<think>", marks[0]).replace("</think>", marks[1])).tokenizer
    assert marks_of(tokenizer) == marks
    prompt = tokenizer(f"<|assistant|>\n{marks[0]}\n" if begun else "Hi")["input_ids"]
    thinking = Thinking(tokenizer, prompt)
    text = f"{'' if begun else marks[0]}One.\n{marks[1]}\n\nSeven."
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert thinking.read(text, tokens, final=True) == ("One.", "Seven.")
    assert 0 < thinking.num_tokens < len(tokens)


def test_a_grammar_begins_after_other_marks() -> None:
    template = THINKS.replace("<think>", "<seed:think>").replace("</think>", "</seed:think>")
    llm = with_config({"method": "suffix"}, target=templated(template))
    wanted = StructuredOutputs(regex="[0-9]{2}", reasoning="open")
    params = SamplingParams(max_tokens=60, structured_outputs=wanted, thinking_token_budget=4)
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], params)
    thought, end, answer = output.text.partition("</seed:think>")
    assert thought
    assert end
    assert re.fullmatch(r"[ \n]*[0-9]{2}", answer)
