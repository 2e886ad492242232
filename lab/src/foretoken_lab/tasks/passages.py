"""Questions that other people wrote: reading (SQuAD, factbook) and word problems (SVAMP, GSM8K).

The files are those of the data folder (:mod:`foretoken.data.corpora`), held-out questions only. Examples come in the
order of a hash of their names, so that the first hundred are a sample of all articles and kinds, and the same hundred
everywhere. The first 200 of the two reading tasks are bundled, in ``samples/``: they run without the folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from foretoken_lab.records import read_records
from foretoken_lab.tasks.example import Example, prompt_hash
from foretoken_lab.tasks.profiles import passage_prompt

SAMPLES = Path(__file__).resolve().parent / "samples"
SAMPLE_SIZE = 200
RECORD = ("id", "passage", "question", "answers", "category")
FACTBOOK_WINDOW = 800  # characters of a factbook passage that are shown; the answer is in them

_SQUAD = ("id", "turns", "answers", "passage_id", "is_impossible")
_FACTBOOK = ("id", "turns", "answers", "passage_ids", "field")


def squad(root: Path | None) -> list[Example]:
    """SQuAD v1.1 and v2.0 dev, the questions that have an answer; the bundled sample if ``root`` is None."""
    return _reading(_sample("squad") if root is None else squad_records(root))


def factbook(root: Path | None) -> list[Example]:
    """Questions about countries with a piece of their page; the bundled sample if ``root`` is None."""
    return _reading(_sample("factbook") if root is None else factbook_records(root))


def svamp(root: Path) -> list[Example]:
    """SVAMP: word problems of one or two steps. Categories: its kinds of calculation."""
    return _problems(root / "eval" / "svamp.jsonl.gz")


def gsm8k(root: Path) -> list[Example]:
    """GSM8K test: word problems of two to eight steps."""
    return _problems(root / "eval" / "gsm8k_test.jsonl.gz")


def squad_records(root: Path) -> Iterator[dict[str, Any]]:
    """Every SQuAD question that has an answer, as a record of ``RECORD`` fields."""
    passages = _passages(root / "rag_wiki" / "squad_passages.jsonl.gz")
    path = root / "eval" / "squad_dev.jsonl.gz"
    for record in read_records(path, _SQUAD):
        if not record["is_impossible"]:
            yield {
                "id": record["id"],
                "passage": passages[record["passage_id"]],
                "question": record["turns"][0],
                "answers": list(dict.fromkeys(record["answers"])),
                "category": "squad",
            }


def factbook_records(root: Path) -> Iterator[dict[str, Any]]:
    """The factbook questions that a piece of a page can answer, as records of ``RECORD`` fields.

    Left out are answers longer than half of the piece (16 of the 600 questions), and answers that are in none of the
    passages that the question names (none).
    """
    passages = _passages(root / "factbook" / "passages.jsonl.xz")
    for record in read_records(root / "eval" / "factbook_qa.jsonl.gz", _FACTBOOK):
        for answer in record["answers"]:
            found = next((passages[name] for name in record["passage_ids"] if answer in passages[name]), None)
            if found is not None and len(answer) <= FACTBOOK_WINDOW // 2:
                yield {
                    "id": record["id"],
                    "passage": window_around(found, answer, FACTBOOK_WINDOW),
                    "question": record["turns"][0],
                    "answers": record["answers"],
                    "category": record["field"].partition(" / ")[0],
                }
                break


def window_around(text: str, answer: str, size: int) -> str:
    """At most ``size`` characters of a text, whole words, with the first occurrence of the answer near the middle."""
    if len(text) <= size:
        return text
    begin = text.index(answer)
    start = max(0, min(begin - (size - len(answer)) // 2, len(text) - size))
    end = start + size
    if start > 0:  # to the next word, but never into the answer
        start = min(begin, text.find(" ", start) + 1 or start)
    if end < len(text):
        end = max(begin + len(answer), text.rfind(" ", start, end))
    return text[start:end].strip()


def in_hash_order(examples: Iterable[Example]) -> list[Example]:
    """The same examples, mixed: sorted by a hash of their names."""
    return sorted(examples, key=lambda example: prompt_hash(example.id))


def _sample(name: str) -> Iterator[dict[str, Any]]:
    return read_records(SAMPLES / f"{name}.jsonl", RECORD)


def _reading(records: Iterable[dict[str, Any]]) -> list[Example]:
    return in_hash_order(
        Example(
            id=record["id"],
            prompt=passage_prompt(record["passage"], record["question"]),
            answer=record["answers"][0],
            response=record["answers"][0],
            category=record["category"],
            alternatives=tuple(record["answers"][1:]),
        )
        for record in records
    )


def _problems(path: Path) -> list[Example]:
    return in_hash_order(
        Example(
            id=record["id"],
            prompt=record["turns"][0],
            answer=str(record["answer"]),
            response=str(record["answer"]),
            category=record["category"],
        )
        for record in read_records(path, ("id", "turns", "answer", "category"))
    )


def _passages(path: Path) -> dict[str, str]:
    return {record["id"]: record["text"] for record in read_records(path, ("id", "text"))}
