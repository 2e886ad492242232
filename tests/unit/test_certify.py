"""A certificate must fail when any part does. Stub engines stand in for the real model."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from foretoken.analysis import certify as certificates
from foretoken.analysis.certify import Certificate, Section, closed_form, greedy_text, same_stream, sampled_law, teeth
from foretoken.analysis.enumeration import one_thread
from foretoken.analysis.teeth import TEETH, PlainRatio, SameNoise, Tooth
from foretoken.core.sampling import SamplingParams
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.greedy import GreedyVerifier
from foretoken.verifiers.match import MatchVerifier

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


def test_a_suspicious_look_is_settled_by_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificates, "ALPHA", 0.9999)  # everything looks suspicious
    looks = sampled_law(engine(), engine(salt=1), quick=True).details["tests"][0]["recipe"]
    assert len(looks) == 2


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
