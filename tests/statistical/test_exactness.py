"""Same law, proved: exact enumeration on tiny models, a chi-square on V = 50, and biased rules that must fail both."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.analysis.enumeration import (
    CHAINS,
    KINDS,
    LAW_OF,
    TREES,
    Kind,
    TablePair,
    drafts,
    one_thread,
    step_law,
    target_law,
    worst_error,
)
from foretoken.analysis.statistics import ChiSquare, goodness_of_fit
from foretoken.analysis.teeth import CAUGHT, TEETH, PlainRatio, Tooth
from foretoken.core.draft import Draft, Law, PointMass, Sampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.tree import ROOT, TokenTree
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.greedy import GreedyVerifier
from foretoken.verifiers.match import MatchVerifier
from foretoken.verifiers.ratio import RatioVerifier
from foretoken.verifiers.recursive import RecursiveVerifier

ENUMERABLE: list[Verifier] = [RatioVerifier(), BlockVerifier(), RecursiveVerifier()]
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def name(item: Verifier | Tooth) -> str:
    return item.name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verifier", ENUMERABLE, ids=name)
def test_the_law_is_the_targets_in_closed_form(verifier: Verifier, kind: Kind) -> None:
    worst = worst_error(verifier, num_pairs=2, kinds=(kind,))
    assert worst.error <= TOLERANCE, worst


@pytest.mark.parametrize("verifier", ENUMERABLE, ids=name)
def test_a_draft_length_decided_by_kept_tokens_changes_nothing(verifier: Verifier) -> None:
    worst = worst_error(verifier, num_pairs=1, stop="after")
    assert worst.error <= TOLERANCE, worst


@pytest.mark.parametrize("verifier", [GreedyVerifier(), *ENUMERABLE], ids=name)
def test_one_hot_targets_give_the_greedy_text(verifier: Verifier) -> None:
    worst = worst_error(verifier, num_pairs=1, greedy=True)
    assert worst.error <= TOLERANCE, worst


@pytest.mark.parametrize("tooth", TEETH, ids=name)
def test_enumeration_has_teeth(tooth: Tooth) -> None:
    assert tooth.bias() > CAUGHT


def test_the_untampered_twin_of_the_teeth_passes() -> None:
    assert worst_error(PlainRatio(), num_pairs=2, kinds=("sampled",)).error <= TOLERANCE


def test_draft_laws_are_laws() -> None:
    for shape in (*CHAINS, *TREES):
        for kind in KINDS:
            found = list(drafts(TablePair(3, 1, "zeros"), shape, kind))
            assert sum(weight for weight, _, _ in found) == pytest.approx(1.0, abs=1e-12)
            assert kind != "point" or len(found) == 1


LAWS = st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any)


class HandTable(TablePair):
    """A pair whose laws are given: p and q of the root, then of every deeper context."""

    def __init__(self, tables: list[list[int]]) -> None:
        super().__init__(3, 0)
        self.tables = [torch.tensor(row, dtype=torch.float64) / sum(row) for row in tables]

    def p(self, context: tuple[int, ...]) -> Tensor:
        return self.tables[0 if not context else 2]

    def q(self, context: tuple[int, ...]) -> Tensor:
        return self.tables[1 if not context else 3]


@given(
    st.lists(LAWS, min_size=4, max_size=4), st.sampled_from(KINDS), st.sampled_from([(-1, 0), (-1, -1), (-1, -1, 0)])
)
@settings(max_examples=60, deadline=None)
def test_zeros_and_one_hots_of_every_kind(tables: list[list[int]], kind: Kind, shape: tuple[int, ...]) -> None:
    pair = HandTable(tables)
    for verifier in ENUMERABLE if shape == (-1, 0) else ENUMERABLE[-1:]:
        joint = step_law(verifier, pair, shape, kind).joint
        assert (joint - target_law(pair)).abs().max() <= TOLERANCE


# ------------------------------------------------------------------ the real streams, float32, V = 50

V, DRAWS = 50, 20_000


def peaked() -> tuple[Tensor, Tensor]:
    """p and q far apart where they are large: a test on flat, close laws would pass biased rules too."""
    generator = torch.Generator().manual_seed(0)
    rest_p, rest_q = (torch.rand(V - 2, generator=generator) for _ in range(2))
    p = torch.cat([torch.tensor([0.35, 0.25]), 0.40 * rest_p / rest_p.sum()])
    q = torch.cat([torch.tensor([0.60, 0.10]), 0.30 * rest_q / rest_q.sum()])
    return p, q


def first_tokens(verifier: Verifier, kind: Kind, declared: Kind | None = None) -> ChiSquare:
    """Chi-square of the first emitted token against p; three siblings, or one for a chain rule."""
    p, q = peaked()
    parents = (ROOT,) * (3 if verifier.trees else 1)
    target = Laws(p.log().expand(len(parents) + 1, V), greedy=False, positions=[5] + [6] * len(parents))
    rows = (0,) * len(parents)
    law_of: dict[Kind, Callable[[], Law]] = {
        "point": PointMass,
        "sampled": lambda: Sampled(q[None], rows),
        "without": lambda: WithoutReplacement(q[None], rows),
    }
    law = law_of[declared or kind]()
    generator = torch.Generator().manual_seed(1)
    if kind == "point":
        proposals = q.topk(len(parents)).indices.expand(DRAWS, -1)
    else:
        replacement = kind == "sampled"
        proposals = torch.multinomial(q.expand(DRAWS, V), len(parents), replacement, generator=generator)
    # one stream for all draws, as in a long request; `match` has one stream per seed, so it gets many
    streams = Streams(12)
    counts = [0] * V
    for number, tokens in enumerate(proposals.tolist()):
        rng = Streams(number) if verifier.name == "match" else streams
        verdict = verifier.verify(Draft(TokenTree(tokens, parents), law), target, rng)
        counts[tokens[verdict.path[0]] if verdict.path else verdict.extra] += 1
    return goodness_of_fit(counts, (p.double() / p.double().sum()).tolist())


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("verifier", "kind"),
    [(v, k) for v in ENUMERABLE for k in KINDS if v.trees or k != "without"] + [(MatchVerifier(), "sampled")],
    ids=lambda item: item if isinstance(item, str) else item.name,
)
def test_sampled_law_on_a_peaked_pair(verifier: Verifier, kind: Kind) -> None:
    assert LAW_OF[kind] in verifier.laws
    assert first_tokens(verifier, kind).p_value > 1e-3


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("verifier", "kind", "declared"),
    [
        (RatioVerifier(), "point", "sampled"),
        (RecursiveVerifier(), "without", "sampled"),
        (TEETH[0].verifier, "sampled", None),
        (next(tooth.verifier for tooth in TEETH if tooth.name == "repeated siblings skipped"), "sampled", None),
    ],
    ids=["point-as-sampled", "without-as-sampled", "no-residual", "repeats-skipped"],
)
def test_biased_rules_fail_the_sampled_test(verifier: Verifier, kind: Kind, declared: Kind | None) -> None:
    assert first_tokens(verifier, kind, declared).p_value < 1e-6
