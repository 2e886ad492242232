"""What a model says itself, as training documents: openings taken from a mixture, continued by the model.

A draft is judged on the target's own words, not on those of a corpus, so it is trained on them (Zhou et al.,
"DistillSpec", 2024, section 4), or on its own words (on-policy), with the target's distribution at every position as
the label. Documents are stored as they are made: an interrupted run reads the stored ones and goes on.
"""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from foretoken.core.errors import InputError
from foretoken.data.documents import BOS, EOS
from foretoken.engine.llm import LLM
from foretoken.options.sampling import SamplingParams
from foretoken.train.mixture import Source, is_held_out
from foretoken.train.rendering import beginning

BATCH = 64  # openings continued at a time
LONGEST_OPENING = 256  # tokens
LENGTH = 96  # tokens of a continuation
SAMPLED = 0.5  # of the continuations are drawn at temperature 1, the others greedy

_ASSISTANT = "<|assistant|>\n"


class Outputs:
    """A model's continuations of a mixture's openings, generated as far as they are read.

    Args:
        model: returns the folder or name of the model; called for every batch, so that it may change.
        sources: where the openings come from, in their shares.
        store: JSON Lines file of the generated documents.
        seed: of the choice of openings and of the sampling.
        renew: load the model anew for every batch.
    """

    def __init__(
        self, model: Callable[[], str], sources: list[Source], store: Path, seed: int, *, renew: bool = False
    ) -> None:
        self._model, self._sources, self._store, self._seed, self._renew = model, sources, store, seed, renew
        self._llm: LLM | None = None

    def source(self, name: str, share: float) -> Source:
        """These documents as a source of a mixture."""
        return Source(name, share, self._documents, kept=self._stored)

    def _stored(self) -> Iterator[str]:
        """The documents generated so far."""
        if self._store.exists():
            with self._store.open(encoding="utf-8") as file:
                for line in file:
                    if line.endswith("\n"):  # the last line of a killed run may be cut off
                        yield json.loads(line)["document"]

    def _documents(self) -> Iterator[str]:
        stored = 0
        for document in self._stored():
            stored += 1
            yield document
        if self._store.exists():
            self._cut_after(stored)
        openings = itertools.islice(self._openings(), stored, None)
        while batch := list(itertools.islice(openings, BATCH)):
            made = self._continue(batch, stored)
            with self._store.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"document": document}) + "\n" for document in made)
            stored += len(made)
            yield from made

    def _cut_after(self, lines: int) -> None:
        with self._store.open("rb+") as file:
            for _ in range(lines):
                file.readline()
            file.truncate()

    def _openings(self) -> Iterator[str]:
        rng = random.Random(f"openings {self._seed}")
        readers = [_endless(source) for source in self._sources]
        shares = [source.share for source in self._sources]
        while True:
            [reader] = rng.choices(readers, shares)
            yield opening(next(reader), rng)

    def _continue(self, openings: list[str], number: int) -> list[str]:
        if self._llm is None or self._renew:
            self._llm = LLM(self._model(), speculative_config={"method": "none"}, max_num_seqs=BATCH)
        llm = self._llm
        encode: Any = llm.tokenizer
        texts = [beginning(each, llm.tokenizer) for each in openings]
        ids = encode(texts, add_special_tokens=False)["input_ids"]
        params = [
            SamplingParams(
                max_tokens=LENGTH, temperature=1.0 if place % 100 < SAMPLED * 100 else 0.0, seed=self._seed + place
            )
            for place in range(number, number + len(ids))
        ]
        outputs = llm.generate([{"prompt_token_ids": each[-LONGEST_OPENING:]} for each in ids], params)
        return [
            encode.decode(output.prompt_token_ids, skip_special_tokens=False)
            + encode.decode(output.token_ids, skip_special_tokens=False)
            + ("\n" if output.finish_reason == "stop" else "")
            for output in outputs
        ]


def opening(document: str, rng: random.Random) -> str:
    """A document up to a point where a model continues it: an answer's beginning, or anywhere in a text."""
    answers = document.count(_ASSISTANT)
    unasked = int(document.startswith(BOS + _ASSISTANT))
    if answers > unasked:
        pieces = document.split(_ASSISTANT)
        return _ASSISTANT.join(pieces[: rng.randint(1 + unasked, answers)]) + _ASSISTANT
    body = document.removeprefix(BOS).removesuffix(EOS)
    start = rng.randrange(max(1, len(body) - 800))
    return BOS + body[start : start + rng.randint(60, 600)]


def _endless(source: Source) -> Iterator[str]:
    """The documents of a source that are trained on, over and over."""
    while True:
        empty = True
        for document in source.documents():
            if not is_held_out(document):
                empty = False
                yield document
        if empty:
            raise InputError(f"corpus '{source.name}' is empty: it holds no document to train on")
