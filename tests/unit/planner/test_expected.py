"""The probability that drafts are accepted, given the emitted text: enumerated, and against random runs."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from foretoken.certify.enumeration import TablePair, verdicts
from foretoken.core.draft import Draft, Sampled
from foretoken.core.laws import Laws
from foretoken.core.randomness import Streams
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.recipe import verifier_named
from foretoken.planner.expected import Start, expect, survival
from foretoken_lab.intervals import mean_interval

_SIZE = 3
_RULES = {"ratio": "ratio", "block": "block", "naive": "match"}  # `naive` is `match` with enumerable decisions


def _step(pair: TablePair, context: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[Draft, Laws]:
    contexts = [context + tokens[:place] for place in range(len(tokens) + 1)]
    logits = torch.stack([pair.p(each) for each in contexts]).log()
    q_KV = torch.stack([pair.q(each) for each in contexts[:-1]])
    draft = Draft(TokenTree(tokens), Sampled(q_KV, tuple(range(len(tokens)))))
    return draft, Laws(logits, greedy=False, positions=[len(each) for each in contexts])


def _logs(pair: TablePair, text: tuple[int, ...], begin: int, count: int) -> tuple[list[float], list[float]]:
    places = range(begin, begin + count)
    pairs = [(pair.q(text[:place])[text[place]], pair.p(text[:place])[text[place]]) for place in places]
    return [math.log(q) for q, _ in pairs], [math.log(p) for _, p in pairs]


def _worst_error(verifier: str, rule: str, seed: int) -> float:
    """The largest difference, over texts of four tokens and lengths up to three, from the formula of a rule."""
    pair = TablePair(_SIZE, seed, "peaked" if seed % 2 else "flat")
    joint = defaultdict(lambda: [0.0] * 4)  # text -> chance that it is emitted with i accepted tokens or more
    for tokens in itertools.product(range(_SIZE), repeat=3):
        weight = math.prod(float(pair.q(tokens[:place])[tokens[place]]) for place in range(3))
        draft, target = _step(pair, (), tokens)
        for chance, verdict in verdicts(verifier_named(verifier), draft, target):
            accepted = len(verdict.path)
            emitted = (*tokens[:accepted], verdict.extra)
            for rest in itertools.product(range(_SIZE), repeat=4 - len(emitted)):
                text = (*emitted, *rest)
                going_on = math.prod(float(pair.p(text[:place])[text[place]]) for place in range(len(emitted), 4))
                for place in range(accepted + 1):
                    joint[text][place] += weight * chance * going_on
    worst = 0.0
    for text, masses in joint.items():
        assert masses[0] == pytest.approx(math.exp(sum(_logs(pair, text, 0, 4)[1])), abs=1e-12)
        for place, chance in enumerate(survival(rule, *_logs(pair, text, 0, 3)), start=1):
            worst = max(worst, abs(masses[place] / masses[0] - chance))
    return worst


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("verifier", list(_RULES))
def test_acceptance_given_the_text_is_that_of_the_formula(verifier: str, seed: int) -> None:
    """For each text of four tokens, so that the tokens after the draft do not matter."""
    assert _worst_error(verifier, _RULES[verifier], seed) < 1e-12


def test_the_product_of_ratios_is_not_the_formula_of_block() -> None:
    assert _worst_error("block", "ratio", 1) > 1e-3


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_steps_of_random_runs_lie_in_the_interval_of_the_expectation(rule: str) -> None:
    """A draft that is made worse leaves it."""
    pair, count, length = TablePair(_SIZE, 6), 10, 3
    differences: list[float] = []
    worse: list[float] = []
    for seed in range(200):
        rng, text, steps = Streams(seed), (0,), 0
        while len(text) <= count:
            tokens = text
            for _ in range(length):
                tokens = (*tokens, rng.categorical("draft", pair.q(tokens)))
            draft, target = _step(pair, text, tokens[len(text) :])
            verdict: Verdict = verifier_named(rule).verify(draft, target, rng)
            text = (*text, *(draft.tree.tokens[node] for node in verdict.path), verdict.extra)
            steps += 1
        text = text[: count + 1]
        log_q, log_p = _logs(pair, text, 1, count)
        starts = [Start(length, tuple(log_q[place : place + length])) for place in range(count)]
        differences.append(steps - expect(starts, [0.0, *log_p], length, rule, 0).num_steps)
        spoilt = [Start(length, tuple(each - 0.2 for each in start.log_q)) for start in starts]
        worse.append(steps - expect(spoilt, [0.0, *log_p], length, rule, 0).num_steps)
    for values, inside in ((differences, True), (worse, False)):
        interval = mean_interval(values, 0.99)[1]
        assert interval is not None
        assert (interval[0] <= 0.0 <= interval[1]) == inside
