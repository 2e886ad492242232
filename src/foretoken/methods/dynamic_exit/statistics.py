"""DEL's statistics of every exit, and the best exit and draft length (arXiv:2504.05598, section 3)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from foretoken.methods.dynamic_exit.costs import Costs

LONGEST = 18  # draft tokens a step (paper, section 4)
PRIOR = 8.0  # weight of earlier requests' statistics in a new request, in columns (ours)


@dataclass(slots=True)
class Statistics:
    """Decayed sums of one request, per exit: agreement with the whole model, and the exit's confidence then.

    Index 0 is exit 1 (one layer). Equations of the paper's section 3; ``threshold`` is its dynamic draft exit. The last
    two (ours) count the columns at or above the threshold, and the matches among them.
    """

    matched: list[float]
    missed: list[float]
    sure_when_matched: list[float]
    sure_when_missed: list[float]
    going_on: list[float]
    going_on_matched: list[float]

    @classmethod
    def empty(cls, exits: int) -> "Statistics":
        return cls(*([0.0] * exits for _ in range(6)))

    def handed_on(self) -> "Statistics":
        """Return the same shares and confidences, at the weight of a few columns: the start of a new request."""
        weights = [min(1.0, PRIOR / max(a + b, 1e-9)) for a, b in zip(self.matched, self.missed, strict=True)]
        sums = (getattr(self, each.name) for each in fields(self))
        return Statistics(*([value * weight for value, weight in zip(each, weights, strict=True)] for each in sums))

    def learn(self, exit_layer: int, decay: float, matches: Sequence[bool], shares: Sequence[float]) -> None:
        """Update one exit with one round: whether it agreed at each valid column, and its confidence."""
        i = exit_layer - 1
        bar = self.threshold(exit_layer)
        goes_on = [match for share, match in zip(shares, matches, strict=True) if share >= bar]
        self.going_on[i] = decay * self.going_on[i] + len(goes_on)
        self.going_on_matched[i] = decay * self.going_on_matched[i] + sum(goes_on)
        hits = [share for share, match in zip(shares, matches, strict=True) if match]
        misses = [share for share, match in zip(shares, matches, strict=True) if not match]
        self.matched[i] = decay * self.matched[i] + len(hits)
        self.missed[i] = decay * self.missed[i] + len(misses)
        self.sure_when_matched[i] = decay * self.sure_when_matched[i] + sum(hits)
        self.sure_when_missed[i] = decay * self.sure_when_missed[i] + sum(misses)

    def alpha(self, exit_layer: int) -> float | None:
        """Share of agreement; None if the exit has no statistics."""
        i = exit_layer - 1
        total = self.matched[i] + self.missed[i]
        return self.matched[i] / total if total else None

    def with_stop(self, exit_layer: int) -> tuple[float, float] | None:
        """Return the expected numbers of accepted and drafted tokens of a draft that stops below the threshold (ours).

        Drafting continues with probability s. A token is accepted with probability a if drafting continues after it,
        else with probability b, so f = s a (1 + f) + (1 - s) b tokens are accepted, and 1 / (1 - s) are drafted. The
        estimate adds one miss; otherwise an exit that was right a few times would seem always right.
        """
        i = exit_layer - 1
        total = self.matched[i] + self.missed[i]
        if not total:
            return None
        both = self.going_on_matched[i] / (total + 1.0)  # s a
        s = min(self.going_on[i] / total, 1.0 - 1.0 / LONGEST)
        return self.matched[i] / (total + 1.0) / (1.0 - min(both, s)), 1.0 / (1.0 - s)

    def threshold(self, exit_layer: int) -> float:
        """Return the confidence below which drafting stops: half-way between the means at hits and at misses.

        Without misses it is half of the mean at hits, without hits 1 (ours; the code compares with NaN).
        """
        i = exit_layer - 1
        if not self.matched[i]:
            return 1.0
        hit = self.sure_when_matched[i] / self.matched[i]
        miss = self.sure_when_missed[i] / self.missed[i] if self.missed[i] else 0.0
        return (hit + miss) / 2


def best_exit(
    statistics: Sequence[Statistics], exits: Sequence[int], costs: Costs, longest: int = LONGEST - 1
) -> tuple[int, int]:
    """Return exit and draft length with the most expected tokens per cost (the paper's TPL), for a batch.

    One exit serves all requests of a step: expected tokens are summed over the requests with statistics of it (ours).

    Args:
        exits: candidates.
    Returns:
        the exit, and the length; length 0 is a step without a draft.
    """
    best, chosen = 1.0 / costs.plain, (exits[0], 0)
    for exit_layer in exits:
        known = [alpha for each in statistics if (alpha := each.alpha(exit_layer)) is not None]
        if not known:
            continue
        expected, power, value = 1.0, [1.0] * len(known), 0.0
        for length in range(1, longest + 1):
            power = [p * alpha for p, alpha in zip(power, known, strict=True)]
            expected += sum(power) / len(known)
            before, value = value, expected / costs.step(exit_layer, length)
            if value < before:  # each further token is worth less
                break
            if value > best:
                best, chosen = value, (exit_layer, length)
    return chosen


def best_exit_with_stop(statistics: Sequence[Statistics], exits: Sequence[int], costs: Costs) -> tuple[int, int]:
    """Return the best exit for drafts that stop below the threshold, without a planned length (ours).

    Returns:
        the exit, and the longest draft: 0 or the cap.
    """
    best, chosen = 1.0 / costs.plain, (exits[0], 0)
    for exit_layer in exits:
        known = [found for each in statistics if (found := each.with_stop(exit_layer)) is not None]
        if not known:
            continue
        accepted, drafted = (sum(each) / len(known) for each in zip(*known, strict=True))
        value = (1.0 + accepted) / costs.step(exit_layer, drafted)
        if value > best:
            best, chosen = value, (exit_layer, LONGEST)
    return chosen


def at_best(costs: Costs, exit_layer: int) -> float:
    """Return the expected tokens per cost of an exit that is always right, at its best length."""
    return max((length + 1) / costs.step(exit_layer, length) for length in range(1, LONGEST))
