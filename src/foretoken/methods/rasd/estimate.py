"""The acceptance probability of a node given its parent: one scale for drafted and retrieved nodes, learned online.

    evidence    draft       q of the draft model           one logistic unit for each set of sources of a node,
                datastore   calibrated share of matches      over the log odds of each
                prompt      calibrated share of matches

The labels come from the emitted tokens: at every node on the path of the text, each child is right or wrong, whether
it was proposed or pruned. So the selection does not bias the estimates.
"""

import math
from collections.abc import Mapping

_CLIP = 6.0  # larger log odds are clipped
_STEP = 0.5  # of the first updates
_PATIENCE = 50.0  # number of updates after which a step is 0.7 of the first


class Estimates:
    """Logistic units, one for each set of sources; initially they average the log odds."""

    def __init__(self) -> None:
        self._units: dict[tuple[str, ...], _Unit] = {}

    def of(self, evidence: Mapping[str, float]) -> float:
        """Return the estimated probability of a node.

        Args:
            evidence: source -> the node's probability by that source; at least one.
        """
        return self._unit(evidence).probability(_log_odds(evidence))

    def learn(self, evidence: Mapping[str, float], stood: bool) -> None:
        """Update with the outcome of a node with an accepted parent."""
        self._unit(evidence).learn(_log_odds(evidence), stood)

    def _unit(self, evidence: Mapping[str, float]) -> "_Unit":
        key = tuple(evidence)
        unit = self._units.get(key)
        if unit is None:
            unit = self._units[key] = _Unit(len(key))
        return unit


class _Unit:
    """Weights w and bias b over a few log odds."""

    __slots__ = ("_bias", "_updates", "_weights")

    def __init__(self, size: int) -> None:
        self._weights = [1.0 / size] * size
        self._bias = 0.0
        self._updates = 0

    def probability(self, odds: list[float]) -> float:
        score = self._bias + sum(weight * each for weight, each in zip(self._weights, odds, strict=True))
        return 1.0 / (1.0 + math.exp(-score))

    def learn(self, odds: list[float], stood: bool) -> None:
        # a normalised step: log odds of 6 must not cause large updates
        step = _STEP / math.sqrt(1.0 + self._updates / _PATIENCE) / (1.0 + sum(each * each for each in odds))
        error = stood - self.probability(odds)
        self._bias += step * error
        self._weights = [weight + step * error * each for weight, each in zip(self._weights, odds, strict=True)]
        self._updates += 1


def _log_odds(evidence: Mapping[str, float]) -> list[float]:
    return [_clipped(value) for value in evidence.values()]


def _clipped(value: float) -> float:
    if value <= 0.0:
        return -_CLIP
    if value >= 1.0:
        return _CLIP
    return max(-_CLIP, min(_CLIP, math.log(value / (1.0 - value))))
