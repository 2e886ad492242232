"""Labels for the judge from annotations: a question, a correct answer, and a wrong one with its error marked.

    {"question": "What is 2 + 3?", "correct": "It is 5.", "wrong": "It is 6.", "error": [6, 7]}

``error`` counts characters of ``wrong``, its end exclusive. Every token of a correct answer is fine. In a wrong answer,
tokens before the error are fine, tokens that overlap it are not, and tokens after it:

    mask       have no label: they may be right, given the error
    negative   are not fine either, as in AutoJudge's notebook of manual annotation (arXiv:2504.20039)

Paper: arXiv:2501.19309 has about 500 such triples ("TokenCourt", not released) and does not specify the labels of
tokens after an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError, InputError
from foretoken.core.tree import TokenTree
from foretoken.engine.llm import LLM
from foretoken_lab.judge.labels import Marked
from foretoken_lab.records import placed_records
from foretoken_lab.tasks.prompt_ids import question_ids

TAILS = ("mask", "negative")
_FIELDS = ("question", "correct", "wrong", "error")


def check_tail(tail: str) -> None:
    """Refuse an unknown treatment of the tokens after an error.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    if tail not in TAILS:
        raise ConfigError(f"--tail {tail}: must be {' or '.join(TAILS)}")


def read_triples(path: Path, llm: LLM, tail: str = "mask") -> list[Marked]:
    """Return two texts for every line of a JSON Lines file.

    Args:
        llm: the target, for its tokenizer and chat template.
        tail: "mask" or "negative".
    Raises:
        ConfigError: an unknown tail, or a tokenizer without token offsets.
        InputError: a line cannot be used; the message names it.
    """
    check_tail(tail)
    if not getattr(llm.tokenizer, "is_fast", False):
        raise ConfigError(f"--triples: the tokenizer of '{llm.target.name}' does not return token offsets")
    source = path.name.split(".")[0]
    records = placed_records(path, _FIELDS)
    found = [marked for place, record in records for marked in _both(source, place, record, llm, tail)]
    if not found:
        raise InputError(f"{path}: holds no triples")
    return found


def _both(source: str, place: str, record: dict[str, Any], llm: LLM, tail: str) -> Iterator[Marked]:
    for name in ("question", "correct", "wrong"):
        if not isinstance(record[name], str) or not record[name]:
            raise InputError(f"{place}: '{name}' must be a text")
    begin, end = _span(place, record["error"], len(record["wrong"]))
    prompt = question_ids(llm, record["question"])
    fine, bad = (source, True), (source, False)
    behind = None if tail == "mask" else bad
    for text, first, last in ((record["correct"], None, None), (record["wrong"], begin, end)):
        encoded = llm.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = list(encoded["input_ids"])
        if len(prompt) + len(tokens) > llm.target.max_length:
            raise InputError(
                f"{place}: question and answer have {len(prompt) + len(tokens)} tokens, the context of "
                f"'{llm.target.name}' holds {llm.target.max_length}: shorten them"
            )
        labels = [
            fine if first is None or stop <= first else bad if start < last else behind
            for start, stop in encoded["offset_mapping"]
        ]
        yield Marked(prompt, TokenTree(tokens), labels)


def _span(place: str, error: Any, length: int) -> tuple[int, int]:
    whole = isinstance(error, list) and len(error) == 2 and all(type(each) is int for each in error)
    if not whole or not 0 <= error[0] < error[1] <= length:
        raise InputError(
            f"{place}: 'error' must be [BEGIN, END], characters of 'wrong' with 0 <= BEGIN < END <= {length}, "
            f"not {str(error)[:60]}"
        )
    return error[0], error[1]
