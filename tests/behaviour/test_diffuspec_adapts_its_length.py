"""The paper's adaptive length on a scripted sequence."""

from __future__ import annotations

import random

from foretoken.methods.diffuspec.drafter import AdaptiveLength


def test_the_trace_of_a_scripted_sequence() -> None:
    rule = AdaptiveLength(least=2, most=10, step=3)
    assert rule.current == 10
    trace = []
    for generated, accepted in ((10, 10), (10, 0), (4, 4), (4, 4), (8, 8)):
        rule.learn(generated, accepted)
        trace.append((rule.generated, rule.accepted, rule.current))
    assert trace == [
        (5.0, 5.0, 8),  # floor(5) + 3
        (7.5, 2.5, 7),  # acceptance fell after
        (5.75, 3.25, 5),
        (4.875, 3.625, 4),
        (6.4375, 5.8125, 6),
    ]


def test_it_stays_within_its_bounds() -> None:
    rng = random.Random(0)
    rule = AdaptiveLength(least=3, most=7, step=10)
    seen = set()
    for _ in range(300):
        rule.learn(rng.randrange(12), rng.randrange(12))
        seen.add(rule.current)
    assert seen <= set(range(3, 8))
    assert {3, 7} <= seen
