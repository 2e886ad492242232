"""Drafters that know more, or less, than a drafter may: for tests of everything that is not a drafter."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.protocols import Budget, Context, Drafter, Outcome
from foretoken.core.tree import EMPTY_TREE, ROOT, TokenTree

Texts = Mapping[tuple[int, ...], Sequence[int]]  # prompt ids -> output ids


class Stub(Drafter):
    """A drafter that proposes nothing and remembers nothing; the others override what they need."""

    name = "stub"

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self.draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def draft(self, context: Context, budget: Budget) -> Draft:
        return NO_DRAFT


class Empty(Stub):
    """Proposes an empty tree that is not the shared NO_DRAFT."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        return Draft(EMPTY_TREE)


class Scripted(Stub):
    """Proposes the known continuation, each token corrupted with probability ``1 - acceptance``.

    The corruption depends on (request's prompt, position) only: what was drafted before changes nothing.
    """

    def __init__(self, texts: Texts, acceptance: float = 1.0, *, confidence: bool = True) -> None:
        self.texts = texts
        self.acceptance = acceptance
        self.confidence = confidence

    def draft(self, context: Context, budget: Budget) -> Draft:
        prompt = tuple(context.tokens[: context.num_prompt])
        done = len(context.tokens) - context.num_prompt
        tokens = list(self.texts[prompt][done : done + min(budget.max_nodes, budget.max_depth)])
        for i in range(len(tokens)):
            if budget.stop_rule is not None:
                reach = self.acceptance**i
                if not budget.stop_rule.worthwhile(reach, self.acceptance, i):
                    del tokens[i:]
                    break
            if random.Random(f"{prompt} {done + i}").random() >= self.acceptance:
                tokens[i] = tokens[i] + 1 if tokens[i] == 0 else tokens[i] - 1
        if not tokens:
            return NO_DRAFT
        return Draft(TokenTree(tokens), confidence=(self.acceptance,) * len(tokens) if self.confidence else ())


class Oracle(Scripted):
    """Proposes what the target will say."""

    def __init__(self, texts: Texts) -> None:
        super().__init__(texts, 1.0)


class AlwaysWrong(Scripted):
    """Never proposes what the target will say."""

    def __init__(self, texts: Texts) -> None:
        super().__init__(texts, 0.0)


class OracleTree(Oracle):
    """The known continuation as the last child among wrong siblings, at every level."""

    branches = True

    def __init__(self, texts: Texts, width: int = 3) -> None:
        super().__init__(texts)
        self.width = width

    def draft(self, context: Context, budget: Budget) -> Draft:
        chain = super().draft(context, budget).tree.tokens[: budget.max_nodes // self.width]
        tokens: list[int] = []
        parents: list[int] = []
        parent = ROOT
        for token in chain:
            tokens += [(token + offset) % 100 + 100 for offset in range(1, self.width)]
            tokens.append(token)
            parents += [parent] * self.width
            parent = len(tokens) - 1
        return Draft(TokenTree(tokens, parents)) if tokens else NO_DRAFT


class Random(Stub):
    """Random tokens: a chain, or a tree of random shape; sometimes nothing. Fills the budget of nodes if asked to."""

    def __init__(self, vocab_size: int, *, tree: bool, seed: int = 0, full: bool = False) -> None:
        self.branches = tree
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._full = full

    def draft(self, context: Context, budget: Budget) -> Draft:
        rng = self._rng
        count = budget.max_nodes if self._full else rng.randint(0, budget.max_nodes)
        if not self.branches:
            count = min(count, budget.max_depth)
        if not count:
            return NO_DRAFT
        tokens = [rng.randrange(self._vocab_size) for _ in range(count)]
        if not self.branches:
            return Draft(TokenTree(tokens))
        parents: list[int] = []
        depths = {ROOT: 0}
        for node in range(count):
            parent = rng.choice([each for each, depth in depths.items() if depth < budget.max_depth])
            parents.append(parent)
            depths[node] = depths[parent] + 1
        return Draft(TokenTree(tokens, parents))


class Crashing(Stub):
    """Another drafter, except that it raises when ``culprit`` says so of a context."""

    def __init__(self, inner: Drafter, culprit: Callable[[Context], bool], *, when: str = "propose") -> None:
        self.branches, self.laws = inner.branches, inner.laws
        self._inner = inner
        self._culprit = culprit
        self._when = when
        self._marked: set[int] = set()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = self._inner.propose(contexts, budgets)  # first: a failure finds the others' state changed
        for context in contexts:
            if self._culprit(context):
                self._marked.add(context.request_id)
                if self._when == "propose":
                    raise RuntimeError("the drafter crashed")
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._inner.observe(outcomes)
        if self._when == "observe" and any(outcome.request_id in self._marked for outcome in outcomes):
            raise RuntimeError("the drafter crashed")

    def release(self, request_id: int) -> None:
        self._inner.release(request_id)


class Recorder(Stub):
    """Another drafter, with a record of how the engine treated it."""

    def __init__(self, inner: Drafter) -> None:
        self.branches, self.laws = inner.branches, inner.laws
        self._inner = inner
        self.proposed: list[tuple[int, tuple[int, ...], Budget, Draft]] = []
        self.observed: list[Outcome] = []
        self.released: Counter[int] = Counter()
        self.after_release: list[str] = []

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        self.after_release += ["propose" for context in contexts if context.request_id in self.released]
        drafts = self._inner.propose(contexts, budgets)
        for context, budget, draft in zip(contexts, budgets, drafts, strict=True):
            self.proposed.append((context.request_id, tuple(context.tokens), budget, draft))
        return drafts

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self.after_release += ["observe" for outcome in outcomes if outcome.request_id in self.released]
        self.observed += outcomes
        self._inner.observe(outcomes)

    def release(self, request_id: int) -> None:
        self.released[request_id] += 1
        self._inner.release(request_id)
