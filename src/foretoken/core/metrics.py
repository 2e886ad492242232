"""The numbers of a run, defined once.

* tokens per step: emitted tokens over target calls after the prompt, bonus included; plain decoding is 1.00.
* distortion and kl: how far a lossy rule's distribution was from the target's, per emitted token; see
  core/distortion.py. Under sparse verification they are not known (NaN, null in JSON): the target's own distribution
  was never computed.
* acceptance[i]: steps that accepted a node at draft depth i + 1 over steps that drafted one there, unconditional.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # it brings torch, and the command line shows its help without
    from collections.abc import Iterable, Sequence

    from foretoken.core.verdict import Verdict


class Emitted(NamedTuple):
    """The tokens of one step, which reach the reader at once.

    Attributes:
        seconds: since the request was queued.
        tokens: how many there were.
        drafted: how many of them the draft wrote; they come first.
        refused: tokens of the draft that did not stand.
        sources: of the drafted tokens, where the drafter has several.
    """

    seconds: float
    tokens: int
    drafted: int
    refused: int = 0
    sources: tuple[str, ...] = ()


@dataclass(slots=True)
class Metrics:
    """Counters of one request (or, added up, of many).

    ``num_steps`` counts target calls that emitted tokens: the first one finishes the prompt and emits one token, so
    plain decoding of n tokens takes n steps. Times are seconds: this request's even share of each step it was in.
    ``sparse`` says that the target verified sparsely; ``experts_sum`` adds up, over ``experts_steps`` verifications,
    the different experts that were read per layer, for all requests of the step together. ``prefix_rows`` adds up the
    rows that lay before a sparse target's verifications, ``prefix_rows_read`` those of them that a head read.
    ``num_discarded_tokens`` were drafted ahead, after what did not stand: never put to the test, no draft tokens.
    ``num_moved_bytes`` went between target and drafter, where the two are not in one place.
    ``drafted_by_source`` and ``accepted_by_source`` count draft tokens by what proposed them, where a drafter says so,
    ``steps_by_source`` the steps with such tokens, and ``off_steps`` those without a draft, by the code of the reason.
    ``emitted`` says of one request when its tokens came, a step at a time, and ``drafts`` has the length of each draft
    and the number of its accepted tokens; they are not added up.
    """

    num_tokens: int = 0
    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_discarded_tokens: int = 0
    num_moved_bytes: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    other_seconds: float = 0.0
    seconds: float = 0.0
    distortion_sum: float = 0.0
    kl_sum: float = 0.0
    sparse: bool = False
    experts_sum: float = 0.0
    experts_steps: int = 0
    prefix_rows: int = 0
    prefix_rows_read: float = 0.0
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    steps_by_source: dict[str, int] = field(default_factory=dict)
    off_steps: dict[str, int] = field(default_factory=dict)
    emitted: list[Emitted] = field(default_factory=list)
    drafts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens per target call; 0 before the first step."""
        return self.num_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the request's wall time."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafted nodes at each depth that were accepted."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def distortion(self) -> float:
        """Mean estimated total variation per emitted token; 0 for a lossless recipe, NaN where it is not known."""
        if self.sparse:
            return math.nan
        return self.distortion_sum / self.num_tokens if self.num_tokens else 0.0

    @property
    def kl(self) -> float:
        """Mean KL divergence of the emitted distribution from the target's, in nats per token; 0 for a lossless
        recipe.
        """
        if self.sparse:
            return math.nan
        return self.kl_sum / self.num_tokens if self.num_tokens else 0.0

    @property
    def experts_per_step(self) -> float | None:
        """Different experts read per layer and verification; None where they are not counted (dense verification)."""
        return self.experts_sum / self.experts_steps if self.experts_steps else None

    @property
    def prefix_read(self) -> float | None:
        """Share of the prefix that a head read in verifications, mean over heads and layers without a window.

        None under dense verification, where it is everything, and before the first step.
        """
        return self.prefix_rows_read / self.prefix_rows if self.prefix_rows else None

    def count_step(self, verdict: Verdict, taken: int) -> None:
        """Count one target call and the tokens that were taken of its verdict."""
        self.num_steps += 1
        self.num_tokens += taken
        for distortion in verdict.distortions[:taken]:  # one by one, as the rule counted them against its budget
            self.distortion_sum += distortion
        self.kl_sum += sum(verdict.divergences[:taken])

    def count_draft(self, depths: tuple[int, ...], accepted: int) -> None:
        """Count one draft: the depth of every node, and how many levels of it were accepted."""
        self.num_draft_tokens += len(depths)
        self.num_accepted_tokens += accepted
        self.drafts.append((len(depths), accepted))
        deepest = max(depths, default=0)
        while len(self.drafted_at) < deepest:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        # one chance per depth and step: a tree with two children at depth 1 drafted that depth once
        for depth in range(deepest):
            self.drafted_at[depth] += 1
        for depth in range(accepted):
            self.accepted_at[depth] += 1

    def count_sources(self, sources: tuple[str, ...], accepted: Sequence[int]) -> None:
        """Count one draft by what proposed it: the source of every node, and the nodes that were accepted."""
        _count(self.steps_by_source, dict.fromkeys(sources))
        _count(self.drafted_by_source, sources)
        _count(self.accepted_by_source, (sources[node] for node in accepted if sources))

    @property
    def by_source(self) -> dict[str, dict[str, int]]:
        """Steps, drafted and accepted tokens of each source."""
        return {
            source: {
                "steps": steps,
                "drafted": self.drafted_by_source[source],
                "accepted": self.accepted_by_source.get(source, 0),
            }
            for source, steps in self.steps_by_source.items()
        }

    def add(self, other: Metrics) -> None:
        """Add another request's counters to these."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, bool):
                setattr(self, each.name, mine or theirs)
            elif isinstance(mine, (int, float)):
                setattr(self, each.name, mine + theirs)
            elif isinstance(mine, dict):
                for source, count in theirs.items():
                    mine[source] = mine.get(source, 0) + count
        self.drafted_at = [sum(both) for both in zip_longest(self.drafted_at, other.drafted_at, fillvalue=0)]
        self.accepted_at = [sum(both) for both in zip_longest(self.accepted_at, other.accepted_at, fillvalue=0)]


def _count(counts: dict[str, int], names: Iterable[str]) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + 1
