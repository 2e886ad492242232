"""Each rule's acceptance against its own enumeration, never above the optimum of its scheme, and equal where it is."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from foretoken import catalog
from foretoken.certify.enumeration import STYLES, TablePair, step_law
from foretoken.core.errors import ConfigError
from foretoken.verifiers.kseq import optimal_rho
from foretoken_lab.studies.acceptance import rules as acceptance
from foretoken_lab.studies.acceptance.optimal import optimal_acceptance
from foretoken_lab.studies.acceptance.rules import RULES, rule_acceptance, rules_for

DISTINCT = "without_replacement"


def pair(seed, size, spread=1.5, rows=6):
    generator = torch.Generator().manual_seed(seed)
    p_BV, q_BV = torch.softmax(
        spread * torch.randn(2, rows, size, generator=generator, dtype=torch.float64), dim=-1
    ).unbind()
    p_BV[0], q_BV[1] = torch.eye(size)[0], torch.eye(size)[1]
    q_BV[2] = p_BV[2]
    if size > 3:
        p_BV[3, :2], q_BV[4, 1:] = 0.0, q_BV[4, 1:].sum() / (size - 1)
        p_BV[3] /= p_BV[3].sum()
    return p_BV, q_BV


def draws(q, n, distinct):
    """Every draft tuple with its probability and the distribution that each of its tokens was drawn from."""
    support = [i for i in range(len(q)) if q[i] > 0]
    n = min(n, len(support)) if distinct else n
    for x in itertools.permutations(support, n) if distinct else itertools.product(support, repeat=n):
        chance, laws = 1.0, []
        for j in range(n):
            gone = set(x[:j]) if distinct else set()
            rest = math.fsum(q[i] for i in support if i not in gone)
            laws.append([0.0 if i in gone else q[i] / rest for i in range(len(q))])
            chance *= laws[-1][x[j]]
        yield x, chance, laws


def recursive_of(p, q, n, distinct):
    total = 0.0
    for x, chance, laws in draws(q, n, distinct):
        left, reach = list(p), 1.0
        for token, law in zip(x, laws, strict=True):
            stands = min(1.0, left[token] / law[token])
            total += chance * reach * stands
            reach *= 1.0 - stands
            left = [max(0.0, a - b) for a, b in zip(left, law, strict=True)]
            mass = math.fsum(left)
            if mass <= 1e-15 or reach <= 0.0:
                break
            left = [a / mass for a in left]
    return total


def naive_of(p, q, n, distinct):
    return math.fsum(chance * math.fsum(p[i] for i in set(x)) for x, chance, _ in draws(q, n, distinct))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_closed_forms_are_what_enumeration_gives(n):
    p_BV, q_BV = pair(1, 5)
    for name, reference in (("recursive", recursive_of), ("naive", naive_of)):
        found_B = rule_acceptance(p_BV, q_BV, n, name, "iid")
        for p_V, q_V, found in zip(p_BV.tolist(), q_BV.tolist(), found_B.tolist(), strict=True):
            assert found == pytest.approx(reference(p_V, q_V, n, False), abs=1e-10)


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(("name", "reference"), [("recursive", recursive_of), ("naive", naive_of)])
def test_prefixes_listed_or_sampled_average_to_enumeration(monkeypatch, name, reference, n, listed):
    if not listed:
        monkeypatch.setattr(acceptance, "_LISTED", 0)
    p_BV, q_BV = pair(2, 5)
    found_B = rule_acceptance(p_BV, q_BV, n, name, DISTINCT, num_samples=1 if listed else 4000)
    for p_V, q_V, found in zip(p_BV.tolist(), q_BV.tolist(), found_B.tolist(), strict=True):
        assert found == pytest.approx(reference(p_V, q_V, n, True), abs=1e-10 if listed or n == 1 else 1.2e-2)


def test_a_seed_gives_the_same_average():
    p_BV, q_BV = pair(3, 2000)
    first, again = (rule_acceptance(p_BV, q_BV, 3, "recursive", DISTINCT, num_samples=8) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [4, 12, 200])
def test_no_rule_exceeds_the_optimum_of_its_scheme(n, size):
    for seed, spread in ((4, 0.3), (5, 2.0), (6, 6.0)):
        p_BV, q_BV = pair(seed, size, spread)
        for rule in rules_for(n):
            slack = 1e-8 if not rule.sampled or size == 4 or n == 1 else 2e-2
            bound_B = optimal_acceptance(p_BV, q_BV, n, rule.scheme)
            rate_B = rule_acceptance(p_BV, q_BV, n, rule.name, rule.scheme, num_samples=200)
            assert (rate_B <= bound_B + slack).all(), (rule.name, rule.scheme)
            if rule.name in ("greedy_draft", "spechub", "transport", "ratio") or rule.scheme == "topk":
                assert torch.allclose(rate_B, bound_B)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_kseq_keeps_its_guarantee(n):
    p_BV, q_BV = pair(7, 60)
    bound_B = optimal_acceptance(p_BV, q_BV, n, "iid")
    rate_B = rule_acceptance(p_BV, q_BV, n, "kseq", "iid")
    assert (rate_B >= (1 - (1 - 1 / n) ** n) * bound_B - 1e-9).all()
    rho_B, beta_B = optimal_rho(p_BV, q_BV, torch.full((len(p_BV),), n))
    assert ((rho_B >= 1) & (rho_B <= n)).all()
    mass_B = 1 - (1 - beta_B) ** n
    assert (mass_B <= rho_B * beta_B + 1e-12).all(), "the residual would be negative"
    # no smaller rho is valid: the accepted mass of a token would exceed p
    assert torch.allclose(mass_B, rho_B * beta_B, atol=1e-8) or n == 1


def test_equal_distributions_are_always_accepted():
    p_BV = torch.softmax(torch.randn(3, 30, generator=torch.Generator().manual_seed(8), dtype=torch.float64), -1)
    for name, scheme in (("recursive", "iid"), ("recursive", DISTINCT), ("kseq", "iid"), ("transport", DISTINCT)):
        rate_B = rule_acceptance(p_BV, p_BV, 1, name, scheme)
        assert torch.allclose(rate_B, torch.ones(3, dtype=torch.float64))


def test_every_pair_of_the_table_is_there_once():
    pairs = [(rule.name, rule.scheme) for rule in RULES]
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(
    ("n", "rule", "scheme", "message"),
    [
        (2, "kseq", DISTINCT, "cannot honour drafts of scheme 'without_replacement'.*independent draws"),
        (2, "greedy_draft", "iid", "use it with greedy"),
        (2, "spechub", "iid", "use it with hub"),
        (2, "recursive", "greedy", "use it with iid, without_replacement, topk"),
        (2, "ratio", "iid", "defined for 1 only"),
        (2, "recursiv", "iid", "did you mean 'recursive'"),
        (2, "recursive", "idd", "did you mean 'iid'"),
        (9, "recursive", "iid", "above the vocabulary"),
        (0, "recursive", "iid", "num_drafts=0"),
    ],
)
def test_a_rule_that_cannot_honour_the_draft_is_refused(n, rule, scheme, message):
    p_V = torch.tensor([0.5, 0.25, 0.25])
    with pytest.raises(ConfigError, match=message):
        rule_acceptance(p_V, p_V, n, rule, scheme)


def test_bad_distributions_and_sample_counts_are_refused():
    p_V = torch.tensor([0.5, 0.25, 0.25])
    with pytest.raises(ConfigError, match="sums to"):
        rule_acceptance(p_V, p_V * 0.9, 2, "kseq", "iid")
    with pytest.raises(ConfigError, match="num_samples=0"):
        rule_acceptance(p_V, p_V, 2, "recursive", DISTINCT, num_samples=0)


KIND_OF = {"iid": "sampled", DISTINCT: "without", "greedy": "top", "hub": "hub"}


@pytest.mark.covering(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.scheme in KIND_OF], ids=lambda rule: f"{rule.name}-{rule.scheme}"
)
def test_the_engines_verifiers_accept_what_the_formulas_say(rule, style):
    verifier = catalog.find(rule.name, "verifier").load()()
    for n in (1, 2, 3):
        if not rule.takes(n):
            continue
        table = TablePair(4, seed=n, style=style)
        found = step_law(verifier, table, (-1,) * n, KIND_OF[rule.scheme], length=1).accepted
        said = rule_acceptance(table.p(()), table.q(()), n, rule.name, rule.scheme)
        assert found == pytest.approx(float(said), abs=3e-8)
