"""Finding a key in a long text: lines that give secret numbers, hidden in filler, and a question about one of them.

What a method that sees only a part of the cache loses first is a single fact far back. Every document hides several
keys, so that a model which has merely noticed that numbers matter is wrong; the needed one may be anywhere, and its
place is recorded (``Example.depth``), spread evenly over the text.
"""

# ruff: noqa: SIM905 - lists of words are read as words, not as two hundred pairs of quotes

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random

from foretoken.core.errors import ConfigError
from foretoken_lab.tasks.example import Example, Split, only, prompt_hash
from foretoken_lab.tasks.profiles import passage_prompt

Filler = Callable[[Random], str]

CATEGORIES = ("depth_0-25", "depth_25-50", "depth_50-75", "depth_75-100")

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_OWNERS = (
    "Paris London Berlin Madrid Oslo Cairo Lima Tokyo Delhi Rome Vienna Athens Dublin Lisbon Prague Boston Chicago "
    "Denver Sydney Geneva Havana Warsaw Bergen Naples Toronto Nairobi Bogota Seoul Hanoi Quito Tunis Riga Turin Porto "
    "Anna Boris Clara David Elena Frank Greta Henry Irene Jonas Karla Louis Marta Norman Olive Peter Ruth Simon Teresa "
    "Ulrich Violet Walter Yvonne Arthur Bella Conrad Daisy Edgar"
).split()
_SUBJECTS = (
    "the old gardener|a grey cat|the postman|my neighbour|the baker|a tall sailor|the new teacher|the young doctor|"
    "the miller's dog|a group of children|the river|the morning train|a flock of birds|the librarian|an old friend|"
    "the west wind|the village band|a quiet stranger|the shopkeeper|the farmer's wife"
).split("|")
_ACTIONS = (
    "walked slowly along the wall|waited next to the gate|turned towards the hills|passed the market square|"
    "stopped near the bridge|looked out over the fields|came back without a word|went on as if nothing had happened|"
    "stayed there for a while|crossed the empty street|disappeared after the houses|rested under the trees|"
    "returned from the harbour|moved on to the next village|stood still and listened|left the warm kitchen"
).split("|")
_TIMES = (
    "In the morning|Later that day|Toward evening|After the rain|On most days|Before the bells rang|Some time ago|"
    "As usual|At the end of summer|When the light faded|Without hurry|Once again|In those years|Soon afterwards"
).split("|")
_ENDINGS = (
    "|, and the air was cold|, while the clouds drifted by|, and nobody took notice|, for the day had been long|"
    ", as it had always been|, though the road was muddy|, and the smell of bread was everywhere|, until it grew dark"
).split("|")


def examples(
    split: Split,
    seed: int,
    length: int = 1200,
    num_keys: int = 4,
    filler: Filler | None = None,
    count: Callable[[str], int] = len,
) -> Iterator[Example]:
    """Documents with hidden keys, without end.

    Args:
        split: the half to draw from.
        seed: equal seeds give equal documents.
        length: of the whole prompt, in what ``count`` counts. Documents are as long as whole sentences allow, and
            never longer.
        num_keys: keys in a document; the question is about one of them.
        filler: gives a sentence or a paragraph to hide the keys in; default: plain sentences of our own.
        count: the length of a text: ``len`` counts characters, a tokenizer's length function tokens.
    Raises:
        ConfigError: unknown split, a number of keys out of range, or a length too short for so many keys.
    """
    if not 1 <= num_keys <= len(_OWNERS):
        raise ConfigError(f"num_keys={num_keys} must be from 1 to {len(_OWNERS)}")
    needed = count(_prompt([key_line(owner, 10000) for owner in _OWNERS[:num_keys]], _OWNERS[0]))
    if length < needed * 1.2:
        raise ConfigError(
            f"prompts of length={length} tokens are too short for {num_keys} keys and text between: give {needed * 2}"
        )
    return only(split, _draw(Random(f"keys {seed}"), length, num_keys, filler or plain_sentence, count))


def plain_sentence(rng: Random) -> str:
    """A plain sentence without numbers, from some forty thousand."""
    return f"{rng.choice(_TIMES)}, {rng.choice(_SUBJECTS)} {rng.choice(_ACTIONS)}{rng.choice(_ENDINGS)}."


def _draw(rng: Random, length: int, num_keys: int, filler: Filler, count: Callable[[str], int]) -> Iterator[Example]:
    while True:
        owners = rng.sample(_OWNERS, num_keys)
        numbers = rng.sample(range(10000, 100000), num_keys)
        keys = [key_line(owner, number) for owner, number in zip(owners, numbers, strict=True)]
        text = _fill(rng, length - count(_prompt(keys, owners[0])), filler, count)
        depth = rng.random()
        # the first key, the needed one, goes where the depth says, the others anywhere
        places = [round(depth * len(text))] + [rng.randint(0, len(text)) for _ in keys[1:]]
        lines = _insert(text, keys, places)
        document = " ".join(lines)
        start = document.index(keys[0])
        reached = start / max(1, len(document) - len(keys[0]))
        prompt = _prompt(lines, owners[0])
        yield Example(
            id=f"keys/{prompt_hash(prompt)}",
            prompt=prompt,
            answer=str(numbers[0]),
            response=keys[0],
            category=CATEGORIES[min(3, int(reached * 4))],
            depth=reached,
        )


def _fill(rng: Random, room: int, filler: Filler, count: Callable[[str], int]) -> list[str]:
    """Sentences of filler up to the remaining length. A paragraph is split, so that keys can stand in it."""
    text: list[str] = []
    while True:
        for sentence in _SENTENCE_END.split(filler(rng).strip()):
            room -= count(sentence) + 1  # the space between sentences
            if room < 0:
                return text
            text.append(sentence)


def _insert(text: Sequence[str], keys: Sequence[str], places: Sequence[int]) -> list[str]:
    """The text with key i before sentence places[i]."""
    at: dict[int, list[str]] = {}
    for key, place in zip(keys, places, strict=True):
        at.setdefault(place, []).append(key)
    lines: list[str] = []
    for index in range(len(text) + 1):
        lines += at.get(index, []) + list(text[index : index + 1])
    return lines


def key_line(owner: str, number: int | str) -> str:
    """The sentence that hides a key, and that answers the question for it."""
    return f"The secret number of {owner} is {number}."


def _prompt(lines: Sequence[str], owner: str) -> str:
    return passage_prompt(" ".join(lines), f"What is the secret number of {owner}?")
