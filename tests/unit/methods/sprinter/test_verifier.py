"""The rule `sprinter` on random tables, by enumeration: oracle judges, the identity, the meter, the guard, budgets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from foretoken.certify.enumeration import TablePair, continuation, target_law, verdicts
from foretoken.core.distortion import divergence, total_variation
from foretoken.core.draft import Approvals, Draft, PointMass, Sampled
from foretoken.core.errors import ConfigError
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.threads import one_thread
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine import compose
from foretoken.methods.sprinter.verifier import SprinterVerifier
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.ratio import RatioVerifier
from foretoken.verifiers.recursive import RecursiveVerifier
from helpers.zoo_llms import target

Context = tuple[int, ...]
Head = Callable[[TablePair, Context, int], bool]  # pair, past, token -> approved

STYLES = ("flat", "peaked", "zeros", "point", "equal")


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def always(pair: TablePair, past: Context, token: int) -> bool:
    return True


def never(pair: TablePair, past: Context, token: int) -> bool:
    return False


def coin(pair: TablePair, past: Context, token: int) -> bool:
    return pair.coin(past)


def coin_of_token(pair: TablePair, past: Context, token: int) -> bool:
    return pair.coin((*past, token, token))


def certain(pair: TablePair, past: Context, token: int) -> bool:
    """An oracle: the exact test would accept this token whatever it draws."""
    return bool(pair.q(past)[token] <= pair.p(past)[token])


def equal(pair: TablePair, past: Context, token: int) -> bool:
    """An oracle that does not see the token: it approves where no token would be refused."""
    return total_variation(pair.p(past), pair.q(past)) < 1e-12


def drafts(pair: TablePair, head: Head, cap: int, *, saw_token: bool) -> Iterator[tuple[float, Draft]]:
    """Every chain that is drawn from q until the head says stop, or the cap is reached."""

    def grow(weight: float, tokens: Context, approved: tuple[bool, ...]) -> Iterator[tuple[float, Draft]]:
        if tokens and (not approved[-1] or len(tokens) == cap):
            q_KV = torch.stack([pair.q(tokens[:k]) for k in range(len(tokens))])
            yield (
                weight,
                Draft(
                    TokenTree(tokens), Sampled(q_KV, tuple(range(len(tokens)))), evidence=Approvals(approved, saw_token)
                ),
            )
            return
        for token, share in enumerate(pair.q(tokens).tolist()):
            if share > 0:
                yield from grow(weight * share, (*tokens, token), (*approved, head(pair, tokens, token)))

    yield from grow(1.0, (), ())


def laws_of(pair: TablePair, tokens: Context) -> Laws:
    rows = [pair.p(tokens[:k]) for k in range(len(tokens) + 1)]
    return Laws(torch.stack(rows).log(), greedy=pair.greedy, positions=range(len(rows)))


def outcomes(
    pair: TablePair, head: Head, cap: int, *, saw_token: bool = False, rule: Verifier | None = None
) -> Iterator[tuple[float, Draft, Verdict]]:
    for weight, draft in drafts(pair, head, cap, saw_token=saw_token):
        for chance, verdict in verdicts(rule or SprinterVerifier(), draft, laws_of(pair, draft.tree.tokens)):
            yield weight * chance, draft, verdict


def emitted(draft: Draft, verdict: Verdict) -> Context:
    return (*(draft.tree.tokens[node] for node in verdict.path), verdict.extra)


def joint_law(pair: TablePair, head: Head, cap: int, length: int = 2, **options: object) -> torch.Tensor:
    """The distribution of the first tokens: one step, then plain sampling from the target."""
    joint = torch.zeros((pair.vocab_size,) * length, dtype=torch.float64)
    for weight, draft, verdict in outcomes(pair, head, cap, **options):  # type: ignore[arg-type]
        text = emitted(draft, verdict)[:length]
        joint[text] += weight * continuation(pair.p, text, length, pair.vocab_size)
    return joint


# ---------------------------------------------------------------------- oracles


@pytest.mark.covering(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("size", "cap"), [(6, 1), (6, 2), (4, 3), (3, 4)])
def test_an_oracle_gives_exactly_the_target_distribution(style: str, size: int, cap: int) -> None:
    for seed, (head, saw) in itertools.product(range(2), ((certain, True), (equal, False))):
        pair = TablePair(size, seed, style)
        found = joint_law(pair, head, cap, saw_token=saw)
        assert float((found - target_law(pair, 2)).abs().max()) < 1e-9


def test_other_judges_do_not() -> None:
    pairs = [TablePair(4, seed, "peaked") for seed in range(4)]
    for head in (always, coin):
        assert max(float((joint_law(pair, head, 3) - target_law(pair, 2)).abs().max()) for pair in pairs) > 0.01


@pytest.mark.parametrize("style", STYLES)
def test_always_reject_is_speculative_decoding_with_window_1(style: str) -> None:
    for seed in range(10):
        pair = TablePair(5, seed, style)
        for _, draft in drafts(pair, never, 20, saw_token=False):
            assert len(draft) == 1
            laws = laws_of(pair, draft.tree.tokens)
            ours, exact = (rule.verify(draft, laws, Streams(seed)) for rule in (SprinterVerifier(), RatioVerifier()))
            assert (ours.path, ours.extra, ours.distortion) == (exact.path, exact.extra, 0.0)
        assert float((joint_law(pair, never, 20) - target_law(pair, 2)).abs().max()) < 1e-9


@pytest.mark.parametrize("cap", [1, 2, 4])
def test_always_accept_emits_all_but_one_untested_and_then_a_tested_one(cap: int) -> None:
    pair = TablePair(3, 7, "flat")
    chance_of_last = 0.0
    for weight, draft, verdict in outcomes(pair, always, cap):
        assert len(draft) == cap
        assert len(verdict.path) >= cap - 1  # only the last one may fall
        assert all(cost > 0 for cost in verdict.distortions[: cap - 1])
        assert verdict.distortions[cap - 1 :] == (0.0,) * (len(verdict.path) + 2 - cap)
        chance_of_last += weight * (len(verdict.path) == cap)
    acceptance = sum(
        weight * float(torch.minimum(pair.p(past), pair.q(past)).sum())
        for past in itertools.product(range(3), repeat=cap - 1)
        for weight in [math.prod(float(pair.q(past[:k])[past[k]]) for k in range(cap - 1))]
    )
    assert chance_of_last == pytest.approx(acceptance, abs=1e-9)


@pytest.mark.parametrize("rule", [RatioVerifier(), BlockVerifier(), RecursiveVerifier()], ids=lambda rule: rule.name)
@pytest.mark.parametrize("head", [coin, coin_of_token], ids=["pre", "post"])
def test_under_an_exact_rule_a_learnt_stop_biases_nothing(rule: Verifier, head: Head) -> None:
    """The token at which the judge stops stays in the draft, also where the judge has seen it."""
    for seed, style in enumerate(STYLES):
        pair = TablePair(4, seed, style)
        assert float((joint_law(pair, head, 3, rule=rule) - target_law(pair, 2)).abs().max()) < 1e-9


# ---------------------------------------------------------------------- the identity and the meter


@pytest.mark.covering(1)
@pytest.mark.parametrize("style", ["flat", "peaked"])
@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_the_distance_is_eta_fp_times_that_of_p_and_q(rate: float, style: str) -> None:
    """A judge that approves with chance ``rate`` whatever comes: e = (1 - eta) p + eta q, an equality of the paper."""
    for seed in range(5):
        pair = TablePair(6, seed, style)
        yes, no = (joint_law(pair, head, 2, length=1) for head in (always, never))
        e_V, p_V, q_V = rate * yes + (1 - rate) * no, pair.p(()), pair.q(())
        torch.testing.assert_close(e_V, (1 - rate) * p_V + rate * q_V)
        assert total_variation(e_V, p_V) == pytest.approx(rate * total_variation(p_V, q_V), abs=1e-12)


def test_a_judge_that_sees_the_token_adds_up_the_excess_that_it_lets_pass() -> None:
    """The general form: TV(e, p) is the sum of eta(x) (q(x) - p(x))+; the meter's mean is exactly that."""
    for seed, style in itertools.product(range(6), ("flat", "peaked", "zeros")):
        pair = TablePair(5, seed, style)
        p_V, q_V = pair.p(()), pair.q(())
        e_V = joint_law(pair, coin_of_token, 2, length=1, saw_token=True)
        passed_V = torch.tensor([coin_of_token(pair, (), x) and float(p_V[x]) > 0 for x in range(5)])
        wanted = float(((q_V - p_V).clamp(min=0) * passed_V).sum())
        assert total_variation(e_V, p_V) == pytest.approx(wanted, abs=1e-9)
        found = list(outcomes(pair, coin_of_token, 2, saw_token=True))
        assert sum(w * v.distortions[0] for w, _, v in found) == pytest.approx(wanted, abs=1e-9)
        assert sum(w * v.divergences[0] for w, _, v in found) >= divergence(e_V, p_V) - 1e-9


@pytest.mark.parametrize("style", STYLES)
def test_the_charge_for_a_token_is_the_distance_of_its_distribution(style: str) -> None:
    """Given the past: every token's distribution is enumerated on its own, and compared with the meter."""
    for seed in range(4):
        pair = TablePair(4, seed, style)
        e_V = joint_law(pair, always, 2, length=1)
        charged = {(v.distortions[0], v.divergences[0]) for _, _, v in outcomes(pair, always, 2)}
        assert len(charged) == 1  # it does not depend on the draw
        ((tv, kl),) = charged
        assert tv == pytest.approx(total_variation(e_V, pair.p(())), abs=1e-9)
        assert kl == pytest.approx(divergence(e_V, pair.p(())), abs=1e-9)
        if style in ("flat", "peaked"):
            torch.testing.assert_close(e_V, pair.q(()))


@pytest.mark.parametrize("saw_token", [False, True])
def test_in_the_mean_the_meter_bounds_the_distance_of_whole_texts(saw_token: bool) -> None:
    for seed, style in itertools.product(range(4), ("peaked", "zeros")):
        pair = TablePair(3, 60 + seed, style)
        head = coin_of_token if saw_token else coin
        found = list(outcomes(pair, head, 3, saw_token=saw_token))
        joint = joint_law(pair, head, 3, length=3, saw_token=saw_token).flatten()
        truth = target_law(pair, 3).flatten()
        assert total_variation(joint, truth) <= sum(w * sum(v.distortions[:3]) for w, _, v in found) + 1e-9
        assert divergence(joint, truth) <= sum(w * sum(v.divergences[:3]) for w, _, v in found) + 1e-9


# ---------------------------------------------------------------------- the guard


@pytest.mark.parametrize("saw_token", [False, True])
def test_tokens_that_the_target_cannot_emit_never_stand(saw_token: bool) -> None:
    fell = 0
    for seed in range(8):
        pair = TablePair(4, seed, "zeros")
        joint = joint_law(pair, always, 3, saw_token=saw_token)
        assert float(joint[target_law(pair, 2) == 0].abs().sum()) == 0.0
        for _, draft, verdict in outcomes(pair, always, 3, saw_token=saw_token):
            assert all(math.isfinite(each) for each in verdict.divergences)
            fell += len(verdict.path) < len(draft) - 1
    assert fell


# ---------------------------------------------------------------------- tokens per target call


@pytest.mark.parametrize(("alpha", "eta_fp", "eta_tp"), [(0.7, 0.2, 0.9), (0.5, 0.0, 1.0), (0.8, 0.6, 0.6)])
def test_tokens_per_target_call_are_the_closed_form(alpha: float, eta_fp: float, eta_tp: float) -> None:
    """Specification e.4: 1 / (1 - a) drafted and (1 + alpha (1 - eta_tp)) / (1 - a) emitted, a the chance of going on.

    The guard must stay out of it, so p is kept above zero by a hair where q has the refused token.
    """
    tiny = 1e-9
    p_V = torch.tensor([alpha, 1 - alpha - tiny, tiny], dtype=torch.float64)
    q_V = torch.tensor([alpha, 0.0, 1 - alpha], dtype=torch.float64)
    a = alpha * eta_tp + (1 - alpha) * eta_fp
    cap = 400  # as good as none
    generator = torch.Generator().manual_seed(0)
    num_steps, drafted, tokens = 4000, 0, 0
    streams = Streams(1)
    log_p_V = p_V.log()
    for _ in range(num_steps):
        chain: list[int] = []
        approved: list[bool] = []
        while not approved or (approved[-1] and len(chain) < cap):
            chain.append(0 if float(torch.rand((), generator=generator)) < alpha else 2)
            level = eta_tp if chain[-1] == 0 else eta_fp
            approved.append(float(torch.rand((), generator=generator)) < level)
        n = len(chain)
        draft = Draft(
            TokenTree(chain), Sampled(q_V.expand(n, -1), tuple(range(n))), evidence=Approvals(tuple(approved), True)
        )
        laws = Laws(log_p_V.expand(n + 1, -1), greedy=False, positions=range(n + 1))
        verdict = SprinterVerifier().verify(draft, laws, streams)
        drafted += n
        tokens += len(verdict.path) + 1
    spread = math.sqrt(a) / (1 - a) / math.sqrt(num_steps)
    assert drafted / num_steps == pytest.approx(1 / (1 - a), abs=4 * spread)
    assert tokens / num_steps == pytest.approx((1 + alpha * (1 - eta_tp)) / (1 - a), abs=4 * spread + 0.03)


# ---------------------------------------------------------------------- temperature 0


def greedy_case(tokens: Context, approved: tuple[bool, ...], **options: object) -> Verdict:
    """The argmax is 0 everywhere; 3 is forbidden."""
    rows = torch.tensor([[0.45, 0.40, 0.15, 0.0]] * (len(tokens) + 1))
    laws = Laws(rows.log(), greedy=True, positions=range(len(rows)))
    rule = SprinterVerifier(SprinterVerifier.Config(**options))  # type: ignore[arg-type]
    return rule.verify(Draft(TokenTree(tokens), PointMass(), evidence=Approvals(approved)), laws, Streams(0))


def test_at_temperature_0_only_the_last_token_must_be_the_argmax() -> None:
    verdict = greedy_case((1, 2, 0, 1), (True, True, True, False))
    assert (verdict.path, verdict.extra) == ((0, 1, 2), 0)
    assert verdict.distortions == (1.0, 1.0, 0.0, 0.0)
    assert verdict.divergences == (math.inf, math.inf, 0.0, 0.0)
    assert greedy_case((1, 0), (True, True)).path == (0, 1)
    assert greedy_case((0, 1), (True, True)).path == (0,)  # at the cap the last one is tested although approved
    assert greedy_case((3, 0), (True, True)).path == ()  # forbidden
    assert greedy_case((1, 0), (True, True), max_distortion=0.5).path == ()
    assert greedy_case((0, 1, 0), (True,) * 3, max_distortion=0.5).path == (0, 1, 2)


# ---------------------------------------------------------------------- budgets


@pytest.mark.parametrize("saw_token", [False, True])
def test_a_budget_of_nothing_is_exact(saw_token: bool) -> None:
    rule = SprinterVerifier(SprinterVerifier.Config(max_distortion=0.0))
    for seed, style in enumerate(STYLES):
        pair = TablePair(4, seed, style)
        found = joint_law(pair, always, 3, saw_token=saw_token, rule=rule)
        assert float((found - target_law(pair, 2)).abs().max()) < 1e-9


@pytest.mark.parametrize("saw_token", [False, True])
@pytest.mark.parametrize("budget", [0.05, 0.2])
def test_budgets_hold_on_every_prefix(budget: float, saw_token: bool) -> None:
    rule = SprinterVerifier(SprinterVerifier.Config(max_distortion=budget))
    spent = False
    for seed in range(30):
        pair, metrics = TablePair(4, seed, "peaked"), Metrics()
        tokens = tuple(int(t) for t in torch.randint(4, (5,), generator=torch.Generator().manual_seed(seed)))
        q_KV = torch.stack([pair.q(tokens[:k]) for k in range(5)])
        draft = Draft(TokenTree(tokens), Sampled(q_KV, tuple(range(5))), evidence=Approvals((True,) * 5, saw_token))
        for _ in range(3):
            verdict = rule.verify_within(draft, laws_of(pair, tokens), Streams(seed), metrics)
            for cost in verdict.distortions:
                metrics.num_tokens += 1
                metrics.distortion_sum += cost
                assert metrics.distortion_sum <= budget * metrics.num_tokens + 1e-9
        spent = spent or metrics.distortion_sum > 0
    assert spent


# ---------------------------------------------------------------------- a judge with a known decision on every token


def known_drafts(pair: TablePair, head: Head, cap: int) -> Iterator[tuple[float, Draft]]:
    """:func:`drafts` with the head's decision on every other token."""
    for weight, draft in drafts(pair, head, cap, saw_token=True):
        tokens, size = draft.tree.tokens, pair.vocab_size
        others = [[k < cap - 1 and head(pair, tokens[:k], token) for token in range(size)] for k in range(len(tokens))]
        assert isinstance(draft.evidence, Approvals)
        evidence = Approvals(draft.evidence.approved, True, torch.tensor(others))
        yield weight, Draft(draft.tree, draft.law, evidence=evidence)


def laws_in_a_step(pair: TablePair, head: Head, cap: int, rule: Verifier) -> dict[Context, tuple[torch.Tensor, float]]:
    """Of every prefix that one step may emit: the distribution of the token after it in the step, and its charge."""
    masses: dict[Context, torch.Tensor] = {}
    charges: dict[Context, set[float]] = {}
    for weight, draft in known_drafts(pair, head, cap):
        for chance, verdict in verdicts(rule, draft, laws_of(pair, draft.tree.tokens)):
            text = emitted(draft, verdict)
            for k in range(min(len(text), len(draft))):
                mass_V = masses.setdefault(text[:k], torch.zeros(pair.vocab_size, dtype=torch.float64))
                mass_V[text[k]] += weight * chance
                charges.setdefault(text[:k], set()).add(round(verdict.distortions[k], 7))
    found = {}
    for past, mass_V in masses.items():
        (charge,) = charges[past]  # the same whatever is drawn
        found[past] = (mass_V / mass_V.sum(), charge)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("head", [always, coin_of_token, certain])
def test_a_judge_with_known_answers_is_charged_exactly(head: Head, style: str) -> None:
    for seed in range(4):
        pair = TablePair(4, seed, style)
        for past, (e_V, charge) in laws_in_a_step(pair, head, 3, SprinterVerifier()).items():
            assert charge == pytest.approx(total_variation(e_V, pair.p(past)), abs=2e-7)


@pytest.mark.parametrize("budget", [0.0, 0.02, 0.1])
def test_a_budget_bounds_the_total_variation_of_every_prefix(budget: float) -> None:
    """Not the charges alone: the true distance, of the distribution of each token from the target's."""
    rule = SprinterVerifier(SprinterVerifier.Config(max_distortion=budget))
    used = 0.0
    for seed, style in itertools.product(range(4), ("flat", "peaked")):
        pair = TablePair(4, seed, style)
        laws = laws_in_a_step(pair, coin_of_token, 4, rule)
        for past in laws:
            spent = sum(
                total_variation(laws[past[:k]][0], pair.p(past[:k])) for k in range(len(past) + 1) if past[:k] in laws
            )
            assert spent <= budget * (len(past) + 1) + 1e-6
            used = max(used, spent)
    assert (used > 1e-6) == (budget > 0)


# ---------------------------------------------------------------------- refusals


def test_unjudged_drafts_are_refused() -> None:
    pair = TablePair(3, 0)
    draft = Draft(TokenTree((1,)), Sampled(pair.q(())[None], (0,)))
    with pytest.raises(ValueError, match="that its drafter has not judged: use method='sprinter'"):
        SprinterVerifier().verify(draft, laws_of(pair, (1,)), Streams(0))
    with pytest.raises(ValueError, match="not valid for drafts of kind PointMass"):
        SprinterVerifier().verify(
            Draft(TokenTree((1,)), PointMass(), evidence=Approvals((True,))), laws_of(pair, (1,)), Streams(0)
        )
    bush = Draft(TokenTree((1, 2), (-1, -1)), Sampled(pair.q(())[None], (0, 0)), evidence=Approvals((True, True)))
    with pytest.raises(ValueError, match="verifies chains"):
        SprinterVerifier().verify(bush, laws_of(pair, (1, 2)), Streams(0))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "draft_model", "model": "zoo:draft"}, "'draft_model' carry none: use method='sprinter'"),
        ({"method": "ngram"}, "'ngram' carry none"),
        ({"method": "ngram", "max_distortion": 2}, r"max_distortion=2 must be a number in \[0, 1\]"),
    ],
)
def test_drafters_without_a_judge_are_refused_at_construction(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose.build({**settings, "verifier": "sprinter"}, target())
