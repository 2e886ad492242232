"""The dense plan against attention written out row by row, in float64, from the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch, Segment
from foretoken.forward.cache import KVCache
from foretoken.forward.dense import DensePlan, _allowed
from helpers.golden import random_tree
from helpers.threads import one_thread  # noqa: F401  (a fixture)

CPU = torch.device("cpu")


def picture(segment: Segment, window: int | None) -> list[str]:
    allowed = _allowed(segment, window, CPU)
    length = segment.prefix + segment.tail + segment.num_rows
    if allowed is None:
        allowed = torch.ones(segment.num_rows, length, dtype=torch.bool)
    return ["".join("1" if seen else "." for seen in row) for row in allowed.tolist()]


def tree_segment(prefix: int) -> Segment:
    """root ─┬─ 0 ── 2
    └─ 1"""
    batch = PackedBatch()
    batch.add_tree(0, prefix, 1, TokenTree((2, 3, 4), (-1, -1, 0)))
    return batch.segments[0]


def test_masks_of_a_tree() -> None:
    assert picture(tree_segment(2), None) == ["111...", "1111..", "111.1.", "1111.1"]
    # positions: 0 1 | 2 3 3 4; a window of three ends in the prefix for the root, after it for node 2
    assert picture(tree_segment(2), 3) == ["111...", ".111..", ".11.1.", "..11.1"]
    assert picture(tree_segment(2), 2) == [".11...", "..11..", "..1.1.", "...1.1"]


def test_masks_of_a_chunk() -> None:
    chunk = Segment(0, 2, 0, 3)
    assert picture(chunk, None) == ["111..", "1111.", "11111"]
    assert picture(chunk, 2) == [".11..", "..11.", "...11"]
    assert picture(Segment(0, 4, 0, 1), None) == ["11111"]
    assert picture(Segment(0, 4, 0, 1), 5) == ["11111"]
    assert picture(Segment(0, 4, 0, 1), 4) == [".1111"]


def test_masks_of_a_level() -> None:
    """The tail holds root, 0 and 1 (depths 0, 1, 1); the level holds a child of each."""
    batch = PackedBatch()
    batch.add_level(0, 2, [5, 6], depths=[2, 2], tail=3, tail_depths=[0, 1, 1], ancestors=[[0, 1], [0, 2]])
    assert picture(batch.segments[0], None) == ["1111.1.", "111.1.1"]
    assert picture(batch.segments[0], 2) == ["...1.1.", "....1.1"]


def test_masks_of_a_chain_after_a_tail() -> None:
    """The tail is a chain, too, so it is as good as a prefix."""
    batch = PackedBatch()
    batch.add_chunk(0, 2, [5, 6], wanted=2, tail=2)
    assert batch.positions == [4, 5]
    assert picture(batch.segments[0], None) == ["11111.", "111111"]
    assert picture(batch.segments[0], 3) == ["..111.", "...111"]


def test_one_plain_row_needs_no_mask() -> None:
    assert _allowed(Segment(0, 9, 0, 1), None, CPU) is None
    assert _allowed(Segment(0, 9, 0, 1), 10, CPU) is None


def oracle(
    q_HTD: Tensor,
    rows_of: list[tuple[Segment, list[tuple[Tensor, Tensor, int]]]],
    positions: list[int],
    sees: list[list[int]],
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """[T, H, Dv]: for each packed row, softmax over the columns that the definition allows."""
    H = q_HTD.shape[0]
    outputs = []
    for segment, columns in rows_of:
        for row in range(segment.num_rows):
            t = segment.start + row
            heads = []
            for head in range(H):
                group = head * columns[0][0].shape[0] // H
                scores, values = [], []
                for index in sees[t]:
                    key_GD, value_GD, position = columns[index]
                    if window is not None and positions[t] - position >= window:
                        continue
                    score = torch.dot(q_HTD[head, t].double(), key_GD[group].double()) * scaling
                    scores.append(score if softcap is None else softcap * torch.tanh(score / softcap))
                    values.append(value_GD[group].double())
                if sinks_H is not None:
                    scores.append(sinks_H[head].double())
                    values.append(torch.zeros_like(values[0]))
                weights = torch.softmax(torch.stack(scores), dim=0)
                heads.append(weights @ torch.stack(values))
            outputs.append(torch.stack(heads))
    return torch.stack(outputs)


def compare(
    shape: tuple[int, int, int, int],
    requests: list[tuple[int, int | TokenTree]],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Largest difference from the oracle.

    Args:
        shape: query heads, key heads, key width, value width.
        requests: committed rows, and then either a chunk's length or a tree after a root.
    """
    H, G, D, Dv = shape
    generator = torch.Generator().manual_seed(0)
    draw = lambda *size: torch.randn(size, generator=generator).to(dtype)  # noqa: E731
    cache = KVCache(1, 8, 512)
    batch = PackedBatch()
    columns_of: list[list[tuple[Tensor, Tensor, int]]] = []
    sees: list[list[int]] = []
    for prefix, what in requests:
        slot = cache.acquire()
        columns: list[tuple[Tensor, Tensor, int]] = []
        if prefix:
            k_GTD, v_GTD = draw(G, prefix, D), draw(G, prefix, Dv)
            before = PackedBatch()
            before.add_chunk(slot, 0, [0] * prefix, wanted=0)
            cache.reserve(slot, prefix)
            DensePlan(cache, before).attend(0, draw(H, prefix, D), k_GTD, v_GTD, scaling=1.0)
            cache.commit(slot, range(prefix))
            columns = [(k_GTD[:, i], v_GTD[:, i], i) for i in range(prefix)]
        columns_of.append(columns)
        committed = list(range(prefix))
        if isinstance(what, int):
            batch.add_chunk(slot, prefix, [0] * what, wanted=what)
            sees += [[*committed, *range(prefix, prefix + row + 1)] for row in range(what)]
        else:
            batch.add_tree(slot, prefix, 0, what)
            for node in range(-1, len(what)):
                sees.append([*committed, prefix, *(prefix + 1 + above for above in what.path_to(node))])
        cache.reserve(slot, batch.segments[-1].num_rows)
    T = len(batch)
    # as a model hands them over: heads first, but strided
    q_HTD, k_GTD, v_GTD = (draw(T, n, d).transpose(0, 1) for n, d in ((H, D), (G, D), (G, Dv)))
    for segment, columns in zip(batch.segments, columns_of, strict=True):
        for row in range(segment.start, segment.start + segment.num_rows):
            columns.append((k_GTD[:, row], v_GTD[:, row], batch.positions[row]))
    sinks_H = draw(H) if sinks else None
    found = DensePlan(cache, batch).attend(
        0, q_HTD, k_GTD, v_GTD, scaling=0.4, window=window, softcap=softcap, sinks_H=sinks_H
    )
    pairs = list(zip(batch.segments, columns_of, strict=True))
    expected = oracle(q_HTD, pairs, batch.positions, sees, 0.4, window, softcap, sinks_H)
    assert found.shape == (T, H, Dv)
    return float((found.double() - expected).abs().max())


TREE = random_tree(0, 10)
REQUESTS: list[tuple[int, int | TokenTree]] = [(6, 4), (0, 3), (9, TREE), (5, 0 + 1), (0, TREE)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize(
    ("softcap", "sinks"),
    [(None, False), (2.0, False), (None, True), (2.0, True)],
    ids=["plain", "cap", "sinks", "both"],
)
@pytest.mark.parametrize(
    "shape",
    [(4, 4, 8, 8), (4, 2, 8, 8), (6, 1, 8, 8), (4, 4, 12, 7), (6, 3, 5, 9)],
    ids=lambda s: "x".join(map(str, s)),
)
def test_ragged_batch_equals_the_definition(
    shape: tuple[int, int, int, int], softcap: float | None, sinks: bool, window: int | None
) -> None:
    assert compare(shape, REQUESTS, window, softcap, sinks) < 2e-6


@pytest.mark.covering(2)
@pytest.mark.parametrize("rows", [63, 64, 65, 80])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("sinks", [False, True], ids=["fused", "plain"])
@pytest.mark.parametrize("shape", [(4, 2, 8, 8), (2, 2, 12, 7)], ids=["grouped", "wide"])
def test_many_rows(rows: int, window: int | None, sinks: bool, shape: tuple[int, int, int, int]) -> None:
    assert compare(shape, [(10, rows)], window, None, sinks) < 3e-6


def test_bfloat16_rounds_but_does_not_drift() -> None:
    for softcap in (None, 2.0):
        assert compare((4, 2, 8, 8), REQUESTS, 3, softcap, False, torch.bfloat16) < 0.06


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_trees_equal_the_definition(data: st.DataObject) -> None:
    requests: list[tuple[int, int | TokenTree]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        size = data.draw(st.integers(0, 6))
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
        requests.append((data.draw(st.integers(0, 7)), TokenTree([0] * size, parents)))
    window = data.draw(st.none() | st.integers(1, 9))
    assert compare((2, 1, 4, 4), requests, window, None, data.draw(st.booleans())) < 2e-6
