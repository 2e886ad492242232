"""The paper's rule for searched paths, by enumeration: how far it strays, that the meter says so, budgets, refusals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.certify.enumeration import TablePair, verdicts
from foretoken.core.distortion import divergence, total_variation
from foretoken.core.draft import Draft, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.threads import one_thread
from foretoken.core.tree import TokenTree
from foretoken.engine import compose
from foretoken.methods.diffuspec.verifier import DiffuSpecVerifier, SlotLaws
from foretoken.verifiers.ratio import RatioVerifier
from helpers.zoo_llms import target

V = 4
STYLES = ("flat", "peaked", "zeros", "point", "equal")
Past = tuple[int, ...]


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def slots(pair: TablePair, count: int) -> Tensor:
    """A lattice: the distribution of each slot does not depend on the draft's tokens before it."""
    return torch.stack([pair.q((0,) * slot) for slot in range(count)])


def best(pair: TablePair, count: int = 2) -> Past:
    """What a search without a trigram finds."""
    return tuple(int(token) for token in slots(pair, count).argmax(-1))


def laws_of(pair: TablePair, tokens: Past, greedy: bool = False) -> Laws:
    p_MV = torch.stack([pair.p(tokens[:k]) for k in range(len(tokens) + 1)])
    return Laws(p_MV.log(), greedy=greedy, positions=range(len(p_MV)))


def draft_of(pair: TablePair, tokens: Past) -> Draft:
    q_NV = slots(pair, len(tokens))
    return Draft(TokenTree(tokens), PointMass(), evidence=SlotLaws(Sampled(q_NV, tuple(range(len(tokens))))))


def rule_of(budget: float | None = None) -> DiffuSpecVerifier:
    return DiffuSpecVerifier(DiffuSpecVerifier.Config(max_distortion=budget))


def emitted(rule: Any, draft: Draft, laws: Laws) -> tuple[dict[Past, Tensor], dict[Past, set[tuple[float, float]]]]:
    """The distribution of each emitted token after those before it, as weights, and what the meter charges there."""
    mass: dict[Past, Tensor] = defaultdict(lambda: torch.zeros(V, dtype=torch.float64))
    charges: dict[Past, set[tuple[float, float]]] = defaultdict(set)
    for weight, verdict in verdicts(rule, draft, laws):
        if weight <= 0.0:
            continue
        out = (*(draft.tree.tokens[node] for node in verdict.path), verdict.extra)
        for k, token in enumerate(out):
            mass[out[:k]][token] += weight
            if verdict.distortions:
                charges[out[:k]].add((round(verdict.distortions[k], 9), round(verdict.divergences[k], 9)))
    return mass, charges


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("budget", [None, 0.15, 0.0])
def test_the_emitted_distribution_is_as_far_from_the_target_as_the_meter_reports(
    style: str, budget: float | None
) -> None:
    strayed = 0.0
    for seed in range(6):
        pair = TablePair(V, seed, style)
        tokens = best(pair)
        mass, charges = emitted(rule_of(budget), draft_of(pair, tokens), laws_of(pair, tokens))
        for past, mass_V in mass.items():
            e_V, p_V = mass_V / mass_V.sum(), pair.p(past)
            ((charged, kl),) = charges[past]
            assert charged == pytest.approx(total_variation(e_V, p_V), abs=1e-8)
            assert kl == pytest.approx(divergence(e_V, p_V), abs=1e-8)
            strayed = max(strayed, charged)
    if style in ("flat", "peaked"):
        assert (strayed > 0.05) == (budget != 0.0)


def test_what_the_searched_token_gains_is_the_closed_form() -> None:
    for seed in range(8):
        pair = TablePair(V, seed, "flat")
        for token in range(V):
            p, q = float(pair.p(())[token]), float(slots(pair, 1)[0, token])
            mass, _ = emitted(rule_of(), draft_of(pair, (token,)), laws_of(pair, (token,)))
            gain = p * (1 / q - 1) if p <= q else 1 - p
            assert float(mass[()][token]) - p == pytest.approx(gain, abs=1e-9)


def test_the_same_arithmetic_on_drawn_tokens_keeps_the_target_s_distribution() -> None:
    """The control: over tokens drawn from the slot's distribution the mean is p, which is why the rule looks exact."""
    for seed, style in enumerate(STYLES):
        pair = TablePair(V, seed, style)
        q_V, e_V = slots(pair, 1)[0], torch.zeros(V, dtype=torch.float64)
        for token in range(V):
            mass, _ = emitted(rule_of(), draft_of(pair, (token,)), laws_of(pair, (token,)))
            e_V += q_V[token] * mass[()]
        torch.testing.assert_close(e_V, pair.p(()), atol=1e-9, rtol=0)


def test_it_is_what_ratio_does_with_a_draft_that_says_it_was_drawn() -> None:
    for seed in range(4):
        pair = TablePair(V, seed, "flat")
        tokens = best(pair)
        searched = draft_of(pair, tokens)
        assert isinstance(searched.evidence, SlotLaws)
        found, _ = emitted(rule_of(), searched, laws_of(pair, tokens))
        pretended, _ = emitted(RatioVerifier(), Draft(searched.tree, searched.evidence.law), laws_of(pair, tokens))
        assert found.keys() == pretended.keys()
        for past, mass_V in found.items():
            torch.testing.assert_close(mass_V, pretended[past], atol=1e-9, rtol=0)


def test_at_temperature_0_it_is_the_walk_along_the_argmax() -> None:
    pair = TablePair(V, 3, "flat")
    first = int(pair.p(()).argmax())
    second = int(pair.p((first,)).argmax())
    off = (second + 1) % V
    for draft in (draft_of(pair, (first, off)), Draft(TokenTree((first, off)))):
        verdict = rule_of().verify(draft, laws_of(pair, (first, off), greedy=True), Streams(0))
        assert (verdict.path, verdict.extra, verdict.distortions) == ((0,), second, (0.0, 0.0))


def test_drafts_without_the_distributions_of_their_slots_are_refused() -> None:
    pair = TablePair(V, 0)
    with pytest.raises(ValueError, match="without the distributions of its slots: use method='diffuspec'"):
        rule_of().verify(Draft(TokenTree((1,))), laws_of(pair, (1,)), Streams(0))
    drawn = Draft(TokenTree((1,)), Sampled(slots(pair, 1), (0,)), evidence=draft_of(pair, (1,)).evidence)
    with pytest.raises(ValueError, match="not valid for drafts of kind Sampled"):
        rule_of().verify(drawn, laws_of(pair, (1,)), Streams(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "draft_model", "model": "zoo:draft"}, "drafts of method 'draft_model' carry none"),
        ({"method": "ngram"}, "drafts of method 'ngram' carry none"),
        ({"method": "diffuspec", "draw": True}, "draw=True with verifier='diffuspec', which is for searched paths"),
        ({"method": "diffuspec", "tree": True}, "verifies chains"),
        ({"method": "diffuspec", "max_distortion": 2}, r"max_distortion=2 must be a number in \[0, 1\]"),
    ],
)
def test_what_does_not_go_with_the_rule_is_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose.build({**settings, "verifier": "diffuspec"}, target())
