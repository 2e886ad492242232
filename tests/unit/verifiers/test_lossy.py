"""Lossy rules: the emitted distribution is the closed form, the meter is its distance from the target's, budgets
hold.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import catalog
from foretoken.certify import enumeration
from foretoken.certify.enumeration import TablePair, drafts, step_law, target_law, verdicts, worst_error
from foretoken.cli.main import main
from foretoken.core.distortion import Account, divergence, total_variation
from foretoken.core.draft import Draft, GreedyLaws, PointMass, Sampled, WithoutReplacement
from foretoken.core.errors import ConfigError
from foretoken.core.laws import Laws
from foretoken.core.metrics import Metrics
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.threads import one_thread
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict
from foretoken.engine.compose import OWN_KEYS
from foretoken.options.sampling import SamplingParams
from foretoken.verifiers.kl_threshold import KlThresholdVerifier
from foretoken.verifiers.mixture import MixtureVerifier
from foretoken.verifiers.p_threshold import PThresholdVerifier
from foretoken.verifiers.recursive import RecursiveVerifier
from foretoken.verifiers.tolerance import ToleranceVerifier
from foretoken.verifiers.topk_relaxed import TopkRelaxedVerifier
from foretoken.verifiers.typical import TypicalVerifier
from foretoken_lab.testing import Empty
from helpers import zoo_llms
from helpers.small_llms import ALTERED, assert_idle, greedy, ids, with_config
from helpers.small_llms import PROMPTS as ALL_PROMPTS

DRAFT = {"method": "draft_model", "model": ALTERED, "num_speculative_tokens": 4}
PROMPTS = ALL_PROMPTS[:3]
LOOSE: dict[str, dict[str, Any]] = {"tolerance": {"tolerance": 0.5}}  # at its default it spares all of these texts
# these listen to a judge, to entropies, to distributions of slots or to a second reading; their tests are in
# tests/unit/methods
JUDGED = ("sprinter", "judge", "entropy_adaptive", "diffuspec", "reflective")
NAMES = [e.name for e in catalog.entries("verifier") if e.promise == "approximate" and e.name not in JUDGED]
CHAINS = ((-1,), (-1, 0), (-1, 0, 1))
TREES = ((-1, -1), (-1, -1, 0), (-1, -1, -1))
STYLES = ("flat", "peaked", "zeros", "point", "equal")


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def rules(**options: Any) -> list[Any]:
    """Every rule, with thresholds at which tokens of three or four both stand and fall."""
    return [
        TypicalVerifier(TypicalVerifier.Config(epsilon=0.25, delta=0.9, **options)),
        TopkRelaxedVerifier(TopkRelaxedVerifier.Config(relaxed_topk=2, relaxed_delta=0.3, **options)),
        MixtureVerifier(MixtureVerifier.Config(lam=0.3, **options)),
        ToleranceVerifier(ToleranceVerifier.Config(tolerance=0.5, **options)),
        PThresholdVerifier(PThresholdVerifier.Config(min_prob=0.3, **options)),
        KlThresholdVerifier(KlThresholdVerifier.Config(max_kl=0.4, max_confidence=0.8, **options)),
    ]


def kinds(rule: Any) -> tuple[Any, ...]:
    """Distributions of drafts that the rule takes."""
    return ("point", "sampled") if PointMass in rule.laws else ("sampled",)


every_rule = pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.name)


def test_every_lossy_rule_of_the_catalogue_is_here() -> None:
    assert {rule.name for rule in rules()} == set(NAMES)


# ---------------------------------------------------------------------- the closed forms, written again in plain Python


def may_stand(rule: Any, p: list[float], q: list[float]) -> list[bool]:
    if rule.name == "p_threshold":
        return [x >= 0.3 for x in p]
    if rule.name == "kl_threshold":
        alike = max(p) <= 0.8 and distances(p, q)[1] <= 0.4
        return [alike and x > 0 for x in p]
    if rule.name == "typical":
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        return [x > min(0.25, 0.9 * math.exp(-entropy)) for x in p]
    best = sorted(range(len(p)), key=lambda i: -p[i])[:2]
    return [i in best and p[i] > 0 and p[i] >= max(p) - 0.3 for i in range(len(p))]


def one_token(rule: Any, p: list[float], q: list[float] | None, tokens: tuple[int, ...]) -> list[float]:
    """The distribution of the token that the rule emits at a node, as the issue's formulas have it."""
    size, n = len(p), len(tokens)
    hot = [float(i == tokens[0]) for i in range(size)]
    if rule.name in ("typical", "topk_relaxed"):
        good = may_stand(rule, p, hot)
        if q is None:
            first = next((t for t in tokens if good[t]), None)
            return p if first is None else [float(i == first) for i in range(size)]
        chance = sum(q[i] for i in range(size) if good[i])
        first_of_n = sum((1 - chance) ** k for k in range(n))  # draw k + 1 is the first in the set
        return [q[i] * good[i] * first_of_n + (1 - chance) ** n * p[i] for i in range(size)]
    law = hot if q is None else q
    if rule.name == "mixture":
        kept = [law[i] if p[i] > 0 else 0.0 for i in range(size)]
        return p if sum(kept) == 0 else [0.7 * p[i] + 0.3 * kept[i] / sum(kept) for i in range(size)]
    if rule.name == "tolerance":
        accepted = [min(law[i], 1.5 * p[i]) for i in range(size)]
    else:
        accepted = [law[i] if good else min(law[i], p[i]) for i, good in enumerate(may_stand(rule, p, law))]
    left = [max(p[i] - law[i], 0.0) for i in range(size)]
    if sum(left) == 0:
        left = p
    return [accepted[i] + (1 - sum(accepted)) * left[i] / sum(left) for i in range(size)]


def distances(e: list[float], p: list[float]) -> tuple[float, float]:
    kl = sum(x * math.log(x / y) if y > 0 else math.inf for x, y in zip(e, p, strict=True) if x > 0)
    return sum(abs(x - y) for x, y in zip(e, p, strict=True)) / 2, max(kl, 0.0)


def path_of(tokens: tuple[int, ...], parents: tuple[int, ...], node: int) -> tuple[int, ...]:
    return () if node < 0 else (*path_of(tokens, parents, parents[node]), tokens[node])


def drafted(pair: TablePair, kind: str, tokens: tuple[int, ...], parents: tuple[int, ...]) -> tuple[Draft, Laws]:
    contexts = [path_of(tokens, parents, node) for node in range(-1, len(tokens))]
    laws = Laws(torch.stack([pair.p(c) for c in contexts]).log(), greedy=pair.greedy, positions=range(len(contexts)))
    expanded = list(dict.fromkeys(parents))
    q_KV = torch.stack([pair.q(path_of(tokens, parents, parent)) for parent in expanded])
    law = PointMass() if kind == "point" else Sampled(q_KV, tuple(expanded.index(parent) for parent in parents))
    return Draft(TokenTree(tokens, parents), law), laws


def cases(rule: Any) -> Iterator[tuple[TablePair, str, tuple[int, ...]]]:
    shapes = (*CHAINS, *TREES) if rule.trees else CHAINS
    for number, (kind, shape, style) in enumerate(itertools.product(kinds(rule), shapes, STYLES)):
        yield TablePair(4 if len(shape) < 3 else 3, number, style), kind, shape


@every_rule
def test_the_distribution_of_one_token_is_the_closed_form(rule: Any) -> None:
    for pair, kind, shape in cases(rule):
        wanted = [0.0] * pair.vocab_size
        seen = []
        for weight, tokens, parents in drafts(pair, shape, kind):  # type: ignore[arg-type]
            children = tuple(t for t, parent in zip(tokens, parents, strict=True) if parent < 0)
            q = None if kind == "point" else pair.q(()).tolist()
            seen.append(one_token(rule, pair.p(()).tolist(), q, children))
            wanted = [a + weight * b for a, b in zip(wanted, seen[-1], strict=True)]
        found = step_law(rule, pair, shape, kind, length=1).joint  # type: ignore[arg-type]
        assert found.tolist() == pytest.approx(wanted, abs=1e-9), (kind, shape, pair.style)


@every_rule
def test_the_meter_is_the_distance_of_the_closed_form_at_every_token(rule: Any) -> None:
    largest = 0.0
    for pair, kind, shape in cases(rule):
        for _, tokens, parents in drafts(pair, shape, kind):  # type: ignore[arg-type]
            draft, laws = drafted(pair, kind, tokens, parents)
            for _, verdict in verdicts(rule, draft, laws):
                assert len(verdict.distortions) == len(verdict.divergences) == len(verdict.path) + 1
                for node, tv, kl in zip((-1, *verdict.path), verdict.distortions, verdict.divergences, strict=True):
                    children = draft.tree.children.get(node, ())
                    context = path_of(tokens, parents, node)
                    p = pair.p(context).tolist()
                    q = None if kind == "point" else pair.q(context).tolist()
                    e = one_token(rule, p, q, tuple(tokens[child] for child in children)) if children else p
                    assert (tv, kl) == pytest.approx(distances(e, p), abs=1e-9)
                    largest = max(largest, tv)
                assert verdict.distortion == pytest.approx(sum(verdict.distortions))
    assert largest > 0.05


def chain_law(rule: Any, pair: TablePair, context: tuple[int, ...], depth: int, length: int) -> torch.Tensor:
    """The joint distribution of the next tokens with ``depth`` sampled draft tokens left: accepted tokens go on, the
    rest is p.
    """
    size = pair.vocab_size
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    p = pair.p(context)
    e = p
    stands = torch.zeros_like(p)
    if depth:
        q = pair.q(context)
        e = torch.tensor(one_token(rule, p.tolist(), q.tolist(), (0,)), dtype=torch.float64)
        if rule.name in ("typical", "topk_relaxed"):
            stands = q * torch.tensor(may_stand(rule, p.tolist(), q.tolist()), dtype=torch.float64)
        elif rule.name in ("p_threshold", "kl_threshold"):
            stands = torch.where(torch.tensor(may_stand(rule, p.tolist(), q.tolist())), q, torch.minimum(p, q))
        else:
            stands = torch.minimum(q, e if rule.name == "mixture" else 1.5 * p)
    rows = []
    for token in range(size):
        after = (*context, token)
        going_on = stands[token] * chain_law(rule, pair, after, depth - 1, length - 1) if depth else 0.0
        rows.append(going_on + (e - stands)[token] * chain_law(rule, pair, after, 0, length - 1))
    return torch.stack(rows)


@every_rule
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_joint_distribution_of_a_chain_is_the_closed_form(rule: Any, depth: int) -> None:
    for seed, style in enumerate(STYLES):
        pair = TablePair(3, 40 + seed, style)
        found = step_law(rule, pair, CHAINS[depth - 1], "sampled", length=3).joint
        assert float((found - chain_law(rule, pair, (), depth, 3)).abs().max()) < 1e-9


@every_rule
def test_in_the_mean_the_meter_bounds_the_distance_of_whole_texts(rule: Any) -> None:
    for seed, kind in itertools.product(range(4), kinds(rule)):
        pair, shape = TablePair(3, 60 + seed, "peaked"), CHAINS[1]
        tv = kl = 0.0
        for weight, tokens, parents in drafts(pair, shape, kind):  # type: ignore[arg-type]
            for chance, verdict in verdicts(rule, *drafted(pair, kind, tokens, parents)):
                tv += weight * chance * verdict.distortion
                kl += weight * chance * sum(verdict.divergences)
        joint, truth = (law.flatten() for law in (step_law(rule, pair, shape, kind).joint, target_law(pair)))  # type: ignore[arg-type]
        assert total_variation(joint, truth) <= tv + 1e-9
        assert divergence(joint, truth) <= kl + 1e-9


class WithGuess(Verifier):
    """Verifies the first node of a chain of two, and decides the second one as a guess, which has no row after it."""

    def __init__(self, rule: Any) -> None:
        self.rule = rule

    def verify(self, draft: Draft, target: Laws, rng: Streams) -> Verdict:
        verdict = self.rule.verify_within(draft.part(0, 1), target, rng, None)
        return self.rule.finish(verdict, draft.part(1), target, rng, None) if verdict.path else verdict


def first_two(rule: Any, draft: Draft, target: Laws) -> dict[Any, float]:
    """Probabilities of the first two emitted tokens with their charges."""
    found: dict[Any, float] = {}
    for chance, verdict in verdicts(rule, draft, target):
        emitted = (*(draft.tree.tokens[node] for node in verdict.path), verdict.extra)[:2]
        key = (emitted, *(round(each, 9) for each in (*verdict.distortions[:2], *verdict.divergences[:2])))
        found[key] = found.get(key, 0.0) + chance
    return found


@pytest.mark.parametrize("bound", [{}, {"max_distortion": 0.1}], ids=["free", "bounded"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
@pytest.mark.parametrize("name", NAMES)
def test_a_guess_is_decided_and_charged_as_the_next_node(name: str, greedy: bool, bound: dict[str, float]) -> None:
    (rule,) = (each for each in rules(**bound) if each.name == name)
    for _, draft, target in enumeration.cases(TablePair(3, 5, greedy=greedy), (-1, 0), "sampled"):
        assert first_two(WithGuess(rule), draft, target) == pytest.approx(first_two(rule, draft, target), abs=1e-12)


@every_rule
def test_the_enumeration_has_teeth(rule: Any) -> None:
    """No lossy rule passes for a lossless one, and other thresholds are not the closed form."""
    assert worst_error(rule, num_pairs=2, shapes=CHAINS[:2], styles=("peaked", "flat")).error > 0.01
    other = type(rule)(
        {
            "typical": TypicalVerifier.Config(epsilon=0.05),
            "topk_relaxed": TopkRelaxedVerifier.Config(relaxed_topk=1),
            "mixture": MixtureVerifier.Config(lam=0.31),
            "tolerance": ToleranceVerifier.Config(tolerance=0.6),
            "p_threshold": PThresholdVerifier.Config(min_prob=0.1),
            "kl_threshold": KlThresholdVerifier.Config(max_kl=0.2),
        }[rule.name]
    )
    found = []
    for seed in range(8):
        pair = TablePair(4, seed, "flat")
        wanted = one_token(rule, pair.p(()).tolist(), pair.q(()).tolist(), (0,))
        found.append(
            float((step_law(other, pair, (-1,), "sampled", length=1).joint - torch.tensor(wanted)).abs().max())
        )
    assert max(found) > 1e-4


def test_closed_forms_of_the_distortion() -> None:
    for seed in range(20):
        pair = TablePair(4, seed, STYLES[seed % 3])
        p, q = pair.p(()), pair.q(())
        mixture, tolerance = rules()[2:4]
        kept = torch.where(p > 0, q, 0.0)
        if float(kept.sum()) > 0:
            wanted = 0.3 * total_variation(kept / kept.sum(), p)
            assert total_variation(mixture.law(p, q, (0,)), p) == pytest.approx(wanted, abs=1e-12)
        wanted = float(torch.minimum((q - p).clamp(min=0), 0.5 * p).sum())
        e = tolerance.law(p, q, (0,))
        assert total_variation(e, p) == pytest.approx(wanted, abs=1e-12)
        assert bool((e <= 1.5 * p + 1e-12).all())


@every_rule
def test_impossible_tokens_are_never_emitted(rule: Any) -> None:
    loose = type(rule)(
        {
            "typical": TypicalVerifier.Config(epsilon=0.0),
            "topk_relaxed": TopkRelaxedVerifier.Config(relaxed_topk=99, relaxed_delta=1.0),
            "mixture": MixtureVerifier.Config(lam=1.0),
            "tolerance": ToleranceVerifier.Config(tolerance=1e6),
            "p_threshold": PThresholdVerifier.Config(min_prob=0.0),
            "kl_threshold": KlThresholdVerifier.Config(max_kl=1e6, max_confidence=1.0),
        }[rule.name]
    )
    for kind, seed in itertools.product(kinds(rule), range(6)):
        pair = TablePair(4, seed, "zeros")
        joint = step_law(loose, pair, (-1, 0), kind, length=2).joint  # type: ignore[arg-type]
        assert float(joint[target_law(pair, 2) == 0].abs().sum()) == 0.0


@pytest.mark.parametrize(
    ("rule", "stands", "falls"),
    [
        (PThresholdVerifier(PThresholdVerifier.Config(min_prob=0.25)), [0.25, 0.75], [0.2499, 0.7501]),
        (KlThresholdVerifier(KlThresholdVerifier.Config(max_confidence=0.75)), [0.25, 0.75], [0.2499, 0.7501]),
        (TypicalVerifier(TypicalVerifier.Config(epsilon=0.25, delta=1.0)), [0.2501, 0.7499], [0.25, 0.75]),
        (TopkRelaxedVerifier(TopkRelaxedVerifier.Config(relaxed_delta=0.5)), [0.25, 0.75], [0.2499, 0.7501]),
    ],
    ids=lambda rule: getattr(rule, "name", ""),
)
def test_a_bound_itself_is_on_the_side_that_the_rule_says(rule: Any, stands: list[float], falls: list[float]) -> None:
    """Token 0, which the exact test refuses, by these numbers."""

    class Unlucky(Streams):
        def bernoulli(self, purpose: str, chances: Any) -> list[bool]:
            return [chance >= 1.0 for chance in chances]

    for p, expected in ((stands, 0), (falls, None)):
        p_V = torch.tensor(p, dtype=torch.float64)
        assert rule.decide(p_V, torch.tensor([0.5, 0.5], dtype=torch.float64), (0,), Unlucky(0))[0] == expected


def test_equal_distributions_pass_a_bound_of_0() -> None:
    rule = KlThresholdVerifier(KlThresholdVerifier.Config(max_kl=0.0))
    p_V = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert rule.members(p_V, p_V).tolist() == [True, True]
    assert rule.members(p_V, p_V.flip(0)).tolist() == [False, False]


def test_where_the_target_is_uncertain_less_is_typical() -> None:
    """Of twenty tokens alike, exp(-entropy) is a twentieth: delta decides; of two, epsilon does."""
    flat, pair = torch.full((20,), 0.05), torch.tensor([0.9, 0.1])
    for delta, every in ((0.9, True), (1.0, False)):
        rule = TypicalVerifier(TypicalVerifier.Config(epsilon=0.3, delta=delta))
        assert bool(rule.members(flat if every else flat * 0.999).all()) is every
        assert rule.members(pair).tolist() == [True, False]


@pytest.mark.parametrize("rule", [ToleranceVerifier(ToleranceVerifier.Config(tolerance=0.5)), MixtureVerifier()])
def test_at_temperature_0_a_token_may_be_as_far_from_the_argmax_as_the_rule_says(rule: Any) -> None:
    ratio = {"tolerance": 1 / 1.5, "mixture": 1.0 - 0.1 / (0.9 * 0.5)}[rule.name]
    for factor, expected in ((1.001, True), (0.999, False)):
        p_V = torch.tensor([0.5, 0.5 * ratio * factor, 0.1])
        assert rule.stands(p_V, None, 1) is expected


# ---------------------------------------------------------------------- temperature 0


def near_argmax(rows: int = 3) -> Laws:
    """Distributions of four tokens at temperature 0: token 0 is the argmax, 1 is near, 2 is far, 3 is forbidden."""
    return Laws(torch.tensor([[0.45, 0.40, 0.15, 0.0]] * rows).log(), greedy=True, positions=range(rows))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "kl_threshold"])
def test_at_temperature_0_a_token_near_the_argmax_stands_and_is_metered(name: str) -> None:
    rule = catalog.find(name, "verifier").load()
    config = {
        "tolerance": {"tolerance": 0.2},
        "typical": {"epsilon": 0.3, "delta": 1.0},
        "p_threshold": {"min_prob": 0.3},
    }.get(name, {})
    rule = rule(rule.Config(**config))
    for law in (PointMass(), Sampled(torch.full((2, 4), 0.25), (0, 1))):
        verdict = rule.verify(Draft(TokenTree((1, 0)), law), near_argmax(), Streams(0))
        assert (verdict.path, verdict.extra) == ((0, 1), 0)
        assert verdict.distortions == (1.0, 0.0, 0.0)
        assert verdict.divergences == (math.inf, 0.0, 0.0)
        for token in (2, 3):
            verdict = rule.verify(Draft(TokenTree((token, 0)), law), near_argmax(), Streams(0))
            assert (verdict.path, verdict.extra, verdict.distortion) == ((), 0, 0.0)


@pytest.mark.parametrize(
    ("emitted", "spent", "stands"), [(0, 0.0, False), (3, 0.0, True), (3, 1.1, False), (2, 0.0, False)]
)
def test_a_budget_is_that_of_all_that_the_request_has_emitted(emitted: int, spent: float, stands: bool) -> None:
    """A token that is not the argmax costs 1, and a quarter may be spent for each token."""
    rule = TypicalVerifier(TypicalVerifier.Config(epsilon=0.3, delta=1.0, max_distortion=0.25))
    so_far = Metrics(num_tokens=emitted, distortion_sum=spent)
    verdict = rule.verify_within(Draft(TokenTree((1,))), near_argmax(), Streams(0), so_far)
    assert (verdict.path == (0,)) is stands


def test_at_temperature_0_a_younger_argmax_stands_where_the_budget_is_spent() -> None:
    bush = Draft(TokenTree((1, 2, 0), (-1, -1, -1)))
    for rule in rules(max_distortion=0.0):
        if rule.trees:
            verdict = rule.verify(bush, near_argmax(4), Streams(0))
            assert (verdict.path, verdict.extra, verdict.distortions) == ((2,), 0, (0.0, 0.0))


def test_at_temperature_0_a_forbidden_token_stands_at_no_setting() -> None:
    loose = MixtureVerifier(MixtureVerifier.Config(lam=1.0))
    assert loose.verify(Draft(TokenTree((2,))), near_argmax(), Streams(0)).path == (0,)
    assert loose.verify(Draft(TokenTree((3,))), near_argmax(), Streams(0)).path == ()


def test_at_temperature_0_distributions_at_temperature_1_are_compared() -> None:
    rule = KlThresholdVerifier(KlThresholdVerifier.Config(max_kl=0.3))
    near, far = [0.35, 0.4, 0.25, 0.0], [0.05, 0.9, 0.05, 0.0]
    for token, q, path in ((1, near, (0,)), (2, near, (0,)), (3, near, ()), (1, far, ()), (0, far, (0,))):
        draft = Draft(TokenTree((token,)), evidence=GreedyLaws(torch.tensor([q])))
        verdict = rule.verify(draft, near_argmax(), Streams(0))
        assert (verdict.path, verdict.distortion) == (path, float(bool(path) and token != 0))
    sure = Laws(torch.tensor([[0.95, 0.05]] * 2).log(), greedy=True, positions=range(2))
    draft = Draft(TokenTree((1,)), evidence=GreedyLaws(torch.tensor([[0.9, 0.1]])))
    assert rule.verify(draft, sure, Streams(0)).path == ()
    anywhere = KlThresholdVerifier(KlThresholdVerifier.Config(max_kl=0.3, max_confidence=1.0))
    assert anywhere.verify(draft, sure, Streams(0)).path == (0,)
    with pytest.raises(ValueError, match="'kl_threshold' was given a draft without its distribution"):
        rule.verify(Draft(TokenTree((1,))), near_argmax(), Streams(0))


@pytest.mark.parametrize(
    "settings",
    [
        {**DRAFT, "model": "zoo:draft"},
        {"method": "sprinter", "model": "zoo:draft", "head": "random:pre"},
        {"method": "kangaroo", "adapter": "random:2", "threshold": 0.1},
        {"method": "del", "exit_layer": 2, "draft_length": 3},
    ],
    ids=lambda settings: settings["method"],
)
def test_at_temperature_0_drafts_carry_their_distribution_where_a_rule_compares(settings: dict[str, Any]) -> None:
    for verifier, carries in (("kl_threshold", True), ("ratio", False)):
        llm = zoo_llms.with_config({**settings, "verifier": verifier})
        drafter: Any = llm.recipe.drafter
        propose, drafts = drafter.propose, []
        drafter.propose = lambda *given: drafts.extend(found := propose(*given)) or found  # noqa: B023
        ids(llm.generate(PROMPTS, SamplingParams(max_tokens=12, repetition_penalty=1.2, ignore_eos=True)))
        for draft in filter(len, drafts):
            assert isinstance(draft.evidence, GreedyLaws) == carries
            if carries:
                assert draft.evidence.q_NV.argmax(-1).tolist() == list(draft.tree.tokens)
                torch.testing.assert_close(draft.evidence.q_NV.sum(-1), torch.ones(len(draft)))
        assert any(map(len, drafts))


def test_at_temperature_0_a_drafter_without_a_distribution_is_refused() -> None:
    class Silent(Empty):
        laws = (Sampled,)

    llm = with_config({"method": Silent(), "verifier": "kl_threshold"})
    with pytest.raises(ConfigError, match=r"'kl_threshold' cannot honour temperature=0: .*use a temperature above 0"):
        llm.generate("x", SamplingParams(max_tokens=2))
    ids(llm.generate("x", SamplingParams(max_tokens=2, temperature=1.0)))


# ---------------------------------------------------------------------- budgets


def test_an_account_keeps_every_prefix_within_the_budget() -> None:
    account = Account(None, 0.25)
    taken = []
    for wish in (0.3, 0.2, 0.3, 0.3, 0.25, 1.0, 0.0, 0.0, 0.6):
        cost = wish if account.allows(wish) else 0.0
        account.add(cost, 0.0)
        taken.append(cost)
        assert sum(taken) <= 0.25 * len(taken) + 1e-9
    assert taken == [0.0, 0.2, 0.3, 0.3, 0.25, 0.0, 0.0, 0.0, 0.6]
    assert not Account(Metrics(num_tokens=9, distortion_sum=2.5), 0.25).allows(0.0)
    assert Account(Metrics(num_tokens=9, distortion_sum=2.5), None).allows(1.0)


@pytest.mark.parametrize("rule", rules(max_distortion=0.0), ids=lambda rule: rule.name)
def test_a_budget_of_nothing_is_exact_verification_decision_by_decision(rule: Any) -> None:
    shapes = (*CHAINS, *TREES) if rule.trees else CHAINS
    worst = worst_error(rule, num_pairs=1, shapes=shapes, styles=("peaked", "zeros"))
    assert worst.error < 1e-9, worst
    assert worst_error(rule, num_pairs=1, shapes=shapes[1:3], styles=("peaked",), greedy=True).error < 1e-12
    for seed in range(30):
        pair = TablePair(4, seed, "peaked")
        draft, laws = drafted(pair, kinds(rule)[seed % len(kinds(rule))], (1, 0, 2), (-1, 0, 1))
        ours, exact = rule.verify(draft, laws, Streams(seed)), RecursiveVerifier().verify(draft, laws, Streams(seed))
        assert (ours.path, ours.extra, ours.distortion) == (exact.path, exact.extra, 0.0)
        assert ours.divergences == (0.0,) * (len(ours.path) + 1)


@pytest.mark.parametrize("rule", rules(max_distortion=1.0), ids=lambda rule: rule.name)
def test_a_budget_that_is_never_spent_changes_nothing(rule: Any) -> None:
    free = next(each for each in rules() if each.name == rule.name)
    for kind in kinds(rule):
        pair = TablePair(3, 5, "peaked")
        found, wanted = (step_law(each, pair, (-1, 0), kind).joint for each in (rule, free))  # type: ignore[arg-type]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_budgets_hold_on_every_prefix_of_every_request(name: str, temperature: float) -> None:
    free, bound = (
        with_config({**DRAFT, "verifier": name, **LOOSE.get(name, {}), **options})
        for options in ({}, {"max_distortion": 0.04})
    )
    params = [SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)] * len(PROMPTS)
    spent: dict[int, list[float]] = {}
    rule: Any = bound.recipe.verifier
    judge = rule.verify_within

    def noting(draft: Draft, target: Laws, rng: Streams, metrics: Metrics) -> Any:
        verdict = judge(draft, target, rng, metrics)
        history = spent.setdefault(id(rng), [])
        # the engine passes the request's charges so far to the rule
        assert (metrics.num_tokens, metrics.distortion_sum) == (len(history), pytest.approx(sum(history)))
        history += verdict.distortions
        return verdict

    rule.verify_within = noting
    outputs = bound.generate(PROMPTS, params)
    ids(outputs)
    assert len(spent) == len(PROMPTS)
    for history in spent.values():
        totals = itertools.accumulate(history)
        assert all(total <= 0.04 * number + 1e-9 for number, total in enumerate(totals, 1))
    assert max(output.metrics.distortion for output in outputs) <= 0.04 + 1e-9
    loose = max(output.metrics.distortion for output in free.generate(PROMPTS, params))
    assert loose > (0.04 if name == "typical" else 0.01)  # without the budget it would not hold
    assert_idle(bound)


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_of_nothing_gives_the_plain_text(name: str) -> None:
    llm = with_config({**DRAFT, "verifier": name, "max_distortion": 0})
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    assert ids(outputs) == [greedy(prompt, 40) for prompt in PROMPTS]
    assert {output.metrics.distortion for output in outputs} == {0.0}
    unbound = with_config({**DRAFT, "verifier": name, **LOOSE.get(name, {})})
    free = unbound.generate(PROMPTS, SamplingParams(max_tokens=40, ignore_eos=True))
    assert ids(free) != ids(outputs)
    for output, plain in zip(free, outputs, strict=True):  # the charge is at least the first difference
        assert (output.metrics.distortion > 0) == (output.token_ids != plain.token_ids)


def test_tokens_that_were_cut_off_are_not_charged() -> None:
    llm = with_config({**DRAFT, "verifier": "typical", "epsilon": 0.0})
    rule: Any = llm.recipe.verifier
    judge, found = rule.verify_within, []
    rule.verify_within = lambda *arguments: found.append(judge(*arguments)) or found[-1]
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=1, ignore_eos=True)
    (whole,) = llm.generate(PROMPTS[0], params)
    ends = itertools.accumulate(len(verdict.distortions) for verdict in found)
    number, verdict, begin = next(
        (number, verdict, end - len(verdict.distortions))
        for number, (verdict, end) in enumerate(zip(found, ends, strict=True))
        if len(verdict.path) > 1
        and whole.token_ids.index(whole.token_ids[end - len(verdict.distortions)]) == end - len(verdict.distortions)
    )
    before = sum(each.distortion for each in found[:number])
    (cut,) = llm.generate(PROMPTS[0], dataclasses.replace(params, stop_token_ids=[whole.token_ids[begin]]))
    assert cut.metrics.num_tokens == begin + 1
    assert cut.metrics.distortion_sum == pytest.approx(before + verdict.distortions[0])
    assert verdict.distortion > verdict.distortions[0] > 0.0


# ---------------------------------------------------------------------- options and refusals


def test_options_of_verifiers_do_not_collide_with_those_of_drafters() -> None:
    taken = {field.name for e in catalog.entries("drafter") for field in dataclasses.fields(e.load().Config)}
    own = {field.name for name in NAMES for field in dataclasses.fields(catalog.find(name, "verifier").load().Config)}
    assert not own & (taken | set(OWN_KEYS))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"verifier": "typical", "epsilon": 1.5}, r"epsilon=1.5 must be a number in \[0, 1\]: lower accepts more"),
        ({"verifier": "typical", "delta": "much"}, "delta='much' must be a number"),
        ({"verifier": "typical", "delta": float("nan")}, "delta=nan must be a number"),
        ({"verifier": "typical", "max_distortion": -0.1}, "max_distortion=-0.1 must be a number"),
        ({"verifier": "typical", "max_distortion": True}, "max_distortion=True must be a number"),
        ({"verifier": "typical", "epsilonn": 0.3}, "unknown option 'epsilonn' .*did you mean 'epsilon'"),
        ({"verifier": "typical", "lam": 0.3}, "unknown option 'lam' .*an option of verifier 'mixture'"),
        ({"epsilon": 0.3}, "unknown option 'epsilon' for method 'ngram' .*an option of verifier 'typical'"),
        ({"verifier": "ratio", "max_distortion": 0.1}, "unknown option 'max_distortion' .*'typical', 'topk_relaxed'"),
        ({"verifier": "topk_relaxed", "relaxed_topk": 0}, "relaxed_topk=0 must be an integer, at least 1"),
        ({"verifier": "topk_relaxed", "relaxed_delta": 2}, "relaxed_delta=2 must be a number"),
        ({"verifier": "mixture", "lam": -1}, "lam=-1 must be a number"),
        ({"verifier": "tolerance", "tolerance": -0.5}, "tolerance=-0.5 must be a number"),
        ({"method": "suffix", "verifier": "tolerance"}, "verifies chains"),
        ({"verifier": "p_threshold", "min_prob": 1.1}, r"min_prob=1.1 must be a number in \[0, 1\]"),
        ({"method": "suffix", "verifier": "p_threshold"}, "verifies chains"),
        ({**DRAFT, "verifier": "kl_threshold", "max_kl": -1}, r"max_kl=-1 must be .*: 0 is exact"),
        ({**DRAFT, "verifier": "kl_threshold", "max_confidence": 2}, "max_confidence=2 must be a number"),
        ({"verifier": "kl_threshold"}, "not valid for drafts of kind PointMass, which 'ngram' proposes"),
        ({**DRAFT, "tree": "hub", "verifier": "typical"}, "not valid for drafts of kind HubPair"),
        ({**DRAFT, "tree": "coupled", "verifier": "mixture"}, "not valid for drafts of kind Coupled"),
    ],
)
def test_bad_options_are_refused_with_the_remedy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_config({"method": "ngram", **settings})


def test_an_option_that_both_sides_claim_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Config(TypicalVerifier.Config):
        prompt_lookup_max: int = 3

    monkeypatch.setattr(TypicalVerifier, "Config", Config)
    with pytest.raises(ConfigError, match="belongs to method 'ngram' and to verifier 'typical'"):
        with_config({"method": "ngram", "verifier": "typical", "prompt_lookup_max": 2})


def test_options_reach_the_rule_and_recipes_do_not_share_them() -> None:
    one, two = (with_config({"method": "ngram", "verifier": "typical", "epsilon": e}).recipe for e in (0.3, 0.4))
    assert [recipe.verifier.config.epsilon for recipe in (one, two)] == [0.3, 0.4]  # type: ignore[union-attr]
    assert one.promise_for(SamplingParams()) == one.promise_for(SamplingParams(temperature=1)) == "approximate"


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_refused(name: str) -> None:
    llm = with_config({**DRAFT, "verifier": name})
    with pytest.raises(ConfigError, match=f"logprobs=2 with verifier='{name}'"):
        llm.generate("x", SamplingParams(logprobs=2))
    assert not llm.engine.busy


@every_rule
def test_other_kinds_and_shapes_are_refused(rule: Any) -> None:
    laws = Laws(torch.zeros(3, 4), greedy=False, positions=range(3))
    bush = TokenTree((0, 1), (-1, -1))
    with pytest.raises(ValueError, match="not valid for drafts of kind WithoutReplacement"):
        rule.verify(Draft(bush, WithoutReplacement(torch.full((1, 4), 0.25), (0, 0))), laws, Streams(0))
    if not rule.trees:
        with pytest.raises(ValueError, match="verifies chains"):
            rule.verify(Draft(bush, Sampled(torch.full((1, 4), 0.25), (0, 0))), laws, Streams(0))


@pytest.mark.parametrize(
    "settings",
    [
        {**DRAFT, "num_drafts": 2, "tree": "sampled"},
        {**DRAFT, "tree": "topk"},
        {"method": "suffix"},
        {"method": "none"},
    ],
    ids=str,
)
def test_trees_and_empty_drafts_run(settings: dict[str, Any]) -> None:
    for name in ("typical", "topk_relaxed", "mixture"):
        llm = with_config({**settings, "verifier": name})
        for temperature in (0.0, 0.8):
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=10, temperature=temperature, seed=2, top_p=0.95))
            ids(outputs)
            assert all(0.0 <= output.metrics.distortion <= 1.0 for output in outputs)
            assert temperature == 0.0 or all(math.isfinite(output.metrics.kl) for output in outputs)


# ---------------------------------------------------------------------- the command line


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands' engine is the one that the other tests have loaded."""
    import foretoken

    monkeypatch.setattr(
        foretoken, "LLM", lambda model, speculative_config=None, **options: zoo_llms.with_config(speculative_config)
    )


def test_generate_reports_the_meter(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = PROMPTS[1]  # of the first the draft knows every token
    typed = ["generate", prompt, "--raw", "--method", "draft_model", "--set", "verifier=typical"]
    typed += ["--set", "epsilon=0.02", "--set", "num_speculative_tokens=4", "--max-tokens", "32", "--ignore-eos"]
    assert main([*typed, "--temperature", "1", "--seed", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["promise"] == "approximate"
    assert 0.0 < answer["distortion"] <= 1.0
    assert answer["kl"] > 0.0
    assert main([*typed, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["distortion"] > 0.0
    assert answer["kl"] is None  # infinite at temperature 0: JSON has no word for it
    assert main([*typed, "--temperature", "1", "--seed", "1"]) == 0
    assert "distortion 0." in (err := capsys.readouterr().err)
    assert "per token" in err
    assert err.rstrip().endswith("· approximate")
    assert main([*typed, "--temperature", "1", "--seed", "1", "--set", "max_distortion=0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["distortion"], answer["kl"]) == (0.0, 0.0)


def test_the_command_line_refuses_what_does_not_fit(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    typed = ["generate", "x", "--method", "ngram", "--set", "verifier=typical"]
    assert main([*typed, "--set", "epsilon=2"]) == 2
    assert "epsilon=2 must be a number in [0, 1]" in capsys.readouterr().err
    assert main([*typed, "--logprobs", "2", "--json"]) == 2
    assert "logprobs=2 with verifier='typical'" in capsys.readouterr().err


def test_methods_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "typical", "--json"]) == 0
    options = {option["name"]: option for option in json.loads(capsys.readouterr().out)["options"]}
    assert set(options) == {"epsilon", "delta", "max_distortion"}
    assert all(option["help"] for option in options.values())
    assert options["epsilon"]["default"] == 0.09


def test_an_approximate_recipe_gets_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    from foretoken.certify import certify
    from foretoken.engine import llm

    plain = SimpleNamespace(with_method=with_config)
    monkeypatch.setattr(llm, "LLM", lambda *args, **options: plain)
    with pytest.raises(ConfigError, match="'mixture' is approximate by design: this recipe is not lossless"):
        certify.certify("ngram", {"verifier": "mixture", "lam": 0.0})
