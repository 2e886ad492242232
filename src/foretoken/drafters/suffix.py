"""Suffix drafting: a tree of the earlier continuations of the text's end, grown best-first by frequency.

Tokens as words, the end of the text as a bar:

    text so far   one cat sat . one cat ran . the cat |
    context       "cat", seen twice before: "sat" followed once, "ran" once
    tree          root ─┬─ ran ── . ── the ── cat
                        └─ sat ── . ── one ── cat
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from foretoken.core.draft import NO_DRAFT, Draft, Law, PointMass
from foretoken.core.needs import Declared, Offers, Variant
from foretoken.core.protocols import Budget, Context, Drafter, Outcome
from foretoken.drafters.agreement import AgreementRates
from foretoken.drafters.best_first_tree import TreeOfCopies, grow
from foretoken.drafters.suffix_automaton import ROOT_STATE, SuffixAutomaton

# a context was continued once; several times in the same way; in several ways
_ONCE, _SAME, _VARIED = range(3)

_by_count = itemgetter(0)


class SuffixDrafter(Drafter):
    """Proposes the continuations of the longest suffix that occurred before, weighted by their frequencies.

    Paper:   Oliaro et al. 2024, SuffixDecoding, arXiv:2411.04975 (frequency-scored trees from a suffix index, grown
             greedily by the product of frequencies).
    Exact:   a proposal is a function of past tokens only (point mass): lossless under any lossless verifier.
    Differs: one suffix automaton per request, online, instead of suffix trees of bounded depth; no index over other
             requests. The confidence is a calibrated frequency: count(context + token) divided by the sum over the
             context's continuations, times the rate at which a context of this length continues in a way seen
             before. The rate is measured on all emitted tokens, drafted or not, so drafts do not bias it; a seeded
             request with tokens that depend on the draft has rates of its own. A draft that reaches the end of the text
             continues from the longest suffix of its context that occurs earlier, so a periodic text is extended
             beyond its end.
    """

    name = "suffix"
    flops = 0.0  # there is no model of its own
    declared = Declared(variants=(Variant(), Variant(options={"tree": False}, branches=False)))
    laws: tuple[type[Law], ...] = (PointMass,)
    branches = True
    offers = Offers(foretells=True)

    @dataclass(frozen=True, kw_only=True)
    class Config(TreeOfCopies):
        """Options of the suffix drafter."""

    def __init__(self, config: Config, target: Any = None) -> None:
        del target
        self.config = config
        self._automata: dict[int, SuffixAutomaton] = {}
        self._rates = self._new_rates()  # of all requests
        self._own_rates: dict[int, list[AgreementRates]] = {}
        self._branching = config.branching
        self.branches = self._branching > 1

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        return [self._propose(context, budget) for context, budget in zip(contexts, budgets, strict=True)]

    def first_confidence(self, context: Context) -> float:
        automaton = self._index(context, self._rates)
        state, matched = automaton.repeated_suffix(self.config.max_match)
        if matched < self.config.min_match:
            return 0.0
        edges = automaton.next[state]
        rate = self._rates[kind := _kind(automaton, edges)].rates[matched]
        if kind == _VARIED:
            counts = [automaton.count[child] for child in edges.values()]
            rate *= max(counts) / sum(counts)
        return rate if rate >= self.config.min_score else 0.0

    def after(self, context: Context, tokens: Sequence[int], budget: Budget) -> Draft:
        """Propose what followed earlier where the text ended with these tokens; after :meth:`propose` of this step."""
        automaton = self._automata.get(context.request_id)
        if automaton is None:
            return NO_DRAFT
        next_, link, length, longest = automaton.next, automaton.link, automaton.length, self.config.max_match
        state, matched = automaton.repeated_suffix(longest)
        for token in tokens:
            while state and token not in next_[state]:
                state = link[state]
                matched = length[state]
            following = next_[state].get(token)
            state, matched = (ROOT_STATE, 0) if following is None else (following, matched + 1)
            if matched > longest:  # drop the oldest token
                matched = longest
                if length[link[state]] >= longest:
                    state = link[state]
        return self._grow(automaton, budget, self._rates_of(context, budget), (state, matched))

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Nothing to do: the next proposal learns from the committed tokens themselves."""

    def release(self, request_id: int) -> None:
        self._automata.pop(request_id, None)
        self._own_rates.pop(request_id, None)

    def _new_rates(self) -> list[AgreementRates]:
        return [AgreementRates(self.config.max_match) for _ in (_ONCE, _SAME, _VARIED)]

    def _propose(self, context: Context, budget: Budget) -> Draft:
        if budget.max_nodes < 1 or budget.max_depth < 1:
            return NO_DRAFT  # nothing is indexed either: the next proposal catches up
        rates = self._rates_of(context, budget)
        automaton = self._index(context, rates)
        return self._grow(automaton, budget, rates, automaton.repeated_suffix(self.config.max_match))

    def _rates_of(self, context: Context, budget: Budget) -> list[AgreementRates]:
        """Of all requests, or a seeded one's own."""
        if budget.history_only:
            return self._own_rates.setdefault(context.request_id, self._new_rates())
        return self._rates

    def _index(self, context: Context, rates: list[AgreementRates]) -> SuffixAutomaton:
        """The request's automaton with all of its tokens; the rates learn from the emitted ones."""
        automaton = self._automata.get(context.request_id)
        if automaton is None:
            # one more than the context: a continuation of the longest context is counted, too
            automaton = self._automata[context.request_id] = SuffixAutomaton(self.config.max_match + 1)
        tokens, num_prompt = context.tokens, context.num_prompt
        if automaton.num_tokens < num_prompt:
            automaton.extend(tokens[automaton.num_tokens : num_prompt])
        for token in tokens[automaton.num_tokens :]:
            state, matched = automaton.repeated_suffix(self.config.max_match)
            if matched:
                edges = automaton.next[state]
                rates[_kind(automaton, edges)].learn(matched, token in edges)
            automaton.extend((token,))
        return automaton

    def _grow(
        self, automaton: SuffixAutomaton, budget: Budget, rates: list[AgreementRates], root: tuple[int, int]
    ) -> Draft:
        """Grow the tree from a repeated suffix; a node's place is its state, and the tokens matched there."""
        min_match, max_match, branching = self.config.min_match, self.config.max_match, self._branching
        next_, link, length, count = automaton.next, automaton.link, automaton.length, automaton.count

        def continuations(node: int, depth: int, place: tuple[int, int]) -> list[tuple[float, int, tuple[int, int]]]:
            """The most frequent continuations of a node's context; in ties the latest comes first."""
            state, matched = place
            if matched > max_match:  # drop the oldest token of the context
                matched = max_match
                if length[link[state]] >= max_match:
                    state = link[state]
            while state and not next_[state]:  # the end of the text: nothing has followed this context yet
                state = link[state]
                matched = length[state]
            if matched < min_match:
                return []
            edges, longer = next_[state], matched + 1
            if len(edges) == 1:
                ((token, child),) = edges.items()
                return [(rates[_ONCE if count[child] == 1 else _SAME].rates[matched], token, (child, longer))]
            ranked = [(count[child], token, child) for token, child in reversed(edges.items())]
            rate = rates[_VARIED].rates[matched] / sum(map(_by_count, ranked))
            ranked.sort(key=_by_count, reverse=True)
            return [(rate * number, token, (child, longer)) for number, token, child in ranked[:branching]]

        return grow(budget, root, continuations, self.config.min_score)


def _kind(automaton: SuffixAutomaton, edges: dict[int, int]) -> int:
    """How a context with these continuations was continued until now."""
    if len(edges) > 1:
        return _VARIED
    return _ONCE if automaton.count[next(iter(edges.values()))] == 1 else _SAME
