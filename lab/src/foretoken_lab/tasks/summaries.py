"""QMSum: a question about a meeting, answered in a few sentences, from as much of the transcript as fits.

Meetings have about nine thousand words, more than small models read. So an example shows a *window* of whole turns: for
a question about a part of the meeting it starts with the first turn that the data set marks as relevant to it, for a
question about all of it at the beginning. The model does not see the text outside of the window; figures name the
context that they were taken with. The score is ROUGE F1 against the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from foretoken.core.errors import ConfigError
from foretoken_lab.records import read_records
from foretoken_lab.tasks.example import Example
from foretoken_lab.tasks.passages import in_hash_order
from foretoken_lab.tasks.profiles import passage_prompt

MEASURES = ("rouge1", "rouge2", "rougeL")


def qmsum(root: Path, length: int, count: Callable[[str], int]) -> list[Example]:
    """QMSum validation and test. Categories: "general" (the whole meeting) and "specific".

    Args:
        root: the data folder.
        length: of a prompt at most, in what ``count`` counts.
        count: the length of a text.
    Raises:
        ConfigError: the package that scores the answers is missing.
        InputError: the file is missing or damaged.
    """
    _scorer()  # found out now, not after an hour of generating
    return in_hash_order(
        Example(
            id=f"{record['id']}/{index}",
            prompt=_prompt(record["document"].split("\n"), query, length, count),
            answer=query["answer"],
            response=query["answer"],
            category=query["type"],
        )
        for record in read_records(root / "eval" / "qmsum.jsonl.gz", ("id", "document", "queries"))
        for index, query in enumerate(record["queries"])
    )


def score_rouge(output: str, example: Example) -> dict[str, float]:
    """ROUGE-1, ROUGE-2 and ROUGE-L F1 with stemming, as in the QMSum paper.

    Raises:
        ConfigError: the package ``rouge-score`` is missing; the message says how to get it.
    """
    scores = _scorer().score(example.answer, output)
    return {name: float(scores[name].fmeasure) for name in MEASURES}


def _prompt(turns: list[str], query: dict[str, Any], length: int, count: Callable[[str], int]) -> str:
    spans = query.get("relevant_turns") or [["0", "0"]]
    first = min(int(begin) for begin, _ in spans)
    room = length - count(passage_prompt("", query["query"]))
    window: list[str] = []
    for turn in turns[first:]:
        room -= count(turn) + 1  # the line end
        if room < 0:
            break
        window.append(turn)
    return passage_prompt("\n".join(window), query["query"])


@lru_cache(maxsize=1)
def _scorer() -> Any:
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError:
        raise ConfigError(
            "task 'qmsum' needs the package rouge-score: pip install rouge-score, or leave the task out"
        ) from None
    return RougeScorer(list(MEASURES), use_stemmer=True)
