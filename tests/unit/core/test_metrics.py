"""The counters of a run, added up by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from foretoken.core.metrics import Metrics
from foretoken.core.verdict import Verdict


def test_nothing_yet_is_zero_not_an_error() -> None:
    empty = Metrics()
    assert empty.tokens_per_step == empty.tokens_per_second == empty.distortion == empty.kl == 0.0
    assert empty.acceptance_by_position == []
    assert empty.experts_per_step is None


def test_a_step_counts_the_accepted_tokens() -> None:
    found = Metrics()
    found.count_step(Verdict((0, 1), 5, distortions=(0.1, 0.2, 0.4), divergences=(1.0, 2.0, 4.0)), 2)
    found.count_step(Verdict((), 5, distortions=(0.8,), divergences=(8.0,)), 1)
    assert (found.num_steps, found.num_tokens) == (2, 3)
    assert found.tokens_per_step == 1.5
    assert found.distortion_sum == pytest.approx(0.1 + 0.2 + 0.8)
    assert found.kl_sum == pytest.approx(1.0 + 2.0 + 8.0)
    assert found.distortion == pytest.approx(1.1 / 3)
    assert found.kl == pytest.approx(11.0 / 3)


def test_a_draft_has_one_chance_at_each_depth() -> None:
    found = Metrics()
    found.count_draft((1, 1, 2, 3, 2), 2)
    found.count_draft((1,), 0)
    found.count_draft((), 0)
    assert (found.num_draft_tokens, found.num_accepted_tokens) == (6, 2)
    assert (found.drafted_at, found.accepted_at) == ([2, 1, 1], [1, 1, 0])
    assert found.acceptance_by_position == [0.5, 1.0, 0.0]


def test_an_undrafted_depth_has_no_acceptance() -> None:
    assert Metrics(drafted_at=[0, 2], accepted_at=[0, 1]).acceptance_by_position == [0.0, 0.5]


def test_tokens_per_second_and_experts() -> None:
    found = Metrics(num_tokens=6, seconds=2.0, experts_sum=9.0, experts_steps=2)
    assert found.tokens_per_second == 3.0
    assert found.experts_per_step == 4.5
    assert Metrics(num_tokens=6, seconds=0.5).tokens_per_second == 12.0


def test_the_share_of_the_prefix_that_was_read() -> None:
    assert Metrics().prefix_read is None
    assert Metrics(prefix_rows=8, prefix_rows_read=2.0).prefix_read == 0.25


def test_every_number_of_another_request_is_added() -> None:
    numbers = [
        each.name for each in dataclasses.fields(Metrics) if isinstance(getattr(Metrics(), each.name), int | float)
    ]
    numbers.remove("sparse")
    found = Metrics(**{name: place for place, name in enumerate(numbers)})
    found.add(Metrics(**dict.fromkeys(numbers, 100.0), sparse=True))
    assert {name: getattr(found, name) for name in numbers} == {name: 100 + place for place, name in enumerate(numbers)}
    assert found.sparse
    found.add(Metrics())
    assert found.sparse


def test_draft_nodes_are_counted_by_their_source() -> None:
    found, other = Metrics(), Metrics()
    found.count_sources(("text", "model", "text"), [0, 2])
    found.count_sources(("model",), [0])
    found.count_sources((), [0, 1])  # one source has no name
    assert found.drafted_by_source == {"text": 2, "model": 2}
    assert found.accepted_by_source == {"text": 2, "model": 1}
    other.count_sources(("model", "grammar"), [1])
    found.add(other)
    assert found.drafted_by_source == {"text": 2, "model": 3, "grammar": 1}
    assert found.accepted_by_source == {"text": 2, "model": 1, "grammar": 1}


def test_sparse_verification_does_not_know_its_distortion() -> None:
    found = Metrics(num_tokens=2, sparse=True)
    assert math.isnan(found.distortion)
    assert math.isnan(found.kl)


def test_adding_adds_everything() -> None:
    names = [
        "num_tokens",
        "num_steps",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_discarded_tokens",
        "num_moved_bytes",
        "draft_seconds",
        "verify_seconds",
        "other_seconds",
        "seconds",
        "distortion_sum",
        "kl_sum",
        "experts_sum",
        "experts_steps",
        "prefix_rows",
        "prefix_rows_read",
    ]
    total = Metrics(**{name: index + 1 for index, name in enumerate(names)}, drafted_at=[3], accepted_at=[1])
    total.add(
        Metrics(**{name: 100 * (index + 1) for index, name in enumerate(names)}, drafted_at=[2, 4], accepted_at=[1, 2])
    )
    assert [getattr(total, name) for name in names] == [101 * (index + 1) for index in range(len(names))]
    assert (total.drafted_at, total.accepted_at) == ([5, 4], [2, 2])
    assert not total.sparse
    total.add(Metrics(drafted_at=[1], accepted_at=[1], sparse=True))
    assert (total.drafted_at, total.accepted_at) == ([6, 4], [3, 2])
    assert total.sparse
    total.add(Metrics())
    assert total.sparse
