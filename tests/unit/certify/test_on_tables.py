"""Sound rules pass the enumeration, and rules with a planted bias do not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from foretoken.certify import on_tables
from foretoken.certify.on_tables import closed_form, teeth
from foretoken.certify.own_checks import LenientTarget, batch_differences, sampler_differences
from foretoken.certify.plain_rule import PlainRule
from foretoken.certify.teeth import TEETH, SameNoise, Tooth
from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.threads import one_thread
from foretoken.core.verdict import Verdict
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.greedy import GreedyVerifier
from foretoken.verifiers.match import MatchVerifier
from foretoken.verifiers.ratio import RatioVerifier


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


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
    class LenientAbreast(RatioVerifier):  # of all rules the quickest to enumerate
        def verify_batch(self, drafts, targets, rngs):  # type: ignore[no-untyped-def]
            if len(drafts) > 1:
                lenient = LenientTarget(RatioVerifier())
                return [lenient.verify(*each) for each in zip(drafts, targets, rngs, strict=True)]
            return super().verify_batch(drafts, targets, rngs)

    assert batch_differences(RatioVerifier()) == 0
    assert batch_differences(LenientAbreast()) > 0
    section = closed_form([LenientAbreast()], quick=True)
    assert not section.passed
    assert "decides differently for several requests together" in section.summary


class Tilted(MatchVerifier):
    """Planted: 0.05 nats for one token, in every row, or in those alone that a filter has been over."""

    def __init__(self, filtered: bool) -> None:
        super().__init__()
        self.filtered = filtered

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        logits_MV = target.logits_MV.clone()
        if not self.filtered or bool(torch.isinf(logits_MV).any()):
            logits_MV[:, 0] += 0.05
        tilted = Laws(logits_MV, greedy=target.greedy, positions=target.positions)
        return super().verify(draft, tilted, rng)


@pytest.mark.parametrize("filtered", [False, True])
def test_a_bias_of_the_sampler_in_match_is_found(filtered: bool) -> None:
    assert sampler_differences(MatchVerifier(), num_seeds=500) == 0
    assert sampler_differences(Tilted(filtered), num_seeds=500) > 0


def test_a_bias_of_the_sampler_in_match_fails_the_certificate() -> None:
    section = closed_form([Tilted(filtered=True)], quick=True)
    assert not section.passed
    assert "of 2000 seeds yield another token than their noise" in section.summary


def test_the_teeth_are_those_of_the_recipe_s_own_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_tables, "TEETH", TEETH[:2])  # each of them is tried where the enumeration is tested
    section = teeth([GreedyVerifier(), BlockVerifier(), MatchVerifier()])
    assert section.passed, section
    assert set(section.details["bias"]) - {tooth.name for tooth in TEETH[:2]} == {
        "block with half the temperature",
        "block with a draft a tenth likelier",
        "match with half the temperature",
    }


def test_the_certificate_fails_if_a_tooth_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_tables, "TEETH", (*TEETH[:1], Tooth("not biased at all", PlainRule())))
    section = teeth()
    assert not section.passed
    assert section.details["missed"] == ["not biased at all"]
