"""A drafter that lets a second process draft ahead, and drafts in this process if the second one fails."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget, Context, Drafter, Outcome
from foretoken.drafting import process
from foretoken.drafting.draft_runner import common_length
from foretoken.drafting.process import HelperProcess
from foretoken.engine.executors.overlap import AssumedContext, DraftOrError, OverlapRule
from foretoken.engine.executors.remote.helper import Helper, Order, Question, TargetFacts
from foretoken.models.language_model import LanguageModel

_READING = 0.01  # seconds more for every token that is new to the helper


class RemoteDrafter(Drafter):
    """Another drafter: a helper process (helper.py) drafts ahead with it; all other calls run in this process.

    The helper is killed when it does not answer in time, and started once more. Until the new one is ready, and for
    good after the second loss, this process drafts ahead. The step in which the helper is lost has no guess. Every
    helper and this process draw their own random numbers: a loss keeps the distribution, but may change a seed's text.

    Args:
        inner: of this process.
        config: of ``inner``; the helper's drafter is made with it, too.
        target: the helper gets only its :class:`TargetFacts`.
        threads: of the helper.
    Raises:
        ConfigError: the helper fails to start.
    """

    def __init__(self, inner: Drafter, config: Any, target: LanguageModel, threads: int) -> None:
        self.name, self.laws, self.branches = inner.name, inner.laws, inner.branches
        self.needs, self.offers, self.explanation = inner.needs, inner.offers, inner.explanation
        self._inner = inner
        facts = TargetFacts(
            target.name, target.vocab_size, target.dtype, target.device, target.trusted, target.tokenizer
        )
        self._known: dict[int, list[int]] = {}  # request -> its tokens that the helper has
        self._gone: list[int] = []
        self._helper = HelperProcess(
            Helper.made,
            (type(inner), config, facts),
            purpose=f"which drafts for method '{self.name}'",
            without="drafts are written in this process from now on",
            forget=self._forget,
            threads=threads,
        )
        if not self._helper.started(process.STARTING):
            self.close()
            raise ConfigError("lane='process': the helper did not start: see its messages above, or use lane='thread'")

    @property
    def flops(self) -> float | None:
        return self._inner.flops

    def reading_flops(self, num_tokens: int) -> float:
        return self._inner.reading_flops(num_tokens)

    @property
    def pid(self) -> int | None:
        """Of the helper's process; None where there is none."""
        return self._helper.pid

    def ready(self, seconds: float = 0.0) -> bool:
        """Whether the helper is there; waits so long for one that is starting."""
        return self._helper.ready(seconds)

    def attach(self, cache: Any) -> None:
        self._inner.attach(cache)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Draft ahead in the helper, if it is there; else here."""
        if not all(isinstance(context, AssumedContext) for context in contexts):
            return self._inner.propose(contexts, budgets)
        if not self.ready():
            return self._inner.propose(contexts, budgets)
        found = self._ask(cast("Sequence[AssumedContext]", contexts), budgets)
        for each in found:
            if isinstance(each, Exception):
                raise each
        return [each for each in found if isinstance(each, Draft)]

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._inner.observe(outcomes)

    def release(self, request_id: int) -> None:
        if self._known.pop(request_id, None) is not None:
            self._gone.append(request_id)
        self._inner.release(request_id)

    def close(self) -> None:
        """End the helper; nothing starts another one."""
        self._helper.close()

    # ------------------------------------------------------------------ the helper

    def _ask(self, contexts: Sequence[AssumedContext], budgets: Sequence[Budget]) -> list[DraftOrError]:
        kept = [common_length(self._known.get(each.request_id, []), each.tokens) for each in contexts]
        questions = tuple(map(_question, contexts, kept, budgets))
        unread = sum(len(each.new) for each in questions)
        order = Order(self._helper.next_number(), self._helper.epoch, questions, tuple(self._gone))
        stopped = next((b.stop_rule.stopped for b in budgets if isinstance(b.stop_rule, OverlapRule)), None)
        # until the reply: an order that is interrupted here may have been read there, or not
        self._known.update((each.request_id, []) for each in contexts)
        answers: list[DraftOrError] | None = self._helper.ask(order, more_seconds=_READING * unread, stopped=stopped)
        if answers is None:
            return [NO_DRAFT] * len(contexts)
        self._gone.clear()
        self._known.update({each.request_id: each.tokens for each in contexts})
        return answers

    def _forget(self) -> None:
        self._known.clear()
        self._gone.clear()


def _question(context: AssumedContext, kept: int, budget: Budget) -> Question:
    rule = budget.stop_rule
    return Question(
        context.request_id,
        kept,
        context.tokens[kept:],
        context.num_prompt,
        context.params,
        context.streams.seed,
        context.stop_ids,
        context.history_only,
        replace(budget, stop_rule=None),
        rule.past if isinstance(rule, OverlapRule) else None,
        not context.history_only,
    )
