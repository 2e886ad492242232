"""The exact distribution of a whole recipe: its own drafter and rule, run by the engine on real models, no sampling.

The enumeration of a rule (enumeration.py) trusts the drafter's declared distribution. Here the drafter itself draws. A
request with scripted random streams takes one of its possible branches; over all branches, the weights of each text add
up to its probability, to compare with that of plain sampling, enumerated likewise.

    drafter.propose    draws from ReplayedStreams, with a stop rule that is a hash of its input (HashedStops)
    engine             budgets, packed forwards, commits: as always
    verifier.verify    the recipe's rule, on the same p and q in float64 (EveryDecision)

A drafter may keep, drop or continue a drawn token because of its value, and still declare that it follows q. Under a
rule that relies on q, the texts then have another distribution, even if the effect is rare. A stop rule on inputs known
before the draw is independent of the draw; a stop rule on the token's own probability is not.

A text is short and over two or three tokens: a bias excludes the others, in the target and the draft. One of the tokens
may be rare, to catch a drafter that treats improbable draws differently.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from foretoken.certify.enumeration import ReplayedStreams
from foretoken.core.distortion import Spent
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
from foretoken.core.protocols import Budget, Context, Drafter, Verifier
from foretoken.core.randomness import Streams, mix64
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.draft_length.history_only import OwnPastRule
from foretoken.engine.llm import LLM
from foretoken.engine.recipe import Recipe, verifier_named
from foretoken.engine.step import Engine
from foretoken.options.sampling import SamplingParams

_SLOTS = 32
_BIAS = 60.0  # logits added to the tokens of the texts; with top_k, no other token remains
_RARE = 9.0  # a smaller bonus: about one draw in ten thousand
_GRAIN = 1000  # rounding of the stop rule's input: rounding of the forward must not change its decision


class HashedStops(OwnPastRule):
    """A stop rule that stops in a quarter of all cases: by a hash of its input and of the request's past.

    Args:
        seed: seed of the hash.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(node_cost=1.0)
        self._past = mix64(seed)

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        """Return the same decision for the same input at the same place of the same text."""
        key = self._past
        for number in (round(_GRAIN * reach), round(_GRAIN * confidence), num_nodes):
            key = mix64(key ^ number)
        return key % 4 > 0

    def learn(self, draft: Draft, verdict: Verdict) -> None:
        """Record the emitted tokens, on which the next step's decisions depend."""
        for token in (*(draft.tree.tokens[node] for node in verdict.path), verdict.extra):
            self._past = mix64(self._past ^ (token + 1))


class EveryDecision(Verifier):
    """The rule of a recipe on distributions in float64, where an enumeration is exact to 1e-15.

    A script cannot replay the noise of `match`; `naive` draws from the same distribution and accepts in the same way.

    Args:
        recipe: the recipe with the rule.
        params: the requests' sampling params.
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
        """Return the verdict of the recipe's rule."""
        return self._rule(draft).verify(*_exactly(draft, target), rng)

    def finish(self, verdict: Verdict, guess: Draft, target: Laws, rng: Streams, spent: Spent | None) -> Verdict:
        """Return the verdict with the extra token of the recipe's rule."""
        return self._rule(guess).finish(verdict, *_exactly(guess, target), rng, spent)

    def _rule(self, draft: Draft) -> Verifier:
        rule = self._recipe.verifier_for(draft, self._params)
        return verifier_named("naive") if rule.name == "match" else rule


def _exactly(draft: Draft, target: Laws) -> tuple[Draft, Laws]:
    """Return both with their distributions in float64."""
    law = draft.law
    if isinstance(law, Tabulated):
        q_KV = law.q_KV.double()
        draft = replace(draft, law=replace(law, q_KV=q_KV / q_KV.sum(-1, keepdim=True)))
    return draft, Laws(target.logits_MV.double(), greedy=False, positions=target.positions, stop_ids=target.stop_ids)


@dataclass(frozen=True, slots=True)
class TextLaw:
    """The exact distribution of a recipe's texts.

    Attributes:
        chances: probability of every possible text.
        num_branches: number of branches.
        num_drafted: drafted tokens over all branches.
        lengths: numbers of nodes of the proposed drafts.
    """

    chances: dict[tuple[int, ...], float]
    num_branches: int
    num_drafted: int
    lengths: frozenset[int]

    def distance(self, other: "TextLaw") -> float:
        """Return the largest difference of a text's probabilities; a missing text has probability 0."""
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
    wrap: Callable[[Drafter], Any] = lambda drafter: drafter,
    filters: Mapping[str, Any] | None = None,
    rare: bool = False,
) -> TextLaw:
    """Return the exact distribution of a recipe's short texts after a prompt.

    Args:
        llm: the recipe. This function reuses its drafter: the engine of ``llm`` itself must not run afterwards.
        prompt: token ids.
        tokens: the ids of the texts, two or three.
        length: tokens of a text, three or four.
        num_nodes: maximum nodes of a draft.
        stops: seed of the stop rule; None: the drafter decides the length. A drafter with its own rule ignores it.
        wrap: wraps the drafter.
        filters: more sampling params, for example ``{"bad_words": [...]}``; allowed_token_ids then limits the tokens,
            too, so that no other token replaces a forbidden one.
        rare: whether the last of the tokens is improbable everywhere.
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
    watched = _Watched(wrap(llm.recipe.drafter))
    recipe = replace(
        llm.recipe,
        drafter=cast(Drafter, watched),
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
    return TextLaw(chances, num_branches, num_drafted, frozenset(watched.lengths))


class _Through:
    """Stands between a drafter and the engine, with the drafter's members; what changes is written by a subclass."""

    def __init__(self, inner: Drafter) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Watched(_Through):
    """Records the lengths of the drafts."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.lengths: set[int] = set()

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = self._inner.propose(contexts, budgets)
        self.lengths.update(map(len, drafts))
        return drafts


class Choosy(_Through):
    """A planted bias: keeps or drops the last drawn siblings because of their values, but declares q unchanged.

    It drops siblings if their ranks in q add up to an odd number; in a chain, a last token of rank two.
    """

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [_without_unwanted(draft) for draft in self._inner.propose(contexts, budgets)]


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
