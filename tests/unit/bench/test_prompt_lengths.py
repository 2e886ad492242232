"""Prompts of a length: as near as words allow, and the question stays at the end."""

from __future__ import annotations

import pytest

from foretoken.bench.prompt_lengths import of_length
from foretoken.core.errors import InputError
from foretoken.data.prompts import Prompt


def count(text):
    return len(text.split())


PROMPTS = [Prompt("0", "one two", "a"), Prompt("1", "three four five", "b"), Prompt("2", "x " * 40, "b")]


def test_prompts_are_filled_up_in_front_and_long_ones_left_out():
    short, longer = of_length(PROMPTS, 30, count)
    assert (short.id, longer.id) == ("0", "1")
    assert count(short.text) == count(longer.text) == 30
    assert short.text.startswith("three four five x")
    assert short.text.endswith("\n\none two")
    assert longer.category == "b"


def test_a_text_that_does_not_suffice_is_repeated():
    (alone,) = of_length([PROMPTS[0]], 7, count)
    assert alone.text == "one two one two one\n\none two"
    assert of_length([PROMPTS[0]], 2, count) == [PROMPTS[0]]


def test_nothing_short_enough_is_refused():
    with pytest.raises(InputError, match="--prompt-tokens 1: the shortest prompt has 2"):
        of_length(PROMPTS, 1, count)
