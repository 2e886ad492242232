"""Prompts for infill: the marks of each family in its order, within the limit, and texts that contain marks."""

from __future__ import annotations

import copy

import pytest

from foretoken.serve.errors import ApiError
from foretoken.serve.infill import FORMS, Form, Infill
from helpers.serving import NAME, served
from helpers.zoo_llms import base, with_config

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")


def with_marks(form: Form, *more: str):
    """The bundled tokenizer with other names for tokens that it has."""
    tokenizer = copy.deepcopy(base().tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [mark for mark in form[:3] if mark] + list(more)})
    return tokenizer


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.prefix)
def test_marks_stand_in_the_order_of_the_family(form: Form) -> None:
    tokenizer = with_marks(form)
    before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("def add(", "return a + b"))
    known = tokenizer.get_vocab()
    prefix, suffix = [known[form.prefix], *before], [known[form.suffix], *after]
    wanted = suffix + prefix if form.suffix_first else prefix + suffix
    wanted += [known[form.middle]] if form.middle else []
    found = Infill(tokenizer).prompt("def add(", "return a + b", 1000)
    assert found[-len(wanted) :] == wanted
    assert len(found) - len(wanted) <= 1  # the token of a beginning


def test_marks_inside_a_text_are_text_and_end_an_answer() -> None:
    tokenizer = with_marks(FORMS[0], "<|file_sep|>")
    known, infill = tokenizer.get_vocab(), Infill(tokenizer)
    found = infill.prompt("a <|fim_suffix|> b", "c <|file_sep|>", 1000)
    assert [found.count(known[mark]) for mark in MARKS] == [1, 1, 1, 0]
    assert infill.stops == [known["<|file_sep|>"]]


def test_long_texts_keep_the_parts_next_to_the_gap() -> None:
    tokenizer = with_marks(FORMS[0])
    known, infill = tokenizer.get_vocab(), Infill(tokenizer)
    before, after = list(range(100, 200)), "one two three four five six seven eight nine ten " * 10
    whole = tokenizer(after, add_special_tokens=False)["input_ids"]
    found = infill.prompt(before, after, 43)
    assert len(found) <= 43
    gap = found.index(known["<|fim_suffix|>"])
    kept = found[gap + 1 : -1]
    assert kept == whole[: len(kept)]
    assert len(kept) == (43 - 3) // 4
    assert found[gap - 1] == 199
    short = infill.prompt(before[-5:], after, 43)
    assert short[-1 - (43 - 3 - 5) : -1] == whole[: 43 - 3 - 5]


def test_the_server_fills_in_and_echoes_around_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = with_config({"method": "suffix"})
    tokens = {"<fim_prefix>": 40, "<fim_suffix>": 41, "<fim_middle>": 42}  # any tokens of the model will do here
    plain = llm.tokenizer.get_vocab
    monkeypatch.setattr(type(llm.tokenizer), "get_vocab", lambda _: {**plain(), **tokens})
    ids = Infill(llm.tokenizer).prompt("Tom has", "marbles.", 1000)
    with served(llm) as running:
        asked = {"model": NAME, "prompt": "Tom has", "max_tokens": 8, "temperature": 0}
        _, by_ids, _ = running.send("/v1/completions", {**asked, "prompt": ids})
        _, filled, _ = running.send("/v1/completions", {**asked, "suffix": "marbles."})
        _, echoed, _ = running.send("/v1/completions", {**asked, "suffix": "marbles.", "echo": True})
    middle = filled["choices"][0]["text"]
    assert middle == by_ids["choices"][0]["text"] != ""
    assert filled["usage"]["prompt_tokens"] == len(ids)
    assert echoed["choices"][0]["text"] == f"Tom has{middle}marbles."


def test_a_model_without_the_tokens_is_refused_by_name() -> None:
    with pytest.raises(ApiError) as caught:
        Infill(base().tokenizer)
    assert caught.value.body["error"]["param"] == "suffix"
    assert "<|fim_suffix|>" in caught.value.body["error"]["message"]
