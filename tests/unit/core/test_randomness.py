"""Noise that is a function of (seed, position, token), and streams that do not disturb each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from foretoken.core.randomness import (
    PURPOSES,
    Streams,
    _invert,
    _invert_rows,
    _mix32,
    categorical_rows,
    exponential,
    gumbel,
    mix64,
)

V = 8192


def test_mix64_is_the_published_splitmix64() -> None:
    """Its first three numbers from the state 0, which moves on by the golden ratio."""
    states = [number * 0x9E3779B97F4A7C15 for number in range(3)]
    assert [mix64(state) for state in states] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix64(2**64 + 5) == mix64(5)


def test_mix32_is_murmur3_s() -> None:
    def finaliser(value: int) -> int:
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            value = (value ^ (value >> shift)) * factor % 2**32
        return value

    values = [0, 1, 2, 77, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
    given = torch.tensor([value - 2**32 if value >= 2**31 else value for value in values], dtype=torch.int32)
    found = _mix32(given.clone())
    assert [value % 2**32 for value in found.tolist()] == [finaliser(value) for value in values]
    assert finaliser(1) == 0x514E28B7  # as published


def test_what_a_seed_gives_is_the_same_in_every_version() -> None:
    """Written down once: a seeded text is to come out again after an update."""
    noise = exponential(7, [0, 5, 1_000_003], 20_000)
    assert noise[[0, 0, 1, 2], [0, 19_999, 77, 4096]].tolist() == pytest.approx(
        [0.33964306, 0.13504697, 0.80560219, 0.17651574], rel=1e-6
    )
    streams = Streams(7)
    drawn = [streams.bernoulli(purpose, [0.5] * 8) for purpose in PURPOSES]
    assert ["".join("01"[bit] for bit in bits) for bits in drawn] == ["11110101", "01001011", "00100111", "10000100"]
    weights = torch.arange(1, 5001, dtype=torch.float64)
    assert [streams.categorical("bonus", weights) for _ in range(3)] == [2605, 4773, 1519]


def test_gumbel_follows_its_distribution() -> None:
    noise = gumbel(11, range(40), V)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.02)
    assert stats.kstest(noise[:6].flatten().numpy(), "gumbel_r").pvalue > 1e-3


def test_exponential_follows_its_distribution() -> None:
    assert stats.kstest(exponential(5, range(6), V).flatten().numpy(), "expon").pvalue > 1e-3


def test_noise_is_finite_and_positive_far_into_the_tail() -> None:
    # one value in 2**24 used to round to zero: that token won the race whatever its probability
    for seed in range(8):
        noise = exponential(seed, range(400), V)
        assert noise.min() > 0.0
        assert torch.isfinite(noise).all()


def test_small_noise_keeps_its_resolution() -> None:
    # rare tokens win only with tiny noise: the count below 1e-6 must be right, not rounded to a coarse grid
    small = sum(int((exponential(seed, range(400), V) < 1e-6).sum()) for seed in range(12))
    expected = 12 * 400 * V * 1e-6
    assert abs(small - expected) < 4.5 * math.sqrt(expected)


def test_rows_are_unrelated() -> None:
    noise = gumbel(3, range(64), V)
    correlation = torch.corrcoef(noise)
    off_diagonal = correlation[~torch.eye(64, dtype=torch.bool)]
    assert off_diagonal.abs().max().item() < 5.5 / math.sqrt(V)
    # nor shifted copies of each other
    spectrum = torch.fft.rfft(noise - noise.mean(1, keepdim=True))
    for other in range(1, 16):
        shifted = torch.fft.irfft(spectrum[0] * spectrum[other].conj(), n=V) / V / (math.pi**2 / 6)
        assert shifted.abs().max().item() < 6.5 / math.sqrt(V)


def test_tokens_are_unrelated_within_a_row() -> None:
    noise = gumbel(8, range(32), V)
    for gap in (1, 2, 3, 64, 4096):
        pairs = torch.stack([noise[:, :-gap].flatten(), noise[:, gap:].flatten()])
        assert abs(torch.corrcoef(pairs)[0, 1].item()) < 5.0 / math.sqrt(pairs.shape[1])


def test_seeds_are_unrelated() -> None:
    rows = torch.cat([gumbel(seed, [7], V) for seed in range(64)])
    off_diagonal = torch.corrcoef(rows)[~torch.eye(64, dtype=torch.bool)]
    assert off_diagonal.abs().max().item() < 5.5 / math.sqrt(V)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=6), st.integers(0, 2**63 - 1), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_value_depends_on_seed_position_and_token_only(positions: list[int], seed: int, pick: int) -> None:
    at = pick % len(positions)
    alone = gumbel(seed, [positions[at]], 1000)[0]
    assert torch.equal(gumbel(seed, positions, 1000)[at], alone)
    ids = torch.tensor([0, 3, 17, 500, 999])
    assert torch.equal(gumbel(seed, positions, 1000, ids=ids)[at], alone[ids])
    assert torch.equal(gumbel(seed, [positions[at]], 700)[0], alone[:700])


def test_winning_frequencies_equal_the_probabilities() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
    winners = (p.log() + gumbel(2, range(40_000), 5)).argmax(1)
    counts = torch.bincount(winners, minlength=5).numpy()
    assert stats.chisquare(counts, p.numpy().astype("float64") / p.double().sum().item() * 40_000).pvalue > 1e-3


def test_purposes_are_separate_and_repeatable() -> None:
    plain, busy = Streams(9), Streams(9)
    for purpose in PURPOSES[:-1]:
        busy.uniform(purpose, 100)
        busy.bernoulli(purpose, [0.5] * 7)
    assert torch.equal(plain.uniform("bonus", 5), busy.uniform("bonus", 5))
    draws = [Streams(9).uniform(purpose, 4).tolist() for purpose in PURPOSES]
    assert len({tuple(draw) for draw in draws}) == len(PURPOSES)
    assert Streams(9).uniform("accept", 4).tolist() != Streams(10).uniform("accept", 4).tolist()


def test_bernoulli_keeps_certainty_and_rate() -> None:
    streams = Streams(1)
    assert streams.bernoulli("accept", []) == []
    assert all(streams.bernoulli("accept", [1.0, math.inf] * 2000))
    assert not any(streams.bernoulli("accept", [0.0, -1.0] * 2000))
    hits = sum(streams.bernoulli("accept", [0.3] * 20_000))
    assert stats.binomtest(hits, 20_000, 0.3).pvalue > 1e-3


@pytest.mark.parametrize("size", [1, 5, 2048, 2049, 5000])
def test_categorical_never_draws_a_token_without_weight(size: int) -> None:
    weights = torch.zeros(size)
    alive = sorted({0, size // 3, size - 1})
    weights[alive] = torch.tensor([0.2, 3.0, 1.0])[: len(alive)]
    streams = Streams(4)
    draws = [streams.categorical("bonus", weights) for _ in range(600)]
    assert set(draws) == set(alive)


def test_categorical_follows_unnormalised_weights_over_many_blocks() -> None:
    size = 5000
    weights = torch.rand(size, generator=torch.Generator().manual_seed(0)) ** 8 * 7
    streams = Streams(6)
    draws = torch.tensor([streams.categorical("bonus", weights) for _ in range(20_000)])
    group = torch.arange(size) % 20
    counts = torch.bincount(group[draws], minlength=20).numpy()
    share = torch.zeros(20, dtype=torch.float64).index_add_(0, group, weights.double())
    assert stats.chisquare(counts, (share / share.sum() * 20_000).numpy()).pvalue > 1e-3
    # and by place, so that a block's share is right too
    places = torch.bincount(draws // 250, minlength=20).numpy()
    share = weights.double().view(20, 250).sum(1)
    assert stats.chisquare(places, (share / share.sum() * 20_000).numpy()).pvalue > 1e-3


@pytest.mark.parametrize("size", [2048, 2049])
def test_draws_are_foreseen_and_come_so(size: int) -> None:
    """The drawn token of a flat distribution gives the uniforms: the share of all, or of the blocks and of one
    block.
    """
    streams, even_V = Streams(6), torch.ones(size)
    streams.categorical("draft", even_V)
    foreseen = streams.foreseen("draft", size, 3)
    assert streams.foreseen("draft", size, 3) == foreseen  # the stream stays where it stands
    assert len(foreseen) == 6
    for first, second in zip(foreseen[::2], foreseen[1::2], strict=True):
        drawn = streams.categorical("draft", even_V)
        if size == 2048:
            assert (drawn, second) == (int(first * size), 0.0)
        else:  # two blocks, and one token after them
            block = int(first * size / 1024)
            assert drawn == 1024 * block + int(second * min(1024, size - 1024 * block))


def test_distinct_draws_are_different_and_follow_the_weights_that_are_left() -> None:
    q_V = torch.tensor([0.5, 0.0, 0.3, 0.2])
    drawn = [tuple(Streams(seed).distinct("draft", q_V, 2)) for seed in range(4000)]
    assert all(a != b and 1 not in (a, b) for a, b in drawn)
    expected = {(a, b): float(q_V[a] * q_V[b] / (1 - q_V[a])) for a in (0, 2, 3) for b in (0, 2, 3) if a != b}
    for pair, chance in expected.items():
        assert drawn.count(pair) == pytest.approx(4000 * chance, abs=4.5 * math.sqrt(4000 * chance))
    assert Streams(3).distinct("draft", q_V, 2) == Streams(3).distinct("draft", q_V, 2)


def test_streams_go_back_to_a_mark_as_if_nothing_had_been_drawn() -> None:
    streams = Streams(3)
    streams.bernoulli("accept", [0.5] * 3)
    mark = streams.mark()
    first = [streams.uniform(purpose, 4).tolist() for purpose in PURPOSES]
    assert streams.uniform("accept", 4).tolist() != first[1]
    streams.rewind(mark)
    assert [streams.uniform(purpose, 4).tolist() for purpose in PURPOSES] == first
    untouched = Streams(3)
    assert untouched.uniform("bonus", 4).tolist() == first[PURPOSES.index("bonus")]


def test_uniforms_are_from_0_to_1() -> None:
    drawn = Streams(3).uniform("draft", 20_000)
    assert drawn.dtype == torch.float32
    assert 0.0 <= float(drawn.min()) < 0.01
    assert 0.99 < float(drawn.max()) < 1.0


@pytest.mark.parametrize("size", [1, 5, 40, 2048, 2049, 3072, 5000])
def test_rows_are_drawn_as_one_by_one(size: int) -> None:
    rng = torch.Generator().manual_seed(size)
    weights_BV = torch.rand(33, size, generator=rng) ** 6 * 3
    weights_BV[:, 1::3] = 0.0
    weights_BV[5] = 0.0
    weights_BV[5, size - 1] = 1e-30  # a lone token at the end of the last block
    for trial in range(20):
        seeds = [100 * trial + row for row in range(33)]
        rows = categorical_rows([Streams(seed) for seed in seeds], "bonus", weights_BV)
        single = [Streams(seed).categorical("bonus", weights) for seed, weights in zip(seeds, weights_BV, strict=True)]
        assert rows == single
        assert all(weights_BV[row, token] > 0 for row, token in enumerate(rows))


def test_a_stream_goes_on_where_it_was_left() -> None:
    weights_BV = torch.rand(2, 3000, generator=torch.Generator().manual_seed(0))
    together, apart = [Streams(1), Streams(2)], [Streams(1), Streams(2)]
    for _ in range(5):
        rows = categorical_rows(together, "residual", weights_BV)
        assert rows == [rng.categorical("residual", weights) for rng, weights in zip(apart, weights_BV, strict=True)]


def test_a_batch_of_one_is_a_draw() -> None:
    weights = torch.rand(3000, generator=torch.Generator().manual_seed(0))
    assert categorical_rows([Streams(5)], "bonus", weights[None]) == [Streams(5).categorical("bonus", weights)]


@pytest.mark.parametrize(
    ("weights", "draw", "token"),
    [
        ([0.0, 1.0, 1.0], 0.0, 1),  # a uniform may be 0, and a token of no weight has no share
        ([1.0, 0.0, 1.0], 0.5, 2),
        ([1.0, 3.0, 0.0], 1.0, 1),  # its product with the sum may be rounded up to the sum
        ([1.0, 1e-9, 0.0], 1.0 - 1e-10, 1),  # a running sum in float32 would not see the second one
        ([1.0, 1e-9, 0.0], 0.5, 0),
    ],
)
def test_a_uniform_falls_into_the_share_of_a_token_that_has_one(weights: list[float], draw: float, token: int) -> None:
    uniform = torch.tensor([draw], dtype=torch.float64)
    assert _invert(torch.tensor(weights), uniform) == token
    assert _invert_rows(torch.tensor([weights] * 2), uniform.repeat(2, 1)).tolist() == [token] * 2
