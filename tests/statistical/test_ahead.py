"""Drafting ahead, proved: with a guess after every draft the texts have the target's distribution, to 1e-12.

Drafter and engine run on tiny models as in test_recipe_law.py; every draw of both is enumerated, those included that
are thrown away with the draft after a wrong guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import pytest

from foretoken.certify.enumeration import ReplayedStreams
from foretoken.certify.recipe_law import TextLaw, text_law
from foretoken.core.draft import Draft
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.residual import ratio
from foretoken.core.verdict import Verdict
from foretoken.engine.llm import LLM
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.verifiers import guessed
from helpers.adapters import shelf
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import save_model
from helpers.zoo_llms import with_config

pytestmark = pytest.mark.statistical

PROMPT, TOKENS, LENGTH = [5, 40], [20, 57], 4
EXACT, CAUGHT = 1e-12, 1e-4


@cache
def model(seed: int) -> LanguageModel:
    """The target (0) and the draft (1)."""
    return load(save_model("llama", shelf() / f"pair-{seed}", seed=seed, num_hidden_layers=4), device="cpu")


def ahead(rule: str | None = None, tree: str = "chain") -> LLM:
    config = {"method": "draft_model", "model": str(model(1).source), "tree": tree, "executor": "pearl"}
    return with_config({**config, "verifier": rule} if rule else config, target=model(0))


@cache
def plain() -> TextLaw:
    return text_law(with_config(None, target=model(0)), PROMPT, TOKENS, length=LENGTH, num_nodes=0)


def error_of(llm: LLM, stops: int | None = None) -> float:
    found = text_law(llm, PROMPT, TOKENS, length=LENGTH, num_nodes=3, stops=stops)
    assert sum(found.chances.values()) == pytest.approx(1.0, abs=1e-9)
    assert found.num_drafted
    return found.distance(plain())


@pytest.mark.parametrize("stops", [None, 0], ids=["full", "stopped"])
@pytest.mark.parametrize("rule", [None, "ratio", "recursive", "kseq", "match"], ids=str)
def test_texts_follow_the_target_s_distribution(rule: str | None, stops: int | None) -> None:
    assert error_of(ahead(rule), stops) <= EXACT


def drawn_again(decide: object, verdict: Verdict, guess: Draft, target: Laws, rng: Streams) -> Verdict:
    """Planted: a refused guess may be drawn again, from the whole distribution."""
    (token,), p_V = guess.tree.tokens, target.p_at(len(verdict.path))
    stands = rng.bernoulli("accept", (ratio(float(p_V[token]), guess.law.chance(0, token)),))[0]
    return replace(verdict, extra=token if stands else rng.categorical("residual", p_V))


def test_a_refused_guess_that_may_come_again_is_seen() -> None:
    with mock.patch.object(guessed, "finish", drawn_again):
        assert error_of(ahead()) > CAUGHT


def test_a_uniform_that_is_used_twice_is_seen() -> None:
    """Planted, as in the released code: the number that a guess has passed with tests the node after it, too.

    Given that the guess passed with chance r, that number is uniform below r: chance c becomes c / r.
    """
    passed: WeakKeyDictionary[Streams, float] = WeakKeyDictionary()
    sound, fresh = guessed.finish, ReplayedStreams.bernoulli

    def finish(decide: Any, verdict: Verdict, guess: Draft, target: Laws, rng: Streams) -> Verdict:
        found = sound(decide, verdict, guess, target, rng)
        if found.extra == guess.tree.tokens[0]:
            chance = ratio(float(target.p_at(len(verdict.path))[found.extra]), guess.law.chance(0, found.extra))
            passed[rng] = min(1.0, chance)
        return found

    def bernoulli(rng: ReplayedStreams, purpose: str, chances: Sequence[float]) -> list[bool]:
        first, *others = chances
        return fresh(rng, purpose, (min(1.0, first / passed.pop(rng, 1.0)), *others))

    with mock.patch.object(guessed, "finish", finish), mock.patch.object(ReplayedStreams, "bernoulli", bernoulli):
        assert error_of(ahead("ratio")) > CAUGHT
