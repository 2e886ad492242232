"""How improbable text is to a model that did not write it: the price of becoming good at something else.

A text is cut into windows that are read one by one, each without the text before it, so that texts of any length are
judged alike. Lossy methods have no part in it: it is the target alone that reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.models.language_model import LanguageModel
from foretoken_lab.tasks.evaluate import negative_log_likelihood

WINDOW = 512  # tokens
_WIDTH_95 = 1.96


@dataclass(frozen=True, slots=True)
class Reading:
    """What reading a text gave.

    Attributes:
        num_tokens: that were predicted; the first of every window is not.
        nats: mean negative log-likelihood a token.
        interval: of 95 %, from the spread of the windows' means; None for a single window.
    """

    num_tokens: int
    nats: float
    interval: tuple[float, float] | None


def read(target: LanguageModel, ids: Sequence[int], window: int = WINDOW) -> Reading:
    """Read a text.

    Args:
        target: as it is, without a method.
        ids: the text's tokens, at least two.
        window: tokens that are read together; the last window may be shorter, down to two.
    """
    pieces = [ids[start : start + window] for start in range(0, len(ids) - 1, window)]
    means = [negative_log_likelihood(target, piece[:1], piece[1:]) / (len(piece) - 1) for piece in pieces]
    counts = [len(piece) - 1 for piece in pieces]
    mean = sum(each * count for each, count in zip(means, counts, strict=True)) / sum(counts)
    if len(means) == 1:
        return Reading(sum(counts), mean, None)
    spread = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1) / len(means))
    return Reading(sum(counts), mean, (mean - _WIDTH_95 * spread, mean + _WIDTH_95 * spread))
