"""Prompts of a given length: the suite's own, each preceded by text of the other prompts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from foretoken.core.errors import InputError
from foretoken.data.prompts import Prompt


def of_length(prompts: Sequence[Prompt], num_tokens: int, count: Callable[[str], int]) -> list[Prompt]:
    """Extend the prompts in front to at most ``num_tokens``; longer ones are left out.

    The text in front consists of the other prompts, repeated if necessary: drafters that copy find more matches there
    than in a text without repetition.

    Args:
        count: returns the number of tokens of a text, including the chat template.
    Raises:
        InputError: all prompts are longer.
    """
    found = []
    for place, prompt in enumerate(prompts):
        if count(prompt.text) > num_tokens:
            continue
        others = [each.text for each in (*prompts[place + 1 :], *prompts[:place])] or [prompt.text]
        words = " ".join(others).split(" ")
        words *= -(-num_tokens // len(words))  # a word has about one token or more
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
