"""The rule `judge` on random tables, by enumeration: planted judges, the closed form, the meter, guards, runs, budgets.

A row's hidden state here is the text up to and with the row's own token, written as a number: what a planted judge says
of it is a function of past and token, and nothing else can be read from it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from foretoken.certify.enumeration import TablePair, continuation, drafts, target_law, verdicts
from foretoken.certify.statistics import goodness_of_fit
from foretoken.core.distortion import divergence, total_variation
from foretoken.core.draft import Draft, PointMass, Sampled, WithoutReplacement
from foretoken.core.errors import ConfigError
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.needs import LastState
from foretoken.core.randomness import Streams
from foretoken.core.threads import one_thread
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.methods.judge.verifier import JudgeVerifier
from foretoken.verifiers.ratio import RatioVerifier
from foretoken.verifiers.recursive import RecursiveVerifier
from helpers.judges import Planted

Context = tuple[int, ...]
Says = Callable[[TablePair, Context], bool]  # pair, text that ends in the token -> it is fine

STYLES = ("flat", "peaked", "zeros", "point", "equal")
KINDS = ("sampled", "point")
BASE = 10


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def always(pair: TablePair, text: Context) -> bool:
    return True


def never(pair: TablePair, text: Context) -> bool:
    return False


def coin(pair: TablePair, text: Context) -> bool:
    return pair.coin((*text, text[-1]))


def written(text: Context) -> float:
    return float(sum((token + 1) * BASE**place for place, token in enumerate(text)))


def read(number: float) -> Context:
    digits = []
    left = int(number)
    while left:
        digits.append(left % BASE - 1)
        left //= BASE
    return tuple(digits)


def judge(pair: TablePair, says: Says, guarded: tuple[int, ...] = (), **options: Any) -> JudgeVerifier:
    head = Planted(lambda row_D: float(says(pair, read(float(row_D)))))
    return JudgeVerifier(JudgeVerifier.Config(**options), head, guarded)


def case(pair: TablePair, kind: str, tokens: Context, **options: Any) -> tuple[Draft, Laws]:
    """A chain and the distributions after it; states are shown as the engine does."""
    texts = [tokens[:k] for k in range(len(tokens) + 1)]
    law = PointMass()
    if kind == "sampled" and tokens:
        law = Sampled(torch.stack([pair.q(text) for text in texts[:-1]]), tuple(range(len(tokens))))  # type: ignore[assignment]
    laws = Laws(
        torch.stack([pair.p(text) for text in texts]).log(),
        greedy=pair.greedy,
        positions=range(len(texts)),
        hidden=lambda: torch.tensor([[written(text)] for text in texts], dtype=torch.float64),
        **options,
    )
    return Draft(TokenTree(tokens), law), laws


def outcomes(
    pair: TablePair, rule: JudgeVerifier, kind: str, depth: int, **options: Any
) -> Iterator[tuple[float, Draft, Verdict]]:
    shape = tuple(range(-1, depth - 1))
    for weight, tokens, _ in drafts(pair, shape, kind):  # type: ignore[arg-type]
        draft, laws = case(pair, kind, tokens, **options)
        for chance, verdict in verdicts(rule, draft, laws):
            yield weight * chance, draft, verdict


def text_of(draft: Draft, verdict: Verdict) -> Context:
    return (*(draft.tree.tokens[node] for node in verdict.path), verdict.extra)


def joint_law(
    pair: TablePair, rule: JudgeVerifier, kind: str, depth: int, length: int = 2, **options: Any
) -> torch.Tensor:
    """The distribution of the first tokens: one step, then plain sampling from the target."""
    joint = torch.zeros((pair.vocab_size,) * length, dtype=torch.float64)
    for weight, draft, verdict in outcomes(pair, rule, kind, depth, **options):
        text = text_of(draft, verdict)[:length]
        joint[text] += weight * continuation(pair.p, text, length, pair.vocab_size)
    return joint


def one_token(pair: TablePair, says: Says, q: list[float]) -> list[float]:
    """The distribution of one token in plain Python: acceptance by the test or by the judge, and the residual of the
    rest.
    """
    p = pair.p(()).tolist()
    stands = []
    for x, (a, b) in enumerate(zip(p, q, strict=True)):
        stands.append(b if a > 0 and b > 0 and says(pair, (x,)) else min(a, b))
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    if sum(left) == 0:
        left = p
    return [s + (1 - sum(stands)) * each / sum(left) for s, each in zip(stands, left, strict=True)]


# ---------------------------------------------------------------------- planted judges


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_a_judge_that_always_refuses_is_the_exact_rule_decision_by_decision(style: str, kind: str) -> None:
    for seed in range(6):
        pair = TablePair(4, seed, style)
        off = judge(pair, always, threshold=1.0)
        assert off.needs.last_state is None  # no states are kept for it
        for rule in (judge(pair, never), off):
            assert float((joint_law(pair, rule, kind, 2) - target_law(pair, 2)).abs().max()) < 1e-9
            for _, tokens, _ in itertools.islice(drafts(pair, (-1, 0, 1), kind), 12):  # type: ignore[arg-type]
                draft, laws = case(pair, kind, tokens)
                for exact in (RatioVerifier(), RecursiveVerifier()):
                    ours, theirs = (each.verify(draft, laws, Streams(seed)) for each in (rule, exact))
                    assert (ours.path, ours.extra, ours.distortion) == (theirs.path, theirs.extra, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_judge_that_always_accepts_lets_all_stand_that_it_may(kind: str) -> None:
    for seed, style in itertools.product(range(2), ("flat", "peaked", "zeros")):
        pair = TablePair(4, seed, style)
        for _, draft, verdict in outcomes(pair, judge(pair, always), kind, 3):
            tokens = draft.tree.tokens
            fell = next((k for k in range(3) if not float(pair.p(tokens[:k])[tokens[k]]) > 0), 3)
            assert len(verdict.path) == fell


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("style", STYLES)
def test_the_distribution_of_one_token_is_the_closed_form(style: str, kind: str) -> None:
    largest = 0.0
    for seed in range(6):
        pair = TablePair(5, seed, style)
        found = joint_law(pair, judge(pair, coin), kind, 1, length=1)
        q_V = pair.q(())
        if kind == "point":
            q_V = torch.zeros_like(q_V)
            q_V[pair.guesses(())[0]] = 1.0
        assert found.tolist() == pytest.approx(one_token(pair, coin, q_V.tolist()), abs=1e-9)
        largest = max(largest, total_variation(found, pair.p(())))
    assert largest > 0.01 or style == "equal"  # where the distributions are equal nothing is refused


# ---------------------------------------------------------------------- the meter


def test_the_mean_charge_is_the_distance_of_the_distribution() -> None:
    for seed, style in itertools.product(range(3), STYLES):
        pair = TablePair(5, seed, style)
        rule = judge(pair, coin)
        e_V, p_V = joint_law(pair, rule, "sampled", 2, length=1), pair.p(())
        found = list(outcomes(pair, rule, "sampled", 2))
        assert sum(w * v.distortions[0] for w, _, v in found) == pytest.approx(total_variation(e_V, p_V), abs=1e-9)
        assert sum(w * v.divergences[0] for w, _, v in found) >= divergence(e_V, p_V) - 1e-9


def test_the_charge_for_a_point_mass_is_the_distance_given_the_draft() -> None:
    for seed, style in itertools.product(range(6), STYLES):
        pair = TablePair(5, seed, style)
        rule, p_V, token = judge(pair, coin), pair.p(()), pair.guesses(())[0]
        e_V = joint_law(pair, rule, "point", 1, length=1)
        for _, _, verdict in outcomes(pair, rule, "point", 1):
            assert verdict.distortions[0] == pytest.approx(total_variation(e_V, p_V), abs=1e-9)
            assert verdict.divergences[0] == pytest.approx(divergence(e_V, p_V), abs=1e-9)
        if coin(pair, (token,)) and 0 < float(p_V[token]) < 1:
            assert float(e_V[token]) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_in_the_mean_the_meter_bounds_the_distance_of_whole_texts(kind: str) -> None:
    for seed, style in itertools.product(range(4), ("peaked", "zeros")):
        pair = TablePair(3, 60 + seed, style)
        for rule in (judge(pair, coin), judge(pair, always, max_run=1)):
            found = list(outcomes(pair, rule, kind, 3))
            joint, truth = joint_law(pair, rule, kind, 3, length=3).flatten(), target_law(pair, 3).flatten()
            assert total_variation(joint, truth) <= sum(w * sum(v.distortions[:3]) for w, _, v in found) + 1e-9
            assert divergence(joint, truth) <= sum(w * sum(v.divergences[:3]) for w, _, v in found) + 1e-9


@pytest.mark.statistical
def test_drawn_tokens_follow_the_closed_form_and_no_other() -> None:
    """With real random streams; the control is the distribution of another judge."""
    pairs = (TablePair(5, seed, "flat") for seed in range(10))
    pair = max(pairs, key=lambda each: torch.tensor(one_token(each, coin, each.q(()).tolist())).dist(each.p(())))
    rule, generator = judge(pair, coin), torch.Generator().manual_seed(0)
    counts, streams = [0] * 5, Streams(3)
    for token in torch.multinomial(pair.q(()), 6000, replacement=True, generator=generator).tolist():
        draft, laws = case(pair, "sampled", (token,))
        counts[text_of(draft, rule.verify(draft, laws, streams))[0]] += 1
    good, bad = (goodness_of_fit(counts, one_token(pair, says, pair.q(()).tolist())) for says in (coin, never))
    assert good.p_value > 1e-3
    assert bad.p_value < 1e-6


# ---------------------------------------------------------------------- which row is judged


@pytest.mark.parametrize("wrong_at", range(4))
def test_a_wrong_token_falls_where_it_stands(wrong_at: int) -> None:
    """The argmax is 0, and all drafted tokens are 1 but one, which the judge dislikes: neither early nor late."""
    tokens = tuple(2 if place == wrong_at else 1 for place in range(4))
    verdict = greedy_case(tokens, lambda pair, text: text[-1] != 2)
    assert verdict.path == tuple(range(wrong_at))
    assert verdict.extra == 0


def test_the_judge_runs_once_and_only_where_the_exact_test_may_reject() -> None:
    pair = TablePair(4, 1, "flat")
    rule = judge(pair, always)
    head: Any = rule.head
    says, asked = head.judge, []
    head.judge = lambda hidden_MD: asked.append(len(hidden_MD)) or says(hidden_MD)
    rows = torch.tensor([[0.45, 0.40, 0.15, 0.0]] * 5).log()
    for tokens, times in (((0, 0, 0, 0), 0), ((0, 1, 0, 1), 1)):
        asked.clear()
        rule.verify(Draft(TokenTree(tokens)), greedy_laws(rows), Streams(0))
        assert asked == [4] * times


# ---------------------------------------------------------------------- temperature 0


def greedy_laws(rows_MV: torch.Tensor, tokens: Context = (), **options: Any) -> Laws:
    states = torch.tensor([[written(tokens[:k])] for k in range(len(rows_MV))], dtype=torch.float64)
    return Laws(rows_MV, greedy=True, positions=range(len(rows_MV)), hidden=lambda: states, **options)


def greedy_case(
    tokens: Context, says: Says = always, guarded: Context = (), stop_ids: frozenset[int] = frozenset(), **options: Any
) -> Verdict:
    """The argmax is 0 everywhere; 3 is forbidden."""
    rows = torch.tensor([[0.45, 0.40, 0.15, 0.0]] * (len(tokens) + 1)).log()
    rule = judge(TablePair(4, 0), says, guarded, **options)
    return rule.verify(Draft(TokenTree(tokens)), greedy_laws(rows, tokens, stop_ids=stop_ids), Streams(0))


def test_at_temperature_0_the_judge_decides_on_tokens_other_than_the_argmax() -> None:
    verdict = greedy_case((1, 0, 2, 1))
    assert (verdict.path, verdict.extra) == ((0, 1, 2, 3), 0)
    assert verdict.distortions == (1.0, 0.0, 1.0, 1.0, 0.0)
    assert verdict.divergences == (math.inf, 0.0, math.inf, math.inf, 0.0)
    assert greedy_case((0, 1, 0), never).path == (0,)
    assert greedy_case((0, 0), never).path == (0, 1)


# ---------------------------------------------------------------------- guards


def test_guarded_tokens_never_stand_on_the_judge_s_word_alone() -> None:
    for options in ({"guarded": (1,)}, {"stop_ids": frozenset({1})}):
        assert greedy_case((2, 1, 2), **options).path == (0,)  # type: ignore[arg-type]
    assert greedy_case((0, 1), guarded=(0,)).path == (0, 1)  # the argmax stands by the exact test
    assert greedy_case((3, 0)).path == ()  # forbidden


@pytest.mark.parametrize("kind", KINDS)
def test_guarded_and_impossible_tokens_follow_the_exact_distribution(kind: str) -> None:
    for seed in range(6):
        pair = TablePair(4, seed, "zeros" if seed % 2 else "flat")
        for rule, options in (
            (judge(pair, always, (1, 2)), {}),
            (judge(pair, always), {"stop_ids": frozenset({1, 2})}),
        ):
            e_V = joint_law(pair, rule, kind, 1, length=1, **options)
            q_V = pair.q(())
            if kind == "point":
                q_V = torch.zeros_like(q_V)
                q_V[pair.guesses(())[0]] = 1.0
            wanted = one_token(pair, lambda pair, text: text[-1] not in (1, 2), q_V.tolist())
            assert e_V.tolist() == pytest.approx(wanted, abs=1e-9)
            assert float(joint_law(pair, rule, kind, 2, **options)[target_law(pair, 2) == 0].abs().sum()) == 0.0


def test_the_guard_has_teeth() -> None:
    pair = TablePair(4, 0, "flat")
    laws = [joint_law(pair, judge(pair, always, guarded), "sampled", 1, length=1) for guarded in ((), (1, 2))]
    assert total_variation(*laws) > 0.02


# ---------------------------------------------------------------------- runs


def test_at_most_so_many_in_a_row_stand_on_the_judge_s_word_alone() -> None:
    assert greedy_case((1, 1, 1, 1), max_run=2).path == (0, 1)
    assert greedy_case((1, 1, 0, 1, 1, 1), max_run=2).path == (0, 1, 2, 3, 4)
    assert greedy_case((1, 0, 1, 0, 1), max_run=1).path == (0, 1, 2, 3, 4)
    assert greedy_case((1, 1), max_run=1).path == (0,)
    assert greedy_case((1, 1)).path == (0, 1)


def test_a_run_is_broken_by_what_the_exact_test_accepts() -> None:
    """p is a tenth of q: a run of two is as probable as two failures of the test in a row."""
    p_V = torch.tensor([0.1, 0.9], dtype=torch.float64)
    q_KV = torch.tensor([[1.0, 0.0]] * 3, dtype=torch.float64)
    laws = Laws(p_V.log().expand(4, -1), greedy=False, positions=range(4), hidden=lambda: torch.zeros(4, 1))
    rule = JudgeVerifier(JudgeVerifier.Config(max_run=1), Planted(lambda row_D: 1.0), ())
    lengths = [0.0] * 4
    for chance, verdict in verdicts(rule, Draft(TokenTree((0, 0, 0)), Sampled(q_KV, (0, 1, 2))), laws):
        lengths[len(verdict.path)] += chance
    # a token falls where its own test fails after one that was spared
    second_falls, third_falls = 0.9 * 0.9, 0.1 * 0.9 * 0.9
    assert lengths == pytest.approx([0.0, second_falls, third_falls, 1 - second_falls - third_falls], abs=1e-12)


# ---------------------------------------------------------------------- budgets


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_of_nothing_is_exact(kind: str) -> None:
    for seed, style in enumerate(STYLES):
        pair = TablePair(4, seed, style)
        found = joint_law(pair, judge(pair, always, max_distortion=0.0), kind, 3)
        assert float((found - target_law(pair, 2)).abs().max()) < 1e-9
    assert greedy_case((1, 0), max_distortion=0.0).path == ()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [0.05, 0.2])
def test_budgets_hold_on_every_prefix(budget: float, kind: str) -> None:
    spent = bound = False
    for seed in range(30):
        pair, metrics = TablePair(4, seed, "peaked"), Metrics()
        rule, free = judge(pair, always, max_distortion=budget), judge(pair, always)
        tokens = tuple(int(t) for t in torch.randint(4, (5,), generator=torch.Generator().manual_seed(seed)))
        draft, laws = case(pair, kind, tokens)
        for _ in range(3):
            verdict = rule.verify_within(draft, laws, Streams(seed), metrics)
            for cost in verdict.distortions:
                metrics.num_tokens += 1
                metrics.distortion_sum += cost
                assert metrics.distortion_sum <= budget * metrics.num_tokens + 1e-9
        spent = spent or metrics.distortion_sum > 0
        loose = free.verify(draft, laws, Streams(seed))
        bound = bound or loose.distortion > budget * len(loose.distortions)
    assert spent
    assert bound  # without the budget it would not hold


# ---------------------------------------------------------------------- options and refusals


def test_the_threshold_is_the_head_s_unless_given() -> None:
    for given, level, stands in ((None, 0.7, False), (0.5, 0.7, True), (0.75, 0.75, False), (1.0, 1.0, False)):
        head = Planted(lambda row_D, level=level: level, threshold=0.8)
        rule = JudgeVerifier(JudgeVerifier.Config(threshold=given), head, ())
        rows = torch.tensor([[0.6, 0.4]] * 2).log()
        assert (rule.verify(Draft(TokenTree((1,))), greedy_laws(rows), Streams(0)).path == (0,)) == stands


def test_a_damaged_judge_lets_nothing_stand() -> None:
    rule = JudgeVerifier(JudgeVerifier.Config(), Planted(lambda row_D: math.nan), ())
    rows = torch.tensor([[0.6, 0.4]] * 2).log()
    assert rule.verify(Draft(TokenTree((1,))), greedy_laws(rows), Streams(0)).path == ()


@pytest.mark.parametrize("normed", [True, False])
def test_it_asks_for_what_its_head_reads(normed: bool) -> None:
    rule = JudgeVerifier(JudgeVerifier.Config(), Planted(lambda row_D: 1.0, normed=normed), ())
    assert rule.needs.last_state == LastState(normed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.5}, r"threshold=1.5 must be a number in \[0, 1\]: lower accepts more, 1 switches it off"),
        ({"threshold": "high"}, "threshold='high'"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"head": 7}, "head=7 must be"),
        ({"head": ""}, "head='' must be"),
        ({"max_run": 0}, "max_run=0 must be an integer, at least 1: .*threshold=1"),
        ({"max_run": True}, "max_run=True"),
        ({"max_distortion": 2}, "max_distortion=2"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgeVerifier.Config(**options)


def test_other_kinds_shapes_and_drafts_without_states_are_refused() -> None:
    pair = TablePair(3, 0)
    rule = judge(pair, always)
    draft, laws = case(pair, "point", (1, 2))
    with pytest.raises(ValueError, match="'judge' is not valid for drafts of kind WithoutReplacement, only for PointM"):
        rule.verify(Draft(TokenTree((1,)), WithoutReplacement(pair.q(())[None], (0,))), laws, Streams(0))
    with pytest.raises(ValueError, match="the rule 'judge' verifies chains"):
        rule.verify(Draft(TokenTree((1, 2), (-1, -1))), laws, Streams(0))
    with pytest.raises(ValueError, match="no hidden states were kept"):
        rule.verify(draft, Laws(laws.logits_MV, greedy=False, positions=range(3)), Streams(0))
