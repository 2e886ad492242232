"""What any draft head must do: its ids are the target's, and its q is a distribution that is 0 at every other token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.check import check
from foretoken.core.draft import Sampled
from foretoken.core.errors import UnsupportedArchitecture
from foretoken.core.tree import TokenTree
from foretoken.drafting.feature_heads.own_rows import OwnRows
from foretoken.models.head_rows import HeadRows
from foretoken.models.load import load
from foretoken.native import build
from helpers.adapters import shelf
from helpers.tiny_models import save_model

WIDTH, VOCABULARY = 16, 30


def own(ids: list[int] | None) -> OwnRows:
    count = VOCABULARY if ids is None else len(ids)
    weight_KW = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(1))
    return OwnRows(weight_KW, None if ids is None else torch.tensor(ids), VOCABULARY)


IMPLEMENTATIONS: dict[str, Callable[[], OwnRows]] = {
    "of all": lambda: own(None),
    "of one": lambda: own([2]),
    "of some": lambda: own(list(range(0, VOCABULARY, 3))),
}
every = pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)


def on_vocabulary(head: OwnRows, logits_MK: torch.Tensor) -> torch.Tensor:
    return logits_MK if head.columns is None else head.columns.spread(logits_MK, -torch.inf)


def states(seed: int, count: int = 5) -> torch.Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


@every
def test_ids_are_tokens_of_the_target_each_once_and_increasing(make: Callable[[], OwnRows]) -> None:
    head = make()
    logits_MK = head.score(states(0))
    assert logits_MK.dtype == torch.float32
    columns = range(logits_MK.shape[1])
    tokens = list(columns if head.columns is None else head.columns.tokens_of(columns))
    assert tokens == sorted(set(tokens))
    assert 0 <= tokens[0] <= tokens[-1] < head.vocab_size
    assert torch.equal(on_vocabulary(head, logits_MK)[:, tokens], logits_MK)


@every
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_q_is_a_distribution_that_is_0_outside_of_the_ids(make: Callable[[], OwnRows], seed: int) -> None:
    head = make()
    q_MV = torch.softmax(on_vocabulary(head, head.score(states(seed, 1))), dim=-1)
    assert q_MV.shape == (1, head.vocab_size)
    drawn = int(torch.multinomial(q_MV[0], 1, generator=torch.Generator().manual_seed(seed)))
    check(Sampled(q_MV, (0,)), TokenTree([drawn]), head.vocab_size)
    if head.columns is not None:
        assert float(q_MV[0, head.columns.ids_C].sum()) == pytest.approx(1.0)
        assert drawn in head.columns
        assert int((q_MV > 0).sum()) <= len(head.columns)


def test_rows_of_a_model_that_caps_its_logits_are_refused_on_the_general_path() -> None:
    model = load(save_model("gemma2", shelf() / "draft-head-gemma2", head_dim=12), device="cpu")
    assert model.native_decoder is None
    with pytest.raises(UnsupportedArchitecture, match="cannot be trimmed"):
        HeadRows(model, range(10), model.vocab_size)


@pytest.mark.skipif(build.library() is None, reason="no C compiler on this machine: the native path is off")
def test_the_fused_decoder_caps_rows_as_the_whole_head() -> None:
    model = load(save_model("gemma2", shelf() / "draft-head-capped"), device="cpu")
    rows = HeadRows(model, [5, 17, 60], model.vocab_size)
    rows.set_tail([2, 9])
    states_MD = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 3
    whole_MV, some_MC = (model.score(states_MD, head=each).logits_MV for each in (None, rows))
    assert torch.equal(some_MC, whole_MV[:, [5, 17, 60, 2, 9]])
    assert float(whole_MV.abs().max()) <= 8.0
