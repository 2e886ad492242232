"""The rule `reflective` on random tables: fusion, the distribution given a draft, the meter by enumeration, budgets,
guards.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foretoken import catalog
from foretoken.certify.enumeration import TablePair, verdicts
from foretoken.core.distortion import divergence, total_variation
from foretoken.core.draft import Draft, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.randomness import Streams
from foretoken.core.threads import one_thread
from foretoken.core.tree import TokenTree
from foretoken.methods.reflective import verifier as module
from foretoken.methods.reflective.given_draft import law_given
from foretoken.methods.reflective.verifier import RULES, ReflectiveVerifier
from foretoken.verifiers.recursive import RecursiveVerifier

V = 3


@pytest.fixture(autouse=True)
def on_one_thread():
    with one_thread():
        yield


def rule(alpha=0.4, **options):
    return ReflectiveVerifier(ReflectiveVerifier.Config(alpha=alpha, prompt=(), prefix=1, **options))


def probes(tokens, *, seed=0):
    """Zr depends on all that was drafted: the s row, then the copy without its end."""
    mixed = hash((tokens, seed)) % 2**31
    return 2.0 * torch.randn(len(tokens), V, dtype=torch.float64, generator=torch.Generator().manual_seed(mixed))


def laws(pair, tokens, *, probe=True, greedy=False, stop_ids=frozenset()):
    logits = torch.stack([pair.p(tokens[:k]).log() for k in range(len(tokens) + 1)])
    return Laws(
        logits,
        greedy=greedy,
        positions=range(5, 6 + len(tokens)),
        process=lambda raw_MV, rows: raw_MV,
        stop_ids=stop_ids,
        probe_logits_PV=probes(tokens) if probe else None,
    )


def chain(pair, tokens, kind="sampled"):
    if kind == "point":
        return Draft(TokenTree(tokens), PointMass())
    q_KV = torch.stack([pair.q(tokens[:k]) for k in range(len(tokens))])
    return Draft(TokenTree(tokens), Sampled(q_KV, tuple(range(len(tokens)))))


def chains(pair, length):
    for tokens in itertools.product(range(V), repeat=length):
        weight = math.prod(float(pair.q(tokens[:k])[tokens[k]]) for k in range(length))
        if weight:
            yield weight, tokens


def first_token_law(verifier, draft, target):
    e_V = torch.zeros(V, dtype=torch.float64)
    for weight, verdict in verdicts(verifier, draft, target):
        e_V[draft.tree.tokens[0] if verdict.path else verdict.extra] += weight
    return e_V


def test_logits_are_mixed_not_probabilities():
    pair, tokens = TablePair(V, 1), (0, 2)
    target, verifier = laws(pair, tokens), rule(0.4)
    mixed = verifier.mixed(chain(pair, tokens), target)
    assert set(mixed) == {0, 1}
    zr_PV = probes(tokens)
    for row in (0, 1):
        geometric_V = pair.p(tokens[:row]) ** 0.6 * zr_PV[row].softmax(-1) ** 0.4
        arithmetic_V = 0.6 * pair.p(tokens[:row]) + 0.4 * zr_PV[row].softmax(-1)
        found_V = mixed[row].double().softmax(-1)
        assert torch.allclose(found_V, geometric_V / geometric_V.sum(), atol=1e-6)
        assert total_variation(found_V, arithmetic_V) > 0.01


@pytest.mark.parametrize("name", [each for each in RULES if each not in ("match", "ratio", "recursive")])
@pytest.mark.parametrize("kind", ["sampled", "point"])
def test_alpha_0_with_the_probe_forced_in_is_the_plain_rule_bit_for_bit(name, kind):
    plain = catalog.find(name, "verifier").load()()
    forced = rule(0.0, rule=name)
    if kind == "point" and PointMass not in plain.laws:
        return
    for seed, tokens in enumerate(itertools.product(range(V), repeat=2)):
        pair = TablePair(V, seed, "peaked")
        ours = forced.verify(chain(pair, tokens, kind), laws(pair, tokens), Streams(seed))
        theirs = plain.verify(chain(pair, tokens, kind), laws(pair, tokens, probe=False), Streams(seed))
        assert (ours.path, ours.extra) == (theirs.path, theirs.extra)


@pytest.mark.parametrize("name", ["recursive", "ratio", "match"])
@pytest.mark.parametrize("greedy", [False, True])
def test_alpha_0_of_a_lossless_rule_costs_nothing(name, greedy):
    plain, forced = catalog.find(name, "verifier").load()(), rule(0.0, rule=name)
    for seed, tokens in enumerate(itertools.product(range(V), repeat=3)):
        pair = TablePair(V, seed, "zeros")
        kind = "point" if greedy else "sampled"
        if not greedy and min(float(pair.q(tokens[:k])[tokens[k]]) for k in range(3)) == 0:
            continue
        ours = forced.verify(chain(pair, tokens, kind), laws(pair, tokens, greedy=greedy), Streams(seed))
        theirs = plain.verify(chain(pair, tokens, kind), laws(pair, tokens, probe=False, greedy=greedy), Streams(seed))
        assert (ours.path, ours.extra) == (theirs.path, theirs.extra)
        assert ours.distortions == pytest.approx((0.0,) * (len(ours.path) + 1), abs=1e-6)


@pytest.mark.parametrize("name", [each for each in RULES if each != "match"])
def test_the_distribution_given_a_draft_sums_over_its_verdicts(name):
    plain = catalog.find(name, "verifier").load()()
    for seed in range(4):
        pair = TablePair(V, seed)
        for _, tokens in chains(pair, 1):
            draft = chain(pair, tokens)
            expected_V = first_token_law(plain, draft, laws(pair, tokens, probe=False))
            assert torch.allclose(law_given(plain, draft, pair.p(()).log()), expected_V, atol=1e-9)


@pytest.mark.covering(1)
@pytest.mark.parametrize("style", ["flat", "peaked", "zeros", "equal"])
@pytest.mark.parametrize("name", ["recursive", "ratio", "typical"])
def test_the_meter_is_the_distance_given_the_draft_and_never_flatters(style, name):
    """Per draft: TV and KL between the enumerated distributions of this rule and of exact verification. In the mean
    over drafts: at least the distance of the emitted distribution from p."""
    pair, verifier = TablePair(V, 2, style), rule(0.6, rule=name)
    mean_V, charged = torch.zeros(V, dtype=torch.float64), 0.0
    for weight, tokens in chains(pair, 2):
        draft, target = chain(pair, tokens), laws(pair, tokens)
        e_V = first_token_law(verifier, draft, target)
        exact_V = first_token_law(RecursiveVerifier(), draft, laws(pair, tokens, probe=False))
        costs = {(verdict.distortions[0], verdict.divergences[0]) for _, verdict in verdicts(verifier, draft, target)}
        ((cost, kl),) = costs  # known before anything is drawn
        assert cost == pytest.approx(total_variation(e_V, exact_V), abs=1e-6)
        assert kl == pytest.approx(divergence(e_V, exact_V), abs=1e-5)
        mean_V += weight * e_V
        charged += weight * cost
    assert charged >= total_variation(mean_V, pair.p(())) - 1e-6
    assert charged > 0.01


def test_a_residual_from_the_unmixed_distribution_is_caught():
    """The planted mistake of the specification: test by the mix, resample by p."""

    class Wrong(ReflectiveVerifier):
        def verify_within(self, draft, target, rng, spent):
            verdict = super().verify_within(draft, target, rng, spent)
            if verdict.path:
                return verdict
            left_V = (target.p_at(0) - draft.law.q_at(0)).clamp(min=0)
            return type(verdict)((), rng.categorical("again", left_V), verdict.distortions, verdict.divergences)

    worst, wrong = 0.0, Wrong(ReflectiveVerifier.Config(alpha=1.0, prompt=(), prefix=1))
    for seed in range(6):
        pair = TablePair(V, seed)
        for _, tokens in chains(pair, 1):
            draft, target = chain(pair, tokens), laws(pair, tokens)
            exact_V = first_token_law(RecursiveVerifier(), draft, laws(pair, tokens, probe=False))
            (cost, *_) = {verdict.distortions[0] for _, verdict in verdicts(wrong, draft, target)}
            worst = max(worst, abs(total_variation(first_token_law(wrong, draft, target), exact_V) - cost))
    assert worst > 0.01


@pytest.mark.parametrize("greedy", [False, True])
def test_a_budget_of_nothing_is_exact_verification_and_any_budget_is_kept(greedy):
    for seed in range(6):
        pair = TablePair(V, seed)
        for _, tokens in chains(pair, 2):
            kind = "point" if greedy else "sampled"
            draft, target = chain(pair, tokens, kind), laws(pair, tokens, greedy=greedy)
            strict = rule(0.6, max_distortion=0.0).verify(draft, target, Streams(seed))
            plain = RecursiveVerifier().verify(draft, laws(pair, tokens, probe=False, greedy=greedy), Streams(seed))
            assert (strict.path, strict.extra) == (plain.path, plain.extra)
            assert strict.distortion == 0.0
            spent = Metrics(num_tokens=3, distortion_sum=0.1)
            some = rule(0.6, max_distortion=0.2).verify_within(draft, target, Streams(seed), spent)
            for count in range(1, len(some.distortions) + 1):
                assert 0.1 + sum(some.distortions[:count]) <= 0.2 * (3 + count) + 1e-9


def test_temperature_0_costs_one_where_the_token_is_not_the_argmax():
    found = set()
    for seed in range(12):
        pair = TablePair(V, seed)
        for tokens in itertools.product(range(V), repeat=2):
            target = laws(pair, tokens, greedy=True)
            verdict = rule(0.7).verify(chain(pair, tokens, "point"), target, Streams(0))
            out = [*(tokens[node] for node in verdict.path), verdict.extra]
            expected = tuple(float(token != target.best[row]) for row, token in enumerate(out))
            assert verdict.distortions == expected
            found |= set(expected)
            if len(verdict.path) == 2:
                assert verdict.extra == target.best[2]  # the bonus is the target's own
    assert found == {0.0, 1.0}


@pytest.mark.parametrize("greedy", [False, True])
def test_a_token_that_ends_the_request_needs_the_targets_own_argmax(greedy):
    verifier = rule(1.0)
    for seed in range(8):
        pair = TablePair(V, seed)
        for tokens in itertools.product(range(V), repeat=2):
            target = laws(pair, tokens, greedy=greedy, stop_ids=frozenset({1}))
            mixed = verifier.mixed(chain(pair, tokens, "point"), target)
            for row in (0, 1):
                ends = tokens[row] == 1 or (greedy and int(probes(tokens)[row].argmax()) == 1)
                assert (row in mixed) == (not ends or int(pair.p(tokens[:row]).argmax()) == 1)


def test_without_probe_rows_the_plain_rule_decides():
    pair, tokens = TablePair(V, 3), (0, 1)
    ours = rule(0.9).verify(chain(pair, tokens), laws(pair, tokens, probe=False), Streams(4))
    theirs = RecursiveVerifier().verify(chain(pair, tokens), laws(pair, tokens, probe=False), Streams(4))
    assert ours == theirs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha=-0.1"), ({"alpha": 1.1}, "alpha=1.1"), ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": True}, "alpha=True"), ({"alpha": "much"}, "alpha='much'"), ({"rule": "block"}, "looks ahead"),
        ({"rule": "typicle"}, "rule='typicle'"), ({"prefix": -1}, "prefix=-1"), ({"prefix": 300}, "prefix=300"),
        ({"prompt": 3}, "prompt=3"), ({"prompt": "", "prefix": 0}, "something must stand"),
        ({"mix_bonus": 1}, "mix_bonus=1"), ({"max_distortion": 2}, "max_distortion=2"),
        ({"rule": "typical", "max_distortion": 0.1}, "lossy itself"),
    ],
)  # fmt: skip
def test_bad_options_are_refused_by_name_and_value(options, message):
    with pytest.raises(ConfigError, match=message):
        ReflectiveVerifier.Config(**options)


def test_every_rule_that_it_takes_decides_node_by_node():
    assert set(RULES) <= {entry.name for entry in catalog.entries("verifier")}
    assert module._EXACT.promise == "same distribution"
