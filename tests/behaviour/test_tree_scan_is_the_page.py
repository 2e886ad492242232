"""Every implementation of the recurrence is the page of the paper, over trees, chains and committed branches.

The kernel for GPUs is, too: tests/unit/forward/kernels/test_tree_scan.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward.ssm import scan
from foretoken.forward.ssm.scan import Rows
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.golden import PARENTS, LayerPlan, Session, tokens_of
from helpers.stree_page import activation_replay, by_the_page, tree_mask
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model

H, G, S, P = 4, 2, 5, 3


def case(count: int, seed: int) -> tuple[Tensor, Rows, list[int]]:
    """A state, rows and a tree, float64."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    parts = normal(count, G, S), normal(count, G, S), normal(count, H, P), -normal(count, H).abs()
    rows = Rows(*parts, normal(count, H).sigmoid(), False)
    parents = [int(torch.randint(-1, row, (1,), generator=generator)) if row else -1 for row in range(count)]
    return normal(H, S, P), rows, parents


Scan = Callable[[Tensor, Rows, list[int]], Tensor]
SCANS: dict[str, Scan] = {
    "walk": lambda state, rows, parents: scan.walk(state, rows, parents)[0],
    "tree scan": scan.tree_scan,
}


def difference(compute: Scan, *, causal: bool = False) -> float:
    worst = 0.0
    for seed in range(6):
        state, rows, parents = case(3 + 4 * seed, seed)
        expected, _ = by_the_page(state, rows, parents, causal=causal)
        worst = max(worst, float((compute(state, rows, parents) - expected).abs().max()))
    return worst


@pytest.mark.parametrize("name", SCANS)
def test_walk_and_scan_are_the_page(name: str) -> None:
    assert difference(SCANS[name]) < 1e-10
    assert difference(SCANS[name], causal=True) > 1e-3


def test_the_page_is_the_recurrence_along_every_path() -> None:
    """h = e^l h + dt x B^T, y = h C, one node at a time."""
    state, rows, parents = case(19, 7)
    y_THP, _ = by_the_page(state, rows, parents)
    B, C, x, decay, dt, _ = rows
    mask = tree_mask(parents)
    for node in range(19):
        h = state.clone()
        for each in mask[node].nonzero()[:, 0].tolist():  # ancestors come first
            for head in range(H):
                group = head // (H // G)
                h[head] = decay[each, head].exp() * h[head] + dt[each, head] * torch.outer(
                    B[each, group], x[each, head]
                )
                y = h[head].T @ C[each, group]
                if each == node:
                    assert torch.allclose(y, y_THP[node, head], atol=1e-10)
        assert torch.allclose(activation_replay(x, dt, decay, B, state, mask, node), h, atol=1e-10)


def test_a_chain_in_chunks_and_its_replay_are_the_page() -> None:
    state, rows, _ = case(130, 8)
    expected_y, expected_state = by_the_page(state, rows, scan.chain_of(130))
    for size in (1, 7, 64):
        found_y, found_state = scan.chunk_scan(state, rows, size)
        assert (found_y - expected_y).abs().max() < 1e-10
        assert (found_state - expected_state).abs().max() < 1e-10
    assert (scan.fold(state, rows) - expected_state).abs().max() < 1e-10
    assert (scan.fold(state, rows.of(slice(0, 129))) - expected_state).abs().max() > 1e-3


@pytest.fixture(scope="module", params=["mamba2_groups", "bamba"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(save_model(request.param, tmp_path_factory.mktemp("states")), device="cpu")


def verified(model: LanguageModel, **options: Any) -> Tensor:
    """Logits of a prompt, of a tree, and of the text after a committed branch of it."""
    session = Session(model, **options)
    slot = session.cache.acquire()
    tree = TokenTree(tokens_of(2, len(PARENTS), VOCAB_SIZE), PARENTS)
    rows = [session.chunk(slot, tokens_of(1, 11, VOCAB_SIZE)), session.draft(slot, 9, tree)]
    session.cache.commit(slot, [0, *(node + 1 for node in tree.path_to(7))])
    return torch.cat([*rows, session.chunk(slot, tokens_of(3, 4, VOCAB_SIZE))])


@pytest.mark.parametrize(("causal", "close"), [(False, True), (True, False)])
def test_the_native_decoder_is_the_page(
    causal: bool, close: bool, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page takes the place of the recurrence in the library's layers, which are compared with native code."""
    if model.native_decoder is None:
        pytest.skip("there is no compiled decoder on this machine")
    native = verified(model)
    monkeypatch.setattr(scan, "walk", lambda *arguments: by_the_page(*arguments, causal=causal))
    expected = verified(model, plan=LayerPlan)
    error = float((native - expected).abs().max() / expected.std())
    assert error < 4e-5 if close else error > 1e-3  # logits in units of their spread; processors round differently
