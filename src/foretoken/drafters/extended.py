"""Any drafter with copies after its drafts: the recipe's option ``extend``."""

from dataclasses import replace

from foretoken.core.draft import Coupled, Draft, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget, Drafter
from foretoken.drafters.copies_first import COPIES, CopiesFirst

_KINDS = (PointMass, Sampled, Coupled)


class ExtendedDrafter(CopiesFirst):
    """Drafts as another drafter, and appends what followed earlier where the text after the draft repeats itself.

    Exact: copies follow from the text and the draft's tokens; they are point masses, as in ``auto``. Where the other
           drafter has no draft, they follow the text itself. Lossless under any lossless verifier of both kinds.

    Args:
        inner: the other drafter.
    Raises:
        ConfigError: nothing can be appended to its drafts.
    """

    def __init__(self, inner: Drafter) -> None:
        reason = _why_not(inner)
        if reason:
            raise ConfigError(f"extend='{COPIES}' does not go with method '{inner.name}': {reason}; leave it out")
        super().__init__(inner)
        self.name = inner.name
        self.offers = replace(inner.offers, portfolio="", foretells=True, ahead=False)

    def _goes_first(self, copy: Draft, budget: Budget, second: Budget) -> bool:
        return False


def _why_not(inner: Drafter) -> str:
    """Why copies cannot follow a drafter's drafts; "" where they can."""
    if inner.offers.portfolio is not None or inner.name in (COPIES, "ngram", "none"):
        return "it copies already, or drafts nothing"
    if inner.branches:
        return "it proposes trees, which have many ends"
    if inner.offers.length is not None:
        return "it decides by itself how long a draft is"
    if any(law not in _KINDS for law in inner.laws):
        return "a copy cannot be written into the distribution of its drafts"
    return ""
