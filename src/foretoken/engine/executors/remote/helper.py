"""PEARL's helper process: it drafts for an engine, and every order contains all that it needs.

              ORDER ────►                   requests with their new tokens, their budgets, and requests to forget
              STOP  ────►                   return the drafts so far (only if the draft length is adaptive)
                    ◄──── REPLY             a draft for each request, or the reason why there is none

One pipe (process.py), one order at a time. An order names how many tokens of the one before are still valid; the
drafter compares the tokens to find the cache rows that are (drafting/draft_runner.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from foretoken.core.laws import LawMaker
from foretoken.core.protocols import Budget, Drafter
from foretoken.core.randomness import Streams, mix64
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.executors.overlap import DraftOrError, OverlapRule
from foretoken.options.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The properties of the target that a drafter's constructor reads, without the target itself."""

    name: str
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    trusted: bool
    tokenizer: Any


@dataclass(frozen=True, slots=True)
class Question:
    """One request of an order.

    Attributes:
        kept: tokens of the request's last order that its text still begins with.
        new: the tokens after them.
        seed: of its streams; with the order's epoch, of the draws here.
        budget: without a stop rule.
        past: of the request, which says how long a draft pays; None: drafts are full.
        hurried: whether a draft ends when the engine says STOP; it must not where a seed's text depends on it.
    """

    request_id: int
    kept: int
    new: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    history_only: bool
    budget: Budget
    past: OwnPastRule | None
    hurried: bool


@dataclass(frozen=True, slots=True)
class Order:
    """What the engine wants: drafts for these requests, and to have those forgotten. The reply bears its number."""

    number: int
    epoch: int
    questions: tuple[Question, ...]
    gone: tuple[int, ...]


@dataclass(slots=True)
class RemoteRequest:
    """A request in a helper's process: the ``Context`` of a drafter (core/protocols.py)."""

    request_id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    streams: Streams
    laws: LawMaker
    stop_ids: frozenset[int]
    history_only: bool
    slot: int = -1
    adapter: None = None  # an adapter is in the engine's process


class Helper:
    """Answers orders with a drafter.

    Args:
        drafter: of this process.
        vocab_size: of the target.
        stopped: whether the engine has sent a message since the order.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, stopped: Callable[[], bool]) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._stopped = stopped
        self._streams: dict[int, Streams] = {}
        self._tokens: dict[int, list[int]] = {}

    @classmethod
    def made(
        cls, drafter_class: Callable[..., Drafter], config: Any, target: TargetFacts, *, stopped: Callable[[], bool]
    ) -> "Helper":
        """With a drafter of the catalogue."""
        return cls(drafter_class(config, target), target.vocab_size, stopped)

    def answer(self, order: Order) -> list[DraftOrError]:
        """A draft for each question, or the error that it ended with."""
        for request_id in order.gone:
            if self._streams.pop(request_id, None) is not None:
                del self._tokens[request_id]
                self._drafter.release(request_id)
        contexts = [self._context(question, order.epoch) for question in order.questions]
        budgets = [self._budget(question) for question in order.questions]
        try:
            return [*self._drafter.propose(contexts, budgets)]
        except Exception as error:
            if len(contexts) == 1:
                return [portable(error)]
        found: list[DraftOrError] = []
        for context, budget in zip(contexts, budgets, strict=True):
            try:
                found += self._drafter.propose([context], [budget])
            except Exception as error:
                found.append(portable(error))
        return found

    def _context(self, question: Question, epoch: int) -> RemoteRequest:
        streams = self._streams.get(question.request_id)
        if streams is None:
            # draws of its own: not those of the engine's process, nor those of a helper that was there before
            streams = self._streams[question.request_id] = Streams(question.seed)
            streams.generator("draft").manual_seed(mix64(mix64(question.seed) ^ mix64(1 + epoch)) >> 1)
        tokens = [*self._tokens.get(question.request_id, ())[: question.kept], *question.new]
        self._tokens[question.request_id] = tokens
        laws = LawMaker(question.params, tokens[: question.num_prompt], self._vocab_size, question.stop_ids)
        laws.append(tokens[question.num_prompt :])
        return RemoteRequest(
            question.request_id,
            tokens,
            question.num_prompt,
            question.params,
            streams,
            laws,
            question.stop_ids,
            question.history_only,
        )

    def _budget(self, question: Question) -> Budget:
        if question.past is None:
            return question.budget
        return replace(
            question.budget, stop_rule=OverlapRule(question.past, self._stopped if question.hurried else _never)
        )


def portable(error: Exception) -> Exception:
    """An error that survives the way back."""
    return (
        type(error)(str(error))
        if type(error).__module__ in ("builtins", "foretoken.core.errors")
        else RuntimeError(f"{type(error).__name__}: {error}")
    )


def _never() -> bool:
    return False
