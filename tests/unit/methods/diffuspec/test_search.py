"""The path search against enumeration, and the tree against all paths in their order."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from foretoken.methods.diffuspec.search import Candidates, Path, Scoring, best_nodes, best_path, prune

END = 9
PAST = (1, 2)


def grams(u: int, v: int, tokens: Sequence[int]) -> list[float]:
    """Some distribution of three tokens."""
    return [-0.1 - ((u * 7 + v * 3 + token * 5) % 11) / 3 for token in tokens]


def lattice(seed: int, slots: int, width: int = 3) -> list[Candidates]:
    rng = random.Random(seed)
    found = []
    for _ in range(slots):
        shares = sorted((rng.random() for _ in range(width)), reverse=True)
        tokens = rng.sample(range(10), width)
        found.append(Candidates(tuple(tokens), tuple(math.log(share / 3) for share in shares)))
    return found


def all_paths(slots: Sequence[Candidates], scoring: Scoring, *, whole: bool) -> list[Path]:
    """Every path, whole or begun, by the definition of the score."""
    found = []
    for count in range(1, len(slots) + 1):
        for picks in itertools.product(*(range(len(slot.tokens)) for slot in slots[:count])):
            tokens = tuple(slot.tokens[pick] for slot, pick in zip(slots, picks, strict=False))
            if END in tokens[:-1] or (whole and count < len(slots) and tokens[-1] != END):
                continue
            logs = tuple(slot.logs[pick] for slot, pick in zip(slots, picks, strict=False))
            read = (*PAST, *tokens)
            total = 0.0
            for place, (token, log) in enumerate(zip(tokens, logs, strict=True)):
                fluent = 0.0 if scoring.grams is None else scoring.grams(read[place], read[place + 1], [token])[0]
                weight = 1.0 if scoring.grams is None else scoring.balance
                total += weight * log + (1 - weight) * fluent
            found.append(Path(tokens, logs, total))
    return sorted(found, key=lambda path: (-path.score, path.tokens))


@pytest.mark.parametrize("balance", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("seed", range(6))
def test_a_beam_without_bound_finds_the_best_of_all_paths(seed: int, balance: float) -> None:
    slots, scoring = lattice(seed, 5), Scoring(balance, grams)
    best = all_paths(slots, scoring, whole=True)[0]
    found = best_path(slots, PAST, scoring, width=10_000, ends={END})
    assert found.tokens == best.tokens
    assert found.logs == best.logs
    assert found.score == pytest.approx(best.score)


def test_a_narrow_beam_may_miss_it_and_is_never_better() -> None:
    scores = []
    for seed in range(40):
        slots, scoring = lattice(seed, 5), Scoring(0.3, grams)
        best = all_paths(slots, scoring, whole=True)[0].score
        scores.append(best - best_path(slots, PAST, scoring, width=2, ends={END}).score)
    assert min(scores) > -1e-12
    assert max(scores) > 0.01


def test_without_grams_and_one_candidate_it_is_the_best_token_of_every_slot() -> None:
    slots = [prune(slot.tokens, [math.exp(log) for log in slot.logs], mass=0.0001, most=1) for slot in lattice(3, 6)]
    found = best_path(slots, PAST, Scoring(1.0, grams), width=3)
    assert found.tokens == tuple(slot.tokens[0] for slot in slots)


def test_a_path_that_has_ended_is_frozen_and_compared_by_its_sum() -> None:
    slots = [Candidates((5, END), (math.log(0.6), math.log(0.4))), Candidates((6,), (math.log(0.9),))]
    assert best_path(slots, PAST, Scoring(), width=3, ends={END}).tokens == (5, 6)
    slots = [slots[0], Candidates((6,), (math.log(0.5),))]
    assert best_path(slots, PAST, Scoring(), width=3, ends={END}).tokens == (END,)
    assert best_path(slots, PAST, Scoring(), width=3).tokens == (5, 6)


def test_of_equal_paths_the_smaller_tokens_go_first() -> None:
    half = math.log(0.5)
    slots = [Candidates((7, 4), (half, half)), Candidates((8, 3), (half, half))]
    assert best_path(slots, PAST, Scoring(), width=2).tokens == (4, 3)
    assert [node.token for node in itertools.islice(best_nodes(slots, PAST, Scoring()), 2)] == [4, 7]


@pytest.mark.parametrize("balance", [1.0, 0.4])
@pytest.mark.parametrize("seed", range(4))
def test_a_tree_is_the_best_paths_in_their_order(seed: int, balance: float) -> None:
    slots, scoring = lattice(seed, 4), Scoring(balance, grams)
    nodes = list(best_nodes(slots, PAST, scoring, ends={END}))
    read: list[tuple[int, ...]] = []
    for number, node in enumerate(nodes):
        assert node.parent < number
        read.append((*(() if node.parent < 0 else read[node.parent]), node.token))
    assert read == [path.tokens for path in all_paths(slots, scoring, whole=False)]


def test_a_tree_with_a_candidate_a_slot_is_the_path() -> None:
    slots = [Candidates(slot.tokens[:1], slot.logs[:1]) for slot in lattice(1, 5)]
    path = best_path(slots, PAST, Scoring(0.5, grams), width=3)
    nodes = list(best_nodes(slots, PAST, Scoring(0.5, grams)))
    assert tuple(node.token for node in nodes) == path.tokens
    assert [node.parent for node in nodes] == [-1, 0, 1, 2, 3]


def test_pruning_keeps_the_fewest_that_have_the_mass_and_every_end() -> None:
    ids, shares = [4, 7, 2, END, 5], [0.5, 0.25, 0.125, 0.06, 0.03]
    assert prune(ids, shares, mass=0.5, most=5).tokens == (4,)
    assert prune(ids, shares, mass=0.0, most=5).tokens == (4,)
    assert prune(ids, shares, mass=0.51, most=5).tokens == (4, 7)
    assert prune(ids, shares, mass=1.0, most=3).tokens == (4, 7, 2)
    assert prune(ids, shares, mass=0.5, most=5, ends={END}).tokens == (4, END)
    assert prune(ids, [0.9, 0.1, 0.0, 0.0, 0.0], mass=1.0, most=5, ends={END}).tokens == (4, 7)
    assert prune(ids, shares, mass=0.51, most=5).logs == pytest.approx([math.log(0.5), math.log(0.25)])
