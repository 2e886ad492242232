"""The suffix automaton against brute force, and SuffixDrafter's trees, budgets and confidences."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.draft import NO_DRAFT, PointMass
from foretoken.core.errors import ConfigError
from foretoken.core.protocols import Budget
from foretoken.drafters.ngram import NgramDrafter
from foretoken.drafters.suffix import SuffixDrafter
from foretoken.drafters.suffix_automaton import ROOT_STATE, SuffixAutomaton

texts = st.one_of(
    st.lists(st.integers(0, 1), max_size=24),
    st.lists(st.integers(0, 3), max_size=24),
    st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 8)).map(lambda x: x[0] * x[1]),
)


@dataclass
class Text:
    """The part of a Context that lookup drafters read."""

    tokens: list[int]
    request_id: int = 0
    num_prompt: int = 0
    params: Any = None
    streams: Any = None
    laws: Any = None


@dataclass
class Refusing:
    """Accepts so many nodes, and records its calls."""

    accepts: int
    asked: list[tuple[float, float, int]] = field(default_factory=list)

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        self.asked.append((reach, confidence, num_nodes))
        return num_nodes < self.accepts


def automaton_of(tokens: list[int], count_limit: int = 50) -> SuffixAutomaton:
    automaton = SuffixAutomaton(count_limit)
    automaton.extend(tokens)
    return automaton


def state_of(automaton: SuffixAutomaton, gram: tuple[int, ...]) -> int | None:
    state = ROOT_STATE
    for token in gram:
        if token not in automaton.next[state]:
            return None
        state = automaton.next[state][token]
    return state


def occurrences(tokens: list[int], gram: tuple[int, ...]) -> int:
    return sum(tuple(tokens[i : i + len(gram)]) == gram for i in range(len(tokens) - len(gram) + 1))


def substrings(tokens: list[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[i:j]) for i in range(len(tokens)) for j in range(i + 1, len(tokens) + 1)}


def longest_repeated_suffix(tokens: list[int], limit: int) -> int:
    end = len(tokens)
    return max(
        (n for n in range(min(limit, end - 1) + 1) if n == 0 or occurrences(tokens, tuple(tokens[-n:])) > 1), default=0
    )


@settings(deadline=None)
@given(texts)
def test_recognises_exactly_the_substrings(tokens):
    automaton = automaton_of(tokens)
    inside = substrings(tokens)
    assert all(state_of(automaton, gram) is not None for gram in inside)
    # and nothing more: every path of the automaton, one token longer than a substring included, is a substring
    for gram in {(), *inside}:
        state = state_of(automaton, gram)
        assert {(*gram, token) for token in automaton.next[state]} == {g for g in inside if g[:-1] == gram}
    assert len(automaton) <= max(1, 2 * len(tokens))


@settings(deadline=None)
@given(texts, st.integers(1, 8))
def test_counts_are_exact_up_to_the_limit_at_every_moment(tokens, limit):
    automaton = SuffixAutomaton(limit)
    for end in range(1, len(tokens) + 1):
        automaton.extend(tokens[end - 1 : end])
        for gram in substrings(tokens[:end]):
            if len(gram) <= limit:
                assert automaton.count[state_of(automaton, gram)] == occurrences(tokens[:end], gram)


@settings(deadline=None)
@given(texts, st.integers(2, 9), st.data())
def test_repeated_suffix_is_the_longest_that_occurred_before(tokens, count_limit, data):
    limit = data.draw(st.integers(1, count_limit - 1))
    automaton = SuffixAutomaton(count_limit)
    assert automaton.repeated_suffix(limit) == (ROOT_STATE, 0)
    for end in range(1, len(tokens) + 1):
        automaton.extend(tokens[end - 1 : end])
        text = tokens[:end]
        state, matched = automaton.repeated_suffix(limit)
        assert matched == longest_repeated_suffix(text, limit)
        assert state == state_of(automaton, tuple(text[end - matched :]))


@settings(deadline=None)
@given(texts, st.lists(st.integers(0, 5), max_size=10), st.integers(1, 6))
def test_growing_in_any_pieces_equals_building_at_once(tokens, pieces, limit):
    grown, rest = SuffixAutomaton(limit), list(tokens)
    for size in [*pieces, len(tokens)]:
        grown.extend(rest[:size])
        del rest[:size]
    whole = automaton_of(tokens, limit)
    for name in ("next", "link", "length", "count", "last", "num_tokens", "work"):
        assert getattr(grown, name) == getattr(whole, name), name


@pytest.mark.parametrize("limit", [2, 9])
@pytest.mark.parametrize(
    "tokens",
    [
        [0] * 3000,
        list(range(3000)),
        [0, 1] * 1500,
        [0] * 1500 + [1] + [0] * 1499,
        random.Random(0).choices(range(2), k=3000),
        random.Random(0).choices(range(300), k=3000),
    ],
    ids=["one token", "all new", "alternating", "two runs", "binary", "many tokens"],
)
def test_work_per_token_is_bounded_by_the_count_limit(tokens, limit):
    # construction visits at most four states a token (Blumer et al.: 3n transitions, 2n states), counting at most limit
    assert automaton_of(tokens, limit).work <= (4 + limit) * len(tokens)


def drafter(**options: Any) -> SuffixDrafter:
    return SuffixDrafter(SuffixDrafter.Config(**options))


def propose_one(suffix: SuffixDrafter, text: Text, nodes: int, depth: int | None = None, stop_rule: Any = None):
    (draft,) = suffix.propose([text], [Budget(nodes, nodes if depth is None else depth, stop_rule)])
    return draft


def branches_of(draft) -> list[tuple[int, ...]]:
    return [tuple(draft.tree.tokens[i] for i in draft.tree.path_to(node)) for node in range(len(draft))]


def reaches_of(draft) -> list[float]:
    reaches: list[float] = []
    for parent, confidence in zip(draft.tree.parents, draft.confidence, strict=True):
        reaches.append(confidence * (1.0 if parent == -1 else reaches[parent]))
    return reaches


@settings(deadline=None)
@given(
    texts,
    st.lists(st.integers(1, 6), max_size=6),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(0, 12),
    st.integers(0, 6),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.booleans(),
)
def test_drafts_are_valid_however_the_text_grows(tokens, chunks, shortest, extra, nodes, depth, min_score, tree):
    suffix = drafter(min_match=shortest, max_match=shortest + extra, min_score=min_score, tree=tree, max_branching=3)
    text, rest = Text([], num_prompt=len(tokens) // 3), list(tokens)
    for size in [*chunks, len(tokens) + 1]:
        text.tokens += rest[:size]
        del rest[:size]
        draft = propose_one(suffix, text, nodes, depth)
        assert len(draft) <= nodes
        assert all(d <= depth for d in draft.tree.depths)
        assert len(draft.confidence) == len(draft)
        assert all(0.0 < confidence <= 1.0 for confidence in draft.confidence)
        assert isinstance(draft.law, PointMass)
        assert tree or draft.tree.is_chain
        assert all(len(children) <= 3 for children in draft.tree.children.values())
        branches = branches_of(draft)
        assert len(set(branches)) == len(branches), "two siblings with one token"
        reaches = reaches_of(draft)
        assert all(reach >= min_score - 1e-9 for reach in reaches)
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(reaches)), "not best-first"
        if nodes and depth and min_score == 0.0:
            assert bool(len(draft)) == (longest_repeated_suffix(text.tokens, shortest + extra) >= shortest)


def followers(tokens: list[int], gram: tuple[int, ...]) -> dict[int, int]:
    """How often each token followed the gram."""
    counts: dict[int, int] = {}
    for i in range(len(tokens) - len(gram)):
        if tuple(tokens[i : i + len(gram)]) == gram:
            counts[tokens[i + len(gram)]] = counts.get(tokens[i + len(gram)], 0) + 1
    return counts


@settings(deadline=None)
@given(texts, st.integers(1, 3), st.integers(0, 3))
def test_every_node_is_weighed_by_brute_force_frequencies(tokens, shortest, extra):
    longest = shortest + extra
    suffix = drafter(min_match=shortest, max_match=longest, min_score=0.0, max_branching=9)
    draft = propose_one(suffix, Text(tokens, num_prompt=len(tokens)), 1000, 3)
    grams = {-1: tuple(tokens)}
    for node in range(-1, len(draft)):
        # the definition of a context: the longest suffix within the limits that something followed
        gram = grams[node][-longest:]
        while gram and not followers(tokens, gram):
            gram = gram[1:]
        counts = followers(tokens, gram) if len(gram) >= shortest else {}
        children = draft.tree.children.get(node, ())
        if node >= 0 and draft.tree.depths[node] == 3:
            assert not children
            continue
        assert {draft.tree.tokens[child] for child in children} == set(counts)
        rate = (len(gram) + 0.5) / (len(gram) + 2.0)  # the prior: nothing was emitted yet
        for child in children:
            token = draft.tree.tokens[child]
            assert draft.confidence[child] == pytest.approx(rate * counts[token] / sum(counts.values()))
            grams[child] = (*gram, token)


def test_weighs_continuations_and_branches():
    #                one cat sat .  one cat ran .  the cat
    draft = propose_one(drafter(), Text([1, 2, 3, 9, 1, 2, 4, 9, 5, 2], num_prompt=10), 6)
    assert branches_of(draft) == [(4,), (3,), (4, 9), (3, 9), (4, 9, 5), (3, 9, 1)]
    assert draft.confidence[0] == draft.confidence[1] == pytest.approx(0.25)


def test_the_more_frequent_continuation_comes_first():
    tokens = [1, 7, 2, 1, 8, 3, 1, 7, 4, 1]
    assert propose_one(drafter(), Text(tokens, num_prompt=10), 2, 1).tree.tokens == (7, 8)
    chain = propose_one(drafter(tree=False), Text(tokens, num_prompt=10), 1)
    assert chain.tree.tokens == (7,)
    assert not drafter(tree=False).branches
    assert not drafter(max_branching=1).branches
    assert drafter().branches


def test_a_draft_goes_on_over_the_end_of_a_periodic_text():
    text = Text([1, 2, 3, 1, 2, 3], num_prompt=6)
    assert propose_one(drafter(tree=False, min_score=0.0), text, 8).tree.tokens == (1, 2, 3, 1, 2, 3, 1, 2)


def test_proposes_nothing_when_nothing_repeats_or_the_match_is_too_short():
    assert propose_one(drafter(), Text([]), 4) is NO_DRAFT
    assert propose_one(drafter(), Text([1, 2, 3]), 4) is NO_DRAFT
    assert propose_one(drafter(min_match=2), Text([1, 2, 3, 1]), 4) is NO_DRAFT


def test_zero_budgets_propose_nothing_and_are_caught_up():
    suffix, text = drafter(), Text([1, 2, 1], num_prompt=3)
    assert propose_one(suffix, text, 0) is NO_DRAFT
    assert propose_one(suffix, text, 5, depth=0) is NO_DRAFT
    text.tokens += [2, 5, 1, 2]
    assert propose_one(suffix, text, 1).tree.tokens == (5,)


def test_requests_of_one_batch_do_not_mix_and_release_clears_them():
    suffix = drafter()
    batch = [Text([1, 2, 1], 10, 3), Text([], 11), Text([1, 3, 1, 4, 1], 12, 5)]
    drafts = suffix.propose(batch, [Budget(1, 1), Budget(4, 4), Budget(2, 1)])
    assert [draft.tree.tokens for draft in drafts] == [(2,), (), (4, 3)]
    suffix.release(10)
    assert propose_one(suffix, Text([8, 1], 10, 2), 4) is NO_DRAFT
    suffix.release(99)


def test_patience_decides_before_every_node_and_stops_the_draft():
    stop_rule = Refusing(accepts=5)
    draft = propose_one(drafter(), Text([1, 2, 3, 9, 1, 2, 4, 9, 5, 2], num_prompt=10), 16, stop_rule=stop_rule)
    assert len(draft) == 5
    assert [num_nodes for _, _, num_nodes in stop_rule.asked] == list(range(6))
    assert [reach * confidence for reach, confidence, _ in stop_rule.asked[:5]] == pytest.approx(reaches_of(draft))
    assert draft.confidence == tuple(confidence for _, confidence, _ in stop_rule.asked[:5])
    assert propose_one(drafter(), Text([1, 1], num_prompt=2), 4, stop_rule=Refusing(accepts=0)) is NO_DRAFT


def test_learns_from_emitted_tokens_but_not_from_the_prompt():
    period = [1, 2, 3, 4]
    prompt_only, emitted = drafter(min_score=0.0), drafter(min_score=0.0)
    before = propose_one(prompt_only, Text(period * 50, num_prompt=200), 1)
    after = propose_one(emitted, Text(period * 50, num_prompt=4), 1)
    assert before.tree.tokens == after.tree.tokens == (1,)
    assert before.confidence[0] == pytest.approx(16.5 / 18.0)
    assert after.confidence[0] > 0.98
    # statistics of one request hold for the next
    emitted.release(0)
    assert propose_one(emitted, Text(period * 50, 1, 200), 1).confidence == after.confidence


def test_a_context_that_never_goes_on_as_before_loses_confidence():
    suffix = drafter(min_score=0.0)
    # 0 comes back again and again, each time followed by a new token
    tokens = [token for new in range(1, 60) for token in (0, new)]
    propose_one(suffix, Text(tokens, num_prompt=1), 1)
    assert max(propose_one(suffix, Text([*tokens, 0], num_prompt=1), 8, 1).confidence) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "min_match=0"),
        ({"max_match": 2.0}, "max_match=2.0"),
        ({"max_match": 10**18}, "between 1 and 4096"),
        ({"max_branching": False}, "max_branching=False"),
        ({"min_match": 4, "max_match": 3}, "lower one or raise the other"),
        ({"min_score": 1.0}, "min_score=1.0"),
        ({"min_score": float("nan")}, "min_score=nan"),
        ({"tree": "yes"}, "tree='yes'"),
    ],
)
def test_config_refuses_unsupported_values(options, message):
    with pytest.raises(ConfigError, match=message):
        SuffixDrafter.Config(**options)


@pytest.mark.parametrize("drafter", [SuffixDrafter(SuffixDrafter.Config()), NgramDrafter(NgramDrafter.Config())])
@given(tokens=texts, more=texts)
@settings(max_examples=60, deadline=None)
def test_the_first_confidence_is_that_of_the_first_node(drafter, tokens, more):
    text = Text(list(tokens), num_prompt=len(tokens) // 2)
    try:
        for token in (None, *more):
            text.tokens += [] if token is None else [token]
            foretold = drafter.first_confidence(text) if text.tokens else 0.0
            (draft,) = drafter.propose([text], [Budget(3, 3)])
            assert foretold == pytest.approx(draft.confidence[0] if len(draft) else 0.0)
    finally:
        drafter.release(text.request_id)
