"""Verdicts of each verifier on drafts with a known outcome, and refusals. Distributions: tests/statistical."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from foretoken import catalog
from foretoken.certify.enumeration import CHAINS, KINDS, LAW_OF, STYLES, TablePair, step_law, target_law
from foretoken.core.draft import NO_DRAFT, Draft, PointMass, Sampled, WithoutReplacement
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams, gumbel
from foretoken.core.residual import ratio, residual, residual_without
from foretoken.core.threads import one_thread
from foretoken.core.tree import TokenTree
from foretoken.core.verdict import Verdict, follow
from foretoken.verifiers import kseq, recursive
from foretoken.verifiers.block import BlockVerifier
from foretoken.verifiers.greedy import GreedyVerifier
from foretoken.verifiers.kseq import optimal_rho
from foretoken.verifiers.match import MatchVerifier
from foretoken.verifiers.ratio import RatioVerifier
from foretoken.verifiers.recursive import RecursiveVerifier
from foretoken.verifiers.spechub import SpecHubVerifier

V = 40
EVERY = [GreedyVerifier(), RatioVerifier(), BlockVerifier(), MatchVerifier(), RecursiveVerifier()]
SAMPLING = EVERY[1:]
REJECTING: list[Verifier] = [RatioVerifier(), BlockVerifier(), RecursiveVerifier()]


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def name(item: Verifier | bool) -> str:
    return ("greedy" if item else "sampling") if isinstance(item, bool) else item.name


def onehot(*tokens: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(tokens), V).float()


def laws(p_MV: torch.Tensor, greedy: bool = False, positions: list[int] | None = None) -> Laws:
    return Laws(p_MV.log(), greedy=greedy, positions=positions or list(range(10, 10 + len(p_MV))))


def random_laws(rows: int, seed: int = 0, sharpness: float = 2.0) -> torch.Tensor:
    return torch.softmax(torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * sharpness, -1)


def chain(tokens: tuple[int, ...], q_NV: torch.Tensor | None = None) -> Draft:
    law = PointMass() if q_NV is None else Sampled(q_NV, tuple(range(len(tokens))))
    return Draft(TokenTree(tokens), law)


@pytest.mark.parametrize("verifier", EVERY, ids=name)
def test_catalogue_agrees_with_the_class(verifier: Verifier) -> None:
    entry = catalog.find(verifier.name, "verifier")
    assert entry.load() is type(verifier)
    assert entry.promise == verifier.promise


@pytest.mark.parametrize(
    ("verifier", "greedy"),
    [(v, greedy) for v in EVERY for greedy in (False, True) if greedy or v in SAMPLING],
    ids=name,
)
def test_perfect_early_miss_and_empty_drafts(verifier: Verifier, greedy: bool) -> None:
    target = laws(onehot(4, 5, 6, 7), greedy)
    for q_NV in (None, onehot(4, 5, 6), random_laws(3)):
        assert verifier.verify(chain((4, 5, 6), q_NV), target, Streams(1)) == Verdict((0, 1, 2), 7)
    flat = torch.full((3, V), 1 / V)
    assert verifier.verify(chain((4, 9, 6), flat), target, Streams(1)) == Verdict((0,), 5)
    assert verifier.verify(chain((9, 5, 6), flat), target, Streams(1)) == Verdict((), 4)
    assert verifier.verify(NO_DRAFT, laws(onehot(4), greedy), Streams(1)) == Verdict((), 4)


#   root ── 0 (1) ── 2 (3)        the target goes 2, 3, 6
#        └─ 1 (2) ── 3 (5)
#                 └─ 4 (3)
TREE = TokenTree((1, 2, 3, 5, 3), (-1, -1, 0, 1, 1))
TREE_TARGET = onehot(2, 9, 3, 9, 9, 6)


@pytest.mark.parametrize(
    ("verifier", "greedy"),
    [(v, greedy) for v in EVERY if v.trees for greedy in (False, True) if greedy or v in SAMPLING],
    ids=name,
)
def test_trees_are_walked_to_the_right_leaf(verifier: Verifier, greedy: bool) -> None:
    q_KV = torch.full((3, V), 1 / V)
    rows = (0, 0, 1, 2, 2)
    for law in (PointMass(), Sampled(q_KV, rows), WithoutReplacement(q_KV, rows)):
        target = laws(TREE_TARGET, greedy, [10, 11, 11, 12, 12, 12])
        assert verifier.verify(Draft(TREE, law), target, Streams(2)) == Verdict((1, 4), 6)


@pytest.mark.parametrize("verifier", [RatioVerifier(), BlockVerifier()], ids=name)
def test_chain_rules_refuse_branching_trees(verifier: Verifier) -> None:
    with pytest.raises(ValueError, match="chains"):
        verifier.verify(Draft(TREE), laws(TREE_TARGET), Streams(0))


def test_greedy_refuses_to_sample() -> None:
    with pytest.raises(ValueError, match="temperature 0"):
        GreedyVerifier().verify(NO_DRAFT, laws(onehot(1)), Streams(0))


def test_greedy_touches_no_tensor() -> None:
    target = Laws(None, greedy=True, positions=range(4), best=[4, 5, 6, 7])  # type: ignore[arg-type]
    assert GreedyVerifier().verify(chain((4, 5, 9)), target, Streams(0)) == Verdict((0, 1), 6)


def test_follow_looks_up_only_the_walked_rows() -> None:
    looked: list[int] = []

    class Choices:
        def __getitem__(self, row: int, /) -> int:
            looked.append(row)
            return [2, 9, 3, 9, 9, 6][row]

    assert follow(TREE, Choices()) == Verdict((1, 4), 6)
    assert looked == [0, 2, 5]


@pytest.mark.parametrize("verifier", REJECTING, ids=name)
def test_a_draft_from_the_target_itself_always_stands(verifier: Verifier) -> None:
    p_MV = random_laws(7)
    for seed in range(50):
        tokens = tuple(int(torch.multinomial(p, 1, generator=torch.Generator().manual_seed(seed))) for p in p_MV[:6])
        verdict = verifier.verify(chain(tokens, laws(p_MV).p_MV[:6]), laws(p_MV), Streams(seed))
        assert verdict.path == tuple(range(6))


@pytest.mark.parametrize("verifier", SAMPLING, ids=name)
def test_impossible_tokens_are_never_emitted(verifier: Verifier) -> None:
    p_MV = random_laws(4)
    p_MV[:, ::2] = 0.0
    q_NV = random_laws(3, seed=5)
    for seed in range(200):
        tokens = tuple(Streams(seed).categorical("draft", q) for q in q_NV)
        for draft in (chain(tokens), chain(tokens, q_NV)):
            verdict = verifier.verify(draft, laws(p_MV), Streams(seed))
            emitted = [*(tokens[node] for node in verdict.path), verdict.extra]
            assert all(token % 2 for token in emitted)


@pytest.mark.parametrize("verifier", REJECTING, ids=name)
def test_an_impossible_proposal_is_refused_even_where_q_denies_it(verifier: Verifier) -> None:
    p_MV, q_NV = random_laws(2), random_laws(1)
    p_MV[0, 3] = q_NV[0, 3] = 0.0
    assert verifier.verify(chain((3,), q_NV), laws(p_MV), Streams(0)).path == ()


@pytest.mark.parametrize("verifier", REJECTING, ids=name)
def test_rounding_that_leaves_no_residual_falls_back_to_the_target(verifier: Verifier) -> None:
    # q exceeds p everywhere by rounding, and the draft's chance is a hair below 1
    p = torch.full((2, V), 1 / V)
    q = p[:1] * (1 + 1e-5)

    class Unlucky(Streams):
        def bernoulli(self, purpose: str, chances: object) -> list[bool]:
            return [False] * len(chances)  # type: ignore[arg-type]

    verdict = verifier.verify(chain((3,), q), laws(p), Unlucky(0))
    assert verdict.path == ()
    assert 0 <= verdict.extra < V
    sure = onehot(3, 3)
    assert verifier.verify(chain((3,)), laws(sure), Unlucky(0)) == Verdict((), 3)
    if verifier.trees:
        bush = Draft(TokenTree((3, 4), (-1, -1)), WithoutReplacement(sure[:1], (0, 0)))
        assert verifier.verify(bush, laws(onehot(5, 5, 5)), Unlucky(0)) == Verdict((), 5)


def test_a_row_without_mass_takes_its_other_value_and_leaves_its_neighbours_alone() -> None:
    weights, otherwise = torch.tensor([[0.0, 0.0], [0.1, 0.3]]), torch.tensor([[0.2, 0.8], [0.5, 0.5]])
    rows, good = recursive._normalised(weights.clone(), otherwise)
    assert good == [False, True]
    assert rows.flatten().tolist() == pytest.approx([0.2, 0.8, 0.25, 0.75])
    rows, good = recursive._normalised(weights[1:].clone(), otherwise[1:])
    assert good == [True]
    assert rows.flatten().tolist() == pytest.approx([0.25, 0.75])


def test_ratio_and_residual_helpers() -> None:
    assert (ratio(0.0, 0.0), ratio(0.2, 0.0), ratio(0.2, 0.4)) == (0.0, float("inf"), 0.5)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.4, 0.4])
    assert residual(p, q).tolist() == pytest.approx([0.3, 0.0, 0.0])
    assert residual(p, p) is p
    assert residual_without(p, (0, 2)).tolist() == pytest.approx([0.0, 0.3, 0.0])
    assert residual_without(p, (0, 1, 2)) is p
    assert p.tolist() == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize("verifier", REJECTING, ids=name)
def test_purposes_do_not_share_numbers(verifier: Verifier) -> None:
    asked: list[str] = []

    class Noting(Streams):
        def bernoulli(self, purpose: str, chances: object) -> list[bool]:
            asked.append(purpose)
            return super().bernoulli(purpose, chances)  # type: ignore[arg-type]

        def categorical(self, purpose: str, p_V: torch.Tensor) -> int:
            asked.append(purpose)
            return super().categorical(purpose, p_V)

    verifier.verify(chain((4, 5), onehot(4, 5)), laws(onehot(4, 5, 6)), Noting(0))
    assert set(asked[:-1]) == {"accept"}
    assert asked[-1] == "bonus"
    asked.clear()
    verifier.verify(chain((4, 8), onehot(4, 8)), laws(onehot(4, 5, 6)), Noting(0))
    assert set(asked[:-1]) == {"accept"}
    assert asked[-1] == "residual"


@pytest.mark.parametrize("kind", KINDS)
def test_block_accepts_at_least_as_much_as_ratio(kind: str) -> None:
    gains = []
    for style in STYLES:
        for seed in range(2):
            pair = TablePair(3, seed, style)
            for shape in CHAINS[2:]:
                block = step_law(BlockVerifier(), pair, shape, kind, length=1).accepted  # type: ignore[arg-type]
                token = step_law(RatioVerifier(), pair, shape, kind, length=1).accepted  # type: ignore[arg-type]
                gains.append(block - token)
    assert min(gains) > -1e-12
    if kind == "point":  # both keep a token with its target mass, the optimum
        assert max(gains) < 1e-12
    else:
        assert max(gains) > 0.02


def test_recursive_on_a_chain_is_the_ratio_rule() -> None:
    for kind in [kind for kind in KINDS if LAW_OF[kind] in RecursiveVerifier.laws]:
        pair = TablePair(3, 3, "peaked")
        ours, theirs = (step_law(v, pair, (-1, 0), kind) for v in (RecursiveVerifier(), RatioVerifier()))
        assert ours.accepted == pytest.approx(theirs.accepted, abs=1e-12)


@pytest.mark.parametrize("style", ["flat", "peaked", "zeros"])
@pytest.mark.parametrize("shape", [(-1, -1), (-1,)], ids=["pair", "alone"])
def test_a_hub_and_its_pairs_follow_the_target_s_distribution(shape: tuple[int, ...], style: str) -> None:
    for seed in range(3):
        pair = TablePair(4, seed, style)  # type: ignore[arg-type]
        joint = step_law(SpecHubVerifier(), pair, shape, "hub", length=1).joint
        torch.testing.assert_close(joint, target_law(pair, 1), rtol=0.0, atol=1e-12)


def test_two_tokens_stand_more_often_than_one_where_one_of_them_is_the_hub() -> None:
    gains = []
    for seed in range(6):
        pair = TablePair(4, seed, "peaked")
        two, one = (step_law(SpecHubVerifier(), pair, shape, "hub", length=1).accepted for shape in ((-1, -1), (-1,)))
        gains.append(two - one)
    assert min(gains) > -1e-12
    assert max(gains) > 0.05


@pytest.mark.parametrize("filtered", [False, True])
def test_match_gives_one_stream_whatever_is_drafted(filtered: bool) -> None:
    p_MV = random_laws(60, sharpness=1.0)
    if filtered:
        p_MV = torch.where(p_MV < p_MV.quantile(0.7, dim=-1, keepdim=True), 0.0, p_MV)

    def stream(seed: int, length: int) -> list[int]:
        """Tokens of a target with a distribution by position and last token, with drafts of that length."""
        tokens = [0]
        guess = torch.Generator().manual_seed(length)
        while len(tokens) < 40:
            draft = torch.randint(0, V, (length,), generator=guess).tolist()
            if length and len(tokens) % 2:  # a good guess now and then: the tokens of plain sampling
                draft = plain[seed][len(tokens) : len(tokens) + length]
            before = [tokens[-1], *draft]
            at = len(tokens)
            rows = torch.stack([p_MV[(7 * token + at + i) % 60] for i, token in enumerate(before)])
            target = Laws(rows.log(), greedy=False, positions=range(at, at + len(before)))
            verdict = MatchVerifier().verify(chain(tuple(draft)), target, Streams(seed))
            accepted[length] = max(accepted.get(length, 0), len(verdict.path))
            tokens += [*(draft[node] for node in verdict.path), verdict.extra]
        return tokens[:40]

    plain: dict[int, list[int]] = {}
    accepted: dict[int, int] = {}
    for seed in range(5):
        plain[seed] = stream(seed, 0)
        assert all(stream(seed, length) == plain[seed] for length in (1, 3, 6))
    assert accepted[3] == 3
    assert len({tuple(tokens) for tokens in plain.values()}) == 5


def test_match_skips_filtered_tokens_without_changing_the_sample() -> None:
    logits = torch.randn(30, 9000, generator=torch.Generator().manual_seed(0)) * 2
    logits[logits < 2.5] = -torch.inf
    target = Laws(logits, greedy=False, positions=range(30))
    whole = (logits + gumbel(77, range(30), 9000)).argmax(-1).tolist()
    found = [
        MatchVerifier().verify(NO_DRAFT, Laws(logits[i : i + 1], greedy=False, positions=[i]), Streams(77)).extra
        for i in range(len(target))
    ]
    assert found == whole


def test_where_one_launch_is_better_all_rows_are_sampled_at_once_and_alike() -> None:
    class OnGpu(Laws):
        on_gpu = True

    p_MV, match = random_laws(6), MatchVerifier()
    for seed in range(20):
        bush = Draft(TREE)
        one_by_one = match.verify(bush, laws(p_MV), Streams(seed))
        assert match.verify(bush, OnGpu(p_MV.log(), greedy=False, positions=range(10, 16)), Streams(seed)) == one_by_one
        drawn = Laws(p_MV.log(), greedy=False, positions=range(10, 16))
        follows = chain((one_by_one.extra if not one_by_one.path else TREE.tokens[one_by_one.path[0]],))
        assert match.verify(follows, OnGpu(p_MV.log(), greedy=False, positions=range(10, 16)), Streams(seed)).path == (
            0,
        )
        assert match.verify(follows, drawn, Streams(seed)).path == (0,)


def test_a_repeated_point_mass_is_refused_for_good() -> None:
    p = torch.zeros(3, V)
    p[:, 3], p[:, 4] = 0.4, 0.6
    bush = Draft(TokenTree((3, 3), (-1, -1)), PointMass())
    verdicts = [RecursiveVerifier().verify(bush, laws(p), Streams(seed)) for seed in range(100)]
    assert {verdict.path for verdict in verdicts} == {(0,), ()}
    assert all(verdict.extra == 4 for verdict in verdicts if not verdict.path)


def test_repeated_siblings_are_each_tried() -> None:
    # p = q / 2 at the repeated token: the first child stands half of the time, the second never (its mass is used up)
    p, q = torch.zeros(3, V), torch.zeros(1, V)
    p[:, 3], p[:, 4], q[0, 3], q[0, 4] = 0.4, 0.6, 0.8, 0.2
    bush = Draft(TokenTree((3, 3), (-1, -1)), Sampled(q, (0, 0)))
    verdicts = [RecursiveVerifier().verify(bush, laws(p), Streams(seed)) for seed in range(400)]
    assert {verdict.path for verdict in verdicts} == {(0,), ()}
    assert all(verdict.extra == 4 for verdict in verdicts if not verdict.path)
    assert 0.4 < sum(bool(verdict.path) for verdict in verdicts) / 400 < 0.6


def test_chains_and_positions_line_up() -> None:
    # the extra token of every rule is drawn from the row after the last accepted node
    for verifier in SAMPLING:
        for kept in range(4):
            rows = [4, 5, 6, 7]
            tokens = tuple(token if i < kept else 30 for i, token in enumerate(rows[:3]))
            verdict = verifier.verify(chain(tokens), laws(onehot(*rows)), Streams(0))
            assert verdict == Verdict(tuple(range(kept)), rows[kept])
            assert all(b == a + 1 for a, b in pairwise(verdict.path))


def bisected(p_V: torch.Tensor, q_V: torch.Tensor, count: int) -> float:
    """The least exact rho of K-SEQ, by halving [1, n] a hundred times."""
    low, high = 1.0, float(count)
    for _ in range(100):
        rho = (low + high) / 2
        beta = float(torch.minimum(q_V, p_V / rho).sum())
        low, high = (rho, high) if 1.0 - (1.0 - beta) ** count > rho * beta else (low, rho)
    return high


@pytest.mark.parametrize("style", ["flat", "peaked", "zeros"])  # where p is all but one-hot, rounding decides
def test_the_factor_of_kseq_is_that_of_a_plain_bisection(style: str) -> None:
    """Exact, and hardly above the least that is; requests of a batch do not disturb each other."""
    pairs = [(TablePair(6, seed, style), count) for seed in range(12) for count in (1, 2, 3, 8)]
    p_BV, q_BV = (torch.stack([law(()) for law in laws]) for laws in zip(*((t.p, t.q) for t, _ in pairs), strict=True))
    counts = torch.tensor([count for _, count in pairs])
    rho_B, beta_B = optimal_rho(p_BV, q_BV, counts)
    for row, (_, count) in enumerate(pairs):
        expected = bisected(p_BV[row], q_BV[row], count)
        rho, beta = float(rho_B[row]), float(beta_B[row])
        assert 1.0 <= rho <= expected + 1e-8
        assert beta == pytest.approx(float(torch.minimum(q_BV[row], p_BV[row] / rho).sum()), abs=1e-12)
        assert 1.0 - (1.0 - beta) ** count <= rho * beta + 1e-12
        alone, _ = optimal_rho(p_BV[row : row + 1], q_BV[row : row + 1], counts[row : row + 1])
        assert float(alone) == pytest.approx(rho, abs=1e-8)


def test_the_factor_of_kseq_is_exact_however_few_rounds_its_search_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upper end of the bracket always is."""
    for rounds in (1, 2, 3, 60):
        monkeypatch.setattr(kseq, "_ROUNDS", rounds)
        for seed in range(10):
            pair = TablePair(6, seed, "peaked")
            for count in (2, 4, 9):
                rho_B, beta_B = optimal_rho(pair.p(())[None], pair.q(())[None], torch.tensor([count]))
                rho, beta = float(rho_B), float(beta_B)
                assert 1.0 <= rho <= count
                assert 1.0 - (1.0 - beta) ** count <= rho * beta + 1e-12


class KnownDraws(Streams):
    """Gives set decisions, draws the most probable token, and records its calls."""

    def __init__(self, *decisions: bool) -> None:
        super().__init__(0)
        self.decisions = list(decisions)
        self.asked: list[tuple[str, tuple[float, ...]]] = []
        self.drawn: list[tuple[str, torch.Tensor]] = []

    def bernoulli(self, purpose, chances):
        self.asked.append((purpose, tuple(chances)))
        return [self.decisions.pop(0) and chance > 0.0 for chance in chances]

    def categorical(self, purpose, p_V):
        self.drawn.append((purpose, p_V / p_V.sum()))
        return int(p_V.argmax())


@pytest.mark.parametrize("drawn", [False, True], ids=["point mass", "drawn"])
@pytest.mark.parametrize("stands", [False, True], ids=["falls", "stands"])
@pytest.mark.parametrize("verifier", [RatioVerifier(), BlockVerifier(), RecursiveVerifier()], ids=name)
def test_a_guess_is_tested_by_the_row_in_front_of_it(verifier: Verifier, stands: bool, drawn: bool) -> None:
    p_MV, q_1V = random_laws(3, seed=4), random_laws(1, seed=5)
    token = int((p_MV[2] / q_1V[0]).argmin())
    p, q = float(p_MV[2, token]), float(q_1V[0, token])
    assert p < q
    rng, verdict = KnownDraws(stands), Verdict((0, 1), -1)
    finished = verifier.finish(verdict, chain((token,), q_1V if drawn else None), laws(p_MV), rng, None)
    assert finished.path == (0, 1)
    found = finished.extra
    assert rng.asked == [("accept", (pytest.approx(p / q if drawn else p),))]
    if stands:
        assert (found, rng.drawn) == (token, [])
        return
    left_V = (p_MV[2] - q_1V[0]).clamp_min(0.0) if drawn else p_MV[2].index_fill(0, torch.tensor([token]), 0.0)
    ((purpose, weights_V),) = rng.drawn
    assert (found, purpose) == (int(left_V.argmax()), "residual")
    torch.testing.assert_close(weights_V, left_V / left_V.sum())
    assert verifier.finish(verdict, chain((token,)), laws(p_MV, greedy=True), rng, None) is verdict


def test_the_block_rule_decides_once_for_each_token_of_a_chain() -> None:
    """Also of those that cannot stand any more."""
    rng = KnownDraws(*[True] * 5)
    assert BlockVerifier().verify(chain((4, 9, 6, 7)), laws(onehot(4, 5, 6, 7, 8)), rng) == Verdict((0,), 5)
    assert rng.asked[0] == ("accept", (1.0, 0.0, 0.0, 0.0))


def test_a_certain_token_passes_despite_rounding() -> None:
    counts = torch.tensor([1.0, 3.0], dtype=torch.float64)
    for beta, passes in ((0.0, [0.0, 0.0]), (0.5, [0.5, 0.875]), (1.0, [1.0, 1.0]), (1.0 + 1e-9, [1.0, 1.0])):
        found = kseq.pass_rate(torch.full((2,), beta, dtype=torch.float64), counts)
        assert found.tolist() == pytest.approx(passes)
