"""The rule `entropy_adaptive` on random tables, by enumeration: the distribution, the meter, budgets, and a biased
twin.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from foretoken.certify.enumeration import TablePair
from foretoken.core.distortion import divergence, total_variation
from foretoken.core.draft import Coupled, Draft, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.randomness import Streams
from foretoken.core.threads import one_thread
from foretoken.core.tree import TokenTree
from foretoken.methods.entropy_adaptive import verifier as module
from foretoken.methods.entropy_adaptive.turns import LargeTurn, Turns
from foretoken.methods.entropy_adaptive.verifier import EntropyAdaptiveVerifier

V = 3


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


def verifier(budget=None):
    return EntropyAdaptiveVerifier(EntropyAdaptiveVerifier.Config(max_distortion=budget))


def laws(pair, tokens, *, greedy=False):
    logits = torch.stack([pair.p(tokens[:k]).log() for k in range(len(tokens) + 1)])
    return Laws(logits, greedy=greedy, positions=range(5, 6 + len(tokens)))


def chain(pair, tokens, *, yields=True, greedy=False):
    q_NV = None if greedy else torch.stack([pair.q(tokens[:k]) for k in range(len(tokens))])
    return Draft(TokenTree(tokens), PointMass() if greedy else Coupled(), evidence=Turns(q_NV, yields))


def steps(pair, rule, length, *, yields, monkeypatch):
    """Every chain of the small model's, with every choice that the target would make: weight, verdict, chain."""
    for tokens in itertools.product(range(V), repeat=length):
        weight = math.prod(float(pair.q(tokens[:k])[tokens[k]]) for k in range(length))
        if not weight:
            continue
        target = laws(pair, tokens)
        for own in itertools.product(range(V), repeat=length + 1):
            chance = math.prod(float(pair.p(tokens[:k])[own[k]]) for k in range(length + 1))
            if chance:
                monkeypatch.setattr(module, "Samples", lambda laws, seed, own=own: own)
                verdict = rule.verify(chain(pair, tokens, yields=yields), target, Streams(0))
                yield weight * chance, verdict, tokens


def emitted_law(pair, rule, length, **options):
    """Distribution of the first emitted tokens: prefix -> probabilities of the next one, and the meter's charges."""
    mass, charges = defaultdict(lambda: torch.zeros(V, dtype=torch.float64)), defaultdict(set)
    for weight, verdict, tokens in steps(pair, rule, length, **options):
        out = (*(tokens[node] for node in verdict.path), verdict.extra)
        for k, token in enumerate(out):
            mass[out[:k]][token] += weight
            charges[out[:k]].add((round(verdict.distortions[k], 12), round(verdict.divergences[k], 12)))
    return mass, charges


@pytest.mark.parametrize("style", ["flat", "peaked", "zeros", "point", "equal"])
@pytest.mark.parametrize("yields", [True, False])
@pytest.mark.parametrize("budget", [None, 0.15, 0.0])
def test_the_emitted_distribution_is_as_far_from_the_target_as_the_meter_reports(style, yields, budget, monkeypatch):
    pair, rule = TablePair(V, 3, style), verifier(budget)
    mass, charges = emitted_law(pair, rule, 2, yields=yields, monkeypatch=monkeypatch)
    assert mass[()].sum() == pytest.approx(1.0)
    for past, mass_V in mass.items():
        if not float(mass_V.sum()):
            continue
        e_V, p_V = mass_V / mass_V.sum(), pair.p(past)
        ((charged, kl),) = charges[past]  # the same whatever was drawn: it is known before
        assert charged == pytest.approx(total_variation(e_V, p_V), abs=1e-9)
        assert kl == pytest.approx(divergence(e_V, p_V), abs=1e-9)
        if budget == 0.0:
            assert charged == 0.0
    if style == "flat":
        assert any(charge > 0 for found in charges.values() for charge, _ in found) == (budget != 0.0)


def test_a_meter_that_takes_the_drawn_tokens_excess_is_caught(monkeypatch):
    """A planted mistake: charging (1 - p/q)+ of the drawn token is right in the mean only, so it has no one value."""

    class Wrong(EntropyAdaptiveVerifier):
        def _cost(self, turns, target, row, token):
            return max(0.0, 1.0 - float(target.p_at(row)[token]) / float(turns.q_NV[row, token])), 0.0

    _, charges = emitted_law(TablePair(V, 3), Wrong(), 2, yields=True, monkeypatch=monkeypatch)
    assert len(charges[()]) > 1


def test_a_rule_that_lets_the_drawn_token_decide_is_detected(monkeypatch):
    """The planted bias that the docstring excludes: the turn ends where the drawn token is improbable."""
    pair, mass_V = TablePair(V, 3), torch.zeros(V, dtype=torch.float64)
    for token in range(V):
        q, p_V = float(pair.q(())[token]), pair.p(())
        mass_V += q * (torch.eye(V, dtype=torch.float64)[token] if q >= 0.4 else p_V)
    assert total_variation(mass_V, pair.q(())) > 0.01


def test_the_target_s_turn_emits_its_own_token_and_its_raw_row():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    target = Laws(logits, greedy=False, positions=[4], process=lambda raw, rows: raw / 0.1)
    verdict = verifier(0.0).verify(Draft(TokenTree(())), target, Streams(7))
    assert isinstance(verdict, LargeTurn)
    assert verdict.path == ()
    assert verdict.distortions == (0.0,)
    assert torch.equal(verdict.logits_V, logits[0])  # not those at temperature 0.1


@pytest.mark.parametrize("yields", [True, False])
def test_greedy_tokens_cost_one_where_they_are_not_the_argmax(yields):
    pair = TablePair(V, 5)
    best = [int(pair.p(()).argmax())]
    off = (best[0] + 1) % V
    tokens = (best[0], off)
    other = int(pair.p((best[0],)).argmax())
    verdict = verifier().verify(
        chain(pair, tokens, yields=yields, greedy=True), laws(pair, tokens, greedy=True), Streams(0)
    )
    costs = (0.0, 0.0 if off == other else 1.0, *((0.0,) if yields else ()))
    assert verdict.distortions == costs
    assert verdict.path == ((0, 1) if yields else (0,))
    bounded = verifier(0.0).verify(
        chain(pair, tokens, yields=yields, greedy=True), laws(pair, tokens, greedy=True), Streams(0)
    )
    assert bounded.extra == other
    assert bounded.path == (0,)
    assert bounded.distortion == 0.0


def test_the_budget_counts_what_the_request_has_spent():
    pair, tokens = TablePair(V, 3), (0, 1)
    rich, poor = Metrics(num_tokens=100), Metrics(num_tokens=100, distortion_sum=100.0)
    rule, target = verifier(0.5), laws(TablePair(V, 3), tokens)
    assert rule.verify_within(chain(pair, tokens), target, Streams(1), rich).distortion > 0
    assert rule.verify_within(chain(pair, tokens), target, Streams(1), poor).distortion == 0


def test_other_drafts_are_refused():
    target = laws(TablePair(V, 3), (0,))
    with pytest.raises(ValueError, match="without turns"):
        verifier().verify(Draft(TokenTree((0,)), Coupled()), target, Streams(0))
    q_KV = torch.full((1, V), 1 / V)
    with pytest.raises(ValueError, match="not valid for drafts of kind Sampled"):
        verifier().verify(Draft(TokenTree((0,)), Sampled(q_KV, (0,)), evidence=Turns(q_KV, True)), target, Streams(0))


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan"), True, "x"])
def test_a_budget_out_of_range_is_refused(value):
    with pytest.raises(ConfigError, match="max_distortion"):
        verifier(value)
