"""Prompts of a given length: the suite's own, each after as much of the others' text as there is room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from foretoken.core.errors import InputError
from foretoken.data.prompts import Prompt


def of_length(prompts: Sequence[Prompt], num_tokens: int, count: Callable[[str], int]) -> list[Prompt]:
    """The prompts, filled up in front to at most so many tokens; those that are longer by themselves are left out.

    The text in front are the other prompts, repeated where they do not suffice: drafters that copy find more there
    than in a text that says everything once.

    Args:
        count: length of a text as the model reads it, chat template included.
    Raises:
        InputError: no prompt is short enough.
    """
    found = []
    for place, prompt in enumerate(prompts):
        if count(prompt.text) > num_tokens:
            continue
        others = [each.text for each in (*prompts[place + 1 :], *prompts[:place])] or [prompt.text]
        words = " ".join(others).split(" ")
        words *= -(-num_tokens // len(words))  # a word is at least about a token
        fits, too_many = 0, len(words) + 1
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if count(_behind(words[:middle], prompt.text)) <= num_tokens:
                fits = middle
            else:
                too_many = middle
        found.append(replace(prompt, text=_behind(words[:fits], prompt.text)))
    if not found:
        shortest = min(count(prompt.text) for prompt in prompts)
        raise InputError(f"--prompt-tokens {num_tokens}: the shortest prompt has {shortest} tokens")
    return found


def _behind(words: Sequence[str], text: str) -> str:
    return f"{' '.join(words)}\n\n{text}" if words else text
