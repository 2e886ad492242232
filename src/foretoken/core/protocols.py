"""The seams: drafter, verifier and plan, each a protocol with defaults for its optional members.

Whoever inherits from a protocol gets the defaults and writes only what its method is about; whoever does not must have
every member. A method declares its needs and offers in core/needs.py.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from torch import Tensor

from foretoken.core.distortion import Spent
from foretoken.core.draft import NO_DRAFT, Draft, Evidence, Law, PointMass
from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.core.laws import LawMaker, Laws
from foretoken.core.needs import Declared, Needs, Offers
from foretoken.core.randomness import Streams
from foretoken.core.stop_rule import StopRule
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict

if TYPE_CHECKING:
    from foretoken.options.sampling import SamplingParams


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The Config of a method without options."""


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

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end it."""
        ...

    @property
    def adapter(self) -> Any:
        """The adapter that corrects the target for it (forward/adapter.py); None: the base model."""
        ...


@dataclass(frozen=True, slots=True)
class Budget:
    """How much one request may propose in this step.

    Attributes:
        max_nodes: draft nodes at most (0: propose nothing).
        max_depth: path length at most; the request's remaining tokens bound it.
        stop_rule: of the adaptive controller; None drafts the full budget.
        evidence: the kind of evidence that the draft is to carry, for the recipe's verifier; None: none.
        history_only: the request is seeded, and its tokens depend on the draft: the draft may follow from nothing
            but its own past, so neither from other requests nor from anything measured.
        least_reach: a node must be likelier than that to stand in order to be worth anything: descendants of one that
            is not are never looked for.
        second: of a drafter that copies, and calls another one where that pays (``Offers.portfolio``): the budget of
            the other one; None: the same.
        rate: expected tokens of a step that drafts by it, per token of plain decoding in its time; 0: not known.
    """

    max_nodes: int
    max_depth: int
    stop_rule: StopRule | None = None
    evidence: type[Evidence] | None = None
    history_only: bool = False
    least_reach: float = 0.0
    second: Budget | None = None
    rate: float = 0.0

    @property
    def limit(self) -> int:
        """Draft nodes at most, whichever drafter proposes them."""
        return self.max_nodes if self.second is None else max(self.max_nodes, self.second.max_nodes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a draft: the tokens that were committed, accepted path first, extra token last."""

    request_id: int
    draft: Draft
    verdict: Verdict
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of one request's rows in one forward of the target, as a drafter has requested them.

    Attributes:
        context: the request; its tokens are those from before the step, or later ones where a plain step is shown late.
        begin: position of the first row.
        draft: what these rows were, after the root; NO_DRAFT for a prompt's chunk and for plain decoding.
        hidden: depth -> [rows, D]. A draft with a resume point brings only the depths beyond that.
        best: the target's most probable token after each row; empty where no logits were computed.
    """

    context: Context
    begin: int
    draft: Draft
    hidden: Mapping[int, Tensor]
    best: Sequence[int]

    def standing(self, path: Sequence[int]) -> Features:
        """The states of the root and the accepted nodes of a draft, as those of undrafted rows.

        For a drafter that has not proposed the draft.
        """
        rows = [0, *(1 + node for node in path)]
        hidden = {depth: states[rows] for depth, states in self.hidden.items()}
        return Features(self.context, self.begin, NO_DRAFT, hidden, [self.best[row] for row in rows])


class Drafter(Protocol):
    """Proposes a tree per request. With a lossless verifier it changes speed, never the output distribution.

    A drafter of the catalogue is made as ``Drafter(config, target)``, ``config`` an instance of its ``Config``.

    Attributes:
        name: the catalogue's name.
        config: its options; None for one of your own that has none.
        laws: kinds of q this drafter proposes with at temperatures above 0, as configured (at 0 every lossless rule
            is the walk along the argmax, and the kind does not matter).
        branches: whether its trees may branch.
        needs: its inputs; with ``hidden_layers`` it is shown every forward by :meth:`on_forward`.
        offers: what its drafts can carry, and whether it decides itself when to stop.
        declared: what others need to know of its class.
        explanation: its own measurements and choices, for the user, in one line; "" where it has not.
        sources: of a drafter that chooses between others, their names; a request may ask for one of them.
        flops: floating-point operations of its own models so far; None where it does not count them.
    """

    name: str
    config: Any = None
    sources: tuple[str, ...] = ()
    laws: tuple[type[Law], ...] = (PointMass,)
    branches: bool = False
    needs: Needs = Needs()
    offers: Offers = Offers()
    declared: ClassVar[Declared] = Declared()
    Config: ClassVar[type[Any]] = NoOptions
    explanation: str = ""

    @property
    def flops(self) -> float | None:
        return None

    def reading_flops(self, num_tokens: int) -> float:
        """Of its own models reading so many tokens of a prompt, the same count."""
        return 0.0

    @classmethod
    def settle(cls, config: Any, verifier: Verifier | None) -> Any:
        """The Config with what the user left open filled in, so that it suits the verifier.

        Raises:
            ConfigError: what the user did not leave open does not suit it.
        """
        return config

    def adapt(self, adapter: Any, folder: str) -> bool:
        """Correct its own model, too, for requests with an adapter of the target.

        Args:
            folder: LoRA of its model.
        Returns:
            whether it has a model that an adapter can correct.
        Raises:
            ModelError: the folder cannot be loaded, or does not fit.
        """
        return False

    def attach(self, cache: Any) -> None:
        """Take the engine's cache of the target (forward/cache.py); called once. For drafters that run a part of it."""
        return

    def first_confidence(self, context: Context) -> float:
        """The confidence in the first node that it would propose, by a look-up; 0: it would propose nothing.

        Called in every step that may have drafts, for requests without ``history_only``, if ``offers.foretells``.
        """
        return 1.0

    @abstractmethod
    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """One draft per context, in order; an empty draft where there is nothing to propose.

        Where the budget has no nodes, drafting does not pay: read nothing of that request, catch up at the next
        proposal. After a failure ``propose`` is called again for each request alone, with its streams as they stood
        before.

        All drafts of a step must have their resume points at the same depth, or none.
        """
        ...

    def on_forward(self, features: Sequence[Features]) -> None:
        """Called if ``needs.hidden_layers`` asks for it: after every forward that read a prompt or a draft, before any
        verdict, and with the states of other forwards of continuing requests, before the next draft is requested. A
        request for which nothing will be drafted may not be shown at all.
        """
        return

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Learn from the committed tokens. Called after every step that had drafts; after a fault again for each
        request alone.

        With a verifier that takes turns, after every step: a request without a draft has an empty one there.
        """
        return

    def release(self, request_id: int) -> None:
        """Forget a request; called exactly once when it ends, also if it never proposed."""
        return

    def close(self) -> None:
        """End the threads and processes that it has started, if any. It may propose again afterwards."""
        return


class Verifier(Protocol):
    """Decides which nodes stand. Pure arithmetic: no model, cache, tokenizer or global random state.

    A verifier of the catalogue is made as ``Verifier()``, or ``Verifier(config)`` where it has options, or
    ``Verifier(config, part, guarded)`` where it has learned something (``declared.learned_part``): ``guarded`` are the
    target's special tokens.

    Attributes:
        name: the catalogue's name.
        promise: "same distribution", "same stream" or "approximate". At temperature 0 a lossless rule gives the same
            text.
        laws: kinds of q that the rule is valid for; anything else is refused before the first step.
        trees: whether the rule handles branching drafts.
        needs: its inputs in addition to distributions: ``last_state`` comes as ``Laws.hidden_MD``, ``evidence`` with
            the draft.
        offers: its capabilities in addition to deciding one draft.
        declared: what others need to know of its class.
        budget: the mean distortion per token that a lossy rule keeps within; None: no bound, or a lossless rule.
    """

    name: str
    promise: str
    laws: tuple[type[Law], ...]
    trees: bool
    needs: Needs = Needs()
    offers: Offers = Offers()
    declared: ClassVar[Declared] = Declared()
    Config: ClassVar[type[Any]] = NoOptions

    @property
    def budget(self) -> float | None:
        return None

    @classmethod
    def settle(cls, config: Any, target: Any) -> Any:
        """The Config with what depends on the target (its tokens, say) filled in; called when a recipe is composed.

        Raises:
            ConfigError: an option does not suit the target.
        """
        return config

    @abstractmethod
    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """Decide one draft.

        Args:
            draft: N nodes; N may be 0, then exactly one token is emitted from row 0.
            target: N + 1 rows; row 0 is the distribution after the root, row i + 1 the distribution after node i.
            rng: the request's random streams.
        Returns:
            a path of 0..N nodes and exactly one extra token.
        """
        ...

    def verify_within(self, draft: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """:meth:`verify` within the rest of a request's budget; None: nothing was emitted yet.

        The engine always calls this one, and the rule keeps no state. A lossless rule has no budget to keep to.
        """
        return self.verify(draft, target, rng)

    def verify_batch(self, drafts: Sequence[Draft], targets: Sequence[Laws], rngs: Sequence[Streams]) -> list[Verdict]:
        """:meth:`verify` for each of the requests, with the same streams and the same result.

        The engine uses it where ``offers.batches`` says that it is more than this loop.
        """
        return [self.verify(*each) for each in zip(drafts, targets, rngs, strict=True)]

    def finish(self, verdict: Verdict, guess: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Couple the extra token after a draft of which every node was accepted to a guess of it.

        An executor that overlaps has meanwhile requested a draft for after this one: where the extra
        token is that guess, the next draft is there already. So a rule may decide the guess as it decides a drafted
        node, by the same distribution of the emitted token, such that it is the guess as often as can be.

        Args:
            verdict: of the draft; its extra token is drawn already.
            guess: one node, and the distribution that it was drawn from.
            target: the distributions of the step; the extra token follows the last node of the path.
            rng: the request's streams, past what :meth:`verify` has drawn.
            spent: as in :meth:`verify_within`, before this verdict.
        Returns:
            the verdict with another extra token; by default the same: the guess was right if it is that token.
        """
        return verdict

    def probe(self, draft: Draft, context: Context) -> TokenTree | None:
        """The draft's tree with further nodes after it, which are computed in the same forward and never committed.

        The first N nodes are the draft's own, unchanged; their rows do not see the further ones. The rows of the
        latter come to the rule as ``Laws.probe_logits_PV``, which is None in a step that cannot hold all of them:
        near the context's end, within a small budget of rows, or after a draft that has a resume point. A rule must
        be able to decide without them. None, the default, asks for nothing.
        """
        return None


class Scoring(NamedTuple):
    """A layer's options for attention scores.

    Attributes:
        scaling: factor of the scores.
        window: sliding window in positions, None for full attention.
        softcap: scores become ``softcap * tanh(scores / softcap)``.
        sinks_H: one extra logit per head in the softmax that attends to nothing.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


class Plan(Protocol):
    """How the target computes the rows of one step; called by every attention layer. See forward/dense.py.

    Attributes:
        native: the plan described (models.native.NativePlan), so that a native decoder may do the same arithmetic in
            one piece instead of being called layer by layer; None if it has to be called.
        swaps: module -> the function called in place of its forward, while the target computes this plan.
        num_experts: different experts that the forward read, mean over its layers; None before it, or without experts.
        prefix_read: of each segment of the batch, the share of its committed prefix that a head reads, mean over heads
            and layers without a window; None: all of it.
    """

    native: Any = None
    swaps: Mapping[Any, Callable[..., Any]] = {}
    prefix_read: Sequence[float] | None = None

    @property
    def num_experts(self) -> float | None:
        return None

    def attend(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, **scoring: Any) -> Tensor:
        """Write the rows' keys and values, attend, and return [T, H, Dv].

        Args:
            layer: index of the calling layer.
            q_HTD, k_GTD, v_GTD: heads first, rotary already applied; any strides.
            scoring: the fields of :class:`Scoring`.
        """
        return self.compute_attention(layer, q_HTD, k_GTD, v_GTD, Scoring(**scoring))

    def compute_attention(self, layer: int, q_HTD: Tensor, k_GTD: Tensor, v_GTD: Tensor, scoring: Scoring) -> Tensor:
        """:meth:`attend` with its options as one record; a plan has one of the two."""
        raise UnsupportedArchitecture(f"{type(self).__name__} computes no attention")

    def mix(self, mixer: Any, projected: Any) -> Tensor:
        """What a state-space layer's recurrence gives of the rows, float32 or wider [T, H, P]; their inputs are kept.

        Args:
            mixer: a models.ssm.layout.Mixer.
            projected: the projections of the rows that it reads (models.ssm.layout.Projected).
        """
        raise UnsupportedArchitecture(f"{type(self).__name__} computes no state-space layers")


class PlanMaker(Protocol):
    """Makes the plan of every step, one maker for each engine, and says what that does to the recipe.

    A plan of the catalogue is made as ``PlanMaker.arranged(settings, target)``.

    Attributes:
        settings_key: what its settings begin with in a ``speculative_config``, for example "verification"; "": it has
            none, and is chosen by its name in the catalogue (``plan='prefix_tree'``).
        exact: whether the distribution of every row is the dense target's, so that the verifier's promise stands.
        reason: the settings because of which nothing is promised; "" for an exact plan.
        explanation: the expected effect of its settings, for the user, in one line; "" for none.
    """

    settings_key: ClassVar[str] = ""
    declared: ClassVar[Declared] = Declared()
    Config: ClassVar[type[Any]] = NoOptions
    exact: bool = True
    reason: str = ""
    explanation: str = ""

    @classmethod
    def suits(cls, target: Any) -> bool:
        """Whether this is the plan of such a target, without any settings."""
        return False

    @classmethod
    def arranged(cls, settings: Mapping[str, Any], target: Any) -> PlanMaker | None:
        """The maker for these settings, under their names without the key; None if they switch nothing on.

        Raises:
            ConfigError: an unknown setting (the nearest name is offered), one out of range, or one that the target
                cannot honour.
        """
        return None

    def over(self, base: Any) -> PlanMaker:
        """Combine this plan with one that was chosen by name.

        Raises:
            ConfigError: they do not go together.
        """
        raise ConfigError(f"plan='{base.name}' does not go with '{self.settings_key}' settings: leave one of them out")

    @abstractmethod
    def __call__(self, cache: Any, batch: Any) -> Plan:
        """The plan of one step.

        Args:
            cache: the target's (models.cache.KVCache).
            batch: the step's rows (models.batch.PackedBatch).
        """
        ...

    def before_step(self, cache: Any, decoding: Sequence[Context]) -> None:
        """Called before a step with the requests that decode; the place to repair what earlier plans left."""
        return

    def wrap(self, drafter: Drafter, num_nodes: int) -> tuple[Drafter, int | None]:
        """The drafter as the engine is to use it, and the number of nodes that it then proposes.

        None as the number leaves the recipe's own, adaptive or not.
        """
        return drafter, None
