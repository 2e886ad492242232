"""How often text goes on as it did before, by the number of tokens that agreed; learned while generating."""

_PRIOR_WEIGHT = 8.0
_MEMORY = 2000.0  # weight is halved here, so that a rate keeps following the workload
LONGEST_MATCH = 4096  # tokens of a context, for drafters that say how long one may be


class AgreementRates:
    """One running mean per agreement length, from a prior that rises with it: (n + 1/2) / (n + 2).

    Args:
        longest: agreements of more tokens share the rate of this length.
        weight: observations that the prior is worth.

    Attributes:
        rates: probability in (0, 1) by agreement length, 0..longest; read-only for others.
    """

    __slots__ = ("_weights", "longest", "rates")

    def __init__(self, longest: int, weight: float = _PRIOR_WEIGHT) -> None:
        self.longest = longest
        self.rates = [(n + 0.5) / (n + 2.0) for n in range(longest + 1)]
        self._weights = [weight] * (longest + 1)

    def learn(self, agreement: int, went_on: bool) -> None:
        """Count one context of that length, and whether the text went on after it as before."""
        at = agreement if agreement < self.longest else self.longest
        weight = self._weights[at] + 1.0
        self.rates[at] += (went_on - self.rates[at]) / weight
        self._weights[at] = weight if weight < _MEMORY else _MEMORY / 2.0
