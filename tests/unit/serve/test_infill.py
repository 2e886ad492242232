"""Prompts for infill: the marks of each family in its order, within the limit, and texts that contain marks."""

from __future__ import annotations

import copy
import json

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


def test_other_files_stand_first_and_the_begun_answer_last() -> None:
    tokenizer = with_marks(FORMS[0], "<|file_sep|>")
    known, infill = tokenizer.get_vocab(), Infill(tokenizer)
    mark = known["<|file_sep|>"]
    plain, found = infill.prompt("a", "b", 100), infill.prompt("a", "b", 100, [("x.py", "one"), ("y.py", "two")], "c")
    shown = tokenizer.decode(found).replace(" ", "")
    assert shown.startswith("<|file_sep|>x.py\none\n<|file_sep|>y.py\ntwo\n<|file_sep|>")
    assert shown.endswith("<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>c")
    assert found.count(mark) == 3
    assert tokenizer.decode(plain).replace(" ", "").endswith("<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>")
    long = infill.prompt("a", "b", 40, [("x.py", "one two " * 100)], "c")
    assert len(long) <= 40
    assert long[-1] == found[-1]


def test_llama_cpps_path_gives_the_text_between(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = with_config({"method": "suffix"})
    tokens = {"<fim_prefix>": 40, "<fim_suffix>": 41, "<fim_middle>": 42}
    plain = llm.tokenizer.get_vocab
    monkeypatch.setattr(type(llm.tokenizer), "get_vocab", lambda _: {**plain(), **tokens})
    with served(llm, api_key="secret") as running:
        key = {"Authorization": "Bearer secret"}
        common = {"model": NAME, "temperature": 0}
        wanted = {"prompt": "Tom has", "suffix": "marbles.", "max_tokens": 8}
        middle = running.send("/v1/completions", {**common, **wanted}, headers=key)[1]["choices"][0]["text"]
        asked = {**common, "input_prefix": "Tom has", "input_suffix": "marbles.", "n_predict": 8, "t_max_predict_ms": 9}
        status, whole, response = running.send("/infill", asked, headers=key)
        assert (status, whole["content"], whole["tokens_predicted"], whole["stop"]) == (200, middle, 8, True)
        assert whole["timings"]["predicted_n"] == 8
        assert response.headers["x-foretoken-ignored"] == "t_max_predict_ms"
        with running.begun("/infill", asked | {"stream": True}, headers=key) as stream:
            pieces = [json.loads(line[6:]) for line in stream.read().decode().split("\n\n") if line]
        assert "".join(each["content"] for each in pieces) == middle
        assert [each["stop"] for each in pieces] == [False] * (len(pieces) - 1) + [True]
        assert running.send("/infill", asked)[0] == 401
        assert running.send("/infill", {**common, "input_prefix": "a"}, headers=key)[0] == 200


def test_a_model_without_the_tokens_is_refused_by_name() -> None:
    with pytest.raises(ApiError) as caught:
        Infill(base().tokenizer)
    assert caught.value.body["error"]["param"] == "suffix"
    assert "<|fim_suffix|>" in caught.value.body["error"]["message"]
