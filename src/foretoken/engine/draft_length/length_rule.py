"""How long one draft is: it grows while the next node raises the rate of this step (see controller.py)."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from foretoken.core.stop_rule import Outlook, StopRule
from foretoken.engine.draft_length.confidence import Confidence, Reaches
from foretoken.engine.draft_length.draft_ledger import DraftLedger


@dataclass(frozen=True, slots=True)
class Prices:
    """What a draft costs, in tokens of plain decoding.

    Attributes:
        asking: the call of the drafter.
        drafting, row: of a node: to draft it, and to verify it.
        rate: tokens of a usual step, for the outlook.
    """

    asking: float
    drafting: float
    row: float
    rate: float


class LengthRule(StopRule):
    """The stop rule of one draft (:class:`foretoken.core.stop_rule.StopRule`).

    The first node was drafted before anything is known of it, so that it costs its row alone.

    Args:
        confidence: corrects the drafter's.
        ledger: of the request.
        least: nodes that are drafted whatever they promise.
    """

    __slots__ = ("_confidence", "_least", "_misses", "_prices", "_reach", "_reaches", "_spent", "_sums", "_weight")

    def __init__(self, confidence: Confidence, ledger: DraftLedger, prices: Prices, least: int = 0) -> None:
        self._confidence, self._prices, self._least = confidence, prices, least
        self._weight, self._misses = ledger.weight, ledger.misses
        self._reaches = Reaches(confidence, self._misses)
        self._sums = [1.0]  # expected tokens with so many nodes
        self._spent, self._reach = 1.0 + prices.asking, 1.0  # before the first node, and that its parent stands

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        stands = self._reach * self._reaches.stands(reach, confidence)
        del self._sums[num_nodes + 1 :]
        so_far, prices = self._sums[-1], self._prices
        rate = so_far / self._time(max(1, num_nodes), num_nodes)
        cost = prices.row + (prices.drafting if num_nodes else 0.0)
        if num_nodes >= self._least and self._weight * stands <= rate * cost:
            return False
        self._sums.append(so_far + stands)
        return True

    def rate(self, num_nodes: int) -> float:
        return self._sums[min(num_nodes, len(self._sums) - 1)] / self._time(num_nodes, num_nodes)

    def after(self, first: StopRule, confidence: Sequence[float]) -> "LengthRule":
        assert isinstance(first, LengthRule)
        count = min(len(confidence), len(first._sums) - 1)
        found = copy(self)
        found._reaches, found._least = Reaches(self._confidence, self._misses), 0
        found._spent = first._time(max(1, count), count)
        found._sums = [first._sums[count]]
        found._reach = first._sums[count] - first._sums[count - 1] if count else 1.0
        return found

    def _time(self, drafted: int, rows: int) -> float:
        """Of the step with so many nodes, in tokens of plain decoding."""
        return self._spent + self._prices.drafting * drafted + self._prices.row * rows

    def outlook(self) -> Outlook:
        stands = tuple(max(0.0, 1.0 - (1.0 - each) * self._misses) for each in self._confidence.by_tenth())
        prices = self._prices
        first = prices.row / (1.0 + prices.asking + prices.drafting) / self._weight
        later = max(first, (prices.row + prices.drafting) / (1.0 + prices.asking + prices.drafting) / self._weight)
        return Outlook(stands, first, later, self._least)
