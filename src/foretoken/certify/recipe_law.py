"""The exact distribution of a whole recipe: its own drafter and rule, run by the engine on real models, no sampling.

Enumerating a rule (enumeration.py) takes the drafter's word for how it drew. Here the drafter itself draws. A request
whose random streams answer from a script takes one branch of all that can happen to it; once every branch was taken,
each text's weights add up to its probability, to be compared with that of plain sampling, enumerated likewise.

    drafter.propose    draws from ReplayedStreams, and asks a stop rule that is a hash of the question (HashedStops)
    engine             budgets, packed forwards, commits: as always
    verifier.verify    the recipe's rule, on the same p and q in float64 (EveryDecision)

A drafter that keeps, drops or continues a drawn token for its value, and then says that it was drawn from q, gives
texts another distribution under a rule that believes it, however seldom that shows. A stop rule that is asked with what
was known before the draw answers the same whatever is drawn; one that is asked with the token's own probability does
not.

A text has few tokens out of few: the others are biased away, in the target and the draft alike. One of them may be made
rare, for a drafter that treats improbable draws otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from foretoken.certify.enumeration import ReplayedStreams
from foretoken.core.draft import (
    NO_DRAFT,
    Coupled,
    Draft,
    HubPair,
    PointMass,
    Sampled,
    Tabulated,
    TopThenSampled,
    WithoutReplacement,
)
from foretoken.core.laws import Laws
from foretoken.core.needs import Needs
from foretoken.core.protocols import Budget, Context, Drafter, Features, Outcome, Verifier
from foretoken.core.randomness import Streams, mix64
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.llm import LLM
from foretoken.engine.recipe import Recipe, verifier_named
from foretoken.engine.step import Engine
from foretoken.options.sampling import SamplingParams

_SLOTS = 32
_BIAS = 60.0  # logits added to the tokens of the texts; next to them top_k leaves nothing
_RARE = 9.0  # less of it: about one draw in ten thousand
_GRAIN = 1000  # of the numbers that a stop rule is asked: rounding of the forward must not show in its answer


class HashedStops(OwnPastRule):
    """A stop rule that says no to a quarter of what it is asked: by a hash of the question and of the request's past.

    Args:
        seed: of the hash.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(node_cost=1.0)
        self._past = mix64(seed)

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """The same answer to the same question, at the same place of the same text."""
        key = self._past
        for number in (round(_GRAIN * reach), round(_GRAIN * confidence), num_nodes):
            key = mix64(key ^ number)
        return key % 4 > 0

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Take in what was emitted; the next step's answers are others."""
        for token in (*(draft.tree.tokens[node] for node in verdict.path), verdict.extra):
            self._past = mix64(self._past ^ (token + 1))


class EveryDecision(Verifier):
    """The rule of a recipe on the distributions in float64, where an enumeration is exact to 1e-15.

    `match` has noise of its own, which no script replays; `naive` draws from the same distribution and accepts in the
    same way.

    Args:
        recipe: whose rule decides.
        params: of the requests.
    """

    name = "every decision"
    promise = "same distribution"
    laws = (PointMass, Coupled, Sampled, WithoutReplacement, TopThenSampled, HubPair)
    trees = True

    def __init__(self, recipe: Recipe, params: SamplingParams) -> None:
        self._recipe = recipe
        self._params = params
        self.needs = Needs() if recipe.verifier is None else recipe.verifier.needs

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        """The verdict of the recipe's rule."""
        return self._rule(draft).verify(*_exactly(draft, target), rng)

    def finish(self, guess: Draft, target: Laws, row: int, rng: Streams) -> int | None:
        """The extra token of the recipe's rule."""
        exact, laws = _exactly(guess, target)
        return self._rule(guess).finish(exact, laws, row, rng)

    def _rule(self, draft: Draft) -> Verifier:
        rule = self._recipe.verifier_for(draft, self._params)
        return verifier_named("naive") if rule.name == "match" else rule


def _exactly(draft: Draft, target: Laws) -> tuple[Draft, Laws]:
    """Both with their distributions in float64."""
    law = draft.law
    if isinstance(law, Tabulated):
        q_KV = law.q_KV.double()
        draft = replace(draft, law=replace(law, q_KV=q_KV / q_KV.sum(-1, keepdim=True)))
    return draft, Laws(target.logits_MV.double(), greedy=False, positions=target.positions, stop_ids=target.stop_ids)


@dataclass(frozen=True, slots=True)
class TextLaw:
    """What a recipe writes, exactly.

    Attributes:
        chances: of every text that can come out.
        num_branches: ways in which it can.
        num_drafted: drafted tokens over all branches.
        lengths: the numbers of nodes of the drafts that were proposed.
    """

    chances: dict[tuple[int, ...], float]
    num_branches: int
    num_drafted: int
    lengths: frozenset[int]

    def distance(self, other: TextLaw) -> float:
        """The largest difference of a text's chances; what is missing has none."""
        texts = {*self.chances, *other.chances}
        return max(abs(self.chances.get(text, 0.0) - other.chances.get(text, 0.0)) for text in texts)


def text_law(
    llm: LLM,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    length: int,
    num_nodes: int,
    stops: int | None = None,
    wrap: Callable[[Drafter], Drafter] = lambda drafter: drafter,
    filters: Mapping[str, Any] | None = None,
    rare: bool = False,
) -> TextLaw:
    """The distribution of a recipe's texts of some tokens after a prompt.

    Args:
        llm: the recipe. Its drafter is taken over: the engine of ``llm`` itself must not run afterwards.
        prompt: token ids.
        tokens: the ids that a text is made of, two or three.
        length: of a text, three or four.
        num_nodes: of a draft, at most.
        stops: seed of the stop rule; None: every draft is as long as the drafter wants. A drafter with a rule of its
            own is not asked.
        wrap: puts something between the engine and the drafter.
        filters: more sampling params, for example ``{"bad_words": [...]}``; the tokens are allowed ones then, too, so
            that no other takes the place of what is forbidden.
        rare: the last of the tokens is improbable everywhere.
    Raises:
        RuntimeError: a request failed.
    """
    params = SamplingParams(
        temperature=1.0,
        top_k=len(tokens),
        logit_bias={**dict.fromkeys(tokens, _BIAS), **({tokens[-1]: _BIAS - _RARE} if rare else {})},
        max_tokens=length,
        ignore_eos=True,
        seed=0,
        **({"allowed_token_ids": list(tokens), **filters} if filters else {}),
    )
    recipe = replace(
        llm.recipe,
        drafter=_Watched(wrap(llm.recipe.drafter)),
        verifier=EveryDecision(llm.recipe, params),
        num_nodes=min(num_nodes, llm.recipe.num_nodes),
        adaptive=stops is not None and llm.recipe.drafter.offers.length is None,
    )
    engine = Engine(llm.target, recipe, max_slots=_SLOTS, max_rows=_SLOTS * (1 + num_nodes))
    chances: dict[tuple[int, ...], float] = {}
    num_branches = num_drafted = 0
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        requests, replayed = [], []
        for _ in range(min(_SLOTS, len(scripts))):
            (request,) = llm.new_requests({"prompt_token_ids": list(prompt)}, params)
            request.streams = ReplayedStreams(scripts.pop())
            rule = None if stops is None else HashedStops(stops)
            request.own_rule, request.ahead_rule = (rule, None) if recipe.executor == "serial" else (None, rule)
            replayed.append(request.streams)
            requests.append(request)
            engine.add(request)
        while engine.busy:
            engine.step()
        for request, streams in zip(requests, replayed, strict=True):
            if request.error is not None:
                raise RuntimeError(f"a request failed: {request.error}")
            text = tuple(request.output_ids)
            chances[text] = chances.get(text, 0.0) + streams.weight
            scripts += streams.untried
            num_branches += 1
            num_drafted += request.metrics.num_draft_tokens
    return TextLaw(chances, num_branches, num_drafted, frozenset(cast(_Watched, recipe.drafter).lengths))


class _Through(Drafter):
    """A drafter with something between it and the engine."""

    def __init__(self, inner: Drafter) -> None:
        self.name, self.laws, self.branches, self.offers = inner.name, inner.laws, inner.branches, inner.offers
        self._inner = inner

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """The drafter's, which may change from step to step."""
        return self._inner.needs

    def attach(self, cache: object) -> None:
        self._inner.attach(cache)

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return self._inner.propose(contexts, budgets)

    def on_forward(self, features: Sequence[Features]) -> None:
        self._inner.on_forward(features)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        self._inner.observe(outcomes)

    def release(self, request_id: int) -> None:
        self._inner.release(request_id)


class _Watched(_Through):
    """Notes how long the drafts are."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.lengths: set[int] = set()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = super().propose(contexts, budgets)
        self.lengths.update(map(len, drafts))
        return drafts


class Choosy(_Through):
    """Planted: the last drawn siblings are kept or dropped for their values, and q is declared as if nobody had looked.

    Those are dropped whose ranks in q add up to an odd number; of a chain, a last token that is second to the best.
    """

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [_without_unwanted(draft) for draft in super().propose(contexts, budgets)]


def _without_unwanted(draft: Draft) -> Draft:
    if not isinstance(draft.law, Tabulated):
        return draft
    tokens, parents = draft.tree.tokens, draft.tree.parents
    kept = len(draft) - 1
    while kept and parents[kept - 1] == parents[-1]:
        kept -= 1
    q_V = draft.law.q_at(kept)
    if sum(int((q_V > q_V[token]).sum()) for token in tokens[kept:]) % 2 == 0:
        return draft
    if not kept:
        return NO_DRAFT
    resume = draft.resume
    return replace(
        draft,
        tree=TokenTree(tokens[:kept], parents[:kept]),
        law=replace(draft.law, row_of=draft.law.row_of[:kept]),
        confidence=draft.confidence[:kept],
        sources=draft.sources[:kept],
        resume=None if resume is None else replace(resume, hidden_TD=resume.hidden_TD[: 1 + kept]),
    )
