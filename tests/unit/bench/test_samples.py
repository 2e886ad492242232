"""Answers side by side: the source of each word."""

from __future__ import annotations

from foretoken.bench.harness import Method, Records, Sample
from foretoken.bench.samples import pieces, side_by_side
from foretoken.core.metrics import Emitted, Metrics
from foretoken.data.prompts import Prompt

WORDS = {1: "a ", 2: "b ", 3: "\ufffd", 4: "é "}


def decode(tokens):
    """Tokens 3 and 4 are the two bytes of one character."""
    return "".join(WORDS[token] for token in tokens).replace("\ufffdé", "é")


def test_pieces_are_runs_of_one_writer():
    found = pieces([1, 2, 1, 2], [False, True, True, False], decode)
    assert [(each["text"], each["drafted"]) for each in found] == [("a ", False), ("b a ", True), ("b ", False)]
    assert pieces([], [], decode) == []


def test_half_a_character_is_not_shown_alone():
    found = pieces([1, 3, 4, 1], [False, False, True, True], decode)
    assert [(each["text"], each["drafted"]) for each in found] == [("a é a ", True)]


def test_the_first_prompt_of_each_category_in_the_first_repeat():
    prompts = [Prompt("0", "p", "x"), Prompt("1", "q", "x"), Prompt("2", "r", "y")]
    came = Metrics(emitted=[Emitted(0.1, 1, 0), Emitted(0.2, 2, 1)])
    samples = [
        Sample(label, prompt, repeat, 1.0, (1, 2, 1) if repeat == 0 else (2,), came, "no" if prompt.id == "2" else None)
        for repeat in (0, 1)
        for prompt in prompts
        for label in ("fast", "none")
    ]
    methods = [Method("none", {"method": "none"}), Method("fast", {"method": "fast"})]
    first, second = side_by_side(Records(samples, 2), methods, decode)
    assert (first["prompt"], first["category"], second["prompt"]) == ("0", "x", "2")
    assert [answer["method"] for answer in first["answers"]] == ["none", "fast"]
    assert [each["drafted"] for each in first["answers"][1]["pieces"]] == [False, True, False]
    assert second["answers"][0]["error"] == "no"
