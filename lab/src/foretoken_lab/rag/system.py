"""The interface of retrieval-augmented generation: a target, passages, a retriever, and one of two methods.

rag = Rag(load("zoo:base"), read_passages(Path("passages.jsonl")), retriever="bm25", method="ralmspec")
for answer in rag.generate(["What is the capital of Chad?"], max_tokens=32):
    answer.text, answer.counts.retrievals
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.metrics import Metrics
from foretoken.engine.output import Completion
from foretoken.engine.text.detokenise import text_of
from foretoken.models.language_model import LanguageModel
from foretoken.models.last_states import LastStates
from foretoken_lab.rag import ralmspec, sequential
from foretoken_lab.rag.config import RagConfig, check_names
from foretoken_lab.rag.counts import Counts
from foretoken_lab.rag.encoders import Encoder, TargetEncoder
from foretoken_lab.rag.knn import KnnRun, KnnStore
from foretoken_lab.rag.passages import Passage
from foretoken_lab.rag.retrievers import Bm25Retriever, DenseRetriever, Retriever
from foretoken_lab.rag.session import NO_PASSAGE, Layout, Session, Shelf
from foretoken_lab.rag.stride import Strides
from foretoken_lab.rag.vectors import GRAPH, vectors_of


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer.

    Attributes:
        prompt: the question.
        completion: as from ``LLM.generate``; its promise is "same text", compared with the sequential method.
        counts: searches, guesses, rollbacks, rows.
    """

    prompt: str
    completion: Completion
    counts: Counts

    @property
    def text(self) -> str:
        return self.completion.text

    @property
    def token_ids(self) -> list[int]:
        return self.completion.token_ids


class Rag:
    """Answers questions greedily, with a search every few tokens.

    Both methods generate the same text, token for token: in the native decoder because a row's bits depend only on its
    own past; elsewhere up to near-ties of the target's two best logits, which rounding may swap.

    Args:
        target: a loaded model.
        passages: the passages; for ``knn`` the corpus.
        retriever: "flat", "hnsw" (dense vectors by faiss), "bm25" or "knn" (kNN-LM); or your own object.
        method: "sequential" or "ralmspec".
        config: further options.
        encoder: of "flat" and "hnsw"; None: the mean of the target's last states.
        index: folder that stores vectors; None: they are computed each time.
        report: called with the number of encoded passages so far.
    Raises:
        ConfigError: an unknown name, an option without effect, or a package that is not installed.
        InputError: there are no passages.
    """

    def __init__(
        self,
        target: LanguageModel,
        passages: Sequence[Passage],
        *,
        retriever: str | Retriever = "flat",
        method: str = "ralmspec",
        config: RagConfig | None = None,
        encoder: Encoder | None = None,
        index: Path | None = None,
        report: Callable[[int], None] = lambda count: None,
    ) -> None:
        check_names(retriever, method)
        self.config = config or RagConfig()
        self.method = method
        self.target = target
        self._passages = passages
        self._layout = Layout.of(target.tokenizer)
        fixed = self.config.stride if isinstance(self.config.stride, int) else None
        knn = retriever == "knn"
        self.strides = Strides(fixed, asynchronous=self.config.asynchronous and not knn)
        self._knn: KnnRun | None = None
        if knn:
            states = LastStates(target)
            self._knn = KnnRun(KnnStore.of(target, passages, report), states, self.strides, self.config)
            self._shelf = Shelf(target, states.span)
            return
        self._shelf = Shelf(target)
        if retriever == "bm25":
            retriever = Bm25Retriever(passages)
        elif isinstance(retriever, str):
            encoder = encoder or TargetEncoder(target)
            vectors = vectors_of(passages, encoder, index, report) if passages else _none()
            retriever = DenseRetriever(retriever, vectors, encoder, None if index is None else index / GRAPH)
        self._searcher = sequential.Searcher(retriever, self.strides, self.config)

    def generate(
        self, questions: Sequence[str], *, max_tokens: int = 128, ignore_eos: bool = False
    ) -> Iterator[Answer]:
        """Yield the answers in order. A failed request has finish_reason "error"; the others are not affected.

        Raises:
            ConfigError: ``max_tokens`` is below 1.
        """
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ConfigError(f"max_tokens={max_tokens!r} must be an integer, at least 1")
        for question in questions:
            yield self._answer(question, max_tokens, ignore_eos)

    def forget(self) -> None:
        """Drop the keys and values of all passages, so that the next request starts with an empty cache."""
        self._shelf.clear()

    @torch.inference_mode()
    def _answer(self, question: str, max_tokens: int, ignore_eos: bool) -> Answer:
        began = time.perf_counter()
        session: Session | None = None
        error = None
        try:
            session = Session(
                self._shelf, self._layout, self._text_of, question, self.config, max_tokens, ignore_eos=ignore_eos
            )
            self._write(session)
        except Exception as failure:  # of this request only
            known = isinstance(failure, RequestError | ValueError)
            error = str(failure) if known else f"{type(failure).__name__}: {failure}"
        seconds = time.perf_counter() - began
        if session is None:
            return Answer(question, _completion(self.target, [], [], Metrics(), "error", error, ""), Counts())
        session.close()
        counts, tokens = session.counts, session.answer
        steps = len(tokens) + counts.discarded_tokens
        metrics = Metrics(num_tokens=len(tokens), num_steps=steps, seconds=seconds)
        metrics.verify_seconds = counts.decode_seconds
        metrics.other_seconds = seconds - counts.decode_seconds
        reason = "error" if error else "stop" if session.ended else "length"
        promise = "same text" if counts.failed is None else "approximate"
        return Answer(
            question, _completion(self.target, session.prompt, tokens, metrics, reason, error, promise), counts
        )

    def _write(self, session: Session) -> None:
        if self._knn is not None:
            (self._knn.sequential if self.method == "sequential" else self._knn.ralmspec)(session)
        elif self.method == "sequential":
            sequential.run(session, self._searcher, self.config)
        else:
            ralmspec.run(session, self._searcher, self.strides, self.config)

    def _text_of(self, number: int) -> str:
        assert number != NO_PASSAGE
        return self._passages[number].text


def _none() -> Any:
    import numpy as np

    return np.zeros((0, 1), np.float32)


def _completion(
    target: LanguageModel,
    prompt: Sequence[int],
    tokens: list[int],
    metrics: Metrics,
    reason: str,
    error: str | None,
    promise: str,
) -> Completion:
    shown = tokens[:-1] if reason == "stop" else tokens
    text = text_of(target.tokenizer, shown, prompt)
    return Completion(text, tokens, reason, error, metrics, None, promise)
