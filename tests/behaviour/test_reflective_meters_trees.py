"""`reflective` over trees on random tables: its charges are the enumerated distances, at every depth and the bonus."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from foretoken import catalog
from foretoken.certify.enumeration import TablePair, verdicts
from foretoken.core.distortion import divergence, total_variation
from foretoken.core.draft import Draft, PointMass, Sampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.threads import one_thread
from foretoken.core.tree import TokenTree
from foretoken.methods.reflective.probe import with_copies
from foretoken.methods.reflective.verifier import RULES, ReflectiveVerifier
from foretoken.verifiers.recursive import RecursiveVerifier

V = 3
PARENTS = (-1, -1, 0)  # two children of the root, and one of the first
KINDS = (Sampled, WithoutReplacement, PointMass)
TREE_RULES = [
    name for name in RULES if name != "match" and catalog.find(name, "verifier").load().trees
]  # match asks its streams nothing: see certify/enumeration.py


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


def past(tree, node):
    return tuple(tree.tokens[each] for each in tree.path_to(node)) if node >= 0 else ()


def laws(pair, tree, *, bonus=None):
    """The target's rows; with ``bonus`` given, those of a probe, each drawn by all that it sees."""
    logits = torch.stack([pair.p(past(tree, node)).log().clamp(min=-30.0) for node in range(-1, len(tree))])
    probe = None
    if bonus is not None:
        probed, rows = with_copies(tree, (), (0,), bonus=bonus), []
        for node in range(len(tree), len(probed)):
            seed = hash(past(probed, node)) % 2**31
            rows.append(2.0 * torch.randn(V, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))
        probe = torch.stack(rows)
    positions = (5, *(5 + depth for depth in tree.depths))
    return Laws(logits, greedy=False, positions=positions, process=lambda raw, rows: raw, probe_logits_PV=probe)


def drafts(pair, kind):
    """Every draft of this kind with its chance."""
    q_V = pair.q(())
    for first in range(V):
        for second in range(V):
            if kind is not Sampled and first == second:
                continue
            weight = {
                Sampled: float(q_V[first] * q_V[second]),
                WithoutReplacement: float(q_V[first] * q_V[second] / (1 - q_V[first])),
                PointMass: 1 / (V * (V - 1)),
            }[kind]
            for third in range(V):
                tree = TokenTree((first, second, third), PARENTS)
                inner_V = pair.q((first,))
                law = PointMass() if kind is PointMass else kind(torch.stack([q_V, inner_V]), (0, 0, 1))
                chance = 1 / V if kind is PointMass else float(inner_V[third])
                if weight * chance:
                    yield weight * chance, Draft(tree, law)


def by_place(rule, draft, target):
    """Walked path -> distribution of the token that is emitted after it, and the charges seen there."""
    mass, charges = defaultdict(lambda: torch.zeros(V, dtype=torch.float64)), defaultdict(set)
    for weight, verdict in verdicts(rule, draft, target):
        out = [*(draft.tree.tokens[node] for node in verdict.path), verdict.extra]
        for depth, token in enumerate(out):
            mass[verdict.path[:depth]][token] += weight
            if verdict.distortions:
                charges[verdict.path[:depth]].add((verdict.distortions[depth], verdict.divergences[depth]))
    return {place: mass_V / mass_V.sum() for place, mass_V in mass.items()}, charges


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TREE_RULES)
@pytest.mark.parametrize("bonus", [False, True])
def test_the_charge_is_the_enumerated_distance_at_every_place_of_a_tree(kind, name, bonus):
    rule = ReflectiveVerifier(ReflectiveVerifier.Config(alpha=0.5, prompt=(), prefix=1, rule=name, mix_bonus=bonus))
    if kind not in rule.laws:
        return
    pair, deepest, mean_V, charged = TablePair(V, 3), 0.0, torch.zeros(V, dtype=torch.float64), 0.0
    for weight, draft in drafts(pair, kind):
        found, charges = by_place(rule, draft, laws(pair, draft.tree, bonus=bonus))
        exact, _ = by_place(RecursiveVerifier(), draft, laws(pair, draft.tree))
        for place, e_V in found.items():
            if place not in exact:  # exact verification never comes here
                continue
            ((cost, kl),) = {(round(cost, 7), round(kl, 5)) for cost, kl in charges[place]}
            assert cost == pytest.approx(total_variation(e_V, exact[place]), abs=1e-5), place
            assert kl == pytest.approx(divergence(e_V, exact[place]), abs=1e-3), place
            deepest = max(deepest, cost if len(place) == 2 else 0.0)
        mean_V += weight * found[()]
        charged += weight * min(charges[()])[0]
    assert (deepest > 0.01) == bonus or name == "typical"
    assert charged > 0.01
    if kind is not PointMass:  # those drafts have no distribution here
        assert charged >= total_variation(mean_V, pair.p(())) - 1e-6
