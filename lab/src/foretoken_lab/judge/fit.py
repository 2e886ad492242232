"""The judge's fit: logistic regression on standardised states; held-out tokens choose the regularisation.

    mean_w loss + |w|^2 / (2 C N)      C from 1e-7 to 1e2, by L-BFGS, each starting from the previous solution

Paper: arXiv:2501.19309 has a weighted cross-entropy, without details; grid, split and choice are those of AutoJudge
(arXiv:2504.20039), as are L-BFGS and the selection by area under the ROC curve.
Differs: within each task the bad tokens together weigh as much as the fine ones, but at most ``HEAVIEST`` each;
tasks with one kind only are left out, since they would teach which task a token is from. A task with four times as
many tokens as another weighs twice as much: with weights proportional to the number, the task that is easiest to mine
dominates (the macro area is 0.01 lower then, on three splits of the zoo's pair). The selection uses the mean of the
areas within the tasks. Mean and scale are folded into the weights.

Letters: N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import InputError
from foretoken.drafting.logistic import Logistic
from foretoken.train.regression import Standard, regress
from foretoken.train.roc import auc
from foretoken_lab.judge.labels import Labels

GRID = tuple(10.0**power for power in range(-7, 3))
HEAVIEST = 20.0  # maximum weight of a bad token relative to a fine one
TELLING = 10  # minimum number of tokens of the rarer class for a meaningful area within a source


@dataclass(frozen=True)
class Fitted:
    """The best head of the grid.

    Attributes:
        unit: weights for unscaled states of the target.
        strength: its C.
        bad_weights: source -> weight of a bad token relative to a fine one, for the sources used in the fit.
        areas: C -> mean area under the ROC curve within the tasks, on the selection tokens; None if none of the tasks
            has both classes there.
    """

    unit: Logistic
    strength: float
    bad_weights: dict[str, float]
    areas: dict[float, float | None]


def fit(labels: Labels, train_N: Tensor, choose_N: Tensor, *, anywhere: Sequence[str] = ()) -> Fitted:
    """Fit on some of the tokens, choose by others.

    Args:
        labels: labels of both parts; the fitting part has fine and bad tokens.
        train_N, choose_N: bool; from different questions.
        anywhere: sources that are no task: their tokens, of one kind, occur in the texts of all tasks.
    Raises:
        InputError: no source has tokens of both kinds for the fit.
    """
    trained = labels.of(train_N)
    y_N = trained.fine_N.float()
    bad_weights = _bad_weights(trained, anywhere)
    if not set(bad_weights) - set(anywhere):
        raise InputError(
            "no task has both fine and bad tokens to fit to: ask more (--examples, --minutes), or other --task"
        )
    weight_N = torch.zeros(len(y_N))
    for source, bad_weight in bad_weights.items():
        here_N = trained.source_N == trained.sources.index(source)
        weight_N[here_N] = torch.where(y_N[here_N] > 0, 1.0, bad_weight)
        weight_N[here_N] /= weight_N[here_N].sum().sqrt()
    standard = Standard.of(labels.hidden_ND[train_N])
    x_ND = standard(labels.hidden_ND[train_N])
    held = labels.of(choose_N)
    numbers = torch.zeros(x_ND.shape[1] + 1)
    best: tuple[float, float, Logistic] | None = None
    areas: dict[float, float | None] = {}
    for strength in GRID:
        penalty_D = torch.full((x_ND.shape[1],), 1.0 / (strength * float(weight_N.sum())))
        numbers = regress(x_ND, y_N, weight_N / weight_N.sum(), penalty_D, numbers)
        unit = standard.fold(numbers[:-1], float(numbers[-1]))
        area = macro_auc(held, unit.probabilities(held.hidden_ND))
        areas[strength] = area
        if best is None or (area is not None and area > best[0]):
            best = (-1.0 if area is None else area), strength, unit
    assert best is not None
    return Fitted(best[2], best[1], bad_weights, areas)


def macro_auc(labels: Labels, score_N: Tensor) -> float | None:
    """Return the mean of the areas under the ROC curve within each source; None if none has both classes.

    A source with fewer than ``TELLING`` tokens of a class counts only if all sources have too few.
    """
    areas = []
    for place in range(len(labels.sources)):
        here_N = labels.source_N == place
        fine_N = labels.fine_N[here_N]
        rarer = min(int(fine_N.sum()), int((~fine_N).sum()))
        if (area := auc(score_N[here_N], fine_N)) is not None:
            areas.append((rarer >= TELLING, area))
    known = [area for telling, area in areas if telling] or [area for _, area in areas]
    return sum(known) / len(known) if known else None


def _bad_weights(labels: Labels, anywhere: Sequence[str]) -> dict[str, float]:
    """Return the weights of sources with both classes, and of sources with tokens in the texts of other sources."""
    found = {}
    for place, source in enumerate(labels.sources):
        fine_N = labels.fine_N[labels.source_N == place]
        fine, bad = int(fine_N.sum()), int((~fine_N).sum())
        if fine and bad:
            found[source] = min(HEAVIEST, fine / bad)
    weights = [weight for source, weight in found.items() if source not in anywhere]
    for source in anywhere:
        if source in labels.sources and source not in found:
            found[source] = sum(weights) / len(weights) if weights else 1.0
    return found
