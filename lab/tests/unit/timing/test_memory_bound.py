"""The memory-bound speed-up, against the figures that VocabTrim publishes for EAGLE on Llama-3.2-3B."""

from __future__ import annotations

import pytest

from foretoken_lab.timing.memory_bound import memory_bound_speedup

_D, _V, _KV, _MLP, _TARGET = 3072, 128_256, 1024, 8192, 3_212_749_824
_LAYER = 2 * _D * _D + 2 * _D * _KV + 3 * _D * _MLP
_OUTSIDE_HEAD = _V * _D + 2 * _D * _D + _LAYER  # embedding, projection of feature and token, one layer


@pytest.mark.parametrize(
    ("rows", "tokens_per_step", "published", "within"),
    [(128_256, 3.63, 1.70, 0.01), (65_536, 3.54, 1.83, 0.03), (32_975, 3.43, 1.95, 0.01), (16_384, 3.25, 1.90, 0.01)],
)
def test_published_figures_are_those_of_four_passes_and_of_all_parameters(
    rows: int, tokens_per_step: float, published: float, within: float
) -> None:
    cost = (_OUTSIDE_HEAD + rows * _D) / _TARGET
    assert memory_bound_speedup(tokens_per_step, cost, 4) == pytest.approx(published, rel=within)
    assert memory_bound_speedup(tokens_per_step, cost, 6) != pytest.approx(published, rel=0.05)


def test_the_costs_of_the_reconstruction() -> None:
    costs = [(_OUTSIDE_HEAD + rows * _D) / _TARGET for rows in (128_256, 32_975, 16_384)]
    assert costs == pytest.approx([0.2825, 0.191, 0.176], abs=5e-4)


def test_plain_decoding_is_1() -> None:
    assert memory_bound_speedup(1.0, 0.3, 0) == 1.0
