"""The recurrence over trees: walk, tree scan and chunk scan against the formula, one path at a time, in float64."""

from __future__ import annotations

import pytest
import torch

from foretoken.forward.ssm import scan
from foretoken.forward.ssm.scan import Rows

H, G, N, P = 4, 2, 5, 3
CLOSE = 1e-10


def rows_of(count: int, seed: int, *, delta: bool, dtype: torch.dtype = torch.float64) -> Rows:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    k, q = normal(count, G, N), normal(count, G, N)
    if delta:
        k, q = (each / each.norm(dim=-1, keepdim=True) for each in (k, q))
    factor = normal(count, H).sigmoid()
    parts = (k, q, normal(count, H, P), -normal(count, H).abs(), factor)
    return Rows(*(each.to(dtype) for each in parts), delta)


def state_of(seed: int) -> torch.Tensor:
    return torch.randn(H, N, P, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_parents(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(-1, row, (1,), generator=generator)) if row else -1 for row in range(count)]


def path_to(row: int, parents: list[int]) -> list[int]:
    path = []
    while row >= 0:
        path.insert(0, row)
        row = parents[row]
    return path


def by_the_formula(state: torch.Tensor, rows: Rows, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """One path, one head at a time, straight from the module's docstring."""
    state, y = state.clone(), torch.zeros(H, P, dtype=state.dtype)
    for row in path:
        for h in range(H):
            k, q = rows.k_TGN[row, h * G // H], rows.q_TGN[row, h * G // H]
            state[h] = rows.decay_TH[row, h].exp() * state[h]
            written = rows.v_THP[row, h] - (state[h].T @ k if rows.delta else 0)
            state[h] += torch.outer(k, rows.factor_TH[row, h] * written)
            y[h] = state[h].T @ q
    return y, state


@pytest.mark.parametrize("delta", [False, True], ids=["mamba2", "delta"])
@pytest.mark.parametrize("seed", range(6))
def test_every_node_of_a_tree_is_its_own_path(seed: int, delta: bool) -> None:
    count = 3 + 4 * seed
    rows, state, parents = rows_of(count, seed, delta=delta), state_of(seed), random_parents(count, seed)
    walked, _ = scan.walk(state, rows, parents)
    scanned = scan.tree_scan(state, rows, parents)
    for row in range(count):
        expected, behind = by_the_formula(state, rows, path_to(row, parents))
        assert (walked[row] - expected).abs().max() < CLOSE
        assert (scanned[row] - expected).abs().max() < CLOSE
        folded = scan.fold(state, rows.of(path_to(row, parents)))  # replay of every node that might be accepted
        assert (folded - behind).abs().max() < CLOSE


@pytest.mark.parametrize("delta", [False, True], ids=["mamba2", "delta"])
@pytest.mark.parametrize("size", [1, 7, 64, 200])
def test_a_chain_in_chunks_is_the_walk(size: int, delta: bool) -> None:
    rows, state = rows_of(130, 3, delta=delta), state_of(3)
    walked, behind = scan.walk(state, rows, scan.chain_of(130))
    scanned, after = scan.chunk_scan(state, rows, size)
    assert (scanned - walked).abs().max() < CLOSE
    assert (after - behind).abs().max() < CLOSE


def test_an_unrequested_row_changes_nothing() -> None:
    rows, state, parents = rows_of(6, 1, delta=False), state_of(1), [-1, 0, -2, 1, -2, 3]
    huge = rows._replace(v_THP=rows.v_THP.clone())
    huge.v_THP[2] = huge.v_THP[4] = 1e30
    for compute in (lambda each: scan.walk(state, each, parents)[0], lambda each: scan.tree_scan(state, each, parents)):
        found = compute(huge)
        assert torch.equal(found[[0, 1, 3, 5]], compute(rows)[[0, 1, 3, 5]])
        assert not found[[2, 4]].any()


@pytest.mark.parametrize("delta", [False, True], ids=["mamba2", "delta"])
def test_states_that_are_forgotten_at_once_lose_no_digits(delta: bool) -> None:
    """Every ninth row leaves e^-300 of the state: sums of logarithms in float32 would lose the digits between them."""
    exact = rows_of(64, 5, delta=delta)
    exact.decay_TH[::9] = -300.0
    rows = Rows(*(each.float() for each in exact[:5]), delta)
    expected, _ = scan.walk(state_of(5), Rows(*(each.double() for each in rows[:5]), delta), scan.chain_of(64))
    found = scan.tree_scan(state_of(5).float(), rows, scan.chain_of(64))
    assert found.isfinite().all()
    assert (found - expected).abs().max() < 5e-6 * expected.abs().max()


def test_siblings_of_very_different_decay_do_not_meet() -> None:
    """e^(a_i - a_j) of rows on different branches overflows; masked after it was taken it would be NaN."""
    rows = rows_of(3, 2, delta=False)
    rows.decay_TH[1], rows.decay_TH[2] = -2000.0, -0.1
    found = scan.tree_scan(state_of(2), rows, [-1, 0, 0])
    assert found.isfinite().all()
    assert (found - scan.walk(state_of(2), rows, [-1, 0, 0])[0]).abs().max() < CLOSE
