"""Drafters and a verifier that follow a script, for tests of other components and for measurements.

A test of an engine, a server or a verifier needs drafts with a predictable outcome. These test doubles propose from
recorded texts: the target's tokens, only wrong tokens, or the target's tokens with a known rate of mistakes.

    >>> llm = LLM("zoo:base", dtype="float32")
    >>> (plain,) = llm.generate(["Once"], params)
    >>> oracle = Oracle({tuple(plain.prompt_token_ids): plain.token_ids})
    >>> fast = LLM.from_target(llm.target, speculative_config={"method": oracle, "num_speculative_tokens": 4})

Each implements the drafter protocol (core/protocols.py), proposes point masses, and keeps no state of a request, so
that one instance may serve several engines in turn.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.core.draft import NO_DRAFT, Draft, Law, PointMass
from foretoken.core.laws import Laws
from foretoken.core.needs import Offers
from foretoken.core.protocols import Budget, Context, Drafter, Outcome, Verifier
from foretoken.core.tree import EMPTY_TREE, ROOT, TokenTree
from foretoken.core.verdict import Verdict

Texts = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt ids -> output ids of each request."""

_GOLDEN = (5**0.5 - 1) / 2


class Stub(Drafter):
    """A stateless drafter that proposes empty drafts. Subclasses override :meth:`draft`, which receives one request.

    Attributes:
        name, distributions, branches: as in core/protocols.py.
    """

    name = "stub"
    offers = Offers(ahead=True)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        """Call :meth:`draft` for every request, in order."""
        return [self.draft(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def draft(self, context: Context, budget: Budget) -> Draft:
        """Return the draft of one request."""
        return NO_DRAFT


class Empty(Stub):
    """Proposes an empty tree other than the shared NO_DRAFT: both must mean plain decoding."""

    def draft(self, context: Context, budget: Budget) -> Draft:
        return Draft(EMPTY_TREE)


class Scripted(Stub):
    """Proposes the known continuation as a chain, with each token wrong with probability ``1 - acceptance``.

    The choice of wrong tokens depends only on the prompt and the position, not on earlier drafts or other requests.
    After a wrong token the script continues unchanged.

    Args:
        texts: the continuation of every request. A missing prompt raises KeyError, which ends its request with that
            reason.
        acceptance: the probability that a token is right, between 0 and 1.
        confidence: whether the drafts report that probability, as a draft model does (``Draft.confidence``).
    """

    name = "scripted"

    def __init__(self, texts: Texts, acceptance: float = 1.0, *, confidence: bool = True) -> None:
        self.texts = texts
        self.acceptance = acceptance
        self.confidence = confidence

    def draft(self, context: Context, budget: Budget) -> Draft:
        prompt = tuple(context.tokens[: context.num_prompt])
        done = len(context.tokens) - context.num_prompt
        tokens = list(self.texts[prompt][done : done + min(budget.max_nodes, budget.max_depth)])
        if budget.stop_rule is not None:
            for place in range(len(tokens)):
                if not budget.stop_rule.worthwhile(self.acceptance**place, self.acceptance, place):
                    del tokens[place:]
                    break
        if not tokens:
            return NO_DRAFT
        confidence = (self.acceptance,) * len(tokens) if self.confidence else ()
        return Draft(TokenTree(self.spoilt(prompt, done, tokens)), confidence=confidence)

    def spoilt(self, prompt: tuple[int, ...], done: int, tokens: list[int]) -> list[int]:
        """Return the tokens to propose in place of the script's.

        Args:
            prompt: the request's prompt.
            done: number of emitted tokens.
            tokens: the rest of the script, at least one token.
        """
        return [
            token if random.Random(f"{prompt} {done + place}").random() < self.acceptance else _other(token)
            for place, token in enumerate(tokens)
        ]


class Oracle(Scripted):
    """Proposes the target's own tokens."""

    def __init__(self, texts: Texts) -> None:
        super().__init__(texts, 1.0)


class AlwaysWrong(Scripted):
    """Proposes only wrong tokens."""

    def __init__(self, texts: Texts) -> None:
        super().__init__(texts, 0.0)


class EvenlySpoilt(Scripted):
    """Like :class:`Scripted`, but even a short run accepts the expected number of tokens.

    The position of the first wrong token of a draft has the distribution of independent coins, but comes from an evenly
    spread sequence instead of a random one; only that token is wrong, because later ones are never reached. It is for
    measurements of one request at a time.

    Args:
        texts: as for :class:`Scripted`.
        acceptance: above 0 and below 1.
        phase: start of the sequence; it should differ between compared runs.
    """

    def __init__(self, texts: Texts, acceptance: float, *, phase: float = 0.0) -> None:
        super().__init__(texts, acceptance, confidence=False)
        self._phase = phase % 1.0

    def spoilt(self, prompt: tuple[int, ...], done: int, tokens: list[int]) -> list[int]:
        self._phase = (self._phase + _GOLDEN) % 1.0
        place = int(math.log(self._phase or 1e-9) / math.log(self.acceptance))
        return [_other(token) if each == place else token for each, token in enumerate(tokens)]


class OracleTree(Oracle):
    """Proposes the known continuation as the last child among wrong siblings, at every level.

    Args:
        texts: as for :class:`Scripted`.
        width: number of children per node.
    """

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
    """Proposes random tokens, which are almost never accepted: a chain, a tree of random shape, or an empty draft.

    Args:
        vocab_size: upper bound of the tokens.
        tree: whether to propose trees instead of chains.
        seed: seed of the sequence that all requests share.
        full: whether to use the whole node budget each time.
        tokens: draw only from these.
    """

    def __init__(
        self, vocab_size: int, *, tree: bool, seed: int = 0, full: bool = False, tokens: Sequence[int] | None = None
    ) -> None:
        self.branches = tree
        self._tokens: Sequence[int] = range(vocab_size) if tokens is None else tokens
        self._rng = random.Random(seed)
        self._full = full

    def draft(self, context: Context, budget: Budget) -> Draft:
        rng = self._rng
        count = budget.max_nodes if self._full else rng.randint(0, budget.max_nodes)
        if not self.branches:
            count = min(count, budget.max_depth)
        if not count:
            return NO_DRAFT
        tokens = [rng.choice(self._tokens) for _ in range(count)]
        if not self.branches:
            return Draft(TokenTree(tokens))
        parents: list[int] = []
        depths = {ROOT: 0}
        for node in range(count):
            parent = rng.choice([each for each, depth in depths.items() if depth < budget.max_depth])
            parents.append(parent)
            depths[node] = depths[parent] + 1
        return Draft(TokenTree(tokens, parents))


class Recorder(Stub):
    """Wraps a drafter and records the engine's calls.

    Attributes:
        proposed: request id, tokens so far, budget and draft of every proposal.
        observed: all outcomes, in order.
        released: how often each request was released; a well-behaved engine does it once.
        after_release: names of the calls for a released request; it should stay empty.
    """

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


class ScriptRule(Verifier):
    """A verifier that follows a script instead of the target's distribution: it emits exactly the script's tokens.

    The acceptance of a :class:`Scripted` drafter is then exact for any target. With random weights the two largest
    logits are often within rounding of each other, and a forward of several rows may then prefer another token than a
    forward of one. The engine's own work (distributions, commit, bookkeeping) is the same.

    Args:
        text: prompt and output of its only request, at least one token longer than the request generates.
    """

    name = "script"
    promise = "same text"
    laws: tuple[type[Law], ...] = (PointMass,)
    trees = False

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def verify(self, draft: Draft, target: Laws, rng: Any) -> Verdict:
        """Accept up to the first token that differs from the script, then emit the script's token."""
        start = target.positions[0]
        stands = 0
        for token in draft.tree.tokens:
            if token != self._text[start + stands]:
                break
            stands += 1
        return Verdict(path=tuple(range(stands)), extra=self._text[start + stands])


def _other(token: int) -> int:
    """Return a different token, for any vocabulary."""
    return token + 1 if token == 0 else token - 1
