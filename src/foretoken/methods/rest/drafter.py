"""REST: continuations of the end of the text in a datastore, as a tree grown best-first by frequency.

context     ... the cat |      longest suffix of the text in the datastore: "the cat", at 3 places
places      the cat sat on     the cat sat .     the cat ran
tree        root ─┬─ sat ─┬─ on
                  │       └─ .
                  └─ ran
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.draft import NO_DRAFT, Draft, Law, PointMass
from foretoken.core.needs import Declared, Variant
from foretoken.core.protocols import Budget, Context, Drafter
from foretoken.core.tree import ROOT
from foretoken.drafters.agreement import AgreementRates
from foretoken.drafters.best_first_tree import TreeOfCopies, grow
from foretoken.drafting.datastore.search import Datastore
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.options.option import Option

# kinds of a context: one place; several with the same continuation; several with different ones
_ONE, _ALIKE, _VARIED = range(3)


@dataclass(slots=True)
class _Lookup:
    """The last look-up of one request; the next tokens are compared with it to update the rates.

    Attributes:
        rates: shared by all requests, or the request's own if its drafts must depend on its history only.
        num_tokens: length of the text at the look-up.
        places: node -> kind, matched tokens, and next tokens of its places in the datastore.
        children: (node, token) -> node.
    """

    rates: list[AgreementRates]
    num_tokens: int = 0
    places: dict[int, tuple[int, int, frozenset[int]]] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)


class RestDrafter(Drafter):
    """Proposes the continuations of the longest suffix of the text that a datastore contains, weighted by frequency.

    Paper:   He et al. 2024, REST: Retrieval-Based Speculative Decoding, arXiv:2311.08252 (suffix array over a corpus,
             longest context first, the most frequent prefixes of the retrieved continuations as a tree).
    Exact:   a proposal is a function of past tokens and of a fixed store (point mass): lossless under any lossless
             verifier. The released code samples once for every path, which favours drafted tokens; the rules here
             decide once for every node.
    Differs: the suffix array covers the reversed stream, so that one search finds the longest context instead of one
             search for each length. Of many places, ``hits`` evenly spaced ones are read; the released code takes the
             first 5,000, which have the smallest next ids. Documents are separated, and no continuation crosses their
             ends. The confidence is a calibrated frequency: the share of the places with this continuation, times the
             rate at which the text continues like any of the places, by the length of the match; the rate is learned
             from all emitted tokens, drafted or not.
    """

    name = "rest"
    flops = 0.0  # there is no separate model
    declared = Declared(
        datastore=True, variants=(Variant(), Variant(options={"tree": False}, branches=False, one_rule=True))
    )
    laws: tuple[type[Law], ...] = (PointMass,)
    branches = True

    @dataclass(frozen=True, kw_only=True)
    class Config(TreeOfCopies):
        """Options of retrieval."""

        datastore: Annotated[
            str | Path,
            Option(
                "Folder of `foretoken datastore build` with the target's tokenizer.",
                remedy="make one with foretoken datastore build FILES --model MODEL --out DIR",
            ),
        ]
        min_match: Annotated[int, Option("Shortest context, in tokens, that is drafted from.", least=1)] = 2
        hits: Annotated[int, Option("Most places to read; of more places, evenly spaced ones are read.", least=1)] = 64

    def __init__(self, config: Config, target: Any) -> None:
        self.config = config
        self._store = Datastore(Path(str(config.datastore)))
        self._store.check(vocabulary_fingerprint(target.tokenizer), target.name)
        self._lookups: dict[int, _Lookup] = {}
        self._rates = self._new_rates()  # shared by all requests
        self._branching = config.branching
        self.branches = self._branching > 1

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def release(self, request_id: int) -> None:
        self._lookups.pop(request_id, None)

    def _new_rates(self) -> list[AgreementRates]:
        return [AgreementRates(self.config.max_match) for _ in (_ONE, _ALIKE, _VARIED)]

    def _propose(self, context: Context, budget: Budget) -> Draft:
        if budget.max_nodes < 1 or budget.max_depth < 1:
            return NO_DRAFT
        lookup = self._lookups.get(context.request_id)
        if lookup is None:
            rates = self._new_rates() if budget.history_only else self._rates
            lookup = self._lookups[context.request_id] = _Lookup(rates)
        tokens = context.tokens
        _learn(lookup, tokens)
        lookup.num_tokens = len(tokens)
        lookup.places.clear()
        lookup.children.clear()
        match = self._store.find(tokens, self.config.min_match, self.config.max_match)
        if match is None:
            return NO_DRAFT
        found = self._store.continuations(match, budget.max_depth, self.config.hits)
        return self._grow(lookup, match.length, found, budget)

    def _grow(self, lookup: _Lookup, matched: int, found: list[list[int]], budget: Budget) -> Draft:
        """Grow the tree from the found places; a node's places are those that continue with its path."""

        def continuations(
            node: int, depth: int, places: list[list[int]]
        ) -> Iterable[tuple[float, int, list[list[int]]]]:
            following = _grouped(places, depth)
            if not following:
                return []
            length = min(matched + depth, self.config.max_match)
            kind = _VARIED if len(following) > 1 else _ONE if len(places) == 1 else _ALIKE
            lookup.places[node] = kind, length, frozenset(following)
            rate = lookup.rates[kind].rates[length] / len(places)
            ranked = sorted(following.items(), key=lambda each: len(each[1]), reverse=True)[: self._branching]
            return [(rate * len(theirs), token, theirs) for token, theirs in ranked]

        draft = grow(budget, found, continuations, self.config.min_score)
        edges = zip(draft.tree.parents, draft.tree.tokens, strict=True)
        lookup.children = {edge: node for node, edge in enumerate(edges)}
        return draft


def _learn(lookup: _Lookup, tokens: Sequence[int]) -> None:
    """Update the rates: compare the last look-up with the tokens that followed, along the draft's path."""
    node = ROOT
    for token in tokens[lookup.num_tokens :]:
        found = lookup.places.get(node)
        if found is None:
            return
        kind, length, following = found
        lookup.rates[kind].learn(length, token in following)
        node = lookup.children.get((node, token), len(lookup.children))  # the default is not a drafted node


def _grouped(places: list[list[int]], depth: int) -> dict[int, list[list[int]]]:
    """Group places by their next token; places that end here are omitted."""
    found: dict[int, list[list[int]]] = {}
    for place in places:
        if len(place) > depth:
            found.setdefault(place[depth], []).append(place)
    return found
