"""A draft model's trees: the proposed part of the recorded nodes, and that the other rows do no harm."""

from __future__ import annotations

import math

import pytest

from foretoken.core.draft import Coupled, Draft
from foretoken.core.protocols import Budget
from foretoken.core.randomness import gumbel
from foretoken.drafters.draft_model import ModelDrafter
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from helpers.golden import tokens_of
from helpers.requests import make_request
from helpers.threads import one_thread  # noqa: F401  (a fixture)
from helpers.tiny_models import VOCAB_SIZE, save_model

PROMPT = tokens_of(3, 9, VOCAB_SIZE)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return load(save_model("llama", tmp_path_factory.mktemp("target")), device="cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("draft"), seed=1, max_position_embeddings=24))


def drafter(target: LanguageModel, folder: str, tree: str) -> ModelDrafter:
    return ModelDrafter(ModelDrafter.Config(model=folder, num_drafts=3, tree=tree), target)


def reaches(draft: Draft) -> list[float]:
    """Of each node, the probability of its path."""
    return [math.prod(draft.confidence[each] for each in draft.tree.path_to(node)) for node in range(len(draft))]


def propose(drafter: ModelDrafter, tokens: list[int], nodes: int, depth: int, *, anew: bool = True) -> Draft:
    request = make_request(tokens, vocab_size=VOCAB_SIZE)
    request.request_id = 7
    if anew:
        drafter.release(7)
    (draft,) = drafter.propose([request], [Budget(nodes, depth)])
    return draft


def test_a_reranked_tree_has_the_best_nodes_of_all_that_a_wider_one_records(target: LanguageModel, folder: str) -> None:
    """Three a level, four levels: 3 + 3 * 9 nodes are recorded, of which the draft has all or the best."""
    reranked, by_levels = (drafter(target, folder, tree) for tree in ("reranked", "topk"))
    whole = propose(reranked, PROMPT, 15, 4)
    best = sorted(reaches(whole), reverse=True)
    assert len(whole) == 15
    for nodes in (1, 2, 5, 8):
        part = propose(reranked, PROMPT, nodes, 4)
        assert sorted(reaches(part), reverse=True) == pytest.approx(best[:nodes])
        assert sum(reaches(part)) >= sum(reaches(propose(by_levels, PROMPT, nodes, 4))) - 1e-6


def test_tokens_read_without_a_proposal_leave_no_trace(target: LanguageModel, folder: str) -> None:
    """Some of the longest path stands, and the next draft is that of a drafter which never saw the tree."""
    one = drafter(target, folder, "reranked")
    draft = propose(one, PROMPT, 6, 5)
    path = max((draft.tree.path_to(node) for node in range(len(draft))), key=len)
    for kept in range(len(path) + 1):
        propose(one, PROMPT, 6, 5)
        tokens = [*PROMPT, *(draft.tree.tokens[node] for node in path[:kept]), 50]
        again, fresh = propose(one, tokens, 6, 5, anew=False), propose(one, tokens, 6, 5)
        assert (again.tree.tokens, again.tree.parents) == (fresh.tree.tokens, fresh.tree.parents)


def test_a_tree_ends_where_the_draft_has_no_positions_left(target: LanguageModel, folder: str) -> None:
    one = drafter(target, folder, "reranked")
    sizes = [len(propose(one, tokens_of(5, count, VOCAB_SIZE), 12, 12)) for count in (9, 20, 23, 24)]
    assert sizes[0] == 12
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 0


@pytest.mark.parametrize(("temperature", "expanded"), [(0.05, 0), (50.0, 2)])
def test_the_child_that_most_probably_stands_is_expanded(
    target: LanguageModel, folder: str, temperature: float, expanded: int
) -> None:
    """Of greedy drafts: the most probable token where q is peaked, the drawn one where it is flat."""
    one = drafter(target, folder, "top_then_sampled")
    request = make_request(PROMPT, vocab_size=VOCAB_SIZE, temperature=temperature)
    (draft,) = one.propose([request], [Budget(6, 3)])
    assert draft.tree.parents == (-1, -1, -1, expanded, expanded, expanded)


def test_coupled_children_are_those_that_the_target_s_noise_puts_first(target: LanguageModel, folder: str) -> None:
    """At the root and at the nodes after it, each with the noise of its position."""
    one = drafter(target, folder, "coupled")
    request = make_request(PROMPT, vocab_size=VOCAB_SIZE, temperature=1.0)
    (draft,) = one.propose([request], [Budget(12, 2)])
    assert len(draft) == 12
    for parent, children in draft.tree.children.items():
        path = [] if parent < 0 else [draft.tree.tokens[node] for node in draft.tree.path_to(parent)]
        cache, batch = one.model.new_cache(1), PackedBatch()
        slot, read = cache.acquire(), [*PROMPT, *path]
        cache.reserve(slot, len(read))
        batch.add_chunk(slot, 0, read, wanted=1)
        logits_V = one.model.forward(batch, DensePlan(cache, batch)).logits_MV[0].float()
        noise_V = gumbel(request.streams.seed, (len(read),), VOCAB_SIZE)[0]
        assert [draft.tree.tokens[node] for node in children] == (logits_V + noise_V).topk(3).indices.tolist()
    assert isinstance(draft.law, Coupled)
