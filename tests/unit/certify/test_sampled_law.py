"""The two-sample test must fail for a biased engine, for one without power, and for an unsound set-up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise

import pytest

from foretoken.certify import sampled_law as part
from foretoken.certify.certificate import ALPHA
from foretoken.certify.on_models import SETTINGS
from foretoken.certify.sampled_law import LOOKS, compare, sampled_law
from foretoken.options.sampling import SamplingParams
from helpers.table_engine import engine


def test_the_sampled_test_fails_a_biased_engine() -> None:
    assert not sampled_law(engine(), engine(salt=1, tilt=0.15)).passed


def test_the_sampled_test_fails_without_power() -> None:
    # an engine that ignores the temperature: plain and recipe agree, but the contrast shows nothing
    def deaf(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        return [[1] * each.max_tokens for each in params]

    section = sampled_law(deaf, deaf, quick=True)
    assert not section.passed


def test_equal_distributions_pass_over_growing_looks_and_a_gross_bias_ends_at_the_first() -> None:
    sizes: list[int] = []

    def counted(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        sizes.append(len(params))
        return engine(salt=1)(prompts, params)

    fair = sampled_law(engine(), counted)
    assert fair.passed, fair
    assert len(fair.details["tests"]) == len(SETTINGS)
    steps = [b - a for a, b in pairwise((0, *LOOKS))]
    assert sizes == steps * len(SETTINGS)
    for test in fair.details["tests"]:
        assert [look["num_each"] for look in test["recipe"]] == list(LOOKS)
        assert len(test["contrast"]) < len(LOOKS)  # decided early, and drawn no further
    biased = sampled_law(engine(), engine(salt=1, tilt=0.5))
    assert not biased.passed
    assert [look["num_each"] for look in biased.details["tests"][0]["recipe"]] == [250]
    assert "the recipe's distribution is not plain sampling's" in biased.summary


def test_each_look_has_its_share_of_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "LOOKS", (10, 20, 30, 40))
    shares = []
    for p_value in (ALPHA / 4 * 0.99, ALPHA / 4 * 1.01):
        found = {"statistic": 1.0, "df": 3, "where": "token 2", "p_value": p_value}
        monkeypatch.setattr(part, "compare", lambda first, second, found=found: found)
        tests = sampled_law(engine(), engine(salt=1)).details["tests"]
        shares.append([len(test["recipe"]) for test in tests])
    assert shares == [[1] * 5, [4] * 5]


def test_the_null_bracket_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()

    def restless(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        return engine(tilt=0.5 * (next(calls) % 2))(prompts, params)  # plain, then null of one setting

    section = sampled_law(restless, engine(), quick=True)
    assert not section.passed
    assert "plain sampling differs from itself" in section.summary


def test_false_alarms_over_all_looks_are_rare() -> None:
    # at a level of a tenth instead of ALPHA, so that alarms can be counted
    level, alarms, runs = 0.1, 0, 60
    for run in range(runs):
        params = [SamplingParams(seed=seed, temperature=1.0, max_tokens=6) for seed in range(400)]
        first, second = (engine(salt=2 * run + arm)([""] * 400, params) for arm in (0, 1))
        first, second = ([tuple(ids[:5]) for ids in sample] for sample in (first, second))  # type: ignore[misc]
        looks = [compare(first[:size], second[:size])["p_value"] for size in (100, 200, 400)]  # type: ignore[arg-type]
        alarms += min(looks) <= level / len(looks)
    assert alarms <= 12  # binomial with 0.1: 12 or fewer with probability 0.99; Bonferroni has some in reserve
