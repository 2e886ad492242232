"""A drafter that scores some tokens only: every lossless rule is exact where q is 0 at all others, in closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken import catalog
from foretoken.certify.enumeration import CHAINS, KINDS, LAW_OF, TREES, TablePair, step_law, target_law
from foretoken.core.columns import Columns
from foretoken.core.draft import Draft, Tabulated
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.verdict import Verdict
from foretoken.verifiers.ratio import RatioVerifier

V = 3
# `match` reads no distribution; its noise is a function of the seed, which cannot be enumerated
RULES = [
    rule.load()
    for rule in catalog.entries("verifier")
    if rule.load().promise == "same distribution"
    and any(LAW_OF[kind] in rule.load().laws for kind in KINDS if kind != "point")
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
every_set = pytest.mark.parametrize("kept", [(1,), (2, 0), (0, 1, 2)], ids=str)


def columns(kept: tuple[int, ...], vocab_size: int = V) -> Columns:
    return Columns(torch.tensor(kept), vocab_size)


class Outside(TablePair):
    """The target's whole mass is on tokens that the drafter does not have."""

    def p(self, context: tuple[int, ...]) -> Tensor:
        assert self.columns is not None
        p_V = super().p(context).clone() + 1e-3
        p_V[self.columns.ids_C] = 0.0
        return p_V / p_V.sum()


def cases(rule: type[Verifier]) -> list[tuple[str, tuple[int, ...]]]:
    """Every kind of q that the rule knows, with a chain and, where it verifies trees, a pair of siblings."""
    kinds = [kind for kind in KINDS if kind != "point" and LAW_OF[kind] in rule.laws]
    shapes = [(-1, 0), *([(-1, -1)] if rule.trees else [])]
    assert shapes[0] in CHAINS
    assert not rule.trees or shapes[1] in TREES
    return [(kind, shape) for kind in kinds for shape in shapes]


@every_set
@every_rule
def test_lossless_rules_are_exact(rule: type[Verifier], kept: tuple[int, ...]) -> None:
    for kind, shape in cases(rule):
        for style in ("flat", "peaked", "zeros"):
            pair = TablePair(V, 5, style, columns=columns(kept))
            found = step_law(rule(), pair, shape, kind, length=2).joint  # type: ignore[arg-type]
            assert float((found - target_law(pair, 2)).abs().max()) < 1e-9, (kind, shape, style)


@every_rule
def test_a_target_outside_of_the_columns_gets_its_own_text_one_token_a_step(rule: type[Verifier]) -> None:
    for kind, shape in cases(rule):
        pair = Outside(V, 5, "flat", columns=columns((1,)))
        found = step_law(rule(), pair, shape, kind, length=2)  # type: ignore[arg-type]
        assert found.accepted == 0.0
        assert float((found.joint - target_law(pair, 2)).abs().max()) < 1e-9, (kind, shape)


class Epsilon(RatioVerifier):
    """Planted: tokens without a column are given a little q, so that a draw looks less probable than it was."""

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        law = draft.law
        assert isinstance(law, Tabulated)
        q_KV = torch.stack([law.q_at(node) for node in range(len(draft))]) + 0.1
        lie = replace(law, q_KV=q_KV / q_KV.sum(-1, keepdim=True), columns=None)
        return super().verify(replace(draft, law=lie), target, rng)


class InsideOnly(RatioVerifier):
    """Planted: the residual is taken over the drafter's own tokens, as if no other could be emitted."""

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        law = draft.law
        assert isinstance(law, Tabulated)
        assert law.columns is not None
        outside_V = law.columns.spread(torch.zeros(len(law.columns), dtype=torch.float64), -torch.inf)
        narrowed = Laws(target.logits_MV + outside_V, greedy=False, positions=target.positions)
        return super().verify(draft, narrowed, rng)


@pytest.mark.parametrize("mistake", [Epsilon, InsideOnly])
def test_a_rule_that_mistakes_the_other_columns_is_caught(mistake: type[RatioVerifier]) -> None:
    pair = TablePair(V, 5, "flat", columns=columns((0, 2)))
    honest = step_law(RatioVerifier(), pair, (-1, 0), "sampled", length=2).joint
    assert float((honest - target_law(pair, 2)).abs().max()) < 1e-9
    found = step_law(mistake(), pair, (-1, 0), "sampled", length=2).joint
    assert float((found - target_law(pair, 2)).abs().max()) > 1e-3
