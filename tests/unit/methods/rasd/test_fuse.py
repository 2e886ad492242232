"""The union of trees: every path, no child twice, the best part of it; and the scale by which that is chosen."""

from __future__ import annotations

import random

import pytest

from foretoken.core.draft import NO_DRAFT, Draft
from foretoken.core.protocols import Budget
from foretoken.core.tree import ROOT, TokenTree
from foretoken.methods.rasd.estimate import Estimates
from foretoken.methods.rasd.fuse import DATASTORE, DRAFT, PROMPT, Union


def draft(tokens, parents=None, confidence=None):
    tree = TokenTree(tokens, parents)
    return Draft(tree, confidence=tuple(confidence or [0.5] * len(tree)))


def drawn(rng, size):
    """A random tree without equal siblings."""
    tokens, parents, taken = [], [], set()
    while len(tokens) < size:
        token, parent = rng.randrange(3), rng.randrange(-1, len(tokens))
        if (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
    return draft(tokens, parents, [rng.random() for _ in tokens])


def paths(tree):
    return {tuple(tree.tokens[each] for each in tree.path_to(node)) for node in range(len(tree))}


def everything(evidence):
    return max(evidence.values())


@pytest.mark.parametrize("seed", range(12))
def test_the_union_has_every_path_once_and_the_draft_keeps_its_numbers(seed):
    rng = random.Random(seed)
    drafts = {DRAFT: drawn(rng, 6), PROMPT: drawn(rng, 5), DATASTORE: drawn(rng, 9)}
    union = Union(drafts)
    assert paths(union.tree) == set().union(*(paths(each.tree) for each in drafts.values()))
    assert len(paths(union.tree)) == len(union)  # no child twice
    assert union.tree.tokens[:6] == drafts[DRAFT].tree.tokens
    assert union.tree.parents[:6] == drafts[DRAFT].tree.parents
    for node in range(len(union)):
        path = tuple(union.tree.tokens[each] for each in union.tree.path_to(node))
        assert union.proposed[node] == [name for name, each in drafts.items() if path in paths(each.tree)]
        assert set(union.evidence[node]) == set(union.proposed[node])


@pytest.mark.parametrize("seed", range(12))
def test_a_selection_hangs_together_within_its_budget(seed):
    rng = random.Random(seed)
    union = Union({DRAFT: drawn(rng, 6), PROMPT: drawn(rng, 5), DATASTORE: drawn(rng, 9)})
    chosen = union.select(everything, Budget(7, 3), 0.0)
    assert len(chosen.tree) == min(7, sum(depth <= 3 for depth in union.tree.depths))
    assert max(chosen.tree.depths) <= 3
    for number, node in enumerate(chosen.nodes):  # the same path, under other numbers
        ours = [chosen.tree.tokens[each] for each in chosen.tree.path_to(number)]
        assert ours == [union.tree.tokens[each] for each in union.tree.path_to(node)]
        assert chosen.sources[number] == "+".join(union.proposed[node])
    reach = [union_reach(union, node) for node in range(len(union)) if union.tree.depths[node] <= 3]
    left = sorted(reach)[: len(reach) - len(chosen.nodes)]
    assert all(value <= min(union_reach(union, node) for node in chosen.nodes) for value in left)


def union_reach(union, node):
    reach = 1.0
    for each in union.tree.path_to(node):
        reach *= everything(union.evidence[each])
    return reach


def test_unlikely_retrieved_nodes_are_pruned_with_what_hangs_on_them_and_drafted_ones_are_not():
    union = Union(
        {
            DRAFT: draft([1, 2], None, [0.9, 0.01]),
            DATASTORE: draft([5, 6, 1, 7], [-1, 0, -1, 2], [0.01, 0.99, 0.9, 0.8]),
        }
    )
    assert set(paths(union.select(everything, Budget(9, 9), 0.05).tree)) == {(1,), (1, 2), (1, 7)}


def test_pruned_nodes_go_with_what_hangs_on_them():
    union = Union({DRAFT: draft([1, 2]), DATASTORE: draft([5, 6, 1, 7], [-1, 0, -1, 2])})
    union.pruned = frozenset({union.child(ROOT, 5), union.child(ROOT, 1)})  # a drafted one stays
    assert set(paths(union.select(everything, Budget(9, 9), 0.0).tree)) == {(1,), (1, 2), (1, 7)}


def test_the_stop_rule_ends_the_selection():
    class First:
        def worthwhile(self, reach, confidence, num_nodes):
            return num_nodes < 2

    union = Union({DRAFT: draft([1, 2, 3, 4])})
    assert len(union.select(everything, Budget(9, 9, First()), 0.0).nodes) == 2


def test_scores_are_evidence_for_every_node_and_come_first():
    union = Union({DRAFT: NO_DRAFT, DATASTORE: draft([4, 5])})
    union.score(DRAFT, [0.25, 0.75])
    assert [list(each.items()) for each in union.evidence] == [
        [(DRAFT, 0.25), (DATASTORE, 0.5)],
        [(DRAFT, 0.75), (DATASTORE, 0.5)],
    ]
    assert union.child(ROOT, 4) == 0
    assert union.child(0, 4) is None


def test_estimates_begin_as_averages_and_learn_each_source_s_rate():
    estimates = Estimates()
    assert estimates.of({DRAFT: 0.3}) == pytest.approx(0.3)
    assert 0.2 < estimates.of({DRAFT: 0.9, PROMPT: 0.1}) < 0.8
    rng = random.Random(0)
    for _ in range(3000):
        q, share = rng.random(), rng.random()
        estimates.learn({DRAFT: q, PROMPT: share}, rng.random() < q)  # the prompt says nothing
    assert estimates.of({DRAFT: 0.9, PROMPT: 0.1}) > 0.75
    assert estimates.of({DRAFT: 0.1, PROMPT: 0.9}) < 0.25
    assert estimates.of({DRAFT: 0.3}) == pytest.approx(0.3)  # another set of evidence, another unit


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_certainties_are_numbers(value):
    estimates = Estimates()
    for stood in (True, False):
        estimates.learn({DRAFT: value}, stood)
    assert 0.0 < estimates.of({DRAFT: value}) < 1.0
