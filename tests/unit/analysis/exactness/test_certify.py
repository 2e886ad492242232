"""A certificate must fail when any part does. Stub engines stand in for the real model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise

import pytest
import torch

from foretoken.analysis.exactness import certify as certificates
from foretoken.analysis.exactness.certify import (
    ALPHA,
    Certificate,
    Section,
    closed_form,
    compare,
    greedy_text,
    same_stream,
    sampled_law,
    teeth,
)
from foretoken.analysis.exactness.enumeration import one_thread
from foretoken.analysis.exactness.own_checks import LenientTarget, batch_differences, sampler_differences
from foretoken.analysis.exactness.plain_rules import PlainRatio
from foretoken.analysis.exactness.teeth import TEETH, SameNoise, Tooth
from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.sampling import SamplingParams
from foretoken.core.verdict import Verdict
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.greedy import GreedyVerifier
from foretoken.verifiers.match import MatchVerifier
from foretoken.verifiers.recursive import RecursiveVerifier

Generate = Callable[[Sequence[str], Sequence[SamplingParams]], list[list[int]]]


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def engine(salt: int = 0, tilt: float = 0.0) -> Generate:
    """Tokens of a law over six tokens that depends on temperature; ``tilt`` moves mass to token 0 after the first."""

    def generate(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        outputs = []
        for each in params:
            rng = random.Random(f"{salt} {each.seed}")
            law = [0.4 ** (i / max(each.temperature, 0.05)) for i in range(6)]
            tokens = rng.choices(range(6), law)
            for _ in range(each.max_tokens - 1):
                tokens.append(0 if rng.random() < tilt else rng.choices(range(6), law)[0])
            outputs.append(tokens)
        return outputs

    return generate


def test_sampled_law_passes_equal_laws_and_fails_a_biased_engine() -> None:
    good = sampled_law(engine(), engine(salt=1))
    assert good.passed, good
    assert len(good.details["tests"]) == len(certificates.SETTINGS)
    assert not sampled_law(engine(), engine(salt=1, tilt=0.15)).passed


def test_sampled_law_fails_without_power() -> None:
    # an engine that ignores the temperature: plain and recipe agree, but the contrast shows nothing
    def deaf(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        return [[1] * each.max_tokens for each in params]

    section = sampled_law(deaf, deaf, quick=True)
    assert not section.passed


def test_looks_grow_and_a_gross_bias_ends_at_the_first() -> None:
    sizes: list[int] = []

    def counted(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        sizes.append(len(params))
        return engine(salt=1)(prompts, params)

    fair = sampled_law(engine(), counted)
    assert fair.passed, fair
    steps = [b - a for a, b in pairwise((0, *certificates.LOOKS))]
    assert sizes == steps * len(certificates.SETTINGS)
    for test in fair.details["tests"]:
        assert [look["num_each"] for look in test["recipe"]] == list(certificates.LOOKS)
        assert len(test["contrast"]) < len(certificates.LOOKS)  # told apart early, and drawn no further
    biased = sampled_law(engine(), engine(salt=1, tilt=0.5))
    assert not biased.passed
    assert [look["num_each"] for look in biased.details["tests"][0]["recipe"]] == [250]
    assert "the recipe's law is not plain sampling's" in biased.summary


def test_each_look_has_its_share_of_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for p_value in (ALPHA / 4 * 0.99, ALPHA / 4 * 1.01):
        found = {"statistic": 1.0, "df": 3, "where": "token 2", "p_value": p_value}
        monkeypatch.setattr(certificates, "compare", lambda first, second, found=found: found)
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


def test_greedy_text_and_same_stream_report_the_first_difference() -> None:
    assert greedy_text(engine(), engine(), quick=True).passed
    assert same_stream(engine(), engine(), quick=True).passed
    other = same_stream(engine(), engine(salt=1), quick=True)
    assert not other.passed
    assert {"prompt", "position", "plain", "speculative"} <= set(other.details["differences"][0])

    def shortened(prompts: Sequence[str], params: Sequence[SamplingParams]) -> list[list[int]]:
        return [tokens[:5] for tokens in engine()(prompts, params)]

    assert greedy_text(engine(), shortened, quick=True).details["differences"][0]["position"] == 5


def test_closed_form_passes_the_rules_and_fails_a_biased_one() -> None:
    section = closed_form([GreedyVerifier(), BlockVerifier(), MatchVerifier()], quick=True)
    assert section.passed, section
    assert section.details["block"]["sampled"]["max_error"] < 1e-12
    assert "not enumerable" in section.details["match"]["note"]
    assert not closed_form([TEETH[0].verifier], quick=True).passed


def test_a_biased_match_rule_is_caught_over_seeds() -> None:
    class Biased(SameNoise):
        name = "match"

    assert not closed_form([Biased()], quick=True).passed


def test_a_bias_of_the_batched_decision_is_caught() -> None:
    class LenientAbreast(RecursiveVerifier):
        def verify_batch(self, drafts, targets, rngs):  # type: ignore[no-untyped-def]
            if len(drafts) > 1:
                lenient = LenientTarget(RecursiveVerifier())
                return [lenient.verify(*each) for each in zip(drafts, targets, rngs, strict=True)]
            return super().verify_batch(drafts, targets, rngs)

    assert batch_differences(RecursiveVerifier()) == 0
    assert batch_differences(LenientAbreast()) > 0
    assert not closed_form([LenientAbreast()], quick=True).passed


@pytest.mark.parametrize("filtered", [False, True])
def test_a_bias_of_the_sampler_in_match_is_caught(filtered: bool) -> None:
    """0.05 nats for one token, in every row, or in those alone that a filter has been over."""

    class Tilted(MatchVerifier):
        def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
            logits_MV = target.logits_MV.clone()
            if not filtered or bool(torch.isinf(logits_MV).any()):
                logits_MV[:, 0] += 0.05
            tilted = Laws(logits_MV, greedy=target.greedy, positions=target.positions)
            return super().verify(draft, tilted, rng)

    assert sampler_differences(MatchVerifier()) == 0
    assert sampler_differences(Tilted()) > 0
    assert not closed_form([Tilted()], quick=True).passed


def test_the_teeth_are_those_of_the_recipe_s_own_rules() -> None:
    section = teeth([GreedyVerifier(), BlockVerifier(), MatchVerifier()])
    assert section.passed, section
    assert set(section.details["bias"]) - {tooth.name for tooth in TEETH} == {
        "block with half the temperature",
        "block with a draft a tenth likelier",
        "match with half the temperature",
    }


def test_the_certificate_fails_if_a_tooth_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert teeth().passed
    monkeypatch.setattr(certificates, "TEETH", (*TEETH[:1], Tooth("not biased at all", PlainRatio())))
    section = teeth()
    assert not section.passed
    assert section.details["missed"] == ["not biased at all"]


def test_certificate_reads_as_text_and_as_json() -> None:
    sections = (Section("teeth", True, "fine"), Section("greedy_text", False, "2 of 3"))
    certificate = Certificate("ngram", {"verifier": "match"}, "zoo:base", "same stream", True, sections, 1.25)
    assert not certificate.passed
    found = json.loads(json.dumps(certificate.to_dict()))
    assert found["passed"] is False
    assert found["sections"][1]["name"] == "greedy_text"
    assert str(certificate).splitlines() == [
        "ngram verifier=match on zoo:base: promises same stream",
        "  pass  teeth        fine",
        "  FAIL  greedy_text  2 of 3",
        "FAILED in 1.2 s",
    ]
