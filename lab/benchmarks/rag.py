"""Retrieval while an answer is written: its effect on answers, and the time that speculation on it saves.

    python benchmarks/rag.py --parts answers --data DATA --json rag_answers.json
    python benchmarks/rag.py --parts speed --data DATA --json rag_speed.json

* answers: factbook questions about countries that the present mixtures leave out, without a passage, with retrieved
  ones, and with the piece that holds the answer (gold). Pages are cut into pieces of at most 600 characters, at ends of
  lines.
* speed: open-ended continuations under the pieces of those pages. Larger collections are these pieces and short random
  vectors next to them, which cost a search what passages would and are never found, so guesses are as right as without
  them. Vectors are a fixed random projection of the target's mean states (for kNN-LM: the states themselves). Methods
  take turns, question by question, and begin without keys and values of earlier ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from foretoken.core.files import check_writable, write_whole
from foretoken.core.provenance import provenance
from foretoken.data.folder import data_root
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken_lab.intervals import wilson_interval
from foretoken_lab.peers.versions import Quiet, command
from foretoken_lab.rag.config import RagConfig
from foretoken_lab.rag.encoders import FolderEncoder, TargetEncoder
from foretoken_lab.rag.knn import KnnStore
from foretoken_lab.rag.passages import Passage
from foretoken_lab.rag.retrievers import Bm25Retriever, DenseRetriever
from foretoken_lab.rag.session import NO_PASSAGE
from foretoken_lab.rag.system import Rag
from foretoken_lab.rag.vectors import vectors_of
from foretoken_lab.recipes.sources import read_country
from foretoken_lab.records import read_records
from foretoken_lab.tasks.example import Example
from foretoken_lab.tasks.scoring import score_span

_PIECE = 600  # characters
_WIDTH = 128  # of projected vectors
_SHORT = 0.2  # length of random vectors: of a million of unit length some would be nearer than any piece
_FIELDS = ("id", "turns", "answers", "passage_ids", "field")
_TOPICS = ("economy", "geography", "government", "people", "history", "climate", "transport", "energy")


def main() -> int:
    options = _options()
    torch.set_num_threads(options.threads)
    quiet = Quiet()
    if options.json:
        check_writable(options.json, "--json")
    target = load(options.target, dtype=options.dtype)
    root = data_root(options.data)
    pieces, asked = _pieces(root)[: options.pieces], list(_questions(root))
    console, found = Console(width=None if sys.stdout.isatty() else 160), {}
    if "answers" in options.parts:
        found["answers"] = _answers(target, pieces, asked, options)
        console.print(_table(found["answers"]))
    if "speed" in options.parts:
        found["speed"] = _speed(target, pieces, options)
        console.print(_table(found["speed"]))
    others = quiet.report()
    if options.json:
        facts = provenance([], model=options.target, dtype=options.dtype, threads=options.threads)
        facts["command"] = command("rag.py")
        facts["share_of_processors_used_by_others"] = others
        write_whole(options.json, json.dumps({"provenance": facts, **found}, indent=1) + "\n")
    return 0


# ---------------------------------------------------------------- the collection


def _pieces(root: Path) -> list[Passage]:
    """Pages of unseen countries in pieces, each under its title; named by the passage that it is of."""
    found: dict[str, Passage] = {}
    for record in read_records(root / "factbook" / "passages.jsonl.xz", ("id", "title", "text")):
        if read_country(record["id"]):
            continue
        piece = ""
        for line in [*record["text"].splitlines(), ""]:
            if piece and (not line or len(piece) + len(line) > _PIECE):
                text = f"{record['title']}\n{piece}"
                found.setdefault(text, Passage(record["id"], text))
                piece = ""
            piece += f"{line[:_PIECE]}\n"
    return list(found.values())


def _questions(root: Path) -> Iterator[tuple[Example, list[str]]]:
    """The questions about unseen countries, and the passages that answer them."""
    for record in read_records(root / "eval" / "factbook_qa.jsonl.gz", _FIELDS):
        if not read_country(record["id"]):
            first, *others = record["answers"]
            example = Example(
                id=record["id"], prompt=record["turns"][0], answer=first, response=first,
                category=record["field"].partition(" / ")[0], alternatives=tuple(others),
            )  # fmt: skip
            yield example, record["passage_ids"]


# ---------------------------------------------------------------- answers


class _Given:
    """A retriever with given results."""

    name, number = "given", NO_PASSAGE

    def __init__(self, size: int) -> None:
        self.size = size

    def query(self, text: str) -> None:
        return None

    def search(self, queries: Any) -> list[list[int]]:
        return [[self.number] for _ in queries]

    def best_of(self, query: Any, numbers: Any) -> int:
        return self.number


def _answers(
    target: LanguageModel, pieces: list[Passage], asked: list[tuple[Example, list[str]]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    gold = {example.id: _gold(pieces, example, names) for example, names in asked}
    asked = [each for each in asked if gold[each[0].id] is not None][: options.limit]
    given = _Given(len(pieces))
    retrievers: dict[str, Any] = {"no passage": given, "gold piece": given, "bm25": Bm25Retriever(pieces)}
    encoders = {"flat, target's states": TargetEncoder(target)}
    if options.encoder:
        encoders["flat, encoder"] = FolderEncoder(options.encoder)
    for name, encoder in encoders.items():
        retrievers[name] = DenseRetriever("flat", vectors_of(pieces, encoder, None), encoder)
    rows = []
    for name, retriever in retrievers.items():
        config = RagConfig(every=options.every)
        system = Rag(target, pieces, retriever=retriever, method="sequential", config=config)
        marks, hits = [], []
        for example, _ in asked:
            given.number = gold[example.id] if name == "gold piece" else NO_PASSAGE
            (answer,) = system.generate([example.prompt], max_tokens=options.max_tokens)
            marks.append(score_span(answer.text, example))
            first = answer.counts.passages[0]
            hits.append(first != NO_PASSAGE and example.answer in pieces[first].text)
        right = int(sum(each["correct"] for each in marks))
        low, high = wilson_interval(right, len(marks))
        rows.append(
            {
                "passages": name,
                "questions": len(marks),
                "exact": right / len(marks),
                "from": low,
                "to": high,
                "f1": mean(each["f1"] for each in marks),
                "first passage holds the answer": mean(hits),
            }
        )
    return rows


def _gold(pieces: list[Passage], example: Example, names: list[str]) -> int | None:
    """The first piece of a named passage that holds the answer."""
    return next((n for n, each in enumerate(pieces) if each.name in names and example.answer in each.text), None)


# ---------------------------------------------------------------- speed


class _Projected:
    """The target's mean states, projected: an encoder with vectors that are cheap to compare."""

    def __init__(self, target: LanguageModel) -> None:
        self._inner = TargetEncoder(target)
        self.name = f"projected {self._inner.name}"
        width = len(self._inner.encode("x"))
        self._matrix = np.random.default_rng(0).standard_normal((width, _WIDTH)).astype(np.float32)

    def encode(self, text: str) -> np.ndarray:
        vector = self._inner.encode(text) @ self._matrix
        found: np.ndarray = vector / np.linalg.norm(vector)
        return found


def _speed(target: LanguageModel, pieces: list[Passage], options: argparse.Namespace) -> list[dict[str, Any]]:
    countries = list(dict.fromkeys(each.text.partition(" - ")[0] for each in pieces))
    questions = [
        f"Tell me about the {_TOPICS[n % len(_TOPICS)]} of {countries[7 * n % len(countries)]}."
        for n in range(options.questions)
    ]
    encoder = _Projected(target)
    real = vectors_of(pieces, encoder, None)
    rows = []
    for name, size in (each.split(":") for each in options.collections.split(",")):
        count = int(float(size))
        if name == "bm25":
            retriever: Any = Bm25Retriever(pieces)
            count = len(pieces)
        elif name == "knn":
            retriever = "knn"
        else:
            retriever = DenseRetriever(name, _padded(real, count), encoder)
        rows += _race(target, pieces, name, count, retriever, questions, options)
    return rows


def _padded(real: np.ndarray, count: int) -> np.ndarray:
    """The real vectors, and random ones after them."""
    if count <= len(real):
        return real[:count]
    made = np.empty((count, real.shape[1]), np.float32)
    made[: len(real)] = real
    rng = np.random.default_rng(1)
    for begin in range(len(real), count, 1 << 16):
        rows = rng.standard_normal((min(1 << 16, count - begin), real.shape[1]), dtype=np.float32)
        made[begin : begin + len(rows)] = _SHORT * rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return made


def _race(
    target: LanguageModel,
    pieces: list[Passage],
    name: str,
    count: int,
    retriever: Any,
    questions: list[str],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    base = RagConfig(every=options.every)
    shapes: dict[str, RagConfig | None] = {
        "sequential": None,
        "stride 1": replace(base, stride=1),
        "stride 3": replace(base, stride=3),
        "stride 3, in a row": replace(base, stride=3, asynchronous=False),
        "auto": base,
        "auto, prefetch 1": replace(base, prefetch=1),
    }
    store = None
    if retriever == "knn":
        read = KnnStore.of(target, pieces[: options.knn_pieces])
        extra = np.zeros(max(0, count - len(read)), np.int64)
        store = KnnStore(_padded(read.keys, count), np.concatenate([read.values, extra])[:count])
        shapes = {key: each for key, each in shapes.items() if key not in ("stride 3, in a row", "auto, prefetch 1")}
        shapes["stride 8"] = replace(base, stride=8)
        pieces = pieces[:1]  # what each system reads by itself is replaced
    systems = {}
    for shape, config in shapes.items():
        method = "sequential" if config is None else "ralmspec"
        systems[shape] = Rag(target, pieces, retriever=retriever, method=method, config=config or base)
        if store is not None:
            systems[shape]._knn._store = store
    answers: dict[str, list[Any]] = {shape: [] for shape in systems}
    for turn, question in enumerate(["Warm up.", *questions]):
        names = list(systems)
        for shape in names[turn % len(names) :] + names[: turn % len(names)]:
            systems[shape].forget()
            (answer,) = systems[shape].generate([question], max_tokens=options.max_tokens, ignore_eos=True)
            if answer.completion.error:
                raise SystemExit(f"{name}, {shape}: {answer.completion.error}")
            if turn:
                answers[shape].append(answer)
    rows = []
    plain = answers["sequential"]
    for shape, found in answers.items():
        seconds = sum(each.completion.metrics.seconds for each in found)
        counts = [each.counts for each in found]
        guesses = sum(each.guesses for each in counts)
        strides = systems[shape].strides
        fixed, slope = strides.search_seconds
        a = strides.step_seconds or sum(each.decode_seconds + each.encode_seconds for each in counts) / max(
            1, sum(each.steps for each in counts)
        )
        rows.append(
            {
                "retriever": name,
                "size": count,
                "method": shape,
                "seconds": seconds,
                "speed-up": sum(each.completion.metrics.seconds for each in plain) / seconds,
                "a ms": 1e3 * a,
                "b(1) ms": 1e3 * (fixed + slope),
                "b per query ms": 1e3 * slope,
                "waited": sum(each.waited_seconds for each in counts) / seconds,
                "right": sum(each.right_guesses for each in counts) / guesses if guesses else None,
                "searches": sum(each.retrievals for each in counts),
                "stride": mean([s for each in counts for s in each.strides] or [1]),
                "rows": sum(each.rows for each in counts),
                "recomputed": sum(each.recomputed_rows for each in counts),
                "same text": all(x.token_ids == y.token_ids for x, y in zip(found, plain, strict=True)),
            }
        )
    return rows


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{each:.3g}" if isinstance(each, float) else str(each) for each in row.values()))
    return table


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="answers,speed")
    parser.add_argument("--data", type=Path, help="folder of the corpora")
    parser.add_argument("--target", default="zoo:base")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--encoder", help="folder of an encoder, for answers")
    parser.add_argument("--every", type=int, default=4, help="tokens under one passage")
    parser.add_argument("--pieces", type=int, help="of the collection, and questions about them only; all")
    parser.add_argument("--limit", type=int, help="questions to answer; all")
    parser.add_argument("--questions", type=int, default=5, help="continuations to time")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--collections", default="flat:3e3,flat:1e6,hnsw:1e5,bm25:0,knn:2e5", help="RETRIEVER:SIZE,…")
    parser.add_argument("--knn-pieces", type=int, default=200, help="pieces that the store of knn is read from")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
