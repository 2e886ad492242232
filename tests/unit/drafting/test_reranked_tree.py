"""EAGLE-2's dynamic tree against the plain statement of it: record everything, sort, cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from foretoken.core.protocols import Budget
from foretoken.core.stop_rule import StopRule
from foretoken.core.tree import ROOT
from foretoken.drafting.reranked_tree import RerankedBuilder
from foretoken.models.language_model import Output

VOCABULARY, WIDTH = 12, 3


class Laws:
    trivial = True


@dataclass(frozen=True)
class UpTo(StopRule):
    count: int

    def worthwhile(self, reach: float, confidence: float, num_nodes: int) -> bool:
        return num_nodes < self.count


class Context:
    laws = Laws()


def law_after(path: tuple[int, ...], flat: bool) -> torch.Tensor:
    """Logits after a path; a flat distribution has ties everywhere."""
    if flat:
        return torch.zeros(VOCABULARY)
    return 3 * torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(hash(path) % 2**31))


def grown(nodes: int, depth: int, flat: bool) -> RerankedBuilder:
    context: Any = Context()
    draft = RerankedBuilder(context, Budget(nodes, depth))
    while draft.frontier:
        paths = [path_of(draft, node) for node in draft.frontier]
        output = Output.of(torch.stack([law_after(path, flat) for path in paths]), top=WIDTH)
        draft.record_level(output, 0, width=WIDTH, name="it")
    return draft


def path_of(draft: RerankedBuilder, node: int) -> tuple[int, ...]:
    if node == ROOT:
        return ()
    return (*path_of(draft, draft.parents[node]), draft.tokens[node])


def plain(nodes: int, depth: int) -> dict[tuple[int, ...], float]:
    """Every recorded path with its probability, without any shortcut; then the best of them."""
    found: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path in frontier:
            q = torch.softmax(law_after(path, False), dim=-1)
            values, ids = q.topk(WIDTH)
            for value, token in zip(values.tolist(), ids.tolist(), strict=True):
                level[(*path, token)] = found.get(path, 1.0) * value
        found |= level
        frontier = sorted(level, key=lambda path: -level[path])[:WIDTH]
    return dict(sorted(found.items(), key=lambda each: -each[1])[:nodes])


@pytest.mark.parametrize(("nodes", "depth"), [(1, 1), (2, 4), (4, 4), (7, 3), (16, 5), (60, 3), (200, 2)])
def test_the_best_of_all_recorded_paths_are_proposed(nodes: int, depth: int) -> None:
    draft = grown(nodes, depth, flat=False)
    draft.rerank()
    expected = plain(nodes, depth)
    found = {path_of(draft, node): draft.reach[node] for node in range(len(draft.tokens))}
    assert found == pytest.approx(expected)
    assert all(parent < node for node, parent in enumerate(draft.parents))
    assert all(each == len(path_of(draft, node)) for node, each in enumerate(draft.depths))


@pytest.mark.parametrize("flat", [False, True])
def test_smaller_budgets_are_parts_of_larger_ones(flat: bool) -> None:
    """With ties, too: the elder of two equal nodes is taken, so that no child comes without its parent."""
    sets = []
    for nodes in (1, 2, 3, 5, 9, 14):
        draft = grown(14, 3, flat)
        draft.budget = Budget(nodes, 3)
        draft.rerank()
        assert len(draft.tokens) == nodes
        sets.append({path_of(draft, node) for node in range(nodes)})
    assert all(a < b for a, b in itertools.pairwise(sets))


def test_a_tree_ends_at_the_first_node_that_does_not_pay() -> None:
    for count in (0, 1, 4):
        draft = grown(16, 4, flat=False)
        draft.budget = Budget(16, 4, UpTo(count))
        draft.rerank()
        assert len(draft.tokens) == count


def test_a_chain_of_width_one_is_called_a_chain() -> None:
    draft: Any = RerankedBuilder(Context(), Budget(4, 4))  # type: ignore[arg-type]
    while draft.frontier:
        output = Output.of(torch.stack([law_after(path_of(draft, draft.frontier[0]), False)]), top=1)
        draft.record_level(output, 0, width=1, name="it")
    draft.rerank()
    assert draft.chain
    assert draft.parents == [-1, 0, 1, 2]
