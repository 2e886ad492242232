"""The certificate's sampled test on the real pair has power: planted bugs fail it where the sound rule passes."""

from __future__ import annotations

import pytest

from foretoken.certify import sampled_law as part
from foretoken.certify.on_models import Generate, tokens_of
from foretoken.certify.sampled_law import sampled_law
from foretoken.certify.teeth import TEETH
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Verifier
from foretoken.verifiers.ratio import RatioVerifier
from helpers.zoo_llms import with_config

LIMITS = {"max_num_seqs": 64, "max_rows_per_step": 1024}


def planted(name: str) -> Verifier:
    return next(tooth.verifier for tooth in TEETH if tooth.name == name)


def generate(verifier: Verifier | None) -> Generate:
    config = {"method": "draft_model", "model": "zoo:draft", "verifier": verifier, "num_speculative_tokens": 4}
    return tokens_of(with_config(None if verifier is None else config, **LIMITS), Metrics())


@pytest.fixture(autouse=True)
def one_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    # the peaked setting alone: a few probable tokens show a wrong distribution soonest
    monkeypatch.setattr(part, "SETTINGS", ({"temperature": 0.3, "top_p": 0.95},))


@pytest.mark.statistical
def test_a_sound_rule_passes_and_a_wrong_temperature_fails_at_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "QUICK_LOOKS", (60, 100))
    plain = generate(None)
    assert sampled_law(plain, generate(RatioVerifier()), quick=True).passed
    section = sampled_law(plain, generate(planted("temperature applied twice to p")), quick=True)
    (found,) = section.details["tests"]
    assert found["reason"] == "the recipe's distribution is not plain sampling's"
    assert [look["num_each"] for look in found["recipe"]] == [60]


@pytest.mark.slow
@pytest.mark.statistical
def test_a_forgotten_residual_fails_the_full_test() -> None:
    # a total variation of some 0.1, since this draft is refused seldom: beyond the quick test, not beyond this one
    (found,) = sampled_law(generate(None), generate(planted("residual not subtracted"))).details["tests"]
    assert found["reason"] == "the recipe's distribution is not plain sampling's"
