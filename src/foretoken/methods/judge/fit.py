"""The judge's fit: logistic regression on standardised states, with the regularisation that holds up best.

    mean_w loss + |w|^2 / (2 C N)      C from 1e-7 to 1e2, by L-BFGS, each from the one before

Paper: arXiv:2501.19309 has a weighted cross-entropy and says no more; grid, split and choice are those of AutoJudge
(arXiv:2504.20039), as are L-BFGS and the area under the ROC curve to choose by.
Differs: within each task the bad tokens together weigh as much as the fine ones, but one of them ``HEAVIEST`` at most;
a task that has one kind only is left out, since it would teach which task a token is from. Of two tasks one of which
has four times as many tokens it weighs twice as much: by their number, the task that is easiest to mine decides (the
macro area is 0.01 lower then, on three splits of the zoo's pair). The area that chooses is the mean of those within the
tasks. Mean and scale are folded into the weights.

Letters: N tokens, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.core.errors import InputError
from foretoken.drafting.logistic import Logistic
from foretoken.methods.judge.labels import Labels
from foretoken.train.regression import Standard, regress
from foretoken.train.roc import auc

GRID = tuple(10.0**power for power in range(-7, 3))
HEAVIEST = 20.0  # weight of a bad token against a fine one
TELLING = 10  # tokens of the rarer class, for the area within a source to mean something


@dataclass(frozen=True)
class Fitted:
    """The best of the grid.

    Attributes:
        unit: for states as the target gives them.
        strength: its C.
        bad_weights: source -> weight of a bad token against a fine one; of the sources that were fitted to.
        areas: C -> mean area under the ROC curve within the tasks, on the tokens to choose by; None where none of them
            has both classes there.
    """

    unit: Logistic
    strength: float
    bad_weights: dict[str, float]
    areas: dict[float, float | None]


def fit(labels: Labels, train_N: Tensor, choose_N: Tensor, *, anywhere: Sequence[str] = ()) -> Fitted:
    """Fit on some of the tokens, choose by others.

    Args:
        labels: of both; fine and bad ones among those to fit on.
        train_N, choose_N: bool; of different questions.
        anywhere: sources that are no task: their tokens, of one kind, stand in the texts of all tasks.
    Raises:
        InputError: no source has tokens of both kinds to fit to.
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
    """Mean of the areas under the ROC curve within each source; None if none has both classes.

    A source with fewer than ``TELLING`` tokens of a class says little, and counts only if there are no others.
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
    """Of each source with both classes, and of those whose tokens stand among the other sources' texts."""
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
