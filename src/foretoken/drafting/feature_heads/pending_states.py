"""The target's states of rows that a draft network has not read yet, request by request.

    rows of a prompt or a plain step    committed in any case: pending at once
    rows of a draft                     unverified until observe names the accepted nodes: then the root's row and
                                        theirs become pending

Letters: T rows, F width of the fused states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from foretoken.core.protocols import Context, Features, Outcome
from foretoken.core.threads import threads_for
from foretoken.drafting.feature_heads.description import Taps
from foretoken.forward import anatomy
from foretoken.forward.cache import KVCache
from foretoken.models.language_model import LanguageModel


def final_of(taps: Taps | None, target: LanguageModel) -> tuple[int, nn.Module] | None:
    """Return the depth of the state that is read after the target's final norm, and that norm; None: there is none."""
    return None if taps is None or not taps.final else (target.num_layers, anatomy.find(target.model).final_norm)


def fused_states(
    states: Sequence[Tensor], depths: Sequence[int], final: tuple[int, nn.Module] | None, dtype: torch.dtype
) -> Tensor:
    """Return the states of some rows side by side, [T, F].

    Args:
        final: see :func:`final_of`.
        dtype: of the target, in which its final norm is computed.
    """
    if final is None:
        return torch.cat([*states], dim=-1)
    depth, norm = final
    with torch.inference_mode():
        found = [norm(each.to(dtype)) if at == depth else each for each, at in zip(states, depths, strict=True)]
    return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


@dataclass(slots=True)
class Pending:
    """One request: its slot in the network's cache, and the target's states of rows that were not read yet.

    Attributes:
        states: [T, F] each.
        num_rows: of all of them.
        unverified: [1 + N, F] of a draft's rows, until observe names the accepted ones.
        last: kept by the drafter of the last row that was read, [1, ...]; None: nothing was read.
    """

    slot: int
    states: list[Tensor] = field(default_factory=list)
    num_rows: int = 0
    unverified: Tensor | None = None
    last: Tensor | None = None

    def add(self, states_TF: Tensor) -> None:
        """Append rows."""
        if len(states_TF):
            self.states.append(states_TF)
            self.num_rows += len(states_TF)

    def take(self, count: int) -> Tensor:
        """Remove and return the first ``count`` states."""
        if len(self.states) > 1:
            with threads_for(sum(map(Tensor.numel, self.states))):
                self.states = [torch.cat(self.states)]
        (states_TF,) = self.states
        self.num_rows -= count
        self.states = [states_TF[count:]] if self.num_rows else []
        return states_TF[:count]


class PendingStates:
    """The pending states of all requests.

    Args:
        target: the model that computes them.
        slots: of the network's cache; a request takes one when its first row arrives.
        taps: which states are read; None: states are added by the caller, never received.
    """

    def __init__(self, target: LanguageModel, slots: KVCache, taps: Taps | None) -> None:
        self._slots, self._dtype = slots, target.dtype
        self._depths = () if taps is None else taps.of(target.num_layers)
        self._final = final_of(taps, target)
        self._of: dict[int, Pending] = {}

    def __len__(self) -> int:
        """Requests."""
        return len(self._of)

    @property
    def requests(self) -> list[int]:
        """Their ids."""
        return list(self._of)

    def get(self, request_id: int) -> Pending | None:
        """One request's; None if its first rows were missed."""
        return self._of.get(request_id)

    def before_root(self, context: Context, margin: int = 0) -> Pending | None:
        """The request's state if all rows before its root are known; a draft without an outcome is dropped.

        Args:
            margin: positions that must be left in the cache after the root.
        """
        state = self._of.get(context.request_id)
        if state is None:
            return None
        state.unverified = None
        rows, known = len(context.tokens) - 1, self._slots.lengths[state.slot] + state.num_rows
        return state if rows == known > 0 and rows + margin < self._slots.max_length else None

    def begin(self, request_id: int) -> Pending | None:
        """Register a request; None if all slots are taken."""
        if not self._slots.free_slots:
            return None
        state = self._of[request_id] = Pending(self._slots.acquire())
        return state

    def receive(self, features: Sequence[Features]) -> list[tuple[Pending, Context]]:
        """Take the target's states of one forward.

        Returns:
            the requests that have more pending rows now.
        """
        longer = []
        for each in features:
            state = self._of.get(each.context.request_id)
            if state is None:
                if each.begin:  # without its first rows a request cannot be drafted for
                    continue
                state = self.begin(each.context.request_id)
                if state is None:
                    continue
            states_TF = self._tapped(each)
            if len(each.draft):
                state.unverified = states_TF
                continue
            known = self._slots.lengths[state.slot] + state.num_rows
            state.add(states_TF[max(0, known - each.begin) :])
            longer.append((state, each.context))
        return longer

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """The rows of the root and of accepted nodes become pending; those of rejected nodes are dropped."""
        for outcome in outcomes:
            state = self._of.get(outcome.request_id)
            if state is not None and state.unverified is not None:
                path = outcome.verdict.path
                if path and path[-1] != len(path) - 1:
                    state.add(state.unverified[[0, *(1 + node for node in path)]])
                else:  # as of a chain: the first rows, without a copy
                    state.add(state.unverified[: 1 + len(path)])
                state.unverified = None

    def release(self, request_id: int) -> None:
        """Forget a request, and free its slot."""
        state = self._of.pop(request_id, None)
        if state is not None:
            self._slots.release(state.slot)

    def _tapped(self, features: Features) -> Tensor:
        """[T, F]: the states that are fused, side by side."""
        states = [features.hidden[depth] for depth in self._depths]
        with threads_for(sum(map(Tensor.numel, states))):
            return fused_states(states, self._depths, self._final, self._dtype)
