"""The meter of lossy rules, and the budget that it is held against."""

from __future__ import annotations

import math

import pytest
import torch

from foretoken.core.distortion import Account, divergence, emitted, price_of, total_variation
from foretoken.core.metrics import Metrics

P = torch.tensor([0.5, 0.25, 0.25, 0.0])
E = torch.tensor([0.25, 0.25, 0.5, 0.0])


def test_total_variation_and_divergence_by_hand() -> None:
    assert total_variation(E, P) == pytest.approx(0.25)
    assert total_variation(P, P) == 0.0
    assert divergence(E, P) == pytest.approx(0.25 * math.log(0.5) + 0.5 * math.log(2.0))
    assert divergence(P, P) == 0.0
    assert divergence(torch.tensor([0.5, 0.0, 0.0, 0.5]), P) == math.inf
    assert divergence(torch.tensor([1.0, 0.0, 0.0, 0.0]), P) == pytest.approx(math.log(2.0))


def test_divergence_is_never_below_zero() -> None:
    assert divergence(P * (1.0 - 1e-6), P) == 0.0


def test_what_a_token_costs_that_stands_for_certain() -> None:
    assert price_of(0.25, 1.0) == pytest.approx((0.75, math.log(4.0)))
    assert price_of(0.2, 0.4) == pytest.approx((0.5, math.log(2.0)))
    assert price_of(0.5, 0.5) == (0.0, 0.0)
    assert price_of(0.5, 0.25) == (0.0, 0.0)


def test_the_distribution_of_an_emitted_token_by_hand() -> None:
    stands_V, rest_V = torch.tensor([0.3, 0.1, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0, 0.0])
    assert emitted(stands_V, rest_V).tolist() == pytest.approx([0.3, 0.1, 0.6, 0.0])
    full_V = torch.tensor([0.6, 0.4 + 1e-6, 0.0, 0.0])  # beyond one by rounding: nothing is left, and nothing negative
    assert emitted(full_V, rest_V).tolist() == full_V.tolist()


def test_an_account_allows_the_mean_and_no_more() -> None:
    account = Account(Metrics(num_tokens=3, distortion_sum=0.2), budget=0.1)
    assert account.allows(0.2)  # 0.2 + 0.2 over 4 tokens
    assert not account.allows(0.2001)
    account.add(0.2, 0.5)
    assert account.allows(0.1)
    assert not account.allows(0.11)
    account.add(0.0, 0.25)
    assert account.allows(0.2)
    assert (account.distortions, account.divergences) == ([0.2, 0.0], [0.5, 0.25])


def test_nothing_is_allowed_once_nothing_is_left() -> None:
    account = Account(Metrics(num_tokens=1, distortion_sum=0.2), budget=0.1)
    assert not account.allows(0.0)
    assert not Account(None, 0.0).allows(0.0)
    assert Account(None, 0.1).allows(0.1)
    assert not Account(None, 0.1).allows(0.1 + 1e-9)
    assert Account(None, 0.1).allows(0.1 + 1e-13)  # sums of floats


def test_without_a_budget_everything_is_allowed() -> None:
    assert Account(None, None).allows(math.inf)
