"""The drafting side: the head, its cache and the drafts, on any device. Every order is self-contained.

    target's side                  drafting side
    parcels        ────────►       states of committed rows, and the tokens after them: read once and kept
    questions      ────────►       the requests to draft for, with their budgets
                   ◄────────       tokens, parents, confidences: 12 bytes a node

The states are the outputs of the target's final norm, in the head's dtype. They contain no rows of rejected drafts, so
the drafting side never rolls back.

Letters: T rows, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.laws import LawMaker
from foretoken.core.protocols import Budget, Outcome
from foretoken.core.randomness import Streams
from foretoken.core.tree import TokenTree
from foretoken.drafting.feature_heads.draft_ids import IDS
from foretoken.drafting.feature_heads.drafter import FeatureDrafter, GrowthOptions
from foretoken.drafting.feature_heads.runner import Runner
from foretoken.engine.executors.remote.helper import RemoteRequest, portable
from foretoken.methods.dovetail.network import Dovetail, DovetailConfig
from foretoken.native import build
from foretoken.options.sampling import SamplingParams

_WAITING_ROWS = 512  # largest number of states that wait for the head
EAGER_ROWS = 16  # the same where the head can read them while the target computes
_ID_BYTES, _NODE_BYTES = 8, 12


@dataclass(frozen=True, slots=True)
class Parcel:
    """Committed rows of one request.

    Attributes:
        begin: position of the first row.
        states_TW: outputs of the final norm.
        told: number of tokens in earlier parcels.
        tokens: the next tokens.
    """

    request_id: int
    begin: int
    states_TW: Tensor
    told: int
    tokens: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the states and of the token ids."""
        return self.states_TW.nbytes + _ID_BYTES * len(self.tokens)


def bytes_back(draft: Draft) -> int:
    """Return the bytes of a draft in a reply."""
    return _NODE_BYTES * len(draft)


@dataclass(slots=True)
class _Told:
    """The tokens of a request from its parcels so far."""

    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts about a target that a head in another process needs (:class:`models.language_model.LanguageModel`).

    Attributes:
        device, dtype: of the head.
        model: None, because the head has its own embedding and LM head.
        packed: whether the head's products run natively.
    """

    name: str
    vocab_size: int
    max_length: int
    device: torch.device
    dtype: torch.dtype
    packed: bool
    model: None = None

    @property
    def native_decoder(self) -> Any:
        """The compiled library, as in a native decoder; None: products run in torch."""
        library = build.library() if self.packed else None
        return None if library is None else _Native(library)


@dataclass(frozen=True, slots=True)
class _Native:
    library: Any


class RemoteHead(FeatureDrafter):
    """The head on the drafting side: reads parcels and answers questions.

    Args:
        options: options of the drafts.
        target: the target, or the facts about it.
        head: has its own LM head if the target is on another device or in another process.
        eager: read states when they arrive, not when a draft is requested.
    """

    name = "dovetail"

    def __init__(self, options: GrowthOptions, target: Any, head: Dovetail, *, eager: bool = False) -> None:
        super().__init__(options, target, Runner(target, head), taps=None)
        self._told: dict[int, _Told] = {}
        self._most_waiting = EAGER_ROWS if eager else _WAITING_ROWS

    def take(self, parcels: Sequence[Parcel]) -> None:
        """Receive rows. Requests without their first rows are ignored."""
        longer: list[tuple[Any, Any]] = []
        for parcel in parcels:
            state = self._pending.get(parcel.request_id)
            if state is None and not parcel.begin and not parcel.told:
                state = self._pending.begin(parcel.request_id)
            if state is None:
                continue
            told = self._told.setdefault(parcel.request_id, _Told())
            if len(told.tokens) != parcel.told or self._cache.lengths[state.slot] + state.num_rows != parcel.begin:
                self.release(parcel.request_id)
                continue
            told.tokens.extend(parcel.tokens)
            state.add(parcel.states_TW)
            if state.num_rows > self._most_waiting:
                longer.append((state, told))
        if longer:
            self._catch_up(longer)

    def told(self, request_id: int) -> list[int]:
        """Return a request's tokens, a list that grows with its parcels; empty if its first rows never arrived."""
        found = self._told.get(request_id)
        return [] if found is None else found.tokens

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """Count tokens outside of the draft vocabulary."""
        self._columns.observe(outcomes)

    def release(self, request_id: int) -> None:
        self._told.pop(request_id, None)
        super().release(request_id)


# ------------------------------------------------------------------ in a separate process


@dataclass(frozen=True, slots=True)
class Newcomer:
    """Facts about a request, sent once."""

    request_id: int
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    history_only: bool


@dataclass(frozen=True, slots=True)
class Order:
    """One message to the drafting side. An order without questions gets no reply.

    Attributes:
        parcels: with their states as bytes, see :func:`packed`.
        questions: request and budget of each draft.
        gone: requests to drop before the rest of the order.
    """

    number: int
    parcels: tuple[tuple[int, int, bytes, int, tuple[int, ...]], ...]
    newcomers: tuple[Newcomer, ...]
    questions: tuple[tuple[int, Budget], ...]
    gone: tuple[int, ...]


def packed(parcel: Parcel) -> tuple[int, int, bytes, int, tuple[int, ...]]:
    """Convert a parcel for a pipe."""
    raw = parcel.states_TW.contiguous().view(torch.uint8).numpy().tobytes()
    return parcel.request_id, parcel.begin, raw, parcel.told, parcel.tokens


@dataclass(slots=True)
class _Asked(RemoteRequest):
    """The ``Context`` of a question, with the number of its tokens that are in its distributions."""

    num_in_laws: int = 0


class Answerer:
    """The drafting side in a helper's process (drafting/process.py)."""

    def __init__(self, remote_head: RemoteHead, target: TargetFacts, width: int) -> None:
        self._remote_head, self._target, self._width = remote_head, target, width
        self._known: dict[int, _Asked] = {}

    @classmethod
    def made(
        cls, options: GrowthOptions, target: TargetFacts, config: DovetailConfig, weights: bytes, *, stopped: Any
    ) -> "Answerer":
        """Build the answerer with a head of these weights (:func:`weights_of`)."""
        from safetensors.torch import load

        tensors = load(weights)
        head = Dovetail(config, ids_K=tensors.pop(IDS, None), own_head=True, own_embedding=True)
        head.take(tensors)
        return cls(RemoteHead(options, target, head, eager=True), target, config.target_width)

    def answer(self, order: Order) -> Any:
        """Return (tokens, parents, confidences) of each question's draft, or the error that stopped it."""
        for request_id in order.gone:
            self._known.pop(request_id, None)
            self._remote_head.release(request_id)
        self._remote_head.take([self._unpacked(*each) for each in order.parcels])
        for each in order.newcomers:
            streams, tokens = Streams(each.seed), self._remote_head.told(each.request_id)
            laws = LawMaker(each.params, tokens[: each.num_prompt], self._target.vocab_size, each.stop_ids)
            self._known[each.request_id] = _Asked(
                each.request_id,
                tokens,
                each.num_prompt,
                each.params,
                streams,
                laws,
                each.stop_ids,
                each.history_only,
                num_in_laws=each.num_prompt,
            )
        if not order.questions:
            return None
        try:
            contexts = [self._context(request_id) for request_id, _ in order.questions]
            drafts = self._remote_head.propose(contexts, [budget for _, budget in order.questions])
        except Exception as error:
            return portable(error)
        return [(each.tree.tokens, each.tree.parents, each.confidence) for each in drafts]

    def _context(self, request_id: int) -> _Asked:
        found = self._known[request_id]
        found.laws.append(found.tokens[found.num_in_laws :])
        found.num_in_laws = len(found.tokens)
        return found

    def _unpacked(self, request_id: int, begin: int, raw: bytes, told: int, tokens: tuple[int, ...]) -> Parcel:
        dtype, width = self._target.dtype, self._width
        states_TW = torch.empty(len(raw) // (width * dtype.itemsize), width, dtype=dtype)
        if raw:
            states_TW.view(torch.uint8).flatten().copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        return Parcel(request_id, begin, states_TW.to(self._target.device), told, tokens)


def draft_of(tokens: Sequence[int], parents: Sequence[int], confidence: Sequence[float]) -> Draft:
    """Build the draft of one question from its reply."""
    return Draft(TokenTree(tokens, parents), confidence=tuple(confidence)) if tokens else NO_DRAFT


def weights_of(head: Dovetail) -> bytes:
    """Serialise a head with its own embedding and LM head, for another process."""
    from safetensors.torch import save

    tensors = {name: each.contiguous() for name, each in head.state_dict().items()}
    return save(tensors if head.ids_K is None else {**tensors, IDS: head.ids_K})
