"""The drafting side: the head, its cache and the drafts, wherever that is. It is told what it needs with every order.

    target's side                  drafting side
    parcels        ────────►       states of rows that stand, and the tokens behind them: read, never forgotten
    questions      ────────►       whom to draft for, and how much
                   ◄────────       tokens, parents, confidences: 12 bytes a node

The states are what the target's final norm gives, in the head's dtype. Rows of a draft that was refused are not in
them, so nothing here is ever taken back.

Letters: T rows, W width.
"""

from __future__ import annotations

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
from foretoken.engine.executors.remote.helper import portable
from foretoken.methods.dovetail.network import Dovetail, DovetailConfig
from foretoken.native import build
from foretoken.options.sampling import SamplingParams

_WAITING_ROWS = 512  # states that wait for the head at most
EAGER_ROWS = 16  # so many may wait where it can read them while the target goes on
_ID_BYTES, _NODE_BYTES = 8, 12


@dataclass(frozen=True, slots=True)
class Parcel:
    """Rows of one request that the target has computed and that stand.

    Attributes:
        begin: position of the first row.
        states_TW: what the final norm gave.
        told: tokens that were told before.
        tokens: those behind them.
    """

    request_id: int
    begin: int
    states_TW: Tensor
    told: int
    tokens: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the states as they are, and of the tokens' ids."""
        return self.states_TW.nbytes + _ID_BYTES * len(self.tokens)


def bytes_back(draft: Draft) -> int:
    """What a draft of tokens takes on its way back."""
    return _NODE_BYTES * len(draft)


@dataclass(slots=True)
class _Told:
    """The tokens of a request, as far as they were told."""

    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What a head has to know of a target that it shares nothing with (:class:`models.language_model.LanguageModel`).

    Attributes:
        device, dtype: of the head.
        model: there is none: the head has rows of its own.
        packed: whether the head's products are to be native.
    """

    name: str
    vocab_size: int
    max_length: int
    device: torch.device
    dtype: torch.dtype
    packed: bool
    model: None = None

    @property
    def fused(self) -> Any:
        """The compiled library, as a fused decoder has it; None where products are the library's."""
        library = build.library() if self.packed else None
        return None if library is None else _Native(library)


@dataclass(frozen=True, slots=True)
class _Native:
    library: Any


class Far(FeatureDrafter):
    """Reads parcels and answers questions.

    Args:
        options: of the drafts.
        target: the target, or what stands for it.
        head: with rows of its own where the target is elsewhere.
        eager: read what comes at once, and not when it is drafted for.
    """

    name = "dovetail"

    def __init__(self, options: GrowthOptions, target: Any, head: Dovetail, *, eager: bool = False) -> None:
        super().__init__(options, target, Runner(target, head), taps=None)
        self._told: dict[int, _Told] = {}
        self._most_waiting = EAGER_ROWS if eager else _WAITING_ROWS

    def take(self, parcels: Sequence[Parcel]) -> None:
        """Take rows over. Of a request whose beginning was never here, nothing is kept."""
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
        """A request's tokens, a list that grows with what is told; empty where its beginning was never here."""
        found = self._told.get(request_id)
        return [] if found is None else found.tokens

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        """What was missed of a draft vocabulary."""
        self._columns.observe(outcomes)

    def release(self, request_id: int) -> None:
        self._told.pop(request_id, None)
        super().release(request_id)


# ------------------------------------------------------------------ in a process of its own


@dataclass(frozen=True, slots=True)
class Newcomer:
    """What is said of a request once."""

    request_id: int
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    own_past: bool


@dataclass(frozen=True, slots=True)
class Order:
    """Everything that is told and asked in one go. Without questions there is no reply.

    Attributes:
        parcels: with their states as bytes, see :func:`packed`.
        questions: whom to draft for, and how much.
        gone: requests to forget, first of all.
    """

    number: int
    parcels: tuple[tuple[int, int, bytes, int, tuple[int, ...]], ...]
    newcomers: tuple[Newcomer, ...]
    questions: tuple[tuple[int, Budget], ...]
    gone: tuple[int, ...]


def packed(parcel: Parcel) -> tuple[int, int, bytes, int, tuple[int, ...]]:
    """A parcel that a pipe carries as it is."""
    raw = parcel.states_TW.contiguous().view(torch.uint8).numpy().tobytes()
    return parcel.request_id, parcel.begin, raw, parcel.told, parcel.tokens


@dataclass(slots=True)
class _Asked:
    """The ``Context`` of a question (core/protocols.py)."""

    request_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    streams: Streams
    laws: LawMaker
    stop_ids: frozenset[int]
    own_past: bool
    slot: int = -1
    num_in_laws: int = 0


class Answerer:
    """The drafting side in a helper's process (drafting/process.py)."""

    def __init__(self, far: Far, target: Elsewhere, width: int) -> None:
        self._far, self._target, self._width = far, target, width
        self._known: dict[int, _Asked] = {}

    @classmethod
    def made(
        cls, options: GrowthOptions, target: Elsewhere, config: DovetailConfig, weights: bytes, *, stopped: Any
    ) -> Answerer:
        """With a head of these weights (:func:`weights_of`)."""
        from safetensors.torch import load

        tensors = load(weights)
        head = Dovetail(config, ids_K=tensors.pop(IDS, None), own_head=True, own_embedding=True)
        head.take(tensors)
        return cls(Far(options, target, head, eager=True), target, config.target_width)

    def answer(self, order: Order) -> Any:
        """(tokens, parents, confidences) of each question's draft, or the error that it ended with."""
        for request_id in order.gone:
            self._known.pop(request_id, None)
            self._far.release(request_id)
        self._far.take([self._unpacked(*each) for each in order.parcels])
        for each in order.newcomers:
            streams, tokens = Streams(each.seed), self._far.told(each.request_id)
            laws = LawMaker(each.params, tokens[: each.num_prompt], self._target.vocab_size, each.stop_ids)
            self._known[each.request_id] = _Asked(
                each.request_id,
                tokens,
                each.num_prompt,
                each.params,
                streams,
                laws,
                each.stop_ids,
                each.own_past,
                num_in_laws=each.num_prompt,
            )
        if not order.questions:
            return None
        try:
            contexts = [self._context(request_id) for request_id, _ in order.questions]
            drafts = self._far.propose(contexts, [budget for _, budget in order.questions])
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
    """What a reply says of one question."""
    return Draft(TokenTree(tokens, parents), confidence=tuple(confidence)) if tokens else NO_DRAFT


def weights_of(head: Dovetail) -> bytes:
    """A head with rows of its own, for another process."""
    from safetensors.torch import save

    tensors = {name: each.contiguous() for name, each in head.state_dict().items()}
    return save(tensors if head.ids_K is None else {**tensors, IDS: head.ids_K})
