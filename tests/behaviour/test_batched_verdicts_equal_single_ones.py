"""Requests decided abreast get the verdicts that they get alone, with the same seeds."""

from __future__ import annotations

import random

import pytest
import torch

from foretoken import catalog
from foretoken.certify.enumeration import LAW_OF, random_shapes
from foretoken.core.draft import NO_DRAFT, Coupled, Draft, HubPair, Law, PointMass, Sampled, Tabulated
from foretoken.core.laws import Laws
from foretoken.core.protocols import Verifier
from foretoken.core.randomness import Streams
from foretoken.core.siblings import draw_siblings
from foretoken.core.tree import EMPTY_TREE, ROOT, TokenTree

RULES: list[Verifier] = [entry.load()() for entry in catalog.entries("verifier") if entry.load().offers.batches]
CHAINS = [(-1,), (-1, 0), (-1, 0, 1, 2)]
SHAPES = [*CHAINS, (-1, -1, -1), *random_shapes(1, 6, 7)]


def random_law(rng: torch.Generator, rows: int, size: int) -> torch.Tensor:
    """Sharp distributions under a top-k filter of ten tokens."""
    logits = torch.randn(rows, size, generator=rng) * 2
    top = logits.topk(10)
    return torch.softmax(torch.full_like(logits, -torch.inf).scatter(1, top.indices, top.values), -1)


def draw(law: type[Law], shape: tuple[int, ...], size: int, seed: int) -> Draft:
    """A draft of that shape (pairs at most under HubPair), drawn as a drafter draws."""
    rng, streams = torch.Generator().manual_seed(seed), Streams(seed)
    tokens: list[int] = []
    parents: list[int] = []
    rows: list[int] = []
    q_rows: list[torch.Tensor] = []
    placed = {ROOT: ROOT}
    for parent in dict.fromkeys(shape):
        children = [node for node, other in enumerate(shape) if other == parent]
        if parent not in placed:
            continue
        q_V = random_law(rng, 1, size)[0]
        count = min(len(children), 2) if law is HubPair else len(children)
        if issubclass(law, PointMass):
            drawn = q_V.topk(count).indices.tolist()
        else:
            drawn = draw_siblings(law, q_V, count, streams)
        q_rows.append(q_V)
        for child, token in zip(children, drawn, strict=False):
            placed[child] = len(tokens)
            tokens.append(token)
            parents.append(placed[parent])
            rows.append(len(q_rows) - 1)
    if issubclass(law, PointMass):
        return Draft(TokenTree(tokens, parents), law())
    tabulated: type[Tabulated] = law
    return Draft(TokenTree(tokens, parents), tabulated(torch.stack(q_rows), tuple(rows)))


def target_for(draft: Draft, size: int, seed: int, greedy: bool) -> Laws:
    """A target near the draft, with much mass on the drafted tokens, so that walks go deep; every third is far."""
    p_MV = random_law(torch.Generator().manual_seed(seed + 1000), len(draft) + 1, size)
    for node, parent in enumerate(draft.tree.parents):
        p_MV[parent + 1, draft.tree.tokens[node]] += 0.7 if seed % 3 else 0.01
    p_MV /= p_MV.sum(-1, keepdim=True)
    return Laws(p_MV.log(), greedy=greedy, positions=[5, *(5 + depth for depth in draft.tree.depths)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [40, 5000])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_abreast_equals_alone(rule: Verifier, size: int) -> None:
    deepest = 0
    kinds = [law for law in (*LAW_OF.values(), Coupled) if law in rule.laws]
    for trial in range(12):
        dice = random.Random(trial)
        drafts: list[Draft] = []
        for seed in range(9):
            empty = (NO_DRAFT, Draft(EMPTY_TREE), Draft(EMPTY_TREE, Sampled(torch.zeros(0, size), ())))
            shape = dice.choice(SHAPES if rule.trees else CHAINS)
            drafts.append(
                dice.choice(empty) if seed % 5 == 4 else draw(dice.choice(kinds), shape, size, 50 * trial + seed)
            )
        targets = [target_for(each, size, number, dice.random() < 0.2) for number, each in enumerate(drafts)]
        seeds = [dice.randrange(2**40) for _ in drafts]
        abreast = rule.verify_batch(drafts, targets, [Streams(seed) for seed in seeds])
        alone = [rule.verify(d, t, Streams(seed)) for d, t, seed in zip(drafts, targets, seeds, strict=True)]
        assert abreast == alone
        deepest = max(deepest, *(len(verdict.path) for verdict in alone))
    assert deepest >= 3


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_batch_of_none_is_none(rule: Verifier) -> None:
    assert rule.verify_batch([], [], []) == []
