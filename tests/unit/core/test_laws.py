"""The processed distribution, against the library's logits processors and against hand-worked cases."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from foretoken.core.columns import Columns
from foretoken.core.errors import ConfigError
from foretoken.core.laws import LawMaker, Laws
from foretoken.core.repetitions import Repetitions
from foretoken.core.tree import EMPTY_TREE, ROOT, TokenTree
from foretoken.options.sampling import SamplingParams

V = 1500  # more than the candidates that top-p looks at before it sorts
ROOT_ONLY = (ROOT,)


def logits(rows: int = 4, sharpness: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * sharpness


def process(raw: torch.Tensor, prompt: tuple[int, ...] = (), **params: object) -> torch.Tensor:
    """Each row processed as a root row of its own."""
    maker = LawMaker(SamplingParams(**{"temperature": 1.0, **params}), prompt, raw.shape[-1])  # type: ignore[arg-type]
    return torch.cat([maker.process(row[None], EMPTY_TREE, ROOT_ONLY) for row in raw])


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_equals_the_library(top_p: float, sharpness: float) -> None:
    raw = logits(sharpness=sharpness)
    expected = TopPLogitsWarper(top_p)(None, raw.clone())
    found = process(raw, top_p=top_p)
    # the two add up the same masses in opposite order, so a token exactly on the border may differ
    assert int((found.isinf() != expected.isinf()).sum()) <= 1
    assert torch.equal(found[~found.isinf() & ~expected.isinf()], raw[~found.isinf() & ~expected.isinf()])


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.05, 0.5, 0.9, 0.999])
def test_top_p_of_a_large_vocabulary_equals_the_library(top_p: float, sharpness: float) -> None:
    raw = sharpness * torch.randn(3, 20_000, generator=torch.Generator().manual_seed(5))
    raw[1, :15_000] = raw[1, 0]  # a tie of most tokens
    raw[2, 7:] = -torch.inf  # what other filters left
    expected = TopPLogitsWarper(top_p)(None, raw.clone())
    found = process(raw, top_p=top_p)
    p = torch.softmax(raw, -1).double()
    kept, theirs = (p.masked_fill(each.isinf(), 0.0) for each in (found, expected))
    # they add up float32 masses one by one: what 20,000 roundings can come to, and the token on the border
    assert ((kept - theirs).sum(-1).abs() <= 20_000 * 2.0**-24 + p.amax(-1)).all()
    assert (kept.sum(-1) > 0).all()
    assert (kept.sum(-1) >= top_p - 1e-5).all()
    smallest = kept.masked_fill(kept == 0.0, 2.0).amin(-1)
    assert (kept.sum(-1) - smallest <= top_p + 1e-5).all(), "one token more than needed"


@pytest.mark.parametrize("sharpness", [0.0, 0.5, 2.0, 9.0])
@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999, 0.9999999])
def test_the_nucleus_of_a_large_vocabulary_is_that_of_a_full_sort(top_p: float, sharpness: float) -> None:
    """Also where the tokens nearly all count, and where the mass is 1 but for rounding."""
    raw = sharpness * torch.randn(1, 20_011, generator=torch.Generator().manual_seed(6))
    raw[0, 9::7] = raw[0, 5]  # ties
    p_V = torch.softmax(raw, -1)[0]
    values, order = p_V.double().sort(descending=True, stable=True)
    expected = order[values.cumsum(0) - values < top_p].sort().values
    found = (process(raw, top_p=top_p)[0] > -torch.inf).nonzero()[:, 0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("params", [{}, {"logit_bias": {3: 2.0}}, {"temperature": 1e-4}, {"top_k": 9}, {"min_p": 0.1}])
@pytest.mark.parametrize("size", [999, 20_000])
def test_the_support_is_that_of_the_processed_row(size: int, params: dict[str, Any]) -> None:
    raw = 5.0 * torch.randn(2, size, generator=torch.Generator().manual_seed(7))
    maker = LawMaker(SamplingParams(**{"temperature": 0.8, "top_p": 0.9, **params}), (), size)
    laws = Laws(
        raw,
        greedy=False,
        positions=[4, 5],
        process=lambda raw_MV, rows: maker.process(raw_MV, EMPTY_TREE, [ROOT] * len(rows)),
        support=lambda raw_1V, row: maker.support(raw_1V, EMPTY_TREE, ROOT),
    )
    found = laws.support_at(1)
    assert found is not None
    ids, kept = found
    expected_V = maker.process(raw[1:], EMPTY_TREE, ROOT_ONLY)[0]
    assert torch.equal(ids, (expected_V > -torch.inf).nonzero()[:, 0])
    assert torch.equal(kept, expected_V[ids])


@pytest.mark.parametrize("top_k", [1, 7, 1499])
def test_top_k_equals_the_library(top_k: int) -> None:
    raw = logits()
    assert torch.equal(process(raw, top_k=top_k), TopKLogitsWarper(top_k)(None, raw.clone()))


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.5, 1.0])
def test_min_p_equals_the_library(min_p: float) -> None:
    raw = logits()
    assert torch.equal(process(raw, min_p=min_p), MinPLogitsWarper(min_p)(None, raw.clone()))


def test_temperature_equals_the_library() -> None:
    raw = logits()
    assert torch.allclose(process(raw, temperature=0.7), TemperatureLogitsWarper(0.7)(None, raw.clone()))


def test_repetition_penalty_equals_the_library() -> None:
    raw = logits()
    prompt = (5, 5, 17, 900)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt] * 4), raw.clone())
    assert torch.allclose(process(raw, prompt, repetition_penalty=1.7), expected)


def test_filters_apply_in_the_documented_order() -> None:
    raw = logits(seed=3)
    x = TemperatureLogitsWarper(0.8)(None, raw.clone())
    x = TopPLogitsWarper(0.8)(None, TopKLogitsWarper(30)(None, MinPLogitsWarper(0.02)(None, x)))
    found = process(raw, temperature=0.8, min_p=0.02, top_k=30, top_p=0.8)
    assert torch.equal(found.isinf(), x.isinf())
    assert torch.allclose(torch.softmax(found, -1), torch.softmax(x, -1), atol=1e-7)


def test_off_switches_change_nothing() -> None:
    raw = logits()
    for params in ({"top_k": 0}, {"top_k": -1}, {"top_k": V}, {"top_k": V + 5}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(process(raw, **params), raw)


def test_ties_keep_exactly_k_tokens_and_at_least_one() -> None:
    flat = torch.zeros(1, V)
    assert int((~process(flat, top_k=5).isinf()).sum()) == 5
    assert int((~process(flat, top_p=1e-6).isinf()).sum()) == 1
    assert int((~process(flat, top_p=0.5).isinf()).sum()) == pytest.approx(V // 2, abs=1)
    assert int((~process(flat, min_p=1.0).isinf()).sum()) == V
    assert process(torch.zeros(1, 2), top_p=0.5).isinf().tolist() == [[False, True]]  # reached is enough


def test_input_is_not_modified_and_half_precision_is_raised() -> None:
    raw = logits().bfloat16()
    before = raw.clone()
    found = process(raw, temperature=0.5, top_k=3, repetition_penalty=1.3)
    assert torch.equal(raw, before)
    assert found.dtype == torch.float32


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-40])
def test_tiny_temperature_is_the_argmax_not_nan(temperature: float) -> None:
    p = torch.softmax(process(logits(), temperature=temperature, top_p=0.9), -1)
    assert torch.equal(p.argmax(-1), logits().argmax(-1))
    assert torch.allclose(p.sum(-1), torch.ones(4))
    maker = LawMaker(SamplingParams(temperature=temperature, top_p=0.9), (), V)
    together = maker.process(logits(), TokenTree([1, 2, 3]), range(-1, 3))
    assert torch.equal(torch.softmax(together, -1), p)


#       root ── 0 (a) ── 1 (b)
#            └─ 2 (b) ── 3 (b)
A, B, STOP = 3, 8, 2
TREE = TokenTree((A, B, B, B), (-1, 0, -1, 2))
HISTORIES = {ROOT: [], 0: [A], 1: [A, B], 2: [B], 3: [B, B]}


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.7},
        {"frequency_penalty": 0.9},
        {"presence_penalty": -0.4, "frequency_penalty": 0.3, "repetition_penalty": 0.8, "logit_bias": {A: 2.0}},
    ],
)
def test_penalties_see_the_path_to_a_node_as_if_it_were_emitted(params: dict[str, object]) -> None:
    settings = SamplingParams(temperature=1.0, **params)  # type: ignore[arg-type]
    prompt, emitted = (1, 4), (A, 6)
    maker = LawMaker(settings, prompt, 12)
    maker.append(emitted)
    raw = torch.randn(5, 12, generator=torch.Generator().manual_seed(1))
    found = maker.process(raw, TREE, range(-1, 4))
    for row, node in enumerate(range(-1, 4)):
        committed = LawMaker(settings, prompt, 12)
        committed.append([*emitted, *HISTORIES[node]])
        assert torch.allclose(found[row], committed.process(raw[row : row + 1], EMPTY_TREE, ROOT_ONLY)[0])


def test_penalties_by_hand() -> None:
    maker = LawMaker(SamplingParams(temperature=1.0, repetition_penalty=2.0), (0,), 4)
    raw = torch.tensor([[4.0, 4.0, -1.0, 0.0]])
    assert maker.process(raw, EMPTY_TREE, ROOT_ONLY).tolist() == [[2.0, 4.0, -1.0, 0.0]]
    maker.append([2])
    assert maker.process(raw, EMPTY_TREE, ROOT_ONLY).tolist() == [[2.0, 4.0, -2.0, 0.0]]
    maker = LawMaker(SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25), (0,), 4)
    maker.append([1, 1, 3])
    assert maker.process(torch.zeros(1, 4), EMPTY_TREE, ROOT_ONLY).tolist() == [[0.0, -1.0, 0.0, -0.75]]


def test_min_tokens_bans_stop_tokens_by_depth() -> None:
    maker = LawMaker(SamplingParams(temperature=1.0, min_tokens=2, max_tokens=9), (1,), 12, frozenset({STOP, 99}))
    found = maker.process(torch.zeros(5, 12), TREE, range(-1, 4))
    assert found[:, STOP].isinf().tolist() == [True, True, False, True, False]
    assert int(found.isinf().sum()) == 3
    maker.append([A])
    assert maker.process(torch.zeros(2, 12), TREE, (-1, 0))[:, STOP].isinf().tolist() == [True, False]
    maker.append([A])
    assert not maker.process(torch.zeros(1, 12), EMPTY_TREE, ROOT_ONLY).isinf().any()


def test_logit_bias_can_forbid_a_token_under_every_other_setting() -> None:
    raw = logits()
    best = int(raw[0].argmax())
    found = process(
        raw[:1], (best,), logit_bias={best: -float("inf")}, repetition_penalty=1.2, temperature=0.3, top_p=0.9
    )
    assert torch.softmax(found, -1)[0, best] == 0.0
    assert not found.isnan().any()


def test_trivial_means_the_raw_argmax() -> None:
    assert LawMaker(SamplingParams(), (1,), 12).trivial
    assert not LawMaker(SamplingParams(temperature=0.5), (1,), 12).trivial
    assert not LawMaker(SamplingParams(repetition_penalty=1.1), (1,), 12).trivial
    assert not LawMaker(SamplingParams(logit_bias={3: 1.0}), (1,), 12).trivial
    maker = LawMaker(SamplingParams(min_tokens=1), (1,), 12, frozenset({STOP}))
    assert not maker.trivial
    maker.append([5])
    assert maker.trivial


def test_copy_has_a_history_of_its_own() -> None:
    plain = LawMaker(SamplingParams(min_tokens=2), (0,), 4).copy()
    plain.append([1])
    assert (plain.num_output, plain.trivial) == (1, False)
    maker = LawMaker(SamplingParams(temperature=1.0, repetition_penalty=2.0, presence_penalty=1.0), (0,), 4)
    twin = maker.copy()
    twin.append([1])
    assert (maker.num_output, twin.num_output) == (0, 1)
    ones = torch.ones(1, 4)
    assert maker.process(ones, EMPTY_TREE, ROOT_ONLY).tolist() == [[0.5, 1.0, 1.0, 1.0]]
    assert twin.process(ones, EMPTY_TREE, ROOT_ONLY).tolist() == [[0.5, -0.5, 1.0, 1.0]]


def test_rows_are_the_same_one_by_one_and_together() -> None:
    raw = logits()
    for greedy in (False, True):
        one_by_one = Laws(raw, greedy=greedy, positions=range(4))
        rows = torch.stack([one_by_one.p_at(row) for row in range(4)])
        assert torch.equal(rows, Laws(raw, greedy=greedy, positions=range(4)).p_MV)
        assert torch.allclose(rows.sum(-1), torch.ones(4))
    assert list(one_by_one.best) == raw.argmax(-1).tolist()
    assert one_by_one.p_MV.argmax(-1).tolist() == list(one_by_one.best)
    assert Laws(raw.double(), greedy=False, positions=range(4)).p_MV.dtype == torch.float64
    assert Laws(raw.bfloat16(), greedy=False, positions=range(4)).p_MV.dtype == torch.float32


def lazy(raw: torch.Tensor, asked: list[range], **options: object) -> Laws:
    """Distributions with rows that are processed on access: ten is added to row 0, eleven to row 1, ..."""

    def process(raw_MV: torch.Tensor, rows: range) -> torch.Tensor:
        assert len(raw_MV) == len(rows)
        asked.append(rows)
        return raw_MV + 10.0 + torch.tensor(list(rows), dtype=raw_MV.dtype)[:, None]

    return Laws(raw, greedy=False, positions=range(7, 7 + len(raw)), process=process, **options)  # type: ignore[arg-type]


def test_a_row_is_processed_once_when_it_is_first_looked_at() -> None:
    raw, asked = logits(), list[range]()
    laws = lazy(raw, asked)
    assert (len(laws), laws.vocab_size) == (4, V)
    assert laws.raw_MV is raw
    for _ in range(2):
        assert torch.allclose(laws.logits_at(2), raw[2] + 12.0)
        assert torch.allclose(laws.p_at(3), torch.softmax(raw[3], -1))
    assert asked == [range(2, 3), range(3, 4)]
    assert torch.allclose(laws.logits_MV, raw + torch.tensor([[10.0], [11.0], [12.0], [13.0]]))
    laws.logits_at(0)
    assert laws.best == raw.argmax(-1).tolist()
    assert asked[2:] == [range(4)]  # all rows once: then none is processed alone


def test_the_same_rows_over_other_logits_are_processed_alike() -> None:
    raw, other, asked = logits(), logits(seed=1), list[range]()
    hidden = torch.ones(4, 3)
    laws = lazy(raw, asked, hidden=lambda: hidden, stop_ids=frozenset({2}), probe_logits_PV=raw[:1])
    assert torch.equal(laws.probe_logits_PV, raw[:1])  # type: ignore[arg-type]
    twin = laws.over(other)
    assert (twin.greedy, list(twin.positions), twin.stop_ids) == (False, [7, 8, 9, 10], frozenset({2}))
    assert twin.hidden_MD is hidden
    assert twin.probe_logits_PV is None
    assert torch.allclose(twin.logits_at(1), other[1] + 11.0)
    assert Laws(raw, greedy=True, positions=range(4)).over(other).greedy
    with pytest.raises(ValueError, match="hidden"):
        _ = lazy(raw, asked).hidden_MD


def test_on_a_gpu_all_rows_are_processed_in_one_launch() -> None:
    class OnGpu(Laws):
        on_gpu = True

    raw, asked = logits(), list[range]()

    def process(raw_MV: torch.Tensor, rows: range) -> torch.Tensor:
        asked.append(rows)
        return raw_MV

    laws = OnGpu(raw, greedy=False, positions=range(4), process=process)
    for row in (2, 0):
        assert torch.equal(laws.logits_at(row), raw[row])
        assert torch.allclose(laws.p_at(row), torch.softmax(raw[row], -1))
    assert asked == [range(4)]


def test_what_a_caller_knows_is_not_looked_for() -> None:
    assert list(Laws(logits(), greedy=True, positions=range(4), best=[3, 1, 4, 1]).best) == [3, 1, 4, 1]


def test_everything_is_made_where_the_logits_live() -> None:
    """On torch's device without memory: two tensors of different devices cannot be added there either."""
    params = SamplingParams(
        temperature=0.5,
        min_tokens=5,
        max_tokens=9,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        logit_bias={3: 1.0},
        top_k=4,
    )
    maker = LawMaker(params, [1, 2], 12, frozenset({STOP}), "meta")
    maker.append([A, B])
    for made in (maker._stop_ids, maker._bias_ids, maker._bias, maker._output_V, maker._seen_V):
        assert made is not None
        assert made.device.type == "meta"
    assert maker.process(torch.empty(5, 12, device="meta"), TREE, range(-1, 4)).device.type == "meta"


def test_a_tied_top_p_keeps_the_token_on_the_border_and_no_other() -> None:
    """By hand: masses of 0.5, 0.3 and 0.2, in a small vocabulary and in one that is selected from."""
    for size in (3, 20_000):
        p = torch.zeros(1, size)
        p[0, :3] = torch.tensor([0.3, 0.2, 0.5])
        for top_p, kept in ((0.4, [2]), (0.51, [0, 2]), (0.79, [0, 2]), (0.81, [0, 1, 2])):
            found = process(p.log().clamp(min=-1e4), top_p=top_p)[0]
            assert (found > -torch.inf).nonzero()[:, 0].tolist() == kept


def test_of_tied_tokens_the_first_is_the_best() -> None:
    logits_MV = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    laws = Laws(logits_MV, greedy=True, positions=[4, 5])
    assert list(laws.best) == [1, 0]
    assert laws.p_MV.tolist() == [[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.0, "logit_bias": {3: 2.0, 4: -1.0}},
        {"temperature": 0.7, "top_p": 0.8},
        {"top_k": 20, "min_p": 0.01},
        {"logit_bias": {0: 5.0, 1: -100.0, 6: 3.0}, "min_tokens": 5},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_some_columns_equal_a_row_that_is_zero_elsewhere(params: dict[str, object]) -> None:
    columns = Columns(torch.tensor([*range(0, V, 3), 1, 4]), V)  # in no order, as context rows come last
    maker = LawMaker(
        SamplingParams(**{"temperature": 1.0, **params}),  # type: ignore[arg-type]
        [3, 3, 4, 5],
        V,
        frozenset({3, 5}),
    )
    maker.append([6, 6, 1])
    tree, nodes = TokenTree([9, 1, 9, 7], [-1, 0, 1, 0]), (-1, 0, 2, 3)
    raw_MC = logits()[:, columns.ids_C]
    found = columns.spread(maker.process(raw_MC, tree, nodes, columns), -torch.inf)
    expected = maker.process(columns.spread(raw_MC, -torch.inf), tree, nodes)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---------------------------------------------------------------------- DRY and XTC


def test_dry_lowers_what_would_lengthen_a_repetition() -> None:
    """After 1 2 3 9 1 2, token 3 lengthens a repetition of two; after 2 2 2, token 2 one of two."""
    params = SamplingParams(dry_multiplier=0.5, dry_base=2.0)
    assert Repetitions(params, [1, 2, 3, 9, 1, 2], frozenset()).penalties([]) == {3: pytest.approx(0.5)}
    assert Repetitions(params, [1, 2, 3, 9, 1], frozenset()).penalties([2, 3]) == {9: pytest.approx(1.0)}
    assert Repetitions(params, [2, 2], frozenset()).penalties([2]) == {2: pytest.approx(0.5)}
    assert Repetitions(params, [1, 2, 3, 9, 1, 2], frozenset({1})).penalties([]) == {}
    near = SamplingParams(dry_multiplier=0.5, dry_penalty_last_n=5)
    assert Repetitions(near, [1, 2, 3, 9, 1, 2], frozenset()).penalties([]) == {}


@pytest.mark.parametrize("seed", range(3))
def test_dry_is_the_longest_agreement_at_each_place(seed: int) -> None:
    generator = random.Random(seed)
    text = [generator.randrange(3) for _ in range(40)]
    expected: dict[int, int] = {}
    for end in range(1, len(text)):
        length = 0
        while length < end and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length >= 2:
            expected[text[end]] = max(length, expected.get(text[end], 0))
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_penalty_last_n=-1)
    found = Repetitions(params, text[:30], frozenset()).penalties(text[30:])
    assert found == {token: pytest.approx(2.0 ** (length - 2)) for token, length in expected.items()}


def test_dry_reads_the_path_of_each_node() -> None:
    raw = torch.zeros(3, 12)
    settings = SamplingParams(dry_multiplier=1.0)
    maker = LawMaker(settings, [5, 6, 7, 8], 12)
    maker.append([5])
    tree = TokenTree([6, 7])
    rows = maker.process(raw, tree, range(-1, 2))
    for depth in range(3):
        committed = LawMaker(settings, [5, 6, 7, 8], 12)
        committed.append([5, 6, 7][: 1 + depth])
        assert torch.equal(rows[depth], committed.process(raw[:1], EMPTY_TREE, [-1])[0])
    assert rows[1, 7] == -1.0


def test_xtc_is_the_mixture_with_and_without_the_best_tokens() -> None:
    p_V = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])
    params = SamplingParams(temperature=1.0, xtc_probability=0.25, xtc_threshold=0.1)
    row = LawMaker(params, (), 5).process(p_V.log()[None], EMPTY_TREE, [-1])[0]
    cut_V = torch.tensor([0.0, 0.0, 0.2, 0.06, 0.04]) / 0.3
    assert torch.allclose(torch.softmax(row, -1), 0.75 * p_V + 0.25 * cut_V, atol=1e-6)
    always = SamplingParams(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.35)  # one token reaches it
    assert torch.allclose(torch.softmax(LawMaker(always, (), 5).process(p_V.log()[None], EMPTY_TREE, [-1])[0], -1), p_V)
    with pytest.raises(ConfigError, match=r"xtc_probability=0\.5 with temperature=0"):
        SamplingParams(xtc_probability=0.5)
