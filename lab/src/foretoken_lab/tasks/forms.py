"""Two checks of form: a JSON object from a description, and a small Python function.

Both are strict, since they test form: a JSON answer is right only if it parses to the expected value, a
function only if its syntax tree equals the expected one. Nothing that a model writes is executed to score it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from foretoken_lab.tasks.example import Example, Split, only, prompt_hash


class Function(NamedTuple):
    """A function for a question: names to choose from, parameters, a description, and its lines.

    ``{n}`` stands for a small number and ``{w}`` for a word, drawn for each request; parameters are ``{p}``, ``{q}``,
    ``{r}``, named from the group that ``parameters`` gives.
    """

    names: str
    parameters: str
    does: Sequence[str]
    body: str


_TEXTS = json.loads(Path(__file__).with_name("forms.json").read_text(encoding="utf-8"))
# fields of a JSON object by the kind of their value, and how a description names them
STRING_FIELDS, INTEGER_FIELDS, BOOLEAN_FIELDS, LIST_FIELDS = (
    _TEXTS[f"{kind}_fields"] for kind in ("string", "integer", "boolean", "list")
)
STRING_FORMS, INTEGER_FORMS, BOOLEAN_FORMS, LIST_FORMS = (
    _TEXTS[f"{kind}_forms"] for kind in ("string", "integer", "boolean", "list")
)
REQUESTS, CODE_REQUESTS, GREETINGS = (_TEXTS[name] for name in ("requests", "code_requests", "greetings"))
# groups of parameter names: as many names as the function has parameters
PARAMETERS = {group: [tuple(names) for names in each] for group, each in _TEXTS["parameters"].items()}
# arguments that distinguish the functions of a group; arguments at which a function raises do not count
CALLS = {group: tuple(map(tuple, each)) for group, each in _TEXTS["calls"].items()}
FUNCTIONS = [Function(**each) for each in _TEXTS["functions"]]

SMALLEST_OBJECT, LARGEST_OBJECT = 2, 5  # fields

_KINDS = ("string", "string", "integer", "integer", "boolean", "list")
_LETTERS = "abcdeilmnorstu"


def json_examples(split: Split, seed: int) -> Iterator[Example]:
    """JSON objects described in words, without end. Categories: "2_fields" to "5_fields"; answer: the JSON text.

    Raises:
        ConfigError: unknown split.
    """
    return only(split, _draw_json(Random(f"json {seed}")))


def code_examples(split: Split, seed: int) -> Iterator[Example]:
    """Small Python functions described in words, without end. Categories: "one_line", "more_lines"; answer: the block.

    Raises:
        ConfigError: unknown split.
    """
    return only(split, _draw_code(Random(f"code {seed}")))


def _draw_json(rng: Random) -> Iterator[Example]:
    while True:
        size = rng.randint(SMALLEST_OBJECT, LARGEST_OBJECT)
        fields: dict[str, Any] = {}
        phrases: list[str] = []
        while len(fields) < size:
            key, value, phrase = _draw_field(rng, rng.choice(_KINDS))
            if key not in fields:
                fields[key] = value
                phrases.append(phrase)
        prompt = rng.choice(REQUESTS).format(fields=_in_words(phrases))
        answer = json.dumps(fields)
        yield Example(
            id=f"json/{prompt_hash(prompt)}", prompt=prompt, answer=answer, response=answer, category=f"{size}_fields"
        )


def _draw_field(rng: Random, kind: str) -> tuple[str, Any, str]:
    """A key, its value, and how a person would say so."""
    value: Any
    if kind == "string":
        key = rng.choice(tuple(STRING_FIELDS))
        value = rng.choice(STRING_FIELDS[key])
        return key, value, rng.choice(STRING_FORMS).format(key=key, value=value)
    if kind == "integer":
        key = rng.choice(INTEGER_FIELDS)
        value = rng.randint(1, 99) if rng.random() < 0.8 else rng.randint(100, 2000)
        return key, value, rng.choice(INTEGER_FORMS).format(key=key, value=value)
    if kind == "boolean":
        key = rng.choice(BOOLEAN_FIELDS)
        value = rng.random() < 0.5
        return key, value, rng.choice(BOOLEAN_FORMS).format(key=key, value=json.dumps(value))
    key = rng.choice(tuple(LIST_FIELDS))
    value = rng.sample(LIST_FIELDS[key], rng.randint(2, 3))
    return key, value, rng.choice(LIST_FORMS).format(key=key, value=_in_words(value))


def _in_words(items: list[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _draw_code(rng: Random) -> Iterator[Example]:
    while True:
        function = rng.choice(FUNCTIONS)
        parameters = rng.choice(PARAMETERS[function.parameters])
        letter, other_letter = rng.sample(_LETTERS, 2)
        words = {
            **dict(zip("pqr", parameters, strict=False)),
            "n": str(rng.randint(2, 99)),
            "w": rng.choice(GREETINGS),
            "l": letter,
            "k": other_letter,
        }
        signature = f"{rng.choice(function.names.split())}({', '.join(parameters)})"
        prompt = rng.choice(CODE_REQUESTS).format(signature=signature, does=rng.choice(function.does).format_map(words))
        lines = [f"def {signature}:", *(f"    {line}" for line in function.body.format_map(words).split("\n"))]
        answer = "```python\n" + "\n".join(lines) + "\n```"
        yield Example(
            id=f"code/{prompt_hash(prompt)}",
            prompt=prompt,
            answer=answer,
            response=answer,
            category="one_line" if len(lines) == 2 else "more_lines",
            calls=_calls(function.parameters, words),
        )


def _calls(parameters: str, words: Mapping[str, str]) -> tuple[tuple[Any, ...], ...]:
    """What to call a function with: the common arguments of its kind, and some about the words of this request.

    Args:
        parameters: their group, as in ``PARAMETERS``.
    """
    n, word, letter = int(words["n"]), words["w"], words["l"]
    about = {
        "number": ((n - 1,), (n,), (n + 1,), (2 * n,)),
        "list": ([n - 1, n, n + 1, 2 * n], list(range(n + 2))),
        "text": (f"{word} Ann", f"Ann {word}", word, f"{letter}x{words['k']}{letter}", letter.upper()),
        "table_key": (({"a": n}, "a"),),
    }.get(parameters, ())
    return (*CALLS[parameters], *(each if isinstance(each, tuple) else (each,) for each in about))
