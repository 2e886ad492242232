"""State-space layers in the native decoder: a row's bits are its own past's, in bfloat16, too, in whatever company."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from foretoken.core.tree import TokenTree
from foretoken.forward.batch import PackedBatch
from foretoken.forward.dense import DensePlan
from foretoken.forward.span import Span
from foretoken.forward.ssm.state import HybridCache
from foretoken.models.language_model import LanguageModel
from foretoken.models.load import load
from foretoken.native import build
from foretoken.native.states import depth_first
from foretoken.native.team import Team
from helpers.adapters import shelf
from helpers.golden import PARENTS, Session, tokens_of
from helpers.tiny_models import VOCAB_SIZE, save_model

TEXT = tokens_of(1, 90, VOCAB_SIZE)
pytestmark = pytest.mark.skipif(build.library() is None, reason="there is no compiled decoder on this machine")


@cache
def model(name: str) -> LanguageModel:
    place = name if name.startswith("zoo:") else str(save_model(name, shelf() / f"states_{name}"))
    found = load(place, dtype="bfloat16", device="cpu")
    assert found.native_decoder is not None
    return found


@pytest.fixture(
    params=["zoo:mamba", "zoo:hybrid", "falcon_h1", "falcon_h1_norm", "nemotron_h", "qwen3_next", "olmo_hybrid"]
)
def target(request: pytest.FixtureRequest) -> LanguageModel:
    return model(request.param)


def read(target: LanguageModel, sizes: Sequence[int], threads: int = 1) -> tuple[Tensor, Session]:
    """Logits of the text's rows, read in chunks of these sizes."""
    session = Session(target)
    slot = session.cache.acquire()
    rows, begin = [], 0
    with Team(threads) as team:
        for size in sizes:
            rows.append(session.chunk(slot, TEXT[begin : begin + size]))
            begin += size
    team.close()
    return torch.cat(rows), session


def test_grouping_and_threads_change_no_bit(target: LanguageModel) -> None:
    """Short chunks are absorbed by the next forward, long ones (more than 16 rows) have a state next to the base."""
    alone, _ = read(target, [1] * 90)
    for sizes in ([90], [7] * 12 + [6], [64, 26], [16, 17, 1, 40, 16]):
        for threads in (1, 2):
            assert torch.equal(read(target, sizes, threads)[0], alone)


def test_a_tree_s_row_is_its_own_path(target: LanguageModel) -> None:
    """Whole, and level by level after its own tail; then its branch is committed and gone on from."""
    tree = TokenTree(tokens_of(2, len(PARENTS), VOCAB_SIZE), PARENTS)
    session = read(target, [50])[1]
    root = TEXT[50]
    found = session.draft(0, root, tree)
    assert torch.equal(session.levels(0, root, tree), found)
    for node in range(-1, len(tree)):
        path = [] if node < 0 else [tree.tokens[each] for each in tree.path_to(node)]
        plain = read(target, [50])[1]
        assert torch.equal(plain.chunk(0, [root, *path])[-1], found[node + 1])
    branch = tree.path_to(7)
    session.draft(0, root, tree)
    session.cache.commit(0, [0, *(node + 1 for node in branch)])
    plain = read(target, [50])[1]
    plain.chunk(0, [root, *(tree.tokens[each] for each in branch)])
    assert torch.equal(session.chunk(0, TEXT[60:64]), plain.chunk(0, TEXT[60:64]))


def test_neighbours_change_no_bit(target: LanguageModel) -> None:
    """A prompt's chunk, a tree and a plain row of three requests in one forward, in either order."""
    tree = TokenTree(tokens_of(3, len(PARENTS), VOCAB_SIZE), PARENTS)
    expected: dict[int, Tensor] = {}
    for order in ([0], [1], [2], [0, 1, 2], [2, 1, 0]):
        session = Session(target)
        slots = [session.cache.acquire() for _ in range(3)]
        for slot in slots[1:]:
            session.chunk(slot, TEXT[: 20 + slot], wanted=1)
        batch = PackedBatch()
        for each in order:
            if each == 0:
                batch.add_chunk(slots[0], 0, TEXT[:30], wanted=2)
            else:
                batch.add_tree(slots[each], 20 + slots[each], 9, tree if each == 1 else TokenTree(()))
        rows = list(session.forward(batch).split([2 if each == 0 else 10 if each == 1 else 1 for each in order]))
        for each, found in zip(order, rows, strict=True):
            assert torch.equal(expected.setdefault(each, found), found)


def test_a_forward_that_stopped_between_layers_is_repeated(target: LanguageModel) -> None:
    """A pending row has been absorbed by the first layer alone: the others follow, and it does not do so twice."""
    sessions = [read(target, [40])[1] for _ in range(2)]
    for session in sessions:
        session.draft(0, TEXT[40], TokenTree(TEXT[41:45]))
        session.cache.commit(0, [0, 1, 2])
    batch = PackedBatch()
    batch.add_tree(0, 43, TEXT[43], TokenTree(()))
    cache = sessions[0].cache
    cache.reserve(0, 1)
    target.forward(batch, DensePlan(cache, batch), span=Span(0, 1, taps=(1,)))
    assert isinstance(cache, HybridCache)
    assert torch.equal(*(session.chunk(0, TEXT[43:60]) for session in sessions))


@pytest.mark.parametrize(
    ("parents", "steps", "levels"),
    [
        ([-1], [0, -1, -1], 0),
        ([-1, 0, 1], [0, -1, 0, 1, 0, 0, 2, 0, -1], 1),
        ([-1, 0, 1, 2, 1], [0, -1, 0, 1, 0, 0, 2, 0, 1, 3, 1, -1, 4, 0, -1], 2),
        ([-1, -2, 0], [0, -1, 0, 2, 0, -1], 1),
        ([-1, -1, 0], [0, -1, 0, 2, 0, -1, 1, -1, -1], 1),
    ],
)
def test_the_order_of_the_walk(parents: list[int], steps: list[int], levels: int) -> None:
    found, most = depth_first(parents)
    assert (list(found), most) == (steps, levels)


def test_a_long_chunk_keeps_its_last_state() -> None:
    assert list(depth_first([-1, 0], keep_last=True)[0]) == [0, -1, 0, 1, 0, 0]
