"""The seams. Nothing here needs a base class: any object with these members is a drafter or a verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from foretoken.core.distortion import Spent
from foretoken.core.draft import Draft, Law
from foretoken.core.laws import LawMaker, Laws
from foretoken.core.randomness import Streams
from foretoken.core.sampling import SamplingParams
from foretoken.core.verdict import Verdict


class Context(Protocol):
    """What a drafter may know of a request; read-only for drafters."""

    @property
    def request_id(self) -> int: ...

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and committed output. The last token is the root of the next draft."""
        ...

    @property
    def num_prompt(self) -> int: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def streams(self) -> Streams: ...

    @property
    def laws(self) -> LawMaker: ...

    @property
    def slot(self) -> int:
        """Its place in the target's cache; for drafters that run a part of the target."""
        ...


class Patience(Protocol):
    """Decides while a draft grows whether one more node is worth its time. See engine/controller.py."""

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """True if drafting and verifying one more node is expected to raise tokens per second.

        Args:
            reach: estimated probability that the node's parent stands.
            confidence: the drafter's estimate that the node stands given its parent does.
            num_nodes: nodes already in this draft.
        """
        ...


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one request may propose in this step.

    Attributes:
        max_nodes: draft nodes at most (0: propose nothing).
        max_depth: path length at most; the request's remaining tokens bound it.
        patience: stop rule of the adaptive controller; None drafts the full budget.
        soft: whether the draft is to carry ``soft_NV`` at temperature 0, for a verifier that compares the two laws.
    """

    max_nodes: int
    max_depth: int
    patience: Patience | None = None
    soft: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a draft: the tokens that were committed, accepted path first, extra token last."""

    request_id: int
    draft: Draft
    verdict: Verdict
    tokens: tuple[int, ...]


class Drafter(Protocol):
    """Proposes a tree per request. With a lossless verifier it changes speed, never the output law.

    Attributes:
        name: the catalogue's name.
        laws: kinds of q this drafter proposes with at temperatures above 0, as configured (at 0 every lossless rule
            is the walk along the argmax, and the kind does not matter).
        branches: whether its trees may branch.
    """

    name: str
    laws: tuple[type[Law], ...]
    branches: bool

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """One draft per context, in order; an empty draft where there is nothing to propose."""
        ...

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn what was committed. Called once after every step that had drafts."""
        ...

    def release(self, request_id: int) -> None:
        """Forget a request; called exactly once when it ends, also if it never proposed."""
        ...


@dataclass(frozen=True, slots=True)
class Sight:
    """What a drafter wants to see of every forward of the target.

    Attributes:
        depths: of the residual stream, increasing; depth e is what e layers give.
        last: of a prompt's rows only so many last ones; None: all.
    """

    depths: tuple[int, ...]
    last: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """Hidden states of one request's rows in one forward of the target.

    Attributes:
        context: the request; its tokens are still those from before the step.
        begin: position of the first row.
        draft: what these rows were, behind the root; NO_DRAFT for a prompt's chunk and for plain decoding.
        hidden: depth -> [rows, D]. Of a draft that was begun by the drafter itself only the depths beyond that.
        best: the target's most probable token after each row; empty where no logits were computed.
    """

    context: Context
    begin: int
    draft: Draft
    hidden: Mapping[int, Tensor]
    best: Sequence[int]


class SelfDrafter(Drafter, Protocol):
    """A drafter that runs a part of the target, shares its cache, and leaves what it computed in ``Draft.begun``.

    All drafts of a step must be begun to the same depth, or not at all.
    """

    sight: Sight

    def attach(self, cache: Any) -> None:
        """Take the engine's cache of the target (models.cache.KVCache); called once."""
        ...

    def see(self, seen: Sequence[Seen]) -> None:
        """Called after every forward of the target, before any verdict, with all requests of the step."""
        ...


class Verifier(Protocol):
    """Decides which nodes stand. Pure arithmetic: no model, cache, tokenizer or global random state.

    Attributes:
        name: the catalogue's name.
        promise: "same law", "same stream" or "approximate". At temperature 0 a lossless rule gives the same text.
        laws: kinds of q that the rule is valid for; anything else is refused before the first step.
        trees: whether the rule handles branching drafts.
    """

    name: str
    promise: str
    laws: tuple[type[Law], ...]
    trees: bool

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Decide one draft.

        Args:
            draft: N nodes; N may be 0, then exactly one token is emitted from row 0.
            target: N + 1 rows; row 0 is the law after the root, row i + 1 the law after node i.
            rng: the request's random streams.
        Returns:
            a path of 0..N nodes and exactly one extra token.
        """
        ...


class BatchVerifier(Verifier, Protocol):
    """A verifier that decides many requests in one go. The engine uses it where a rule has it."""

    def verify_batch(self, drafts: Sequence[Draft], targets: Sequence[Laws], rngs: Sequence[Streams]) -> list[Verdict]:
        """:meth:`verify` for each of the requests, with the same streams and the same result."""
        ...


@dataclass(frozen=True, slots=True)
class LastState:
    """What a verifier may want to see of the target beside its laws: the last hidden state of each row of a draft.

    Attributes:
        normed: as the target's head reads it, behind the final norm; False: before it.
    """

    normed: bool = True


class SeeingVerifier(Verifier, Protocol):
    """A verifier that looks at hidden states; the engine hands them over as ``Laws.hidden_MD``.

    Attributes:
        needs: which. The target is checked for them when the engine is built.
    """

    needs: LastState


class ComparingVerifier(Verifier, Protocol):
    """A verifier that compares the drafter's law with the target's, also at temperature 0 (``Draft.soft_NV``).

    It is refused at temperature 0 beside a drafter that does not say ``softens = True``.
    """

    compares_laws: bool


class BudgetedVerifier(Verifier, Protocol):
    """A lossy verifier with a budget. The engine tells it what each request has spent; the rule keeps no state."""

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """:meth:`verify` within what is left of the request's budget; None: nothing was emitted yet."""
        ...


class Plan(Protocol):
    """How the target computes its rows; called by every attention layer. See models/dense.py.

    Attributes:
        native: the plan described (models.native.NativePlan), so that a fused decoder may do the same arithmetic in
            one piece instead of being called layer by layer; None if it has to be called.
    """

    @property
    def native(self) -> Any: ...

    def attend(
        self,
        layer: int,
        q_HTD: Tensor,
        k_GTD: Tensor,
        v_GTD: Tensor,
        *,
        scaling: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Write the rows' keys and values, attend, and return [T, H, Dv]."""
        ...


class SwappingPlan(Plan, Protocol):
    """A plan that also computes some of the target's modules in another way. See methods/sparse/plan.py.

    Attributes:
        swaps: module -> what is called in place of its forward, while the target computes this plan.
        num_experts: different experts that the forward read, mean over its layers; None before it, or without experts.
    """

    swaps: Mapping[Any, Callable[..., Any]]

    @property
    def num_experts(self) -> float | None: ...
