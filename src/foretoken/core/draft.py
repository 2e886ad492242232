"""A draft: a token tree together with the distribution it was drawn from. The distribution is never implicit.

Nearly every known bias of speculative decoding is a verifier that assumed the wrong distribution, so the kind is a
type:

* :class:`PointMass`: the proposals are a deterministic function of the past (n-gram, suffix, top-k expansion);
  q(x) = 1 at the proposed token.
* :class:`Coupled`: drawn with the noise that the `match` verifier samples the target with; a function of seed, position
  and past, hence a point mass, but not independent of that noise.
* :class:`Sampled`: siblings are independent draws from q (with replacement; repeats are possible and count).
* :class:`WithoutReplacement`: siblings are successive draws from q, each without the tokens drawn before it.
* :class:`TopThenSampled`: siblings are the most probable tokens of q, then one draw from the rest of q.
* :class:`HubPair`: two siblings, of which one is always the most probable token of q.

How many siblings a node gets must be decided before any of them is drawn: the number is part of the distribution.

A drafter that scores some tokens only says which (core/columns.py); every other token has q = 0, and can still be
emitted: by a residual, or as the extra token.

Letters: N draft nodes, K distinct parents that were expanded, V vocabulary, C columns of a drafter that scores some.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from foretoken.core.columns import Columns
from foretoken.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class PointMass:
    """Deterministic proposals: q is 1 at the proposed token."""


@dataclass(frozen=True, slots=True)
class Coupled(PointMass):
    """Tokens drawn from q by the noise of (seed, position), the same that `match` uses on the target.

    For `match` any draft is right, and this one agrees with the target's sample far more often than an independent
    draw. A rule that decides by later positions (`block`) would be biased: noise of later positions is used again.
    """


@dataclass(frozen=True, slots=True)
class _Tabulated:
    """q_KV float32, rows sum to 1; ``row_of[node]`` is the row of q that ``node`` was drawn from.

    Siblings share a row. For a chain ``row_of`` is ``(0, 1, ..., N-1)``.
    q is the processed distribution (temperature, filters and penalties applied), exactly the one that was sampled.
    With ``columns`` q_KV is [K, C], and q is 0 at every token that has no column.
    """

    q_KV: Tensor
    row_of: tuple[int, ...]
    columns: Columns | None = None

    def q_at(self, node: int) -> Tensor:
        """float32 [V]: the distribution that ``node`` was drawn from, before its elder siblings are taken out."""
        row = self.q_KV[self.row_of[node]]
        return row if self.columns is None else self.columns.spread(row)

    def chance(self, node: int, token: int) -> float:
        """q(token) in the distribution that ``node`` was drawn from."""
        column = token if self.columns is None else self.columns.of(token)
        return float(self.q_KV[self.row_of[node], column]) if column >= 0 else 0.0


@dataclass(frozen=True, slots=True)
class Sampled(_Tabulated):
    """Siblings are independent draws from their row of q."""


@dataclass(frozen=True, slots=True)
class WithoutReplacement(_Tabulated):
    """Siblings, in node order, are successive draws from their row of q without replacement."""


@dataclass(frozen=True, slots=True)
class TopThenSampled(_Tabulated):
    """The elder n - 1 of n siblings are the most probable tokens of their row of q, the youngest is drawn without them.

    "Greedy draft sampling" (arXiv:2502.18779). With one sibling it is a draw from q.
    """


@dataclass(frozen=True, slots=True)
class HubPair(_Tabulated):
    """Two siblings: a draw from q, then the most probable token a of q; where the draw was a, a draw from q without a.

    The pair distribution of SpecHub (arXiv:2411.05289). With one sibling it is a draw from q.
    """


Law = PointMass | Sampled | WithoutReplacement | TopThenSampled | HubPair
Tabulated = Sampled | WithoutReplacement | TopThenSampled | HubPair


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """How far the target itself has come with a draft's rows: a drafter that runs its first layers leaves this.

    Attributes:
        depth: the number of layers that were run. Their keys and values lie in the target's cache after the committed
            prefix, the root's row first, then the nodes' in order.
        hidden_TD: [1 + N, D], the residual stream of those rows at that depth, as the target gave it.
    """

    depth: int
    hidden_TD: Tensor


class Evidence:
    """What a drafter says of its nodes beyond the distribution that they were drawn from.

    A draft carries at most one piece, of the kind that the recipe's verifier decides by (core/needs.py).

    Attributes:
        title: its name in messages.
        greedy_only: the evidence is requested, and needed, at temperature 0 only.
    """

    __slots__ = ()
    title = "evidence"
    greedy_only = False


@dataclass(frozen=True, slots=True)
class Approvals(Evidence):
    """Which nodes the drafter's own head expects the target to accept.

    The rule `sprinter` lets a node stand on its word; every other rule tests all of them.

    Attributes:
        approved: one answer per node; None where the head gave none.
        saw_token: whether an answer looked at the node's token. If not, it depends on the past alone, and a token that
            stands without a test has the distribution q.
        others_NV: bool [N, V], where an answer looked at the token: the tokens that would have been approved in a
            node's place, none where the node could only be the last one. So the distribution of the emitted token is
            known. None: not known, because a forward would be needed for every token.
    """

    title = "what the drafter's own head approves of"

    approved: tuple[bool | None, ...]
    saw_token: bool = False
    others_NV: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GreedyLaws(Evidence):
    """The distributions at temperature 1 that the tokens of a greedy draft are the argmax of; the draft is a point
    mass.

    Attributes:
        q_NV: float32 [N, V], bias and penalties applied, no filter.
    """

    title = "the drafter's distribution at temperature 0"
    greedy_only = True

    q_NV: Tensor


@dataclass(frozen=True, slots=True)
class Draft:
    """What a drafter proposes for one request in one step.

    Attributes:
        tree: the proposed tokens; an empty tree is plain decoding.
        law: the kind of q, with q where it is tabulated.
        confidence: the drafter's own estimate, per node, that the node stands given its parent stands; empty if
            the drafter has none. Used by the draft-length controller only, never by a verifier.
        resume: the target's own work on these rows, from which verification goes on; None: they are only tokens.
        evidence: of the kind that the budget requested, by which the recipe's verifier decides; None: none was
            requested.
        sources: what proposed each node, in words that are counted as they are; empty where there is one source.
        moved_bytes: between target and drafter, for this draft and for what the drafter has read before it.
        by_engine: the engine's own draft, of tokens that follow for certain (core/constraint.py) or that the request
            predicts; the drafter does not learn of it.
    """

    tree: TokenTree
    law: Law = field(default_factory=PointMass)
    confidence: tuple[float, ...] = ()
    resume: ResumePoint | None = None
    evidence: Evidence | None = None
    sources: tuple[str, ...] = ()
    moved_bytes: int = 0
    by_engine: bool = False

    def __len__(self) -> int:
        return len(self.tree.tokens)

    @property
    def promise(self) -> float:
        """The expected number of accepted tokens of a chain, by its own confidences."""
        reach = expected = 1.0
        for confidence in self.confidence:
            reach *= confidence
            expected += reach
        return expected - 1.0

    @property
    def extensible(self) -> bool:
        """Whether :meth:`followed_by` has a meaning: it is a chain of tokens only, with a confidence each."""
        plain = self.resume is None and self.evidence is None
        return plain and len(self.confidence) == len(self) > 0 and self.tree.is_chain

    def followed_by(self, copies: Draft) -> Draft:
        """This chain and another one of point masses after it, which follow from the tokens before them.

        Where some tokens have columns only, it ends at the first that has none: its q cannot be written there.
        """
        law, count = self.law, len(copies)
        if isinstance(law, _Tabulated):
            columns = [token if law.columns is None else law.columns.of(token) for token in copies.tree.tokens]
            count = next((place for place, column in enumerate(columns) if column < 0), count)
            rows, width = law.q_KV.shape
            q_KV = law.q_KV.new_zeros((rows + count, width))
            q_KV[:rows] = law.q_KV
            for place, column in enumerate(columns[:count]):
                q_KV[rows + place, column] = 1.0
            law = replace(law, q_KV=q_KV, row_of=(*law.row_of, *range(rows, rows + count)))
        if not count:
            return self
        return replace(
            self,
            tree=TokenTree((*self.tree.tokens, *copies.tree.tokens[:count])),
            law=law,
            confidence=(*self.confidence, *copies.confidence[:count]),
            sources=(*self.sources, *copies.sources[:count]),
        )

    def part(self, begin: int, stop: int | None = None) -> Draft:
        """Nodes ``begin`` to ``stop - 1`` of a chain as a draft of their own, each with the row that it was drawn from.

        Raises:
            ValueError: it is no chain of tokens only: other drafts cannot be cut into such pieces.
        """
        if not self.tree.is_chain or self.resume is not None or self.evidence is not None:
            raise ValueError("only a chain of tokens can be cut")
        piece = slice(begin, stop)
        tokens = self.tree.tokens[piece]
        if not tokens:
            return NO_DRAFT
        law = replace(self.law, row_of=self.law.row_of[piece]) if isinstance(self.law, _Tabulated) else self.law
        return Draft(TokenTree(tokens), law, self.confidence[piece], sources=self.sources[piece])


NO_DRAFT = Draft(EMPTY_TREE)
