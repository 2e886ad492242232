"""What rounding does to a model: how far its distributions of the next token are from a reference's, over a text.

    KL(p || q) = Σ_v p[v] (log p[v] - log q[v])          p: the reference, q: the model, nats a token

The text is cut into windows, each read by itself. The model reads first, as it reads a prompt, and its logits go to a
temporary file; it can then be freed before the reference is loaded. So neither two models nor two whole [T, V] tensors
are in memory at once, and no logit is rounded in between. A shift that all logits of a position share changes nothing.

Letters: T tokens, V vocabulary, M rows of one forward.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.prefill import chunks

WINDOW = 1024  # tokens that are read together
_ROWS = 128  # of one forward of the model
_ROWS_COMPARED = 32  # at once, in float64: 67 MB for a vocabulary of 262,144


@dataclass(frozen=True, slots=True)
class RoundingError:
    """The distance of a model from a reference.

    Attributes:
        num_tokens: positions that were compared.
        mean_kl, median_kl, p99_kl: KL(reference || model), nats a token.
        same_best: share of positions where both have the same most probable token.
        perplexity: of the model; None: every window has a single token, and nothing was predicted.
        reference_perplexity: of the reference, likewise.
        perplexity_change: of the model, relative to the reference.
    """

    num_tokens: int
    mean_kl: float
    median_kl: float
    p99_kl: float
    same_best: float
    perplexity: float | None
    reference_perplexity: float | None
    perplexity_change: float | None


class Comparison:
    """Sums over the windows of a text."""

    def __init__(self) -> None:
        self._kl: list[Tensor] = []
        self._same = self._num_predicted = 0
        self._nats, self._reference_nats = 0.0, 0.0

    def add(self, found_TV: Tensor, expected_TV: Tensor, ids: Sequence[int]) -> None:
        """Compare a window.

        Args:
            found_TV: the model's logits; may have more or fewer tokens without a text (padding) than the reference.
            expected_TV: the reference's logits.
            ids: the window's T tokens; row t predicts token t + 1.
        """
        width = min(found_TV.shape[1], expected_TV.shape[1])
        for start in range(0, len(ids), _ROWS_COMPARED):
            rows = slice(start, start + _ROWS_COMPARED)
            found_MV, expected_MV = (each[rows, :width].double().log_softmax(-1) for each in (found_TV, expected_TV))
            kl_M = (expected_MV.exp() * (expected_MV - found_MV)).nan_to_num(posinf=math.inf).sum(-1)
            self._kl.append(kl_M.clamp_min(0))
            self._same += int((found_MV.argmax(-1) == expected_MV.argmax(-1)).sum())
            following = torch.tensor(ids[start + 1 : start + 1 + _ROWS_COMPARED])[:, None]
            self._num_predicted += len(following)
            self._nats -= found_MV[: len(following)].gather(1, following).sum().item()
            self._reference_nats -= expected_MV[: len(following)].gather(1, following).sum().item()

    def result(self) -> RoundingError:
        """The figures of all windows so far; at least one."""
        kl_T = torch.cat(self._kl)
        ours = theirs = change = None
        if self._num_predicted:
            nats, reference_nats = (each / self._num_predicted for each in (self._nats, self._reference_nats))
            ours, theirs, change = math.exp(nats), math.exp(reference_nats), math.expm1(nats - reference_nats)
        return RoundingError(
            num_tokens=len(kl_T),
            mean_kl=kl_T.mean().item(),
            median_kl=kl_T.median().item(),
            p99_kl=kl_T.quantile(0.99).item(),
            same_best=self._same / len(kl_T),
            perplexity=ours,
            reference_perplexity=theirs,
            perplexity_change=change,
        )


def windows(ids: Sequence[int], begin: Sequence[int], size: int) -> list[list[int]]:
    """Cut a text's tokens into windows.

    Args:
        ids: without special tokens.
        begin: what the tokenizer puts before every text, such as a BOS token; each window begins with it.
        size: tokens of a window, ``begin`` included; the last may have fewer.
    """
    step = max(1, size - len(begin))
    return [[*begin, *ids[start : start + step]] for start in range(0, len(ids), step)]


@torch.inference_mode()
def logits_of(target: LanguageModel, ids: Sequence[int]) -> Iterator[Tensor]:
    """A window's logits as the model computes a prompt's, float32 [M, V] after [M, V], in order."""
    cache = target.new_cache(1)
    for _, _, batch in chunks(cache, cache.acquire(), ids, rows=_ROWS, wanted=lambda begin, end: end - begin):
        yield target.forward(batch, DensePlan(cache, batch)).logits_MV.float()


Progress = Callable[[int], object]  # is given how many rows more have been read


class StoredLogits:
    """Logits [T, V] of several windows in a temporary file, float32; freed at the end of the ``with`` block."""

    def __init__(self, num_rows: int, width: int) -> None:
        self._shape = num_rows, width
        self._used = 0

    def __enter__(self) -> StoredLogits:
        self._folder = tempfile.TemporaryDirectory(prefix="foretoken-")
        path = str(Path(self._folder.name) / "logits")
        rows, width = self._shape
        self._logits_TV = torch.from_file(path, shared=True, size=rows * width, dtype=torch.float32).view(rows, width)
        return self

    def __exit__(self, *exception: object) -> None:
        del self._logits_TV
        self._folder.cleanup()

    def append(self, logits_MV: Tensor) -> None:
        """Store the next rows."""
        self._logits_TV[self._used : self._used + len(logits_MV)] = logits_MV
        self._used += len(logits_MV)

    def rows(self, first: int, count: int) -> Tensor:
        """[count, V], a view."""
        return self._logits_TV[first : first + count]


class Reads(Protocol):
    """What the model is compared with."""

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Of a window, [T, V] on the CPU."""


def store(
    target: LanguageModel, texts: Sequence[Sequence[Sequence[int]]], stored: StoredLogits, progress: Progress
) -> None:
    """Let the model read all windows of all texts, and keep its logits."""
    for window in (window for text in texts for window in text):
        for logits_MV in logits_of(target, window):
            stored.append(logits_MV)
            progress(len(logits_MV))


def compare(
    stored: StoredLogits, reference: Reads, texts: Sequence[Sequence[Sequence[int]]], progress: Progress
) -> Iterator[RoundingError]:
    """Let the reference read the same windows.

    Yields:
        the error of each text, as soon as the reference has read it.
    """
    first = 0
    for text in texts:
        comparison = Comparison()
        for window in text:
            comparison.add(stored.rows(first, len(window)), reference.logits(window), window)
            first += len(window)
            progress(len(window))
        yield comparison.result()
