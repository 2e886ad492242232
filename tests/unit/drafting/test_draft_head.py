"""What any draft head must do: its ids are the target's, its logits are the full head's, and its q is a law."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.analysis.exactness.enumeration import LAW_OF, TablePair, step_law, target_law
from foretoken.core.check import check
from foretoken.core.draft import Sampled
from foretoken.core.errors import ConfigError, UnsupportedArchitecture
from foretoken.core.protocols import Verifier
from foretoken.core.tree import TokenTree
from foretoken.drafting.draft_head import DraftHead, FullHead, TrimmedHead
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.ratio import RatioVerifier
from foretoken.verifiers.recursive import RecursiveVerifier
from helpers.adapters import shelf
from helpers.tiny_models import VOCAB_SIZE, save_model

Make = Callable[[LanguageModel], DraftHead]

IMPLEMENTATIONS: dict[str, Make] = {
    "full": FullHead,
    "trimmed to one": lambda model: TrimmedHead(model, [2]),
    "trimmed": lambda model: TrimmedHead(model, range(0, VOCAB_SIZE, 3)),
    "trimmed to all": lambda model: TrimmedHead(model, range(VOCAB_SIZE)),
}
every = pytest.mark.parametrize("make", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
families = pytest.mark.parametrize("family", ["llama", "phi"])  # the first may run packed; the head of phi has a bias
quick = settings(max_examples=20, deadline=None)


@cache
def model(family: str) -> LanguageModel:
    return load(save_model(family, shelf() / f"draft-head-{family}"), device="cpu")


def states(seed: int, count: int = 5) -> torch.Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))


@every
@families
def test_ids_are_tokens_of_the_target_each_once_and_increasing(make: Make, family: str) -> None:
    head = make(model(family))
    assert head.vocab_size == model(family).vocab_size
    if head.ids_K is not None:
        ids = head.ids_K.tolist()
        assert head.ids_K.dtype == torch.int64
        assert ids == sorted(set(ids))
        assert 0 <= ids[0] <= ids[-1] < head.vocab_size
    columns = torch.arange(head.score(states(0)).shape[1])
    assert torch.equal(head.tokens_of(columns), columns if head.ids_K is None else head.ids_K)


@every
@families
@quick
@given(seed=st.integers(0, 2**31), scale=st.sampled_from([0.1, 1.0, 10.0]))
def test_logits_are_the_full_head_s_at_these_ids(make: Make, family: str, seed: int, scale: float) -> None:
    head, hidden_MD = make(model(family)), scale * states(seed)
    logits_MK = head.score(hidden_MD)
    assert logits_MK.dtype == torch.float32
    expected_MV = FullHead(model(family)).score(hidden_MD)
    expected_MK = expected_MV if head.ids_K is None else expected_MV[:, head.ids_K]
    torch.testing.assert_close(logits_MK, expected_MK, rtol=1e-5, atol=1e-5 * float(expected_MV.abs().max()))


@every
@quick
@given(seed=st.integers(0, 2**31))
def test_q_is_a_law_that_is_0_outside_of_the_ids(make: Make, seed: int) -> None:
    head = make(model("llama"))
    q_MV = torch.softmax(head.on_vocabulary(head.score(states(seed, 1))), dim=-1)
    assert q_MV.shape == (1, head.vocab_size)
    drawn = int(torch.multinomial(q_MV[0], 1, generator=torch.Generator().manual_seed(seed)))
    check(Sampled(q_MV, (0,)), TokenTree([drawn]), head.vocab_size)
    if head.ids_K is not None:
        assert float(q_MV[0, head.ids_K].sum()) == pytest.approx(1.0)
        assert drawn in head.ids_K.tolist()
        assert int((q_MV > 0).sum()) <= len(head.ids_K)


@pytest.mark.parametrize("ids", [[], [3, 3], [4, 2], [-1, 5], [0, VOCAB_SIZE]], ids=str)
def test_wrong_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="ids of a trimmed head"):
        TrimmedHead(model("llama"), ids)


def test_a_model_that_caps_its_logits_is_refused() -> None:
    with pytest.raises(UnsupportedArchitecture, match="cannot be trimmed"):
        TrimmedHead(model("gemma2"), range(10))


# ------------------------------------------------------------------ lossless rules under such a q


class Trimmed(TablePair):
    """Tables whose drafter scores some tokens only: its law is the table's there, and 0 at every other token."""

    def __init__(self, vocab_size: int, seed: int, style: str, kept: tuple[int, ...]) -> None:
        super().__init__(vocab_size, seed, style)
        self.kept = kept

    def q(self, context: tuple[int, ...]) -> torch.Tensor:
        inside_V = torch.full((self.vocab_size,), -math.inf, dtype=torch.float64)
        inside_V[list(self.kept)] = 0.0
        q_V = torch.softmax(super().q(context).clamp_min(1e-12).log() + inside_V, dim=-1)
        assert float(q_V.sum()) == pytest.approx(1.0)
        return q_V


class Outside(Trimmed):
    """The target's whole mass is on tokens that the drafter does not have."""

    def p(self, context: tuple[int, ...]) -> torch.Tensor:
        p_V = super().p(context).clone() + 1e-3
        p_V[list(self.kept)] = 0.0
        return p_V / p_V.sum()


# `match` reads no law; its noise is a function of the seed, which cannot be enumerated
RULES: tuple[tuple[Verifier, str], ...] = (
    (RatioVerifier(), "sampled"),
    (BlockVerifier(), "sampled"),
    (RecursiveVerifier(), "sampled"),
    (RecursiveVerifier(), "without"),
)


@pytest.mark.parametrize("kept", [(1,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("rule", "kind"), RULES, ids=lambda each: getattr(each, "name", each))
def test_lossless_rules_are_exact_where_q_is_0_outside(rule: Verifier, kind: str, kept: tuple[int, ...]) -> None:
    assert LAW_OF[kind] in rule.laws  # type: ignore[index]
    shapes = [(-1, 0), *([(-1, -1)] if rule.trees else [])]
    for shape in shapes:
        for style in ("flat", "peaked", "zeros"):
            pair = Trimmed(3, 5, style, kept)
            found = step_law(rule, pair, shape, kind, length=2).joint  # type: ignore[arg-type]
            assert float((found - target_law(pair, 2)).abs().max()) < 1e-9


@pytest.mark.parametrize(("rule", "kind"), RULES, ids=lambda each: getattr(each, "name", each))
def test_a_target_outside_of_the_ids_gets_its_own_text_one_token_a_step(rule: Verifier, kind: str) -> None:
    pair = Outside(3, 5, "flat", (1,))
    found = step_law(rule, pair, (-1, 0), kind, length=2)  # type: ignore[arg-type]
    assert found.accepted == 0.0
    assert float((found.joint - target_law(pair, 2)).abs().max()) < 1e-9


def test_a_rule_that_is_told_another_law_is_caught() -> None:
    """Planted: tokens outside of the ids are given a little q, so that a draw looks less probable than it was."""

    class Believing(RatioVerifier):
        def verify(self, draft, target, rng):  # type: ignore[no-untyped-def]
            law = draft.law
            lie = Sampled(0.7 * law.q_KV + 0.1, law.row_of) if isinstance(law, Sampled) else law
            return super().verify(type(draft)(draft.tree, lie), target, rng)

    pair = Trimmed(3, 5, "flat", (0, 2))
    found = step_law(Believing(), pair, (-1, 0), "sampled", length=2).joint
    assert float((found - target_law(pair, 2)).abs().max()) > 1e-3
