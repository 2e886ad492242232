"""The target's states of rows that a head has not read yet, request by request.

    of a prompt or a plain step     the row is committed in any case: it waits for the head
    of a draft                      shown, until observe says which nodes stand: the root's row and theirs wait

Letters: T rows, F width of the fused depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foretoken.core.protocols import Context, Features, Outcome
from foretoken.core.threads import threads_for
from foretoken.forward import anatomy
from foretoken.models.language_model import LanguageModel


class Slots(Protocol):
    """Places of requests, and how many of each one's rows were read: a cache, or a list where the cache is elsewhere.

    Attributes:
        lengths: rows of each slot.
    """

    lengths: list[int]

    @property
    def free_slots(self) -> int: ...

    def acquire(self) -> int: ...

    def release(self, slot: int) -> None: ...


@dataclass(slots=True)
class Unread:
    """One request: its slot in the head's cache, and the target's states of rows that were not read yet.

    Attributes:
        last: what the head keeps of the last row that was read, [1, ...]; None: nothing was read.
    """

    slot: int
    waiting: list[Tensor] = field(default_factory=list)  # [T, F] each
    num_waiting: int = 0
    shown: Tensor | None = None  # [1 + N, F] of a draft's rows, until observe says which of them stand
    last: Tensor | None = None

    def wait(self, states_TF: Tensor) -> None:
        """These rows come behind those that wait."""
        if len(states_TF):
            self.waiting.append(states_TF)
            self.num_waiting += len(states_TF)

    def take(self, count: int) -> Tensor:
        """The first ``count`` states that wait, which wait no longer."""
        if len(self.waiting) > 1:
            with threads_for(sum(map(Tensor.numel, self.waiting))):
                self.waiting = [torch.cat(self.waiting)]
        (states_TF,) = self.waiting
        self.num_waiting -= count
        self.waiting = [states_TF[count:]] if self.num_waiting else []
        return states_TF[:count]


class UnreadStates:
    """What waits, of all requests.

    Args:
        target: whose states they are.
        slots: of the head's cache; a request takes one when its first row is shown.
        depths: that are fused, in this order.
        final: whether the deepest one is read behind the target's final norm.
    """

    def __init__(self, target: LanguageModel, slots: Slots, depths: Sequence[int], *, final: bool) -> None:
        self._slots, self._depths, self._dtype = slots, tuple(depths), target.dtype
        self._final_norm = anatomy.find(target.model).final_norm if final else None
        self._of: dict[int, Unread] = {}

    def __len__(self) -> int:
        """Requests."""
        return len(self._of)

    @property
    def requests(self) -> list[int]:
        """Whose states there are."""
        return list(self._of)

    def get(self, request_id: int) -> Unread | None:
        """A request's; None where its beginning was not seen."""
        return self._of.get(request_id)

    def begin(self, request_id: int) -> Unread | None:
        """A new request's; None where all slots are taken."""
        if not self._slots.free_slots:
            return None
        state = self._of[request_id] = Unread(self._slots.acquire())
        return state

    def show(self, features: Sequence[Features]) -> list[tuple[Unread, Context]]:
        """Take the target's states: of rows that are committed in any case at once, of a draft's for a while.

        Returns:
            the requests that have more rows waiting now.
        """
        longer = []
        for each in features:
            state = self._of.get(each.context.request_id)
            if state is None:
                if each.begin:  # whose beginning was not seen cannot be drafted for
                    continue
                state = self.begin(each.context.request_id)
                if state is None:
                    continue
            states_TF = self._read_off(each)
            if len(each.draft):
                state.shown = states_TF
                continue
            known = self._slots.lengths[state.slot] + state.num_waiting
            state.wait(states_TF[max(0, known - each.begin) :])
            longer.append((state, each.context))
        return longer

    def settle(self, outcomes: Sequence[Outcome]) -> None:
        """The root's row and those of accepted nodes wait for the next draft; the others are forgotten."""
        for outcome in outcomes:
            state = self._of.get(outcome.request_id)
            if state is not None and state.shown is not None:
                path = outcome.verdict.path
                if path and path[-1] != len(path) - 1:
                    state.wait(state.shown[[0, *(1 + node for node in path)]])
                else:  # as of a chain: the first rows, where they are
                    state.wait(state.shown[: 1 + len(path)])
                state.shown = None

    def release(self, request_id: int) -> None:
        """Forget a request, and give its slot back."""
        state = self._of.pop(request_id, None)
        if state is not None:
            self._slots.release(state.slot)

    def _read_off(self, features: Features) -> Tensor:
        """[T, F]: the states that are fused, side by side."""
        states = [features.hidden[depth] for depth in self._depths]
        with threads_for(sum(map(Tensor.numel, states))):
            if self._final_norm is not None:
                with torch.inference_mode():
                    found: Tensor = self._final_norm(states[0].to(self._dtype))
                    return found
            return torch.cat(states, dim=-1)
