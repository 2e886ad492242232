"""REST: what followed the end of the text in a datastore, as a tree grown best-first by frequency.

context     ... the cat |      longest end of the text that the datastore holds: "the cat", at 3 places
places      the cat sat on     the cat sat .     the cat ran
tree        root ─┬─ sat ─┬─ on
                  │       └─ .
                  └─ ran
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Annotated, Any

from foretoken.core.draft import NO_DRAFT, Draft, Law, PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.needs import Declared, Variant
from foretoken.core.protocols import Budget, Context, Drafter
from foretoken.core.tree import ROOT, TokenTree
from foretoken.drafters.agreement import LONGEST_MATCH, AgreementRates
from foretoken.drafting.datastore.search import Datastore
from foretoken.models.fingerprint import vocabulary_fingerprint
from foretoken.options.option import Checked, Option

# what the places of a context have shown: there is one; several that go on alike; several that do not
_ONE, _ALIKE, _VARIED = range(3)


@dataclass(slots=True)
class _Looked:
    """What one request looked up last, from which the next tokens teach the rates.

    Attributes:
        rates: of all requests, or of this one alone where its past is all that counts.
        num_tokens: tokens of the text when it was looked up.
        places: node -> what the datastore said of it: the kind, tokens matched, and how the places go on.
        children: (node, token) -> node.
    """

    rates: list[AgreementRates]
    num_tokens: int = 0
    places: dict[int, tuple[int, int, frozenset[int]]] = field(default_factory=dict)
    children: dict[tuple[int, int], int] = field(default_factory=dict)


class RestDrafter(Drafter):
    """Proposes what followed the longest end of the text that a datastore holds, weighed by how often.

    Paper:   He et al. 2024, REST: Retrieval-Based Speculative Decoding, arXiv:2311.08252 (suffix array over a corpus,
             longest context first, the most frequent prefixes of the retrieved continuations as a tree).
    Exact:   a proposal is a function of past tokens and of a store that does not change (point mass): lossless under
             any lossless verifier. The released code draws once for every path, which favours drafted tokens; the
             rules here decide once for every node.
    Differs: the suffix array is that of the reversed stream, so that one search finds the longest context instead of
             one search for each length. Of many places, ``hits`` evenly spaced ones are read; the released code takes
             the first 5,000, which are those with the smallest next ids. Documents are separated, and no continuation
             leaves its own. Not the raw frequency but a calibrated one is the confidence: the share of the places that
             go on so, times the rate at which the text goes on as any of the places did, by the length of the match;
             that rate is learned from the tokens that were emitted, drafted or not.
    """

    name = "rest"
    flops = 0.0  # there is no model of its own
    declared = Declared(
        datastore=True,
        variants=(Variant(), Variant(options={"tree": False}, branches=False, one_rule=True)),
    )
    laws: tuple[type[Law], ...] = (PointMass,)
    branches = True

    @dataclass(frozen=True, kw_only=True)
    class Config(Checked):
        """Options of retrieval."""

        datastore: Annotated[
            str | Path,
            Option(
                "Folder of `foretoken datastore build` with the target's tokenizer.",
                remedy="make one with foretoken datastore build FILES --model MODEL --out DIR",
            ),
        ]
        min_match: Annotated[int, Option("Shortest context, in tokens, that is drafted from.", least=1)] = 2
        max_match: Annotated[
            int,
            Option(
                "Longest context that is looked up.",
                least=1,
                most=LONGEST_MATCH,
                remedy="every length has a rate of its own",
            ),
        ] = 16
        hits: Annotated[int, Option("Places that are read at most; of more, that many are taken evenly.", least=1)] = 64
        min_score: Annotated[
            float,
            Option(
                "Nodes with a lower estimated probability of acceptance are left out; 0 drafts the full budget.",
                least=0,
                below=1,
                remedy="use 0 to keep every node",
            ),
        ] = 0.05
        max_branching: Annotated[
            int, Option("Continuations that are tried after one node, at most; most frequent first.", least=1)
        ] = 4
        tree: Annotated[bool, Option("Draft a tree; false drafts a chain of the most frequent continuations.")] = True

        def check_together(self) -> None:
            if self.min_match > self.max_match:
                raise ConfigError(
                    f"min_match={self.min_match} is greater than max_match={self.max_match}: "
                    "lower one or raise the other"
                )

    def __init__(self, config: Config, target: Any) -> None:
        self.config = config
        self._store = Datastore(Path(str(config.datastore)))
        self._store.check(vocabulary_fingerprint(target.tokenizer), target.name)
        self._looked: dict[int, _Looked] = {}
        self._rates = self._new_rates()  # of all requests
        self._branching = config.max_branching if config.tree else 1
        self.branches = self._branching > 1

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def release(self, request_id: int) -> None:
        self._looked.pop(request_id, None)

    def _new_rates(self) -> list[AgreementRates]:
        return [AgreementRates(self.config.max_match) for _ in (_ONE, _ALIKE, _VARIED)]

    def _propose(self, context: Context, budget: Budget) -> Draft:
        if budget.max_nodes < 1 or budget.max_depth < 1:
            return NO_DRAFT
        looked = self._looked.get(context.request_id)
        if looked is None:
            rates = self._new_rates() if budget.own_past else self._rates
            looked = self._looked[context.request_id] = _Looked(rates)
        tokens = context.tokens
        _learn(looked, tokens)
        looked.num_tokens = len(tokens)
        looked.places.clear()
        looked.children.clear()
        match = self._store.find(tokens, self.config.min_match, self.config.max_match)
        if match is None:
            return NO_DRAFT
        found = self._store.continuations(match, budget.max_depth, self.config.hits)
        return self._grow(looked, match.length, found, budget)

    def _grow(self, looked: _Looked, matched: int, found: list[list[int]], budget: Budget) -> Draft:
        """Best-first: always add the node that is most likely to stand, then consider how its places go on."""
        min_score, max_match, stop_rule = self.config.min_score, self.config.max_match, budget.stop_rule
        tokens: list[int] = []
        parents: list[int] = []
        confidences: list[float] = []
        # (-score, serial, token, parent, depth, reach, confidence, places); the serial settles ties
        frontier: list[tuple[float, int, int, int, int, float, float, list[list[int]]]] = []
        serial = 0
        node, depth, reach, places = ROOT, 0, 1.0, found
        while True:
            if depth < budget.max_depth:
                following = _grouped(places, depth)
                if following:
                    length = min(matched + depth, max_match)
                    kind = _VARIED if len(following) > 1 else _ONE if len(places) == 1 else _ALIKE
                    looked.places[node] = kind, length, frozenset(following)
                    rate = looked.rates[kind].rates[length] / len(places)
                    ranked = sorted(following.items(), key=_by_number, reverse=True)[: self._branching]
                    for token, theirs in ranked:
                        confidence = rate * len(theirs)
                        score = reach * confidence
                        if score < min_score:
                            break
                        entry = (-score, serial, token, node, depth + 1, reach, confidence, theirs)
                        heappush(frontier, entry)
                        serial += 1
            if not frontier or len(tokens) >= budget.max_nodes:
                break
            score, _, token, parent, depth, reach, confidence, places = heappop(frontier)
            if stop_rule is not None and not stop_rule.worthwhile(reach, confidence, len(tokens)):
                break  # what is left in the frontier is less likely to stand
            node, reach = len(tokens), -score
            looked.children[parent, token] = node
            tokens.append(token)
            parents.append(parent)
            confidences.append(confidence)
        return Draft(TokenTree(tokens, parents), confidence=tuple(confidences)) if tokens else NO_DRAFT


def _learn(looked: _Looked, tokens: Sequence[int]) -> None:
    """Compare what was looked up last with the tokens that came, as far as the draft went along."""
    node = ROOT
    for token in tokens[looked.num_tokens :]:
        said = looked.places.get(node)
        if said is None:
            return
        kind, length, following = said
        looked.rates[kind].learn(length, token in following)
        node = looked.children.get((node, token), len(looked.children))  # no such node: nothing was said of it


def _grouped(places: list[list[int]], depth: int) -> dict[int, list[list[int]]]:
    """The places by their next token; those that end here have none."""
    found: dict[int, list[list[int]]] = {}
    for place in places:
        if len(place) > depth:
            found.setdefault(place[depth], []).append(place)
    return found


def _by_number(item: tuple[int, list[list[int]]]) -> int:
    return len(item[1])
