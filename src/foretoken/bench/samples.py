"""Answers of all methods to the same prompts, side by side, with the accepted draft tokens marked."""

from collections.abc import Callable, Sequence
from typing import Any

from foretoken.bench.harness import Method, Records, Sample

_MOST_TOKENS = 256  # maximum tokens of an answer in the report
_BROKEN = "\ufffd"  # decoding of an incomplete character


def side_by_side(
    records: Records, methods: Sequence[Method], decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """Return every method's answer to the first prompt of each category, in the first repeat; JSON-ready.

    Args:
        decode: converts token ids to text.
    """
    first: dict[str, int] = {}
    for sample in records.samples:
        first.setdefault(sample.prompt.category, id(sample.prompt))
    found = []
    for category, wanted in first.items():
        answers = {s.label: s for s in records.samples if id(s.prompt) == wanted and s.repeat == 0}
        prompt = next(iter(answers.values())).prompt
        found.append(
            {
                "prompt": prompt.id,
                "category": category,
                "text": prompt.text,
                "answers": [_answer(answers[m.label], decode) for m in methods if m.label in answers],
            }
        )
    return found


def _answer(sample: Sample, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    drafted = [place < step.drafted for step in sample.metrics.emitted for place in range(step.tokens)]
    drafted += [False] * (len(sample.tokens) - len(drafted))  # the engine did not record the times of tokens
    tokens = sample.tokens[:_MOST_TOKENS]
    return {
        "method": sample.label,
        "pieces": pieces(tokens, drafted[: len(tokens)], decode),
        "cut": len(tokens) < len(sample.tokens),
        "error": sample.error,
    }


def pieces(
    tokens: Sequence[int], drafted: Sequence[bool], decode: Callable[[Sequence[int]], str]
) -> list[dict[str, Any]]:
    """Split the text into pieces, each from the draft or from the target.

    A character of several tokens belongs to the source of its last token.
    """
    found: list[dict[str, Any]] = []
    shown = ""
    for end in range(1, len(tokens) + 1):
        last = end == len(tokens)
        if not last and drafted[end - 1] == drafted[end]:
            continue
        text = decode(tokens[:end])
        if text.endswith(_BROKEN) and not last:
            continue
        if len(text) > len(shown):
            found.append({"text": text[len(shown) :], "drafted": drafted[end - 1]})
            shown = text
    return found
