"""Copying where the text repeats itself, another drafter elsewhere, and copies after what the other one proposed.

copied chain ─► better than the other drafter? ─┬─ yes ──► the copy goes to the target, without the other drafter
                                                └─ no ───► the other drafter's draft, and what followed it before
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from foretoken.core.draft import Draft
from foretoken.core.needs import Offers
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.drafting.outer import Outer

COPIES = "suffix"
"""The source of copied nodes (``Draft.sources``)."""

NOTHING = Budget(0, 0)


class CopiesFirst(Outer):
    """Base of drafters that copy or call another drafter: subclasses decide which goes first.

    A copy is a point mass. Which drafter proposes is decided from the past, before anything is drawn: to prefer a
    drawn draft because it agrees with a copy would change its distribution. Copies after drawn tokens follow from
    these, so that their rows of q are 1 at the copied token.
    """

    offers = Offers(portfolio="", foretells=True)

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self._suffix = SuffixDrafter(SuffixDrafter.Config(tree=False))  # chains, which every rule takes
        self._name = inner.name
        self.sources = tuple(name for name in (COPIES, inner.name) if name != "none")
        self.branches = self._inner.branches
        # requests with a copy in this step, and the target's states of it, if the inner drafter reads any
        self._copied: dict[int, Features | None] = {}

    @abstractmethod
    def _goes_first(self, copy: Draft, budget: Budget, second: Budget) -> bool:
        """Whether a copy is proposed without a call of the other drafter.

        Args:
            copy: some nodes.
            budget, second: of copies, and of the other drafter; it may have no nodes.
        """

    def _second(self, context: Context, budget: Budget) -> Budget:
        """The other drafter's budget for a request."""
        return budget if budget.second is None else budget.second

    def first_confidence(self, context: Context) -> float:
        return self._suffix.first_confidence(context)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Look up all requests; call the other drafter for those where a copy does not go first."""
        copies = self._suffix.propose(contexts, budgets)
        seconds = [self._second(context, budget) for context, budget in zip(contexts, budgets, strict=True)]
        taken = [
            len(copy) > 0 and self._goes_first(copy, budget, second)
            for copy, budget, second in zip(copies, budgets, seconds, strict=True)
        ]
        left = [NOTHING if copied else second for copied, second in zip(taken, seconds, strict=True)]
        drafts = self._inner.propose(contexts, left) if any(each.max_nodes for each in left) else copies
        found = []
        for context, copied, copy, draft, budget, second in zip(
            contexts, taken, copies, drafts, budgets, seconds, strict=True
        ):
            self._copied.pop(context.request_id, None)
            if copied or (len(copy) and not len(draft)) or draft is copy:
                proposed = replace(copy, law=self.law, sources=(COPIES,) * len(copy))
            else:
                own = replace(draft, sources=(self._name,) * len(draft))
                proposed = self._with_copies(context, own, budget, second)
            if COPIES in proposed.sources:
                self._copied[context.request_id] = None
            found.append(proposed)
        return found

    def on_forward(self, features: Sequence[Features]) -> None:
        """Forward the target's states, those of a copy after its verdict, as if they had been read without a draft."""
        theirs = []
        for each in features:
            request_id = each.context.request_id
            if len(each.draft) and request_id in self._copied:
                self._copied[request_id] = each
            else:
                theirs.append(each)
        if theirs:
            self._inner.on_forward(theirs)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Report the outcomes of the inner drafter's own drafts, and the tokens that it needs from the others."""
        theirs, stood = [], []
        for outcome in outcomes:
            if outcome.request_id not in self._copied:
                theirs.append(outcome)
            elif (features := self._copied.pop(outcome.request_id)) is not None:
                stood.append(features.standing(outcome.verdict.path))
        if stood:
            self._inner.on_forward(stood)
        if theirs:
            self._inner.observe(theirs)

    def release(self, request_id: int) -> None:
        self._copied.pop(request_id, None)
        self._suffix.release(request_id)
        self._inner.release(request_id)

    def _with_copies(self, context: Context, draft: Draft, budget: Budget, second: Budget) -> Draft:
        """A draft, and what followed its tokens before, as far as that raises the rate of the step."""
        free = min(budget.max_nodes, budget.max_depth) - len(draft)
        if free < 1 or budget.stop_rule is None or second.stop_rule is None or not draft.extensible:
            return draft
        rule = budget.stop_rule.after(second.stop_rule, draft.confidence)
        more = self._suffix.after(context, draft.tree.tokens, Budget(free, free, rule, None, budget.history_only))
        return draft.followed_by(replace(more, sources=(COPIES,) * len(more)))
